"""Compiles the GEMMs, activations and gradients of biases for sm_90 without a GPU, with their launchers' arguments.
What is checked is what the generated code must have to be fast: WGMMA, TMA or 16-byte cp.async, wide accesses, and
registers that do not spill. The tensors are meta tensors, so the shapes can be real ones."""

import math
import re

import pytest
import torch

pytest.importorskip("triton")

import kernel_launches as layer
import triton.language as tl
from ahead_of_time import since
from combinations import every_combination
from compiled_launches import atomics
from kernel_launches import ACTIVATIONS, BF16, FP16, FP32, GEMMS, LAYOUTS, NUM_SMS, ROUTERS, SHAPES

from symmoe.errors import ArgumentError
from symmoe.kernels.activation import SUM_COLUMNS, Activation
from symmoe.kernels.routing_rule import RoutingRule
from symmoe.kernels.triton import (
    activation,
    bias,
    gemm,
    gemm_act,
    plan,
    route,
    router_products,
    tiles,
)

WGMMA, TMA, WIDE_LOAD, WIDE_STORE = (
    "wgmma.mma_async",
    "cp.async.bulk.tensor",
    "ld.global.v4.b32",
    "st.global.v4.b32",
)
COPY_16, NARROW_COPY = "cp.async.cg", "cp.async.ca"  # of 16 bytes, and of fewer
# Bytes, of gathered rows with a bias that are added to what is there, all at once, which nothing in the package does.
SPILLED = since(("3.6", 0), ("3.7", 4))
OTHER_DTYPES = [case for case in GEMMS if "out_dtype" not in case[1]]
USUAL = ["qwen3-30b", "mixtral-8x7b"]
MODULES = activation, bias, gemm, gemm_act, route, router_products, plan


def named(cases):
    """Cases by what is in them."""
    return {
        "-".join("-".join(part) if isinstance(part, dict) else part for part in case): case
        for case in cases
    }


@every_combination(product=named(GEMMS), shape=USUAL)
def test_bf16_is_fast_code(launches, product, shape):
    function, options = product
    layer.launch_gemm(function, shape, BF16, **options)
    code = launches.compile()
    by_pointers = "gather" in options, "table" in options and function != "wgrad"
    assert WGMMA in code.ptx
    assert (TMA in code.ptx, COPY_16 in code.ptx) == (not all(by_pointers), any(by_pointers))
    assert NARROW_COPY not in code.ptx
    assert WIDE_STORE in code.ptx
    assert code.spilled <= (SPILLED if set(options) == {"gather", "biased", "accumulate"} else 0)


@pytest.mark.slow
@every_combination(product=named(OTHER_DTYPES), dtype=[FP16, FP32])
def test_other_dtypes_are_not_rounded_to_tf32(launches, product, dtype):
    function, options = product
    layer.launch_gemm(function, "qwen3-30b", dtype, **options)
    code = launches.compile()
    assert (WGMMA in code.ptx) == (dtype == FP16)
    assert "tf32" not in code.ptx
    assert code.spilled <= (since(("3.6", 24), ("3.7", 0)) if dtype == FP16 else 0)


