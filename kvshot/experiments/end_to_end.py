"""Tokens a verify call end to end (the paper's Table 4): drafters against the target's own greedy text."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch
from pydantic import NonNegativeInt, PositiveInt

from kvshot.data import prompt_ids
from kvshot.data.generate import BlockGenerator, Forced, Row, Sampled
from kvshot.data.synthesize import common_start
from kvshot.drafters.checkpoint import load_drafter
from kvshot.drafters.drafter import Drafter
from kvshot.errors import KvshotError
from kvshot.evaluation.decode import DecodeReport, plain_decode
from kvshot.evaluation.metrics import Estimate, estimate, resample
from kvshot.evaluation.replay import Text, replay
from kvshot.evaluation.tree import TreeShape
from kvshot.experiments.bench import Bench
from kvshot.experiments.profiles import profile
from kvshot.experiments.record import (
    RECORD,
    OfRun,
    Sha256,
    Strict,
    describe_code,
    describe_machine,
    published_path,
    trained_record,
)
from kvshot.fileio import atomic_file, cache_dir
from kvshot.paper import SETTING
from kvshot.progress import progress
from kvshot.targets import Target

PAPER_TREE = TreeShape(SETTING.tree_depth, SETTING.tree_top_k, SETTING.tree_candidates)
SHAPES = (PAPER_TREE, *map(TreeShape, range(1, 9)))


class Calls(Strict):
    """Verify calls of every prompt, and the tokens that they kept (the target's own included)."""

    calls: list[NonNegativeInt]
    kept: list[NonNegativeInt]

    @classmethod
    def of(cls, reports: Sequence[DecodeReport]) -> Calls:
        return cls(calls=[len(r.kept) for r in reports], kept=[sum(r.kept) for r in reports])


class Domain(Strict):
    """texts_sha256: of prompts and texts; otherwise: text tokens that one pass over the text would have chosen
    otherwise (near ties of the target's two best scores); shapes: "tree (8, 10, 60)", "chain 1" .. "chain 8".
    """

    prompts: PositiveInt
    tokens: NonNegativeInt
    otherwise: NonNegativeInt
    texts_sha256: Sha256
    shapes: dict[str, Calls]


class EndToEnd(OfRun):
    """One drafter's verify calls on the target's greedy text, by domain."""

    KIND, REMEDY = "end-to-end record", "measure it again"

    max_new_tokens: PositiveInt
    computed_in: str
    domains: dict[str, Domain]


def place(results: str | os.PathLike, profile: str, experiment: str, seed: int = 0) -> Path:
    return published_path(results, profile, experiment, seed, "end_to_end")


def greedy_texts(target: Target, prompts: Sequence[Sequence[int]], max_new_tokens: int, *, quiet: bool = False
                 ) -> list[list[int]]:
    """The target's greedy text behind each prompt, kept in the cache."""
    about = json.dumps([target.weights_sha256, str(target.dtype), max_new_tokens, [list(p) for p in prompts]])
    path = cache_dir() / "greedy" / f"{hashlib.sha256(about.encode()).hexdigest()[:16]}.json"
    if path.exists():
        return json.loads(path.read_text())
    texts: list[list[int]] = []
    with progress("greedy texts (prompts)", len(prompts), quiet=quiet) as advance:
        common = common_start(prompts)
        if target.device.type == "cpu" and common and target.model.config.model_type in ("llama", "qwen2", "qwen3"):
            # many rows at a time: one at a time a small target waits for its memory
            texts = _in_blocks(target, prompts, common, max_new_tokens, advance)
        else:
            for p in prompts:
                texts.append(plain_decode(target, p, max_new_tokens))
                advance()
    with atomic_file(path) as tmp:
        tmp.write_text(json.dumps(texts))
    return texts


def _in_blocks(target: Target, prompts: Sequence[Sequence[int]], common: Sequence[int], max_new_tokens: int, advance
               ) -> list[list[int]]:
    start, stop, size = len(common), frozenset(target.eos_ids), 64
    generator = BlockGenerator(target.model, common, block_rows=size, max_rows=size,
                               capacity=max(map(len, prompts)) + max_new_tokens + 2)
    blocks = ((n, [Row((Forced(tuple(p[start:])), Sampled(max_new_tokens, stop)))
                   for p in prompts[n * size : (n + 1) * size]]) for n in range(-(-len(prompts) // size)))
    done = {}
    for number, rows in generator.run(blocks):
        # `written` is without the end token; `last` is what the target chose at the end
        done[number] = [r.written[-1] + ([r.last] if r.outcome == "stop" else []) for r in rows]
        advance(len(rows))
    return [text for n in sorted(done) for text in done[n]]


@torch.no_grad()
def replayed(target: Target, drafter: Drafter, asked: Sequence[Sequence[int]], texts: Sequence[Sequence[int]],
             max_new_tokens: int, shapes: Sequence[TreeShape], advance: Callable[[], None]
             ) -> tuple[dict[str, Calls], int]:
    """Verify calls by shape on the target's texts behind each prompt, and how many tokens of these are near ties
    (`Domain`). advance: called after each text.
    """
    reports: dict[str, list[DecodeReport]] = {}
    otherwise = 0
    for prompt, text in zip(asked, texts, strict=True):
        read = Text.read(target, drafter, prompt, text, limit=max_new_tokens)
        otherwise += read.otherwise
        for shape, report in replay(drafter, read, shapes).items():
            reports.setdefault(shape, []).append(report)
        advance()
    return {shape: Calls.of(r) for shape, r in reports.items()}, otherwise


def measure(bench: Bench, drafter: Drafter, experiment: str, seed: int, run_created: datetime) -> EndToEnd:
    """Replay the first prompts of every domain (the profile says how many): the paper's tree, and chains of 1 to 8.

    bench.target should be in float32: its rounding is that of the text.
    """
    target, domains, code = bench.target, {}, describe_code()
    prompts, max_new_tokens = bench.profile.replay_prompts, bench.profile.replay_tokens
    for name in bench.domains:
        conversations = bench.conversations[name][:prompts]
        asked = [prompt_ids(target.tokenizer, c.messages[:-1], options=bench.template) for c in conversations]
        texts = greedy_texts(target, asked, max_new_tokens, quiet=bench.quiet)
        with progress(f"{name}: replay (texts)", len(texts), quiet=bench.quiet) as advance:
            shapes, otherwise = replayed(target, drafter, asked, texts, max_new_tokens, SHAPES, advance)
        digest = hashlib.sha256(json.dumps([asked, texts]).encode()).hexdigest()
        domains[name] = Domain(prompts=len(asked), tokens=sum(map(len, texts)), otherwise=otherwise,
                               texts_sha256=digest, shapes=shapes)
    return EndToEnd(experiment=experiment, profile=bench.profile.name, seed=seed, run_created=run_created,
                    max_new_tokens=max_new_tokens,
                    target=bench.target_info(), computed_in=str(target.dtype).removeprefix("torch."), domains=domains,
                    code=code, machine=describe_machine(target.device), created=datetime.now(UTC))


def measure_run(run: str | os.PathLike, results: str | os.PathLike, *, device: str | None = None
                ) -> tuple[EndToEnd, Path]:
    """Measure a finished run's best drafter in float32, and publish what came out.

    Raises KvshotError for no such run, and for one on other data than its profile's.
    """
    record = trained_record(Path(run) / RECORD)
    bench = Bench(profile(record.profile).model_copy(update={"dtype": "float32"}), device=device)
    bench.check_data(record, run)
    drafter, _ = load_drafter(Path(run) / "best", bench.target)
    seed = record.training.seed
    out = measure(bench, drafter, record.experiment, seed, record.created)
    path = place(results, record.profile, record.experiment, seed)
    out.save(path)
    return out, path


def mat_of(calls: Calls, *, n_boot: int = 2000) -> Estimate:
    """Tokens a verify call, with a 95 % interval over prompts."""
    return estimate(sum(calls.kept) / max(1, sum(calls.calls)), _resampled(calls, n_boot), len(calls.calls))


def mat_difference(a: EndToEnd, b: EndToEnd, domain: str, shape: str, *, n_boot: int = 2000) -> Estimate:
    """MAT of `a` minus that of `b` on the same texts, both under the same resamples of prompts.

    Raises KvshotError when the texts differ.
    """
    x, y = a.domains[domain], b.domains[domain]
    if x.texts_sha256 != y.texts_sha256:
        raise KvshotError(f"{a.experiment} and {b.experiment} were measured on different texts: measure both again")
    p, q = x.shapes[shape], y.shapes[shape]
    return estimate(sum(p.kept) / sum(p.calls) - sum(q.kept) / sum(q.calls),
                    _resampled(p, n_boot) - _resampled(q, n_boot), len(p.calls))


def _resampled(calls: Calls, n_boot: int) -> np.ndarray:
    counts = np.stack([calls.kept, calls.calls], -1)[:, None]
    kept, made = resample(counts, n_boot, 0)[:, 0].T
    return kept / np.maximum(1, made)
