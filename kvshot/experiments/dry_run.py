"""A campaign on paper: every drafter built at the target's real shapes on the meta device, with time and memory."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from kvshot.drafters.config import DrafterConfig
from kvshot.experiments.cost import cost
from kvshot.experiments.profiles import Profile
from kvshot.experiments.registry import select
from kvshot.paper import SETTING
from kvshot.targets import Target, load_target

TRAINING_BYTES = 16  # of a trained parameter: fp32 master, gradient and two moments


def shape_of(name: str) -> Target:
    """A target without weights. The paper's own needs no network; others are loaded as usual."""
    if name != SETTING.target:
        return load_target(name, device="cpu")
    config = Qwen3Config(
        vocab_size=SETTING.vocab_size, hidden_size=SETTING.hidden_size, intermediate_size=12_288,
        num_hidden_layers=SETTING.target_layers, num_attention_heads=SETTING.heads,
        num_key_value_heads=SETTING.kv_heads, head_dim=SETTING.head_dim, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": SETTING.rope_theta}, max_position_embeddings=40_960)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return Target(name, model.eval().requires_grad_(False), None, "0" * 64)


def dry_run(profile: Profile, only: Sequence[str] = (), *, mean_length: int = 1500, tflops: float = 300.0
            ) -> pd.DataFrame:
    """One row an experiment: trained parameters, memory of training beside the target, hours at `tflops` TFLOP/s.

    memory: weights, gradients, moments, the captured features of a batch, and what the backward pass wants of every
    draft step: scores, and attention weights over the prefix in two precisions. hours: products only, three times the
    forward pass of the drafter and, for an online profile, one of the target.
    """
    target, recipe = shape_of(profile.target), profile.train
    weights = sum(p.numel() for p in target.model.parameters())
    sequences = max(1, recipe.batch_tokens // mean_length)
    columns = sequences * min(recipe.columns_per_sequence or mean_length, mean_length)
    rows = []
    for e in select(only):
        config = e.config(target, profile.draft_vocab_size)
        spent, steps = cost(config, prefix=mean_length // 2), int(e.train.get("n_steps", recipe.n_steps))
        features = recipe.batch_tokens * feature_bytes(target, config)
        sources = {"none": (), "own": ("own",), "target": ("target",), "both": ("own", "target")}[config.memory]
        heads = sum(config.cross_heads[0] if source == "target" else config.n_heads for source in sources)
        kept = profile.draft_vocab_size * 2 + config.depth * heads * mean_length * 8  # bytes a column and step
        memory = spent.parameters * TRAINING_BYTES + features + steps * columns * kept
        # the prefix memory: one full column of every token at most
        flops = 3 * spent.flops * (columns * steps + recipe.batch_tokens)
        if profile.online:
            flops += 2 * weights * recipe.batch_tokens
        rows.append([e.name, spent.parameters / 1e6, spent.parameters * 2 / 1e6, features / 1e9, memory / 1e9,
                     recipe.steps * flops / (tflops * 1e12) / 3600])
    names = ["experiment", "parameters (M)", "checkpoint (MB)", "features of a batch (GB)", "training memory (GB)",
             "hours"]
    return pd.DataFrame(rows, columns=names)


def feature_bytes(target: Target, config: DrafterConfig) -> int:
    """Bytes that a drafter reads of one token, in bfloat16: hidden states, keys and values, the final state."""
    states = (len(set(config.hidden_needed)) + 1) * target.hidden_size
    return 2 * (states + 2 * len(config.kv_needed) * target.n_kv_heads * target.head_dim)
