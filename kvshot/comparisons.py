"""Figures and tables that set the rows of a campaign side by side, the paper's numbers among them."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from kvshot.errors import KvshotError
from kvshot.evaluation import StepwiseSummary, TreeShape
from kvshot.evaluation.metrics import PairedDifference
from kvshot.experiments import RunRecord
from kvshot.experiments.campaign import campaign_of
from kvshot.experiments.claims import Finding
from kvshot.experiments.compare import by_step, check_comparable, pooled
from kvshot.experiments.end_to_end import PAPER_TREE, SHAPES, EndToEnd, mat_of, place
from kvshot.experiments.record import published_path
from kvshot.paper import TABLE5, TABLE6
from kvshot.viz import GREY, HEIGHT, PALETTE, SMALL, WIDTH, Decay, label_lines, looks

Rows = dict[str, list[RunRecord]]

_OURS = {
    "eagle3-continued": "EAGLE-3, continued", "eagle3-block": "EAGLE-3, target's last block",
    "kv-only-2-blocks": "KV-only, 2 target blocks", "kv-only-4-blocks": "KV-only, 4 target blocks",
    "kv-only-2-continued": "KV-only, 2 layers, continued", "kv-only-2-outer": "KV-only, 2 outer blocks, random",
    "kv-only-4-outer": "KV-only, 4 outer blocks, random",
    "no-prefix-attention": "EAGLE-3, no prefix attention", "mtp": "MTP-style",
}


def label(name: str) -> str:
    """The paper's name of a row, or ours where it has none."""
    return TABLE5[name].name if name in TABLE5 else TABLE6[name].name if name in TABLE6 else _OURS.get(name, name)


def rows(names: Sequence[str], results: str | os.PathLike, profile: str) -> Rows:
    """The records of experiments, by name, a list over seeds; an experiment without records is left out.

    Raises KvshotError when none of them has any, or they are not of one campaign.
    """
    campaign = campaign_of(Path(results) / profile)
    found = {name: campaign[name] for name in names if name in campaign}
    if not found:
        raise KvshotError(f"no records of {', '.join(names)} in {Path(results) / profile}: run `kvshot reproduce "
                          f"--profile {profile}`, with `--only` for some of them")
    first, *others = (r for records in found.values() for r in records)
    for other in others:
        check_comparable(first, other)
    return found


def missing_note(names: Sequence[str], found: Rows) -> str:
    """A sentence about the rows that have not been run."""
    absent = [label(n) for n in names if n not in found]
    note = "Not run yet: " + "; ".join(absent) + "." if absent else "Every row has been run."
    return textwrap.fill(note, 75)  # a page's width


def decays(found: Rows, *, domain: str = "held_out") -> list[Decay]:
    """Curves of every row for `viz.alpha_decay`, over its seeds, and the n-gram row on the same columns."""
    curves = [replace(Decay.from_summary(label(name), pooled(records, domain=domain)), n=None)  # the n-gram row has it
              for name, records in found.items()]
    ngram = _ngram(found, domain)
    return curves if ngram is None else [*curves, Decay.from_summary("n-gram", ngram, "reference")]


def rows_table(found: Rows, *, domain: str = "held_out") -> pd.DataFrame:
    """MAT and retention with 95 % intervals beside the paper's, and what a draft step costs; n-gram row last."""
    lines = {}
    for name, records in found.items():
        paper = TABLE5.get(name) or TABLE6.get(name)
        printed = ["-", "-"] if paper is None else [f"{paper.mat:.2f}", f"{paper.retention / 100:.3f}"]
        spent = records[0].cost
        lines[label(name)] = [len(records), *_cells(pooled(records, domain=domain)), *printed,
                              "-" if spent is None else f"{spent.parameters / 1e6:.1f}",
                              "-" if spent is None else f"{spent.flops / 1e6:.1f}"]
    ngram = _ngram(found, domain)
    if ngram is not None:
        lines["n-gram"] = ["-", *_cells(ngram), "-", "-", "-", "-"]
    columns = ["seeds", "MAT", "retention", "MAT, paper", "retention, paper", "M parameters", "MFLOP a draft step"]
    return pd.DataFrame.from_dict(lines, orient="index", columns=columns).rename_axis(columns="row")


def _cells(s: StepwiseSummary) -> list[str]:
    return [f"{e:.3f}" for e in (s.mat, s.retention)]


