"""The command line of kvshot. What a user can mend is one line and exit code 2."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Optional

import typer
from rich.table import Table

from kvshot.allocator import restart_with_settings
from kvshot.cli_data import console, data
from kvshot.errors import KvshotError, memory_is_full
from kvshot.fileio import require_new

# the base of its usage errors; newer versions of typer carry a click of their own, older ones import it
ClickException = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
                  help="Drafters for long-range speculative decoding: data, capture, training, evaluation.")
app.add_typer(data, name="data")

ProfileOption = Annotated[str, typer.Option("--profile", "-p", help="smoke, laptop or paper")]
DataOption = Annotated[Optional[Path], typer.Option(help="another corpus folder than the profile's")]  # noqa: UP045
TargetOption = Annotated[Optional[str], typer.Option(help="another target than the profile's")]  # noqa: UP045
DeviceOption = Annotated[Optional[str], typer.Option(help="cpu, cuda, ...; default: a GPU if there is one")]  # noqa: UP045


OnlyOption = Annotated[Optional[list[str]], typer.Option(  # noqa: UP045
    help="an experiment or a table (table2, fig1b, beyond); may be repeated")]


def main() -> None:
    """Run the command line; KvshotError becomes one line on stderr and exit code 2."""
    restart_with_settings()
    try:
        code = app(standalone_mode=False)
    except typer.Abort:
        raise SystemExit(130) from None
    except ClickException as err:
        if err.format_message():  # without a command the help has been printed
            print(f"kvshot: {err.format_message()}: see `kvshot --help`", file=sys.stderr)
        raise SystemExit(err.exit_code) from None
    except KvshotError as err:
        print(f"kvshot: {err}", file=sys.stderr)
        raise SystemExit(2) from None
    except (RuntimeError, MemoryError) as err:
        if not memory_is_full(err):
            raise
        print("kvshot: the memory is full: end what else uses it, or choose another --device or a smaller target",
              file=sys.stderr)
        raise SystemExit(2) from None
    except OSError as err:
        print(f"kvshot: {err.filename or 'a file'}: {err.strerror or err}: check the path and its permissions",
              file=sys.stderr)
        raise SystemExit(2) from None
    raise SystemExit(code or 0)


@app.command()
def capture(profile: ProfileOption = "laptop", only: OnlyOption = None, data: DataOption = None,
            device: DeviceOption = None) -> None:
    """Run the target once over the profile's data and keep its states (in the cache, by content).

    What EAGLE-3 reads, or what the experiments named by --only read.
    """
    from kvshot.experiments.registry import select

    bench = _bench(profile, device, data, [e.name for e in select(only)] if only else ["eagle3"])
    if bench.profile.online:
        console.print(f"nothing to store: in profile {profile} the target runs when its features are needed")
        return
    for name in bench.conversations:
        store = bench.store(name)
        console.print(f"{store.folder}: {len(store)} sequences, {store.n_tokens} tokens")


@app.command()
def train(
    experiment: Annotated[str, typer.Argument(help="a name that `kvshot experiments` lists")],
    profile: ProfileOption = "laptop",
    out: Annotated[Optional[Path], typer.Option(help="folder of the run; the same folder resumes it")] = None,  # noqa: UP045
    steps: Annotated[Optional[int], typer.Option(min=1)] = None,  # noqa: UP045
    lr: Annotated[Optional[float], typer.Option(min=0)] = None,  # noqa: UP045
    seed: Annotated[int, typer.Option(min=0)] = 0,
    data: DataOption = None,
    device: DeviceOption = None,
) -> None:
    """Train an experiment's drafter, evaluate the best checkpoint, write the record."""
    from kvshot.experiments.registry import experiment as find
    from kvshot.experiments.run import recipe, run

    start = find(experiment).start
    bench = _bench(profile, device, data, [experiment])
    given = {k: v for k, v in {"steps": steps, "lr": lr, "seed": seed}.items() if v is not None}
    out = out or Path("runs") / profile / f"{experiment}-seed{seed}"
    record = run(bench, experiment, out, recipe(bench.profile, experiment, **given),
                 start=start and out.parent / f"{start}-seed{seed}" / "best")
    if record is not None:
        show_record(record)
        console.print(f"checkpoint {out / 'best'}, record {out / 'record.json'}")


