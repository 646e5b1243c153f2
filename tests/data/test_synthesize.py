"""Synthesis on the smoke target: resumable, filtered, and the text is what the target wrote."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvshot.data import Conversation, Message, prompt_ids
from kvshot.data.corpus import Corpus
from kvshot.data.filters import Report
from kvshot.data.synthesize import (
    Recipe,
    _Frame,
    _Keeper,
    _rows,
    answer,
    describe,
    extend_corpus,
    synthesize,
    synthesize_corpus,
)
from kvshot.errors import KvshotError
from kvshot.fileio import exclusive
from kvshot.targets import load_target, weights_sha256

WORDS = [f"w{i}" for i in range(40)]
SPECIAL = ["<|pad|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="module")
def word_target(tmp_path_factory) -> str:
    """A folder with a tiny random Llama whose every token is a word, so that whatever it samples is text."""
    folder = tmp_path_factory.mktemp("words")
    vocab = {w: i for i, w in enumerate([*SPECIAL, "system", "user", "assistant", *WORDS])}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|pad|>",
                                        additional_special_tokens=["<|im_start|>"])
    tokenizer.chat_template = (
        "{%- for m in messages -%}{{ '<|im_start|>' + m.role + ' ' + m.content + '<|im_end|>' }}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant ' }}{%- endif -%}")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(
        vocab_size=len(vocab), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, eos_token_id=vocab["<|im_end|>"], pad_token_id=0)).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def tokenizer():
    return load_target("smoke").tokenizer


def recipe(target: str, **choices) -> Recipe:
    return Recipe(**{"target": target, "seed": 1, "block_rows": 8, "max_user_tokens": 40, "max_answer_tokens": 24,
                     "answer_temperature": 1.0, **choices})


def test_the_frame_rebuilds_the_template(tokenizer):
    frame = _Frame(tokenizer)
    text = "Hi there"
    ids = [*frame.before, *tokenizer(text, add_special_tokens=False)["input_ids"], frame.end, *frame.header]
    assert ids == prompt_ids(tokenizer, [{"role": "user", "content": text}])


def test_template_options_are_in_the_frame_and_in_the_record(tokenizers):
    words, off = tokenizers["thinking"], {"enable_thinking": False}
    assert words.decode(_Frame(words, off).header).endswith("<think>\n\n</think>\n\n")
    assert "think" not in words.decode(_Frame(words).header)
    with_them, without = recipe("smoke", template=off), recipe("smoke")
    assert describe(with_them, Report())["template"] == off and "template" not in describe(without, Report())


@pytest.mark.slow
def test_synthesis_resumes_and_stops_at_whole_blocks(word_target, tmp_path):
    folder, words = tmp_path / "a", load_target(word_target).tokenizer
    asked = recipe(word_target)
    kept, report = synthesize(asked, folder, answer_tokens=150, workers=2)
    parts = sorted(folder.glob("part-*.json"))
    assert report.kept == len(kept) > 0 and report.dropped.total() > 0
    assert sum(c.meta["answer_tokens"] for c in kept) >= 150
    by_id = {f"{p.stem[5:]}-{i:03d}": row for p in parts for i, row in enumerate(json.loads(p.read_text()))}
    for c in kept:
        user, _, said = by_id[c.id]["written"]
        assert [m.content for m in c.messages] == [words.decode(user), words.decode(said)]
        assert c.truncated == (by_id[c.id]["outcome"] == "limit")
        assert words.eos_token_id not in said and len(said) == c.meta["answer_tokens"]
    # a part that is lost is made again, the same; the others are not touched
    before = {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in parts}
    parts[0].unlink()
    again, _ = synthesize(asked, folder, answer_tokens=150, workers=1)
    assert again == kept
    assert parts[0].read_bytes() == before[parts[0].name][0]
    assert all(p.stat().st_mtime_ns == before[p.name][1] for p in parts[1:])
    with pytest.raises(KvshotError, match="another recipe"):
        synthesize(recipe(word_target, seed=2), folder, answer_tokens=10)


@pytest.mark.parametrize("content", [
    b"", b"[{", b"{}", b"[]\xff", b"[[1]]", b'[{"written": []}]', b'[{"written": [], "outcome": "stop"}]',
    b'[{"written": [["w"]], "outcome": "stop"}]', b'[{"written": [[-1]], "outcome": "stop"}]',
    b'[{"written": [[5]], "outcome": 3}]'])
def test_a_damaged_part_is_named(word_target, tmp_path, monkeypatch, content):
    monkeypatch.setattr("kvshot.data.synthesize.mp.get_context", lambda *a: pytest.fail("work"))
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "part-00000.json").write_bytes(content)
    with pytest.raises(KvshotError, match=r"part-00000.json is damaged \(.*\): delete it and run again") as caught:
        synthesize_corpus(recipe(word_target), tmp_path, answer_tokens=150, held_out=3)
    assert "\n" not in str(caught.value)


def test_a_part_with_rows_of_no_prompt_is_damaged(tmp_path, tokenizer):
    prompt = Conversation(id="p", messages=[Message(role="user", content="Hi")])
    rows = [{"written": [[40], [41]], "outcome": "stop"}] * 2
    (tmp_path / "part-00000.json").write_text(json.dumps(rows))
    with pytest.raises(KvshotError, match=r"part-00000.json is damaged \(2 rows, not 1\): delete it"):
        answer(recipe("smoke"), tmp_path, [prompt], tokenizer=tokenizer)


def test_what_can_never_be_held_out_is_said_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr("kvshot.data.synthesize.synthesize", lambda *a, **k: pytest.fail("work"))
    for held_out, answer_tokens, most in ((300, 100, 108), (6000, 100_000_000, 7000)):
        with pytest.raises(KvshotError, match=f"at most {most} conversations .*--held-out"):
            synthesize_corpus(recipe("smoke"), tmp_path / "out", answer_tokens=answer_tokens, held_out=held_out)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_corpus_grows_at_its_end_only(word_target, tmp_path, monkeypatch):
    monkeypatch.setattr("kvshot.data.synthesize.HELD_OUT_AMONG", 12)
    small, _ = synthesize_corpus(recipe(word_target), tmp_path, answer_tokens=300, workers=1, held_out=3)
    large, _ = synthesize_corpus(recipe(word_target), tmp_path, answer_tokens=600, workers=1, held_out=3)
    assert small.splits["held_out"] == large.splits["held_out"] and len(small.splits["held_out"]) == 3
    assert small.splits["validation"] == large.splits["validation"]
    n = len(small.splits["train"])
    assert small.splits["train"] == large.splits["train"][:n] and len(large.splits["train"]) > n
    assert Corpus.load(tmp_path).splits == large.splits


def test_a_finished_data_set_is_not_replaced(word_target, tmp_path, monkeypatch):
    asked, begun = recipe(word_target), []
    monkeypatch.setattr("kvshot.data.synthesize._run_workers", lambda *a, **k: begun.append(a) or pytest.fail("work"))
    about = asked.model_dump(mode="json") | {"target_weights_sha256": weights_sha256(word_target)}
    some = [Conversation(id="0-0", messages=[Message(role="user", content="w1"), Message(role="assistant",
            content="w2")], meta={"answer_tokens": 100})]
    splits = {name: some for name in ("train", "validation", "held_out", "other")}
    there = Corpus.save(tmp_path, "x", about | {"other": {}}, splits)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    same, report = synthesize_corpus(asked, tmp_path, answer_tokens=300, held_out=1)
    assert same.info == there.info and not report.kept  # it holds as much
    for other, held_out, message in ((recipe(word_target, seed=2), 1, "another recipe .seed"),
                                     (recipe("smoke"), 1, "another recipe .target"),
                                     (asked, 2, "with 1 conversations held out, not 2")):
        with pytest.raises(KvshotError, match=message):
            synthesize_corpus(other, tmp_path, answer_tokens=1000, held_out=held_out)
    with exclusive(tmp_path), pytest.raises(KvshotError, match="another process"):
        synthesize_corpus(asked, tmp_path, answer_tokens=1000, held_out=1)
    with exclusive(tmp_path), pytest.raises(KvshotError, match="another process"):
        extend_corpus(tmp_path, answer_tokens=1000)
    assert not begun and {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.name != ".lock"} == before


def test_a_longer_one_keeps_the_other_splits(word_target, tmp_path, monkeypatch):
    asked = recipe(word_target)
    about = asked.model_dump(mode="json") | {"target_weights_sha256": weights_sha256(word_target)}

    def some(n, first=0):
        return [Conversation(id=f"{i}-0", messages=[
            Message(role="user", content=f"w{i} w{i + 1}"), Message(role="assistant", content=f"w{i + 2}")],
            meta={"answer_tokens": 1}) for i in range(first, first + n)]

    other = some(2, 50)
    Corpus.save(tmp_path, "x", about | {"other": {"prompts": "mine"}}, {
        "train": some(1), "validation": some(1, 1), "held_out": some(1, 2), "other": other})
    monkeypatch.setattr("kvshot.data.synthesize.synthesize", lambda *a, **k: (some(20), Report(kept=20)))
    longer, _ = synthesize_corpus(asked, tmp_path, answer_tokens=20, held_out=1)
    assert longer.splits["other"] == other and longer.info.recipe["other"] == {"prompts": "mine"}
    assert longer.info.recipe["kept"] == 20 and len(longer.splits["train"]) == 18


@pytest.mark.slow
def test_an_extended_corpus_is_the_longer_one(word_target, tmp_path, monkeypatch):
    monkeypatch.setattr("kvshot.data.synthesize.HELD_OUT_AMONG", 12)
    asked = recipe(word_target)
    whole, _ = synthesize_corpus(asked, tmp_path / "whole", answer_tokens=600, workers=1, held_out=3)
    small, _ = synthesize_corpus(asked, tmp_path / "grown", answer_tokens=300, workers=1, held_out=3)
    grown, report = extend_corpus(tmp_path / "grown", answer_tokens=600, workers=1)
    assert grown.splits == whole.splits and report.kept
    assert grown.info.recipe == whole.info.recipe
    assert Corpus.load(tmp_path / "grown").splits == whole.splits
    same, report = extend_corpus(tmp_path / "grown", answer_tokens=10, workers=1)
    assert same.splits == whole.splits and not report.kept
    with pytest.raises(KvshotError, match="was not made by"):
        Corpus.save(tmp_path / "foreign", "x", {"from": "elsewhere"}, small.splits)
        extend_corpus(tmp_path / "foreign", answer_tokens=10_000)
    with pytest.raises(KvshotError, match="other weights"):
        Corpus.save(tmp_path / "other", "x", {**small.info.recipe, "target_weights_sha256": "0"}, small.splits)
        extend_corpus(tmp_path / "other", answer_tokens=10_000)


@pytest.mark.slow
def test_answers_to_given_prompts(word_target, tmp_path):
    prompts = [Conversation(id=f"p{i}", messages=[Message(role="user", content=f"w{i} " * (1 + i))]) for i in range(11)]
    greedy = recipe(word_target, answer_temperature=0.0)
    kept, report = answer(greedy, tmp_path, prompts, workers=1)
    assert report.kept + report.dropped.total() == 11 and kept
    target = load_target(word_target, dtype="bfloat16")
    for c in kept:
        assert c.messages[:-1] == prompts[int(c.id[1:])].messages
    ids = prompt_ids(target.tokenizer, kept[0].messages[:-1])
    with torch.no_grad():
        first = int(target.model(torch.tensor([ids])).logits[0, -1].argmax())
    assert target.tokenizer.decode([first]) == kept[0].messages[-1].content.split()[0]
    with pytest.raises(KvshotError, match="other prompts"):
        answer(greedy, tmp_path, prompts[1:], workers=1)
    with pytest.raises(KvshotError, match="does not end with a user turn"):
        answer(greedy, tmp_path, kept, workers=1)


@pytest.mark.slow
def test_a_target_that_writes_nothing_usable_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr("kvshot.data.synthesize.GIVE_UP_AFTER", 2)
    with pytest.raises(KvshotError, match="writes no usable text"):  # random bytes are no UTF-8
        synthesize(recipe("smoke", max_user_tokens=12), tmp_path, answer_tokens=100, workers=1)


@pytest.mark.parametrize(("written", "outcome", "reason"), [
    ([[5]], "limit", "endless user turn"),
    ([[5], [6], [7]], "gave up", "looping"),
    ([[], [6], [7]], "stop", "empty"),
    ([[5, 6]], "quit", "user turn without its end token"),
])
def test_reasons_to_drop(tokenizer, written, outcome, reason):
    frame = _Frame(tokenizer)
    got = _Keeper(tokenizer)._conversation({"written": written, "outcome": outcome}, "x", frame, None)
    assert got == (None, reason)


def test_special_tokens_inside_a_turn_are_dropped(tokenizer):
    frame = _Frame(tokenizer)
    row = {"written": [[40], list(frame.header), [41, frame.end, 42]], "outcome": "stop"}
    assert _Keeper(tokenizer)._conversation(row, "x", frame, None) == (None, "special tokens")


def test_a_user_turn_with_another_end_ends_the_row(tokenizer):
    """Llama 3 may end a text where it should end a turn: the answer behind it would have another context."""
    frame = _Frame(tokenizer)
    assert not frame.quit and frame.stop == {frame.end}
    frame.stop, frame.quit = frozenset({frame.end, 3}), frozenset({3})
    ended, ok = _rows(recipe("smoke"), frame, None, 0)[:2]
    for row, last in ((ended, 3), (ok, frame.end)):
        row.take(40)
        row.take(last)
    assert ended.done and ended.outcome == "quit" and ended.written == [[40]]
    assert not ok.done and ok.outcome == "stop" and ok.queue
    while ok.queue:
        ok.pop_forced()
    ok.take(41)
    ok.take(3)  # an answer may end so
    assert ok.done and ok.outcome == "stop"


def test_default_workers_are_the_usable_cores(tokenizer, tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr("kvshot.data.synthesize.usable_cores", lambda: 7)
    monkeypatch.setattr("kvshot.data.synthesize._run_workers", lambda *a, **k: started.append(a[3]))
    prompt = Conversation(id="p", messages=[Message(role="user", content="Hi")])
    for call in (lambda: synthesize(recipe("smoke"), tmp_path / "a", answer_tokens=1),
                 lambda: answer(recipe("smoke"), tmp_path / "b", [prompt])):
        with pytest.raises((KvshotError, FileNotFoundError)):  # nothing was written
            call()
    assert started == [7, 7]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="asks Linux for the children of a process")
def test_workers_end_with_a_parent_that_is_killed(word_target, tmp_path):
    parent = subprocess.Popen([sys.executable, "-m", "kvshot", "data", "synthesize", str(tmp_path), "-t", word_target,
                               "--answer-tokens", "100000000", "--workers", "1"], stdout=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL)

    def wait(until):
        for _ in range(1200):
            if until():
                return
            assert parent.poll() in (None, -signal.SIGKILL), "it ended by itself"
            time.sleep(0.1)
        raise AssertionError("waited two minutes in vain")

    wait(lambda: any(tmp_path.glob("parts/part-*.json")))
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
    alive = [pid for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert alive
    parent.kill()
    parent.wait()
    wait(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() and b"spawn_main" in Path(
        f"/proc/{pid}/cmdline").read_bytes() for pid in alive))
