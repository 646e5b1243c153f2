"""What keeps synthesised conversations worth training on: no empty, repeated or looping text."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvshot.data.readers import Conversation


@dataclass
class Report:
    """How many conversations were kept, and how many were dropped for which reason."""

    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    def count(self, reason: str | None) -> bool:
        """Count a conversation: dropped for `reason` or kept when it is None; return whether it was kept."""
        if reason is None:
            self.kept += 1
        else:
            self.dropped[reason] += 1
        return reason is None

    def __str__(self) -> str:
        total = self.kept + self.dropped.total()
        most_first = sorted(self.dropped.items(), key=lambda item: (-item[1], item[0]))
        parts = [f"{n} {reason} ({n / total:.1%})" for reason, n in most_first]
        return f"kept {self.kept} of {total}" + (f"; dropped {', '.join(parts)}" if parts else "")


def looping(
    token_ids: Sequence[int] | np.ndarray, *, copies: int = 3, tail: int = 32, n: int = 6, share: float = 0.5
) -> bool:
    """Whether a text of T tokens is degenerate.

    True when it ends in a cycle (some period repeated `copies` times or more, over at least `tail` tokens),
    or when more than `share` of its n-grams stood earlier in the text. Texts under `tail` tokens never loop.
    """
    ids = np.asarray(token_ids)
    if len(ids) < tail:
        return False
    for period in range(1, len(ids) // copies + 1):
        span = max(copies * period, tail)  # the last `span` tokens must repeat with this period
        if span <= len(ids) and np.array_equal(ids[len(ids) - span:-period], ids[len(ids) - span + period:]):
            return True
    grams = np.lib.stride_tricks.sliding_window_view(ids, n)
    return 1 - len(np.unique(grams, axis=0)) / len(grams) > share


def words(text: str) -> list[str]:
    """Lower-case words: what counts when two texts are compared."""
    return re.findall(r"\w+", text.lower())


def fingerprints(conversation: Conversation, prefix_words: int) -> set[str]:
    """Keys that near-duplicates share: how the first user turn starts, and how each longer answer starts.

    Answers under `prefix_words` words ("Yes.") are left out: sharing one makes no duplicate.
    """
    first = next((m.content for m in conversation.messages if m.role == "user"), "")
    answers = [words(m.content) for m in conversation.messages if m.role == "assistant"]
    keys = {"a " + " ".join(a[:prefix_words]) for a in answers if len(a) >= prefix_words}
    # a text without a single word ("1+1=?" has some, "???" has none) is compared as it stands
    prompt = " ".join(words(first)[:prefix_words]) or first.strip()
    return keys | {"u " + prompt} if prompt else keys


class Filter:
    """Decides, one conversation after another, what to keep, and counts it in `report`.

    Near-duplicates share the first `prefix_words` words of the opening user turn or of an answer.
    """

    def __init__(self, *, prefix_words: int = 16) -> None:
        self.prefix_words = prefix_words
        self.report = Report()
        self._texts: set[str] = set()
        self._keys: set[str] = set()

    def keep(self, conversation: Conversation, answer_ids: Sequence[int] | np.ndarray) -> bool:
        """Whether to keep it; `answer_ids`: the token ids of its (last) answer. A kept one is remembered."""
        return self.report.count(self._reason(conversation, answer_ids))

    def _reason(self, conversation: Conversation, answer_ids: Sequence[int] | np.ndarray) -> str | None:
        if not conversation.messages or any(not m.content.strip() for m in conversation.messages):
            return "empty"
        if looping(answer_ids):
            return "looping"
        if _whole(conversation) in self._texts:
            return "duplicate"
        if fingerprints(conversation, self.prefix_words) & self._keys:
            return "near-duplicate"
        self.remember(conversation)
        return None

    def remember(self, conversation: Conversation) -> None:
        """Later conversations must not repeat this one."""
        self._texts.add(_whole(conversation))
        self._keys |= fingerprints(conversation, self.prefix_words)


def _whole(conversation: Conversation) -> str:
    return "\0".join(" ".join(words(m.content)) or m.content.strip() for m in conversation.messages)
