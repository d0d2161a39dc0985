"""The snippets of docs/training.md run, one after the other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).resolve().parent.parent / "docs" / "training.md"


def test_snippets_run(capsys: pytest.CaptureFixture[str]):
    text = PAGE.read_text(encoding="utf-8")
    snippets = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    assert len(snippets) == len(sections) + 1
    torch.manual_seed(0)
    scope: dict[str, object] = {}
    for number, snippet in enumerate(snippets):
        exec(compile(snippet, f"{PAGE.name}, snippet {number}", "exec"), scope)
    out = capsys.readouterr().out
    assert "dropped here: tensor([" in out
    assert "\n1 " in out
    assert max(map(len, text.splitlines())) <= 120
