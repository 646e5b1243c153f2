"""Claims name rows that exist, take the paper's differences from its tables, and answer only from records."""

from __future__ import annotations

import pytest

from kvshot import comparisons
from kvshot.errors import KvshotError
from kvshot.experiments import EXPERIMENTS
from kvshot.experiments.campaign import campaign_of
from kvshot.experiments.claims import CLAIMS, Claim, Finding, judge, overall, scorecard, span
from kvshot.paper import TABLE5, TABLE6

from .test_compare import record


def test_rows_exist_and_texts_differ():
    assert {c.a for c in CLAIMS} | {c.b for c in CLAIMS} <= set(EXPERIMENTS)
    assert len({(c.part, c.text) for c in CLAIMS}) == len(CLAIMS)
    # every row of the paper's tables decides something
    assert set(TABLE5) | set(TABLE6) - {"baseline"} <= {c.a for c in CLAIMS} | {c.b for c in CLAIMS}


def test_the_papers_differences():
    def printed(a, b, statistic):
        return Claim("hybrid", "", a, b, statistic).printed

    assert printed("kv-only-2", "kv-only-1", "mat") == pytest.approx(2.23 - 1.84)
    assert printed("kv-only-4", "eagle3", "retention") == pytest.approx(0.806 - 0.735)
    assert printed("eagle3", "kv-only-1", "alpha_marginal_0") == pytest.approx(0.638 - 0.494)
    assert printed("offline-ttt", "kv-only-2", "alpha_marginal_3") == pytest.approx(0.488 - 0.497)
    assert printed("hybrid-checkpoint", "eagle3-continued", "mat") is None
    for c in CLAIMS:  # a claim of the paper's own points the way its numbers do
        if c.whose == "paper":
            assert c.printed > 0, c


def test_missing_rows_leave_a_question_open():
    def found(*answers):
        return [Finding(CLAIMS[1], None, 0, a) for a in answers]

    yes, no, open_ = "supported", "not reproduced here", "undecided at this scale"
    assert overall(found(yes, yes)) == yes and overall(found(yes, open_)) == open_
    assert overall(found(yes, None)).startswith("not run yet (1 of 2")
    assert overall(found(no, None)) == no and overall(found(None, yes), "any") == yes
    assert overall(found(no, None), "any").startswith("not run yet")
    assert overall([]).startswith("not run yet")


def test_a_question_of_our_own_has_nothing_to_reproduce():
    ours = Claim("controls", "it helps", "eagle3", "mtp", "mat", "ours")
    several = [Finding(ours, None, 1, a) for a in ("supported", "not reproduced here", None)]
    assert [f.said for f in several] == ["yes", "no", "not run yet"]
    assert overall(several[:1]) == "yes" and overall(several[1:2]) == "no" and overall(several[:2], "any") == "yes"
    mixed = [several[0], Finding(CLAIMS[1], None, 1, "supported")]
    assert CLAIMS[1].whose == "paper" and overall(mixed) == "supported"
    table = comparisons.scorecard_table(mixed)
    assert table["whose"].tolist() == ["our question", "paper"] and table["answer"].tolist() == ["yes", "supported"]


def test_an_answer_needs_both_rows(tmp_path):
    claim = Claim("prediction 2", "deeper is better", "kv-only-2", "kv-only-1", "mat")
    folder = tmp_path / "smoke"
    folder.mkdir()
    assert judge(claim, campaign_of(folder)).answer is None
    for name, rate, seeds in (("kv-only-2", 0.6, (0, 1)), ("kv-only-1", 0.5, (0,))):
        for seed in seeds:
            record(name, rate, seed).save(folder / f"{name}-seed{seed}.json")
    finding = judge(claim, campaign_of(folder))
    assert finding.answer == "supported" and finding.seeds == 1 and finding.measured.difference.low > 0
    assert finding.by == f"{finding.measured.difference:+.3f}" and finding.by.startswith("+0.")
    other = judge(claim, campaign_of(folder), domain="human_eval")  # a profile without such text has no answer on it
    assert other.answer is None and other.by == other.said == "not run yet"
    assert span([other]) == "not run yet" and span([finding, other]) == finding.by.partition(" ")[0]
    findings = scorecard(tmp_path, "smoke", ["prediction 2"])
    table = comparisons.scorecard_table(findings)
    assert len(table) == len(findings) and (table["answer"] == "not run yet").sum() == len(findings) - 1
    assert table.loc["draft layer 2 adds to MAT", "paper"] == "+0.390"
    with pytest.raises(KvshotError, match="choose ablations"):
        scorecard(tmp_path, "smoke", ["prediction 9"])
