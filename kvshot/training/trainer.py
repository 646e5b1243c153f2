"""Train a drafter on a feature store: accelerate for device and precision, a checkpoint that resumes bit for bit."""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, PartialState
from accelerate.utils import DistributedType
from pydantic import BaseModel, ConfigDict, Field

from kvshot.data import DraftVocab
from kvshot.drafters.checkpoint import load_drafter, save_drafter
from kvshot.drafters.config import DrafterConfig
from kvshot.drafters.drafter import Drafter
from kvshot.drafters.init import Init
from kvshot.errors import KvshotError, memory_is_full
from kvshot.fileio import atomic_file, restore_folder
from kvshot.products import WideProducts, wide_is_faster
from kvshot.progress import progress
from kvshot.targets import Features, Target
from kvshot.training.batches import load_batch, training_batches
from kvshot.training.probes import Probes, numbers
from kvshot.training.ttt import TTTLoss, choose_columns


class TrainConfig(BaseModel):
    """One recipe for all rows of a comparison. Lengths in tokens or optimizer steps."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    steps: int = Field(2000, ge=1)
    batch_tokens: int = Field(4096, ge=16, description="of one optimizer step, however many processes share it")
    n_steps: int = Field(7, ge=1, description="TTT steps K")
    decay: float = Field(0.8, gt=0, le=1, description="loss weight decay^k of step k")
    columns_per_sequence: int | None = Field(48, ge=1, description="None: every supervised column")
    lr: float = Field(1e-3, gt=0)
    warmup: float = Field(0.03, ge=0, lt=1, description="share of the steps")
    final_lr: float = Field(0.05, ge=0, le=1, description="share of lr at the end of the cosine")
    weight_decay: float = Field(0.01, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = Field(1.0, gt=0)
    init: Init = "target"
    optimizer: Literal["adamw", "muon"] = Field("adamw", description="muon: for all matrices but the draft head")
    offline: bool = Field(False, description="every step from the target's states: no drift alignment (Table 6)")
    kv_gradient: float = Field(1.0, gt=0, description="factor on the gradient of draft-side W_K, W_V (Table 6)")
    precision: Literal["no", "bf16"] = "bf16"
    eval_every: int = Field(200, ge=1)
    seed: int = Field(0, ge=0)


@dataclass
class Progress:
    """What a run has behind it.

    curve: one dict a check (step, tokens, loss, and what `evaluate` returned); probes: one dict a step (`Probes`);
    wide: bfloat16 products in float32 arithmetic (`kvshot.products`), as the run began.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best_mat: float = -math.inf
    best_step: int = 0
    curve: list[dict] = field(default_factory=list)
    probes: list[dict] = field(default_factory=list)
    wide: bool = False


def scale_kv_gradient(drafter: Drafter, factor: float) -> None:
    """Scale the gradient of the projections that make the drafter's own keys and values, before clipping."""
    for layer in drafter.layers:
        for name in layer.branches:
            attention = layer.get_submodule(name)
            for projection in (attention.k_proj, attention.v_proj):
                projection.weight.register_hook(lambda gradient: gradient * factor)


