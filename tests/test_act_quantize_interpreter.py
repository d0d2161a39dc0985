"""The Triton activations that quantise on the CPU, in Triton's interpreter, against the kernels that they fuse.

Not covered here: the hardware's casts to E4M3, which the interpreter has wrong (they are replaced).
test_act_quantize_compile.py looks at the generated code; tests/gpu runs it.
"""

from pathlib import Path

import pytest
from interpreter import interpreted, interpreter

CHECKS = Path(__file__).with_name("act_quantize_interpreter_checks.py")


@pytest.mark.slow
@interpreter
def test_kernels_give_the_bits_of_what_they_fuse():
    assert interpreted(CHECKS).count(": ok") == 6 + 2 + 1
