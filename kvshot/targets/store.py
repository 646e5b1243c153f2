"""What the target gave for a whole data set, captured once to disk and read back memory-mapped.

A folder of safetensors shards and, written last, `index.json`. In a shard the sequences follow one another on
the first axis, so that one sequence is a contiguous slice. The folder belongs to one content key: target
weights, tokens and masks, layers, dtypes.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvshot.data.template import examples_sha256
from kvshot.errors import KvshotError
from kvshot.fileio import atomic_file, require_space
from kvshot.products import fast_products
from kvshot.progress import progress
from kvshot.targets.hooks import Layers, capture, resolve_layers
from kvshot.targets.target import Target

FORMAT = 2
SHARD_BYTES = 256_000_000
INDEX = "index.json"


class Sample(Protocol):
    """A tokenised conversation: ids int [T], loss_mask bool [T], as numpy arrays."""

    ids: np.ndarray
    loss_mask: np.ndarray


class FeatureStore:
    """Sequence i of the data set as a dict of memory-mapped tensors (views; copy before writing).

    ids int64 [T], loss_mask bool [T], hidden [n, T, d], keys (as cached, after RoPE) and values
    [L_s, H_kv, T, D], final [T, d], argmax int64 [T]: the target's own choice of the token after each position.
    """

    def __init__(self, folder: str | os.PathLike) -> None:
        """Read the index of a finished store. Raises KvshotError when unfinished or damaged."""
        self.folder = Path(folder)
        if not (self.folder / INDEX).exists():
            raise KvshotError(f"{self.folder} is no finished feature store: run the capture to fill it")
        self.meta = _read_index(self.folder)
        self.lengths: list[int] = self.meta["lengths"]
        self._shards: dict[int, dict[str, Tensor]] = {}
        self._where = {}
        for number, members in enumerate(_plan(self.lengths, self.meta["shard_tokens"])):
            start = 0
            for i in members:
                self._where[i] = number, start
                start += self.lengths[i]
            path = _shard_path(self.folder, number)
            if not path.exists() or path.stat().st_size != self.meta["shard_sizes"][number]:
                raise KvshotError(f"{path} is missing or damaged: delete {self.folder} and capture again")

    @classmethod
    def build(
        cls, folder: str | os.PathLike, target: Target, examples: Sequence[Sample], *,
        hidden_layers: Layers | None = None, kv_layers: Layers | None = None,
        dtype: torch.dtype = torch.bfloat16, batch_tokens: int = 4096, quiet: bool = False,
    ) -> FeatureStore:
        """Capture `examples` into `folder` and open it; layers as for `capture`, stored in `dtype`.

        batch_tokens: size of one forward pass, padding included. A store of the same content is opened as it
        is; an interrupted one is resumed at its missing shards. Raises KvshotError when the folder holds a
        store of something else, the disk is too small, or an example is empty.
        """
        folder = Path(folder)
        key = _describe(target, examples, hidden_layers, kv_layers, dtype)
        if (folder / INDEX).exists():
            return cls.open(folder, target=target, examples=examples, hidden_layers=hidden_layers,
                            kv_layers=kv_layers, dtype=dtype)
        lengths = [len(example.ids) for example in examples]
        per_token = _token_bytes(target, key, dtype)
        shard_tokens = max(1, SHARD_BYTES // per_token)
        plan = _plan(lengths, shard_tokens)
        missing = [n for n in range(len(plan)) if not _finished(_shard_path(folder, n), key["key"])]
        todo = sum(lengths[i] for n in missing for i in plan[n])
        if not quiet:
            print(f"feature store {folder}: {len(lengths)} sequences, {sum(lengths)} tokens of {per_token} "
                  f"bytes, {sum(lengths) * per_token / 1e9:.2f} GB; to do: {todo * per_token / 1e9:.2f} GB",
                  file=sys.stderr, flush=True)
        require_space(folder, todo * per_token, f"the feature store in {folder}")
        with progress("capture (tokens)", todo, quiet=quiet) as advance:
            for n in missing:
                tensors = _capture_shard(target, examples, plan[n], key, dtype, batch_tokens, advance)
                with atomic_file(_shard_path(folder, n)) as part:
                    save_file(tensors, part, metadata={"key": key["key"]})
        sizes = [_shard_path(folder, n).stat().st_size for n in range(len(plan))]
        index = {**key, "lengths": lengths, "shard_tokens": shard_tokens, "shard_sizes": sizes}
        with atomic_file(folder / INDEX) as part:
            part.write_text(json.dumps(index), encoding="utf-8")
        return cls(folder)

    @classmethod
    def open(
        cls, folder: str | os.PathLike, *, target: Target, examples: Sequence[Sample],
        hidden_layers: Layers | None = None, kv_layers: Layers | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> FeatureStore:
        """Open a finished store; KvshotError naming what differs unless it holds exactly this content."""
        store = cls(folder)
        wanted = _describe(target, examples, hidden_layers, kv_layers, dtype)
        for field, value in wanted.items():
            if field != "key" and store.meta.get(field) != value:
                raise KvshotError(f"feature store {folder} has {field} {store.meta.get(field)}, not {value}: "
                                  "use another folder, or delete this one and capture again")
        return store

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def n_tokens(self) -> int:
        return sum(self.lengths)

    def rows(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        """Several sequences."""
        return [self[i] for i in indices]

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        if not 0 <= i < len(self):
            raise IndexError(f"sequence {i} of {len(self)}")
        number, start = self._where[i]
        if number not in self._shards:
            path = _shard_path(self.folder, number)
            try:
                with safe_open(path, "pt") as shard:
                    if (shard.metadata() or {}).get("key") != self.meta["key"]:
                        raise KvshotError(f"{path} is of another store: delete {self.folder} and capture again")
                    self._shards[number] = {name: shard.get_tensor(name) for name in shard.keys()}
            except SafetensorError as err:
                raise KvshotError(f"{path} is damaged: delete {self.folder} and capture again") from err
        return _sequence(self._shards[number], start, start + self.lengths[i])


class OnlineFeatures:
    """The rows of a `FeatureStore` without the disk: the target runs over a batch when it is asked for.

    For data whose features would fill a disk array. Stored or online, the same sequences train the same drafter, up to
    the rounding of another batch composition.
    """

    def __init__(
        self, target: Target, examples: Sequence[Sample], *, hidden_layers: Layers | None = None,
        kv_layers: Layers | None = None, dtype: torch.dtype = torch.bfloat16, batch_tokens: int = 4096,
    ) -> None:
        """Layers, dtype, batch_tokens and errors as for `FeatureStore.build`."""
        self.target, self.examples, self.dtype, self.batch_tokens = target, examples, dtype, batch_tokens
        self.meta = _describe(target, examples, hidden_layers, kv_layers, dtype)
        self.lengths: list[int] = [len(example.ids) for example in examples]

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def n_tokens(self) -> int:
        return sum(self.lengths)

    def rows(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        """Sequences `indices`, in that order, from one pass of the target or a few."""
        longest_first = sorted(set(indices), key=lambda i: -self.lengths[i])
        shard = _capture_shard(self.target, self.examples, longest_first, self.meta, self.dtype, self.batch_tokens,
                               lambda n: None, self.target.device)
        found, start = {}, 0
        for i in longest_first:
            found[i] = _sequence(shard, start, start + self.lengths[i])
            start += self.lengths[i]
        return [found[i] for i in indices]


Features = FeatureStore | OnlineFeatures


def _sequence(shard: dict[str, Tensor], start: int, end: int) -> dict[str, Tensor]:
    """Tokens start..end-1 of a shard as the tensors of one sequence."""
    rows = {name: tensor[start:end] for name, tensor in shard.items()}
    return {
        "ids": rows["ids"], "loss_mask": rows["loss_mask"], "final": rows["final"], "argmax": rows["argmax"],
        "hidden": rows["hidden"].transpose(0, 1),
        "keys": rows["keys"].permute(1, 2, 0, 3), "values": rows["values"].permute(1, 2, 0, 3),
    }


def _read_index(folder: Path) -> dict:
    """Raises KvshotError unless everything is there that a store is read by."""
    try:
        meta = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        if meta["format"] != FORMAT:
            raise KvshotError(f"feature store {folder} has format {meta['format']}, not {FORMAT}: "
                              "capture again in another folder")
        if len(meta["shard_sizes"]) != len(_plan(meta["lengths"], meta["shard_tokens"])):
            raise ValueError("not the shards of these lengths")
        for field in ("key", "hidden_layers", "kv_layers"):
            meta[field]
        return meta
    except (ValueError, KeyError, TypeError) as err:
        raise KvshotError(f"{folder / INDEX} is damaged: delete {folder} and capture again") from err


def _shard_path(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.safetensors"


def _finished(path: Path, key: str) -> bool:
    """Whether a shard of exactly this content lies there (shards appear under their name only when whole)."""
    try:
        with safe_open(path, "pt") as shard:
            return (shard.metadata() or {}).get("key") == key
    except (OSError, SafetensorError):
        return False


def _plan(lengths: Sequence[int], shard_tokens: int) -> list[list[int]]:
    """Members of each shard, sequences from long to short: batches pad little, the hungriest comes first."""
    shards, room = [], 0
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if not shards or lengths[i] > room:
            shards.append([])
            room = shard_tokens
        shards[-1].append(i)
        room -= lengths[i]
    return shards


def _describe(
    target: Target, examples: Sequence[Sample], hidden_layers: Layers | None, kv_layers: Layers | None,
    dtype: torch.dtype,
) -> dict:
    """The content of a store, field by field, and the sha256 over all of them as `key`."""
    hidden_layers, kv_layers = resolve_layers(target, hidden_layers, kv_layers)
    if not len(examples):
        raise KvshotError("no examples to capture: check the data and its filters")
    for i, example in enumerate(examples):
        ids, mask = np.shape(example.ids), np.shape(example.loss_mask)
        if len(ids) != 1 or ids[0] == 0 or ids != mask:
            raise KvshotError(f"example {i} has ids {ids} and loss mask {mask}: encode it again")
    fields = {
        "format": FORMAT, "weights_sha256": target.weights_sha256, "tokens_sha256": examples_sha256(examples),
        "hidden_layers": list(hidden_layers), "kv_layers": list(kv_layers),
        "computed_in": str(target.dtype), "stored_in": str(dtype),
    }
    return {**fields, "key": hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()}


def _token_bytes(target: Target, key: dict, dtype: torch.dtype) -> int:
    states = (len(key["hidden_layers"]) + 1) * target.hidden_size
    cached = 2 * len(key["kv_layers"]) * target.n_kv_heads * target.head_dim
    return (states + cached) * dtype.itemsize + 17  # two int64 ids and a mask byte


def token_batches(lengths: list[int], batch_tokens: int) -> Iterator[slice]:
    """Runs of sequences (lengths falling) whose padded size stays within `batch_tokens`."""
    start = 0
    while start < len(lengths):
        size = max(1, batch_tokens // lengths[start])
        yield slice(start, start + size)
        start += size


def _choices(target: Target, final: Tensor, rows: int = 512) -> Tensor:
    """The target's argmax after each final state [N, d] -> int64 [N], a few rows at a time: logits are large."""
    head = target.model.get_output_embeddings()  # scale and cap keep the order, so the bare product will do
    return torch.cat([_argmax(head(part.to(head.weight.dtype))) for part in final.split(rows)]).cpu()


