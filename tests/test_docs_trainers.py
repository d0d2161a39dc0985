"""docs/trainers.md: behind every number in the table is a test."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from limits import HANG_S

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "trainers.md").read_text(encoding="utf-8")
FEATURES = ["train", "clip", "accumulate", "bf16", "evaluate", "save", "resume", "LoRA"]


def rows(head: str) -> list[list[str]]:
    """The cells of the table that begins with this line."""
    lines = PAGE.partition(f"\n{head}\n")[2].splitlines()[1:]
    table = lines[: next(i for i, line in enumerate([*lines, ""]) if not line.startswith("|"))]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def named_tests() -> dict[str, str]:
    """Path and name of each test, by its number."""
    return {number: test.strip("`") for number, test in rows("| | in `tests/integrations` |")}


def test_every_number_of_the_table_has_a_test_of_its_own():
    named, table = named_tests(), rows("| trainer | " + " | ".join(FEATURES) + " |")
    assert len(table) == 6
    assert all(len(cells) == 1 + len(FEATURES) for cells in table)
    assert {number for cells in table for number in cells[1:]} - {"not run"} == named.keys()
    assert len(set(named.values())) == len(named)
    for test in named.values():
        file, name = re.fullmatch(r"(\w+\.py)::(\w+)(?:\[.*\])?", test).groups()
        assert f"def {name}(" in (ROOT / "tests" / "integrations" / file).read_text(encoding="utf-8")


@pytest.mark.slow
def test_pytest_finds_the_tests_of_the_table():
    """With their cases."""
    if find_spec("transformers") is None or find_spec("peft") is None:
        pytest.skip("needs transformers and peft, which are not installed")
    files = sorted({test.partition("::")[0] for test in named_tests().values()})
    command = ["-m", "pytest", "--collect-only", "-q", "-m", "slow or not slow", "-p", "no:cacheprovider", *files]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT / "tests" / "integrations",
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    there = {line.removeprefix("tests/integrations/") for line in done.stdout.splitlines()}
    assert set(named_tests().values()) <= there, done.stdout[-3000:] + done.stderr
