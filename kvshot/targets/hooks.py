"""What a target gives in one forward pass: hidden states, keys and values, the final state.

Layer indices are Hugging Face's: hidden state i has passed through i decoder blocks; the keys and values of
layer j are those that block j (0-based) puts into its cache.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvshot.errors import KvshotError
from kvshot.targets.target import Target

Layers = tuple[int, ...]


@dataclass(eq=False)
class TargetContext:
    """What the target gave for a right-padded batch. Entries where `mask` is False hold no meaning.

    ids, positions: int64 [B, T]; mask: bool [B, T]; hidden: [B, n, T, d]; keys (as cached: after k_norm and
    RoPE) and values: [B, L_s, H_kv, T, D]; final: [B, T, d], after the final norm (what the head reads); queries (after
    q_norm and RoPE): [B, L_s, H, T, D], where they were asked for.
    """

    ids: Tensor
    mask: Tensor
    positions: Tensor
    hidden: Tensor
    hidden_layers: Layers
    keys: Tensor
    values: Tensor
    kv_layers: Layers
    final: Tensor
    target: Target
    queries: Tensor | None = None

    def keys_unrotated(self) -> Tensor:
        """The keys with RoPE taken off, [B, L_s, H_kv, T, D]."""
        return self.target.rotate_keys(self.keys, self.kv_layers, self.positions, undo=True)


@torch.no_grad()
def capture(
    target: Target, ids: Tensor, mask: Tensor | None = None, *,
    hidden_layers: Layers | None = None, kv_layers: Layers | None = None, queries: bool = False,
) -> TargetContext:
    """One forward pass of the target over ids [B, T], right-padded where mask [B, T] is False; no logits.

    hidden_layers: 0..L (None: the target's default; (): none); L is the state after the final norm, as in
    Hugging Face. kv_layers: block ids 0..L-1 (likewise). queries: those of `kv_layers`, too. Raises KvshotError for
    layers that do not exist or have no full keys and values, token ids outside the vocabulary, and a mask that is not
    right-padded.
    """
    ids = torch.as_tensor(ids, dtype=torch.int64, device=target.device)
    mask = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.to(target.device, torch.bool)
    hidden_layers, kv_layers = resolve_layers(target, hidden_layers, kv_layers)
    _check_batch(target, ids, mask)
    states, keys, values, asked = {}, {}, {}, {}
    with ExitStack() as stack:
        for i in set(hidden_layers) - {target.n_layers}:
            block = target.decoder.layers[i]
            hook = block.register_forward_pre_hook(keep_input(states, i), with_kwargs=True)
            stack.callback(hook.remove)
        stack.enter_context(_recorded_attention(target, kv_layers, keys, values, asked if queries else None))
        # No attention mask: under causal attention right padding cannot reach a real token, and the fast
        # kernels take none.
        final = target.decoder(input_ids=ids, use_cache=False).last_hidden_state
    states[target.n_layers] = final
    if missing := [j for j in kv_layers if j not in keys]:
        raise KvshotError(f"layers {missing} of {target.name} gave no keys: its attention bypasses "
                          "transformers' attention registry; capture hidden states only (kv_layers=())")
    batch, length = ids.shape
    no_kv = final.new_zeros(batch, 0, target.n_kv_heads, length, target.head_dim)
    return TargetContext(
        ids=ids, mask=mask, positions=torch.arange(length, device=ids.device).expand_as(ids),
        hidden=_stack(states, hidden_layers, final.new_zeros(batch, 0, length, target.hidden_size)),
        hidden_layers=hidden_layers, final=final, target=target, kv_layers=kv_layers,
        keys=_stack(keys, kv_layers, no_kv), values=_stack(values, kv_layers, no_kv),
        queries=_stack(asked, kv_layers, no_kv) if queries else None,
    )


def resolve_layers(
    target: Target, hidden_layers: Layers | None, kv_layers: Layers | None
) -> tuple[Layers, Layers]:
    """The defaults filled in. Raises KvshotError naming the usable layers for any that the target lacks."""
    hidden = target.default_hidden_layers if hidden_layers is None else tuple(hidden_layers)
    layers = target.default_kv_layers if kv_layers is None else tuple(kv_layers)
    if bad := [i for i in hidden if not 0 <= i <= target.n_layers]:
        raise KvshotError(f"target {target.name} has no hidden layers {bad}: use 0 to {target.n_layers}")
    if bad := [j for j in layers if j not in target.kv_layers]:
        kinds = ", ".join(f"{j} ({_kind(target, j)})" for j in bad)
        usable = ", ".join(map(str, target.kv_layers)) or "none"
        raise KvshotError(f"target {target.name} has no full keys and values in layers {kinds}: use {usable}")
    return hidden, layers


def _kind(target: Target, layer: int) -> str:
    if not 0 <= layer < target.n_layers:
        return "absent"
    kind = target.layer_types[layer]
    return kind if "linear" in kind else f"{kind}, shared or compressed"


def _check_batch(target: Target, ids: Tensor, mask: Tensor) -> None:
    if ids.ndim != 2 or ids.shape != mask.shape or ids.numel() == 0:
        shapes = f"ids {tuple(ids.shape)} and mask {tuple(mask.shape)}"
        raise KvshotError(f"{shapes} do not fit: both must be [batch, length] and not empty")
    if bool((~mask[:, :-1] & mask[:, 1:]).any()):
        raise KvshotError("the mask has gaps or left padding: pad sequences on the right")
    if int(ids.min()) < 0 or int(ids.max()) >= target.embedding_weight.shape[0]:
        raise KvshotError(f"token ids outside the vocabulary of {target.name}: encode with its tokenizer")


def keep_input(states: dict[int, Tensor], i: int) -> Callable:
    """A pre-hook (with_kwargs) for a decoder block: what enters it, [B, T, d], becomes `states[i]`."""
    def hook(_module: nn.Module, args: tuple, kwargs: dict) -> None:
        states[i] = args[0] if args else kwargs["hidden_states"]

    return hook


def _stack(tensors: dict[int, Tensor], layers: Layers, empty: Tensor) -> Tensor:
    if not layers:
        return empty
    return torch.stack([tensors[i].to(empty.device) for i in layers], dim=1)  # blocks may be spread out


@contextmanager
def _recorded_attention(
    target: Target, layers: Layers, keys: dict[int, Tensor], values: dict[int, Tensor],
    queries: dict[int, Tensor] | None,
) -> Iterator[None]:
    """Meanwhile the attention function in transformers' registry also notes the keys and values it is given.

    Every architecture hands that function its keys after k_norm and RoPE; without a cache they span the whole
    sequence whatever the window. So one wrapper serves all, and no cache class is involved.
    """
    if not layers:
        yield
        return
    wanted = {id(target.attention(j)): j for j in layers}
    name = target.config._attn_implementation
    real = ALL_ATTENTION_FUNCTIONS.get(name)

    def record(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args, **kwargs):
        if (layer := wanted.get(id(module))) is not None:
            keys[layer], values[layer] = key, value
            if queries is not None:
                queries[layer] = query
        # "eager" is not in the registry: each architecture brings its own
        attend = real or sys.modules[type(module).__module__].eager_attention_forward
        return attend(module, query, key, value, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS[name] = record
    try:
        yield
    finally:
        if real is None:
            del ALL_ATTENTION_FUNCTIONS[name]
        else:
            ALL_ATTENTION_FUNCTIONS[name] = real
