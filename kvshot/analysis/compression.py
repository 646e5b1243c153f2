"""Biased compression, measured: what a later query wants of the prefix, and the earlier one gave no weight (Eq. 1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pandas as pd
import torch
from torch import Tensor

from kvshot.errors import KvshotError
from kvshot.evaluation.metrics import interval
from kvshot.progress import progress
from kvshot.targets import Target, TargetContext, capture

THRESHOLD = 0.01
SINK = 1  # the first token draws attention that means nothing; it is left out


def attention_maps(target: Target, ids: Tensor, layers: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """(layer, weights [H, T, T] in float32) for each of `layers`, from the target's own queries and keys of ids [T].

    For layers with full attention and no extra terms in their scores.
    """
    context = capture(target, ids[None], hidden_layers=(), kv_layers=tuple(layers), queries=True)
    for at, layer in enumerate(layers):
        yield layer, attention_weights(context, at)


def attention_weights(context: TargetContext, at: int) -> Tensor:
    """Weights [H, T, T] in float32 of the block `context.kv_layers[at]`, of the first sequence, where queries are."""
    q, k = context.queries[0, at].float(), context.keys[0, at].float()
    n = q.shape[1]
    future = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
    k = k.repeat_interleave(q.shape[0] // k.shape[0], 0)
    block = context.target.decoder.layers[context.kv_layers[at]]
    scale = getattr(block.self_attn, "scaling", q.shape[-1] ** -0.5)
    return (q @ k.transpose(-1, -2) * scale).masked_fill(future, -torch.inf).softmax(-1)


def _pairs(weights: Tensor, k: int, first: int) -> tuple[Tensor, Tensor, Tensor]:
    """weights [H, T, T] -> rows t and t + k on the prefix 0..t, [H, N, T - k], and which entries count, [N, T - k]."""
    n = weights.shape[-1] - k
    prefix = torch.ones(n, n, dtype=torch.bool, device=weights.device).tril()
    prefix[:, :SINK] = False
    return weights[:, first:n, :n], weights[:, first + k :, :n], prefix[first:]


def shares(x: Tensor, counted: Tensor) -> Tensor:
    """Weights x [..., T] where `counted`, scaled to sum to one."""
    x = x * counted
    return x / x.sum(-1, keepdim=True).clamp(min=1e-12)


def jensen_shannon(p: Tensor, q: Tensor) -> Tensor:
    """Jensen-Shannon distance (0..1, base 2) over the last axis."""
    middle = (p + q) / 2
    js = (torch.xlogy(p, p / middle) + torch.xlogy(q, q / middle)).nan_to_num(0).sum(-1) / 2
    return (js.clamp(min=0) / torch.log(torch.tensor(2.0))).sqrt()


def attention_shift(target: Target, texts: Sequence[Tensor], offsets: Sequence[int] = tuple(range(8)), *,
                    layers: Sequence[int] | None = None, first: int = 32, quiet: bool = False) -> pd.DataFrame:
    """How attention to the common prefix changes from position t to t + k, averaged over heads and t >= first.

    texts: ids [T] each, longer than first + the largest offset. Both queries' weights on tokens 1..t are scaled to sum
    to one. One row a text, layer and offset k: "suppressed", the share of the query at t + k that lies on tokens which
    the query at t gave less than 1 %; "distance", the Jensen-Shannon distance (0..1, base 2) between the two on those
    tokens. k = 0 is the tail that a query has anyway.
    Raises KvshotError when no text is long enough.
    """
    layers = target.kv_layers if layers is None else tuple(layers)
    texts = [t for t in texts if len(t) > first + max(offsets)]
    if not texts:
        raise KvshotError(f"no text is longer than {first + max(offsets)} tokens: give longer ones")
    rows = []
    with progress("attention (texts)", len(texts), quiet=quiet) as advance:
        for number, ids in enumerate(texts):
            for layer, weights in attention_maps(target, ids, layers):
                for k in offsets:
                    now, later, counted = _pairs(weights, k, first)
                    p, q = shares(now, counted), shares(later, counted)
                    suppressed = (q * (p < THRESHOLD)).sum(-1).mean()
                    rows.append([number, layer, k, float(suppressed), float(jensen_shannon(p, q).mean())])
            advance()
    return pd.DataFrame(rows, columns=["text", "layer", "k", "suppressed", "distance"])


def suppressed_example(target: Target, ids: Tensor, k: int = 4, *, first: int = 32) -> dict[str, float | int]:
    """The clearest case in one text: of all layers, heads and positions the token which the query at t gave under 1 %
    and the query at t + k gives most weight. Keys: layer, head, position t, token (its position), before, after.
    Raises KvshotError for a text that is too short.
    """
    if len(ids) <= first + k:
        raise KvshotError(f"the text has {len(ids)} tokens: give one of more than {first + k}")
    best: dict[str, float | int] = {"after": -1.0}
    for layer, weights in attention_maps(target, ids, target.kv_layers):
        now, later, counted = _pairs(weights, k, first)
        wanted = torch.where(counted & (now < THRESHOLD), later, -1.0)
        if float(wanted.max()) > best["after"]:
            head, t, i = (int(x) for x in torch.unravel_index(wanted.argmax(), wanted.shape))
            best = {"layer": layer, "head": head, "position": t + first, "token": i,
                    "before": float(now[head, t, i]), "after": float(wanted.max())}
    return best


def interval_by(table: pd.DataFrame, value: str, by: str, *, n_boot: int = 1000) -> pd.DataFrame:
    """Mean of `value` for each `by`, over the texts, with a 95 % interval over texts: columns mean, low, high."""
    per_text = table.pivot_table(index="text", columns=by, values=value)
    low, high = interval(per_text.to_numpy(), n_boot=n_boot)
    return pd.DataFrame({"mean": per_text.mean(), "low": low, "high": high})