@app.command()
def evaluate(
    checkpoint: Annotated[Path, typer.Argument(help="folder of a drafter")],
    profile: ProfileOption = "laptop",
    steps: Annotated[int, typer.Option("-k", min=1, help="draft steps K")] = 7,
    data: DataOption = None,
    target: TargetOption = None,
    device: DeviceOption = None,
) -> None:
    """Step-wise acceptance of a checkpoint on the profile's held-out data."""
    from kvshot.experiments.run import evaluate as measure

    _, domains = measure(_bench(profile, device, data, target=target), checkpoint, steps)
    for name, domain in domains.items():
        _show_domain(name, domain)


@app.command()
def replay(
    run: Annotated[Path, typer.Argument(help="folder that `kvshot train` wrote")],
    results: Annotated[Path, typer.Option(help="folder of published records")] = Path("results"),
    device: DeviceOption = None,
) -> None:
    """Tokens a verify call of a trained drafter, end to end on the target's own greedy text (Table 4)."""
    from kvshot.experiments.end_to_end import measure_run

    record, path = measure_run(run, results, device=device)
    for name, domain in record.domains.items():
        console.print(f"{name}: {domain.prompts} prompts, {domain.tokens} tokens, MAT " + ", ".join(
            f"{shape} {sum(c.kept) / sum(c.calls):.2f}" for shape, c in domain.shapes.items()))
    console.print(f"{path}")


@app.command()
def diagnose(
    run: Annotated[Path, typer.Argument(help="folder that `kvshot train` or `kvshot import` wrote, or a published "
                                             "checkpoint")],
    results: Annotated[Path, typer.Option(help="folder of published records")] = Path("results"),
    profile: Annotated[Optional[str], typer.Option("--profile", "-p", help="of an imported drafter: on whose data; "  # noqa: UP045
                                                   "default: laptop")] = None,
    data: DataOption = None,
    target: TargetOption = None,
    texts: Annotated[int, typer.Option(min=3, help="held-out conversations whose attention is compared")] = 48,
    query_steps: Annotated[int, typer.Option(min=1, help="training steps of the queries alone")] = 200,
    device: DeviceOption = None,
) -> None:
    """Why does this drafter decay? True states in place of its own, where it looks, what better queries are worth."""
    from kvshot.evaluation.metrics import pool
    from kvshot.experiments.diagnosis import diagnose_checkpoint, diagnose_run, record_of
    from kvshot.experiments.profiles import profile as find

    how = {"device": device, "texts": texts, "query_steps": query_steps}
    if not (run / "config.json").exists() or record_of(run).exists():
        if profile or data or target:
            raise KvshotError(f"{run} is a run and is diagnosed on its own profile's data: leave out --profile, --data "
                              "and --target")
        record, path = diagnose_run(run, results, **how)
    else:
        record, path = diagnose_checkpoint(run, find(profile or "laptop", data, target), **how)
    for name, counts in (record.regimes | record.queries).items():
        measured = pool([counts], n_boot=2)
        console.print(f"{name}: alpha {measured.alpha[0]:.3f} to {measured.alpha[-1]:.3f}, "
                      f"MAT {measured.mat.value:.3f}")
    for o in record.outcomes:
        console.print(f"{o.branch}: distance of its attention from the target's {o.accepted:.3f} where a draft was "
                      f"accepted, {o.rejected:.3f} where not")
    console.print(f"{path}")


