"""What a configuration's rotary embedding is, where a drafter has to turn keys as the target does."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvshot.errors import KvshotError

STATIC = ("linear", "llama3")  # other frequencies, the same for every length


def rope_parameters(config: PretrainedConfig, layer_type: str = "full_attention") -> dict:
    """Those of the layers of this type."""
    rope = getattr(config, "rope_parameters", None) or {}
    return rope.get(layer_type, rope)


def rope_frequencies(config: PretrainedConfig) -> tuple[float, ...] | None:
    """Radians a position of each pair of head dimensions; None where they follow from the base alone.

    Raises KvshotError for a rotation that is more than frequencies: of a part of the head, with a factor on the
    rotated vectors (YaRN), or another for longer texts.
    """
    rope = rope_parameters(config)
    kind = rope.get("rope_type", "default")
    if rope.get("partial_rotary_factor", 1.0) != 1.0 or kind not in ("default", *STATIC):
        raise KvshotError(f"{rope} is another rotation than plain or scaled RoPE over the whole head")
    if kind == "default":
        return None
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = LlamaConfig(hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim, rope_parameters=rope,
                        max_position_embeddings=getattr(config, "max_position_embeddings", 2048))
    frequencies, _ = ROPE_INIT_FUNCTIONS[kind](shape, torch.device("cpu"))
    return tuple(frequencies.double().tolist())
