"""Sphinx extension of this book: `jupyter-book build book/` alone gives the whole book, offline.

It runs stale notebooks with Papermill before Sphinx looks for pages, points Sphinx at the table of contents
at the top of the repository, serves MathJax from a Python package and makes any warning fail the build.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from pathlib import Path

from kvshot.errors import KvshotError
from kvshot_book.execute import update_notebooks
from kvshot_book.plan import ROOT

MATHJAX = "tex-svg.js"  # one file, no fonts to fetch
GLUED = re.compile(r"([\w./-]+\.ipynb)::")


def _config_inited(app, config) -> None:
    # Jupyter Book insists on book/_toc.yml; that one is a stub.
    toc = ROOT / "_toc.yml"
    config.external_toc_path = str(toc)
    config.kvshot_toc = toc.read_text(encoding="utf8")
    config.mathjax_path = MATHJAX
    try:
        update_notebooks(Path(app.srcdir))
    except KvshotError as err:
        # Not the exception itself: Jupyter Book would bury it under two tracebacks of its own.
        print(f"\nThe book was not built: {err}\n", file=sys.stderr)
        raise SystemExit(1) from None


def _source_read(app, docname, source) -> None:
    """A page that pastes a number from a notebook is rebuilt with that notebook."""
    for match in GLUED.finditer(source[0]):
        app.env.note_dependency(app.env.relfn2path(match[1], docname)[1])


def _drop_thebe(app) -> None:
    """sphinx-thebe puts a script, and a JavaScript error, on every page for a button that we do not show."""
    for event in ("env-before-read-docs", "doctree-resolved"):
        for listener in list(app.events.listeners.get(event, [])):
            if listener.handler.__module__.startswith("sphinx_thebe"):
                app.disconnect(listener.id)


def _mathjax_file() -> Path:
    spec = importlib.util.find_spec("sphinx-mathjax-offline")
    if spec is None:
        raise SystemExit("sphinx-mathjax-offline is missing: pip install -e '.[book]'")
    return Path(spec.origin).parent / "static" / "mathjax" / MATHJAX


def _copy_mathjax(app, exception) -> None:
    if exception is None and app.builder.format == "html":
        shutil.copyfile(_mathjax_file(), Path(app.outdir) / "_static" / MATHJAX)


def setup(app) -> dict:
    app.keep_going = True  # finish, then exit 1 if anything warned
    # A changed table of contents makes every page stale: sphinx-external-toc cannot renumber a few of them.
    app.add_config_value("kvshot_toc", "", "env")
    app.connect("config-inited", _config_inited, priority=100)  # sphinx-external-toc reads its file at 900
    app.connect("builder-inited", _drop_thebe)
    app.connect("source-read", _source_read)
    app.connect("build-finished", _copy_mathjax)
    return {"version": "0.1", "parallel_read_safe": True, "parallel_write_safe": True}
