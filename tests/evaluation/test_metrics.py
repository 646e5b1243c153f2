from __future__ import annotations

import math

import numpy as np
import pytest

from kvshot.errors import KvshotError
from kvshot.evaluation import (
    ConversationCounts,
    Estimate,
    StepwiseHits,
    StepwiseSummary,
    mat,
    paired_difference,
    pool,
    retention,
    summarise,
)
from kvshot.evaluation.metrics import interval, statistic_of

K = 4


def random_hits(seed: int = 0, n: int = 300, n_conversations: int = 12, full: bool = False) -> StepwiseHits:
    rng = np.random.default_rng(seed)
    length = np.full(n, K) if full else rng.integers(1, K + 1, n)
    valid = np.arange(K) < length[:, None]
    oov = rng.random((n, K)) < 0.1
    hits = (rng.random((n, K)) < [0.8, 0.7, 0.6, 0.5]) & ~oov
    conversation = np.sort(rng.integers(0, n_conversations, n)) * 3 + 5  # numbers need not be consecutive
    return StepwiseHits(hits & valid, valid, conversation, oov & valid)


def loop_counts(h: StepwiseHits, k: int) -> dict[str, tuple[int, int]]:
    """Numerators and denominators of the definitions, one column at a time."""
    n = dict.fromkeys(("marginal", "joint", "conditional", "oov"), (0, 0))

    def add(name, right):
        n[name] = (n[name][0] + bool(right), n[name][1] + 1)

    for hit, valid, oov in zip(h.hits.tolist(), h.valid.tolist(), h.oov.tolist(), strict=True):
        if valid[k]:
            add("marginal", hit[k])
            add("oov", oov[k])
        if all(valid[: k + 1]):
            add("joint", all(hit[: k + 1]))
            if all(hit[:k]):
                add("conditional", hit[k])
    return n


@pytest.mark.parametrize("ragged", [False, True])
def test_rates_equal_plain_loops(ragged):
    h = random_hits()
    if ragged:  # a column may also lack an early step: then it cannot count for joint or conditional later
        rng = np.random.default_rng(9)
        valid = rng.random(h.valid.shape) < 0.7
        h = StepwiseHits(rng.random(valid.shape) < 0.7, valid, h.conversation, np.zeros_like(valid))
    summary = summarise(h, n_boot=20)
    for k, step in enumerate(summary.steps):
        for name, expected in loop_counts(h, k).items():
            rate = getattr(step, "oov" if name == "oov" else f"alpha_{name}")
            assert (rate.numerator, rate.denominator) == expected, (k, name)
            assert rate.value == expected[0] / expected[1]
    assert summary.n_columns == 300 and summary.n_conversations == 12


def test_mat_and_retention_equal_plain_loops():
    summary = summarise(random_hits(), n_boot=20)
    product, expected = 1.0, 1.0
    for alpha in summary.alpha:
        product *= alpha
        expected += product
    assert summary.mat.value == pytest.approx(expected, abs=1e-12)
    assert mat(summary.alpha) == pytest.approx(expected, abs=1e-12)
    joint = [step.alpha_joint.value for step in summary.steps]
    assert summary.mat_joint.value == pytest.approx(1 + sum(joint), abs=1e-12)
    assert summary.retention.value == pytest.approx(summary.alpha[-1] / summary.alpha[0], abs=1e-12)
    assert retention([[0.5, 0.25], [0.4, 0.4]]).tolist() == [0.5, 1.0]


def test_joint_mat_is_the_mean_accepted_length_where_every_step_is_supervised():
    h = random_hits(full=True)
    accepted = [next((k for k in range(K) if not hit[k]), K) for hit in h.hits.tolist()]
    assert summarise(h, n_boot=2).mat_joint.value == pytest.approx(
        1 + sum(accepted) / len(accepted), abs=1e-12
    )


