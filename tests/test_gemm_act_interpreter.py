"""The activation kernels, alone and fused with GEMMs, on the CPU in Triton's interpreter, against the twins."""

from pathlib import Path

from interpreter import interpreted, interpreter

CHECKS = Path(__file__).with_name("gemm_act_interpreter_checks.py")
NUM_CHECKS = 12


@interpreter
def test_kernels_match_twins():
    assert interpreted(CHECKS).count(": ok") == NUM_CHECKS
