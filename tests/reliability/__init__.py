"""The reliability suites: `python -m tests.reliability SUITE`. See command.py for the suites and their figures."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests/, as pytest has it