def _argmax(x: Tensor, width: int = 64) -> Tensor:
    """x.argmax(-1) of [N, V], the lowest index among equals; in chunks, which a CPU does several times faster."""
    if x.shape[-1] % width:
        return x.argmax(-1)
    chunks = x.view(len(x), -1, width)
    chunk = chunks.amax(-1).argmax(-1)
    return chunk * width + chunks[torch.arange(len(x), device=x.device), chunk].argmax(-1)


def _capture_shard(
    target: Target, examples: Sequence[Sample], members: list[int], key: dict, dtype: torch.dtype,
    batch_tokens: int, advance, device: torch.device | str = "cpu",
) -> dict[str, Tensor]:
    """All tensors of one shard, tokens on the first axis; ids and masks on the CPU, the rest on `device`."""
    hidden_layers, kv_layers = tuple(key["hidden_layers"]), tuple(key["kv_layers"])
    lengths = [len(examples[i].ids) for i in members]
    total, kv_shape = sum(lengths), (len(kv_layers), target.n_kv_heads, target.head_dim)
    shard = {
        "ids": torch.from_numpy(np.concatenate([examples[i].ids for i in members]).astype(np.int64)),
        "loss_mask": torch.from_numpy(np.concatenate([examples[i].loss_mask for i in members]).astype(bool)),
        "hidden": torch.empty(total, len(hidden_layers), target.hidden_size, dtype=dtype, device=device),
        "keys": torch.empty(total, *kv_shape, dtype=dtype, device=device),
        "values": torch.empty(total, *kv_shape, dtype=dtype, device=device),
        "final": torch.empty(total, target.hidden_size, dtype=dtype, device=device),
        "argmax": torch.empty(total, dtype=torch.int64, device=device),
    }
    end = 0
    for batch in token_batches(lengths, batch_tokens):
        sizes = torch.tensor(lengths[batch])
        mask = torch.arange(int(sizes.max())) < sizes[:, None]
        start, end = end, end + int(sizes.sum())
        ids = torch.zeros(mask.shape, dtype=torch.int64)
        ids[mask] = shard["ids"][start:end]
        with fast_products(target.device, target.dtype):
            context = capture(target, ids, mask, hidden_layers=hidden_layers, kv_layers=kv_layers)
            argmax = _choices(target, context.final[context.mask])
        mask = context.mask
        shard["hidden"][start:end] = context.hidden.transpose(1, 2)[mask]
        shard["keys"][start:end] = context.keys.permute(0, 3, 1, 2, 4)[mask]
        shard["values"][start:end] = context.values.permute(0, 3, 1, 2, 4)[mask]
        shard["final"][start:end] = context.final[mask]
        shard["argmax"][start:end] = argmax
        advance(end - start)
    _require_finite(shard, target)
    return shard


def _require_finite(shard: dict[str, Tensor], target: Target) -> None:
    """Raises KvshotError for inf or NaN: a drafter that trained on them would be lost many steps later."""
    names = [name for name in ("hidden", "keys", "values", "final") if shard[name].numel()]
    # the extremes: they keep NaN, and take a fortieth of the time of isfinite on all
    extremes = torch.stack([torch.stack(shard[name].aminmax()) for name in names])
    for name, finite in zip(names, extremes.isfinite().all(-1).tolist(), strict=True):
        if not finite:
            dtype = str(target.dtype).removeprefix("torch.")
            raise KvshotError(f"{target.name} in {dtype} gives inf or NaN ({name}): use bfloat16 or float32, which "
                              "hold larger numbers than float16, or check its weights if it does so there")
