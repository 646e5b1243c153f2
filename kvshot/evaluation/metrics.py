"""Step-wise acceptance: three alphas with their counts, MAT, retention, and intervals over conversations.

alpha_k is teacher-forced: ground-truth tokens feed every step. *Marginal* (the paper's Table 5) looks at step
k alone; *joint* asks that steps 0..k are all right; *conditional* that step k is right given that 0..k-1
were. A label outside the draft vocabulary is a miss.
"""

from __future__ import annotations

import base64
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from pydantic import BaseModel, ConfigDict, NonNegativeInt, model_validator
from scipy import stats

from kvshot.errors import KvshotError


@dataclass(frozen=True, eq=False)
class StepwiseHits:
    """What a drafter got right, one row per draft column.

    hits: bool [n_cols, K], the drafter's argmax at step k is the target's.
    valid: bool [n_cols, K], the column is supervised at step k (`training.masks.supervised_columns`).
    conversation: int64 [n_cols], index of the conversation that a column comes from.
    oov: bool [n_cols, K], the label lies outside the draft vocabulary.

    By convention a row exists for each column with any supervised step, by conversation, then by position, so
    that two drafters on the same examples have the same rows. Where `valid` is False, `hits` and `oov` are
    ignored.
    """

    hits: np.ndarray
    valid: np.ndarray
    conversation: np.ndarray
    oov: np.ndarray

    def __post_init__(self):
        shape = np.shape(self.hits)
        if len(shape) != 2 or any(np.shape(a) != shape for a in (self.valid, self.oov)):
            raise ValueError(f"hits, valid and oov need one shape [n_cols, K], got {shape}")
        if np.shape(self.conversation) != shape[:1]:
            raise ValueError(f"conversation needs shape {shape[:1]}, got {np.shape(self.conversation)}")
        if any(a.dtype != np.bool_ for a in (self.hits, self.valid, self.oov)):
            raise ValueError("hits, valid and oov must be boolean")
        if (self.hits & self.oov & self.valid).any():
            raise ValueError("an out-of-vocabulary label cannot be a hit")

    @classmethod
    def concat(cls, parts: Sequence[StepwiseHits]) -> StepwiseHits:
        """Put the rows of several batches one after the other."""
        names = ("hits", "valid", "conversation", "oov")
        return cls(*(np.concatenate([getattr(p, n) for p in parts]) for n in names))

    def by_conversation(self) -> StepwiseHits:
        """The same rows, sorted by conversation; within one the order stays."""
        order = np.argsort(self.conversation, kind="stable")
        return StepwiseHits(self.hits[order], self.valid[order], self.conversation[order], self.oov[order])


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class _WithInterval(_Frozen):
    """Prints as "1.234 [1.200, 1.268]" under a format such as ".3f"."""

    def __format__(self, spec: str) -> str:
        if self.value is None:
            return "undefined"
        return f"{self.value:{spec}}" + (f" [{self.low:{spec}}, {self.high:{spec}}]" if self.low is not None else "")


class Rate(_WithInterval):
    """A share with the counts behind it and its 95 % bootstrap interval.

    The interval is None with fewer than two conversations (nothing to resample) or for an undefined rate.
    """

    numerator: NonNegativeInt
    denominator: NonNegativeInt
    low: float | None
    high: float | None

    @model_validator(mode="after")
    def _is_a_share(self):
        if self.numerator > self.denominator:
            raise ValueError(f"numerator {self.numerator} exceeds denominator {self.denominator}")
        return self

    @property
    def value(self) -> float | None:
        """The rate, or None for 0 / 0."""
        return self.numerator / self.denominator if self.denominator else None


class Estimate(_WithInterval):
    """A number computed from several rates, with its 95 % bootstrap interval; None as in `Rate`."""

    value: float | None
    low: float | None
    high: float | None


class StepSummary(_Frozen):
    """Acceptance at one draft step; `oov` is the share of labels outside the draft vocabulary."""

    step: NonNegativeInt
    alpha_marginal: Rate
    alpha_joint: Rate
    alpha_conditional: Rate
    oov: Rate


