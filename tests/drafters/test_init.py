"""A drafter made of the target's own blocks is the target; warm starts take all of the other drafter or refuse."""

from __future__ import annotations

import pytest
import torch
import transformers

from kvshot.analysis import target_as_drafter
from kvshot.data import DraftVocab
from kvshot.drafters import DrafterConfig, Given, new_drafter, warm_start
from kvshot.drafters.layers import rotate
from kvshot.errors import KvshotError
from kvshot.targets import Target, capture
from kvshot.targets.smoke import smoke_tokenizer
from kvshot.training.ttt import unroll
from tests.drafters.conftest import POINTS, make_drafter

V, K = 61, 4
SHAPE = dict(vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8, initializer_range=0.2, bos_token_id=None, eos_token_id=1,
             pad_token_id=0)
EVERY = dict(memory="target", kv_layers=(0, 1, 2, 3), depth=4, per_layer=True, injection="linear+rope")


def make_target(family: str, **more) -> Target:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SHAPE, **more)
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:  # all ones would hide which norm is which
            parameter.data += 0.3 * torch.randn_like(parameter)
    return Target(family.lower(), model.double().requires_grad_(False), smoke_tokenizer(), "0" * 64)


@pytest.fixture(scope="module")
def llama() -> Target:
    return make_target("Llama")


@pytest.fixture(scope="module")
def vocab() -> DraftVocab:
    return DraftVocab(torch.arange(V), V)


def setting(target: Target, config: DrafterConfig):
    ids = torch.randint(2, V, (2, 14), generator=torch.Generator().manual_seed(1))
    context = capture(target, ids, hidden_layers=config.hidden_needed, kv_layers=config.kv_needed)
    return ids, Given(context.hidden, context.keys, context.values)


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_all_blocks_of_the_target_are_the_target(family, vocab):
    """Every step of every column gives the target's own logits: positions, memory, chain and rotation are exact."""
    target = make_target(family)
    config = DrafterConfig.for_target(target, draft_vocab_size=V, qk_norm=family == "Qwen3", **EVERY)
    drafter = new_drafter(target, config, vocab, seed=0, init="layers").double()
    ids, given = setting(target, config)
    columns = torch.arange(14 - K).expand(2, -1)
    with torch.no_grad():
        expected = target.model(ids).logits
        for k, state in enumerate(unroll(drafter, ids, given, columns, K)):
            torch.testing.assert_close(drafter.logits(state), expected[:, 1 + k : 15 - K + k], rtol=0, atol=2e-5)


def test_attention_with_the_targets_queries_is_the_targets(llama, vocab):
    config = DrafterConfig.for_target(llama, draft_vocab_size=V, memory="target", kv_layers=(2,), per_layer=True,
                                      injection="linear+rope")
    drafter = new_drafter(llama, config, vocab, seed=0, init="layers").double()
    ids, given = setting(llama, config)
    states = capture(llama, ids, hidden_layers=(2,), kv_layers=()).hidden[:, 0]
    seen = []
    hook = llama.decoder.layers[2].self_attn.register_forward_hook(lambda m, a, out: seen.append(out[0]))
    llama.decoder(input_ids=ids, use_cache=False)
    hook.remove()
    layer, at = drafter.layers[0], torch.arange(1, 14).expand(2, -1)
    memory = drafter.remember(given, ids)
    inputs = layer.input_layernorm(states[:, 1:])
    out, _ = layer.self_attn(inputs, drafter.rope(at), memory[0]["target"], drafter.limit(at - 1)["target"], None,
                             drafter.attention)
    torch.testing.assert_close(out, seen[0][:, 1:], rtol=0, atol=1e-5)


def test_rope_comes_off_and_goes_back_on(llama, vocab):
    config = DrafterConfig.for_target(llama, draft_vocab_size=V, **EVERY)
    drafter = new_drafter(llama, config, vocab, seed=0).double()
    ids, given = setting(llama, config)
    rope = drafter.rope(torch.arange(14).expand(2, -1))
    plain = capture(llama, ids, kv_layers=(1,)).keys_unrotated()[:, 0]
    torch.testing.assert_close(rotate(given.keys[:, 1], rope, undo=True), plain, rtol=0, atol=1e-5)
    torch.testing.assert_close(rotate(rotate(given.keys[:, 1], rope, undo=True), rope), given.keys[:, 1])


