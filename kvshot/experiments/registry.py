"""Every row of the paper's Tables 1, 2, 3, 5 and 6 and of Fig. 1b, and rows of our own, as named experiments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvshot.drafters.config import DrafterConfig
from kvshot.errors import KvshotError
from kvshot.targets import Target

Choices = dict[str, object]


@dataclass(frozen=True)
class Experiment:
    """One row. Names are the keys of `kvshot.paper` where the paper has the row.

    about: what it tests. tables: where it stands ("table1" .. "table6", "fig1b", "beyond"); what
    stands in "table4" is measured end to end, too. choices(target): what of
    `DrafterConfig` differs from the defaults. train: what of the profile's recipe differs. start: the experiment whose
    checkpoint it starts from, of the same seed. decisive: it decides a claim, and is run with several seeds.
    """

    name: str
    about: str
    tables: tuple[str, ...]
    choices: Callable[[Target], Choices]
    train: Mapping[str, object] = field(default_factory=dict)
    start: str | None = None
    decisive: bool = False

    def config(self, target: Target, draft_vocab_size: int) -> DrafterConfig:
        """The drafter's configuration for a target. Raises KvshotError when the target lacks what it reads."""
        return DrafterConfig.for_target(target, draft_vocab_size=draft_vocab_size, **self.choices(target))


def _states(target: Target) -> Choices:
    return {"hidden_layers": target.default_hidden_layers}


def _kv(n_layers: int = 3, injection: str = "linear+rope", **more) -> Callable[[Target], Choices]:
    """KV-only on n spaced target layers."""
    return lambda target: {"memory": "target", "kv_layers": target.spaced_kv_layers(n_layers), "injection": injection,
                           **more}


def _with_states(memory: str) -> Callable[[Target], Choices]:
    """EAGLE-3's input with the target's keys and values as (another) memory."""
    return lambda target: {**_kv()(target), **_states(target), "memory": memory}


def _blocks(depth: int) -> Callable[[Target], Choices]:
    """KV-only from the target's outer blocks: the first and the last half of `depth`, each with its own keys."""
    def choices(target: Target) -> Choices:
        n, half = target.n_layers, depth // 2
        return {"memory": "target", "kv_layers": (*range(half), *range(n - half, n)), "per_layer": True,
                "injection": "linear+rope", "depth": depth, "qk_norm": target.qk_norm}  # as the blocks to copy have

    return choices


