"""A drafter on disk: `config.json` says what it is and for which target, `model.safetensors` holds the weights."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, JsonValue
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from kvshot.data import DraftVocab
from kvshot.drafters.config import DrafterConfig, checked
from kvshot.drafters.drafter import Drafter
from kvshot.errors import KvshotError
from kvshot.fileio import atomic_folder
from kvshot.targets import Target

FORMAT = 1


class _About(BaseModel):
    """config.json. kvshot: the drafter's configuration; target: name and weights_sha256."""

    model_config = ConfigDict(extra="forbid")

    format: int
    kvshot: dict[str, JsonValue]
    target: dict[Literal["name", "weights_sha256"], str]
    vocab_sha256: str


def save_drafter(folder: str | os.PathLike, drafter: Drafter, vocab: DraftVocab, target: Target, *,
                 dtype: torch.dtype | None = None) -> None:
    """Write a checkpoint folder; `dtype` casts the weights (bfloat16 for publication)."""
    tensors = {name: t.detach().to("cpu", dtype or t.dtype).contiguous() for name, t in drafter.state_dict().items()}
    tensors |= {name: t.cpu().contiguous() for name, t in vocab.state().items()}
    about = _About(format=FORMAT, kvshot=drafter.config.model_dump(mode="json"), vocab_sha256=vocab.sha256,
                   target={"name": target.name, "weights_sha256": target.weights_sha256})
    with atomic_folder(folder) as tmp:
        save_file(tensors, tmp / "model.safetensors")
        (tmp / "config.json").write_text(about.model_dump_json(indent=1) + "\n")


def load_drafter(folder: str | os.PathLike, target: Target) -> tuple[Drafter, DraftVocab]:
    """The drafter (float32, eval mode, on the target's device) and its vocabulary.

    Raises KvshotError when the folder is no checkpoint, is damaged, has missing, extra or misshapen tensors, or was
    trained for another target or vocabulary.
    """
    about, tensors = _read(Path(folder))
    if about.target["weights_sha256"] != target.weights_sha256:
        raise KvshotError(f"{folder} was trained for target {about.target['name']!r} with other weights than "
                          f"{target.name!r}: load that target, or train a drafter for this one")
    config = checked(DrafterConfig, about.kvshot)
    vocab = DraftVocab.from_state({k: tensors.pop(k) for k in ("d2t", "t2d") if k in tensors},
                                  vocab_size=config.target_vocab_size, size=config.draft_vocab_size)
    if vocab.sha256 != about.vocab_sha256:
        raise KvshotError(f"{folder} holds another draft vocabulary than its config.json names: fetch it again")
    drafter = Drafter(config, target.embedding_weight, vocab.ids.to(target.device))
    load_strictly(drafter, tensors, Path(folder))
    return drafter.to(target.device).eval(), vocab


def target_of(folder: str | os.PathLike) -> str:
    """The name of the target that a checkpoint is for. Raises KvshotError as `load_drafter`."""
    return _read(Path(folder))[0].target["name"]


def _read(folder: Path) -> tuple[_About, dict]:
    missing = [name for name in ("config.json", "model.safetensors") if not (folder / name).is_file()]
    if missing:
        raise KvshotError(f"{folder} is no drafter checkpoint ({missing[0]} is missing): give the folder that training "
                          "wrote")
    try:
        about = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tensors = load_file(folder / "model.safetensors")
    except (OSError, ValueError, SafetensorError) as err:
        raise KvshotError(f"{folder} is damaged ({err}): train or fetch it again") from err
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise KvshotError(f"{folder}/config.json does not describe a kvshot drafter of format {FORMAT}: "
                          "give a checkpoint that this version wrote")
    return checked(_About, about), tensors


def load_strictly(drafter: Drafter, tensors: dict, folder: Path) -> None:
    """Raises KvshotError unless these are exactly the drafter's tensors."""
    want = {name: tuple(t.shape) for name, t in drafter.state_dict().items()}
    have = {name: tuple(t.shape) for name, t in tensors.items()}
    wrong = sorted(set(want.items()) ^ set(have.items()))
    if wrong:
        name = wrong[0][0]
        raise KvshotError(f"{folder}: tensor {name} is {have.get(name, 'missing')} in the file and "
                          f"{want.get(name, 'unknown')} in the configuration: the two do not belong together")
    drafter.load_state_dict({name: t.float() for name, t in tensors.items()})
