"""Runs the activation kernels, separate and fused, in Triton's interpreter, against float64. A script.

test_interpreted.py starts it; see gemm_interpreter_checks.py. Sizes are tiny and tiles are smaller still.
"""

import time
from dataclasses import replace

import torch
from gemm_problem import ActProblem, Scattered, check_act, check_act_ranges, check_activation, triton_kernels
from interpreter import spare_the_interpreter
from row_ranges import random_ranges

from symmoe.kernels.activation import Activation
from symmoe.kernels.triton.tiles import TileConfig

WIDTHS, CAPACITY = (24, 72), 64
TILES = {"block_m": 16, "block_n": 64, "block_k": 16, "num_stages": 2, "num_warps": 4, "group_m": 2}
NUM_SMS = 3
# splits, dtype, activation, (flatten, parts, lead), whether weights are tables
CASES = [
    ((19, 0, 1, 32, 0), torch.float32, Activation(), (False, 1, 0), False),
    ((0, 16, 0, 0, 47), torch.float16, Activation(alpha=1.702, limit=1.0, offset=1.0), (True, 2, 1), False),
    ((64, 0, 0), torch.float16, Activation(interleave=8), (False, 2, 2), True),
    ((5, 30, 4), torch.float32, Activation(interleave=1, limit=1.0), (True, 2, 1), True),
    ((0, 0), torch.float32, Activation(interleave=4), (False, 2, 2), False),
    ((33, 1, 9), torch.float16, Activation(function="relu2", is_gated=False), (False, 2, 1), False),
    ((33, 1, 9), torch.float32, Activation(function="relu2", is_gated=False), (True, 1, 0), True),
    ((20, 17), torch.float16, Activation(interleave=2), (False, 1, 0), False),
    ((20, 17), torch.float32, Activation(function="gelu"), (False, 1, 0), False),
    ((20, 17), torch.float16, Activation(function="gelu", is_gated=False), (True, 2, 1), False),
    ((20, 17), torch.float32, Activation(function="gelu_tanh", limit=1.0, offset=1.0), (True, 1, 0), False),
    ((20, 17), torch.float16, Activation(is_gated=False, alpha=1.702), (False, 2, 1), False),
]

kernels = triton_kernels()


def options_of(flatten, parts, lead):
    """(of the forward kernel, of the backward kernel)."""
    act_config = replace(TileConfig(**TILES), flatten=flatten, parts=parts)
    dact_config = replace(kernels.DactConfig(**TILES), flatten=flatten, parts=parts, lead=lead)
    return {"num_sms": NUM_SMS, "config": act_config}, {"num_sms": NUM_SMS, "config": dact_config}


def check(splits, dtype, activation, config, is_table):
    p = ActProblem(splits, WIDTHS, dtype, activation, capacity=CAPACITY)
    check_act(kernels, p, *options_of(*config), table=is_table)
    check_activation(kernels, ActProblem((50,), WIDTHS, dtype, activation, capacity=50), dscale_dtype=dtype)


def check_ranges(splits, dtype, activation, config, is_table):
    """Of whole numbers: NumPy's order of sums depends on a row's place in a tile."""
    p = ActProblem(splits, WIDTHS, dtype, activation, capacity=CAPACITY, is_exact=True)
    act_options, dact_options = options_of(*config)
    if is_table:
        scattered = [Scattered(weight) for weight in (p.weight1, p.weight2)]
        p.weight1, p.weight2 = (each.table for each in scattered)
    options = {"act_options": act_options, "dact_options": dact_options, "gather": is_table}
    check_act_ranges(kernels, p, random_ranges(splits, 3), **options)


def check_no_rows():
    """Nothing is launched; a gradient of no rows is zero."""
    p = ActProblem((0, 0), WIDTHS, torch.float32, Activation(), capacity=0)
    check_act(kernels, p)
    check_activation(kernels, p)


def main():
    torch.set_num_threads(1)
    for check_it, cases in ((check, CASES), (check_ranges, (CASES[0], CASES[2], CASES[5]))):
        for case in cases:
            started = time.perf_counter()
            check_it(*case)
            print(f"{check_it.__name__} {case[:3]}: {time.perf_counter() - started:.1f} s", flush=True)
    check_no_rows()
    print("all is well")


if __name__ == "__main__":
    spare_the_interpreter()
    main()
