"""A data set of a profile: conversations in named splits, with the recipe that made them and the hash of every file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from kvshot.data.readers import Conversation, read_conversations, write_conversations
from kvshot.errors import KvshotError
from kvshot.fileio import atomic_file, sha256_file

RECIPE = "recipe.json"


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


class Corpus:
    """Splits by name: "train", "validation" (for choosing checkpoints), "held_out", and other domains."""

    def __init__(self, info: CorpusInfo, splits: dict[str, list[Conversation]]) -> None:
        self.info, self.splits = info, splits

    @classmethod
    def load(cls, folder: str | os.PathLike) -> Corpus:
        """Read and check a folder. Raises KvshotError when a file is missing or is not what `recipe.json` hashed."""
        folder = Path(folder)
        try:
            info = CorpusInfo.model_validate_json((folder / RECIPE).read_bytes())
        except OSError as err:
            raise KvshotError(f"no data set in {folder} ({RECIPE}: {err.strerror}): check the path, or make one with "
                              "`kvshot data synthesize` or `kvshot data fetch`") from err
        except ValidationError as err:
            raise KvshotError(f"{folder / RECIPE} is damaged ({err.errors()[0]['msg']}): fetch it again") from err
        splits = {}
        for name, split in info.splits.items():
            path = folder / split.file
            if not path.exists() or sha256_file(path) != split.sha256:
                raise KvshotError(f"{path} is missing or differs from {RECIPE}: fetch the data set again")
            splits[name] = read_conversations(path).conversations
        return cls(info, splits)

    @classmethod
    def add(cls, folder: str | os.PathLike, split: str, conversations: list[Conversation], recipe: Mapping) -> Corpus:
        """Write one more split (another domain) into a corpus folder, its recipe under the split's name."""
        corpus = cls.load(folder)
        splits = {**corpus.splits, split: conversations}
        return cls.save(folder, corpus.info.name, {**corpus.info.recipe, split: dict(recipe)}, splits)

    @classmethod
    def save(cls, folder: str | os.PathLike, name: str, recipe: Mapping, splits: Mapping[str, list[Conversation]]
             ) -> Corpus:
        """Write every split as compressed JSONL, then the recipe with their hashes; returns the corpus."""
        folder = Path(folder)
        files = {}
        # all of them beside the old ones first: a full disk or a kill must not leave a data set of two halves
        fresh = {split: folder / f"new-{split}.jsonl.xz" for split in splits}
        try:
            for split, conversations in splits.items():
                write_conversations(fresh[split], conversations)
                files[split] = SplitInfo(
                    file=f"{split}.jsonl.xz", sha256=sha256_file(fresh[split]), conversations=len(conversations),
                    answer_tokens=sum(c.meta.get("answer_tokens", 0) for c in conversations))
            for split, path in fresh.items():
                path.replace(folder / files[split].file)
        finally:
            for path in fresh.values():
                path.unlink(missing_ok=True)
        info = CorpusInfo(name=name, recipe=dict(recipe), splits=files)
        with atomic_file(folder / RECIPE) as tmp:
            tmp.write_text(info.model_dump_json(indent=1) + "\n")
        return cls(info, dict(splits))
