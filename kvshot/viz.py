"""The figures of the book, in one style: colour-blind safe, readable in grey print and at phone width."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Literal

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvshot.drafters import Round
from kvshot.errors import KvshotError
from kvshot.evaluation import DecodeReport, StepwiseSummary
from kvshot.experiments import EXPERIMENTS, cost, experiment
from kvshot.targets import Target

# Okabe and Ito's palette without yellow (too light for a line on white); black and grey are for references.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
GREY = "#6B6B6B"
MARKERS = ("o", "s", "^", "D", "v", "P")
# Inches. Pages show figures 560 pixels wide (cell metadata), phones about 340: small text is then 15 and 9
# pixels high.
WIDTH, HEIGHT = 4.6, 3.2
SMALL = 9  # points


def looks() -> Iterator[tuple[str, str]]:
    """Colour and marker of one line after another: no pair twice in 36."""
    n = len(PALETTE)
    return ((PALETTE[i % n], MARKERS[(i + i // n) % n]) for i in count())


def set_style() -> None:
    """Set seaborn's theme and matplotlib's defaults for every figure that follows."""
    sns.set_theme(style="ticks", palette=PALETTE, rc={
        "figure.figsize": (WIDTH, HEIGHT), "figure.dpi": 200, "savefig.bbox": "tight",
        "font.size": 10, "axes.labelsize": 10, "xtick.labelsize": SMALL, "ytick.labelsize": SMALL,
        "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.grid.axis": "y",
        "grid.color": "#E3E3E3", "grid.linewidth": 0.8, "lines.linewidth": 1.8, "lines.markersize": 4.5,
        "axes.edgecolor": GREY, "xtick.color": GREY, "ytick.color": GREY, "text.color": "#222222",
    })


@dataclass(frozen=True)
class Decay:
    """One curve of acceptance against the draft step.

    name: shown beside the line. alpha [K]: share of columns whose step-k proposal is the target's argmax.
    low, high [K]: its 95 % interval, or neither. n: columns behind step 0.
    kind: "measured" (solid, coloured), "paper" (dashed, the paper's own value), "reference" (dotted grey: a
    yardstick such as the n-gram row).
    """

    name: str
    alpha: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    n: int | None = None
    kind: Literal["measured", "paper", "reference"] = "measured"

    def __post_init__(self) -> None:
        bounds = [b for b in (self.low, self.high) if b is not None]
        if len(bounds) == 1 or any(len(b) != len(self.alpha) for b in bounds):
            raise KvshotError(f"decay curve {self.name}: give both bounds of the interval, one value a step")

    @classmethod
    def from_summary(
        cls, name: str, summary: StepwiseSummary, kind: Literal["measured", "reference"] = "measured"
    ) -> Decay:
        """The marginal rates of an evaluation, with intervals if it has more than one conversation."""
        rates = [step.alpha_marginal for step in summary.steps]
        low, high = [r.low for r in rates], [r.high for r in rates]
        known = None not in low
        return cls(
            name, summary.alpha, low if known else None, high if known else None,
            n=rates[0].denominator, kind=kind,
        )


def alpha_decay(series: Sequence[Decay], *, ylabel: str = "acceptance rate α") -> Figure:
    """Acceptance per draft step, one labelled line a series, intervals as bands.

    Raises KvshotError for an empty list or series of different lengths.
    """
    if len({len(s.alpha) for s in series}) != 1:
        raise KvshotError("alpha_decay: give at least one series, all with the same number of steps")
    fig, ax = plt.subplots(layout="constrained")
    steps = np.arange(len(series[0].alpha))
    labels = []
    colours = looks()
    for s in series:
        look = _look(s.kind, colours)
        ax.plot(steps, s.alpha, **look)
        if s.low is not None:
            ax.fill_between(steps, s.low, s.high, color=look["color"], alpha=0.18, linewidth=0)
        counted = f"\nn = {s.n:,}" if s.n is not None else ""
        labels.append((float(s.alpha[-1]), s.name + counted, look["color"]))
    top = max(max(s.alpha if s.high is None else s.high) for s in series)
    ax.set(xlabel="draft step k", ylabel=ylabel, xticks=steps, ylim=(0, min(1.0, top * 1.08)))
    ax.set_xlim(-0.3, steps[-1] + 0.3)
    label_lines(ax, steps[-1] + 0.3, labels)
    plt.close(fig)  # so that a notebook shows it once, as the value of the cell
    return fig


def _look(kind: str, colours) -> dict:
    if kind == "reference":
        return {"color": GREY, "linestyle": ":", "marker": ""}
    colour, marker = next(colours)
    if kind == "paper":
        return {"color": colour, "linestyle": (0, (5, 2)), "marker": marker, "markerfacecolor": "white"}
    return {"color": colour, "linestyle": "-", "marker": marker}


def label_lines(ax: Axes, x: float, labels: list[tuple[float, str, str]]) -> None:
    """Write each label at the right end of its line, moved just enough not to overlap or to leave the figure."""
    ax.figure.draw_without_rendering()  # the layout decides the axes' height
    low, high = ax.get_ylim()
    points = ax.get_window_extent().height * 72 / ax.figure.dpi
    line = (high - low) * SMALL * 1.25 / points
    placed, below = [], low
    for y, text, colour in sorted(labels):
        half = line * (text.count("\n") + 1) / 2
        y = max(y, below + half)
        below = y + half + line / 4
        placed.append([y, half, text, colour])
    above = high + line  # half a line may stand above the axes
    for entry in reversed(placed):
        entry[0] = min(entry[0], above - entry[1])
        above = entry[0] - entry[1] - line / 4
    for y, _, text, colour in placed:
        ax.annotate(
            text, (x, y), xytext=(3, 0), textcoords="offset points", color=colour, fontsize=SMALL,
            va="center", annotation_clip=False,
        )


def decay_table(series: Sequence[Decay], digits: int = 3) -> pd.DataFrame:
    """The numbers behind `alpha_decay`: one row a step, one column a series, intervals in brackets."""
    def cell(s: Decay, k: int) -> str:
        interval = "" if s.low is None else f" [{s.low[k]:.{digits}f}, {s.high[k]:.{digits}f}]"
        return f"{s.alpha[k]:.{digits}f}{interval}"

    steps = range(len(series[0].alpha))
    table = pd.DataFrame({s.name: [cell(s, k) for k in steps] for s in series}, index=steps)
    return table.rename_axis(index=None, columns="step k")  # one header line instead of two


def rates_table(summary: StepwiseSummary) -> pd.DataFrame:
    """The three alphas with their denominators: one row a step."""
    kinds = ("marginal", "joint", "conditional")

    def cell(rate) -> str:
        return "-" if rate.value is None else f"{rate.value:.3f} of {rate.denominator:,}"

    rows = {s.step: [cell(getattr(s, f"alpha_{kind}")) for kind in kinds] for s in summary.steps}
    return pd.DataFrame.from_dict(rows, orient="index", columns=list(kinds)).rename_axis(columns="step k")


def summary_table(summaries: dict[str, StepwiseSummary]) -> pd.DataFrame:
    """MAT (from marginal and from joint alphas) and retention with 95 % intervals, one row a name."""
    columns = {"MAT": "mat", "MAT, joint": "mat_joint", "retention": "retention"}
    rows = {name: [f"{getattr(s, field):.3f}" for field in columns.values()] for name, s in summaries.items()}
    return pd.DataFrame.from_dict(rows, orient="index", columns=list(columns))


def learning_curve(curves: dict[str, Sequence], *, ylabel: str = "MAT on validation text") -> Figure:
    """MAT against training tokens seen, one labelled line a run; curves: points with `tokens` and `mat`."""
    fig, ax = plt.subplots(layout="constrained")
    labels = []
    for (name, points), (colour, marker) in zip(curves.items(), looks(), strict=False):
        seen, mat = [p.tokens / 1e6 for p in points], [p.mat for p in points]
        ax.plot(seen, mat, color=colour, marker=marker)
        labels.append((mat[-1], name, colour))
    ax.set(xlabel="training tokens seen (millions)", ylabel=ylabel)
    label_lines(ax, ax.get_xlim()[1], labels)
    plt.close(fig)
    return fig


def round_table(tokenizer, drafted: Round) -> pd.DataFrame:
    """One draft-and-verify round, a row a step: proposal, its probability, the target's choice, what became of it."""
    rows = []
    for k, (token, p) in enumerate(zip(drafted.drafted, drafted.probability, strict=True)):
        fate = "accepted" if k < drafted.accepted else "rejected" if k == drafted.accepted else "not reached"
        rows.append([repr(tokenizer.decode([token])), f"{p:.2f}", repr(tokenizer.decode([drafted.chosen[k]])), fate])
    return pd.DataFrame(rows, columns=["drafter proposes", "p", "target would say", ""]).rename_axis(columns="step k")


