"""Every row of the paper is an experiment; each builds, trains a step and predicts on the smoke target."""

from __future__ import annotations

import pytest
import torch

from kvshot import paper
from kvshot.data import DraftVocab, encode_all
from kvshot.data.toy import toy_conversations
from kvshot.drafters import DrafterConfig, new_drafter
from kvshot.errors import KvshotError
from kvshot.experiments import EXPERIMENTS, cost, experiment, profile, recipe
from kvshot.experiments.registry import plan, select
from kvshot.targets import FeatureStore, load_target
from kvshot.training.batches import load_batch
from kvshot.training.ttt import TTTLoss, choose_columns


def test_every_row_of_the_paper_is_an_experiment():
    assert set(paper.TABLE5) <= set(EXPERIMENTS)
    assert set(paper.TABLE6) - {"baseline"} <= set(EXPERIMENTS)  # the baseline is kv-only-2
    for key, row in paper.TABLE5.items():
        assert {f"table{n}" for n in row.tables} <= set(EXPERIMENTS[key].tables), key
    assert all("table6" in EXPERIMENTS[key].tables for key in paper.TABLE6 if key != "baseline")
    assert set(paper.FIG1B) <= set(EXPERIMENTS)


def test_the_order_serves_checkpoints_and_claims_first():
    order = plan((), 3)
    assert len(order) == len({(e.name, s) for e, s in order}) == len(EXPERIMENTS) + 2 * sum(
        e.decisive for e in EXPERIMENTS.values())
    names = [(e.name, s) for e, s in order]
    for e, seed in order:
        if e.start:
            assert names.index((e.start, seed)) < names.index((e.name, seed))
    first = [e.decisive for e, _ in order[: len(EXPERIMENTS)]]
    assert first == sorted(first, reverse=True)


def test_selection_by_table_or_name_brings_the_start_along():
    assert [e.name for e in select(["cross-only-checkpoint"])] == ["eagle3", "cross-only-checkpoint"]
    assert {e.name for e in select(["table6"])} == {"kv-only-2"} | set(paper.TABLE6) - {"baseline"}
    with pytest.raises(KvshotError, match="unknown experiment or table 'table7'"):
        select(["table7"])
    with pytest.raises(KvshotError, match="unknown experiment 'eagle4'"):
        experiment("eagle4")


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    target = load_target("smoke", device="cpu")
    examples = encode_all(target.tokenizer, toy_conversations(8), 96).examples
    vocab = DraftVocab.from_examples(examples, target.vocab_size, 40)
    everything = tuple(range(target.n_layers + 1))
    store = FeatureStore.build(tmp_path_factory.mktemp("features"), target, examples, hidden_layers=everything,
                               kv_layers=target.kv_layers, quiet=True)
    return target, vocab, store


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_learns_on_the_smoke_target(setting, name):
    target, vocab, store = setting
    config, e = recipe(profile("smoke"), name), EXPERIMENTS[name]
    drafter = new_drafter(target, e.config(target, len(vocab)), vocab, seed=0, init=config.init)
    assert cost(drafter.config).parameters == sum(p.numel() for p in drafter.parameters())
    batch = load_batch(store, [0, 3, 5], drafter.config)
    columns = choose_columns(batch.loss_mask, config.n_steps, 16, torch.Generator().manual_seed(0))
    loss = TTTLoss(drafter, target.scorer(vocab.ids), n_steps=config.n_steps, offline=config.offline)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    values = []
    for _ in range(8):
        values.append(loss(batch, columns))
        values[-1].backward()
        if len(values) == 1:
            idle = [n for n, p in drafter.named_parameters() if p.grad is None or not p.grad.any()]
            assert not idle
        optimizer.step()
        optimizer.zero_grad()
    assert values[-1] < values[0]


def test_one_change_at_a_time():
    """Rows of Table 6 differ from its baseline in what they say, and in nothing else."""
    target = load_target("smoke", device="cpu")
    base = EXPERIMENTS["kv-only-2"].config(target, 40).model_dump()
    differs = {
        name: {k for k, v in EXPERIMENTS[name].config(target, 40).model_dump().items() if v != base[k]}
        for name in paper.TABLE6 if name != "baseline"}
    assert differs == {
        "kv-layers-4": {"kv_layers"}, "mlp-projector": {"injection"}, "mlp-projector-norm": {"injection"},
        "hidden-to-kv": {"injection"}, "qk-norm": {"qk_norm"}, "offline-ttt": set(), "offline-ttt-gradient-50": set()}
    assert EXPERIMENTS["offline-ttt"].train == {"offline": True}


def test_the_cost_by_hand():
    shape = dict(hidden_size=8, intermediate_size=12, n_heads=2, n_kv_heads=1, head_dim=4, norm_eps=1e-6,
                 rope_theta=1e4, target_vocab_size=30, draft_vocab_size=10)
    block = 16 * 8 + 2 * 16 * 4 + 8 * 8 + 3 * 8 * 12  # q; k and v; o; MLP
    eagle = DrafterConfig(**shape, hidden_layers=(1, 2, 3))
    assert cost(eagle, prefix=100).flops == 2 * (block + 8 * 10) + 4 * 100 * 8
    assert cost(eagle).parameters == block + 8 * 10 + 24 * 8 + 4 * 8
    alone = DrafterConfig(**shape, hidden_layers=(1, 2, 3), memory="none")
    assert cost(alone, prefix=100).flops == 2 * (block + 8 * 10)
    hybrid = DrafterConfig(**shape, hidden_layers=(1, 2, 3), memory="both", kv_layers=(0, 1), injection="linear")
    cross, gate = 16 * 8 + 2 * 16 * 4 + 8 * 8, 24 * 8 + 8 * 8
    assert cost(hybrid, prefix=100).flops == 2 * (block + cross + gate + 8 * 10) + 2 * 4 * 100 * 8
