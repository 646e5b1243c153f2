"""Run records: small JSON files with what a run was, what it measured, and the counts behind every rate."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

import torch
import transformers
from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
)

from kvshot.allocator import usable_cores
from kvshot.errors import KvshotError
from kvshot.evaluation.metrics import ConversationCounts, StepwiseSummary
from kvshot.fileio import atomic_file

SCHEMA_VERSION = 1
RECORD = "record.json"  # of a run, in its folder: written when the run is whole
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Strict(BaseModel):
    """Unknown fields and NaN are errors: a record is read years later, by people who cannot ask."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Stored(Strict):
    """What is a file of its own. KIND, REMEDY: how an error names such a file, and what to do about a bad one."""

    KIND: ClassVar[str]
    REMEDY: ClassVar[str]

    @classmethod
    def load(cls, path: str | os.PathLike) -> Self:
        """Read a file strictly: unknown, missing or impossible values raise KvshotError."""
        try:
            return cls.model_validate_json(Path(path).read_bytes(), strict=True)
        except OSError as err:
            raise KvshotError(f"cannot read the {cls.KIND} {path} ({err.strerror}): check the path") from err
        except ValidationError as err:
            first = err.errors()[0]
            where = ".".join(map(str, first["loc"])) or "file"
            raise KvshotError(f"{path} is no {cls.KIND} ({where}: {first['msg']}): {cls.REMEDY}") from err

    def save(self, path: str | os.PathLike) -> None:
        """Write the record as JSON, whole or not at all. Raises KvshotError when the disk is full."""
        with atomic_file(path) as tmp:
            tmp.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")


class TargetInfo(Strict):
    """The target by name and by the hash of its weights."""

    name: str
    weights_sha256: Sha256


class DataInfo(Strict):
    """The data set; tokens are supervised tokens (answers), each counted once."""

    name: str
    sha256: Sha256
    n_train_conversations: NonNegativeInt
    n_train_tokens: NonNegativeInt
    n_held_out_conversations: NonNegativeInt
    n_held_out_tokens: NonNegativeInt


class CurvePoint(Strict):
    """A point of the training curve: `tokens` seen so far, mean training loss since the last point.

    `mat` (held-out) is None where only the loss was logged.
    """

    step: NonNegativeInt
    tokens: NonNegativeInt
    loss: float
    mat: float | None = None
    alpha: list[float] | None = None


class TrainingInfo(Strict):
    """How long, how fast, and the curve.

    options: every setting of the trainer, as it was given; wide_products: whether bfloat16 products were computed in
    float32 arithmetic (`kvshot.products`; None: not noted); processes: how many shared every batch.
    """

    steps: NonNegativeInt
    tokens_seen: NonNegativeInt
    lr: NonNegativeFloat
    seed: int
    wall_seconds: NonNegativeFloat
    tokens_per_second: NonNegativeFloat
    wide_products: bool | None = None
    processes: PositiveInt = 1
    options: dict[str, JsonValue] = {}
    curve: list[CurvePoint] = []


class DomainEvaluation(Strict):
    """Step-wise acceptance on one held-out domain, with the n-gram row on the same columns.

    counts: of every conversation, for paired comparisons with other records.
    """

    drafter: StepwiseSummary
    ngram: StepwiseSummary | None = None
    counts: ConversationCounts | None = None


class Cost(Strict):
    """What a drafter costs. parameters: trained ones. flops: of one draft step of one column over `prefix` tokens."""

    parameters: NonNegativeInt
    flops: NonNegativeInt
    prefix: NonNegativeInt


class CodeInfo(Strict):
    """Version of kvshot; in a source checkout its git commit (`dirty`: the package differs from it)."""

    version: str
    commit: str | None = None
    dirty: bool | None = None


class MachineInfo(Strict):
    """What it ran on. `device`: "cpu", or the accelerator's name."""

    cpu: str
    cores: PositiveInt
    device: str
    torch: str
    transformers: str
    python: str


