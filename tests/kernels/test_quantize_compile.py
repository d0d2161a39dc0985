"""Compiles what quantises without a GPU: for Hopper, and what makes formats that Blackwell multiplies for Blackwell.
What is checked is what the generated code must have: the GPU's conversion to E4M3, which saturates; exact divisions and
no approximate ones, no subnormals flushed; wide accesses; registers that do not spill."""

import re
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch

pytest.importorskip("triton")

from ahead_of_time import since
from compiled_launches import (
    BLACKWELL,
    HOPPER,
    MAX_SHARED,
    REGISTERS,
    Case,
    access_bits,
    code_cases,
    no_atomics,
)
from launch_table import (
    ACTIVATIONS,
    BF16,
    E2M1_AND_E8M0,
    FORMATS,
    FP16,
    FP32,
    SWIGLU,
    Launch,
    scale_table,
)

from symmoe.kernels import hopper_choice, hopper_launchers
from symmoe.kernels.activation import GELU, Activation
from symmoe.kernels.bias_sums import SLOT_ROWS
from symmoe.kernels.formats import TILE
from symmoe.kernels.low_precision import (
    act_quantized,
    hopper_columns,
    hopper_dact_quantize,
    hopper_weights,
    quantize,
)
from symmoe.kernels.triton import tiles

NAMES = ("float8_block", "mxfp8", "nvfp4")
USUAL, WIDE = "deepseek-like", {"G": 32, "H": 7168, "W": 4096, "N": 65536}
NARROW = WIDE | {"H": 2880}
TO_E4M3, FROM_E4M3 = "cvt.rn.satfinite.e4m3x2.f32", "cvt.rn.f16x2.e4m3x2"
IN_REGISTERS = {".ftz": False}
MAX_WORD = ["global.gpu.relaxed.max.s32"]


def divides_exactly_and_accesses_much(name, code):
    block_format = FORMATS[name]
    assert not re.search(r"(div\.(full|approx)|rcp\.approx|ex2|lg2)", code.ptx)
    assert ("div.rn.f32" in code.ptx) == (block_format.scale in ("fp32", "e4m3"))
    if "e4m3" in (block_format.element, block_format.scale):
        assert TO_E4M3 in code.ptx
    assert max(access_bits(code.ptx, r"st\.global")) >= 32
    assert max(access_bits(code.ptx, r"ld\.global")) >= 128


def quantises(kernel, name, dtype=BF16, ways="", sizes=None, arch=HOPPER, also=(), bounds=None):
    return Case(
        Launch(kernel, sizes or WIDE, dtype, name, ways=ways),
        arch=arch,
        ptx=IN_REGISTERS,
        bounds=bounds or {},
        also=(partial(divides_exactly_and_accesses_much, name), *also),
    )


def loads_every_number_once(dtype, code):
    """Sums stay in a warp, without atomics."""
    numbers = quantize.SUM_COLUMNS * SLOT_ROWS // 32 * dtype.itemsize * 8  # bits of a thread
    assert sum(bits for bits in access_bits(code.ptx, r"ld\.global") if bits == 128) == numbers
    no_atomics(code)


def loads_every_number_of_a_pair_once(name, dtype, ways, code):
    """Of scattered matrices, their address too."""
    is_square = name == "float8_block"
    tile, threads = (128 * 128, 256) if is_square else (32 * 256, 128)
    extra_bits = 32 * FORMATS[name].has_global_scale + 64 * (ways == "table")
    loaded_bits = sum(access_bits(code.ptx, r"ld\.global"))
    assert loaded_bits == tile * 8 * dtype.itemsize // threads + extra_bits


def pairs(name, dtype, ways):
    once = partial(loads_every_number_of_a_pair_once, name, dtype, ways)
    return quantises("quantize_weight_pairs", name, dtype, ways, also=(once,))


def finds_the_largest(code):
    """One word for a program; no other atomics, and no sums."""
    assert re.findall(r"\b(?:atom|red)\.(\S+)", code.ptx) == MAX_WORD
    assert max(access_bits(code.ptx, r"ld\.global")) >= 128


def stores(bits, code):
    assert set(access_bits(code.ptx, "st.global")) == {bits}


def of_tiles(kernel, arch, *also, **changes):
    launch = Launch(kernel, WIDE, format="mxfp8", changes=changes)
    return Case(launch, arch=arch, ptx=IN_REGISTERS, also=also)


