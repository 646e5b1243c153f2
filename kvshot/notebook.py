"""What the notebooks of the book need besides the library: quiet output, and numbers for the prose."""

from __future__ import annotations

import math
import os
import sys

from kvshot.errors import KvshotError


def setup() -> None:
    """First cell of every notebook: the book's figure style; no progress bars, no chatter on stderr."""
    from kvshot import viz

    os.environ["TQDM_DISABLE"] = "1"
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    if "transformers" in sys.modules:  # it read the variable when it was imported
        sys.modules["transformers"].logging.set_verbosity_error()
    viz.set_style()


def glue(name: str, value: float | int | str | bool) -> None:
    """Record one value for prose: pages paste it with {glue:text}`notebooks/01_decay.ipynb::name:.3f`.

    NumPy and torch scalars become plain Python ones, since their repr cannot be formatted in a page.
    Raises KvshotError for anything that is not one finite value.
    """
    from IPython.display import display

    if getattr(value, "ndim", 1) == 0:
        value = value.item()
    printable = isinstance(value, (bool, int, float, str))
    if not printable or isinstance(value, float) and not math.isfinite(value):
        raise KvshotError(f"glue({name!r}, {value!r}): give one finite number or a text")
    # the bundle that myst_nb.glue makes, without importing Sphinx into the kernel
    prefix = "application/papermill.record/"
    display(
        {prefix + "text/plain": repr(value)}, raw=True,
        metadata={"scrapbook": {"name": name, "mime_prefix": prefix}},
    )
