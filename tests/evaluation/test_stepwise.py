"""Step-wise hits against a plain loop over columns and steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvshot.data import DraftVocab, encode_all
from kvshot.data.toy import toy_conversations
from kvshot.drafters import Given, eagle3
from kvshot.drafters.init import new_drafter
from kvshot.evaluation import NgramModel, StepwiseHits, ngram_hits, paired_difference, stepwise_hits
from kvshot.targets import FeatureStore, load_target
from kvshot.training.ttt import unroll

K = 3


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    target = load_target("smoke", device="cpu")
    examples = encode_all(target.tokenizer, toy_conversations(5, seed=3)).examples
    vocab = DraftVocab.from_examples(examples, target.vocab_size, 24)
    store = FeatureStore.build(tmp_path_factory.mktemp("f"), target, examples, kv_layers=(), quiet=True,
                               dtype=torch.float32)
    drafter = new_drafter(target, eagle3(target, draft_vocab_size=24), vocab, seed=0)
    return drafter, store, examples, vocab


def by_hand(drafter, store) -> StepwiseHits:
    rows = {"hits": [], "valid": [], "conversation": [], "oov": []}
    with torch.no_grad():
        for c in range(len(store)):
            entry = store[c]
            mask, length = entry["loss_mask"].tolist(), len(entry["ids"])
            for i in range(length - 2):
                valid = [i + 2 + k < length and all(mask[i + 1 : i + 3 + k]) for k in range(K)]
                if not valid[0]:
                    continue
                hits, oov = [False] * K, [False] * K
                n = sum(valid)
                states = unroll(drafter, entry["ids"][None], Given(entry["hidden"][None]), torch.tensor([[i]]), n)
                for k, state in enumerate(states):
                    label = int(entry["argmax"][i + 1 + k])
                    hits[k] = int(drafter.vocab_ids[drafter.logits(state)[0, 0].argmax()]) == label
                    oov[k] = label not in drafter.vocab_ids
                for name, value in (("hits", hits), ("valid", valid), ("conversation", c), ("oov", oov)):
                    rows[name].append(value)
    return StepwiseHits(**{name: np.array(value) for name, value in rows.items()})


def test_hits_equal_a_plain_loop(setting):
    drafter, store, _, _ = setting
    expected = by_hand(drafter, store)
    for batch_tokens in (1, 4096):
        got = stepwise_hits(drafter, store, K, batch_tokens=batch_tokens, quiet=True)
        for name in ("hits", "valid", "conversation", "oov"):
            assert np.array_equal(getattr(got, name), getattr(expected, name)), name
    assert expected.oov.any() and not expected.oov.all() and not expected.valid.all()


def test_the_ngram_row_has_the_same_columns(setting):
    drafter, store, examples, _ = setting
    labels = [store[i]["argmax"].numpy() for i in range(len(store))]
    row = ngram_hits(NgramModel.fit(examples), examples, labels, K)
    paired_difference(stepwise_hits(drafter, store, K, quiet=True), row, "alpha_marginal_0", n_boot=10)


def test_a_drafter_that_says_what_the_target_says_scores_one(setting, monkeypatch):
    """Perfect proposals are hits wherever the label is inside the vocabulary: nothing is shifted by a position."""
    drafter, store, _, _ = setting

    def oracle(drafter, ids, hidden, columns, n_steps):  # one batch, longer sequences first
        width = ids.shape[1]
        labels = torch.stack([torch.nn.functional.pad(store[i]["argmax"], (0, width - store.lengths[i]))
                              for i in sorted(range(len(store)), key=store.lengths.__getitem__, reverse=True)])
        for k in range(n_steps):
            yield labels.gather(1, (columns + 1 + k).clamp(max=width - 1))[..., None].float()

    monkeypatch.setattr("kvshot.evaluation.stepwise.unroll", oracle)
    monkeypatch.setattr(type(drafter), "logits", lambda self, state: (self.vocab_ids == state).float())
    hits = stepwise_hits(drafter, store, K, quiet=True)
    assert np.array_equal(hits.hits, hits.valid & ~hits.oov)
