"""Runs the Triton GEMM kernels in Triton's interpreter and compares them with the twins. A script.

test_gemm_interpreter.py starts it with TRITON_INTERPRET=1, which must be set before triton is imported. Sizes are
tiny; the tiles are smaller still, so that every case has several tiles, partial ones, and partial contraction blocks.
tl.dot on bf16 is wrong in Triton 3.6's interpreter, so bf16 is left to the GPU tests.
"""

import itertools
import time
from dataclasses import replace

import torch
from interpreter import spare_the_interpreter
from row_ranges import random_ranges, rows_of, whole_groups
from triton.tools.ragged_tma import create_ragged_descriptor

from symmoe.kernels.table import TensorTable
from symmoe.kernels.triton import bias, gemm, splits, tiles
from symmoe.kernels.twin import bias as twin_bias
from symmoe.kernels.twin import gemm as twin_gemm
from symmoe.kernels.twin import splits as twin_splits

HIDDEN, FFN, NUM_PACKED, CAPACITY = 24, 40, 13, 64
SPLITS = [[19, 0, 1, 32, 0], [0, 0, 0, 0, 0], [0, 16, 0, 0, 47], [64, 0, 0, 0, 0]]
CONFIG = tiles.TileConfig(block_m=16, block_n=16, block_k=16, num_stages=2, num_warps=4, group_m=2)
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


def table_of(matrices):
    """The matrices of a packed tensor, or of a view that leaves gaps between them, as a table."""
    return TensorTable(torch.tensor([m.data_ptr() for m in matrices]), tuple(matrices.shape), matrices.dtype)


def check(name, call, twin_call, outputs, dtype):
    """Runs the kernel and its twin on copies of the same outputs and compares every element; returns the kernel's."""
    got = [out.clone() for out in outputs]
    expected = [out.clone() for out in outputs]
    call(*got)
    twin_call(*expected)
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(
            g, e, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * 4, msg=lambda text, n=name: f"{n}: {text}"
        )
    return got


def assert_same(name, tensors, others):
    for tensor, other in zip(tensors, others, strict=True):
        assert torch.equal(tensor, other), name


class Problem:
    """Inputs of all functions: tail rows are NaN."""

    def __init__(self, sizes, dtype):
        self.num_groups, self.num_rows = len(sizes), sum(sizes)
        self.row_range, self.row_index = whole_groups(sizes), index(self.num_rows)
        self.rows = random(CAPACITY, HIDDEN, dtype=dtype, nan_from=self.num_rows)
        self.packed = random(NUM_PACKED, HIDDEN, dtype=dtype)
        self.dout = random(CAPACITY, FFN, dtype=dtype, nan_from=self.num_rows)
        self.packed_dout = random(NUM_PACKED, FFN, dtype=dtype)
        self.weight = random(self.num_groups, FFN, HIDDEN, dtype=dtype)
        self.bias = random(self.num_groups, FFN, dtype=dtype)
        self.scale = random(CAPACITY, dtype=torch.float32, nan_from=self.num_rows)


def check_gemm(p, sizes, dtype, options):
    biases = ({}, {"bias": p.bias, "zero_tail": True}, {"bias": p.bias, "bias_scale": p.scale})
    for (source, idx), extra in itertools.product(((p.rows, None), (p.packed, p.row_index)), biases):
        arguments = {"row_index": idx, **extra}
        name = f"grouped_gemm {sizes} {dtype} gather={idx is not None} {list(extra)}"

        def call(out, weight=p.weight, s=source, a=arguments):
            gemm.grouped_gemm(s, weight, p.row_range, out, **a, **options)

        def twin(out, s=source, a=arguments):
            twin_gemm.grouped_gemm(s, p.weight, p.row_range, out, **a)

        packed = check(name, call, twin, [blank(CAPACITY, FFN, dtype=dtype)], dtype)
        if extra.get("zero_tail"):
            assert not packed[0][p.num_rows :].any(), name
        if idx is None or extra:  # the loads of a table are the same with and without a bias
            out = blank(CAPACITY, FFN, dtype=dtype)
            call(out, table_of(p.weight))
            assert_same(f"{name} table", [out], packed)


def check_dgrad(p, sizes, dtype, options):
    for zero_tail in (False, True):
        name = f"grouped_gemm_dgrad {sizes} {dtype} zero_tail={zero_tail}"

        def call(out, weight=p.weight, z=zero_tail):
            gemm.grouped_gemm_dgrad(p.dout, weight, p.row_range, out, zero_tail=z, **options)

        def twin(out, z=zero_tail):
            twin_gemm.grouped_gemm_dgrad(p.dout, p.weight, p.row_range, out, zero_tail=z)

        packed = check(name, call, twin, [blank(CAPACITY, HIDDEN, dtype=dtype)], dtype)
    out = blank(CAPACITY, HIDDEN, dtype=dtype)
    call(out, table_of(p.weight))
    assert_same(f"{name} table", [out], packed)