@pytest.mark.parametrize(("choices", "layer"), [
    (dict(hidden_layers=(1, 2, 3)), 3), (dict(hidden_layers=(1, 2, 3), depth=2), 0),
    (dict(memory="target", kv_layers=(0, 1, 3), injection="linear"), 3),
    (dict(hidden_layers=(1, 2, 3), memory="both", kv_layers=(0, 1, 3), injection="linear+rope"), 3),
])
def test_other_drafters_can_start_from_blocks(llama, vocab, choices, layer):
    config = DrafterConfig.for_target(llama, draft_vocab_size=V, **choices)
    drafter = new_drafter(llama, config, vocab, seed=0, init="layers")
    block = llama.decoder.layers[layer]
    q = drafter.layers[0].self_attn.q_proj.weight[:, -32:]
    assert torch.equal(q.double(), block.self_attn.q_proj.weight.float().double())
    assert torch.equal(drafter.layers[0].mlp["up_proj"].weight, block.mlp.up_proj.weight.float())
    if config.memory == "both":
        assert torch.equal(drafter.layers[0].cross_attn.o_proj.weight, block.self_attn.o_proj.weight.float())
    if config.remembers_target:  # the identity on the layer read, on top of chance
        started = new_drafter(llama, config, vocab, seed=0).injections[0].k_proj.weight
        extra = drafter.injections[0].k_proj.weight - started
        torch.testing.assert_close(extra, torch.cat([torch.zeros(16, 32), torch.eye(16)], 1))


@pytest.mark.parametrize(("choices", "message"), [
    (dict(EVERY, injection="mlp"), "cannot start as the identity"), (dict(EVERY, qk_norm=True), "of another kind"),
    (dict(memory="target", kv_layers=(0, 1, 2), injection="concat"), "the draft layer wants"),
])
def test_starts_that_do_not_fit_are_refused(llama, vocab, choices, message):
    config = DrafterConfig.for_target(llama, draft_vocab_size=V, **choices)
    with pytest.raises(KvshotError, match=message):
        new_drafter(llama, config, vocab, seed=0, init="layers")


def test_the_head_starts_as_asked(llama, vocab):
    config = DrafterConfig.for_target(llama, draft_vocab_size=V, hidden_layers=(1, 2, 3))
    ours = new_drafter(llama, config, vocab, seed=0, init="target")
    assert torch.equal(ours.lm_head.weight, llama.head_weight.float())
    assert torch.equal(ours.norm.weight, llama.decoder.norm.weight.float())
    random = new_drafter(llama, config, vocab, seed=0, init="random")
    assert random.lm_head.weight.std().item() == pytest.approx(0.02, rel=0.1)
    torch.testing.assert_close(ours.fc.weight - random.fc.weight, torch.cat([torch.zeros(32, 64), torch.eye(32)], 1))


def head_of(family: str, vocab: DraftVocab, **more) -> tuple[torch.Tensor, ...]:
    """Scores of random states by a fresh drafter's norm and head, and by the target's."""
    target = make_target(family, **more)
    config = DrafterConfig.for_target(target, draft_vocab_size=V, hidden_layers=(1, 2, 3))
    drafter = new_drafter(target, config, vocab, seed=0)
    x = 3 * torch.randn(5, 32, generator=torch.Generator().manual_seed(2)).double()
    with torch.no_grad():
        return drafter.double().logits(x), target.model.get_output_embeddings()(target.decoder.norm(x))


HYBRID = dict(linear_conv_kernel_dim=4, linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2,
              linear_num_value_heads=4, layer_types=["linear_attention", "full_attention"] * 2)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, decoder_sparse_step=1,
               shared_expert_intermediate_size=24)


@pytest.mark.parametrize(("family", "more"), [
    ("Llama", {}), ("Qwen3", {}), ("Qwen3_5Text", HYBRID), ("Qwen3Next", {**HYBRID, **EXPERTS}), ("Gemma", {}),
    ("Gemma3Text", {}), ("Granite", {}),
])
def test_norm_and_head_start_as_the_target_computes_them(family, more, vocab):
    """Some families store the norm's weight less one."""
    torch.testing.assert_close(*head_of(family, vocab, **more), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("family", "more", "what"), [
    ("Cohere", {}, "the final norm"), ("Cohere2", {}, "the final norm"), ("Nemotron", {}, "the final norm"),
    ("StableLm", {}, "the final norm"), ("Starcoder2", {}, "the final norm"), ("Olmo", {}, "the final norm"),
    ("Granite", dict(logits_scaling=8.0), "scales, caps or shifts"),
    ("Gemma2", dict(final_logit_softcapping=5.0), "scales, caps or shifts"),
])
def test_a_norm_or_head_of_another_kind_is_refused(family, more, what, vocab):
    with pytest.raises(KvshotError, match=f"{what}.*: use init='random'"):
        head_of(family, vocab, **more)


@pytest.mark.parametrize(("family", "more"), [("Gemma", {}), ("Granite", dict(attention_multiplier=1.0)),
                                              ("Granite", dict(attention_multiplier=8**-0.5, residual_multiplier=0.5))])
def test_blocks_that_compute_otherwise_are_refused(family, more, vocab):
    """Their weights have the names and shapes of a draft layer's."""
    target = make_target(family, **more)
    config = DrafterConfig.for_target(target, draft_vocab_size=V, **EVERY)
    assert new_drafter(target, config, vocab, seed=0)
    with pytest.raises(KvshotError, match="computes otherwise than a draft layer .*: use init='target'"):
        new_drafter(target, config, vocab, seed=0, init="layers")


