"""The same maths on a GPU: capture, unroll, one optimizer step. Skipped without one."""

from __future__ import annotations

import pytest
import torch

from kvshot.data import DraftVocab, encode_all
from kvshot.data.toy import toy_conversations
from kvshot.drafters import eagle3
from kvshot.drafters.init import new_drafter
from kvshot.targets import FeatureStore, load_target
from kvshot.training.batches import load_batch
from kvshot.training.ttt import TTTLoss, choose_columns, unroll

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def test_capture_unroll_and_loss_agree_with_the_cpu(tmp_path):
    results = []
    for device in ("cpu", "cuda"):
        target = load_target("smoke", device=device)
        examples = encode_all(target.tokenizer, toy_conversations(6)).examples
        vocab = DraftVocab.from_examples(examples, target.vocab_size, 40)
        store = FeatureStore.build(tmp_path / device, target, examples, kv_layers=(), quiet=True, dtype=torch.float32)
        drafter = new_drafter(target, eagle3(target, draft_vocab_size=40), vocab, seed=0)
        batch = load_batch(store, [0, 1, 2], drafter.config)
        columns = choose_columns(batch.loss_mask, 3, 6, torch.Generator().manual_seed(0))
        batch, columns = batch.to(device), columns.to(device)
        loss = TTTLoss(drafter, target.scorer(vocab.ids.to(device)), n_steps=3)(batch, columns)
        loss.backward()
        states = torch.stack(list(unroll(drafter, batch.ids, batch.given, columns.at, 3)))
        results.append([loss.detach().cpu(), drafter.fc.weight.grad.cpu(), states.detach().cpu(), batch.final.cpu()])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
