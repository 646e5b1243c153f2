"""kvshot: hidden states or KV caches? Drafters for long-range speculative decoding, trained and measured."""

from kvshot.errors import KvshotError

__version__ = "0.1.0"

__all__ = ["KvshotError", "__version__", "decode"]


def __getattr__(name: str):
    """`kvshot.decode`, imported when it is asked for: it brings torch, which the command line loads late."""
    if name == "decode":
        from kvshot.evaluation.decode import decode

        return decode
    raise AttributeError(f"module 'kvshot' has no attribute {name!r}")
