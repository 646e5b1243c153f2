"""Which optimizer, which learning rate, which start? Short runs of EAGLE-3, compared on validation MAT.

    python benchmarks/recipe.py results/choices/laptop-eagle3.json [profile] [steps]

Every run sees the same batches and columns; only what its name says differs. The validation split is not reported on
anywhere else.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from kvshot.allocator import restart_with_settings
from kvshot.drafters.config import checked
from kvshot.experiments import Bench, profile, train
from kvshot.experiments.record import describe_machine
from kvshot.fileio import atomic_file
from kvshot.training.trainer import TrainConfig

CHOICES = {
    "from the target, AdamW, lr 3e-3": {"init": "target", "optimizer": "adamw", "lr": 3e-3},
    "from the target, Muon, lr 3e-3": {"init": "target", "optimizer": "muon", "lr": 3e-3},
    "from random, AdamW, lr 3e-3": {"init": "random", "optimizer": "adamw", "lr": 3e-3},
    "from the target, AdamW, lr 1e-3": {"init": "target", "optimizer": "adamw", "lr": 1e-3},
}


def main(out: str, profile_name: str = "laptop", steps: str = "200") -> None:
    bench, rows = Bench(profile(profile_name)), []
    for name, choice in CHOICES.items():
        given = {"steps": int(steps), "eval_every": int(steps), **choice}
        config = checked(TrainConfig, {**bench.profile.train.model_dump(), **given})
        with tempfile.TemporaryDirectory() as folder:
            done = train(bench, "eagle3", folder, config)
        last = done.curve[-1]
        rows.append({"name": name, **choice, **last, "tokens_per_second": done.tokens / done.seconds})
        print(f"{name}: MAT {last['mat']:.3f}, loss {last['loss']:.3f}, {rows[-1]['tokens_per_second']:,.0f} tokens/s",
              flush=True)
        with atomic_file(Path(out)) as tmp:
            tmp.write_text(json.dumps({
                "profile": profile_name, "draft_vocab_size": len(bench.vocab),
                "recipe": bench.profile.train.model_dump(mode="json"),
                "data": bench.data_info().model_dump(), "machine": describe_machine().model_dump(), "rows": rows,
            }, indent=1) + "\n")


if __name__ == "__main__":
    restart_with_settings()
    main(*sys.argv[1:])
