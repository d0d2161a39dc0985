"""Compiles every general kernel for the GPUs that nothing was measured on, without one, in a usual and an odd case.
What is checked is what a launch there needs: it compiles, it fits into shared memory, and registers spill little."""

from itertools import product

import pytest

pytest.importorskip("triton")

from ahead_of_time import VERSION, since
from compiled_launches import GENERAL_MODULES, HOPPER_MODULES, kernels_of
from launch_table import (
    ACTIVATIONS,
    BF16,
    FP16,
    FP32,
    GEMMS,
    LAYOUTS,
    SIZES,
    SWIGLU,
    TABLE,
    Launch,
    scale_table,
)

from symmoe.kernels import architectures, control
from symmoe.kernels.activation import Activation
from symmoe.kernels.routing_rule import RoutingRule
from symmoe.kernels.twin import Kernels

OTHERS = [
    10 * major + minor
    for (major, minor), kind in architectures.ARCHITECTURES.items()
    if not kind.is_measured
]
KERNELS = {kernel.__name__ for *_, kernel in kernels_of(*GENERAL_MODULES)}
HOPPER_KERNELS = {kernel.__name__ for *_, kernel in kernels_of(*HOPPER_MODULES)}
QWEN = SIZES["qwen3-30b"]
FUSED = "grouped_gemm_act", "grouped_gemm_dact"
ELEMENTWISE = "scaled_activation", "scaled_activation_grad"
FUSED_IN_ODD_CASES = [  # sizes, activation, dtype, layout
    ("qwen3-30b", Activation(interleave=32), BF16, ""),
    ("odd", Activation(interleave=4, limit=7.0), BF16, "gather biased"),
    ("odd", ACTIVATIONS["srelu"], BF16, "gather table"),
    ("narrow", ACTIVATIONS["gelu"], FP16, ""),
    ("narrow", SWIGLU, FP32, "gather"),
]
USUAL_ROWS = {"G": 32, "H": 7168, "W": 4096, "N": 65536}
SMALL = [{"G": 2, "H": 2048, "W": 2048, "N": 333}, {"G": 2, "H": 32, "W": 32, "N": 16}]
ACTIVATIONS_THAT_QUANTISE = [
    ("swiglu", 2048, "float8_block"),
    ("swiglu", 2048, "mxfp8"),
    ("gpt-oss", 2880, "mxfp8"),
    ("interleave by one", 2880, "float8_block"),
]


def of_small_rows(sizes):
    """All that quantises, with what a format has besides and without."""
    both = [
        Launch(kernel, sizes, BF16, name, ways="plain" if kernel == "quantize_columns" else "")
        for kernel, name in product(("quantize_rows", "quantize_columns"), ("mxfp8", "nvfp4"))
    ]
    without_ways = [
        Launch(kernel, sizes, dtype, "mxfp8", ways=ways)
        for kernel, dtype, ways in (
            ("quantize_rows", BF16, "sums"),
            ("sum_dbias", FP32, ""),
            ("quantize_weights", FP32, ""),
            ("quantize_weights", FP32, "transposed"),
            ("quantize_weight_pairs", FP32, ""),
            ("encode_rows", BF16, ""),
            ("group_amax", BF16, "signs"),
            ("group_amax", BF16, ""),
            ("weight_amax", FP32, ""),
            ("swizzle_scales", BF16, ""),
            ("unswizzle_scales", BF16, ""),
            ("unpack_rows", BF16, ""),
            ("decode_rows", FP32, ""),
            ("requantize_columns", BF16, ""),
        )
    ]
    of_table = {"scale": scale_table((sizes["N"], 1), (sizes["N"], 17)), "row_range": None}
    no_seeds = Launch("quantize_rows", sizes, BF16, "nvfp4", changes={"seeds": None})
    return [
        *both,
        *without_ways,
        no_seeds,
        Launch("swizzle_scales", sizes, format="mxfp8", changes=of_table),
    ]


def of_experts(kernel, ways, sizes, dtype):
    return [
        Launch(f"grouped_gemm_{kernel}", sizes[name], dtype, name, ways=ways)
        for name in ("float8_block", "mxfp8", "nvfp4")
    ]


def of_trips(sizes, dtype):
    ways = "table" if dtype == FP32 else ""
    plans = "count_slots", "send_counts", "lay_out", "assign_rows"
    rows = "push_rows", "place_rows", "fan_out", "push_sums", "pull_rows", "sum_home"
    slots = "push_slots", "index_rows", "gather_values", "pull_values"
    replicas = "push_replicas", "add_from_replicas"
    return [
        *(Launch(kernel, sizes, dtype) for kernel in (*plans, *rows, *slots)),
        *(Launch(kernel, sizes, dtype, ways=ways) for kernel in replicas),
    ]


