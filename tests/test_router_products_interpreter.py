"""The router's Triton GEMMs on the CPU, in Triton's interpreter, against exact sums and the twins."""

from pathlib import Path

from interpreter import interpreted, interpreter

CHECKS = Path(__file__).with_name("router_products_interpreter_checks.py")


@interpreter
def test_kernels_match_exact_sums():
    assert interpreted(CHECKS).endswith("all is well\n")