def _ngram(found: Rows, domain: str) -> StepwiseSummary | None:
    """The n-gram row on the columns that all rows share."""
    return next(iter(found.values()))[0].evaluation[domain].ngram


def alpha_table(found: Rows, *, domain: str = "held_out") -> pd.DataFrame:
    """Acceptance at every step, a row a drafter; the numbers behind the decay figure (intervals are its bands)."""
    curves = decays(found, domain=domain)
    cells = {c.name: [f"{a:.3f}" for a in c.alpha] for c in curves}
    columns = [f"α{k}" for k in range(len(curves[0].alpha))]
    return pd.DataFrame.from_dict(cells, orient="index", columns=columns).rename_axis(columns="row")


def differences(found: Rows, base: str, results: str | os.PathLike, profile: str, *, domain: str = "held_out"
                ) -> dict[str, list[PairedDifference]]:
    """Of every row but `base`: its acceptance minus that of `base`, step by step; how much training runs vary is taken
    from all records of the profile.
    """
    if base not in found:
        raise KvshotError(f"no record of {base} to compare with: run `kvshot reproduce --only {base}`")
    campaign = campaign_of(Path(results) / profile)
    return {name: by_step(records, found[base], domain=domain, campaign=campaign)
            for name, records in found.items() if name != base}


def difference_figure(steps: Mapping[str, Sequence[PairedDifference]], base: str, order: Sequence[str] = ()
                      ) -> Figure:
    """Lines of `differences` with their 95 % intervals against the draft step; the paper's dashed, where it has them.

    order: the rows of another figure, whose colours the lines get.
    """
    if not steps:
        raise KvshotError(f"no row to compare with {base}: give at least one other")
    fig, ax = plt.subplots(figsize=(WIDTH, HEIGHT * 1.15), layout="constrained")
    labels, look = [], dict(zip(order or steps, looks(), strict=False))
    for name, several in steps.items():
        colour, marker = look[name]
        k = np.arange(len(several))
        value = [d.difference.value for d in several]
        ax.plot(k, value, color=colour, marker=marker)
        ax.fill_between(k, [d.difference.low for d in several], [d.difference.high for d in several], color=colour,
                        alpha=0.18, linewidth=0)
        if name in TABLE5 and base in TABLE5:
            printed = np.subtract(TABLE5[name].alpha, TABLE5[base].alpha)
            ax.plot(np.arange(len(printed)), printed, color=colour, linestyle=(0, (5, 2)), linewidth=1.2)
        labels.append((value[-1], label(name), colour))
    ax.axhline(0, color=GREY, linewidth=1)
    ax.set(xlabel="draft step k", ylabel=f"α minus that of {label(base)}", xticks=k)
    ax.set_xlim(-0.3, k[-1] + 0.3)
    label_lines(ax, k[-1] + 0.3, labels)
    plt.close(fig)
    return fig


def difference_table(steps: Mapping[str, Sequence[PairedDifference]]) -> pd.DataFrame:
    """The numbers behind `difference_figure`."""
    if not steps:
        raise KvshotError("no differences to print: give at least one row beside the base")
    cells = {label(name): [signed(d) for d in several] for name, several in steps.items()}
    index = range(max(map(len, steps.values())))
    return pd.DataFrame(cells, index=index).rename_axis(index=None, columns="step k")


def signed(d: PairedDifference, digits: int = 3) -> str:
    """The difference and its 95 % interval."""
    return format(d.difference, f"+.{digits}f")


def forest(findings: Sequence[Finding]) -> Figure:
    """Differences of claims as points with intervals, the paper's as hollow diamonds; claims not run are left out."""
    shown = [f for f in findings if f.measured is not None]
    fig, ax = plt.subplots(figsize=(WIDTH, 0.9 + 0.5 * max(1, len(shown))), layout="constrained")
    for y, f in enumerate(shown):
        e = f.measured.difference
        ax.plot([e.low, e.high], [y, y], color=PALETTE[0], linewidth=2)
        ax.plot(e.value, y, "o", color=PALETTE[0], label="here, 95 % interval" if y == 0 else None)
        if f.claim.printed is not None:
            ax.plot(f.claim.printed, y, "D", color=PALETTE[1], markerfacecolor="white", label="paper" if not any(
                g.claim.printed is not None for g in shown[:y]) else None)
    ax.axvline(0, color=GREY, linewidth=1)
    ax.set_yticks(range(len(shown)), [f"{label(f.claim.a)}\n− {label(f.claim.b)}" for f in shown], fontsize=SMALL - 1)
    ax.set(xlabel="difference of " + ", ".join(dict.fromkeys(_what(f.claim.statistic) for f in shown)))
    ax.invert_yaxis()
    ax.grid(False, axis="y")
    ax.grid(True, axis="x")
    if shown:
        ax.legend(loc="lower center", bbox_to_anchor=(0.3, 1.0), ncol=2, frameon=False, fontsize=SMALL)
    plt.close(fig)
    return fig


