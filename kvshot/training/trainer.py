"""Train a drafter on a feature store: accelerate for device and precision, a checkpoint that resumes bit for bit."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import torch
from accelerate import Accelerator
from pydantic import BaseModel, ConfigDict, Field
from torch import nn

from kvshot.data import DraftVocab
from kvshot.drafters.checkpoint import save_drafter
from kvshot.drafters.config import DrafterConfig
from kvshot.drafters.drafter import Drafter
from kvshot.errors import KvshotError
from kvshot.fileio import atomic_file
from kvshot.progress import progress
from kvshot.targets import FeatureStore, Target
from kvshot.training.batches import load_batch, training_batches
from kvshot.training.ttt import TTTLoss, choose_columns


class TrainConfig(BaseModel):
    """One recipe for all rows of a comparison. Lengths in tokens or optimizer steps."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    steps: int = Field(2000, ge=1)
    batch_tokens: int = Field(4096, ge=16)
    n_steps: int = Field(7, ge=1, description="TTT steps K")
    decay: float = Field(0.8, gt=0, le=1, description="loss weight decay^k of step k")
    columns_per_sequence: int | None = Field(48, ge=1, description="None: every supervised column")
    lr: float = Field(1e-3, gt=0)
    warmup: float = Field(0.03, ge=0, lt=1, description="share of the steps")
    final_lr: float = Field(0.05, ge=0, le=1, description="share of lr at the end of the cosine")
    weight_decay: float = Field(0.01, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = Field(1.0, gt=0)
    head_init: Literal["random", "target"] = "target"
    precision: Literal["no", "bf16"] = "bf16"
    eval_every: int = Field(200, ge=1)
    seed: int = 0


@dataclass
class Progress:
    """What a run has behind it; `curve` holds one dict a check: step, tokens, loss, and what `evaluate` returned."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best_mat: float = -math.inf
    best_step: int = 0
    curve: list[dict] = field(default_factory=list)


def new_drafter(target: Target, config: DrafterConfig, vocab: DraftVocab, *, seed: int,
                head_init: Literal["random", "target"] = "target") -> Drafter:
    """A fresh drafter: normal(0, 0.02) matrices; with head_init "target" the target's pruned head and final norm."""
    generator = torch.Generator().manual_seed(seed)
    drafter = Drafter(config, target.embedding_weight.float(), vocab.ids.to(target.device))
    for module in drafter.modules():
        if isinstance(module, nn.Linear):
            weight = torch.empty(module.weight.shape).normal_(0.0, 0.02, generator=generator)
            module.weight.data.copy_(weight)
    drafter.to(target.device)
    if head_init == "target":
        drafter.lm_head.weight.data.copy_(target.head_weight[vocab.ids.to(target.device)])
        drafter.norm.weight.data.copy_(target.decoder.norm.weight)
    return drafter


def learning_rate(config: TrainConfig, step: int) -> float:
    """Linear warm-up, then a cosine to final_lr * lr; `step` counts from 0."""
    warm = max(1, round(config.warmup * config.steps))
    if step < warm:
        return config.lr * (step + 1) / warm
    t = (step - warm) / max(1, config.steps - warm)
    return config.lr * (config.final_lr + (1 - config.final_lr) * 0.5 * (1 + math.cos(math.pi * min(t, 1.0))))


class Trainer:
    """Runs a recipe. `folder` gets `last.pt` (all that a resume needs) and `best/` (the drafter, by held-out MAT).

    evaluate(drafter) -> dict with at least "mat": the validation measure, asked every `eval_every` steps.
    """

    def __init__(self, target: Target, drafter: Drafter, vocab: DraftVocab, store: FeatureStore, config: TrainConfig,
                 folder: str | os.PathLike, evaluate: Callable[[Drafter], dict]) -> None:
        missing = set(drafter.config.hidden_layers) - set(store.meta["hidden_layers"])
        if missing:
            raise KvshotError(f"the feature store lacks hidden layers {sorted(missing)}: capture them first")
        self.target, self.drafter, self.vocab, self.store = target, drafter, vocab, store
        self.config, self.folder, self.evaluate = config, Path(folder), evaluate
        # `cpu` is for a target that was put on the CPU of a machine that has a GPU
        self.accelerator = Accelerator(cpu=target.device.type == "cpu")
        teacher = target.scorer(vocab.ids.to(target.device))
        loss = TTTLoss(drafter, teacher, n_steps=config.n_steps, decay=config.decay)
        optimizer = torch.optim.AdamW(drafter.parameters(), lr=config.lr, betas=config.betas,
                                      weight_decay=config.weight_decay, fused=True)
        self.loss, self.optimizer = self.accelerator.prepare(loss, optimizer)
        self.done = Progress()

    def run(self, *, until: int | None = None, quiet: bool = False) -> Progress:
        """Train to step `until` (default: the end), from `last.pt` if it is there.

        Raises KvshotError when the loss is not finite, or `last.pt` belongs to another recipe.
        """
        self._resume()
        config, state = self.config, self.done
        until = config.steps if until is None else until
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        batches = training_batches(self.store.lengths, config.batch_tokens, config.seed, state.step * world)
        running: list[torch.Tensor] = []
        self.loss.train()
        with progress("training (steps)", config.steps, quiet=quiet) as advance:
            advance(state.step)
            started, before = time.monotonic(), state.seconds
            while state.step < until:
                indices = [next(batches) for _ in range(world)][rank]
                running.append(self._step(indices))
                state.step += 1
                state.seconds = before + time.monotonic() - started
                last = state.step == until
                if state.step % config.eval_every == 0 or last:
                    self._check(running)
                    running.clear()
                advance(1, self._note())
        return state

    def _step(self, indices: list[int]) -> torch.Tensor:
        config, state = self.config, self.done
        batch = load_batch(self.store, indices, self.accelerator.device)
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + state.step)
        columns = choose_columns(batch.loss_mask, config.n_steps, config.columns_per_sequence, generator)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(config, state.step)
        with self._autocast():
            loss = self.loss(batch, columns)
        self.accelerator.backward(loss)
        self.accelerator.clip_grad_norm_(self.drafter.parameters(), config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        state.tokens += sum(self.store.lengths[i] for i in indices) * self.accelerator.num_processes
        return loss.detach()

    def _check(self, running: list[torch.Tensor]) -> None:
        """Loss so far, validation, best drafter, resume point."""
        state = self.done
        loss = torch.stack(running).mean().item()
        if not math.isfinite(loss):
            raise KvshotError(f"the loss is {loss} before step {state.step}: lower the learning rate "
                              f"(now {self.config.lr}) or check the captured features for NaN")
        self.drafter.eval()
        with self._autocast():
            measured = self.evaluate(self.drafter)
        self.drafter.train()
        state.curve.append({"step": state.step, "tokens": state.tokens, "loss": loss, **measured})
        if measured["mat"] > state.best_mat:
            state.best_mat, state.best_step = measured["mat"], state.step
            if self.accelerator.is_main_process:
                save_drafter(self.folder / "best", self.drafter, self.vocab, self.target)
        if self.accelerator.is_main_process:
            self._save()

    def _autocast(self):
        """bf16 products over fp32 masters. Not accelerate's own: that is one setting for the whole process."""
        return torch.autocast(self.accelerator.device.type, torch.bfloat16, enabled=self.config.precision == "bf16")

    def _note(self) -> str:
        state = self.done
        rate = state.tokens / max(state.seconds, 1e-9)
        return f"{rate:,.0f} tokens/s, best MAT {state.best_mat:.3f}" if state.curve else f"{rate:,.0f} tokens/s"

    def _save(self) -> None:
        payload = {"config": self.config.model_dump(), "drafter": self.drafter.state_dict(),
                   "optimizer": self.optimizer.state_dict(), "progress": asdict(self.done),
                   "store": self.store.meta["key"]}
        with atomic_file(self.folder / "last.pt") as tmp:
            torch.save(payload, tmp)

    def _resume(self) -> None:
        path = self.folder / "last.pt"
        if not path.exists():
            return
        saved = torch.load(path, map_location=self.accelerator.device, weights_only=True)
        if saved["config"] != self.config.model_dump() or saved["store"] != self.store.meta["key"]:
            raise KvshotError(f"{path} belongs to another recipe or data set: use another folder or delete it")
        self.drafter.load_state_dict(saved["drafter"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.done = Progress(**saved["progress"])
