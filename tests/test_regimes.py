"""Interventions change what they say they change; keys and values follow from hidden states."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvshot.analysis.equivalence import explained, recomputed
from kvshot.analysis.regimes import OWN, STATES, VERIFIED, gains, interventions, state_drift
from kvshot.data import DraftVocab, encode_all
from kvshot.data.toy import toy_conversations
from kvshot.drafters import DrafterConfig, Given, new_drafter
from kvshot.errors import KvshotError
from kvshot.targets import FeatureStore, load_target
from kvshot.training.masks import supervised_columns
from kvshot.training.ttt import unroll

K = 4


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    target = load_target("smoke", dtype="float32", device="cpu")
    examples = encode_all(target.tokenizer, toy_conversations(6, seed=1), 160).examples
    store = FeatureStore.build(tmp_path_factory.mktemp("store"), target, examples, dtype=torch.float32, quiet=True)
    return target, examples, store


def drafter_of(target, examples, **choices):
    vocab = DraftVocab.from_examples(examples, target.vocab_size, 64)
    config = DrafterConfig.for_target(target, draft_vocab_size=64, **choices)
    return new_drafter(target, config, vocab, seed=0, init="random").eval()


def test_interventions(bench):
    target, examples, store = bench
    eagle = drafter_of(target, examples, hidden_layers=target.default_hidden_layers)
    hits = interventions(eagle, store, K, quiet=True)
    assert list(hits) == [OWN, STATES, VERIFIED]
    for other in (STATES, VERIFIED):  # step 0 has the target's state anyway
        np.testing.assert_array_equal(hits[other].hits[:, 0], hits[OWN].hits[:, 0])
        assert (hits[other].hits[:, 1:] != hits[OWN].hits[:, 1:]).any()
    # a verified step k is step 0 of the column k later
    first, later = hits[OWN], hits[VERIFIED]
    for k in range(1, K):
        same = (first.conversation[k:] == first.conversation[:-k]) & first.valid[:-k, k]
        np.testing.assert_array_equal(later.hits[:-k, k][same], first.hits[k:, 0][same])
    kv = drafter_of(target, examples, memory="target", kv_layers=target.default_kv_layers, injection="linear")
    assert list(interventions(kv, store, K, quiet=True)) == [OWN, VERIFIED]
    added = gains(hits, 2, n_boot=20)
    assert list(added) == ["drift of the state", "what lies in between"]
    total = sum(d.difference.value for d in added.values())
    rate = {way: h.hits[:, 2].sum() / h.valid[:, 2].sum() for way, h in hits.items()}
    assert total == pytest.approx(rate[VERIFIED] - rate[OWN])
    assert list(gains(interventions(kv, store, K, quiet=True), 2, n_boot=20)) == ["what lies in between"]


def test_true_states_change_the_query_and_not_the_chain(bench):
    """Step by step in plain code: the drafted chain, and at each step a second look from the target's state."""
    target, examples, store = bench
    eagle = drafter_of(target, examples, hidden_layers=target.default_hidden_layers)
    row = store[0]
    ids, given = row["ids"][None], Given(row["hidden"][None])
    columns = torch.arange(4, 9)[None]
    memory, fused = eagle.remember(given, torch.cat([ids[:, 1:], ids[:, -1:]], 1)), eagle.fuse(given.hidden)
    limit, state, chain = eagle.limit(columns), fused[:, columns[0]], None
    drafted, verified = (list(unroll(eagle, ids, given, columns, K, offline=way)) for way in (False, True))
    for k, got in enumerate(unroll(eagle, ids, given, columns, K, true_states=True)):
        at = columns + 1 + k
        looked, _ = eagle.step(ids[0][at], at, fused[:, columns[0] + k], memory, limit, chain)
        torch.testing.assert_close(got, looked)
        if k:  # and they are neither the drafted ones nor those with the chain from true states, too
            assert not torch.allclose(got, drafted[k]) and (k == 1 or not torch.allclose(got, verified[k]))
        state, chain = eagle.step(ids[0][at], at, state, memory, limit, chain)


def test_state_drift_of_a_drafter_whose_output_is_known(bench):
    target, examples, store = bench
    eagle = drafter_of(target, examples, hidden_layers=target.default_hidden_layers)
    table = state_drift(eagle, store, K)
    assert table.index.tolist() == [1, 2, 3] and (table.cosine.abs() <= 1).all() and (table.n > 0).all()
    # a layer that adds nothing hands the fused state on: at step 1 it is compared with its neighbour's
    with torch.no_grad():
        eagle.layers[0].self_attn.o_proj.weight.zero_()
        eagle.layers[0].mlp["down_proj"].weight.zero_()
    total = norm = n = 0.0
    for i, example in enumerate(examples):
        fused = eagle.fuse(store[i]["hidden"][None])[0].detach()
        supervised = supervised_columns(torch.from_numpy(example.loss_mask), 2)
        for c in range(len(example.ids) - 1):
            if supervised[c, 0] and supervised[c, 1]:
                total += float(torch.cosine_similarity(fused[c], fused[c + 1], dim=0))
                norm += float(fused[c].norm() / fused[c + 1].norm())
                n += 1
    passed = state_drift(eagle, store, 2)
    assert passed.n.tolist() == [n]
    assert passed.cosine.tolist() == pytest.approx([total / n], abs=1e-5)
    assert passed.norm.tolist() == pytest.approx([norm / n], abs=1e-5)
    kv = drafter_of(target, examples, memory="target", kv_layers=target.default_kv_layers, injection="linear")
    with pytest.raises(KvshotError, match="nothing that could drift"):
        state_drift(kv, store, K)


def test_keys_and_values_from_their_own_hidden_state(bench):
    target, examples, _ = bench
    table = recomputed(target, torch.from_numpy(examples[0].ids))
    assert len(table) == target.n_layers and table.to_numpy().max() < 1e-4


def test_linear_maps_explain_what_they_can(bench):
    target, examples, _ = bench
    texts = [torch.from_numpy(e.ids) for e in examples]
    sources = {"one": (1,), "all": tuple(range(target.n_layers + 1))}
    table = explained(target, texts[:5], texts[5:], sources, ridge=1e-6).set_index(["source", "block"])
    assert (table.to_numpy() <= 1).all()
    assert table.loc[("one", 1), "values"] > 0.9  # block 1 reads state 1: only its norm is not linear
    mean = table.groupby("source").mean()
    assert mean.loc["all", "values"] > mean.loc["one", "values"]