@app.command(name="import")
def import_(
    checkpoint: Annotated[Path, typer.Argument(help="EAGLE-3 folder of EAGLE, SpecForge or speculators")],
    out: Annotated[Path, typer.Argument(help="folder for kvshot's own copy")],
    target: Annotated[str, typer.Option(help="the target that it was trained for")],
    hidden_layers: Annotated[Optional[str], typer.Option(help="blocks applied before the states that it reads, as "  # noqa: UP045
                                                             "2,16,29, where the checkpoint does not say")] = None,
    rope_theta: Annotated[Optional[float], typer.Option(min=1, help="in place of what it says; EAGLE trained with "  # noqa: UP045
                                                                   "10000")] = None,
    ignore_window: Annotated[bool, typer.Option(help="take one that attends within a window as if it attended to all: "
                                                "right for texts that are no longer")] = False,
) -> None:
    """Take over an EAGLE-3 drafter of another project: then evaluate it, diagnose it, decode with it."""
    from kvshot.drafters import load_eagle3, save_drafter
    from kvshot.targets import load_target

    require_new(out)
    try:
        layers = [int(i) for i in hidden_layers.split(",")] if hidden_layers else None
    except ValueError:
        raise KvshotError(f"--hidden-layers {hidden_layers} is no list like 2,16,29") from None
    loaded = load_target(target, device="cpu")
    drafter, vocab = load_eagle3(checkpoint, loaded, hidden_layers=layers, rope_theta=rope_theta,
                                 ignore_window=ignore_window)
    save_drafter(out, drafter, vocab, loaded)
    console.print(f"{out}: reads states {drafter.config.hidden_layers} (blocks applied), {len(vocab)} draft tokens")


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="folder of a drafter")],
    out: Annotated[Path, typer.Argument(help="folder in speculators' format")],
    verifier: Annotated[Optional[str], typer.Option(help="what the target is called where it is served")] = None,  # noqa: UP045
) -> None:
    """Write an EAGLE-3 drafter as vLLM and speculators read it, in bfloat16."""
    from kvshot.drafters import load_drafter, save_speculators, target_of
    from kvshot.targets import load_target

    require_new(out)
    target = load_target(target_of(checkpoint), device="cpu")
    save_speculators(out, *load_drafter(checkpoint, target), target, verifier=verifier)
    console.print(f"{out}")


@app.command()
def show(records: Annotated[list[Path], typer.Argument(help="record files, or folders of them")]) -> None:
    """Print run records."""
    from kvshot.experiments import RunRecord, load_records

    for path in records:
        found = load_records(path) if path.is_dir() else [RunRecord.load(path)]
        if not found:
            raise KvshotError(f"no records in {path}: name a profile's folder, such as results/laptop")
        for record in found:
            show_record(record)


@app.command()
def experiments(
    profile: ProfileOption = "laptop",
    only: OnlyOption = None,
    results: Annotated[Path, typer.Option(help="folder of published records")] = Path("results"),
) -> None:
    """List the experiments: what they test, what they cost, which records exist."""
    from kvshot.experiments.campaign import campaign_of
    from kvshot.experiments.cost import cost
    from kvshot.experiments.dry_run import shape_of
    from kvshot.experiments.profiles import profile as find
    from kvshot.experiments.registry import select

    chosen = find(profile)
    target = shape_of(chosen.target)
    console.print(f"profile {profile}: {chosen.target}, {chosen.train.steps} steps a run")
    campaign = campaign_of(results / profile)
    rows = [(e, cost(e.config(target, chosen.draft_vocab_size)), campaign.get(e.name, ())) for e in select()]
    work = {e.name: spent.flops * e.train.get("n_steps", chosen.train.n_steps) for e, spent, _ in rows}
    minutes = {e.name: [r.training.wall_seconds / 60 for r in done] for e, _, done in rows}
    pace = [m / work[name] for name, measured in minutes.items() for m in measured]
    wanted = {e.name for e in select(only or ())}
    for e, spent, done in rows:
        if e.name in wanted:
            took = "".join(f" {m:.0f}" for m in minutes[e.name]) or (
                f" about {median(pace) * work[e.name]:.0f}" if pace else " ?")
            state = f"seeds {' '.join(str(r.training.seed) for r in done)}" if done else "to do"
            console.print(f"{e.name}{' *' if e.decisive else ''} ({', '.join(e.tables)}): "
                          f"{spent.parameters / 1e6:.1f} M parameters, {spent.flops / 1e6:.1f} MFLOP a draft step; "
                          f"{state},{took} min")
            console.print(f"    {e.about}")
    console.print("* decides a claim: run with several seeds. min: of training, one number a seed; about: from the "
                  "FLOPs, at the median pace of the finished runs")


