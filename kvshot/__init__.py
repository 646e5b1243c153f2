"""kvshot: hidden states or KV caches? Drafters for long-range speculative decoding, trained and measured."""

from kvshot.errors import KvshotError

__version__ = "0.1.0"

__all__ = ["KvshotError", "__version__"]
