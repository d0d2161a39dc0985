"""Compiles the grouped GEMMs of quantised numbers without a GPU: of E4M3 numbers with fp32 scales for Hopper, by its
own kernels and by Triton's; of MXFP8 and NVFP4 numbers for Blackwell and for Hopper."""

import re
from functools import partial
from itertools import product

import pytest

pytest.importorskip("triton")

from ahead_of_time import since
from compiled_launches import BLACKWELL, HOPPER, WORKSTATION, Case, atomics, code_cases, no_atomics
from launch_table import BF16, FP16, FP32, Launch

from symmoe.kernels import hopper_choice
from symmoe.kernels import hopper_launchers as launchers

MAX_SPILLED = since(("3.6", 8), ("3.9", 20))  # bytes: of a tile, not of its stages
# Of the product: bytes, and how often a stage goes to local memory. The same ptxas keeps less in registers of
# what Triton 3.7 writes: mostly what a tile needs before and after its stages; eight bytes are read in a stage, by one
# of the two warpgroups. No order of these lines, nor other widths of what is kept, was found that spills less with it.
GEMM_SPILLED, STAGE_SPILLS = since(("3.6", (16, 0)), ("3.7", (52, 1)), ("3.9", (100, 6)))
BIAS_SPILLED, BIAS_STAGE_SPILLS = since(("3.6", (40, 0)), ("3.9", (76, 2)))  # of a tile with a bias
ADDED_SPILLED = 32  # of a tile too, where it is added by TMA
TABLE_SPILLED = since(("3.6", 20), ("3.7", 8), ("3.9", 20))
ODD_SPILLED = 128  # bytes, where tiles have to be masked
STAGE_PRODUCTS = 16  # 4 to a half, 2 halves, 2 warpgroups
USUAL = "deepseek-like"


def begins_at_zero(code):
    """Every partial sum begins at zero, and the other products of its stage are added to it."""
    kinds = re.findall(r"wgmma\.mma_async\.sync\.aligned\.(\S+) [^;]*;", code.ptx)
    assert kinds == ["m64n128k32.f32.e4m3.e4m3"] * STAGE_PRODUCTS
    adds = re.findall(r"\}, %rd\d+, %rd\d+, (\S+), 1, 1;", code.ptx)
    assert [add == "0" for add in adds] == [True, False, False, False] * 4


