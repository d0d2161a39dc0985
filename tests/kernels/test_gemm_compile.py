"""Compiles every GEMM kernel for sm_90 without a GPU, with the arguments its launcher would pass.

What is checked is what the generated code must have to be fast: WGMMA, TMA or 16-byte cp.async, wide stores, and
registers that do not spill. The tensors are meta tensors, so the shapes can be real ones.
"""

import pytest
import torch

pytest.importorskip("triton")

import triton.language as tl
from ahead_of_time import since
from combinations import every_combination
from compiled_launches import atomics, catch_launches, meta

from symmoe.kernels.tensor_table import TensorTable
from symmoe.kernels.triton import bias, gemm, splits, tiles

WGMMA, TMA, WIDE_STORE = "wgmma.mma_async", "cp.async.bulk.tensor", "st.global.v4.b32"
COPY_16, NARROW_COPY = "cp.async.cg", "cp.async.ca"  # of 16 bytes, and of fewer
SHAPES = {  # G, H, W, N
    "qwen3-30b": (32, 2048, 1536, 65536),
    "mixtral-8x7b": (4, 4096, 28672, 16384),
    "odd": (3, 1032, 1424, 999),  # widths that no tile divides, contractions that no step divides
    "narrow": (65, 136, 72, 999),
}


@pytest.fixture
def launches(monkeypatch):
    return catch_launches(monkeypatch, bias, gemm, splits)


