"""Attention from queries and keys is the model's own; shifts equal plain loops."""

from __future__ import annotations

import math

import pytest
import torch

from kvshot.analysis.compression import attention_maps, attention_shift, interval_by, suppressed_example
from kvshot.errors import KvshotError
from kvshot.targets import load_target


@pytest.fixture(scope="module")
def target():
    return load_target("smoke", dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def ids():
    return torch.randint(3, 300, (24,), generator=torch.Generator().manual_seed(0))


def test_maps_are_the_models_own(target, ids):
    kind = target.config._attn_implementation
    target.model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            theirs = target.model(ids[None], output_attentions=True).attentions
    finally:
        target.model.set_attn_implementation(kind)
    maps = dict(attention_maps(target, ids, target.kv_layers))
    assert len(maps) == target.n_layers
    for layer, weights in maps.items():
        torch.testing.assert_close(weights, theirs[layer][0])


def test_shift_equals_plain_loops(target, ids):
    first, k, layer = 5, 3, target.kv_layers[-1]
    got = attention_shift(target, [ids], [0, k], layers=[layer], first=first)
    ((_, weights),) = attention_maps(target, ids, [layer])
    suppressed, distance = [], []
    for head in weights:
        for t in range(first, len(ids) - k):
            now, later = head[t, 1 : t + 1], head[t + k, 1 : t + 1]
            p, q = (now / now.sum()).tolist(), (later / later.sum()).tolist()
            suppressed.append(sum(b for a, b in zip(p, q, strict=True) if a < 0.01))
            js = sum((a * math.log2(2 * a / (a + b)) if a else 0) + (b * math.log2(2 * b / (a + b)) if b else 0)
                     for a, b in zip(p, q, strict=True)) / 2
            distance.append(math.sqrt(max(js, 0)))
    row = got[got.k == k].iloc[0]
    assert row.suppressed == pytest.approx(sum(suppressed) / len(suppressed), abs=1e-5)
    assert row.distance == pytest.approx(sum(distance) / len(distance), abs=1e-4)
    assert got[got.k == 0].iloc[0].distance == pytest.approx(0, abs=1e-3)


def test_the_example_is_the_largest(target, ids):
    found = suppressed_example(target, ids, k=2, first=5)
    best = 0.0
    for _, weights in attention_maps(target, ids, target.kv_layers):
        for head in weights:
            for t in range(5, len(ids) - 2):
                for i in range(1, t + 1):
                    if head[t, i] < 0.01:
                        best = max(best, float(head[t + 2, i]))
    assert found["after"] == pytest.approx(best) and found["before"] < 0.01
    assert 1 <= found["token"] <= found["position"]


def test_intervals_and_short_texts(target, ids):
    table = attention_shift(target, [ids, ids.flip(0)], [1], first=5)
    summary = interval_by(table, "suppressed", "k")
    assert (summary.low <= summary["mean"]).all() and (summary["mean"] <= summary.high).all()
    with pytest.raises(KvshotError, match="longer"):
        attention_shift(target, [ids], [1], first=50)
    with pytest.raises(KvshotError, match="more than 54"):
        suppressed_example(target, ids[:54], 4, first=50)
