"""The fast generator against transformers' own greedy decoding, and its sampling against the exact distribution."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from kvshot.data.generate import BlockGenerator, Forced, Row, Sampled, _Product, _top, choose
from kvshot.errors import KvshotError

SMALL = dict(vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8, eos_token_id=None, pad_token_id=0)
CONFIGS = {"llama": LlamaConfig(**SMALL), "qwen2": Qwen2Config(**SMALL), "qwen3": Qwen3Config(**SMALL)}
PREFIX = [3, 7, 1]


def model_of(name: str):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]).eval()
    for p in model.parameters():
        p.data.normal_(0, 0.3)
    return model


def greedy(model, prompt, n):
    """Plain decoding without a cache."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(n):
            ids.append(model(torch.tensor([ids])).logits[0, -1].argmax().item())
    return ids[len(prompt):]


def run(model, scripts, **options):
    generator = BlockGenerator(model, PREFIX, capacity=100, **options)
    size = options.get("block_rows", 64)
    blocks = ((n, [Row(s) for s in scripts[n * size : (n + 1) * size]]) for n in range(-(-len(scripts) // size)))
    return [row for _, rows in sorted(generator.run(blocks), key=lambda item: item[0]) for row in rows]


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_rows_equal_plain_decoding(name):
    """Prompts of many lengths, rows that end at different times, blocks that start while others run."""
    model = model_of(name)
    g = torch.Generator().manual_seed(1)
    scripts, expected = [], []
    for i in range(23):
        prompt = torch.randint(50, (1 + i % 6,), generator=g).tolist()
        n = 1 + (7 * i) % 40  # rows outlive the growth step of the cache
        scripts.append((Forced(tuple(prompt)), Sampled(n, frozenset())))
        expected.append(greedy(model, PREFIX + prompt, n))
    rows = run(model, scripts, block_rows=4, max_rows=10)
    assert [r.written[1] for r in rows] == expected
    assert {r.outcome for r in rows} == {"limit"}


def test_stop_tokens_segments_and_what_follows():
    model = model_of("llama")
    free = greedy(model, PREFIX, 30)
    stop = free[5]
    cut = free.index(stop)
    header = (9, 4)
    (row,) = run(model, [(Sampled(30, frozenset({stop})), Forced(header), Sampled(6, frozenset()))])
    assert row.written[0] == free[:cut]
    assert row.written[1] == list(header)
    assert row.written[2] == greedy(model, PREFIX + free[: cut + 1] + list(header), 6)  # the stop token was fed
    (row,) = run(model, [(Sampled(3, frozenset({49})), Forced(header), Sampled(6, frozenset()))])
    assert row.outcome == "limit" and row.written == [free[:3]]  # no answer to a turn that did not end


def test_a_row_can_give_up():
    (row,) = run(model_of("llama"), [(Sampled(90, frozenset(), give_up=lambda ids: len(ids) >= 32),)])
    assert row.outcome == "gave up" and len(row.written[0]) == 32


def test_sampled_rows_do_not_depend_on_what_runs_beside_them():
    model = model_of("qwen3").double()
    scripts = [(Sampled(5 + i, frozenset({8}), temperature=1.0, top_p=0.9),) for i in range(12)]
    alone = [r.written for r in run(model, scripts, block_rows=4, max_rows=4, seed=5)]
    together = [r.written for r in run(model, scripts, block_rows=4, max_rows=12, seed=5)]
    other = [r.written for r in run(model, scripts, block_rows=4, max_rows=12, seed=6)]
    assert alone == together != other


@pytest.mark.parametrize(("temperature", "top_p", "top_k"), [(1.0, 1.0, 128), (0.7, 0.8, 128), (1.5, 1.0, 3)])
def test_sampling_follows_the_distribution(temperature, top_p, top_k):
    logits = torch.tensor([2.0, 0.5, 1.5, -1.0, 0.0, 1.0])
    p = (logits.double() / temperature).softmax(-1)
    order = p.argsort(descending=True)
    inside = (p[order].cumsum(0) - p[order] < top_p) & (torch.arange(6) < top_k)
    kept = torch.zeros(6, dtype=p.dtype).scatter(0, order[inside], p[order[inside]])
    kept /= kept.sum()
    n = 20_000
    draws = torch.rand(n, generator=torch.Generator().manual_seed(0))
    segment = Sampled(1, frozenset(), temperature, top_p, top_k)
    chosen = choose(logits.expand(n, -1), [segment] * n, draws).bincount(minlength=6)
    assert (chosen[kept == 0] == 0).all()
    assert chisquare(chosen[kept > 0], kept[kept > 0] * n).pvalue > 1e-3


def test_forced_rows_do_not_disturb_the_draws_of_others():
    """A block that only reads its prompt for a while draws the same, whatever runs beside it."""
    model = model_of("llama").double()
    segment = Sampled(9, frozenset(), temperature=1.0)
    scripts = [(Forced(tuple(range(1, 2 + 3 * (i // 2)))), segment) for i in range(8)]
    alone = [r.written for r in run(model, scripts, block_rows=2, max_rows=2, seed=5)]
    assert alone == [r.written for r in run(model, scripts, block_rows=2, max_rows=8, seed=5)]


def test_equal_scores_are_settled_as_argmax_does():
    logits = torch.zeros(5, 300)
    logits[:, [7, 9]] = 1.0
    draws = torch.linspace(0, 0.99, 5)
    assert torch.equal(choose(logits, [Sampled(1, frozenset())] * 5, draws), logits.argmax(-1))


def test_temperature_zero_is_the_argmax():
    logits = torch.randn(40, 300, generator=torch.Generator().manual_seed(0))
    got = choose(logits, [Sampled(1, frozenset())] * 40, torch.full((40,), 0.999))
    assert torch.equal(got, logits.argmax(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_largest_of_a_long_row(dtype):
    x = torch.randn(3, 49152, generator=torch.Generator().manual_seed(0)).to(dtype)
    values, ids = _top(x, 128)
    assert torch.equal(values.to(dtype), x.topk(128).values)  # ties may come in any order
    assert torch.equal(x.gather(1, ids).float(), values.float())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_a_product_is_its_linear_layers_side_by_side(dtype, tolerance, bias):
    """In bfloat16 the weights are laid out for the CPU's units, where it has them."""
    torch.manual_seed(0)
    a, b = (torch.nn.Linear(64, n, bias=bias, dtype=dtype) for n in (48, 17))
    product = _Product(a, b)
    with torch.inference_mode():
        for rows in (1, 33, 320):
            x = torch.randn(rows, 64, dtype=dtype)
            torch.testing.assert_close(product(x), torch.cat([a(x), b(x)], -1), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("absent", ["_is_mkldnn_bf16_supported", "_reorder_linear_weight", "_linear_pointwise"])
def test_a_torch_without_the_private_operators_does_plain_products(absent, monkeypatch):
    every = {"_is_mkldnn_bf16_supported": lambda: True, "_reorder_linear_weight": pytest.fail,
             "_linear_pointwise": pytest.fail}
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace(**{k: v for k, v in every.items() if k != absent}))
    linear, x = torch.nn.Linear(8, 5, dtype=torch.bfloat16), torch.ones(2, 8, dtype=torch.bfloat16)
    with torch.inference_mode():
        assert torch.equal(_Product(linear)(x), linear(x))


def test_other_shapes_are_refused():
    model = AutoModelForCausalLM.from_config(MistralConfig(**SMALL, sliding_window=4))
    with pytest.raises(KvshotError, match="without sliding windows"):
        BlockGenerator(model, PREFIX, capacity=10)
    with pytest.raises(KvshotError, match="prefix is empty"):
        BlockGenerator(model_of("llama"), [], capacity=10)
