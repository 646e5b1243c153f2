"""EAGLE-3 checkpoints of other projects come in whole or not at all; what goes out comes back the same."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvshot.data import DraftVocab
from kvshot.drafters import DrafterConfig, load_eagle3, new_drafter, save_speculators
from kvshot.errors import KvshotError
from kvshot.targets import load_target

V_D = 40


@pytest.fixture(scope="module")
def target():
    return load_target("smoke", device="cpu")


@pytest.fixture
def exported(target, tmp_path):
    """A drafter of ours in speculators' format, with a state read that no default names."""
    config = DrafterConfig.for_target(target, draft_vocab_size=V_D, hidden_layers=(1, 2, 4), norm_before_residual=True)
    vocab = DraftVocab(torch.arange(3, 3 + 7 * V_D, 7), target.vocab_size)
    drafter = new_drafter(target, config, vocab, seed=0)
    save_speculators(tmp_path / "out", drafter, vocab, target, dtype=torch.float32)
    return drafter, vocab, tmp_path / "out"


def rewrite(folder, change=lambda about: None, tensors=None):
    about = json.loads((folder / "config.json").read_text())
    change(about)
    (folder / "config.json").write_text(json.dumps(about))
    if tensors is not None:
        save_file(tensors(load_file(folder / "model.safetensors")), folder / "model.safetensors")


def test_what_goes_out_comes_back(target, exported):
    drafter, vocab, folder = exported
    again, known = load_eagle3(folder, target)
    assert again.config == drafter.config and torch.equal(known.ids, vocab.ids)
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


@pytest.mark.parametrize(("stated", "read"), [((1, 2, 3), (2, 3, 4)), ((2, 3, 4), (2, 3, 4))])
def test_eagles_own_format(target, exported, tmp_path, stated, read):
    """Other names, a pickle, one flat configuration, a theta that training ignored; both ways to count the layers."""
    drafter, vocab, folder = exported
    about = json.loads((folder / "config.json").read_text())
    flat = {**about["transformer_layer_config"], "draft_vocab_size": V_D, "architectures": ["LlamaForCausalLMEagle3"],
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(stated)}}
    flat.pop("rope_parameters")
    theirs = tmp_path / "eagle"
    theirs.mkdir()
    (theirs / "config.json").write_text(json.dumps(flat))
    torch.save({n.replace("layers.0.", "midlayer."): t for n, t in drafter.state_dict().items()} | vocab.state(),
               theirs / "pytorch_model.bin")
    loaded, _ = load_eagle3(theirs, target)
    assert loaded.config.hidden_layers == read and not loaded.config.norm_before_residual
    assert loaded.config.rope_theta == drafter.config.rope_theta
    assert torch.equal(loaded.layers[0].self_attn.q_proj.weight, drafter.layers[0].self_attn.q_proj.weight)
    other, _ = load_eagle3(theirs, target, hidden_layers=(1, 3, 5), rope_theta=77.0)
    assert other.config.hidden_layers == (1, 3, 5) and other.config.rope_theta == 77.0


def test_without_maps_every_token_can_be_drafted(target, tmp_path):
    config = DrafterConfig.for_target(target, draft_vocab_size=target.vocab_size, hidden_layers=(1, 2, 3))
    vocab = DraftVocab(torch.arange(target.vocab_size), target.vocab_size)
    save_speculators(tmp_path / "all", new_drafter(target, config, vocab, seed=0), vocab, target)
    rewrite(tmp_path / "all", tensors=lambda t: {n: x for n, x in t.items() if n not in ("d2t", "t2d")})
    assert len(load_eagle3(tmp_path / "all", target)[1]) == target.vocab_size


def without(name):
    return lambda tensors: {n: t for n, t in tensors.items() if n != name}


