"""The target writes its own conversations: user turns sampled behind the bare user header, then its answers.

Nothing has to be downloaded to train a drafter on what the target itself would say, and held-out text comes from the
same source. Worker processes with one thread each fill parts (one per block of rows); a run that was killed goes on
with the parts that are missing.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing as mp
import os
import queue
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, Field, JsonValue

from kvshot.allocator import set_for_children, usable_cores
from kvshot.data.corpus import OWN_SPLITS, RECIPE, Corpus
from kvshot.data.filters import Filter, Report, looping
from kvshot.data.generate import MAX_ROWS, BlockGenerator, Forced, Row, Sampled
from kvshot.data.parts import part_path, read_part, write_part
from kvshot.data.readers import Conversation, Message
from kvshot.data.split import split_corpus, without_alike
from kvshot.data.template import prompt_ids, prompt_text
from kvshot.errors import KvshotError
from kvshot.fileio import atomic_file, exclusive
from kvshot.progress import progress
from kvshot.targets import load_target, load_tokenizer, weights_sha256


class Recipe(BaseModel):
    """How conversations are written. Lengths in tokens; temperature 0 is greedy."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    target: str
    seed: int = Field(0, ge=0)
    user_temperature: float = Field(1.0, ge=0)
    user_top_p: float = Field(0.95, gt=0, le=1)
    max_user_tokens: int = Field(80, ge=1)
    answer_temperature: float = Field(0.7, ge=0)
    answer_top_p: float = Field(0.95, gt=0, le=1)
    max_answer_tokens: int = Field(224, ge=16)
    block_rows: int = Field(64, ge=1)
    template: dict[str, JsonValue] = {}

    @property
    def left_out(self) -> set[str]:
        """Of its record: no template options are not noted, as in data sets that are older than the field."""
        return set() if self.template else {"template"}


HELD_OUT_AMONG = 7000
GIVE_UP_AFTER = 20  # blocks


class _Frame:
    """The pieces of the target's chat template around one user turn and one answer, as token ids."""

    def __init__(self, tokenizer, options: Mapping[str, JsonValue] | None = None) -> None:
        mark = "\ue000"
        text = prompt_text(tokenizer, [{"role": "user", "content": mark}], options=options)
        before, found, after = text.partition(mark)
        ids = {part: tokenizer(part, add_special_tokens=False)["input_ids"] for part in (before, after)}
        if not found or not ids[before] or not ids[after] or ids[after][0] not in tokenizer.all_special_ids:
            raise KvshotError("the chat template does not end a user turn with a special token: "
                              "write the prompts yourself and let the target answer them")
        self.before, self.end, self.header = ids[before], ids[after][0], tuple(ids[after][1:])
        self.stop = frozenset({self.end, tokenizer.eos_token_id} - {None})
        self.quit = self.stop - {self.end}  # behind a user turn that ends so, no answer has the saved context
        self.special = frozenset(tokenizer.all_special_ids)


def _rows(recipe: Recipe, frame: _Frame, prompts: Sequence[Sequence[int]] | None, number: int) -> list[Row]:
    answer = Sampled(recipe.max_answer_tokens, frame.stop, recipe.answer_temperature, recipe.answer_top_p,
                     give_up=looping)
    if prompts is not None:
        start = len(common_start(prompts))
        mine = prompts[number * recipe.block_rows : (number + 1) * recipe.block_rows]
        return [Row((Forced(tuple(p[start:])), answer)) for p in mine]
    user = Sampled(recipe.max_user_tokens, frozenset({frame.end}), recipe.user_temperature, recipe.user_top_p,
                   quit=frame.quit)
    return [Row((user, Forced(frame.header), answer)) for _ in range(recipe.block_rows)]


def common_start(prompts: Sequence[Sequence[int]]) -> Sequence[int]:
    """The longest start that all prompts share, short of a whole prompt."""
    return os.path.commonprefix([list(p[:-1]) for p in prompts])


