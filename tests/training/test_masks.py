from __future__ import annotations

import torch

from kvshot.training.masks import supervised_columns


def by_hand(mask: list[bool], n_steps: int) -> list[list[bool]]:
    """The definition in plain loops: x_{i+1}, x_{i+2+k} and every token between them are in a response."""
    length = len(mask)
    return [
        [i + 2 + k < length and all(mask[i + 1 : i + 3 + k]) for k in range(n_steps)] for i in range(length)
    ]


def test_hand_checkable_example():
    """position  0    1    2    3    4    5     6    7    8
    token     user user a    b    c    <end> user d    e      (a..<end> and d..e are responses)
    Column 1 holds x_2 = a: it predicts b, c, <end> at steps 0, 1, 2 and would leave the response at step 3.
    """
    mask = torch.tensor([0, 0, 1, 1, 1, 1, 0, 1, 1], dtype=torch.bool)
    triples = [
        (i, k, i + 2 + k) for i, k in supervised_columns(mask, 7).nonzero().tolist()
    ]  # (column, step, position of the predicted token)
    assert triples == [(1, 0, 3), (1, 1, 4), (1, 2, 5), (2, 0, 4), (2, 1, 5), (3, 0, 5), (6, 0, 8)]


def test_equals_plain_loops_single_and_batched():
    generator = torch.Generator().manual_seed(0)
    for n_steps in (1, 3, 7):
        masks = torch.rand(40, 23, generator=generator) < 0.75
        expected = torch.tensor([by_hand(row, n_steps) for row in masks.tolist()])
        assert torch.equal(supervised_columns(masks, n_steps), expected)
        assert torch.equal(supervised_columns(masks[3], n_steps), expected[3])
    assert expected.any() and not expected.all()


def test_a_later_step_implies_every_earlier_one():
    masks = torch.rand(20, 30, generator=torch.Generator().manual_seed(1)) < 0.8
    steps = supervised_columns(masks, 7).int()
    assert (steps.diff(dim=-1) <= 0).all()


def test_edges():
    assert supervised_columns(torch.ones(5, dtype=torch.bool), 7)[0].tolist() == [True] * 3 + [False] * 4
    assert not supervised_columns(torch.zeros(2, 6, dtype=torch.bool), 7).any()
    assert not supervised_columns(torch.ones(1, dtype=torch.bool), 7).any()
    assert supervised_columns(torch.zeros(2, 0, dtype=torch.bool), 7).shape == (2, 0, 7)
