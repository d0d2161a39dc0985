"""The sources of the E4M3 kernels for Hopper on the CPU, in an emulator of Gluon, against an oracle."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from limits import HANG_S

pytest.importorskip("triton")


@pytest.mark.slow
def test_kernels_match_the_oracle():
    """In a process of its own: the emulator takes Gluon's place before kernels are imported."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, Path(__file__).with_name("fp8_emulator_checks.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.endswith("all is well\n")
