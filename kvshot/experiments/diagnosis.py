"""Why does a drafter decay? Interventions, drift, where it looks, what better queries would be worth (Section 4)."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
import torch
from pydantic import AwareDatetime, NonNegativeFloat, NonNegativeInt, PositiveInt

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
from kvshot.experiments.profiles import profile
from kvshot.experiments.record import (
    CodeInfo,
    MachineInfo,
    RunRecord,
    Stored,
    Strict,
    TargetInfo,
    describe_code,
    describe_machine,
)

OWN_QUERIES, ORACLE_QUERIES = "own queries", "oracle queries"


class Drift(Strict):
    """The drafter's own state before a step against the target's (`analysis.regimes.state_drift`)."""

    step: PositiveInt
    cosine: float
    norm: NonNegativeFloat


class Looking(Strict):
    """Mean distance of one attention from the target's at one step (`analysis.queries.query_error`), over texts."""

    branch: str
    step: NonNegativeInt
    distance: float
    low: float
    high: float
    stale: float


class Outcome(Strict):
    """Mean distance of one attention where drafts were accepted and rejected (`analysis.queries.by_outcome`)."""

    branch: str
    accepted: float
    rejected: float
    difference: float
    low: float
    high: float


class Diagnosis(Stored):
    """One trained drafter. run_created: when its record was made.

    regimes: by intervention; drift: None for a drafter without states; queries: after `query_steps` steps in which only
    the queries learned, from what they have and from the target's states as well.
    """

    experiment: str
    profile: str
    seed: NonNegativeInt
    run_created: AwareDatetime
    target: TargetInfo
    texts: PositiveInt
    regimes: dict[str, ConversationCounts]
    drift: list[Drift] | None
    looking: list[Looking]
    outcomes: list[Outcome]
    query_steps: PositiveInt
    query_tokens: PositiveInt
    queries: dict[str, ConversationCounts]
    code: CodeInfo
    machine: MachineInfo
    created: AwareDatetime

    @classmethod
    def load(cls, path: str | os.PathLike) -> Diagnosis:
        """Raises KvshotError for a file that is no such record."""
        try:
            return cls.model_validate_json(Path(path).read_bytes(), strict=True)
        except (OSError, ValueError) as err:
            first = str(err).splitlines()[0]
            raise KvshotError(f"{path} is no diagnosis ({first}): make it again with `kvshot diagnose`") from err


def diagnoses(results: str | os.PathLike, profile_name: str) -> dict[str, Diagnosis]:
    """The published ones of a profile, by experiment; of several seeds the first."""
    found: dict[str, Diagnosis] = {}
    for path in sorted((Path(results) / profile_name / "diagnosis").glob("*-seed*.json")):
        d = Diagnosis.load(path)
        found.setdefault(d.experiment, d)
    return found


def _learned(bench: Bench, drafter: Drafter, n_steps: int, steps: int, batch_tokens: int
             ) -> dict[str, ConversationCounts]:
    """Acceptance after the queries learned on, without and with the target's states."""
    out, layers = {}, bench.target.spaced_kv_layers(3)
    bench.also.append(WithStates(**drafter.config.model_dump(), also=layers))
    for name, extra in ((OWN_QUERIES, ()), (ORACLE_QUERIES, layers)):
        learner = learn_queries(drafter, bench.target, bench.store(TRAIN), extra, steps=steps, n_steps=n_steps,
                                batch_tokens=batch_tokens, quiet=bench.quiet)
        out[name] = ConversationCounts.of(stepwise_hits(learner, bench.store("held_out"), n_steps, quiet=bench.quiet))
    return out


def diagnose(bench: Bench, drafter: Drafter, record: RunRecord, *, texts: int = 48, query_steps: int = 200
             ) -> Diagnosis:
    """Everything on the held-out conversations; texts: how many of them for the attention."""
    n_steps, target, quiet = bench.profile.train.n_steps, bench.target, bench.quiet
    bench.also.append(drafter.config)
    batch_tokens = bench.profile.train.batch_tokens
    queries = _learned(bench, drafter, n_steps, query_steps, batch_tokens)
    store = bench.store("held_out")
    hits = interventions(drafter, store, n_steps, quiet=quiet)
    drift = None
    if drafter.config.reads_hidden:
        drift = [Drift(step=step, cosine=row["cosine"], norm=row["norm"])
                 for step, row in state_drift(drafter, store, n_steps).iterrows()]
    examples = bench.examples["held_out"][:texts]
    looked = query_error(drafter, target, [(torch.from_numpy(e.ids), torch.from_numpy(e.loss_mask)) for e in examples],
                         n_steps, quiet=quiet)
    return Diagnosis(
        experiment=record.experiment, profile=record.profile, seed=record.training.seed, run_created=record.created,
        target=bench.target_info(), texts=texts, regimes={name: ConversationCounts.of(h) for name, h in hits.items()},
        drift=drift, looking=_looking(looked),
        outcomes=[Outcome(branch=b, **row) for b, row in by_outcome(looked).iterrows()],
        query_steps=query_steps, query_tokens=query_steps * batch_tokens, queries=queries,
        code=describe_code(), machine=describe_machine(target.device), created=datetime.now(UTC))


def _looking(table: pd.DataFrame) -> list[Looking]:
    out = []
    for branch, rows in table.groupby("branch", sort=False):
        intervals, stale = interval_by(rows, "distance", "step"), rows.groupby("step")["stale"].mean()
        out += [Looking(branch=branch, step=step, distance=row["mean"], low=row["low"], high=row["high"],
                        stale=stale[step]) for step, row in intervals.iterrows()]
    return out


def diagnose_run(run: str | os.PathLike, results: str | os.PathLike, *, device: str | None = None, texts: int = 48,
                 query_steps: int = 200) -> tuple[Diagnosis, Path]:
    """Diagnose a run's best drafter and publish what came out.

    run: a folder of `kvshot train`, or a published checkpoint with its record beside it. Raises KvshotError for
    anything else.
    """
    run = Path(run)
    trained = (run / "best").is_dir()
    record = RunRecord.load(run / "record.json" if trained else run.with_name(run.name + ".json"))
    if record.training is None:
        raise KvshotError(f"the run in {run} trained nothing: give a run that `kvshot train` made")
    bench = Bench(profile(record.profile), device=device, experiments=[record.experiment])
    drafter, _ = load_drafter(run / "best" if trained else run, bench.target)
    out = diagnose(bench, drafter, record, texts=texts, query_steps=query_steps)
    path = Path(results) / record.profile / "diagnosis" / f"{record.experiment}-seed{record.training.seed}.json"
    out.save(path)
    return out, path