def test_identities_on_the_same_columns():
    summary = summarise(random_hits(full=True), n_boot=2)
    product = 1.0
    for step in summary.steps:
        assert step.alpha_joint.value <= step.alpha_marginal.value
        assert step.alpha_joint.numerator <= step.alpha_conditional.denominator
        product *= step.alpha_conditional.value
        assert product == pytest.approx(step.alpha_joint.value, abs=1e-12)
    first = summary.steps[0]
    assert first.alpha_marginal.value == first.alpha_joint.value == first.alpha_conditional.value
    assert summary.steps[-1].alpha_joint.value < summary.steps[-1].alpha_marginal.value


def test_independent_steps_make_both_mats_agree():
    """With independent hits joint alpha is the product of marginals, so the two MATs estimate one number."""
    summary = summarise(random_hits(seed=1, n=40_000, full=True), n_boot=2)
    assert summary.mat.value == pytest.approx(summary.mat_joint.value, abs=0.02)


def test_intervals_contain_the_point_estimate_and_repeat():
    h = random_hits()
    summary = summarise(h, seed=3)
    rates = [getattr(s, f"alpha_{n}") for s in summary.steps for n in ("marginal", "joint", "conditional")]
    for estimate in (*rates, summary.mat, summary.mat_joint, summary.retention):
        assert estimate.low < estimate.value < estimate.high
    assert summarise(h, seed=3) == summary
    assert summarise(h, seed=4) != summary


def test_bootstrap_equals_resampling_rows_in_plain_loops():
    """Weighting per-conversation counts is the same as copying whole conversations."""
    h = random_hits()
    names = np.unique(h.conversation)
    draws = np.random.default_rng(0).multinomial(len(names), np.full(len(names), 1 / len(names)), size=50)
    values = []
    for draw in draws:
        rows = []
        for conversation, times in zip(names, draw, strict=True):
            rows += times * np.flatnonzero(h.conversation == conversation).tolist()
        values.append(mat(h.hits[rows].sum(0) / h.valid[rows].sum(0)))
    low, high = np.quantile(values, [0.025, 0.975])
    summary = summarise(h, n_boot=50, seed=0)
    assert (summary.mat.low, summary.mat.high) == (pytest.approx(low), pytest.approx(high))


def simulate(rng: np.random.Generator, n_conversations: int = 40, n_each: int = 15) -> StepwiseHits:
    """Conversations differ in difficulty (Beta with mean 0.6), so their columns are correlated."""
    p = rng.beta(6, 4, n_conversations)
    hits = rng.random((n_conversations, n_each)) < p[:, None]
    hits = hits.reshape(-1, 1)
    return StepwiseHits(
        hits, np.ones_like(hits), np.repeat(np.arange(n_conversations), n_each), np.zeros_like(hits)
    )


def test_interval_covers_the_truth_about_95_times_in_100():
    rng = np.random.default_rng(0)
    runs, covered, naive = 300, 0, 0
    for _ in range(runs):
        rate = summarise(simulate(rng), n_boot=200).steps[0].alpha_marginal
        covered += rate.low <= 0.6 <= rate.high
        naive += abs(rate.value - 0.6) <= 1.96 * math.sqrt(0.24 / rate.denominator)
    assert 0.90 <= covered / runs <= 0.98
    assert naive / runs < 0.85  # what treating columns as independent would have claimed


@pytest.mark.parametrize("statistic, wider", [(np.mean, 1.0), (np.median, math.sqrt(math.pi / 2))])
def test_interval_of_texts_is_as_wide_as_theory_says(statistic, wider):
    values = np.random.default_rng(0).normal(3.0, 2.0, (400, 2)) * [1.0, 10.0]
    low, high = interval(values, statistic, n_boot=4000)
    expected = 2 * 1.96 * 2.0 * wider / math.sqrt(400) * np.array([1.0, 10.0])
    np.testing.assert_allclose(high - low, expected, rtol=0.15)
    assert (low < statistic(values, axis=0)).all() and (statistic(values, axis=0) < high).all()
    assert np.isnan(interval(values[:1], statistic)).all()