def depth_figure(families: Mapping[str, Mapping[int, StepwiseSummary]], paper: Mapping[int, float],
                 level: tuple[str, StepwiseSummary] | None = None) -> Figure:
    """MAT against the number of draft layers. families: name -> depth -> summary; level: a row for a horizontal line.
    """
    fig, ax = plt.subplots(layout="constrained")
    labels = []
    for (name, depths), (colour, marker) in zip(families.items(), looks(), strict=False):
        mats = {depth: s.mat for depth, s in sorted(depths.items())}
        value = np.array([m.value for m in mats.values()])
        error = [value - [m.low for m in mats.values()], np.array([m.high for m in mats.values()]) - value]
        ax.errorbar(list(mats), value, yerr=error, color=colour, marker=marker, capsize=2)
        labels.append((float(value[-1]), name, colour))
    colour = PALETTE[len(families)]
    ax.plot(list(paper), list(paper.values()), color=colour, linestyle=(0, (5, 2)), marker="D", markerfacecolor="white")
    labels.append((list(paper.values())[-1], "KV-only, paper", colour))
    if level is not None:
        ax.axhline(level[1].mat.value, color=GREY, linestyle=":")
        labels.append((level[1].mat.value, level[0], GREY))
    ax.set(xlabel="draft layers", ylabel="MAT", xticks=sorted({d for f in families.values() for d in f} | {*paper}))
    label_lines(ax, ax.get_xlim()[1], labels)
    plt.close(fig)
    return fig


def scorecard_table(findings: Sequence[Finding]) -> pd.DataFrame:
    """Claims, a row each: whose it is, the paper's difference, the measured one with its interval, seeds, answer."""
    lines = []
    for f in findings:
        c = f.claim
        ours = "-" if f.measured is None else signed(f.measured)
        printed = "-" if c.printed is None else f"{c.printed:+.3f}"
        whose = "paper" if c.whose == "paper" else "our question"
        lines.append([c.text, whose, f"{_what(c.statistic)}: {c.a} − {c.b}", printed, ours, f.seeds or "-", f.said])
    columns = ["claim", "whose", "difference of", "paper", "here [95 % interval]", "seeds", "answer"]
    return pd.DataFrame(lines, columns=columns).set_index("claim").rename_axis(index=None, columns="claim")


def _what(statistic: str) -> str:
    return statistic.replace("alpha_marginal_", "α").replace("mat", "MAT")


def curves(found: Rows) -> dict[str, list]:
    """Training curves of seed 0 (or the lowest there is), for `viz.learning_curve`."""
    return {label(name): records[0].training.curve for name, records in found.items()}


def rising_table(found: Rows) -> pd.DataFrame:
    """How much validation MAT the last stretch of training added, a row a drafter: is it trained enough?"""
    lines = {}
    for name, (before, end) in _last_stretch(found).items():
        lines[name] = [f"{end.tokens / 1e6:.1f} M", f"{before.mat:.3f}", f"{end.mat:.3f}",
                       f"{end.mat - before.mat:+.3f}", f"{1 - before.tokens / end.tokens:.0%}"]
    columns = ["tokens seen", "MAT at the check before", "MAT at the end", "added", "by this part of the tokens"]
    return pd.DataFrame.from_dict(lines, orient="index", columns=columns).rename_axis(columns="row")


def rising_note(found: Rows) -> str:
    """A sentence about the last stretch of training: how many rows still rose, and by how much."""
    added = {name: end.mat - before.mat for name, (before, end) in _last_stretch(found).items()}
    low, high = min(added, key=added.get), max(added, key=added.get)
    note = (f"{sum(a > 0 for a in added.values())} of {len(added)} rows still rose: by {added[low]:+.3f} "
            f"({low}) to {added[high]:+.3f} ({high}).")
    return textwrap.fill(note, 75)