def check_sums(p, sizes, dtype, options):
    """Results that are added to what is there: contiguous and gathered rows, with and without a bias."""
    biases = {"bias": p.bias, "bias_scale": p.scale}
    cases = (
        (gemm.grouped_gemm, twin_gemm.grouped_gemm, p.rows, {}, FFN),
        (gemm.grouped_gemm, twin_gemm.grouped_gemm, p.packed, {"row_index": p.row_index, **biases}, FFN),
        (gemm.grouped_gemm_dgrad, twin_gemm.grouped_gemm_dgrad, p.dout, {}, HIDDEN),
        (gemm.grouped_gemm_dgrad, twin_gemm.grouped_gemm_dgrad, p.packed_dout, {"row_index": p.row_index}, HIDDEN),
    )
    options = {**options, "config": replace(options["config"], block_n=128)}  # added in two pieces
    for (kernel, twin, source, extra, width), accumulate in itertools.product(cases, (False, True)):
        name = f"{kernel.__name__} {sizes} {dtype} {list(extra)} accumulate={accumulate}"
        arguments = {**extra, "accumulate": accumulate}
        check(
            name,
            lambda out, k=kernel, s=source, a=arguments: k(s, p.weight, p.row_range, out, **a, **options),
            lambda out, t=twin, s=source, a=arguments: t(s, p.weight, p.row_range, out, **a),
            [random(CAPACITY, width, dtype=dtype)],
            dtype,
        )


def check_wgrad(p, sizes, dtype, options):
    sources = ((p.dout, p.rows, None, None), (p.packed_dout, p.rows, p.row_index, None),
               (p.dout, p.packed, None, p.row_index))  # fmt: skip
    modes = ((False, dtype), (True, dtype), (True, torch.float32), (False, torch.float32))
    for number, ((d, r, i, j), (accumulate, out_dtype)) in enumerate(itertools.product(sources, modes)):
        name = f"grouped_gemm_wgrad {sizes} {dtype} {i is not None} {j is not None} {accumulate} {out_dtype}"
        arguments = {"dout_index": i, "rows_index": j, "accumulate": accumulate}

        def call(out, d=d, r=r, a=arguments):
            gemm.grouped_gemm_wgrad(d, r, p.row_range, out, **a, **options)

        def twin(out, d=d, r=r, a=arguments):
            twin_gemm.grouped_gemm_wgrad(d, r, p.row_range, out, **a)

        before = random(p.num_groups, FFN, HIDDEN, dtype=out_dtype)
        if accumulate:
            before[torch.tensor(sizes) == 0] = torch.nan  # left alone
        got = [before.clone()]
        expected = before.clone()
        call(got[0])
        twin(expected)
        torch.testing.assert_close(
            got[0], expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * 4, equal_nan=True, msg=name
        )
        if number % 3 == 0:  # every mode and every source once
            out = before.clone()
            call(table_of(out))
            assert torch.equal(out.nan_to_num(7), got[0].nan_to_num(7)), f"{name} table"


def check_bias(p, sizes, dtype):
    sources = ((p.dout, None), (p.packed_dout, p.row_index))
    for (dout, i), scale, accumulate in itertools.product(sources, (None, p.scale), (False, True)):
        name = f"bias {sizes} {dtype} gather={i is not None} {scale is not None} {accumulate}"
        if not accumulate:
            check(
                f"grad of {name}",
                lambda out, d=dout, i=i, s=scale: bias.grouped_bias_grad(d, p.row_range, out, dout_index=i, scale=s),
                lambda out, d=dout, i=i, s=scale: twin_bias.grouped_bias_grad(
                    d, p.row_range, out, dout_index=i, scale=s
                ),
                [blank(p.num_groups, FFN, dtype=dtype)],
                dtype,
            )
        if scale is None:
            check(
                f"dot of {name}",
                lambda out, d=dout, i=i, a=accumulate: bias.grouped_bias_dot(
                    d, p.bias, p.row_range, out, dout_index=i, accumulate=a
                ),
                lambda out, d=dout, i=i, a=accumulate: twin_bias.grouped_bias_dot(
                    d, p.bias, p.row_range, out, dout_index=i, accumulate=a
                ),
                [blank(CAPACITY, dtype=torch.float32)],
                dtype,
            )


