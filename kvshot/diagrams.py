"""Drawings made from configurations, in the manner of the paper's Fig. 3."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from kvshot.drafters import DrafterConfig
from kvshot.viz import GREY, PALETTE, SMALL, WIDTH

TOKEN, STATE, OWN, TARGET = GREY, PALETTE[0], PALETTE[2], PALETTE[1]
X = {"reads": (0.0, 1.42), "attention": (1.78, 3.3), "out": (3.66, 4.6)}  # left and right edge, inches
BOX, GAP = 0.46, 0.12  # inches


def framework(drafters: Mapping[str, DrafterConfig]) -> Figure:
    """One row a drafter: what it reads, what its queries attend to, what comes out and goes back in."""
    rows = {name: max(len(_reads(c)), len(_attends(c))) for name, c in drafters.items()}
    heights = [n * (BOX + GAP) + 0.62 for n in rows.values()]
    figure = plt.figure(figsize=(WIDTH, sum(heights)))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-0.05, WIDTH + 0.05), ylim=(0, sum(heights)))
    axes.axis("off")
    top = sum(heights)
    for (name, config), height in zip(drafters.items(), heights, strict=True):
        _row(axes, name, config, top, height)
        top -= height
    plt.close(figure)  # a notebook shows what the cell returns, and would show an open figure as well
    return figure


def _reads(config: DrafterConfig) -> list[tuple[str, str]]:
    boxes = [("token embedding", TOKEN)]
    if config.reads_hidden:
        layers = ", ".join(map(str, config.hidden_layers))
        boxes.append((f"target states\n(layers {layers})", STATE))
    return boxes


def _attends(config: DrafterConfig) -> list[tuple[str, str]]:
    own = "own keys, values", OWN
    target = f"target's keys, values\n(layers {', '.join(map(str, config.kv_layers))})", TARGET
    boxes = {"own": [own], "target": [target], "both": [own, target], "none": [("its own chain only", OWN)]}
    return boxes[config.memory]


def _row(axes: Axes, name: str, config: DrafterConfig, top: float, height: float) -> None:
    axes.text(0, top - 0.1, name, weight="bold", fontsize=10, va="top")
    middle = top - 0.3 - (height - 0.62) / 2
    reads = _column(axes, "reads", _reads(config), middle)
    attends = _column(axes, "attention", _attends(config), middle)
    layers = f"{config.depth} layer" + ("s" if config.depth > 1 else "")
    merged = "gate, " if config.memory == "both" else ""
    (out,) = _column(axes, "out", [(f"{merged}{layers},\ndraft head", GREY)], middle)
    for y in reads:
        for z in attends:
            _arrow(axes, (X["reads"][1], y), (X["attention"][0], z))
    for z in attends:
        _arrow(axes, (X["attention"][1], z), (X["out"][0], out))
    if config.reads_hidden:
        low = min(reads[-1], out) - BOX / 2
        _arrow(axes, (sum(X["out"]) / 2, out - BOX / 2), (sum(X["reads"]) / 2, reads[-1] - BOX / 2), bend=-0.16)
        axes.text(sum(X["attention"]) / 2, low - 0.28, "later steps: its own state", fontsize=SMALL - 1, ha="center",
                  va="top", color=STATE)


def _column(axes: Axes, where: str, boxes: list[tuple[str, str]], middle: float) -> list[float]:
    """Boxes stacked around `middle`; returns their heights' middles, from the top."""
    left, right = X[where]
    start = middle + (len(boxes) - 1) * (BOX + GAP) / 2
    out = []
    for n, (text, color) in enumerate(boxes):
        y = start - n * (BOX + GAP)
        axes.add_patch(FancyBboxPatch((left, y - BOX / 2), right - left, BOX, linewidth=1.2, edgecolor=color,
                                      facecolor="white", boxstyle="round,pad=0,rounding_size=0.06", zorder=2))
        axes.text((left + right) / 2, y, text, fontsize=SMALL - 1, ha="center", va="center", zorder=3)
        out.append(y)
    return out


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], bend: float = 0.0) -> None:
    color = STATE if bend else GREY
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=8, linewidth=1.0, color=color,
                                   connectionstyle=f"arc3,rad={bend}", zorder=1, shrinkA=0, shrinkB=0))