@pytest.mark.parametrize(("change", "tensors", "message"), [
    (lambda a: a.update(eagle_aux_hidden_state_layer_ids=None), None, "does not say which hidden states"),
    (lambda a: a.update(norm_output=True), None, "variant with norm_output"),
    (lambda a: a["transformer_layer_config"].update(attention_bias=True), None, "variant with attention_bias"),
    (lambda a: a["transformer_layer_config"].update(hidden_act="gelu"), None, "variant with gelu"),
    (lambda a: a.update(speculators_model_type="dflash"), None, "holds dflash"),
    (lambda a: a.update(target_hidden_size=99), None, "load the target it was made for"),
    (lambda a: a.pop("norm_before_residual"), None, "what its residual is"),
    (lambda a: a["transformer_layer_config"].update(model_type="gemma3_text"), None, "llama or qwen3"),
    (lambda a: a["transformer_layer_config"].update(layer_types=["sliding_attention"], sliding_window=8), None,
     "within a window of 8 tokens"),
    (lambda a: a["transformer_layer_config"].update(partial_rotary_factor=0.5), None, "another rotation"),
    (lambda a: a["transformer_layer_config"].update(rope_parameters={"sliding_attention": {"rope_theta": 1e4}}), None,
     "several rotations"),
    (lambda a: a.update(eagle_aux_hidden_state_layer_ids=[2, 3, 99]), None, "only states between blocks"),
    (lambda a: a.update(eagle_aux_hidden_state_layer_ids=5), None, "is not understood"),
    (lambda a: a.pop("transformer_layer_config"), None, "is not understood .KeyError"),
    (lambda a: a["transformer_layer_config"].pop("intermediate_size"), None, "is not understood .KeyError"),
    (lambda a: a["transformer_layer_config"]["rope_parameters"].update(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=32), None, "another rotation"),
    (lambda a: None, without("norm.weight"), "norm.weight is missing"),
    (lambda a: None, without("t2d"), "without t2d"),
    (lambda a: None, lambda t: {**t, "fc_norm.0.weight": t["norm.weight"] + 1}, "fc_norm.0.weight"),
    (lambda a: None, lambda t: {**t, "embed_tokens.weight": t["embed_tokens.weight"] + 1}, "embeddings of its own"),
])
def test_what_does_not_fit_is_refused(target, exported, change, tensors, message):
    _, _, folder = exported
    rewrite(folder, change, tensors)
    with pytest.raises(KvshotError, match=message) as caught:
        load_eagle3(folder, target)
    assert "\n" not in str(caught.value)


def test_a_window_can_be_ignored(target, exported):
    drafter, _, folder = exported
    rewrite(folder, lambda a: a["transformer_layer_config"].update(layer_types=["sliding_attention"], sliding_window=8))
    assert load_eagle3(folder, target, ignore_window=True)[0].config == drafter.config


def test_in_eagles_format_flags_may_be_nested_and_layers_must_be_told_apart(target, exported):
    _, _, folder = exported

    def flat(about):
        layer = about.pop("transformer_layer_config")
        about.pop("speculators_model_type"), about.pop("eagle_aux_hidden_state_layer_ids")
        about.update(layer, eagle_config={"norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": [2, 3, 4]})

    rewrite(folder, flat)
    assert load_eagle3(folder, target)[0].config.norm_before_residual
    rewrite(folder, lambda a: a["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[3, 4, 5]))
    with pytest.raises(KvshotError, match="outputs of blocks or their inputs"):
        load_eagle3(folder, target)


def test_damaged_and_foreign_folders_are_refused(target, exported, tmp_path):
    _, _, folder = exported
    with pytest.raises(KvshotError, match="has no config.json"):
        load_eagle3(tmp_path / "nowhere", target)
    (folder / "model.safetensors").write_bytes(b"half")
    with pytest.raises(KvshotError, match="is damaged"):
        load_eagle3(folder, target)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"half")
    with pytest.raises(KvshotError, match="is damaged") as caught:
        load_eagle3(folder, target)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("choices", [{}, dict(hidden_layers=(1, 2), memory="none"), dict(
    memory="target", kv_layers=(1,), injection="linear")], ids=str)
def test_only_eagle3_goes_out(target, tmp_path, choices):
    config = DrafterConfig.for_target(target, draft_vocab_size=V_D, **choices)
    vocab = DraftVocab(torch.arange(V_D), target.vocab_size)
    with pytest.raises(KvshotError, match="only a drafter that reads hidden states"):
        save_speculators(tmp_path / "out", new_drafter(target, config, vocab, seed=0), vocab, target)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("choices", "message"), [
    (dict(hidden_layers=(7,)), "only states between blocks"),
    (dict(hidden_layers=(1, 2, 4), rope_frequencies=(1.0,) * 8), "a scaled RoPE that is not its target's"),
])
def test_what_would_mean_something_else_there_stays(target, tmp_path, choices, message):
    config = DrafterConfig.for_target(target, draft_vocab_size=V_D, **choices)
    vocab = DraftVocab(torch.arange(V_D), target.vocab_size)
    with pytest.raises(KvshotError, match=message):
        save_speculators(tmp_path / "out", new_drafter(target, config, vocab, seed=0), vocab, target)
