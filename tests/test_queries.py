"""Attention that is the target's own has distance zero; oracle queries start as the drafter's own."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

from kvshot.analysis.oracle import OracleQueries, learn_queries
from kvshot.analysis.queries import ALL, _Recorder, branches, by_outcome, query_error, recorded_steps
from kvshot.data import DraftVocab, encode_all
from kvshot.data.toy import toy_conversations
from kvshot.drafters import DrafterConfig, new_drafter
from kvshot.drafters.attention import dense
from kvshot.drafters.layers import rotate
from kvshot.errors import KvshotError
from kvshot.evaluation import stepwise_hits
from kvshot.experiments.registry import experiment
from kvshot.targets import FeatureStore, load_target
from kvshot.training.batches import load_batch
from kvshot.training.ttt import TTTLoss, choose_columns, unroll

K = 3


class Bench:
    def __init__(self, folder) -> None:
        self.target = load_target("smoke", dtype="float32", device="cpu")
        self.examples = encode_all(self.target.tokenizer, toy_conversations(8, seed=1), 160).examples
        layers = tuple(range(self.target.n_layers))
        self.store = FeatureStore.build(folder, self.target, self.examples, hidden_layers=layers, kv_layers=layers,
                                        dtype=torch.float32, quiet=True)
        self.vocab = DraftVocab.from_examples(self.examples, self.target.vocab_size, 64)
        self.texts = [(torch.from_numpy(e.ids), torch.from_numpy(e.loss_mask)) for e in self.examples]

    def drafter(self, init="random", **choices):
        config = DrafterConfig.for_target(self.target, draft_vocab_size=64, **choices)
        return new_drafter(self.target, config, self.vocab, seed=0, init=init).eval()


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return Bench(tmp_path_factory.mktemp("store"))


def kv_only(bench, **more):
    return bench.drafter(memory="target", kv_layers=bench.target.spaced_kv_layers(2), injection="linear+rope", **more)


def test_the_recorder_sees_the_weights_that_are_used():
    g = torch.Generator().manual_seed(0)
    q, keys, values = (torch.randn(s, generator=g) for s in ((1, 4, 5, 8), (1, 2, 6, 8), (1, 2, 6, 8)))
    ck, cv = torch.randn(2, 1, 2, 5, 3, 8, generator=g)
    limit = torch.tensor([[0, 1, 3, 6, 6]])
    recorder = _Recorder()
    torch.testing.assert_close(recorder(q, keys, values, limit, ck, cv), dense(q, keys, values, limit, ck, cv))
    weights = recorder.weights[0]
    chain = torch.zeros_like(cv)  # with values only in the memory, the output is weights @ values
    used = dense(q, keys, values, limit, ck, chain)
    torch.testing.assert_close(weights @ values.repeat_interleave(2, 1), used)


def test_a_copy_of_the_targets_first_block_asks_the_targets_questions(bench):
    """Its query depends on token and position alone, so it is the target's at every step, whatever was drafted."""
    drafter = bench.drafter(init="layers", **experiment("kv-only-2-blocks").choices(bench.target))
    table = query_error(drafter, bench.target, bench.texts, K, blocks=(0,), quiet=True)
    assert branches(drafter) == ["layer 1", "layer 2"]
    first = table[table.branch == "layer 1"]
    assert len(first) and first.distance.max() < 1e-2 and first.stale.min() > 0.02
    assert table[table.branch == "layer 2"].distance.min() > 0.02
    assert sorted(table.step.unique()) == list(range(K)) and table.distance.between(0, 1).all()


@pytest.mark.parametrize("memory", ["own", "both", "kv"])
def test_hits_are_those_of_the_evaluator(bench, memory):
    hidden = {"hidden_layers": bench.target.default_hidden_layers}
    kv = {"kv_layers": bench.target.spaced_kv_layers(2), "injection": "linear"}
    drafter = kv_only(bench) if memory == "kv" else bench.drafter(memory=memory, **hidden,
                                                                  **(kv if memory == "both" else {}))
    table = query_error(drafter, bench.target, bench.texts, K, per_text=10**6, first=0, quiet=True)
    hits = stepwise_hits(drafter, bench.store, K, quiet=True)
    late = np.isin(hits.conversation, table.text.unique()) & hits.valid[:, -1]
    one = table[table.branch == table.branch.iloc[0]]
    for k in range(K):
        got = one[one.step == k].sort_values(["text", "column"]).hit.to_numpy()
        np.testing.assert_array_equal(got, hits.hits[late, k])


