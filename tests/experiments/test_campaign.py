"""A campaign runs what is missing, publishes as it goes, survives a failure and goes on where it stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from kvshot import comparisons
from kvshot.errors import KvshotError
from kvshot.experiments import PROFILES, Bench, RunRecord, campaign, load_records, profile, recipe, train
from kvshot.experiments.campaign import missing, reproduce
from kvshot.experiments.end_to_end import EndToEnd, mat_of, place
from kvshot.experiments.record import published_path
from kvshot.experiments.run import run
from kvshot.targets import FeatureStore
from kvshot.training.probes import load_probes
from kvshot.training.trainer import Trainer


@pytest.mark.slow
def test_a_smoke_campaign(tmp_path, monkeypatch):
    monkeypatch.setenv("KVSHOT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TQDM_DISABLE", "1")
    only, where = ["hybrid-checkpoint", "mtp"], dict(results=tmp_path / "results", runs=tmp_path / "runs")
    options = dict(seeds=1, options=("--device", "cpu"))
    real, calls = campaign._kvshot, []

    def command(*args, **how):
        calls.append(args[:2])
        if args[:2] == ("train", "eagle3") and len(calls) == 2:
            raise KvshotError("killed by signal 9")
        real(*args, **how)

    monkeypatch.setattr(campaign, "_kvshot", command)
    failed = reproduce("smoke", only=only, **where, **options)
    assert len(failed) == 2 and "eagle3-seed0" in failed[0] and "hybrid-checkpoint-seed0" in failed[1]
    assert [r.experiment for r in load_records(tmp_path / "results" / "smoke")] == ["mtp"]
    assert [e.name for e, _ in missing("smoke", tmp_path / "results", only, 1)] == ["eagle3", "hybrid-checkpoint"]
    calls[:] = [(), ()]
    assert reproduce("smoke", only=only, **where, **options) == []
    ran = [c[1] if c[0] == "train" else c[0] for c in calls[2:]]
    assert ran == ["capture", "eagle3", "replay", "hybrid-checkpoint", "replay"]
    records = {r.experiment: r for r in load_records(tmp_path / "results" / "smoke")}
    assert set(records) == {"eagle3", "hybrid-checkpoint", "mtp"}
    assert records["mtp"].training.options["n_steps"] == 1
    assert len(records["mtp"].evaluation["held_out"].drafter.steps) == 7
    assert records["hybrid-checkpoint"].drafter["memory"] == "both"
    # the warm start is worth something: after as many steps the hybrid is ahead of its start
    mat = {n: r.evaluation["held_out"].drafter.mat.value for n, r in records.items()}
    assert mat["hybrid-checkpoint"] > mat["eagle3"] - 0.02
    assert reproduce("smoke", only=only, **where, **options) == [] and calls[7:] == []
    measured = EndToEnd.load(place(where["results"], "smoke", "hybrid-checkpoint"))
    assert set(measured.domains["held_out"].shapes) == {"tree (8, 10, 60)", *(f"chain {n}" for n in range(1, 9))}
    assert mat_of(measured.domains["held_out"].shapes["chain 1"]).value >= 1
    # a record of another recipe, or one without counts, is no record of this campaign
    path = tmp_path / "results" / "smoke" / "mtp-seed0.json"
    record = RunRecord.load(path)
    assert record.setting == profile("smoke").setting and record.setting["draft_vocab_size"] == 64
    spoilt = (lambda r: r.training.options.update(lr=0.004), lambda r: r.setting.update(draft_vocab_size=32),
              lambda r: r.setting.update(corpus="1" * 64), lambda r: setattr(r, "experiment", "eagle3"),
              lambda r: setattr(r.evaluation["held_out"], "counts", None))
    for spoil in spoilt:
        other = record.model_copy(deep=True)
        spoil(other)
        other.save(path)
        assert [e.name for e, _ in missing("smoke", tmp_path / "results", only, 1)] == ["mtp"]
    older = record.model_copy(update={"setting": None})  # made before the field: judged by what it notes
    older.save(path)
    assert not list(missing("smoke", tmp_path / "results", only, 1))
    fewer = profile("smoke").model_copy(update={"train_conversations": 7})
    with monkeypatch.context() as changed:
        changed.setitem(PROFILES, "smoke", fewer)
        assert [e.name for e, _ in missing("smoke", tmp_path / "results", ["mtp"], 1)] == ["mtp"]
    record.save(path)
    assert not list(missing("smoke", tmp_path / "results", only, 1))
    # a checkpoint of a run that was killed before its record is no start
    (tmp_path / "runs" / "smoke" / "eagle3-seed0" / "record.json").unlink()
    (tmp_path / "results" / "smoke" / "hybrid-checkpoint-seed0.json").unlink()
    calls[:] = [(), ()]
    monkeypatch.setattr(campaign, "_kvshot", lambda *args, **how: calls.append(args[:2]))
    failed = reproduce("smoke", only=["hybrid-checkpoint"], **where, **options)
    assert calls[2:] == [("capture", "--profile"), ("train", "eagle3")]
    assert len(failed) == 1 and "its start eagle3 did not finish" in failed[0]
    # nor is a finished one of another recipe
    stale = RunRecord.load(tmp_path / "results" / "smoke" / "eagle3-seed0.json")
    stale.training.options["lr"] = 0.004
    stale.save(tmp_path / "runs" / "smoke" / "eagle3-seed0" / "record.json")
    calls[:] = [(), ()]
    failed = reproduce("smoke", only=["hybrid-checkpoint"], **where, **options)
    assert calls[2:] == [("capture", "--profile"), ("train", "eagle3")] and "with this recipe" in failed[0]
    # three splits, captured once with all layers that the three rows read; the rerun read fewer and used them
    stores = [FeatureStore(p.parent).meta for p in (tmp_path / "cache").rglob("index.json")]
    assert len(stores) == 3 and {len(s["kv_layers"]) for s in stores} == {3}


@pytest.mark.slow
def test_what_was_measured_end_to_end_is_of_the_published_run(tmp_path, monkeypatch):
    """A published record whose end-to-end record and run are gone: the run made again takes the record's place."""
    monkeypatch.setenv("KVSHOT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TQDM_DISABLE", "1")
    where = dict(only=["eagle3"], results=tmp_path / "results", runs=tmp_path / "runs", seeds=1)
    options = dict(options=("--device", "cpu"))
    assert reproduce("smoke", **where, **options) == []
    path = published_path(tmp_path / "results", "smoke", "eagle3")
    older = RunRecord.load(path)
    older.created -= timedelta(days=1)
    older.save(path)
    with pytest.raises(KvshotError, match="of another run than"):
        comparisons.end_to_end(["eagle3"], tmp_path / "results", "smoke")
    place(tmp_path / "results", "smoke", "eagle3").unlink()
    run = tmp_path / "runs" / "smoke" / "eagle3-seed0"
    real, calls = campaign._kvshot, []
    monkeypatch.setattr(campaign, "_kvshot", lambda *args, **how: (calls.append(args[0]), real(*args, **how)))
    assert reproduce("smoke", **where, **options) == [] and calls == ["replay"]  # nothing is trained or captured for it
    assert RunRecord.load(path) == RunRecord.load(run / "record.json")
    assert list(comparisons.end_to_end(["eagle3"], tmp_path / "results", "smoke")) == ["eagle3"]
    assert not list(missing("smoke", tmp_path / "results", ["eagle3"], 1))
    # a record vouches for its own run only: it is gone before another one takes a step in the folder
    (run / "last.pt").unlink()
    bench = Bench(profile("smoke"), device="cpu", quiet=True)

    def dies(self, indices):
        raise KvshotError("killed")

    monkeypatch.setattr(Trainer, "_step", dies)
    with pytest.raises(KvshotError, match="killed"):
        train(bench, "eagle3", run, recipe(bench.profile, "eagle3"))
    assert (run / "best").is_dir() and not (run / "record.json").exists()


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_campaign_that_was_killed_amid_a_training_makes_the_same_record(tmp_path, monkeypatch):
    """All of its processes at once, by a signal that none of them can answer, behind the first resume point."""
    monkeypatch.setenv("KVSHOT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TQDM_DISABLE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as in this process
    name, results, runs = "kv-only-3", tmp_path / "results", tmp_path / "runs"  # its steps leave time for the kill
    bench = Bench(profile("smoke"), experiments=[name], device="cpu", quiet=True)
    whole = run(bench, name, tmp_path / "whole", recipe(bench.profile, name))
    command = [sys.executable, "-m", "kvshot", "reproduce", "--profile", "smoke", "--only", name, "--seeds", "1",
               "--results", results, "--runs", runs, "--device", "cpu"]
    began = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
    folder = runs / "smoke" / f"{name}-seed0"
    try:
        assert _waited_for((folder / "last.pt").exists, 300, every=0.002)
    finally:
        os.killpg(began.pid, signal.SIGKILL)
    assert began.wait(30) == -signal.SIGKILL and not (folder / "record.json").exists() and not results.exists()
    assert torch.load(folder / "last.pt", weights_only=True)["progress"]["step"] == 20
    assert reproduce("smoke", only=[name], seeds=1, results=results, runs=runs, options=("--device", "cpu")) == []
    (record,) = load_records(results / "smoke")
    assert [p.step for p in record.training.curve] == [20, 40] and record.training.curve == whole.training.curve
    assert record.evaluation == whole.evaluation and record.training.tokens_seen == whole.training.tokens_seen
    assert record.training.options == whole.training.options and record.data == whole.data
    one, other = (load_probes(p / "probes.csv.xz") for p in (tmp_path / "whole", folder))
    assert len(one) == 40 and one.equals(other)


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("stage", ["capture", "train"])
def test_a_campaign_that_is_told_to_end_takes_its_run_along(tmp_path, stage):
    child = tmp_path / "python"
    child.write_text(f'#!/bin/sh\n[ "$3" = {stage} ] || exit 0\necho $$ > {tmp_path}/pid\nexec sleep 60\n')
    child.chmod(0o755)
    code = (f"import sys; from kvshot.cli import app; sys.executable = {str(child)!r}\n"
            f"app(['reproduce', '--profile', 'smoke', '--only', 'mtp', '--results', {str(tmp_path / 'results')!r}, "
            f"'--runs', {str(tmp_path / 'runs')!r}])")
    began = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    try:
        pid = int(_waited_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip()))
        began.terminate()
        assert began.wait(30) == 128 + signal.SIGTERM
        assert _waited_for(lambda: not _alive(pid))
    finally:
        began.kill()


