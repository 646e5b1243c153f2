"""A slider has a frame a value, live and static; what comes from text is escaped."""

from __future__ import annotations

import re

import pytest

from kvshot.errors import KvshotError
from kvshot.widgets import Slider, bars, shaded_text


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
