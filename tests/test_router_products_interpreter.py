"""The router's Triton GEMMs on the CPU, in Triton's interpreter, against exact sums and the twins."""

import os
import subprocess
import sys
from pathlib import Path

from interpreter import interpreter

CHECKS = Path(__file__).with_name("router_products_interpreter_checks.py")


@interpreter
def test_kernels_match_exact_sums():
    """In a process of its own: the interpreter has to be chosen before triton is imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, CHECKS], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.endswith("all is well\n")