DROPS = {"lay_out": {"overflow": control.OVERFLOW_DROP}, "assign_rows": {"drop": True}}
WITH_REPLICAS = (
    "place_replicas",
    "route_to_replicas",
    "count_slots",
    "send_counts",
    "lay_out",
    "assign_rows",
)
BETWEEN_NODES = (
    "rail_rows publish_header own_counts other_counts plan_in_node take_rows post_report count_exchange "
    "receive_fault_flags barrier send_signal wait_for_signal"
).split()
USUAL_BLOCKS = dict.fromkeys(("float8_block", "mxfp8", "nvfp4"), "deepseek-like")
ODD_BLOCKS = dict.fromkeys(USUAL_BLOCKS, "odd blocks")
GROUPS = {
    "products": [
        *(
            Launch(kernel, "odd" if {" ", "-"} & {*ways} else "qwen3-30b", ways=ways)
            for kernel, ways in GEMMS
        ),
        *(
            Launch(kernel, sizes, dtype)
            for kernel, (dtype, sizes) in product(
                ("grouped_gemm", "grouped_gemm_dgrad", "grouped_gemm_wgrad"),
                ((FP16, "odd"), (FP32, "narrower")),
            )
        ),
        *(
            Launch(kernel, "odd", dtype, ways=ways)
            for kernel, (dtype, ways) in product(
                ("grouped_bias_grad", "grouped_bias_dot"), ((BF16, ""), (FP32, "gather"))
            )
        ),
        *(Launch("grouped_gemm_wgrad", "odd", dtype, ways="no-rows") for dtype in (BF16, FP32)),
        Launch("splits_to_row_range"),
    ],
    "activations": [
        *(Launch(kernel, ways=layout) for kernel, layout in product(FUSED, LAYOUTS)),
        *(Launch(kernel) for kernel in (*ELEMENTWISE, "sum_dact_partials")),
        *(
            Launch(kernel, sizes, dtype, activation=act, ways=layout)
            for kernel, (sizes, act, dtype, layout) in product(FUSED, FUSED_IN_ODD_CASES)
        ),
        *(
            Launch(kernel, sizes, dtype, activation=act)
            for kernel, (sizes, act, dtype, _) in product(ELEMENTWISE, FUSED_IN_ODD_CASES)
        ),
    ],
    "router": [
        *(
            Launch(kernel, sizes)
            for kernel, sizes in product(
                ("router_gemm", "router_gemm_grads"), ("qwen3-30b", "odd router")
            )
        ),
        Launch("choose_experts", QWEN | {"R": 64}, ways="counted"),
        *(
            Launch(kernel, "odd router", changes={"rule": RoutingRule(score=score)})
            for kernel in ("choose_experts", "choose_experts_grad")
            for score in ("sigmoid", "sqrtsoftplus")
        ),
        Launch("choose_experts_grad", "qwen3-30b"),
        *(Launch(kernel) for kernel in ("router_losses", "router_losses_grad")),
    ],
    "rows": [
        *of_trips("qwen3-30b", BF16),
        *of_trips("odd trip", FP32),
        *(Launch(kernel, QWEN | {"S": 4}, changes=DROPS.get(kernel)) for kernel in WITH_REPLICAS),
        *map(Launch, BETWEEN_NODES),
    ],
    "quantised products": [
        launch
        for sizes, dtype in ((USUAL_BLOCKS, BF16), (ODD_BLOCKS, FP32))
        for kernel, ways in (
            ("quantized", ""),
            ("quantized", "zero-tail biased"),
            ("wgrad_quantized", ""),
            ("wgrad_quantized", "accumulate"),
        )
        for launch in of_experts(kernel, ways, sizes, dtype)
    ]
    + [
        Launch("grouped_gemm_quantized", "odd blocks", FP32, name, ways="zero-tail biased parts")
        for name in ("mxfp8", "nvfp4")
    ],
    "quantisers": [
        *(
            Launch(kernel, USUAL_ROWS, BF16, name)
            for kernel, name in product(
                ("quantize_rows", "quantize_columns", "quantize_weights", "quantize_weight_pairs"),
                ("float8_block", "mxfp8", "nvfp4"),
            )
        ),
        *(launch for sizes in SMALL for launch in of_small_rows(sizes)),
        *(
            Launch(
                kernel,
                {"G": 32, "I": ffn, "N": 65536},
                BF16,
                name,
                ACTIVATIONS[act],
                "dbias" if (kernel, name) == ("dact_quantize", "mxfp8") else "",
            )
            for kernel, (act, ffn, name) in product(
                ("act_quantize", "dact_quantize"), ACTIVATIONS_THAT_QUANTISE
            )
        ),
    ],
}
QUANTISED = {"quantised products", "quantisers"}


