"""Two rows of a table compared: the same columns, the same seeds, one interval over both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from kvshot.analysis.verdict import Answer, Verdict, positive
from kvshot.errors import KvshotError
from kvshot.evaluation.metrics import PairedDifference, StepwiseSummary, paired_difference, pool
from kvshot.experiments.profiles import PROFILES
from kvshot.experiments.record import RunRecord
from kvshot.experiments.registry import EXPERIMENTS


def paired(a: Sequence[RunRecord], b: Sequence[RunRecord], statistic: str, *, domain: str = "held_out",
           n_boot: int = 2000) -> PairedDifference:
    """A statistic of experiment `a` minus that of `b`, over the seeds that both have (see `paired_difference`).

    Raises KvshotError when they share no seed, were made on other data or by another recipe, or keep no counts.
    """
    by_seed = [{r.training.seed: r for r in rows if r.training} for rows in (a, b)]
    seeds = sorted(set(by_seed[0]) & set(by_seed[1]))
    if not seeds:
        raise KvshotError("the two experiments have no seed in common: run `kvshot reproduce` for both")
    pairs = [(by_seed[0][s], by_seed[1][s]) for s in seeds]
    for x, y in pairs:
        for what, ours, theirs in (("data", x.data.sha256, y.data.sha256),
                                   ("target", x.target.weights_sha256, y.target.weights_sha256),
                                   ("number of steps", x.training.steps, y.training.steps)):
            if ours != theirs:
                raise KvshotError(f"{x.experiment} and {y.experiment} differ in their {what}: compare rows of one "
                                  "campaign only")
        if differ := _recipe_differences(x, y):
            raise KvshotError(f"{x.experiment} and {y.experiment} differ in {', '.join(differ)}: compare rows of one "
                              "campaign only, and run the older one again (`kvshot reproduce`)")
        for r in (x, y):
            if domain not in r.evaluation or r.evaluation[domain].counts is None:
                raise KvshotError(f"the record of {r.experiment} keeps no counts for {domain}: make it again")
    return paired_difference([x.evaluation[domain].counts for x, _ in pairs],
                             [y.evaluation[domain].counts for _, y in pairs], statistic, n_boot=n_boot)


def greater(claim: str, difference: PairedDifference, names: tuple[str, str], *, by: float = 0.0) -> Verdict:
    """The claim that the first of `names` is ahead by more than `by`: supported or not when the interval says so."""
    d = difference.difference
    if d.low is None or d.high is None:
        raise KvshotError(f"{claim}: no interval: evaluate on at least two conversations")
    what = f"{difference.statistic} of {names[0]} minus {names[1]}"
    return Verdict(claim, what, d, positive(d.low - by, d.high - by))


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
    """What of the training differs, but for what the experiments or their families say should."""
    a, b = x.training.options, y.training.options
    meant = {"seed", "best_step", "validation_conversations", "eval_every"}
    for r in (x, y):
        if r.experiment in EXPERIMENTS:
            meant |= {*EXPERIMENTS[r.experiment].train}
        if r.profile in PROFILES:
            meant |= {key for family in PROFILES[r.profile].families.values() for key in family}
    return sorted(key for key in {*a, *b} - meant if a.get(key) != b.get(key))


def by_step(a: Sequence[RunRecord], b: Sequence[RunRecord], *, domain: str = "held_out", n_boot: int = 2000
            ) -> list[PairedDifference]:
    """Acceptance of `a` minus that of `b` at every draft step, as `paired` gives it."""
    n_steps = len(a[0].evaluation[domain].drafter.steps) if a and domain in a[0].evaluation else 0
    return [paired(a, b, f"alpha_marginal_{k}", domain=domain, n_boot=n_boot) for k in range(n_steps)]


def pooled(records: Sequence[RunRecord], *, domain: str = "held_out") -> StepwiseSummary:
    """One summary over the seeds of an experiment. Raises KvshotError when one keeps no counts."""
    counts = [r.evaluation[domain].counts for r in records if domain in r.evaluation]
    if not counts or None in counts or len(counts) < len(records):
        raise KvshotError(f"a record keeps no counts for {domain}: make it again")
    return pool(counts)
