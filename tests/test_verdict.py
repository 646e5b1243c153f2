"""A verdict is what the interval says, in both directions."""

from __future__ import annotations

import pytest

from kvshot.analysis import below, long_range_decay
from kvshot.errors import KvshotError
from kvshot.evaluation import Estimate, StepwiseHits, summarise


@pytest.mark.parametrize(("low", "high", "answer"), [
    (0.7, 0.8, "supported"), (0.9, 1.1, "undecided at this scale"), (1.05, 1.2, "not reproduced here"),
])
def test_below(low, high, answer):
    verdict = below("it falls", "ratio", Estimate(value=(low + high) / 2, low=low, high=high), 1.0)
    assert verdict.answer == answer and f"[{low:.3f}, {high:.3f}]" in str(verdict)


def test_no_interval_no_verdict():
    with pytest.raises(KvshotError, match="no interval"):
        below("it falls", "ratio", Estimate(value=0.5, low=None, high=None), 1.0)


def test_decay_is_seen_where_it_is_and_not_where_it_is_not():
    import numpy as np

    rng = np.random.default_rng(0)
    n, conversation = 4000, np.repeat(np.arange(40), 100)
    valid, oov = np.ones((n, 3), bool), np.zeros((n, 3), bool)
    falling = rng.random((n, 3)) < np.array([0.6, 0.5, 0.4])
    flat = rng.random((n, 3)) < 0.5
    assert long_range_decay(summarise(StepwiseHits(falling, valid, conversation, oov))).answer == "supported"
    assert long_range_decay(summarise(StepwiseHits(flat, valid, conversation, oov))).answer != "supported"
