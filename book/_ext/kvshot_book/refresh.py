"""Run the notebooks in place: their stored outputs are what `pytest --nbval` compares with.

`python -m kvshot_book.refresh [NAME ...]`; a second run that changes nothing leaves no diff. The figure of a cell with
the metadata `{"kvshot": {"figure": "NAME"}}` is also kept as book/_static/NAME.png, where the README shows it.
"""

from __future__ import annotations

import base64
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from kvshot.errors import KvshotError
from kvshot.fileio import atomic_file
from kvshot_book.execute import drop_live_views
from kvshot_book.kernel import NOTEBOOK_METADATA, kernel_config, set_kernel_environment
from kvshot_book.plan import ROOT, load_plan


def figures(notebook: nbformat.NotebookNode) -> Iterator[tuple[str, bytes]]:
    """(name, PNG) of every cell whose figure is wanted outside the notebook."""
    for cell in notebook.cells:
        if name := cell.metadata.get("kvshot", {}).get("figure"):
            images = [o.data["image/png"] for o in cell.outputs if "image/png" in o.get("data", {})]
            if len(images) != 1:
                raise KvshotError(f"the cell of figure {name} shows {len(images)} images, not one")
            yield name, base64.b64decode(images[0])


def refresh(path: Path, static: Path) -> None:
    """Execute one notebook with its own default parameters and store outputs without volatile metadata."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook, kernel_name="python3", timeout=600, record_timing=False, config=kernel_config(),
        resources={"metadata": {"path": str(path.parent)}},
    ).execute()
    notebook.metadata = nbformat.from_dict(NOTEBOOK_METADATA)
    for cell in notebook.cells:
        drop_live_views(cell)  # their ids are random, and their state is not kept
    with atomic_file(path) as tmp:
        tmp.write_text(nbformat.writes(notebook) + "\n", encoding="utf8")
    for name, png in figures(notebook):
        with atomic_file(static / f"{name}.png") as tmp:
            tmp.write_bytes(png)


def main(names: list[str], root: Path = ROOT) -> None:
    set_kernel_environment(root)
    sources = {page.name: page.source for page in load_plan(root)}
    unknown = sorted(set(names) - set(sources))
    if unknown:
        raise KvshotError(f"no such notebook: {', '.join(unknown)}: choose from {', '.join(sources)}")
    for name in names or sources:
        print(f"{name} ...", flush=True)
        refresh(sources[name], root / "book" / "_static")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KvshotError as err:
        sys.exit(f"error: {err}")
