"""The Triton activations that quantise on the CPU, in Triton's interpreter, against the kernels that they fuse.

Not covered here: the hardware's casts to E4M3, which the interpreter has wrong (they are replaced).
test_act_quantize_compile.py looks at the generated code; tests/gpu runs it.
"""

import os
import subprocess
import sys
from pathlib import Path

from interpreter import interpreter

CHECKS = Path(__file__).with_name("act_quantize_interpreter_checks.py")


@interpreter
def test_kernels_give_the_bits_of_what_they_fuse():
    """In a process of its own: the interpreter has to be chosen before triton is imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-W", "ignore", CHECKS],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count(": ok") == 6 + 2 + 1