def _last_stretch(found: Rows) -> dict[str, tuple]:
    """The last two checks of each of `curves`; one check is its own predecessor."""
    return {name: (curve[-2:][0], curve[-1]) for name, curve in curves(found).items()}


def overtakes(found: Rows, alpha: Sequence[float], *, domain: str = "held_out") -> pd.DataFrame:
    """Of every row: from which step on it stays ahead of a given curve, and its difference at the last step."""
    lines = {}
    for name, records in found.items():
        gaps = np.subtract(pooled(records, domain=domain).alpha, alpha)
        behind = np.flatnonzero(gaps <= 0)
        since = behind[-1] + 1 if len(behind) else 0
        lines[label(name)] = [f"{since}" if since < len(gaps) else "-", f"{gaps[-1]:+.3f}"]
    return pd.DataFrame.from_dict(lines, orient="index", columns=["ahead from step", "difference at the last step"]
                                  ).rename_axis(columns="row")


def seeds_table(records: Sequence[RunRecord], *, domain: str = "held_out") -> pd.DataFrame:
    """MAT of every seed, and their range, of the experiments with more than one."""
    by_name: Rows = {}
    for r in records:
        by_name.setdefault(r.experiment, []).append(r)
    lines = {}
    for name, several in by_name.items():
        mats = [r.evaluation[domain].drafter.mat.value for r in several]
        if len(mats) > 1:
            lines[label(name)] = [" ".join(f"{m:.3f}" for m in mats), f"{max(mats) - min(mats):.3f}"]
    return pd.DataFrame.from_dict(lines, orient="index", columns=["MAT, a number a seed", "range"]).rename_axis(
        columns="row")


def calls_table(measured: Mapping[str, EndToEnd], domain: str, paper: Mapping[str, float] | None = None
                ) -> pd.DataFrame:
    """Tokens a verify call with 95 % intervals over prompts: the paper's tree, and chains; a row a drafter."""
    shapes = [PAPER_TREE.name, *(TreeShape(n).name for n in (1, 2, 4, 6, 8))]
    lines = {}
    for name, record in measured.items():
        calls = record.domains[domain].shapes
        first, *rest = (mat_of(calls[s]) for s in shapes)
        printed = (paper or {}).get(name)
        lines[label(name)] = [f"{first:.2f}",
                              "-" if printed is None else f"{printed:.2f}", *(f"{e.value:.2f}" for e in rest)]
    columns = [shapes[0], "paper's Table 4", *shapes[1:]]
    return pd.DataFrame.from_dict(lines, orient="index", columns=columns).rename_axis(columns="MAT")


def chains_figure(measured: Mapping[str, EndToEnd], domain: str) -> Figure:
    """Tokens a verify call against the length of the chain, a line a drafter, bands: intervals over prompts."""
    fig, ax = plt.subplots(layout="constrained")
    labels = []
    for (name, record), (colour, marker) in zip(measured.items(), looks(), strict=False):
        calls = record.domains[domain].shapes
        lengths = [s.levels for s in SHAPES if s.is_chain]
        mats = [mat_of(calls[TreeShape(n).name]) for n in lengths]
        ax.plot(lengths, [m.value for m in mats], color=colour, marker=marker)
        ax.fill_between(lengths, [m.low for m in mats], [m.high for m in mats], color=colour, alpha=0.15, linewidth=0)
        labels.append((mats[-1].value, label(name), colour))
    ax.set(xlabel="drafted tokens in a chain", ylabel="tokens a verify call (MAT)", xticks=lengths)
    label_lines(ax, ax.get_xlim()[1], labels)
    plt.close(fig)
    return fig


def end_to_end(names: Sequence[str], results: str | os.PathLike, profile: str) -> dict[str, EndToEnd]:
    """The end-to-end records of experiments (seed 0), by name; those without are left out.

    Raises KvshotError when none of them has any, or one is of another run than the record beside it.
    """
    paths = {name: place(results, profile, name) for name in names}
    found = {name: EndToEnd.load(path) for name, path in paths.items() if path.exists()}
    if not found:
        raise KvshotError(f"no end-to-end records of {', '.join(names)} in {Path(results) / profile}: run "
                          f"`kvshot reproduce --profile {profile} --only table4`")
    for name, measured in found.items():
        measured.check_run(published_path(results, profile, name))
    return found
