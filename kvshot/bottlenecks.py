"""Figures and tables of the bottleneck pages (Section 4): queries, gradients, gates."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from kvshot.comparisons import label, signed
from kvshot.errors import KvshotError
from kvshot.evaluation import paired_difference
from kvshot.evaluation.metrics import pool
from kvshot.experiments.diagnosis import LAST_STATES, ORACLE_QUERIES, OWN_QUERIES, Diagnosis
from kvshot.paper import FIG4
from kvshot.training.probes import BINS, load_probes
from kvshot.viz import SMALL, WIDTH, label_lines, looks
from kvshot.widgets import Slider, bars

PARTS = {"q": "W_Q", "k": "W_K", "v": "W_V"}


def probes_of(names: Sequence[str], results: str | os.PathLike, profile: str) -> dict[str, pd.DataFrame]:
    """What training saw of each experiment, its first seed with probes.

    Raises KvshotError for an experiment without any.
    """
    folder = Path(results) / profile / "probes"
    paths = {name: sorted(folder.glob(f"{name}-seed*.csv.xz")) for name in names}
    if absent := [name for name, found in paths.items() if not found]:
        raise KvshotError(f"no probes of {', '.join(absent)} in {folder}: train them with `kvshot train NAME --profile "
                          f"{profile} --out RUN` and `kvshot publish RUN`")
    return {name: load_probes(found[0]) for name, found in paths.items()}


def _gates(probes: pd.DataFrame) -> list[str]:
    """The columns with a draft step's mean gate, in the order of the steps."""
    columns = [c for c in probes.columns if c.startswith("gate.") and c[5:].isdigit()]
    if not columns:
        raise KvshotError("these probes saw no gate: give those of a hybrid")
    return columns


def _histograms(probes: pd.DataFrame) -> pd.DataFrame:
    """Dimensions by mean gate, a row a closer look."""
    return probes[[f"gate.bin.{i}" for i in range(BINS)]].dropna()


def mean_gate(probes: pd.DataFrame) -> pd.DataFrame:
    """The gate, mean over draft steps: columns raw, ema (Fig. 4's coefficient), by optimizer step."""
    raw = probes[_gates(probes)].mean(axis=1)
    return pd.DataFrame({"raw": raw, "ema": raw.ewm(alpha=FIG4.ema_coefficient, adjust=True).mean()})


def gate_figure(runs: Mapping[str, pd.DataFrame]) -> Figure:
    """Fig. 4's form: the mean gate over training, raw and as a moving average."""
    fig, ax = plt.subplots(layout="constrained")
    labels = []
    for (name, probes), (colour, _) in zip(runs.items(), looks(), strict=False):
        gate = mean_gate(probes)
        ax.plot(gate.index, gate["raw"], color=colour, alpha=0.25, linewidth=0.8)
        ax.plot(gate.index, gate["ema"], color=colour)
        labels.append((gate["ema"].iloc[-1], label(name), colour))
    ax.set(xlabel="optimizer step", ylabel="mean gate", ylim=(0, None))
    label_lines(ax, ax.get_xlim()[1], labels)
    plt.close(fig)
    return fig


def gate_table(runs: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """The moving average at its start, its lowest and its end, and the raw gate of the first and last draft step."""
    rows = {}
    for name, probes in runs.items():
        gate, last = mean_gate(probes)["ema"], probes.tail(50)
        first, final = _gates(probes)[0], _gates(probes)[-1]
        rows[label(name)] = [f"{gate.iloc[0]:.3f}", f"{gate.min():.3f} (step {gate.idxmin()})", f"{gate.iloc[-1]:.3f}",
                             *(f"{last[c].mean():.3f}" for c in (first, final))]
    columns = ["start", "lowest", "end", *(f"draft step {c[5:]}, end" for c in (first, final))]
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns).rename_axis(columns="run")


def gate_slider(probes: pd.DataFrame) -> Slider:
    """The histogram of mean gates over dimensions, at each closer look during training."""
    close = _histograms(probes)
    return Slider("optimizer step", [f"step {step}" for step in close.index],
                  [bars(row.tolist(), ("gate 0", "gate 1")) for _, row in close.iterrows()])


