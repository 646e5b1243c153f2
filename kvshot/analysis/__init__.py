"""What measurements say about the paper's claims."""

from kvshot.analysis.verdict import Verdict, below, long_range_decay

__all__ = ["Verdict", "below", "long_range_decay"]