def launch(function, shape, dtype, *, gather=False, table=False, biased=False, accumulate=False, out_dtype=None):
    """Calls a GEMM of the first expert layer, [W, H] weights, the way the layer does."""
    G, H, W, N = SHAPES[shape]
    rows_N = N // 2 if gather else N
    row_range = meta(2, G, dtype=torch.int32)
    index = meta(N, dtype=torch.int32) if gather else None
    x, h = meta(rows_N, H, dtype=dtype), meta(N, W, dtype=dtype)

    def matrices(dtype):
        return TensorTable(meta(G, dtype=torch.int64), (G, W, H), dtype) if table else meta(G, W, H, dtype=dtype)

    if function == "gemm":
        biases = {"bias": meta(G, W, dtype=dtype), "bias_scale": meta(N, dtype=torch.float32), "zero_tail": True}
        extra = {**(biases if biased else {}), "accumulate": accumulate}
        gemm.grouped_gemm(x, matrices(dtype), row_range, h, row_index=index, num_sms=132, **extra)
    elif function == "dgrad":
        dout, out = (meta(N // 2, W, dtype=dtype), meta(N, H, dtype=dtype)) if gather else (h, x)
        options = {"row_index": index, "accumulate": accumulate, "zero_tail": True, "num_sms": 132}
        gemm.grouped_gemm_dgrad(dout, matrices(dtype), row_range, out, **options)
    else:
        gemm.grouped_gemm_wgrad(
            h, x, row_range, matrices(out_dtype or dtype), rows_index=index, accumulate=accumulate, num_sms=132
        )


GEMMS = [
    ("gemm", {}),
    ("gemm", {"gather": True}),
    ("gemm", {"biased": True}),
    ("gemm", {"gather": True, "biased": True}),
    ("gemm", {"table": True}),
    ("gemm", {"gather": True, "table": True, "biased": True}),
    ("gemm", {"accumulate": True}),
    ("gemm", {"gather": True, "biased": True, "accumulate": True}),
    ("dgrad", {}),
    ("dgrad", {"table": True}),
    ("dgrad", {"gather": True}),
    ("dgrad", {"accumulate": True}),
    ("wgrad", {}),
    ("wgrad", {"gather": True}),
    ("wgrad", {"accumulate": True}),
    ("wgrad", {"gather": True, "accumulate": True}),
    ("wgrad", {"accumulate": True, "out_dtype": torch.float32}),
    ("wgrad", {"gather": True, "accumulate": True, "out_dtype": torch.float32, "table": True}),
    ("wgrad", {"out_dtype": torch.float32, "table": True}),
]
# Bytes, of gathered rows with a bias that are added to what is there, all at once, which nothing in the package does.
SPILLED = since(("3.6", 0), ("3.7", 4))
OTHER_DTYPES = [case for case in GEMMS if "out_dtype" not in case[1]]


def named(cases):
    """Cases by what is in them."""
    return {"-".join("-".join(part) if isinstance(part, dict) else part for part in case): case for case in cases}


@every_combination(product=named(GEMMS), shape=["qwen3-30b", "mixtral-8x7b"])
def test_bf16_is_fast_code(launches, product, shape):
    function, options = product
    launch(function, shape, torch.bfloat16, **options)
    code = launches.compile()
    by_pointers = "gather" in options, "table" in options and function != "wgrad"
    assert WGMMA in code.ptx
    assert (TMA in code.ptx) == (not all(by_pointers))
    assert (COPY_16 in code.ptx) == any(by_pointers)
    assert NARROW_COPY not in code.ptx
    assert WIDE_STORE in code.ptx
    assert code.spilled <= (SPILLED if set(options) == {"gather", "biased", "accumulate"} else 0)


@pytest.mark.slow
@every_combination(product=named(OTHER_DTYPES), dtype=[torch.float16, torch.float32])
def test_other_dtypes(launches, product, dtype):
    function, options = product
    launch(function, "qwen3-30b", dtype, **options)
    code = launches.compile()
    # FP32 must not be rounded to TF32 on the way.
    assert (WGMMA in code.ptx) == (dtype == torch.float16)
    assert "tf32" not in code.ptx
    assert code.spilled == 0


@every_combination(
    product=named(case for case in GEMMS if case[1] in ({}, {"gather": True}, {"table": True}, {"accumulate": True})),
    shape=["odd", "narrow"],
)
def test_odd_widths(launches, product, shape):
    function, options = product
    launch(function, shape, torch.bfloat16, **options)
    code = launches.compile()
    assert WGMMA in code.ptx
    assert NARROW_COPY not in code.ptx
    assert code.spilled == 0


# Adapters of a layer: as narrow as their rank, which every tile and every step of the contraction exceed.
LOW_RANK = [
    ("gemm", {"gather": True}, "down"),
    ("gemm", {}, "down"),
    ("gemm", {"accumulate": True}, "up"),
    ("dgrad", {}, "up"),
    ("dgrad", {"gather": True}, "up"),
    ("dgrad", {"accumulate": True}, "down"),
    ("wgrad", {"gather": True}, "down"),
    ("wgrad", {}, "up"),
]


@pytest.mark.slow
@every_combination(product=named(LOW_RANK), rank=[8, 16, 64], dtype=[torch.bfloat16, torch.float32])
def test_low_ranks(launches, monkeypatch, product, rank, dtype):
    """Down: [r, H] weights; up: [W, r]."""
    function, options, adapter = product
    G, H, W, N = SHAPES["qwen3-30b"]
    monkeypatch.setitem(SHAPES, "adapter", (G, H, rank, N) if adapter == "down" else (G, rank, W, N))
    launch(function, "adapter", dtype, **options)
    code = launches.compile()
    assert (WGMMA in code.ptx) == (dtype == torch.bfloat16)
    copies = [line for line in code.asm["ttgir"].splitlines() if "async_copy_global_to_local" in line]
    of_bounds = [line for line in copies if "tensor<1x!tt.ptr<i32>" in line]
    # With one step of the contraction, what is fetched ahead is a whole tile, and the bounds of its group.
    assert (NARROW_COPY in code.ptx) == bool(of_bounds)
    assert not of_bounds or "accumulate" in options
    assert WIDE_STORE in code.ptx
    if "accumulate" in options:
        assert "ld.global.v4.b32" in code.ptx
    assert code.spilled == 0


@pytest.mark.parametrize("function", ["gemm", "dgrad", "wgrad"])
def test_no_more_programs_than_sms_are_lent(launches, function):
    """launch gives them 132."""
    launch(function, "qwen3-30b", torch.bfloat16)
    assert launches.pop_one().grid == (132,)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("gather", [False, True])
def test_bias_gradients(launches, gather, dtype):
    """One pass over dout, in pieces of 16 bytes; sums without atomics."""
    G, _, W, N = SHAPES["qwen3-30b"]
    dout = meta(N, W, dtype=dtype)
    index = meta(N, dtype=torch.int32) if gather else None
    row_range, scale = meta(2, G, dtype=torch.int32), meta(N, dtype=torch.float32)
    biases = meta(G, W, dtype=dtype)
    bias.grouped_bias_grad(dout, row_range, biases, dout_index=index, scale=scale)
    bias.grouped_bias_dot(dout, biases, row_range, scale, dout_index=index, accumulate=True)
    for kernel in ("grouped_bias_grad_kernel", "grouped_bias_dot_kernel"):
        code = launches.compile(kernel)
        assert COPY_16 in code.ptx or "ld.global.v4.b32" in code.ptx
        assert not atomics(code.ptx)
        assert code.spilled == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_zeros_of_a_table(launches, dtype):
    G, H, W, _ = SHAPES["odd"]
    out = TensorTable(meta(G, dtype=torch.int64), (G, W, H), dtype)
    empty = meta(0, H, dtype=dtype), meta(0, W, dtype=dtype)
    gemm.grouped_gemm_wgrad(empty[1], empty[0], meta(2, G, dtype=torch.int32), out)
    assert launches[-1].name == "zero_matrices_kernel"
    assert WIDE_STORE in launches.compile().ptx


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("num_groups", [1, 65])
def test_splits(launches, num_groups, dtype):
    splits.splits_to_row_range(meta(num_groups, dtype=dtype), meta(2, num_groups, dtype=torch.int32), 12345)
    assert launches.compile().spilled == 0


def test_types_of_outputs_are_known_to_triton():
    assert tiles.TRITON_DTYPES[torch.float32] is tl.float32
