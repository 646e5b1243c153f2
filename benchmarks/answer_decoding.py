"""How should answers be decoded? Greedy against sampled, by what an n-gram table predicts and how much text loops.

    python benchmarks/answer_decoding.py results/data/answer_decoding.json

Text that a table of stock phrases predicts well makes every drafter look alike. Each row: the same user turns' recipe
and seed, only the answers' temperature differs; n-gram rates are cross-validated over conversations (4 folds).
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np

from kvshot.allocator import restart_with_settings
from kvshot.data import Example
from kvshot.data.filters import looping
from kvshot.data.synthesize import Recipe, synthesize
from kvshot.evaluation import NgramModel
from kvshot.fileio import atomic_file
from kvshot.targets import load_target


def repeats_itself(ids: np.ndarray, n: int = 4) -> tuple[int, int]:
    """Tokens that follow the same n-1 tokens as earlier in the same answer did: (how many, of how many)."""
    seen, hits = {}, 0
    for i in range(n, len(ids)):
        context = tuple(ids[i - n : i].tolist())
        hits += seen.get(context) == ids[i]
        seen[context] = ids[i]
    return hits, max(0, len(ids) - n)


def ngram_rate(answers: list[np.ndarray], order: int, folds: int = 4) -> float:
    examples = [Example(str(i), a, np.ones(len(a), bool)) for i, a in enumerate(answers)]
    hits = total = 0
    for fold in range(folds):
        model = NgramModel.fit([e for i, e in enumerate(examples) if i % folds != fold], order)
        for e in examples[fold::folds]:
            hits += int((model.predict(e.ids)[:-1] == e.ids[1:]).sum())
            total += len(e.ids) - 1
    return hits / total


def measure(temperature: float, answer_tokens: int) -> dict:
    recipe = Recipe(target="smollm2-135m", seed=1, answer_temperature=temperature)
    tokenizer = load_target(recipe.target, device="cpu").tokenizer
    with tempfile.TemporaryDirectory() as folder:
        kept, report = synthesize(recipe, folder, answer_tokens=answer_tokens, max_rows=64)
        answers = [np.array(tokenizer(c.messages[-1].content, add_special_tokens=False)["input_ids"]) for c in kept]
    answers = [a for a in answers if len(a) > 8]
    assert not any(looping(a) for a in answers)
    repeats = np.array([repeats_itself(a) for a in answers]).sum(0)
    return {
        "temperature": temperature, "top_p": recipe.answer_top_p, "answers": len(answers),
        "answer_tokens": int(sum(map(len, answers))),
        "kept": report.kept, "dropped": dict(sorted(report.dropped.items())),
        "dropped as looping": report.dropped["looping"] / (report.kept + report.dropped.total()),
        "ngram": {str(order): ngram_rate(answers, order) for order in (2, 3, 5)},
        "repeats itself": float(repeats[0] / repeats[1]),
    }


def main(out: str, answer_tokens: int = 15_000) -> None:
    rows = [measure(t, answer_tokens) for t in (0.0, 0.7)]
    with atomic_file(Path(out)) as tmp:
        tmp.write_text(json.dumps({"target": "smollm2-135m", "rows": rows}, indent=1) + "\n")
    for row in rows:
        print(f"T = {row['temperature']}: {row['dropped as looping']:.1%} dropped as looping, 5-gram "
              f"{row['ngram']['5']:.3f}, repeats itself {row['repeats itself']:.3f}, {row['answer_tokens']} tokens")


if __name__ == "__main__":
    restart_with_settings()
    main(*sys.argv[1:2])
