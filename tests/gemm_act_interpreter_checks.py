"""Runs the activation kernels, alone and fused, in Triton's interpreter and compares them with the twins. A script.

test_gemm_act_interpreter.py starts it; see gemm_interpreter_checks.py. Sizes are tiny and tiles are smaller still.
"""

import ctypes
import time
from dataclasses import replace

import torch
from interpreter import spare_the_interpreter
from row_ranges import random_ranges, rows_of, whole_groups

from symmoe.kernels.activation import Activation
from symmoe.kernels.table import TensorTable
from symmoe.kernels.triton import activation as gpu_activation
from symmoe.kernels.triton import gemm_act
from symmoe.kernels.triton.tiles import TileConfig
from symmoe.kernels.twin import activation as twin_activation
from symmoe.kernels.twin import gemm_act as twin_gemm_act

HIDDEN, FFN, NUM_PACKED, CAPACITY = 24, 72, 13, 64
TILES = {"block_m": 16, "block_n": 64, "block_k": 16, "num_stages": 2, "num_warps": 4, "group_m": 2}
ACT_CONFIG, DACT_CONFIG = TileConfig(**TILES), gemm_act.DactConfig(**TILES)
NUM_SMS = 3
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}
SENTINEL = -77.0
# splits, dtype, activation, (flatten, parts, lead), whether weights are tables
CASES = [
    ([19, 0, 1, 32, 0], torch.float32, Activation(), (False, 1, 0), False),
    ([0, 16, 0, 0, 47], torch.float16, Activation(alpha=1.702, limit=1.0, offset=1.0), (True, 2, 1), False),
    ([64, 0, 0], torch.float16, Activation(interleave=8), (False, 2, 2), True),
    ([5, 30, 4], torch.float32, Activation(interleave=1, limit=1.0), (True, 2, 1), True),
    ([0, 0], torch.float32, Activation(interleave=4), (False, 2, 2), False),
    ([33, 1, 9], torch.float16, Activation(kind="srelu"), (False, 2, 1), False),
    ([33, 1, 9], torch.float32, Activation(kind="srelu"), (True, 1, 0), True),
    ([20, 17], torch.float16, Activation(interleave=2), (False, 1, 0), False),
]


def random(*shape, dtype, nan_from=None, scale=1.0):
    """Normal numbers; rows from nan_from on are NaN."""
    tensor = (torch.randn(*shape) * scale).to(dtype)
    if nan_from is not None:
        tensor[nan_from:] = torch.nan
    return tensor


def blank(*shape, dtype):
    """An output that shows what was not written, and where something was written that should not be."""
    return torch.full(shape, SENTINEL, dtype=dtype)


