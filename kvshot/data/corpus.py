"""A data set of a profile: conversations in named splits, with the recipe that made them and the hash of every file."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from kvshot.data.readers import Conversation, as_jsonl, read_conversations
from kvshot.errors import KvshotError
from kvshot.fileio import atomic_file, exclusive, sha256_file

RECIPE = "recipe.json"
OWN_SPLITS = ("train", "validation", "held_out")


class SplitInfo(BaseModel):
    """One file of the data set."""

    model_config = ConfigDict(extra="forbid")

    file: str
    sha256: str
    conversations: int
    answer_tokens: int


class CorpusInfo(BaseModel):
    """`recipe`: everything that made the text (target, seeds, temperatures, filters and what they dropped)."""

    model_config = ConfigDict(extra="forbid")

    name: str
    recipe: dict[str, JsonValue]
    splits: dict[str, SplitInfo]

    def require_free(self, split: str) -> None:
        """Raise KvshotError unless `split` can be the name of one more split, of its file and of its recipe."""
        if not re.fullmatch(r"[A-Za-z0-9_-]+", split):
            raise KvshotError(f"{split!r} cannot name a split: use letters, digits, _ and -")
        if split in (*self.splits, *self.recipe):
            raise KvshotError(f"the data set has a split or a field of its recipe called {split!r} already: choose "
                              "another name")


class Corpus:
    """Splits by name: "train", "validation" (for choosing checkpoints), "held_out", and other domains."""

    def __init__(self, info: CorpusInfo, splits: dict[str, list[Conversation]]) -> None:
        self.info, self.splits = info, splits

    @classmethod
    def load(cls, folder: str | os.PathLike) -> Corpus:
        """Read and check a folder. Raises KvshotError when a file is missing or is not what `recipe.json` hashed."""
        folder = Path(folder)
        info = _info(folder)
        splits = {}
        for name, split in info.splits.items():
            path = folder / split.file
            if not path.exists() or sha256_file(path) != split.sha256:
                raise KvshotError(f"{path} is missing or differs from {RECIPE}: fetch or make the data set again, in a "
                                  "new folder")
            splits[name] = read_conversations(path).conversations
        return cls(info, splits)

    @classmethod
    def begun(cls, folder: str | os.PathLike, recipe: Mapping, *, since: Mapping | None = None) -> Corpus | None:
        """What `folder` holds already, None when that is no data set.

        since: fields that older recipes do not note, with what they had then. Raises KvshotError when a field of
        `recipe` is another one there, or the data set is damaged.
        """
        folder = Path(folder)
        if not (folder / RECIPE).exists():
            return None
        there, recipe = ({**(since or {}), **r} for r in (_info(folder).recipe, recipe))
        other = [field for field, value in recipe.items() if field not in there or there[field] != value]
        if other:
            raise KvshotError(f"{folder} holds a data set of another recipe ({', '.join(other[:3])}): name a new "
                              "folder")
        return cls.load(folder)

    @classmethod
    def add(cls, folder: str | os.PathLike, split: str, conversations: list[Conversation], recipe: Mapping) -> Corpus:
        """Write one more split (another domain) into a corpus folder, its recipe under the split's name.

        Raises KvshotError when the name is taken or unsafe, nothing is to be written, or another process is at work
        in the folder.
        """
        _info(Path(folder))  # before the lock makes a folder
        with exclusive(folder):
            corpus = cls.load(folder)
            corpus.info.require_free(split)
            splits = {**corpus.splits, split: conversations}
            return cls.save(folder, corpus.info.name, {**corpus.info.recipe, split: dict(recipe)}, splits)

    @classmethod
    def save(cls, folder: str | os.PathLike, name: str, recipe: Mapping, splits: Mapping[str, list[Conversation]]
             ) -> Corpus:
        """Write every split as compressed JSONL, then the recipe with their hashes; returns the corpus.

        The files are called by their content, and replacing the recipe switches to them: a kill at any moment leaves
        the old data set or the new one. For a folder that others may write to, hold `fileio.exclusive` meanwhile.
        Raises KvshotError for an empty split.
        """
        folder = Path(folder)
        empty = [split for split, conversations in splits.items() if not conversations]
        if empty:
            raise KvshotError(f"no conversation for the split {empty[0]!r}: a data set has no empty ones, give it some")
        old = _info(folder).splits if (folder / RECIPE).exists() else {}
        files = {}
        try:
            for split, conversations in splits.items():
                data = as_jsonl(conversations, ".xz")
                digest = hashlib.sha256(data).hexdigest()
                same = split in old and old[split].sha256 == digest  # an unchanged split keeps its file
                file = old[split].file if same else f"{split}-{digest[:8]}.jsonl.xz"
                if not (folder / file).exists() or sha256_file(folder / file) != digest:
                    with atomic_file(folder / file) as tmp:
                        tmp.write_bytes(data)
                files[split] = SplitInfo(
                    file=file, sha256=digest, conversations=len(conversations),
                    answer_tokens=sum(c.meta.get("answer_tokens", 0) for c in conversations))
            info = CorpusInfo(name=name, recipe=dict(recipe), splits=files)
            with atomic_file(folder / RECIPE) as tmp:
                tmp.write_text(info.model_dump_json(indent=1) + "\n", encoding="utf-8")
        finally:
            _sweep(folder, {*old, *splits}, {s.file for s in old.values()})
        return cls(info, dict(splits))


def _sweep(folder: Path, splits: set[str], files: set[str]) -> None:
    """Remove those of `files`, and of the content-named files of `splits`, that `recipe.json` does not name (now)."""
    named = {s.file for s in _info(folder).splits.values()} if (folder / RECIPE).exists() else set()
    files = files | {path.name for s in splits for path in folder.glob(f"{s}-{'[0-9a-f]' * 8}.jsonl.xz")}
    for file in files - named:
        (folder / file).unlink(missing_ok=True)


def _info(folder: Path) -> CorpusInfo:
    try:
        return CorpusInfo.model_validate_json((folder / RECIPE).read_bytes())
    except OSError as err:
        raise KvshotError(f"no data set in {folder} ({RECIPE}: {err.strerror}): check the path, or make one with "
                          "`kvshot data synthesize`, `kvshot data fetch` or, from your own files, `kvshot data split`"
                          ) from err
    except ValidationError as err:
        raise KvshotError(f"{folder / RECIPE} is damaged ({err.errors()[0]['msg']}): fetch or make the data set again, "
                          "in a new folder") from err
