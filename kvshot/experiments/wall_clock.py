"""Wall clock: drafters against plain decoding on the same prompts, interleaved, and where the time goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd
import torch

from kvshot.drafters.drafter import Drafter
from kvshot.errors import KvshotError
from kvshot.evaluation.decode import Decoded, DecodeReport, decode, plain_decode
from kvshot.evaluation.metrics import interval
from kvshot.evaluation.tree import TreeShape
from kvshot.progress import progress
from kvshot.targets import Target
from kvshot.targets.session import Session

PARTS = ("target", "drafter", "host")


def contestants(target: Target, drafters: Mapping[str, tuple[Drafter, TreeShape]], max_new_tokens: int
                ) -> dict[str, Callable[[list[int]], tuple[list[int], DecodeReport | None]]]:
    """What is timed, by name: transformers' `generate`, its prompt lookup, our plain loop, and each drafter.

    A function of the prompt's ids that gives the new tokens, and a report where there is one.
    """
    def generate(**options):
        def run(ids: list[int]):
            given = torch.tensor([ids], device=target.device)
            out = target.model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=max_new_tokens,
                                        do_sample=False, **options)
            return out[0, len(ids) :].tolist(), None
        return run

    def ours(drafter: Drafter, shape: TreeShape):
        def run(ids: list[int]):
            done: Decoded = decode(target, drafter, ids, max_new_tokens=max_new_tokens, shape=shape)
            return done.tokens, done.report
        return run

    plain = {"generate": generate(), "generate, prompt lookup": generate(prompt_lookup_num_tokens=8),
             "plain loop": lambda ids: (plain_decode(target, ids, max_new_tokens), None)}
    return plain | {name: ours(*what) for name, what in drafters.items()}


def time_decoding(target: Target, prompts: Sequence[Sequence[int]], drafters: Mapping[str, tuple[Drafter, TreeShape]],
                  *, max_new_tokens: int = 128, quiet: bool = False) -> pd.DataFrame:
    """One row a prompt and contestant: seconds, tokens, verify calls, seconds by part, whether the text is the plain
    loop's.

    Every prompt is decoded by all of them before the next one, in an order that changes from prompt to prompt, so that
    a slow minute of the machine hits all alike. Seconds include reading the prompt.
    """
    runs, rows = contestants(target, drafters, max_new_tokens), []
    for run in runs.values():  # first calls set things up
        run(list(prompts[0])[:8])
    with progress("decoding (prompts)", len(prompts), quiet=quiet) as advance:
        for number, prompt in enumerate(prompts):
            order = np.random.default_rng(number).permutation(list(runs))
            texts = {}
            for name in order:
                began = target.clock()
                tokens, report = runs[name](list(prompt))
                row = {"prompt": number, "name": str(name), "seconds": target.clock() - began, "tokens": len(tokens)}
                if report is not None:
                    row |= {"calls": len(report.kept), "prefill": report.prefill_seconds,
                            **{part: report.seconds[part] for part in PARTS}}
                texts[str(name)] = tokens
                rows.append(row)
            for row in rows[-len(runs) :]:
                row["same"] = texts[row["name"]] == texts["plain loop"]
            advance()
    return pd.DataFrame(rows)


def speed_ups(times: pd.DataFrame, base: str = "plain loop", *, n_boot: int = 2000) -> pd.DataFrame:
    """Per contestant: tokens/s, and the median over prompts of how much faster than `base` it was, with a 95 % interval
    over prompts.
    """
    seconds = times.pivot(index="prompt", columns="name", values="seconds")
    rate = times.groupby("name")[["tokens", "seconds"]].sum()
    rows = {}
    for name in seconds:
        ratio = (seconds[base] / seconds[name]).to_numpy()
        low, high = interval(ratio, np.median, n_boot=n_boot)
        rows[name] = [rate.tokens[name] / rate.seconds[name], np.median(ratio), low, high,
                      times.loc[times.name == name, "same"].mean()]
    columns = ["tokens/s", "speed-up", "low", "high", "same text"]
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns)


@torch.no_grad()
def pass_costs(target: Target, prompt: Sequence[int], widths: Sequence[int], *, repeats: int = 9) -> dict[int, float]:
    """Median seconds of one target pass over `width` new tokens behind the prompt, heads and choice included."""
    score, out = target.scorer(), {}
    session = Session(target)
    session.read(torch.tensor(list(prompt), device=target.device))
    for width in widths:
        fed = torch.full((width,), int(prompt[-1]), device=target.device)
        taken = []
        for _ in range(repeats + 1):
            began = target.clock()
            score(session.read(fed)).argmax(-1).tolist()
            taken.append(target.clock() - began)
            session.keep([])
        out[width] = float(np.median(taken[1:]))
    return out


def per_call(times: pd.DataFrame) -> pd.DataFrame:
    """Where the time of a verify call goes, in seconds, and the tokens that it kept, by contestant."""
    drafted = times.dropna(subset=["calls"])
    total = drafted.groupby("name")[["calls", "tokens", *PARTS]].sum()
    prompts = drafted.groupby("name").prompt.count()
    out = total[list(PARTS)].div(total.calls, axis=0)
    out.insert(0, "kept", (total.tokens - prompts) / total.calls)  # the first token of a text comes with its prompt
    return out


def predicted(calls: pd.DataFrame, mats: Mapping[str, float], widths: Mapping[str, int],
              pass_seconds: Mapping[int, float]) -> pd.Series:
    """The cost model: how much faster than the plain loop each contestant of `per_call` should be.

    mats: tokens a verify call, measured elsewhere; widths: tokens of a verify pass; pass_seconds: of a target pass by
    its width (between those that were measured, on a line). Drafting and host are those of `calls`. Raises
    KvshotError for a width outside those measured.
    """
    known = sorted(pass_seconds)
    if outside := [n for n in calls.index if not known[0] <= widths[n] <= known[-1]]:
        raise KvshotError(f"no pass as wide as that of {', '.join(outside)} was timed: time more widths")
    verify = np.interp([widths[n] for n in calls.index], known, [pass_seconds[w] for w in known])
    kept = np.array([mats[n] for n in calls.index])
    seconds = verify + calls.drafter + calls.host
    return pd.Series(kept * pass_seconds[1] / seconds, index=calls.index, name="predicted")


def choices(said: pd.Series, ups: pd.DataFrame, drafter_of: Mapping[str, str]) -> pd.DataFrame:
    """By drafter: the contestant that `predicted` puts first, the speed-up it was said to have and had (`speed_ups`),
    and the one that was fastest.
    """
    rows = {}
    for drafter, group in said.groupby(pd.Series(drafter_of).reindex(said.index)):
        chosen, fastest = group.idxmax(), ups.loc[group.index, "speed-up"].idxmax()
        rows[drafter] = [chosen, group[chosen], ups.loc[chosen, "speed-up"], fastest, ups.loc[fastest, "speed-up"]]
    return pd.DataFrame.from_dict(rows, orient="index",
                                  columns=["chosen", "predicted", "measured", "fastest", "its speed-up"])


def by_shape(values: pd.Series, contestants: Mapping[str, Mapping]) -> pd.DataFrame:
    """Values of contestants (each with its "drafter" and "shape"): a row a drafter, a column a shape."""
    known = pd.DataFrame.from_dict(contestants, orient="index").assign(value=values)
    order = dict.fromkeys(known["shape"])
    return known.pivot(index="drafter", columns="shape", values="value")[list(order)].rename_axis(
        index=None, columns=None)
