"""The Triton GEMMs of E4M3 numbers on the CPU, in Triton's interpreter, against the twins."""

from pathlib import Path

from interpreter import interpreted, interpreter

CHECKS = Path(__file__).with_name("fp8_interpreter_checks.py")


@interpreter
def test_kernels_match_twins():
    assert interpreted(CHECKS).endswith("all is well\n")
