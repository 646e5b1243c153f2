"""A drafter made of all the target's blocks is the target: what the framework must give exactly."""

from __future__ import annotations

import pandas as pd
import torch

from kvshot.data import DraftVocab
from kvshot.drafters import DrafterConfig, Given, new_drafter
from kvshot.targets import Target, capture
from kvshot.training.ttt import unroll


@torch.no_grad()
def target_as_drafter(target: Target, ids: torch.Tensor, n_steps: int = 7) -> pd.DataFrame:
    """Unroll a drafter that copies every block of the target, each attending to that block's own keys and values.

    ids [B, T]. One row a draft step: columns, share of columns whose first choice is the target's, and the largest
    difference of a score, in units of the scores' standard deviation. Raises KvshotError for a target whose blocks are
    of another kind than draft layers.
    """
    n, vocab = target.n_layers, DraftVocab(torch.arange(target.vocab_size), target.vocab_size)
    config = DrafterConfig.for_target(
        target, draft_vocab_size=target.vocab_size, memory="target", kv_layers=tuple(range(n)), per_layer=True,
        injection="linear+rope", depth=n, qk_norm=target.qk_norm)
    drafter = new_drafter(target, config, vocab, seed=0, init="layers").to(target.dtype)
    context = capture(target, ids, hidden_layers=(), kv_layers=config.kv_needed)
    given, scores = Given(keys=context.keys, values=context.values), target.logits(context.final)
    ids = context.ids
    columns = torch.arange(ids.shape[1] - 1 - n_steps, device=ids.device).expand(ids.shape[0], -1)
    rows = []
    for k, state in enumerate(unroll(drafter, ids, given, columns, n_steps)):
        ours, theirs = drafter.logits(state).float(), scores[:, 1 + k : 1 + k + columns.shape[1]]
        agree = (ours.argmax(-1) == theirs.argmax(-1)).float().mean()
        rows.append([columns.numel(), float(agree), float((ours - theirs).abs().max() / theirs.std())])
    return pd.DataFrame(rows, pd.RangeIndex(n_steps, name="step"), ["columns", "same choice", "largest difference"])