def make_optimizers(drafter: Drafter, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """AdamW for everything, or Muon for the matrices inside and AdamW for norms and draft head.

    Muon's steps are scaled to the size of AdamW's, so that one learning rate serves both.
    """
    inner = [p for name, p in drafter.named_parameters() if p.ndim == 2 and name != "lm_head.weight"]
    muon = inner if config.optimizer == "muon" else []
    chosen = {id(p) for p in muon}
    rest = [p for p in drafter.parameters() if id(p) not in chosen]
    adamw = torch.optim.AdamW(rest, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=True)
    if not muon:
        return [adamw]
    return [adamw, torch.optim.Muon(muon, lr=config.lr, weight_decay=config.weight_decay,
                                    adjust_lr_fn="match_rms_adamw")]


def learning_rate(config: TrainConfig, step: int) -> float:
    """Linear warm-up, then a cosine to final_lr * lr; `step` counts from 0."""
    warm = max(1, round(config.warmup * config.steps))
    if step < warm:
        return config.lr * (step + 1) / warm
    t = (step - warm) / max(1, config.steps - warm)
    return config.lr * (config.final_lr + (1 - config.final_lr) * 0.5 * (1 + math.cos(math.pi * min(t, 1.0))))


def processes(device: torch.device) -> PartialState:
    """Who trains: this process, or all that a launcher (torchrun, accelerate) started, one on each device."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # the others wait for the first one's capture, which takes longer than a hung collective is given by default
    return PartialState(cpu=device.type == "cpu", timeout=timedelta(days=1))


def _accelerator(device: torch.device) -> Accelerator:
    """Device and processes by accelerate; precision is ours. The embedding is a buffer: DDP need not broadcast it."""
    processes(device)
    kwargs = DistributedDataParallelKwargs(broadcast_buffers=False)
    try:
        accelerator = Accelerator(mixed_precision="no", cpu=device.type == "cpu", kwargs_handlers=[kwargs])
    except ValueError as err:
        raise KvshotError(f"this process has already trained on another device: start a new one for {device}") from err
    if accelerator.distributed_type not in (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU):
        raise KvshotError(f"training does not shard a drafter ({accelerator.distributed_type}): launch plain data "
                          "parallel processes")
    if accelerator.device.type != device.type:
        raise KvshotError(f"the target is on {device}, training would run on {accelerator.device}: start a new "
                          "process, or load the target there")
    return accelerator


class Trainer:
    """Runs a recipe. `folder` gets `last.pt` (all that a resume needs) and `best/` (the drafter, by held-out MAT).

    evaluate(drafter) -> dict with at least "mat": the validation measure, asked every `eval_every` steps.
    """

    def __init__(self, target: Target, drafter: Drafter, vocab: DraftVocab, store: Features, config: TrainConfig,
                 folder: str | os.PathLike, evaluate: Callable[[Drafter], dict]) -> None:
        self.target, self.drafter, self.vocab, self.store = target, drafter, vocab, store
        self.config, self.folder, self.evaluate = config, Path(folder), evaluate
        self.accelerator = _accelerator(target.device)
        teacher = target.scorer(vocab.ids.to(target.device), wide=False)  # the loss widens it, a part at a time
        loss = TTTLoss(drafter, teacher, n_steps=config.n_steps, decay=config.decay, offline=config.offline,
                       mean=lambda x: self.accelerator.reduce(x, "mean"))
        if config.kv_gradient != 1:
            scale_kv_gradient(drafter, config.kv_gradient)
        self.probes, self.seen = Probes(drafter), []
        with warnings.catch_warnings():  # accelerate passes on what torch has begun to rename
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            self.loss = self.accelerator.prepare(loss)
        self.optimizers = [self.accelerator.prepare(o) for o in make_optimizers(drafter, config)]
        products = torch.bfloat16 if config.precision == "bf16" else torch.float32
        self.done = Progress(wide=wide_is_faster(self.accelerator.device, products))

    def run(self, *, until: int | None = None, quiet: bool = False, begins: Callable[[], None] = lambda: None
            ) -> Progress:
        """Train to step `until` (default: the end), from `last.pt` if it is there. begins: called before a first step.

        Raises KvshotError when the loss is not finite, or `last.pt` belongs to another recipe.
        """
        self._resume()
        steps = self.accelerator.gather(torch.tensor([self.done.step], device=self.accelerator.device))
        if steps.min() != steps.max():
            raise KvshotError(f"the processes found different steps in {self.folder}: give them one shared folder")
        config, state = self.config, self.done
        until = config.steps if until is None else until
        if state.step < until:
            begins()
        batches = training_batches(self.store.lengths, config.batch_tokens, config.seed, state.step)
        running: list[tuple[torch.Tensor, torch.Tensor]] = []
        with progress("training (steps)", config.steps, start=state.step, quiet=quiet) as advance:
            started = time.monotonic() - state.seconds
            while state.step < until:
                running.append(self._step(next(batches)))
                state.step += 1
                if self._checked(state.step) or state.step == until:
                    losses = self._finite(running)  # waits for the device, so the time below is that of the work
                    state.seconds = time.monotonic() - started
                    self._check(losses)
                    running.clear()
                    started = time.monotonic() - state.seconds  # validation is not training time
                else:
                    state.seconds = time.monotonic() - started
                advance(1, self._note())
        return state

    def _step(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """One optimizer step on these sequences, of which this process takes its part. Loss and gradient norm."""
        config, state = self.config, self.done
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        own = indices[rank::world]
        batch = load_batch(self.store, own or indices[:1], self.drafter.config)
        generator = torch.Generator().manual_seed((config.seed * 1_000_003 + state.step) * world + rank)
        columns = choose_columns(batch.loss_mask, config.n_steps, config.columns_per_sequence, generator)
        columns.weight *= bool(own)  # more processes than sequences: this one only keeps step
        batch, columns = batch.to(self.accelerator.device), columns.to(self.accelerator.device)
        for group in (g for optimizer in self.optimizers for g in optimizer.param_groups):
            group["lr"] = learning_rate(config, state.step)
        with self.probes.watch(close=self._checked(state.step + 1)):
            with self._products():
                with self._autocast():
                    loss = self.loss(batch, columns)
                self.accelerator.backward(loss)
        self.seen.append({"step": state.step + 1, **self.probes.row()})
        norm = self.accelerator.clip_grad_norm_(self.drafter.parameters(), config.clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        state.tokens += sum(self.store.lengths[i] for i in indices)
        return loss.detach(), norm.detach()

    def _checked(self, step: int) -> bool:
        return step % self.config.eval_every == 0 or step == self.config.steps

    def _finite(self, running: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
        """Mean loss over the steps since the last check; a NaN in loss or gradient anywhere stops every process."""
        both = torch.stack([torch.stack(pair) for pair in running]).mean(0)
        loss, norm = self.accelerator.reduce(both, "mean").tolist()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise KvshotError(f"the loss is {loss} (gradient norm {norm}) before step {self.done.step}: lower the "
                              f"learning rate (now {self.config.lr}) or check the captured features for NaN")
        return loss

    def _check(self, loss: float) -> None:
        """Validation, best drafter, resume point."""
        state = self.done
        with self._products(), self._autocast():
            measured = self.evaluate(self.drafter)
        state.curve.append({"step": state.step, "tokens": state.tokens, "loss": loss, **measured})
        state.probes += numbers(self.seen)
        self.seen.clear()
        if measured["mat"] > state.best_mat:
            state.best_mat, state.best_step = measured["mat"], state.step
            if self.accelerator.is_main_process:
                save_drafter(self.folder / "best", self.drafter, self.vocab, self.target)
        if self.accelerator.is_main_process:
            self._save()
        self.accelerator.wait_for_everyone()

    def _autocast(self):
        """bf16 products over fp32 masters. Not accelerate's own: that is one setting for the whole process."""
        return torch.autocast(self.accelerator.device.type, torch.bfloat16, enabled=self.config.precision == "bf16")

    def _products(self):
        on_cpu = self.accelerator.device.type == "cpu"
        return WideProducts() if self.done.wide and on_cpu else nullcontext()

    def _note(self) -> str:
        state = self.done
        rate = state.tokens / max(state.seconds, 1e-9)
        return f"{rate:,.0f} tokens/s, best MAT {state.best_mat:.3f}" if state.curve else f"{rate:,.0f} tokens/s"

    def _save(self) -> None:
        payload = {"drafter": self.drafter.state_dict(),
                   "optimizers": [o.state_dict() for o in self.optimizers], "progress": asdict(self.done),
                   "belongs": self._belongs()}
        with atomic_file(self.folder / "last.pt") as tmp:
            torch.save(payload, tmp)

    def _belongs(self) -> dict:
        """What a resume point must share with the run that continues it."""
        meta = self.store.meta  # not its layers: what is read of them is in the drafter's configuration
        return {"config": self.config.model_dump(mode="json"),
                "data": [meta[k] for k in ("weights_sha256", "tokens_sha256", "computed_in", "stored_in")],
                "drafter": self.drafter.config.model_dump(mode="json"), "vocab": self.vocab.sha256}

    def _load(self, path: Path) -> None:
        saved = torch.load(path, map_location=self.accelerator.device, weights_only=True)
        belongs = saved["belongs"]
        # with the fields that were added since
        belongs["drafter"] = DrafterConfig(**belongs["drafter"]).model_dump(mode="json")
        for what, now in self._belongs().items():
            if belongs[what] != now:
                raise KvshotError(f"{path} belongs to another recipe (its {what} differs): use another folder or "
                                  "delete it")
        self.drafter.load_state_dict(saved["drafter"])
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.done = Progress(**saved["progress"])

    def _resume(self) -> None:
        self.seen.clear()
        path = self.folder / "last.pt"
        if not path.exists():
            return
        try:
            self._load(path)
        except KvshotError:
            raise
        except Exception as err:  # a damaged file, or a whole one of something else, raises nearly anything
            if memory_is_full(err):
                raise
            raise KvshotError(f"{path} is damaged ({type(err).__name__}): delete it to train from the start") from err
        restore_folder(self.folder / "best")  # killed while it was replaced: the one of this step lies aside
        try:
            load_drafter(self.folder / "best", self.target)
        except KvshotError as err:  # lost or foreign: the next check writes it again, if one is to come
            if self.done.step >= self.config.steps:
                raise KvshotError(f"{path} is of a finished run whose best checkpoint is lost ({err}): delete the "
                                  "folder to train again") from err
            self.done.best_mat = -math.inf
