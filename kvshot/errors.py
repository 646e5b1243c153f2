"""One exception for everything a user can mend."""

from __future__ import annotations


class KvshotError(Exception):
    """What was wrong and what to do, in one line; the command line exits with code 2."""


def memory_is_full(err: Exception) -> bool:
    """Whether an allocation failed: torch's CPU allocator says so in a plain RuntimeError, on Windows in other words.
    """
    if isinstance(err, MemoryError) or type(err).__name__ == "OutOfMemoryError":  # torch's, of a GPU
        return True
    return isinstance(err, RuntimeError) and any(
        words in str(err) for words in ("DefaultCPUAllocator", "not enough memory"))
