"""The paper's campaign at the real shapes of its target, without weights."""

import pytest

from kvshot.experiments import EXPERIMENTS, profile
from kvshot.experiments.dry_run import dry_run, feature_bytes, shape_of


def test_the_papers_target_at_its_real_size():
    target = shape_of("Qwen/Qwen3-8B")
    assert sum(p.numel() for p in target.model.parameters()) == 8_190_735_360  # as on its model card: 8.2 B
    assert target.default_hidden_layers == (2, 18, 33) and target.default_kv_layers == (6, 18, 30)
    assert all(p.is_meta for p in target.model.parameters())


def test_every_experiment_builds_at_the_papers_shapes():
    rows = dry_run(profile("paper")).set_index("experiment")
    assert list(rows.index) == list(EXPERIMENTS)
    d, v = 4096, 32_000
    eagle = 3 * d * d + 2 * d * (4096 + 2 * 1024) + d * d + 3 * d * 12_288 + d * v + 4 * d
    assert rows.loc["eagle3", "parameters (M)"] == pytest.approx(eagle / 1e6)
    assert rows.loc["eagle3", "features of a batch (GB)"] == pytest.approx(16_384 * 4 * 4096 * 2 / 1e9)
    layer = rows.loc["kv-only-3", "parameters (M)"] - rows.loc["kv-only-2", "parameters (M)"]
    block = d * (4096 + 2 * 1024) + d * d + 3 * d * 12_288 + 2 * d + 2 * 1024 * 3 * 1024
    assert layer == pytest.approx(block / 1e6)
    assert rows["hours"].gt(0).all()
    assert rows.loc["kv-only-4", "training memory (GB)"] > rows.loc["kv-only-2", "training memory (GB)"] + 20
    faster = dry_run(profile("paper"), ["eagle3"], tflops=600)
    assert faster["hours"][0] == pytest.approx(rows.loc["eagle3", "hours"] / 2)


def test_bytes_of_a_token():
    target = shape_of("Qwen/Qwen3-8B")
    hybrid = EXPERIMENTS["hybrid-random"].config(target, 32_000)
    assert feature_bytes(target, hybrid) == 2 * (4 * 4096 + 2 * 3 * 8 * 128)