def _waited_for(asked, seconds: float = 60, every: float = 0.05):
    """What `asked` says, once it is true."""
    until = time.monotonic() + seconds
    while not (said := asked()) and time.monotonic() < until:
        time.sleep(every)
    return said


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_run_waits_for_its_start_and_no_other(tmp_path, monkeypatch):
    """Two at a time: the hybrid starts when EAGLE-3 is done, another row in between."""
    events, lock = [], threading.Lock()
    eagle_may_end = threading.Event()

    def command(*args, log=None, share=1):
        if args[0] != "train":
            return
        name, folder = args[1], Path(args[args.index("--out") + 1])
        with lock:
            events.append(("starts", name))
        if name == "mtp":
            assert ("ends", "eagle3") not in events
            eagle_may_end.set()
        if name == "eagle3":
            assert eagle_may_end.wait(20)
        assert share == 2 and log == folder.with_name(folder.name + ".log")
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(f"{name}\n\n")
        (folder / "best").mkdir(parents=True)
        (folder / "record.json").touch()
        with lock:
            events.append(("ends", name))

    monkeypatch.setattr(campaign, "_kvshot", command)
    monkeypatch.setattr(campaign, "publish", lambda folder, results: None)
    monkeypatch.setattr(campaign, "_usable", lambda run, *recipe: (run / "record.json").exists())
    only = ["hybrid-checkpoint", "mtp"]
    assert reproduce("smoke", only=only, results=tmp_path / "r", runs=tmp_path, seeds=1, jobs=2) == []
    assert sorted(events[:2]) == [("starts", "eagle3"), ("starts", "mtp")]
    assert events.index(("ends", "eagle3")) < events.index(("starts", "hybrid-checkpoint"))
    assert campaign._last_line(tmp_path / "smoke" / "mtp-seed0") == "mtp"


def test_a_failed_run_says_why_although_its_output_is_in_a_file(tmp_path):
    log = tmp_path / "run.log"
    with pytest.raises(KvshotError, match=r"exit code 2 \(.*unknown experiment"):
        campaign._kvshot("train", "nonsense", "--profile", "smoke", "--out", str(tmp_path / "run"), log=log, share=2)
