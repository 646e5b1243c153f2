"""Train and held-out conversations that do not share text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvshot.data.filters import fingerprints, words
from kvshot.data.readers import Conversation
from kvshot.errors import KvshotError


class Split(NamedTuple):
    """Each in the order of the input; `dropped` resembled a held-out conversation and is on neither side."""

    train: list[Conversation]
    held_out: list[Conversation]
    dropped: list[Conversation]


def split(
    conversations: Sequence[Conversation], *, held_out: float | int = 0.05, seed: int = 0,
    among: int | None = None, prefix_words: int = 16, gram: int = 8, overlap: float = 0.5,
) -> Split:
    """Hold out whole conversations (a share, or a number of them), then drop near-duplicates from the rest.

    They are drawn from the first `among` conversations (default: all), so that a data set which grows at its end
    keeps its held-out part and the order of its training part.

    A training conversation is dropped when its opening user turn, or an answer of at least `prefix_words`
    words, starts with the same `prefix_words` words as a held-out one, or when a share of `overlap` or more
    of its `gram`-word sequences stands in the held-out conversations.

    Raises KvshotError when `held_out` leaves either side empty.
    """
    total = min(len(conversations), among or len(conversations))
    count = max(1, round(held_out * total)) if isinstance(held_out, float) and 0 < held_out < 1 else held_out
    if not isinstance(count, int) or not 0 < count < total:
        raise KvshotError(
            f"cannot hold out {held_out} of {total} conversations: give a share between 0 and 1, "
            "or a number that leaves some for training"
        )
    chosen = set(np.random.default_rng(seed).permutation(total)[:count].tolist())
    kept_out = [conversations[i] for i in sorted(chosen)]
    rest = [c for i, c in enumerate(conversations) if i not in chosen]
    train, dropped = without_alike(rest, kept_out, prefix_words=prefix_words, gram=gram, overlap=overlap)
    if not train:
        raise KvshotError("every training conversation resembles a held-out one: give more varied data")
    return Split(train, kept_out, dropped)


def split_corpus(
    conversations: Sequence[Conversation], *, held_out: int, validation: int, seed: int = 0, among: int | None = None,
) -> tuple[dict[str, list[Conversation]], int]:
    """The splits "train", "validation" and "held_out" of a data set, and how many conversations were dropped.

    held_out, validation: numbers of conversations, drawn from the first `among`. Those that resemble one held out are
    dropped from the other two, those that resemble one of validation from training, as `split` defines it.

    Raises KvshotError when a split would be empty.
    """
    total = min(len(conversations), among or len(conversations))
    if held_out + validation >= total:
        raise KvshotError(f"{total} conversations are too few to hold out {held_out} and choose checkpoints on "
                          f"{validation}: hold out fewer (--held-out), or give more conversations")
    aside = split(conversations, held_out=held_out + validation, seed=seed, among=among)
    try:
        inner = split(aside.held_out, held_out=held_out, seed=seed)
    except KvshotError as err:
        raise KvshotError("every conversation for validation resembles a held-out one: ask for more of them, or give "
                          "more varied data") from err
    parts = {"train": aside.train, "validation": inner.train, "held_out": inner.held_out}
    return parts, len(aside.dropped) + len(inner.dropped)


def without_alike(
    conversations: Sequence[Conversation], held_out: Sequence[Conversation], *,
    prefix_words: int = 16, gram: int = 8, overlap: float = 0.5,
) -> tuple[list[Conversation], list[Conversation]]:
    """(kept, dropped): the conversations without those that resemble a held-out one, as `split` defines it."""
    keys = set().union(*(fingerprints(c, prefix_words) for c in held_out))
    grams = set().union(*(_grams(c, gram) for c in held_out))
    kept, dropped = [], []
    for conversation in conversations:
        own = _grams(conversation, gram)
        overlaps = bool(own) and len(own & grams) >= overlap * len(own)
        alike = overlaps or not keys.isdisjoint(fingerprints(conversation, prefix_words))
        (dropped if alike else kept).append(conversation)
    return kept, dropped


def _grams(conversation: Conversation, n: int) -> set[int]:
    """Hashes of the n-word sequences of every turn but the system's (equal ones within one process only)."""
    texts = [words(m.content) for m in conversation.messages if m.role != "system"]
    return {hash(tuple(t[i:i + n])) for t in texts for i in range(len(t) - n + 1)}
