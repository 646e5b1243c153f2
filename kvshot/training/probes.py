"""What training says about its bottlenecks (Section 4): the gate, and the gradients of each attention's projections."""

from __future__ import annotations

import lzma
import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor, nn

from kvshot.drafters.drafter import Drafter
from kvshot.errors import KvshotError
from kvshot.fileio import atomic_file

BINS = 20
PROJECTIONS = {"q": "q_proj", "k": "k_proj", "v": "v_proj"}


def effective_rank(matrix: Tensor) -> float:
    """exp of the entropy of the singular values, scaled to sum to one: n for n equal ones, 1 for a single one."""
    if not matrix.isfinite().all():
        return float("nan")  # the trainer says so
    values = torch.linalg.svdvals(matrix.float())
    shares = values / values.sum().clamp(min=1e-30)
    return float(torch.exp(-torch.xlogy(shares, shares).sum()))


def participation(norms: Tensor) -> float:
    """How many rows share a gradient: (sum n^2)^2 / sum n^4 of the row norms; n for n equal rows, 1 for one."""
    squares = norms.double() ** 2
    return float(squares.sum() ** 2 / (squares**2).sum().clamp(min=1e-300))


class Probes:
    """Watches a drafter train and changes nothing. One row an optimizer step.

    Every step: `gate.<k>`, the mean gate of draft step k over columns and dimensions (hybrids); `norm.<branch>.<p>`,
    the norm of the gradient of the projection p (q, k, v; over all layers) of a branch
    ("self_attn", "cross_attn"); `norm.merge` and `norm.injections` where there are such parts.
    In a close step, means over layers: `rank.<branch>.<p>`, the effective rank of that gradient; `rows.<branch>.<p>`,
    how many rows (a column's step, or an entry of the prefix memory) contribute to it, and `shared.<branch>.<p>`, how
    many do so in effect (`participation`); and `gate.bin.<i>`, how many dimensions have a mean gate in
    [i / 20, (i + 1) / 20). Of the columns that were drawn, gradients as the optimizer gets them but for the clipping:
    with the factor `kv_gradient` where there is one. Of several processes each sees the gradients of the whole batch,
    and gates and rows of its own part.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.watched, self.close = drafter, False, False
        self.gates: list[Tensor] = []
        self.row_norms: dict[tuple[str, int], list[Tensor]] = defaultdict(list)
        self.projections: dict[str, list[nn.Linear]] = defaultdict(list)
        for index, layer in enumerate(drafter.layers):
            for branch in layer.branches:
                for short, name in PROJECTIONS.items():
                    projection = layer.get_submodule(f"{branch}.{name}")
                    self.projections[f"{branch}.{short}"].append(projection)
                    projection.register_forward_hook(self._rows((f"{branch}.{short}", index)))
        if drafter.config.memory == "both":
            drafter.layers[-1].merge.gate_proj.register_forward_hook(self._gate)

    def _gate(self, module: nn.Module, inputs: tuple, output: Tensor) -> None:
        if self.watched:
            self.gates.append(output.detach().float().sigmoid().flatten(0, -2).mean(0))  # of one draft step, [d]

    def _rows(self, name: tuple[str, int]):
        def hook(module: nn.Module, inputs: tuple, output: Tensor) -> None:
            if self.watched and self.close and output.requires_grad:
                output.register_hook(lambda g: self.row_norms[name].append(g.float().norm(dim=-1).flatten()))

        return hook

    @contextmanager
    def watch(self, *, close: bool) -> Iterator[None]:
        """Around one loss and its backward pass."""
        self.watched, self.close = True, close
        self.gates.clear()
        self.row_norms.clear()
        try:
            yield
        finally:
            self.watched = False

    def row(self) -> dict[str, Tensor | float]:
        """What was seen; gradients must not have been clipped yet. Tensors stay on the device (no waiting)."""
        out: dict[str, Tensor | float] = {f"gate.{k}": g.mean() for k, g in enumerate(self.gates)}
        for name, projections in self.projections.items():
            out[f"norm.{name}"] = _norm(p.weight for p in projections)
        if self.gates:
            out["norm.merge"] = _norm(self.drafter.layers[-1].merge.parameters())
        if self.drafter.config.remembers_target:
            out["norm.injections"] = _norm(self.drafter.injections.parameters())
        return {**out, **self._closely()} if self.close else out

    def _closely(self) -> dict[str, float]:
        out: dict[str, float] = {}
        for name, projections in self.projections.items():
            gradients = [p.weight.grad for p in projections if p.weight.grad is not None]
            rows = [torch.cat(norms) for (of, _), norms in self.row_norms.items() if of == name]
            if not gradients or not rows:
                continue
            out[f"rank.{name}"] = sum(map(effective_rank, gradients)) / len(gradients)
            out[f"rows.{name}"] = sum(float((norms > 0).sum()) for norms in rows) / len(rows)
            out[f"shared.{name}"] = sum(map(participation, rows)) / len(rows)
        if self.gates:
            bins = torch.histc(torch.stack(self.gates).mean(0), BINS, 0, 1)
            out |= {f"gate.bin.{i}": float(n) for i, n in enumerate(bins)}
        return out


def _norm(parameters) -> Tensor:
    gradients = [p.grad for p in parameters if p.grad is not None]
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients])) if gradients \
        else torch.zeros(())


def numbers(rows: list[dict[str, Tensor | float]]) -> list[dict[str, float]]:
    """Rows with every tensor as a number: here the device is waited for."""
    return [{name: float(value) for name, value in row.items()} for row in rows]


def save_probes(path: str | os.PathLike, rows: list[dict[str, float]]) -> None:
    """A table with a row for each optimizer step (`step`), as compressed CSV with four digits, whole or not at all."""
    with atomic_file(path) as tmp:
        pd.DataFrame(rows).astype({"step": int}).set_index("step").to_csv(tmp, float_format="%.4g", compression="xz")


def load_probes(path: str | os.PathLike) -> pd.DataFrame:
    """What `save_probes` wrote, indexed by step. Raises KvshotError when there is nothing, or it is damaged."""
    if not Path(path).exists():
        raise KvshotError(f"no probes at {path}: train the experiment again, or choose one that has them")
    try:
        return pd.read_csv(path, index_col="step", compression="xz")
    except (OSError, EOFError, ValueError, lzma.LZMAError) as err:
        raise KvshotError(f"{path} is damaged ({type(err).__name__}): train the experiment again") from err
