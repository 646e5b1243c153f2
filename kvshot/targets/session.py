"""A target that reads one sequence bit by bit: its cache stays, only new tokens are computed."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from kvshot.errors import KvshotError
from kvshot.targets.hooks import keep_input
from kvshot.targets.target import Target


class _Layer(DynamicLayer):
    """Keys and values in a buffer with room: a new token is written, not the whole past copied."""

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.room = None
        if self.room is None or end > self.room[0].shape[-2]:
            grown = []
            for old, new in ((self.keys, key_states), (self.values, value_states)):
                buffer = new.new_empty(*new.shape[:-2], max(256, 2 * end), new.shape[-1])
                if start:
                    buffer[..., :start, :] = old
                grown.append(buffer)
            self.room = tuple(grown)
        self.room[0][..., start:end, :], self.room[1][..., start:end, :] = key_states, value_states
        self.show(end)
        return self.keys, self.values

    def show(self, length: int) -> None:
        self.keys, self.values = (buffer[..., :length, :] for buffer in self.room)

    def compact(self, start: int, kept: Tensor) -> None:
        """Entries `kept` move to positions start, start + 1, ...; what lay behind `start` otherwise is forgotten."""
        for buffer in self.room:
            buffer[..., start : start + len(kept), :] = buffer[..., kept, :]
        self.show(start + len(kept))


class Session:
    """One sequence under a target with full attention in every layer.

    length: tokens in the cache. After `read`, `hidden` [n, N, d] has the states of the N tokens just read.
    Raises KvshotError for a target with windows or linear attention: their caches forget, and cannot take back.
    """

    def __init__(self, target: Target, hidden_layers: Sequence[int] = ()) -> None:
        if set(target.layer_types) != {"full_attention"} or len(target.kv_layers) != target.n_layers:
            raise KvshotError(f"{target.name} has layers without full attention: lossless decoding needs a cache that "
                              "can drop rejected tokens")
        self.target, self.hidden_layers = target, tuple(hidden_layers)
        self.cache = Cache(layers=[_Layer() for _ in range(target.n_layers)])
        self.length, self.hidden = 0, None
        forward = inspect.signature(target.decoder.forward).parameters
        self._cache_name = "cache" if "cache" in forward else "past_key_values"  # renamed within transformers 5

    @torch.no_grad()
    def read(self, tokens: Tensor, depth: Tensor | None = None, sees: Tensor | None = None) -> Tensor:
        """Read N tokens behind the cache; the states after the final norm, [N, d].

        Without more they follow one another. For a tree: depth int64 [N], how far behind the cache each stands; sees
        bool [N, N]: which of the N each attends to, itself included (all attend to the cache).
        """
        n, start, decoder = len(tokens), self.length, self.target.decoder
        options = {self._cache_name: self.cache, "use_cache": True}
        if sees is not None:
            mask = torch.zeros(n, start + n, dtype=self.target.dtype, device=tokens.device)
            mask[:, start:].masked_fill_(~sees, torch.finfo(mask.dtype).min)
            options |= {"attention_mask": mask[None, None], "position_ids": (start + depth)[None]}
        states: dict[int, Tensor] = {}
        hooks = [decoder.layers[i].register_forward_pre_hook(keep_input(states, i), with_kwargs=True)
                 for i in set(self.hidden_layers) - {self.target.n_layers}]
        try:
            final = decoder(input_ids=tokens[None], **options).last_hidden_state
        finally:
            for hook in hooks:
                hook.remove()
        states[self.target.n_layers] = final
        self.hidden = torch.stack([states[i][0] for i in self.hidden_layers]) if self.hidden_layers else None
        self._start, self.length = start, start + n
        return final[0]

    def keep(self, which: Sequence[int]) -> None:
        """Of the tokens read last, keep these, in this order (each the next position), and forget the others."""
        if list(which) == list(range(self.length - self._start)):
            return
        kept = torch.tensor(which, dtype=torch.int64, device=self.target.device)
        for layer in self.cache.layers:
            layer.compact(self._start, self._start + kept)
        if self.hidden is not None:
            self.hidden = self.hidden[:, kept]
        self.length = self._start + len(which)

    def keys_values(self, layers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Keys (as cached) and values of some layers for the tokens read last and kept: [1, L, H_kv, M, D]."""
        cut = slice(self._start, self.length)
        both = [(self.cache.layers[j].keys[..., cut, :], self.cache.layers[j].values[..., cut, :]) for j in layers]
        return torch.stack([k for k, _ in both], 1), torch.stack([v for _, v in both], 1)
