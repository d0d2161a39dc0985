"""The Triton GEMMs of MXFP8 and NVFP4 numbers on the CPU, in Triton's interpreter, against the twins."""

from pathlib import Path

import pytest
from interpreter import interpreted, interpreter

CHECKS = Path(__file__).with_name("scaled_interpreter_checks.py")


@pytest.mark.slow
@interpreter
def test_kernels_match_twins():
    assert interpreted(CHECKS).endswith("all is well\n")
