"""A tree of drafts: one drafter step a level, the best nodes kept."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvshot.drafters.drafter import Chain, Drafter, Memory
from kvshot.errors import KvshotError


@dataclass(frozen=True)
class TreeShape:
    """levels: drafted tokens on the longest path. top_k: children of a node, and nodes that a level expands.

    max_nodes: drafted nodes that are verified at most; None: all. (levels, 1) is a chain.
    """

    levels: int = 7
    top_k: int = 1
    max_nodes: int | None = None

    def __post_init__(self) -> None:
        if self.levels < 0 or self.top_k < 1 or (self.max_nodes is not None and self.max_nodes < 1):
            raise KvshotError(f"{self}: levels from 0, top_k and max_nodes from 1")

    @property
    def is_chain(self) -> bool:
        """One path, and all of it."""
        return self.top_k == 1 and self.max_nodes is None

    @property
    def name(self) -> str:
        """What records and tables call it: "chain 4", "tree (8, 10, 60)"."""
        return f"chain {self.levels}" if self.is_chain else f"tree ({self.levels}, {self.top_k}, {self.max_nodes})"

    @classmethod
    def from_eagle(cls, depth: int, top_k: int, total_token: int) -> TreeShape:
        """EAGLE's numbers: `depth` d makes d + 1 levels, `total_token` counts the root."""
        return cls(depth + 1, top_k, total_token - 1)


@dataclass
class Tree:
    """Node 0 is the token that the target has chosen; a parent stands before its children.

    tokens, parent, depth: int64 [N] (the root: parent 0, depth 0); score float [N]: log-probability of the path.
    """

    tokens: Tensor
    parent: Tensor
    depth: Tensor
    score: Tensor

    def sees(self) -> Tensor:
        """bool [N, N]: a node's ancestors and itself."""
        out = np.eye(len(self.tokens), dtype=bool)
        for i, p in enumerate(self.parent.tolist()):
            if i:
                out[i] |= out[p]
        return torch.from_numpy(out).to(self.tokens.device)

    def children(self) -> dict[int, list[int]]:
        """The nodes right below each node that has any, the better first."""
        below: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parent.tolist()):
            if node:
                below.setdefault(parent, []).append(node)
        return below

    def is_chain(self) -> bool:
        return bool((self.parent[1:] == torch.arange(len(self.parent) - 1, device=self.parent.device)).all())


@torch.no_grad()
def draft_tree(drafter: Drafter, memory: Memory, fused: Tensor | None, root: Tensor, column: int, shape: TreeShape
               ) -> Tree:
    """Draft behind the chosen token `root` (int64 [1]) of column `column`.

    fused [1, 1, d]: the fused target state of the column, None for a drafter that reads none. A level expands the best
    `top_k` of its nodes by the log-probability of their paths; of all nodes the best `max_nodes` stay.
    """
    device = root.device
    limit = drafter.limit(torch.full((1, 1), column, dtype=torch.int64, device=device))
    frontier = torch.zeros(1, dtype=torch.int64, device=device)
    tokens, parents, scores, depths = [root], [frontier], [torch.zeros(1, device=device)], [0]
    state, chain = fused, None
    for level in range(shape.levels):
        width = len(frontier)
        fed, score = torch.cat(tokens)[frontier], torch.cat(scores)[frontier]
        position = torch.full((1, width), column + 1 + level, dtype=torch.int64, device=device)
        seen = {source: n.expand(1, width) for source, n in limit.items()}
        state, chain = drafter.step(fed[None], position, state, memory, seen, chain)
        log_p = drafter.logits(state)[0].float().log_softmax(-1)
        best = log_p.topk(min(shape.top_k, log_p.shape[-1]), dim=-1)
        start = sum(map(len, tokens))
        tokens.append(drafter.vocab_ids[best.indices].flatten())
        parents.append(frontier.repeat_interleave(best.indices.shape[-1]))
        scores.append((score[:, None] + best.values).flatten())
        depths.append(level + 1)
        # stable: of equals the first, so that the same tree comes out everywhere
        chosen = scores[-1].sort(descending=True, stable=True).indices[: shape.top_k].sort().values
        of = chosen // best.indices.shape[-1]
        frontier, state, chain = start + chosen, state[:, of], _select(chain, of)
    every = Tree(torch.cat(tokens), torch.cat(parents),
                 torch.cat([torch.full_like(t, d) for t, d in zip(tokens, depths, strict=True)]), torch.cat(scores))
    return _best(every, shape.max_nodes)


def _select(chain: Chain, of: Tensor) -> Chain:
    return [{source: (k[:, :, of], v[:, :, of]) for source, (k, v) in layer.items()} for layer in chain]


def _best(tree: Tree, max_nodes: int | None) -> Tree:
    """The root and the best nodes. A child never beats its parent and comes after it, so no parent is lost."""
    if max_nodes is None or len(tree.tokens) - 1 <= max_nodes:
        return tree
    kept = tree.score.sort(descending=True, stable=True).indices[: max_nodes + 1].sort().values
    place = torch.zeros_like(tree.parent)
    place[kept] = torch.arange(len(kept), device=kept.device)
    return Tree(tree.tokens[kept], place[tree.parent[kept]], tree.depth[kept], tree.score[kept])
