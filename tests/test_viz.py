"""Figures hold the numbers they were given, and labels that do not overlap."""

import itertools
import json
from types import SimpleNamespace

import matplotlib
import numpy as np
import pytest

from kvshot.drafters import Round
from kvshot.errors import KvshotError
from kvshot.evaluation import DecodeReport, StepwiseHits, summarise
from kvshot.viz import (
    Decay,
    alpha_decay,
    answer_decoding_table,
    decay_table,
    decode_table,
    learning_curve,
    looks,
    rates_table,
    recipe_table,
    round_table,
    rounds_table,
    set_style,
    summary_table,
)

matplotlib.use("Agg")

OURS = Decay("ours", [0.7, 0.6, 0.5], [0.68, 0.57, 0.46], [0.72, 0.63, 0.54], n=1234)
PAPER = Decay("paper", [0.74, 0.69, 0.65], kind="paper")
NGRAM = Decay("n-gram", [0.3, 0.3, 0.3], kind="reference")


def test_lines_and_bands_are_the_numbers():
    (axes,) = alpha_decay([OURS, PAPER, NGRAM]).axes
    for line, series in zip(axes.lines, [OURS, PAPER, NGRAM], strict=True):
        assert list(line.get_xdata()) == [0, 1, 2]
        assert list(line.get_ydata()) == list(series.alpha)
    assert [line.get_linestyle() for line in axes.lines] == ["-", "--", ":"]
    (band,) = axes.collections
    corners = {tuple(v) for v in np.round(band.get_paths()[0].vertices, 6)}
    assert {(0, 0.68), (1, 0.57), (2, 0.46), (0, 0.72), (1, 0.63), (2, 0.54)} <= corners
    assert [t.get_text() for t in axes.texts if "ours" in t.get_text()] == ["ours\nn = 1,234"]
    assert axes.get_xlabel() and axes.get_ylabel()


def test_series_from_an_evaluation():
    valid = np.ones((4, 2), dtype=bool)
    valid[3, 1] = False
    hits = np.array([[1, 0], [1, 1], [0, 0], [1, 0]], dtype=bool)
    columns = StepwiseHits(hits, valid, np.array([0, 0, 1, 1]), np.zeros_like(hits))
    summary = summarise(columns, n_boot=50)
    series = Decay.from_summary("ours", summary)
    assert (series.alpha, series.n, series.kind) == ([3 / 4, 1 / 3], 4, "measured")
    assert series.low[0] == summary.steps[0].alpha_marginal.low
    assert series.high[1] == summary.steps[1].alpha_marginal.high

    alone = StepwiseHits(hits, valid, np.zeros(4, dtype=int), np.zeros_like(hits))
    assert Decay.from_summary("one conversation", summarise(alone, n_boot=50)).low is None


@pytest.mark.parametrize("last", [[0.5, 0.5, 0.5, 0.5], [0.5, 0.51, 0.1, 0.5], [0.02, 0.01, 0.9, 0.0],
                                  [0.88, 0.89, 0.88, 0.87, 0.86, 0.88]])
def test_labels_do_not_overlap(last):
    set_style()
    figure = alpha_decay([Decay(f"series {i}", [0.9, y], n=10_000 * i) for i, y in enumerate(last)])
    figure.draw_without_rendering()
    boxes = [t.get_window_extent() for t in figure.axes[0].texts]
    assert len(boxes) == len(last)
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
    width, height = figure.canvas.get_width_height()
    assert all(0 <= b.x0 and b.x1 <= width and 0 <= b.y0 and b.y1 <= height for b in boxes)


def test_table_prints_what_the_figure_shows():
    table = decay_table([OURS, PAPER])
    assert list(table["ours"]) == ["0.700 [0.680, 0.720]", "0.600 [0.570, 0.630]", "0.500 [0.460, 0.540]"]
    assert list(table["paper"]) == ["0.740", "0.690", "0.650"]


def test_series_that_do_not_fit_are_refused():
    with pytest.raises(KvshotError, match="same number of steps"):
        alpha_decay([OURS, Decay("short", [0.5])])
    with pytest.raises(KvshotError, match="at least one"):
        alpha_decay([])
    with pytest.raises(KvshotError, match="interval"):
        Decay("x", [0.5, 0.4], low=[0.4, 0.3])


