"""The n-gram row: how far the last few tokens alone get, a yardstick for how much a drafter really reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvshot.errors import KvshotError
from kvshot.evaluation.metrics import StepwiseHits
from kvshot.training.masks import supervised_columns

if TYPE_CHECKING:
    from kvshot.data import Example

_TOKEN_BITS = 32  # a key packs (number of the shorter context, token id) into one int64


@dataclass(frozen=True, eq=False)
class NgramModel:
    """Back-off table: the commonest continuation of the longest context seen in training, ties by lower id.

    levels[c] describes contexts of c tokens: sorted keys int64 [n_c] and their continuations int32 [n_c].
    A context of c tokens is keyed by (row of its last c-1 tokens in level c-1, its first token).
    """

    levels: tuple[tuple[np.ndarray, np.ndarray], ...]

    @property
    def order(self) -> int:
        """Longest n-gram: contexts have up to order - 1 tokens."""
        return len(self.levels)

    @classmethod
    def fit(cls, examples: Sequence[Example], order: int = 5) -> NgramModel:
        """Count supervised tokens after every context of up to order - 1 tokens of the same example.

        Contexts may hold prompt tokens; only tokens of the loss mask count as continuations.
        Raises KvshotError when nothing is supervised.
        """
        if order < 1:
            raise KvshotError(f"an n-gram order of {order} makes no model: choose 1 or more")
        ids = np.concatenate([np.asarray(e.ids, dtype=np.int32) for e in examples] or [np.empty(0, np.int32)])
        mask = np.concatenate([np.asarray(e.loss_mask, dtype=bool) for e in examples] or [np.empty(0, bool)])
        offset = np.concatenate([np.arange(len(e.ids)) for e in examples] or [np.empty(0, np.int64)])
        at = np.flatnonzero(mask)  # places of the continuations
        if not len(at):
            raise KvshotError("no token is supervised: an n-gram model needs training examples with answers")
        rows, levels = np.zeros(len(at), dtype=np.int64), []
        for length in range(order):
            if length:
                inside = offset[at] >= length
                at, rows = at[inside], rows[inside]
                key = _key(rows, ids[at - length])
            else:
                key = rows
            keys, rows = np.unique(key, return_inverse=True)
            levels.append((keys, _most_frequent(rows, ids[at])))
        return cls(tuple(levels))

    def predict(self, ids: np.ndarray) -> np.ndarray:
        """int [T] -> int64 [T]: entry t predicts the token after position t from ids[..t] of one sequence."""
        ids = np.asarray(ids)
        out = np.full(len(ids), self.levels[0][1][0], dtype=np.int64)
        at, rows = np.arange(len(ids)), np.zeros(len(ids), dtype=np.int64)
        for length, (keys, continuations) in enumerate(self.levels[1:], start=1):
            inside = at >= length - 1
            at, rows = at[inside], rows[inside]
            key = _key(rows, ids[at - (length - 1)])
            rows = np.searchsorted(keys, key)
            known = rows < len(keys)
            known[known] = keys[rows[known]] == key[known]
            at, rows = at[known], rows[known]  # a context can only be known if its shorter ending is
            out[at] = continuations[rows]
        return out


def _key(rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    return (rows.astype(np.int64) << _TOKEN_BITS) | tokens.astype(np.int64)


def _most_frequent(rows: np.ndarray, continuations: np.ndarray) -> np.ndarray:
    """The commonest continuation of each row 0..n-1 (all occur), ties by lower id: int32 [n]."""
    pairs, counts = np.unique(_key(rows, continuations), return_counts=True)
    rows, tokens = pairs >> _TOKEN_BITS, (pairs & ((1 << _TOKEN_BITS) - 1)).astype(np.int32)
    starts = np.flatnonzero(np.diff(rows, prepend=-1))
    best = np.flatnonzero(counts == np.maximum.reduceat(counts, starts)[rows])
    return tokens[best[np.flatnonzero(np.diff(rows[best], prepend=-1))]]


def ngram_hits(
    model: NgramModel, examples: Sequence[Example], labels: Sequence[np.ndarray], n_steps: int
) -> StepwiseHits:
    """The n-gram model as a drafter, on the same columns as any other.

    labels[i]: int64 [T] of example i, the target's argmax for the token after each position. At step k column
    i has read the true tokens up to x_{i+1+k}, so it predicts like position i+1+k. Nothing is out of
    vocabulary.
    Raises KvshotError when labels and examples do not match.
    """
    if len(labels) != len(examples):
        raise KvshotError(f"{len(labels)} label arrays for {len(examples)} examples: pass one for each")
    parts = list(_example_hits(model, examples, labels, n_steps))
    if not parts:
        raise KvshotError("no examples to evaluate: pass at least one")
    return StepwiseHits.concat(parts)


def _example_hits(model, examples, labels, n_steps: int) -> Iterator[StepwiseHits]:
    for number, (example, label) in enumerate(zip(examples, labels, strict=True)):
        label = np.asarray(label)
        if label.shape != (len(example.ids),):
            raise KvshotError(
                f"labels of example {number} have shape {label.shape} for {len(example.ids)} tokens: "
                "capture them again from the same examples"
            )
        supervised = supervised_columns(torch.as_tensor(np.asarray(example.loss_mask)), n_steps).numpy()
        columns = np.flatnonzero(supervised.any(axis=1))
        valid = supervised[columns]
        right = model.predict(example.ids) == label
        read = np.minimum(columns[:, None] + 1 + np.arange(n_steps), len(right) - 1)
        conversation = np.full(len(columns), number, dtype=np.int64)
        yield StepwiseHits(right[read] & valid, valid, conversation, np.zeros_like(valid))