def only(tensor, rows):
    """NaN in all rows but these."""
    return torch.where(rows[:, None], tensor, torch.nan)


def whole_numbers(*shape, dtype, nan_from=None):
    """Their sums are exact: NumPy's order of them, which depends on a row's place in a tile, does not matter."""
    tensor = torch.randint(-4, 5, shape).to(dtype)
    if nan_from is not None:
        tensor[nan_from:] = torch.nan
    return tensor


def check_ranges(p, sizes, dtype, options):
    """The kernels write the rows of a range and no others; all ranges together give the bits of one call."""
    biases = {"bias": p.bias, "bias_scale": p.scale}
    packed, weight = (whole_numbers(*like.shape, dtype=dtype) for like in (p.packed, p.weight))
    every_row, dout = (whole_numbers(CAPACITY, n, dtype=dtype, nan_from=p.num_rows) for n in (HIDDEN, FFN))

    def gathered(row_range, out, rows):
        gemm.grouped_gemm(packed, weight, row_range, out, row_index=p.row_index, **options)

    def contiguous(row_range, out, rows):
        gemm.grouped_gemm(only(every_row, rows), weight, row_range, out, **biases, **options)

    def dgrad(row_range, out, rows):
        gemm.grouped_gemm_dgrad(only(dout, rows), table_of(weight), row_range, out, **options)

    all_rows = torch.arange(CAPACITY) < p.num_rows
    for call, width in ((gathered, FFN), (contiguous, FFN), (dgrad, HIDDEN)):
        whole, union = (blank(CAPACITY, width, dtype=dtype) for _ in range(2))
        call(p.row_range, whole, all_rows)
        for ranges in random_ranges(sizes, 3):
            rows, out = rows_of(ranges, CAPACITY), blank(CAPACITY, width, dtype=dtype)
            call(ranges, out, rows)
            name = f"{call.__name__} of ranges {ranges.tolist()} of {sizes} {dtype}"
            assert torch.equal(out, torch.where(rows[:, None], whole, blank(1, width, dtype=dtype))), name
            call(ranges, union, rows)
        assert torch.equal(union, whole), f"{call.__name__} of all ranges of {sizes} {dtype}"


def check_panels():
    """The kernels write the columns of a panel and no others; with the bits of the whole."""
    width, sizes, in_width = 600, [5, 0, 11], 8
    row_range, num_rows = whole_groups(sizes), sum(sizes)
    for dtype in (torch.float32, torch.float16):
        config = replace(CONFIG, block_n=128, flatten=dtype == torch.float16)
        rows, row_index = whole_numbers(20, in_width, dtype=dtype, nan_from=num_rows), index(num_rows)
        packed = whole_numbers(NUM_PACKED, in_width, dtype=dtype)
        weight, bias = whole_numbers(3, width, in_width, dtype=dtype), random(3, width, dtype=dtype)
        weight_t, table = weight.transpose(1, 2).contiguous(), table_of(weight)

        def plain(row_range, out, rows=rows, weight=weight, **options):
            gemm.grouped_gemm(rows, weight, row_range, out, **options)

        def biased(row_range, out, packed=packed, i=row_index, table=table, bias=bias, **options):
            gemm.grouped_gemm(packed, table, row_range, out, row_index=i, bias=bias, **options)

        def dgrad(row_range, out, rows=rows, weight=weight_t, **options):
            gemm.grouped_gemm_dgrad(rows, weight, row_range, out, **options)

        def added(row_range, out, rows=rows, weight=weight, **options):
            gemm.grouped_gemm(rows, weight, row_range, out, accumulate=True, **options)

        ranges = torch.tensor([[1, 9, 5], [5, 5, 14]], dtype=torch.int32)
        for call, zero_tail in ((plain, True), (biased, False), (dgrad, True), (added, False)):
            options = {"num_sms": NUM_SMS, "config": config}
            whole, in_ranges = (blank(20, width, dtype=dtype) for _ in range(2))
            call(row_range, whole, zero_tail=zero_tail, **options)
            call(ranges, in_ranges, **options)
            for columns in ((0, 256), (256, 512), (512, width), (256, width)):
                inside = slice(*columns)
                for where, expected, extra in (
                    (row_range, whole, {"zero_tail": zero_tail}), (ranges, in_ranges, {})
                ):  # fmt: skip
                    out, right = (blank(20, width, dtype=dtype) for _ in range(2))
                    right[:, inside] = expected[:, inside]
                    call(where, out, columns=columns, **extra, **options)
                    assert torch.equal(out, right), f"{call.__name__} of columns {columns} {dtype} {extra}"


