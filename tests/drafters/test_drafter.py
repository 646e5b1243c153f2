"""The draft column: unrolled training equals step-by-step drafting; nothing looks ahead; a real reference agrees."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvshot.drafters.attention import BACKENDS
from kvshot.drafters.injection import Given
from kvshot.drafters.layers import rotate
from kvshot.training.ttt import unroll
from tests.drafters.conftest import POINTS, changed, make_drafter, sequence

K = 5


def step_by_step(drafter, ids, given, column, n_steps=K):
    """Draft as a decoder would: one sequence, one column, memory grown token by token, nothing from the future."""
    memory = None
    for j in range(column + 1):  # the target has read x_0..x_column only
        memory = drafter.remember(given.positions(j, j + 1), ids[:, j + 1 : j + 2], memory)
    limit = drafter.limit(torch.full((1, 1), column))
    state, chain, out = drafter.fuse(given.positions(column, column + 1).hidden), None, []
    for k in range(n_steps):
        at = column + 1 + k
        state, chain = drafter.step(ids[:, at : at + 1], torch.full((1, 1), at), state, memory, limit, chain)
        out.append(drafter.logits(state)[0, 0])
    return torch.stack(out)


def one(given, b):
    return Given(given.hidden[b : b + 1], given.keys[b : b + 1], given.values[b : b + 1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_unroll_equals_step_by_step_drafting(drafter, dtype):
    drafter = drafter.to(dtype)
    ids, given = sequence(drafter)
    columns = torch.arange(ids.shape[1] - K).expand(2, -1)  # every step of every column has a token
    together = torch.stack([drafter.logits(s) for s in unroll(drafter, ids, given, columns, K)])
    for b in range(2):
        for i in columns[b].tolist():
            alone = step_by_step(drafter, ids[b : b + 1], one(given, b), i)
            exact = dict(rtol=0, atol=1e-10) if dtype.itemsize == 8 else dict(rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(together[:, b, i], alone, **exact)


def test_offline_steps_are_first_steps_of_later_columns(drafter):
    ids, given = sequence(drafter)
    first = next(unroll(drafter, ids, given, torch.arange(12).expand(2, -1), 1))
    columns = torch.arange(8).expand(2, -1)
    for k, states in enumerate(unroll(drafter, ids, given, columns, K, offline=True)):
        torch.testing.assert_close(states, first[:, k : k + 8])


def test_a_subset_of_columns_gives_the_same_states(drafter):
    ids, given = sequence(drafter)
    every = list(unroll(drafter, ids, given, torch.arange(8).expand(2, -1), K))
    some = torch.tensor([[6, 0, 3], [1, 7, 2]])
    for k, states in enumerate(unroll(drafter, ids, given, some, K)):
        torch.testing.assert_close(states, every[k].gather(1, some[..., None].expand(-1, -1, states.shape[-1])))


def test_nothing_looks_ahead_or_at_other_sequences(drafter):
    """Change every later token and state, and the other sequence: step k of column i must not move at all."""
    ids, given = sequence(drafter)
    columns = torch.arange(8).expand(2, -1)
    before = torch.stack(list(unroll(drafter, ids, given, columns, K)))
    for i in (0, 3, 7):
        other = changed(changed(given, slice(i + 1, None), 0), slice(None), 1)
        for k in range(K):
            other_ids = ids.clone()
            other_ids[0, i + 2 + k :] = (other_ids[0, i + 2 + k :] + 1) % drafter.config.target_vocab_size
            other_ids[1] = (ids[1] + 3) % drafter.config.target_vocab_size
            after = torch.stack(list(unroll(drafter, other_ids, other, columns, K)))
            torch.testing.assert_close(after[: k + 1, 0, i], before[: k + 1, 0, i], rtol=0, atol=0)


@pytest.mark.parametrize("name", [n for n in POINTS if n != "no prefix attention"])
def test_what_a_column_may_see_it_does_see(name):
    """The other side of causality: own token of each step, an earlier token, an earlier state all matter."""
    drafter = make_drafter(**POINTS[name])
    ids, given = sequence(drafter)
    columns = torch.tensor([[6], [6]])
    before = torch.stack(list(unroll(drafter, ids, given, columns, K)))
    own = drafter.config.memory in ("own", "both")
    for position in (3, 7, 8, 11):
        other = ids.clone()
        other[:, position] = (other[:, position] + 1) % drafter.config.target_vocab_size
        moved = (torch.stack(list(unroll(drafter, other, given, columns, K))) - before).abs().amax((1, 2, 3)) > 1e-9
        # a token under x_7 is seen through entries of the drafter's own, where it keeps any
        assert moved.tolist() == [position <= 7 + k and (own or position >= 7) for k in range(K)]
    reads = drafter.config.reads_hidden or drafter.config.remembers_target
    for position in (2, 6) if reads and (own or drafter.config.remembers_target) else ():
        states = torch.stack(list(unroll(drafter, ids, changed(given, position), columns, K)))
        assert ((states - before).abs().amax((1, 2, 3)) > 1e-9).all()


@pytest.mark.parametrize("step", [1, 2])
def test_a_loss_on_a_later_step_reaches_all_that_it_came_from(step):
    """The state enters the next step with its gradient: autograd gives what finite differences give, for the state of
    one later step alone, where without prefix attention nothing but the steps before carries what the target gave.
    """
    drafter = make_drafter(**POINTS["no prefix attention"])
    ids, given = sequence(drafter, batch=1, length=5)

    def state(hidden):
        return list(unroll(drafter, ids, Given(hidden), torch.tensor([[1]]), step + 1))[step]

    assert torch.autograd.gradcheck(state, given.hidden.requires_grad_())


def test_without_prefix_attention_earlier_columns_do_not_matter():
    drafter = make_drafter(**POINTS["no prefix attention"])
    ids, given = sequence(drafter)
    columns = torch.tensor([[6], [6]])
    before = torch.stack(list(unroll(drafter, ids, given, columns, K)))
    ids[:, :7] = 0
    after = torch.stack(list(unroll(drafter, ids, changed(given, slice(0, 6)), columns, K)))
    torch.testing.assert_close(after, before, rtol=0, atol=0)


@pytest.mark.parametrize("shift", [1000, 100_000])
@pytest.mark.parametrize("name", [n for n, p in POINTS.items() if p.get("injection") != "linear"])
def test_shifting_all_positions_changes_nothing(name, shift, monkeypatch):
    """RoPE is relative: with its own memory only, EAGLE's i+k and our i+1+k are the same drafter.

    The target's keys come rotated to their true positions, so they must move along. (A projection that mixes rotated
    keys, "linear", is not relative: what the paper's RoPE fix is for.)
    """
    drafter = make_drafter(**POINTS[name])
    ids, given = sequence(drafter)
    columns = torch.tensor([[2, 5], [0, 7]])
    before = torch.stack(list(unroll(drafter, ids, given, columns, K)))
    plain = drafter.rope
    turned = plain(torch.full((2, ids.shape[1]), shift))
    if drafter.config.kv_needed:
        given.keys = torch.stack([rotate(layer, turned) for layer in given.keys.unbind(1)], 1)
    monkeypatch.setattr(drafter, "rope", lambda positions: plain(positions + shift))
    after = torch.stack(list(unroll(drafter, ids, given, columns, K)))
    torch.testing.assert_close(after, before, rtol=0, atol=1e-9)


def test_a_shift_of_the_drafts_alone_is_felt_once_the_targets_keys_are_in(monkeypatch):
    """The mistake that the test above would miss in hidden-only drafters: draft positions one off the target's."""
    for name in ("kv concat", "kv linear+rope, 3 layers", "cross only", "hybrid"):
        drafter = make_drafter(**POINTS[name])
        ids, given = sequence(drafter)
        columns = torch.tensor([[2, 5], [0, 7]])
        before = torch.stack(list(unroll(drafter, ids, given, columns, K)))
        step = drafter.step
        with monkeypatch.context() as m:
            m.setattr(drafter, "step", lambda tokens, positions, *rest, step=step: step(tokens, positions - 1, *rest))
            after = torch.stack(list(unroll(drafter, ids, given, columns, K)))
        assert (after - before).abs().max() > 1e-4, name


