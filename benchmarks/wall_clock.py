"""Tokens per second on this machine: plain decoding, transformers' own ways, and published drafters.

    python benchmarks/wall_clock.py results/laptop/wall_clock.json [prompts] [new tokens]

Run it on an idle machine. Every prompt is decoded by every contestant before the next prompt begins; what counts are
the ratios. The drafters are those of which a checkpoint is published; without one the name is left out. Tokens a verify
call are also replayed on other prompts, for the cost model to predict from.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from kvshot.allocator import restart_with_settings
from kvshot.data import prompt_ids
from kvshot.drafters.checkpoint import load_drafter
from kvshot.evaluation.tree import TreeShape
from kvshot.experiments import Bench, profile
from kvshot.experiments.end_to_end import PAPER_TREE, greedy_texts, replayed
from kvshot.experiments.record import describe_code, describe_machine
from kvshot.experiments.wall_clock import pass_costs, speed_ups, time_decoding
from kvshot.fileio import atomic_file
from kvshot.progress import progress

SHAPES = (*map(TreeShape, (1, 2, 3, 4, 6)), TreeShape(3, 3, 8), TreeShape(4, 4, 12), PAPER_TREE)
WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 13, 16, 24, 32, 48, 61)
REPLAYED = 32  # prompts


def main(out: str, prompts: str = "8", new_tokens: str = "48", results: str = "results") -> None:
    bench = Bench(profile("laptop").model_copy(update={"dtype": "float32"}))
    target, drafters, contestants = bench.target, {}, {}
    for folder in sorted(Path(results).glob("laptop*/*-seed0")):
        name = folder.name.removesuffix("-seed0") + (", long" if folder.parent.name == "laptop-long" else "")
        drafters[name], _ = load_drafter(folder, target)
    for label in drafters:
        for shape in SHAPES:
            contestants[f"{label}, {shape.name}"] = label, shape
    domain, n, limit = bench.domains[0], int(prompts), int(new_tokens)
    asked = [prompt_ids(target.tokenizer, c.messages[:-1], options=bench.template)
             for c in bench.conversations[domain][: n + REPLAYED]]
    if len(asked) <= n:
        sys.exit(f"error: {len(asked)} held-out prompts, none left to replay: time fewer than {n}")
    texts, calls = greedy_texts(target, asked[n:], limit), {}
    with progress("replay (texts)", len(drafters) * len(texts)) as advance:
        for label, drafter in drafters.items():
            found, _ = replayed(target, drafter, asked[n:], texts, limit, SHAPES, advance)
            calls[label] = {shape: c.model_dump() for shape, c in found.items()}
    costs = pass_costs(target, asked[0] * 3, WIDTHS)
    times = time_decoding(target, asked[:n], {k: (drafters[d], s) for k, (d, s) in contestants.items()},
                          max_new_tokens=limit)
    print(speed_ups(times).round(2).to_string())
    with atomic_file(Path(out)) as tmp:
        tmp.write_text(json.dumps({
            "target": bench.target_info().model_dump(), "computed_in": "float32", "max_new_tokens": limit,
            "machine": describe_machine(target.device).model_dump(), "code": describe_code().model_dump(),
            "contestants": {k: {"drafter": d, "shape": s.name, "width": 1 + (s.max_nodes or s.levels)}
                            for k, (d, s) in contestants.items()},
            "pass_seconds": costs, "replayed": calls,
            "times": {domain: json.loads(times.to_json(orient="records"))}}) + "\n")


if __name__ == "__main__":
    restart_with_settings()
    main(*sys.argv[1:])
