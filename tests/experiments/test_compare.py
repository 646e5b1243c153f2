"""Paired comparisons of records: what may be compared, and what the interval says."""

from __future__ import annotations

import numpy as np
import pytest

from kvshot.errors import KvshotError
from kvshot.evaluation import ConversationCounts, StepwiseHits, paired_difference, summarise
from kvshot.experiments.compare import Luck, by_step, combine, greater, luck, paired
from kvshot.experiments.record import (
    CodeInfo,
    DataInfo,
    DomainEvaluation,
    MachineInfo,
    RunRecord,
    TargetInfo,
    TrainingInfo,
)


def hits(rate: float, seed: int, n_steps: int = 3) -> StepwiseHits:
    """600 columns of 30 conversations, right with one probability at each step."""
    shape = (600, n_steps)
    right = np.random.default_rng(7).random(shape) + 0.02 * np.random.default_rng(seed).standard_normal(shape) < rate
    return StepwiseHits(right, np.ones(shape, bool), np.repeat(np.arange(30), 20), np.zeros(shape, bool))


def record(name: str, rate: float, seed: int = 0, *, steps: int = 10, data: str = "a", counts=True, n_steps: int = 3
           ) -> RunRecord:
    h = hits(rate, seed, n_steps)
    return RunRecord(
        experiment=name, profile="smoke", drafter={}, target=TargetInfo(name="t", weights_sha256="0" * 64),
        data=DataInfo(name="d", sha256=data * 64, n_train_conversations=1, n_train_tokens=1, n_held_out_conversations=1,
                      n_held_out_tokens=1),
        training=TrainingInfo(steps=steps, tokens_seen=1, lr=1e-3, seed=seed, wall_seconds=1, tokens_per_second=1),
        evaluation={"held_out": DomainEvaluation(drafter=summarise(h, n_boot=2),
                                                 counts=ConversationCounts.of(h) if counts else None)},
        code=CodeInfo(version="0"), machine=MachineInfo(cpu="c", cores=1, device="cpu", torch="2", transformers="5",
                                                        python="3"))


def test_a_pair_is_matched_by_seed():
    a, b = [record("a", 0.6, s) for s in (2, 0, 1)], [record("b", 0.5, s) for s in (0, 1, 5)]
    got = paired(a, b, "mat", n_boot=50)
    assert got == paired_difference([hits(0.6, 0), hits(0.6, 1)], [hits(0.5, 0), hits(0.5, 1)], "mat", n_boot=50)


def test_verdicts_follow_the_interval():
    a, b = [record("a", 0.6)], [record("b", 0.5)]
    assert greater("a leads", paired(a, b, "mat"), ("a", "b")).answer == "supported"
    assert greater("b leads", paired(b, a, "mat"), ("b", "a")).answer == "not reproduced here"
    same = paired(a, [record("c", 0.6, 0)], "alpha_marginal_1")
    undecided = greater("equal", same, ("a", "c"))
    assert undecided.answer == "undecided at this scale" and undecided.estimate.value == 0
    assert str(undecided).startswith("equal: undecided at this scale (alpha_marginal_1 of a minus c = 0.000")


def test_the_luck_of_a_training_run_widens_the_interval():
    campaign = {"a": [record("a", 0.6, s) for s in (0, 1, 2)], "b": [record("b", 0.5, s) for s in (0, 1)],
                "c": [record("c", 0.7)]}
    values = [[r.evaluation["held_out"].drafter.mat.value for r in campaign[name]] for name in "ab"]
    squares = sum((x - sum(v) / len(v)) ** 2 for v in values for x in v)
    found = luck(campaign, "mat")
    assert found.freedom == 3 and found.sd == pytest.approx((squares / 3) ** 0.5)
    assert found.half_width(2) == pytest.approx(3.182446 * found.sd)  # Student's t of 3, times sqrt(2 / 2)
    assert luck({"c": campaign["c"]}, "mat") is None
    alone, wide = (paired(campaign["a"], campaign["b"], "mat", campaign=c).difference for c in (None, campaign))
    assert wide.value == alone.value
    assert wide.value - wide.low == pytest.approx(((alone.value - alone.low) ** 2 + found.half_width(2) ** 2) ** 0.5)
    assert wide.high - wide.value == pytest.approx(((alone.high - alone.value) ** 2 + found.half_width(2) ** 2) ** 0.5)
    with pytest.raises(KvshotError, match="differ in their data"):  # what another recipe changes is no luck
        luck(campaign | {"d": [record("d", 0.5), record("d", 0.5, 1, data="b")]}, "mat")
    steps = by_step(campaign["a"], campaign["b"], campaign=campaign)
    assert steps[1] == paired(campaign["a"], campaign["b"], "alpha_marginal_1", campaign=campaign)
    with pytest.raises(KvshotError, match="none for elsewhere"):
        by_step(campaign["a"], campaign["b"], domain="elsewhere")


def test_luck_covers_the_truth_about_95_times_in_100():
    """Rows of equal quality, a seed each, beside others with two: how often is their difference called zero?"""
    rng, inside = np.random.default_rng(3), 0
    for _ in range(2000):
        x = rng.normal(0, 0.01, (6, 2))
        found = Luck(sd=float((x.var(1) * 2).sum() / 6) ** 0.5, freedom=6)
        a, b = rng.normal(0, 0.01, 2)
        inside += abs(a - b) <= found.half_width(1)
    assert 0.935 < inside / 2000 < 0.965


@pytest.mark.parametrize(("other", "message"), [
    (dict(seed=3), "no seed in common"), (dict(steps=20), "number of steps"), (dict(data="b"), "differ in their data"),
    (dict(counts=False), "keeps no counts"),
])
def test_what_may_not_be_compared(other, message):
    with pytest.raises(KvshotError, match=message):
        paired([record("a", 0.6)], [record("b", 0.5, **other)], "mat")


def test_parts_of_a_claim():
    yes, no, open_ = "supported", "not reproduced here", "undecided at this scale"
    assert combine([yes, yes]) == yes and combine([yes, no]) == no and combine([yes, open_]) == open_
    assert combine([no, yes], "any") == yes and combine([no, open_], "any") == open_ and combine([no], "any") == no
    with pytest.raises(KvshotError, match="without parts"):
        combine([])


def test_rows_of_another_recipe_are_refused():
    def trained(name, **options):
        r = record(name, 0.5)
        r.training.options.update({"lr": 1e-3, "n_steps": 7, "seed": 0, **options})
        return [r]

    assert paired(trained("eagle3"), trained("mtp", n_steps=1), "mat").difference.value == 0  # its own: meant
    with pytest.raises(KvshotError, match="differ in lr: compare rows of one campaign"):
        paired(trained("eagle3"), trained("kv-only-1", lr=2e-3), "mat")
    with pytest.raises(KvshotError, match="n_steps"):
        paired(trained("eagle3"), trained("kv-only-1", n_steps=1), "mat")
