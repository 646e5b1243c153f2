from __future__ import annotations

import numpy as np
import pytest

from kvshot.data import Conversation, Filter, Report, looping

VARIED = np.random.default_rng(0).integers(0, 1000, 200).tolist()


def talk(user: str, answer: str) -> Conversation:
    return Conversation(
        id="c", messages=[{"role": "user", "content": user}, {"role": "assistant", "content": answer}])


@pytest.mark.parametrize("period", [1, 2, 3, 7, 20, 50])
def test_a_cycle_at_the_end_loops(period):
    cycle = list(range(2000, 2000 + period))
    repeats = -(-32 // period) + 3
    for cut in {0, period // 2}:  # the last round need not be whole
        assert looping(VARIED + (cycle * repeats)[: period * repeats - cut])
    assert not looping(VARIED + cycle * 2)


def test_a_cycle_that_ends_early_loops_only_when_it_dominates():
    cycle = [5, 6, 7, 8]
    assert looping(cycle * 60 + VARIED[:100])
    assert not looping(cycle * 10 + VARIED)


def test_numbered_repetition_loops():
    """Never exactly periodic: the number changes each time."""
    assert looping([t for n in range(12) for t in (3000 + n, *range(2000, 2015))])


def test_ordinary_text_does_not_loop():
    for length in (0, 1, 6, 31, 32, 200):
        assert not looping(VARIED[:length])
    assert not looping([9] * 31)  # too short to judge
    assert not looping(VARIED + [9] * 31)
    assert looping(VARIED + [9] * 32)
    # a list with equal bullets, a table with equal rules
    assert not looping([t for i in range(20) for t in (7, 8, *VARIED[5 * i: 5 * i + 5])])


def test_looping_against_a_plain_search():
    rng = np.random.default_rng(1)
    seen = set()
    for _ in range(300):
        ids = rng.integers(0, 2, int(rng.integers(1, 60))).tolist() + [1, 0] * int(rng.integers(0, 25))
        cyclic = any(
            len(ids) >= span and all(ids[-i] == ids[-i - period] for i in range(1, span - period + 1))
            for period in range(1, len(ids) // 3 + 1) for span in [max(3 * period, 32)]
        )
        grams = [tuple(ids[i:i + 6]) for i in range(len(ids) - 5)]
        repeated = len(grams) > 0 and sum(g in grams[:i] for i, g in enumerate(grams)) / len(grams) > 0.5
        expected = len(ids) >= 32 and (cyclic or repeated)
        assert looping(np.array(ids)) == expected
        seen.add((cyclic, repeated, expected))
    assert len(seen) >= 4


def test_filter_says_why():
    keep = Filter(prefix_words=4)
    ids = VARIED[:50]
    assert keep.keep(talk("Tell me a joke", "A man walks into a bar."), ids)
    assert not keep.keep(talk("Tell me a joke", " "), ids)
    assert not keep.keep(talk("Say it again", "again " * 40), [4] * 40)
    assert not keep.keep(talk("tell me a JOKE!", "A man walks into a bar"), ids)
    assert not keep.keep(talk("Tell me a joke about dogs", "Dogs do not joke."), ids)  # same opening
    assert not keep.keep(talk("Another one", "A man walks into another bar."), ids)  # same answer
    assert keep.keep(talk("Another one please", "A man sits in a bar."), ids)
    assert keep.keep(talk("Is it so?", "Yes."), ids)
    assert keep.keep(talk("Is it not?", "Yes."), ids)  # a short answer may come twice
    assert keep.keep(talk("???", "What?"), ids) and not keep.keep(talk("???", "Why?"), ids)
    assert keep.report.dropped == {"empty": 1, "looping": 1, "duplicate": 1, "near-duplicate": 3}
    assert str(keep.report) == (
        "kept 5 of 11; dropped 3 near-duplicate (27.3%), 1 duplicate (9.1%), 1 empty (9.1%), 1 looping (9.1%)"
    )


def test_a_dropped_conversation_does_not_block_its_like():
    keep = Filter()
    assert not keep.keep(talk("Say it", "again " * 40), [4] * 40)
    assert keep.keep(talk("Say it", "once"), VARIED[:50])


def test_empty_report():
    assert str(Report()) == "kept 0 of 0"