def rounds_table(tokenizer, rounds: Sequence[Round]) -> pd.DataFrame:
    """Rounds in order: how many proposals were accepted, their text, and the target's own token behind them."""
    rows = [[r.accepted, repr(tokenizer.decode(r.drafted[: r.accepted])), repr(tokenizer.decode([r.kept[-1]]))]
            for r in rounds]
    table = pd.DataFrame(rows, columns=["accepted", "drafted text that is kept", "the target adds"])
    return table.rename_axis(columns="round")


def answer_decoding_table(path: str | Path) -> pd.DataFrame:
    """What `benchmarks/answer_decoding.py` measured, one row a temperature."""
    rows = _benchmark_rows(path, "temperature", "dropped as looping", "ngram", "repeats itself")
    rates = [[r["dropped as looping"], r["ngram"]["5"], r["repeats itself"]] for r in rows]
    cells = [[f"{r['answers']:,} ({r['answer_tokens']:,} tokens)", *(f"{x:.3f}" for x in rate)]
             for r, rate in zip(rows, rates, strict=True)]
    columns = ["answers kept", "dropped as looping", "5-gram predicts", "repeats itself"]
    return pd.DataFrame(cells, [f"{r['temperature']:g}" for r in rows], columns).rename_axis(columns="temperature")


