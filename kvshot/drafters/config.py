"""A drafter is a point in a small space: what it reads, what it remembers of the prefix, how deep it is."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvshot.errors import KvshotError
from kvshot.targets import Target


class DrafterConfig(BaseModel):
    """What a drafter reads and remembers, and its shape.

    hidden_layers: HF indices (blocks applied) of the target states fused into its input; empty: the token embedding
    alone. memory: what it can attend to of the verified prefix: "own", keys and values of its own layers, or "none".
    EAGLE-3 is three hidden layers, own memory, depth 1; "No target info" (Table 1) is no hidden layer, own memory.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    hidden_layers: tuple[int, ...] = ()
    memory: Literal["own", "none"] = "own"
    depth: int = Field(1, ge=1)

    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    n_heads: int = Field(ge=1)
    n_kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=2, multiple_of=2)
    norm_eps: float = Field(gt=0)
    rope_theta: float = Field(gt=0)
    target_vocab_size: int = Field(ge=1)
    draft_vocab_size: int = Field(ge=1)

    @model_validator(mode="after")
    def _consistent(self) -> DrafterConfig:
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"{self.n_heads} query heads cannot share {self.n_kv_heads} key heads")
        if self.draft_vocab_size > self.target_vocab_size:
            raise ValueError(f"a draft vocabulary of {self.draft_vocab_size} exceeds the target's "
                             f"{self.target_vocab_size}")
        if any(i < 0 for i in self.hidden_layers):
            raise ValueError(f"hidden layers {self.hidden_layers} must be HF indices from 0")
        return self

    @property
    def reads_hidden(self) -> bool:
        return bool(self.hidden_layers)

    @classmethod
    def for_target(cls, target: Target, *, draft_vocab_size: int, **choices) -> DrafterConfig:
        """The target's widths, heads and RoPE base, with `choices` for the rest.

        Raises KvshotError for an unknown or impossible choice.
        """
        shape = {
            "hidden_size": target.hidden_size, "intermediate_size": target.config.intermediate_size,
            "n_heads": target.n_heads, "n_kv_heads": target.n_kv_heads, "head_dim": target.head_dim,
            "norm_eps": target.norm_eps, "rope_theta": target.rope_theta,
            "target_vocab_size": target.vocab_size, "draft_vocab_size": draft_vocab_size,
        }
        return checked(cls, {**shape, **choices})


def checked(cls, fields: dict):
    """`cls(**fields)`, with pydantic's report folded into one KvshotError line."""
    try:
        return cls(**fields)
    except ValidationError as err:
        first = err.errors()[0]
        where = ".".join(map(str, first["loc"])) or cls.__name__
        raise KvshotError(f"{where}: {first['msg'].removeprefix('Value error, ')}: correct the configuration") from err


def eagle3(target: Target, *, draft_vocab_size: int) -> DrafterConfig:
    """EAGLE-3: three fused hidden states, own memory, one layer."""
    return DrafterConfig.for_target(target, draft_vocab_size=draft_vocab_size,
                                    hidden_layers=target.default_hidden_layers)


FAMILIES = {"eagle3": eagle3}