@dataclass
class _Work:
    """What the workers share: the next block number to try, and the way to report."""

    counter: object
    results: object
    total: int | None
    max_rows: int

    def numbers(self, folder: Path) -> Iterator[int]:
        """Numbers of blocks that nobody has written or begun."""
        while True:
            with self.counter.get_lock():
                number = self.counter.value
                self.counter.value += 1
            if self.total is not None and number >= self.total:
                return
            if not part_path(folder, number).exists():
                yield number


def _worker(recipe: Recipe, folder: Path, prompts, work: _Work) -> None:
    torch.set_num_threads(1)
    # a parent that is killed cannot end its workers, and they would go on for ever
    threading.Thread(target=lambda: (mp.parent_process().join(), os._exit(1)), daemon=True).start()
    try:
        target = load_target(recipe.target, dtype="bfloat16", device="cpu")
        frame = _Frame(target.tokenizer, recipe.template)
        prefix = frame.before if prompts is None else list(common_start(prompts))
        longest = max(map(len, prompts)) if prompts else len(frame.before) + recipe.max_user_tokens + len(frame.header)
        generator = BlockGenerator(target.model, prefix, capacity=longest + recipe.max_answer_tokens + 2,
                                   block_rows=recipe.block_rows, max_rows=max(work.max_rows, recipe.block_rows),
                                   seed=recipe.seed)
        blocks = ((n, _rows(recipe, frame, prompts, n)) for n in work.numbers(folder))
        for number, rows in generator.run(blocks):
            write_part(folder, number, rows)
            work.results.put(number)
        work.results.put(None)
    except KvshotError as err:
        work.results.put(str(err))
    except Exception as err:  # reported by the parent, which cannot see this process's traceback
        work.results.put(f"a worker failed with {type(err).__name__}: {err}")


def _run_workers(recipe: Recipe, folder: Path, prompts, workers: int, total: int | None, done,
                 max_rows: int = MAX_ROWS, first: int = 0) -> None:
    """Fill missing parts until `done(number)` says that it is enough or, with `total`, all are there."""
    have = sorted(int(p.stem.split("-")[1]) for p in folder.glob("part-*.json"))
    if any([done(n) for n in have]) or (total is not None and len(have) >= total):
        return
    ctx = mp.get_context("spawn")
    work = _Work(ctx.Value("q", first), ctx.Queue(), total, max_rows)
    set_for_children()
    processes = [ctx.Process(target=_worker, args=(recipe, folder, prompts, work), daemon=True) for _ in range(workers)]
    for p in processes:
        p.start()
    alive = workers
    try:
        while alive:
            try:
                got = work.results.get(timeout=5)
            except queue.Empty:
                if any(p.exitcode not in (None, 0) for p in processes):
                    raise KvshotError("a worker process died (out of memory?): use fewer workers or rows") from None
                continue
            if got is None:
                alive -= 1
            elif isinstance(got, str):
                raise KvshotError(got)
            elif done(got):
                return  # blocks that were begun and are not needed are given up
    finally:
        for p in processes:
            p.terminate()
            p.join()


