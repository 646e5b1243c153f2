"""Run stale notebooks with Papermill and write the executed copies into `book/notebooks/`."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import nbformat
import papermill
from papermill.exceptions import PapermillExecutionError
from sphinx.util import logging

from kvshot.errors import KvshotError
from kvshot.fileio import atomic_file
from kvshot_book.kernel import NOTEBOOK_METADATA, kernel_config, set_kernel_environment
from kvshot_book.plan import ROOT, STAMP, Page, is_fresh, load_plan, page_digest

ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
logger = logging.getLogger(__name__)


def update_notebooks(book_dir: Path, root: Path = ROOT) -> list[str]:
    """Execute every page whose inputs changed and remove copies that no entry asks for.

    Returns the names of the pages that ran; raises KvshotError at the first that cannot.
    """
    set_kernel_environment(root)
    folder = Path(book_dir) / "notebooks"
    folder.mkdir(exist_ok=True)
    pages = load_plan(root)
    ran = []
    for page in pages:
        executed = folder / page.source.name
        digest = page_digest(page, root)
        if is_fresh(executed, digest):
            logger.info("[papermill] %s: up to date", page.name)
            continue
        logger.info("[papermill] %s: running ...", page.name)
        start = time.perf_counter()
        execute(page, executed, digest, root)
        logger.info("[papermill] %s: done in %.0f s", page.name, time.perf_counter() - start)
        ran.append(page.name)
    for stray in set(folder.glob("*.ipynb")) - {folder / p.source.name for p in pages}:
        stray.unlink()
        logger.info("[papermill] removed %s: no longer in book.yml", stray.name)
    return ran


def execute(page: Page, executed: Path, digest: str, root: Path = ROOT) -> None:
    """Run one page and put the cleaned copy at `executed`, whole or not at all.

    Raises KvshotError for an unknown parameter, a failing cell or a kernel that cannot run; what a failing
    run had produced is kept under `_build/failed/`. A cell may take `KVSHOT_CELL_TIMEOUT` seconds (600).
    """
    failed = root / "_build" / "failed" / page.source.name
    failed.parent.mkdir(parents=True, exist_ok=True)
    try:
        # Papermill only warns about a parameter that no cell reads
        unknown = sorted(set(page.parameters) - set(papermill.inspect_notebook(str(page.source))))
        if unknown:
            raise KvshotError(f"{_where(page, root)}: no cell tagged 'parameters' sets {', '.join(unknown)}")
        notebook = papermill.execute_notebook(
            str(page.source), str(failed), parameters=page.parameters, cwd=str(page.source.parent),
            kernel_name="python3", progress_bar=False, request_save_on_cell_execute=False,
            execution_timeout=int(os.environ.get("KVSHOT_CELL_TIMEOUT", 600)), config=kernel_config(),
        )
    except KvshotError:
        raise
    except PapermillExecutionError as err:
        raise KvshotError(_failure(page, err, failed, root)) from None
    except Exception as err:  # dead kernel, cell timeout, missing kernel, unreadable file
        reason = ANSI.sub("", str(err)).strip()
        raise KvshotError(f"{_where(page, root)}: {type(err).__name__}: {reason}") from None
    failed.unlink()
    _clean(notebook)
    notebook.metadata[STAMP] = {"digest": digest, "parameters": page.parameters}
    with atomic_file(executed) as tmp:
        tmp.write_text(nbformat.writes(notebook), encoding="utf8")


def _where(page: Page, root: Path) -> str:
    return f"{page.source.relative_to(root)} (parameters {page.parameters})"


def _failure(page: Page, err: PapermillExecutionError, failed: Path, root: Path) -> str:
    """File, cell, exception, cell source and the end of the traceback."""
    cells = nbformat.read(page.source, as_version=4).cells
    # Papermill counts its injected cell, so look the failing one up in the source.
    index = next((i for i, c in enumerate(cells, 1) if c.source == err.source), None)
    cell = f"cell {index} of {len(cells)}" if index else "the cell with the injected parameters"
    traceback = ANSI.sub("", "\n".join(err.traceback)).splitlines()[-12:]
    return "\n".join([
        f"{_where(page, root)}, {cell}: {err.ename}: {err.evalue}",
        "--- cell ---", err.source, "--- end of the traceback ---", *traceback,
        f"--- the run so far: {failed.relative_to(root)} ---",
    ])


def drop_live_views(cell: nbformat.NotebookNode) -> None:
    """Keep what a page without a kernel can show of a widget: its text/html."""
    for output in cell.get("outputs", []):
        output.get("data", {}).pop("application/vnd.jupyter.widget-view+json", None)


def _clean(notebook: nbformat.NotebookNode) -> None:
    """Drop what is volatile or of no use on a static page (times, widget state: dead sliders)."""
    notebook.metadata = nbformat.from_dict(NOTEBOOK_METADATA)
    for cell in notebook.cells:
        cell.metadata.pop("papermill", None)
        cell.metadata.pop("execution", None)
        drop_live_views(cell)
        if "injected-parameters" in cell.metadata.get("tags", []):
            cell.metadata["tags"].append("hide-input")
