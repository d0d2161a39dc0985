"""Compiles the grouped GEMMs of E4M3 numbers without a GPU. See test_gemm_compile.py and test_hopper_compile.py."""

import re
from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from ahead_of_time import since
from compiled_launches import BLACKWELL, HOPPER, atomics, meta
from low_precision_launches import BF16, FP16, FP32, gemm_operands, wgrad_operands

from symmoe.kernels import hopper_choice
from symmoe.kernels import hopper_launchers as launchers
from symmoe.kernels.low_precision import fp8, hopper_fp8, hopper_fp8_wgrad, products
from symmoe.kernels.operands import ScatteredWeight, TensorTable

MAX_SPILLED = since(("3.6", 8), ("3.9", 20))  # bytes: of a tile, not of its stages
# Of the product: bytes, and how often a stage goes to local memory. The same ptxas keeps less in registers of
# what Triton 3.7 writes: mostly what a tile needs before and after its stages; eight bytes are read in a stage, by one
# of the two warpgroups. No order of these lines, nor other widths of what is kept, was found that spills less with it.
GEMM_SPILLED, STAGE_SPILLS = since(("3.6", (16, 0)), ("3.7", (52, 1)), ("3.9", (100, 6)))
BIAS_SPILLED, BIAS_STAGE_SPILLS = since(("3.6", (40, 0)), ("3.9", (76, 2)))  # of a tile with a bias
ADDED_SPILLED = 32  # of a tile too, where it is added by TMA
ODD_SPILLED = 128  # bytes, where tiles have to be masked
PRODUCTS = "m64n128k32.f32.e4m3.e4m3"
STAGE_PRODUCTS = 16  # 4 to a half, 2 halves, 2 warpgroups

SHAPES = {
    "deepseek-like FC1": (32, 4096, 7168, 65536),
    "odd": (3, 712, 1040, 999),
}  # G, O, C, N of a product


gemm_arguments, wgrad_arguments = partial(gemm_operands, "fp8"), partial(wgrad_operands, "fp8")
MODULES = fp8, hopper_fp8, hopper_fp8_wgrad


def check_products(ptx):
    """Every partial sum begins at zero, and the other products of its stage are added to it."""
    assert (
        re.findall(r"wgmma\.mma_async\.sync\.aligned\.(\S+) [^;]*;", ptx)
        == [PRODUCTS] * STAGE_PRODUCTS
    )
    adds = re.findall(r"\}, %rd\d+, %rd\d+, (\S+), 1, 1;", ptx)
    assert [add == "0" for add in adds] == [True, False, False, False] * 4


def check_column_scales(ptx):
    """They come by TMA with the operands; threads read 32 of a column and 4 of a row for both partial sums of a stage.
    Those of a row while the first one is on its way, those of the next stage's columns after the second one."""
    assert ptx.count("cp.async.bulk.tensor.2d.shared") == 4
    assert "cp.async.ca" not in ptx
    first = ptx[ptx.index("wgmma.mma_async") :]
    under_way = first[: first.index("wgmma.wait_group.sync.aligned 0;")]
    rest = first[len(under_way) : first.index("wgmma.mma_async", len(under_way))]
    assert (under_way.count("ld.shared.v2.b32"), under_way.count("ld.shared.b32")) == (0, 4)
    assert "ld.shared" not in rest
    before, second = ptx[: ptx.index("wgmma.mma_async")], first[len(under_way) + len(rest) :]
    second = second[
        : second.index("wgmma.mma_async", second.index("wgmma.wait_group.sync.aligned 0;"))
    ]
    of_the_next = second[: second.index("fma.rn.f32")].count("ld.shared.v2.b32")
    assert (before.count("ld.shared.v2.b32"), of_the_next) == (16, 16)