def synthesize(recipe: Recipe, folder: str | os.PathLike, *, answer_tokens: int, workers: int | None = None,
               tokenizer=None, max_rows: int = MAX_ROWS, first: int = 0, seen: Sequence[Conversation] = ()
               ) -> tuple[list[Conversation], Report]:
    """Conversations of one user turn and one answer: the first whole blocks that hold `answer_tokens` kept tokens.

    folder: parts and the recipe; a folder begun with another recipe is refused. max_rows: live rows of a worker; what
    it began and is not needed is lost, so a small data set wants few. first: number of the first block; seen:
    conversations kept before it, which new ones must not repeat. Returns the kept conversations in block order and the
    report of what was dropped. Raises KvshotError on a bad recipe, target or full disk.
    """
    tokenizer = tokenizer or load_tokenizer(recipe.target)
    frame, keeper, ready, upto, kept = _Frame(tokenizer, recipe.template), _Keeper(tokenizer, seen), set(), first, 0
    with _begun(Path(folder), recipe.model_dump_json(indent=1, exclude=recipe.left_out)) as folder, progress(
            "answer tokens kept", answer_tokens) as advance:
        def done(number: int) -> bool:
            nonlocal upto, kept
            ready.add(number)
            while upto in ready:  # in the order in which `collect` reads them: what is a duplicate depends on it
                n = sum(c.meta["answer_tokens"] for c in keeper.part(folder, upto, frame))
                upto, kept = upto + 1, kept + n
                advance(n, str(keeper.filter.report))
            if upto - first >= GIVE_UP_AFTER and not kept:
                raise KvshotError(f"nothing in {upto - first} blocks of {recipe.block_rows} rows is worth keeping "
                                  f"({keeper.filter.report}): the target writes no usable text with this recipe")
            return kept >= answer_tokens

        _run_workers(recipe, folder, None, workers or usable_cores(), None, done, max_rows, first)
        return collect(folder, tokenizer, answer_tokens=answer_tokens, first=first, seen=seen)


