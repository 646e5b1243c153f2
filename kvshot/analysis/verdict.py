"""Verdicts computed from records: supported, not reproduced here, or undecided at this scale."""

from __future__ import annotations

from typing import Literal, NamedTuple

from kvshot.errors import KvshotError
from kvshot.evaluation.metrics import Estimate, StepwiseSummary

Answer = Literal["supported", "not reproduced here", "undecided at this scale"]


class Verdict(NamedTuple):
    """A claim of the paper, the number that decides it here, and the answer."""

    claim: str
    statistic: str
    estimate: Estimate
    answer: Answer

    def __str__(self) -> str:
        e = self.estimate
        interval = f"95 % interval [{e.low:.3f}, {e.high:.3f}]"
        return f"{self.claim}: {self.answer} ({self.statistic} = {e.value:.3f}, {interval})"


def positive(low: float | None, high: float | None) -> Answer:
    """Of a difference that is claimed to be positive, by its interval."""
    if low is None or high is None:
        return "undecided at this scale"
    return "supported" if low > 0 else "not reproduced here" if high < 0 else "undecided at this scale"


def below(claim: str, statistic: str, estimate: Estimate, bound: float) -> Verdict:
    """Supported when the whole interval lies below `bound`, not reproduced when it lies above."""
    if estimate.low is None or estimate.high is None:
        raise KvshotError(f"{claim}: the record has no interval: evaluate on at least two conversations")
    return Verdict(claim, statistic, estimate, positive(bound - estimate.high, bound - estimate.low))


def long_range_decay(summary: StepwiseSummary) -> Verdict:
    """The paper's Fig. 1b: a drafter that reuses hidden states accepts less at the last step than at the first."""
    last = len(summary.steps) - 1
    return below("hidden-state drafters decay over draft steps", f"retention α{last}/α0", summary.retention, 1.0)
