"""Lossless speculative decoding: a drafter proposes a chain or a tree, the target reads it in one pass and decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvshot.drafters.drafter import Drafter
from kvshot.drafters.injection import Given
from kvshot.errors import KvshotError
from kvshot.evaluation.tree import Tree, TreeShape, draft_tree
from kvshot.targets import Target
from kvshot.targets.session import Session


@dataclass
class DecodeReport:
    """What happened at each verify call.

    accepted: drafted tokens that were right; tried: those that stood at the place where they were wanted, right or not
    (accepted, or one more); kept: tokens added, the target's own included. Nothing behind an end counts.
    seconds: "target", "drafter" and "host" (all the rest), prefill not included; prefill_seconds: the target's.
    """

    accepted: list[int] = field(default_factory=list)
    tried: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: {"target": 0.0, "drafter": 0.0, "host": 0.0})
    prefill_seconds: float = 0.0

    @property
    def mat(self) -> float | None:
        """Tokens a verify call, the target's own one included; None before the first call.

        The last calls before a length limit draft no further than it, and count like any other.
        """
        return sum(self.kept) / len(self.kept) if self.kept else None

    def cut(self, n: int) -> None:
        """The text ended behind the first n tokens of the last call: what was drafted behind them does not count."""
        for counts in (self.accepted, self.tried, self.kept):
            counts[-1:] = [min(count, n) for count in counts[-1:]]

    @classmethod
    def pooled(cls, reports: Sequence[DecodeReport]) -> DecodeReport:
        """Several texts as one: rates pool verify calls, they are no means of means."""
        seconds = {part: sum(r.seconds[part] for r in reports) for part in cls().seconds}
        joined = ([x for r in reports for x in getattr(r, name)] for name in ("accepted", "tried", "kept"))
        return cls(*joined, seconds, sum(r.prefill_seconds for r in reports))

    def acceptance(self) -> list[tuple[int, int]]:
        """(accepted, tried) by draft position: tried where all before were accepted and a draft was there."""
        return [(sum(a > k for a in self.accepted), sum(t > k for t in self.tried))
                for k in range(max(self.tried, default=0))]


@dataclass
class Decoded:
    """tokens: what was generated, an end token included. report: how."""

    tokens: list[int]
    report: DecodeReport


Process = Callable[[list[int], Tensor], Tensor]


@torch.no_grad()
def decode(target: Target, drafter: Drafter, ids: Sequence[int], *, max_new_tokens: int = 128,
           shape: TreeShape | None = None, temperature: float = 0.0, generator: torch.Generator | None = None,
           eos_ids: Sequence[int] | None = None, on_tokens: Callable[[list[int]], None] | None = None,
           on_round: Callable[[Tree, list[int], int], None] | None = None, process: Process | None = None,
           stop: Callable[[list[int]], bool] | None = None) -> Decoded:
    """Generate behind the prompt `ids`: the target's greedy text, or samples of its distribution, whatever the drafter.

    Exact up to the target's own rounding: where its two best scores are closer than that, a pass over several tokens
    may choose otherwise than a pass over one.

    shape: of the draft (default: a chain of 7). temperature 0 is greedy. eos_ids: default the target's own.
    on_tokens(new): called with each round's tokens; on_round(tree, path, own): with what was drafted, the nodes
    accepted (the root first) and the target's own token behind them. process(text, scores): changes the target's scores
    [V] for the token after `text` before anything is chosen. stop(new): asked after every token, with all so far.
    Raises KvshotError for an empty prompt or a target whose cache cannot take tokens back.
    """
    if not len(ids) or max_new_tokens < 1:
        raise KvshotError("decoding needs a prompt of at least one token and room for a new one")
    run = _Run(target, drafter, shape or TreeShape(), temperature, generator,
               set(target.eos_ids if eos_ids is None else eos_ids), on_round, process)
    new = run.start(list(ids))
    tokens: list[int] = []
    while True:
        end = next((n + 1 for n, t in enumerate(new) if t in run.eos or stop and stop(tokens + new[: n + 1])), None)
        new = new[:end][: max_new_tokens - len(tokens)]
        run.report.cut(len(new))
        tokens += new
        if on_tokens is not None:
            on_tokens(new)
        if end is not None or len(tokens) >= max_new_tokens:
            return Decoded(tokens, run.report)
        new = run.round(max_new_tokens - len(tokens))


def for_generate(target: Target, drafter: Drafter, shape: TreeShape | None = None, streamer=None) -> Callable:
    """`model.generate(ids, custom_generate=for_generate(target, drafter), ...)`: transformers' call, our decoding.

    Everything in the user's generation configuration that acts on one sequence counts: sampling, logits processors,
    lengths, ends. A streamer is given here: transformers does not hand its own on to a custom function. Raises
    KvshotError for a batch, beams, or another model than the target's.
    """
    def generate(model, input_ids, logits_processor=(), stopping_criteria=(), generation_config=None, **model_kwargs):
        mask = model_kwargs.get("attention_mask")
        if model is not target.model:
            raise KvshotError("the drafter was made for another model: call generate on target.model")
        if len(input_ids) != 1 or generation_config.num_beams > 1 or mask is not None and not bool(mask.all()):
            raise KvshotError("speculative decoding takes one sequence without padding, and no beams")

        def process(text: list[int], scores: Tensor) -> Tensor:
            at = input_ids.device  # where transformers made the processors
            return logits_processor(torch.tensor([text], device=at), scores[None].to(at))[0]

        def stop(new: list[int]) -> bool:
            text = torch.cat([input_ids, torch.tensor([new], device=input_ids.device)], 1)
            return bool(stopping_criteria(text, None).all())

        def stream(new: list[int]) -> None:
            for token in new:
                streamer.put(torch.tensor([token]))

        if streamer is not None:
            streamer.put(input_ids.cpu())  # as transformers does: a streamer may skip the prompt
        out = decode(target, drafter, input_ids[0].tolist(), shape=shape, eos_ids=(),
                     max_new_tokens=generation_config.max_length - input_ids.shape[1],
                     temperature=1.0 if generation_config.do_sample else 0.0,  # the processors hold the user's own
                     process=process if len(logits_processor) else None, stop=stop if len(stopping_criteria) else None,
                     on_tokens=None if streamer is None else stream)
        if streamer is not None:
            streamer.end()
        return torch.cat([input_ids, torch.tensor([out.tokens], device=input_ids.device)], 1)

    return generate


@torch.no_grad()
def plain_decode(target: Target, ids: Sequence[int], max_new_tokens: int, *, eos_ids: Sequence[int] | None = None
                 ) -> list[int]:
    """Greedy decoding, a token a pass, with the same cache: what `decode` must equal, and the fair baseline."""
    eos = set(target.eos_ids if eos_ids is None else eos_ids)
    session, score, tokens = Session(target), target.scorer(), []
    if not len(ids):
        raise KvshotError("decoding needs a prompt of at least one token")
    fed = torch.tensor(list(ids), device=target.device)
    while len(tokens) < max_new_tokens and not (tokens and tokens[-1] in eos):
        fed = score(session.read(fed)[-1:]).argmax(-1)
        tokens.append(int(fed))
    return tokens


class _Run:
    """One sequence: the target's session, the drafter's memory, and the chosen token that nobody has read."""

    def __init__(self, target: Target, drafter: Drafter, shape: TreeShape, temperature: float, generator, eos,
                 on_round=None, process: Process | None = None) -> None:
        self.target, self.drafter, self.shape, self.eos = target, drafter, shape, eos
        self.temperature, self.generator, self.on_round = temperature, generator, on_round
        self.process, self.text = process, []
        self.session = Session(target, drafter.config.hidden_needed)
        self.score = target.scorer()
        self.memory, self.fused, self.report = None, None, DecodeReport()

    def start(self, ids: list[int]) -> list[int]:
        """Read the prompt; the first new token."""
        began = self.target.clock()
        final = self.session.read(torch.tensor(ids, device=self.target.device))
        self.report.prefill_seconds = self.target.clock() - began
        scores = self._processed(self.score(final[-1]), ids)
        self.root = int(scores.argmax()) if self.temperature == 0 else self._sample(self._probabilities(scores))
        self.text = [*ids, self.root]
        self._remember([*ids[1:], self.root])
        return [self.root]

    def round(self, room: int) -> list[int]:
        """Draft, verify, keep: 1 to levels + 1 new tokens, `room` at most."""
        began = self.target.clock()
        before = dict(self.report.seconds)
        levels = min(self.shape.levels, room - 1)
        shape = TreeShape(levels, self.shape.top_k, self.shape.max_nodes)
        device = self.target.device
        with self._timed("drafter"):
            root = torch.tensor([self.root], device=device)
            tree = draft_tree(self.drafter, self.memory, self.fused, root, self.session.length - 1, shape)
        tree_like = () if tree.is_chain() else (tree.depth, tree.sees())
        with self._timed("target"):
            scores = self.score(self.session.read(tree.tokens, *tree_like))
        path, bonus, tried = self._walk(tree, scores)
        if self.on_round is not None:
            self.on_round(tree, path, bonus)
        tokens = tree.tokens[path[1:]].tolist()
        new = [*tokens, bonus]
        self.report.accepted.append(len(tokens))
        self.report.tried.append(tried)
        self.report.kept.append(len(new))
        self.session.keep(path)
        self.root, self.text = bonus, self.text + new
        with self._timed("drafter"):
            self._remember(new)
        spent = sum(self.report.seconds.values()) - sum(before.values())
        self.report.seconds["host"] += self.target.clock() - began - spent
        return new

    def _remember(self, following: list[int]) -> None:
        """The drafter's memory of the tokens just read and kept; `following`: the token after each."""
        config, session = self.drafter.config, self.session
        hidden = None if session.hidden is None else session.hidden[None]
        keys, values = session.keys_values(config.kv_needed) if config.kv_needed else (None, None)
        given = Given(hidden, keys, values)
        tokens = torch.tensor([following], device=self.target.device)
        self.memory = self.drafter.remember(given, tokens, self.memory)
        self.fused = self.drafter.fuse(None if hidden is None else hidden[:, :, -1:])

    def _walk(self, tree: Tree, scores: Tensor) -> tuple[list[int], int, int]:
        """The accepted path of nodes, from the root, the target's own token behind it, and how many were tried."""
        tokens, children = tree.tokens.tolist(), tree.children()
        plain = self.temperature == 0 and self.process is None
        greedy = scores.argmax(-1).tolist() if plain else None  # one transfer for all nodes
        path = [0]
        while True:
            below = children.get(path[-1], [])
            if plain:
                own = greedy[path[-1]]
            else:
                here = self._processed(scores[path[-1]], self.text + [tokens[n] for n in path[1:]])
                own = int(here.argmax())
            if self.temperature == 0:
                following = next((n for n in below if tokens[n] == own), None)
            else:
                following, own = self._accept(here, below, tokens)
            if following is None:
                return path, own, len(path) - 1 + bool(below)
            path.append(following)

    def _processed(self, scores: Tensor, text: list[int]) -> Tensor:
        return scores if self.process is None else self.process(text, scores)

    def _accept(self, scores: Tensor, below: list[int], tokens: list[int]) -> tuple[int | None, int]:
        """One place of the sampled text: a child, each with the probability left for its token, or another token."""
        p = self._probabilities(scores)
        for node in below:
            if self._uniform() < float(p[tokens[node]]):
                return node, tokens[node]
            p[tokens[node]] = 0.0
            p = p / p.sum()
        return None, self._sample(p)

    def _probabilities(self, scores: Tensor) -> Tensor:
        return (scores.double() / self.temperature).softmax(-1).cpu()

    def _uniform(self) -> float:
        return float(torch.rand((), dtype=torch.float64, generator=self.generator))

    def _sample(self, p: Tensor) -> int:
        return int(torch.multinomial(p, 1, generator=self.generator))

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        began = self.target.clock()
        yield
        self.report.seconds[what] += self.target.clock() - began
