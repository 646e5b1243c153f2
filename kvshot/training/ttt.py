"""Training-time test (TTT): unroll a drafter over K steps on captured sequences, and its loss.

Step k of column i gets the ground-truth token x_{i+1+k}, the drafter's own state of step k-1, and is judged by the
target's distribution at position i+1+k. Only the sampled columns are unrolled; what the others contribute to the prefix
memory is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kvshot.drafters.drafter import Drafter
from kvshot.drafters.injection import Given
from kvshot.training.masks import supervised_columns


@dataclass
class Batch:
    """B right-padded sequences of captured features.

    ids int64 [B, T]; loss_mask bool [B, T]; given: states, keys and values of T positions; final [B, T, d] (after the
    target's final norm); argmax int64 [B, T]: the target's own choice after each position; index int64 [B]: sequence
    numbers in the store.
    """

    ids: Tensor
    loss_mask: Tensor
    given: Given
    final: Tensor
    argmax: Tensor
    index: Tensor

    def to(self, device: torch.device | str) -> Batch:
        return Batch(*(getattr(self, f).to(device) for f in self.__dataclass_fields__))


@dataclass
class Columns:
    """Which columns of a batch are unrolled.

    at int64 [B, N]; valid bool [B, N, K]: supervised at step k; weight float [B]: how many supervised columns of the
    sequence each sampled one stands for.
    """

    at: Tensor
    valid: Tensor
    weight: Tensor

    def to(self, device: torch.device | str) -> Columns:
        return Columns(self.at.to(device), self.valid.to(device), self.weight.to(device))


def choose_columns(loss_mask: Tensor, n_steps: int, per_sequence: int | None,
                   generator: torch.Generator | None = None) -> Columns:
    """All supervised columns of each sequence, or a random `per_sequence` of them, without replacement.

    With the weights, the sampled loss is an unbiased estimate of the full one's sums. loss_mask and result are on the
    CPU, so that a seed means the same columns on every device.
    """
    supervised = supervised_columns(loss_mask, n_steps)
    first = supervised[..., 0]
    counts = first.sum(-1)
    width = int(counts.max()) if per_sequence is None else min(per_sequence, int(counts.max()))
    rank = torch.rand(first.shape, generator=generator)
    chosen = rank.masked_fill(~first, 2.0).topk(max(width, 1), dim=-1, largest=False).indices.sort(-1).values
    valid = supervised.gather(1, chosen[..., None].expand(-1, -1, n_steps))
    taken = counts.clamp(max=max(width, 1)).clamp(min=1)
    return Columns(chosen, valid, counts / taken)


def gather_columns(x: Tensor, at: Tensor) -> Tensor:
    """x [B, T, ...] at positions [B, N] -> [B, N, ...]; positions beyond the end are clamped (they are not valid)."""
    at = at.clamp(max=x.shape[1] - 1)
    return x.gather(1, at.view(*at.shape, *[1] * (x.ndim - 2)).expand(*at.shape, *x.shape[2:]))


def unroll(drafter: Drafter, ids: Tensor, given: Given, columns: Tensor, n_steps: int, *, offline: bool = False,
           true_states: bool = False) -> Iterator[Tensor]:
    """States [B, N, d] of steps 0..K-1 for columns [B, N], teacher-forced on ids [B, T] and what the target gave for T.

    offline: step k starts from the target's states, keys and values of position i + k, as if the tokens before had been
    verified: the drafter never meets a state of its own making (Table 6, "Offline TTT").
    true_states: an intervention. What step k yields is computed from the target's fused state of position i + k in
    place of the drafter's own; the earlier steps that it attends to stay as they were drafted.
    """
    # the last position's column has no token to feed: its entry is cut by every limit
    memory = drafter.remember(given, torch.cat([ids[:, 1:], ids[:, -1:]], 1))
    fused = drafter.fuse(given.hidden)
    state = chain = None
    for k in range(n_steps):
        at = columns + k if offline else columns
        if k == 0 or offline:
            state, chain = None if fused is None else gather_columns(fused, at), None
        position, before = columns + 1 + k, chain
        fed = gather_columns(ids, position), position
        state, chain = drafter.step(*fed, state, memory, drafter.limit(at), before)
        if true_states and k and fused is not None:
            yield drafter.step(*fed, gather_columns(fused, columns + k), memory, drafter.limit(at), before)[0]
        else:
            yield state


CPU_ROWS = 32


class _SoftCrossEntropy(torch.autograd.Function):
    """-sum_v p_v log q_v per row, with the gradient q - p kept from the forward pass in the logits' own precision."""

    @staticmethod
    def forward(ctx, logits: Tensor, teacher: Tensor) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        difference = torch.empty_like(logits, memory_format=torch.contiguous_format)
        loss = logits.new_empty(logits.shape[:-1], dtype=wide)
        # on a CPU a few rows at a time: the wide copies stay in its cache instead of going through memory
        rows = CPU_ROWS if logits.device.type == "cpu" else max(1, loss.numel())
        parts = (x.view(-1, *x.shape[loss.ndim :]) for x in (difference, loss))
        for d, each, q, p in zip(*(x.split(rows) for x in (*parts, logits.flatten(0, -2), teacher.flatten(0, -2))),
                                 strict=True):
            p, log_q = p.to(wide).softmax(-1), q.to(wide).log_softmax(-1)
            torch.linalg.vecdot(p, log_q, out=each).neg_()
            d.copy_(log_q.exp_().sub_(p))
        ctx.save_for_backward(difference)
        return loss

    @staticmethod
    def backward(ctx, grad: Tensor):
        (difference,) = ctx.saved_tensors
        return difference * grad[..., None].to(difference.dtype), None


def soft_cross_entropy(logits: Tensor, teacher: Tensor) -> Tensor:
    """Cross-entropy of softmax(logits) against softmax(teacher), both [..., V_d] -> [...] (nats)."""
    return _SoftCrossEntropy.apply(logits, teacher)


class TTTLoss(nn.Module):
    """The objective: sum over steps of decay^k times the mean soft cross-entropy over supervised columns.

    teacher: final states [..., d] -> the target's scores over the draft vocabulary [..., V_d] (`Target.scorer`). The
    target's distribution is restricted to that vocabulary; positions whose target choice lies outside it are left out
    of the loss (and count as misses in evaluation). offline: see `unroll`. mean: of a number over the processes that
    share a batch; the mean of their losses is then that of the whole batch.
    """

    def __init__(self, drafter: Drafter, teacher: Callable[[Tensor], Tensor], *, n_steps: int = 7, decay: float = 0.8,
                 offline: bool = False, mean: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.drafter, self.teacher, self.n_steps, self.decay = drafter, teacher, n_steps, decay
        self.offline, self.mean = offline, mean
        self.register_buffer("in_vocab", drafter.in_vocab(), persistent=False)

    def forward(self, batch: Batch, columns: Columns) -> Tensor:
        loss = batch.final.new_zeros((), dtype=torch.float32)
        steps = unroll(self.drafter, batch.ids, batch.given, columns.at, self.n_steps, offline=self.offline)
        for k, state in enumerate(steps):
            position = columns.at + 1 + k
            keep = columns.valid[..., k] & self.in_vocab[gather_columns(batch.argmax, position)]
            with torch.no_grad():
                teacher = self.teacher(gather_columns(batch.final, position)[keep])
            each = soft_cross_entropy(self.drafter.logits(state[keep]), teacher)
            weight = columns.weight[:, None].expand_as(keep)[keep]
            loss = loss + self.decay**k * (each * weight).sum() / self.mean(weight.sum()).clamp(min=1e-9)
        return loss
