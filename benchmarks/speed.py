"""Speed of the hot paths, as ratios within one run (timings of a shared machine mean little by themselves).

    python benchmarks/speed.py

capture against the bare decoder; a TTT step with sampled columns against all columns; the batched generator against
transformers' `generate` at the same batch.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable

import numpy as np
import torch

from kvshot.allocator import restart_with_settings
from kvshot.data import DraftVocab, Example
from kvshot.data.generate import BlockGenerator, Row, Sampled
from kvshot.drafters import eagle3
from kvshot.drafters.init import new_drafter
from kvshot.products import fast_products
from kvshot.targets import FeatureStore, Target, capture, load_target
from kvshot.training.batches import load_batch
from kvshot.training.ttt import TTTLoss, choose_columns


def interleaved(repeats: int, **work: Callable[[], None]) -> dict[str, float]:
    """Median seconds of each, run in turns after one warm-up."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(repeats + 1):
        for name, f in work.items():
            start = time.perf_counter()
            f()
            if turn:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(t) for name, t in times.items()}


def report(title: str, tokens: int, seconds: dict[str, float]) -> None:
    first, *rest = seconds
    print(f"{title}: {first} {tokens / seconds[first]:,.0f} tokens/s", end="")
    for name in rest:
        print(f"; {name} {tokens / seconds[name]:,.0f} ({seconds[first] / seconds[name]:.2f} times)", end="")
    print(flush=True)


def capture_speed(target: Target, ids: torch.Tensor) -> None:
    """On tokens [B, T]."""
    mask = torch.ones_like(ids, dtype=torch.bool)
    with torch.inference_mode():
        report("capture", ids.numel(), interleaved(
            3, decoder=lambda: target.decoder(ids, use_cache=False),
            capture=lambda: capture(target, ids, mask, kv_layers=())))


def training_speed(target: Target, ids: torch.Tensor, vocab_size: int = 8192) -> None:
    """Of EAGLE-3 on tokens [B, T], all of them supervised."""
    examples = [Example(str(i), row.numpy(), np.ones(len(row), bool)) for i, row in enumerate(ids)]
    vocab = DraftVocab.from_examples(examples, target.vocab_size, vocab_size)
    drafter = new_drafter(target, eagle3(target, draft_vocab_size=len(vocab)), vocab, seed=0)
    loss = TTTLoss(drafter, target.scorer(vocab.ids))
    with tempfile.TemporaryDirectory() as folder:
        store = FeatureStore.build(folder, target, examples, kv_layers=(), quiet=True)
        batch = load_batch(store, range(len(examples)), drafter.config)

    def step(per_sequence: int | None) -> None:
        with fast_products(target.device, torch.bfloat16):
            with torch.autocast("cpu", torch.bfloat16):
                value = loss(batch, choose_columns(batch.loss_mask, 7, per_sequence))
            value.backward()
        drafter.zero_grad()

    report("TTT step, K = 7", ids.numel(), interleaved(
        2, **{"all columns": lambda: step(None), "48 a sequence": lambda: step(48)}))


def generation_speed(target: Target, prefix: list[int], n: int, new: int) -> None:
    """Of n greedy rows of `new` tokens behind one prefix."""
    generator = BlockGenerator(target.model, prefix, capacity=len(prefix) + new + 2, block_rows=n, max_rows=n)

    def ours() -> None:
        list(generator.run(iter([(0, [Row((Sampled(new, frozenset()),)) for _ in range(n)])])))

    def theirs() -> None:
        target.model.generate(torch.tensor([prefix] * n), max_new_tokens=new, min_new_tokens=new, do_sample=False,
                              pad_token_id=0)

    report(f"generation, {n} rows", n * new, interleaved(1, generate=theirs, ours=ours))


def main() -> None:
    target = load_target("smollm2-135m", device="cpu")
    ids = torch.randint(3, 40_000, (16, 256), generator=torch.Generator().manual_seed(0))
    capture_speed(target, ids)
    training_speed(target, ids)
    generation_speed(target, ids[0, :24].tolist(), n=96, new=64)


if __name__ == "__main__":
    restart_with_settings()
    main()
