"""A data set from conversation files of one's own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from kvshot.data.corpus import Corpus
from kvshot.data.readers import ReadReport, read_conversations
from kvshot.data.split import split_corpus
from kvshot.errors import KvshotError
from kvshot.fileio import atomic_folder, require_new, sha256_file


def corpus_from_files(
    files: Sequence[str | os.PathLike], out: str | os.PathLike, *, held_out: int | None = None,
    validation: int | None = None, seed: int = 0, on_bad: Literal["refuse", "skip"] = "refuse",
) -> tuple[Corpus, list[ReadReport]]:
    """Read files as `read_conversations` does, split them by conversation, write a corpus into the new folder `out`.

    held_out: conversations that are only evaluated on (default: a tenth, at least 2 and at most 300); validation: how
    many more choose checkpoints (default: a third of that, at least 1). Those without an answer are left out; what
    resembles a held-out one is dropped. Returns the corpus and the report on each file.

    Raises KvshotError for an existing `out`, a file that cannot be read, or too few conversations.
    """
    require_new(out)
    reports = [read_conversations(file, on_bad=on_bad) for file in files]
    read = [c.model_copy(update={"id": f"{number}-{c.id}"}) if len(reports) > 1 else c  # files may use the same ids
            for number, report in enumerate(reports) for c in report.conversations]
    usable = [c for c in read if any(m.role == "assistant" for m in c.messages)]
    held_out = max(2, min(300, len(usable) // 10)) if held_out is None else held_out
    validation = max(1, held_out // 3) if validation is None else validation
    if len(usable) <= held_out + validation:
        raise KvshotError(f"{len(usable)} conversations with an answer are too few to hold out {held_out} and choose "
                          f"checkpoints on {validation}: give {held_out + validation + 1} or more, or ask for less")
    parts, dropped = split_corpus(usable, held_out=held_out, validation=validation, seed=seed)
    recipe = {
        "from": [{"file": Path(file).name, "sha256": sha256_file(file), "conversations": len(report.conversations),
                  "bad records": len(report.bad)} for file, report in zip(files, reports, strict=True)],
        "seed": seed, "without an answer": len(read) - len(usable), "dropped as like a held-out one": dropped}
    with atomic_folder(out) as folder:
        return Corpus.save(folder, Path(out).resolve().name, recipe, parts), reports
