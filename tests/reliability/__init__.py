"""The reliability suites: `python -m tests.reliability SUITE`. See command.py for the suites and their figures."""

import sys
from pathlib import Path

sys.path[:0] = [str(each) for each in Path(__file__).resolve().parents[1].iterdir() if each.is_dir()]  # as in pytest
