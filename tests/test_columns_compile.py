"""Compiles the quantisers of columns for Hopper without a GPU, and counts what the machine code does for a number."""

import re
import subprocess
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")

from test_gpu_kernels_compile import HopperDriver, WarmedUp  # noqa: E402
from test_quantize_compile import FORMATS, C, G, N, column_scale, meta  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402
from triton.runtime import driver  # noqa: E402

from symmoe.kernels.formats import TILE, max_tiles  # noqa: E402
from symmoe.kernels.gpu.hopper import columns  # noqa: E402

TYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32"}
TYPE_NAMES[torch.uint8] = "u8"
BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?([A-Z0-9_.]+)")
FP32_REGISTERS = 65536
OPTIONS = ({}, {"registers": 128}, {"num_warps": 16, "registers": 64}, {"features": 64, "registers": 64})


@pytest.fixture
def compile_launch(monkeypatch, tmp_path):
    """compile_launch(): PTX, the names of the machine's instructions, and registers of the one launch."""
    launches = []
    monkeypatch.setattr(columns, "launch", lambda kernel, grid, *rest: launches.append((kernel.kernel, *rest)))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))

    def compile_one():
        kernel, constants, *args = launches.pop()
        assert not launches
        named, signature, constexprs, attributes = dict(constants.named), {}, {}, {}
        values = [*args, *[None] * (len(kernel.params) - len(args))]
        for i, (parameter, value) in enumerate(zip(kernel.params, values, strict=True)):
            if parameter.is_constexpr or value is None:
                signature[parameter.name], constexprs[parameter.name] = "constexpr", named.pop(parameter.name, value)
            elif isinstance(value, torch.Tensor):
                signature[parameter.name] = "*" + TYPE_NAMES[value.dtype]
                if not parameter.do_not_specialize_on_alignment:
                    attributes[i,] = [["tt.divisibility", 16]]
            else:
                assert parameter.do_not_specialize, parameter.name
                signature[parameter.name] = "i32"
        source = GluonASTSource(kernel, signature, constexprs, attributes)
        result = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=named)
        binary = tmp_path / "kernel.cubin"
        binary.write_bytes(result.asm["cubin"])
        tools = [[BINARIES / "cuobjdump", "-res-usage", binary], [BINARIES / "nvdisasm", "-c", binary]]
        usage, code = (subprocess.run(tool, capture_output=True, text=True, check=True).stdout for tool in tools)
        registers, spilled = int(re.search(r"REG:(\d+)", usage)[1]), int(re.search(r"STACK:(\d+)", usage)[1])
        assert spilled == 0
        print(kernel.__name__, registers, "registers,", result.metadata.shared, "bytes shared")
        return result.asm["ptx"], INSTRUCTION.findall(code), registers

    return compile_one


def buffers(width, block_format):
    tokens = TILE * max_tiles(N, G)
    return meta(width, tokens, dtype=torch.uint8), column_scale(width, tokens // TILE, block_format)


def check(ptx, instructions, registers, options):
    chosen = {**columns.TILE_OPTIONS, **options}
    assert registers <= chosen["registers"]
    assert 32 * chosen["num_warps"] * registers * 2 <= FP32_REGISTERS  # two programs to an SM, or more
    assert ".ftz" not in ptx
    assert "max.NaN.f32" in ptx  # or a block with NaN would have the scale of its other numbers
    assert not re.search(r"(div\.(full|approx)|rcp\.approx|ex2|lg2)", ptx)
    numbers = TILE * chosen["features"] // (32 * chosen["num_warps"])  # of a thread
    names = [name.split(".")[0] for name in instructions]
    # Two conversions to four numbers; codes are turned by words, never by bytes, and stored 16 bytes at a time.
    assert names.count("F2FP") >= numbers // 2
    assert not [name for name in instructions if re.match(r"(STS|LDS|STG|LDG)\.(E\.)?[US]8", name)]
    assert instructions.count("STG.E.128") == numbers // 16
    assert sum(name.startswith("STS") for name in instructions) <= numbers // 4 + 16
    return numbers


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("width", [C, 2880])
def test_columns(compile_launch, width, options, indexed):
    block_format, row_start = FORMATS["float8_block"], meta(G + 1, dtype=torch.int32)
    index = meta(N, dtype=torch.int32) if indexed else None
    rows = meta(N, width, dtype=torch.bfloat16)
    columns.launch_quantize_columns(
        rows, row_start, *buffers(width, block_format), block_format, row_index=index, **options
    )
    ptx, instructions, registers = compile_launch()
    numbers = check(ptx, instructions, registers, options)
    assert instructions.count("LDG.E.128") == numbers // 8
    assert len(instructions) < 8 * numbers + 400
    assert ptx.count("div.rn.f32") == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("width", [C, 2880])
def test_columns_of_rows_of_the_wire(compile_launch, width, options, dtype):
    block_format, row_start = FORMATS["float8_block"], meta(G + 1, dtype=torch.int32)
    wire = meta(8192, -(-(width + 4 * block_format.num_blocks(width)) // 16) * 16, dtype=torch.uint8)
    index = meta(N, dtype=torch.int32)
    result = buffers(width, block_format)
    columns.launch_requantize_columns(wire, row_start, *result, block_format, dtype, row_index=index, **options)
    ptx, instructions, registers = compile_launch()
    numbers = check(ptx, instructions, registers, options)
    assert instructions.count("LDG.E.64") == numbers // 8
    assert len(instructions) < 10 * numbers + 450
    assert "cvt.rn.f16x2.e4m3x2" in ptx


def test_powers_of_two_are_not_divided(compile_launch):
    from symmoe.kernels.formats import BlockFormat

    block_format, row_start = (
        BlockFormat(element="e4m3", scale="power_of_two", block=128),
        meta(G + 1, dtype=torch.int32),
    )
    columns.launch_quantize_columns(meta(N, C, dtype=torch.float16), row_start, *buffers(C, block_format), block_format)
    ptx, instructions, registers = compile_launch()
    check(ptx, instructions, registers, {})
    assert "div.rn" not in ptx


def test_steps_do_not_compile_again(monkeypatch):
    """The number of rows is not part of the compiled code: a rank that compiles lets its peers wait."""
    monkeypatch.setattr(driver, "_active", HopperDriver())
    warmed = [WarmedUp(columns.hopper_quantize_columns_kernel), WarmedUp(columns.hopper_requantize_columns_kernel)]
    monkeypatch.setattr(columns, "hopper_quantize_columns_kernel", warmed[0])
    monkeypatch.setattr(columns, "hopper_requantize_columns_kernel", warmed[1])
    block_format = FORMATS["float8_block"]

    def step(num_rows):
        tokens = TILE * max_tiles(num_rows, 2)
        data, scale = torch.empty(256, tokens, dtype=torch.uint8), torch.empty(tokens // TILE, 256).t()
        row_start = torch.zeros(3, dtype=torch.int32)
        rows, wire = torch.zeros(num_rows, 256, dtype=torch.bfloat16), torch.zeros(num_rows, 272, dtype=torch.uint8)
        columns.launch_quantize_columns(rows, row_start, data, scale, block_format)
        columns.launch_requantize_columns(wire, row_start, data, scale, block_format, torch.bfloat16)

    step(128)
    before = [kernel.num_variants for kernel in warmed]
    assert all(before)
    for num_rows in (1, 16, 333):
        step(num_rows)
    assert [kernel.num_variants for kernel in warmed] == before
