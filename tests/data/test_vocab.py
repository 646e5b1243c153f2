from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from kvshot.data import DraftVocab, Example
from kvshot.errors import KvshotError


def example(ids, mask=None) -> Example:
    mask = np.ones(len(ids)) if mask is None else mask
    return Example("c", np.array(ids, dtype=np.int64), np.array(mask, dtype=bool))


def test_most_frequent_supervised_tokens_against_a_counter():
    rng = np.random.default_rng(0)
    examples = [example(rng.geometric(0.03, 300) % 120, rng.random(300) < 0.5) for _ in range(5)]
    counts = Counter(int(i) for e in examples for i, on in zip(e.ids, e.loss_mask, strict=True) if on)
    ranked = sorted(range(120), key=lambda i: (-counts[i], i))
    for size in (1, 20, len(counts), 118, 120):  # the last ones need padding
        assert DraftVocab.from_examples(examples, 120, size).ids.tolist() == sorted(ranked[:size])


def test_ties_and_padding_go_to_the_lower_ids():
    vocab = DraftVocab.from_examples([example([9, 9, 4, 7, 5, 5, 2], [1, 1, 1, 1, 1, 1, 0])], 12, 3)
    assert vocab.ids.tolist() == [4, 5, 9]
    assert DraftVocab.from_examples([example([9, 4])], 12, 5).ids.tolist() == [0, 1, 2, 4, 9]


def test_maps_agree():
    vocab = DraftVocab(torch.tensor([1, 4, 5, 9]), 11)
    assert vocab.d2t.tolist() == [1, 3, 3, 6]  # offsets, not ids
    assert vocab.t2d.nonzero()[:, 0].tolist() == [1, 4, 5, 9] and vocab.t2d.dtype == torch.bool
    draft = torch.arange(len(vocab))
    assert torch.equal(vocab.lookup[draft + vocab.d2t], draft)
    assert vocab.lookup[torch.tensor([[0, 1], [9, 10]])].tolist() == [[-1, 0], [3, -1]]
    assert len(vocab) == 4 and len(vocab.t2d) == 11


def test_checkpoint_round_trip():
    vocab = DraftVocab(torch.tensor([1, 4, 5, 9]), 11)
    state = vocab.state()
    assert set(state) == {"d2t", "t2d"} and state["d2t"].dtype == torch.int64
    back = DraftVocab.from_state(state, vocab_size=11, size=4)
    assert torch.equal(back.ids, vocab.ids) and back.sha256 == vocab.sha256
    assert torch.equal(vocab.to("cpu").lookup, vocab.lookup)
    others = [DraftVocab(torch.tensor(ids), size) for ids, size in (([1, 4, 5, 9], 12), ([1, 4, 5, 8], 11))]
    assert len({vocab.sha256, *(o.sha256 for o in others)}) == 3


def test_a_checkpoint_of_another_vocabulary_is_refused():
    state = DraftVocab(torch.tensor([1, 4, 5, 9]), 11).state()
    with pytest.raises(KvshotError, match="target vocabulary has 11 tokens, not 12"):
        DraftVocab.from_state(state, vocab_size=12)
    with pytest.raises(KvshotError, match="draft vocabulary has 4 tokens, not 8"):
        DraftVocab.from_state(state, size=8)
    with pytest.raises(KvshotError, match="without t2d"):
        DraftVocab.from_state({"d2t": state["d2t"]})
    ids_for_offsets = state | {"d2t": torch.tensor([1, 4, 5, 9])}
    with pytest.raises(KvshotError, match="name different tokens"):
        DraftVocab.from_state(ids_for_offsets)
    with pytest.raises(KvshotError, match="wrong shape or type"):
        DraftVocab.from_state(state | {"d2t": state["d2t"].float()})


@pytest.mark.parametrize("ids", [[], [1, 1], [2, 1], [-1, 2], [1, 11]])
def test_ids_must_ascend_within_the_target(ids):
    with pytest.raises(KvshotError, match="ascending int64 ids below 11"):
        DraftVocab(torch.tensor(ids, dtype=torch.int64), 11)


def test_impossible_requests():
    good = [example([1, 2])]
    for size in (0, 13):
        with pytest.raises(KvshotError, match="does not fit a target of 12 tokens"):
            DraftVocab.from_examples(good, 12, size)
    for examples in ([], [example([1, 2], [0, 0])]):
        with pytest.raises(KvshotError, match="no supervised token"):
            DraftVocab.from_examples(examples, 12, 4)
    with pytest.raises(KvshotError, match="has token 12 but the target knows 12"):
        DraftVocab.from_examples([example([1, 12])], 12, 4)
