"""Batches of captured sequences: similar lengths together, a fresh order every epoch, the same for every drafter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from kvshot.errors import KvshotError
from kvshot.targets import FeatureStore
from kvshot.training.ttt import Batch

WIDTH = 16


def plan_epoch(lengths: Sequence[int], batch_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Indices of each batch, in order; a function of its arguments only.

    A batch has at most `batch_tokens` tokens with padding, or is one longer sequence.
    """
    if not len(lengths):
        raise KvshotError("no sequences to train on: check the data and its filters")
    rng = np.random.default_rng([seed, epoch])
    # jitter, so that batches are not the same sets every epoch
    order = np.argsort(np.asarray(lengths) * rng.uniform(0.95, 1.05, len(lengths)), kind="stable")[::-1]
    batches: list[list[int]] = []
    longest = 0
    for i in order.tolist():
        longest = max(longest, lengths[i]) if batches else lengths[i]
        if not batches or longest * (len(batches[-1]) + 1) > batch_tokens:
            batches.append([])
            longest = lengths[i]
        batches[-1].append(i)
    rng.shuffle(batches)
    return batches


def training_batches(lengths: Sequence[int], batch_tokens: int, seed: int, start: int = 0) -> Iterator[list[int]]:
    """Batches without end, from batch number `start` on."""
    epoch = 0
    while True:
        plan = plan_epoch(lengths, batch_tokens, seed, epoch)
        yield from plan[start:]
        start = max(0, start - len(plan))
        epoch += 1


def load_batch(store: FeatureStore, indices: Sequence[int], hidden_layers: Sequence[int]) -> Batch:
    """Sequences `indices` of the store, with the hidden layers asked for, in that order.

    Padded with zeros to the longest, or up to WIDTH - 1 more. Raises KvshotError when the store lacks a layer: a
    neighbouring one in its place would go unnoticed.
    """
    have = store.meta["hidden_layers"]
    missing = sorted(set(hidden_layers) - set(have))
    if missing:
        raise KvshotError(f"the feature store {store.folder} lacks hidden layers {missing}: capture them first")
    picked = [have.index(i) for i in hidden_layers]
    rows = [store[i] for i in indices]
    for row in rows:
        row["hidden"] = row["hidden"][picked]
    # widths that recur: an allocator that keeps its blocks can use them again
    width = -(-max(len(r["ids"]) for r in rows) // WIDTH) * WIDTH

    def pad(name: str, axis: int) -> Tensor:
        first = rows[0][name]
        shape = list(first.shape)
        shape[axis] = width
        out = torch.zeros(len(rows), *shape, dtype=first.dtype)
        for i, r in enumerate(rows):
            out[i].narrow(axis, 0, r[name].shape[axis]).copy_(r[name])
        return out

    return Batch(pad("ids", 0), pad("loss_mask", 0), pad("hidden", 1), pad("final", 0), pad("argmax", 0),
                 torch.tensor(indices))
