from __future__ import annotations

import gzip
import json
import lzma

import pytest

from kvshot.data import Conversation, read_conversations, write_conversations
from kvshot.errors import KvshotError

SHAREGPT = {"id": "x_0", "conversations": [
    {"from": "system", "value": "Be short."},
    {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"},
    {"from": "human", "value": "More"}, {"from": "gpt", "value": "No"},
]}
ULTRACHAT = {"id": "7", "data": ["Hi", "Ho", "More", "No"]}
MESSAGES = {"prompt_id": "p", "messages": [
    {"role": "developer", "content": "Be short."},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    {"role": "assistant", "content": "Ho"},
]}
TURNS = [("user", "Hi"), ("assistant", "Ho"), ("user", "More"), ("assistant", "No")]


def turns(conversation: Conversation) -> list[tuple[str, str]]:
    return [(m.role, m.content) for m in conversation.messages]


def jsonl(path, *records):
    lines = (r if isinstance(r, str) else json.dumps(r, ensure_ascii=False) for r in records)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_the_three_formats_in_one_file(tmp_path):
    report = read_conversations(jsonl(tmp_path / "mix.jsonl", SHAREGPT, "", ULTRACHAT, MESSAGES))
    assert report.bad == [] and [c.id for c in report.conversations] == ["x_0", "7", "p"]
    assert turns(report.conversations[0]) == [("system", "Be short."), *TURNS]
    assert turns(report.conversations[1]) == TURNS
    assert turns(report.conversations[2]) == [("system", "Be short."), *TURNS[:2]]
    assert not any(c.truncated for c in report.conversations)


@pytest.mark.parametrize("name, text", [
    ("a.json", json.dumps([SHAREGPT, ULTRACHAT], indent=1)), ("array.txt", json.dumps([SHAREGPT, ULTRACHAT])),
    ("lines.json", json.dumps(SHAREGPT) + "\n" + json.dumps(ULTRACHAT)), ("bom.jsonl", None),
])
def test_arrays_lines_and_byte_order_marks(name, text, tmp_path):
    path = tmp_path / name
    lines = f"\ufeff{json.dumps(SHAREGPT)}\r\n{json.dumps(ULTRACHAT)}"
    path.write_text(text or lines, encoding="utf-8")
    assert [turns(c)[-4:] for c in read_conversations(path).conversations] == [TURNS, TURNS]


def test_one_indented_record_and_missing_ids(tmp_path):
    (tmp_path / "one.json").write_text(json.dumps({"data": ["Hi", "Ho"]}, indent=2))
    assert read_conversations(tmp_path / "one.json").conversations[0].id == "one-1"


def test_line_separators_inside_a_string_do_not_split_the_record(tmp_path):
    path = jsonl(tmp_path / "u.jsonl", {"data": ["Hi\u2028you\x85", "Ho"]}, ULTRACHAT)
    assert turns(read_conversations(path).conversations[0])[0] == ("user", "Hi\u2028you\x85")


BAD = [
    ("{not json", "not JSON"), ([1], "not a JSON object"), ({"text": "Hi"}, "none of the fields"),
    ({"messages": []}, "'messages' is missing, empty"), ({"data": "Hi"}, "not a list"),
    ({"messages": ["Hi"]}, "turn 1 is not a JSON object"), ({"data": ["Hi", "  "]}, "turn 2 is empty"),
    ({"data": ["Hi", None]}, "turn 2 has no text"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "turn 1 has the unknown role 'tool'"),
    ({"conversations": [{"value": "x"}]}, "unknown role None"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "unknown role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "not text"),
    ('{"data": ["Hi", "\\ud800"]}', "broken Unicode"),
    ({"data": ["Hi", "Ho"], "truncated": "yes"}, "'truncated' must be"),
    ({"data": ["Hi", "Ho"], "meta": 3}, "'meta' an object"),
    ({"data": ["Hi"], "truncated": True}, "does not end with an assistant turn"),
    ("[" * 100_000, "nested too deeply"), ('{"data": ["Hi", "Ho"], "n": ' + "1" * 5000 + "}", "too many digits"),
]


@pytest.mark.parametrize("record, reason", BAD)
def test_bad_records_are_named_and_refused_or_skipped(record, reason, tmp_path):
    path = jsonl(tmp_path / "b.jsonl", ULTRACHAT, "", record, ULTRACHAT)
    with pytest.raises(KvshotError, match="b.jsonl line 3: ") as refused:
        read_conversations(path)
    assert reason in str(refused.value) and "\n" not in str(refused.value)
    assert str(refused.value).endswith("(--on-bad skip, in Python on_bad='skip')")
    report = read_conversations(path, on_bad="skip")
    assert len(report.conversations) == 2
    assert [line for line, _ in report.bad] == [3] and reason in report.bad[0][1]


def test_every_bad_line_is_counted(tmp_path):
    path = jsonl(tmp_path / "b.jsonl", ULTRACHAT, *(record for record, _ in BAD))
    with pytest.raises(KvshotError, match=f"and {len(BAD) - 1} more bad records"):
        read_conversations(path)
    assert [line for line, _ in read_conversations(path, on_bad="skip").bad] == list(range(2, 2 + len(BAD)))


def test_a_file_of_bad_records_only_is_an_error_even_when_skipping(tmp_path):
    with pytest.raises(KvshotError, match="line 1: turn 2 is empty"):
        read_conversations(jsonl(tmp_path / "b.jsonl", {"data": ["Hi", ""]}), on_bad="skip")


def test_format_can_be_forced(tmp_path):
    path = jsonl(tmp_path / "b.jsonl", SHAREGPT | ULTRACHAT)
    assert len(read_conversations(path, format="ultrachat").conversations[0].messages) == 4
    assert len(read_conversations(path, format="sharegpt").conversations[0].messages) == 5
    with pytest.raises(KvshotError, match="'messages' is missing"):
        read_conversations(path, format="messages")
    with pytest.raises(KvshotError, match="unknown conversation format 'alpaca'"):
        read_conversations(path, format="alpaca")


@pytest.mark.parametrize("name, content, match", [
    ("empty.jsonl", b"\n\n", "holds no conversations"), ("empty.json", b"[]", "holds no conversations"),
    ("broken.json", b'[{"data": ["Hi",\n "Ho"]},', "line 2: not JSON"),
    ("deep.json", b"[" * 100_000, "deep.json: not JSON .nested too deeply"),
    ("digits.json", b"[" + b"1" * 5000 + b"]", "digits.json: not JSON .a number has too many digits"),
    ("digits.jsonl", b'{"data": ' + b"1" * 5000 + b"}", "line 1: not JSON .a number has too many digits"),
    ("latin.jsonl", b'{"data": ["\xe9"]}', "not UTF-8"),
    ("a.jsonl.xz", b"no xz", "cannot be decompressed"), ("a.jsonl.gz", b"no gz", "cannot be decompressed"),
    ("cut.jsonl.xz", lzma.compress(b"x" * 99)[:-9], "cannot be decompressed"),
    ("cut.jsonl.gz", gzip.compress(b"x" * 99)[:-9], "cannot be decompressed"),
])
def test_unreadable_files(name, content, match, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(KvshotError, match=match):
        read_conversations(tmp_path / name)


def test_missing_file_and_folder(tmp_path):
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(KvshotError, match="no file"):
            read_conversations(path)


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
def test_round_trip_gives_the_same_bytes_twice(suffix, tmp_path):
    odd = [{"role": "user", "content": "Hi\u2028 \n 😀"}, {"role": "assistant", "content": "Ho"}]
    conversations = [
        Conversation(id="a", messages=odd, truncated=True, meta={"seed": 3}),
        Conversation(id="b", messages=[{"role": "user", "content": "Hi"}]),
    ]
    paths = [tmp_path / f"{i}.jsonl{suffix}" for i in (1, 2)]
    for path in paths:
        write_conversations(path, conversations)
    assert read_conversations(paths[0]).conversations == conversations
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(p.name for p in paths)
    if suffix:
        plain = (lzma if suffix == ".xz" else gzip).decompress(paths[0].read_bytes()).decode()
        assert plain.split("\n")[1:] == ['{"id":"b","messages":[{"role":"user","content":"Hi"}]}', ""]
