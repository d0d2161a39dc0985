"""Run by test_interpreted.py in a process with TRITON_INTERPRET=1: kernels against what they fuse. Two comparisons,
byte for byte: with the Triton kernels that are fused, of any numbers; and with the twin, of whole numbers, whose
activation is exact in both. The interpreter's casts to E4M3 are replaced, see quantize_interpreter_checks.py."""

from dataclasses import replace
from functools import partial
from itertools import product

import act_quantize_cases as cases
import quantize_interpreter_checks
import triton
import triton.language as tl
from compared_launches import differences
from launch_table import ACTIVATIONS, BF16, SWIGLU, Launch
from row_ranges import random_ranges

from symmoe.kernels import gpu
from symmoe.kernels.low_precision import act_quantized, codes
from symmoe.kernels.triton import tiles


@triton.jit
def e4m3_code(x):
    """The cast, of NaN as well."""
    return tl.where(x == x, quantize_interpreter_checks.e4m3_code(x), 0x7F).to(tl.uint8)


SPLITS = (0, 133, 1, 0)
CASES = [  # activation, FFN width, format
    ("swiglu", 128, "float8_block"),
    ("swiglu", 160, "mxfp8"),
    ("gpt-oss", 128, "float8_block_powers"),
    ("interleave by one", 80, "float8_block"),
    ("interleave", 96, "mxfp8"),
    ("srelu", 144, "float8_block"),
    ("geglu", 128, "mxfp8"),
    ("tanh gelu", 128, "float8_block"),
]
WAYS = [  # of launches whose bits are the twin's
    ("act_quantize", ""),
    ("dact_quantize", ""),
    ("dact_quantize", "dbias"),
    ("dact_quantize", "fp32-dbias"),
]


def compared(launch, **options):
    """The launch, and what checks it."""
    name = f"{launch}, {launch.activation}, {', '.join(options)}"
    return name, partial(differences, launch, **options)


def checks():
    """Names, and what checks them."""
    quantize_interpreter_checks.check_casts()
    codes.e4m3_code = quantize_interpreter_checks.e4m3_code
    act_quantized.e4m3_code = e4m3_code
    tiles.ROW_PROGRAMS = 4  # so that programs have several tiles
    apart = {"splits": SPLITS, "reference": cases.Apart(gpu)}
    for name, ffn, block_format in CASES:
        launches = cases.launches(ACTIVATIONS[name], ffn, block_format, splits=SPLITS)
        for launch in launches:
            yield compared(launch, **apart)
        for part in random_ranges(SPLITS, 3):
            yield compared(launches[0], part=part, **apart)
    for block_format, (kernel, ways) in product(("float8_block", "mxfp8"), WAYS):
        launch = Launch(kernel, {"I": 144}, BF16, block_format, ACTIVATIONS["srelu"], ways)
        yield compared(launch, splits=SPLITS)
        yield compared(replace(launch, activation=SWIGLU), splits=(0, 0))
