"""Files that are either whole or absent: write to a temporary name, then rename."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvshot.errors import KvshotError


def _is_full(err: Exception) -> bool:
    """Whether writing failed for want of space; torch and safetensors say so in errors of their own."""
    if isinstance(err, OSError) and err.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return any(word in str(err) for word in ("No space left", "PytorchStreamWriter failed", "inline_container"))


def _beside(path: Path, ending: str) -> Path:
    """A hidden name that nobody else takes: containers that share a folder also share process ids."""
    return path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.{ending}")


def _no_space(path: Path) -> KvshotError:
    return KvshotError(f"no space left while writing {path}: free some space and run again")


@contextmanager
def atomic_file(path: str | os.PathLike) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it replaces `path`, on failure it is removed.

    Raises KvshotError when the disk is full; other errors pass through unchanged.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = _beside(path, "tmp")
    try:
        yield tmp
        os.replace(tmp, path)
    except Exception as err:
        if _is_full(err):
            raise _no_space(path) from err
        raise
    finally:
        tmp.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: str | os.PathLike) -> Iterator[Path]:
    """The same for a folder: it appears under `path` only when the block ends well.

    An existing folder at `path` is replaced; `restore_folder` brings it back should the process be killed amid that.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = _beside(path, "tmp")
    tmp.mkdir()
    try:
        yield tmp
        if path.exists():
            _swap(path, tmp)
        else:
            os.replace(tmp, path)
    except Exception as err:
        if _is_full(err):
            raise _no_space(path) from err
        raise
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


def _swap(path: Path, tmp: Path) -> None:
    """A folder cannot be renamed over another that is not empty: the old one has to step aside."""
    old = _beside(path, "old")
    try:
        os.replace(path, old)
        os.replace(tmp, path)
    except BaseException:
        if old.exists() and not path.exists():
            os.replace(old, path)
        raise
    for stale in _aside(path):  # also of a process that was killed here
        shutil.rmtree(stale, ignore_errors=True)


def _aside(path: Path) -> list[Path]:
    """What stepped aside for `path`."""
    name = re.compile(rf"\.{re.escape(path.name)}\.\d+(\.[0-9a-f]+)?\.old")
    return [p for p in path.parent.glob(".*.old") if name.fullmatch(p.name)]


def restore_folder(path: str | os.PathLike) -> None:
    """Put back the folder that a killed `atomic_folder` had moved aside, if there is none at `path`."""
    path = Path(path)
    if path.exists():
        return
    with suppress(OSError):  # another process has put it back
        if aside := _aside(path):
            os.replace(max(aside, key=lambda p: p.stat().st_ctime_ns), path)  # when it was moved aside


def require_new(folder: str | os.PathLike) -> None:
    """Raise KvshotError where a command would replace what a user has there: `folder` may be absent or empty."""
    folder = Path(folder)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise KvshotError(f"{folder} exists already: name a new folder")


def require_folder(folder: str | os.PathLike) -> None:
    """Raise KvshotError where `folder` cannot be made: a file has its name, or that of a folder above it."""
    there = next((p for p in (Path(folder), *Path(folder).parents) if p.exists()), None)
    if there is not None and not there.is_dir():
        raise KvshotError(f"{there} is a file: name a folder")


def sha256_file(path: str | os.PathLike) -> str:
    """Hex sha256 of a file's bytes."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def require_space(folder: str | os.PathLike, n_bytes: int, what: str) -> None:
    """Raise KvshotError before writing `n_bytes` to a disk that cannot take them."""
    folder = Path(folder)
    probe = next(p for p in (folder, *folder.resolve().parents) if p.exists())
    free = shutil.disk_usage(probe).free
    if n_bytes > free:
        raise KvshotError(
            f"{what} needs {n_bytes / 1e9:.2f} GB but {probe} has {free / 1e9:.2f} GB free: "
            "free some space or choose another folder"
        )


def cache_dir() -> Path:
    """Where targets and features are kept: `KVSHOT_CACHE`, else the platform's user cache."""
    import platformdirs

    return Path(os.environ.get("KVSHOT_CACHE") or platformdirs.user_cache_dir("kvshot", appauthor=False))


@contextmanager
def exclusive(folder: str | os.PathLike) -> Iterator[None]:
    """Nobody else on this machine may be in `folder` meanwhile; KvshotError when somebody is.

    The lock goes with the process, however it ends. Where the system has no such locks nothing is checked.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as err:
            raise KvshotError(f"another process is at work in {folder}: wait for it, or stop it (a campaign that was "
                              "killed may have left its run behind)") from err
        yield
