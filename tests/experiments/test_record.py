from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from kvshot.errors import KvshotError
from kvshot.evaluation import StepwiseHits, summarise
from kvshot.experiments import RunRecord, load_records
from kvshot.experiments import record as record_module
from kvshot.experiments.record import (
    CurvePoint,
    DataInfo,
    DomainEvaluation,
    TargetInfo,
    TrainingInfo,
    describe_code,
    describe_machine,
)


@pytest.fixture(scope="module")
def record() -> RunRecord:
    rng = np.random.default_rng(0)
    hits = rng.random((400, 7)) < 0.6
    summary = summarise(
        StepwiseHits(hits, np.ones_like(hits), np.arange(400) // 20, np.zeros_like(hits)), n_boot=50
    )
    curve = [CurvePoint(step=1, tokens=100, loss=5.0), CurvePoint(step=2, tokens=200, loss=1 / 3, mat=1.5)]
    return RunRecord(
        experiment="eagle3",
        profile="smoke",
        drafter={"depth": 1, "reads": ["embedding", "hidden"], "theta": 1e4, "injection": None},
        target=TargetInfo(name="smoke", weights_sha256="a" * 64),
        data=DataInfo(
            name="synthetic",
            sha256="b" * 64,
            n_train_conversations=9,
            n_train_tokens=1000,
            n_held_out_conversations=3,
            n_held_out_tokens=400,
        ),
        training=TrainingInfo(
            steps=2, tokens_seen=200, lr=1e-3, seed=0, wall_seconds=1.5, tokens_per_second=133.3, curve=curve
        ),
        evaluation={"held-out": DomainEvaluation(drafter=summary, ngram=summary)},
        code=describe_code(),
        machine=describe_machine(),
    )


def test_round_trip_is_exact_and_the_file_is_small(record, tmp_path):
    path = tmp_path / "new" / "eagle3.json"
    record.save(path)
    assert RunRecord.load(path) == record
    assert list(path.parent.iterdir()) == [path]  # no temporary file stays
    assert path.stat().st_size < 16_000
    again = tmp_path / "again.json"
    RunRecord.load(path).save(again)
    assert again.read_bytes() == path.read_bytes()


def test_every_rate_has_its_counts_in_the_file(record, tmp_path):
    record.save(tmp_path / "r.json")
    raw = json.loads((tmp_path / "r.json").read_text())
    steps = raw["evaluation"]["held-out"]["drafter"]["steps"]
    summary = record.evaluation["held-out"].drafter
    for step, alpha in zip(steps, summary.alpha, strict=True):
        counts = step["alpha_marginal"]
        assert counts["numerator"] / counts["denominator"] == alpha


def edit(record: RunRecord, path: Path, change) -> Path:
    raw = json.loads(record.model_dump_json())
    change(raw)
    path.write_text(json.dumps(raw))
    return path


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda r: r.update(schema_version=2), "schema_version"),
        (lambda r: r.update(surprise=1), "surprise"),
        (lambda r: r.pop("target"), "target"),
        (lambda r: r["target"].update(weights_sha256="A" * 64), "target.weights_sha256"),
        (lambda r: r["training"].update(steps="2"), "training.steps"),
        (lambda r: r["training"]["curve"][0].update(loss=None), "training.curve.0.loss"),
        (
            lambda r: r["evaluation"]["held-out"]["drafter"]["steps"][0]["alpha_joint"].update(denominator=1),
            "evaluation.held-out.drafter.steps.0.alpha_joint",
        ),
        (lambda r: r.update(created="2026-01-01T00:00:00"), "created"),
    ],
)
def test_load_refuses_in_one_line_that_says_where(record, tmp_path, change, says):
    path = edit(record, tmp_path / "bad.json", change)
    with pytest.raises(KvshotError) as caught:
        RunRecord.load(path)
    assert f"({says}: " in str(caught.value) and "\n" not in str(caught.value)


def test_load_refuses_what_is_no_json_or_no_file(tmp_path):
    (tmp_path / "half.json").write_text('{"schema_version": 1, "exp')
    with pytest.raises(KvshotError, match="no run record"):
        RunRecord.load(tmp_path / "half.json")
    with pytest.raises(KvshotError, match="cannot read the run record"):
        RunRecord.load(tmp_path / "none.json")


def test_load_records_sorts_by_name_and_names_the_bad_file(record, tmp_path):
    for name in ("b", "a"):
        record.model_copy(update={"experiment": name}).save(tmp_path / f"{name}-seed0.json")
    (tmp_path / "notes.txt").write_text("not a record")
    assert [r.experiment for r in load_records(tmp_path)] == ["a", "b"]
    (tmp_path / "wall_clock.json").write_text("{}")  # a measurement of another kind
    assert len(load_records(tmp_path)) == 2
    (tmp_path / "c-seed1.json").write_text("[]")
    with pytest.raises(KvshotError, match=r"c-seed1\.json"):
        load_records(tmp_path)
    with pytest.raises(KvshotError, match="no folder"):
        load_records(tmp_path / "missing")


def test_nan_never_enters_a_record():
    with pytest.raises(ValidationError):
        CurvePoint(step=1, tokens=1, loss=float("nan"))


def test_a_failed_save_leaves_the_old_file(record, tmp_path, monkeypatch):
    path = tmp_path / "r.json"
    record.save(path)
    before = path.read_bytes()

    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises(KvshotError, match="space"):
        record.save(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_created_is_kept_in_utc(record):
    assert record.created.tzinfo == UTC and abs((datetime.now(UTC) - record.created).total_seconds()) < 600
    raw = json.loads(record.model_dump_json()) | {"created": "2026-01-01T02:00:00+02:00"}
    assert RunRecord.model_validate(raw).created == datetime(2026, 1, 1, tzinfo=UTC)
    assert RunRecord.model_validate(raw).model_dump_json().endswith('"created":"2026-01-01T00:00:00Z"}')


def test_machine(record):
    machine = record.machine
    assert machine.cpu and machine.cores >= 1 and machine.device == "cpu"
    assert machine.python == ".".join(map(str, sys.version_info[:3]))


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_commit_is_that_of_its_own_checkout_only(tmp_path, monkeypatch):
    def git(*args):
        who = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
        done = subprocess.run(
            ["git", "-C", str(tmp_path), *who, *args], check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    for name in [name for name in os.environ if name.startswith("GIT_")]:  # set inside git hooks
        monkeypatch.delenv(name)
    module = tmp_path / "kvshot" / "experiments" / "record.py"
    module.parent.mkdir(parents=True)
    module.write_text("x = 1\n")
    monkeypatch.setattr(record_module, "__file__", str(module))
    assert describe_code().commit is None  # no repository
    git("init", "-q")
    assert describe_code().commit is None  # no commit yet
    git("add", ".")
    git("commit", "-qm", "first")
    assert (describe_code().commit, describe_code().dirty) == (git("rev-parse", "HEAD"), False)
    (tmp_path / "results.json").write_text("{}")
    assert describe_code().dirty is False  # only the package counts
    module.write_text("x = 2\n")
    assert describe_code().dirty is True
    inside = tmp_path / "env" / "site-packages" / "kvshot" / "experiments" / "record.py"
    monkeypatch.setattr(record_module, "__file__", str(inside))
    inside.parent.mkdir(parents=True)
    assert describe_code().commit is None  # an environment inside another repository
