"""Probes report what autograd computes, count who contributes, and change nothing."""

from __future__ import annotations

import lzma

import pytest
import torch

from kvshot.drafters.config import DrafterConfig
from kvshot.drafters.init import new_drafter
from kvshot.errors import KvshotError
from kvshot.targets import OnlineFeatures
from kvshot.training.batches import load_batch
from kvshot.training.probes import Probes, effective_rank, load_probes, numbers, participation, save_probes
from kvshot.training.trainer import TrainConfig, Trainer
from kvshot.training.ttt import TTTLoss, choose_columns, gather_columns

CONFIG = TrainConfig(steps=8, batch_tokens=512, columns_per_sequence=8, n_steps=3, eval_every=4, lr=3e-3,
                     precision="no")


def evaluate(drafter):
    return {"mat": 1.0}


def config(small, memory, **more):
    layers = {"hidden_layers": small.target.default_hidden_layers} if memory in ("own", "both") else {}
    target = {"kv_layers": small.target.spaced_kv_layers(2), "injection": "linear"} if memory != "own" else {}
    return DrafterConfig.for_target(small.target, draft_vocab_size=48, memory=memory, **layers, **target, **more)


def probed(small, chosen, n_steps=3, offline=False):
    """The probes' row, the drafter with its gradients, the batch and its columns: one loss, close up."""
    features = OnlineFeatures(small.target, small.examples, kv_layers=chosen.kv_needed)
    drafter = new_drafter(small.target, chosen, small.vocab, seed=0)
    batch, probes = load_batch(features, [0, 3], chosen), Probes(drafter)
    loss = TTTLoss(drafter, small.target.scorer(small.vocab.ids), n_steps=n_steps, offline=offline)
    columns = choose_columns(batch.loss_mask, n_steps, 5, torch.Generator().manual_seed(0))
    with probes.watch(close=True):
        loss(batch, columns).backward()
    return numbers([probes.row()])[0], drafter, batch, columns, loss


def test_effective_rank_and_participation_know_their_limits():
    assert effective_rank(torch.eye(5)) == pytest.approx(5)
    assert effective_rank(torch.outer(torch.arange(1.0, 6), torch.ones(7))) == pytest.approx(1, abs=1e-3)
    assert effective_rank(torch.diag(torch.tensor([0.5, 0.25, 0.25]))) == pytest.approx(2**1.5)
    assert participation(torch.ones(6)) == pytest.approx(6)
    assert participation(torch.tensor([3.0, 0, 0])) == pytest.approx(1)


@pytest.mark.parametrize(("memory", "depth"), [("own", 1), ("target", 2), ("both", 1)])
def test_norms_and_ranks_are_those_of_the_gradients(small, memory, depth):
    row, drafter, *_ = probed(small, config(small, memory, depth=depth))
    for branch in drafter.layers[0].branches:
        for short in "qkv":
            gradients = [layer.get_submodule(f"{branch}.{short}_proj").weight.grad for layer in drafter.layers]
            assert row[f"norm.{branch}.{short}"] == pytest.approx(sum((g**2).sum() for g in gradients).sqrt().item())
            ranks = [effective_rank(g) for g in gradients]
            assert row[f"rank.{branch}.{short}"] == pytest.approx(sum(ranks) / depth)
    assert ("norm.injections" in row) == (memory != "own") and ("norm.merge" in row) == (memory == "both")


def test_who_contributes(small):
    """Draft-side entries are the only ones of a KV-only drafter; its own memory gives a drafter all positions."""
    row, _, batch, columns, loss = probed(small, config(small, "target"))
    deep = probed(small, config(small, "target", depth=2))[0]
    assert deep["rows.self_attn.v"] == row["rows.self_attn.v"]  # of a layer, not of all
    kept = torch.stack([columns.valid[..., k] & loss.in_vocab[gather_columns(batch.argmax, columns.at + 1 + k)]
                        for k in range(3)], -1)
    last = (kept * torch.arange(1, 4)).amax(-1)  # steps up to the last one that is judged
    assert row["rows.self_attn.v"] == last.sum() and row["rows.self_attn.q"] == kept.sum()
    assert 1 <= row["shared.self_attn.v"] <= row["rows.self_attn.v"]
    own = probed(small, config(small, "own"))[0]
    assert own["rows.self_attn.k"] > row["rows.self_attn.k"] and own["rows.self_attn.q"] >= row["rows.self_attn.q"]


