"""Named experiments, profiles and the records they leave."""

from kvshot.experiments.bench import Bench
from kvshot.experiments.profiles import PROFILES, Profile, profile
from kvshot.experiments.record import RunRecord, load_records
from kvshot.experiments.run import evaluate, published, published_drafter, run, train

__all__ = [
    "PROFILES", "Bench", "Profile", "RunRecord", "evaluate", "load_records", "profile", "published",
    "published_drafter", "run", "train",
]
