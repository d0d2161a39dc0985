"""Runs the Triton GEMM kernels in Triton's interpreter and compares them with the twins. A script.

test_gemm_interpreter.py starts it with TRITON_INTERPRET=1, which must be set before triton is imported. Sizes are
tiny; the tiles are smaller still, so that every case has several tiles, partial ones, and partial contraction blocks.
tl.dot on bf16 is wrong in Triton 3.6's interpreter, so bf16 is left to the GPU tests.
"""

import itertools
import time
from dataclasses import replace

import torch

from symmoe.kernels.gpu import gemm, gemm_swiglu
from symmoe.kernels.twin import gemm as twin_gemm
from symmoe.kernels.twin import gemm_swiglu as twin_gemm_swiglu

HIDDEN, FFN, NUM_PACKED, CAPACITY = 24, 40, 13, 64
SPLITS = [[19, 0, 1, 32, 0], [0, 0, 0, 0, 0], [0, 16, 0, 0, 47], [64, 0, 0, 0, 0]]
CONFIG = gemm.TileConfig(block_m=16, block_n=16, block_k=16, num_stages=2, num_warps=4, group_m=2)
NUM_SMS = 3
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}


def random(*shape, dtype, nan_from=None):
    """Normal numbers; rows from nan_from on are NaN."""
    tensor = torch.randn(*shape).to(dtype)
    if nan_from is not None:
        tensor[nan_from:] = torch.nan
    return tensor


def blank(*shape, dtype):
    """An output that shows what was not written, and where something was written that should not be."""
    return torch.full(shape, -77.0, dtype=dtype)


def index(num_rows):
    """Packed rows of num_rows rows; the tail's entries are out of range on purpose."""
    entries = torch.randint(0, NUM_PACKED, (CAPACITY,), dtype=torch.int32)
    entries[num_rows:] = -(2**30)
    return entries


def check(name, call, twin_call, outputs, dtype):
    """Runs the kernel and its twin on copies of the same blank outputs and compares every element of both."""
    got = [out.clone() for out in outputs]
    expected = [out.clone() for out in outputs]
    call(*got)
    twin_call(*expected)
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(
            g, e, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * 4, msg=lambda text, n=name: f"{n}: {text}"
        )


def check_gemms(splits, dtype, flatten):
    num_groups, num_rows = len(splits), sum(splits)
    row_start = torch.tensor([0, *itertools.accumulate(splits)], dtype=torch.int32)
    row_index = index(num_rows)
    rows = random(CAPACITY, HIDDEN, dtype=dtype, nan_from=num_rows)
    packed = random(NUM_PACKED, HIDDEN, dtype=dtype)
    dout = random(CAPACITY, FFN, dtype=dtype, nan_from=num_rows)
    packed_dout = random(NUM_PACKED, FFN, dtype=dtype)
    weight = random(num_groups, FFN, HIDDEN, dtype=dtype)
    config = replace(CONFIG, flatten=flatten)
    options = {"num_sms": NUM_SMS, "config": config}

    for source, idx in ((rows, None), (packed, row_index)):
        check(
            f"grouped_gemm {splits} {dtype} gather={idx is not None}",
            lambda out, s=source, i=idx: gemm.grouped_gemm(s, weight, row_start, out, row_index=i, **options),
            lambda out, s=source, i=idx: twin_gemm.grouped_gemm(s, weight, row_start, out, row_index=i),
            [blank(CAPACITY, FFN, dtype=dtype)],
            dtype,
        )
    check(
        f"grouped_gemm_dgrad {splits} {dtype}",
        lambda out: gemm.grouped_gemm_dgrad(dout, weight, row_start, out, **options),
        lambda out: twin_gemm.grouped_gemm_dgrad(dout, weight, row_start, out),
        [blank(CAPACITY, HIDDEN, dtype=dtype)],
        dtype,
    )
    sources = (
        (dout, rows, None, None),
        (packed_dout, rows, row_index, None),
        (dout, packed, None, row_index),
    )
    for d, r, i, j in sources:
        check(
            f"grouped_gemm_wgrad {splits} {dtype} {i is not None} {j is not None}",
            lambda out, d=d, r=r, i=i, j=j: gemm.grouped_gemm_wgrad(
                d, r, row_start, out, dout_index=i, rows_index=j, num_sms=NUM_SMS, config=config
            ),
            lambda out, d=d, r=r, i=i, j=j: twin_gemm.grouped_gemm_wgrad(
                d, r, row_start, out, dout_index=i, rows_index=j
            ),
            [blank(num_groups, FFN, HIDDEN, dtype=dtype)],
            dtype,
        )


def check_swiglu(splits, dtype, flatten, parts):
    num_groups, num_rows = len(splits), sum(splits)
    row_start = torch.tensor([0, *itertools.accumulate(splits)], dtype=torch.int32)
    row_index = index(num_rows)
    rows = random(CAPACITY, HIDDEN, dtype=dtype, nan_from=num_rows)
    packed = random(NUM_PACKED, HIDDEN, dtype=dtype)
    weight1 = random(num_groups, 2 * FFN, HIDDEN, dtype=dtype) / HIDDEN**0.5
    weight2 = random(num_groups, HIDDEN, FFN, dtype=dtype)
    probs = random(CAPACITY, dtype=torch.float32, nan_from=num_rows)
    h = random(CAPACITY, 2 * FFN, dtype=dtype, nan_from=num_rows)
    config = replace(CONFIG, flatten=flatten, parts=parts)
    options = {"num_sms": NUM_SMS, "config": config}
    partials = blank(-(-FFN // config.block_n), CAPACITY, dtype=torch.float32)  # tiles are narrower than real ones

    for source, idx in ((rows, None), (packed, row_index)):
        forward = (source, weight1, row_start, probs)
        check(
            f"grouped_gemm_swiglu {splits} {dtype} gather={idx is not None}",
            lambda h, a, f=forward, i=idx: gemm_swiglu.grouped_gemm_swiglu(*f, h, a, row_index=i, **options),
            lambda h, a, f=forward, i=idx: twin_gemm_swiglu.grouped_gemm_swiglu(*f, h, a, row_index=i),
            [blank(CAPACITY, 2 * FFN, dtype=dtype), blank(CAPACITY, FFN, dtype=dtype)],
            dtype,
        )
        backward = (source, weight2, row_start, h, probs)
        check(
            f"grouped_gemm_dswiglu {splits} {dtype} gather={idx is not None}",
            lambda *outs, b=backward, i=idx: gemm_swiglu.grouped_gemm_dswiglu(
                *b, *outs, partials, row_index=i, **options
            ),
            lambda *outs, b=backward, i=idx: twin_gemm_swiglu.grouped_gemm_dswiglu(*b, *outs, partials, row_index=i),
            [
                blank(CAPACITY, 2 * FFN, dtype=dtype),
                blank(CAPACITY, FFN, dtype=dtype),
                blank(CAPACITY, dtype=torch.float32),
            ],
            dtype,
        )


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for i, splits in enumerate(SPLITS):
        dtype = (torch.float32, torch.float16)[i % 2]
        started = time.perf_counter()
        check_gemms(splits, dtype, flatten=i % 2 == 0)
        check_swiglu(splits, dtype, flatten=i % 2 == 1, parts=(1, 2, 4)[i % 3])
        print(f"{splits} {dtype}: ok, {time.perf_counter() - started:.1f} s", flush=True)


if __name__ == "__main__":
    main()