def test_an_estimate_prints_with_its_interval_where_it_has_one():
    assert f"{Estimate(value=1.2345, low=1.2, high=1.268):.3f}" == "1.234 [1.200, 1.268]"
    assert f"{Estimate(value=0.5, low=-0.25, high=1):+.2f}" == "+0.50 [-0.25, +1.00]"
    assert f"{Estimate(value=1.5, low=None, high=None):.1f}" == "1.5"
    assert f"{Estimate(value=None, low=None, high=None):.1f}" == "undefined"


def test_out_of_vocabulary_is_a_miss_and_stays_in_the_denominator():
    hits = np.array([[True], [False], [False], [True]])
    oov = np.array([[False], [True], [True], [False]])
    step = summarise(StepwiseHits(hits, np.ones_like(hits), np.arange(4), oov), n_boot=2).steps[0]
    assert (step.alpha_marginal.numerator, step.alpha_marginal.denominator) == (2, 4)
    assert (step.oov.numerator, step.oov.denominator) == (2, 4)
    with pytest.raises(ValueError, match="out-of-vocabulary"):
        StepwiseHits(hits, np.ones_like(hits), np.arange(4), hits)


def test_undefined_is_none_not_a_number():
    valid = np.ones((3, 2), dtype=bool)
    summary = summarise(StepwiseHits(~valid, valid, np.arange(3), ~valid), n_boot=5)
    rate = summary.steps[1].alpha_conditional
    assert (rate.value, rate.low, rate.high, rate.denominator) == (None, None, None, 0)
    assert summary.retention.value is None and summary.mat.value == 1.0
    alone = summarise(StepwiseHits(valid, valid, np.zeros(3, dtype=np.int64), ~valid), n_boot=5)
    assert alone.mat.value == 3.0 and alone.mat.low is None
    assert StepwiseSummary.model_validate_json(summary.model_dump_json()) == summary


def test_bad_input():
    valid = np.ones((3, 2), dtype=bool)
    with pytest.raises(KvshotError, match="step 1: evaluate on longer answers"):
        short = valid & [True, False]
        summarise(StepwiseHits(short, short, np.arange(3), ~valid))
    with pytest.raises(KvshotError, match="no column"):
        summarise(StepwiseHits(valid[:0], valid[:0], np.arange(0), valid[:0]))
    with pytest.raises(ValueError, match="shape"):
        StepwiseHits(valid, valid[:2], np.arange(3), valid)
    with pytest.raises(ValueError, match="boolean"):
        StepwiseHits(valid.astype(int), valid, np.arange(3), ~valid)


def test_concat_adds_rows():
    a, b = random_hits(0), random_hits(1)
    both = summarise(StepwiseHits.concat([a, b]), n_boot=2).steps[2].alpha_joint
    expected = [loop_counts(h, 2)["joint"] for h in (a, b)]
    assert (both.numerator, both.denominator) == tuple(map(sum, zip(*expected, strict=True)))


def test_paired_difference_is_narrower_than_unpaired():
    rng = np.random.default_rng(2)
    a = simulate(rng)
    worse = a.hits & (rng.random(a.hits.shape) < 0.95)
    b = StepwiseHits(worse, a.valid, a.conversation, a.oov)
    paired = paired_difference(a, b, "alpha_marginal_0")
    alone = summarise(a).steps[0].alpha_marginal, summarise(b).steps[0].alpha_marginal
    assert paired.difference.value == pytest.approx(alone[0].value - alone[1].value)
    assert 0 < paired.difference.low < paired.difference.value < paired.difference.high
    assert paired.difference.high - paired.difference.low < 0.5 * (alone[0].high - alone[0].low)


