"""Who contributes to the gradient of a drafter's projections (Section 4): the smallest case, counted exactly."""

from __future__ import annotations

import pandas as pd
import torch

from kvshot.data import DraftVocab
from kvshot.drafters.config import DrafterConfig
from kvshot.drafters.init import new_drafter
from kvshot.drafters.injection import Given
from kvshot.targets import Target, capture
from kvshot.training.probes import PROJECTIONS, Probes, numbers
from kvshot.training.ttt import unroll


def who_contributes(target: Target, length: int = 24, n_steps: int = 3) -> pd.DataFrame:
    """Rows with a gradient for each projection, of one column in the middle of a random text, all its steps supervised.

    EAGLE-3 against a one-layer KV-only drafter, both untrained: a row each; columns W_Q, W_K, W_V. length: tokens, at
    least twice n_steps.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, target.vocab_size, (1, length), generator=generator)
    vocab = DraftVocab(torch.arange(min(64, target.vocab_size)), target.vocab_size)
    column, rows = torch.tensor([[length // 2]]), {}
    for name, choices in {
        "EAGLE-3": {"hidden_layers": target.default_hidden_layers},
        "KV-only": {"memory": "target", "kv_layers": target.default_kv_layers, "injection": "linear"},
    }.items():
        config = DrafterConfig.for_target(target, draft_vocab_size=len(vocab), **choices)
        drafter = new_drafter(target, config, vocab, seed=0, init="random")
        context = capture(target, ids, hidden_layers=config.hidden_needed, kv_layers=config.kv_needed)
        given = Given(context.hidden, context.keys, context.values)
        probes = Probes(drafter)
        with probes.watch(close=True):
            states = unroll(drafter, context.ids, given, column.to(context.ids.device), n_steps)
            sum(drafter.logits(state).logsumexp(-1).sum() for state in states).backward()
        seen = numbers([probes.row()])[0]
        rows[name] = [int(seen[f"rows.self_attn.{p}"]) for p in PROJECTIONS]
    return pd.DataFrame.from_dict(rows, orient="index", columns=["W_Q", "W_K", "W_V"]).rename_axis(columns="rows")
