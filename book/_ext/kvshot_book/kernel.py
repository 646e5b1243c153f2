"""The kernel that runs the notebooks: one setting for the book, for `make refresh` and for nbval."""

from __future__ import annotations

import os
from pathlib import Path

from traitlets.config import Config

from kvshot_book.plan import ROOT

# What is written back into a notebook: nothing of the machine it ran on.
NOTEBOOK_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def set_kernel_environment(root: Path = ROOT) -> None:
    """Change this process's environment, which kernels inherit.

    The checkout's own kvshot is imported, whatever is installed; targets come from the cache or from pip,
    never from a model hub; no progress bars; this environment's `python3` kernel before a user-wide one.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("JUPYTER_PREFER_ENV_PATH", "1")
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    known = os.environ.get("PYTHONPATH", "")
    if str(root) not in known.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), known]))


def kernel_config() -> Config:
    """ipykernel from 7.4 on warns about plain TCP unless the manager offers keys; older ones cannot."""
    from jupyter_client.manager import KernelManager

    if KernelManager.class_traits().get("transport_encryption"):
        return Config({"KernelManager": {"transport_encryption": "auto"}})
    return Config()
