"""Conversations in and out: ShareGPT, UltraChat and OpenAI-style messages; JSON or JSONL, also .gz, .xz."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from kvshot.errors import KvshotError
from kvshot.fileio import atomic_file

Format = Literal["auto", "sharegpt", "ultrachat", "messages"]
Role = Literal["system", "user", "assistant"]

_ROLES: dict[str, Role] = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant",
    "bot": "assistant",
}


class Message(BaseModel):
    """One turn."""

    model_config = ConfigDict(extra="forbid")

    role: Role
    content: str


class Conversation(BaseModel):
    """Turns in order. `truncated`: a length limit cut the last answer, so no end-of-turn token follows it."""

    model_config = ConfigDict(extra="forbid")

    id: str
    messages: list[Message]
    truncated: bool = False
    meta: dict[str, Any] = {}


@dataclass
class ReadReport:
    """What a file held. `bad`: (line, reason) of each skipped record; in a JSON array its place, from 1."""

    conversations: list[Conversation]
    bad: list[tuple[int, str]]


class _Bad(Exception):
    """Why a record is no conversation."""


def read_conversations(
    path: str | os.PathLike, *, format: Format = "auto", on_bad: Literal["refuse", "skip"] = "refuse"
) -> ReadReport:
    """Read a JSON or JSONL file of conversations; `format="auto"` looks at each record's fields.

    Raises KvshotError for a missing, unreadable or empty file, and, with `on_bad="refuse"`, for a record that
    is no conversation (its line is named). With `on_bad="skip"` such records are listed in `ReadReport.bad`.
    """
    path = Path(path)
    if format != "auto" and format not in _PARSERS:
        raise KvshotError(f"unknown conversation format {format!r}: use auto, {', '.join(_PARSERS)}")
    report = parse_conversations(_records(path), path.name.split(".")[0], format=format)
    if report.bad and (on_bad == "refuse" or not report.conversations):
        number, reason = report.bad[0]
        more = f", and {len(report.bad) - 1} more bad records" if len(report.bad) > 1 else ""
        skip = " or skip bad records (--on-bad skip, in Python on_bad='skip')" if report.conversations else ""
        raise KvshotError(f"{path} line {number}: {reason}{more}: mend the file{skip}")
    if not report.conversations:
        raise KvshotError(f"{path} holds no conversations: give a JSON or JSONL file with at least one")
    return report


def parse_conversations(records: Iterable[tuple[int, Any]], name: str, *, format: Format = "auto") -> ReadReport:
    """Numbered records, parsed from JSON, as conversations; one without an id is called NAME-NUMBER."""
    report = ReadReport([], [])
    for number, record in records:
        try:
            if isinstance(record, Exception):
                raise _Bad(f"not JSON ({_why(record)})")
            report.conversations.append(_conversation(record, format, f"{name}-{number}"))
        except _Bad as bad:
            report.bad.append((number, str(bad)))
    return report


def write_conversations(path: str | os.PathLike, conversations: Iterable[Conversation]) -> None:
    """Write JSONL, compressed as the suffix says (.xz, .gz); equal conversations give equal bytes."""
    data = as_jsonl(conversations, Path(path).suffix)
    with atomic_file(path) as tmp:
        tmp.write_bytes(data)


def as_jsonl(conversations: Iterable[Conversation], suffix: str = "") -> bytes:
    """The bytes of a JSONL file whose name ends with `suffix`."""
    lines = "".join(
        json.dumps(c.model_dump(exclude_defaults=True), ensure_ascii=False, separators=(",", ":")) + "\n"
        for c in conversations
    )
    data = lines.encode()
    if suffix == ".xz":
        return lzma.compress(data, preset=9)
    return gzip.compress(data, mtime=0) if suffix == ".gz" else data


def _text(path: Path) -> str:
    if not path.is_file():
        raise KvshotError(f"no file {path}: check the path")
    try:
        data = path.read_bytes()
        if path.suffix == ".xz":
            data = lzma.decompress(data)
        elif path.suffix == ".gz":
            data = gzip.decompress(data)
        return data.decode("utf-8-sig")
    except (lzma.LZMAError, gzip.BadGzipFile, EOFError, zlib.error) as err:
        raise KvshotError(f"{path} cannot be decompressed ({err}): fetch or compress it again") from err
    except UnicodeDecodeError as err:
        raise KvshotError(f"{path} is not UTF-8 text ({err.reason} at byte {err.start}): convert it") from err
    except OSError as err:
        raise KvshotError(f"{path} cannot be read ({err.strerror or err}): check the file") from err


_UNREADABLE = (ValueError, RecursionError)  # no JSON; numbers of thousands of digits; nested without end


def _why(err: Exception) -> str:
    if isinstance(err, json.JSONDecodeError):
        return f"{err.msg} at column {err.colno}"
    return "nested too deeply" if isinstance(err, RecursionError) else "a number has too many digits"


def _records(path: Path) -> Iterator[tuple[int, Any]]:
    """(number, parsed record), or the error in place of the record."""
    text = _text(path)
    if text.lstrip()[:1] == "[" or ".json" in path.suffixes:
        try:
            whole = json.loads(text)
        except _UNREADABLE as err:
            if text.lstrip()[:1] == "[":
                where, why = (f" line {err.lineno}", err.msg) if isinstance(err, json.JSONDecodeError) else (
                    "", _why(err))
                raise KvshotError(f"{path}{where}: not JSON ({why}): mend the file") from err
            # many ".json" files are JSONL
        else:
            yield from enumerate(whole if isinstance(whole, list) else [whole], 1)
            return
    for number, line in enumerate(text.split("\n"), 1):  # not splitlines: JSON strings may hold U+2028
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except _UNREADABLE as err:
            yield number, err


def _conversation(record: Any, format: str, fallback_id: str) -> Conversation:
    if not isinstance(record, dict):
        raise _Bad("not a JSON object")
    if format == "auto":
        format = next((name for name, (field, _) in _PARSERS.items() if field in record), "")
        if not format:
            fields = ", ".join(field for field, _ in _PARSERS.values())
            raise _Bad(f"has none of the fields {fields}")
    field, parse = _PARSERS[format]
    turns = record.get(field)
    if not isinstance(turns, list) or not turns:
        raise _Bad(f"field {field!r} is missing, empty or not a list")
    messages = []
    for place, turn in enumerate(turns, 1):
        try:
            messages.append(_message(*parse(turn, place)))
        except _Bad as bad:
            raise _Bad(f"turn {place} {bad}") from None
    ids = (record.get(name) for name in ("id", "prompt_id", "conversation_id"))
    identity = next((i for i in ids if i is not None), fallback_id)
    truncated, meta = record.get("truncated", False), record.get("meta", {})
    if not isinstance(truncated, bool) or not isinstance(meta, dict):
        raise _Bad("field 'truncated' must be true or false, 'meta' an object")
    if truncated and messages[-1].role != "assistant":
        raise _Bad("is marked truncated but does not end with an assistant turn")
    return Conversation(id=str(identity), messages=messages, truncated=truncated, meta=meta)


def _message(role: Any, content: Any) -> Message:
    known = _ROLES.get(role) if isinstance(role, str) else None
    if known is None:
        raise _Bad(f"has the unknown role {role!r}")
    if isinstance(content, list):  # OpenAI's content parts
        texts = [p.get("text") if isinstance(p, dict) and p.get("type") == "text" else None for p in content]
        if not all(isinstance(t, str) for t in texts):
            raise _Bad("has content parts that are not text")
        content = "".join(texts)
    if not isinstance(content, str):
        raise _Bad("has no text")
    if not content.strip():
        raise _Bad("is empty")
    try:
        content.encode()
    except UnicodeEncodeError:
        raise _Bad("holds broken Unicode (a lone surrogate)") from None
    return Message(role=known, content=content)


def _fields(role: str, content: str) -> Callable[[Any, int], tuple[Any, Any]]:
    def parse(turn: Any, place: int) -> tuple[Any, Any]:
        if not isinstance(turn, dict):
            raise _Bad("is not a JSON object")
        return turn.get(role), turn.get(content)

    return parse


_PARSERS: dict[str, tuple[str, Callable[[Any, int], tuple[Any, Any]]]] = {
    "messages": ("messages", _fields("role", "content")),
    "sharegpt": ("conversations", _fields("from", "value")),
    "ultrachat": ("data", lambda turn, place: ("user" if place % 2 else "assistant", turn)),
}
