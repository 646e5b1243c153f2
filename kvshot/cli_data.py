"""The commands of `kvshot data`: conversations written, read, looked at."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from math import isfinite
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console

from kvshot.errors import KvshotError

data = typer.Typer(help="Conversations: write, read, look at.")
console = Console(markup=False, highlight=False, soft_wrap=True)  # paths and [intervals] as they are

TargetOption = Annotated[str, typer.Option("--target", "-t", help="smoke, smollm2-135m, a hub id or a local folder")]
TemplateOption = Annotated[str, typer.Option(help="options of the chat template, as JSON")]


class OnBad(StrEnum):
    refuse = "refuse"
    skip = "skip"


@data.callback(invoke_without_command=True)
def help_(context: typer.Context) -> None:
    # not typer's no_args_is_help: that is a usage error without a message
    if context.invoked_subcommand is None:
        print(context.get_help())


@data.command()
def synthesize(
    out: Annotated[Path, typer.Argument(help="folder for the data set (parts of an unfinished run in OUT/parts)")],
    target: TargetOption = "smollm2-135m",
    answer_tokens: Annotated[int, typer.Option(min=1, help="stop when this many answer tokens were kept")] = 100_000,
    temperature: Annotated[float, typer.Option(min=0, help="of the answers; 0 is greedy")] = 0.7,
    max_answer_tokens: Annotated[int, typer.Option(min=16)] = 224,
    template: TemplateOption = "{}",
    seed: Annotated[int, typer.Option(min=0)] = 0,
    workers: Annotated[Optional[int], typer.Option(min=1, help="processes; default: one per core")] = None,  # noqa: UP045
    held_out: Annotated[int, typer.Option(min=1, help="conversations held out; a third more choose checkpoints")] = 300,
) -> None:
    """Let the target write its own conversations, filter and split them."""
    from kvshot.data.synthesize import synthesize_corpus

    recipe = _recipe(target, seed, temperature, max_answer_tokens, template)
    _show_written(*synthesize_corpus(recipe, out, answer_tokens=answer_tokens, workers=workers, held_out=held_out), out)


@data.command()
def extend(
    corpus: Annotated[Path, typer.Argument(help="folder of a synthesised data set (its parts in CORPUS/parts)")],
    answer_tokens: Annotated[int, typer.Option(min=1, help="answer tokens that it shall hold, all told")],
    workers: Annotated[Optional[int], typer.Option(min=1, help="processes; default: one per core")] = None,  # noqa: UP045
) -> None:
    """Let the target write more training conversations into a data set; what is there stays as it is."""
    from kvshot.data.synthesize import extend_corpus

    _show_written(*extend_corpus(corpus, answer_tokens=answer_tokens, workers=workers), corpus)


def _show_written(corpus, report, folder: Path) -> None:
    """What was dropped, and what stands in each file now."""
    console.print(f"{report}" if report.kept or report.dropped else "nothing to do: it holds as much already")
    for info in corpus.info.splits.values():
        console.print(f"{folder / info.file}: {info.conversations} conversations, {info.answer_tokens} answer tokens")


@data.command()
def fetch(
    name: Annotated[str, typer.Argument(help="sharegpt or ultrachat")],
    out: Annotated[Optional[Path], typer.Option(help="folder; default: data/NAME in the cache, where the "  # noqa: UP045
                                                        "paper profile looks for sharegpt")] = None,
    limit: Annotated[Optional[int], typer.Option(min=2, help="only the first so many records")] = None,  # noqa: UP045
    held_out: Annotated[int, typer.Option(min=1, help="conversations held out; a tenth more for validation")] = 1000,
) -> None:
    """Get one of the paper's data sets from the Hugging Face hub, and split it."""
    from kvshot.data.hub import fetch_corpus
    from kvshot.fileio import cache_dir

    out = out or cache_dir() / "data" / name
    corpus, bad = fetch_corpus(name, out, limit=limit, held_out=held_out)
    console.print(f"{bad} records hold no usable conversation")
    for info in corpus.info.splits.values():
        console.print(f"{out / info.file}: {info.conversations} conversations")


@data.command()
def preview(
    file: Annotated[Path, typer.Argument(help="ShareGPT, UltraChat or messages; JSON or JSONL, also .gz, .xz")],
    target: TargetOption = "smollm2-135m",
    n: Annotated[int, typer.Option("-n", min=1, help="how many conversations")] = 1,
    template: TemplateOption = "{}",
    on_bad: OnBad = OnBad.refuse,
) -> None:
    """Show which tokens a drafter would be trained on."""
    from kvshot.data import encode, read_conversations
    from kvshot.data import preview as show_tokens
    from kvshot.targets import load_tokenizer

    report = read_conversations(file, on_bad=on_bad.value)
    _print_bad(report.bad)
    tokenizer = load_tokenizer(target)
    for conversation in report.conversations[:n]:
        console.print(show_tokens(tokenizer, encode(tokenizer, conversation, options=_options(template))))