def keeps_stages_in_registers(most_spills, code):
    stages = code.loops_of("QGMMA")
    products = [sum(name.startswith("QGMMA") for name in stage) for stage in stages]
    assert products == [STAGE_PRODUCTS // 2] * 2
    spills = [name for stage in stages for name in stage if name.startswith(("LDL", "STL"))]
    assert len(spills) <= most_spills


def reads_scales_of_columns_in_time(code):
    """They come by TMA with the operands; threads read 32 of a column and 4 of a row for both partial sums of a stage.
    Those of a row while the first one is on its way, those of the next stage's columns after the second one."""
    ptx, end = code.ptx, "wgmma.wait_group.sync.aligned 0;"
    first = ptx[ptx.index("wgmma.mma_async") :]
    under_way = first[: first.index(end)]
    following = first[len(under_way) : first.index("wgmma.mma_async", len(under_way))]
    assert (under_way.count("ld.shared.v2.b32"), under_way.count("ld.shared.b32")) == (0, 4)
    assert "ld.shared" not in following
    second = first[len(under_way) + len(following) :]
    second = second[: second.index("wgmma.mma_async", second.index(end))]
    of_the_next = second[: second.index("fma.rn.f32")].count("ld.shared.v2.b32")
    assert (ptx[: ptx.index("wgmma.mma_async")].count("ld.shared.v2.b32"), of_the_next) == (16, 16)


def fp8_gemm(sizes, ways, dtype=BF16, spilled=GEMM_SPILLED, spills=STAGE_SPILLS, ptx=None):
    return Case(
        Launch("launch_fp8_gemm", sizes, dtype, ways=ways),
        ptx={"setmaxnreg": True} | (ptx or {}),
        bounds={"spilled": spilled},
        also=(begins_at_zero, partial(keeps_stages_in_registers, spills)),
    )


def stores_by_tma(dtype, ways, code):
    """What is added goes by a table; fp32 sums alone are added there, others would be rounded twice."""
    accumulate = "accumulate" in ways
    num_stores = 0 if accumulate and dtype != FP32 else 16
    kind = "cp.reduce.async" if accumulate else "cp.async"
    space = "4d.global.shared::cta.add." if accumulate else "3d.global.shared::cta."
    if "table" in ways:
        assert len(re.findall(rf"{kind}\.bulk\.tensor\.4d\.global", code.ptx)) == 16
    else:
        stores = re.findall(r"\S+\.bulk\.tensor\.\dd\.global\S*", code.ptx)
        assert stores == num_stores * [f"{kind}.bulk.tensor.{space}bulk_group"]
    assert not atomics(code.ptx)


def fp8_wgrad(sizes, ways, dtype):
    most_spilled = TABLE_SPILLED if "table" in ways else MAX_SPILLED
    if "accumulate" in ways and dtype == FP32:
        most_spilled = ADDED_SPILLED
    return Case(
        Launch("launch_fp8_wgrad", sizes, dtype, ways=ways),
        ptx={"setmaxnreg": True, "cp.async.bulk.tensor.2d.shared": 4, "cp.async.ca": False},
        bounds={"spilled": most_spilled},
        also=(begins_at_zero, reads_scales_of_columns_in_time, partial(stores_by_tma, dtype, ways)),
    )


def waits_once_for_a_stage(code):
    assert len(re.findall(r"mbarrier\.arrive\.shared", code.ptx)) == 2  # besides the load's
    # The load's; of either role the first stage's, and the next one's.
    assert code.ptx.count("mbarrier.try_wait") == 5
    before_every_part = re.findall(r"cp\.async\.bulk\.wait_group\.read\s+1;", code.ptx)
    assert len(before_every_part) == 16


# -- Triton's ----------------------------------------------------------------------------------------------------------
MULTIPLYING = r"\b(?:tcgen05\.mma|wgmma\.mma_async|mma\.sync)\.\S+"


def multiplies_e4m3(arch, code):
    multiplying = set(re.findall(MULTIPLYING, code.ptx))
    if arch == BLACKWELL:
        assert multiplying == {"tcgen05.mma.cta_group::1.kind::f8f6f4"}
    else:
        kinds = {text.partition(".m64n")[0] for text in multiplying}
        assert kinds == {"wgmma.mma_async.sync.aligned"}
        assert all(text.endswith("f32.e4m3.e4m3") for text in multiplying)


def general_fp8(kernel, ways, dtype, arch):
    is_tight = arch == BLACKWELL and "biased" not in ways
    return Case(
        Launch(kernel, "odd fp8", dtype, ways=ways),
        f"{kernel.removesuffix('_quantized')}_fp8_kernel",
        arch=arch,
        ptx={"cp.async.bulk.tensor": True},
        bounds={"spilled": 0 if is_tight else ODD_SPILLED},
        also=(partial(multiplies_e4m3, arch),),
    )


GENERAL_FP8 = [
    ("grouped_gemm_quantized", "zero-tail", FP32),
    ("grouped_gemm_quantized", "zero-tail fp32-biased", FP32),
    ("grouped_gemm_wgrad_quantized", "accumulate", BF16),
]
NAMES = ("mxfp8", "nvfp4")
ARCHS = (BLACKWELL, WORKSTATION, HOPPER)
MAX_TENSOR_COLUMNS = 512  # of tensor memory, which an SM has
PRODUCT = {  # Triton 3.9 gives a vector of scales its other name on Blackwell
    "mxfp8": r"kind::mxf8f6f4\.block_scale\.(scale_vec::1X|block32)",
    "nvfp4": r"kind::mxf4nvf4\.block_scale\.(scale_vec::4X|block16)",
}
EMULATED = {"mxfp8": "f32.bf16.bf16", "nvfp4": "f32.f16.f16"}
# Bytes, of weight gradients that are added to what is there, on Blackwell.
SCALED_ADDED_SPILLED = since(("3.6", 0), ("3.7", 16), ("3.8", 48), ("3.9", 72))


def multiplies_as_the_format_has_it(name, arch, code):
    products = re.findall(MULTIPLYING, code.ptx)
    assert products
    if arch == HOPPER:
        assert all(text.startswith("wgmma") and EMULATED[name] in text for text in products)
    else:
        assert all(re.search(PRODUCT[name], text) for text in products)
    if arch == BLACKWELL:
        assert all(text.startswith("tcgen05") for text in products)
        assert code.metadata.tmem_size <= MAX_TENSOR_COLUMNS


def has_scales_in_tensor_memory(code):
    """They go there from shared memory, and not by way of registers, as they would from another layout."""
    instructions = set(re.findall(r"^\s*(?:@\S+\s+)?(tcgen05\.\S+)", code.ptx, re.MULTILINE))
    assert "tcgen05.cp.cta_group::1.warpx4.32x128b" in instructions
    stores = [text for text in instructions if text.startswith("tcgen05.st")]
    assert all("x128" in text for text in stores)


def rounds_one_by_one(code):
    """Global scales, and what is added to."""
    assert not re.search(r"fma\.rn\.f32", code.ptx)


def scaled(kernel, name, arch, sizes, ways, dtype=BF16, spilled=0, also=()):
    # Scales of scattered weights come by way of registers.
    by_copy = arch == BLACKWELL and "scattered" not in ways
    return Case(
        Launch(kernel, sizes, dtype, format=name, ways=ways),
        arch=arch,
        ptx={"cp.async.bulk.tensor": True},
        bounds={"spilled": spilled},
        also=(
            partial(multiplies_as_the_format_has_it, name, arch),
            *[has_scales_in_tensor_memory] * by_copy,
            *also,
        ),
    )


scaled_gemm = partial(scaled, "grouped_gemm_quantized")
scaled_wgrad = partial(scaled, "grouped_gemm_wgrad_quantized")


def scaled_gradient(name, arch, sizes, ways, dtype):
    spilled = SCALED_ADDED_SPILLED if ways else 0
    return scaled_wgrad(name, arch, sizes, ways, dtype, spilled, (no_atomics, rounds_one_by_one))


SECTIONS = {
    "fp8": [
        fp8_gemm(
            *options,
            ptx={"cp.async.bulk.tensor.3d.shared": True, "cp.async.bulk.tensor.4d.global": 8},
        )
        for options in (
            (USUAL, "zero-tail"),
            ("odd fp8", "zero-tail", FP16),
            ("odd fp8", ""),
            ("odd fp8", "zero-tail"),
        )
    ],
    "fp8 with biases": [
        fp8_gemm(sizes, f"zero-tail {ways}", spilled=BIAS_SPILLED, spills=BIAS_STAGE_SPILLS)
        for sizes, ways in product(
            (USUAL, "odd fp8"), ("bias", "biased", "bias scattered", "biased scattered")
        )
    ],
    "gradients of fp8": [
        *(fp8_wgrad(USUAL, *options) for options in product(("", "accumulate"), (BF16, FP32))),
        fp8_wgrad("odd fp8", "accumulate", BF16),
    ],
    "gradients of fp8 in scattered matrices": [
        fp8_wgrad(USUAL, ways, FP32) for ways in ("table", "table accumulate")
    ],
    "gradients of fp8 wait once for a stage": [
        Case(
            Launch("launch_fp8_wgrad", USUAL),
            bounds={"spilled": MAX_SPILLED},
            also=(waits_once_for_a_stage,),
        )
    ],
    "fp8 by Triton": [
        general_fp8(*options, arch) for options, arch in product(GENERAL_FP8, (BLACKWELL, HOPPER))
    ],
    "products": [
        scaled_gemm(name, arch, sizes, "zero-tail")
        for name, (arch, sizes) in product(
            NAMES,
            [
                (BLACKWELL, USUAL),
                (BLACKWELL, "odd blocks"),
                (BLACKWELL, "narrow blocks"),
                (WORKSTATION, "odd blocks"),
                (HOPPER, "odd blocks"),
            ],
        )
    ],
    "biases": [
        scaled_gemm(name, arch, "odd blocks", "biased") for name, arch in product(NAMES, ARCHS)
    ],
    "scattered weights": [
        scaled_gemm(name, arch, "odd blocks", "scattered")
        for name, arch in product(NAMES, (BLACKWELL, HOPPER))
    ],
    "scattered gradients": [
        scaled_wgrad(name, arch, USUAL, "table accumulate", FP32, max(16, SCALED_ADDED_SPILLED))
        for name, arch in product(NAMES, (BLACKWELL, HOPPER))
    ],
    "parts of products": [
        scaled_gemm(name, arch, "odd blocks", "parts", FP16)
        for name, arch in product(NAMES, (BLACKWELL, HOPPER))
    ],
    "gradients": [
        scaled_gradient(name, *options)
        for name, options in product(
            NAMES,
            [
                (BLACKWELL, USUAL, "", BF16),
                (BLACKWELL, USUAL, "accumulate", FP32),
                *((arch, "odd blocks", "accumulate", BF16) for arch in ARCHS),
            ],
        )
    ],
}


@code_cases(SECTIONS)
def test_code(launches, on, case):
    on(case.arch)
    case.check(launches)


def test_the_public_functions_choose_the_kernels_for_hopper(launches, monkeypatch):
    def launchers_for(device, dtype, columns):
        return launchers if dtype in (BF16, FP16) and columns >= 256 else None

    def launched(kernel, sizes="odd fp8", dtype=BF16, ways=""):
        launch = Launch(kernel, sizes, dtype, ways=ways, changes={"num_sms": 5})
        (kernel_launch,) = launches.made_by(launch)
        return kernel_launch

    monkeypatch.setattr(hopper_choice, "hopper_kernels", launchers_for)
    product, gradient = "grouped_gemm_quantized", "grouped_gemm_wgrad_quantized"
    launch = launched(product)
    pipe = launch.kwargs["PIPE"]
    assert (launch.grid, pipe.num_n_tiles, pipe.num_k) == ((5,), 3, 9)
    for dtype, ways in ((BF16, ""), (FP32, "accumulate")):
        launch = launched(gradient, dtype=dtype, ways=ways)
        assert (launch.grid, launch.kwargs["PIPE"].accumulate) == ((5,), bool(ways))
    narrow = {"G": 3, "W": 128, "H": 256, "N": 99}
    assert launched(product, dtype=FP32).name == "grouped_gemm_fp8_kernel"
    assert launched(product, narrow).name == "grouped_gemm_fp8_kernel"
    turned = {**narrow, "W": 256, "H": 128}
    assert launched(gradient, turned).name == "grouped_gemm_wgrad_fp8_kernel"
