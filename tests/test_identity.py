"""The identity on which the framework page stands, and its measure."""

import torch

from kvshot.analysis import target_as_drafter
from kvshot.targets import load_target


def test_all_blocks_of_the_smoke_target_draft_like_it():
    target = load_target("smoke", device="cpu")
    ids = torch.randint(3, 300, (2, 40), generator=torch.Generator().manual_seed(0))
    table = target_as_drafter(target, ids, 5)
    assert table["columns"].tolist() == [2 * 34] * 5
    assert (table["same choice"] == 1).all() and (table["largest difference"] < 1e-3).all()
