"""Files that are either whole or absent: write to a temporary name, then rename."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvshot.errors import KvshotError


def _is_full(err: Exception) -> bool:
    """Whether writing failed for want of space; torch and safetensors say so in errors of their own."""
    if isinstance(err, OSError) and err.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return any(word in str(err) for word in ("No space left", "PytorchStreamWriter failed", "inline_container"))


def _no_space(path: Path) -> KvshotError:
    return KvshotError(f"no space left while writing {path}: free some space and run again")


@contextmanager
def atomic_file(path: str | os.PathLike) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it replaces `path`, on failure it is removed.

    Raises KvshotError when the disk is full; other errors pass through unchanged.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
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

    An existing folder at `path` is replaced.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    shutil.rmtree(tmp, ignore_errors=True)
    tmp.mkdir()
    try:
        yield tmp
        if path.exists():
            old = path.with_name(f".{path.name}.{os.getpid()}.old")
            os.replace(path, old)
            os.replace(tmp, path)
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.replace(tmp, path)
    except Exception as err:
        if _is_full(err):
            raise _no_space(path) from err
        raise
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


def require_new(folder: str | os.PathLike) -> None:
    """Raise KvshotError where a command would replace what a user has there: `folder` may be absent or empty."""
    folder = Path(folder)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise KvshotError(f"{folder} exists already: name a new folder")


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
