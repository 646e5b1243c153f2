"""What all runs of one profile share: target, examples, draft vocabulary, captured features."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from pydantic import JsonValue

from kvshot.data import DraftVocab, Example, encode_all, examples_sha256, split
from kvshot.data.corpus import Corpus
from kvshot.data.toy import toy_conversations
from kvshot.drafters.checkpoint import load_drafter, target_of
from kvshot.drafters.config import DrafterConfig
from kvshot.drafters.drafter import Drafter
from kvshot.errors import KvshotError
from kvshot.evaluation.metrics import StepwiseHits
from kvshot.evaluation.ngram import NgramModel, ngram_hits
from kvshot.experiments.profiles import Profile
from kvshot.experiments.record import DataInfo, RunRecord, TargetInfo
from kvshot.experiments.registry import experiment
from kvshot.fileio import cache_dir
from kvshot.targets import Features, FeatureStore, OnlineFeatures, Target, load_target

TRAIN, VALIDATION = "train", "validation"


class Bench:
    """Loads what is needed when it is needed. Features are kept in `cache_dir()/features`, by content.

    experiments: whose layers are captured; a finished store that has more than these layers is used as it is.
    """

    def __init__(self, profile: Profile, *, experiments: Sequence[str] = ("eagle3",), device: str | None = None,
                 quiet: bool = False) -> None:
        self.profile, self.device, self.quiet = profile, device, quiet
        self.experiments = [experiment(name) for name in experiments]
        self.also: list[DrafterConfig] = []  # drafters beside those of the experiments, for their layers

    @cached_property
    def target(self) -> Target:
        return load_target(self.profile.target, dtype=self.profile.dtype, device=self.device)

    @cached_property
    def conversations(self) -> dict[str, list]:
        if self.profile.data is not None:
            splits = Corpus.load(self.profile.data).splits
            if lacking := [name for name in (TRAIN, VALIDATION) if name not in splits]:
                raise KvshotError(f"the data in {self.profile.data} has no split {lacking[0]}: add one, or choose "
                                  "another corpus")
            if len(splits) < 3:
                raise KvshotError(f"the data in {self.profile.data} has no split to measure on beside {TRAIN} and "
                                  f"{VALIDATION}: add one, such as held_out")
            return splits
        parts = split(toy_conversations(240, seed=0), held_out=60, prefix_words=50, overlap=1.1)
        return {TRAIN: parts.train, VALIDATION: parts.held_out[:20], "held_out": parts.held_out[20:]}

    @cached_property
    def template(self) -> dict[str, JsonValue]:
        """The profile's options that the target's chat template has."""
        try:
            source = self.target.tokenizer.get_chat_template()
        except ValueError:  # none, or several and none of them the default: encoding says so
            return dict(self.profile.template)
        return {name: value for name, value in self.profile.template.items() if name in source}

    @cached_property
    def examples(self) -> dict[str, list[Example]]:
        """By split; conversations longer than the profile's limit lose their end."""
        limit = {TRAIN: self.profile.train_conversations}
        out = {}
        for name, conversations in self.conversations.items():
            encoded = encode_all(self.target.tokenizer, conversations[: limit.get(name)], self.profile.max_length,
                                 options=self.template)
            if encoded.skipped and not self.quiet:
                print(f"{name}: left out {len(encoded.skipped)} conversations, the first: {encoded.skipped[0][1]}",
                      file=sys.stderr)
            out[name] = encoded.examples
        return out

    def drafter(self, checkpoint: str | os.PathLike) -> Drafter:
        """A checkpoint's drafter. What is wrong with it, or with the data, is said before the target is fetched."""
        target_of(checkpoint)
        self.conversations  # noqa: B018
        return load_drafter(checkpoint, self.target)[0]

    @property
    def domains(self) -> list[str]:
        """The held-out splits that are reported."""
        return [name for name in self.conversations if name not in (TRAIN, VALIDATION)]

    @cached_property
    def vocab(self) -> DraftVocab:
        return DraftVocab.from_examples(self.examples[TRAIN], self.target.vocab_size, self.profile.draft_vocab_size)

    @property
    def layers(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(hidden layers, KV layers) that the drafters read, and EAGLE-3's hidden layers where they are stored."""
        configs = [*(e.config(self.target, 1) for e in self.experiments), *self.also]
        default = () if self.profile.online else self.target.default_hidden_layers
        hidden = {*default, *(i for c in configs for i in c.hidden_needed)}
        return tuple(sorted(hidden)), tuple(sorted({i for c in configs for i in c.kv_needed}))

    def store(self, name: str) -> Features:
        """Captured features of a split, from the cache or captured now; of an online profile when asked for."""
        examples, (hidden, kv) = self.examples[name], self.layers
        if self.profile.online:
            return OnlineFeatures(self.target, examples, hidden_layers=hidden, kv_layers=kv,
                                  batch_tokens=self.profile.train.batch_tokens)
        content = f"{self.target.weights_sha256}{self.target.dtype}{examples_sha256(examples)}"
        stem = f"{self.target.name.replace('/', '--')}-{name}-{_short(content)}"
        for path in sorted((cache_dir() / "features").glob(f"{stem}-*/index.json")):
            try:
                meta = FeatureStore(path.parent).meta
            except KvshotError:  # damaged, or of another version; building that very one again says what to do
                continue
            have_hidden, have_kv = tuple(meta["hidden_layers"]), tuple(meta["kv_layers"])
            if {*hidden} <= {*have_hidden} and {*kv} <= {*have_kv}:
                return FeatureStore.open(path.parent, target=self.target, examples=examples, hidden_layers=have_hidden,
                                         kv_layers=have_kv)
        folder = cache_dir() / "features" / f"{stem}-{_short(f'{hidden}{kv}')[:6]}"
        return FeatureStore.build(folder, self.target, examples, hidden_layers=hidden, kv_layers=kv, quiet=self.quiet)

    @cached_property
    def ngram(self) -> NgramModel:
        return NgramModel.fit(self.examples[TRAIN])

    def ngram_hits(self, name: str, n_steps: int) -> StepwiseHits:
        """The n-gram row on the columns of a split."""
        store = self.store(name)
        parts = (range(start, min(start + 16, len(store))) for start in range(0, len(store), 16))
        labels = [row["argmax"].cpu().numpy() for part in parts for row in store.rows(part)]
        return ngram_hits(self.ngram, self.examples[name], labels, n_steps)

    def check_data(self, record: RunRecord, run: str | os.PathLike) -> None:
        """Raises KvshotError when a run was trained on other data than the profile has here."""
        if self.data_info() != record.data:
            raise KvshotError(f"the run in {run} was trained on other data than profile {record.profile} has: give a "
                              "run on the profile's data")

    def target_info(self) -> TargetInfo:
        return TargetInfo(name=self.target.name, weights_sha256=self.target.weights_sha256)

    def data_info(self) -> DataInfo:
        """Names, hashes and token counts for a record; `held_out` counts every reported domain."""
        def tokens(examples: list[Example]) -> int:
            return sum(int(e.loss_mask.sum()) for e in examples)

        held_out = [e for d in self.domains for e in self.examples[d]]
        everything = [e for name in self.conversations for e in self.examples[name]]
        return DataInfo(
            name=Path(self.profile.data).name if self.profile.data is not None else "toy",
            sha256=examples_sha256(everything), n_train_conversations=len(self.examples[TRAIN]),
            n_train_tokens=tokens(self.examples[TRAIN]), n_held_out_conversations=len(held_out),
            n_held_out_tokens=tokens(held_out))


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