@data.command()
def convert(
    file: Annotated[Path, typer.Argument(help="ShareGPT, UltraChat or messages; JSON or JSONL, also .gz, .xz")],
    out: Annotated[Path, typer.Argument(help="messages JSONL to write, .xz and .gz compress")],
    on_bad: OnBad = OnBad.refuse,
) -> None:
    """Read any known format, write messages JSONL."""
    from kvshot.data import read_conversations, write_conversations

    if out.exists():
        raise KvshotError(f"{out} exists already: name a new file")
    report = read_conversations(file, on_bad=on_bad.value)
    _print_bad(report.bad)
    write_conversations(out, report.conversations)
    console.print(f"{out}: {len(report.conversations)} conversations")


@data.command(name="split")
def split_files(
    files: Annotated[list[Path], typer.Argument(help="ShareGPT, UltraChat or messages; JSON or JSONL, also .gz, .xz")],
    out: Annotated[Path, typer.Argument(help="new folder for the data set, to be given as --data")],
    held_out: Annotated[Optional[int], typer.Option(min=1, help="conversations held out; default: a tenth, 2 to "  # noqa: UP045
                                                                "300")] = None,
    validation: Annotated[Optional[int], typer.Option(min=1, help="conversations that choose checkpoints; default: a "  # noqa: UP045
                                                                  "third of those held out")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    on_bad: OnBad = OnBad.refuse,
) -> None:
    """Make a data set of your own files: train, validation and held-out conversations that do not share text."""
    from kvshot.data.own import corpus_from_files

    corpus, reports = corpus_from_files(files, out, held_out=held_out, validation=validation, seed=seed,
                                        on_bad=on_bad.value)
    for file, report in zip(files, reports, strict=True):
        _print_bad(report.bad, f"{file} " if len(files) > 1 else "")
    about = corpus.info.recipe
    console.print(f"{about['without an answer']} without an answer left out, {about['dropped as like a held-out one']} "
                  "dropped as like a held-out one")
    for info in corpus.info.splits.values():
        console.print(f"{out / info.file}: {info.conversations} conversations")


def _recipe(target: str, seed: int, temperature: float, max_answer_tokens: int, template: str):
    from kvshot.data.synthesize import Recipe

    if not isfinite(temperature):  # typer's minimum lets infinity through
        raise KvshotError(f"--temperature {temperature} is no temperature: give a number from 0, which is greedy")
    return Recipe(target=target, seed=seed, answer_temperature=temperature, max_answer_tokens=max_answer_tokens,
                  template=_options(template))


def _options(text: str) -> dict:
    """Of the chat template, from JSON."""
    try:
        options = json.loads(text)
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise KvshotError(f"--template {text} is no JSON object such as '{{\"enable_thinking\": false}}'")
    return options


def _print_bad(bad: list[tuple[int, str]], where: str = "") -> None:
    for line, reason in bad:
        print(f"skipped {where}line {line}: {reason}", file=sys.stderr)


@data.command()
def answer(
    prompts: Annotated[str, typer.Argument(help="'human-eval', or a file of conversations that end with a user turn")],
    corpus: Annotated[Path, typer.Argument(help="data set folder that gets the answers as one more split")],
    split: Annotated[str, typer.Option(help="name of the split; parts of an unfinished run in CORPUS/SPLIT.parts")],
    target: TargetOption = "smollm2-135m",
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy")] = 0.7,
    max_answer_tokens: Annotated[int, typer.Option(min=16)] = 224,
    template: TemplateOption = "{}",
    seed: Annotated[int, typer.Option(min=0)] = 0,
    workers: Annotated[Optional[int], typer.Option(min=1)] = None,  # noqa: UP045
) -> None:
    """Let the target answer given prompts: another held-out domain of a data set."""
    from kvshot.data import human_eval_prompts, read_conversations
    from kvshot.data.synthesize import answer_corpus

    given = human_eval_prompts() if prompts == "human-eval" else read_conversations(Path(prompts)).conversations
    recipe = _recipe(target, seed, temperature, max_answer_tokens, template)
    whole, report = answer_corpus(recipe, corpus, split, given, source=prompts, workers=workers)
    console.print(f"{report}\n{corpus}: split {split}, {len(whole.splits[split])} conversations")
