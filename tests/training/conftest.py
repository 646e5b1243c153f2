"""A feature store and a drafter on the smoke target, small enough to train in seconds."""

from __future__ import annotations

import pytest

from kvshot.data import DraftVocab, encode_all
from kvshot.data.toy import toy_conversations
from kvshot.drafters.config import eagle3
from kvshot.targets import FeatureStore, load_target


class Small:
    """Target, examples, vocabulary, store and configuration that the tests of training share."""

    def __init__(self, folder) -> None:
        self.target = load_target("smoke", device="cpu")
        self.examples = encode_all(self.target.tokenizer, toy_conversations(24), 96).examples
        self.vocab = DraftVocab.from_examples(self.examples, self.target.vocab_size, 48)
        self.store = FeatureStore.build(folder, self.target, self.examples, kv_layers=(), quiet=True)
        self.config = eagle3(self.target, draft_vocab_size=48)


@pytest.fixture(scope="session")
def small(tmp_path_factory) -> Small:
    return Small(tmp_path_factory.mktemp("features"))
