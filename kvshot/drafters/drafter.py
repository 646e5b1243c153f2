"""The drafter: one `step` for every column, in training and in decoding.

A column is one drafting position. Column i has the verified tokens x_0..x_i with the target's states, keys and values,
and x_{i+1}, which the target has chosen but not read. Step k feeds token x_{i+1+k} at position i+1+k and predicts the
next one. At step 0 a drafter that reads hidden states starts from the fused target states of position i; later from its
own output of the step before, before the final norm.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvshot.drafters.attention import BACKENDS
from kvshot.drafters.config import DrafterConfig
from kvshot.drafters.injection import Given, Injection
from kvshot.drafters.layers import DraftLayer, Entries, Keys, RMSNorm, Rope
from kvshot.errors import KvshotError

Memory = list[dict[str, Keys]]  # per layer, by source: "own" (entries of columns), "target" (entries of positions)
Chain = list[dict[str, Entries]]


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
        if config.remembers_target:
            self.injections = nn.ModuleList(Injection(config, i) for i in range(config.depth))
        self.norm = RMSNorm(d, config.norm_eps)
        self.lm_head = nn.Linear(d, config.draft_vocab_size, bias=False)
        self.register_buffer("embedding", embedding.detach(), persistent=False)
        self.register_buffer("vocab_ids", vocab_ids, persistent=False)
        self.attention = BACKENDS["dense"]
        self.frequencies: dict[torch.device, Tensor] = {}  # no buffer: that would follow the weights' dtype

    def rope(self, positions: Tensor) -> Rope:
        """cos, sin [B, N, D/2] of positions [B, N]; angles in float64, so that no position is too long."""
        c, dtype = self.config, self.norm.weight.dtype
        device = positions.device
        if device not in self.frequencies:
            half = torch.arange(0, c.head_dim, 2, dtype=torch.float64, device=device) / c.head_dim
            given = c.rope_frequencies
            self.frequencies[device] = c.rope_theta**-half if given is None else half.new_tensor(given)
        angles = positions[..., None].double() * self.frequencies[device]
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def in_vocab(self) -> Tensor:
        """Which of the target's tokens it can propose, bool [V]."""
        known = torch.zeros(self.config.target_vocab_size, dtype=torch.bool, device=self.vocab_ids.device)
        known[self.vocab_ids] = True
        return known

    def embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.embedding).to(self.norm.weight.dtype)

    def fuse(self, hidden: Tensor | None) -> Tensor | None:
        """Target states [B, n, N, d] -> fused state [B, N, d]; None for a drafter that reads none.

        The first of the n states are those of `config.hidden_layers`.
        """
        count = len(self.config.hidden_layers)
        if not count:
            return None
        if hidden is None or hidden.shape[1] != len(self.config.hidden_needed):
            have = 0 if hidden is None else hidden.shape[1]
            raise KvshotError(f"the drafter reads {len(self.config.hidden_needed)} hidden states, the context has "
                              f"{have}: capture layers {self.config.hidden_needed}")
        return self.fc(hidden[:, :count].transpose(1, 2).flatten(2).to(self.fc.weight.dtype))

    def remember(self, given: Given, tokens: Tensor, memory: Memory | None = None) -> Memory:
        """The prefix memory after M more positions of the target.

        given: what the target gave for consecutive positions, the first one right behind those in `memory`; tokens
        [B, M]: the token *after* each of these positions, of which the last may be one that the target has not read.
        Position i adds the target's entry i and the drafter's own entry of column i. The last layer makes only keys
        and values, the ones under it run in full.
        """
        memory = memory or self._nothing(tokens.shape[0])
        start = max(keys.keys.shape[2] for keys in memory[0].values())
        at = start + torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        out: Memory = [dict(layer) for layer in memory]
        if self.config.remembers_target:
            rope = self.rope(at)
            for index, injection in enumerate(self.injections):
                out[index]["target"] = memory[index]["target"].append(injection(given, rope))
        if self.config.memory in ("own", "both"):
            x, state, rope, limit = self.embed(tokens), self.fuse(given.hidden), self.rope(at + 1), self.limit(at)
            for index, layer in enumerate(self.layers):
                inputs, _ = layer.read(x, state)
                out[index]["own"] = memory[index]["own"].append(layer.self_attn.key_value(inputs, rope))
                if index + 1 < self.config.depth:
                    x, _ = layer(x, state, rope, out[index], limit, None, self.attention)
        return out

    def _nothing(self, batch: int) -> Memory:
        c, like = self.config, self.norm.weight

        def empty(heads: int) -> Keys:
            none = like.new_zeros(batch, heads, 0, c.head_dim)
            return Keys(none, none)

        heads = {"own": c.n_kv_heads, "target": c.cross_heads[1]}
        return [{s: empty(heads[s]) for s in layer.branches.values()} for layer in self.layers]

    def step(self, tokens: Tensor, positions: Tensor, state: Tensor | None, memory: Memory, limit: dict[str, Tensor],
             chain: Chain | None = None) -> tuple[Tensor, Chain]:
        """One draft step of N columns of B sequences.

        tokens, positions [B, N]; state [B, N, d]: fused (step 0) or the output of the step before; limit: from
        `limit(columns)`; chain: of the steps before, None at step 0.
        Returns the new state [B, N, d] (before the final norm) and the chain with this step's entries.
        """
        x, rope, grown = self.embed(tokens), self.rope(positions), []
        for index, layer in enumerate(self.layers):
            past = None if chain is None else chain[index]
            x, entries = layer(x, state, rope, memory[index], limit, past, self.attention)
            grown.append(entries)
        return x, grown

    def logits(self, state: Tensor) -> Tensor:
        """Scores over the draft vocabulary: [B, N, d] -> [B, N, V_d]."""
        return self.lm_head(self.norm(state))

    def limit(self, columns: Tensor) -> dict[str, Tensor]:
        """How many entries of each source columns [B, N] see.

        Of its own the step-0 entries of the columns before it (its own is the first of its chain), or none; of the
        target's those of positions 0..i (x_{i+1} has none yet).
        """
        return {"own": torch.zeros_like(columns) if self.config.memory == "none" else columns, "target": columns + 1}
