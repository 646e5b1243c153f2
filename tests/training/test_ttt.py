"""The TTT loss against a plain loop, sampled columns against all of them, and the gradient of the fused loss."""

from __future__ import annotations

import pytest
import torch

from kvshot.drafters.init import new_drafter
from kvshot.drafters.injection import Given
from kvshot.training import ttt
from kvshot.training.batches import load_batch
from kvshot.training.ttt import TTTLoss, choose_columns, gather_columns, soft_cross_entropy, unroll

K = 4


@pytest.mark.parametrize("rows", [4, 32])
def test_soft_cross_entropy_and_its_gradient(rows, monkeypatch):
    monkeypatch.setattr(ttt, "CPU_ROWS", rows)
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, 7, generator=g, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(3, 5, 7, generator=g, dtype=torch.float64)
    weight = torch.rand(3, 5, generator=g, dtype=torch.float64)
    plain = -(teacher.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    (expected,) = torch.autograd.grad((plain * weight).sum(), logits)
    got = soft_cross_entropy(logits, teacher)
    torch.testing.assert_close(got, plain)
    torch.testing.assert_close(torch.autograd.grad((got * weight).sum(), logits)[0], expected)
    assert torch.autograd.gradcheck(lambda x: soft_cross_entropy(x, teacher), logits)


def one(given, b):
    return Given(given.hidden[b : b + 1])


def loop_loss(small, drafter, batch, n_steps, decay):
    """The objective written down: for each step the mean over supervised (column, step) pairs in the vocabulary."""
    head = small.target.head_weight[small.vocab.ids]
    total = 0.0
    for k in range(n_steps):
        terms = []
        for b in range(len(batch.ids)):
            mask, length = batch.loss_mask[b].tolist(), batch.ids.shape[1]
            for i in range(length - 2 - k):
                if not all(mask[i + 1 : i + 3 + k]):  # x_{i+1} .. x_{i+2+k} in one response
                    continue
                label = batch.argmax[b, i + 1 + k]
                if label not in small.vocab.ids:
                    continue
                column = torch.tensor([[i]])
                states = list(unroll(drafter, batch.ids[b : b + 1], one(batch.given, b), column, k + 1))
                log_q = drafter.logits(states[k])[0, 0].log_softmax(-1)
                p = (batch.final[b, i + 1 + k] @ head.T).softmax(-1)
                terms.append(-(p * log_q).sum())
        total = total + decay**k * torch.stack(terms).mean()
    return total


@pytest.fixture(scope="module")
def setting(small):
    drafter = new_drafter(small.target, small.config, small.vocab, seed=0)
    batch = load_batch(small.store, [0, 5, 9], small.config)
    batch.given.hidden, batch.final = batch.given.hidden.float(), batch.final.float()
    return drafter, batch, TTTLoss(drafter, small.target.scorer(small.vocab.ids), n_steps=K)


def test_the_objective_equals_a_plain_loop(small, setting):
    drafter, batch, loss = setting
    with torch.no_grad():
        got = loss(batch, choose_columns(batch.loss_mask, K, None))
        torch.testing.assert_close(got, loop_loss(small, drafter, batch, K, 0.8), rtol=1e-5, atol=1e-5)


def test_every_parameter_gets_a_gradient(setting):
    drafter, batch, loss = setting
    drafter.zero_grad()
    loss(batch, choose_columns(batch.loss_mask, K, None)).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in drafter.parameters())
    assert not drafter.embedding.requires_grad


def test_all_columns_are_exactly_the_supervised_ones():
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 0], [0, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0]], dtype=torch.bool)
    columns = choose_columns(mask, 3, None)
    pairs = {(b, c, k) for b in range(2) for n, c in enumerate(columns.at[b].tolist()) for k in range(3)
             if columns.valid[b, n, k]}
    # column i is supervised at k when x_{i+1} and x_{i+2+k} are in one run of the mask
    assert pairs == {(0, 1, 0), (0, 1, 1), (0, 1, 2), (0, 2, 0), (0, 2, 1), (0, 3, 0), (0, 7, 0),
                     (1, 0, 0), (1, 0, 1), (1, 1, 0)}
    assert columns.weight.tolist() == [1.0, 1.0]


def test_sampled_columns_are_fresh_distinct_and_unbiased():
    mask = torch.zeros(2, 30, dtype=torch.bool)
    mask[0, 4:28], mask[1, 10:16] = True, True
    value = torch.rand(2, 30, generator=torch.Generator().manual_seed(3))
    full = choose_columns(mask, 3, None)
    exact = (gather_columns(value, full.at) * full.valid[..., 0] * full.weight[:, None]).sum()
    draws, seen = [], set()
    for seed in range(400):
        some = choose_columns(mask, 3, 4, torch.Generator().manual_seed(seed))
        for b in range(2):
            kept = some.at[b][some.valid[b, :, 0]].tolist()
            assert len(kept) == len(set(kept)) == 4
        seen.add(tuple(some.at[0].tolist()))
        draws.append((gather_columns(value, some.at) * some.valid[..., 0] * some.weight[:, None]).sum())
    draws = torch.stack(draws)
    assert len(seen) > 200
    assert (draws.mean() - exact).abs() < 4 * draws.std() / len(draws) ** 0.5
    again = choose_columns(mask, 3, 4, torch.Generator().manual_seed(7))
    assert torch.equal(again.at, choose_columns(mask, 3, 4, torch.Generator().manual_seed(7)).at)


def test_sampled_gradient_is_that_of_the_full_loss_on_average(setting):
    """The mean gradient over many column samples points where the full one does (ratio estimates: nearly)."""
    drafter, batch, loss = setting

    def gradient(columns):
        drafter.zero_grad()
        loss(batch, columns).backward()
        return drafter.fc.weight.grad.flatten().clone()

    full = gradient(choose_columns(batch.loss_mask, K, None))
    some = [gradient(choose_columns(batch.loss_mask, K, 12, torch.Generator().manual_seed(s))) for s in range(60)]
    mean = torch.stack(some).mean(0)
    assert torch.cosine_similarity(mean, full, dim=0) > 0.97
    assert 0.9 < mean.norm() / full.norm() < 1.1


def test_targets_outside_the_vocabulary_teach_nothing(setting):
    _, batch, loss = setting
    columns = choose_columns(batch.loss_mask, K, None)
    outside = (~loss.in_vocab).nonzero()[0, 0]
    spoiled = type(batch)(**{**vars(batch), "argmax": torch.full_like(batch.argmax, outside)})
    assert loss(spoiled, columns) == 0.0
