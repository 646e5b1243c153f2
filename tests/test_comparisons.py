"""Side-by-side figures and tables hold the numbers of the records."""

from __future__ import annotations

from datetime import UTC, datetime

import matplotlib
import pytest

from kvshot import comparisons
from kvshot.errors import KvshotError
from kvshot.experiments.claims import scorecard
from kvshot.experiments.compare import by_step, pooled
from kvshot.experiments.end_to_end import Calls, Domain, EndToEnd, place
from kvshot.experiments.record import CodeInfo, CurvePoint, MachineInfo, TargetInfo
from kvshot.viz import PALETTE
from tests.experiments.test_compare import record

matplotlib.use("Agg")


@pytest.fixture
def results(tmp_path):
    for name, rate, seeds in (("eagle3", 0.5, (0, 1)), ("kv-only-1", 0.45, (0,)), ("kv-only-2", 0.6, (0, 1))):
        for seed in seeds:
            r = record(name, rate, seed)
            r.training.curve = [CurvePoint(step=s, tokens=100 * s, loss=1, mat=1 + s / 10) for s in (2, 6, 10)]
            (tmp_path / "smoke").mkdir(exist_ok=True)
            r.save(tmp_path / "smoke" / f"{name}-seed{seed}.json")
    return tmp_path


def test_rows_and_tables(results):
    names = ["eagle3", "kv-only-1", "kv-only-2", "kv-only-4"]
    rows = comparisons.rows(names, results, "smoke")
    assert list(rows) == names[:3] and [len(r) for r in rows.values()] == [2, 1, 2]
    assert comparisons.missing_note(names, rows) == "Not run yet: KV-only, 4 layers."
    assert comparisons.missing_note(names[:3], rows) == "Every row has been run."
    table = comparisons.rows_table(rows)
    summary = pooled(rows["kv-only-2"])
    assert table.loc["KV-only, 2 layers", "MAT"].startswith(f"{summary.mat.value:.3f} [")
    assert table.loc["KV-only, 2 layers", ["seeds", "MAT, paper"]].tolist() == [2, "2.23"]
    assert comparisons.alpha_table(rows).loc["EAGLE-3, 1 layer"].tolist() == [
        f"{a:.3f}" for a in pooled(rows["eagle3"]).alpha]
    rising = comparisons.rising_table(rows)
    assert rising.loc["EAGLE-3, 1 layer"].tolist() == ["0.0 M", "1.600", "2.000", "+0.400", "40%"]
    rows["kv-only-1"][0].training.curve = rows["kv-only-1"][0].training.curve[:1]  # one check: nothing to compare with
    assert comparisons.rising_note(rows).split("\n") == [
        "2 of 3 rows still rose: by +0.000 (KV-only, 1 layer) to +0.400 (EAGLE-3, 1", "layer)."]
    alpha = pooled(rows["eagle3"]).alpha
    passed = comparisons.overtakes(rows, [0.9, 0.9, *(a - 0.01 for a in alpha[2:-1]), 0.3])
    assert passed.loc["EAGLE-3, 1 layer"].tolist() == ["2", f"{alpha[-1] - 0.3:+.3f}"]
    never = comparisons.overtakes(rows, [0.9] * len(alpha))["ahead from step"]
    assert never.tolist() == ["-"] * 3
    assert list(comparisons.seeds_table([r for rs in rows.values() for r in rs]).index) == [
        "EAGLE-3, 1 layer", "KV-only, 2 layers"]
    with pytest.raises(KvshotError, match="kvshot reproduce"):
        comparisons.rows(["mtp"], results, "smoke")
    record("kv-only-4", 0.5, 0, data="b").save(results / "smoke" / "kv-only-4-seed0.json")
    with pytest.raises(KvshotError, match="differ in their data"):
        comparisons.rows(names, results, "smoke")


def test_differences(results):
    rows = comparisons.rows(["eagle3", "kv-only-1", "kv-only-2"], results, "smoke")
    steps = comparisons.differences(rows, "eagle3", results, "smoke")
    assert list(steps) == ["kv-only-1", "kv-only-2"]
    expected = by_step(rows["kv-only-2"], rows["eagle3"], campaign=rows)
    (axes,) = comparisons.difference_figure(steps, "eagle3").axes
    drawn = [list(line.get_ydata()) for line in axes.lines]
    assert [d.difference.value for d in expected] in drawn
    (axes,) = comparisons.difference_figure(steps, "eagle3", list(rows)).axes
    assert [line.get_color() for line in axes.lines[:2]] == list(PALETTE[1:2]) * 2  # measured, and the paper's
    assert comparisons.difference_table(steps).loc[1, "KV-only, 2 layers"] == comparisons.signed(expected[1])
    with pytest.raises(KvshotError, match="no record of mtp"):
        comparisons.differences(rows, "mtp", results, "smoke")
    with pytest.raises(KvshotError, match="at least one"):
        comparisons.difference_figure({}, "eagle3")


def test_depth_and_forest(results):
    rows = comparisons.rows(["eagle3", "kv-only-1", "kv-only-2"], results, "smoke")
    depths = {1: pooled(rows["kv-only-1"]), 2: pooled(rows["kv-only-2"])}
    level = "EAGLE-3", pooled(rows["eagle3"])
    (axes,) = comparisons.depth_figure({"KV-only": depths}, {1: 1.84, 2: 2.23}, level).axes
    assert [d.mat.value for d in depths.values()] in [list(line.get_ydata()) for line in axes.lines]
    findings = scorecard(results, "smoke", ["prediction 2", "prediction 3"])
    (axes,) = comparisons.forest(findings).axes
    measured = [f for f in findings if f.measured is not None]
    assert len(axes.get_yticklabels()) == len(measured) == 5
    table = comparisons.scorecard_table(findings)
    assert (table["answer"] == "not run yet").sum() == len(findings) - 5


def test_end_to_end_tables(tmp_path):
    def measured(name, kept):
        shapes = {s: Calls(calls=[10, 20], kept=[kept, 2 * kept]) for s in (
            "tree (8, 10, 60)", *(f"chain {n}" for n in range(1, 9)))}
        return EndToEnd(experiment=name, profile="smoke", seed=0, run_created=datetime.now(UTC), max_new_tokens=9,
                        target=TargetInfo(name="t", weights_sha256="0" * 64), computed_in="float32",
                        domains={"held_out": Domain(prompts=2, tokens=9, otherwise=0, texts_sha256="1" * 64,
                                                    shapes=shapes)},
                        code=CodeInfo(version="0"), created=datetime.now(UTC),
                        machine=MachineInfo(cpu="c", cores=1, device="cpu", torch="2", transformers="5", python="3"))

    measured("eagle3", 15).save(place(tmp_path, "smoke", "eagle3"))
    measured("hybrid-checkpoint", 17).save(place(tmp_path, "smoke", "hybrid-checkpoint"))
    found = comparisons.end_to_end(["eagle3", "mtp", "hybrid-checkpoint"], tmp_path, "smoke")
    assert list(found) == ["eagle3", "hybrid-checkpoint"]
    table = comparisons.calls_table(found, "held_out", {"eagle3": 4.76})
    assert table.loc["EAGLE-3, 1 layer"].tolist() == ["1.50 [1.50, 1.50]", "4.76", *["1.50"] * 5]
    (axes,) = comparisons.chains_figure(found, "held_out").axes
    assert list(axes.lines[1].get_ydata()) == [1.7] * 8
    with pytest.raises(KvshotError, match="table4"):
        comparisons.end_to_end(["mtp"], tmp_path, "smoke")
