"""What lossless greedy decoding would do with a drafter, from the text alone.

The text is known before: it is the target's own, whatever the drafter. So the target reads it once, and only the drafts
have to be made. Verify calls come out as `decode` makes them, in a fraction of the time, and the same columns of text
serve every drafter and every shape of draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvshot.drafters.drafter import Drafter, Memory
from kvshot.drafters.injection import Given
from kvshot.errors import KvshotError
from kvshot.evaluation.decode import DecodeReport
from kvshot.evaluation.tree import Tree, TreeShape, draft_tree
from kvshot.targets import Target, capture
from kvshot.training.ttt import unroll


@dataclass
class Text:
    """A prompt of `n_prompt` tokens with the target's greedy text behind it, as one drafter remembers it.

    limit: how many tokens the decoder may write; ended: the text ends with an end token; otherwise: tokens of the text
    that the target would choose otherwise in one pass over all of it (near ties).
    """

    ids: Tensor
    n_prompt: int
    limit: int
    ended: bool
    otherwise: int
    given: Given
    memory: Memory
    fused: Tensor | None

    @classmethod
    @torch.no_grad()
    def read(cls, target: Target, drafter: Drafter, prompt: Sequence[int], text: Sequence[int], *,
             limit: int | None = None, eos_ids: Sequence[int] | None = None) -> Text:
        """One pass of the target over both; limit: default as long as the text.

        Raises KvshotError for empty ones, and for a text that ends neither at the limit nor with an end token.
        """
        if not len(prompt) or not len(text):
            raise KvshotError("a replay needs a prompt of at least one token and a text behind it")
        ended, limit = text[-1] in (target.eos_ids if eos_ids is None else eos_ids), limit or len(text)
        if len(text) > limit or len(text) < limit and not ended:
            raise KvshotError(f"a text of {len(text)} tokens is no decoder's under a limit of {limit}: give the limit "
                              "it was written under")
        config = drafter.config
        context = capture(target, torch.tensor([[*prompt, *text]]), hidden_layers=config.hidden_needed,
                          kv_layers=config.kv_needed)
        given = Given(context.hidden if config.hidden_needed else None,
                      *((context.keys, context.values) if config.kv_needed else (None, None)))
        ids = context.ids[0]
        # the last entry's token is not known; no column sees it
        memory = drafter.remember(given, torch.cat([ids[1:], ids[-1:]])[None])
        own = target.logits(context.final[0, len(prompt) - 1 : -1]).argmax(-1)
        otherwise = int((own != ids[len(prompt) :]).sum())
        return cls(ids, len(prompt), limit, ended, otherwise, given, memory, drafter.fuse(given.hidden))

    def report(self, accepts, levels: int) -> DecodeReport:
        """Walk the text: accepts(column, n) -> (accepted, tried) of a draft of at most n levels."""
        out, at, end = DecodeReport(), self.n_prompt, len(self.ids)  # ids[at] is chosen and not read
        while at < end - 1:
            room = min(levels, self.limit - (at - self.n_prompt + 1) - 1)
            accepted, tried = accepts(at - 1, room) if room else (0, 0)
            accepted = min(accepted, end - 1 - at)
            ends = self.ended and at + accepted == end - 1  # the end token was drafted: nothing behind it counts
            out.accepted.append(accepted)
            out.tried.append(accepted if ends else tried)
            out.kept.append(accepted if ends else accepted + 1)
            at += accepted + 1
        return out


@torch.no_grad()
def replay_tree(drafter: Drafter, text: Text, shape: TreeShape) -> DecodeReport:
    """The verify calls of `decode` with drafts of this shape."""
    ids = text.ids.tolist()

    def accepts(column: int, levels: int) -> tuple[int, int]:
        fused = None if text.fused is None else text.fused[:, column : column + 1]
        tree = draft_tree(drafter, text.memory, fused, text.ids[column + 1 : column + 2], column,
                          TreeShape(levels, shape.top_k, shape.max_nodes))
        return _walk(tree, ids[column + 2 :])

    return text.report(accepts, shape.levels)


def _walk(tree: Tree, following: Sequence[int]) -> tuple[int, int]:
    """How many tokens of `following` the tree holds, and how many were tried."""
    tokens, children, path = tree.tokens.tolist(), tree.children(), [0]
    for wanted in following:
        node = next((n for n in children.get(path[-1], []) if tokens[n] == wanted), None)
        if node is None:
            break
        path.append(node)
    return len(path) - 1, len(path) - 1 + (path[-1] in children)


def replay(drafter: Drafter, text: Text, shapes: Sequence[TreeShape]) -> dict[str, DecodeReport]:
    """The verify calls of `decode` with drafts of each of these shapes, by the shape's name."""
    chains = {s: s.levels for s in shapes if s.is_chain and s.levels}
    unrolled = replay_chains(drafter, text, [*chains.values()]) if chains else {}
    return {s.name: unrolled[chains[s]] if s in chains else replay_tree(drafter, text, s) for s in shapes}


@torch.no_grad()
def replay_chains(drafter: Drafter, text: Text, lengths: Sequence[int]) -> dict[int, DecodeReport]:
    """The verify calls of `decode` with chains of each of these lengths, from one unrolling over all columns.

    While a chain is right, its own tokens are the text's: so the text is fed.
    """
    most, first = max(lengths), text.n_prompt - 1
    columns = torch.arange(first, len(text.ids) - 1, device=text.ids.device)[None]
    wanted = torch.cat([text.ids, text.ids.new_full((most,), -1)])  # behind the end nothing is right
    right = [drafter.vocab_ids[drafter.logits(state).argmax(-1)] == wanted[columns + 2 + k]
             for k, state in enumerate(unroll(drafter, text.ids[None], text.given, columns, most))]
    accepted = torch.stack(right, -1)[0].long().cumprod(-1).sum(-1).tolist()

    def accepts(column: int, levels: int) -> tuple[int, int]:
        n = min(accepted[column - first], levels)
        return n, min(n + 1, levels)

    return {n: text.report(accepts, n) for n in lengths}
