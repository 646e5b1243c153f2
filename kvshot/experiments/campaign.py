"""The campaign: every missing record of a profile, one after another, resumable after a kill at any moment."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from pathlib import Path

from kvshot.allocator import usable_cores
from kvshot.errors import KvshotError
from kvshot.experiments.end_to_end import EndToEnd, place
from kvshot.experiments.profiles import Profile, profile
from kvshot.experiments.record import RECORD, RunRecord, load_records, published_path
from kvshot.experiments.registry import EXPERIMENTS, Experiment, plan
from kvshot.experiments.run import publish, recipe
from kvshot.fileio import cache_dir
from kvshot.progress import EVERY


def campaign_of(folder: Path) -> dict[str, list[RunRecord]]:
    """The records of every row in a results folder, by name, in the order of their seeds."""
    out: dict[str, list[RunRecord]] = {}
    for record in load_records(folder) if folder.is_dir() else ():
        if record.training is not None:
            out.setdefault(record.experiment, []).append(record)
    return {name: sorted(records, key=lambda r: r.training.seed) for name, records in out.items()}


def missing(profile_name: str, results: str | os.PathLike, only: Sequence[str] = (), seeds: int = 3
            ) -> Iterator[tuple[Experiment, int]]:
    """What a campaign has still to run, in its order: no record, or one of another recipe or without counts.

    A row of Table 4 is missing as long as its first seed has not been measured end to end.
    """
    for e, seed in plan(only, seeds):
        if not _published(profile_name, results, e, seed) or _to_replay(profile_name, results, e, seed):
            yield e, seed


def _published(profile_name: str, results: str | os.PathLike, e: Experiment, seed: int) -> bool:
    return _fits(published_path(results, profile_name, e.name, seed), profile(profile_name), e.name, seed)


def _to_replay(profile_name: str, results: str | os.PathLike, e: Experiment, seed: int) -> bool:
    """Of Table 4, and not measured end to end since the record was made."""
    if "table4" not in e.tables or seed:
        return False
    measured, record = place(results, profile_name, e.name), published_path(results, profile_name, e.name)
    return not (measured.exists() and record.exists()
                and EndToEnd.load(measured).run_created == RunRecord.load(record).created)


def _fits(path: Path, chosen: Profile, name: str, seed: int) -> bool:
    if not path.exists():
        return False
    record, wanted = RunRecord.load(path), recipe(chosen, name, seed=seed)
    if record.training is None or any(d.counts is None for d in record.evaluation.values()):
        return False
    if (record.experiment, record.profile) != (name, chosen.name):
        return False
    if record.setting is None:  # older than the field
        if chosen.train_conversations not in (None, record.data.n_train_conversations):
            return False
    elif record.setting != chosen.setting:
        return False
    return wanted.model_dump(mode="json").items() <= record.training.options.items()


def _usable(run: Path, chosen: Profile, e: Experiment, seed: int) -> bool:
    """Whether a run's folder holds a whole run of this recipe: the record is written last."""
    return (run / "best").is_dir() and _fits(run / RECORD, chosen, e.name, seed)


def reproduce(profile_name: str, *, results: str | os.PathLike = "results", runs: str | os.PathLike | None = None,
              only: Sequence[str] = (), seeds: int = 3, jobs: int = 1, options: Sequence[str] = ()) -> list[str]:
    """Run what is missing and publish each record as it finishes; returns a line for each run that failed.

    Every run is a process of its own (`kvshot train`): what one of them leaves in memory, or its crash, touches no
    other. The features that all of them read are captured first, once. runs: folder of checkpoints (default: in the
    cache); a run whose start failed fails, too. jobs: how many run at a time, sharing the CPU's cores (small products
    on one core each are done sooner than on all cores one after another); what each prints goes into
    `<run>.log` then, and one line for all of them comes here now and then. options: passed on to each `kvshot train`.
    """
    runs = (Path(runs) if runs is not None else cache_dir() / "runs") / profile_name
    todo, failed = list(missing(profile_name, results, only, seeds)), []
    if not todo:
        return []
    chosen = profile(profile_name)
    lacking = {(e.name, seed) for e, seed in todo if not _published(profile_name, results, e, seed)}
    # a start whose record is published may lack its checkpoint here: it is trained again, and its record stays unless
    # it is replayed, too: what is measured end to end is of the run whose record is published
    for e, seed in list(todo):
        before = e.start and (EXPERIMENTS[e.start], seed)
        if before and before not in todo and not _usable(runs / f"{e.start}-seed{seed}", chosen, *before):
            todo.insert(0, before)
    names = list(dict.fromkeys(e.name for e, seed in todo
                               if not _usable(runs / f"{e.name}-seed{seed}", chosen, e, seed)))
    if names:
        _kvshot("capture", "--profile", profile_name, *(x for n in names for x in ("--only", n)), *options)

    def one(e: Experiment, seed: int) -> None:
        folder = runs / f"{e.name}-seed{seed}"
        if e.start and not _usable(runs / f"{e.start}-seed{seed}", chosen, EXPERIMENTS[e.start], seed):
            raise KvshotError(f"its start {e.start} did not finish with this recipe")
        share = {"log": _log(folder) if jobs > 1 else None, "share": jobs}
        if not _usable(folder, chosen, e, seed):
            _kvshot("train", e.name, "--profile", profile_name, "--seed", str(seed), "--out", str(folder), *options,
                    **share)
        if (e.name, seed) in lacking or _to_replay(profile_name, results, e, seed):
            publish(folder, results)
        if _to_replay(profile_name, results, e, seed):
            _kvshot("replay", str(folder), "--results", str(results), *options, **share)

    for (e, seed), error in _in_parallel(todo, jobs, one, lambda e, seed: _last_line(runs / f"{e.name}-seed{seed}")):
        if error is not None and not isinstance(error, (KvshotError, OSError)):
            raise error
        if error is not None:
            failed.append(f"{e.name}-seed{seed}: {error}")
            _say(failed[-1])
    return failed