@app.command()
def plan(
    profile: ProfileOption = "paper",
    only: OnlyOption = None,
    mean_length: Annotated[int, typer.Option(min=16, help="tokens of an average sequence")] = 1500,
    tflops: Annotated[float, typer.Option(min=0.01, help="sustained TFLOP/s of the machine")] = 300.0,
) -> None:
    """Build every drafter of a profile at its real shapes, without weights or data, and estimate the campaign."""
    from kvshot.experiments.dry_run import dry_run
    from kvshot.experiments.profiles import profile as find

    chosen = find(profile)
    rows = dry_run(chosen, only or (), mean_length=mean_length, tflops=tflops)
    table = Table(title=f"profile {profile}: {chosen.target}, {tflops:g} TFLOP/s, {mean_length} tokens a sequence")
    for n, column in enumerate(rows.columns):
        table.add_column(column, justify="right" if n else "left", no_wrap=not n)
    for row in rows.itertuples(index=False):
        table.add_row(*(f"{x:,.1f}" if isinstance(x, float) else str(x) for x in row))
    console.print(table)
    console.print(f"one seed of each: {rows['hours'].sum():,.0f} hours")


@app.command()
def reproduce(
    profile: ProfileOption = "laptop",
    only: OnlyOption = None,
    seeds: Annotated[int, typer.Option(min=1, help="of the experiments that decide a claim")] = 3,
    results: Annotated[Path, typer.Option(help="folder of published records")] = Path("results"),
    runs: Annotated[Optional[Path], typer.Option(help="folder of checkpoints; default: in the cache")] = None,  # noqa: UP045
    jobs: Annotated[int, typer.Option(min=1, help="runs at a time, sharing the cores")] = 1,
    device: DeviceOption = None,
) -> None:
    """Run every experiment whose record is missing. A kill at any moment loses little: the same command goes on."""
    from kvshot.experiments.campaign import reproduce as run_all

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the runs end, too
    failed = run_all(profile, results=results, runs=runs, only=only or (), seeds=seeds, jobs=jobs,
                     options=("--device", device) if device else ())
    if failed:
        raise KvshotError(f"{len(failed)} of the runs failed: {'; '.join(failed)}")


@app.command()
def publish(
    run: Annotated[Path, typer.Argument(help="folder that `kvshot train` wrote")],
    results: Annotated[Path, typer.Option(help="folder of published records")] = Path("results"),
    checkpoint: Annotated[bool, typer.Option(help="also the drafter, in bfloat16")] = False,
) -> None:
    """Copy a finished run's record (and drafter) to where the book reads it."""
    from kvshot.experiments.run import publish as copy

    console.print(f"{copy(run, results, checkpoint=checkpoint)}")


def show_record(record) -> None:
    """Print what a record measured, per domain, and how it was trained."""
    console.print(f"{record.experiment} on {record.target.name} ({record.profile}), kvshot "
                  f"{record.code.version}, {record.created:%Y-%m-%d}, {record.machine.device}")
    if record.training:
        t = record.training
        console.print(f"{t.steps} steps, {t.tokens_seen:,} tokens seen in {t.wall_seconds:.0f} s "
                      f"({t.tokens_per_second:,.0f} tokens/s), seed {t.seed}, learning rate {t.lr}")
    for name, domain in record.evaluation.items():
        _show_domain(name, domain)


def _show_domain(name: str, domain) -> None:
    """Alphas as a table, each with its interval or the columns behind it; MAT and retention below."""
    table = Table(title=f"{name}: {domain.drafter.n_conversations} conversations, {domain.drafter.n_columns} columns")
    for n, column in enumerate(("", "marginal [95 %]", "joint, of columns", "conditional, of")):
        table.add_column(column, justify="right" if n else "left", no_wrap=True)
    rows = {"drafter": domain.drafter} | ({"n-gram": domain.ngram} if domain.ngram else {})
    for label, summary in rows.items():
        for s in summary.steps:
            table.add_row(f"{label} α{s.step}", f"{s.alpha_marginal:.3f}", *(
                f"{r.value:.3f} of {r.denominator}" if r.denominator else "undefined"
                for r in (s.alpha_joint, s.alpha_conditional)))
        table.add_section()
    console.print(table)
    for label, summary in rows.items():
        parts = {"MAT": summary.mat, "from joint alphas": summary.mat_joint, "retention": summary.retention}
        console.print(f"{label}: " + ", ".join(f"{what} {e:.3f}" for what, e in parts.items()))


def _bench(name: str, device: str | None, data: Path | None, experiments: Sequence[str] = ("eagle3",),
           target: str | None = None):
    from kvshot.experiments.bench import Bench
    from kvshot.experiments.profiles import profile

    return Bench(profile(name, data, target), experiments=experiments, device=device)
