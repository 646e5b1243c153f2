"""Batches of captured sequences: similar lengths together, a fresh order every epoch, the same for every drafter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from kvshot.drafters.config import DrafterConfig
from kvshot.drafters.injection import Given
from kvshot.errors import KvshotError
from kvshot.targets import Features
from kvshot.training.ttt import Batch

WIDTH = 16


def plan_epoch(lengths: Sequence[int], batch_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Indices of each batch, in order; a function of its arguments only.

    A batch padded to its longest sequence has at most `batch_tokens` tokens, or is one longer sequence; what
    `load_batch` makes of it is up to WIDTH - 1 tokens a sequence larger.
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


def load_batch(store: Features, indices: Sequence[int], config: DrafterConfig) -> Batch:
    """Sequences `indices` of the store, with what a drafter of this configuration reads.

    Padded with zeros to the longest, or up to WIDTH - 1 more. Raises KvshotError when the store lacks a layer: a
    neighbouring one in its place would go unnoticed.
    """
    hidden = _places(store, "hidden_layers", config.hidden_needed)
    kv = _places(store, "kv_layers", config.kv_needed)
    rows = store.rows(indices)
    # widths that recur: an allocator that keeps its blocks can use them again
    width = -(-max(len(r["ids"]) for r in rows) // WIDTH) * WIDTH

    def pad(name: str, axis: int, places: list[int] | None = None) -> Tensor:
        shape = list(rows[0][name].shape)
        shape[axis] = width
        if places is not None:
            shape[0] = len(places)
        out = torch.zeros(len(rows), *shape, dtype=rows[0][name].dtype, device=rows[0][name].device)
        for i, r in enumerate(rows):
            there = r[name] if places is None else r[name][places]
            out[i].narrow(axis, 0, there.shape[axis]).copy_(there)
        return out

    given = Given(pad("hidden", 1, hidden) if hidden else None,
                  *(pad(name, 2, kv) if kv else None for name in ("keys", "values")))
    return Batch(pad("ids", 0), pad("loss_mask", 0), given, pad("final", 0), pad("argmax", 0), torch.tensor(indices))


def _places(store: Features, kind: str, wanted: Sequence[int]) -> list[int]:
    have = store.meta[kind]
    missing = sorted(set(wanted) - set(have))
    if missing:
        raise KvshotError(f"the captured features lack {kind.replace('_', ' ')} {missing}: capture them "
                          "first")
    return [have.index(i) for i in wanted]
