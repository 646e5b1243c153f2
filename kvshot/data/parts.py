"""The parts of an unfinished synthesis: one file for each block of rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, TypeAdapter, ValidationError

from kvshot.data.generate import Row
from kvshot.errors import KvshotError
from kvshot.fileio import atomic_file


class _Written(BaseModel):
    """Of a `Row`, what it wrote in each segment and how it ended."""

    model_config = ConfigDict(extra="forbid", strict=True)

    written: Annotated[list[list[NonNegativeInt]], Field(min_length=1)]
    outcome: str


_PART = TypeAdapter(list[_Written])


def part_path(folder: Path, number: int) -> Path:
    return folder / f"part-{number:05d}.json"


def write_part(folder: Path, number: int, rows: Sequence[Row]) -> None:
    """Token ids per segment, and how each row ended; text is made later, in one place."""
    with atomic_file(part_path(folder, number)) as tmp:
        tmp.write_text(json.dumps([{"written": r.written, "outcome": r.outcome} for r in rows]))


def read_part(folder: Path, number: int, rows: int | None = None) -> list[dict]:
    """What `write_part` wrote, a dict for each row. Raises KvshotError for anything else, or another number of `rows`.
    """
    path = part_path(folder, number)
    try:
        part = _PART.validate_json(path.read_bytes())
    except ValidationError as err:
        raise KvshotError(f"{path} is damaged ({err.errors()[0]['msg']}): delete it and run again") from err
    if rows not in (None, len(part)):
        raise KvshotError(f"{path} is damaged ({len(part)} rows, not {rows}): delete it and run again")
    return [row.model_dump() for row in part]
