"""The feature store holds exactly what `capture` gives, and never looks complete when it is not."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from kvshot.data import examples_sha256
from kvshot.errors import KvshotError
from kvshot.targets import FeatureStore, OnlineFeatures, capture, load_target
from kvshot.targets import store as store_module
from kvshot.targets.store import _argmax


@dataclass
class Sample:
    ids: np.ndarray
    loss_mask: np.ndarray


@pytest.fixture(scope="module")
def target():
    return load_target("smoke")


def make_samples(lengths=(7, 30, 1, 12, 30, 5), seed=0) -> list[Sample]:
    random = np.random.default_rng(seed)
    return [Sample(random.integers(3, 259, n).astype(np.int32), random.random(n) < 0.5) for n in lengths]


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(store_module, "SHARD_BYTES", 40_000)


def check(store, target, samples, *, exact_dtype=torch.float32, tolerance=2e-5) -> None:
    assert len(store) == len(samples) and store.n_tokens == sum(len(s.ids) for s in samples)
    for i, sample in enumerate(samples):
        entry = store[i]
        single = capture(target, torch.from_numpy(sample.ids.astype(np.int64))[None])
        assert entry["ids"].tolist() == sample.ids.tolist()
        assert entry["loss_mask"].tolist() == sample.loss_mask.tolist()
        for field in ("hidden", "keys", "values", "final"):
            wanted = getattr(single, field)[0]
            assert entry[field].dtype == exact_dtype and entry[field].shape == wanted.shape
            torch.testing.assert_close(entry[field].float(), wanted, atol=tolerance, rtol=tolerance)


def test_entries_equal_capture(tmp_path, target, small_shards, capsys):
    samples = make_samples()
    store = FeatureStore.build(tmp_path / "s", target, samples, dtype=torch.float32, batch_tokens=40)
    assert len(list((tmp_path / "s").glob("shard-*.safetensors"))) > 1
    assert "6 sequences, 85 tokens of 1809 bytes" in capsys.readouterr().err
    check(store, target, samples)
    again = FeatureStore.open(tmp_path / "s", target=target, examples=samples, dtype=torch.float32)
    check(again, target, samples)


def test_online_rows_are_the_stored_ones(tmp_path, target, small_shards):
    samples = make_samples()
    store = FeatureStore.build(tmp_path / "s", target, samples, dtype=torch.float32, quiet=True)
    online = OnlineFeatures(target, samples, dtype=torch.float32, batch_tokens=40)
    assert online.lengths == store.lengths and online.n_tokens == store.n_tokens == 85 and len(online) == 6
    assert online.meta["key"] == store.meta["key"]
    indices = [3, 1, 5, 1, 0]
    for i, row in zip(indices, online.rows(indices), strict=True):
        for name, tensor in store[i].items():
            torch.testing.assert_close(row[name], tensor, atol=1e-4, rtol=1e-4, msg=f"{name} of {i}")
            assert row[name].shape == tensor.shape
    with pytest.raises(KvshotError, match="no examples"):
        OnlineFeatures(target, [])


def test_default_is_bfloat16_and_size_estimate_holds(tmp_path, target):
    samples = make_samples()
    store = FeatureStore.build(tmp_path / "s", target, samples, quiet=True)
    check(store, target, samples, exact_dtype=torch.bfloat16, tolerance=0.02)
    payload = sum(t.numel() * t.element_size() for i in range(len(store)) for t in store[i].values())
    files = sum(store.meta["shard_sizes"])
    # 4 states of 64, keys and values of 3 layers with 2 heads of 16, two bytes each; an id and a mask byte
    assert payload == store.n_tokens * ((4 * 64 + 2 * 3 * 2 * 16) * 2 + 17)
    assert payload <= files < payload + 2000


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads Linux's list of mapped files")
def test_reading_maps_instead_of_copying(tmp_path, target):
    store = FeatureStore.build(tmp_path / "s", target, make_samples(), quiet=True)
    a, b = store[1]["keys"], store[1]["keys"]
    assert a.data_ptr() == b.data_ptr()
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "shard-00000" in line]
    spans = [tuple(int(x, 16) for x in line.split()[0].split("-")) for line in maps]
    assert any(low <= a.data_ptr() < high for low, high in spans)


def test_no_layers_at_all(tmp_path, target):
    samples = make_samples((4, 2))
    store = FeatureStore.build(tmp_path / "s", target, samples, hidden_layers=(), kv_layers=(), quiet=True)
    assert store[0]["hidden"].shape == (0, 4, 64) and store[0]["keys"].shape == (0, 2, 4, 16)
    assert store[1]["final"].shape == (2, 64)


def test_mismatches_are_refused(tmp_path, target):
    samples = make_samples()
    FeatureStore.build(tmp_path / "s", target, samples, quiet=True)
    masks = make_samples()
    masks[3].loss_mask = ~masks[3].loss_mask
    twin = load_target("smoke")
    twin.weights_sha256 = "f" * 64
    double = load_target("smoke", dtype="float64")
    for field, change in {
        "tokens_sha256": dict(examples=make_samples(seed=1)),
        "hidden_layers": dict(hidden_layers=(1, 2, 3)),
        "kv_layers": dict(kv_layers=(0,)),
        "stored_in": dict(dtype=torch.float32),
        "weights_sha256": dict(target=twin),
        "computed_in": dict(target=double),
    }.items():
        wanted = {"target": target, "examples": samples, **change}
        for use in (FeatureStore.open, FeatureStore.build):
            with pytest.raises(KvshotError, match=f"has {field} .* not .*: use another folder"):
                use(tmp_path / "s", **wanted)
    for examples in (masks, samples[::-1], samples[:-1]):
        with pytest.raises(KvshotError, match="tokens_sha256"):
            FeatureStore.open(tmp_path / "s", target=target, examples=examples)


def test_interrupted_build_is_not_a_store_and_resumes(tmp_path, target, small_shards, monkeypatch):
    samples, calls, real = make_samples(), [], store_module.capture

    def fail_on_third(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(store_module, "capture", fail_on_third)
    options = dict(dtype=torch.float32, batch_tokens=20, quiet=True)
    with pytest.raises(KeyboardInterrupt):
        FeatureStore.build(tmp_path / "s", target, samples, **options)
    whole = sorted(path.name for path in (tmp_path / "s").iterdir())
    assert whole and all(name.endswith(".safetensors") for name in whole)  # finished shards, nothing else
    with pytest.raises(KvshotError, match="no finished feature store"):
        FeatureStore.open(tmp_path / "s", target=target, examples=samples, dtype=torch.float32)
    kept = (tmp_path / "s" / whole[0]).stat().st_mtime_ns
    store = FeatureStore.build(tmp_path / "s", target, samples, **options)
    assert (tmp_path / "s" / whole[0]).stat().st_mtime_ns == kept
    check(store, target, samples)
    monkeypatch.setattr(store_module, "capture", None)  # a finished store is opened, not captured again
    FeatureStore.build(tmp_path / "s", target, samples, **options)


def test_leftovers_of_another_build_are_replaced(tmp_path, target, small_shards):
    samples, others = make_samples(), make_samples(seed=1)
    FeatureStore.build(tmp_path / "s", target, others, dtype=torch.float32, quiet=True)
    (tmp_path / "s" / "index.json").unlink()
    store = FeatureStore.build(tmp_path / "s", target, samples, dtype=torch.float32, quiet=True)
    check(store, target, samples)


def test_damage_is_noticed(tmp_path, target, small_shards):
    samples = make_samples()
    folder = tmp_path / "s"
    FeatureStore.build(folder, target, samples, quiet=True)
    shard = next(folder.glob("shard-*"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(KvshotError, match="missing or damaged: delete"):
        FeatureStore(folder)
    shard.unlink()
    with pytest.raises(KvshotError, match="missing or damaged: delete"):
        FeatureStore(folder)
    index = json.loads((folder / "index.json").read_text())
    lacking = [{k: v for k, v in index.items() if k != field}
               for field in ("key", "lengths", "shard_tokens", "shard_sizes", "hidden_layers", "kv_layers")]
    fewer = {**index, "shard_sizes": index["shard_sizes"][:-1]}
    for text in ("{", "[]", *map(json.dumps, [{"format": 0}, *lacking, fewer, {**index, "lengths": 3}])):
        (folder / "index.json").write_text(text)
        with pytest.raises(KvshotError, match="capture again"):
            FeatureStore(folder)
    (folder / "index.json").write_bytes(b'{"format": "\xff"}')
    with pytest.raises(KvshotError, match="capture again"):
        FeatureStore(folder)


def test_a_shard_of_the_right_size_and_other_content_is_noticed(tmp_path, target):
    FeatureStore.build(tmp_path / "s", target, make_samples(), quiet=True)
    shard = next((tmp_path / "s").glob("shard-*"))
    shard.write_bytes(b"\xff" * shard.stat().st_size)
    with pytest.raises(KvshotError, match="is damaged: delete"):
        FeatureStore(tmp_path / "s")[0]


def test_tokens_are_known_by_the_digest_of_the_data(tmp_path, target):
    """Stores of before keep their key: one digest, of ids as int64 and masks as bytes."""
    samples = make_samples((4, 2))
    store = FeatureStore.build(tmp_path / "s", target, samples, quiet=True)
    by_hand = hashlib.sha256()
    for s in samples:
        by_hand.update(len(s.ids).to_bytes(8, "little") + s.ids.astype("<i8").tobytes() + s.loss_mask.tobytes())
    assert store.meta["tokens_sha256"] == by_hand.hexdigest() == examples_sha256(samples)


def test_bad_data_and_full_disk(tmp_path, target, monkeypatch):
    with pytest.raises(KvshotError, match="no examples"):
        FeatureStore.build(tmp_path / "s", target, [], quiet=True)
    with pytest.raises(KvshotError, match="example 1 has ids"):
        FeatureStore.build(tmp_path / "s", target, make_samples((3, 0)), quiet=True)
    wrong = Sample(np.arange(3, 6), np.ones(2, bool))
    with pytest.raises(KvshotError, match="example 0 has ids"):
        FeatureStore.build(tmp_path / "s", target, [wrong], quiet=True)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10}))
    with pytest.raises(KvshotError, match="needs .* GB but"):
        FeatureStore.build(tmp_path / "s", target, make_samples(), quiet=True)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("where, value", [("final", torch.inf), ("hidden", torch.nan), ("values", -torch.inf),
                                          ("keys", torch.nan)])
def test_what_is_not_finite_is_not_captured(tmp_path, where, value):
    """As when half precision overflows."""
    target = load_target("smoke")
    attention = target.decoder.layers[5].self_attn
    broken = {"final": target.decoder.norm.weight, "hidden": target.decoder.layers[3].mlp.down_proj.weight,
              "values": attention.v_proj.weight, "keys": attention.k_norm.weight}[where]
    broken.data.view(-1)[0] = value
    layers = dict(hidden_layers=(4,) * (where == "hidden"), kv_layers=(5,) * (where in ("keys", "values")))
    with pytest.raises(KvshotError, match=rf"float32 gives inf or NaN \({where}\): use bfloat16 or float32"):
        FeatureStore.build(tmp_path / "s", target, make_samples(), quiet=True, **layers)
    assert not list(tmp_path.rglob("*.safetensors"))
    with pytest.raises(KvshotError, match="inf or NaN"):
        OnlineFeatures(target, make_samples(), **layers).rows([0, 2])


def test_plan_covers_every_sequence_once_within_bounds():
    lengths = [5, 900, 3, 40, 40, 7, 1000]
    plan = store_module._plan(lengths, 100)
    assert sorted(i for members in plan for i in members) == list(range(len(lengths)))
    assert all(len(members) == 1 or sum(lengths[i] for i in members) <= 100 for members in plan)
    ordered = [lengths[i] for members in plan for i in members]
    assert ordered == sorted(lengths, reverse=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [640, 49152, 77])
def test_argmax_takes_the_lowest_of_equals(size, dtype):
    x = torch.randn(9, size, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0, [5, 70 % size, 75]] = 9.0
    x[1] = 0.0
    first = [int((row == row.max()).nonzero()[0]) for row in x]
    assert _argmax(x).tolist() == first


def test_the_target_chooses_as_its_model_does(tmp_path):
    target = load_target("smoke", device="cpu")
    ids = np.arange(5, 60)
    example = Sample(ids, np.ones(len(ids), dtype=bool))
    store = FeatureStore.build(tmp_path, target, [example], kv_layers=(), quiet=True)
    with torch.no_grad():
        expected = target.model(torch.from_numpy(ids)[None]).logits[0].argmax(-1)
    assert torch.equal(store[0]["argmax"], expected)
