"""The source of dact_quantize for Hopper on the CPU, in an emulator of Gluon, against numpy's quantisers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from limits import HANG_S

pytest.importorskip("triton")
pytest.importorskip("ml_dtypes")

CHECKS = Path(__file__).with_name("dact_quantize_emulator_checks.py")


@pytest.mark.slow
def test_the_kernel_matches_the_oracle():
    """In a process of its own: the emulator takes Gluon's place before kernels are imported."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", CHECKS]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.endswith("all is well\n")
