"""Tokens per second on this machine: plain decoding, transformers' own ways, and published drafters.

    python benchmarks/wall_clock.py results/laptop/wall_clock.json [prompts] [new tokens]

Run it on an idle machine. Every prompt is decoded by every contestant before the next prompt begins; what counts are
the ratios. The drafters are those of which a checkpoint is published; without one the name is left out.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from kvshot.allocator import restart_with_settings
from kvshot.data import prompt_ids
from kvshot.drafters.checkpoint import load_drafter
from kvshot.evaluation.tree import TreeShape
from kvshot.experiments import Bench, profile
from kvshot.experiments.end_to_end import PAPER_TREE
from kvshot.experiments.record import describe_code, describe_machine
from kvshot.experiments.wall_clock import pass_costs, speed_ups, time_decoding
from kvshot.fileio import atomic_file

LONG = "eagle3, long"  # the best drafter there is: several shapes; the others for what a draft step costs
SHAPES = {LONG: (TreeShape(2), TreeShape(4), TreeShape(6), TreeShape(4, 4, 12), PAPER_TREE)}
WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 32, 48, 61)


def main(out: str, prompts: str = "8", new_tokens: str = "48", results: str = "results") -> None:
    bench = Bench(profile("laptop").model_copy(update={"dtype": "float32"}))
    target, drafters = bench.target, {}
    for folder in sorted(Path(results).glob("laptop*/*-seed0")):
        name = folder.name.removesuffix("-seed0")
        drafter, _ = load_drafter(folder, target)
        label = LONG if folder.parent.name == "laptop-long" else name
        for shape in SHAPES.get(label, (TreeShape(4),)):
            drafters[f"{label}, {shape.name}"] = drafter, shape
    domain = bench.domains[0]
    asked = [prompt_ids(target.tokenizer, c.messages[:-1]) for c in bench.conversations[domain][: int(prompts)]]
    times = time_decoding(target, asked, drafters, max_new_tokens=int(new_tokens))
    print(speed_ups(times).round(2).to_string())
    costs = pass_costs(target, asked[0] * 3, WIDTHS)
    with atomic_file(Path(out)) as tmp:
        tmp.write_text(json.dumps({
            "target": bench.target_info().model_dump(), "computed_in": "float32", "max_new_tokens": int(new_tokens),
            "machine": describe_machine(target.device).model_dump(), "code": describe_code().model_dump(),
            "pass_seconds": costs, "times": {domain: json.loads(times.to_json(orient="records"))}}) + "\n")


if __name__ == "__main__":
    restart_with_settings()
    main(*sys.argv[1:])
