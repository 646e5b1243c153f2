"""Are hidden states and the KV cache equivalent (Section 2.3, Eq. 4)? With the target's weights; by a learned map."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from kvshot.analysis.compression import SINK
from kvshot.errors import KvshotError
from kvshot.targets import Target, capture


@torch.no_grad()
def recomputed(target: Target, ids: Tensor) -> pd.DataFrame:
    """Keys and values of every block from its input state, with the block's own norm and W_K, W_V, against the cache.

    ids [T]. A row a block: the largest difference, in units of the tensor's standard deviation. Raises KvshotError for
    blocks of another shape than Llama's.
    """
    context = capture(target, ids[None], hidden_layers=tuple(range(target.n_layers)), kv_layers=target.kv_layers)
    rows = {}
    for at, layer in enumerate(target.kv_layers):
        block = target.decoder.layers[layer]
        attention = block.self_attn
        if not all(hasattr(attention, part) for part in ("k_proj", "v_proj")):
            raise KvshotError(f"{target.name} has no separate key and value projections: nothing to recompute")
        x = block.input_layernorm(context.hidden[:, layer])
        k, v = (p(x).unflatten(-1, (-1, target.head_dim)) for p in (attention.k_proj, attention.v_proj))
        k = attention.k_norm(k) if hasattr(attention, "k_norm") else k
        k = target.rotate_keys(k.transpose(1, 2)[:, None], (layer,), context.positions)
        pairs = (k[:, 0], context.keys[:, at]), (v.transpose(1, 2), context.values[:, at])
        rows[layer] = [float((ours - theirs).abs().max() / theirs.std()) for ours, theirs in pairs]
    return pd.DataFrame.from_dict(rows, orient="index", columns=["keys", "values"]).rename_axis("block")


def explained(target: Target, train: Sequence[Tensor], test: Sequence[Tensor], sources: dict[str, tuple[int, ...]], *,
              blocks: Sequence[int] | None = None, ridge: float = 1e-2) -> pd.DataFrame:
    """How much of every block's keys (RoPE taken off) and values a linear map of hidden states explains, R² on `test`.

    train, test: texts ids [T]; sources: name -> hidden layers that the map reads; blocks: default all. One row a source
    and block. Inputs are scaled to unit variance; ridge: in units of that, times the number of positions. R² pools the
    dimensions: 1 is perfect, 0 the mean of `train`. It is a lower bound: more text may find a better map.
    """
    blocks = target.kv_layers if blocks is None else tuple(blocks)
    wanted = tuple(sorted({i for layers in sources.values() for i in layers}))

    def read(texts: Sequence[Tensor]) -> tuple[np.ndarray, np.ndarray]:
        contexts = [capture(target, t[None], hidden_layers=wanted, kv_layers=blocks) for t in texts]
        inputs = torch.cat([c.hidden[0, :, SINK:] for c in contexts], 1)
        outputs = [torch.stack([c.keys_unrotated()[0], c.values[0]], 1)[..., SINK:, :] for c in contexts]
        outputs = torch.cat([o.permute(3, 0, 1, 2, 4) for o in outputs]).flatten(3)
        return inputs.double().cpu().numpy(), outputs.double().cpu().numpy()  # [n, N, d], [N, L, 2, H_kv * D]

    (x_train, y_train), (x_test, y_test) = read(train), read(test)
    shape, rows, mean = y_train.shape[1:], [], y_train.mean(0)
    for name, layers in sources.items():
        at = [wanted.index(i) for i in layers]
        x, z = (np.concatenate(list(part[at]), -1) for part in (x_train, x_test))
        centre, spread = x.mean(0), x.std(0) + 1e-9
        x, z = (x - centre) / spread, (z - centre) / spread
        gram = x.T @ x
        gram[np.diag_indices_from(gram)] += ridge * len(x)
        weights = np.linalg.solve(gram, x.T @ (y_train - mean).reshape(len(x), -1))
        left = y_test - mean - (z @ weights).reshape(-1, *shape)
        share = 1 - (left**2).sum((0, 3)) / ((y_test - mean) ** 2).sum((0, 3))
        rows += [[name, layer, *share[i]] for i, layer in enumerate(blocks)]
    return pd.DataFrame(rows, columns=["source", "block", "keys", "values"])
