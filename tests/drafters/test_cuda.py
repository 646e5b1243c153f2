"""The same maths on a GPU: capture, unroll and loss; training on live features, its resume, and evaluation.

What trains here is run on a CPU, too, so that a machine without a GPU (which skips the rest) knows the test is right.
"""

from __future__ import annotations

import pytest
import torch
from accelerate.state import AcceleratorState

from kvshot.data import DraftVocab, encode_all
from kvshot.data.toy import toy_conversations
from kvshot.drafters import DrafterConfig, eagle3
from kvshot.drafters.checkpoint import load_drafter
from kvshot.drafters.init import new_drafter
from kvshot.evaluation.metrics import summarise
from kvshot.evaluation.stepwise import stepwise_hits
from kvshot.targets import FeatureStore, OnlineFeatures, load_target
from kvshot.training.batches import load_batch
from kvshot.training.trainer import TrainConfig, Trainer
from kvshot.training.ttt import TTTLoss, choose_columns, unroll

CUDA = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture
def any_device():
    """Accelerate settles on one device a process: forget it before and after."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=CUDA)])
def test_capture_unroll_and_loss_agree_with_the_cpu(tmp_path, device):
    results = []
    for where in ("cpu", device):
        target = load_target("smoke", device=where)
        examples = encode_all(target.tokenizer, toy_conversations(6)).examples
        vocab = DraftVocab.from_examples(examples, target.vocab_size, 40)
        store = FeatureStore.build(tmp_path / where, target, examples, kv_layers=(), quiet=True, dtype=torch.float32)
        drafter = new_drafter(target, eagle3(target, draft_vocab_size=40), vocab, seed=0)
        batch = load_batch(store, [0, 1, 2], drafter.config)
        columns = choose_columns(batch.loss_mask, 3, 6, torch.Generator().manual_seed(0))
        batch, columns = batch.to(where), columns.to(where)
        loss = TTTLoss(drafter, target.scorer(vocab.ids.to(where)), n_steps=3)(batch, columns)
        loss.backward()
        states = torch.stack(list(unroll(drafter, batch.ids, batch.given, columns.at, 3)))
        results.append([loss.detach().cpu(), drafter.fc.weight.grad.cpu(), states.detach().cpu(), batch.final.cpu()])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=CUDA)])
def test_two_steps_on_live_features_and_a_resume(tmp_path, any_device, device):
    target = load_target("smoke", device=device)
    examples = encode_all(target.tokenizer, toy_conversations(12), 96).examples
    vocab = DraftVocab.from_examples(examples, target.vocab_size, 48)
    config = DrafterConfig.for_target(target, draft_vocab_size=48, memory="both", injection="linear+rope",
                                      hidden_layers=target.default_hidden_layers, kv_layers=target.spaced_kv_layers(2))
    train, held_out = (OnlineFeatures(target, part, kv_layers=config.kv_needed)
                       for part in (examples[3:], examples[:3]))
    recipe = TrainConfig(steps=2, batch_tokens=512, columns_per_sequence=8, n_steps=3, eval_every=1, lr=3e-3,
                         precision="bf16")

    def evaluate(drafter):
        return {"mat": summarise(stepwise_hits(drafter, held_out, 3, quiet=True), n_boot=2).mat.value}

    def trainer(folder):
        drafter = new_drafter(target, config, vocab, seed=0)
        return Trainer(target, drafter, vocab, train, recipe, tmp_path / folder, evaluate)

    whole = trainer("whole").run(quiet=True)
    trainer("halves").run(until=1, quiet=True)
    second = trainer("halves")
    done = second.run(quiet=True)
    assert done.step == 2 and done.tokens == whole.tokens > 0
    losses = [[point["loss"] for point in run.curve] for run in (done, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)  # a GPU adds up in any order
    assert second.drafter.fc.weight.device.type == device and second.drafter.fc.weight.dtype == torch.float32
    best, _ = load_drafter(tmp_path / "halves" / "best", target)
    hits = stepwise_hits(best, held_out, 3, quiet=True)
    assert hits.valid[:, 0].all() and not (hits.hits & ~hits.valid).any()
    assert 1 <= summarise(hits, n_boot=2).mat.value <= 4
