"""A data set on disk is the old one or the new one, and nobody's work is replaced by surprise."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path

import pytest

from kvshot.data import Conversation, Message, write_conversations
from kvshot.data import corpus as module
from kvshot.data.corpus import Corpus
from kvshot.errors import KvshotError
from kvshot.fileio import exclusive, sha256_file


def talk(n: int) -> Conversation:
    return Conversation(id=f"c{n}", messages=[Message(role="user", content=f"Hi {n}"),
                                              Message(role="assistant", content=f"Ho {n}")])


OLD = {"train": [talk(1)], "validation": [talk(2)], "held_out": [talk(3)]}
NEW = {"train": [talk(1), talk(4)], "validation": [talk(5)], "held_out": [talk(3)]}


@pytest.mark.parametrize("cleanup", [True, False], ids=["interrupted", "killed"])
@pytest.mark.parametrize("step", range(4))  # two changed splits, the recipe, and after everything
def test_a_kill_leaves_the_old_data_set_or_the_new_one(tmp_path, monkeypatch, step, cleanup):
    Corpus.save(tmp_path, "tiny", {"seed": 0}, OLD)
    left, real = step, module.atomic_file

    @contextmanager
    def killed(path):
        nonlocal left
        if not left:
            raise KeyboardInterrupt
        left -= 1
        with real(path) as tmp:
            yield tmp

    with monkeypatch.context() as patch:
        patch.setattr(module, "atomic_file", killed)
        if not cleanup:
            patch.setattr(module, "_sweep", lambda *_: None)
        if step < 3:
            with pytest.raises(KeyboardInterrupt):
                Corpus.save(tmp_path, "tiny", {"seed": 0}, NEW)
        else:
            Corpus.save(tmp_path, "tiny", {"seed": 0}, NEW)
    assert Corpus.load(tmp_path).splits == (OLD if step < 3 else NEW)
    if cleanup:
        assert len(list(tmp_path.glob("*.xz"))) == 3
    Corpus.save(tmp_path, "tiny", {"seed": 0}, NEW)
    assert Corpus.load(tmp_path).splits == NEW
    assert len(list(tmp_path.iterdir())) == 4  # what the kill left is gone


def test_plain_names_are_read_and_kept_where_nothing_changed(tmp_path):
    whole = Corpus.save(tmp_path, "tiny", {}, OLD)
    for name, split in whole.info.splits.items():  # as the data sets of before
        (tmp_path / split.file).rename(tmp_path / f"{name}.jsonl.xz")
        split.file = f"{name}.jsonl.xz"
    (tmp_path / "recipe.json").write_text(whole.info.model_dump_json())
    (tmp_path / "mine.jsonl.xz").write_bytes(b"a user's")
    assert Corpus.load(tmp_path).splits == OLD
    Corpus.save(tmp_path, "tiny", {}, NEW)
    back = Corpus.load(tmp_path)
    assert back.splits == NEW and back.info.splits["held_out"].file == "held_out.jsonl.xz"
    digest = sha256_file(tmp_path / back.info.splits["train"].file)
    assert back.info.splits["train"].file == f"train-{digest[:8]}.jsonl.xz"
    assert {p.name for p in tmp_path.iterdir()} == {"recipe.json", "mine.jsonl.xz"} | {
        s.file for s in back.info.splits.values()}


def test_the_published_data_set_loads():
    splits = Corpus.load(Path(__file__).parents[2] / "results" / "data" / "smollm2-135m").splits
    assert {"train", "validation", "held_out", "human_eval"} == set(splits)


def test_an_empty_split_is_not_written(tmp_path):
    Corpus.save(tmp_path, "tiny", {}, OLD)
    with pytest.raises(KvshotError, match="no conversation for the split 'other'"):
        Corpus.add(tmp_path, "other", [], {})
    assert Corpus.load(tmp_path).splits == OLD


@pytest.mark.parametrize("name", ["train", "validation", "held_out", "seed", "other", "", "a/b", "..", "a b", "ä",
                                  "a\n"])
def test_names_that_a_split_cannot_have(tmp_path, name):
    Corpus.save(tmp_path, "tiny", {"seed": 0}, OLD)
    Corpus.add(tmp_path, "other", [talk(6)], {"prompts": "mine"})
    before = (tmp_path / "recipe.json").read_bytes()
    with pytest.raises(KvshotError, match="already: choose|cannot name a split"):
        Corpus.add(tmp_path, name, [talk(7)], {})
    assert (tmp_path / "recipe.json").read_bytes() == before


def test_two_processes_do_not_mix(tmp_path):
    Corpus.save(tmp_path, "tiny", {}, OLD)
    with exclusive(tmp_path), pytest.raises(KvshotError, match="another process is at work"):
        Corpus.add(tmp_path, "other", [talk(6)], {})
    Corpus.add(tmp_path, "other", [talk(6)], {})
    with pytest.raises(KvshotError, match="no data set"):
        Corpus.add(tmp_path / "nowhere", "other", [talk(6)], {})
    assert not (tmp_path / "nowhere").exists()


def test_begun(tmp_path):
    assert Corpus.begun(tmp_path, {"seed": 0}) is None
    Corpus.save(tmp_path, "tiny", {"seed": 0, "kept": 3}, OLD)
    assert Corpus.begun(tmp_path, {"seed": 0}).splits == OLD
    for other in ({"seed": 1}, {"seed": 0, "limit": None}):
        with pytest.raises(KvshotError, match="another recipe"):
            Corpus.begun(tmp_path, other)
    # a field that older recipes do not have: what is not noted there, or not asked for, was the older default
    assert Corpus.begun(tmp_path, {"seed": 0}, since={"template": {}}).splits == OLD
    with pytest.raises(KvshotError, match="another recipe .template."):
        Corpus.begun(tmp_path, {"seed": 0, "template": {"a": 1}}, since={"template": {}})
    Corpus.save(tmp_path / "b", "tiny", {"seed": 0, "template": {"a": 1}}, OLD)
    with pytest.raises(KvshotError, match="another recipe .template."):
        Corpus.begun(tmp_path / "b", {"seed": 0}, since={"template": {}})
    write_conversations(next(tmp_path.glob("train-*")), OLD["held_out"])
    with pytest.raises(KvshotError, match="differs from recipe.json"):
        Corpus.begun(tmp_path, {"seed": 0})
