"""Two error regimes (Eq. 5), by intervention: what would be accepted if the drafter's own states were the target's?"""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
import torch
import torch.nn.functional as F

from kvshot.drafters.drafter import Drafter
from kvshot.errors import KvshotError
from kvshot.evaluation import PairedDifference, StepwiseHits, paired_difference, stepwise_hits
from kvshot.evaluation.metrics import ConversationCounts
from kvshot.targets import Features
from kvshot.training.batches import load_batch
from kvshot.training.ttt import choose_columns, gather_columns, unroll

OWN, STATES, VERIFIED = "as drafted", "the target's states", "all verified"


def interventions(drafter: Drafter, store: Features, n_steps: int = 7, *, quiet: bool = False
                  ) -> dict[str, StepwiseHits]:
    """Hits on the same columns three ways.

    "as drafted": what the evaluator measures. "the target's states": step k starts from the target's fused state of
    position i + k, the steps before it as drafted: no drift of the state that it is fed (only for drafters that read
    states). "all verified": the drafter has what the target knows at i + k, memory included: step 0 of that column.
    """
    ways: dict[str, dict[str, bool]] = {OWN: {}}
    if drafter.config.reads_hidden:
        ways[STATES] = {"true_states": True}
    ways[VERIFIED] = {"offline": True}
    return {name: stepwise_hits(drafter, store, n_steps, quiet=quiet, **how) for name, how in ways.items()}


@torch.no_grad()
def state_drift(drafter: Drafter, store: Features, n_steps: int = 7) -> pd.DataFrame:
    """The drafter's own input state against the target's fused state of the same position, by step from 1 on.

    Columns: cosine (mean), norm (mean ratio own / target's), n. Raises KvshotError for a drafter that reads no states.
    """
    if not drafter.config.reads_hidden:
        raise KvshotError("the drafter reads no hidden states: there is nothing that could drift")
    sums, device = torch.zeros(n_steps - 1, 3, dtype=torch.float64), drafter.vocab_ids.device
    for i in range(len(store)):
        batch = load_batch(store, [i], drafter.config)
        columns, batch = choose_columns(batch.loss_mask, n_steps, None).to(device), batch.to(device)
        fused = drafter.fuse(batch.given.hidden)
        for k, state in enumerate(unroll(drafter, batch.ids, batch.given, columns.at, n_steps)):
            if k + 1 == n_steps:
                break
            keep = columns.valid[..., k + 1]
            own, true = state[keep], gather_columns(fused, columns.at + k + 1)[keep]
            both = torch.stack([F.cosine_similarity(own, true, dim=-1), own.norm(dim=-1) / true.norm(dim=-1),
                                own.new_ones(len(own))])
            sums[k] += both.double().sum(-1).cpu()
    table = pd.DataFrame((sums[:, :2] / sums[:, 2:]).numpy(), columns=["cosine", "norm"],
                         index=pd.RangeIndex(1, n_steps, name="step"))
    return table.assign(n=sums[:, 2].long().numpy())


def gains(hits: Mapping[str, StepwiseHits | ConversationCounts], step: int, *, n_boot: int = 2000
          ) -> dict[str, PairedDifference]:
    """Acceptance at a step, what each intervention adds to the one before it, on the same columns, with intervals.

    Keys: "drift of the state" (where there is one) and "what lies in between" (the memory and chain of the tokens since
    column i, as the target knows them).
    """
    rate = f"alpha_marginal_{step}"
    if STATES not in hits:
        return {"what lies in between": paired_difference(hits[VERIFIED], hits[OWN], rate, n_boot=n_boot)}
    return {"drift of the state": paired_difference(hits[STATES], hits[OWN], rate, n_boot=n_boot),
            "what lies in between": paired_difference(hits[VERIFIED], hits[STATES], rate, n_boot=n_boot)}
