"""End-to-end measurements: the texts are the target's own, statistics equal plain sums, the cost model its formula."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import numpy as np
import pandas as pd
import pytest
import torch

from kvshot.data import DraftVocab
from kvshot.drafters import DrafterConfig, new_drafter
from kvshot.errors import KvshotError
from kvshot.evaluation import plain_decode
from kvshot.evaluation.tree import TreeShape
from kvshot.experiments import Bench, end_to_end, profile
from kvshot.experiments.end_to_end import Calls, EndToEnd, greedy_texts, mat_difference, mat_of, measure, place
from kvshot.experiments.wall_clock import by_shape, choices, pass_costs, per_call, predicted, speed_ups, time_decoding
from kvshot.targets import load_target
from tests.data.conftest import THINKING

PROMPTS = [[1, 5, 9, 20], [1, 5, 30], [1, 5, 9, 11, 12]]


@pytest.fixture(scope="module")
def target():
    return load_target("smoke", dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def drafter(target):
    vocab = DraftVocab(torch.arange(64), target.vocab_size)
    config = DrafterConfig.for_target(target, draft_vocab_size=64, hidden_layers=target.default_hidden_layers)
    return new_drafter(target, config, vocab, seed=0, init="random").eval()


def test_greedy_texts_are_the_plain_loops_and_are_kept(target, tmp_path, monkeypatch):
    monkeypatch.setenv("KVSHOT_CACHE", str(tmp_path))
    texts = greedy_texts(target, PROMPTS, 20, quiet=True)
    assert texts == [plain_decode(target, p, 20) for p in PROMPTS]
    (kept,) = tmp_path.rglob("greedy/*.json")
    kept.write_text(json.dumps([[1]]))
    assert greedy_texts(target, PROMPTS, 20, quiet=True) == [[1]]
    assert greedy_texts(target, PROMPTS, 21, quiet=True) != [[1]]


@pytest.mark.slow
def test_a_record_round_trip(drafter, tmp_path, monkeypatch):
    monkeypatch.setenv("KVSHOT_CACHE", str(tmp_path))
    bench = Bench(profile("smoke"), device="cpu", quiet=True)
    record = measure(bench, drafter, "eagle3", 0, datetime.now(UTC))
    path = place(tmp_path, "smoke", "eagle3")
    record.save(path)
    assert EndToEnd.load(path) == record
    domain = record.domains["held_out"]
    assert domain.prompts == 4 and domain.otherwise == 0
    for calls in domain.shapes.values():  # every call keeps a token at least, all but the first come from calls
        assert sum(calls.kept) == domain.tokens - domain.prompts
    assert sum(domain.shapes["chain 8"].calls) <= sum(domain.shapes["chain 1"].calls)
    same = mat_difference(record, record, "held_out", "chain 4", n_boot=20)
    assert (same.value, same.low, same.high) == (0, 0, 0)
    other = record.model_copy(deep=True)
    other.domains["held_out"].texts_sha256 = "0" * 64
    with pytest.raises(KvshotError, match="different texts"):
        mat_difference(record, other, "held_out", "chain 4")
    path.write_text("{}")
    with pytest.raises(KvshotError, match="measure it again"):
        EndToEnd.load(path)


def test_training_and_decoding_ask_the_template_for_the_same(monkeypatch):
    """Without its options a thinking target would be asked for thoughts that the training text does not have."""
    chosen = profile("smoke").model_copy(update={"template": {"enable_thinking": False}})
    bench, asked = Bench(chosen, device="cpu", quiet=True), []
    assert bench.template == {}  # the smoke target's own template has no such option
    bench = Bench(chosen, device="cpu", quiet=True)
    monkeypatch.setattr(bench.target.tokenizer, "chat_template", THINKING)

    def stop(target, prompts, *rest, **options):
        asked.extend(prompts)
        raise KvshotError("enough")

    monkeypatch.setattr(end_to_end, "greedy_texts", stop)
    with pytest.raises(KvshotError, match="enough"):
        measure(bench, None, "eagle3", 0, datetime.now(UTC))
    for prompt, example in zip(asked, bench.examples["held_out"], strict=False):
        assert example.ids[: len(prompt)].tolist() == list(prompt)
        assert example.loss_mask.argmax() == len(prompt)  # the block is prompt, and not learned


def test_mat_pools_calls():
    e = mat_of(Calls(calls=[10, 20, 5], kept=[20, 30, 15]), n_boot=500)
    assert e.value == pytest.approx(65 / 35)
    assert 1.5 <= e.low < e.value < e.high <= 3


@pytest.mark.slow
def test_timing_decodes_the_same_texts(target, drafter):
    times = time_decoding(target, PROMPTS, {"eagle3, chain 2": (drafter, TreeShape(2))}, max_new_tokens=12, quiet=True)
    assert len(times) == 3 * 4 and times["same"].all()
    ups = speed_ups(times, n_boot=50)
    assert ups.loc["plain loop", "speed-up"] == 1 and (ups["tokens/s"] > 0).all()
    calls = per_call(times)
    assert list(calls.index) == ["eagle3, chain 2"] and 1 <= calls["kept"].iloc[0] <= 3
    costs = pass_costs(target, PROMPTS[0] * 4, (1, 4), repeats=2)
    assert set(costs) == {1, 4} and min(costs.values()) > 0


def test_speed_up_is_the_median_of_paired_ratios():
    times = pd.DataFrame({"prompt": [0, 1, 2] * 2, "name": ["plain loop"] * 3 + ["x"] * 3, "tokens": 10,
                          "seconds": [2.0, 3.0, 8.0, 1.0, 2.0, 2.0], "same": True})
    ups = speed_ups(times, n_boot=100)
    assert ups.loc["x", "speed-up"] == 2.0 and ups.loc["x", "low"] >= 1.5 and ups.loc["x", "high"] <= 4
    assert ups.loc["x", "tokens/s"] == pytest.approx(30 / 5)


def test_the_cost_model():
    names = ["x, chain 1", "x, tree (2, 2, 4)", "y, chain 2"]
    calls = pd.DataFrame({"drafter": [0.03, 0.07, 0.05], "host": [0.005, 0.01, 0.0]}, index=names)
    mats, widths = dict(zip(names, (1.5, 2.0, 1.2), strict=True)), dict(zip(names, (2, 5, 3), strict=True))
    said = predicted(calls, mats, widths, {1: 0.1, 2: 0.12, 6: 0.20})
    assert said["x, chain 1"] == pytest.approx(1.5 * 0.1 / (0.12 + 0.03 + 0.005))
    assert said["x, tree (2, 2, 4)"] == pytest.approx(2.0 * 0.1 / (np.interp(5, [2, 6], [0.12, 0.20]) + 0.08))
    with pytest.raises(KvshotError, match="wide as that of y, chain 2 was"):
        predicted(calls, mats, widths | {"y, chain 2": 7}, {1: 0.1, 6: 0.2})
    ups = pd.DataFrame({"speed-up": [0.7, 0.9, 0.6]}, index=names)
    chosen = choices(said, ups, {n: n[0] for n in names})
    assert list(chosen.index) == ["x", "y"]
    grid = by_shape(said, {n: {"drafter": n[0], "shape": n[3:]} for n in names})
    assert list(grid.columns) == ["chain 1", "tree (2, 2, 4)", "chain 2"] and list(grid.index) == ["x", "y"]
    assert grid.loc["y", "chain 2"] == said.iloc[2] and np.isnan(grid.loc["y", "chain 1"])
    assert chosen.loc["x"].tolist() == [names[0], pytest.approx(said.iloc[0]), 0.7, names[1], 0.9]
