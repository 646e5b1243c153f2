"""Something to move: a slider over prepared frames, live in Jupyter and on a static page alike."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from itertools import cycle

from kvshot.errors import KvshotError
from kvshot.viz import PALETTE

DASHES = ("", "7 4", "2 3", "10 3 2 3", "12 4")  # lines can be told apart in grey print

_MOVE = ("const f=this.closest('figure');f.querySelectorAll('[data-frame]').forEach((m,k)=>{m.hidden=k!=this.value;"
         "if(k==this.value){f.querySelector('output').value=m.dataset.frame;"
         "this.setAttribute('aria-valuetext',m.dataset.frame)}})")


class Slider:
    """A slider over a few values; each shows a piece of HTML.

    Jupyter gets ipywidgets; a page without a kernel (the book, a viewer) gets the same frames behind an HTML range
    input, which needs nothing from elsewhere. name: what the values are of; captions: what a screen reader says, too.
    """

    def __init__(self, name: str, captions: Sequence[str], frames: Sequence[str], start: int = 0) -> None:
        if not frames or len(captions) != len(frames) or not 0 <= start < len(frames):
            raise KvshotError(f"a slider over {len(captions)} captions and {len(frames)} frames from number {start}: "
                              "give as many captions as frames, and start at one of them")
        self.name, self.captions, self.frames, self.start = name, list(captions), list(frames), start

    def widget(self):
        """The ipywidgets version."""
        import ipywidgets

        slider = ipywidgets.SelectionSlider(options=self.captions, value=self.captions[self.start],
                                            description=self.name, layout={"width": "100%"},
                                            style={"description_width": "initial"})
        shown = ipywidgets.HTML(self.frames[self.start])
        slider.observe(lambda change: setattr(shown, "value", self.frames[self.captions.index(change["new"])]), "value")
        return ipywidgets.VBox([slider, shown])

    def html(self) -> str:
        """The static version."""
        frames = "".join(f'<div data-frame="{html.escape(c)}"{"" if i == self.start else " hidden"}>{f}</div>'
                         for i, (c, f) in enumerate(zip(self.captions, self.frames, strict=True)))
        first = html.escape(self.captions[self.start])
        return (f'<figure class="kvshot-slider"><label>{html.escape(self.name)} <input type="range" min="0" '
                f'max="{len(self.frames) - 1}" step="1" value="{self.start}" aria-valuetext="{first}" '
                f'oninput="{html.escape(_MOVE)}"></label> <output>{first}</output>{frames}</figure>')

    def __repr__(self) -> str:
        return f"Slider({self.name!r}, {self.captions})"

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict:
        bundle = {"text/plain": repr(self), "text/html": self.html()}
        live = self.widget()._repr_mimebundle_()
        return bundle | {kind: data for kind, data in live.items() if kind.startswith("application/")}


def shaded_text(tokens: Sequence[str], weights: Sequence[float], marked: int | None = None) -> str:
    """Tokens with a background as dark as their weight (0..1, in twentieths), one of them in a frame."""
    out = []
    for i, (token, weight) in enumerate(zip(tokens, weights, strict=True)):
        shade = round(20 * min(1.0, max(0.0, weight))) * 0.035  # the darkest still leaves black text readable
        edge = "outline:2px solid #D55E00;" if i == marked else ""
        text = html.escape(token).replace("\n", "⏎")
        out.append(f'<span style="background:rgba(0,114,178,{shade:g});{edge}">{text}</span>')
    return f'<p style="line-height:1.8">{"".join(out)}</p>'


def bars(heights: Sequence[float], labels: tuple[str, str], height: int = 120) -> str:
    """A histogram: heights scaled to the largest, the labels of its left and its right end."""
    top = max(max(heights), 1e-12)
    each = "".join(f'<span style="flex:1;margin:0 1px;background:#0072B2;height:{round(height * h / top)}px"></span>'
                   for h in heights)
    left, right = map(html.escape, labels)
    return (f'<div style="display:flex;align-items:flex-end;height:{height}px;border-bottom:1px solid #6B6B6B">{each}'
            f'</div><div style="display:flex;justify-content:space-between"><span>{left}</span><span>{right}</span>'
            "</div>")


def curves(lines: Mapping[str, Sequence[float]], top: float, labels: tuple[str, str]) -> str:
    """Lines over 0, 1, 2, … between 0 and `top`, as a drawing with a legend below; labels: of the two axes.

    A line without values is left out, and keeps its colour for other drawings.
    """
    width, height, left, down = 460, 240, 50, 200
    most, top = max([2, *map(len, lines.values())]) - 1, max(top, 1e-12)

    def at(k: int, y: float) -> str:
        return f"{left + (width - left - 12) * k / most:.1f},{down - (down - 10) * y / top:.1f}"

    parts = []
    for tick in range(int(top * 10) + 1):
        x, y = at(0, tick / 10).split(",")
        parts.append(f'<path d="M{x} {y}H{width}" stroke="#E3E3E3"/><text x="{left - 6}" y="{float(y) + 4:.1f}" '
                     f'text-anchor="end">{tick / 10:.1f}</text>')
    for k in range(most + 1):
        parts.append(f'<text x="{at(k, 0).split(",")[0]}" y="{down + 16}" text-anchor="middle">{k}</text>')
    legend = []
    for (name, values), colour, dash in zip(lines.items(), cycle(PALETTE), cycle(DASHES), strict=False):
        if not values:
            continue
        points = " ".join(at(k, y) for k, y in enumerate(values))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2.2" '
                     f'stroke-dasharray="{dash}"/>')
        legend.append(f'<span style="color:{colour};white-space:nowrap"><svg width="34" height="10"><path d="M0 5H34" '
                      f'stroke="{colour}" stroke-width="2.2" stroke-dasharray="{dash}"/></svg> '
                      f"{html.escape(name)}</span>")
    x, y = map(html.escape, labels)
    return (f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{y} against {x}" '
            f'style="width:100%;max-width:{width}px;font-size:12px;fill:#444">{"".join(parts)}'
            f'<text x="{(left + width) // 2}" y="{height - 6}" text-anchor="middle">{x}</text>'
            f'<text transform="translate(14 {down // 2 + 5}) rotate(-90)" text-anchor="middle">{y}</text></svg>'
            f'<div>{" &nbsp; ".join(legend)}</div>')