def small_summary():
    valid = np.ones((4, 2), dtype=bool)
    hits = np.array([[1, 0], [1, 1], [0, 1], [1, 1]], dtype=bool)
    return summarise(StepwiseHits(hits, valid, np.array([0, 0, 1, 1]), np.zeros_like(hits)), n_boot=50)


def test_tables_of_an_evaluation():
    rates = rates_table(small_summary())
    assert rates.loc[1].tolist() == ["0.750 of 4", "0.500 of 4", "0.667 of 3"]
    table = summary_table({"ours": small_summary()})
    assert table.loc["ours", "MAT"].startswith("2.312 [") and table.loc["ours", "MAT, joint"].startswith("2.250 [")


def test_a_learning_curve_holds_its_points():
    points = [SimpleNamespace(tokens=1_000_000, mat=1.2), SimpleNamespace(tokens=2_500_000, mat=1.5)]
    (axes,) = learning_curve({"ours": points}).axes
    assert axes.lines[0].get_xydata().tolist() == [[1.0, 1.2], [2.5, 1.5]]


def test_every_line_is_drawn_and_has_a_look_of_its_own():
    points = [SimpleNamespace(tokens=1_000_000, mat=1.2), SimpleNamespace(tokens=2_500_000, mat=1.5)]
    (axes,) = learning_curve({f"run {i}": points for i in range(20)}).axes
    assert len({(line.get_color(), line.get_marker()) for line in axes.lines}) == 20
    assert len(set(itertools.islice(looks(), 36))) == 36
    assert len(alpha_decay([Decay(f"row {i}", [0.5, 0.4]) for i in range(9)]).axes[0].lines) == 9


def test_rounds_say_what_became_of_each_proposal():
    tokenizer = SimpleNamespace(decode=lambda ids: " ".join(map(str, ids)))
    one = Round(drafted=[5, 6, 7], probability=[0.9, 0.5, 0.1], chosen=[5, 8, 9, 4], accepted=1)
    assert round_table(tokenizer, one)[""].tolist() == ["accepted", "rejected", "not reached"]
    assert rounds_table(tokenizer, [one]).loc[0].tolist() == [1, "'5'", "'8'"]


def test_the_table_of_decoding_pools_verify_calls():
    one, two = DecodeReport([2, 0], [2, 1], [3, 1]), DecodeReport([1], [1], [2])
    table = decode_table({"chain": [one, two], "none": [DecodeReport()]}, positions=3)
    assert table.loc["chain"].tolist() == [3, "2.00", "0.67 (3)", "1.00 (1)", "-"]
    assert table.loc["none"].tolist() == [0, "-", "-", "-", "-"]


def test_the_table_of_recipes(tmp_path):
    row = {"name": "a, b", "tokens": 410_000, "mat": 1.3849, "loss": 24.848, "lr": 1e-3}
    (tmp_path / "x.json").write_text(json.dumps({"rows": [row]}))
    assert recipe_table(tmp_path / "x.json").loc["a, b"].tolist() == ["0.41 M", "24.85", "1.385"]
    (tmp_path / "x.json").write_text(json.dumps({"rows": [row | {"tokens_per_second": 1944.4}]}))
    assert recipe_table(tmp_path / "x.json").loc["a, b", "tokens/s"] == "1,944"
    (tmp_path / "x.json").write_text(json.dumps({"rows": [{"name": "a"}]}))
    with pytest.raises(KvshotError, match="no benchmark result"):
        recipe_table(tmp_path / "x.json")


def test_the_table_of_answer_decoding(tmp_path):
    row = {"temperature": 0.0, "answers": 2, "answer_tokens": 30, "dropped as looping": 0.25, "ngram": {"5": 0.4},
           "repeats itself": 0.1}
    (tmp_path / "x.json").write_text(json.dumps({"rows": [row]}))
    table = answer_decoding_table(tmp_path / "x.json")
    assert table.loc["0"].tolist() == ["2 (30 tokens)", "0.250", "0.400", "0.100"]
    with pytest.raises(KvshotError, match="no benchmark result"):
        answer_decoding_table(tmp_path / "y.json")
