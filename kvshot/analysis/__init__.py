"""What measurements say about the paper's claims."""

from kvshot.analysis.identity import target_as_drafter
from kvshot.analysis.verdict import Verdict, below, long_range_decay, positive

__all__ = ["Verdict", "below", "long_range_decay", "positive", "target_as_drafter"]
