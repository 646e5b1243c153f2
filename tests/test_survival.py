"""Probes find what is there: the token's own cache holds its value; rates equal plain sums."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

from kvshot.analysis.compression import attention_maps
from kvshot.analysis.survival import CACHE, recovered, survival
from kvshot.errors import KvshotError
from kvshot.targets import capture, load_target


@pytest.fixture(scope="module")
def target():
    return load_target("smoke", dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def texts():
    g = torch.Generator().manual_seed(0)
    return [torch.randint(3, 40, (48,), generator=g) for _ in range(24)]


@pytest.fixture(scope="module")
def table(target, texts):
    return survival(target, texts[:20], texts[20:], {"state": (2,), "embedding": (0,)}, block=1, distances=(0, 2, 8),
                    quiet=True)


def test_each_source_knows_what_it_holds(table):
    rates = recovered(table, ["source", "distance"], n_boot=50)
    assert (rates.loc[CACHE, "r2"] > 0.9).all()
    assert rates.loc[("embedding", 0), "right"] == 1 and rates.loc[("embedding", 8), "right"] < 0.3
    assert rates.loc[("state", 0), "r2"] > rates.loc[("state", 8), "r2"] + 0.3
    assert rates.loc[("state", 0), "right"] > rates.loc[("state", 8), "right"]
    assert (rates.n == 4 * (48 - 9)).all() and (rates.r2_low <= rates.r2).all() and (rates.r2 <= rates.r2_high).all()


def test_weights_are_those_that_the_token_received(target, texts, table):
    weights = torch.stack([w for _, w in attention_maps(target, texts[21], (0, 1))]).flatten(0, 1)  # below state 2
    rows = table[(table.text == 1) & (table.source == "state") & (table.distance == 2)]
    wanted = [float(weights[:, t, t - 2].mean()) for t in range(9, 48)]
    assert rows.weight.tolist() == pytest.approx(wanted, abs=1e-6)


def test_totals_are_around_the_mean_of_tokens_with_like_attention(target, texts):
    kept = survival(target, texts[:20], texts[20:], {"state": (2,)}, block=1, distances=(2,), edges=(0.03,), quiet=True)
    one = kept[kept.source == "state"]
    assert set(one.group) == {0, 1} and ((one.weight >= 0.03) == (one.group == 1)).all()
    known, weights = [], []
    for ids in texts[:20]:
        values = capture(target, ids[None], hidden_layers=(), kv_layers=(1,)).values[0, 0].transpose(0, 1).flatten(1)
        w = torch.stack([w for _, w in attention_maps(target, ids, (0, 1))]).flatten(0, 1)
        known += [values[t - 2].double() for t in range(3, 48)]
        weights += [float(w[:, t, t - 2].mean()) for t in range(3, 48)]
    heavy = torch.stack([v for v, w in zip(known, weights, strict=True) if w >= 0.03]).mean(0)
    values = capture(target, texts[20][None], hidden_layers=(), kv_layers=(1,)).values[0, 0].transpose(0, 1).flatten(1)
    first = one[one.text == 0].reset_index(drop=True)
    row = first[first.group == 1].index[0]
    assert first.total[row] == pytest.approx(float(((values[row + 1].double() - heavy) ** 2).sum()), rel=1e-5)


def test_rates_are_plain_sums():
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"text": rng.integers(0, 5, 60), "g": rng.integers(0, 2, 60), "error": rng.random(60),
                          "total": 1 + rng.random(60), "right": rng.random(60) < 0.3})
    rates = recovered(table, ["g"], n_boot=20)
    for g in range(2):
        rows = table[table.g == g]
        got = rates.loc[(g,)]
        assert got.r2 == pytest.approx(1 - rows.error.sum() / rows.total.sum())
        assert got.right == pytest.approx(rows.right.mean()) and got.n == len(rows)


def test_short_texts(target, texts):
    with pytest.raises(KvshotError, match="fewer than two texts to fit on.*longer than 65"):
        survival(target, texts[:2], texts[2:4], {"state": (2,)}, quiet=True)
