"""One's own files become a data set that the profiles' commands read."""

from __future__ import annotations

import json

import pytest

from kvshot.data.corpus import Corpus
from kvshot.data.own import corpus_from_files
from kvshot.errors import KvshotError
from kvshot.experiments.bench import Bench
from kvshot.experiments.profiles import profile
from kvshot.fileio import sha256_file


def record(n: int) -> dict:
    return {"id": f"c{n}", "conversations": [{"from": "human", "value": f"Question {n} on {n}"},
                                             {"from": "gpt", "value": f"Answer {n}: {n + 1} and {n + 2}"}]}


def jsonl(path, *records):
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def test_files_become_a_corpus(tmp_path):
    one = jsonl(tmp_path / "one.jsonl", *(record(n) for n in range(30)), {"data": ["no answer"]})
    two = jsonl(tmp_path / "two.jsonl", {"data": ["Hi", "Ho"]}, {"text": "bad"}, record(3) | {"id": "again"})
    with pytest.raises(KvshotError, match="two.jsonl line 2"):
        corpus_from_files([one, two], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    corpus, reports = corpus_from_files([one, two], tmp_path / "out", on_bad="skip")
    assert [len(r.bad) for r in reports] == [0, 1]
    assert len(corpus.splits["held_out"]) == 3 and len(corpus.splits["validation"]) == 1
    about, back = corpus.info.recipe, Corpus.load(tmp_path / "out")
    assert back.splits == corpus.splits and back.info == corpus.info and corpus.info.name == "out"
    assert sum(map(len, corpus.splits.values())) + about["dropped as like a held-out one"] == 32
    assert about["without an answer"] == 1 and about["from"][1] == {
        "file": "two.jsonl", "sha256": sha256_file(two), "conversations": 2, "bad records": 1}
    with pytest.raises(KvshotError, match="exists already"):
        corpus_from_files([one], tmp_path / "out")
    # and the commands' way to it
    bench = Bench(profile("smoke", tmp_path / "out"), device="cpu", quiet=True)
    assert bench.domains == ["held_out"] and len(bench.examples["train"]) == len(corpus.splits["train"])


def test_what_is_like_a_held_out_one_is_dropped(tmp_path):
    file = jsonl(tmp_path / "a.jsonl", *(record(n) for n in range(20)), *(record(n) for n in range(20)))
    corpus, _ = corpus_from_files([file], tmp_path / "out", held_out=8, validation=2, seed=1)
    parts = {name: {c.id for c in part} for name, part in corpus.splits.items()}
    assert not parts["train"] & (parts["held_out"] | parts["validation"])
    assert not parts["validation"] & parts["held_out"]
    kept = sum(map(len, corpus.splits.values()))
    assert corpus.info.recipe["dropped as like a held-out one"] == 40 - kept > 0


def test_few_conversations(tmp_path):
    corpus, _ = corpus_from_files([jsonl(tmp_path / "4.jsonl", *map(record, range(4)))], tmp_path / "four")
    assert {name: len(part) for name, part in corpus.splits.items()} == {"train": 1, "validation": 1, "held_out": 2}
    three = jsonl(tmp_path / "3.jsonl", *map(record, range(3)))
    with pytest.raises(KvshotError, match="3 conversations with an answer are too few .* give 4 or more"):
        corpus_from_files([three], tmp_path / "three")
    with pytest.raises(KvshotError, match="too few to hold out 9 and choose checkpoints on 3"):
        corpus_from_files([three], tmp_path / "three", held_out=9)
    same = jsonl(tmp_path / "same.jsonl", *[record(0)] * 9)
    with pytest.raises(KvshotError, match="resembles a held-out one"):
        corpus_from_files([same], tmp_path / "three")
    assert not (tmp_path / "three").exists()
