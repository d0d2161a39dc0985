"""Compiles the GEMMs, activations, gradients of biases and the router for sm_90 without a GPU. What is checked is what
the code must have to be fast: WGMMA, TMA or 16-byte cp.async, wide accesses, and registers that do not spill."""

import math
import re
from itertools import product

import pytest

pytest.importorskip("triton")

import triton.language as tl
from ahead_of_time import since
from compiled_launches import Case, code_cases, no_atomics
from launch_table import (
    ACTIVATIONS,
    BF16,
    FP16,
    FP32,
    GEMMS,
    LAYOUTS,
    NUM_SMS,
    ROUTERS,
    SIZES,
    Launch,
)

from symmoe.errors import ArgumentError
from symmoe.kernels.activation import SUM_COLUMNS, Activation
from symmoe.kernels.routing_rule import RoutingRule
from symmoe.kernels.triton import activation, gemm_act, tiles

WGMMA = "wgmma.mma_async"
TMA = "cp.async.bulk.tensor"
WIDE_LOAD, WIDE_STORE = "ld.global.v4.b32", "st.global.v4.b32"
COPY_16, NARROW_COPY = "cp.async.cg", "cp.async.ca"  # of 16 bytes, and of fewer
USUAL = ["qwen3-30b", "mixtral-8x7b"]
# Bytes, of gathered rows with a bias that are added to what is there, all at once, which nothing in the package does.
SPILLED = {"gather biased accumulate": since(("3.6", 0), ("3.7", 4), ("3.9", 12))}


def fast_product(kernel, ways, sizes):
    by_pointers = "gather" in ways, "table" in ways and kernel != "grouped_gemm_wgrad"
    ptx = {
        WGMMA: True,
        TMA: not all(by_pointers),
        COPY_16: any(by_pointers),
        NARROW_COPY: False,
        WIDE_STORE: True,
    }
    return Case(Launch(kernel, sizes, ways=ways), ptx=ptx, bounds={"spilled": SPILLED.get(ways, 0)})


def product_of_another_dtype(kernel, ways, dtype):
    most_spilled = since(("3.6", 24), ("3.7", 0)) if dtype == FP16 else 0
    return Case(
        Launch(kernel, "qwen3-30b", dtype, ways=ways),
        ptx={WGMMA: dtype == FP16, "tf32": False},
        bounds={"spilled": most_spilled},
    )


# Adapters of a layer, as narrow as their rank, which every tile and every step of the contraction exceed. Down: [r, H]
# weights; up: [2I, r].
LOW_RANK = [
    ("grouped_gemm", "gather", "down"),
    ("grouped_gemm", "", "down"),
    ("grouped_gemm", "accumulate", "up"),
    ("grouped_gemm_dgrad", "", "up"),
    ("grouped_gemm_dgrad", "gather", "up"),
    ("grouped_gemm_dgrad", "accumulate", "down"),
    ("grouped_gemm_wgrad", "gather", "down"),
    ("grouped_gemm_wgrad", "", "up"),
]


