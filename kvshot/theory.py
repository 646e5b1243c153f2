"""Figures of the theory pages: attention that shifts, keys and values that a linear map explains."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from kvshot.viz import MARKERS, PALETTE, SMALL, WIDTH


def shift_figure(curves: Mapping[str, pd.DataFrame]) -> Figure:
    """Means with intervals (`analysis.compression.interval_by`) against the offset k, a line a measure."""
    fig, ax = plt.subplots(layout="constrained")
    for (name, c), colour, marker in zip(curves.items(), PALETTE, MARKERS, strict=False):
        ax.errorbar(c.index, c["mean"], yerr=[c["mean"] - c["low"], c["high"] - c["mean"]], color=colour,
                    marker=marker, capsize=2, label=name)
        ax.set_xticks(c.index)
    ax.set(xlabel="offset k", ylabel="mean over layers, heads, positions", ylim=(0, 1))
    ax.legend(frameon=False)
    plt.close(fig)
    return fig


def shift_by_layer(table: pd.DataFrame) -> Figure:
    """The suppressed share of `attention_shift` by layer and offset."""
    grid = table.pivot_table(index="layer", columns="k", values="suppressed")
    fig, ax = plt.subplots(figsize=(WIDTH, 4.2), layout="constrained")
    sns.heatmap(grid, ax=ax, cmap="viridis", vmin=0, vmax=1, cbar_kws={"label": "suppressed share"})
    ax.set(xlabel="offset k", ylabel="layer")
    plt.close(fig)
    return fig


def shift_by_third(table: pd.DataFrame) -> pd.DataFrame:
    """The numbers behind `shift_by_layer`, averaged over thirds of the layers."""
    grid = table.pivot_table(index="layer", columns="k", values="suppressed")
    thirds = grid.groupby(lambda layer: 3 * layer // (grid.index.max() + 1)).mean()
    names = ["lower third", "middle third", "upper third"]
    return thirds.set_axis([names[i] for i in thirds.index]).rename_axis(index=None, columns="k").round(2)


def explained_figure(table: pd.DataFrame) -> Figure:
    """`analysis.equivalence.explained`: variance explained against the block, keys and values side by side."""
    fig, axes = plt.subplots(1, 2, sharey=True, figsize=(WIDTH, 2.9), layout="constrained")
    for ax, what in zip(axes, ("keys", "values"), strict=True):
        for (name, rows), colour, marker in zip(table.groupby("source", sort=False), PALETTE, MARKERS, strict=False):
            ax.plot(rows["block"], rows[what], color=colour, marker=marker, label=name)
        ax.set(xlabel="block", title=what)
    axes[0].set(ylabel="variance explained (R²)")
    axes[1].legend(frameon=False, fontsize=SMALL - 1)
    plt.close(fig)
    return fig
