"""The pages that set rows side by side run for another profile, as they tell their readers to try."""

from __future__ import annotations

import json

import matplotlib
import pytest

from kvshot.experiments import EXPERIMENTS
from kvshot.experiments.profiles import ROOT
from kvshot.experiments.record import CurvePoint
from tests.experiments.test_compare import record

PAGES = ("05_long_range", "06_depth", "07_short_range", "08_hybrid", "09_ablations", "11_scorecard")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    (folder / "smoke").mkdir()
    for number, e in enumerate(EXPERIMENTS.values()):
        for seed in (0, 1) if e.decisive else (0,):
            r = record(e.name, 0.4 + number / 100, seed, n_steps=7)
            r.training.options["seed"] = seed
            r.training.curve = [CurvePoint(step=s, tokens=100 * s, loss=1, mat=1 + s / 10) for s in (5, 10)]
            r.save(folder / "smoke" / f"{e.name}-seed{seed}.json")
    return folder


@pytest.mark.parametrize("page", PAGES)
def test_a_page_shows_a_profile_with_one_text(page, results, monkeypatch):
    """Smoke records have no second text: the page says so instead of failing."""
    matplotlib.use("Agg")
    monkeypatch.chdir(ROOT / "notebooks")
    cells = [c for c in json.loads((ROOT / "notebooks" / f"{page}.ipynb").read_text())["cells"]
             if c["cell_type"] == "code"]
    assert "parameters" in cells[0]["metadata"]["tags"]
    names = {}
    for n, cell in enumerate(cells):
        exec(compile("".join(cell["source"]), f"{page}, cell {n}", "exec"), names)
        if n == 0:
            names |= {"profile": "smoke", "results_dir": str(results)}
    if page != "11_scorecard":
        assert all(f.said == "not run yet" for f in names["elsewhere"])
