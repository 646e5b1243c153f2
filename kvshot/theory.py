"""Figures of the theory pages: attention that shifts, what maps explain, what survives, what interventions change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from torch import Tensor

from kvshot.analysis.compression import SINK, attention_maps
from kvshot.analysis.regimes import OWN, STATES, VERIFIED, gains
from kvshot.comparisons import label, signed
from kvshot.evaluation.metrics import pool
from kvshot.experiments.diagnosis import Diagnosis
from kvshot.targets import Target
from kvshot.viz import SMALL, WIDTH, looks
from kvshot.widgets import Slider, curves, shaded_text


def shift_figure(curves: Mapping[str, pd.DataFrame]) -> Figure:
    """Means with intervals (`analysis.compression.interval_by`) against the offset k, a line a measure."""
    fig, ax = plt.subplots(layout="constrained")
    for (name, c), (colour, marker) in zip(curves.items(), looks(), strict=False):
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
        for (name, rows), (colour, marker) in zip(table.groupby("source", sort=False), looks(), strict=False):
            ax.plot(rows["block"], rows[what], color=colour, marker=marker, label=name)
        ax.set(xlabel="block", title=what)
    axes[0].set(ylabel="variance explained (R²)")
    axes[1].legend(frameon=False, fontsize=SMALL - 1)
    plt.close(fig)
    return fig


def survival_figure(rates: pd.DataFrame) -> Figure:
    """`analysis.survival.recovered` by source and distance: variance of the value explained, and tokens identified."""
    fig, axes = plt.subplots(1, 2, figsize=(WIDTH, 3.0), layout="constrained")
    for ax, (what, title) in zip(axes, (("r2", "value vector (R²)"), ("right", "token identified")), strict=True):
        for (name, rows), (colour, marker) in zip(rates.groupby("source", sort=False), looks(), strict=False):
            at = rows.index.get_level_values("distance")
            off = np.clip(np.stack([rows[what] - rows[f"{what}_low"], rows[f"{what}_high"] - rows[what]]), 0, None)
            ax.errorbar(at, rows[what], yerr=off, color=colour, marker=marker, capsize=2, label=name)
        ax.set_xscale("log", base=2)
        ax.set_xticks(at, [f"{d}" for d in at])
        ax.set(xlabel="tokens back", title=title, ylim=(min(0, rates[what].min()) - 0.02, 1.02))
        ax.title.set_fontsize(SMALL)
    axes[0].legend(frameon=False, fontsize=SMALL - 1)
    plt.close(fig)
    return fig


def attention_slider(target: Target, ids: Tensor, case: Mapping[str, float | int], offsets: Sequence[int], *,
                     around: int = 48) -> Slider:
    """One head's attention over a sentence from the queries at t + k, k in `offsets`; case: of `suppressed_example`.

    Shades are in units of the largest weight of each query, the first token left out; the case's token is framed.
    """
    (_, weights), = attention_maps(target, ids, (int(case["layer"]),))
    t, start = int(case["position"]), max(SINK, min(int(case["token"]), int(case["position"]) - around))
    tokens = [target.tokenizer.decode([int(i)]) for i in ids[start : t + 1]]
    frames, captions = [], []
    for k in offsets:
        row = weights[int(case["head"]), t + k, : t + 1].cpu()
        row = row[start:] / row[SINK:].max()
        frames.append(shaded_text(tokens, row.tolist(), int(case["token"]) - start))
        captions.append(f"query at t + {k}")
    return Slider("k", captions, frames)


def regimes_figure(diagnosed: Mapping[str, Diagnosis]) -> Figure:
    """Acceptance as drafted and under each intervention against the draft step, a panel a drafter."""
    fig, axes = plt.subplots(-(-len(diagnosed) // 2), 2, sharex=True, sharey=True, squeeze=False, layout="constrained",
                             figsize=(WIDTH, 2.3 * -(-len(diagnosed) // 2)))
    top = 0.0
    for ax, (name, d) in zip(axes.flat, diagnosed.items(), strict=False):
        for way, (colour, marker) in zip((OWN, STATES, VERIFIED), looks(), strict=False):
            if way in d.regimes:
                rates = [s.alpha_marginal for s in pool([d.regimes[way]]).steps]
                ax.plot([r.value for r in rates], color=colour, marker=marker, label=way)
                ax.fill_between(range(len(rates)), [r.low for r in rates], [r.high for r in rates], color=colour,
                                alpha=0.18, linewidth=0)
                top = max(top, *(r.high for r in rates))
        ax.set_title(label(name), fontsize=SMALL)
    axes[0, 0].set(ylim=(0, 1.05 * top), xticks=range(len(rates)))  # the panels share them
    for ax in axes.flat[len(diagnosed):]:
        ax.set_axis_off()
    handles = axes[0, 0].get_legend_handles_labels()
    fig.legend(*handles, loc="outside upper center", frameon=False, fontsize=SMALL, ncols=len(handles[0]))
    fig.supxlabel("draft step k", fontsize=10)
    fig.supylabel("acceptance rate α", fontsize=10)
    plt.close(fig)
    return fig


def regimes_slider(diagnosed: Mapping[str, Diagnosis]) -> Slider:
    """All drafters' acceptance against the draft step, a frame an intervention; a drafter that one cannot be made on
    is left out of its frame.
    """
    alphas = {way: {label(name): pool([d.regimes[way]], n_boot=2).alpha
                    for name, d in diagnosed.items() if way in d.regimes} for way in (OWN, STATES, VERIFIED)}
    top = 1.05 * max(max(y) for lines in alphas.values() for y in lines.values())
    every = list(alphas[OWN])  # a drafter keeps its colour
    frames = [curves({n: lines.get(n, []) for n in every}, top, ("draft step k", "acceptance rate α"))
              for lines in alphas.values()]
    return Slider("states of the steps", list(alphas), frames)


def regimes_table(diagnosed: Mapping[str, Diagnosis]) -> pd.DataFrame:
    """First and last acceptance as drafted, and what the interventions add at the last step, with 95 % intervals."""
    rows = {}
    for name, d in diagnosed.items():
        alpha, last = pool([d.regimes[OWN]], n_boot=2).alpha, d.regimes[OWN].steps - 1
        added = gains(d.regimes, last)
        rows[label(name)] = [f"{alpha[0]:.3f}", f"{alpha[-1]:.3f}", *(
            signed(added[k], 3) if k in added else "no state" for k in ("drift of the state", "what lies in between"))]
    columns = ["α0", f"α{last}", "+ the target's states", "+ what lies in between"]
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns).rename_axis(columns="drafter")


def drift_table(diagnosed: Mapping[str, Diagnosis]) -> pd.DataFrame:
    """Cosine and relative norm of the drafters' own states against the target's fused ones, by step."""
    columns = {}
    for name, d in diagnosed.items():
        for x in d.drift or ():
            columns.setdefault((label(name), "cosine"), {})[x.step] = f"{x.cosine:.2f}"
            columns.setdefault((label(name), "norm"), {})[x.step] = f"{x.norm:.2f}"
    return pd.DataFrame(columns).rename_axis(index="step")
