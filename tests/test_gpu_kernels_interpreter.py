"""The Triton barrier, plan and token kernels on the CPU, in Triton's interpreter, against the twins, byte for byte.

Not covered here: the inline assembly of the barrier (the wait, the fence, the clock: replaced, because the interpreter
has none), ordering between GPUs, and sums of bf16 rows (the interpreter truncates where hardware rounds to nearest).
test_gpu_kernels_compile.py looks at the generated code; tests/gpu runs it.
"""

from pathlib import Path

import pytest
from interpreter import interpreted, interpreter
from simulated_ranks import CASES

CHECKS = Path(__file__).with_name("gpu_kernels_interpreter_checks.py")


@pytest.mark.slow
@interpreter
def test_kernels_match_twins():
    printed = interpreted(CHECKS)
    print(printed)
    num_barriers = printed.count("barrier, ")
    assert num_barriers >= 30
    num_signals = printed.count("signal, ")
    assert num_signals >= 6
    num_parts = printed.count("parts of ")
    assert num_parts >= 4
    num_routes = printed.count("select_experts, ")
    assert num_routes >= 4
    assert printed.count(": ok") == 2 * len(CASES) + num_barriers + num_signals + num_parts + num_routes
