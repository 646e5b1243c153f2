"""What survives in a hidden state (Section 2): which tokens of the prefix can still be read from it?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from kvshot.analysis.compression import attention_weights
from kvshot.errors import KvshotError
from kvshot.evaluation.metrics import resamples
from kvshot.progress import progress
from kvshot.targets import Target, capture

CACHE = "the cache"  # the ceiling: keys and values of the token itself


STRENGTHS = 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0  # of the penalty, in units of unit variance, times the number of rows


class _Ridge:
    """Least squares from scaled inputs to several groups of outputs, each with the penalty that serves it best on rows
    left out.

    x [n, p], y [n, m]; groups: slices of the m outputs; left_out bool [n]. The last fit is on all rows.
    """

    def __init__(self, x: np.ndarray, y: np.ndarray, groups: Sequence[slice], left_out: np.ndarray) -> None:
        self.centre, self.spread, self.mean = x.mean(0), x.std(0) + 1e-9, y.mean(0)
        x, y = (x - self.centre) / self.spread, y - self.mean
        some, rest = x[~left_out], x[left_out]
        gram, cross = some.T @ some, some.T @ y[~left_out]
        wrong = []
        for strength in STRENGTHS:
            miss = rest @ _solve(gram, cross, strength * len(some)) - y[left_out]
            wrong.append([(miss[:, g] ** 2).sum() for g in groups])
        best = np.argmin(wrong, axis=0)
        gram, cross = gram + rest.T @ rest, cross + rest.T @ y[left_out]
        self.weights = np.empty_like(cross)
        for i in set(best.tolist()):
            solved = _solve(gram, cross, STRENGTHS[i] * len(x))
            for g in (g for g, chosen in zip(groups, best, strict=True) if chosen == i):
                self.weights[:, g] = solved[:, g]

    def __call__(self, x: np.ndarray) -> np.ndarray:
        return ((x - self.centre) / self.spread) @ self.weights + self.mean


def _solve(gram: np.ndarray, cross: np.ndarray, penalty: float) -> np.ndarray:
    penalised = gram.copy()
    penalised[np.diag_indices_from(penalised)] += penalty
    return np.linalg.solve(penalised, cross)


class _Texts:
    """What is read of some texts. Positions t from `first` on; the token looked for stands at t - distance."""

    def __init__(self, target: Target, texts: Sequence[Tensor], hidden: tuple[int, ...], kv: tuple[int, ...],
                 block: int, first: int, advance) -> None:
        below = tuple(j for j in target.kv_layers if j < max(hidden))  # the blocks whose attention made the states
        layers = tuple(sorted({*kv, *below}))
        cache = [layers.index(j) for j in kv]
        parts: dict[str, list] = {"hidden": [], "cache": [], "values": [], "weights": [], "ids": []}
        for ids in texts:
            context = capture(target, ids[None], hidden_layers=hidden, kv_layers=layers, queries=True)
            pairs = torch.stack([context.keys_unrotated()[0, cache], context.values[0, cache]], 1)  # [L, 2, H, T, D]
            parts["hidden"].append(context.hidden[0].transpose(0, 1))  # [T, n, d]
            parts["cache"].append(pairs.permute(3, 0, 1, 2, 4).flatten(1))
            parts["values"].append(context.values[0, layers.index(block)].transpose(0, 1).flatten(1))
            each = (attention_weights(context, layers.index(j)).mean(0) for j in below)
            parts["weights"].append(sum(each) / len(below))
            parts["ids"].append(ids)
            advance()
        for name, several in parts.items():
            setattr(self, name, [x.cpu().numpy().astype(np.int64 if name == "ids" else np.float64) for x in several])
        self.first, self.lengths = first, [len(x) for x in texts]

    def states(self, places: Sequence[int]) -> np.ndarray:
        return np.concatenate([h[self.first :, list(places)].reshape(len(h) - self.first, -1) for h in self.hidden])

    def looked_for(self, what: str, distance: int) -> np.ndarray:
        """Rows of `what` ("cache", "values", "ids") at t - distance."""
        return np.concatenate([x[self.first - distance : len(x) - distance] for x in getattr(self, what)])

    def received(self, distance: int) -> np.ndarray:
        """Weight, mean over heads and blocks below the states, that the query at t gave to t - distance."""
        return np.concatenate([np.diagonal(w, -distance)[self.first - distance :] for w in self.weights])

    def number(self) -> np.ndarray:
        return np.repeat(np.arange(len(self.lengths)), [n - self.first for n in self.lengths])


def survival(target: Target, train: Sequence[Tensor], test: Sequence[Tensor], sources: dict[str, tuple[int, ...]], *,
             block: int | None = None, distances: Sequence[int] = (1, 4, 16, 64),
             edges: Sequence[float] = (0.005, 0.02), quiet: bool = False) -> pd.DataFrame:
    """Read a token's value vector and its identity from the state `distance` positions later, by linear probes.

    train, test: texts ids [T]; the probes are fitted on `train` and everything below is of `test`. sources: name ->
    hidden layers of the state at t. block: whose values (default: the middle one of three spaced blocks).
    A probe for each source and distance, all on the positions t >= the largest distance + 1; the last fifth of `train`
    decides its penalty.

    One row a position: text, source, distance; weight: what the queries at t gave the token (mean over the heads of
    all blocks that the states have passed); group: how many of `edges` that exceeds; error, total: squared error of the
    value's probe, and around the mean of the tokens of this group in `train` (R² = 1 - sum / sum: tokens that draw
    attention are of another kind, and knowing the kind is no recovery); right: whether the token embedding nearest
    (cosine) to the other probe's, of all tokens in `test`, is the token's. The source "the cache" reads the token's own
    keys and values in three spaced blocks: the ceiling.
    Raises KvshotError when no text is long enough.
    """
    kv = target.spaced_kv_layers(3)
    block = kv[1] if block is None else block
    kv = kv if block in kv else (*kv, block)
    first, hidden = max(distances) + 1, tuple(sorted({i for layers in sources.values() for i in layers}))
    train, test = ([t for t in texts if len(t) > first] for texts in (train, test))
    if len(train) < 2 or not test:
        raise KvshotError(f"fewer than two texts to fit on, or none to judge, are longer than {first} tokens: give "
                          "longer ones or smaller distances")
    with progress("reading (texts)", len(train) + len(test), quiet=quiet) as advance:
        fitted, judged = (_Texts(target, texts, hidden, kv, block, first, advance) for texts in (train, test))
    embed = target.embedding_weight.double().cpu().numpy()
    candidates = np.unique(np.concatenate(judged.ids))
    cut = fitted.number() >= min(-(-4 * len(train) // 5), len(train) - 1)
    n = judged.values[0].shape[1]
    groups = [slice(0, n), slice(n, n + embed.shape[1])]
    goals = {d: [np.concatenate([part.looked_for("values", d), embed[part.looked_for("ids", d)]], 1)
                 for part in (fitted, judged)] for d in distances}
    guesses: dict[tuple[str, int], np.ndarray] = {}
    width = groups[-1].stop
    for name in sources:  # one solution for all distances: they share their inputs
        x, z = (part.states([hidden.index(i) for i in sources[name]]) for part in (fitted, judged))
        everything = [slice(g.start + i * width, g.stop + i * width) for i in range(len(distances)) for g in groups]
        probe = _Ridge(x, np.concatenate([goals[d][0] for d in distances], 1), everything, cut)
        guesses |= {(name, d): part for d, part in zip(distances, np.split(probe(z), len(distances), 1), strict=True)}
    for d in distances:
        x, z = (part.looked_for("cache", d) for part in (fitted, judged))
        guesses[CACHE, d] = _Ridge(x, goals[d][0], groups, cut)(z)
    rows = []
    for (name, d), guess in guesses.items():
        known, goal = goals[d]
        mean = known.mean(0)
        groups_of = [np.digitize(part.received(d), edges) for part in (fitted, judged)]
        means = np.stack([known[groups_of[0] == g].mean(0) if (groups_of[0] == g).any() else mean
                          for g in range(len(edges) + 1)])[groups_of[1]]
        found = _nearest(guess[:, n:] - mean[n:], embed[candidates] - mean[n:], candidates)
        rows.append(pd.DataFrame({
            "text": judged.number(), "source": name, "distance": d, "weight": judged.received(d),
            "group": groups_of[1],
            "error": ((guess - goal)[:, :n] ** 2).sum(1), "total": ((means - goal)[:, :n] ** 2).sum(1),
            "right": found == judged.looked_for("ids", d)}))
    return pd.concat(rows, ignore_index=True)


def _nearest(guess: np.ndarray, vectors: np.ndarray, names: np.ndarray) -> np.ndarray:
    """The name of the vector with the largest cosine, for each guess."""
    return names[(guess @ (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).T).argmax(1)]


def recovered(table: pd.DataFrame, by: Sequence[str], *, n_boot: int = 1000) -> pd.DataFrame:
    """R² of the values and share of tokens identified for each group, with 95 % intervals over texts.

    Columns: r2, r2_low, r2_high, right, right_low, right_high, n (positions), texts (with such positions).
    """
    texts = np.sort(table["text"].unique())
    weights = resamples(len(texts), n_boot, 0)
    out = {}
    for key, rows in table.groupby(list(by), observed=True):
        sums = rows.groupby("text")[["error", "total", "right"]].sum().assign(n=rows.groupby("text").size())
        sums = sums.reindex(texts, fill_value=0).to_numpy(np.float64)
        draws = weights @ sums
        with np.errstate(invalid="ignore", divide="ignore"):
            drawn = [1 - draws[:, 0] / draws[:, 1], draws[:, 2] / draws[:, 3]]
        error, total, right, n = sums.sum(0)
        intervals = [np.nanquantile(d, [0.025, 0.975]) for d in drawn]
        out[key] = [1 - error / total, *intervals[0], right / n, *intervals[1], int(n),
                    rows["text"].nunique()]
    columns = ["r2", "r2_low", "r2_high", "right", "right_low", "right_high", "n", "texts"]
    frame = pd.DataFrame.from_dict(out, orient="index", columns=columns)
    frame.index = pd.MultiIndex.from_tuples(frame.index, names=list(by))
    return frame.astype({"n": int, "texts": int})
