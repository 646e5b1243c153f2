"""The one attention of all drafters: a column's query looks at its prefix and at its own chain.

B sequences, N columns each. The prefix memory is shared by the columns of a sequence and cut for each by `limit`; the
chain holds what the column itself has drafted and is never masked. Both softmax together.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Attend = Callable[..., Tensor]


def reference(q: Tensor, keys: Tensor, values: Tensor, limit: Tensor, chain_k: Tensor, chain_v: Tensor) -> Tensor:
    """The oracle, in loops. Shapes and meaning as for `dense`."""
    b, h, n, d = q.shape
    group = h // keys.shape[1]
    out = torch.empty_like(q)
    for s in range(b):
        for head in range(h):
            kv = head // group
            for col in range(n):
                seen = int(limit[s, col])
                k = torch.cat([keys[s, kv, :seen], chain_k[s, kv, col]])
                v = torch.cat([values[s, kv, :seen], chain_v[s, kv, col]])
                weights = torch.stack([torch.dot(q[s, head, col], key) for key in k]) / d**0.5
                out[s, head, col] = (weights.softmax(0)[:, None] * v).sum(0)
    return out


def dense(q: Tensor, keys: Tensor, values: Tensor, limit: Tensor, chain_k: Tensor, chain_v: Tensor) -> Tensor:
    """q [B, H, N, D]; keys, values [B, H_kv, S, D]; limit [B, N] int64; chain_k, chain_v [B, H_kv, N, C, D], C >= 1.

    Column n of sequence b sees entries [0, limit[b, n]) of the memory and its own C chain entries. Scale 1/sqrt(D).
    Returns [B, H, N, D] in q's dtype; the softmax runs in float32 or wider.
    """
    b, h, n, d = q.shape
    kv, s = keys.shape[1], keys.shape[2]
    group = h // kv
    grouped = (q * d**-0.5).reshape(b, kv, group, n, d)  # here, where it is small
    wide = torch.promote_types(q.dtype, torch.float32)
    # the chain is a diagonal: dot products of each column with its own few entries, no matrix product
    chain = (grouped[..., None, :] * chain_k[:, :, None]).sum(-1, dtype=wide)
    prefix = (grouped.reshape(b, kv, group * n, d) @ keys.transpose(-1, -2)).view(b, kv, group, n, s).to(wide)
    hidden = torch.arange(s, device=q.device) >= limit[:, :, None]
    bias = torch.zeros(hidden.shape, dtype=wide, device=q.device).masked_fill(hidden, -torch.inf)
    prefix = prefix + bias[:, None, None]  # its gradient passes through; filling would copy it
    weights = torch.cat([prefix, chain], -1).softmax(-1).to(values.dtype)
    out = (weights[..., :s].reshape(b, kv, group * n, s) @ values).view(b, kv, group, n, d)
    out = out + (weights[..., s:, None] * chain_v[:, :, None]).sum(-2)
    return out.reshape(b, h, n, d)


BACKENDS: dict[str, Attend] = {"reference": reference, "dense": dense}