def gate_shares(probes: pd.DataFrame) -> pd.DataFrame:
    """The numbers behind `gate_slider`: share of the dimensions by gate, a row a closer look."""
    close = _histograms(probes)
    edges, shares = (0, 1, 2, 5, 10, BINS), close.to_numpy() / close.sum(axis=1).to_numpy()[:, None]
    cells = {f"{a / BINS:g} to {b / BINS:g}": [f"{100 * x:.0f} %" for x in shares[:, a:b].sum(1)]
             for a, b in zip(edges, edges[1:], strict=False)}
    return pd.DataFrame(cells, index=close.index).rename_axis(index=None, columns="step")


def branch_gradients(probes: pd.DataFrame) -> pd.DataFrame:
    """Gradient norms of the two attentions of a hybrid, moving averages: columns self_attn, cross_attn, ratio, gate."""
    def norm(branch: str) -> pd.Series:
        squares = sum(probes[f"norm.{branch}.{p}"] ** 2 for p in PARTS)
        return np.sqrt(squares).ewm(alpha=FIG4.ema_coefficient).mean()

    own, cross = norm("self_attn"), norm("cross_attn")
    return pd.DataFrame({"self_attn": own, "cross_attn": cross, "ratio": cross / own, "gate": mean_gate(probes)["ema"]})


def starvation_figure(runs: Mapping[str, pd.DataFrame]) -> Figure:
    """The cross branch's gradient, in units of the other's, against the mean gate; a path through training."""
    fig, ax = plt.subplots(layout="constrained")
    for (name, probes), (colour, marker) in zip(runs.items(), looks(), strict=False):
        path = branch_gradients(probes)
        ax.plot(path["gate"], path["ratio"], color=colour, linewidth=1.2)
        ax.plot(path["gate"].iloc[-1], path["ratio"].iloc[-1], color=colour, marker=marker, markersize=8,
                label=f"{label(name)} (mark: end)", linestyle="")
    ax.set(xlabel="mean gate", ylabel="gradient norm, cross / self", xscale="log", yscale="log")
    for axis, ticks in ((ax.xaxis, (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)), (ax.yaxis, (0.001, 0.01, 0.1, 1))):
        axis.set_major_locator(FixedLocator(ticks))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_locator(NullLocator())
    ax.legend(frameon=False, fontsize=SMALL)
    plt.close(fig)
    return fig


def path_table(runs: Mapping[str, pd.DataFrame], parts: int = 10) -> pd.DataFrame:
    """The numbers behind `starvation_figure`: means over equal parts of the training."""
    columns = {}
    for name, probes in runs.items():
        path = branch_gradients(probes)
        part = np.arange(len(path)) * parts // len(path)
        means = path.groupby(part)[["gate", "ratio"]].mean()
        columns |= {(label(name), "gate"): means["gate"].map("{:.3f}".format),
                    (label(name), "gradient ratio"): means["ratio"].map("{:.3f}".format)}
    table = pd.DataFrame(columns)
    table.index = [f"{100 * i // parts} to {100 * (i + 1) // parts} %" for i in table.index]
    return table.rename_axis(index="training")


def gradient_table(runs: Mapping[str, pd.DataFrame], branch: str = "self_attn") -> pd.DataFrame:
    """The last closer look at W_Q and the draft-side W_K, W_V: who contributes, how large, how diverse.

    Norms are medians over the last 100 steps.
    """
    rows = {}
    for name, probes in runs.items():
        close = probes[f"rank.{branch}.q"].dropna().index[-1]
        for p, title in PARTS.items():
            at = probes.loc[close]
            rows[label(name), title] = [
                f"{probes[f'norm.{branch}.{p}'].tail(100).median():.3f}", f"{at[f'rows.{branch}.{p}']:,.0f}",
                f"{at[f'shared.{branch}.{p}']:,.0f}", f"{at[f'rank.{branch}.{p}']:.0f}"]
    columns = ["gradient norm", "rows that contribute", "in effect", "effective rank"]
    table = pd.DataFrame.from_dict(rows, orient="index", columns=columns)
    table.index = pd.MultiIndex.from_tuples(table.index)
    return table


