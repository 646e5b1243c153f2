"""A replay of the target's own text makes the verify calls of a decoder that writes it."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from kvshot.errors import KvshotError
from kvshot.evaluation.decode import decode
from kvshot.evaluation.replay import Text, replay
from kvshot.evaluation.tree import TreeShape

from .test_decode import draw_case, make_drafter, make_target


def calls(report):
    return report.accepted, report.tried, report.kept


@pytest.mark.slow
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True,
          phases=[Phase.explicit, Phase.generate])  # to shrink a failure takes minutes
@given(data=st.data())
def test_a_replay_is_the_decoder(data):
    target, drafter, ids, shape, eos, n = draw_case(data.draw)
    done = decode(target, drafter, ids, max_new_tokens=n, shape=shape, eos_ids=eos)
    text = Text.read(target, drafter, ids, done.tokens, limit=n, eos_ids=eos)
    assert text.otherwise == 0
    length = data.draw(st.integers(1, 6))
    chain = decode(target, drafter, ids, max_new_tokens=n, shape=TreeShape(length), eos_ids=eos)
    replayed = replay(drafter, text, (TreeShape(6), TreeShape(length)))
    assert calls(replayed[f"chain {length}"]) == calls(chain.report)
    assert calls(replay(drafter, text, (shape,))[shape.name]) == calls(done.report)


def test_nothing_to_replay():
    target, drafter = make_target(11), make_drafter(11, "eagle3")
    with pytest.raises(KvshotError, match="at least one token"):
        Text.read(target, drafter, [1, 2], [])
    for limit in (2, 4):
        with pytest.raises(KvshotError, match="under a limit"):
            Text.read(target, drafter, [1, 2], [3, 4, 5], limit=limit, eos_ids=())