@every_combination(
    product=named(
        case
        for case in GEMMS
        if case[1] in ({}, {"gather": True}, {"table": True}, {"accumulate": True})
    ),
    shape=["odd", "narrower"],
)
def test_odd_widths(launches, product, shape):
    function, options = product
    layer.launch_gemm(function, shape, BF16, **options)
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
@every_combination(product=named(LOW_RANK), rank=[8, 16, 64], dtype=[BF16, FP32])
def test_low_ranks(launches, product, rank, dtype):
    """Down: [r, H] weights; up: [2I, r]."""
    function, options, adapter = product
    G, H, I, N = SHAPES["qwen3-30b"]
    layer.launch_gemm(
        function, (G, H, rank // 2, N) if adapter == "down" else (G, rank, I, N), dtype, **options
    )
    code = launches.compile()
    assert (WGMMA in code.ptx) == (dtype == BF16)
    copies = [
        line for line in code.asm["ttgir"].splitlines() if "async_copy_global_to_local" in line
    ]
    of_bounds = [line for line in copies if "tensor<1x!tt.ptr<i32>" in line]
    # With one step of the contraction, what is fetched ahead is a whole tile, and the bounds of its group.
    assert (NARROW_COPY in code.ptx) == bool(of_bounds)
    assert not of_bounds or "accumulate" in options
    assert WIDE_STORE in code.ptx
    assert WIDE_LOAD in code.ptx or "accumulate" not in options
    assert code.spilled == 0


@pytest.mark.parametrize("function", ["gemm", "dgrad", "wgrad"])
def test_no_more_programs_than_sms_are_lent(launches, function):
    layer.launch_gemm(function, "qwen3-30b", BF16)
    assert launches.pop_one().grid == (NUM_SMS,)


@every_combination(
    kernel=["grouped_bias_grad_kernel", "grouped_bias_dot_kernel"],
    gather=[False, True],
    dtype=[BF16, FP32],
)
def test_gradients_of_biases_read_16_bytes_and_use_no_atomics(launches, kernel, gather, dtype):
    layer.launch_bias_gradients(dtype, gather)
    code = launches.compile(kernel)
    assert COPY_16 in code.ptx or WIDE_LOAD in code.ptx
    assert not atomics(code.ptx)
    assert code.spilled == 0


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_zeros_of_a_table(launches, dtype):
    layer.launch_zeros(dtype)
    assert launches[-1].name == "zero_matrices_kernel"
    assert WIDE_STORE in launches.compile().ptx


@every_combination(num_groups=[1, 65], dtype=[torch.int32, torch.int64])
def test_splits(launches, num_groups, dtype):
    layer.launch_splits(num_groups, dtype)
    assert launches.compile().spilled == 0


def test_types_of_outputs_are_known_to_triton():
    assert tiles.TRITON_DTYPES[FP32] is tl.float32


# -- activations, by themselves and fused with GEMMs ------------------------------------------------------------------
FUSED = ["grouped_gemm_act_kernel", "grouped_gemm_dact_kernel"]
ELEMENTWISE = ["scaled_activation_kernel", "scaled_activation_grad_kernel"]
HALVES_AND_BLOCKS = {"halves": ACTIVATIONS["swiglu"], "blocks": ACTIVATIONS["interleave"]}
# Bytes, of dact with limits or sums of dbias, which need more registers than there are beside an epilogue in eight
# parts; and with addresses of rows or weights for every thread.
MAX_SPILLED, MAX_SPILLED_BY_ADDRESSES = 256, since(("3.6", 84), ("3.7", 64))
# Of dact with contiguous rows: Triton 3.7 has no register left for interleaved features of mixtral-8x7b.
CONTIGUOUS_SPILLED = since(("3.6", 0), ("3.7", 8))


@every_combination(kernel=FUSED, activation=ACTIVATIONS, layout=LAYOUTS, shape=USUAL)
def test_fused_activations_use_wgmma_and_wide_accesses_and_do_not_spill(
    launches, kernel, activation, layout, shape
):
    layer.launch_activations(shape, activation, layout=layout)
    code, is_dact = launches.compile(kernel), kernel == "grouped_gemm_dact_kernel"
    assert WGMMA in code.ptx
    assert (TMA in code.ptx, COPY_16 in code.ptx) == (layout != "table", layout != "contiguous")
    assert WIDE_STORE in code.ptx
    assert WIDE_LOAD in code.ptx or not is_dact
    if is_dact and (layout == "biased" or activation.limit < math.inf):
        assert code.spilled <= MAX_SPILLED
    elif (
        shape == "qwen3-30b"
        and layout in ("gather", "contiguous")
        and activation in HALVES_AND_BLOCKS.values()
    ):
        assert (launches.of(kernel).grid, code.spilled) == ((NUM_SMS,), 0)
    elif is_dact:
        assert code.spilled <= (
            CONTIGUOUS_SPILLED if layout == "contiguous" else MAX_SPILLED_BY_ADDRESSES
        )
    else:
        assert code.spilled == 0


@pytest.mark.slow
@every_combination(
    kernel=FUSED, activation={n: ACTIVATIONS[n] for n in ("swiglu", "srelu")}, dtype=[FP16, FP32]
)
def test_fused_activations_of_other_dtypes_are_not_rounded_to_tf32(
    launches, kernel, activation, dtype
):
    layer.launch_activations("qwen3-30b", activation, dtype)
    code = launches.compile(kernel)
    assert (WGMMA in code.ptx) == (dtype == FP16)
    assert "tf32" not in code.ptx
    assert code.spilled == 0


@every_combination(kernel=ELEMENTWISE, interleave=[None, 32, 8, 4, 1])
def test_elementwise_kernels_access_16_bytes(launches, kernel, interleave):
    layer.launch_activations("qwen3-30b", Activation(interleave=interleave))
    code = launches.compile(kernel)
    assert WIDE_LOAD in code.ptx
    assert WIDE_STORE in code.ptx
    assert code.spilled == 0


@every_combination(
    kernel=[*FUSED, "sum_dscale_kernel", "sum_dbias_kernel", *ELEMENTWISE],
    shape=["odd", "narrow"],
    interleave=[None, 4, 8],
)
def test_activations_of_widths_that_no_tile_divides_use_no_atomics(
    launches, kernel, shape, interleave
):
    layer.launch_activations(shape, Activation(interleave=interleave, limit=7.0), layout="biased")
    assert not atomics(launches.compile(kernel).ptx)


@pytest.mark.parametrize(("interleave", "text"), [
    (3, r"interleave \(3\) must be a power of two up to 32"),
    (64, r"interleave \(64\) must be a power of two up to 32"),
    (32, r"interleave \(32\) must divide the FFN width \(40\)"),
])  # fmt: skip
def test_interleave_that_kernels_cannot_address_is_refused(interleave, text):
    with pytest.raises(ArgumentError, match=text):
        activation.addressable(Activation(interleave=interleave), 40 if interleave == 32 else 192)


def test_the_workspace_is_enough_for_every_choice_of_tiles():
    for dtype in (BF16, FP16, FP32):
        for ffn in (16, 128, 256, 14336):
            config = gemm_act.dact_config(ffn, dtype)
            assert config.block_m >= gemm_act.MIN_BLOCK_M
            assert config.block_n % SUM_COLUMNS == 0


# -- the router -------------------------------------------------------------------------------------------------------
@every_combination(
    kernel=["router_gemm_kernel", "router_dgrad_kernel", "router_wgrad_kernel"],
    shape=ROUTERS.keys(),
)
def test_products_of_the_router_are_of_bf16_and_tensor_cores_add_up_a_step_only(
    launches, kernel, shape
):
    """What they cut off must not grow with the number of terms: a step begins at zero, and is added outside."""
    layer.launch_router(shape)
    code = launches.compile(kernel)
    (kind,) = set(re.findall(r"wgmma\.mma_async\S*", code.ptx))
    assert re.search(r"\.f32\.bf16\.bf16$", kind)
    assert "mma.sync" not in code.ptx
    assert code.stack == 0
    begins = re.findall(
        r"wgmma\.mma_async[^;]*\}, %rd\d+, %rd\d+, (\S+), 1, 1, [01], [01];", code.ptx
    )
    assert (len(begins), begins.count("0")) == (code.ptx.count(WGMMA), 1)
    assert all(begin == "0" or begin.startswith("%p") for begin in begins)
    rows, columns = (
        int(size) for size in re.search(r"wgmma\.mma_async\S*\.m(\d+)n(\d+)k", code.ptx).groups()
    )
    sums_of_a_thread = rows * columns // 128
    assert len(re.findall(r"add(?:\.rn)?\.f32", code.ptx)) >= sums_of_a_thread


def test_bf16_parts_round_to_nearest(launches):
    layer.launch_router("odd")
    assert "cvt.rn.bf16" in launches.compile("bf16_parts_kernel").ptx


@every_combination(
    kernel=["choose_experts_kernel", "choose_experts_grad_kernel"],
    choice={
        "8 of 128": (128, 8, RoutingRule()),
        "8 of 128, counted": (128, 8, RoutingRule(), 64),
        "3 of 20": (20, 3, RoutingRule()),
        "in groups": (256, 8, RoutingRule(score="sigmoid", num_expert_groups=8, topk_groups=4)),
    },
)
def test_a_choice_of_experts_spills_nothing(launches, kernel, choice):
    layer.launch_choice(*choice)
    assert launches.compile(kernel).stack == 0


@every_combination(num_experts=[20, 256], score=["softmax", "sigmoid"])
def test_losses_of_a_router_spill_nothing(launches, num_experts, score):
    layer.launch_losses(num_experts, score)
    for name in ("router_loss_sums", "router_loss", "router_losses_grad"):
        assert launches.compile(f"{name}_kernel").stack == 0
