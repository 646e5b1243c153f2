"""Which batch, optimizer, learning rate and start? Short runs of one drafter, compared on validation MAT.

    python benchmarks/recipe.py results/choices/laptop-eagle3.json eagle3
    python benchmarks/recipe.py results/choices/laptop-kv-only-2.json kv-only-2
    python benchmarks/recipe.py results/choices/laptop-eagle3-whole.json eagle3 laptop 2048000 "lr 2e-3" "lr 5e-4"

Every run sees as many tokens as 100 steps of the laptop profile have, or as many as are given; only what its name says
differs from the profile's recipe. Names behind the number of tokens: of the choices, these only. The validation split
is not reported on anywhere else. Rows that the file has are not run again.
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
from kvshot.experiments.run import recipe
from kvshot.fileio import atomic_file
from kvshot.training.trainer import TrainConfig

CHOICES = {
    "eagle3": {
        "as chosen": {},
        "another seed": {"seed": 1},
        "every column": {"columns_per_sequence": None},
        "batches of 4,096 tokens": {"batch_tokens": 4096},
        "lr 2e-3": {"lr": 2e-3},
        "lr 5e-4": {"lr": 5e-4},
        "start from the target": {"init": "target"},
        "start from the target, lr 2e-3": {"init": "target", "lr": 2e-3},
    },
    "kv-only-2": {
        "as chosen": {},
        "another seed": {"seed": 1},
        "every column": {"columns_per_sequence": None},
        "lr 2e-3": {"lr": 2e-3},
        "lr 5e-4": {"lr": 5e-4},
        "start from the target": {"init": "target"},
    },
}


def main(out: str, experiment: str, profile_name: str = "laptop", tokens: str = "204800", *only: str) -> None:
    if experiment not in CHOICES:
        raise SystemExit(f"no choices for {experiment!r}: choose {', '.join(CHOICES)}")
    if unknown := {*only} - {*CHOICES[experiment]}:
        raise SystemExit(f"unknown choice {', '.join(sorted(unknown))}: choose {', '.join(CHOICES[experiment])}")
    chosen = profile(profile_name)
    bench, path = Bench(chosen, experiments=[experiment]), Path(out)
    base = recipe(chosen, experiment)
    about = {"profile": profile_name, "experiment": experiment, "draft_vocab_size": chosen.draft_vocab_size,
             "recipe": base.model_dump(mode="json"), "data": bench.data_info().model_dump(),
             "machine": describe_machine().model_dump()}
    before = json.loads(path.read_text()) if path.exists() else {"rows": [], **about}
    if before["recipe"] != about["recipe"] or before["data"] != about["data"]:
        raise SystemExit(f"{out} holds rows of another recipe or other data: delete it to begin again")
    rows = before["rows"]
    for name, choice in CHOICES[experiment].items():
        if name in [row["name"] for row in rows] or only and name not in only:
            continue
        batch = choice.get("batch_tokens", base.batch_tokens)
        steps = int(tokens) // batch
        config = checked(TrainConfig, {**base.model_dump(), "steps": steps, "eval_every": steps, **choice})
        with tempfile.TemporaryDirectory() as folder:
            done = train(bench, experiment, folder, config)
        last = done.curve[-1]
        rows.append({"name": name, **choice, **last, "tokens_per_second": done.tokens / done.seconds})
        print(f"{name}: MAT {last['mat']:.3f}, loss {last['loss']:.3f}, {rows[-1]['tokens_per_second']:,.0f} tokens/s",
              flush=True)
        with atomic_file(path) as tmp:
            tmp.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    restart_with_settings()
    main(*sys.argv[1:])
