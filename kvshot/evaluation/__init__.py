"""How good a drafter is: step-wise acceptance, intervals, and the n-gram yardstick."""

from kvshot.evaluation.decode import Decoded, DecodeReport, decode, for_generate, plain_decode
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
    pool,
    retention,
    summarise,
)
from kvshot.evaluation.ngram import NgramModel, ngram_hits
from kvshot.evaluation.stepwise import stepwise_hits
from kvshot.evaluation.tree import TreeShape

__all__ = [
    "ConversationCounts",
    "DecodeReport",
    "Decoded",
    "Estimate",
    "NgramModel",
    "PairedDifference",
    "Rate",
    "StepSummary",
    "StepwiseHits",
    "StepwiseSummary",
    "TreeShape",
    "decode",
    "for_generate",
    "mat",
    "ngram_hits",
    "paired_difference",
    "plain_decode",
    "pool",
    "retention",
    "stepwise_hits",
    "summarise",
]
