"""The theory figures hold the numbers they were given."""

from __future__ import annotations

import re

import matplotlib
import numpy as np
import pandas as pd
import pytest
import torch

from kvshot import theory
from kvshot.analysis.compression import attention_maps
from kvshot.targets import load_target
from kvshot.theory import explained_figure, shift_by_layer, shift_by_third, shift_figure

matplotlib.use("Agg")


def test_figures_and_table():
    table = pd.DataFrame({"layer": [0, 0, 1, 1, 2, 2], "k": [0, 4] * 3, "suppressed": [.1, .2, .3, .4, .5, .6]})
    curve = pd.DataFrame({"mean": [.3, .4], "low": [.2, .3], "high": [.5, .6]}, index=pd.Index([0, 4], name="k"))
    (ax,) = shift_figure({"suppressed": curve}).axes
    assert ax.lines[0].get_ydata().tolist() == [.3, .4] and ax.get_ylim() == (0, 1)
    np.testing.assert_allclose(shift_by_layer(table).axes[0].collections[0].get_array().ravel(), table.suppressed)
    thirds = shift_by_third(table)
    assert thirds.loc["upper third", 4] == pytest.approx(.6) and len(thirds) == 3
    rows = pd.DataFrame({"source": ["a", "a", "b", "b"], "block": [0, 4] * 2, "keys": [.1, .2, .3, .4],
                         "values": [.5, .6, .7, .8]})
    keys, values = explained_figure(rows).axes
    assert [line.get_ydata().tolist() for line in values.lines] == [[.5, .6], [.7, .8]]
    assert [line.get_label() for line in keys.lines] == ["a", "b"]


def test_survival_figure_has_a_line_a_source():
    index = pd.MultiIndex.from_product([["state", "the cache"], [1, 4]], names=["source", "distance"])
    rates = pd.DataFrame({"r2": [0.4, 0.1, 1, 1], "r2_low": 0.0, "r2_high": 1.0, "right": [0.5, 0.1, 0.9, 0.9],
                          "right_low": 0.0, "right_high": 1.0}, index=index)
    left, right = theory.survival_figure(rates).axes
    assert [t.get_text() for t in left.get_legend().get_texts()] == ["state", "the cache"]
    assert [bars.lines[0].get_ydata().tolist() for bars in right.containers] == [[0.5, 0.1], [0.9, 0.9]]


def test_the_attention_slider_shades_by_the_heads_own_weights():
    target = load_target("smoke", dtype="float32", device="cpu")
    ids = torch.randint(3, 300, (40,), generator=torch.Generator().manual_seed(0))
    case = {"layer": 1, "head": 2, "position": 34, "token": 20, "before": 0.0, "after": 1.0}
    slider = theory.attention_slider(target, ids, case, (0, 3), around=48)
    assert slider.captions == ["query at t + 0", "query at t + 3"]
    (_, weights), = attention_maps(target, ids, (1,))
    for frame, k in zip(slider.frames, (0, 3), strict=True):
        spans = re.findall(r"rgba\(0,114,178,([\d.]+)\);(outline)?", frame)
        row = weights[2, 34 + k, 1:35]
        assert [float(a) for a, _ in spans] == pytest.approx(
            [round(20 * float(w)) * 0.035 for w in row / row.max()])
        assert [i for i, (_, framed) in enumerate(spans) if framed] == [20 - 1]
