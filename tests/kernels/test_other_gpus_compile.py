"""Compiles every general kernel for the GPUs that nothing was measured on, without one, in a usual and an odd case.

What is checked is what a launch there needs: it compiles, it fits into shared memory, and registers spill little.
"""

import itertools
import sys

import pytest
import torch

pytest.importorskip("triton")

import act_quantize_launches as act_quantize
import quantize_launches as quantize
import test_gemm_act_compile as gemm_act
import test_gemm_compile as gemm
import test_gpu_kernels_compile as rows
import test_router_products_compile as router
from compiled_launches import catch_launches, kernels_of, meta
from quantized_gemm_launches import ELEMENTS, SHAPES, gemm_operands, wgrad_operands
from simulated_ranks import Case

from symmoe.kernels import architectures, gpu
from symmoe.kernels.activation import Activation
from symmoe.kernels.low_precision import fp8 as gpu_fp8
from symmoe.kernels.low_precision import scaled as gpu_scaled
from symmoe.kernels.routing_rule import RoutingRule
from symmoe.kernels.tensor_table import TensorTable
from symmoe.kernels.triton import bias, route, splits
from symmoe.kernels.triton import gemm as gpu_gemm

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
OTHERS = [10 * major + minor for (major, minor), kind in architectures.ARCHITECTURES.items() if not kind.is_measured]
MODULES = sorted({sys.modules[getattr(gpu, name).__module__] for name in gpu.__all__}, key=lambda each: each.__name__)
KERNELS = {kernel.__name__ for *_, kernel in kernels_of(*MODULES)}


def launch_products():
    for function, options in gemm.GEMMS:
        gemm.launch(function, "qwen3-30b" if len(options) < 2 else "odd", BF16, **options)
    for dtype in (FP16, FP32):
        for function in ("gemm", "dgrad", "wgrad"):
            gemm.launch(function, "odd" if dtype == FP16 else "narrow", dtype)
    row_range, scale = meta(2, 32), meta(999, dtype=FP32)
    for dtype, index in ((BF16, None), (FP32, meta(999))):
        dout, biases = meta(999, 1424, dtype=dtype), meta(32, 1424, dtype=dtype)
        bias.grouped_bias_grad(dout, row_range, biases, dout_index=index, scale=scale)
        bias.grouped_bias_dot(dout, biases, row_range, scale, dout_index=index, accumulate=True)
        table = TensorTable(meta(32, dtype=torch.int64), (32, 1424, 1032), dtype)
        gpu_gemm.grouped_gemm_wgrad(dout[:0], meta(0, 1032, dtype=dtype), row_range, table)
    splits.splits_to_row_range(meta(32), row_range, 12345)


def launch_activations():
    swiglu, srelu, gelu = (gemm_act.ACTIVATIONS[name] for name in ("swiglu", "srelu", "gelu"))
    for layout in gemm_act.LAYOUTS:
        gemm_act.launch("qwen3-30b", swiglu, layout=layout)
    gemm_act.launch("qwen3-30b", Activation(interleave=32), layout="contiguous")
    gemm_act.launch("odd", Activation(interleave=4, limit=7.0), layout="biased")
    gemm_act.launch("odd", srelu, layout="table")
    gemm_act.launch("narrow", gelu, FP16, layout="contiguous")
    gemm_act.launch("narrow", swiglu, FP32)


def launch_router():
    for shape in ("qwen3-30b", "odd"):
        router.launch(shape)
    for experts, top_k, rule in ((128, 8, RoutingRule()), (20, 3, RoutingRule(score="sigmoid"))):
        logits, probs, topk_idx = meta(8192, experts, dtype=FP32), meta(8192, top_k, dtype=FP32), meta(8192, top_k)
        route.choose_experts(logits, logits[0], None, topk_idx, probs, logits, rule=rule)
        route.choose_experts_grad(probs, logits, topk_idx, logits, logits, rule=rule)


def launch_rows():
    rows.step(Case(tokens=(64, 32), num_experts=128, top_k=8, hidden=2048, dtype=BF16), 0)
    rows.step(Case(tokens=(3, 70, 9), num_experts=12, top_k=3, hidden=1000, dtype=FP32), 1)


