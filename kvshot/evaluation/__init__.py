"""How good a drafter is: step-wise acceptance, intervals, and the n-gram yardstick."""

from kvshot.evaluation.metrics import (
    ConversationCounts,
    Estimate,
    PairedDifference,
    Rate,
    StepSummary,
    StepwiseHits,
    StepwiseSummary,
    mat,
    paired_difference,
    retention,
    summarise,
)
from kvshot.evaluation.ngram import NgramModel, ngram_hits
from kvshot.evaluation.stepwise import stepwise_hits

__all__ = [
    "ConversationCounts",
    "Estimate",
    "NgramModel",
    "PairedDifference",
    "Rate",
    "StepSummary",
    "StepwiseHits",
    "StepwiseSummary",
    "mat",
    "ngram_hits",
    "paired_difference",
    "retention",
    "stepwise_hits",
    "summarise",
]
