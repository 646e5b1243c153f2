"""Drawings made from configurations, in the manner of the paper's Fig. 3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from kvshot.drafters import DrafterConfig
from kvshot.evaluation.tree import Tree
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


def draft_tree(tokenizer, tree: Tree, path: Sequence[int]) -> Figure:
    """A tree of drafts, a column a level: nodes that the target accepted are filled and joined by a bold line."""
    parent, depth = tree.parent.tolist(), tree.depth.tolist()
    leaves = [n for n in range(len(parent)) if n not in parent[1:]]
    order: list[int] = []

    def visit(node: int) -> None:
        children = [n for n in range(1, len(parent)) if parent[n] == node]
        for child in children:
            visit(child)
        y[node] = sum(y[c] for c in children) / len(children) if children else float(-len(order))
        if not children:
            order.append(node)

    y: dict[int, float] = {}
    visit(0)
    figure, axes = plt.subplots(figsize=(WIDTH, 0.34 * max(len(leaves), 3) + 0.4))
    for node in range(len(parent)):
        good = node in path
        if node:
            axes.plot([depth[parent[node]] + 0.42, depth[node] - 0.42], [y[parent[node]], y[node]], zorder=1,
                      color=OWN if good else GREY, linewidth=2.4 if good else 0.8)
        text = repr(tokenizer.decode([int(tree.tokens[node])]))[1:-1].replace(" ", "\u2423")
        axes.text(depth[node], y[node], text, ha="center", va="center", fontsize=SMALL - 1, zorder=2,
                  bbox=dict(boxstyle="round,pad=0.25", facecolor=OWN if good else "white",
                            edgecolor=OWN if good else GREY, linewidth=0.8), color="white" if good else "#222222")
    axes.set(xlim=(-0.6, max(depth) + 0.6), ylim=(min(y.values()) - 0.6, max(y.values()) + 0.6))
    axes.axis("off")
    plt.close(figure)
    return figure
