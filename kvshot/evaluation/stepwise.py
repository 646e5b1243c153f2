"""Step-wise acceptance: run a drafter over held-out features, teacher-forced, every supervised column."""

from __future__ import annotations

import torch

from kvshot.drafters.drafter import Drafter
from kvshot.evaluation.metrics import StepwiseHits
from kvshot.progress import progress
from kvshot.targets import Features
from kvshot.targets.store import token_batches
from kvshot.training.batches import load_batch
from kvshot.training.ttt import choose_columns, gather_columns, unroll


@torch.no_grad()
def stepwise_hits(drafter: Drafter, store: Features, n_steps: int = 7, *, batch_tokens: int = 4096,
                  quiet: bool = False, **how: bool) -> StepwiseHits:
    """Whether the drafter's first choice is the target's, for each supervised column and step.

    A target choice outside the draft vocabulary is a miss. Columns come by sequence, then by position. how: `offline`
    or `true_states` of `unroll`.
    """
    device, in_vocab, parts = drafter.vocab_ids.device, drafter.in_vocab(), []
    order = sorted(range(len(store)), key=store.lengths.__getitem__, reverse=True)  # so that batches pad little
    with progress("evaluating (sequences)", len(store), quiet=quiet) as advance:
        for part in token_batches([store.lengths[i] for i in order], batch_tokens):
            batch = load_batch(store, order[part], drafter.config)
            columns = choose_columns(batch.loss_mask, n_steps, None).to(device)
            batch = batch.to(device)
            keep = columns.valid[..., 0]
            hits, oov = [], []
            for k, state in enumerate(unroll(drafter, batch.ids, batch.given, columns.at, n_steps, **how)):
                label = gather_columns(batch.argmax, columns.at + 1 + k)[keep]
                choice = drafter.vocab_ids[drafter.logits(state[keep]).argmax(-1)]
                hits.append(choice == label)
                oov.append(~in_vocab[label])
            valid = columns.valid[keep]
            parts.append(StepwiseHits(
                hits=(torch.stack(hits, -1) & valid).cpu().numpy(), valid=valid.cpu().numpy(),
                conversation=batch.index[:, None].expand_as(keep)[keep].cpu().numpy(),
                oov=(torch.stack(oov, -1) & valid).cpu().numpy()))
            advance(len(batch.index))
    return StepwiseHits.concat(parts).by_conversation()
