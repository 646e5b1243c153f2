"""The drafter: one `step` for every column, in training and in decoding.

A column is one drafting position. Column i has the verified tokens x_0..x_i with the target's states, and x_{i+1},
which the target has chosen but not read. Step k feeds token x_{i+1+k} at position i+1+k and predicts the next one.
At step 0 a drafter that reads hidden states starts from the fused target states of position i; later from its own
output of the step before, before the final norm.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvshot.drafters.attention import BACKENDS
from kvshot.drafters.config import DrafterConfig
from kvshot.errors import KvshotError


@dataclass
class LayerMemory:
    """What one layer keeps of the prefix. keys, values [B, H_kv, S, D], keys rotated to their true positions."""

    keys: Tensor
    values: Tensor

    def append(self, other: LayerMemory) -> LayerMemory:
        return LayerMemory(torch.cat([self.keys, other.keys], 2), torch.cat([self.values, other.values], 2))


Chain = list[tuple[Tensor, Tensor]]  # per layer: keys, values [B, H_kv, N, C, D] of steps 0..C-1 of each column


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in float32 or wider."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return F.rms_norm(wide, self.weight.shape, self.weight.to(wide.dtype), self.eps).to(x.dtype)


class DraftLayer(nn.Module):
    """One decoder block over columns. The first one reads [norm(embedding); norm(state)] where there is a state."""

    def __init__(self, config: DrafterConfig, index: int) -> None:
        super().__init__()
        d, hd = config.hidden_size, config.head_dim
        self.config = config
        self.takes_state = index == 0 and config.reads_hidden
        width = 2 * d if self.takes_state else d
        self.input_layernorm = RMSNorm(d, config.norm_eps)
        if self.takes_state:
            self.hidden_norm = RMSNorm(d, config.norm_eps)
        self.self_attn = nn.ModuleDict({
            "q_proj": nn.Linear(width, config.n_heads * hd, bias=False),
            "k_proj": nn.Linear(width, config.n_kv_heads * hd, bias=False),
            "v_proj": nn.Linear(width, config.n_kv_heads * hd, bias=False),
            "o_proj": nn.Linear(config.n_heads * hd, d, bias=False),
        })
        self.post_attention_layernorm = RMSNorm(d, config.norm_eps)
        self.mlp = nn.ModuleDict({
            "gate_proj": nn.Linear(d, config.intermediate_size, bias=False),
            "up_proj": nn.Linear(d, config.intermediate_size, bias=False),
            "down_proj": nn.Linear(config.intermediate_size, d, bias=False),
        })

    def read(self, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """(attention input, residual): embeddings or hidden x [B, N, d], state [B, N, d] for the first layer."""
        if self.takes_state:  # the residual is the state as it came, not normalised (EAGLE-3)
            return torch.cat([self.input_layernorm(x), self.hidden_norm(state)], -1), state
        return self.input_layernorm(x), x

    def key_value(self, inputs: Tensor, rope: tuple[Tensor, Tensor]) -> LayerMemory:
        """Keys (rotated) and values of N positions: [B, H_kv, N, D]."""
        k = _heads(self.self_attn["k_proj"](inputs), self.config.head_dim)
        v = _heads(self.self_attn["v_proj"](inputs), self.config.head_dim)
        return LayerMemory(rotate(k, *rope), v)

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Output projection, residual, MLP: attended [B, H, N, D] -> [B, N, d]."""
        x = residual + self.self_attn["o_proj"](attended.transpose(1, 2).flatten(2))
        h = self.post_attention_layernorm(x)
        mlp = self.mlp
        return x + mlp["down_proj"](F.silu(mlp["gate_proj"](h)) * mlp["up_proj"](h))