class RunRecord(Stored):
    """One run of one experiment.

    experiment, profile: names; drafter: its configuration (for a run without one, what was run instead); setting:
    `Profile.setting` (None in records older than the field); training: None when nothing was trained; evaluation: by
    held-out domain; created: UTC.
    """

    KIND = "run record"
    REMEDY = f"run the experiment again, or read it with a version of kvshot that writes schema {SCHEMA_VERSION}"

    schema_version: Literal[1] = SCHEMA_VERSION
    experiment: str
    profile: str
    drafter: dict[str, JsonValue]
    cost: Cost | None = None
    target: TargetInfo
    data: DataInfo
    setting: dict[str, JsonValue] | None = None
    training: TrainingInfo | None = None
    evaluation: dict[str, DomainEvaluation]
    code: CodeInfo
    machine: MachineInfo
    created: Annotated[AwareDatetime, AfterValidator(lambda time: time.astimezone(UTC))] = Field(
        default_factory=lambda: datetime.now(UTC).replace(microsecond=0)
    )


class OfRun(Stored):
    """What was measured of a run's drafter afterwards, in a file of its own. run_created: when its record was made."""

    experiment: str
    profile: str
    seed: NonNegativeInt
    run_created: AwareDatetime
    target: TargetInfo
    code: CodeInfo
    machine: MachineInfo
    created: AwareDatetime

    def check_run(self, record: str | os.PathLike) -> None:
        """Raises KvshotError when the record of the run, if it is there, is of another run than was measured here."""
        if Path(record).exists() and RunRecord.load(record).created != self.run_created:
            raise KvshotError(f"the {self.KIND} of {self.experiment}, seed {self.seed}, is of another run than "
                              f"{record}: {self.REMEDY}")


def trained_record(path: str | os.PathLike) -> RunRecord:
    """The record of a run that trained a drafter. Raises KvshotError for any other."""
    record = RunRecord.load(path)
    if record.training is None:
        raise KvshotError(f"the run of {path} trained nothing: give a run that `kvshot train` made")
    return record


def published_path(results: str | os.PathLike, profile: str, experiment: str, seed: int = 0, kind: str = "") -> Path:
    """Where the record of a run is published, or what else was measured of it, in the folder `kind`; the checkpoint
    lies beside the record, without the suffix.
    """
    return Path(results) / profile / kind / f"{experiment}-seed{seed}.json"


def load_records(folder: str | os.PathLike) -> list[RunRecord]:
    """Every NAME-seedN.json directly in `folder`, by file name. Raises KvshotError for one that is no record."""
    folder = Path(folder)
    if not folder.is_dir():
        raise KvshotError(f"no folder of records at {folder}: check the path, or run the experiments first")
    return [RunRecord.load(path) for path in sorted(folder.iterdir()) if re.fullmatch(r".+-seed\d+\.json", path.name)]


def describe_code() -> CodeInfo:
    """Version of the installed package, and the git commit when it runs from its own checkout."""
    try:
        number = version("kvshot")
    except PackageNotFoundError:
        number = "not installed"
    package = Path(__file__).resolve().parents[1]

    def git(*args: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(package), *args], capture_output=True, text=True, timeout=20, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    # An environment that lies inside some other repository must not lend its commit.
    top = git("rev-parse", "--show-toplevel")
    commit = git("rev-parse", "HEAD") if top and Path(top).resolve() == package.parent else None
    if commit is None:
        return CodeInfo(version=number)
    return CodeInfo(version=number, commit=commit, dirty=git("status", "--porcelain", "--", ".") != "")


def describe_machine(device: torch.device | str = "cpu") -> MachineInfo:
    """Processor, cores that this process uses, device and library versions."""
    device = torch.device(device)
    return MachineInfo(
        cpu=_cpu_name(),
        cores=min(usable_cores(), torch.get_num_threads()),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        torch=torch.__version__,
        transformers=transformers.__version__,
        python=platform.python_version(),
    )


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")  # Linux leaves platform.processor() empty
    if info.exists():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
