"""Two error regimes (Eq. 5), by intervention: what would be accepted if the drafter's own states were the target's?"""

from __future__ import annotations

import pandas as pd
import torch
import torch.nn.functional as F

from kvshot.drafters.drafter import Drafter
from kvshot.errors import KvshotError
from kvshot.evaluation import StepwiseHits, stepwise_hits
from kvshot.targets import Features
from kvshot.training.batches import load_batch
from kvshot.training.ttt import choose_columns, gather_columns, unroll

OWN, STATES, VERIFIED = "as drafted", "the target's states", "all verified"


def interventions(drafter: Drafter, store: Features, n_steps: int = 7, *, quiet: bool = False
                  ) -> dict[str, StepwiseHits]:
    """Hits on the same columns three ways.

    "as drafted": what the evaluator measures. "the target's states": step k starts from the target's fused state of
    position i + k, all else as drafted: no drift of the state (only for drafters that read states). "all verified":
    the drafter has what the target knows at i + k, its prefix memory included: what step 0 of that column would say.
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
    sums = torch.zeros(n_steps - 1, 3, dtype=torch.float64)
    for i in range(len(store)):
        batch = load_batch(store, [i], drafter.config)
        columns = choose_columns(batch.loss_mask, n_steps, None)
        fused = drafter.fuse(batch.given.hidden)
        for k, state in enumerate(unroll(drafter, batch.ids, batch.given, columns.at, n_steps)):
            if k + 1 == n_steps:
                break
            keep = columns.valid[..., k + 1]
            own, true = state[keep], gather_columns(fused, columns.at + k + 1)[keep]
            both = torch.stack([F.cosine_similarity(own, true, dim=-1), own.norm(dim=-1) / true.norm(dim=-1),
                                torch.ones(len(own))])
            sums[k] += both.double().sum(-1)
    table = pd.DataFrame((sums[:, :2] / sums[:, 2:]).numpy(), columns=["cosine", "norm"],
                         index=pd.RangeIndex(1, n_steps, name="step"))
    return table.assign(n=sums[:, 2].long().numpy())


def shares_of_decay(hits: dict[str, StepwiseHits]) -> pd.DataFrame:
    """By step: the decay since step 0, and how much of it each intervention gives back (as a share of the decay)."""
    rates = pd.DataFrame({name: h.hits.sum(0) / h.valid.sum(0) for name, h in hits.items()})
    decay = rates[OWN].iloc[0] - rates[OWN]
    out = pd.DataFrame({"decay": decay})
    if STATES in rates:
        out["drift of the state"] = (rates[STATES] - rates[OWN]) / decay
        out["what the target read since"] = (rates[VERIFIED] - rates[STATES]) / decay
    else:
        out["what the target read since"] = (rates[VERIFIED] - rates[OWN]) / decay
    return out.iloc[1:].rename_axis("step")
