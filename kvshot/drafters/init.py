"""Where a drafter starts: from chance, from the target's head, from the target's own layers, from another drafter."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from kvshot.data import DraftVocab
from kvshot.drafters.config import DrafterConfig
from kvshot.drafters.drafter import Drafter
from kvshot.drafters.injection import Injection
from kvshot.drafters.layers import rotate
from kvshot.errors import KvshotError
from kvshot.targets import Target

Init = Literal["random", "target", "layers"]


def new_drafter(target: Target, config: DrafterConfig, vocab: DraftVocab, *, seed: int, init: Init = "target"
                ) -> Drafter:
    """A fresh drafter: normal(0, 0.02) matrices.

    With init "target", final norm and draft head are the target's (pruned to the draft vocabulary), and the fusion
    passes the highest hidden state through, so that the head reads from the first step what it was made to read. With
    "layers" the blocks are copies of the target's, too, and injections begin as the identity on one target layer.
    Raises KvshotError for a target whose blocks are of another kind, or whose keys are turned otherwise than the
    drafter turns them.
    """
    generator = torch.Generator().manual_seed(seed)
    drafter = Drafter(config, target.embedding_weight, vocab.ids.to(target.device))
    _check_rotation(drafter, target)
    for module in drafter.modules():
        if isinstance(module, nn.Linear):
            weight = torch.empty(module.weight.shape).normal_(0.0, 0.02, generator=generator)
            module.weight.data.copy_(weight)
            if module.bias is not None:
                module.bias.data.zero_()
    drafter.to(target.device)
    if init != "random":
        _start_from_head(drafter, target)
    if init == "layers":
        for index, block in enumerate(_blocks(config, target.n_layers)):
            _copy_block(drafter, index, target, block)
            if config.remembers_target:
                _pass_through(drafter.injections[index], config, block)
    return drafter


def _check_rotation(drafter: Drafter, target: Target) -> None:
    """Some architectures turn neighbouring dimensions instead of halves: nothing but a trial tells."""
    layers = drafter.config.kv_needed
    positions = torch.tensor([[0, 1, 5, 90]], device=target.device)
    keys = torch.randn(1, len(layers), 1, 4, drafter.config.head_dim, generator=torch.Generator().manual_seed(0))
    keys = keys.to(target.device)
    theirs, rope = target.rotate_keys(keys, layers, positions), drafter.rope(positions)
    for n, layer in enumerate(layers):
        if not torch.allclose(theirs[:, n], rotate(keys[:, n], rope), atol=0.1):  # the target's tables may be bfloat16
            raise KvshotError(f"block {layer} of {target.name} turns its keys otherwise than a drafter does: its keys "
                              "and values cannot be reused yet, only its hidden states")


def _start_from_head(drafter: Drafter, target: Target) -> None:
    config, d = drafter.config, drafter.config.hidden_size
    if not hasattr(target.decoder, "norm") or target.config.model_type.startswith("gemma"):
        raise KvshotError(f"the final norm of {target.name} works otherwise than the drafter's: use init='random'")
    drafter.lm_head.weight.data.copy_(target.head_weight[drafter.vocab_ids])
    if config.hidden_layers[-1:] != (target.n_layers,):  # that state has passed the target's norm already
        drafter.norm.weight.data.copy_(target.decoder.norm.weight)
    if config.reads_hidden:
        drafter.fc.weight.data[:, -d:] += torch.eye(d, device=target.device)


def _blocks(config: DrafterConfig, n_layers: int) -> list[int]:
    """The target block that each draft layer copies: the one it reads, or evenly from first to last."""
    if config.per_layer:
        return list(config.kv_layers)
    if config.depth == 1:
        return [n_layers - 1]
    return [round(i * (n_layers - 1) / (config.depth - 1)) for i in range(config.depth)]


def _copy_block(drafter: Drafter, index: int, target: Target, block: int) -> None:
    """Every weight of a target block into a draft layer.

    The attention of a layer that also reads a state is twice as wide: the state's half gets the block's weights.
    """
    layer, source = drafter.layers[index], target.decoder.layers[block].state_dict()
    mine = layer.state_dict()
    into = {name: name for name in mine if not name.startswith(("cross_attn.", "merge.", "hidden_norm."))}
    into |= {f"cross_attn.{name[10:]}": name for name in into if name.startswith("self_attn.")
             and f"cross_attn.{name[10:]}" in mine}
    if set(into.values()) != set(source):
        odd = sorted(set(into.values()) ^ set(source))[0]
        raise KvshotError(f"blocks of {target.name} are of another kind than draft layers (weight {odd}): use "
                          "init='target'" + (", or qk_norm" if "_norm" in odd else ""))
    for name, theirs in into.items():
        _fill(mine[name], source[theirs], f"{name} of block {block}")
    if layer.takes_state:
        layer.hidden_norm.weight.data.copy_(source["input_layernorm.weight"])


def _fill(mine: Tensor, theirs: Tensor, what: str) -> None:
    if mine.shape == theirs.shape:
        mine.copy_(theirs)
    elif mine.ndim == 2 and mine.shape[0] == theirs.shape[0] and mine.shape[1] == 2 * theirs.shape[1]:
        mine[:, theirs.shape[1] :].copy_(theirs)
    else:
        raise KvshotError(f"{what} is {tuple(theirs.shape)}, the draft layer wants {tuple(mine.shape)}: use "
                          "init='target'")


def _pass_through(injection: Injection, config: DrafterConfig, block: int) -> None:
    """The identity on the target layer nearest to `block`: alone if no other is read, else on top of what is there."""
    layers = config.kv_layers[injection.first : injection.first + injection.count]
    if injection.kind == "concat":
        return
    if not isinstance(injection.k_proj, nn.Linear) or injection.kind == "hidden":
        raise KvshotError(f"injection {injection.kind!r} cannot start as the identity: use linear, or init='target'")
    nearest = min(range(len(layers)), key=lambda i: abs(layers[i] - block))
    for weight in (injection.k_proj.weight.data, injection.v_proj.weight.data):
        size = weight.shape[0]
        if len(layers) == 1:
            weight.zero_()
        weight[:, nearest * size : (nearest + 1) * size] += torch.eye(size, device=weight.device)


NEW_IN_HYBRIDS = ("injections.", "cross_attn.", "merge.")


def warm_start(drafter: Drafter, other: Drafter) -> list[str]:
    """Copy another drafter's weights: a hybrid or cross-only drafter from EAGLE-3's, or the same kind to go on.

    All of `other` must find its place. Returns the names of the weights that keep their own start. Raises KvshotError
    when the two do not share vocabulary or shapes, or the drafter has other new weights than a hybrid's.
    """
    for what in ("hidden_layers", "rope_theta", "norm_eps", "qk_norm", "norm_before_residual", "depth",
                 "rope_frequencies"):
        if getattr(drafter.config, what) != getattr(other.config, what):
            raise KvshotError(f"cannot start from that checkpoint: the two drafters differ in {what} "
                              f"({getattr(drafter.config, what)}, there {getattr(other.config, what)})")
    if not torch.equal(drafter.vocab_ids, other.vocab_ids):
        raise KvshotError("the two drafters have other draft vocabularies: train both on the same data")
    mine, theirs = drafter.state_dict(), other.state_dict()
    lost = sorted(name for name, t in theirs.items() if name not in mine or mine[name].shape != t.shape)
    new = sorted(set(mine) - set(theirs))
    strange = [name for name in new if not any(part in name for part in NEW_IN_HYBRIDS)]
    if lost or strange:
        raise KvshotError(f"cannot start from that checkpoint: weight {(lost + strange)[0]} belongs to one of the two "
                          "drafters only, or has another shape there")
    drafter.load_state_dict({**mine, **theirs})
    return new
