"""The campaign: every missing record of a profile, one after another, resumable after a kill at any moment."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvshot.errors import KvshotError
from kvshot.experiments.profiles import Profile, profile
from kvshot.experiments.record import RunRecord
from kvshot.experiments.registry import EXPERIMENTS, Experiment, plan
from kvshot.experiments.run import publish, recipe
from kvshot.fileio import cache_dir
from kvshot.training.trainer import TrainConfig


def records_of(name: str, folder: Path) -> dict[int, RunRecord]:
    """The records of an experiment in a results folder, by seed."""
    out = {}
    for path in sorted(folder.glob(f"{name}-seed*.json")):
        seed = path.stem.removeprefix(f"{name}-seed")
        if seed.isdigit():
            out[int(seed)] = RunRecord.load(path)
    return out


def missing(profile_name: str, results: str | os.PathLike, only: Sequence[str] = (), seeds: int = 3
            ) -> Iterator[tuple[Experiment, int]]:
    """What a campaign has still to run, in its order: no record, or one of another recipe or without counts."""
    chosen, folder = profile(profile_name), Path(results) / profile_name
    for e, seed in plan(only, seeds):
        path = folder / f"{e.name}-seed{seed}.json"
        if not path.exists() or not _fits(RunRecord.load(path), chosen, recipe(chosen, e.name, seed=seed)):
            yield e, seed


def _fits(record: RunRecord, chosen: Profile, wanted: TrainConfig) -> bool:
    if record.training is None or any(d.counts is None for d in record.evaluation.values()):
        return False
    if chosen.train_conversations not in (None, record.data.n_train_conversations):
        return False
    return wanted.model_dump(mode="json").items() <= record.training.options.items()


def finished(run: Path) -> bool:
    """Whether a run's folder holds a whole run: the record is written last."""
    return (run / "record.json").exists() and (run / "best").is_dir()


def reproduce(profile_name: str, *, results: str | os.PathLike = "results", runs: str | os.PathLike | None = None,
              only: Sequence[str] = (), seeds: int = 3, options: Sequence[str] = ()) -> list[str]:
    """Run what is missing and publish each record as it finishes; returns a line for each run that failed.

    Every run is a process of its own (`kvshot train`): what one of them leaves in memory, or its crash, touches no
    other. The features that all of them read are captured first, once. runs: folder of checkpoints (default: in the
    cache); a run whose start failed fails, too. options: passed on to each `kvshot train`.
    """
    runs = Path(runs) if runs is not None else cache_dir() / "runs"
    todo, failed = list(missing(profile_name, results, only, seeds)), []
    if not todo:
        return []
    # a start whose record is published may lack its checkpoint here: it is trained again, its record stays
    for e, seed in list(todo):
        before = e.start and (EXPERIMENTS[e.start], seed)
        if before and before not in todo and not finished(runs / profile_name / f"{e.start}-seed{seed}"):
            todo.insert(0, before)
    lacking = {(e.name, seed) for e, seed in missing(profile_name, results, only, seeds)}
    names = list(dict.fromkeys(e.name for e, _ in todo))
    _kvshot("capture", "--profile", profile_name, *(x for n in names for x in ("--only", n)), *options)
    for number, (e, seed) in enumerate(todo, 1):
        name = f"{e.name}-seed{seed}"
        print(f"run {number} of {len(todo)}: {name} ({e.about})", file=sys.stderr, flush=True)
        folder = runs / profile_name / name
        try:
            if e.start and not finished(runs / profile_name / f"{e.start}-seed{seed}"):
                raise KvshotError(f"its start {e.start} did not finish")
            _kvshot("train", e.name, "--profile", profile_name, "--seed", str(seed), "--out", str(folder), *options)
            if (e.name, seed) in lacking:
                publish(folder, results)
        except KvshotError as err:
            failed.append(f"{name}: {err}")
            print(failed[-1], file=sys.stderr, flush=True)
    return failed


def _kvshot(*args: str) -> None:
    """A command of our own; its progress goes to our stderr, its last words into the error."""
    done = subprocess.run([sys.executable, "-m", "kvshot", *args], stdout=subprocess.DEVNULL)
    if done.returncode < 0:
        raise KvshotError(f"killed by signal {-done.returncode} (out of memory?)")
    if done.returncode:
        raise KvshotError(f"`kvshot {' '.join(args)}` failed with exit code {done.returncode} (its message is above)")
