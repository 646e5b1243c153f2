"""Random tiny drafters, in double precision so that equalities are sharp."""

from __future__ import annotations

import pytest
import torch

from kvshot.drafters.config import DrafterConfig
from kvshot.drafters.drafter import Drafter

SHAPE = dict(hidden_size=16, intermediate_size=24, n_heads=4, n_kv_heads=2, head_dim=6, norm_eps=1e-6,
             rope_theta=100.0, target_vocab_size=40, draft_vocab_size=11)
POINTS = {
    "eagle3": dict(hidden_layers=(1, 2, 4)),
    "eagle3, 2 layers": dict(hidden_layers=(1, 2, 4), depth=2),
    "no target info": dict(),
    "no target info, 3 layers": dict(depth=3),
    "no prefix attention": dict(hidden_layers=(1, 2, 4), memory="none"),
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


def sequence(drafter: Drafter, batch: int = 2, length: int = 13, seed: int = 1):
    """ids [B, T] and hidden [B, n, T, d]."""
    generator = torch.Generator().manual_seed(seed)
    config = drafter.config
    ids = torch.randint(config.target_vocab_size, (batch, length), generator=generator)
    hidden = torch.randn(batch, len(config.hidden_layers), length, config.hidden_size, generator=generator)
    return ids, hidden.to(drafter.norm.weight.dtype)
