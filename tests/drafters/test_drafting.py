"""Drafting and verifying on the smoke target: the target's own text, the unrolled drafter's proposals."""

from __future__ import annotations

import pytest
import torch

from kvshot.data import DraftVocab, encode_all, prompt_ids
from kvshot.data.toy import toy_conversations
from kvshot.drafters import Given, draft_and_verify, draft_chain, eagle3
from kvshot.drafters.init import new_drafter
from kvshot.errors import KvshotError
from kvshot.targets import capture, load_target
from kvshot.training.ttt import unroll


@pytest.fixture(scope="module")
def pair():
    target = load_target("smoke", device="cpu")
    vocab = DraftVocab.from_examples(encode_all(target.tokenizer, toy_conversations(8)).examples, target.vocab_size, 40)
    return target, new_drafter(target, eagle3(target, draft_vocab_size=40), vocab, seed=0)


def alone(target, ids, n):
    ids = list(ids)
    with torch.no_grad():
        for _ in range(n):
            ids.append(int(target.model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids


def test_rounds_write_what_the_target_writes_alone(pair):
    target, drafter = pair
    ids = prompt_ids(target.tokenizer, [{"role": "user", "content": "Hello"}])
    text = list(ids)
    for _ in range(6):
        done = draft_and_verify(target, drafter, text, 4)
        assert len(done.kept) == done.accepted + 1 and len(done.chosen) == 5
        text += done.kept
    assert text == alone(target, ids, len(text) - len(ids))


def test_a_right_chain_is_accepted_whole_and_stops_at_an_end(pair, monkeypatch):
    """With the target's own continuation as draft, everything is kept; an end token inside it ends the text."""
    target, drafter = pair
    ids = prompt_ids(target.tokenizer, [{"role": "user", "content": "Hello"}])
    future = alone(target, ids, 5)[len(ids):]
    monkeypatch.setattr("kvshot.drafters.drafting.draft_chain", lambda *a: (future[:4], [1.0] * 4))
    done = draft_and_verify(target, drafter, ids, 4)
    assert (done.accepted, done.kept) == (4, future)
    wrong = [*future[:2], (future[2] + 1) % target.vocab_size, future[3]]
    monkeypatch.setattr("kvshot.drafters.drafting.draft_chain", lambda *a: (wrong, [1.0] * 4))
    assert draft_and_verify(target, drafter, ids, 4).kept == future[:3]
    monkeypatch.setattr("kvshot.drafters.drafting.draft_chain", lambda *a: (future[:4], [1.0] * 4))
    monkeypatch.setattr(type(target), "eos_ids", property(lambda self: frozenset({future[1]})))
    assert draft_and_verify(target, drafter, ids, 4).kept == future[: future.index(future[1]) + 1]


def test_a_chain_equals_the_unrolled_drafter_on_the_same_tokens(pair):
    target, drafter = pair
    ids = prompt_ids(target.tokenizer, [{"role": "user", "content": "Hello"}])
    tokens, p = draft_chain(target, drafter, ids, 4)
    every = torch.tensor([ids + tokens])
    hidden = capture(target, every, hidden_layers=drafter.config.hidden_layers, kv_layers=()).hidden
    with torch.no_grad():
        for k, state in enumerate(unroll(drafter, every, Given(hidden), torch.tensor([[len(ids) - 2]]), 4)):
            q = drafter.logits(state)[0, 0].softmax(-1)
            assert drafter.vocab_ids[q.argmax()] == tokens[k]
            assert q.max().item() == pytest.approx(p[k], abs=1e-5)


def test_a_prefix_is_needed(pair):
    with pytest.raises(KvshotError, match="at least two tokens"):
        draft_chain(*pair, [3], 2)