def _rows() -> list[Experiment]:
    kv2 = "the 2-layer KV-only drafter of Table 2 with one change: "
    return [
        Experiment("eagle3", "hidden states reused, one layer: the baseline", ("table3", "table4", "table5", "fig1b",
                   "table2"),
                   _states, decisive=True),
        Experiment("kv-only-2", "keys and values reused, 2 draft layers", ("table2", "table4", "table5", "table6"),
                   _kv(depth=2), decisive=True),
        Experiment("kv-only-1", "keys and values reused, 1 draft layer", ("table1", "table2", "table5"), _kv(),
                   decisive=True),
        Experiment("kv-only-4", "keys and values reused, 4 draft layers", ("table2", "table5"), _kv(depth=4),
                   decisive=True),
        Experiment("kv-only-4-blocks", "4 draft layers that start as copies of the target's outer blocks: optimisation "
                   "or capacity?", ("table2", "beyond"), _blocks(4), {"init": "layers"}, decisive=True),
        Experiment("hybrid-checkpoint", "both, merged by a gate, from EAGLE-3's checkpoint", ("table3", "table4",
                   "table5"), _with_states("both"), start="eagle3", decisive=True),
        Experiment("eagle3-continued", "EAGLE-3 trained on for as long as the warm-started hybrid",
                   ("table3", "table4", "beyond"), _states, start="eagle3", decisive=True),
        Experiment("no-prefix-attention", "hidden states without attention to earlier ones: what a single compressed "
                   "vector holds", ("beyond",), lambda target: {**_states(target), "memory": "none"}, decisive=True),
        Experiment("kv-only-2-continued", "the 2-layer KV-only drafter trained on for as long as EAGLE-3 continued",
                   ("beyond",), _kv(depth=2), start="kv-only-2"),
        Experiment("no-target-info", "no target information: a one-layer language model", ("table1", "table5"),
                   lambda target: {}),
        Experiment("head-concat", "target layers as additional heads", ("table1", "table5"), _kv(injection="concat")),
        Experiment("linear-projection", "one projection of all target layers, keys as cached", ("table1", "table5"),
                   _kv(injection="linear")),
        Experiment("kv-only-3", "keys and values reused, 3 draft layers", ("table2", "table5"), _kv(depth=3)),
        Experiment("kv-only-2-blocks", "2 draft layers that start as copies of the target's first and last block",
                   ("table2", "beyond"), _blocks(2), {"init": "layers"}),
        Experiment("kv-only-2-outer", "the drafter of kv-only-2-blocks from a random start: what is the start alone "
                   "worth?", ("beyond",), _blocks(2)),
        Experiment("kv-only-4-outer", "the drafter of kv-only-4-blocks from a random start", ("beyond",), _blocks(4)),
        Experiment("eagle3-block", "EAGLE-3 whose layer starts as a copy of the target's last block",
                   ("table2", "beyond"), lambda target: {**_states(target), "qk_norm": target.qk_norm},
                   train={"init": "layers"}),
        Experiment("hybrid-random", "both, merged by a gate, from a random start", ("table3", "table5"),
                   _with_states("both")),
        Experiment("cross-only-random", "EAGLE-3's input, the target's keys and values instead of its own memory",
                   ("table3", "table5"), _with_states("target")),
        Experiment("cross-only-checkpoint", "the same from EAGLE-3's checkpoint", ("table3", "table5"),
                   _with_states("target"), start="eagle3"),
        Experiment("mtp", "the last hidden state, trained on the first step only, applied recursively", ("fig1b",),
                   lambda target: {"hidden_layers": (target.n_layers,)}, train={"n_steps": 1}),
        Experiment("kv-layers-4", kv2 + "4 target layers", ("table6",), _kv(4, depth=2)),
        Experiment("mlp-projector", kv2 + "an MLP for the projection", ("table6",), _kv(injection="mlp", depth=2)),
        Experiment("mlp-projector-norm", kv2 + "an MLP behind a LayerNorm", ("table6",),
                   _kv(injection="mlp+norm", depth=2)),
        Experiment("hidden-to-kv", kv2 + "keys and values projected from hidden states", ("table6",),
                   _kv(injection="hidden", depth=2)),
        Experiment("qk-norm", kv2 + "norms on queries and keys", ("table6",), _kv(depth=2, qk_norm=True)),
        Experiment("offline-ttt", kv2 + "every step trained from the target's states", ("table6",), _kv(depth=2),
                   {"offline": True}),
        Experiment("offline-ttt-gradient-50", kv2 + "the same, draft-side W_K and W_V with 50 times the gradient",
                   ("table6",), _kv(depth=2), {"offline": True, "kv_gradient": 50.0}),
    ]


EXPERIMENTS: dict[str, Experiment] = {e.name: e for e in _rows()}


def experiment(name: str) -> Experiment:
    """An experiment by name; KvshotError when there is none."""
    if name not in EXPERIMENTS:
        raise KvshotError(f"unknown experiment {name!r}: choose {', '.join(EXPERIMENTS)}")
    return EXPERIMENTS[name]


def select(only: Sequence[str] = ()) -> list[Experiment]:
    """Experiments by name or by table ("table2"), with those whose checkpoints they start from; all by default.

    The order is that of a campaign: what decides a claim first, a checkpoint before what starts from it.
    """
    tables = sorted({t for e in EXPERIMENTS.values() for t in e.tables})
    for name in only:
        if name not in tables and name not in EXPERIMENTS:
            raise KvshotError(f"unknown experiment or table {name!r}: choose {', '.join(tables)}, or one of "
                              f"{', '.join(EXPERIMENTS)}")
    chosen = {e.name for e in EXPERIMENTS.values() if not only or e.name in only or set(only) & set(e.tables)}
    chosen |= {EXPERIMENTS[name].start for name in chosen} - {None}
    return [e for e in EXPERIMENTS.values() if e.name in chosen]


def plan(only: Sequence[str] = (), seeds: int = 3) -> list[tuple[Experiment, int]]:
    """(experiment, seed) in the order of a campaign: every row once, then decisive rows with further seeds."""
    rows = select(only)
    return [(e, 0) for e in rows] + [(e, seed) for seed in range(1, seeds) for e in rows if e.decisive]
