"""The paper's data sets: rows of the library become a corpus; what cannot be had is one clear line."""

import builtins
import json

import pytest

from kvshot.data import hub
from kvshot.data.corpus import Corpus
from kvshot.errors import KvshotError


@pytest.fixture
def local(tmp_path, monkeypatch):
    """A ShareGPT file in place of the hub's."""
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = [{"id": f"c{i}", "conversations": [{"from": "human", "value": f"Question {i} " + "about " * i},
                                               {"from": "gpt", "value": " ".join(f"word{i}{j}" for j in range(30))}]}
            for i in range(30)]
    rows[3]["conversations"] = []
    rows[4]["conversations"] = rows[4]["conversations"][:1]
    path = tmp_path / "share.json"
    path.write_text(json.dumps(rows))
    monkeypatch.setitem(hub.SOURCES, "sharegpt", hub.Source("json", "train", {"data_files": str(path)}))


def test_rows_become_a_corpus(local, tmp_path):
    corpus, bad = hub.fetch_corpus("sharegpt", tmp_path / "out", held_out=4)
    assert bad == 2
    assert {name: s.conversations for name, s in corpus.info.splits.items()} == {
        "train": 23, "validation": 1, "held_out": 4}
    again = Corpus.load(tmp_path / "out")
    assert again.splits == corpus.splits
    ids = [c.id for part in corpus.splits.values() for c in part]
    assert sorted(ids) == sorted(f"c{i}" for i in range(30) if i not in (3, 4))
    few, _ = hub.fetch_corpus("sharegpt", tmp_path / "few", held_out=2, limit=12)
    assert sum(len(part) for part in few.splits.values()) == 10


def test_a_fetched_corpus_is_not_replaced(local, tmp_path, monkeypatch):
    first, bad = hub.fetch_corpus("sharegpt", tmp_path / "out", held_out=4)
    Corpus.add(tmp_path / "out", "other", first.splits["held_out"], {})
    monkeypatch.setitem(hub.SOURCES, "ultrachat", hub.Source("elsewhere", "train"))
    for name, options in (("sharegpt", {"held_out": 3}), ("sharegpt", {"held_out": 4, "limit": 12}),
                          ("ultrachat", {"held_out": 4})):
        with pytest.raises(KvshotError, match="another recipe"):
            hub.fetch_corpus(name, tmp_path / "out", **options)
    monkeypatch.setattr("datasets.load_dataset", lambda *a, **k: pytest.fail("fetched again"))
    again, same = hub.fetch_corpus("sharegpt", tmp_path / "out", held_out=4)
    assert same == bad == 2 and again.splits == first.splits | {"other": first.splits["held_out"]}


def test_what_cannot_be_had(local, tmp_path, monkeypatch):
    with pytest.raises(KvshotError, match="unknown data set 'pile'"):
        hub.fetch_corpus("pile", tmp_path)
    monkeypatch.setitem(hub.SOURCES, "sharegpt", hub.Source("json", "train", {"data_files": str(tmp_path / "none")}))
    with pytest.raises(KvshotError, match="cannot load json"):
        hub.fetch_corpus("sharegpt", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    real = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", lambda name, *a, **k: (_ for _ in ()).throw(ImportError(name))
                        if name == "datasets" else real(name, *a, **k))
    with pytest.raises(KvshotError, match=r"pip install 'kvshot\[hub\]'"):
        hub.fetch_corpus("sharegpt", tmp_path / "out")
