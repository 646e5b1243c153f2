"""Why does a drafter decay? Interventions, drift, where it looks, what better queries would be worth (Section 4)."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
import torch
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from kvshot.analysis.compression import interval_by
from kvshot.analysis.oracle import WithStates, learn_queries
from kvshot.analysis.queries import by_outcome, query_error
from kvshot.analysis.regimes import interventions, state_drift
from kvshot.drafters.checkpoint import load_drafter
from kvshot.drafters.drafter import Drafter
from kvshot.errors import KvshotError
from kvshot.evaluation.metrics import ConversationCounts
from kvshot.evaluation.stepwise import stepwise_hits
from kvshot.experiments.bench import TRAIN, Bench
from kvshot.experiments.profiles import Profile, profile
from kvshot.experiments.record import (
    RECORD,
    DataInfo,
    OfRun,
    Strict,
    describe_code,
    describe_machine,
    published_path,
    trained_record,
)

OWN_QUERIES, LAST_STATES, ORACLE_QUERIES = "own queries", "the target's last states", "oracle queries"


class Drift(Strict):
    """The drafter's own state before a step against the target's (`analysis.regimes.state_drift`)."""

    step: PositiveInt
    cosine: float
    norm: NonNegativeFloat


class Looking(Strict):
    """Mean distance of one attention from the target's at one step (`analysis.queries.query_error`), over texts.

    gain: how much smaller it is than `stale`; intervals over texts.
    """

    branch: str
    step: NonNegativeInt
    distance: float
    low: float
    high: float
    stale: float
    gain: float
    gain_low: float
    gain_high: float


class Outcome(Strict):
    """Mean distance of one attention where drafts were accepted and rejected (`analysis.queries.by_outcome`)."""

    branch: str
    accepted: float
    rejected: float
    difference: float
    low: float
    high: float


class Diagnosis(OfRun):
    """One trained drafter.

    data: None where it was not noted; regimes: by intervention; drift: None for a drafter without states; looking,
    outcomes: empty for one without a memory of the prefix; queries: after `query_steps` steps in which only the queries
    learned, from what they have, from the target's states at the last verified position as well, or from those at the
    future one (`OracleQueries`).
    """

    KIND, REMEDY = "diagnosis", "make it again with `kvshot diagnose`"

    data: DataInfo | None = None
    texts: PositiveInt
    regimes: dict[str, ConversationCounts]
    drift: list[Drift] | None
    looking: list[Looking]
    outcomes: list[Outcome]
    query_steps: PositiveInt
    query_tokens: PositiveInt
    queries: dict[str, ConversationCounts]


def diagnoses(results: str | os.PathLike, profile_name: str) -> dict[str, Diagnosis]:
    """The published ones of a profile, by experiment; of several seeds the first.

    Raises KvshotError for one of another run than the record beside it.
    """
    found: dict[str, Diagnosis] = {}
    for path in sorted((Path(results) / profile_name / "diagnosis").glob("*-seed*.json")):
        d = Diagnosis.load(path)
        d.check_run(published_path(results, profile_name, d.experiment, d.seed))
        found.setdefault(d.experiment, d)
    return found


def _learned(bench: Bench, drafter: Drafter, n_steps: int, steps: int, batch_tokens: int
             ) -> dict[str, ConversationCounts]:
    """Acceptance after the queries learned on, from three kinds of input."""
    out, layers = {}, bench.target.spaced_kv_layers(3)
    bench.also.append(WithStates(**drafter.config.model_dump(), also=layers))
    text, held_out = bench.store(TRAIN), bench.store("held_out")
    for name, extra, future in ((OWN_QUERIES, (), False), (LAST_STATES, layers, False), (ORACLE_QUERIES, layers, True)):
        learner = learn_queries(drafter, bench.target, text, extra, future=future, steps=steps, n_steps=n_steps,
                                batch_tokens=batch_tokens, quiet=bench.quiet)
        out[name] = ConversationCounts.of(stepwise_hits(learner, held_out, n_steps, quiet=bench.quiet))
    return out


def diagnose(bench: Bench, drafter: Drafter, name: str, *, seed: int = 0, run_created: datetime | None = None,
             texts: int = 48, query_steps: int = 200) -> Diagnosis:
    """Everything on the held-out conversations; texts: how many of them for the attention.

    name, seed, run_created: of the experiment's run (the last: now, where there is none). Raises KvshotError for data
    without held-out conversations.
    """
    if "held_out" not in bench.conversations:
        raise KvshotError("the data has no split held_out to diagnose on: add one, or choose another corpus")
    n_steps, target, quiet, code = bench.profile.train.n_steps, bench.target, bench.quiet, describe_code()
    bench.also.append(drafter.config)
    batch_tokens = bench.profile.train.batch_tokens
    queries = _learned(bench, drafter, n_steps, query_steps, batch_tokens)
    store = bench.store("held_out")
    hits = interventions(drafter, store, n_steps, quiet=quiet)
    drift = None
    if drafter.config.reads_hidden:
        drift = [Drift(step=step, cosine=row["cosine"], norm=row["norm"])
                 for step, row in state_drift(drafter, store, n_steps).iterrows()]
    looking, outcomes = [], []
    if drafter.config.memory != "none":
        pairs = [(torch.from_numpy(e.ids), torch.from_numpy(e.loss_mask)) for e in bench.examples["held_out"][:texts]]
        looked = query_error(drafter, target, pairs, n_steps, quiet=quiet)
        looking = _looking(looked)
        outcomes = [Outcome(branch=b, **row) for b, row in by_outcome(looked).iterrows()]
    now = datetime.now(UTC)
    return Diagnosis(
        experiment=name, profile=bench.profile.name, seed=seed, run_created=run_created or now, data=bench.data_info(),
        target=bench.target_info(), texts=texts, regimes={name: ConversationCounts.of(h) for name, h in hits.items()},
        drift=drift, looking=looking, outcomes=outcomes, query_steps=query_steps,
        query_tokens=query_steps * batch_tokens, queries=queries,
        code=code, machine=describe_machine(target.device), created=now)


def _looking(table: pd.DataFrame) -> list[Looking]:
    out = []
    for branch, rows in table.assign(gain=table["stale"] - table["distance"]).groupby("branch", sort=False):
        distance, stale, gain = (interval_by(rows, what, "step") for what in ("distance", "stale", "gain"))
        out += [Looking(branch=branch, step=step, distance=row["mean"], low=row["low"], high=row["high"],
                        stale=stale.loc[step, "mean"], gain=gain.loc[step, "mean"], gain_low=gain.loc[step, "low"],
                        gain_high=gain.loc[step, "high"]) for step, row in distance.iterrows()]
    return out


def diagnose_run(run: str | os.PathLike, results: str | os.PathLike, *, device: str | None = None, texts: int = 48,
                 query_steps: int = 200) -> tuple[Diagnosis, Path]:
    """Diagnose a run's best drafter and publish what came out.

    run: a folder of `kvshot train`, or a published checkpoint with its record beside it. Raises KvshotError for
    anything else, and for a run on other data than its profile's.
    """
    run = Path(run)
    record, trained = trained_record(record_of(run)), (run / "best").is_dir()
    bench = Bench(profile(record.profile), device=device, experiments=[record.experiment])
    bench.check_data(record, run)
    drafter, _ = load_drafter(run / "best" if trained else run, bench.target)
    out = diagnose(bench, drafter, record.experiment, seed=record.training.seed, run_created=record.created,
                   texts=texts, query_steps=query_steps)
    path = published_path(results, record.profile, record.experiment, record.training.seed, "diagnosis")
    out.save(path)
    return out, path


def diagnose_checkpoint(folder: str | os.PathLike, chosen: Profile, *, device: str | None = None, texts: int = 48,
                        query_steps: int = 200) -> tuple[Diagnosis, Path]:
    """Diagnose a drafter without a run (`kvshot import`) on a profile's data; into `diagnosis.json` in its folder."""
    folder, bench = Path(folder), Bench(chosen, device=device)
    out = diagnose(bench, bench.drafter(folder), folder.resolve().name, texts=texts, query_steps=query_steps)
    out.save(folder / "diagnosis.json")
    return out, folder / "diagnosis.json"


def record_of(run: str | os.PathLike) -> Path:
    """Where the record of a run lies: in its folder, or beside its published checkpoint."""
    run = Path(run).resolve()
    if run.name == "best" and (run.parent / RECORD).exists():
        run = run.parent
    return run / RECORD if (run / "best").is_dir() else run.with_name(run.name + ".json")
