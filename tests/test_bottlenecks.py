"""Tables and figures of the bottleneck pages say what the probes and diagnoses hold."""

from __future__ import annotations

import matplotlib
import numpy as np
import pandas as pd
import pytest

from kvshot import bottlenecks
from kvshot.analysis.gradients import who_contributes
from kvshot.errors import KvshotError
from kvshot.targets import load_target
from kvshot.training.probes import save_probes

matplotlib.use("Agg")


@pytest.fixture
def probes():
    steps = np.arange(1, 101)
    rows = []
    for s in steps:
        row = {"step": s, "gate.0": 0.5 / s, "gate.1": 0.3 / s, "norm.merge": 1.0}
        for branch in ("self_attn", "cross_attn"):
            for p in "qkv":
                row[f"norm.{branch}.{p}"] = 2.0 if branch == "self_attn" else 1.0
                if s % 50 == 0:
                    row |= {f"rank.{branch}.{p}": float(s), f"rows.{branch}.{p}": 40.0, f"shared.{branch}.{p}": 9.0}
        if s % 50 == 0:
            row |= {f"gate.bin.{i}": float(i == 0) * 60 + float(i == 10) * 20 for i in range(20)}
        rows.append(row)
    return pd.DataFrame(rows).set_index("step")


def test_the_mean_gate_is_figure_4s(probes):
    gate = bottlenecks.mean_gate(probes)
    assert gate["raw"].iloc[0] == pytest.approx(0.4) and gate["raw"].iloc[9] == pytest.approx(0.04)
    ema = gate["ema"]
    weights = 0.98 ** np.arange(5)[::-1]
    assert ema.iloc[4] == pytest.approx((weights * gate["raw"][:5]).sum() / weights.sum())
    with pytest.raises(KvshotError, match="no gate"):
        bottlenecks.mean_gate(probes[["norm.merge"]])


def test_tables_and_figures(probes):
    runs = {"hybrid-checkpoint": probes, "hybrid-random": probes}
    table = bottlenecks.gate_table(runs)
    assert table.iloc[0]["start"] == "0.400" and "step 100" in table.iloc[0]["lowest"]
    shares = bottlenecks.gate_shares(probes)
    assert shares.loc[50].tolist() == ["75 %", "0 %", "0 %", "0 %", "25 %"]
    assert bottlenecks.gate_slider(probes).captions == ["step 50", "step 100"]
    path = bottlenecks.branch_gradients(probes)
    assert path["ratio"].tolist() == pytest.approx([0.5] * 100)
    tenths = bottlenecks.path_table(runs)
    assert len(tenths) == 10 and tenths.index[9] == "90 to 100 %" and tenths.iloc[0, 1] == "0.500"
    ranks = bottlenecks.gradient_table({"eagle3": probes})
    assert ranks.iloc[1].tolist() == ["2.000", "40", "9", "100"] and ranks.index[1] == ("EAGLE-3, 1 layer", "W_K")
    for figure in (bottlenecks.gate_figure(runs), bottlenecks.starvation_figure(runs), bottlenecks.rank_figure(runs)):
        assert figure.axes[0].get_xlabel()


def test_panels_that_share_an_axis_show_every_line_whole(probes):
    low = probes.copy()
    low[[c for c in low if c.startswith("rank.")]] /= 10
    figure = bottlenecks.rank_figure({"eagle3": low, "kv-only-2": probes})
    for ax in figure.axes:
        assert all(ax.get_ylim()[1] >= max(line.get_ydata()) for line in ax.lines)


def test_probes_are_found_by_experiment(tmp_path, probes):
    save_probes(tmp_path / "laptop/probes/mtp-seed1.csv.xz", probes.reset_index().to_dict("records"))
    found = bottlenecks.probes_of(["mtp"], tmp_path, "laptop")
    assert list(found) == ["mtp"] and len(found["mtp"]) == 100
    with pytest.raises(KvshotError, match="no probes of eagle3"):
        bottlenecks.probes_of(["eagle3", "mtp"], tmp_path, "laptop")


def test_one_column_by_hand():
    """Its own memory brings a drafter the entries of all columns before; the target's none."""
    table = who_contributes(load_target("smoke", dtype="float32", device="cpu"), length=24, n_steps=3)
    assert table.loc["EAGLE-3"].tolist() == [3, 12 + 3, 12 + 3] and table.loc["KV-only"].tolist() == [3, 3, 3]
