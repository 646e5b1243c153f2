"""Query estimation (Prediction 2): does a drafter look where the target will look, and is it right when it does?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from kvshot.analysis.compression import SINK, attention_weights, jensen_shannon, shares
from kvshot.drafters.attention import dense
from kvshot.drafters.drafter import Drafter
from kvshot.drafters.injection import Given
from kvshot.errors import KvshotError
from kvshot.evaluation.metrics import resamples
from kvshot.progress import progress
from kvshot.targets import Target, capture
from kvshot.training.masks import supervised_columns
from kvshot.training.ttt import unroll


class _Recorder:
    """The dense attention, noting the weights [B, H, N, S] that each query puts on the prefix memory."""

    def __init__(self) -> None:
        self.weights: list[Tensor] = []

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor, limit: Tensor, chain_k: Tensor, chain_v: Tensor
                 ) -> Tensor:
        group = q.shape[1] // keys.shape[1]
        k, own = keys.repeat_interleave(group, 1), chain_k.repeat_interleave(group, 1)
        prefix = (q @ k.transpose(-1, -2)).float()
        hidden = torch.arange(keys.shape[2], device=q.device) >= limit[:, None, :, None]
        chain = (q[:, :, :, None] * own).sum(-1).float()
        scores = torch.cat([prefix.masked_fill(hidden, -torch.inf), chain], -1) * q.shape[-1] ** -0.5
        self.weights.append(scores.softmax(-1)[..., : keys.shape[2]])
        return dense(q, keys, values, limit, chain_k, chain_v)


def branches(drafter: Drafter) -> list[str]:
    """Names of the drafter's attentions, in the order in which a step runs them: "layer 1", "layer 1, target"."""
    return [f"layer {i + 1}" + (", target's memory" if name == "cross_attn" else "")
            for i, layer in enumerate(drafter.layers) for name in layer.branches]