@pytest.mark.parametrize("depth", [1, 3])
def test_an_embedding_only_drafter_is_a_llama(depth):
    """transformers agrees: with its own memory and no states, step k of column i is Llama on x_1..x_{i+1+k}."""
    drafter = make_drafter(depth=depth)
    c = drafter.config
    llama = LlamaForCausalLM(LlamaConfig(
        vocab_size=c.target_vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size,
        num_hidden_layers=depth, num_attention_heads=c.n_heads, num_key_value_heads=c.n_kv_heads, head_dim=c.head_dim,
        rms_norm_eps=c.norm_eps, rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        attn_implementation="eager")).double().eval()
    state = {name: t for name, t in drafter.state_dict().items() if name.startswith(("layers.", "norm."))}
    state["embed_tokens.weight"] = drafter.embedding
    llama.model.load_state_dict(state)
    ids, _ = sequence(drafter)
    columns = torch.arange(8).expand(2, -1)
    with torch.no_grad():
        expected = drafter.lm_head(llama.model(ids[:, 1:]).last_hidden_state)  # entry j: x_1..x_{j+1}
        for k, s in enumerate(unroll(drafter, ids, Given(), columns, K)):
            torch.testing.assert_close(drafter.logits(s), expected[:, k : k + 8], rtol=0, atol=1e-6)