def check_many_groups():
    """More groups than rows, and more than a power of two."""
    sizes = [1, 0, 0, 2] * 17
    p = Problem(sizes, torch.float32)
    options = {"num_sms": NUM_SMS, "config": replace(CONFIG, block_n=64, block_k=32)}
    check(
        "grouped_gemm with 68 groups",
        lambda out: gemm.grouped_gemm(p.rows, p.weight, p.row_range, out, zero_tail=True, **options),
        lambda out: twin_gemm.grouped_gemm(p.rows, p.weight, p.row_range, out, zero_tail=True),
        [blank(CAPACITY, FFN, dtype=torch.float32)],
        torch.float32,
    )
    check_bias(p, "68 groups", torch.float32)


def check_no_rows():
    """Nothing to launch, but zeros for a gradient that is not added to something."""
    row_range, dout, rows = whole_groups([0, 0]), torch.empty(0, FFN), torch.empty(0, HIDDEN)
    for accumulate in (False, True):
        out = torch.ones(2, 60, HIDDEN)
        for target in (out[:, :FFN].clone(), table_of(out[:, :FFN])):
            gemm.grouped_gemm_wgrad(dout, rows, row_range, target, accumulate=accumulate)
            written = target if isinstance(target, torch.Tensor) else out[:, :FFN]
            assert torch.equal(written, torch.full_like(written, float(accumulate))), accumulate
        assert (out[:, FFN:] == 1).all()
    gemm.grouped_gemm(rows, torch.ones(2, FFN, HIDDEN), row_range, dout, zero_tail=True)
    bias.grouped_bias_dot(dout, torch.ones(2, FFN), row_range, torch.empty(0))
    dbias = torch.ones(2, FFN)
    bias.grouped_bias_grad(dout, row_range, dbias)
    assert not dbias.any()


def check_splits():
    cases = [([3, 0, 4], 10), ([3, 0, 4], 5), ([-3, 2, -(2**31), 4], 10), ([2**31 - 1] * 5, 9), ([6], 8),
             ([1, 2**31 - 1, 1], 2**31 - 1), ([1] * 70, 64), ([3], 0)]  # fmt: skip
    cases = [(torch.tensor(sizes, dtype=dtype), n) for sizes, n in cases for dtype in (torch.int32, torch.int64)]
    cases.append((torch.tensor([-(2**63), 5, 2**63 - 1, 2**63 - 1]), 100))
    for sizes, num_rows in cases:
        got, expected = torch.full((2, 2, sizes.shape[0]), -1, dtype=torch.int32)
        splits.splits_to_row_range(sizes, got, num_rows)
        twin_splits.splits_to_row_range(sizes, expected, num_rows)
        assert torch.equal(got, expected), (sizes, num_rows, got)


def check_ragged_descriptor():
    """The descriptor that is made by hand is Triton's."""
    for shape, block in (((7, 24), [16, 8]), ((300, 2048), [64, 128])):
        rows = torch.empty(shape)
        ours, theirs = tiles.ragged_descriptor(rows, block), create_ragged_descriptor(rows, block)
        for name in ("shape", "strides", "block_shape", "padding"):
            assert list(getattr(ours, name)) == list(getattr(theirs, name)), name


def timed(name, check_it, *args):
    started = time.perf_counter()
    check_it(*args)
    print(f"{name}: ok, {time.perf_counter() - started:.1f} s", flush=True)


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for i, sizes in enumerate(SPLITS):
        dtype = (torch.float32, torch.float16)[i % 2]
        options = {"num_sms": NUM_SMS, "config": replace(CONFIG, flatten=i % 2 == 0)}
        p = Problem(sizes, dtype)
        for check_it in (check_gemm, check_dgrad, check_sums, check_wgrad, check_ranges):
            timed(f"{check_it.__name__} {sizes} {dtype}", check_it, p, sizes, dtype, options)
        timed(f"check_bias {sizes} {dtype}", check_bias, p, sizes, dtype)
    sizes, options = [37], {"num_sms": NUM_SMS, "config": CONFIG}
    timed("check_ranges of one group", check_ranges, Problem(sizes, torch.float16), sizes, torch.float16, options)
    for check_it in (check_panels, check_many_groups, check_no_rows, check_splits, check_ragged_descriptor):
        timed(check_it.__name__, check_it)
    print("all is well")


if __name__ == "__main__":
    spare_the_interpreter()
    main()
