"""`make lint` finds nothing. A test, so that it runs on one core while the other core tests."""

from pathlib import Path

import pytest
from programs import printed_by

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(("ruff", "check", "symmoe", "tests", "examples", "benchmarks", "docs"), id="ruff"),
        pytest.param(("mypy",), id="mypy", marks=pytest.mark.slow),
    ],
)
def test_finds_nothing(command: tuple[str, ...]) -> None:
    pytest.importorskip(command[0], reason="looks for faults in sources: pip install '.[dev]'")
    printed_by("-m", *command, cwd=ROOT)