def product_of_low_rank(kernel, ways, adapter, rank, dtype):
    narrow = {"I": rank // 2} if adapter == "down" else {"H": rank}

    def is_fetched_whole(code):
        """With one step of the contraction, what is fetched ahead is a whole tile, and the bounds of its group."""
        text = code.asm["ttgir"].splitlines()
        copies = [line for line in text if "async_copy_global_to_local" in line]
        of_bounds = [line for line in copies if "tensor<1x!tt.ptr<i32>" in line]
        assert (NARROW_COPY in code.ptx) == bool(of_bounds)
        assert not of_bounds or "accumulate" in ways
        assert WIDE_LOAD in code.ptx or "accumulate" not in ways

    return Case(
        Launch(kernel, SIZES["qwen3-30b"] | narrow, dtype, ways=ways),
        ptx={WGMMA: dtype == BF16, WIDE_STORE: True},
        also=(is_fetched_whole,),
    )


def reads_16_bytes(code):
    assert COPY_16 in code.ptx or WIDE_LOAD in code.ptx
    no_atomics(code)


# Bytes, of dact with limits or sums of dbias, which need more registers than there are beside an epilogue in eight
# parts; and with addresses of rows or weights for every thread.
MAX_SPILLED, MAX_SPILLED_BY_ADDRESSES = 256, since(("3.6", 84), ("3.7", 64))
# Of dact with contiguous rows: Triton 3.7 has no register left for interleaved features of mixtral-8x7b.
CONTIGUOUS_SPILLED = since(("3.6", 0), ("3.7", 8))
NAMES = ("swiglu", "gpt-oss", "interleave", "srelu", "gelu", "geglu", "tanh geglu")


def fused(kernel, name, layout, sizes):
    is_dact = kernel == "grouped_gemm_dact"
    act = ACTIVATIONS[name]
    is_simple = layout in ("gather", "") and name in ("swiglu", "interleave")
    most_spilled = 0
    if is_dact and ("biased" in layout or act.limit < math.inf):
        most_spilled = MAX_SPILLED
    elif is_dact and not (sizes == "qwen3-30b" and is_simple):
        most_spilled = MAX_SPILLED_BY_ADDRESSES if layout else CONTIGUOUS_SPILLED
    ptx = {WGMMA: True, TMA: "table" not in layout, COPY_16: layout != "", WIDE_STORE: True}
    return Case(
        Launch(kernel, sizes, activation=act, ways=layout),
        f"{kernel}_kernel",
        ptx=ptx | ({WIDE_LOAD: True} if is_dact else {}),
        bounds={"spilled": most_spilled},
    )


def fused_of_another_dtype(kernel, name, dtype):
    launch = Launch(kernel, "qwen3-30b", dtype, activation=ACTIVATIONS[name], ways="gather")
    return Case(launch, f"{kernel}_kernel", ptx={WGMMA: dtype == FP16, "tf32": False})


def odd_activation(kernel, launched_by, sizes, interleave):
    act = Activation(interleave=interleave, limit=7.0)
    ways = "gather biased" if launched_by.startswith("grouped") else ""
    launch = Launch(launched_by, sizes, activation=act, ways=ways)
    return Case(launch, f"{kernel}_kernel", bounds={"spilled": 10**6}, also=(no_atomics,))


OF_FUSED = {
    "grouped_gemm_act": "grouped_gemm_act",
    "grouped_gemm_dact": "grouped_gemm_dact",
    "sum_dscale": "grouped_gemm_dact",
    "sum_dbias": "grouped_gemm_dact",
    "scaled_activation": "scaled_activation",
    "scaled_activation_grad": "scaled_activation_grad",
}


def adds_up_a_step_only(code):
    """What tensor cores cut off must not grow with the number of terms: a step begins at zero, and is added outside."""
    (kind,) = set(re.findall(r"wgmma\.mma_async\S*", code.ptx))
    assert re.search(r"\.f32\.bf16\.bf16$", kind)
    begins = re.findall(
        r"wgmma\.mma_async[^;]*\}, %rd\d+, %rd\d+, (\S+), 1, 1, [01], [01];", code.ptx
    )
    assert (len(begins), begins.count("0")) == (code.ptx.count(WGMMA), 1)
    assert all(begin == "0" or begin.startswith("%p") for begin in begins)
    sizes = re.search(r"wgmma\.mma_async\S*\.m(\d+)n(\d+)k", code.ptx).groups()
    sums_of_a_thread = math.prod(map(int, sizes)) // 128
    assert len(re.findall(r"add(?:\.rn)?\.f32", code.ptx)) >= sums_of_a_thread


def of_router(kernel, sizes):
    launched_by = "router_gemm" if kernel == "router_gemm" else "router_gemm_grads"
    return Case(
        Launch(launched_by, sizes),
        f"{kernel}_kernel",
        ptx={"mma.sync": False},
        bounds={"spilled": 10**6, "stack": 0},
        also=(adds_up_a_step_only,),
    )


OF_8192 = {"T": 8192, "R": 64}
CHOICES = {  # E, K, rule
    "choose_experts": [
        (128, 8, RoutingRule()),
        (20, 3, RoutingRule()),
        (256, 8, RoutingRule(score="sigmoid", num_expert_groups=8, topk_groups=4)),
        (256, 6, RoutingRule(score="sqrtsoftplus")),
    ]
}
CHOICES["choose_experts_grad"] = CHOICES["choose_experts"]


def choice(kernel, num_experts, top_k, rule, ways=""):
    sizes = {**OF_8192, "E": num_experts, "K": top_k}
    return Case(Launch(kernel, sizes, ways=ways, changes={"rule": rule}), bounds={"stack": 0})


def losses(kernel, launched_by, num_experts, score):
    changes = {"normalises": score != "softmax"}
    launch = Launch(launched_by, {"T": 8192, "E": num_experts}, changes=changes)
    return Case(launch, f"{kernel}_kernel", bounds={"stack": 0})


SECTIONS = {
    **{
        f"{kernel} in bf16": [
            fast_product(*gemm, sizes) for gemm, sizes in product(GEMMS, USUAL) if gemm[0] == kernel
        ]
        for kernel in ("grouped_gemm", "grouped_gemm_dgrad", "grouped_gemm_wgrad")
    },
    "products of other dtypes are not rounded to TF32": [
        product_of_another_dtype(*gemm, dtype)
        for gemm, dtype in product(GEMMS, (FP16, FP32))
        if "fp32" not in gemm[1]
    ],
    "products of odd widths": [
        Case(Launch(kernel, sizes, ways=ways), ptx={WGMMA: True, NARROW_COPY: False})
        for (kernel, ways), sizes in product(GEMMS, ("odd", "narrower"))
        if ways in ("", "gather", "table", "accumulate")
    ],
    "products of low ranks": [
        product_of_low_rank(*gemm, rank, dtype)
        for gemm, rank, dtype in product(LOW_RANK, (8, 16, 64), (BF16, FP32))
    ],
    "gradients of biases": [
        Case(Launch(kernel, "qwen3-30b", dtype, ways=ways), also=(reads_16_bytes,))
        for kernel, ways, dtype in product(
            ("grouped_bias_grad", "grouped_bias_dot"), ("", "gather"), (BF16, FP32)
        )
    ],
    "zeros of a table": [
        Case(
            Launch("grouped_gemm_wgrad", "odd", dtype, ways="no-rows"),
            "zero_matrices_kernel",
            ptx={WIDE_STORE: True},
        )
        for dtype in (BF16, FP32)
    ],
    "splits": [
        Case(Launch("splits_to_row_range", {"G": groups, "N": 999}, changes={"splits": kind}))
        for groups, kind in product((1, 65), ("i32 G", "i64 G"))
    ],
    **{
        f"{kernel} is fast": [fused(kernel, *options) for options in product(NAMES, LAYOUTS, USUAL)]
        for kernel in ("grouped_gemm_act", "grouped_gemm_dact")
    },
    "fused activations of other dtypes are not rounded to TF32": [
        fused_of_another_dtype(*options)
        for options in product(
            ("grouped_gemm_act", "grouped_gemm_dact"), ("swiglu", "srelu"), (FP16, FP32)
        )
    ],
    **{
        f"{kernel} accesses 16 bytes": [
            Case(
                Launch(kernel, activation=Activation(interleave=interleave)),
                ptx={WIDE_LOAD: True, WIDE_STORE: True},
            )
            for interleave in (None, 32, 8, 4, 1)
        ]
        for kernel in ("scaled_activation", "scaled_activation_grad")
    },
    **{
        f"{kernel} of odd widths uses no atomics": [
            odd_activation(kernel, launched_by, *options)
            for options in product(("odd", "narrow"), (None, 4, 8))
        ]
        for kernel, launched_by in OF_FUSED.items()
    },
    **{
        f"{kernel} multiplies bf16": [of_router(kernel, sizes) for sizes in ROUTERS]
        for kernel in ("router_gemm", "router_dgrad", "router_wgrad")
    },
    "parts of bf16 are rounded to nearest": [
        Case(Launch("router_gemm", "odd router"), "bf16_parts_kernel", ptx={"cvt.rn.bf16": True})
    ],
    **{
        f"{kernel} spills nothing": [choice(kernel, *options) for options in choices]
        for kernel, choices in CHOICES.items()
    },
    "choose_experts counts": [choice("choose_experts", *CHOICES["choose_experts"][0], "counted")],
    "losses of a router spill nothing": [
        losses(*names, *kind)
        for kind in product((20, 256), ("softmax", "sigmoid"))
        for names in (
            ("router_loss_sums", "router_losses"),
            ("router_loss", "router_losses"),
            ("router_losses_grad", "router_losses_grad"),
        )
    ],
}


@code_cases(SECTIONS)
def test_code(launches, case):
    case.check(launches)


@pytest.mark.parametrize(
    "kernel",
    [
        "grouped_gemm",
        "grouped_gemm_dgrad",
        "grouped_gemm_wgrad",
        "grouped_gemm_act",
        "grouped_gemm_dact",
    ],
)
def test_no_more_programs_than_sms_are_lent(launches, kernel):
    first, *_ = launches.made_by(Launch(kernel, "qwen3-30b"))
    assert first.grid == (NUM_SMS,)


def test_types_of_outputs_are_known_to_triton():
    assert tiles.TRITON_DTYPES[FP32] is tl.float32


@pytest.mark.parametrize(("interleave", "text"), [
    (3, r"interleave \(3\) must be a power of two up to 32"),
    (64, r"interleave \(64\) must be a power of two up to 32"),
    (32, r"interleave \(32\) must divide the FFN width \(40\)"),
])  # fmt: skip
def test_interleave_that_kernels_cannot_address_is_refused(interleave, text):
    with pytest.raises(ArgumentError, match=text):
        activation.addressable(Activation(interleave=interleave), 40 if interleave == 32 else 192)


def test_the_workspace_is_enough_for_every_choice_of_tiles():
    for dtype, ffn in product((BF16, FP16, FP32), (16, 128, 256, 14336)):
        config = gemm_act.dact_config(ffn, dtype)
        assert config.block_m >= gemm_act.MIN_BLOCK_M
        assert config.block_n % SUM_COLUMNS == 0