def launch_quantised_products():
    for name, (shape, dtype) in itertools.product(ELEMENTS, (("deepseek-like FC1", BF16), ("odd", FP32))):
        kernels = gpu_fp8 if name == "fp8" else gpu_scaled
        kind = "fp8" if name == "fp8" else "scaled"
        G, O, _, N = SHAPES[shape]
        gemm, wgrad = getattr(kernels, f"grouped_gemm_{kind}"), getattr(kernels, f"grouped_gemm_wgrad_{kind}")
        arguments, options = gemm_operands(name, shape, dtype)
        gemm(*arguments, num_sms=132, **options)
        options |= {"bias": meta(G, O, dtype=dtype), "bias_scale": meta(N, dtype=FP32)}
        options |= {"group_range": meta(2, G)} if name != "fp8" and shape == "odd" else {}
        gemm(*arguments, zero_tail=True, num_sms=132, **options)
        for accumulate in (False, True):
            arguments, options = wgrad_operands(name, shape, dtype)
            wgrad(*arguments, accumulate=accumulate, num_sms=132, **options)


def launch_quantisers():
    for name, launch in itertools.product(
        quantize.NAMES,
        (quantize.launch_rows, quantize.launch_columns, quantize.launch_weights, quantize.launch_weight_pairs),
    ):
        launch(name, BF16)
    quantize.step(333, 0x9A5C, 2048)
    quantize.step(16, 1)
    for name, ffn, block_format in act_quantize.CASES[:4]:
        for operand in ("rows", "columns"):
            act_quantize.launch_act(name, ffn, block_format, operand)
        act_quantize.launch_dact(name, ffn, block_format, with_dbias=block_format == "mxfp8")


GROUPS = {
    "products": launch_products,
    "activations": launch_activations,
    "router": launch_router,
    "rows": launch_rows,
    "quantised products": launch_quantised_products,
    "quantisers": launch_quantisers,
}
QUANTISED = {"quantised products", "quantisers"}


# Bytes that a thread spills, at most, where it is more than none. Where tensor cores take operands from registers,
# accumulators leave little room for three of them.
MAX_SPILLED = {
    "grouped_gemm_kernel": 256,
    "grouped_gemm_wgrad_kernel": 64,
    "grouped_gemm_act_kernel": 256,
    "grouped_gemm_dact_kernel": 64,
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
def launches(monkeypatch):
    return catch_launches(monkeypatch, *MODULES)


@pytest.fixture
def on(monkeypatch):
    """on(arch): the launchers choose as on a GPU of this architecture."""
    monkeypatch.setattr(gpu_scaled, "scaled_products", gpu_scaled.scaled_products.__wrapped__)
    return lambda arch: monkeypatch.setattr(architectures, "capability", lambda device: divmod(arch, 10))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "arch"),
    [(group, arch) for group in GROUPS for arch in OTHERS if group not in QUANTISED or arch >= 89],
    ids=str,
)
def test_it_compiles_and_fits(launches, on, group, arch):
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
    ("arch", "columns"), [(80, 128), (86, 128), (89, 128), (90, 256), (100, 256), (120, 128)], ids=str
)
def test_tiles_are_as_wide_as_registers_allow(launches, on, arch, columns):
    """Those for Hopper are those that were measured."""
    on(arch)
    gemm.launch("gemm", "mixtral-8x7b", BF16)
    gemm.launch("wgrad", "mixtral-8x7b", BF16)
    gemm_act.launch("mixtral-8x7b", Activation())
    gemm_act.launch("mixtral-8x7b", Activation(function="relu2", is_gated=False))
    names = "BLOCK_M", "BLOCK_N", "BLOCK_K", "num_stages", "num_warps", "FLATTEN", "PARTS"
    chosen = [tuple(launch.kwargs.get(name) for name in names) for launch in launches if "BLOCK_M" in launch.kwargs]
    wide = columns == 256
    gemm_tile, ungated = (
        ((128, 256, 64, 3, 8), (128, 256, 64, 3, 8)) if wide else ((128, 128, 64, 4, 8), (128, 128, 64, 3, 8))
    )
    dact = (128, columns, 64, 3 if wide else 4, 8, wide, 8 if wide else 4)
    gated = (128, columns // 2, 64, 3, 8, False, 4)
    assert chosen == [(*gemm_tile, True, None)] * 2 + [gated, dact, (*ungated, False, 4), dact]
