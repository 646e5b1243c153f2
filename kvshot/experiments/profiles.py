"""Profiles: the same experiments on a random toy, on a real small target, later on the paper's."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from kvshot.data.corpus import Corpus
from kvshot.data.readers import as_jsonl
from kvshot.errors import KvshotError
from kvshot.fileio import cache_dir
from kvshot.training.trainer import TrainConfig

ROOT = Path(__file__).resolve().parents[2]


class Profile(BaseModel):
    """Target, data and recipe that all rows of a comparison share.

    data: a corpus folder, or None for the made-up conversations of the smoke profile. dtype: of the target while
    features are captured. max_length: longest sequence in tokens. train_conversations: the first so many of the
    training split (None: all). template: options of the chat template, for training and decoding alike; one that a
    target's template does not have is left out. online: run the target when its features are needed instead of storing
    them. replay_prompts: of every held-out domain, for what is measured end to end on greedy text of `replay_tokens`
    tokens.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    target: str
    data: Path | None
    dtype: str
    draft_vocab_size: int = Field(ge=1)
    max_length: int = Field(ge=8)
    train_conversations: int | None = Field(None, ge=1)
    template: dict[str, JsonValue] = {}
    online: bool = False
    train: TrainConfig
    replay_prompts: int = Field(50, ge=2)
    replay_tokens: int = Field(128, ge=2)

    @property
    def setting(self) -> dict[str, JsonValue]:
        """What beside the recipe makes two runs comparable: target, text that is used, lengths."""
        return {**self.model_dump(mode="json", include={"target", "dtype", "draft_vocab_size", "max_length",
                                                        "train_conversations", "online", "template"}),
                "corpus": None if self.data is None else _used(self.data, self.train_conversations)}


@cache
def _used(data: Path, train_conversations: int | None) -> str | None:
    """Hash of the conversations that are used; None where there are none. More behind them change nothing."""
    try:
        splits = Corpus.load(data).splits
    except KvshotError:
        return None
    used = {name: c[:train_conversations] if name == "train" else c for name, c in splits.items()}
    return hashlib.sha256(b"".join(name.encode() + as_jsonl(used[name]) for name in sorted(used))).hexdigest()


_LAPTOP = Profile(
    name="laptop", target="smollm2-135m", data=ROOT / "results" / "data" / "smollm2-135m", dtype="bfloat16",
    draft_vocab_size=4096, max_length=512, train_conversations=4000,
    train=TrainConfig(steps=1000, batch_tokens=2048, columns_per_sequence=48, lr=1e-3, init="random", eval_every=200))

PROFILES = {
    "smoke": Profile(
        name="smoke", target="smoke", data=None, dtype="float32", draft_vocab_size=64, max_length=160,
        replay_prompts=4, replay_tokens=24,
        train=TrainConfig(steps=40, batch_tokens=1024, columns_per_sequence=24, lr=3e-3, eval_every=20,
                          precision="no")),
    # every row: 2 M tokens, so that all of them can be run on a laptop
    "laptop": _LAPTOP,
    # the rows that live pages use: 9 M tokens, until validation MAT is nearly flat
    "laptop-long": _LAPTOP.model_copy(update={
        "name": "laptop-long", "train_conversations": 8000,
        "train": TrainConfig(steps=2400, batch_tokens=4096, columns_per_sequence=48, lr=3e-3, eval_every=200)}),
    "paper": Profile(
        name="paper", target="Qwen/Qwen3-8B", data=cache_dir() / "data" / "sharegpt", dtype="bfloat16",
        draft_vocab_size=32000, max_length=4096, online=True,
        # ShareGPT's answers come without thoughts: asked for them, the drafter would meet text that it never saw
        template={"enable_thinking": False},
        # about 70k samples, 3 epochs (the paper); batch, columns and learning rate are ours
        train=TrainConfig(steps=12000, batch_tokens=16384, columns_per_sequence=512, lr=3e-4, eval_every=500)),
}


def profile(name: str, data: Path | None = None, target: str | None = None) -> Profile:
    """A profile by name, with another corpus folder or target if given; KvshotError when there is none."""
    if name not in PROFILES:
        raise KvshotError(f"unknown profile {name!r}: choose {', '.join(PROFILES)}")
    given = {"data": data, "target": target}
    return PROFILES[name].model_copy(update={k: v for k, v in given.items() if v is not None})
