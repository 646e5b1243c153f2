from __future__ import annotations

from collections import Counter, defaultdict
from types import SimpleNamespace

import numpy as np
import pytest

from kvshot.errors import KvshotError
from kvshot.evaluation import NgramModel, ngram_hits, summarise


def example(ids, mask=None) -> SimpleNamespace:
    ids = np.asarray(ids, dtype=np.int32)
    return SimpleNamespace(
        ids=ids, loss_mask=np.ones(len(ids), bool) if mask is None else np.asarray(mask, bool)
    )


def random_examples(seed: int, n: int = 25, vocab: int = 6) -> list[SimpleNamespace]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 40, n)
    return [example(rng.integers(0, vocab, t), rng.random(t) < 0.7) for t in lengths]


class DictModel:
    """The same model in plain dictionaries."""

    def __init__(self, examples, order):
        self.order = order
        self.seen = defaultdict(Counter)
        for e in examples:
            ids = e.ids.tolist()
            for t in range(len(ids)):
                for length in range(order):
                    if e.loss_mask[t] and length <= t:
                        self.seen[tuple(ids[t - length : t])][ids[t]] += 1

    def next(self, prefix: list[int]) -> int:
        for length in range(min(self.order - 1, len(prefix)), -1, -1):
            counts = self.seen.get(tuple(prefix[len(prefix) - length :]))
            if counts:
                return min(counts, key=lambda token: (-counts[token], token))
        raise AssertionError("the empty context is always seen")


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_equals_plain_dictionaries(order):
    train, test = random_examples(0), random_examples(1, vocab=8)  # tokens 6 and 7 are unknown to the model
    model, oracle = NgramModel.fit(train, order=order), DictModel(train, order)
    assert model.order == order
    for e in test:
        expected = [oracle.next(e.ids[: t + 1].tolist()) for t in range(len(e.ids))]
        assert model.predict(e.ids).tolist() == expected


def test_hand_example():
    """1 2 is followed by 3 twice and 4 once; 2 alone by 5 more often; ties go to the lower token."""
    train = [example([1, 2, 3]), example([1, 2, 3]), example([1, 2, 4]), *[example([9, 2, 5])] * 3]
    model = NgramModel.fit(train, order=3)
    assert model.predict(np.array([1, 2]))[1] == 3
    assert model.predict(np.array([8, 2]))[1] == 5
    assert NgramModel.fit([example([7, 6, 7, 5])], order=2).predict(np.array([7]))[0] == 5


def test_contexts_do_not_cross_examples_and_prompts_are_no_continuations():
    model = NgramModel.fit([example([1, 2]), example([3, 4], [False, True])], order=3)
    assert model.predict(np.array([2]))[0] == 1  # "2 -> 3" never happened: the commonest token, lowest id
    assert model.predict(np.array([3]))[0] == 4  # but a prompt token may be the context
    hidden = NgramModel.fit([example([1, 2, 1, 2, 1, 3], [0, 0, 0, 0, 0, 1])], order=2)
    assert hidden.predict(np.array([1]))[0] == 3


def test_ids_far_beyond_training_do_not_collide():
    train = random_examples(2)
    ids = np.array([2, 2 + 2**17, 2**31 - 1, 3, 4])
    oracle = DictModel(train, 4)
    expected = [oracle.next(ids[: t + 1].tolist()) for t in range(len(ids))]
    assert NgramModel.fit(train, order=4).predict(ids).tolist() == expected


def test_hits_equal_plain_loops():
    train, test, n_steps = random_examples(3), random_examples(4), 3
    model = NgramModel.fit(train, order=3)
    labels = [np.random.default_rng(i).integers(0, 6, len(e.ids)) for i, e in enumerate(test)]
    rows = []
    for number, (e, label) in enumerate(zip(test, labels, strict=True)):
        predicted, mask = model.predict(e.ids), e.loss_mask.tolist()
        for i in range(len(mask)):
            valid = [i + 2 + k < len(mask) and all(mask[i + 1 : i + 3 + k]) for k in range(n_steps)]
            hits = [v and bool(predicted[i + 1 + k] == label[i + 1 + k]) for k, v in enumerate(valid)]
            if any(valid):
                rows.append((number, valid, hits))
    got = ngram_hits(model, test, labels, n_steps)
    assert got.conversation.tolist() == [r[0] for r in rows]
    assert got.valid.tolist() == [r[1] for r in rows]
    assert got.hits.tolist() == [r[2] for r in rows]
    assert not got.oov.any()


def test_a_memorised_text_is_predicted_and_the_row_is_flat():
    e = example(np.arange(60))
    summary = summarise(ngram_hits(NgramModel.fit([e]), [e], [np.roll(e.ids, -1)], 7), n_boot=2)
    assert summary.alpha == [1.0] * 7 and summary.mat.value == 8.0


def test_examples_without_answers_only_leave_no_rows():
    e, silent = example(np.arange(9)), example(np.arange(5), [False] * 5)
    model = NgramModel.fit([e, silent])
    hits = ngram_hits(model, [silent, e], [silent.ids, e.ids], 2)
    assert set(hits.conversation) == {1}


def test_bad_input():
    e = example([1, 2, 3])
    model = NgramModel.fit([e])
    for bad in ([], [example([1, 2], [False, False])]):
        with pytest.raises(KvshotError, match="no token is supervised"):
            NgramModel.fit(bad)
    with pytest.raises(KvshotError, match="order of 0"):
        NgramModel.fit([e], order=0)
    with pytest.raises(KvshotError, match="0 label arrays for 1"):
        ngram_hits(model, [e], [], 2)
    with pytest.raises(KvshotError, match="example 0"):
        ngram_hits(model, [e], [np.arange(2)], 2)
    with pytest.raises(KvshotError, match="no examples"):
        ngram_hits(model, [], [], 2)
