"""The Triton kernels that quantise on the CPU, in Triton's interpreter, against the twins, byte for byte.

Not covered here: the hardware's casts to and from E4M3, which the interpreter has wrong (they are replaced).
test_quantize_compile.py looks at the generated code; tests/gpu runs it.
"""

from pathlib import Path

import pytest
from interpreter import interpreted, interpreter

CHECKS = Path(__file__).with_name("quantize_interpreter_checks.py")


@pytest.mark.slow
@interpreter
def test_kernels_match_twins():
    assert interpreted(CHECKS).count(": ok") == 9 + 4 + 3 + 8 + 3 + 1