def test_attention_backends_agree_with_the_loops():
    g = torch.Generator().manual_seed(0)
    q = torch.randn(2, 6, 5, 4, generator=g, dtype=torch.float64)
    keys, values = (torch.randn(2, 3, 7, 4, generator=g, dtype=torch.float64) for _ in range(2))
    chain_k, chain_v = (torch.randn(2, 3, 5, 2, 4, generator=g, dtype=torch.float64) for _ in range(2))
    limit = torch.tensor([[0, 1, 3, 7, 7], [2, 0, 5, 6, 1]])
    expected = BACKENDS["reference"](q, keys, values, limit, chain_k, chain_v)
    for name, backend in BACKENDS.items():
        got = backend(q, keys, values, limit, chain_k, chain_v)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12, msg=name)
        other_k, other_v = keys.clone(), values.clone()
        other_k[:, :, 5:], other_v[:, :, 5:] = 1e4, -1e4  # beyond the limit of the first three columns
        again = backend(q, other_k, other_v, limit, chain_k, chain_v)
        torch.testing.assert_close(again[:, :, :3], expected[:, :, :3], rtol=0, atol=1e-12, msg=name)


def test_an_empty_memory_is_no_nan():
    g = torch.Generator().manual_seed(0)
    q, chain = torch.randn(1, 2, 3, 4, generator=g), torch.randn(1, 1, 3, 1, 4, generator=g)
    empty = torch.empty(1, 1, 0, 4)
    for backend in BACKENDS.values():
        out = backend(q, empty, empty, torch.zeros(1, 3, dtype=torch.int64), chain, chain)
        torch.testing.assert_close(out, chain[:, :, :, 0].expand(-1, 2, -1, -1))


def test_a_state_enters_twice_normalised_and_as_it_is():
    """EAGLE-3's layer by hand: [norm(e); norm(g)] into attention, the un-normed g as residual."""
    drafter = make_drafter(hidden_layers=(1, 2, 4))
    ids, given = sequence(drafter, batch=1)
    hidden = given.hidden
    layer, w = drafter.layers[0], drafter.state_dict()
    g = torch.cat([hidden[0, n, 0] for n in range(3)]) @ w["fc.weight"].T
    e = drafter.embedding[ids[0, 1]]

    def norm(x, weight):
        return x / (x.square().mean() + drafter.config.norm_eps).sqrt() * weight

    x = torch.cat([norm(e, w["layers.0.input_layernorm.weight"]), norm(g, w["layers.0.hidden_norm.weight"])])
    v = (x @ w["layers.0.self_attn.v_proj.weight"].T).view(2, -1)
    attended = v.repeat_interleave(2, 0).flatten()  # column 0 at step 0 sees itself only
    h = g + attended @ w["layers.0.self_attn.o_proj.weight"].T
    n = norm(h, w["layers.0.post_attention_layernorm.weight"])
    m = torch.nn.functional.silu(n @ w["layers.0.mlp.gate_proj.weight"].T) * (n @ w["layers.0.mlp.up_proj.weight"].T)
    out = h + m @ w["layers.0.mlp.down_proj.weight"].T
    state = next(iter(unroll(drafter, ids, given, torch.zeros(1, 1, dtype=torch.int64), 1)))[0, 0]
    torch.testing.assert_close(state, out)
    torch.testing.assert_close(drafter.logits(state), norm(out, w["norm.weight"]) @ w["lm_head.weight"].T)
    assert layer.takes_state
