"""A campaign runs what is missing, publishes as it goes, survives a failure and goes on where it stopped."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from kvshot.errors import KvshotError
from kvshot.experiments import RunRecord, campaign, load_records
from kvshot.experiments.campaign import missing, reproduce
from kvshot.experiments.end_to_end import EndToEnd, mat_of, place
from kvshot.targets import FeatureStore


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
    spoilt = (lambda r: r.training.options.update(lr=0.004),
              lambda r: setattr(r.evaluation["held_out"], "counts", None))
    for spoil in spoilt:
        other = record.model_copy(deep=True)
        spoil(other)
        other.save(path)
        assert [e.name for e, _ in missing("smoke", tmp_path / "results", only, 1)] == ["mtp"]
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
