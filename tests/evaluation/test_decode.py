"""Lossless: greedy text is the target's own, samples follow its distribution, caches equal a fresh computation."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import stats

from kvshot.data import DraftVocab
from kvshot.drafters import Drafter, DrafterConfig, Given, new_drafter
from kvshot.errors import KvshotError
from kvshot.evaluation.decode import _Run, decode, for_generate, plain_decode
from kvshot.evaluation.tree import TreeShape, draft_tree
from kvshot.targets import Target, capture
from kvshot.targets.session import Session
from kvshot.targets.smoke import smoke_tokenizer
from kvshot.training.ttt import unroll

STATES, KV = dict(hidden_layers=(1, 2, 3)), dict(kv_layers=(0, 2), injection="linear+rope")
KINDS = {
    "eagle3": STATES, "eagle3, 2 layers": dict(STATES, depth=2), "mtp": dict(hidden_layers=(3,)), "no info": {},
    "no prefix": dict(STATES, memory="none"), "kv": dict(KV, memory="target"),
    "kv concat, 2 layers": dict(KV, memory="target", injection="concat", depth=2),
    "kv hidden": dict(KV, memory="target", injection="hidden"), "cross only": dict(STATES, **KV, memory="target"),
    "hybrid": dict(STATES, **KV, memory="both"), "hybrid, 2 layers": dict(STATES, **KV, memory="both", depth=2),
}


@functools.cache
def make_target(vocab: int, family: str = "Llama") -> Target:
    """Float64, so that no two scores are close enough for the order of a sum to matter."""
    torch.manual_seed(vocab)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=vocab, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=6, initializer_range=0.5, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).double().eval().requires_grad_(False)
    return Target(family, model, smoke_tokenizer(), "0" * 64)


@functools.cache
def make_drafter(vocab: int, kind: str, seed: int = 0, family: str = "Llama") -> Drafter:
    """Random weights, and a draft vocabulary that leaves out a token of the target's."""
    target = make_target(vocab, family)
    config = DrafterConfig.for_target(target, draft_vocab_size=vocab - 1, **KINDS[kind])
    drafter = Drafter(config, target.embedding_weight, torch.arange(1, vocab)).double()
    generator = torch.Generator().manual_seed(seed)
    for parameter in drafter.parameters():
        parameter.data.normal_(0.0, 0.4, generator=generator)
    return drafter.eval()


def target_copy(target: Target) -> Drafter:
    """All blocks of the target: it drafts what the target chooses."""
    n = target.vocab_size
    config = DrafterConfig.for_target(target, draft_vocab_size=n, memory="target", kv_layers=(0, 1, 2), depth=3,
                                      per_layer=True, injection="linear+rope")
    return new_drafter(target, config, DraftVocab(torch.arange(n), n), seed=0, init="layers").double()


def plain(target: Target, ids: list[int], n: int, eos: set[int]) -> list[int]:
    """Greedy decoding without any cache."""
    out: list[int] = []
    while len(out) < n and not (out and out[-1] in eos):
        with torch.no_grad():
            out.append(int(target.model(torch.tensor([ids + out])).logits[0, -1].argmax()))
    return out


def draw_case(draw, vocab: int = 11) -> tuple[Target, Drafter, list[int], TreeShape, set[int], int]:
    """Target, drafter, prompt, shape of the draft, end tokens, limit of length."""
    kind, seed = draw(st.sampled_from(sorted(KINDS))), draw(st.integers(0, 2))
    ids = draw(st.lists(st.integers(0, vocab - 1), min_size=1, max_size=9))
    shape = TreeShape(draw(st.integers(0, 5)), draw(st.integers(1, 4)), draw(st.none() | st.integers(1, 9)))
    eos, n = draw(st.sets(st.integers(0, vocab - 1), max_size=2)), draw(st.integers(1, 24))
    return make_target(vocab), make_drafter(vocab, kind, seed), ids, shape, eos, n