Run = tuple[Experiment, int]


def _in_parallel(todo: Sequence[Run], jobs: int, one: Callable[[Experiment, int], None],
                 state: Callable[[Experiment, int], str]) -> Iterator[tuple[Run, BaseException | None]]:
    """one(*run) for every run, `jobs` at a time, a start before what starts from it; yields each with its error.

    Says what begins, and now and then, where there are several, the `state` of those under way.
    """
    waiting, running, count = list(todo), {}, 0
    with ThreadPoolExecutor(jobs) as pool, _children.ended_with_us():
        while waiting or running:
            while len(running) < jobs and (ready := _ready(waiting, running.values())):
                waiting.remove(ready)
                running[pool.submit(one, *ready)], count = ready, count + 1
                _say(f"run {count} of {len(todo)}: {ready[0].name}-seed{ready[1]} ({ready[0].about})")
            done, _ = wait(running, timeout=None if jobs == 1 else EVERY, return_when=FIRST_COMPLETED)
            if not done:
                _say("; ".join(f"{e.name}-seed{seed}: {state(e, seed)}" for e, seed in running.values()))
            for future in done:
                yield running.pop(future), future.exception()


def _ready(waiting: Sequence[Run], running: Iterable[Run]) -> Run | None:
    """The first run whose start is neither to come nor under way."""
    unfinished = {(e.name, seed) for e, seed in (*waiting, *running)}
    return next(((e, seed) for e, seed in waiting if (e.start, seed) not in unfinished), None)


def _log(folder: Path) -> Path:
    return folder.with_name(folder.name + ".log")


def _last_line(folder: Path) -> str:
    """What a run said last."""
    log = _log(folder)
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "starting")


class _Children:
    """The processes of a campaign. One that is left behind would bar the next campaign from its folder."""

    def __init__(self) -> None:
        self.running: set[subprocess.Popen] = set()
        self.ending = False

    def run(self, args: Sequence[str], **how) -> int:
        """The exit code of a command, which ends when this process is interrupted."""
        if self.ending:
            raise KvshotError("the campaign is ending")
        child = subprocess.Popen(args, **how)
        self.running.add(child)
        try:
            return child.wait()
        except BaseException:
            child.terminate()
            raise
        finally:
            self.running.discard(child)

    @contextmanager
    def ended_with_us(self) -> Iterator[None]:
        """Those that other threads run end, too, when this one is interrupted."""
        try:
            yield
        except BaseException:
            self.ending = True
            for child in list(self.running):
                child.terminate()
            raise


_children = _Children()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _kvshot(*args: str, log: Path | None = None, share: int = 1) -> None:
    """A command of our own; its progress goes to our stderr or into `log`, its last words into the error.

    share: how many such commands the CPU's cores are for.
    """
    environment = dict(os.environ)
    if share > 1:
        given = int(environment.get("OMP_NUM_THREADS") or usable_cores())
        environment["OMP_NUM_THREADS"] = str(max(1, min(given, usable_cores() // share)))
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") if log is not None else nullcontext() as stderr:
        code = _children.run([sys.executable, "-m", "kvshot", *args], stdout=subprocess.DEVNULL, stderr=stderr,
                             env=environment)
    if code < 0:
        raise KvshotError(f"killed by signal {-code} (out of memory?)")
    if code:
        said = "its message is above" if log is None else _last_line(log.with_suffix(""))
        raise KvshotError(f"`kvshot {' '.join(args)}` failed with exit code {code} ({said})")
