from __future__ import annotations

import numpy as np
import pytest

from kvshot.data import Conversation, split
from kvshot.data.split import split_corpus
from kvshot.errors import KvshotError

RNG = np.random.default_rng(0)
WORDS = np.array([f"w{i}" for i in range(5000)])


def text(n: int) -> str:
    return " ".join(RNG.choice(WORDS, n))


def talk(name: str, user: str, answer: str) -> Conversation:
    return Conversation(
        id=name, messages=[{"role": "user", "content": user}, {"role": "assistant", "content": answer}])


DISTINCT = [talk(str(i), text(20), text(60)) for i in range(100)]


def names(conversations) -> list[str]:
    return [c.id for c in conversations]


@pytest.mark.parametrize("held_out, count", [(0.1, 10), (7, 7), (0.001, 1)])
def test_sizes_order_and_seed(held_out, count):
    one, again, other = (split(DISTINCT, held_out=held_out, seed=s) for s in (3, 3, 4))
    assert one == again and names(one.held_out) != names(other.held_out)
    assert len(one.held_out) == count and not one.dropped
    assert sorted(names(one.train) + names(one.held_out), key=int) == names(DISTINCT)
    assert names(one.train) == sorted(names(one.train), key=int)
    assert names(one.held_out) == sorted(names(one.held_out), key=int)


def test_near_duplicates_of_held_out_conversations_leave_training():
    base = split(DISTINCT, held_out=10)
    victim, safe = base.held_out[0], base.train[0]

    def variants(source):
        user, answer = (m.content for m in source.messages)
        return [
            talk("same", user, answer),
            talk("opening", user.upper() + " and more", text(60)),
            talk("answer", text(20), answer + " " + text(60)),
            talk("shifted", text(20), "Sure: " + answer),  # other start, nearly the same words
        ]

    # replacing training conversations leaves the choice of held-out ones as it was
    spare = iter(names(base.train)[-8:])
    swapped = {next(spare): v for source in (victim, safe) for v in variants(source)}
    result = split([swapped.get(c.id, c) for c in DISTINCT], held_out=10)
    assert names(result.held_out) == names(base.held_out)
    assert names(result.dropped) == ["same", "opening", "answer", "shifted"]  # those of a training one stay
    assert len(result.train) == 86


def test_shared_phrases_and_short_answers_do_not_count():
    phrase = text(10)
    many = [talk(str(i), text(20), f"{text(20)} {phrase} {text(20)}") for i in range(20)]
    many += [talk(str(20 + i), text(20), "Yes.") for i in range(20)]
    assert split(many, held_out=0.5).dropped == []


@pytest.mark.parametrize("held_out", [0, 0.0, 1.0, -1, 100, 101, "5"])
def test_impossible_sizes(held_out):
    with pytest.raises(KvshotError, match=f"cannot hold out {held_out} of 100 conversations"):
        split(DISTINCT, held_out=held_out)


def test_nothing_left_to_train_on():
    with pytest.raises(KvshotError, match="every training conversation resembles"):
        split([DISTINCT[0]] * 5, held_out=1)


def test_a_data_set_too_small_for_its_splits_names_the_option():
    with pytest.raises(KvshotError, match=r"100 conversations are too few to hold out 75 and .* on 25: .*--held-out"):
        split_corpus(DISTINCT, held_out=75, validation=25)
    with pytest.raises(KvshotError, match="^40 conversations are too few"):
        split_corpus(DISTINCT, held_out=30, validation=10, among=40)
    assert len(split_corpus(DISTINCT, held_out=74, validation=25)[0]["train"]) == 1