# Bytes that a thread spills, at most, if any. Operands of tensor cores in registers leave little room.
MAX_SPILLED = {
    "grouped_gemm_kernel": 256,
    "grouped_gemm_wgrad_kernel": since(("3.6", 184), ("3.7", 64)),
    "grouped_gemm_act_kernel": 256,
    "grouped_gemm_dact_kernel": 64,
    "lay_out_kernel": since(("3.6", 16), ("3.7", 8)),  # of 64 ranks; on 8.x
    "rail_rows_kernel": 16,
    "router_gemm_kernel": 64,
    "router_dgrad_kernel": 64,
    "router_wgrad_kernel": 1088,
    # On Ada; on Blackwell less than 64.
    "grouped_gemm_fp8_kernel": 1664,
    "grouped_gemm_wgrad_fp8_kernel": 256,
    "grouped_gemm_scaled_kernel": 2240,
    "grouped_gemm_wgrad_scaled_kernel": 1088,
}
OF_QUANTISERS = 256


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "arch"),
    [(group, arch) for group in GROUPS for arch in OTHERS if group not in QUANTISED or arch >= 89],
)
def test_it_compiles_and_fits(launches, on, group, arch):
    if (group, arch) in {("products", 100), ("quantised products", 89)} and VERSION < (3, 7):
        pytest.skip(
            "Triton 3.6 ends at an assertion of its own (10.0), or makes instructions that 8.9 does not have"
        )
    on(arch)
    for launch in GROUPS[group]:
        launch()
    for launch in {launch.key: launch for launch in launches}.values():
        code = launch.compile(arch)
        limit = MAX_SPILLED.get(launch.name, OF_QUANTISERS if group == "quantisers" else 0)
        assert code.spilled <= limit, (launch.name, code.spilled)


ON_THE_HOST = {"copy_host_to_device", "read_addresses", "dact_workspace_numel"}


def test_every_kernel_of_the_contract_has_a_row():
    contract = {name for base in Kernels.__mro__ for name in vars(base) if name[0] != "_"}
    assert contract - TABLE.keys() == ON_THE_HOST


def test_no_kernel_is_left_out(launches):
    """Neither of those that are compiled for other GPUs, nor of those for Hopper."""
    for launch in (launch for group in GROUPS.values() for launch in group):
        launch()
    assert {launch.name for launch in launches} == KERNELS
    launches.clear()
    for kernel in TABLE:
        Launch(kernel)()
    assert HOPPER_KERNELS - {launch.name for launch in launches} == set()


@pytest.mark.parametrize(
    ("arch", "columns"), [(80, 128), (86, 128), (89, 128), (90, 256), (100, 256), (120, 128)]
)
def test_tiles_are_as_wide_as_registers_allow(launches, on, arch, columns):
    """Those for Hopper are those that were measured."""
    on(arch)
    sizes = "mixtral-8x7b"
    for launch in (
        Launch("grouped_gemm", sizes),
        Launch("grouped_gemm_wgrad", sizes),
        *(
            Launch(kernel, sizes, activation=ACTIVATIONS[name], ways="gather")
            for name, kernel in product(("swiglu", "srelu"), FUSED)
        ),
    ):
        launch()
    wgrad = launches.latest("grouped_gemm_wgrad_kernel").kwargs["WGRAD"].config
    assert (wgrad.block_m, wgrad.block_n) == (128, columns)
    chosen = [launch.kwargs["GEMM"].config for launch in launches if "GEMM" in launch.kwargs]
    chosen = [
        (c.block_m, c.block_n, c.block_k, c.num_stages, c.num_warps, c.flatten, c.parts)
        for c in chosen
    ]
    wide = columns == 256
    gemm_tile, ungated = (
        ((128, 256, 64, 3, 8), (128, 256, 64, 3, 8))
        if wide
        else ((128, 128, 64, 4, 8), (128, 128, 64, 3, 8))
    )
    dact = (128, columns, 64, 3 if wide else 4, 8, wide, 8 if wide else 4)
    gated = (128, columns // 2, 64, 3, 8, False, 4)
    assert chosen == [(*gemm_tile, True, 1), gated, dact, (*ungated, False, 4), dact]
