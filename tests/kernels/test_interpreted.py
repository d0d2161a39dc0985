"""Kernels run without a GPU, in Triton's interpreter or in an emulator of Gluon, in processes of their own. Their
results are compared with twins, or with an oracle. Not covered here: inline assembly (wait, fence and clock of the
barrier) and the hardware's casts to and from E4M3, which the interpreter lacks or has wrong: the modules replace them;
ordering between GPUs; sums of bf16 rows (the interpreter truncates where hardware rounds to nearest). The *_compile.py
files look at the generated code; tests/gpu runs it."""

import pytest
from interpreter import interpreter, run_checks

SLOW = ("gemm", "gpu_kernels", "quantize act_quantize", "quantized_gemm", "router_products")
IN_THE_INTERPRETER = [
    *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW),
    "nodes pointers",
]
SLOW = ("columns", "dact_quantize", "fp8")
IN_THE_EMULATOR = [*(pytest.param(name, marks=pytest.mark.slow) for name in SLOW), "hopper"]


@interpreter
@pytest.mark.parametrize("names", IN_THE_INTERPRETER)
def test_kernels_in_the_interpreter(names):
    run_checks(*(f"{name}_interpreter_checks" for name in names.split()))


@pytest.mark.parametrize("name", IN_THE_EMULATOR)
def test_kernels_in_the_emulator(name):
    pytest.importorskip("triton")
    pytest.importorskip("ml_dtypes")
    run_checks(f"{name}_emulator_checks")
