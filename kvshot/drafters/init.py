"""Where a drafter starts: from chance, from the target's head, from the target's own layers, from another drafter."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from kvshot.data import DraftVocab
from kvshot.drafters.config import DrafterConfig
from kvshot.drafters.drafter import Drafter
from kvshot.drafters.injection import Injection
from kvshot.drafters.layers import DraftLayer, rotate
from kvshot.errors import KvshotError
from kvshot.targets import Target

Init = Literal["random", "target", "layers"]


def new_drafter(target: Target, config: DrafterConfig, vocab: DraftVocab, *, seed: int, init: Init = "target"
                ) -> Drafter:
    """A fresh drafter: normal(0, 0.02) matrices.

    With init "target", final norm and draft head are the target's (pruned to the draft vocabulary), and the fusion
    passes the highest hidden state through, so that the head reads from the first step what it was made to read. With
    "layers" the blocks are copies of the target's, too, and injections begin as the identity on one target layer.
    Raises KvshotError for a target whose norm, head or blocks compute otherwise than the drafter's with the same
    weights, or whose keys are turned otherwise than the drafter turns them.
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


@torch.no_grad()
def _start_from_head(drafter: Drafter, target: Target) -> None:
    """A trial, as above: no class name tells how a norm or a head computes."""
    config, d = drafter.config, drafter.config.hidden_size
    drafter.lm_head.weight.data.copy_(target.head_weight[drafter.vocab_ids])
    ids = drafter.vocab_ids[:256]
    # states along the head's own rows: their scores are large, so that a cap on scores shows
    x = torch.cat([_trial(d, target), target.head_weight[ids[:8]]])
    if config.hidden_layers[-1:] == (target.n_layers,):  # that state has passed the target's norm already
        ours, theirs = drafter.lm_head(x.float()), target.logits(x, ids)
    else:
        _copy_norm(drafter, target, x)
        ours, theirs = drafter.logits(x.float()), target.logits(target.decoder.norm(x), ids)
    if not _close(ours[:, : len(ids)], theirs):
        raise KvshotError(f"{target.name} scales, caps or shifts the scores of its head, which a drafter does not: use "
                          "init='random'")
    if config.reads_hidden:
        drafter.fc.weight.data[:, -d:] += torch.eye(d, device=target.device)


def _copy_norm(drafter: Drafter, target: Target, x: Tensor) -> None:
    norm, mine = getattr(target.decoder, "norm", None), drafter.norm
    weight = getattr(norm, "weight", None)
    if weight is not None and weight.shape == mine.weight.shape:
        for candidate in (weight, 1 + weight.float()):  # Gemma and Qwen3-Next store it less one
            mine.weight.data.copy_(candidate)
            if _same_norm(mine, norm, x):
                return
    raise KvshotError(f"the final norm of {target.name} works otherwise than the drafter's: use init='random'")


def _trial(d: int, target: Target) -> Tensor:
    """States [8, d] whose mean is not zero: a norm that takes it off shows."""
    x = 1 + torch.randn(8, d, generator=torch.Generator().manual_seed(0))
    return x.to(target.device, target.dtype)


def _same_norm(mine: nn.Module, theirs: nn.Module, x: Tensor) -> bool:
    return torch.allclose(mine(x.float()), theirs(x).float(), rtol=0.02, atol=1e-3)  # the target may be in bfloat16


def _close(ours: Tensor, theirs: Tensor) -> bool:
    """Equal but for bfloat16 sums: what differs in kind differs by more than 4 % of the largest."""
    return float((ours - theirs.float()).abs().max()) <= 0.04 * float(theirs.abs().max())


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
    _check_block(layer, target, block)
    if layer.takes_state:
        layer.hidden_norm.weight.data.copy_(source["input_layernorm.weight"])


@torch.no_grad()
def _check_block(layer: DraftLayer, target: Target, block: int) -> None:
    """With the same weights, what a draft layer does beside attention must be what the block does."""
    theirs, x = target.decoder.layers[block], _trial(layer.input_layernorm.weight.shape[0], target)
    width = target.head_dim
    same = (all(_same_norm(layer.get_submodule(name), theirs.get_submodule(name), x)
                for name in ("input_layernorm", "post_attention_layernorm"))
            and _close(layer.feed_forward(x.float()), theirs.mlp(x))
            and abs(getattr(theirs.self_attn, "scaling", width**-0.5) * width**0.5 - 1) < 1e-3
            and getattr(theirs, "residual_multiplier", 1.0) == 1.0)
    if not same:
        raise KvshotError(f"block {block} of {target.name} computes otherwise than a draft layer with its weights "
                          "(norms, activation or scalings): use init='target'")


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
