"""The draft vocabulary: the target tokens that a drafter can propose."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from kvshot.data.template import Example
from kvshot.errors import KvshotError


@dataclass(frozen=True, eq=False)
class DraftVocab:
    """V_d of the target's V tokens. ids: int64 [V_d], ascending; draft token i is target token ids[i].

    lookup: int64 [V], the draft index of every target token, -1 where there is none.
    """

    ids: torch.Tensor
    vocab_size: int
    lookup: torch.Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        ids = self.ids
        ascending = ids.ndim == 1 and ids.dtype == torch.int64 and bool((ids[1:] > ids[:-1]).all())
        if not ascending or not len(ids) or ids[0] < 0 or ids[-1] >= self.vocab_size:
            raise KvshotError(
                f"a draft vocabulary must be ascending int64 ids below {self.vocab_size}: build it again"
            )
        lookup = torch.full((self.vocab_size,), -1, dtype=torch.int64, device=ids.device)
        lookup[ids] = torch.arange(len(ids), device=ids.device)
        object.__setattr__(self, "lookup", lookup)

    @classmethod
    def from_examples(cls, examples: Iterable[Example], vocab_size: int, size: int) -> DraftVocab:
        """The `size` most frequent supervised tokens (EAGLE-3); ties and spare places go to lower ids.

        Raises KvshotError for a size outside 1..vocab_size, no supervised token, or ids beyond the target's.
        """
        if not 1 <= size <= vocab_size:
            raise KvshotError(f"a draft vocabulary of {size} does not fit a target of {vocab_size} tokens: "
                              f"choose 1 to {vocab_size}")
        counts = np.zeros(vocab_size, dtype=np.int64)
        for example in examples:
            supervised = example.ids[example.loss_mask]
            if len(supervised) and not 0 <= supervised.min() <= supervised.max() < vocab_size:
                raise KvshotError(f"example {example.id!r} has token {supervised.max()} but the target knows "
                                  f"{vocab_size}: encode the data with the target's own tokenizer")
            counts += np.bincount(supervised, minlength=vocab_size)
        if not counts.any():
            raise KvshotError("no supervised token to build a draft vocabulary from: check the loss masks")
        chosen = np.sort(np.argsort(-counts, kind="stable")[:size])
        return cls(torch.from_numpy(chosen.astype(np.int64)), vocab_size)

    @classmethod
    def from_state(
        cls, state: Mapping[str, torch.Tensor], *, vocab_size: int | None = None, size: int | None = None
    ) -> DraftVocab:
        """Back from `state()`, or from any EAGLE-3 checkpoint's `d2t` and `t2d`.

        Raises KvshotError when they are missing or contradict each other, or differ from what is expected.
        """
        missing = [name for name in ("d2t", "t2d") if name not in state]
        if missing:
            raise KvshotError(f"checkpoint without {' and '.join(missing)}: use one with a draft vocabulary")
        d2t, t2d = state["d2t"], state["t2d"]
        if d2t.ndim != 1 or t2d.ndim != 1 or d2t.is_floating_point():
            raise KvshotError("the checkpoint's d2t or t2d has a wrong shape or type: use an intact one")
        ids = d2t.to(torch.int64) + torch.arange(len(d2t), device=d2t.device)
        if not torch.equal(t2d.bool().nonzero()[:, 0], ids):
            raise KvshotError("the checkpoint's d2t and t2d name different tokens: use an intact checkpoint")
        for what, found, expected in (("target", len(t2d), vocab_size), ("draft", len(d2t), size)):
            if expected is not None and found != expected:
                raise KvshotError(f"the checkpoint's {what} vocabulary has {found} tokens, not {expected}: "
                                  "use the target and configuration it was trained with")
        return cls(ids, len(t2d))

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def t2d(self) -> torch.Tensor:
        """bool [V]: which target tokens have a draft token."""
        return self.lookup >= 0

    @property
    def d2t(self) -> torch.Tensor:
        """int64 [V_d] of offsets: draft token i is target token i + d2t[i]."""
        return self.ids - torch.arange(len(self.ids), device=self.ids.device)

    def to(self, device: torch.device | str) -> DraftVocab:
        """The same on another device."""
        return DraftVocab(self.ids.to(device), self.vocab_size)

    def state(self) -> dict[str, torch.Tensor]:
        """Checkpoint tensors under their EAGLE-3 names: d2t int64 [V_d], t2d bool [V]."""
        return {"d2t": self.d2t, "t2d": self.t2d}

    @property
    def sha256(self) -> str:
        """Hex digest of the ids and the target's vocabulary size."""
        return hashlib.sha256(f"{self.vocab_size}:{self.ids.tolist()}".encode()).hexdigest()