def converts(conversions, accesses, code):
    assert set(re.findall(r"cvt\.\S*e4m3\S*", code.ptx)) == set(conversions)
    for access in accesses:  # 16 bytes at a time
        assert re.search(access + r"\.global\S*\.v4\.b32", code.ptx), access


def of_wire(kernel, name, arch, dtype, ways, conversions, accesses=("st",)):
    return Case(
        Launch(kernel, WIDE, dtype, name, ways=ways),
        arch=arch,
        ptx=IN_REGISTERS,
        also=(partial(converts, conversions, accesses),),
    )


def all_of_wire(name, arch):
    """Rows that are taken off it, decoded, and quantised again along tokens, with an index and without."""
    return [
        *(
            of_wire("unpack_rows", name, arch, BF16, ways, (), ("ld", "st"))
            for ways in ("", "indexed")
        ),
        *(of_wire("decode_rows", name, arch, dtype, "", [FROM_E4M3]) for dtype in (BF16, FP32)),
        *(
            of_wire("requantize_columns", name, arch, BF16, ways, [TO_E4M3, FROM_E4M3])
            for ways in ("", "indexed")
        ),
    ]


# -- activations that quantise -----------------------------------------------------------------------------------------
CASES = [  # activation, FFN width, format
    ("swiglu", 2048, "float8_block"),
    ("swiglu", 2048, "mxfp8"),
    ("gpt-oss", 2880, "mxfp8"),
    ("interleave by one", 2880, "float8_block"),
    ("interleave", 2880, "mxfp8"),
    ("srelu", 2048, "float8_block_powers"),
    ("geglu", 2048, "float8_block"),
    ("tanh gelu", 2048, "mxfp8"),
]
WITH_ARCH = [*((*case, HOPPER) for case in CASES), *((*case, BLACKWELL) for case in CASES[:2])]
# Bytes, of a strip: MXFP8 has four times the blocks.
MAX_SPILLED = {"mxfp8": 64, "float8_block": since(("3.6", 8), ("3.9", 224))}
MAX_SPILLED_BY_SUMS = since(("3.6", 252), ("3.7", 136), ("3.9", 336))


def flushes_what_it_may(act, code):
    """Instructions that take subnormal numbers for zeros: of the sigmoid, and of libdevice's erf."""
    of_erf = {"abs.ftz.f32", "fma.rn.ftz.f32"} if act.function == GELU else set()
    assert set(re.findall(r"\S+\.ftz\S*", code.ptx)) <= {"ex2.approx.ftz.f32"} | of_erf


def quantises_activations(kernel, name, ffn, block_format, arch, ways="", dtype=BF16):
    def accesses_much(code):
        assert max(access_bits(code.ptx, r"st\.global")) >= 32
        assert max(access_bits(code.ptx, r"ld\.global")) >= 128

    act = ACTIVATIONS[name]
    most_spilled = MAX_SPILLED_BY_SUMS if ways else MAX_SPILLED.get(block_format, 0)
    sizes = {"G": 32, "I": ffn, "N": 65536}
    return Case(
        Launch(kernel, sizes, dtype, block_format, act, ways),
        {"act_quantize": "act_quantize_rows_kernel"}.get(kernel, f"{kernel}_kernel"),
        arch,
        ptx={TO_E4M3: True}
        | ({"div.rn.f32": True} if FORMATS[block_format].scale == "fp32" else {}),
        bounds={"spilled": most_spilled},
        also=(partial(flushes_what_it_may, act), accesses_much, no_atomics),
    )


def sums_of_dbias(name, ffn, block_format, arch):
    case = quantises_activations("dact_quantize", name, ffn, block_format, arch, "dbias")
    bounds = {"spilled": 10**6}
    return Case(case.launch, "sum_dbias_kernel", arch, bounds=bounds, also=(no_atomics,))


def converts_every_number_once(code):
    numbers, threads = act_quantized.FEATURES * act_quantized.ROWS, 32 * act_quantized.ROW_WARPS
    assert code.registers <= 64  # eight programs to an SM
    assert code.ptx.count("cvt.rn.satfinite.e4m3x2") == numbers // threads // 2