def table(weight):
    """The same matrices, each somewhere else, known by their addresses; and what keeps them alive."""
    nbytes = weight[0].numel() * weight.dtype.itemsize
    memory = [torch.empty(nbytes + 16, dtype=torch.uint8) for _ in weight]
    pointers = [-(-m.data_ptr() // 16) * 16 for m in memory]
    for pointer, matrix in zip(pointers, weight, strict=True):
        ctypes.memmove(pointer, matrix.contiguous().data_ptr(), nbytes)
    return TensorTable(torch.tensor(pointers), tuple(weight.shape), weight.dtype), memory


def check(name, call, twin_call, outputs, dtype):
    """Runs the kernel and its twin on copies of the same blank outputs and compares every element of both."""
    got = [out.clone() for out in outputs]
    expected = [out.clone() for out in outputs]
    call(*got)
    twin_call(*expected)
    for i, (g, e) in enumerate(zip(got, expected, strict=True)):
        torch.testing.assert_close(
            g,
            e,
            rtol=TOLERANCE[dtype],
            atol=TOLERANCE[dtype] * 4,
            msg=lambda text, n=name, i=i: f"{n}, output {i}: {text}",
        )
    return got


def run(splits, dtype, activation, config, is_table):
    num_groups, num_rows, width = len(splits), sum(splits), activation.hidden_width(FFN)
    row_range = whole_groups(splits)
    row_index = torch.randint(0, NUM_PACKED, (CAPACITY,), dtype=torch.int32)
    row_index[num_rows:] = -(2**30)
    rows = random(CAPACITY, HIDDEN, dtype=dtype, nan_from=num_rows)
    packed = random(NUM_PACKED, HIDDEN, dtype=dtype)
    weight1 = random(num_groups, width, HIDDEN, dtype=dtype, scale=HIDDEN**-0.5)
    weight2 = random(num_groups, HIDDEN, FFN, dtype=dtype, scale=HIDDEN**-0.5)
    bias = random(num_groups, width, dtype=dtype)
    scale = random(CAPACITY, dtype=torch.float32, nan_from=num_rows)
    h = random(CAPACITY, width, dtype=dtype, nan_from=num_rows)
    (w1, _keep1), (w2, _keep2) = (table(w) if is_table else (w, None) for w in (weight1, weight2))
    flatten, parts, lead = config
    act_config = replace(ACT_CONFIG, flatten=flatten, parts=parts)
    dact_config = replace(DACT_CONFIG, flatten=flatten, parts=parts, lead=lead)
    num_tiles = -(-FFN // dact_config.block_n)
    bias_numel = gemm_act.bias_slots(CAPACITY, num_groups, dact_config.block_m) * width

    for source, index, with_bias in ((rows, None, True), (packed, row_index, False)):
        about = f"{splits} {dtype} {activation} gather={index is not None}"
        b = bias if with_bias else None
        check(
            f"grouped_gemm_act {about}",
            lambda h, a, s=source, i=index, b=b: gemm_act.grouped_gemm_act(
                s, w1, row_range, scale, h, a, activation, row_index=i, bias=b, num_sms=NUM_SMS, config=act_config
            ),
            lambda h, a, s=source, i=index, b=b: twin_gemm_act.grouped_gemm_act(
                s, weight1, row_range, scale, h, a, activation, row_index=i, bias=b
            ),
            [blank(CAPACITY, width, dtype=dtype), blank(CAPACITY, FFN, dtype=dtype)],
            dtype,
        )
        workspace = torch.full((num_tiles * CAPACITY + bias_numel * with_bias,), torch.nan)

        def dact(dh, a, dscale, dbias, s=source, i=index, ws=workspace, with_bias=with_bias):
            gemm_act.grouped_gemm_dact(
                s,
                w2,
                row_range,
                h,
                scale,
                dh,
                a,
                dscale,
                ws,
                activation,
                row_index=i,
                dbias=dbias if with_bias else None,
                num_sms=NUM_SMS,
                config=dact_config,
            )

        def twin_dact(dh, a, dscale, dbias, s=source, i=index, with_bias=with_bias):
            twin_gemm_act.grouped_gemm_dact(
                s,
                weight2,
                row_range,
                h,
                scale,
                dh,
                a,
                dscale,
                torch.empty(CAPACITY),
                activation,
                row_index=i,
                dbias=dbias if with_bias else None,
            )

        _, _, dscale, _ = check(
            f"grouped_gemm_dact {about}",
            dact,
            twin_dact,
            [
                blank(CAPACITY, width, dtype=dtype),
                blank(CAPACITY, FFN, dtype=dtype),
                blank(CAPACITY, dtype=torch.float32),
                blank(num_groups, width, dtype=torch.float32),
            ],
            dtype,
        )
        assert not dscale[num_rows:].any()

    h, scale, dout = (random(CAPACITY, n, dtype=dtype) for n in (width, 1, FFN))
    scale = scale[:, 0].float()
    check(
        f"scaled_activation {dtype} {activation}",
        lambda out: gpu_activation.scaled_activation(h, scale, out, activation),
        lambda out: twin_activation.scaled_activation(h, scale, out, activation),
        [blank(CAPACITY, FFN, dtype=dtype)],
        dtype,
    )
    check(
        f"scaled_activation_grad {dtype} {activation}",
        lambda *outs: gpu_activation.scaled_activation_grad(dout, h, scale, *outs, activation),
        lambda *outs: twin_activation.scaled_activation_grad(dout, h, scale, *outs, activation),
        [blank(CAPACITY, width, dtype=dtype), blank(CAPACITY, dtype=torch.float32)],
        dtype,
    )


def check_ranges(splits, dtype, activation, config, is_table):
    """A range's rows are written, no others; all ranges, in one workspace, give the bits of one call.

    Operands are whole numbers, so that products are exact: NumPy's order of sums depends on a row's place in a tile.
    """
    num_groups, num_rows, width = len(splits), sum(splits), activation.hidden_width(FFN)

    def whole_numbers(*shape):
        return torch.randint(-2, 3, shape).to(dtype)

    row_range = whole_groups(splits)
    rows, dout, h = (whole_numbers(CAPACITY, n) for n in (HIDDEN, HIDDEN, width))
    weight1, weight2 = whole_numbers(num_groups, width, HIDDEN), whole_numbers(num_groups, HIDDEN, FFN)
    (w1, _keep1), (w2, _keep2) = (table(w) if is_table else (w, None) for w in (weight1, weight2))
    index, scale = torch.randperm(CAPACITY, dtype=torch.int32), torch.rand(CAPACITY)
    flatten, parts, lead = config
    act_options = {"num_sms": NUM_SMS, "config": replace(ACT_CONFIG, flatten=flatten, parts=parts)}
    dact_options = {"num_sms": NUM_SMS, "config": replace(DACT_CONFIG, flatten=flatten, parts=parts, lead=lead)}
    num_tiles = -(-FFN // DACT_CONFIG.block_n)

    def blanks():
        outputs = [blank(CAPACITY, n, dtype=dtype) for n in (width, FFN, width, FFN)]
        return *outputs, torch.full((num_tiles * CAPACITY,), torch.nan)

    def run_all(row_range, outputs, dscale, inside):
        """Both kernels; what they must not read is NaN."""
        h_out, a, dh, a_again, workspace = outputs
        kept = torch.where(inside[:, None], h, torch.nan)
        gemm_act.grouped_gemm_act(
            torch.where(inside[:, None], rows, torch.nan), w1, row_range, scale, h_out, a, activation, **act_options
        )
        options = {"row_index": index, **dact_options}
        return gemm_act.grouped_gemm_dact(
            dout, w2, row_range, kept, scale, dh, a_again, dscale, workspace, activation, **options
        )

    whole, dscale = blanks(), torch.full((2, CAPACITY), SENTINEL)
    assert run_all(row_range, whole, dscale[0], torch.arange(CAPACITY) < num_rows) == num_tiles
    union = blanks()
    for ranges in random_ranges(splits, 3):
        inside = rows_of(ranges, CAPACITY)
        outputs = blanks()
        assert run_all(ranges, outputs, None, inside) == num_tiles
        for out, expected in zip(outputs[:4], whole[:4], strict=True):
            assert torch.equal(out[inside], expected[inside]), ranges
            assert (out[~inside] == SENTINEL).all(), ranges
        run_all(ranges, union, None, inside)
    for out, expected in zip(union[:4], whole[:4], strict=True):
        assert torch.equal(out, expected), splits
    gemm_act.sum_dact_partials(union[4], row_range, dscale[1], num_tiles)
    assert torch.equal(dscale[1], dscale[0])


def check_no_rows():
    """Nothing is launched; a gradient of no rows is zero."""
    activation, row_range = Activation(), whole_groups((0, 0))
    empty = {n: torch.empty(0, n) for n in (HIDDEN, FFN, 2 * FFN)}
    scale, dbias = torch.empty(0), torch.ones(2, 2 * FFN)
    h, a = empty[2 * FFN], empty[FFN]
    gemm_act.grouped_gemm_act(empty[HIDDEN], torch.ones(2, 2 * FFN, HIDDEN), row_range, scale, h, a, activation)
    workspace = torch.empty(gemm_act.dact_workspace_numel(0, 2, FFN, activation))
    gemm_act.grouped_gemm_dact(
        empty[HIDDEN],
        torch.ones(2, HIDDEN, FFN),
        row_range,
        h,
        scale,
        h,
        a,
        scale,
        workspace,
        activation,
        dbias=dbias,
    )
    gpu_activation.scaled_activation(h, scale, a, activation)
    gpu_activation.scaled_activation_grad(a, h, scale, h, scale, activation)
    assert not dbias.any()


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for case in CASES:
        started = time.perf_counter()
        run(*case)
        print(f"{case[:3]}: ok, {time.perf_counter() - started:.1f} s", flush=True)
    for case in (CASES[0], CASES[2], CASES[5]):
        started = time.perf_counter()
        check_ranges(*case)
        print(f"ranges of {case[:3]}: ok, {time.perf_counter() - started:.1f} s", flush=True)
    check_no_rows()
    print("no rows: ok")


if __name__ == "__main__":
    spare_the_interpreter()
    main()
