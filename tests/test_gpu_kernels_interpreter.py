"""The Triton barrier, plan and token kernels on the CPU, in Triton's interpreter, against the twins, byte for byte.

Not covered here: the inline assembly of the barrier (the wait, the fence, the clock: replaced, because the interpreter
has none), ordering between GPUs, and sums of bf16 rows (the interpreter truncates where hardware rounds to nearest).
test_gpu_kernels_compile.py looks at the generated code; tests/gpu runs it.
"""

import os
import subprocess
import sys
from pathlib import Path

from interpreter import interpreter
from simulated_ranks import CASES

CHECKS = Path(__file__).with_name("gpu_kernels_interpreter_checks.py")


@interpreter
def test_kernels_match_twins():
    """In a process of its own: the interpreter has to be chosen before triton is imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, CHECKS], env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    print(result.stdout)
    assert result.returncode == 0, result.stdout + result.stderr
    num_barriers = result.stdout.count("barrier, ")
    assert num_barriers >= 30
    num_signals = result.stdout.count("signal, ")
    assert num_signals >= 6
    num_parts = result.stdout.count("parts of ")
    assert num_parts >= 4
    num_routes = result.stdout.count("select_experts, ")
    assert num_routes >= 4
    assert result.stdout.count(": ok") == 2 * len(CASES) + num_barriers + num_signals + num_parts + num_routes
