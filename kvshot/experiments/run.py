"""Run one named experiment: train its drafter under the profile's recipe, evaluate it, leave a record."""

from __future__ import annotations

import os
import shutil
from contextlib import nullcontext
from pathlib import Path

import torch

from kvshot.drafters.checkpoint import load_drafter, save_drafter, target_of
from kvshot.drafters.config import checked
from kvshot.drafters.drafter import Drafter
from kvshot.drafters.init import new_drafter, warm_start
from kvshot.errors import KvshotError
from kvshot.evaluation.metrics import ConversationCounts, summarise
from kvshot.evaluation.stepwise import stepwise_hits
from kvshot.experiments.bench import TRAIN, VALIDATION, Bench
from kvshot.experiments.cost import cost
from kvshot.experiments.profiles import Profile, profile
from kvshot.experiments.record import (
    RECORD,
    CurvePoint,
    DomainEvaluation,
    RunRecord,
    TrainingInfo,
    describe_code,
    describe_machine,
    published_path,
    trained_record,
)
from kvshot.experiments.registry import Experiment, experiment
from kvshot.fileio import atomic_file, cache_dir, exclusive, require_folder
from kvshot.targets import Target, load_target
from kvshot.targets.loading import resolve_device
from kvshot.training.masks import supervised_columns
from kvshot.training.probes import save_probes
from kvshot.training.trainer import Progress, TrainConfig, Trainer, processes

PROBES = "probes.csv.xz"


def recipe(base: Profile, name: str, **given) -> TrainConfig:
    """The profile's recipe with what the experiment changes; `given` wins."""
    return checked(TrainConfig, {**base.train.model_dump(), **experiment(name).train, **given})


def train(bench: Bench, name: str, folder: str | os.PathLike, config: TrainConfig, *,
          start: str | os.PathLike | None = None) -> Progress:
    """Train (or resume) an experiment's drafter in `folder`.

    start: checkpoint of the experiment that it starts from. Raises KvshotError for an unknown experiment, a start that
    is not there, or a folder in which another process is at work.
    """
    e = experiment(name)
    _check_before(bench, e, folder, start)
    group = processes(resolve_device(bench.device))
    with group.main_process_first():
        bench.target.weights_sha256  # noqa: B018  the others find it unpacked
    drafter_config = e.config(bench.target, len(bench.vocab))
    drafter = new_drafter(bench.target, drafter_config, bench.vocab, seed=config.seed, init=config.init)
    if e.start is not None:
        warm_start(drafter, load_drafter(start, bench.target)[0])
    steps = bench.profile.train.n_steps  # also for a drafter that is trained on fewer
    for split in (TRAIN, VALIDATION):
        if not any(supervised_columns(torch.from_numpy(x.loss_mask), steps)[..., -1].any()
                   for x in bench.examples[split]):
            raise KvshotError(f"no {split} answer is long enough for {steps} draft steps: give longer answers "
                              "or train fewer steps")
    with group.main_process_first():  # the others find the features captured
        validation, store = bench.store(VALIDATION), bench.store(TRAIN)

    def evaluate(model: Drafter) -> dict:
        summary = summarise(stepwise_hits(model, validation, steps, quiet=True), n_boot=2)
        return {"mat": summary.mat.value, "alpha": summary.alpha}

    trainer = Trainer(bench.target, drafter, bench.vocab, store, config, folder, evaluate)

    def begins() -> None:  # a record says that its folder holds a whole run: it goes before the first step of another
        if group.is_main_process:
            (Path(folder) / RECORD).unlink(missing_ok=True)

    with exclusive(folder) if group.is_main_process else nullcontext():
        return trainer.run(quiet=bench.quiet, begins=begins)


def _check_before(bench: Bench, e: Experiment, folder: str | os.PathLike, start: str | os.PathLike | None) -> None:
    """What can be wrong without the target is said before it is fetched."""
    require_folder(folder)
    if e.start is not None:
        if start is None or not (Path(start).parent / RECORD).exists():
            raise KvshotError(f"{e.name} starts from a finished run of {e.start}, and {start or 'nothing'} is none: "
                              f"train {e.start} first, or use `kvshot reproduce --only {e.name}`")
        target_of(start)
    bench.conversations  # noqa: B018


def evaluate(
    bench: Bench, checkpoint: str | os.PathLike, n_steps: int = 7
) -> tuple[Drafter, dict[str, DomainEvaluation]]:
    """Step-wise acceptance of a checkpoint on every held-out domain, in float32, with the n-gram row."""
    drafter = bench.drafter(checkpoint)
    bench.also.append(drafter.config)
    out = {}
    for domain in bench.domains:
        hits = stepwise_hits(drafter, bench.store(domain), n_steps, quiet=bench.quiet)
        out[domain] = DomainEvaluation(drafter=summarise(hits), ngram=summarise(bench.ngram_hits(domain, n_steps)),
                                       counts=ConversationCounts.of(hits))
    return drafter, out