@pytest.mark.slow
@settings(max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(data=st.data())
def test_greedy_text_is_the_targets_own(data):
    target, drafter, ids, shape, eos, n = draw_case(data.draw)
    parts: list[int] = []
    got = decode(target, drafter, ids, max_new_tokens=n, shape=shape, eos_ids=eos, on_tokens=parts.extend)
    assert got.tokens == parts == plain(target, ids, n, eos) == plain_decode(target, ids, n, eos_ids=eos)
    r = got.report
    assert all(0 <= a <= t <= min(a + 1, shape.levels) for a, t in zip(r.accepted, r.tried, strict=True))
    assert 1 + sum(r.kept) == len(got.tokens)


@pytest.mark.parametrize("shape", [TreeShape(3), TreeShape(2, 2), TreeShape(3, 3, 5)], ids=str)
@pytest.mark.parametrize("family", ["Qwen3", "Mistral"])
def test_other_families_and_eager_attention(family, shape):
    target = make_target(13, family)
    if family == "Mistral":
        target.config.sliding_window = None
    drafter = make_drafter(13, "hybrid", 1, family)
    for attention in ("sdpa", "eager"):
        target.config._attn_implementation = attention
        got = decode(target, drafter, [3, 5, 7], max_new_tokens=24, shape=shape, eos_ids=())
        assert got.tokens == plain(target, [3, 5, 7], 24, set())


@pytest.mark.slow
@pytest.mark.parametrize("shape", [TreeShape(2), TreeShape(2, 3, 6)], ids=str)
def test_samples_follow_the_targets_distribution(shape):
    """Chi-square of the first three tokens against the exact probabilities."""
    vocab, temperature, n = 5, 1.3, 1500
    target, drafter = make_target(vocab), make_drafter(vocab, "hybrid")
    generator, ids = torch.Generator().manual_seed(0), [1, 2]
    counts = np.zeros((vocab,) * 3)
    for _ in range(n):
        got = decode(target, drafter, ids, max_new_tokens=3, shape=shape, temperature=temperature, generator=generator,
                     eos_ids=())
        counts[tuple(got.tokens)] += 1
    exact = np.ones((vocab,) * 3)
    for a in range(vocab):
        for b in range(vocab):
            with torch.no_grad():
                p = (target.model(torch.tensor([[*ids, a, b]])).logits[0, 1:] / temperature).softmax(-1).numpy()
            exact[a, b] *= p[0, a] * p[1, b] * p[2]
    assert exact.sum() == pytest.approx(1)
    often = exact * n >= 5
    observed = np.append(counts[often], counts[~often].sum())
    expected = np.append(exact[often], exact[~often].sum()) * n
    assert stats.chisquare(observed, expected).pvalue > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_caches_equal_a_fresh_computation_after_every_round(kind):
    target, drafter = make_target(11), make_drafter(11, kind)
    run = _Run(target, drafter, TreeShape(3, 2, 5), 0.0, None, set())
    ids = [4, 8, 1]
    ids += run.start(ids)
    for _ in range(6):
        ids += run.round(100)
        assert run.session.length == len(ids) - 1
        c = drafter.config
        context = capture(target, torch.tensor([ids[:-1]]), hidden_layers=c.hidden_needed, kv_layers=c.kv_needed)
        fresh = drafter.remember(Given(context.hidden, context.keys, context.values), torch.tensor([ids[1:]]))
        for mine, theirs in zip(run.memory, fresh, strict=True):
            assert set(mine) == set(theirs)
            for source in mine:
                torch.testing.assert_close(mine[source].keys, theirs[source].keys)
                torch.testing.assert_close(mine[source].values, theirs[source].values)
        if c.reads_hidden:
            torch.testing.assert_close(run.fused, drafter.fuse(context.hidden[:, :, -1:]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_chain_is_accepted_as_far_as_the_offline_evaluation_says(kind):
    """The closed loop: a round behind column i keeps the leading hits of column i, teacher-forced on greedy text."""
    levels, ids = 3, [4, 5, 1]
    target, drafter = make_target(7), make_drafter(7, kind, 1)
    got = decode(target, drafter, ids, max_new_tokens=60, shape=TreeShape(levels), eos_ids=())
    text, c = torch.tensor([ids + got.tokens]), drafter.config
    context = capture(target, text, hidden_layers=c.hidden_needed, kv_layers=c.kv_needed)
    columns = torch.arange(text.shape[1] - levels - 1)[None]
    with torch.no_grad():
        states = unroll(drafter, text, Given(context.hidden, context.keys, context.values), columns, levels)
        width = columns.shape[1]
        hits = torch.stack([drafter.vocab_ids[drafter.logits(s).argmax(-1)][0] == text[0, 2 + k : 2 + k + width]
                            for k, s in enumerate(states)], -1)
    column = len(ids) - 1
    for accepted, tried in zip(got.report.accepted, got.report.tried, strict=True):
        if column >= columns.shape[1]:
            break
        assert accepted == int(hits[column].long().cumprod(0).sum()) and tried == min(accepted + 1, levels)
        column += accepted + 1
    assert column > 40


def test_a_drafter_that_is_the_target_is_never_wrong():
    target = make_target(11)
    config = DrafterConfig.for_target(target, draft_vocab_size=11, memory="target", kv_layers=(0, 1, 2), depth=3,
                                      per_layer=True, injection="linear+rope")
    vocab = DraftVocab(torch.arange(11), 11)
    drafter = new_drafter(target, config, vocab, seed=0, init="layers").double()
    got = decode(target, drafter, [2, 9], max_new_tokens=1 + 4 * 6, shape=TreeShape(5), eos_ids=())
    assert got.report.accepted == [5] * 4 and got.report.mat == 6.0
    assert got.report.acceptance() == [(4, 4)] * 5
    assert got.tokens == plain(target, [2, 9], 25, set())


@pytest.mark.parametrize("options", [
    {}, dict(eos_token_id=3), dict(repetition_penalty=1.7), dict(no_repeat_ngram_size=2),
    dict(min_new_tokens=9, eos_token_id=3),
], ids=str)
def test_transformers_generate_gives_the_same_text(options):
    target, drafter = make_target(11), make_drafter(11, "hybrid")
    ids = torch.tensor([[4, 8, 1]])
    common = dict(max_new_tokens=20, do_sample=False, pad_token_id=0, **options)
    expected = target.model.generate(ids, **common)
    for shape in (TreeShape(3), TreeShape(3, 3, 8)):
        got = target.model.generate(ids, custom_generate=for_generate(target, drafter, shape), **common)
        assert got.tolist() == expected.tolist()


@pytest.mark.slow
def test_transformers_generate_samples_with_its_own_warpers():
    """top-k and temperature cut the target's distribution before anything is accepted."""
    target, drafter, n = make_target(5), make_drafter(5, "hybrid"), 1200
    ids, counts = torch.tensor([[1, 2]]), np.zeros((5, 5))
    torch.manual_seed(0)
    for _ in range(n):
        got = target.model.generate(ids, custom_generate=for_generate(target, drafter, TreeShape(2, 2)), do_sample=True,
                                    temperature=0.8, top_k=3, max_new_tokens=2, pad_token_id=0)
        counts[tuple(got[0, 2:].tolist())] += 1
    exact = np.zeros((5, 5))
    for a in range(5):
        with torch.no_grad():
            scores = target.model(torch.tensor([[1, 2, a]])).logits[0, 1:] / 0.8
        p = scores.masked_fill(scores < scores.topk(3).values[:, -1:], -torch.inf).softmax(-1).numpy()
        exact[a] = p[0, a] * p[1]
    assert counts[exact == 0].sum() == 0
    often = exact * n >= 5
    observed = np.append(counts[often], counts[~often].sum())
    expected = np.append(exact[often], exact[~often].sum()) * n
    keep = expected > 0
    assert stats.chisquare(observed[keep], expected[keep]).pvalue > 1e-3


def test_a_streamer_hears_every_new_token():
    class Streamer:
        def __init__(self):
            self.heard, self.ended = [], False

        def put(self, value):
            self.heard += value.flatten().tolist()

        def end(self):
            self.ended = True

    target, drafter, streamer = make_target(11), make_drafter(11, "hybrid"), Streamer()
    ours = for_generate(target, drafter, TreeShape(3), streamer)
    got = target.model.generate(torch.tensor([[4, 8, 1]]), custom_generate=ours, max_new_tokens=12, do_sample=False,
                                pad_token_id=0)
    assert streamer.heard == got[0].tolist() and streamer.ended  # the prompt first, as from transformers itself


def test_a_streamer_that_skips_the_prompt_prints_the_whole_answer(capsys):
    target, drafter = make_target(11), make_drafter(11, "hybrid")
    ids, options = torch.tensor([[4, 8, 1]]), dict(max_new_tokens=12, do_sample=False, pad_token_id=0)
    target.model.generate(ids, streamer=transformers.TextStreamer(target.tokenizer, skip_prompt=True), **options)
    theirs = capsys.readouterr().out
    streamer = transformers.TextStreamer(target.tokenizer, skip_prompt=True)
    target.model.generate(ids, custom_generate=for_generate(target, drafter, TreeShape(3), streamer), **options)
    assert capsys.readouterr().out == theirs != ""


def test_nothing_behind_a_stop_is_counted():
    target = make_target(11)
    drafter = target_copy(target)
    whole = decode(target, drafter, [2, 9], max_new_tokens=12, shape=TreeShape(6), eos_ids=())
    got = decode(target, drafter, [2, 9], max_new_tokens=12, shape=TreeShape(6), eos_ids=(),
                 stop=lambda new: len(new) == 4)
    assert whole.report.kept[0] == 7 and got.tokens == whole.tokens[:4]
    # the first token comes from the prompt
    assert (got.report.accepted, got.report.tried, got.report.kept) == ([3], [3], [3])


def test_nothing_behind_an_accepted_end_is_counted():
    target = make_target(11)
    drafter = target_copy(target)
    text = plain(target, [2, 9], 12, set())
    end = next(t for n, t in enumerate(text) if n in (2, 3) and t not in text[:n])
    got = decode(target, drafter, [2, 9], max_new_tokens=12, shape=TreeShape(6), eos_ids=[end])
    n = text.index(end)  # the first token comes from the prompt, the next n from one round of right drafts
    assert got.tokens == text[: n + 1]
    assert (got.report.accepted, got.report.tried, got.report.kept) == ([n], [n], [n])


def test_generate_refuses_what_it_cannot_do():
    target, drafter = make_target(11), make_drafter(11, "eagle3")
    ours = for_generate(target, drafter)
    with pytest.raises(KvshotError, match="one sequence"):
        target.model.generate(torch.tensor([[1, 2], [3, 4]]), custom_generate=ours, max_new_tokens=2, pad_token_id=0)
    with pytest.raises(KvshotError, match="made for"):
        make_target(13).model.generate(torch.tensor([[1, 2]]), custom_generate=ours, max_new_tokens=2, pad_token_id=0)


def test_the_tree_holds_the_best_paths():
    """Against all paths of a small vocabulary, each scored by stepping through it alone."""
    target, drafter = make_target(6), make_drafter(6, "hybrid")
    ids = torch.tensor([[1, 4, 2, 5]])
    c = drafter.config
    context = capture(target, ids[:, :-1], hidden_layers=c.hidden_needed, kv_layers=c.kv_needed)
    everything = Given(context.hidden, context.keys, context.values)
    memory = drafter.remember(everything, ids[:, 1:])
    fused = drafter.fuse(context.hidden[:, :, -1:])
    tree = draft_tree(drafter, memory, fused, ids[0, -1:], 2, TreeShape(2, 5, None))
    limit = drafter.limit(torch.full((1, 1), 2))

    @torch.no_grad()
    def score(path):
        state, chain, total, fed = fused, None, 0.0, 5
        for k, token in enumerate(path):
            state, chain = drafter.step(torch.tensor([[fed]]), torch.full((1, 1), 3 + k), state, memory, limit, chain)
            total += float(drafter.logits(state)[0, 0].float().log_softmax(-1)[token - 1])
            fed = token
        return total

    def path_of(node):
        return [] if node == 0 else [*path_of(int(tree.parent[node])), int(tree.tokens[node])]

    assert len(tree.tokens) == 1 + 5 + 25
    scores = {tuple(path_of(n)): float(tree.score[n]) for n in range(1, 31)}
    for path, value in scores.items():
        assert value == pytest.approx(score(path), abs=1e-5)
    small = draft_tree(drafter, memory, fused, ids[0, -1:], 2, TreeShape(2, 5, 7))
    kept = sorted(small.score[1:].tolist(), reverse=True)
    assert kept == pytest.approx(sorted(scores.values(), reverse=True)[:7])
    assert (small.parent[1:] < torch.arange(1, 8)).all()
    assert (small.depth[1:] == small.depth[small.parent[1:]] + 1).all()


def test_shapes_and_errors():
    assert TreeShape.from_eagle(7, 10, 61) == TreeShape(8, 10, 60)
    with pytest.raises(KvshotError, match="levels from 0"):
        TreeShape(2, 0)
    target, drafter = make_target(11), make_drafter(11, "eagle3")
    with pytest.raises(KvshotError, match="at least one token"):
        decode(target, drafter, [])
    windowed = Target("m", target.model, target.tokenizer, "0" * 64)
    windowed.__dict__["layer_types"] = ("sliding_attention",) * 3
    with pytest.raises(KvshotError, match="without full attention"):
        Session(windowed)