@pytest.mark.parametrize(("name", "fresh"), [
    ("eagle3", ()), ("cross only", ("injections",)), ("hybrid", ("cross_attn", "injections", "merge")),
])
def test_warm_starts(name, fresh):
    other, drafter = make_drafter(seed=3, **POINTS["eagle3"]), make_drafter(seed=4, **POINTS[name])
    other.vocab_ids.copy_(drafter.vocab_ids)
    before = {n: t.clone() for n, t in drafter.state_dict().items()}
    new = warm_start(drafter, other)
    assert sorted({part for n in new for part in n.split(".") if part in ("cross_attn", "injections", "merge")}) == \
        sorted(fresh)
    theirs = other.state_dict()
    for n, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, before[n] if n in new else theirs[n]), n


@pytest.mark.parametrize("name", ["no target info", "eagle3, 2 layers", "mtp", "kv linear, qk norm"])
def test_warm_starts_from_another_kind_are_refused(name):
    with pytest.raises(KvshotError, match="cannot start from that checkpoint"):
        warm_start(make_drafter(**POINTS[name]), make_drafter(**POINTS["eagle3"]))


def test_a_warm_start_must_read_the_same_layers():
    """Equal shapes are not enough: a neighbouring layer would go unnoticed."""
    with pytest.raises(KvshotError, match=r"differ in hidden_layers \(\(1, 2, 4\), there \(1, 2, 3\)\)"):
        warm_start(make_drafter(**POINTS["hybrid"]), make_drafter(hidden_layers=(1, 2, 3)))


def test_the_last_state_is_not_normalised_twice(llama, vocab):
    """MTP reads the state behind the target's final norm: its own norm must not rescale it."""
    config = DrafterConfig.for_target(llama, draft_vocab_size=V, hidden_layers=(4,))
    drafter = new_drafter(llama, config, vocab, seed=0)
    assert torch.equal(drafter.norm.weight, torch.ones(32))
    drafter.fc.weight.data.copy_(torch.eye(32))
    ids, given = setting(llama, config)
    ours = drafter.double().logits(drafter.fuse(given.hidden))
    torch.testing.assert_close(ours.argmax(-1), llama.model(ids).logits.argmax(-1))


LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}


@pytest.mark.parametrize("rope", [LINEAR, LLAMA3], ids=lambda rope: rope["rope_type"])
def test_keys_with_scaled_rotation_are_turned_as_the_target_turns_them(rope, monkeypatch):
    """The drafter of all blocks is the target; with the base alone it would not be, and is refused."""
    scaled = make_target("Llama", rope_parameters=rope)
    ids = torch.randint(V, (1, 24), generator=torch.Generator().manual_seed(0))
    assert target_as_drafter(scaled, ids, 3)["largest difference"].max() < 1e-4
    drafter = DrafterConfig.for_target(scaled, draft_vocab_size=V, **EVERY)
    assert len(drafter.rope_frequencies) == scaled.head_dim // 2
    assert DrafterConfig.for_target(make_target("Llama"), draft_vocab_size=V, **EVERY).rope_frequencies is None
    with pytest.raises(KvshotError, match="give no RoPE"):
        DrafterConfig.for_target(scaled, draft_vocab_size=V, rope_theta=7.0, **EVERY)
    monkeypatch.setattr("kvshot.drafters.config.rope_frequencies", lambda config: None)
    with pytest.raises(KvshotError, match="turns its keys otherwise"):
        target_as_drafter(scaled, ids, 3)


def test_neighbours_turned_instead_of_halves_are_refused(vocab):
    cohere = make_target("Cohere")
    config = DrafterConfig.for_target(cohere, draft_vocab_size=V, **EVERY)
    with pytest.raises(KvshotError, match="turns its keys otherwise"):
        new_drafter(cohere, config, vocab, seed=0, init="random")


def test_blocks_that_turn_their_keys_otherwise_are_refused():
    """Gemma 3's windows have a base of their own."""
    full, sliding = ({"rope_type": "default", "rope_theta": theta} for theta in (1e6, 1e4))
    gemma = make_target("Gemma3Text", layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=8,
                        rope_parameters={"full_attention": full, "sliding_attention": sliding})
    assert DrafterConfig.for_target(gemma, draft_vocab_size=V, **{**EVERY, "kv_layers": (1, 3), "depth": 2})
    with pytest.raises(KvshotError, match="choose full-attention blocks"):
        DrafterConfig.for_target(gemma, draft_vocab_size=V, **{**EVERY, "kv_layers": (0, 1), "depth": 2})


def test_keys_with_another_rotation_are_refused():
    yarn = make_target("Llama", rope_parameters={
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32})
    with pytest.raises(KvshotError, match="cannot be reused yet"):
        DrafterConfig.for_target(yarn, draft_vocab_size=V, **EVERY)
    assert DrafterConfig.for_target(yarn, draft_vocab_size=V, hidden_layers=(1, 2)).rope_frequencies is None


def test_warm_starts_want_the_same_vocabulary():
    with pytest.raises(KvshotError, match="other draft vocabularies"):
        warm_start(make_drafter(seed=1), make_drafter(seed=2))
