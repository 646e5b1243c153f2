"""The paper's data sets, from the Hugging Face hub through the `datasets` library (extra "hub")."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from kvshot.data.corpus import Corpus
from kvshot.data.readers import parse_conversations
from kvshot.data.split import split_corpus
from kvshot.errors import KvshotError
from kvshot.fileio import exclusive


@dataclass(frozen=True)
class Source:
    """Arguments of `datasets.load_dataset`."""

    path: str
    split: str
    options: dict[str, str] = field(default_factory=dict)


SOURCES = {
    "sharegpt": Source("anon8231489123/ShareGPT_Vicuna_unfiltered", "train",
                       {"data_files": "ShareGPT_V3_unfiltered_cleaned_split.json"}),
    "ultrachat": Source("HuggingFaceH4/ultrachat_200k", "train_sft"),
}


def fetch_corpus(name: str, out: str | os.PathLike, *, limit: int | None = None, held_out: int = 1000, seed: int = 0
                 ) -> tuple[Corpus, int]:
    """Load a data set, split it by conversation and write it as a corpus into `out`.

    limit: the first so many records. held_out: conversations that are only evaluated on; a tenth of that many more
    choose checkpoints. Returns the corpus and how many records were no usable conversation; a corpus of the same
    recipe in `out` is returned as it is. Raises KvshotError for an unknown name, a missing library, a data set that
    cannot be had, or another data set in `out`.
    """
    if name not in SOURCES:
        raise KvshotError(f"unknown data set {name!r}: choose {', '.join(SOURCES)}, or make one of your own files "
                          "with `kvshot data split`")
    source = SOURCES[name]
    asked = {"from": source.path, "split": source.split, **source.options, "limit": limit, "seed": seed,
             "held_out": held_out}
    if old := Corpus.begun(out, asked, since={"held_out": held_out}):
        return old, old.info.recipe.get("unusable records", 0)
    try:
        import datasets
    except ImportError as err:
        raise KvshotError("the package 'datasets' is missing: pip install 'kvshot[hub]'") from err
    try:
        rows = datasets.load_dataset(source.path, split=source.split, **source.options)
    except Exception as err:  # the library raises whatever its backends raise
        reason = (str(err).strip().splitlines() or [type(err).__name__])[0]
        raise KvshotError(f"cannot load {source.path} ({reason}): check the network, or fetch it elsewhere and use "
                          "`kvshot data split`") from err
    if limit is not None:
        rows = rows.select(range(min(limit, len(rows))))
    report = parse_conversations(enumerate(rows, 1), name)
    usable = [c for c in report.conversations if any(m.role == "assistant" for m in c.messages)]
    parts, dropped = split_corpus(usable, held_out=held_out, validation=max(1, held_out // 10), seed=seed)
    bad = len(rows) - len(usable)
    recipe = asked | {"unusable records": bad, "dropped as like a held-out one": dropped}
    with exclusive(out):
        Corpus.begun(out, asked)  # what another process wrote meanwhile
        return Corpus.save(out, name, recipe, parts), bad
