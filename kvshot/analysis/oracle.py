"""The oracle query: what would be accepted if the drafter's queries knew what the target knows at that position?"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from kvshot.drafters.config import DrafterConfig
from kvshot.drafters.drafter import Chain, Drafter, Memory
from kvshot.drafters.injection import Given
from kvshot.errors import KvshotError
from kvshot.products import fast_products
from kvshot.progress import progress
from kvshot.targets import Features, Target
from kvshot.training.batches import load_batch, training_batches
from kvshot.training.ttt import TTTLoss, choose_columns, gather_columns


class WithStates(DrafterConfig):
    """The same drafter, which wants the target's states of some layers as well."""

    also: tuple[int, ...] = ()

    @property
    def hidden_needed(self) -> tuple[int, ...]:
        before = super().hidden_needed
        return before + tuple(i for i in self.also if i not in before)


class OracleQueries(Drafter):
    """A trained drafter of which only the queries learn on, from more than they have.

    Every query gets a linear map, from zero, of the target's states `layers`. future: at the position that the step
    drafts from (i + 1 + k), which has read all tokens up to there; else at i, the last one that the target has read
    when drafting begins. With `layers` empty the queries learn on from what they have. Keys, values and all else stay
    as they were.
    """

    def __init__(self, drafter: Drafter, layers: tuple[int, ...], *, future: bool = True) -> None:
        config = drafter.config
        super().__init__(WithStates(**config.model_dump(), also=layers), drafter.embedding, drafter.vocab_ids)
        self.load_state_dict(drafter.state_dict())
        self.requires_grad_(False)
        self.to(drafter.norm.weight.device)
        self.future = future
        self.places = [self.config.hidden_needed.index(i) for i in layers]
        self.attentions = [layer.get_submodule(name) for layer in self.layers for name in layer.branches]
        self.maps = nn.ModuleList()
        for index, attention in enumerate(self.attentions):
            attention.q_proj.requires_grad_(True)
            if layers:
                made = nn.Linear(len(layers) * config.hidden_size, attention.q_proj.out_features, bias=False)
                nn.init.zeros_(made.weight)
                self.maps.append(made.to(self.norm.weight.device))
                attention.q_proj.register_forward_hook(self._add(index))

    def _add(self, index: int) -> Callable:
        def hook(module: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
            return output if self.here is None else output + self.maps[index](self.here)

        return hook

    def remember(self, given: Given, tokens: Tensor, memory: Memory | None = None) -> Memory:
        self.here = None  # the memory is that of the drafter
        if self.places:
            states = given.hidden[:, self.places].float()
            states = states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + 1e-6)
            self.states = states.transpose(1, 2).flatten(2)
        return super().remember(given, tokens, memory)

    def step(self, tokens: Tensor, positions: Tensor, state: Tensor | None, memory: Memory, limit: dict[str, Tensor],
             chain: Chain | None = None) -> tuple[Tensor, Chain]:
        if self.places:
            at = positions if self.future else limit["target"] - 1  # a column sees the entries of 0..i
            self.here = gather_columns(self.states, at).to(self.norm.weight.dtype)
        return super().step(tokens, positions, state, memory, limit, chain)


def learn_queries(drafter: Drafter, target: Target, store: Features, layers: tuple[int, ...], *, future: bool = True,
                  steps: int = 200, batch_tokens: int = 2048, columns: int | None = 32, lr: float = 1e-3,
                  n_steps: int = 7, seed: int = 0, bf16: bool = True, quiet: bool = False) -> OracleQueries:
    """Train the queries of a copy of `drafter` on the TTT loss: see `OracleQueries`.

    store: features of training text that hold those layers. AdamW, the rate falls linearly to zero. Raises KvshotError
    for a loss that is not finite.
    """
    learner = OracleQueries(drafter, layers, future=future)
    loss_of = TTTLoss(learner, target.scorer(learner.vocab_ids, wide=False), n_steps=n_steps)
    learned = [p for p in learner.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    batches, device = training_batches(store.lengths, batch_tokens, seed), learner.vocab_ids.device
    with progress("learning queries (steps)", steps, quiet=quiet) as advance:
        for step in range(steps):
            batch = load_batch(store, next(batches), learner.config)
            generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
            chosen = choose_columns(batch.loss_mask, n_steps, columns, generator).to(device)
            with fast_products(device, torch.bfloat16 if bf16 else torch.float32):
                with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                    loss = loss_of(batch.to(device), chosen)
                if not loss.isfinite():
                    raise KvshotError(f"the loss is {loss.item()} at step {step}: lower the learning rate (now {lr})")
                loss.backward()
            nn.utils.clip_grad_norm_(learned, 1.0)
            optimizer.param_groups[0]["lr"] = lr * (1 - step / steps)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            advance(1, f"loss {loss.item():.3f}")
    return learner.eval()
