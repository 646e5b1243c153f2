"""A slider has a frame a value, live and static; what comes from text is escaped."""

from __future__ import annotations

import re

import pytest

from kvshot.errors import KvshotError
from kvshot.viz import PALETTE
from kvshot.widgets import Slider, bars, curves, shaded_text


def test_live_and_static_show_the_same_frames():
    slider = Slider("k", ["k = 0", "k = 1"], ["<p>zero</p>", "<p>one</p>"], start=1)
    live = slider.widget()
    assert live.children[1].value == "<p>one</p>"
    live.children[0].value = "k = 0"
    assert live.children[1].value == "<p>zero</p>"
    static = slider.html()
    assert re.findall(r'<div data-frame="(k = \d)"( hidden)?>', static) == [("k = 0", " hidden"), ("k = 1", "")]
    assert 'max="1"' in static and 'value="1"' in static and "http" not in static
    bundle = slider._repr_mimebundle_()
    assert bundle["text/html"] == static and "application/vnd.jupyter.widget-view+json" in bundle


@pytest.mark.parametrize(("captions", "frames", "start"), [([], [], 0), (["a"], ["x", "y"], 0), (["a"], ["x"], 1)])
def test_frames_and_captions_go_together(captions, frames, start):
    with pytest.raises(KvshotError, match="as many captions as frames"):
        Slider("k", captions, frames, start)


def test_pieces():
    text = shaded_text(["<a>", "b\n"], [0.0, 0.52], marked=1)
    assert "&lt;a&gt;" in text and "0.35)" in text and text.count("outline") == 1 and "⏎" in text
    assert re.findall(r"height:(\d+)px\"></span>", bars([1, 2, 0], ("0", "1"), 100)) == ["50", "100", "0"]


def test_curves_are_drawn_to_scale_and_keep_their_colours():
    drawn = curves({"none": [], "<a>": [0.5, 0.0, 1.0]}, 1.0, ("step", "rate"))
    (points,) = re.findall(r'points="([^"]+)"', drawn)
    (x0, y0), (x1, y1), (x2, y2) = ([float(v) for v in p.split(",")] for p in points.split())
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2) and y0 == pytest.approx((y1 + y2) / 2) and y2 < y1
    assert PALETTE[1] in drawn and PALETTE[0] not in drawn and "&lt;a&gt;" in drawn
