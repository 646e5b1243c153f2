"""Which draft columns are supervised at which step."""

from __future__ import annotations

import torch
from torch import Tensor


def supervised_columns(loss_mask: Tensor, n_steps: int) -> Tensor:
    """Say which (column, step) pairs have a target: bool [..., T] -> bool [..., T, n_steps].

    Column i pairs the target's state at position i with token x_{i+1}; at step k it predicts x_{i+2+k}, and
    its teacher is the target at position i+1+k. The pair is supervised exactly when x_{i+1} and x_{i+2+k} lie
    in the same assistant response, that is, in the same contiguous run of `loss_mask`. So True at step k
    implies True at every earlier step. What would reach beyond T is False; so is padding, which is outside
    the mask.
    """
    mask = loss_mask.bool()
    length = mask.shape[-1]
    # Positions of one run share the number of unmasked positions before them; two runs never do.
    run = torch.where(mask, torch.cumsum(~mask, dim=-1), -1)
    run = torch.nn.functional.pad(run, (0, n_steps + 1), value=-1)
    first = run[..., 1 : length + 1].unsqueeze(-1)
    predicted = run.unfold(-1, n_steps, 1)[..., 2 : length + 2, :]
    return (first >= 0) & (predicted == first)
