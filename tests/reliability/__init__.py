"""The reliability suites: `python -m tests.reliability SUITE`. See command.py for the suites and their figures."""

import sys
from pathlib import Path

_TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [
    str(_TESTS),
    str(_TESTS / "support"),
    str(_TESTS.parent / "benchmarks"),
]  # as in pytest
