"""Named experiments, profiles, the campaign, and the records they leave."""

from kvshot.experiments.bench import Bench
from kvshot.experiments.campaign import reproduce
from kvshot.experiments.cost import cost
from kvshot.experiments.profiles import PROFILES, Profile, profile
from kvshot.experiments.record import RunRecord, load_records
from kvshot.experiments.registry import EXPERIMENTS, Experiment, experiment
from kvshot.experiments.run import evaluate, published, published_drafter, recipe, run, train

__all__ = [
    "EXPERIMENTS", "PROFILES", "Bench", "Experiment", "Profile", "RunRecord", "cost", "evaluate", "experiment",
    "load_records", "profile", "published", "published_drafter", "recipe", "reproduce", "run", "train",
]
