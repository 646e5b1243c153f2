"""EAGLE-3 checkpoints of other projects: in, of EAGLE, SpecForge and speculators; out, speculators' for serving."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

from kvshot.data import DraftVocab
from kvshot.drafters.checkpoint import load_strictly
from kvshot.drafters.config import DrafterConfig, checked
from kvshot.drafters.drafter import Drafter
from kvshot.errors import KvshotError
from kvshot.fileio import atomic_folder
from kvshot.targets import Target
from kvshot.targets.loading import first_line
from kvshot.targets.rope import rope_frequencies, rope_parameters

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
UNKNOWN = ("norm_before_fc", "fc_norm", "norm_output", "attention_bias", "mlp_bias")  # variants that would go unnoticed
SPECULATORS = "0.9.0"  # the version whose format is written


def load_eagle3(folder: str | os.PathLike, target: Target, *, hidden_layers: Sequence[int] | None = None,
                rope_theta: float | None = None, ignore_window: bool = False) -> tuple[Drafter, DraftVocab]:
    """A drafter that EAGLE, SpecForge or speculators trained for this target, as `load_drafter` gives one.

    hidden_layers: HF indices (blocks applied) of the fused states, where the checkpoint does not say or says it
    wrongly; rope_theta: a plain base in place of what it says (EAGLE's own training used 10000 whatever its
    configuration said); ignore_window: read one that attends within a window as if it attended to all before. Raises
    KvshotError for another kind of checkpoint, a variant that this library does not have, a damaged or incomplete one,
    and one for a target of other shapes.
    """
    folder = Path(folder)
    about, tensors = _read(folder)
    try:
        layer, stated = _layer_and_states(about, folder)
        _refuse_variants(layer, folder, ignore_window)
        states = _states(hidden_layers or stated, target, folder)
        tensors = {name.replace("midlayer.", "layers.0."): t for name, t in tensors.items()
                   if not name.startswith("verifier_")}
        vocab = _vocab(tensors, target)
        _check_embedding(tensors.pop("embed_tokens.weight", None), target, folder)
        qk_norm = any(name.endswith("q_norm.weight") for name in tensors)
        config = _config(layer, target, rope_theta, hidden_layers=states, draft_vocab_size=len(vocab), qk_norm=qk_norm)
    except KvshotError:
        raise
    except Exception as err:  # whatever a strange configuration makes of the lines above
        raise KvshotError(f"{folder}/config.json is not understood ({type(err).__name__}: {first_line(err)}): give an "
                          "intact EAGLE-3 checkpoint") from err
    drafter = Drafter(config, target.embedding_weight, vocab.ids.to(target.device))
    load_strictly(drafter, tensors, folder)
    return drafter.to(target.device).eval(), vocab


def _read(folder: Path) -> tuple[dict, dict[str, Tensor]]:
    weights = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if weights is None or not (folder / "config.json").is_file():
        raise KvshotError(f"{folder} has no config.json with {' or '.join(WEIGHTS)}: give a downloaded checkpoint")
    try:
        about = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tensors = load_file(weights) if weights.suffix == ".safetensors" else torch.load(
            weights, map_location="cpu", weights_only=True)
    except Exception as err:  # half a pickle raises nearly anything
        raise KvshotError(f"{folder} is damaged ({type(err).__name__}): fetch it again") from err
    if not isinstance(about, dict) or not isinstance(tensors, dict) or not all(
            isinstance(t, Tensor) for t in tensors.values()):
        raise KvshotError(f"{folder} is no drafter checkpoint: give the folder of one")
    return about, tensors


def _layer_and_states(about: dict, folder: Path) -> tuple[dict, list[int] | None]:
    """All that is said of the drafter in one dict, and the HF indices of the states it reads where they are stated.

    speculators counts blocks applied. In EAGLE's format are found block outputs (1 first: one less) and blocks applied
    (2 first), and nothing but that tells them apart.
    """
    kind = about.get("speculators_model_type")
    if kind == "eagle3":
        layer = about["transformer_layer_config"]
        if layer.get("model_type") not in ("llama", "qwen3") or "norm_before_residual" not in about:
            raise KvshotError(f"{folder} does not say whether it is a llama or qwen3 layer, or what its residual is "
                              "(norm_before_residual; vLLM and speculators guess differently): write it there")
        return {**layer, **about}, about.get("eagle_aux_hidden_state_layer_ids")
    if kind is not None or "draft_vocab_size" not in about:
        raise KvshotError(f"{folder} holds {kind or 'no EAGLE-3 drafter'}: give an EAGLE-3 checkpoint of EAGLE, "
                          "SpecForge or speculators")
    layer = {**about, **(about.get("eagle_config") or {})}
    stated = layer.get("eagle_aux_hidden_state_layer_ids")
    if stated and stated[0] not in (1, 2):
        raise KvshotError(f"{folder} reads the layers {stated}, which are outputs of blocks or their inputs: give "
                          "hidden layers (blocks applied: i + 1 for the output of block i)")
    return layer, [i + 1 for i in stated] if stated and stated[0] == 1 else stated


def _refuse_variants(layer: Mapping, folder: Path, ignore_window: bool) -> None:
    odd = [name for name in UNKNOWN if layer.get(name)]
    if layer.get("hidden_act", "silu") != "silu":
        odd.append(str(layer["hidden_act"]))
    rope = layer.get("rope_parameters") or {}
    if any(isinstance(value, dict) for value in rope.values()):
        odd.append("several rotations")
    if odd:
        raise KvshotError(f"{folder} is an EAGLE-3 variant with {', '.join(odd)}, which kvshot does not have: use a "
                          "plain one")
    windows = "sliding_attention" in (layer.get("layer_types") or ()) or layer.get("use_sliding_window")
    if windows and not ignore_window:
        raise KvshotError(f"{folder} attends within a window of {layer.get('sliding_window')} tokens: import it with "
                          "ignore_window for texts that are no longer")


def _states(stated: Sequence[int] | None, target: Target, folder: Path) -> tuple[int, ...]:
    if not stated:
        raise KvshotError(f"{folder} does not say which hidden states it reads: give hidden layers (EAGLE's own code "
                          f"uses {', '.join(map(str, target.default_hidden_layers))}); a wrong guess costs acceptance "
                          "and nothing else tells")
    _check_states(stated, target)
    return tuple(stated)


def _check_states(states: Sequence[int], target: Target) -> None:
    """The last state is one thing here (behind the final norm) and another there (before it)."""
    if not all(0 <= i < target.n_layers for i in states):
        raise KvshotError(f"hidden layers {list(states)} of a target with {target.n_layers} blocks: only states between"
                          " blocks mean the same in both formats")


def _vocab(tensors: dict[str, Tensor], target: Target) -> DraftVocab:
    """Takes the maps out of `tensors`; without them the drafter proposes every token."""
    maps = {name: tensors.pop(name) for name in ("d2t", "t2d") if name in tensors}
    if not maps:
        return DraftVocab(torch.arange(target.vocab_size), target.vocab_size)
    return DraftVocab.from_state(maps, vocab_size=target.vocab_size)


def _check_embedding(theirs: Tensor | None, target: Target, folder: Path) -> None:
    ours = target.embedding_weight
    if theirs is not None and (theirs.shape != ours.shape or not torch.allclose(
            theirs.to(ours.device, torch.float32), ours.float(), rtol=1e-2, atol=1e-5)):
        raise KvshotError(f"{folder} has embeddings of its own, or those of another target than {target.name}: "
                          "kvshot's drafters share the target's")


def _config(layer: Mapping, target: Target, rope_theta: float | None, **found) -> DrafterConfig:
    width = layer["hidden_size"]
    if width != target.hidden_size or layer.get("target_hidden_size") not in (None, width):
        raise KvshotError(f"the drafter is {width} wide, target {target.name} {target.hidden_size}: load the target it "
                          "was made for (drafters of another width than their target's are not supported)")
    heads = layer["num_attention_heads"]
    head_dim = layer.get("head_dim") or width // heads
    names = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "max_position_embeddings")
    given = LlamaConfig(hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim,
                        **{name: layer[name] for name in names if layer.get(name) is not None})
    return checked(DrafterConfig, {
        "depth": layer.get("num_hidden_layers", 1), "hidden_size": width,
        "intermediate_size": layer["intermediate_size"], "n_heads": heads,
        "n_kv_heads": layer.get("num_key_value_heads") or heads, "head_dim": head_dim,
        "norm_eps": layer.get("rms_norm_eps", 1e-6), "norm_before_residual": bool(layer.get("norm_before_residual")),
        "rope_theta": rope_theta or rope_parameters(given).get("rope_theta", 1e4),
        "rope_frequencies": None if rope_theta else rope_frequencies(given),
        "target_vocab_size": target.vocab_size, **found})


def save_speculators(folder: str | os.PathLike, drafter: Drafter, vocab: DraftVocab, target: Target, *,
                     verifier: str | None = None, dtype: torch.dtype = torch.bfloat16, tokens: int = 4) -> None:
    """Write a drafter in speculators' format, as vLLM serves it.

    verifier: the target's hub id or folder there (default: its name here); tokens: how many are drafted at a time
    there. Raises KvshotError for a drafter that reads the target's keys and values, or no states: nothing serves
    those.
    """
    c = drafter.config
    if c.memory != "own" or not c.reads_hidden:
        raise KvshotError("only a drafter that reads hidden states and remembers its own keys (EAGLE-3) has a place in "
                          "that format: export one of those")
    _check_states(c.hidden_layers, target)
    rope: dict = {"rope_type": "default", "rope_theta": c.rope_theta}
    if c.rope_frequencies is not None:
        rope = dict(rope_parameters(target.config))
        if rope_frequencies(target.config) != c.rope_frequencies:
            raise KvshotError("the drafter has a scaled RoPE that is not its target's: this cannot be exported yet")
    layer = {
        "model_type": "qwen3" if c.qk_norm else "llama", "hidden_act": "silu",
        "hidden_size": c.hidden_size, "intermediate_size": c.intermediate_size, "num_hidden_layers": c.depth,
        "num_attention_heads": c.n_heads, "num_key_value_heads": c.n_kv_heads, "head_dim": c.head_dim,
        "rms_norm_eps": c.norm_eps, "vocab_size": c.target_vocab_size, "attention_bias": False, "mlp_bias": False,
        "tie_word_embeddings": False, "rope_parameters": rope, "rope_theta": c.rope_theta,
        "max_position_embeddings": getattr(target.config, "max_position_embeddings", 2048)}
    about = {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "speculators_version": SPECULATORS,
        "transformer_layer_config": layer, "draft_vocab_size": c.draft_vocab_size,
        "norm_before_residual": c.norm_before_residual, "norm_before_fc": False, "fc_norm": False, "norm_output": False,
        "embed_requires_grad": False, "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": list(c.hidden_layers), "tie_word_embeddings": False,
        "dtype": str(dtype).removeprefix("torch."),
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}],
            "verifier": {"name_or_path": verifier or target.name, "architectures": [type(target.model).__name__]}}}
    tensors = {**drafter.state_dict(), "embed_tokens.weight": drafter.embedding}
    tensors = {name: t.detach().to(dtype) for name, t in tensors.items()} | vocab.state()
    with atomic_folder(folder) as tmp:
        save_file({name: t.cpu().contiguous() for name, t in tensors.items()}, tmp / "model.safetensors")
        (tmp / "config.json").write_text(json.dumps(about, indent=1) + "\n")
