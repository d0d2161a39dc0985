"""Compiles every general kernel for the GPUs that nothing was measured on, without one, in a usual and an odd case.
What is checked is what a launch there needs: it compiles, it fits into shared memory, and registers spill little."""

import itertools
import sys

import pytest
import torch

pytest.importorskip("triton")

import kernel_launches as layer
import low_precision_launches as quantize
from ahead_of_time import VERSION, since
from compiled_launches import kernels_of, meta
from kernel_launches import ACTIVATIONS, BF16, FP16, FP32, GEMMS, LAYOUTS
from low_precision_launches import ELEMENTS, PRODUCT_SHAPES, gemm_operands, wgrad_operands

from symmoe.kernels import architectures, gpu
from symmoe.kernels.activation import Activation
from symmoe.kernels.low_precision import fp8 as gpu_fp8
from symmoe.kernels.low_precision import products as gpu_products
from symmoe.kernels.low_precision import scaled as gpu_scaled
from symmoe.kernels.routing_rule import RoutingRule

OTHERS = [
    10 * major + minor
    for (major, minor), kind in architectures.ARCHITECTURES.items()
    if not kind.is_measured
]
FOUND = {sys.modules[getattr(gpu, name).__module__] for name in gpu.__all__}
MODULES = sorted({*FOUND, gpu_fp8, gpu_scaled}, key=lambda each: each.__name__)
KERNELS = {kernel.__name__ for *_, kernel in kernels_of(*MODULES)}


def launch_products():
    for function, options in GEMMS:
        layer.launch_gemm(function, "qwen3-30b" if len(options) < 2 else "odd", BF16, **options)
    for dtype, shape in ((FP16, "odd"), (FP32, "narrower")):
        for function in ("gemm", "dgrad", "wgrad"):
            layer.launch_gemm(function, shape, dtype)
    for dtype in (BF16, FP32):
        layer.launch_bias_gradients(dtype, dtype == FP32, "odd")
        layer.launch_zeros(dtype)
    layer.launch_splits(32, torch.int32)


def launch_fused_products():
    for layout in LAYOUTS:
        layer.launch_activations("qwen3-30b", Activation(), layout=layout)
    layer.launch_activations("qwen3-30b", Activation(interleave=32), layout="contiguous")
    layer.launch_activations("odd", Activation(interleave=4, limit=7.0), layout="biased")
    layer.launch_activations("odd", ACTIVATIONS["srelu"], layout="table")
    layer.launch_activations("narrow", ACTIVATIONS["gelu"], FP16, layout="contiguous")
    layer.launch_activations("narrow", Activation(), FP32)


def launch_routers():
    for shape in ("qwen3-30b", "odd"):
        layer.launch_router(shape)
    layer.launch_choice(128, 8, RoutingRule(), 64)
    layer.launch_choice(20, 3, RoutingRule(score="sigmoid"))
    layer.launch_losses(128, "softmax")


def launch_trips():
    for shape, dtype in (("qwen3-30b", BF16), ("odd", FP32)):
        layer.launch_plan(shape)
        layer.launch_rows(shape, dtype)
        layer.launch_slots(shape, with_probs=True)
        layer.launch_replicas(dtype, table=dtype == FP32)
    layer.launch_plan("qwen3-30b", drop=True, num_replica_slots=4)
    layer.launch_between_nodes("qwen3-30b", 2)
    layer.launch_barrier(4)
    layer.launch_signals()


def launch_quantised_products():
    for name, (shape, dtype) in itertools.product(
        ELEMENTS, (("deepseek-like FC1", BF16), ("odd", FP32))
    ):
        (G, O, _, N), arguments = PRODUCT_SHAPES[shape], gemm_operands(name, shape, dtype)
        gpu_products.grouped_gemm_quantized(*arguments, num_sms=132)
        options = {"bias": (meta(G, O, dtype=dtype), meta(N, dtype=FP32)), "zero_tail": True}
        options |= {"group_range": meta(2, G)} if name != "fp8" and shape == "odd" else {}
        gpu_products.grouped_gemm_quantized(*arguments, num_sms=132, **options)
        arguments = wgrad_operands(name, shape, dtype)
        for accumulate in (False, True):
            gpu_products.grouped_gemm_wgrad_quantized(
                *arguments, accumulate=accumulate, num_sms=132
            )


def launch_quantisers():
    for name, launch in itertools.product(quantize.NAMES, quantize.LAUNCHES):
        launch(name, BF16)
    quantize.step(333, 0x9A5C, 2048)
    quantize.step(16, 1)
    for name, ffn, block_format in quantize.ACTIVATION_CASES[:4]:
        quantize.launch_act(name, ffn, block_format)
        quantize.launch_dact(name, ffn, block_format, with_dbias=block_format == "mxfp8")


GROUPS = {
    "products": launch_products,
    "activations": launch_fused_products,
    "router": launch_routers,
    "rows": launch_trips,
    "quantised products": launch_quantised_products,
    "quantisers": launch_quantisers,
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


@pytest.fixture
def on(monkeypatch):
    """on(arch): the launchers choose as on a GPU of this architecture."""
    monkeypatch.setattr(gpu_scaled, "scaled_products", gpu_scaled.scaled_products.__wrapped__)
    return lambda arch: monkeypatch.setattr(
        architectures, "capability", lambda device: divmod(arch, 10)
    )


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
    GROUPS[group]()
    for launch in {launch.key: launch for launch in launches}.values():
        code = launch.compile(arch)
        most = MAX_SPILLED.get(launch.name, OF_QUANTISERS if group == "quantisers" else 0)
        assert code.spilled <= most, (launch.name, code.spilled)


@pytest.mark.slow
def test_no_kernel_is_left_out(launches):
    for launch_all in GROUPS.values():
        launch_all()
    assert {launch.name for launch in launches} == KERNELS


@pytest.mark.parametrize(
    ("arch", "columns"), [(80, 128), (86, 128), (89, 128), (90, 256), (100, 256), (120, 128)]
)
def test_tiles_are_as_wide_as_registers_allow(launches, on, arch, columns):
    """Those for Hopper are those that were measured."""
    on(arch)
    layer.launch_gemm("gemm", "mixtral-8x7b", BF16)
    layer.launch_gemm("wgrad", "mixtral-8x7b", BF16)
    layer.launch_activations("mixtral-8x7b", Activation())
    layer.launch_activations("mixtral-8x7b", ACTIVATIONS["srelu"])
    wgrad = launches.of("grouped_gemm_wgrad_kernel").kwargs["WGRAD"].config
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
