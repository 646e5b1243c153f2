"""A few hundred made-up conversations for the smoke profile: enough structure for a drafter to learn something."""

from __future__ import annotations

import numpy as np

from kvshot.data.readers import Conversation, Message

_THINGS = ("a cat", "two dogs", "the sea", "my bike", "an old map", "green tea", "a red door", "the moon")
_DEEDS = ("likes", "finds", "draws", "hides", "counts", "sells")


def toy_conversations(n: int, seed: int = 0) -> list[Conversation]:
    """`n` question-and-answer conversations of one or two turns, a function of `n` and `seed`."""
    rng = np.random.default_rng(seed)
    out = []
    for i in range(n):
        messages = []
        for _ in range(1 + int(rng.random() < 0.3)):
            who, what, deed = rng.integers(len(_THINGS)), rng.integers(len(_THINGS)), rng.choice(_DEEDS)
            messages += [
                Message(role="user", content=f"Who {deed} {_THINGS[what]}?"),
                Message(role="assistant", content=f"{_THINGS[who]} {deed} {_THINGS[what]}, and {_THINGS[what]} "
                                                  f"{deed} {_THINGS[who]}."),
            ]
        out.append(Conversation(id=f"toy-{i}", messages=messages))
    return out
