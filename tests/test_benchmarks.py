"""The scripts that measure still start: nothing else runs them between two measurements."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from kvshot.targets import load_target

SCRIPTS = sorted(p.stem for p in (Path(__file__).parents[1] / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_can_be_imported(name):
    assert callable(importlib.import_module(f"benchmarks.{name}").main)


def test_speed_measures_all_that_it_names(capsys):
    speed, target = importlib.import_module("benchmarks.speed"), load_target("smoke", device="cpu")
    ids = torch.randint(3, 250, (2, 24), generator=torch.Generator().manual_seed(0))
    speed.capture_speed(target, ids)
    speed.training_speed(target, ids, vocab_size=40)
    speed.generation_speed(target, ids[0, :4].tolist(), n=3, new=5)
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in printed] == ["capture", "TTT step, K = 7", "generation, 3 rows"]
    assert all("tokens/s; " in line for line in printed)


@pytest.mark.parametrize(("experiment", "choice", "said"), [
    ("mtp", "lr 2e-3", "no choices for 'mtp': choose eagle3, kv-only-2"),
    ("eagle3", "lr 9", "unknown choice lr 9: choose as chosen, "),
])
def test_a_recipe_trial_that_does_not_exist_is_refused(tmp_path, experiment, choice, said):
    with pytest.raises(SystemExit, match=said):
        importlib.import_module("benchmarks.recipe").main(tmp_path / "out.json", experiment, "smoke", "2048", choice)
    assert not any(tmp_path.iterdir())