class StepwiseSummary(_Frozen):
    """One drafter on one held-out set.

    mat: 1 + sum_k prod_{j<=k} alpha_j with marginal alphas, as the paper. mat_joint: 1 + sum_k joint alpha_k,
    what a greedy chain of K drafts would yield per verify call on text that the target writes greedily (on other text
    the true token is fed after a right step even where the two differ). Both count the bonus token.
    retention: alpha_{K-1} / alpha_0, marginal.
    """

    n_columns: NonNegativeInt
    n_conversations: NonNegativeInt
    n_boot: NonNegativeInt
    seed: int
    steps: list[StepSummary]
    mat: Estimate
    mat_joint: Estimate
    retention: Estimate

    @property
    def alpha(self) -> list[float]:
        """The K marginal alphas."""
        return [step.alpha_marginal.value for step in self.steps]


class PairedDifference(_Frozen):
    """`a` minus `b` of one statistic on the same columns, both sides under the same resamples."""

    statistic: str
    a: float | None
    b: float | None
    difference: Estimate
    n_conversations: NonNegativeInt
    n_boot: NonNegativeInt
    seed: int


def mat(alpha) -> np.ndarray | float:
    """Tokens per verify call, bonus token included: 1 + sum_k prod_{j<=k} alpha_j over the last axis."""
    return 1.0 + np.cumprod(alpha, axis=-1).sum(axis=-1)


def retention(alpha) -> np.ndarray | float:
    """alpha_{K-1} / alpha_0 over the last axis; NaN where alpha_0 is 0."""
    alpha = np.asarray(alpha, dtype=np.float64)
    return _ratio(alpha[..., -1], alpha[..., 0])[()]


def _ratio(numerator, denominator):
    return np.divide(numerator, denominator, out=np.full(np.shape(numerator), np.nan), where=denominator > 0)


_HIT, _VALID, _ALL_HIT, _ALL_VALID, _PREFIX_HIT, _OOV = range(6)
_RATES = {
    "alpha_marginal": (_HIT, _VALID),
    "alpha_joint": (_ALL_HIT, _ALL_VALID),
    "alpha_conditional": (_ALL_HIT, _PREFIX_HIT),
    "oov": (_OOV, _VALID),
}
_NUMBERS = ("mat", "mat_joint", "retention")


def _count(h: StepwiseHits) -> np.ndarray:
    """Sufficient counts of every statistic: float64 [n_conversations, K, 6], indexed by the names above."""
    _, group = np.unique(h.conversation, return_inverse=True)
    n_groups = int(group.max(initial=-1)) + 1
    all_valid = np.logical_and.accumulate(h.valid, axis=1)
    all_hit = np.logical_and.accumulate(h.hits & h.valid, axis=1)
    before = np.concatenate([np.ones_like(all_hit[:, :1]), all_hit[:, :-1]], axis=1)
    fields = (h.hits & h.valid, h.valid, all_hit, all_valid, all_valid & before, h.oov & h.valid)
    steps = range(h.hits.shape[1])
    counts = [[np.bincount(group, weights=f[:, k], minlength=n_groups) for f in fields] for k in steps]
    counts = np.asarray(counts).reshape(len(steps), len(fields), n_groups).transpose(2, 0, 1)
    empty = np.flatnonzero(counts[..., _ALL_VALID].sum(axis=0) == 0)
    if len(empty) or not len(steps):
        raise KvshotError(
            f"no column is supervised at step {empty[0] if len(empty) else 0}: evaluate on longer answers, "
            "or with fewer steps"
        )
    return counts


class ConversationCounts(_Frozen):
    """The counts of every conversation, packed for a record: what a paired comparison of two records needs.

    packed: base64 of zlib of little-endian uint16 [conversations, steps, 6] (hits, valid, all right so far, supervised
    so far, right before, outside the vocabulary).
    """

    conversations: NonNegativeInt
    steps: NonNegativeInt
    packed: str

    @classmethod
    def of(cls, hits: StepwiseHits) -> ConversationCounts:
        table = _count(hits)
        raw = table.astype("<u2")
        if (raw != table).any():
            raise KvshotError("a conversation has more than 65,535 columns: evaluate on shorter ones")
        return cls(conversations=len(table), steps=table.shape[1],
                   packed=base64.b64encode(zlib.compress(raw.tobytes(), 9)).decode())

    def table(self) -> np.ndarray:
        """float64 [conversations, steps, 6], read-only. Raises KvshotError when damaged."""
        return _unpacked(self)


