"""Synthesis on the smoke target: resumable, filtered, and the text is what the target wrote."""

from __future__ import annotations

import json

import pytest

from kvshot.data import Conversation, Message, prompt_ids
from kvshot.data.synthesize import Recipe, _Frame, _Keeper, answer, collect, synthesize
from kvshot.errors import KvshotError
from kvshot.targets import load_target

RECIPE = Recipe(target="smoke", seed=1, block_rows=8, max_user_tokens=40, max_answer_tokens=24,
                user_temperature=1.0, answer_temperature=1.0)


@pytest.fixture(scope="module")
def tokenizer():
    return load_target("smoke").tokenizer


def test_the_frame_rebuilds_the_template(tokenizer):
    frame = _Frame(tokenizer)
    text = "Hi there"
    ids = [*frame.before, *tokenizer(text, add_special_tokens=False)["input_ids"], frame.end, *frame.header]
    assert ids == prompt_ids(tokenizer, [{"role": "user", "content": text}])


@pytest.mark.slow
def test_synthesis_resumes_and_drops_what_is_no_text(tokenizer, tmp_path):
    kept, report = synthesize(RECIPE, tmp_path / "a", answer_tokens=60, workers=2, tokenizer=tokenizer)
    parts = sorted((tmp_path / "a").glob("part-*.json"))
    assert report.kept == len(kept) > 0 and report.dropped.total() > 0
    assert sum(c.meta["answer_tokens"] for c in kept) >= 60
    by_id = {f"{p.stem[5:]}-{i:03d}": row for p in parts for i, row in enumerate(json.loads(p.read_text()))}
    for c in kept:
        user, _, said = by_id[c.id]["written"]
        assert [m.content for m in c.messages] == [tokenizer.decode(user), tokenizer.decode(said)]
        assert c.truncated == (by_id[c.id]["outcome"] == "limit")
        assert tokenizer.eos_token_id not in said and "\ufffd" not in tokenizer.decode(said)
    # a part that is lost is made again, the same; the others are not touched
    before = {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in parts}
    parts[0].unlink()
    again, _ = synthesize(RECIPE, tmp_path / "a", answer_tokens=sum(c.meta["answer_tokens"] for c in kept), workers=1,
                          tokenizer=tokenizer)
    assert parts[0].read_bytes() == before[parts[0].name][0]
    assert all(p.stat().st_mtime_ns == before[p.name][1] for p in parts[1:])
    assert again[: len(kept)] == kept
    assert collect(tmp_path / "a", tokenizer)[0] == again
    with pytest.raises(KvshotError, match="another recipe"):
        synthesize(RECIPE.model_copy(update={"seed": 2}), tmp_path / "a", answer_tokens=10, tokenizer=tokenizer)


@pytest.mark.slow
def test_answers_to_given_prompts(tokenizer, tmp_path):
    prompts = [Conversation(id=f"p{i}", messages=[Message(role="user", content="Say " + "ho " * i)]) for i in range(11)]
    recipe = RECIPE.model_copy(update={"answer_temperature": 0.0})
    kept, report = answer(recipe, tmp_path, prompts, workers=1, tokenizer=tokenizer)
    assert report.kept + report.dropped.total() == 11
    for c in kept:
        assert c.messages[:-1] == prompts[int(c.id[1:])].messages


@pytest.mark.parametrize(("written", "outcome", "reason"), [
    ([[5]], "limit", "endless user turn"),
    ([[5], [6], [7]], "gave up", "looping"),
    ([[], [6], [7]], "stop", "empty"),
])
def test_reasons_to_drop(tokenizer, written, outcome, reason):
    frame = _Frame(tokenizer)
    got = _Keeper(tokenizer)._conversation({"written": written, "outcome": outcome}, "x", frame, None)
    assert got == (None, reason)


def test_special_tokens_inside_a_turn_are_dropped(tokenizer):
    frame = _Frame(tokenizer)
    row = {"written": [[40], list(frame.header), [41, frame.end, 42]], "outcome": "stop"}
    assert _Keeper(tokenizer)._conversation(row, "x", frame, None) == (None, "special tokens")
