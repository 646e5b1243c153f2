"""A target: a frozen language model, its shape, its layers, its head and its rotary embedding."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from kvshot.errors import KvshotError
from kvshot.targets.rope import rope_parameters


@dataclass(eq=False)
class Target:
    """A frozen causal language model in eval mode, its tokenizer, and the sha256 of its weights."""

    name: str
    model: nn.Module
    tokenizer: object
    weights_sha256: str

    @cached_property
    def decoder(self) -> nn.Module:
        """The stack of decoder blocks, with the embedding before and the final norm after it."""
        decoder = self.model.get_decoder()
        if not hasattr(decoder, "layers"):
            raise KvshotError(f"target {self.name} has no list of decoder layers: use a decoder-only model")
        return decoder

    @property
    def config(self):
        """The text configuration of the model."""
        return self.model.config.get_text_config()

    @property
    def n_layers(self) -> int:
        return len(self.decoder.layers)

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def n_heads(self) -> int:
        return self.config.num_attention_heads

    @property
    def n_kv_heads(self) -> int:
        return getattr(self.config, "num_key_value_heads", None) or self.n_heads

    @property
    def head_dim(self) -> int:
        return getattr(self.config, "head_dim", None) or self.hidden_size // self.n_heads

    @property
    def vocab_size(self) -> int:
        return self.head_weight.shape[0]

    @property
    def embedding_weight(self) -> Tensor:
        """[V, d]"""
        return self.model.get_input_embeddings().weight

    @property
    def head_weight(self) -> Tensor:
        """[V, d]; the embedding's own tensor when the two are tied."""
        return self.model.get_output_embeddings().weight

    @property
    def device(self) -> torch.device:
        return self.embedding_weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding_weight.dtype

    @property
    def norm_eps(self) -> float:
        return getattr(self.config, "rms_norm_eps", None) or 1e-6

    @property
    def rope_theta(self) -> float:
        """Base of the rotary frequencies of the full-attention layers."""
        return float(rope_parameters(self.config).get("rope_theta") or getattr(self.config, "rope_theta", None) or 1e4)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end a generation: those of the generation configuration, then the tokenizer's."""
        ids = getattr(self.model.generation_config, "eos_token_id", None)
        ids = [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
        extra = self.tokenizer.eos_token_id
        return tuple(dict.fromkeys(ids if extra is None else [*ids, extra]))

    @cached_property
    def layer_types(self) -> tuple[str, ...]:
        """What each block attends with: "full_attention", "sliding_attention", "linear_attention", …"""
        types = getattr(self.config, "layer_types", None)
        if types is None:
            window = getattr(self.config, "sliding_window", None)
            types = ["sliding_attention" if window else "full_attention"] * self.n_layers
        return tuple(types)

    @cached_property
    def kv_layers(self) -> tuple[int, ...]:
        """Blocks whose keys and values can be captured: softmax attention over keys of the block's own."""
        own = self.n_layers - (getattr(self.config, "num_kv_shared_layers", None) or 0)
        if getattr(self.config, "kv_lora_rank", None):
            own = 0  # latent attention caches a compressed state, not keys and values
        usable = ("full_attention", "sliding_attention", "chunked_attention")
        return tuple(j for j in range(own) if self.layer_types[j] in usable)

    @property
    def default_hidden_layers(self) -> tuple[int, int, int]:
        """EAGLE-3's low, middle and high states: 2, L // 2 and L - 3 blocks applied."""
        return 2, self.n_layers // 2, self.n_layers - 3

    @property
    def default_kv_layers(self) -> tuple[int, ...]:
        """Three layers, uniformly spaced over the depth, as in the paper."""
        return self.spaced_kv_layers(3)

    def spaced_kv_layers(self, n: int) -> tuple[int, ...]:
        """The middles of n equal slices of the full-attention layers (of all usable ones if too few)."""
        full = tuple(j for j in self.kv_layers if self.layer_types[j] == "full_attention")
        layers = full if len(full) >= n else self.kv_layers
        if not 0 < n <= len(layers):
            raise KvshotError(f"target {self.name} has {len(layers)} layers with keys and values, not {n}: "
                              "name the layers, or () for none")
        return tuple(layers[(2 * i + 1) * len(layers) // (2 * n)] for i in range(n))

    def clock(self) -> float:
        """Seconds, once the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def logits(self, final: Tensor, rows: Tensor | None = None) -> Tensor:
        """Next-token scores, float32: final [..., d] to [..., V], or [..., len(rows)] for those token ids.

        final: the state after the final norm (`TargetContext.final`). The product is taken in the target's
        dtype and softcapped or scaled as the model does it, so the argmax is the model's own.
        """
        return self.scorer(rows)(final)

    def scorer(self, rows: Tensor | None = None, *, wide: bool = True) -> Callable[[Tensor], Tensor]:
        """`logits` for fixed `rows`, whose part of the head is picked once; not `wide`: as precise as the product."""
        head = self.model.get_output_embeddings()
        weight, bias = head.weight, head.bias
        if rows is not None:
            weight, bias = weight[rows], None if bias is None else bias[rows]
        factor = (getattr(self.config, "logit_scale", None) or 1.0) / (
            getattr(self.config, "logits_scaling", None) or 1.0)
        cap = getattr(self.config, "final_logit_softcapping", None)

        def score(final: Tensor) -> Tensor:
            scores = nn.functional.linear(final.to(weight.dtype), weight, bias)
            # a pass over all scores costs as much as their product with the head
            if wide or factor != 1.0 or cap is not None:
                scores = scores.float()
            if factor != 1.0:
                scores = scores * factor
            return scores if cap is None else torch.tanh(scores / cap) * cap

        return score

    def attention(self, layer: int) -> nn.Module:
        """The attention of block `layer`. Raises KvshotError where blocks keep it under another name than Llama's."""
        block = self.decoder.layers[layer]
        if not hasattr(block, "self_attn"):
            raise KvshotError(f"block {layer} of {self.name} ({type(block).__name__}) has no self_attn: its keys and "
                              "values cannot be captured; use its hidden states only (no KV layers)")
        return block.self_attn

    @property
    def qk_norm(self) -> bool:
        """Whether its blocks norm queries and keys."""
        return hasattr(self.attention(0), "q_norm")

    def rotates(self, layer: int) -> bool:
        """Whether a block's queries and keys carry positions; some architectures have blocks without."""
        if not getattr(self.attention(layer), "use_rope", True):  # SmolLM3, Llama 4
            return False
        window = getattr(self.config, "sliding_window", None)
        mixed = window and self.config.model_type.startswith(("cohere2", "exaone"))
        return not mixed or self.layer_types[layer] == "sliding_attention"

    def rotate_keys(
        self, keys: Tensor, layers: tuple[int, ...], positions: Tensor, *, undo: bool = False
    ) -> Tensor:
        """The target's RoPE put on (or taken off) keys [B, L_s, H_kv, T, D] of blocks `layers`.

        positions: [B, T]. Every block's own base, scaling and rotated share of the head are honoured. Same
        shape and dtype as `keys`; computed in float32.
        """
        turned = [self._rotate(keys[:, n], j, positions, undo) for n, j in enumerate(layers)]
        return torch.stack(turned, dim=1) if turned else keys

    def _rotate(self, keys: Tensor, layer: int, positions: Tensor, undo: bool) -> Tensor:
        if not self.rotates(layer):
            return keys
        attention = self.attention(layer)
        rotary = self.decoder.rotary_emb
        like = torch.zeros(1, dtype=self.dtype, device=keys.device)  # tables rounded as in the model's pass
        per_type = "layer_type" in inspect.signature(rotary.forward).parameters
        cos, sin = rotary(like, positions, self.layer_types[layer]) if per_type else rotary(like, positions)
        cos, sin = cos.float(), sin.float()
        if undo:  # the tables may carry a scaling s (YaRN) and rounding: the inverse is the transpose over s²
            scale = cos.square() + sin.square()
            cos, sin = cos / scale, -sin / scale
        # the architecture's own function: it knows halves from pairs, and how much of the head turns
        rotate = sys.modules[type(attention).__module__].apply_rotary_pos_emb
        return rotate(keys.float(), keys.float(), cos, sin)[1].to(keys.dtype)