@lru_cache(maxsize=256)  # a page asks for the same ones again and again
def _unpacked(counts: ConversationCounts) -> np.ndarray:
    try:
        flat = np.frombuffer(zlib.decompress(base64.b64decode(counts.packed, validate=True)), dtype="<u2")
        table = flat.reshape(counts.conversations, counts.steps, 6).astype(np.float64)
    except (ValueError, zlib.error) as err:
        raise KvshotError(f"the counts of a record are damaged ({err}): fetch or make it again") from err
    table.flags.writeable = False
    return table


def _statistics(counts: np.ndarray) -> dict[str, np.ndarray]:
    """Every rate [..., K] and number [...] from counts [..., K, 6]; NaN where undefined."""
    out = {name: _ratio(counts[..., top], counts[..., bottom]) for name, (top, bottom) in _RATES.items()}
    out["mat"] = mat(out["alpha_marginal"])
    out["mat_joint"] = 1.0 + out["alpha_joint"].sum(axis=-1)
    out["retention"] = retention(out["alpha_marginal"])
    return out


@lru_cache(maxsize=4)  # every comparison of a page draws the same ones
def resamples(n: int, n_boot: int, seed: int) -> np.ndarray:
    """How often each of n clusters is drawn in each of n_boot resamples: float64 [n_boot, n], read-only."""
    drawn = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=n_boot).astype(np.float64)
    drawn.flags.writeable = False
    return drawn


def resample(counts: np.ndarray, n_boot: int, seed: int) -> np.ndarray:
    """Cluster bootstrap: counts [C, K, 6] summed over n_boot draws of C conversations -> [n_boot, K, 6]."""
    n = len(counts)
    return (resamples(n, n_boot, seed) @ counts.reshape(n, -1)).reshape(n_boot, *counts.shape[1:])