def answer(recipe: Recipe, folder: str | os.PathLike, prompts: Sequence[Conversation], *, workers: int | None = None,
           tokenizer=None) -> tuple[list[Conversation], Report]:
    """The target's answers to given prompts (conversations that end with a user turn); as `synthesize` otherwise."""
    for prompt in prompts:
        if not prompt.messages or prompt.messages[-1].role != "user":
            raise KvshotError(f"prompt {prompt.id!r} does not end with a user turn: remove its last answer")
    tokenizer = tokenizer or load_tokenizer(recipe.target)
    ids = [prompt_ids(tokenizer, p.messages, options=recipe.template) for p in prompts]
    asked = hashlib.sha256(json.dumps(ids).encode()).hexdigest()
    total = -(-len(prompts) // recipe.block_rows)
    about = recipe.model_dump_json(indent=1, exclude=recipe.left_out) + f"\nprompts {asked}"
    with _begun(Path(folder), about) as folder, progress("blocks", total) as advance:
        _run_workers(recipe, folder, ids, workers or usable_cores(), total, lambda number: bool(advance(1)))
        kept = []
        keeper, frame = _Keeper(tokenizer), _Frame(tokenizer, recipe.template)
        for n in range(total):
            kept += keeper.part(folder, n, frame, prompts[n * recipe.block_rows : (n + 1) * recipe.block_rows])
    return kept, keeper.filter.report


def answer_corpus(recipe: Recipe, folder: str | os.PathLike, split: str, prompts: Sequence[Conversation], *,
                  source: str, workers: int | None = None) -> tuple[Corpus, Report]:
    """`answer` into FOLDER/SPLIT.parts, then add what was kept to the corpus in FOLDER as `split`.

    source: what the prompts are, for the record. Raises KvshotError as `answer` and `Corpus.add` do (before the work
    where it can be known), and when no answer is worth keeping.
    """
    folder = Path(folder)
    Corpus.load(folder).info.require_free(split)
    kept, report = answer(recipe, folder / f"{split}.parts", prompts, workers=workers)
    if not kept:
        raise KvshotError(f"none of the {len(prompts)} answers is worth keeping ({report}): nothing was added, try "
                          "other prompts, another target or temperature")
    return Corpus.add(folder, split, kept, describe(recipe, report) | {"prompts": source}), report


@contextmanager
def _begun(folder: Path, text: str) -> Iterator[Path]:
    """A folder of parts of one recipe, with one process in it."""
    with exclusive(folder):
        path = folder / "recipe.txt"
        if path.exists() and path.read_text() != text:
            raise KvshotError(f"{folder} was begun with another recipe or other prompts: use another folder or "
                              "delete it")
        with atomic_file(path) as tmp:
            tmp.write_text(text)
        yield folder


class _Keeper:
    """Parts to conversations, through the filters; `seen` were kept before."""

    def __init__(self, tokenizer, seen: Sequence[Conversation] = ()) -> None:
        self.tokenizer, self.filter = tokenizer, Filter()
        for conversation in seen:
            self.filter.remember(conversation)

    def part(self, folder: Path, number: int, frame: _Frame, prompts: Sequence[Conversation] | None = None) -> list:
        out = []
        for i, row in enumerate(read_part(folder, number, None if prompts is None else len(prompts))):
            prompt = None if prompts is None else prompts[i]
            conversation, reason = self._conversation(row, f"{number:05d}-{i:03d}", frame, prompt)
            if reason is not None:
                self.filter.report.count(reason)
            elif self.filter.keep(conversation, row["written"][-1]):
                out.append(conversation)
        return out

    def _conversation(self, row, name: str, frame: _Frame, prompt) -> tuple[Conversation | None, str | None]:
        written, tokenizer = row["written"], self.tokenizer
        if row["outcome"] == "quit":
            return None, "user turn without its end token"
        if prompt is None and len(written) < 3:
            return None, "endless user turn"
        if row["outcome"] == "gave up":
            return None, "looping"
        sampled = written[-1:] if prompt is not None else [written[0], written[-1]]
        if any(not ids for ids in sampled):
            return None, "empty"
        if any(frame.special.intersection(ids) for ids in sampled):
            return None, "special tokens"
        texts = [tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in sampled]
        turns = prompt.messages if prompt is not None else [Message(role="user", content=texts[0])]
        if any("\ufffd" in text for text in texts):
            return None, "broken characters"
        turns = [*turns, Message(role="assistant", content=texts[-1])]
        return Conversation(
            id=prompt.id if prompt is not None else name, messages=turns,
            truncated=row["outcome"] == "limit", meta={"answer_tokens": len(written[-1])}), None


def collect(folder: str | os.PathLike, tokenizer, *, answer_tokens: int | None = None, first: int = 0,
            seen: Sequence[Conversation] = ()) -> tuple[list[Conversation], Report]:
    """The finished parts of a synthesis, filtered, in order up to a missing one or `answer_tokens` kept tokens."""
    folder, frame, keeper = Path(folder), _Frame(tokenizer), _Keeper(tokenizer, seen)
    kept, tokens, number = [], 0, first
    while part_path(folder, number).exists() and (answer_tokens is None or tokens < answer_tokens):
        new = keeper.part(folder, number, frame)
        kept, tokens, number = kept + new, tokens + sum(c.meta["answer_tokens"] for c in new), number + 1
    if not kept:
        raise KvshotError(f"{folder} holds no conversation worth keeping: synthesise more, or with another recipe")
    return kept, keeper.filter.report


def synthesize_corpus(recipe: Recipe, out: str | os.PathLike, *, answer_tokens: int, workers: int | None = None,
                      held_out: int = 300) -> tuple[Corpus, Report]:
    """`synthesize` into OUT/parts, then split and write the corpus into OUT.

    held_out: conversations that are only evaluated on; a third of that many more become the validation split. Both
    come from the first HELD_OUT_AMONG, so that a longer synthesis only adds training conversations at the end.
    Near-duplicates of either are removed from training. A finished data set of the same recipe is continued, or
    returned with an empty report when it holds as much; its other splits stay. Raises KvshotError when OUT holds
    another data set, and for a held_out that there can never be enough conversations for.
    """
    out, validation = Path(out), max(1, held_out // 3)
    most = min(HELD_OUT_AMONG, answer_tokens + recipe.block_rows)  # if every answer were one token long
    if held_out + validation >= most and not (out / RECIPE).exists():
        raise KvshotError(f"there will be at most {most} conversations to hold out {held_out} of and choose "
                          f"checkpoints on {validation}: hold out fewer (--held-out) or, if that is less than "
                          f"{HELD_OUT_AMONG}, ask for more answer tokens")
    asked = _made_by(recipe)
    with exclusive(out):
        about, splits = {}, {}
        if old := Corpus.begun(out, asked, since={"template": {}}):
            about, splits, there = old.info.recipe, old.splits, len(old.splits["held_out"])
            if there != held_out:
                raise KvshotError(f"{out} holds a data set with {there} conversations held out, not {held_out}: ask "
                                  "for as many, or name a new folder")
            if _own_tokens(old) >= answer_tokens:
                return old, Report()
        kept, report = synthesize(recipe, out / "parts", answer_tokens=answer_tokens, workers=workers)
        parts, dropped = split_corpus(kept, held_out=held_out, validation=validation, seed=recipe.seed,
                                      among=HELD_OUT_AMONG)
        about = {**about, **describe(recipe, report), "dropped as like a held-out one": dropped}
        return Corpus.save(out, out.resolve().name, about, {**splits, **parts}), report


def _own_tokens(corpus: Corpus) -> int:
    return sum(corpus.info.splits[name].answer_tokens for name in OWN_SPLITS)


def extend_corpus(folder: str | os.PathLike, *, answer_tokens: int, workers: int | None = None
                  ) -> tuple[Corpus, Report]:
    """Synthesise on behind the last block of a corpus, until `answer_tokens` of its target's own text were kept.

    New conversations that resemble neither an earlier nor a held-out one go to the end of the training split; the other
    splits stay as they are. Returns the corpus and the report on the new blocks. Raises KvshotError when the corpus was
    not synthesised, or by other weights.
    """
    folder = Path(folder)
    Corpus.load(folder)  # before the lock makes a folder
    with exclusive(folder):
        return _extend(folder, Corpus.load(folder), answer_tokens, workers)


def _extend(folder: Path, corpus: Corpus, answer_tokens: int, workers: int | None) -> tuple[Corpus, Report]:
    about, splits = dict(corpus.info.recipe), corpus.splits
    needed = {*Recipe.model_fields, "target_weights_sha256"} - {"template"}
    if not needed <= set(about) or not set(OWN_SPLITS) <= set(splits):
        raise KvshotError(f"{folder} was not made by `kvshot data synthesize`: only such a data set can be extended")
    recipe = Recipe(**{name: about[name] for name in Recipe.model_fields if name in about})
    own = [c for name in OWN_SPLITS for c in splits[name]]
    missing = answer_tokens - _own_tokens(corpus)
    if missing <= 0:
        return corpus, Report()
    if about["target_weights_sha256"] != weights_sha256(recipe.target):
        raise KvshotError(f"{folder} was written by other weights than {recipe.target} has here: start a new data set")
    first = 1 + max(int(c.id.split("-")[0]) for c in own)
    new, report = synthesize(recipe, folder / "parts", answer_tokens=missing, workers=workers, first=first, seen=own)
    new, alike = without_alike(new, splits["validation"] + splits["held_out"])
    about["kept"] += report.kept
    about["dropped"] = dict(sorted((Counter(about["dropped"]) + report.dropped).items()))
    about["dropped as like a held-out one"] += len(alike)
    return Corpus.save(folder, corpus.info.name, about, {**splits, "train": splits["train"] + new}), report


def _made_by(recipe: Recipe) -> dict:
    return {**recipe.model_dump(mode="json", exclude=recipe.left_out),
            "target_weights_sha256": weights_sha256(recipe.target)}


def describe(recipe: Recipe, report: Report) -> dict:
    """Everything that made the text, for the corpus's own record."""
    return {
        **_made_by(recipe), "computed_in": "bfloat16", "top_k": Sampled(1, frozenset()).top_k,
        "kept": report.kept, "dropped": dict(sorted(report.dropped.items())),
    }
