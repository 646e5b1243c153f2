"""Two rows of a table compared: the same columns, the same seeds, one interval over both."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

from kvshot.analysis.verdict import Answer, Verdict, positive
from kvshot.errors import KvshotError
from kvshot.evaluation.metrics import Estimate, PairedDifference, StepwiseSummary, paired_difference, pool, statistic_of
from kvshot.experiments.record import RunRecord
from kvshot.experiments.registry import EXPERIMENTS

Campaign = Mapping[str, Sequence[RunRecord]]  # the records of every row, by name, one a seed


@dataclass(frozen=True)
class Luck:
    """How much a statistic differs between training runs of a row, which differ in their seed only.

    sd: standard deviation, pooled over the rows that have several seeds; freedom: its degrees of freedom, runs minus
    rows. Few rows have more than one seed, so all are taken to vary alike.
    """

    sd: float
    freedom: int

    def half_width(self, seeds: int) -> float:
        """Of the 95 % interval of a difference between two rows of so many runs each: Student's t."""
        return float(stats.t.ppf(0.975, self.freedom)) * self.sd * math.sqrt(2 / seeds)


def luck(campaign: Campaign, statistic: str, *, domain: str = "held_out") -> Luck | None:
    """From the rows of a campaign; None where no row has a second seed.

    Raises KvshotError when the seeds of a row were made by different recipes or on different data.
    """
    squares, freedom = 0.0, 0
    for records in campaign.values():
        for other in records[1:]:
            check_comparable(records[0], other)
        counts = [r.evaluation[domain].counts for r in records if domain in r.evaluation]
        values = [statistic_of(c, statistic) for c in counts if c is not None]
        if len(values) > 1 and np.isfinite(values).all():
            squares += float(np.var(values) * len(values))
            freedom += len(values) - 1
    return Luck(math.sqrt(squares / freedom), freedom) if freedom else None


def paired(a: Sequence[RunRecord], b: Sequence[RunRecord], statistic: str, *, domain: str = "held_out",
           campaign: Campaign | None = None, n_boot: int = 2000) -> PairedDifference:
    """A statistic of experiment `a` minus that of `b`, over the seeds that both have (see `paired_difference`).

    campaign: its rows tell how much training runs vary, and that widens the interval, which is over conversations
    otherwise: the two half-widths add as squares. Raises KvshotError when the two share no seed, were made on other
    data or by another recipe, or keep no counts.
    """
    by_seed = [{r.training.seed: r for r in rows if r.training} for rows in (a, b)]
    seeds = sorted(set(by_seed[0]) & set(by_seed[1]))
    if not seeds:
        raise KvshotError("the two experiments have no seed in common: run `kvshot reproduce` for both")
    pairs = [(by_seed[0][s], by_seed[1][s]) for s in seeds]
    for x, y in pairs:
        check_comparable(x, y)
        for r in (x, y):
            if domain not in r.evaluation or r.evaluation[domain].counts is None:
                raise KvshotError(f"the record of {r.experiment} keeps no counts for {domain}: make it again")
    found = paired_difference([x.evaluation[domain].counts for x, _ in pairs],
                              [y.evaluation[domain].counts for _, y in pairs], statistic, n_boot=n_boot)
    varies, e = luck(campaign or {}, statistic, domain=domain), found.difference
    if varies is None or e.low is None:
        return found
    half = varies.half_width(len(pairs))
    wider = Estimate(value=e.value, low=e.value - math.hypot(e.value - e.low, half),
                     high=e.value + math.hypot(e.high - e.value, half))
    return found.model_copy(update={"difference": wider})


def check_comparable(x: RunRecord, y: RunRecord) -> None:
    """Raises KvshotError unless two rows differ in their drafters, and in what their experiments say, only."""
    for what, ours, theirs in (("data", x.data.sha256, y.data.sha256),
                               ("target", x.target.weights_sha256, y.target.weights_sha256),
                               ("draft vocabulary", *(r.drafter.get("draft_vocab_size") for r in (x, y))),
                               ("number of steps", x.training.steps, y.training.steps)):
        if ours != theirs:
            raise KvshotError(f"{x.experiment} and {y.experiment} differ in their {what}: compare rows of one "
                              "campaign only")
    if differ := _recipe_differences(x, y):
        raise KvshotError(f"{x.experiment} and {y.experiment} differ in {', '.join(differ)}: compare rows of one "
                          "campaign only, and run the older one again (`kvshot reproduce`)")


def greater(claim: str, difference: PairedDifference, names: tuple[str, str]) -> Verdict:
    """The claim that the first of `names` is ahead: supported or not when the interval says so."""
    d = difference.difference
    if d.low is None or d.high is None:
        raise KvshotError(f"{claim}: no interval: evaluate on at least two conversations")
    what = f"{difference.statistic} of {names[0]} minus {names[1]}"
    return Verdict(claim, what, d, positive(d.low, d.high))


def combine(answers: Sequence[Answer], rule: Literal["all", "any"] = "all") -> Answer:
    """One answer of a claim in several parts: "all" must hold, or "any" may."""
    if not answers:
        raise KvshotError("a claim without parts has no answer")
    decisive: Answer = "not reproduced here" if rule == "all" else "supported"
    otherwise: Answer = "supported" if rule == "all" else "not reproduced here"
    if decisive in answers:
        return decisive
    return otherwise if set(answers) == {otherwise} else "undecided at this scale"


def _recipe_differences(x: RunRecord, y: RunRecord) -> list[str]:
    """What of the training differs, but for what the experiments say should."""
    a, b = x.training.options, y.training.options
    meant = {"seed", "best_step", "validation_conversations", "eval_every"}
    for r in (x, y):
        if r.experiment in EXPERIMENTS:
            meant |= {*EXPERIMENTS[r.experiment].train}
    return sorted(key for key in {*a, *b} - meant if a.get(key) != b.get(key))


def by_step(a: Sequence[RunRecord], b: Sequence[RunRecord], *, domain: str = "held_out",
            campaign: Campaign | None = None, n_boot: int = 2000) -> list[PairedDifference]:
    """Acceptance of `a` minus that of `b` at every draft step, as `paired` gives it."""
    if not a or domain not in a[0].evaluation:
        raise KvshotError(f"no record of a row to compare, or none for {domain}: run `kvshot reproduce`")
    return [paired(a, b, f"alpha_marginal_{k}", domain=domain, campaign=campaign, n_boot=n_boot)
            for k in range(len(a[0].evaluation[domain].drafter.steps))]


def pooled(records: Sequence[RunRecord], *, domain: str = "held_out") -> StepwiseSummary:
    """One summary over the seeds of an experiment. Raises KvshotError when one keeps no counts."""
    counts = [r.evaluation[domain].counts for r in records if domain in r.evaluation]
    if not counts or None in counts or len(counts) < len(records):
        raise KvshotError(f"a record keeps no counts for {domain}: make it again")
    return pool(counts)
