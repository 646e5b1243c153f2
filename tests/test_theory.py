"""The theory figures hold the numbers they were given."""

from __future__ import annotations

import matplotlib
import numpy as np
import pandas as pd
import pytest

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
