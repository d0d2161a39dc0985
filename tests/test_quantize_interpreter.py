"""The Triton kernels that quantise on the CPU, in Triton's interpreter, against the twins, byte for byte.

Not covered here: the hardware's casts to and from E4M3, which the interpreter has wrong (they are replaced).
test_quantize_compile.py looks at the generated code; tests/gpu runs it.
"""

import os
import subprocess
import sys
from pathlib import Path

from interpreter import interpreter

CHECKS = Path(__file__).with_name("quantize_interpreter_checks.py")


@interpreter
def test_kernels_match_twins():
    """In a process of its own: the interpreter has to be chosen before triton is imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, CHECKS], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count(": ok") == 11 + 5 + 4 + 10 + 3 + 1
