"""The sources of the quantisers of columns for Hopper on the CPU, in an emulator of Gluon, against the twins."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from limits import HANG_S

pytest.importorskip("triton")
pytest.importorskip("ml_dtypes")


def test_kernels_match_the_twins():
    """In a process of its own: the emulator takes Gluon's place before kernels are imported."""
    checks = Path(__file__).with_name("columns_emulator_checks.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, checks], env=environment, capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.endswith("all is well\n")
