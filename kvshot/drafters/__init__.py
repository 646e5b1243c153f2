"""Drafters: one configuration space, one step, one attention."""

from kvshot.drafters.checkpoint import load_drafter, save_drafter, target_of
from kvshot.drafters.config import DrafterConfig, eagle3
from kvshot.drafters.drafter import Drafter
from kvshot.drafters.drafting import Round, draft_and_verify, draft_chain
from kvshot.drafters.foreign import load_eagle3, save_speculators
from kvshot.drafters.init import new_drafter, warm_start
from kvshot.drafters.injection import Given

__all__ = [
    "Drafter", "DrafterConfig", "Given", "Round", "draft_and_verify", "draft_chain", "eagle3",
    "load_drafter", "load_eagle3", "new_drafter", "save_drafter", "save_speculators", "target_of", "warm_start",
]
