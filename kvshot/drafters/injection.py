"""How the target's keys and values become those that a draft layer attends to (Section 3 and Table 6 of the paper)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvshot.drafters.config import DrafterConfig
from kvshot.drafters.layers import Keys, Rope, rotate, to_heads
from kvshot.errors import KvshotError


@dataclass
class Given:
    """What the target gives for T positions, the layers as the drafter's configuration lists them.

    hidden [B, n, T, d] (`config.hidden_needed`); keys as cached, after RoPE, and values [B, L_s, H_kv, T, D]
    (`config.kv_needed`). None for what the drafter does not read.
    """

    hidden: Tensor | None = None
    keys: Tensor | None = None
    values: Tensor | None = None

    def positions(self, start: int, end: int | None = None) -> Given:
        """Only positions start..end-1."""
        cut = slice(start, end)
        return Given(None if self.hidden is None else self.hidden[:, :, cut],
                     None if self.keys is None else self.keys[:, :, :, cut],
                     None if self.values is None else self.values[:, :, :, cut])

    def to(self, device: torch.device | str) -> Given:
        moved = (None if t is None else t.to(device, non_blocking=True) for t in (self.hidden, self.keys, self.values))
        return Given(*moved)


class Injection(nn.Module):
    """Target keys and values of several layers -> one draft layer's memory [B, H, T, D].

    concat: every target layer keeps its heads, the draft layer has as many. linear: W_K, W_V on the concatenated
    layers, keys as cached. linear+rope: the same with RoPE taken off before and put on after. mlp, mlp+norm: two
    layers in its place, without and with a LayerNorm before them. hidden: W_K, W_V on normed hidden states instead
    of keys and values (Hidden->KV, Eq. 4).
    """

    def __init__(self, config: DrafterConfig, index: int) -> None:
        super().__init__()
        self.kind, self.head_dim = config.injection, config.head_dim
        self.first, self.count = (index, 1) if config.per_layer else (0, len(config.kv_layers))
        self.hidden_at, self.norm_eps = config.kv_hidden_at, config.norm_eps
        d_kv = config.n_kv_heads * config.head_dim
        width = self.count * (config.hidden_size if self.kind == "hidden" else d_kv)
        if self.kind != "concat":
            self.k_proj, self.v_proj = self._projector(width, d_kv), self._projector(width, d_kv)

    def _projector(self, width: int, out: int) -> nn.Module:
        if not self.kind.startswith("mlp"):
            return nn.Linear(width, out, bias=False)
        layers = [nn.Linear(width, width, bias=False), nn.SiLU(), nn.Linear(width, out, bias=False)]
        return nn.Sequential(*([nn.LayerNorm(width)] if self.kind == "mlp+norm" else []), *layers)

    def forward(self, given: Given, rope: Rope) -> Keys:
        """`rope`: of the T positions. No k_norm here: the target's keys come normalised where the target does that."""
        dtype = rope[0].dtype
        if self.kind == "hidden":
            if given.hidden is None:
                raise KvshotError("the drafter makes keys from hidden states, the context has none: capture them")
            at = [self.hidden_at[i] for i in range(self.first, self.first + self.count)]
            x = given.hidden[:, at].to(dtype)
            # as the target's blocks norm them (Eq. 4): a few dimensions of raw states are hundreds of times the others.
            # No weight: the projection would absorb it
            x = F.rms_norm(x, x.shape[-1:], eps=self.norm_eps).transpose(1, 2).flatten(2)
            return Keys(rotate(to_heads(self.k_proj(x), self.head_dim), rope), to_heads(self.v_proj(x), self.head_dim))
        keys, values = self._pick(given.keys, dtype), self._pick(given.values, dtype)
        if self.kind == "concat":
            return Keys(keys.flatten(1, 2), values.flatten(1, 2))
        b, n, h, t, d = keys.shape
        if self.kind != "linear":
            keys = rotate(keys.flatten(1, 2), rope, undo=True).view(b, n, h, t, d)
        keys = to_heads(self.k_proj(_joined(keys)), self.head_dim)
        return Keys(keys if self.kind == "linear" else rotate(keys, rope),
                    to_heads(self.v_proj(_joined(values)), self.head_dim))

    def _pick(self, x: Tensor | None, dtype: torch.dtype) -> Tensor:
        if x is None or x.shape[1] < self.first + self.count:
            have = 0 if x is None else x.shape[1]
            raise KvshotError(f"the drafter reads keys and values of {self.first + self.count} layers, the context has "
                              f"{have}: capture them")
        return x[:, self.first : self.first + self.count].to(dtype)


def _joined(x: Tensor) -> Tensor:
    """[B, L, H, T, D] -> [B, T, L * H * D]"""
    return x.permute(0, 3, 1, 2, 4).flatten(2)