@pytest.mark.parametrize("offline", [False, True])
def test_gates_are_those_of_each_draft_step(small, offline):
    chosen = config(small, "both")
    seen = []
    row, drafter, batch, columns, loss = probed(small, chosen, offline=offline)
    drafter.layers[0].merge.register_forward_pre_hook(lambda m, args: seen.append(m.gate(*args).mean().item()))
    with torch.no_grad():
        loss(batch, columns)
    assert [row[f"gate.{k}"] for k in range(3)] == pytest.approx(seen) and len(set(seen)) == 3
    assert sum(row[f"gate.bin.{i}"] for i in range(20)) == chosen.hidden_size


def test_training_with_probes_is_training_without(small, tmp_path, monkeypatch):
    chosen, weights = config(small, "both"), []
    features = OnlineFeatures(small.target, small.examples, kv_layers=chosen.kv_needed)

    for n in range(2):
        if n:
            monkeypatch.setattr(Probes, "row", lambda self: {})
            monkeypatch.setattr(Probes, "_gate", lambda *args: None)
            monkeypatch.setattr(Probes, "_rows", lambda *args: lambda *a: None)
        drafter = new_drafter(small.target, chosen, small.vocab, seed=0)
        run = Trainer(small.target, drafter, small.vocab, features, CONFIG, tmp_path / str(n), evaluate)
        done = run.run(quiet=True)
        weights.append(drafter.state_dict())
        assert len(done.probes) == 8 and (list(done.probes[0]) == ["step"]) == bool(n)
        if not n:
            close = [i for i, row in enumerate(done.probes) if "rank.cross_attn.k" in row]
            assert close == [3, 7]
    assert all(torch.equal(w, weights[1][name]) for name, w in weights[0].items())


def test_a_resumed_run_has_the_rows_of_a_whole_one(small, tmp_path):
    def trainer(folder):
        drafter = new_drafter(small.target, small.config, small.vocab, seed=0)
        return Trainer(small.target, drafter, small.vocab, small.store, CONFIG, tmp_path / folder, evaluate)

    whole = trainer("whole").run(quiet=True)
    trainer("halves").run(until=4, quiet=True)
    assert trainer("halves").run(quiet=True).probes == whole.probes
    assert [row["step"] for row in whole.probes] == list(range(1, 9))


def test_a_run_that_was_interrupted_and_called_again_has_each_step_once(small, tmp_path):
    drafter = new_drafter(small.target, small.config, small.vocab, seed=0)
    run = Trainer(small.target, drafter, small.vocab, small.store, CONFIG, tmp_path, evaluate)
    real, calls = run._step, iter(range(100))

    def step(batches):
        if next(calls) == 5:
            raise KeyboardInterrupt
        return real(batches)

    run._step = step
    with pytest.raises(KeyboardInterrupt):
        run.run(quiet=True)
    assert [row["step"] for row in run.run(quiet=True).probes] == list(range(1, 9))


def test_a_table_comes_back(tmp_path):
    save_probes(tmp_path / "p.csv.xz", [{"step": 1, "a": 0.123456}, {"step": 20001.0, "a": 2.0, "b": 1e-7}])
    table = load_probes(tmp_path / "p.csv.xz")
    assert list(table.index) == [1, 20001] and table["a"].tolist() == [0.1235, 2.0]
    assert table["b"].isna().tolist() == [True, False]
    with pytest.raises(KvshotError, match="no probes"):
        load_probes(tmp_path / "q.csv.xz")
    whole = (tmp_path / "p.csv.xz").read_bytes()
    for content in (b"", b"step,a", whole[:-20], whole[:40] + b"?" + whole[41:], lzma.compress(b"a,b\n1,2\n"),
                    lzma.compress(b"\xff\xfe,\n")):
        (tmp_path / "q.csv.xz").write_bytes(content)
        with pytest.raises(KvshotError, match="is damaged .*: train the experiment again"):
            load_probes(tmp_path / "q.csv.xz")