@pytest.mark.parametrize(
    ("shape", "zero_tail", "dtype"),
    [
        ("deepseek-like FC1", True, BF16),
        pytest.param("odd", True, FP16, marks=pytest.mark.slow),
        pytest.param("odd", False, BF16, marks=pytest.mark.slow),
        ("odd", True, BF16),
    ],
    ids=str,
)
def test_products(launches, shape, zero_tail, dtype):
    arguments = gemm_arguments(SHAPES[shape], dtype)
    launchers.launch_fp8_gemm(*arguments, zero_tail=zero_tail, num_sms=132)
    code = launches.compile_roles(None)
    ptx = code.ptx
    assert code.spilled <= GEMM_SPILLED
    stages = code.loops_of("QGMMA")
    assert [sum(name.startswith("QGMMA") for name in stage) for stage in stages] == [
        STAGE_PRODUCTS // 2
    ] * 2
    assert (
        sum(name.startswith(("LDL", "STL")) for stage in stages for name in stage) <= STAGE_SPILLS
    )
    check_products(ptx)
    assert "cp.async.bulk.tensor.3d.shared" in ptx
    assert ptx.count("cp.async.bulk.tensor.4d.global") == 8


@pytest.mark.parametrize("is_table", [False, True], ids=["packed", "table"])
@pytest.mark.parametrize("is_scaled", [False, True], ids=["bias", "scaled bias"])
@pytest.mark.parametrize("shape", SHAPES)
def test_biases(launches, shape, is_scaled, is_table):
    """They cost registers of a tile, and up to Triton 3.8 none of its stages."""
    G, O, _, N = SHAPES[shape]
    rows, weight, row_range, out = gemm_arguments(SHAPES[shape])
    if is_table:
        tables = (
            TensorTable(meta(G, dtype=torch.int64), tuple(each.shape), each.dtype)
            for each in weight[:2]
        )
        weight = ScatteredWeight(*tables)
    bias = meta(G, O, dtype=BF16), meta(N, dtype=FP32) if is_scaled else None
    launchers.launch_fp8_gemm(rows, weight, row_range, out, bias=bias, zero_tail=True, num_sms=132)
    code = launches.compile_roles(None)
    assert code.spilled <= BIAS_SPILLED
    spills = [
        name
        for stage in code.loops_of("QGMMA")
        for name in stage
        if name.startswith(("LDL", "STL"))
    ]
    assert len(spills) <= BIAS_STAGE_SPILLS
    check_products(code.ptx)


@pytest.mark.parametrize(
    ("shape", "dtype", "accumulate"),
    [
        *(
            ("deepseek-like FC1", dtype, accumulate)
            for dtype in (BF16, FP32)
            for accumulate in (False, True)
        ),
        ("odd", BF16, True),
    ],
    ids=str,
)
def test_weight_gradients(launches, shape, dtype, accumulate):
    launchers.launch_fp8_wgrad(
        *wgrad_arguments(SHAPES[shape], dtype), accumulate=accumulate, num_sms=132
    )
    code = launches.compile_roles(None)
    ptx = code.ptx
    assert code.spilled <= (ADDED_SPILLED if accumulate and dtype == FP32 else MAX_SPILLED)
    check_products(ptx)
    check_column_scales(ptx)
    stores = 0 if accumulate and dtype != FP32 else 16
    kind = "cp.reduce.async" if accumulate else "cp.async"  # of fp32; others would be rounded twice
    place = (
        "4d.global.shared::cta.add." if accumulate else "3d.global.shared::cta."
    )  # what is added goes by a table
    assert re.findall(r"\S+\.bulk\.tensor\.\dd\.global\S*", ptx) == stores * [
        f"{kind}.bulk.tensor.{place}bulk_group"
    ]
    assert not atomics(ptx)


@pytest.mark.parametrize("accumulate", [False, True])
def test_weight_gradients_of_scattered_matrices(launches, accumulate):
    *operands, out = wgrad_arguments(SHAPES["deepseek-like FC1"], FP32)
    table = TensorTable(meta(len(out), dtype=torch.int64), tuple(out.shape), FP32)
    launchers.launch_fp8_wgrad(*operands, table, accumulate=accumulate, num_sms=132)
    code = launches.compile_roles(None)
    assert code.spilled <= (
        ADDED_SPILLED if accumulate else since(("3.6", 20), ("3.7", 8), ("3.9", 20))
    )
    check_products(code.ptx)
    check_column_scales(code.ptx)
    kind = "cp.reduce.async" if accumulate else "cp.async"
    assert len(re.findall(rf"{kind}\.bulk\.tensor\.4d\.global", code.ptx)) == 16