def interval(values: np.ndarray, statistic: Callable[..., np.ndarray] = np.mean, *, n_boot: int = 1000,
             seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """95 % bootstrap interval (low, high) of a statistic (with an `axis`) of texts, the first axis of `values`.

    NaN with fewer than two texts.
    """
    if len(values) < 2:
        nothing = np.full(np.shape(values)[1:], np.nan)
        return nothing, nothing
    done = stats.bootstrap((values,), statistic, n_resamples=n_boot, axis=0, method="percentile", vectorized=True,
                           rng=np.random.default_rng(seed))
    return done.confidence_interval


def _interval(samples: np.ndarray, n_conversations: int) -> tuple[float | None, float | None]:
    """The central 95 % of the resamples in which the statistic is defined."""
    samples = samples[np.isfinite(samples)]
    if n_conversations < 2 or not len(samples):
        return None, None
    low, high = np.quantile(samples, [0.025, 0.975])
    return float(low), float(high)


def estimate(value: float, samples: np.ndarray, n_conversations: int) -> Estimate:
    """A value with the central 95 % of its resamples; without an interval where there was nothing to resample."""
    if not np.isfinite(value):
        return Estimate(value=None, low=None, high=None)
    low, high = _interval(samples, n_conversations)
    return Estimate(value=float(value), low=low, high=high)


def summarise(hits: StepwiseHits, *, n_boot: int = 1000, seed: int = 0) -> StepwiseSummary:
    """Pool the columns into rates with counts, MAT and retention; intervals resample conversations.

    Raises KvshotError when a step has no supervised column.
    """
    return _summary(_count(hits)[None], len(hits.hits), n_boot, seed)


def pool(seeds: Sequence[ConversationCounts], *, n_boot: int = 1000, seed: int = 0) -> StepwiseSummary:
    """One summary of several training seeds on the same columns: their counts add up; intervals resample conversations.

    Raises KvshotError for different columns.
    """
    tables = _tables(list(seeds))
    if (tables[..., _VALID] != tables[:1, ..., _VALID]).any():
        raise KvshotError("the seeds were evaluated on different columns: use the same examples and steps for all")
    return _summary(tables, int(tables[..., 0, _VALID].sum()), n_boot, seed)


def _summary(tables: np.ndarray, n_columns: int, n_boot: int, seed: int) -> StepwiseSummary:
    """tables [seeds, conversations, steps, 6]"""
    n, total = tables.shape[1], tables.sum(axis=(0, 1))
    point, samples = _statistics(total), _statistics(resample(tables.sum(0), n_boot, seed))

    def rate(name: str, k: int) -> Rate:
        top, bottom = (int(total[k, column]) for column in _RATES[name])
        low, high = _interval(samples[name][:, k], n) if bottom else (None, None)
        return Rate(numerator=top, denominator=bottom, low=low, high=high)

    return StepwiseSummary(
        n_columns=n_columns,
        n_conversations=n,
        n_boot=n_boot,
        seed=seed,
        steps=[StepSummary(step=k, **{name: rate(name, k) for name in _RATES}) for k in range(len(total))],
        **{name: estimate(point[name], samples[name], n) for name in _NUMBERS},
    )


Measured = StepwiseHits | ConversationCounts


def paired_difference(
    a: Measured | Sequence[Measured], b: Measured | Sequence[Measured], statistic: str = "mat", *, n_boot: int = 1000,
    seed: int = 0,
) -> PairedDifference:
    """Bootstrap a statistic of `a` minus that of `b`, both under the same resamples of the same columns.

    a, b: one measurement, or one for each training seed, whose counts add up; the interval is over conversations alone
    (`experiments.compare` adds the luck of a training run). statistic: "mat", "mat_joint", "retention", or
    "alpha_marginal", "alpha_joint", "alpha_conditional", "oov" with a step, as in "alpha_marginal_3".
    Raises KvshotError for an unknown statistic or for different columns.
    """
    tables = _tables(a), _tables(b)
    if tables[0].shape != tables[1].shape or (tables[0][..., _VALID] != tables[1][..., _VALID]).any():
        raise KvshotError("the evaluations cover different columns: use the same examples and steps for both")
    point = [float(_pick(table.sum(axis=(0, 1)), statistic)) for table in tables]
    samples = [_pick(resample(table.sum(0), n_boot, seed), statistic) for table in tables]
    values = [value if np.isfinite(value) else None for value in point]
    n = tables[0].shape[1]
    return PairedDifference(
        statistic=statistic,
        a=values[0],
        b=values[1],
        difference=estimate(point[0] - point[1], samples[0] - samples[1], n),
        n_conversations=n,
        n_boot=n_boot,
        seed=seed,
    )


def statistic_of(measured: Measured, statistic: str) -> float:
    """A statistic of one measurement (see `paired_difference`); NaN where it is undefined."""
    return float(_pick(_tables(measured)[0].sum(axis=0), statistic))


def _pick(counts: np.ndarray, statistic: str) -> np.ndarray:
    """A statistic by name from counts [..., K, 6]."""
    name, step = re.fullmatch(r"(.*?)(?:_(\d+))?", statistic).groups()
    if name not in (_RATES if step else _NUMBERS):
        raise KvshotError(
            f"unknown statistic {statistic!r}: choose {', '.join(_NUMBERS)}, "
            f"or one of {', '.join(_RATES)} with a step, as in alpha_marginal_3"
        )
    if step is not None and int(step) >= counts.shape[-2]:
        raise KvshotError(f"statistic {statistic!r} asks for step {step} of only {counts.shape[-2]} steps")
    values = _statistics(counts)[name]
    return values if step is None else values[..., int(step)]


def _tables(x: Measured | Sequence[Measured]) -> np.ndarray:
    """[seeds, conversations, steps, 6]"""
    several = [x] if isinstance(x, Measured) else list(x)
    tables = [m.table() if isinstance(m, ConversationCounts) else _count(m) for m in several]
    if not tables or len({t.shape for t in tables}) > 1:
        raise KvshotError("the evaluations of a comparison cover different columns: give at least one, all of the same "
                          "examples and steps")
    return np.stack(tables)
