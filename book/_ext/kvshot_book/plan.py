"""Which notebooks the book shows, and when an executed copy is out of date."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
from dataclasses import dataclass
from pathlib import Path

import nbformat
import yaml

from kvshot.errors import KvshotError
from kvshot.fileio import sha256_file

ROOT = Path(__file__).resolve().parents[3]
STAMP = "kvshot"  # where an executed copy keeps the digest of its inputs
ALL_RESULTS = "results/**/*"
# A new version of one of these can change numbers or pictures.
WATCHED = ("torch", "transformers", "numpy", "scipy", "pandas", "matplotlib", "seaborn")


@dataclass(frozen=True)
class Page:
    """One entry of `notebooks/book.yml`.

    `parameters` are injected by Papermill after the cell tagged `parameters`; `reads` are glob patterns,
    relative to the repository, of the files whose content the notebook shows.
    """

    source: Path
    parameters: dict
    reads: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.source.stem


def load_plan(root: Path = ROOT) -> list[Page]:
    """The pages in the order of `notebooks/book.yml`; KvshotError for an entry that cannot be meant."""
    path = root / "notebooks" / "book.yml"
    pages = []
    for entry in yaml.safe_load(path.read_text(encoding="utf8")) or []:
        unknown = set(entry) - {"notebook", "parameters", "reads"}
        if unknown or "notebook" not in entry:
            raise KvshotError(f"{path.name}: entry {entry}: use the keys notebook, parameters and reads only")
        source = root / "notebooks" / entry["notebook"]
        if not source.is_file():
            raise KvshotError(f"{path.name} lists {entry['notebook']}: no such file in {source.parent}")
        reads = tuple(entry.get("reads", [ALL_RESULTS]))
        for pattern in reads:
            if pattern != ALL_RESULTS and not _matches(root, pattern):
                raise KvshotError(f"{path.name}: {source.name} reads {pattern}: it matches no file")
        pages.append(Page(source, dict(entry.get("parameters") or {}), reads))
    return pages


def _matches(root: Path, pattern: str) -> list[Path]:
    return [p for p in root.glob(pattern) if p.is_file()]


def _contents(root: Path, patterns: tuple[str, ...]) -> dict[str, str]:
    files = {p for pattern in patterns for p in _matches(root, pattern)}
    return {p.relative_to(root).as_posix(): sha256_file(p) for p in sorted(files)}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def page_digest(page: Page, root: Path = ROOT) -> str:
    """Hex sha256 of all that can change the executed copy.

    That is: the cells (source, tags, figure metadata), the parameters, the library, this extension, the
    files that the notebook reads, Python and package versions. Stored outputs do not count.
    """
    notebook = nbformat.read(page.source, as_version=4)
    cells = [
        [c.cell_type, c.source, c.metadata.get("tags"), c.metadata.get("mystnb"), c.get("attachments")]
        for c in notebook.cells
    ]
    inputs = {
        "cells": cells,
        "parameters": page.parameters,
        "files": _contents(root, ("kvshot/**/*.py", "book/_ext/**/*.py", *page.reads)),
        "versions": {"python": platform.python_version(), **{n: _version(n) for n in WATCHED}},
    }
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def is_fresh(executed: Path, digest: str) -> bool:
    """Whether the file `executed` was made from exactly these inputs."""
    try:
        metadata = json.loads(executed.read_text(encoding="utf8"))["metadata"]
    except (OSError, ValueError, KeyError):
        return False
    return metadata.get(STAMP, {}).get("digest") == digest