def _heads(x: Tensor, head_dim: int) -> Tensor:
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE in the half-split convention of transformers: x [B, H, N, D], cos and sin [B, N, D/2]."""
    a, b = x.chunk(2, -1)
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Drafter(nn.Module):
    """A drafter for one target. `embedding` [V, d] is the target's, frozen and not part of the checkpoint.

    vocab_ids: int64 [V_d], the target ids of the draft vocabulary, ascending.
    """

    def __init__(self, config: DrafterConfig, embedding: Tensor, vocab_ids: Tensor) -> None:
        super().__init__()
        if tuple(embedding.shape) != (config.target_vocab_size, config.hidden_size):
            raise KvshotError(f"the drafter wants target embeddings [{config.target_vocab_size}, "
                              f"{config.hidden_size}], not {list(embedding.shape)}: use the target it was made for")
        if len(vocab_ids) != config.draft_vocab_size:
            raise KvshotError(f"the draft vocabulary has {len(vocab_ids)} tokens, the configuration says "
                              f"{config.draft_vocab_size}: use the vocabulary saved with the drafter")
        self.config = config
        d = config.hidden_size
        if config.reads_hidden:
            self.fc = nn.Linear(len(config.hidden_layers) * d, d, bias=False)
        self.layers = nn.ModuleList(DraftLayer(config, i) for i in range(config.depth))
        self.norm = RMSNorm(d, config.norm_eps)
        self.lm_head = nn.Linear(d, config.draft_vocab_size, bias=False)
        self.register_buffer("embedding", embedding.detach(), persistent=False)
        self.register_buffer("vocab_ids", vocab_ids, persistent=False)
        self.attention = BACKENDS["dense"]

    def rope(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos, sin [B, N, D/2] of positions [B, N]; angles in float64, so that no position is too long."""
        c = self.config
        half = torch.arange(0, c.head_dim, 2, dtype=torch.float64, device=positions.device) / c.head_dim
        angles = positions[..., None].double() * c.rope_theta**-half
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.embedding).to(self.norm.weight.dtype)

    def fuse(self, hidden: Tensor | None) -> Tensor | None:
        """Target states [B, n, N, d] -> fused state [B, N, d]; None for a drafter that reads none."""
        if not self.config.reads_hidden:
            return None
        if hidden is None or hidden.shape[1] != len(self.config.hidden_layers):
            have = 0 if hidden is None else hidden.shape[1]
            raise KvshotError(f"the drafter reads {len(self.config.hidden_layers)} hidden states, the context has "
                              f"{have}: capture layers {self.config.hidden_layers}")
        return self.fc(hidden.transpose(1, 2).flatten(2).to(self.fc.weight.dtype))

    def remember(self, tokens: Tensor, positions: Tensor, state: Tensor | None,
                 memory: list[LayerMemory] | None = None) -> list[LayerMemory]:
        """Prefix memory of every layer from step-0 inputs of consecutive columns.

        tokens, positions [B, M]: x_{i+1} and i+1 of the columns; state [B, M, d]: their fused states; memory: of the
        columns before them. Layers under the last run in full; of the last only keys and values are made.
        """
        if self.config.memory == "none":
            empty = self.norm.weight.new_zeros(tokens.shape[0], self.config.n_kv_heads, 0, self.config.head_dim)
            return [LayerMemory(empty, empty)] * self.config.depth
        x, rope = self.embed(tokens), self.rope(positions, self.norm.weight.dtype)
        out = []
        for index, layer in enumerate(self.layers):
            inputs, residual = layer.read(x, state)
            new = layer.key_value(inputs, rope)
            past = memory[index] if memory is not None else None
            out.append(new if past is None else past.append(new))
            if index + 1 < self.config.depth:
                start = 0 if past is None else past.keys.shape[2]
                limit = start + torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
                x, _ = self._attend(layer, inputs, residual, new, out[-1], limit, rope, None)
        return out

    def _attend(self, layer: DraftLayer, inputs: Tensor, residual: Tensor, new: LayerMemory, memory: LayerMemory,
                limit: Tensor, rope: tuple[Tensor, Tensor], chain: tuple | None) -> tuple[Tensor, tuple]:
        """One layer: `new` are the keys and values of these very inputs, which end each column's chain."""
        k, v = new.keys[:, :, :, None], new.values[:, :, :, None]
        if chain is not None:
            k, v = torch.cat([chain[0], k], 3), torch.cat([chain[1], v], 3)
        q = rotate(_heads(layer.self_attn["q_proj"](inputs), self.config.head_dim), *rope)
        attended = self.attention(q, memory.keys.to(q.dtype), memory.values.to(q.dtype), limit, k, v)
        return layer.finish(residual, attended), (k, v)

    def step(self, tokens: Tensor, positions: Tensor, state: Tensor | None, memory: list[LayerMemory], limit: Tensor,
             chain: Chain | None = None) -> tuple[Tensor, Chain]:
        """One draft step of N columns of B sequences.

        tokens, positions [B, N]; state [B, N, d]: fused (step 0) or the output of the step before; limit [B, N]: how
        many entries of the memory a column sees (`columns i`: i, the step-0 entries of earlier columns; its own is
        the first of its chain); chain: of the steps before, None at step 0.
        Returns the new state [B, N, d] (before the final norm) and the chain with this step's entries.
        """
        x, rope = self.embed(tokens), self.rope(positions, self.norm.weight.dtype)
        grown: Chain = []
        for index, layer in enumerate(self.layers):
            inputs, residual = layer.read(x, state)
            past = None if chain is None else chain[index]
            new = layer.key_value(inputs, rope)
            x, entries = self._attend(layer, inputs, residual, new, memory[index], limit, rope, past)
            grown.append(entries)
        return x, grown

    def logits(self, state: Tensor) -> Tensor:
        """Scores over the draft vocabulary: [B, N, d] -> [B, N, V_d]."""
        return self.lm_head(self.norm(state))

    def limit(self, columns: Tensor) -> Tensor:
        """Memory entries that columns [B, N] see: the step-0 entries of the columns before them, or none."""
        return columns if self.config.memory == "own" else torch.zeros_like(columns)