# -- for Hopper --------------------------------------------------------------------------------------------------------
LIMITED = ACTIVATIONS["gpt-oss"]
PLAIN, TANH = since(("3.6", ((0, 4), (16, 16))), ("3.9", ((64, 64), (76, 76))))
LIMITS, GEGLU = since(("3.6", (16, 92)), ("3.7", (16, 84)), ("3.9", (64, 128)))
POWERS = since(("3.6", 16), ("3.7", 44), ("3.9", 72)), 120
ON_HOPPER = [  # activation, FFN width, dtype, format, most spilled bytes without dbias and with it
    (SWIGLU, 2048, BF16, "float8_block", PLAIN),
    (SWIGLU, 14336, BF16, "float8_block", PLAIN),
    (SWIGLU, 768, BF16, "float8_block_powers", POWERS),
    (SWIGLU, 768, FP16, "float8_block", PLAIN),
    (LIMITED, 2944, BF16, "float8_block", (LIMITS, LIMITS)),
    (ACTIVATIONS["geglu"], 2048, BF16, "float8_block", (GEGLU, GEGLU)),
    (ACTIVATIONS["tanh geglu"], 2048, BF16, "float8_block", TANH),
]


def leaves_room_for(module, code):
    """As many programs to an SM as there should be, which keeps 1 KB for each."""
    programs = module.PROGRAMS_PER_SM
    assert programs * (code.shared + 1024) <= MAX_SHARED[HOPPER] + 1024
    assert programs * code.registers * 32 * module.NUM_WARPS <= REGISTERS


def computes_every_number_once(act, dtype, code):
    flushes_what_it_may(act, code)
    numbers = TILE**2 // (32 * hopper_dact_quantize.NUM_WARPS)  # of a thread and a matrix
    exponentials = 2 if act.function == GELU else 1  # of erf and the density, or of the sigmoid
    assert code.ptx.count("ex2.approx.ftz.f32") == exponentials * numbers
    assert code.ptx.count(TO_E4M3) == 5 * numbers // 2  # dh in both ways, a in one
    of_16_bytes = r"cp\.async\.cg\.shared\.global \[[^]]*\], \[[^]]*\], 0x10, %r\d+;"
    # Zeros past a group's end; the first tile, the next one.
    assert len(re.findall(of_16_bytes, code.ptx)) == 2 * 3 * numbers // 8
    # Scales and sums, codes of rows, codes of columns.
    assert set(access_bits(code.ptx, r"st\.global")) == {32, 64, 128}
    if dtype == BF16:
        assert not re.search(r"\bF2F\b", code.sass)  # a quarter as fast as conversions in pairs


def dact_on_hopper(act, ffn, dtype, block_format, most_spilled, ways):
    return Case(
        Launch(
            "launch_dact_quantize",
            {"G": 32, "I": ffn, "N": 65536},
            dtype,
            block_format,
            act,
            ways,
        ),
        ptx={"div.rn.f32": FORMATS[block_format].scale == "fp32"},  # powers of two need no division
        bounds={"spilled": most_spilled[bool(ways)]},
        also=(
            partial(computes_every_number_once, act, dtype),
            partial(leaves_room_for, hopper_dact_quantize),
            no_atomics,
        ),
    )


NUMBERS = TILE**2 // (32 * hopper_columns.NUM_WARPS)  # of a thread
CONVERSION = "F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C"


def keeps_columns_in_registers(copies, most_instructions, most_spilled, code):
    """A number is copied once, rounded once, and turned in registers."""
    (names,) = code.loops_of("F2FP.SATFINITE")
    assert not re.search(r"(div\.(full|approx)|rcp\.approx|ex2|lg2)", code.ptx)
    assert not [name for name in names if name.startswith("STS")]
    num_spills = sum(name in ("LDL", "STL") for name in names)
    assert num_spills <= since(("3.6", most_spilled), ("3.9", 15))
    counts = {
        CONVERSION: NUMBERS // 2,
        "STG.E.128": NUMBERS // 16,
        "LDGSTS.E.BYPASS.128": copies,
        "BAR.SYNC.DEFER_BLOCKING": 2,
    }
    assert {name: names.count(name) for name in counts} == counts
    # The largest of two features at once, NaN if there is one: or a block would have the scale of its other numbers.
    largest = [
        name
        for name in names
        if name.startswith("HMNMX2") and ".NAN" in name and ".XORSIGN" in name
    ]
    assert len(largest) == NUMBERS // 2 - 1 + 2
    assert len(names) < most_instructions


def on_hopper(kernel, sizes, dtype, name, ways, ptx, also):
    # What a tile needs once; up to Triton 3.8 nothing with bf16.
    bounds = {"stack": since(("3.6", 16), ("3.9", 64)), "spilled": 10**6}
    return Case(
        Launch(kernel, sizes, dtype, name, ways=ways),
        ptx=IN_REGISTERS | ptx,
        bounds=bounds,
        also=(also, partial(leaves_room_for, hopper_columns)),
    )