def test_weight_gradients_wait_once_for_a_stage(launches):
    launchers.launch_fp8_wgrad(*wgrad_arguments(SHAPES["deepseek-like FC1"]), num_sms=132)
    ptx = launches.compile_roles(None).ptx
    assert len(re.findall(r"mbarrier\.arrive\.shared", ptx)) == 2  # besides the load's, with bytes
    assert (
        ptx.count("mbarrier.try_wait") == 5
    )  # load's; of either role the first stage's, and the next one's
    assert (
        len(re.findall(r"cp\.async\.bulk\.wait_group\.read\s+1;", ptx)) == 16
    )  # before every part


@pytest.mark.parametrize("arch", [BLACKWELL, HOPPER])
@pytest.mark.parametrize(
    ("is_wgrad", "has_bias"),
    [(False, False), (False, True), (True, False)],
    ids=["product", "bias", "wgrad"],
)
def test_the_general_kernels(launches, is_wgrad, has_bias, arch):
    """As another GPU runs them, and as Hopper runs what its own kernels do not take."""
    if is_wgrad:
        products.grouped_gemm_wgrad_quantized(
            *wgrad_arguments(SHAPES["odd"]), accumulate=True, num_sms=132
        )
    else:
        G, O, _, N = SHAPES["odd"]
        options = {"bias": (meta(G, O, dtype=FP32), meta(N, dtype=FP32))} if has_bias else {}
        products.grouped_gemm_quantized(
            *gemm_arguments(SHAPES["odd"], FP32), zero_tail=True, num_sms=132, **options
        )
    code = launches.compile(arch=arch)
    ptx, spilled = code.ptx, code.spilled
    assert "cp.async.bulk.tensor" in ptx
    multiplying = set(re.findall(r"\b(?:tcgen05\.mma|wgmma\.mma_async|mma\.sync)\.\S+", ptx))
    if arch == HOPPER:
        assert {text.partition(".m64n")[0] for text in multiplying} == {
            "wgmma.mma_async.sync.aligned"
        }
        assert all(text.endswith("f32.e4m3.e4m3") for text in multiplying)
        assert spilled <= ODD_SPILLED
    else:
        assert multiplying == {"tcgen05.mma.cta_group::1.kind::f8f6f4"}
        assert spilled <= (ODD_SPILLED if has_bias else 0)


def test_the_public_functions_choose_the_kernels_for_hopper(launches, monkeypatch):
    def taken(device, dtype, columns):
        return launchers if dtype in (BF16, FP16) and columns >= 256 else None

    monkeypatch.setattr(hopper_choice, "hopper_kernels", taken)
    shape = SHAPES["odd"]
    products.grouped_gemm_quantized(*gemm_arguments(shape), num_sms=5)
    launch = launches.pop_one()
    pipe = launch.kwargs["PIPE"]
    assert (launch.grid, pipe.num_n_tiles, pipe.num_k) == ((5,), 3, 9)
    for dtype, accumulate in ((BF16, False), (FP32, True)):
        products.grouped_gemm_wgrad_quantized(
            *wgrad_arguments(shape, dtype), accumulate=accumulate, num_sms=5
        )
        launch = launches.pop_one()
        assert (launch.grid, launch.kwargs["PIPE"].accumulate) == ((5,), accumulate)
    products.grouped_gemm_quantized(*gemm_arguments(shape, FP32), num_sms=5)
    products.grouped_gemm_quantized(*gemm_arguments((3, 128, 256, 99)), num_sms=5)
    products.grouped_gemm_wgrad_quantized(*wgrad_arguments((3, 256, 128, 99)), num_sms=5)
    assert [launch.name for launch in launches] == ["grouped_gemm_fp8_kernel"] * 2 + [
        "grouped_gemm_wgrad_fp8_kernel"
    ]