@pytest.mark.parametrize("statistic", ["mat", "mat_joint", "retention", "alpha_conditional_2", "oov_3"])
def test_paired_difference_matches_the_summaries(statistic):
    a, b = random_hits(0), random_hits(0)
    keep = np.random.default_rng(4).random(a.hits.shape) < 0.9
    b = StepwiseHits(a.hits & keep, a.valid, a.conversation, a.oov)
    result = paired_difference(a, b, statistic, n_boot=30)
    for side, h in ((result.a, a), (result.b, b)):
        summary = summarise(h, n_boot=2)
        name, _, step = statistic.rpartition("_")
        expected = getattr(summary.steps[int(step)], name) if step.isdigit() else getattr(summary, statistic)
        assert side == pytest.approx(expected.value)
    assert result.difference.value == pytest.approx(result.a - result.b)
    same = paired_difference(a, a, statistic, n_boot=30).difference
    assert (same.value, same.low, same.high) == (0, 0, 0)


def test_packed_counts_compare_like_the_hits_they_came_from():
    a = random_hits(0)
    keep = np.random.default_rng(4).random(a.hits.shape) < 0.9
    b = StepwiseHits(a.hits & keep, a.valid, a.conversation, a.oov)
    packed = [ConversationCounts.model_validate_json(ConversationCounts.of(x).model_dump_json()) for x in (a, b)]
    for statistic in ("mat", "retention", "alpha_joint_2"):
        assert paired_difference(*packed, statistic, n_boot=50) == paired_difference(a, b, statistic, n_boot=50)
    with pytest.raises(KvshotError, match="different columns"):
        paired_difference(packed[0], random_hits(1))
    with pytest.raises(KvshotError, match="damaged"):
        packed[0].model_copy(update={"packed": packed[0].packed[:-8]}).table()


def test_counts_of_seeds_add_up_and_conversations_alone_are_resampled():
    rng = np.random.default_rng(5)
    a = simulate(rng)
    worse = StepwiseHits(a.hits & (rng.random(a.hits.shape) < 0.9), a.valid, a.conversation, a.oov)
    one, twice = paired_difference(a, worse), paired_difference([a, a], [worse, worse])
    assert (twice.a, twice.b) == (one.a, one.b)
    assert twice.difference.low == pytest.approx(one.difference.low)
    split = paired_difference([a, worse], [worse, a])
    assert split.difference.low == split.difference.value == split.difference.high == 0
    assert statistic_of(worse, "retention") == paired_difference(a, worse, "retention").b
    with pytest.raises(KvshotError, match="different columns"):
        paired_difference([a, a], [worse])
    with pytest.raises(KvshotError, match="at least one"):
        paired_difference([], [])


def test_seeds_pool_into_one_summary():
    hits = [random_hits(seed=s) for s in (3, 4)]
    valid = hits[0].valid
    hits = [StepwiseHits(h.hits & valid, valid, hits[0].conversation, h.oov & valid) for h in hits]
    counts = [ConversationCounts.of(h) for h in hits]
    one = pool(counts[:1], n_boot=50, seed=5)
    assert one == summarise(hits[0], n_boot=50, seed=5)
    both = pool(counts, n_boot=50)
    for k, step in enumerate(both.steps):
        assert step.alpha_marginal.numerator == sum(int((h.hits & h.valid)[:, k].sum()) for h in hits)
        assert step.alpha_marginal.denominator == 2 * int(valid[:, k].sum())
        assert step.alpha_marginal.low <= step.alpha_marginal.value <= step.alpha_marginal.high
    assert both.mat.value == pytest.approx(mat(both.alpha))
    # twice the same seed knows no more, and no less
    twice = pool([counts[0], counts[0]], n_boot=50, seed=5)
    assert [twice.mat.low, twice.mat.high] == pytest.approx([one.mat.low, one.mat.high])
    other = random_hits(seed=9)
    with pytest.raises(KvshotError, match="different columns"):
        pool([counts[0], ConversationCounts.of(other)])


def test_paired_difference_refuses():
    a, b = random_hits(0), random_hits(1)
    with pytest.raises(KvshotError, match="different columns"):
        paired_difference(a, b)
    for statistic in ("speed", "mat_3", "alpha_marginal", ""):
        with pytest.raises(KvshotError, match="unknown statistic"):
            paired_difference(a, a, statistic)
    with pytest.raises(KvshotError, match="only 4 steps"):
        paired_difference(a, a, "oov_4")
