from __future__ import annotations

import ast
from pathlib import Path

import pytest

from kvshot import paper
from kvshot.evaluation import mat, retention


@pytest.mark.parametrize("key", paper.TABLE5)
def test_mat_and_retention_formulas_give_the_printed_columns(key):
    row = paper.TABLE5[key]
    assert len(row.alpha) == paper.SETTING.ttt_steps
    # printed alphas carry 0.0005 each: the largest gap is 2.5453 against 2.54
    assert float(mat(row.alpha)) == pytest.approx(row.mat, abs=0.0055)
    assert 100 * float(retention(row.alpha)) == pytest.approx(row.retention, abs=0.05)


def test_the_formula_is_told_apart_from_its_near_misses():
    """The tolerance above is not slack: with one step fewer no row of a long MAT would match."""
    for row in paper.TABLE5.values():
        if row.mat > 2:
            assert abs(float(mat(row.alpha[:-1])) - row.mat) > 0.0055
    gaps = {key: abs(float(mat(row.alpha)) - row.mat) for key, row in paper.TABLE5.items()}
    assert max(gaps, key=gaps.get) == "hybrid-checkpoint"
    assert all(gap < 0.005 for key, gap in gaps.items() if key != "hybrid-checkpoint")


def test_marginal_alphas_are_flat_without_target_information():
    """A flat row is what teacher-forced steps give a language model that sees no target state."""
    alpha = paper.TABLE5["no-target-info"].alpha
    assert max(alpha) - min(alpha) < 0.0025


@pytest.mark.parametrize("key", paper.TABLE6)
def test_table6_retention(key):
    row = paper.TABLE6[key]
    gap = 100 * row.alpha_6 / row.alpha_0 - row.retention
    assert abs(gap) <= 100 * 0.0005 / row.alpha_0 * (1 + row.alpha_6 / row.alpha_0) + 0.05


def test_table6_baseline_is_the_two_layer_row_of_table5():
    base, row = paper.TABLE6["baseline"], paper.TABLE5["kv-only-2"]
    assert (base.alpha_0, base.alpha_3, base.alpha_6) == (row.alpha[0], row.alpha[3], row.alpha[6])
    assert (base.retention, base.mat) == (row.retention, row.mat)


@pytest.mark.parametrize("key", paper.FIG1B)
def test_fig1b_change(key):
    curve = paper.FIG1B[key]
    assert 100 * (float(retention(curve.alpha)) - 1) == pytest.approx(curve.change, abs=0.1)


def test_tables_are_views_of_table5():
    assert {n: len(paper.table(n)) for n in (1, 2, 3, 5)} == {1: 4, 2: 4, 3: 4, 5: 12}
    assert list(paper.table(2)) == [f"kv-only-{n}" for n in (1, 2, 3, 4)]


def test_headline_statements_hold_in_the_numbers():
    mats = {key: row.mat for key, row in paper.TABLE5.items()}
    depth = [mats[f"kv-only-{n}"] for n in (1, 2, 3, 4)]
    assert [round(b - a, 2) for a, b in zip(depth, depth[1:], strict=False)] == [0.39, 0.08, 0.03]
    assert round(paper.TABLE4["hybrid-continued"].mat - paper.TABLE4["eagle3-continued"].mat, 2) == 0.03


def test_paper_imports_nothing_of_kvshot():
    tree = ast.parse(Path(paper.__file__).read_text())
    names = [n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    assert names == ["dataclasses"] and not any(isinstance(n, ast.Import) for n in ast.walk(tree))
