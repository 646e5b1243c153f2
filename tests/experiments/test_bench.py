"""What the runs of a profile share: the same features, stored or not."""

from __future__ import annotations

import pytest

from kvshot.drafters import new_drafter, save_drafter
from kvshot.experiments import Bench, evaluate, experiment, profile


@pytest.mark.slow
def test_an_online_profile_measures_the_same_and_stores_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("KVSHOT_CACHE", str(tmp_path))
    online = Bench(profile("smoke").model_copy(update={"online": True}), device="cpu", quiet=True)
    config = experiment("hybrid-random").config(online.target, len(online.vocab))
    drafter = new_drafter(online.target, config, online.vocab, seed=0, init="random")
    save_drafter(tmp_path / "drafter", drafter, online.vocab, online.target)
    _, measured = evaluate(online, tmp_path / "drafter", 3)
    assert not (tmp_path / "features").exists()
    _, stored = evaluate(Bench(profile("smoke"), device="cpu", quiet=True), tmp_path / "drafter", 3)
    assert (tmp_path / "features").exists() and measured == stored
