"""The parts of a draft layer: norm, rotation, attention over a prefix and a chain, the gated merge of two of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvshot.drafters.attention import Attend
from kvshot.drafters.config import DrafterConfig

Rope = tuple[Tensor, Tensor]  # cos, sin [B, N, D/2]
Entries = tuple[Tensor, Tensor]  # keys, values [B, H_kv, N, C, D] of steps 0..C-1 of each column


@dataclass
class Keys:
    """Keys (rotated to their true positions) and values [B, H_kv, S, D] that a query can attend to."""

    keys: Tensor
    values: Tensor

    def append(self, other: Keys) -> Keys:
        if not self.keys.shape[2]:
            return other
        return Keys(torch.cat([self.keys, other.keys], 2), torch.cat([self.values, other.values], 2))


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in float32 or wider."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return F.rms_norm(wide, self.weight.shape, self.weight.to(wide.dtype), self.eps).to(x.dtype)


def to_heads(x: Tensor, head_dim: int) -> Tensor:
    """[B, N, H * D] -> [B, H, N, D]"""
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def rotate(x: Tensor, rope: Rope, *, undo: bool = False) -> Tensor:
    """RoPE in the half-split convention of transformers: x [B, H, N, D]; `undo` turns back."""
    a, b = x.chunk(2, -1)
    cos, sin = rope[0][:, None].to(x.dtype), rope[1][:, None].to(x.dtype)
    if undo:
        sin = -sin
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Attention(nn.Module):
    """Queries of columns over a prefix memory and each column's own chain."""

    def __init__(self, config: DrafterConfig, width: int, n_heads: int, n_kv_heads: int) -> None:
        super().__init__()
        hd = self.head_dim = config.head_dim
        self.q_proj = nn.Linear(width, n_heads * hd, bias=False)
        self.k_proj = nn.Linear(width, n_kv_heads * hd, bias=False)
        self.v_proj = nn.Linear(width, n_kv_heads * hd, bias=False)
        self.o_proj = nn.Linear(n_heads * hd, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(hd, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(hd, config.norm_eps) if config.qk_norm else nn.Identity()

    def key_value(self, inputs: Tensor, rope: Rope) -> Keys:
        """Keys and values of N positions: inputs [B, N, width]."""
        k = self.k_norm(to_heads(self.k_proj(inputs), self.head_dim))
        return Keys(rotate(k, rope), to_heads(self.v_proj(inputs), self.head_dim))

    def forward(self, inputs: Tensor, rope: Rope, memory: Keys, limit: Tensor, chain: Entries | None,
                attend: Attend) -> tuple[Tensor, Entries]:
        """inputs [B, N, width], limit [B, N] -> [B, N, d] and the chain, which ends with these inputs' own entries."""
        new = self.key_value(inputs, rope)
        k, v = new.keys[:, :, :, None], new.values[:, :, :, None]
        if chain is not None:
            k, v = torch.cat([chain[0], k], 3), torch.cat([chain[1], v], 3)
        q = rotate(self.q_norm(to_heads(self.q_proj(inputs), self.head_dim)), rope)
        attended = attend(q, memory.keys.to(q.dtype), memory.values.to(q.dtype), limit, k, v)
        return self.o_proj(attended.transpose(1, 2).flatten(2)), (k, v)


class GatedDelta(nn.Module):
    """The paper's gated delta rule: h = n + g * W(o - n), g = sigmoid(W_g [n; o; o - n] + b_g), element-wise."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(3 * size, size)
        self.delta_proj = nn.Linear(size, size, bias=False)

    def gate(self, own: Tensor, cross: Tensor) -> Tensor:
        """g in (0, 1), [B, N, d]."""
        return self.gate_proj(torch.cat([own, cross, cross - own], -1)).sigmoid()

    def forward(self, own: Tensor, cross: Tensor) -> Tensor:
        return own + self.gate(own, cross) * self.delta_proj(cross - own)


class DraftLayer(nn.Module):
    """One decoder block over columns. The first one reads [norm(embedding); norm(state)] where there is a state.

    `self_attn` looks at the drafter's own memory, or, in a drafter that remembers only what the target gives, at that.
    A drafter with both has `cross_attn` for the target's and merges the two.
    """

    def __init__(self, config: DrafterConfig, index: int) -> None:
        super().__init__()
        d = config.hidden_size
        self.takes_state = index == 0 and config.reads_hidden
        self.norm_before_residual = config.norm_before_residual
        width = 2 * d if self.takes_state else d
        own = config.n_heads, config.n_kv_heads
        cross = config.cross_heads
        self.input_layernorm = RMSNorm(d, config.norm_eps)
        if self.takes_state:
            self.hidden_norm = RMSNorm(d, config.norm_eps)
        self.branches = {"self_attn": "target" if config.memory == "target" else "own"}
        self.self_attn = Attention(config, width, *(cross if config.memory == "target" else own))
        if config.memory == "both":
            self.branches["cross_attn"] = "target"
            self.cross_attn = Attention(config, width, *cross)
            self.merge = GatedDelta(d)
        self.post_attention_layernorm = RMSNorm(d, config.norm_eps)
        self.mlp = nn.ModuleDict({
            "gate_proj": nn.Linear(d, config.intermediate_size, bias=False),
            "up_proj": nn.Linear(d, config.intermediate_size, bias=False),
            "down_proj": nn.Linear(config.intermediate_size, d, bias=False),
        })

    def read(self, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """(attention input, residual): embeddings or hidden x [B, N, d], state [B, N, d] for the first layer."""
        if self.takes_state:  # EAGLE-3's residual is the state as it came, not normalised
            normed = self.hidden_norm(state)
            return torch.cat([self.input_layernorm(x), normed], -1), normed if self.norm_before_residual else state
        return self.input_layernorm(x), x

    def forward(self, x: Tensor, state: Tensor | None, rope: Rope, memory: Mapping[str, Keys],
                limit: Mapping[str, Tensor], chain: Mapping[str, Entries] | None, attend: Attend
                ) -> tuple[Tensor, dict[str, Entries]]:
        """x [B, N, d] -> [B, N, d] and each source's chain; memory, limit and chain by source ("own", "target")."""
        inputs, residual = self.read(x, state)
        outputs, grown = [], {}
        for name, source in self.branches.items():
            past = None if chain is None else chain[source]
            out, grown[source] = self.get_submodule(name)(inputs, rope, memory[source], limit[source], past, attend)
            outputs.append(out)
        x = residual + (self.merge(*outputs) if len(outputs) > 1 else outputs[0])
        return x + self.feed_forward(self.post_attention_layernorm(x)), grown

    def feed_forward(self, h: Tensor) -> Tensor:
        """SwiGLU, [..., d] -> [..., d]."""
        mlp = self.mlp
        return mlp["down_proj"](F.silu(mlp["gate_proj"](h)) * mlp["up_proj"](h))
