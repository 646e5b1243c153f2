"""Processes that share a batch train the drafter that one process trains."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvshot.experiments import Bench, profile, train
from kvshot.experiments.run import recipe

# every kind of drafter: torch refuses to share one of which a parameter gets no gradient
NAMES = ("eagle3", "mtp", "kv-only-2", "hybrid-random", "cross-only-random", "no-prefix-attention", "no-target-info")
RECIPE = {"steps": 3, "eval_every": 3, "columns_per_sequence": None}
# batches of about five sequences, shared unevenly; and of two: the third process has no part in them
RUNS = [(name, 640) for name in NAMES] + [("eagle3", 260)]


def train_all(folder: Path) -> None:
    for name, tokens in RUNS:
        bench = Bench(profile("smoke"), experiments=[name], device="cpu", quiet=True)
        train(bench, name, folder / f"{name}-{tokens}", recipe(bench.profile, name, batch_tokens=tokens, **RECIPE))


@pytest.mark.slow
def test_three_processes_train_what_one_trains(tmp_path):
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    train_all(alone)
    subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", __file__,
                    str(shared)], check=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"})
    for name, tokens in RUNS:
        one, all_three = (torch.load(folder / f"{name}-{tokens}" / "last.pt", weights_only=True)
                          for folder in (alone, shared))
        before, after = (saved["progress"]["curve"][-1] for saved in (one, all_three))
        assert before["tokens"] == after["tokens"] and before["loss"] == pytest.approx(after["loss"], rel=1e-4)
        for key, tensor in one["drafter"].items():
            torch.testing.assert_close(all_three["drafter"][key], tensor, rtol=1e-3, atol=1e-5, msg=f"{name}: {key}")


if __name__ == "__main__":
    train_all(Path(sys.argv[1]))
