"""What the runs of a profile share: the same features, stored or not."""

from __future__ import annotations

import pytest

from kvshot.data import Conversation, Message
from kvshot.data.corpus import Corpus
from kvshot.drafters import new_drafter, save_drafter
from kvshot.errors import KvshotError
from kvshot.experiments import Bench, evaluate, experiment, profile, recipe
from kvshot.experiments.diagnosis import diagnose_checkpoint
from kvshot.experiments.run import run


def test_more_training_text_than_is_used_changes_no_setting(tmp_path):
    def talk(n):
        messages = [Message(role="user", content="Hi"), Message(role="assistant", content=f"Ho {n}")]
        return Conversation(id=str(n), messages=messages, meta={"answer_tokens": 1})

    def setting(name, train, held_out=9):
        some = {"train": [talk(n) for n in train], "validation": [talk(8)], "held_out": [talk(held_out)]}
        Corpus.save(tmp_path / name, "tiny", {}, some)
        chosen = profile("smoke", tmp_path / name).model_copy(update={"train_conversations": 2})
        return chosen.setting["corpus"]

    same = setting("a", (0, 1))
    assert setting("b", (0, 1, 2)) == same != setting("c", (1, 0)) and setting("d", (0, 1), 7) != same
    assert profile("smoke").setting["corpus"] is None


def test_an_option_that_only_another_of_the_targets_templates_has_is_left_out(monkeypatch):
    bench = Bench(profile("smoke").model_copy(update={"template": {"enable_thinking": False}}), device="cpu")
    both = {"default": bench.target.tokenizer.chat_template, "tool_use": "{{ enable_thinking }}"}
    monkeypatch.setattr(bench.target.tokenizer, "chat_template", both)
    assert bench.template == {}


def test_what_is_wrong_without_the_target_is_said_before_it_is_fetched(tmp_path, monkeypatch):
    monkeypatch.setattr("kvshot.experiments.bench.load_target", lambda *a, **k: pytest.fail("fetched the target"))
    monkeypatch.setattr("kvshot.experiments.bench.Bench.store", lambda *a: pytest.fail("captured"))
    (tmp_path / "file").write_text("")
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "record.json").write_text("")
    good, bare = profile("smoke"), profile("smoke", data=tmp_path / "nowhere")

    def trained(chosen, name, folder, **start):
        run(Bench(chosen, experiments=[name], device="cpu", quiet=True), name, folder, recipe(chosen, name), **start)

    for message, attempt in (
            ("no data set in .*nowhere", lambda: trained(bare, "eagle3", tmp_path / "run")),
            ("file is a file: name a folder", lambda: trained(good, "eagle3", tmp_path / "file")),
            ("file is a file: name a folder", lambda: trained(good, "eagle3", tmp_path / "file" / "deeper" / "run")),
            ("train eagle3 first", lambda: trained(good, "hybrid-checkpoint", tmp_path / "run")),
            ("config.json is missing", lambda: trained(good, "hybrid-checkpoint", tmp_path / "run",
                                                       start=tmp_path / "start" / "best")),
            ("no drafter checkpoint", lambda: evaluate(Bench(good, device="cpu"), tmp_path / "nowhere")),
            ("no drafter checkpoint", lambda: diagnose_checkpoint(tmp_path / "nowhere", good, device="cpu"))):
        with pytest.raises(KvshotError, match=message):
            attempt()
    monkeypatch.setattr("kvshot.experiments.bench.target_of", lambda checkpoint: "smoke")
    with pytest.raises(KvshotError, match="no data set in .*nowhere"):
        evaluate(Bench(bare, device="cpu"), tmp_path / "start")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "start"]


@pytest.mark.slow
def test_an_online_profile_measures_the_same_and_stores_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("KVSHOT_CACHE", str(tmp_path))
    online = Bench(profile("smoke").model_copy(update={"online": True}), device="cpu", quiet=True)
    config = experiment("hybrid-random").config(online.target, len(online.vocab))
    drafter = new_drafter(online.target, config, online.vocab, seed=0, init="random")
    save_drafter(tmp_path / "drafter", drafter, online.vocab, online.target)
    _, measured = evaluate(online, tmp_path / "drafter", 3)
    assert not (tmp_path / "features").exists()
    _, stored = evaluate(Bench(profile("smoke"), device="cpu", quiet=True), tmp_path / "drafter", 3)
    assert (tmp_path / "features").exists() and measured == stored