def test_weights_on_a_memory_of_its_own_stand_at_the_tokens_that_were_read(bench):
    """Entry j of the memory has read token j + 1: the weights follow when that token's value is taken away."""
    drafter = bench.drafter(hidden_layers=bench.target.default_hidden_layers)
    batch = load_batch(bench.store, [0], drafter.config)
    columns = torch.tensor([[12, 20]])
    for _, (weights,) in recorded_steps(drafter, batch.ids, batch.given, columns, 2):
        for n, i in enumerate((12, 20)):
            assert not weights[:, n, 0].any() and not weights[:, n, i + 1 :].any()
            assert (weights[:, n, 1 : i + 1] > 0).all()
    keys = drafter.remember(batch.given, torch.cat([batch.ids[:, 1:], batch.ids[:, -1:]], 1))[0]["own"].keys
    q = None

    def keep(module, inputs, output):
        nonlocal q
        q = output

    drafter.layers[0].self_attn.q_proj.register_forward_hook(keep)
    _, (weights,) = next(iter(recorded_steps(drafter, batch.ids, batch.given, columns, 1)))
    turned = rotate(q.unflatten(-1, (-1, drafter.config.head_dim)).transpose(1, 2), drafter.rope(columns + 1))
    head = turned[0, 0, 1]  # column 20
    scores = keys[0, 0, :20] @ head * drafter.config.head_dim**-0.5
    seen = weights[0, 1, 1:21]
    torch.testing.assert_close(seen / seen.sum(), scores.softmax(0))


def test_too_little_text(bench):
    with pytest.raises(KvshotError, match="no memory of the prefix"):
        drafter = bench.drafter(memory="none", hidden_layers=bench.target.default_hidden_layers)
        query_error(drafter, bench.target, bench.texts, K, quiet=True)
    with pytest.raises(KvshotError, match="fewer than three texts"):
        query_error(kv_only(bench), bench.target, bench.texts[:1], K, quiet=True)


def test_by_outcome_weighs_steps_alike():
    rows = [(t, s, hit, d) for t in range(4) for s, hit, d, n in
            ((0, True, 0.1, 9), (0, False, 0.3, 1), (1, True, 0.5, 1), (1, False, 0.7, 9)) for _ in range(n)]
    table = pd.DataFrame(rows, columns=["text", "step", "hit", "distance"]).assign(branch="layer 1")
    table["column"] = range(len(table))
    row = by_outcome(table, n_boot=50).loc["layer 1"]
    assert row.tolist() == pytest.approx([0.3, 0.5, 0.2, 0.2, 0.2])
    both = by_outcome(pd.concat([table, table.assign(branch="layer 2", distance=0.5)]), n_boot=50)
    assert list(both.index) == ["layer 1", "layer 2", ALL]
    assert both.loc[ALL, "accepted"] == pytest.approx(0.4) and both.loc["layer 2", "difference"] == 0
    assert by_outcome(table.assign(hit=False), n_boot=50).empty


@pytest.mark.parametrize("layers", [(), (1, 2)])
def test_oracle_queries_start_as_the_drafters_own(bench, layers):
    drafter = kv_only(bench, depth=2)
    learner = OracleQueries(drafter, layers)
    np.testing.assert_array_equal(stepwise_hits(learner, bench.store, K, quiet=True).hits,
                                  stepwise_hits(drafter, bench.store, K, quiet=True).hits)
    names = {n for n, p in learner.named_parameters() if p.requires_grad}
    assert names == {f"layers.{i}.self_attn.q_proj.weight" for i in range(2)} | \
        ({f"maps.{i}.weight" for i in range(2)} if layers else set())


@pytest.mark.parametrize("future", [False, True])
def test_which_position_the_queries_learn_from(bench, future):
    """Change the target's state of one position: the steps of a column notice when they draft from there, or it is i.
    """
    learner = OracleQueries(kv_only(bench), (1, 2), future=future)
    torch.nn.init.normal_(learner.maps[0].weight, std=0.1)
    batch = load_batch(bench.store, [0], learner.config)
    columns = torch.tensor([[10, 20]])

    @torch.no_grad()
    def states():
        return torch.stack(list(unroll(learner, batch.ids, batch.given, columns, K)), -1)[0, :, 0]  # [N, K]

    before = states()
    batch.given.hidden[:, :, 22 if future else 20] += 1.0
    changed = (states() != before).tolist()
    # position 22 is that of step 1 of column 20; a step's entry in the chain comes from its input, not its query
    assert changed == ([[False] * 3, [False, True, False]] if future else [[False] * 3, [True] * 3])


@pytest.mark.parametrize("memory", ["target", "both"])
def test_only_queries_learn(bench, memory):
    hidden = {"hidden_layers": bench.target.default_hidden_layers} if memory == "both" else {}
    drafter = bench.drafter(memory=memory, kv_layers=bench.target.spaced_kv_layers(2), injection="linear", **hidden)
    before = {n: t.clone() for n, t in drafter.state_dict().items()}
    for layers, future in (((), False), ((1, 2), False), ((1, 2), True)):
        learner = learn_queries(drafter, bench.target, bench.store, layers, future=future, steps=30, batch_tokens=512,
                                columns=None, n_steps=K, lr=1e-2, bf16=False, quiet=True)
        for name, tensor in learner.state_dict().items():
            if not name.startswith("maps"):
                assert torch.equal(tensor, before[name]) == ("q_proj" not in name), name
        assert all(map(torch.Tensor.any, learner.maps.state_dict().values()))
        assert loss_of(bench, learner) < loss_of(bench, drafter)
    assert all(torch.equal(before[n], t) for n, t in drafter.state_dict().items())


@torch.no_grad()
def loss_of(bench, drafter):
    batch = load_batch(bench.store, range(len(bench.store)), drafter.config)
    loss = TTTLoss(drafter, bench.target.scorer(bench.vocab.ids), n_steps=K)
    return loss(batch, choose_columns(batch.loss_mask, K, None)).item()