@torch.no_grad()
def recorded_steps(drafter: Drafter, ids: Tensor, given: Given, columns: Tensor, n_steps: int
                   ) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Each step's states [1, N, d] and, for every branch, the weights [H, N, T] on positions 0..T-1 of the prefix.

    One sequence. An entry of the drafter's own memory stands at the position of the token that it has read.
    """
    recorder, before = _Recorder(), drafter.attention
    sources = [source for layer in drafter.layers for source in layer.branches.values()]
    drafter.attention = recorder
    try:
        for state in unroll(drafter, ids, given, columns, n_steps):
            seen = recorder.weights[-len(sources):]
            recorder.weights.clear()
            yield state, [torch.nn.functional.pad(w[0], (1, 0))[..., : ids.shape[1]] if source == "own" else w[0]
                          for w, source in zip(seen, sources, strict=True)]
    finally:
        drafter.attention = before


def _shares(weights: Tensor, columns: Tensor) -> Tensor:
    """[..., N, T] -> the same on positions SINK..i of each column i, scaled to sum to one."""
    at = torch.arange(weights.shape[-1], device=weights.device)
    return shares(weights, (at >= SINK) & (at <= columns[:, None]))


def query_error(drafter: Drafter, target: Target, texts: Sequence[tuple[Tensor, Tensor]], n_steps: int = 7, *,
                blocks: Sequence[int] | None = None, per_text: int = 32, first: int = 32, quiet: bool = False
                ) -> pd.DataFrame:
    """How far the drafter's attention to the verified prefix is from the target's at the same future position.

    texts: (ids [T], loss mask [T]) each; of every one up to `per_text` supervised columns i >= first, evenly spaced. No
    map between the two query spaces is needed: compared are the weights on tokens 1..i, scaled to sum to one, by their
    Jensen-Shannon distance. The target's are those of its query at i + 1 + k in `blocks` (default: three spaced ones),
    which has read the tokens in between. Every head of the drafter is compared with one of the target's, the one
    nearest to it at step 0 on the first half of the texts; rows are of the second half.

    One row a text, column, step and branch ("layer 1", ...): distance, mean over the branch's heads; stale, the same
    between the target's own query at i, the last one that exists when drafting begins, and that at i + 1 + k; hit:
    the drafter's first choice is the target's. Raises KvshotError when fewer than three texts are long enough, and for
    a drafter without a memory of the prefix.
    """
    if drafter.config.memory == "none":
        raise KvshotError("the drafter has no memory of the prefix: its attention cannot be compared with the target's")
    blocks = target.spaced_kv_layers(3) if blocks is None else tuple(blocks)
    c, names, chosen = drafter.config, branches(drafter), []
    for ids, mask in texts:
        wanted = supervised_columns(mask[None], n_steps)[0, :, -1]
        wanted[:first] = False
        at = wanted.nonzero()[:, 0]
        if len(at):
            chosen.append((ids, at[torch.linspace(0, len(at) - 1, min(per_text, len(at))).long()]))
    if len(chosen) < 3:  # one to match heads on, two for an interval
        raise KvshotError(f"fewer than three texts have {n_steps} supervised tokens after {first}: give longer ones")
    half, sums, pairs, rows = len(chosen) // 2, [0.0] * len(names), None, []
    with progress("attention (texts)", len(chosen), quiet=quiet) as advance:
        for number, (ids, columns) in enumerate(chosen):
            needed = tuple(dict.fromkeys((*blocks, *c.kv_needed)))
            context = capture(target, ids[None], hidden_layers=c.hidden_needed or (), kv_layers=needed, queries=True)
            at = [needed.index(j) for j in c.kv_needed]
            given = Given(context.hidden if c.hidden_needed else None,
                          *((context.keys[:, at], context.values[:, at]) if at else (None, None)))
            true = torch.cat([attention_weights(context, needed.index(j)) for j in blocks])  # [G, T, T]
            choices = target.logits(context.final[0]).argmax(-1)
            columns = columns.to(true.device)
            steps = recorded_steps(drafter, context.ids, given, columns[None], n_steps if number >= half else 1)
            for k, (state, seen) in enumerate(steps):
                later, ours = _shares(true[:, columns + 1 + k], columns), [_shares(w, columns) for w in seen]
                if number < half:
                    for b, weights in enumerate(ours):  # a head at a time: [G, N, T] fits
                        sums[b] = sums[b] + torch.stack([jensen_shannon(head, later).mean(-1) for head in weights])
                    continue
                pairs = pairs or [s.argmin(-1) for s in sums]
                stale, hit = _shares(true[:, columns], columns), _hits(drafter, state, choices[columns + 1 + k])
                for name, weights, nearest in zip(names, ours, pairs, strict=True):
                    goal = later[nearest]
                    rows.append(pd.DataFrame({
                        "text": number, "column": columns.cpu(), "step": k, "branch": name,
                        "distance": jensen_shannon(weights, goal).mean(0).cpu(),
                        "stale": jensen_shannon(stale[nearest], goal).mean(0).cpu(), "hit": hit.cpu()}))
            advance()
    return pd.concat(rows, ignore_index=True)


def _hits(drafter: Drafter, state: Tensor, label: Tensor) -> Tensor:
    return drafter.vocab_ids[drafter.logits(state)[0].argmax(-1)] == label


ALL = "all attentions"


def by_outcome(table: pd.DataFrame, *, n_boot: int = 1000) -> pd.DataFrame:
    """Mean distance where the draft was accepted and where it was not, for each branch, and their difference.

    Columns: accepted, rejected, difference (rejected - accepted) with low and high, its 95 % interval over texts. Every
    step weighs the same in both, so that later steps, harder and farther away, do not make the difference. Where there
    are several branches a last row is of their mean. A branch without steps that have both outcomes is left out.
    """
    if table["branch"].nunique() > 1:
        keys = ["text", "column", "step", "hit"]
        table = pd.concat([table, table.groupby(keys, as_index=False)["distance"].mean().assign(branch=ALL)])
    texts = np.sort(table["text"].unique())
    weights = resamples(len(texts), n_boot, 0)
    out = {}
    for branch, rows in table.groupby("branch", sort=False):
        means = [_by_step(rows[rows["hit"] == hit], texts, np.vstack([np.ones(len(texts)), weights]))
                 for hit in (True, False)]
        steps = sorted(set(means[0]) & set(means[1]))
        if not steps:
            continue
        with np.errstate(invalid="ignore"):  # a step without one of the outcomes in a resample is left out of both
            accepted, rejected = (np.stack([m[k] for k in steps]) for m in means)
            gaps = np.nanmean(rejected - accepted, axis=0)
        low, high = np.nanquantile(gaps[1:], [0.025, 0.975])
        out[branch] = [accepted[:, 0].mean(), rejected[:, 0].mean(), gaps[0], low, high]
    columns = ["accepted", "rejected", "difference", "low", "high"]
    return pd.DataFrame.from_dict(out, orient="index", columns=columns).rename_axis("branch")


def _by_step(rows: pd.DataFrame, texts: np.ndarray, weights: np.ndarray) -> dict[int, np.ndarray]:
    """Mean distance of each step under every row of weights [R, texts] -> step: [R]."""
    grouped = rows.groupby(["step", "text"])["distance"].agg(["sum", "count"])
    out = {}
    for step, several in grouped.groupby(level="step"):
        of = several.droplevel("step").reindex(texts, fill_value=0).to_numpy(np.float64)
        total = weights @ of
        with np.errstate(invalid="ignore", divide="ignore"):
            out[step] = total[:, 0] / total[:, 1]
    return out