def decode_table(reports: Mapping[str, Sequence[DecodeReport]], positions: int = 4) -> pd.DataFrame:
    """Verify calls, MAT, and the share accepted at the first positions among those tried; pooled over texts."""
    rows = {}
    for name, several in reports.items():
        r = DecodeReport.pooled(several)
        shares = [f"{got / tried:.2f} ({tried})" if tried else "-" for got, tried in r.acceptance()[:positions]]
        shares += ["-"] * (positions - len(shares))
        rows[name] = [len(r.accepted), f"{r.mat:.2f}" if r.mat else "-", *shares]
    columns = ["verify calls", "MAT", *(f"draft {k + 1} accepted (tried)" for k in range(positions))]
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns)


def recipe_table(path: str | Path) -> pd.DataFrame:
    """What `benchmarks/recipe.py` measured, one row a short run; its speed where it was kept."""
    rows = _benchmark_rows(path, "name", "tokens", "mat", "loss")
    cells = {"tokens seen": [f"{r['tokens'] / 1e6:.2f} M" for r in rows], "loss": [f"{r['loss']:.2f}" for r in rows],
             "validation MAT": [f"{r['mat']:.3f}" for r in rows]}
    if all("tokens_per_second" in r for r in rows):
        cells["tokens/s"] = [f"{r['tokens_per_second']:,.0f}" for r in rows]
    return pd.DataFrame(cells, [r["name"] for r in rows]).rename_axis(columns="choice")


def _benchmark_rows(path: str | Path, *wanted: str) -> list[dict]:
    try:
        rows = json.loads(Path(path).read_text(encoding="utf-8"))["rows"]
        if not all({*wanted} <= {*row} for row in rows):
            raise KeyError(f"one of {', '.join(wanted)}")
    except (OSError, ValueError, KeyError) as err:
        raise KvshotError(f"{path} is no benchmark result ({err}): run the benchmark that writes it again") from err
    return rows


def experiments_table(target: Target, draft_vocab_size: int, names: Sequence[str] | None = None) -> pd.DataFrame:
    """What experiments read and remember, and what they cost on a target; all of them by default."""
    rows = {}
    for name in names or EXPERIMENTS:
        e = experiment(name)
        c = e.config(target, draft_vocab_size)
        spent = cost(c)
        layers = f" of layers {', '.join(map(str, c.kv_layers))}" if c.kv_layers else ""
        memory = {"own": "own", "none": "none", "target": "target's", "both": "own and target's"}[c.memory]
        how = [f"from {e.start}" if e.start else "", *(f"{key} {value}" for key, value in e.train.items())]
        reads = "states of " + ", ".join(map(str, c.hidden_layers)) if c.hidden_layers else "token only"
        rows[name] = [reads, memory + layers, c.injection or "", c.depth, ", ".join(filter(None, how)),
                      f"{spent.parameters / 1e6:.1f} M", f"{spent.flops / 1e6:.1f}"]
    columns = ["reads", "memory", "injection", "depth", "start, training", "parameters", "MFLOP a draft step"]
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns).rename_axis(columns="experiment")
