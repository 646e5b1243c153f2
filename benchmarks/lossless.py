"""Is the text really the target's? Decode with a published drafter in float32, then let the target judge every token.

    python benchmarks/lossless.py results/laptop-long/lossless.json [prompts] [new tokens]

The target reads each text in one pass. A token that is not its first choice there is counted, with how much worse its
score is: where the two best scores nearly tie, passes over different numbers of tokens may round to different choices.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from kvshot.allocator import restart_with_settings
from kvshot.data import prompt_ids
from kvshot.evaluation.decode import decode, plain_decode
from kvshot.evaluation.tree import TreeShape
from kvshot.experiments import Bench, profile, published_drafter
from kvshot.experiments.record import describe_code, describe_machine
from kvshot.fileio import atomic_file
from kvshot.progress import progress
from kvshot.targets import Target, capture

SHAPES = TreeShape(4), TreeShape(4, 4, 12)


def shortfalls(target: Target, prompt: list[int], text: list[int]) -> torch.Tensor:
    """Best score minus that of the token that was written, [N]; 0 where it is the best one."""
    final = capture(target, torch.tensor([[*prompt, *text]]), hidden_layers=(), kv_layers=()).final
    scores = target.logits(final[0, len(prompt) - 1 : -1])
    return scores.amax(-1) - scores.gather(-1, torch.tensor(text, device=scores.device)[:, None])[:, 0]


def main(out: str, prompts: str = "100", new_tokens: str = "48", plain: str = "20") -> None:
    bench = Bench(profile("laptop-long").model_copy(update={"dtype": "float32"}))
    target = bench.target
    drafter = published_drafter("eagle3", target, "results", "laptop-long")
    half = int(prompts) // len(bench.domains)
    chosen = [c for d in bench.domains for c in bench.conversations[d][:half]]
    asked = [prompt_ids(target.tokenizer, c.messages[:-1], options=bench.template) for c in chosen]
    rows = []
    with progress("decoding (prompts)", len(asked)) as advance:
        for number, prompt in enumerate(asked):
            shape = SHAPES[number % len(SHAPES)]
            text = decode(target, drafter, prompt, max_new_tokens=int(new_tokens), shape=shape).tokens
            short = shortfalls(target, prompt, text)
            row = {"shape": shape.name, "tokens": len(text), "not first": int((short > 0).sum()),
                   "largest shortfall": float(short.max())}
            if number % max(1, len(asked) // int(plain)) == 0:
                row["same as plain"] = text == plain_decode(target, prompt, int(new_tokens))
            rows.append(row)
            advance()
    with atomic_file(Path(out)) as tmp:
        tmp.write_text(json.dumps({
            "target": bench.target_info().model_dump(), "computed_in": "float32", "max_new_tokens": int(new_tokens),
            "machine": describe_machine(target.device).model_dump(), "code": describe_code().model_dump(),
            "rows": rows}, indent=1) + "\n")
    print(f"{len(rows)} texts, {sum(r['tokens'] for r in rows)} tokens, {sum(r['not first'] for r in rows)} not first, "
          f"largest shortfall {max(r['largest shortfall'] for r in rows):.2g}")


if __name__ == "__main__":
    restart_with_settings()
    main(*sys.argv[1:])
