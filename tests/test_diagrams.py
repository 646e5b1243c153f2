"""The drawing shows what the configuration says."""

import matplotlib
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg

from kvshot.diagrams import draft_tree, framework
from kvshot.drafters import DrafterConfig
from kvshot.evaluation.tree import Tree
from kvshot.viz import set_style

matplotlib.use("Agg")

SHAPE = dict(hidden_size=8, intermediate_size=12, n_heads=2, n_kv_heads=1, head_dim=4, norm_eps=1e-6, rope_theta=1e4,
             target_vocab_size=30, draft_vocab_size=10)
STATES, KV = dict(hidden_layers=(1, 2, 3)), dict(kv_layers=(0, 4), injection="linear")


@pytest.mark.parametrize(("choices", "shown", "absent"), [
    (STATES, ["target states\n(layers 1, 2, 3)", "own keys, values", "later steps: its own state"], ["gate"]),
    (dict(KV, memory="target", depth=2), ["target's keys, values\n(layers 0, 4)", "2 layers,\ndraft head"],
     ["own keys, values", "later steps: its own state"]),
    (dict(STATES, **KV, memory="both"), ["own keys, values", "target's keys, values\n(layers 0, 4)",
                                         "gate, 1 layer,\ndraft head"], []),
    (dict(STATES, memory="none"), ["its own chain only"], ["own keys, values"]),
])
def test_a_row_says_what_the_drafter_is(choices, shown, absent):
    set_style()
    figure = framework({"one": DrafterConfig(**SHAPE, **choices)})
    texts = [t.get_text() for t in figure.axes[0].texts]
    assert {"one", "token embedding", *shown} <= {*texts} and not {*absent} & {*texts}
    renderer = FigureCanvasAgg(figure).get_renderer()
    boxes = [t.get_window_extent(renderer) for t in figure.axes[0].texts]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_a_tree_shows_its_tokens_and_the_accepted_path():
    class Letters:
        def decode(self, ids):
            return " " + "abcdef"[ids[0]]

    tree = Tree(torch.arange(6), torch.tensor([0, 0, 0, 1, 1, 2]), torch.tensor([0, 1, 1, 2, 2, 2]), torch.zeros(6))
    axes = draft_tree(Letters(), tree, [0, 2]).axes[0]
    assert [t.get_text() for t in axes.texts] == ["\u2423" + c for c in "abcdef"]
    filled = [t.get_bbox_patch().get_facecolor()[:3] != (1, 1, 1) for t in axes.texts]
    assert filled == [True, False, True, False, False, False]
    assert [t.get_position()[0] for t in axes.texts] == [0, 1, 1, 2, 2, 2]
    assert len({t.get_position() for t in axes.texts}) == 6 and len(axes.lines) == 5
