"""A drafter is a point in a small space: what it reads, what it remembers of the prefix, how deep it is."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvshot.errors import KvshotError
from kvshot.targets import Target
from kvshot.targets.rope import rope_frequencies, rope_parameters


class DrafterConfig(BaseModel):
    """What a drafter reads and remembers, and its shape.

    hidden_layers: HF indices (blocks applied) of the target states fused into its input; empty: the token embedding
    alone. memory: what it can attend to of the verified prefix: "own", keys and values of its own layers; "target",
    those of the target's blocks `kv_layers` by way of `injection` (see `Injection`); "both", two attentions merged by
    a gate; "none". per_layer: draft layer i reads kv_layers[i] alone. qk_norm: RMSNorm per head on queries and on the
    drafter's own keys. norm_before_residual: the state enters the residual normalised, too (some EAGLE-3 drafters of
    speculators). rope_frequencies: see `targets.rope.rope_frequencies`.

    EAGLE-3 is three hidden layers, own memory, depth 1; "No target info" (Table 1) is no hidden layer, own memory;
    KV-only is no hidden layer, the target's memory; the hybrid is EAGLE-3 with both; cross-only EAGLE-3's input with
    the target's memory.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    hidden_layers: tuple[int, ...] = ()
    memory: Literal["own", "target", "both", "none"] = "own"
    kv_layers: tuple[int, ...] = ()
    injection: Literal["concat", "linear", "linear+rope", "mlp", "mlp+norm", "hidden"] | None = None
    per_layer: bool = False
    qk_norm: bool = False
    norm_before_residual: bool = False
    depth: int = Field(1, ge=1)

    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    n_heads: int = Field(ge=1)
    n_kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=2, multiple_of=2)
    norm_eps: float = Field(gt=0)
    rope_theta: float = Field(gt=0)
    rope_frequencies: tuple[float, ...] | None = None
    target_vocab_size: int = Field(ge=1)
    draft_vocab_size: int = Field(ge=1)

    @model_validator(mode="after")
    def _consistent(self) -> DrafterConfig:
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"{self.n_heads} query heads cannot share {self.n_kv_heads} key heads")
        if self.draft_vocab_size > self.target_vocab_size:
            raise ValueError(f"a draft vocabulary of {self.draft_vocab_size} exceeds the target's "
                             f"{self.target_vocab_size}")
        if any(i < 0 for i in (*self.hidden_layers, *self.kv_layers)):
            raise ValueError(f"hidden layers {self.hidden_layers} and KV layers {self.kv_layers} must be HF indices "
                             "from 0")
        if self.remembers_target != bool(self.kv_layers) or self.remembers_target != (self.injection is not None):
            raise ValueError(f"memory {self.memory!r} with KV layers {self.kv_layers} and injection {self.injection!r}:"
                             " the target's memory needs both, any other neither")
        if self.rope_frequencies is not None and len(self.rope_frequencies) != self.head_dim // 2:
            raise ValueError(f"{len(self.rope_frequencies)} rotary frequencies for {self.head_dim // 2} pairs of "
                             "dimensions")
        if self.per_layer and len(self.kv_layers) != self.depth:
            raise ValueError(f"{self.depth} draft layers cannot read {len(self.kv_layers)} target layers one each")
        return self

    @property
    def reads_hidden(self) -> bool:
        return bool(self.hidden_layers)

    @property
    def remembers_target(self) -> bool:
        return self.memory in ("target", "both")

    @property
    def hidden_needed(self) -> tuple[int, ...]:
        """HF indices of all hidden states it reads: those fused into its input, then others made into keys."""
        extra = self.kv_layers if self.injection == "hidden" else ()
        return self.hidden_layers + tuple(i for i in extra if i not in self.hidden_layers)

    @property
    def kv_hidden_at(self) -> tuple[int, ...]:
        """Where in `hidden_needed` the states entering blocks `kv_layers` stand; empty unless keys come from them."""
        return tuple(map(self.hidden_needed.index, self.kv_layers)) if self.injection == "hidden" else ()

    @property
    def kv_needed(self) -> tuple[int, ...]:
        """Target blocks whose keys and values it reads."""
        return () if self.injection == "hidden" else self.kv_layers

    @property
    def cross_heads(self) -> tuple[int, int]:
        """Query and key heads of the attention over the target's memory.

        Concatenated target layers bring all their key heads; the query heads become the next multiple of them.
        """
        if self.injection != "concat":
            return self.n_heads, self.n_kv_heads
        kv = self.n_kv_heads * (1 if self.per_layer else len(self.kv_layers))
        return -(-self.n_heads // kv) * kv, kv

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
        config = checked(cls, {**shape, **choices})
        if config.kv_needed and (config.rope_theta != target.rope_theta or config.rope_frequencies):
            raise KvshotError("a drafter that reads the target's keys turns them as the target does: give no RoPE")
        if "rope_theta" in choices or "rope_frequencies" in choices:
            return config
        frequencies = _frequencies(target, config.kv_needed)
        return checked(cls, {**shape, **choices, "rope_frequencies": frequencies})


def _frequencies(target: Target, layers: tuple[int, ...]) -> tuple[float, ...] | None:
    """The target's; a drafter that reads no keys of it (`layers`) does with the base where they are something else."""
    if not all(target.rotates(j) for j in layers):
        raise KvshotError(f"some of the blocks {layers} of {target.name} have keys without positions: choose others")
    if any(rope_parameters(target.config, target.layer_types[j]) != rope_parameters(target.config) for j in layers):
        raise KvshotError(f"some of the blocks {layers} of {target.name} have another rotation than its full-attention "
                          "ones: choose full-attention blocks")
    try:
        return rope_frequencies(target.config)
    except KvshotError as err:
        if not layers:
            return None
        raise KvshotError(f"the keys and values of {target.name} cannot be reused yet, only its hidden states: "
                          f"{err}") from err


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
