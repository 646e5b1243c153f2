"""Draft a chain and let the target judge it, greedily and from scratch each round: for reading, not for speed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvshot.drafters.drafter import Drafter
from kvshot.drafters.injection import Given
from kvshot.errors import KvshotError
from kvshot.targets import Target, capture


@dataclass
class Round:
    """One round: K proposals behind a prefix, and the target's own choices in one pass over them.

    drafted [K], probability [K]: the drafter's first choice at each step and what it gave it (within the draft
    vocabulary). chosen [K + 1]: the target's greedy choice at each place, given the drafted tokens before it; the last
    is the bonus token after a chain that is right throughout. accepted: how many drafts were right before the first
    wrong one, or before the end of the text.
    """

    drafted: list[int]
    probability: list[float]
    chosen: list[int]
    accepted: int

    @property
    def kept(self) -> list[int]:
        """The tokens this round adds: accepted drafts and one choice of the target's own (MAT counts these)."""
        return self.drafted[: self.accepted] + [self.chosen[self.accepted]]


@torch.no_grad()
def draft_chain(target: Target, drafter: Drafter, ids: list[int], n_steps: int = 7) -> tuple[list[int], list[float]]:
    """K greedy proposals for what follows `ids`, whose last token the target chose but has not read.

    Returns target token ids and probabilities. Raises KvshotError for fewer than two tokens: there must be a prefix.
    """
    if len(ids) < 2:
        raise KvshotError("drafting needs at least two tokens: a prefix that the target read, and its choice")
    device = target.device
    every = torch.tensor([ids], device=device)
    config = drafter.config
    context = capture(target, every[:, :-1], hidden_layers=config.hidden_needed, kv_layers=config.kv_needed)
    given = Given(context.hidden, context.keys, context.values)
    column = torch.full((1, 1), len(ids) - 2, device=device)
    memory, fused = drafter.remember(given, every[:, 1:]), drafter.fuse(given.hidden)
    state = None if fused is None else fused[:, -1:]
    token, chain, tokens, probabilities = every[:, -1:], None, [], []
    for k in range(n_steps):
        state, chain = drafter.step(token, column + 1 + k, state, memory, drafter.limit(column), chain)
        p = drafter.logits(state)[0, 0].float().softmax(-1)
        best = int(p.argmax())
        tokens.append(int(drafter.vocab_ids[best]))
        probabilities.append(float(p[best]))
        token = torch.tensor([[tokens[-1]]], device=device)
    return tokens, probabilities


@torch.no_grad()
def draft_and_verify(target: Target, drafter: Drafter, ids: list[int], n_steps: int = 7) -> Round:
    """One round behind `ids`: draft K tokens, read them with the target in one pass, keep what agrees."""
    drafted, probability = draft_chain(target, drafter, ids, n_steps)
    every = torch.tensor([ids + drafted], device=target.device)
    context = capture(target, every, hidden_layers=(), kv_layers=())
    chosen = target.logits(context.final[0, len(ids) - 1 :]).argmax(-1).tolist()
    # what follows an end of text does not count: an accepted end is the target's own last token
    stops = [k for k in range(n_steps) if drafted[k] != chosen[k] or drafted[k] in target.eos_ids]
    accepted = stops[0] if stops else n_steps
    return Round(drafted, probability, chosen, accepted)