def run(bench: Bench, name: str, folder: str | os.PathLike, config: TrainConfig, *,
        start: str | os.PathLike | None = None) -> RunRecord | None:
    """Train, evaluate the best checkpoint, write the record to `record.json` in `folder`.

    Under torchrun or `accelerate launch` the processes share every batch; the first of them evaluates, reports and
    writes, and the others get None. A run that was whole already is evaluated again, and keeps the date that it is
    known by.
    """
    folder, group, code = Path(folder), processes(resolve_device(bench.device)), describe_code()
    setting = bench.profile.setting
    bench.quiet |= not group.is_main_process
    done = train(bench, name, folder, config, start=start)
    if not group.is_main_process:
        return None
    drafter, measured = evaluate(bench, folder / "best", bench.profile.train.n_steps)
    curve = [CurvePoint(**point) for point in done.curve]
    training = TrainingInfo(
        steps=done.step, tokens_seen=done.tokens, lr=config.lr, seed=config.seed, wall_seconds=done.seconds,
        tokens_per_second=done.tokens / max(done.seconds, 1e-9), wide_products=done.wide,
        processes=group.num_processes, curve=curve,
        options={**config.model_dump(mode="json"), "best_step": done.best_step,
                 "validation_conversations": len(bench.examples[VALIDATION])})
    result = RunRecord(
        experiment=name, profile=bench.profile.name, drafter=drafter.config.model_dump(mode="json"),
        cost=cost(drafter.config), target=bench.target_info(), data=bench.data_info(), training=training,
        setting=setting, evaluation=measured, code=code, machine=describe_machine(bench.target.device))
    if (folder / RECORD).exists():
        result.created = RunRecord.load(folder / RECORD).created
    if done.probes:
        save_probes(folder / PROBES, done.probes)
    result.save(folder / RECORD)
    return result


def publish(folder: str | os.PathLike, results: str | os.PathLike, *, checkpoint: bool = False) -> Path:
    """Copy a run's record to results/<profile>/<experiment>-seed<n>.json, what its probes saw to the folder `probes`
    there, and, if asked or if one is there, which would be another run's, its drafter in bfloat16.
    """
    record = trained_record(Path(folder) / RECORD)
    path = published_path(results, record.profile, record.experiment, record.training.seed)
    name = path.with_suffix("")
    if checkpoint or name.exists():
        target = load_target(record.target.name, device="cpu")
        drafter, vocab = load_drafter(Path(folder) / "best", target)
        save_drafter(name, drafter, vocab, target, dtype=torch.bfloat16)
    seen = Path(folder) / PROBES
    if seen.exists():
        with atomic_file(name.parent / "probes" / f"{name.name}.csv.xz") as tmp:
            shutil.copyfile(seen, tmp)
    record.save(path)
    return path


def published(name: str, profile_name: str, results: str | os.PathLike, *, seed: int = 0, live: bool = False,
              quiet: bool = True) -> RunRecord:
    """The committed record of an experiment, or, with `live`, one made now (in the cache; it resumes).

    Raises KvshotError when the record is not there and `live` is False.
    """
    path = published_path(results, profile_name, name, seed)
    if not live:
        if not path.exists():
            raise KvshotError(f"no record {path}: set live=True to compute it, or choose a profile that has records")
        return RunRecord.load(path)
    bench, runs = Bench(profile(profile_name), experiments=[name], quiet=quiet), cache_dir() / "runs" / profile_name
    before = experiment(name).start
    if before is not None:
        published(before, profile_name, results, seed=seed, live=True, quiet=quiet)
    folder = runs / f"{name}-seed{seed}"
    return run(bench, name, folder, recipe(bench.profile, name, seed=seed),
               start=before and runs / f"{before}-seed{seed}" / "best")


def published_drafter(name: str, target: Target, results: str | os.PathLike, profile_name: str, *,
                      seed: int = 0) -> Drafter:
    """The drafter of a run: the committed checkpoint, else the one that a live run left in the cache."""
    published_one = published_path(results, profile_name, name, seed).with_suffix("")
    places = [published_one, cache_dir() / "runs" / profile_name / published_one.name / "best"]
    found = next((p for p in places if (p / "config.json").exists()), None)
    if found is None:
        raise KvshotError(f"no checkpoint of {published_one.name} for profile {profile_name}: train it with "
                          f"published({name!r}, {profile_name!r}, results, live=True)")
    return load_drafter(found, target)[0]
