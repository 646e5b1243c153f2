"""A checkpoint says what it is, comes back the same, and nothing else is accepted for it."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvshot.data import DraftVocab
from kvshot.drafters import DrafterConfig, eagle3, load_drafter, save_drafter
from kvshot.drafters.init import new_drafter
from kvshot.errors import KvshotError
from kvshot.targets import load_target


@pytest.fixture(scope="module")
def target():
    return load_target("smoke", device="cpu")


@pytest.fixture
def saved(target, tmp_path):
    vocab = DraftVocab(torch.arange(3, 43), target.vocab_size)
    drafter = new_drafter(target, eagle3(target, draft_vocab_size=40), vocab, seed=0)
    save_drafter(tmp_path / "ckpt", drafter, vocab, target)
    return drafter, vocab, tmp_path / "ckpt"


def test_round_trip(saved, target):
    drafter, vocab, folder = saved
    back, ids = load_drafter(folder, target)
    assert back.config == drafter.config and torch.equal(ids.ids, vocab.ids)
    assert all(torch.equal(t, back.state_dict()[n]) for n, t in drafter.state_dict().items())
    assert torch.equal(back.embedding, target.embedding_weight.float())
    assert "embedding" not in back.state_dict()


def test_bf16_copy_is_half_the_size_and_loads(saved, target, tmp_path):
    drafter, vocab, folder = saved
    save_drafter(tmp_path / "half", drafter, vocab, target, dtype=torch.bfloat16)
    half = (tmp_path / "half" / "model.safetensors").stat().st_size
    assert half < 0.55 * (folder / "model.safetensors").stat().st_size
    back, _ = load_drafter(tmp_path / "half", target)
    assert torch.equal(back.fc.weight, drafter.fc.weight.bfloat16().float())


def edit_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def edit_config(folder, change):
    about = json.loads((folder / "config.json").read_text())
    change(about)
    (folder / "config.json").write_text(json.dumps(about))


@pytest.mark.parametrize(("spoil", "message"), [
    (lambda f: edit_tensors(f, lambda t: t.pop("fc.weight")), "fc.weight is missing"),
    (lambda f: edit_tensors(f, lambda t: t.update(extra=torch.zeros(2))), "extra is .* unknown"),
    (lambda f: edit_tensors(f, lambda t: t.update({"norm.weight": torch.zeros(2)})), "norm.weight is"),
    (lambda f: edit_tensors(f, lambda t: t.pop("d2t")), "d2t"),
    (lambda f: edit_tensors(f, lambda t: t.update(d2t=t["d2t"] + 1)), "different tokens"),
    (lambda f: edit_config(f, lambda a: a["target"].update(weights_sha256="0" * 64)), "other weights"),
    (lambda f: edit_config(f, lambda a: a["kvshot"].pop("hidden_layers")), "fc.weight is"),
    (lambda f: edit_config(f, lambda a: a["kvshot"].pop("rope_theta")), "rope_theta"),
    (lambda f: edit_config(f, lambda a: a["kvshot"].update(colour="red")), "colour"),
    (lambda f: edit_config(f, lambda a: a.update(format=99)), "format 1"),
    (lambda f: edit_config(f, lambda a: a.update(vocab_sha256="0" * 64)), "another draft vocabulary"),
    (lambda f: (f / "config.json").write_text("{"), "damaged"),
    (lambda f: (f / "config.json").unlink(), "no drafter checkpoint"),
    (lambda f: (f / "model.safetensors").write_bytes(b"x" * 40), "damaged"),
    (lambda f: (f / "model.safetensors").unlink(), "no drafter checkpoint"),
])
def test_a_foreign_or_damaged_checkpoint_is_refused(saved, target, spoil, message):
    folder = saved[2]
    spoil(folder)
    with pytest.raises(KvshotError, match=message):
        load_drafter(folder, target)


@pytest.mark.parametrize(("change", "message"), [
    ({"n_kv_heads": 3}, "cannot share"), ({"draft_vocab_size": 10**6}, "exceeds the target's"),
    ({"hidden_layers": (-1,)}, "from 0"), ({"memory": "theirs"}, "memory"), ({"depth": 0}, "depth"),
    ({"hue": 1}, "hue"),
])
def test_impossible_configurations(target, change, message):
    fields = {"draft_vocab_size": 40, **change}
    with pytest.raises(KvshotError, match=message):
        DrafterConfig.for_target(target, **fields)


def test_a_failed_write_leaves_the_old_checkpoint(saved, target, monkeypatch):
    drafter, vocab, folder = saved
    before = (folder / "model.safetensors").read_bytes()

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvshot.drafters.checkpoint.save_file", full)
    with pytest.raises(KvshotError, match="no space left"):
        save_drafter(folder, drafter, vocab, target)
    assert (folder / "model.safetensors").read_bytes() == before
    assert [p.name for p in folder.parent.iterdir()] == ["ckpt"]
