"""What a process gets of the machine: cores, and an allocator that keeps large blocks.

Without the latter, page faults alone cost a CPU run up to three times its time.
"""

from __future__ import annotations

import os
import sys

# glibc returns large blocks to the system at once and faults them in again; it reads these when a process starts
SETTINGS = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000", "MALLOC_TOP_PAD_": "500000000"}


def set_for_children() -> None:
    """Processes started from here on get the settings; the user's own stay."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)


def restart_with_settings() -> None:
    """Run this very command again with the settings, in place of this process; nothing off Linux or a second time."""
    if sys.platform == "linux" and not SETTINGS.keys() <= os.environ.keys():
        set_for_children()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def usable_cores() -> int:
    """How many this process may use, where the system says so."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
