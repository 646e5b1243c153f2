"""Random tiny drafters, in double precision so that equalities are sharp."""

from __future__ import annotations

import pytest
import torch

from kvshot.drafters.config import DrafterConfig
from kvshot.drafters.drafter import Drafter
from kvshot.drafters.injection import Given

SHAPE = dict(hidden_size=16, intermediate_size=24, n_heads=4, n_kv_heads=2, head_dim=6, norm_eps=1e-6,
             rope_theta=100.0, target_vocab_size=40, draft_vocab_size=11)
STATES, KV = dict(hidden_layers=(1, 2, 4)), dict(memory="target", kv_layers=(0, 2, 3))
POINTS = {
    "eagle3": STATES,
    "eagle3, 2 layers": dict(STATES, depth=2),
    "mtp": dict(hidden_layers=(5,)),
    "no target info": dict(),
    "no target info, 3 layers": dict(depth=3),
    "no prefix attention": dict(STATES, memory="none"),
    "kv concat": dict(KV, injection="concat"),
    "kv linear, qk norm": dict(KV, injection="linear", qk_norm=True),
    "kv linear+rope, 3 layers": dict(KV, injection="linear+rope", depth=3),
    "kv mlp": dict(KV, injection="mlp"),
    "kv mlp+norm": dict(KV, injection="mlp+norm"),
    "kv hidden, 2 layers": dict(KV, injection="hidden", depth=2),
    "kv per layer, 3 layers": dict(KV, injection="linear+rope", depth=3, per_layer=True),
    "kv concat, qk norm": dict(KV, injection="concat", qk_norm=True, kv_layers=(1, 3)),
    "cross only": dict(STATES, **KV, injection="linear+rope"),
    "hybrid": dict(STATES, **{**KV, "memory": "both"}, injection="linear+rope"),
    "hybrid, hidden states as keys": dict(STATES, **{**KV, "memory": "both"}, injection="hidden"),
    "hybrid concat, 2 layers": dict(STATES, **{**KV, "memory": "both"}, injection="concat", depth=2),
}


def make_drafter(seed: int = 0, dtype: torch.dtype = torch.float64, **choices) -> Drafter:
    config = DrafterConfig(**{**SHAPE, **choices})
    generator = torch.Generator().manual_seed(seed)
    embedding = torch.randn(config.target_vocab_size, config.hidden_size, generator=generator)
    vocab_ids = torch.randperm(config.target_vocab_size, generator=generator)[: config.draft_vocab_size].sort().values
    drafter = Drafter(config, embedding.to(dtype), vocab_ids).to(dtype)
    for parameter in drafter.parameters():
        parameter.data.normal_(0.0, 0.4, generator=generator)
    return drafter


@pytest.fixture(params=POINTS, ids=list(POINTS))
def drafter(request) -> Drafter:
    return make_drafter(**POINTS[request.param])


def sequence(drafter: Drafter, batch: int = 2, length: int = 13, seed: int = 1) -> tuple[torch.Tensor, Given]:
    """ids [B, T] and what a target might give for them."""
    generator = torch.Generator().manual_seed(seed)
    c, dtype = drafter.config, drafter.norm.weight.dtype
    ids = torch.randint(c.target_vocab_size, (batch, length), generator=generator)
    hidden = torch.randn(batch, len(c.hidden_needed), length, c.hidden_size, generator=generator)
    shape = (batch, len(c.kv_needed), c.n_kv_heads, length, c.head_dim)
    keys, values = (torch.randn(shape, generator=generator) for _ in range(2))
    return ids, Given(hidden.to(dtype), keys.to(dtype), values.to(dtype))


def changed(given: Given, positions: slice | int, row: slice | int = slice(None), by: float = 0.5) -> Given:
    """What the target gives, other at these positions of these sequences."""
    out = Given(given.hidden.clone(), given.keys.clone(), given.values.clone())
    out.hidden[row, :, positions] += by
    out.keys[row, :, :, positions] += by
    out.values[row, :, :, positions] -= by
    return out
