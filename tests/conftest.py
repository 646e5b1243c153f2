"""Tiny tensors: one thread is faster than two, and does not wait for a busy core."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvshot.products import PRODUCTS

torch.set_num_threads(1)


class SeenProducts(TorchDispatchMode):
    """Notes what reaches the kernels: (rows, type) of every product's last two factors."""

    def __init__(self):
        super().__init__()
        self.products = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op in PRODUCTS:
            self.products.append((args[-2].shape[-2], args[-1].dtype))
        return op(*args, **(kwargs or {}))


@pytest.fixture
def seen_products():
    return SeenProducts
