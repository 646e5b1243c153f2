"""bfloat16 products on CPUs that are slow at them.

A CPU without units for bfloat16, or with slow ones, can take several times as long for such a product as for a float32
one. The same product can be had from float32 arithmetic: bfloat16 units, too, accumulate in float32 and round once.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from torch.utils._python_dispatch import TorchDispatchMode

SMALL = 64  # rows below which turning the other factor into float32 costs more than the product
PRODUCTS = frozenset(op.default for op in (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm))


class WideProducts(TorchDispatchMode):
    """Within, the `PRODUCTS` of bfloat16 tensors on the CPU, of at least `SMALL` rows, are computed in float32 and
    rounded, forward and backward; what a fused kernel multiplies inside is not.
    """

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op in PRODUCTS and args[-1].dtype is torch.bfloat16 and args[-1].device.type == "cpu" \
                and args[-2].shape[-2] >= SMALL:
            return op(*(a.float() for a in args), **(kwargs or {})).to(torch.bfloat16)
        return op(*args, **(kwargs or {}))


def wide_is_faster(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products of this kind are faster in float32 arithmetic: bfloat16 ones on a CPU that is slow at them."""
    return device.type == "cpu" and dtype is torch.bfloat16 and _slow_bf16()


def fast_products(device: torch.device, dtype: torch.dtype) -> AbstractContextManager:
    """`WideProducts` where products of this kind are faster with it, else nothing."""
    return WideProducts() if wide_is_faster(device, dtype) else nullcontext()


@cache
def _slow_bf16() -> bool:
    """Whether bfloat16 products take clearly longer here than float32 ones, measured once in a process (50 ms)."""
    seconds = {dtype: [] for dtype in (torch.float32, torch.bfloat16)}
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        for _ in range(4):
            for dtype, measured in seconds.items():
                x = torch.ones(512, 512, dtype=dtype)
                start = time.perf_counter()
                x @ x
                measured.append(time.perf_counter() - start)
    return min(seconds[torch.bfloat16]) > 1.4 * min(seconds[torch.float32])
