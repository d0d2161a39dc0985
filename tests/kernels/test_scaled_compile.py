"""Compiles the grouped GEMMs of MXFP8 and NVFP4 numbers without a GPU, for Blackwell and for Hopper. With the arguments
of their launchers, on meta tensors, so that shapes can be real ones. See test_gemm_compile.py."""

import re

import pytest
import torch

pytest.importorskip("triton")

from ahead_of_time import since
from compiled_launches import BLACKWELL, HOPPER, WORKSTATION, atomics, catch_launches, meta
from low_precision_launches import BF16, FP16, FP32, PRODUCT_SHAPES, gemm_operands, wgrad_operands

from symmoe.kernels.formats import TILE
from symmoe.kernels.low_precision import products
from symmoe.kernels.low_precision.block_scaled import scaled
from symmoe.kernels.operands import ScatteredWeight, TensorTable

UNITS = {BLACKWELL: "tcgen05", WORKSTATION: "mma", HOPPER: None}
MAX_TENSOR_COLUMNS = 512  # of tensor memory, which an SM has
PRODUCT = {  # Triton 3.9 gives a vector of scales its other name on Blackwell
    "mxfp8": r"kind::mxf8f6f4\.block_scale\.(scale_vec::1X|block32)",
    "nvfp4": r"kind::mxf4nvf4\.block_scale\.(scale_vec::4X|block16)",
}
EMULATED = {"mxfp8": "f32.bf16.bf16", "nvfp4": "f32.f16.f16"}

names = pytest.mark.parametrize("name", PRODUCT)
ARCHS_AND_SHAPES = [
    *((BLACKWELL, shape) for shape in PRODUCT_SHAPES),
    (WORKSTATION, "odd"),
    (HOPPER, "odd"),
]


@pytest.fixture
def compile_launch(monkeypatch):
    """compile_launch(arch, function, arguments, **options): the code of its one launch."""
    launches = catch_launches(monkeypatch, scaled)

    def compile_one(arch, function, arguments, **options):
        monkeypatch.setattr(scaled, "scaled_products", lambda device: UNITS[arch])
        function(*arguments, num_sms=132, **options)
        return launches.compile(arch=arch)

    return compile_one


# Bytes, of weight gradients that are added to what is there, on Blackwell.
ADDED_SPILLED = since(("3.6", 0), ("3.7", 16), ("3.8", 48), ("3.9", 72))


def check(code, name, arch, most_spilled=0):
    """The products are those of the format, operands come by TMA, and registers do not spill."""
    instructions = set(
        re.findall(r"^\s*(?:@\S+\s+)?((?:tcgen05|wgmma|mma|cp\.async\.bulk)\.\S+)", code.ptx, re.M)
    )
    products = [
        text
        for text in instructions
        if re.match(r"(tcgen05\.mma|wgmma\.mma_async|mma\.sync)\.", text)
    ]
    assert products
    if arch == HOPPER:
        assert all(text.startswith("wgmma") and EMULATED[name] in text for text in products)
    else:
        assert all(re.search(PRODUCT[name], text) for text in products)
    if arch == BLACKWELL:
        assert all(text.startswith("tcgen05") for text in products)
        assert code.metadata.tmem_size <= MAX_TENSOR_COLUMNS
        # Scales go from shared to tensor memory, and not by way of registers, as they would from another layout.
        assert "tcgen05.cp.cta_group::1.warpx4.32x128b" in instructions
        assert not [
            text for text in instructions if text.startswith("tcgen05.st") and "x128" not in text
        ]
    assert any(text.startswith("cp.async.bulk.tensor") for text in instructions)
    assert code.spilled <= most_spilled


@names
@pytest.mark.parametrize(("arch", "shape"), ARCHS_AND_SHAPES)
def test_products(compile_launch, arch, shape, name):
    arguments = gemm_operands(name, shape)
    check(
        compile_launch(arch, products.grouped_gemm_quantized, arguments, zero_tail=True), name, arch
    )


@names
@pytest.mark.parametrize("arch", UNITS)
def test_biases(compile_launch, arch, name):
    G, O, _, N = PRODUCT_SHAPES["odd"]
    bias = meta(G, O, dtype=BF16), meta(N, dtype=FP32)
    code = compile_launch(
        arch, products.grouped_gemm_quantized, gemm_operands(name, "odd"), bias=bias
    )
    check(code, name, arch)


@pytest.mark.parametrize("arch", [BLACKWELL, HOPPER])
@names
def test_scattered_matrices(compile_launch, arch, name):
    """Weights, their scales, and gradients. Scales of weights come by way of registers."""
    rows, (weight, _, global_scale), *rest = gemm_operands(name, "odd")
    addresses = meta(len(weight), dtype=torch.int64)
    scales = len(weight), -(-weight.shape[1] // TILE), rows.scale.shape[1] * rows.scale.shape[2]
    tables = (
        TensorTable(addresses, tuple(weight.shape), weight.dtype),
        TensorTable(addresses, scales, torch.uint8),
    )
    arguments = rows, ScatteredWeight(*tables, global_scale), *rest
    code = compile_launch(arch, products.grouped_gemm_quantized, arguments)
    assert re.search((EMULATED if arch == HOPPER else PRODUCT)[name], code.ptx)
    *operands, out = wgrad_operands(name, "deepseek-like FC1", FP32)
    table = TensorTable(meta(len(out), dtype=torch.int64), tuple(out.shape), FP32)
    code = compile_launch(
        arch, products.grouped_gemm_wgrad_quantized, (*operands, table), accumulate=True
    )
    check(code, name, arch, max(16, ADDED_SPILLED))


@pytest.mark.slow
@names
@pytest.mark.parametrize("arch", [BLACKWELL, HOPPER])
def test_parts_of_products(compile_launch, arch, name):
    arguments, group_range = gemm_operands(name, "odd", FP16), meta(2, PRODUCT_SHAPES["odd"][0])
    check(
        compile_launch(arch, products.grouped_gemm_quantized, arguments, group_range=group_range),
        name,
        arch,
    )


@names
@pytest.mark.parametrize(
    ("arch", "shape", "dtype", "accumulate"),
    [
        (BLACKWELL, "deepseek-like FC1", BF16, False),
        (BLACKWELL, "deepseek-like FC1", FP32, True),
        *((arch, "odd", BF16, True) for arch in UNITS),
    ],
    ids=str,
)
def test_weight_gradients(compile_launch, arch, shape, dtype, accumulate, name):
    arguments = wgrad_operands(name, shape, dtype)
    code = compile_launch(
        arch, products.grouped_gemm_wgrad_quantized, arguments, accumulate=accumulate
    )
    check(code, name, arch, ADDED_SPILLED if accumulate else 0)
    assert not atomics(code.ptx)
    assert not re.search(
        r"fma\.rn\.f32", code.ptx
    )  # global scales and what is added to are rounded one by one