def rank_figure(runs: Mapping[str, pd.DataFrame], branch: str = "self_attn") -> Figure:
    """Effective rank of each projection's gradient at the closer looks, a panel a run."""
    fig, axes = plt.subplots(1, len(runs), sharey=True, figsize=(WIDTH, 2.9), layout="constrained", squeeze=False)
    for ax, (name, probes) in zip(axes[0], runs.items(), strict=True):
        for (p, title), (colour, marker) in zip(PARTS.items(), looks(), strict=False):
            rank = probes[f"rank.{branch}.{p}"].dropna()
            ax.plot(rank.index, rank, color=colour, marker=marker, label=title)
        ax.set_title(label(name), fontsize=SMALL)
        ax.set(xlabel="optimizer step")
    axes[0, 0].set(ylabel="effective rank of the gradient", ylim=(0, None))  # shared, so once all is drawn
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", frameon=False, fontsize=SMALL,
               ncols=len(PARTS))
    plt.close(fig)
    return fig


def looking_figure(diagnosed: Mapping[str, Diagnosis]) -> Figure:
    """Distance of each attention from the target's, by draft step; dashed: of the target's own last query."""
    fig, ax = plt.subplots(layout="constrained", figsize=(WIDTH, 3.6))
    labels, look = [], looks()
    for name, d in diagnosed.items():
        for branch in dict.fromkeys(row.branch for row in d.looking):
            colour, marker = next(look)
            rows = [row for row in d.looking if row.branch == branch]
            steps, mean = [r.step for r in rows], [r.distance for r in rows]
            ax.plot(steps, mean, color=colour, marker=marker)
            ax.fill_between(steps, [r.low for r in rows], [r.high for r in rows], color=colour, alpha=0.18, linewidth=0)
            ax.plot(steps, [r.stale for r in rows], color=colour, linestyle=(0, (4, 2)), linewidth=1)
            labels.append((mean[-1], f"{label(name)}:\n{branch}", colour))
    ax.set(xlabel="draft step k", ylabel="distance from the target's attention", xticks=steps, ylim=(0, None))
    label_lines(ax, ax.get_xlim()[1], labels)
    plt.close(fig)
    return fig


def looking_table(diagnosed: Mapping[str, Diagnosis]) -> pd.DataFrame:
    """The numbers behind `looking_figure` at the first and the last step, and where drafts were accepted or not."""
    rows = {}
    for name, d in diagnosed.items():
        for o in d.outcomes:
            several = [r for r in d.looking if r.branch == o.branch]
            ends = [f"{r.distance:.2f} ({r.stale:.2f})" for r in (several[0], several[-1])] if several else ["", ""]
            rows[f"{label(name)}: {o.branch}"] = [*ends, f"{o.accepted:.3f}", f"{o.rejected:.3f}",
                                                  f"{o.difference:+.3f} [{o.low:+.3f}, {o.high:+.3f}]"]
    last = max(r.step for d in diagnosed.values() for r in d.looking)
    columns = ["step 0 (stale)", f"step {last} (stale)", "accepted", "rejected", "rejected - accepted"]
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns).rename_axis(columns="attention")


def oracle_table(diagnosed: Mapping[str, Diagnosis]) -> pd.DataFrame:
    """MAT with queries that learned on from what they have, what the target's last states add, and what the future ones
    add to those.
    """
    rows = {}
    for name, d in diagnosed.items():
        own = pool([d.queries[OWN_QUERIES]], n_boot=2)
        pairs = ((LAST_STATES, OWN_QUERIES), (ORACLE_QUERIES, LAST_STATES))
        more = [signed(paired_difference(d.queries[a], d.queries[b], "mat")) for a, b in pairs]
        oracle = pool([d.queries[ORACLE_QUERIES]], n_boot=2)
        rows[label(name)] = [f"{own.alpha[0]:.2f} to {own.alpha[-1]:.2f}", f"{own.mat.value:.3f}", *more,
                             f"{oracle.alpha[0]:.2f} to {oracle.alpha[-1]:.2f}"]
    columns = ["α, own queries", "MAT", "+ last states, MAT", "+ oracle, MAT", "α, oracle"]
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns).rename_axis(columns="drafter")
