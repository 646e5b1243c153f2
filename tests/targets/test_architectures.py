"""Captured tensors against `output_hidden_states` and against keys and values computed here from scratch."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch
import transformers

from kvshot.errors import KvshotError
from kvshot.targets import Target, capture
from kvshot.targets.smoke import smoke_tokenizer

SHAPE = dict(
    vocab_size=101, hidden_size=32, intermediate_size=48, num_hidden_layers=6, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=128, initializer_range=0.2,
    bos_token_id=None, eos_token_id=1, pad_token_id=0,
)
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, decoder_sparse_step=1)
LINEAR = dict(
    linear_conv_kernel_dim=4, linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2,
    linear_num_value_heads=4, layer_types=["linear_attention", "linear_attention", "full_attention"] * 2,
)
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
GEMMA_ROPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
ARCHITECTURES = {
    "llama": ("Llama", {}),
    "llama-yarn": ("Llama", dict(rope_parameters=YARN)),
    "llama-eager": ("Llama", dict(attn_implementation="eager")),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "qwen3-moe": ("Qwen3Moe", MOE),
    "mistral-window": ("Mistral", dict(sliding_window=4)),
    "gemma3": ("Gemma3", dict(
        sliding_window=4, query_pre_attn_scalar=16, rope_parameters=GEMMA_ROPE, final_logit_softcapping=5.0,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2)),
    "smollm3-nope": ("SmolLM3", dict(no_rope_layers=[1, 1, 0, 1, 1, 0])),
    "qwen3-next": ("Qwen3Next", dict(MOE, shared_expert_intermediate_size=24, **LINEAR)),
    "qwen3.5": ("Qwen3_5", LINEAR),
}
LENGTHS = (19, 11, 3)
CLOSE = dict(atol=1e-3, rtol=1e-3)  # float32 sums in another order, after six random layers; an error is far larger


def make_target(name: str, **overrides) -> Target:
    family, fields = ARCHITECTURES[name]
    fields = {**SHAPE, **fields, **overrides}
    attention = fields.pop("attn_implementation", "sdpa")
    suffix = "TextConfig" if hasattr(transformers, f"{family}TextConfig") else "Config"
    config = getattr(transformers, f"{family}{suffix}")(**fields)
    config._attn_implementation = attention
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():  # norms and biases at rest would hide errors
            if "norm" in key or key.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return Target(name, model, smoke_tokenizer(), "0" * 64)


def make_batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, 101, (len(LENGTHS), max(LENGTHS)), generator=generator)
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    return ids.where(mask, 0), mask


def rms(x: torch.Tensor, norm: torch.nn.Module) -> torch.Tensor:
    eps = getattr(norm, "eps", None) or norm.variance_epsilon
    shifted = type(norm).__name__.startswith(("Gemma", "Qwen3Next", "Qwen3_5"))  # stored less one
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (norm.weight.double() + shifted)


def rope_by_hand(keys: torch.Tensor, target: Target, layer: int) -> torch.Tensor:
    """keys [B, H, T, D] float64, pair (i, i + R/2) turned by position * base^(-2i/R), one angle at a time."""
    config = target.config
    if hasattr(config, "no_rope_layers") and not config.no_rope_layers[layer]:
        return keys
    rope = config.rope_parameters
    rope = rope.get(target.layer_types[layer], rope)
    width = int(keys.shape[-1] * rope.get("partial_rotary_factor", 1.0))
    if rope["rope_type"] == "yarn":
        frequencies, scale = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    else:
        frequencies, scale = [rope["rope_theta"] ** (-2 * i / width) for i in range(width // 2)], 1.0
    out = keys.clone()
    for i, frequency in enumerate(frequencies):
        for position in range(keys.shape[2]):
            angle = torch.tensor(position * float(frequency), dtype=torch.float64)
            a, b = keys[:, :, position, i], keys[:, :, position, i + width // 2]
            out[:, :, position, i] = (a * angle.cos() - b * angle.sin()) * scale
            out[:, :, position, i + width // 2] = (b * angle.cos() + a * angle.sin()) * scale
    return out


def kv_by_hand(target: Target, state: torch.Tensor, layer: int) -> tuple[torch.Tensor, ...]:
    """Cached keys, keys before RoPE, values [B, H, T, D] of a block, from the state [B, T, d] entering it."""
    block = target.decoder.layers[layer]
    attention, x = block.self_attn, rms(state, block.input_layernorm)

    def heads(projection: torch.nn.Linear) -> torch.Tensor:
        bias = 0 if projection.bias is None else projection.bias.double()
        return (x @ projection.weight.double().T + bias).unflatten(-1, (2, 16))

    plain = heads(attention.k_proj)
    if hasattr(attention, "k_norm"):
        plain = rms(plain, attention.k_norm)
    plain = plain.transpose(1, 2)
    return rope_by_hand(plain, target, layer), plain, heads(attention.v_proj).transpose(1, 2)


@pytest.fixture(autouse=True)
def _warnings_are_errors():
    gc.collect()  # sockets and files that earlier tests left open warn when they are collected: not in here
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", ResourceWarning)
        yield


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_capture_equals_reference(name, capfd):
    target = make_target(name)
    ids, mask = make_batch()
    everything = tuple(range(target.n_layers + 1))
    context = capture(target, ids, mask, hidden_layers=everything, kv_layers=target.kv_layers)
    with torch.no_grad():
        reference = target.model(ids, attention_mask=mask.long(), output_hidden_states=True, use_cache=False)

    def close(a: torch.Tensor, b: torch.Tensor) -> None:
        torch.testing.assert_close(a[mask].float(), b[mask].float(), **CLOSE)

    for i in everything:
        close(context.hidden[:, i], reference.hidden_states[i])
    close(context.final, reference.hidden_states[-1])
    close(target.logits(context.final), reference.logits)
    rows = torch.tensor([3, 50, 100])
    close(target.logits(context.final, rows), reference.logits[..., rows])
    unrotated = context.keys_unrotated()
    assert context.keys.shape == context.values.shape == (3, len(target.kv_layers), 2, 19, 16)
    for n, layer in enumerate(target.kv_layers):
        cached, plain, values = kv_by_hand(target, reference.hidden_states[layer], layer)
        close(context.keys[:, n].transpose(1, 2), cached.transpose(1, 2))
        close(unrotated[:, n].transpose(1, 2), plain.transpose(1, 2))
        close(context.values[:, n].transpose(1, 2), values.transpose(1, 2))
    again = target.rotate_keys(unrotated, target.kv_layers, context.positions)
    torch.testing.assert_close(again, context.keys, **CLOSE)
    # transformers says once a process that a faster kernel is not installed: no fault of ours
    said = [x for x in capfd.readouterr().err.splitlines() if "falling back to its reference PyTorch" not in x]
    assert not said


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_padded_batch_equals_single_sequences(name):
    target = make_target(name)
    ids, mask = make_batch()
    layers = target.kv_layers[-2:]
    batch = capture(target, ids, mask, hidden_layers=(1, 3, 6), kv_layers=layers)
    for row, length in enumerate(LENGTHS):
        single = capture(target, ids[row : row + 1, :length], hidden_layers=(1, 3, 6), kv_layers=layers)
        for field in ("hidden", "keys", "values"):
            torch.testing.assert_close(getattr(batch, field)[row, ..., :length, :], getattr(single, field)[0], **CLOSE)
        torch.testing.assert_close(batch.final[row, :length], single.final[0], **CLOSE)
        torch.testing.assert_close(batch.positions[row, :length], torch.arange(length))


@pytest.mark.parametrize("name", ["qwen3-next", "qwen3.5"])
def test_linear_attention_layers_are_refused(name):
    target = make_target(name)
    with pytest.raises(KvshotError, match=r"layers 0 \(linear_attention\), 4 \(linear_attention\): use 2, 5"):
        capture(target, *make_batch(), kv_layers=(0, 2, 4))
    with pytest.raises(KvshotError, match="has 2 layers with keys and values, not 3"):
        capture(target, *make_batch(), hidden_layers=())
    assert capture(target, *make_batch(), kv_layers=()).keys.shape == (3, 0, 2, 19, 16)


@pytest.mark.parametrize("family", ["Cohere2", "Exaone4"])
@pytest.mark.parametrize("first", ["full_attention", "sliding_attention"])
def test_blocks_without_positions_are_known(family, first):
    """Their keys do not change when the text moves."""
    types = [first, "sliding_attention", "full_attention"] * 2
    config = getattr(transformers, f"{family}Config")(**SHAPE, sliding_window=4, layer_types=types)
    torch.manual_seed(0)
    target = Target(family, getattr(transformers, f"{family}ForCausalLM")(config).eval(), smoke_tokenizer(), "0" * 64)
    ids, _ = make_batch()
    caches = [target.model(ids, position_ids=torch.arange(shift, shift + ids.shape[1])[None].expand_as(ids),
                           use_cache=True).past_key_values for shift in (0, 7)]
    here, there = (cache.layers[0].keys for cache in caches)
    assert target.rotates(0) == (not torch.allclose(here, there, atol=1e-4)) == (first == "sliding_attention")


def test_blocks_without_self_attn_give_states_but_no_keys():
    """GPT-NeoX calls its attention otherwise."""
    shape = {k: v for k, v in SHAPE.items() if k not in ("num_key_value_heads", "head_dim")}
    torch.manual_seed(0)
    target = Target("neox", transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**shape)).eval(),
                    smoke_tokenizer(), "0" * 64)
    assert capture(target, *make_batch(), kv_layers=()).hidden.shape == (3, 3, 19, 32)
    for use in (lambda: capture(target, *make_batch(), kv_layers=(1,)), lambda: target.rotates(1)):
        with pytest.raises(KvshotError, match=r"block 1 of neox \(GPTNeoXLayer\) has no self_attn: .*states only"):
            use()


def test_layers_that_share_keys_are_refused():
    target = make_target("gemma3")
    target.config.num_kv_shared_layers = 2  # what Gemma 3n and Gemma 4 declare
    assert target.kv_layers == (0, 1, 2, 3)
    with pytest.raises(KvshotError, match="shared or compressed"):
        capture(target, *make_batch(), kv_layers=(5,))


def test_defaults_prefer_full_attention():
    assert make_target("llama").default_kv_layers == (1, 3, 5)
    assert make_target("llama").default_hidden_layers == (2, 3, 3)
    assert make_target("gemma3").spaced_kv_layers(2) == (2, 5)
    assert make_target("gemma3").default_kv_layers == (1, 3, 5)  # only two full layers: all are used
    assert make_target("gemma3").rope_theta == 1e6


def test_bfloat16_keys_unrotate_within_rounding():
    target = make_target("qwen3")
    target.model.bfloat16()
    context = capture(target, *make_batch(), kv_layers=(2,))
    again = target.rotate_keys(context.keys_unrotated(), (2,), context.positions)
    assert context.keys.dtype == again.dtype == torch.bfloat16
    torch.testing.assert_close(again, context.keys, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("ids, mask, message", [
    (torch.zeros(0, 4), None, "not empty"),
    (torch.zeros(4), None, r"\[batch, length\]"),
    (torch.tensor([[5, 101]]), None, "outside the vocabulary"),
    (torch.tensor([[5, -1]]), None, "outside the vocabulary"),
    (torch.tensor([[5, 6]]), torch.tensor([[False, True]]), "pad sequences on the right"),
    (torch.tensor([[5, 6]]), torch.tensor([[True]]), "do not fit"),
])
def test_bad_batches_are_refused(ids, mask, message):
    with pytest.raises(KvshotError, match=message):
        capture(make_target("llama"), ids.long(), mask)


def test_bad_layers_are_refused():
    target = make_target("llama")
    with pytest.raises(KvshotError, match="use 0 to 6"):
        capture(target, *make_batch(), hidden_layers=(7,))
    with pytest.raises(KvshotError, match=r"6 \(absent\): use 0, 1, 2, 3, 4, 5"):
        capture(target, *make_batch(), kv_layers=(6,))


def test_registry_and_hooks_are_restored():
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    target, before = make_target("llama"), ALL_ATTENTION_FUNCTIONS["sdpa"]
    capture(target, *make_batch())
    eager = make_target("llama-eager")
    capture(eager, *make_batch())
    eager.decoder.norm.forward = None
    with pytest.raises(TypeError):
        capture(eager, *make_batch())
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is before and "eager" not in ALL_ATTENTION_FUNCTIONS
    assert not any(layer._forward_pre_hooks for model in (target, eager) for layer in model.decoder.layers)
