"""What a drafter costs, from its configuration alone."""

from __future__ import annotations

import torch

from kvshot.drafters.config import DrafterConfig
from kvshot.drafters.drafter import Drafter
from kvshot.experiments.record import Cost


def cost(config: DrafterConfig, prefix: int = 256) -> Cost:
    """Counted on the meta device: products of the layers and the head, and attention over the prefix.

    Fusion and injection are left out of `flops`: they run once for each verified token, not for each draft step.
    """
    with torch.device("meta"):
        drafter = Drafter(config, torch.empty(config.target_vocab_size, config.hidden_size),
                          torch.empty(config.draft_vocab_size, dtype=torch.int64))
    weights = sum(p.numel() for part in (drafter.layers, drafter.lm_head) for p in part.parameters() if p.ndim == 2)
    attention = 0
    for layer in drafter.layers:
        for name in layer.branches:
            seen = 0 if config.memory == "none" else prefix
            attention += 4 * seen * layer.get_submodule(name).q_proj.out_features
    return Cost(parameters=sum(p.numel() for p in drafter.parameters()), flops=2 * weights + attention, prefix=prefix)
