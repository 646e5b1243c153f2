"""Progress with time left, for anything that takes more than a few seconds."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

EVERY = 30.0  # seconds between lines in a log


@contextmanager
def progress(
    description: str, total: int | None, *, start: int = 0, quiet: bool = False
) -> Iterator[Callable[..., None]]:
    """Yield `advance(n=1, note="")`; `start` of `total` was done by an earlier run.

    Draws a bar on stderr when it is a terminal, else prints a line now and then.
    `TQDM_DISABLE=1` (what notebooks and tests set) silences it.
    """
    if quiet or os.environ.get("TQDM_DISABLE") == "1":
        yield lambda n=1, note="": None
        return
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield from _lines(description, total, start)
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(description, total=total, completed=start, note="")
        yield lambda n=1, note="": bar.update(task, advance=n, note=note)


def _lines(description: str, total: int | None, done: int) -> Iterator[Callable[..., None]]:
    """For logs: one line every `EVERY` seconds."""
    began, before = time.monotonic(), done
    last = began

    def advance(n: int = 1, note: str = "") -> None:
        nonlocal done, last
        done += n
        now = time.monotonic()
        if now - last >= EVERY:
            last = now
            left = f", {(now - began) / max(done - before, 1) * (total - done):.0f} s left" if total else ""
            print(f"{description}: {done}/{total or '?'} after {now - began:.0f} s{left} {note}".rstrip(),
                  file=sys.stderr, flush=True)

    yield advance
