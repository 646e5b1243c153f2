"""Drafters: one configuration space, one step, one attention."""

from kvshot.drafters.checkpoint import load_drafter, save_drafter
from kvshot.drafters.config import FAMILIES, DrafterConfig, eagle3
from kvshot.drafters.drafter import Drafter
from kvshot.drafters.drafting import Round, draft_and_verify, draft_chain

__all__ = [
    "FAMILIES", "Drafter", "DrafterConfig", "Round", "draft_and_verify", "draft_chain", "eagle3", "load_drafter",
    "save_drafter",
]
