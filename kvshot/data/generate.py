"""Fast batched generation on a CPU, for writing data sets with the target itself.

A *row* is a script of segments: forced tokens (a prompt, a header) and sampled ones (a turn). Every live row takes
exactly one token per step, forced or sampled, so rows that start together stay equally long: a *block* of such rows
needs no padding and no mask, and its attention reads only what was written. Rows that end leave their block (the last
row moves into the hole), and a new block starts when enough rows have left; the matrix products of all blocks run
together. This is what keeps the batch full without carrying finished rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from kvshot.errors import KvshotError


@dataclass(frozen=True)
class Forced:
    """Tokens that are fed, not chosen."""

    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Sampled:
    """Tokens the target chooses, up to and including a stop token or `max_tokens`; a token of `quit` ends the row.

    temperature 0 is greedy. `top_k` bounds the candidates (at most 128), `top_p` cuts the nucleus among them.
    `give_up(tokens)` is asked every 16 tokens; True ends the row there (a loop is not worth finishing).
    """

    max_tokens: int
    stop: frozenset[int]
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 128
    give_up: Callable[[Sequence[int]], bool] | None = None
    quit: frozenset[int] = frozenset()


@dataclass
class Row:
    """One row's script and what has been written: `written[s]` are the tokens of segment s, without the stop token.

    `outcome`: "" while it runs, then "stop", "limit", "gave up" or "quit" for the last sampled segment reached.
    """

    segments: tuple[Forced | Sampled, ...]
    written: list[list[int]] = field(default_factory=list)
    outcome: str = ""
    segment: int = -1
    queue: list[int] = field(default_factory=list)
    last: int = -1  # the token to feed next

    def __post_init__(self) -> None:
        self._advance()

    def _advance(self) -> None:
        self.segment += 1
        if self.segment < len(self.segments):
            seg = self.segments[self.segment]
            self.queue = list(seg.tokens)[::-1] if isinstance(seg, Forced) else []
            self.written.append(list(seg.tokens) if isinstance(seg, Forced) else [])
            if isinstance(seg, Forced) and not seg.tokens:
                self._advance()

    @property
    def done(self) -> bool:
        return self.segment >= len(self.segments)

    def pop_forced(self) -> int:
        token = self.queue.pop()
        if not self.queue:
            self._advance()
        return token

    def take(self, token: int) -> None:
        """Record a sampled token."""
        seg, out = self.segments[self.segment], self.written[self.segment]
        if token in seg.quit:
            self.outcome, self.segment = "quit", len(self.segments)
            return
        if token in seg.stop:
            self.outcome = "stop"
            self._advance()
            return
        out.append(token)
        if len(out) >= seg.max_tokens:
            self.outcome, self.segment = "limit", len(self.segments)
        elif seg.give_up is not None and len(out) % 16 == 0 and seg.give_up(out):
            self.outcome, self.segment = "gave up", len(self.segments)


MAX_ROWS = 320  # live rows of one worker: more make better use of the matrix units, and more memory (5 GB here)
KNOWN = ("llama", "qwen2", "qwen3", "mistral")  # the same blocks, up to biases and norms of queries and keys


class _Layers:
    """The weights of a decoder whose blocks have the common shape, fused for few large products."""

    def __init__(self, model: torch.nn.Module) -> None:
        cfg = model.config
        if cfg.model_type not in KNOWN or getattr(cfg, "sliding_window", None):
            raise KvshotError(f"the fast generator knows {', '.join(KNOWN)} without sliding windows, not "
                              f"{type(model).__name__}: let a server such as vLLM write the answers as messages "
                              "JSONL, and make a data set of them with `kvshot data split`")
        base = model.model
        self.base = base
        self.n_heads, self.n_kv = cfg.num_attention_heads, cfg.num_key_value_heads
        self.layers = [(layer, layer.self_attn, layer.mlp) for layer in base.layers]
        self.head_dim = self.layers[0][1].head_dim
        with torch.no_grad():
            self.qkv = [_Product(a.q_proj, a.k_proj, a.v_proj) for _, a, _ in self.layers]
            self.out = [_Product(a.o_proj) for _, a, _ in self.layers]
            self.gate_up = [_Product(m.gate_proj, m.up_proj) for _, _, m in self.layers]
            self.down = [_Product(m.down_proj) for _, _, m in self.layers]
            self.head = _Product(model.lm_head)


class _Product:
    """Linear layers side by side as one product.

    In bfloat16 the weight is kept as the CPU's units read it: oneDNN would lay it out anew at every call.
    """

    def __init__(self, *linears: torch.nn.Linear) -> None:
        self.bias = None if linears[0].bias is None else torch.cat([x.bias for x in linears])
        self.weight = torch.cat([x.weight for x in linears])
        # private operators: with a torch that lacks one, the plain product does
        supported, reorder, self.product = (getattr(torch.ops.mkldnn, name, None) for name in (
            "_is_mkldnn_bf16_supported", "_reorder_linear_weight", "_linear_pointwise"))
        self.packed = bool(self.weight.dtype == torch.bfloat16 and torch.backends.mkldnn.is_available()
                           and supported and reorder and self.product and supported())
        if self.packed:
            self.weight = reorder(self.weight, MAX_ROWS)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed:
            return self.product(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)


def _norm(x: torch.Tensor, norm: torch.nn.Module) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


@dataclass
class _Block:
    number: int
    rows: list[Row]
    order: list[int]  # position in the cache -> index of the row
    cache: torch.Tensor  # [layers, 2, rows * H_kv, room, D]
    n_kv: int
    length: int
    rng: torch.Generator

    def leave(self, slot: int) -> None:
        """Row at `slot` ends: the last row takes its place."""
        last = len(self.order) - 1
        if slot != last:
            a, b = slot * self.n_kv, last * self.n_kv
            self.cache[:, :, a : a + self.n_kv, : self.length] = self.cache[:, :, b : b + self.n_kv, : self.length]
            self.order[slot] = self.order[last]
        self.order.pop()

    def make_room(self, step: int = 32) -> None:
        """Grow by `step` tokens and drop the rows that left: bmm wants dense memory, and copies it otherwise."""
        if self.length == self.cache.shape[3]:
            kept = self.cache[:, :, : len(self.order) * self.n_kv]
            self.cache = F.pad(kept, (0, 0, 0, step))


class BlockGenerator:
    """Runs scripts of rows through a target's decoder.

    model: a causal LM of transformers with Llama-shaped blocks (Llama, Qwen2, Qwen3, Mistral without windows).
    prefix: tokens common to all rows, computed once. capacity: longest row in tokens, prefix included.
    Raises KvshotError for a model of another shape.
    """

    def __init__(self, model: torch.nn.Module, prefix: Sequence[int], *, capacity: int, block_rows: int = 64,
                 max_rows: int = MAX_ROWS, seed: int = 0) -> None:
        if not len(prefix):
            raise KvshotError("the common prefix is empty: give at least the first token of the template")
        self.w = _Layers(model)
        self.capacity, self.block_rows, self.max_rows, self.seed = capacity, block_rows, max_rows, seed
        self.prefix = list(prefix)
        self.dtype = model.lm_head.weight.dtype
        shape = (len(self.w.layers), 2, self.w.n_kv, 0, self.w.head_dim)
        first = _Block(-1, [], [0], torch.zeros(shape, dtype=self.dtype), self.w.n_kv, 0, torch.Generator())
        with torch.inference_mode():
            for token in self.prefix[:-1]:
                self._forward([first], torch.tensor([token]))
        self._prefix_cache = first.cache[:, :, :, : first.length]

    def run(self, blocks: Iterator[tuple[int, list[Row]]]) -> Iterator[tuple[int, list[Row]]]:
        """Yield (block number, rows) as blocks finish. Draws depend on (seed, block number) only."""
        live: list[_Block] = []
        todo = iter(blocks)
        more = True
        while True:
            while more and sum(len(b.order) for b in live) + self.block_rows <= self.max_rows:
                item = next(todo, None)
                if item is None:
                    more = False
                else:
                    live.append(self._open(*item))
            if not live:
                return
            self._step(live)
            for block in [b for b in live if not b.order]:
                live.remove(block)
                yield block.number, block.rows

    @torch.inference_mode()
    def _open(self, number: int, rows: list[Row]) -> _Block:
        if len(rows) > self.block_rows:
            raise ValueError(f"block {number} has {len(rows)} rows, more than {self.block_rows}")
        w = self.w
        length = len(self.prefix) - 1
        cache = self._prefix_cache.repeat(1, 1, len(rows), 1, 1)
        digest = hashlib.sha256(f"{self.seed}/{number}".encode()).digest()
        rng = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        for row in rows:
            row.last = self.prefix[-1]
        return _Block(number, rows, list(range(len(rows))), cache, w.n_kv, length, rng)

    @torch.inference_mode()
    def _step(self, live: list[_Block]) -> None:
        slots = [(b, i) for b in live for i in range(len(b.order))]
        rows = [b.rows[b.order[i]] for b, i in slots]
        hidden = self._forward(live, torch.tensor([r.last for r in rows]))
        sampled = [i for i, r in enumerate(rows) if not r.queue]
        # drawn at every step, needed or not: a block's draws must not depend on what runs beside it
        draws = torch.cat([torch.rand(len(b.order), generator=b.rng) for b in live])
        if sampled:
            logits = self.w.head(hidden[sampled])
            chosen = choose(logits, [rows[i].segments[rows[i].segment] for i in sampled], draws[sampled])
            for i, token in zip(sampled, chosen.tolist(), strict=True):
                rows[i].last = token
                rows[i].take(token)
        for i in set(range(len(rows))).difference(sampled):
            rows[i].last = rows[i].pop_forced()
        for block, slot in reversed(slots):  # from the back, so that a hole is filled by a row already judged
            if block.rows[block.order[slot]].done or block.length >= self.capacity:
                block.leave(slot)

    def _forward(self, live: list[_Block], tokens: torch.Tensor) -> torch.Tensor:
        """Feed one token per live row: tokens [N] -> post-norm states [N, d]."""
        w = self.w
        counts = [len(b.order) for b in live]
        n, d = sum(counts), w.head_dim
        positions = torch.tensor([b.length for b in live]).repeat_interleave(torch.tensor(counts))
        x = w.base.embed_tokens(tokens)
        cos, sin = (t[0, :, None] for t in w.base.rotary_emb(x, positions[None]))
        for block in live:
            block.make_room()
        sizes = [w.n_heads * d, w.n_kv * d, w.n_kv * d]
        mixed = torch.empty(n, w.n_heads * d, dtype=x.dtype)
        for index, (layer, attn, mlp) in enumerate(w.layers):
            q, k, v = w.qkv[index](_norm(x, layer.input_layernorm)).split(sizes, -1)
            q, k, v = q.view(n, w.n_heads, d), k.view(n, w.n_kv, d), v.view(n, w.n_kv, d)
            if hasattr(attn, "q_norm"):
                q, k = _norm(q, attn.q_norm), _norm(k, attn.k_norm)
            q, k = _rotate(q, cos, sin).mul_(attn.scaling), _rotate(k, cos, sin)
            at = 0
            for block, count in zip(live, counts, strict=True):
                part, end = slice(at, at + count), block.length + 1
                keys, values = block.cache[index, :, : count * w.n_kv]
                keys[:, end - 1], values[:, end - 1] = k[part].reshape(-1, d), v[part].reshape(-1, d)
                # keys first: the other order would have bmm repack the cache
                scores = torch.bmm(keys, q[part].reshape(count * w.n_kv, -1, d).transpose(1, 2)).transpose(1, 2)
                scores[..., end:] = -torch.inf
                mixed[part] = torch.bmm(scores.softmax(-1), values).view(count, -1)
                at += count
            x += w.out[index](mixed)
            gate, up = w.gate_up[index](_norm(x, layer.post_attention_layernorm)).chunk(2, -1)
            x += w.down[index](mlp.act_fn(gate).mul_(up))
        for block in live:
            block.length += 1
        return _norm(x, w.base.norm)


def choose(logits: torch.Tensor, segments: Sequence[Sampled], draws: torch.Tensor) -> torch.Tensor:
    """One token a row: logits [N, V], uniform draws [N] -> ids [N]; temperature, top-k and top-p of each row."""
    values, ids = _top(logits, min(128, logits.shape[-1]))
    values, k = values.float(), values.shape[-1]
    temperature = torch.tensor([max(s.temperature, 1e-4) for s in segments])[:, None]
    top_p = torch.tensor([s.top_p for s in segments])[:, None]
    top_k = torch.tensor([s.top_k for s in segments])[:, None]
    p = ((values - values[:, :1]) / temperature).softmax(-1)
    p = p * ((p.cumsum(-1) - p < top_p) & (torch.arange(k) < top_k))
    edges = p.cumsum(-1)
    pick = (edges <= draws[:, None] * edges[:, -1:]).sum(-1).clamp(max=k - 1)
    chosen = ids.gather(1, pick[:, None])[:, 0]
    greedy = torch.tensor([s.temperature == 0 for s in segments])
    return torch.where(greedy, logits.argmax(-1), chosen) if greedy.any() else chosen


def _top(x: torch.Tensor, k: int, widths: Sequence[int] = (64, 8)) -> tuple[torch.Tensor, torch.Tensor]:
    """x.topk(k) of [N, V], faster on long rows: the k largest lie in the k chunks with the largest maxima."""
    if not widths:
        return x.topk(k, dim=-1)
    (n, size), width, narrower = x.shape, widths[0], widths[1:]
    if size % width or size < 4 * k * width:
        return _top(x, k, narrower)
    chunks = x.view(n, -1, width)
    best = chunks.amax(-1).topk(k, dim=-1, sorted=False).indices
    rows = torch.arange(n)[:, None] * chunks.shape[1] + best
    values, where = _top(chunks.reshape(-1, width).index_select(0, rows.view(-1)).view(n, -1), k, narrower)
    return values, best.gather(1, where // width) * width + where % width
