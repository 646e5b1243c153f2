"""Conversations: reading, templates and loss masks, filters, splits, the draft vocabulary."""

from kvshot.data.filters import Filter, Report, looping
from kvshot.data.humaneval import human_eval_prompts
from kvshot.data.readers import Conversation, Message, ReadReport, read_conversations, write_conversations
from kvshot.data.split import Split, split
from kvshot.data.template import Encoded, Example, encode, encode_all, examples_sha256, preview, prompt_ids
from kvshot.data.vocab import DraftVocab

__all__ = [
    "Conversation", "DraftVocab", "Encoded", "Example", "Filter", "Message", "ReadReport", "Report", "Split",
    "encode", "encode_all", "examples_sha256", "human_eval_prompts", "looping", "preview", "prompt_ids",
    "read_conversations", "split", "write_conversations",
]
