"""`kvshot data ...` in this process: what it prints, what it refuses, and that nothing is replaced by surprise."""

from __future__ import annotations

import json

import pytest
import torch

from kvshot import cli
from kvshot.data import Conversation, Message, read_conversations, synthesize, write_conversations
from kvshot.data.corpus import Corpus
from kvshot.data.filters import Report


@pytest.fixture
def kvshot(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "restart_with_settings", lambda: None)

    def run(*args) -> tuple[int, str, list[str]]:
        """Exit code, what was printed, lines on stderr."""
        monkeypatch.setattr("sys.argv", ["kvshot", "data", *map(str, args)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        out = capsys.readouterr()
        return end.value.code, out.out, out.err.splitlines()

    return run


def chats(path, n=12):
    path.write_text("".join(json.dumps({"data": [f"Question {i} on {i}", f"Answer {i}"]}) + "\n" for i in range(n)))
    return path


def test_alone_it_explains_itself(kvshot):
    code, printed, errors = kvshot()
    assert code == 0 and "synthesize" in printed and not errors


def test_convert_replaces_no_file(kvshot, tmp_path):
    file = chats(tmp_path / "a.jsonl", 1)
    before = file.read_bytes()
    for out in ("a.jsonl", tmp_path):
        code, _, errors = kvshot("convert", "a.jsonl", out)
        assert code == 2 and len(errors) == 1 and "exists already: name a new file" in errors[0]
    assert file.read_bytes() == before
    assert kvshot("convert", "a.jsonl", "b.jsonl")[0] == 0
    assert len(read_conversations(tmp_path / "b.jsonl").conversations) == 1


def test_split(kvshot, tmp_path):
    chats(tmp_path / "a.jsonl")
    with (tmp_path / "a.jsonl").open("a") as more:
        more.write("{\n")
    code, printed, errors = kvshot("split", "a.jsonl", "a.jsonl", "out", "--on-bad", "skip", "--held-out", 3)
    assert code == 0 and [e.split(":")[0] for e in errors] == ["skipped a.jsonl line 13"] * 2
    assert ": 3 conversations" in printed and len(Corpus.load(tmp_path / "out").splits["held_out"]) == 3
    code, _, errors = kvshot("split", "a.jsonl", "out")
    assert code == 2 and "exists already" in errors[0]
    code, _, errors = kvshot("split", "a.jsonl")
    assert code == 2 and len(errors) == 1


def test_a_temperature_is_a_number(kvshot, tmp_path):
    prompts_and_corpus(tmp_path)
    for args in (("synthesize", "out"), ("answer", "prompts.jsonl", "corpus", "--split", "mine")):
        code, _, errors = kvshot(*args, "--target", "smoke", "--temperature", "inf")
        assert code == 2 and len(errors) == 1 and "--temperature inf is no temperature" in errors[0]
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="finite number"):
        synthesize.Recipe(target="smoke", answer_temperature=float("inf"))


@pytest.mark.parametrize("error", [None, MemoryError(), torch.OutOfMemoryError("CUDA out of memory"),
                                   RuntimeError("[enforce fail at alloc_cpu.cpp:80] not enough memory")], ids=repr)
def test_a_full_memory_is_one_line(kvshot, monkeypatch, error):
    def ask_for_too_much(*args, **how):
        if error is not None:
            raise error
        torch.empty(10**15)

    monkeypatch.setattr(synthesize, "synthesize_corpus", ask_for_too_much)
    code, _, errors = kvshot("synthesize", "out", "--target", "smoke")
    assert code == 2 and len(errors) == 1 and "memory is full: end what else uses it" in errors[0]


def test_another_error_of_torch_is_no_full_memory(kvshot, monkeypatch):
    monkeypatch.setattr(synthesize, "synthesize_corpus", lambda *a, **k: torch.zeros(2) @ torch.zeros(3))
    with pytest.raises(RuntimeError, match="size"):
        kvshot("synthesize", "out", "--target", "smoke")


def prompts_and_corpus(tmp_path):
    some = [Conversation(id=f"p{i}", messages=[Message(role="user", content=f"Hi {i}")]) for i in range(2)]
    write_conversations(tmp_path / "prompts.jsonl", some)
    answered = [c.model_copy(update={"messages": [*c.messages, Message(role="assistant", content="Ho")]}) for c in some]
    Corpus.save(tmp_path / "corpus", "tiny", {"seed": 0}, {name: answered for name in ("train", "held_out")})
    return answered


def test_answers_are_added_once(kvshot, tmp_path, monkeypatch):
    answered = prompts_and_corpus(tmp_path)
    asked = []
    monkeypatch.setattr(synthesize, "answer", lambda *a, **k: asked.append(a) or (answered, Report(kept=2)))
    args = "answer", "prompts.jsonl", "corpus", "--target", "smoke", "--split"
    code, printed, _ = kvshot(*args, "mine")
    assert code == 0 and "split mine, 2 conversations" in printed and len(asked) == 1
    back = Corpus.load(tmp_path / "corpus")
    assert back.splits["mine"] == answered and back.info.recipe["mine"]["prompts"] == "prompts.jsonl"
    for name in ("mine", "train", "held_out", "seed", "../x", ""):
        code, _, errors = kvshot(*args, name)
        assert code == 2 and len(errors) == 1, name
    assert len(asked) == 1 and Corpus.load(tmp_path / "corpus").info == back.info


def test_no_answer_worth_keeping(kvshot, tmp_path, monkeypatch):
    prompts_and_corpus(tmp_path)
    report = Report()
    report.count("looping")
    monkeypatch.setattr(synthesize, "answer", lambda *a, **k: ([], report))
    code, _, errors = kvshot("answer", "prompts.jsonl", "corpus", "--target", "smoke", "--split", "mine")
    assert code == 2 and "none of the 2 answers is worth keeping (kept 0 of 1; dropped 1 looping" in errors[0]
    assert set(Corpus.load(tmp_path / "corpus").splits) == {"train", "held_out"}
