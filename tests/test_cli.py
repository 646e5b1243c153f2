"""The command line as a user meets it: the smoke profile from end to end; a mistake is one line and exit code 2."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from rich.console import Console

from kvshot import bottlenecks, cli, theory
from kvshot.data import Conversation, Message, read_conversations, write_conversations
from kvshot.data.corpus import Corpus
from kvshot.errors import KvshotError
from kvshot.evaluation.metrics import StepwiseHits, pool, summarise
from kvshot.experiments import RunRecord
from kvshot.experiments.diagnosis import Diagnosis, diagnoses
from kvshot.experiments.record import DomainEvaluation
from kvshot.training.probes import load_probes


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("cli")


def kvshot(place, *args, ok=True):
    done = subprocess.run(
        [sys.executable, "-m", "kvshot", *map(str, args)], capture_output=True, text=True, cwd=place, timeout=240,
        env={**os.environ, "KVSHOT_CACHE": str(place / "cache"), "COLUMNS": "200", "HF_HUB_OFFLINE": "1",
             "TQDM_DISABLE": "1"})
    if ok:
        assert done.returncode == 0, done.stderr
        return done.stdout
    assert done.returncode == 2, (done.returncode, done.stderr)
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("kvshot: "), done.stderr
    return lines[0]


@pytest.mark.slow
def test_train_evaluate_show(place):
    printed = kvshot(place, "train", "eagle3", "--profile", "smoke", "--out", "run", "--device", "cpu")
    assert "held_out: 40 conversations" in printed and "n-gram α6" in printed
    record = RunRecord.load(place / "run" / "record.json")
    assert record.experiment == "eagle3" and record.training.steps == 40 and record.profile == "smoke"
    assert record.drafter["hidden_layers"] == [2, 3, 4] and record.data.n_train_conversations == 48
    again = kvshot(place, "evaluate", "run/best", "--profile", "smoke", "--device", "cpu")
    alpha0 = record.evaluation["held_out"].drafter.steps[0].alpha_marginal
    assert f"{alpha0.value:.3f}" in again
    assert "eagle3" in kvshot(place, "show", "run/record.json")
    # the same command again has nothing left to train and measures the same
    kvshot(place, "train", "eagle3", "--profile", "smoke", "--out", "run", "--device", "cpu")
    again = RunRecord.load(place / "run" / "record.json")
    assert again.evaluation == record.evaluation and again.created == record.created
    assert kvshot(place, "publish", "run", "--checkpoint").strip() == "results/smoke/eagle3-seed0.json"
    assert RunRecord.load(place / "results/smoke/eagle3-seed0.json") == RunRecord.load(place / "run" / "record.json")
    assert "held_out" in kvshot(place, "evaluate", "results/smoke/eagle3-seed0", "-p", "smoke", "--device", "cpu")
    few = "--texts", 6, "--query-steps", 2, "--device", "cpu"
    printed = kvshot(place, "diagnose", "run", *few)
    assert "oracle queries: alpha" in printed and "layer 1: distance" in printed
    found = diagnoses(place / "results", "smoke")["eagle3"]
    assert found.regimes["as drafted"] == record.evaluation["held_out"].counts
    assert found.run_created == RunRecord.load(place / "run" / "record.json").created
    assert [d.step for d in found.drift] == [1, 2, 3, 4, 5, 6] and len(found.looking) == 7
    every = {"eagle3": found}
    assert theory.regimes_table(every).shape == (1, 4) and theory.drift_table(every).shape == (6, 2)
    stateless = found.model_copy(update={"regimes": {k: v for k, v in found.regimes.items() if "states" not in k}})
    slider = theory.regimes_slider(every | {"mtp": stateless})
    assert slider.captions == ["as drafted", "the target's states", "all verified"]
    assert [frame.count("<polyline") for frame in slider.frames] == [2, 1, 2]
    assert bottlenecks.oracle_table(every).iloc[0, 0].startswith(f"{pool([found.queries['own queries']]).alpha[0]:.2f}")
    assert bottlenecks.looking_table(every).iloc[0, 0].startswith(f"{found.looking[0].distance:.2f} (")
    for figure in (theory.regimes_figure(every), bottlenecks.looking_figure(every)):
        assert figure.axes[0].lines
        assert all(ax.get_ylim()[1] >= max(line.get_ydata()) for ax in figure.axes for line in ax.lines)
    kvshot(place, "diagnose", "results/smoke/eagle3-seed0", *few)  # a published checkpoint, in bfloat16
    assert "no such" in kvshot(place, "diagnose", "nowhere", ok=False).lower()
    kvshot(place, "export", "run/best", "served")  # and back, as a stranger's
    assert "reads states (2, 3, 4)" in kvshot(place, "import", "served", "mine", "--target", "smoke")
    assert "held_out" in kvshot(place, "evaluate", "mine", "-p", "smoke", "--target", "smoke", "--device", "cpu")
    assert "mine/diagnosis.json" in kvshot(place, "diagnose", "mine", "-p", "smoke", *few)
    assert Diagnosis.load(place / "mine/diagnosis.json").experiment == "mine"
    assert "exists already" in kvshot(place, "export", "run/best", "mine", ok=False)
    assert "is a run" in kvshot(place, "diagnose", "run", "-p", "smoke", ok=False)
    wrong = kvshot(place, "import", "served", "x", "--target", "smoke", "--hidden-layers", "a", ok=False)
    assert "no list like" in wrong
    assert load_probes(place / "results/smoke/probes/eagle3-seed0.csv.xz").index.max() == 40
    listed = kvshot(place, "experiments", "--profile", "smoke", "--only", "eagle3", "--only", "kv-only-1")
    assert re.search(r"^eagle3 .*; seeds 0, \d+ min$", listed, re.M)
    assert re.search(r"^kv-only-1 .*; to do, about \d+ min$", listed, re.M) and "kv-only-2" not in listed
    other = kvshot(place, "train", "eagle3", "--profile", "smoke", "--out", "run", "--lr", "0.1", ok=False)
    assert "another recipe" in other


@pytest.mark.parametrize("conversations", [30, 1])
def test_the_table_of_alphas_fits_80_columns_and_has_what_is_behind_them(monkeypatch, conversations):
    random = np.random.default_rng(0)
    hits = random.random((120_000, 7)) < 0.6
    hits[:, 5] = False
    summary = summarise(StepwiseHits(hits, hits | True, np.arange(len(hits)) % conversations, hits & False), n_boot=20)
    monkeypatch.setattr(cli, "console", Console(width=80, file=io.StringIO(), markup=False))
    cli._show_domain("held_out", DomainEvaluation(drafter=summary, ngram=summary))
    lines = cli.console.file.getvalue().splitlines()
    assert lines[0].strip() == f"held_out: {conversations} conversations, 120000 columns"
    assert max(map(len, lines[:-2])) <= 80
    (line,) = (line for line in lines if "drafter α1" in line)
    s, before = summary.steps[1], int(hits[:, 0].sum())
    interval = f" [{s.alpha_marginal.low:.3f}, {s.alpha_marginal.high:.3f}]" if conversations > 1 else ""
    assert [part.strip() for part in line.split("│")[2:-1]] == [
        f"{hits[:, 1].mean():.3f}{interval}", f"{s.alpha_joint.value:.3f} of 120000",
        f"{s.alpha_joint.numerator / before:.3f} of {before}"]
    assert sum("undefined" in line for line in lines if "α6" in line) == 2  # after a step that nobody survives


@pytest.mark.slow
def test_data_commands(place):
    sharegpt = place / "sharegpt.jsonl"
    good = {"id": "a", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}]}
    sharegpt.write_text(json.dumps(good) + "\nnot json\n")
    assert "line 2" in kvshot(place, "data", "convert", sharegpt, "out.jsonl", ok=False)
    assert not (place / "out.jsonl").exists()
    assert "1 conversations" in kvshot(place, "data", "convert", sharegpt, "out.jsonl", "--on-bad", "skip")
    assert read_conversations(place / "out.jsonl").conversations[0].messages[1].content == "Hello!"
    assert "⟦Hello!" in kvshot(place, "data", "preview", "out.jsonl", "--target", "smoke")
    kvshot(place, "capture", "--profile", "smoke", "--device", "cpu")
    assert {"train", "validation", "held_out"} <= {p.name.split("-")[1] for p in (place / "cache/features").iterdir()}


@pytest.mark.parametrize(("args", "message"), [
    (("train", "eagle4", "--profile", "smoke"), "unknown experiment 'eagle4'"),
    (("train", "eagle3", "--profile", "tiny"), "unknown profile 'tiny'"),
    (("train", "hybrid-checkpoint", "--profile", "smoke", "--out", "lone/h"), "train eagle3 first"),
    (("reproduce", "--profile", "smoke", "--only", "table9"), "unknown experiment or table 'table9'"),
    (("plan", "--profile", "tiny"), "unknown profile 'tiny'"),
    (("data", "extend", "nowhere", "--answer-tokens", "10"), "no data set in nowhere"),
    (("data", "fetch", "pile"), "unknown data set 'pile'"),
    (("evaluate", "nowhere", "--profile", "smoke"), "no drafter checkpoint"),
    (("show", "nowhere.json"), "nowhere.json"),
    (("data", "preview", "nowhere.jsonl", "--target", "smoke"), "nowhere.jsonl"),
    (("data", "preview", "empty.jsonl", "--target", "smoke"), "no conversations"),
    (("data", "preview", "silent.jsonl", "--target", "smoke"), "no assistant token"),
    (("data", "preview", "silent.jsonl", "--target", "no/such-target"), "no/such-target"),
    (("data", "answer", "nowhere.jsonl", "corpus", "--split", "x", "--target", "smoke"), "nowhere.jsonl"),
    (("train", "eagle3", "--profile", "smoke", "--lr", "nan"), "lr"),
    (("train", "eagle3", "--profile", "smoke", "--data", "nowhere"), "no data set in nowhere"),
    (("train", "eagle3", "--profile", "smoke", "--data", "partly"), "has no split validation"),
    (("show", "partly"), "no records in partly"),
])
def test_mistakes_are_one_line_and_exit_code_2(place, args, message):
    (place / "empty.jsonl").write_text("")
    write_conversations(place / "silent.jsonl", [Conversation(id="q", messages=[Message(role="user", content="Hi")])])
    some = [Conversation(id="q", messages=[Message(role="user", content="Hi"), Message(role="assistant", content="Ho")],
                         meta={"answer_tokens": 1})]
    Corpus.save(place / "partly", "partly", {}, {"train": some, "held_out": some})
    before = sorted(p.name for p in place.iterdir())
    assert message in kvshot(place, *args, ok=False)
    assert sorted(p.name for p in place.iterdir() if p.name != "cache") == [n for n in before if n != "cache"]


def test_a_corpus_is_checked(tmp_path):
    some = [Conversation(id="q", messages=[Message(role="user", content="Hi"), Message(role="assistant", content="Ho")],
                         meta={"answer_tokens": 1})]
    Corpus.save(tmp_path, "tiny", {"target": "smoke"}, {"train": some, "held_out": some})
    back = Corpus.load(tmp_path)
    assert back.splits["train"] == some and back.info.splits["train"].answer_tokens == 1
    train = tmp_path / back.info.splits["train"].file
    first = train.read_bytes()
    Corpus.save(tmp_path, "tiny", {"target": "smoke"}, {"train": some, "held_out": some})
    assert train.read_bytes() == first
    write_conversations(train, some * 2)
    with pytest.raises(KvshotError, match="differs from recipe.json"):
        Corpus.load(tmp_path)
    with pytest.raises(KvshotError, match="no data set"):
        Corpus.load(tmp_path / "nowhere")