def columns(sizes, ways, name="float8_block", dtype=BF16):
    limit = 7 * NUMBERS + (100 if ways else 50)
    ptx = {"div.rn.f32": 4} if name == "float8_block" else {"div.rn": False}
    check = partial(keeps_columns_in_registers, NUMBERS // 8, limit, 0)
    return on_hopper("launch_quantize_columns", sizes, dtype, name, ways, ptx, check)


def columns_of_wire(sizes, dtype):
    most_spilled = 8 if dtype != BF16 else 0
    check = partial(keeps_columns_in_registers, NUMBERS // 16, 10 * NUMBERS + 100, most_spilled)
    ptx = {FROM_E4M3: NUMBERS // 2}
    name = "float8_block"
    return on_hopper("launch_requantize_columns", sizes, dtype, name, "indexed", ptx, check)


def pairs_on_hopper(dtype, ways):
    def rounds_once_for_each_operand(code):
        (names,) = code.loops_of("F2FP.SATFINITE")
        assert names.count(CONVERSION) == NUMBERS
        assert names.count("LDGSTS.E.BYPASS.128") == NUMBERS // 8
        stores = names.count("STG.E.128"), names.count("STG.E.64")
        assert stores == (NUMBERS // 16, NUMBERS // 8)
        assert not [name for name in names if name in ("LDL", "STL")]
        assert sum(name.startswith("STS") for name in names) <= 2  # the block's largest number
        assert len(names) < 9 * NUMBERS + (150 if ways else 50)

    return on_hopper(
        "launch_quantize_weight_pairs",
        WIDE,
        dtype,
        "float8_block",
        ways,
        {"div.rn.f32": 2},  # one scale
        rounds_once_for_each_operand,
    )


SECTIONS = {
    "quantize_rows": [
        quantises("quantize_rows", name, dtype, "indexed" if dtype == BF16 else "")
        for name, dtype in product(NAMES, (BF16, FP32))
    ],
    "quantize_columns": [
        quantises("quantize_columns", name, ways="" if name == "mxfp8" else "indexed")
        for name in NAMES
    ],
    "quantize_weights": [
        quantises("quantize_weights", name, ways=ways)
        for name, ways in product(NAMES, ("", "transposed"))
    ],
    "encode_rows": [
        quantises("encode_rows", name, dtype, sizes=sizes)
        for name, dtype, sizes in product(NAMES[:2], (BF16, FP32), (WIDE, NARROW))
    ],
    "quantize_weight_pairs": [
        pairs(*options) for options in product(NAMES, (BF16, FP32), ("", "table"))
    ],
    "on Blackwell": [
        quantises(kernel, name, arch=BLACKWELL)
        for kernel, name in product(
            ("quantize_rows", "quantize_columns", "quantize_weights", "quantize_weight_pairs"),
            E2M1_AND_E8M0,
        )
    ],
    "rows and their sums": [
        quantises(
            "quantize_rows",
            name,
            dtype,
            "indexed sums",
            arch=arch,
            also=(partial(loads_every_number_once, dtype),),
            bounds={"shared": 1024},
        )
        for name, dtype, arch in product(NAMES, (BF16, FP32), (HOPPER, BLACKWELL))
    ],
    "sum_dbias": [
        Case(
            Launch("sum_dbias", WIDE, dtype),
            arch=arch,
            ptx=IN_REGISTERS,
            bounds={"shared": 0},
            also=(no_atomics,),
        )
        for dtype, arch in product((BF16, FP32), (HOPPER, BLACKWELL))
    ],
    # Lanes of groups are one, and tiles of columns end within a block.
    "one group of a narrow width": [
        Case(Launch(kernel, "one group", FP16, name), ptx=IN_REGISTERS)
        for name, kernel in product(NAMES, ("quantize_rows", "quantize_columns"))
    ],
    "amax": [
        Case(
            Launch(kernel, WIDE, ways=ways),
            arch=arch,
            ptx=IN_REGISTERS,
            also=(finds_the_largest,),
        )
        for arch, (kernel, ways) in product(
            (HOPPER, BLACKWELL),
            [
                ("group_amax", ""),
                ("group_amax", "signs"),
                ("weight_amax", ""),
                ("weight_amax", "table"),
            ],
        )
    ],
    "tiles of scales": [
        case
        for arch in (BLACKWELL, HOPPER)
        for case in (
            of_tiles("unswizzle_scales", arch),
            of_tiles("swizzle_scales", arch, partial(stores, 32)),
            of_tiles(
                "swizzle_scales",
                arch,
                partial(stores, 128),
                scale=scale_table((256, 8), (7168, 64)),
                row_range=None,
            ),
        )
    ],
    **{f"the wire, {name}": all_of_wire(name, HOPPER) for name in NAMES[:2]},
    "the wire on Blackwell": all_of_wire("mxfp8", BLACKWELL),
    "act_quantize": [quantises_activations("act_quantize", *options) for options in WITH_ARCH],
    "every number is converted once": [
        replace(case, also=(*case.also, converts_every_number_once))
        for case in [quantises_activations("act_quantize", *CASES[0], HOPPER, dtype=FP16)]
    ],
    "dact_quantize": [quantises_activations("dact_quantize", *options) for options in WITH_ARCH],
    "dact_quantize with sums": [
        quantises_activations("dact_quantize", *options, "dbias") for options in WITH_ARCH
    ],
    "sums of dbias": [sums_of_dbias(*options) for options in WITH_ARCH],
    "launch_dact_quantize": [dact_on_hopper(*options, "") for options in ON_HOPPER],
    "launch_dact_quantize with sums": [dact_on_hopper(*options, "dbias") for options in ON_HOPPER],
    "launch_quantize_columns": [
        *(columns(*options) for options in product((WIDE, NARROW), ("", "indexed"))),
        columns(WIDE, "", "float8_block_powers", FP16),
    ],
    "launch_requantize_columns": [
        columns_of_wire(*options) for options in product((WIDE, NARROW), (BF16, FP16))
    ],
    "launch_quantize_weight_pairs": [
        pairs_on_hopper(*options) for options in product((BF16, FP16), ("", "table"))
    ],
}


@code_cases(SECTIONS)
def test_code(launches, case):
    case.check(launches)


def test_sums_need_one_warp(launches):
    (launch,) = launches.made_by(Launch("quantize_rows", WIDE, ways="indexed sums"))
    assert launch.kwargs["num_warps"] == 1


def test_what_is_launched(launches, monkeypatch):
    """The kernel for Hopper where it fits, and Triton's elsewhere."""
    monkeypatch.setattr(tiles, "device_num_sms", lambda _: 132)
    monkeypatch.setattr(hopper_choice, "hopper_kernels", lambda *_: hopper_launchers)

    def launched_for(activation, block_format="float8_block", ways=""):
        sizes = {"G": 32, "I": 256, "N": 65536}
        launch = Launch("dact_quantize", sizes, BF16, block_format, activation, ways)
        first, *sums = (launch.name for launch in launches.made_by(launch))
        assert sums == ["sum_dscale_kernel", "sum_dbias_kernel"][: 1 + bool(ways)]
        return first

    for activation, options, has_its_own in (
        (SWIGLU, {}, True),
        (LIMITED, {"block_format": "float8_block_powers"}, True),
        (LIMITED, {"ways": "dbias"}, True),
        (Activation(interleave=32), {"ways": "fp32-dbias"}, False),
        (Activation(interleave=32), {}, False),
        (SWIGLU, {"block_format": "mxfp8"}, False),
    ):
        name = "hopper_dact_quantize_kernel" if has_its_own else "dact_quantize_kernel"
        assert launched_for(activation, **options) == name
    monkeypatch.setattr(hopper_choice, "hopper_kernels", lambda *_: None)
    assert launched_for(SWIGLU) == "dact_quantize_kernel"


def test_what_the_quantisers_for_hopper_take():
    block_format = replace(FORMATS["float8_block"], block_lines=TILE)
    for given, shape, is_taken in (
        (block_format, (2, 256, 384), True),
        (FORMATS["float8_block"], (2, 256, 384), False),  # scales of lines
        (replace(FORMATS["nvfp4"], block_lines=16), (2, 256, 384), False),
        (block_format, (2, 256, 320), False),
        (block_format, (2, 192, 384), False),
    ):
        assert hopper_weights.takes_weight_pairs(given, torch.zeros(shape)) == is_taken
    rows = torch.zeros(3, 512, dtype=BF16)
    for name, given, width, is_taken in (
        ("float8_block", rows, 512, True),
        ("mxfp8", rows, 512, False),
        ("float8_block", rows, 508, False),  # rows of which some begin at no 16 bytes
        ("float8_block", rows.view(-1)[4:516].view(1, 512), 512, False),
    ):
        assert hopper_columns.takes_columns(FORMATS[name], given, width) == is_taken
