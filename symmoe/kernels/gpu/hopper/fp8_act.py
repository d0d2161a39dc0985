"""grouped_gemm_fp8_act for Hopper: fp8.py's products of gates and ups, and the quantised activation in the epilogue.

A tile is 128 rows of 128 gates and their 128 ups, which are the halves of a stage's weights. So a warpgroup has the
sums of both in the registers that fp8.py has for two halves of a tile, and a row of them becomes a whole block of the
result: its scale is a maximum over the four lanes that have the row.

The formulas are those of gpu/activation.py and gpu/quantize.py, on the same rounded numbers: the bits are those of the
product, followed by act_quantize.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from symmoe.kernels.activation import Activation
from symmoe.kernels.gpu.activation import act_value
from symmoe.kernels.gpu.hopper.fp8 import BLOCK_K, E4M3, HALF, Fp8Pipeline, load, product
from symmoe.kernels.gpu.hopper.gemm import NUM_WARPS, describe, describe_ragged, grid
from symmoe.kernels.gpu.hopper.pipeline import (
    BLOCK_M,
    CHUNK,
    halves,
    locate_tile,
    make_barriers,
    row_tile_prefix,
    store_chunk,
)
from symmoe.kernels.gpu.launch import Constants, fast_launch, launch
from symmoe.kernels.gpu.quantize import INFINITY_BITS, block_scales, encode, magnitude_bits

REGISTERS = {"multiply_registers": 240, "load_registers": 24}  # of the usual 232, some would spill in the loop


@gluon.jit
def activate(gate, up, factor, PIPE: gl.constexpr):
    """act(h) * factor of rounded gates and ups, rounded alike, in fp32."""
    ACTIVATION: gl.constexpr = PIPE.activation
    value = act_value(gate.to(gl.float32), up.to(gl.float32), ACTIVATION)
    return (value * factor[:, None]).to(gate.dtype).to(gl.float32)


@gluon.jit
def store_tile(gate, up, args, first_row, end, n_tile, WARPGROUP: gl.constexpr, PIPE: gl.constexpr):
    """Stores h and the quantised activation by TMA, which reads while the next tile is multiplied."""
    h_desc, data_desc, chunks, codes, row_factor, scale = args
    PART: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    NUM_BLOCKS: gl.constexpr = PIPE.columns // HALF
    tile_row = first_row + CHUNK * WARPGROUP
    row = tile_row + gl.arange(0, CHUNK, gl.SliceLayout(1, PART))
    factor = gl.load(row_factor + row, mask=row < end, other=0.0)
    tma.store_wait(0)
    gates = halves(gate, 1)
    ups = halves(up, 1)
    a = ()
    for i in gl.static_range(2):
        g = gl.convert_layout(gates[i], PART, assert_trivial=True).to(chunks.dtype)
        u = gl.convert_layout(ups[i], PART, assert_trivial=True).to(chunks.dtype)
        chunks.index(4 * WARPGROUP + i).store(g)
        chunks.index(4 * WARPGROUP + 2 + i).store(u)
        a = a + (activate(g, u, factor, PIPE),)  # noqa: RUF005
    bits = gl.maximum(gl.max(magnitude_bits(a[0]), axis=1), gl.max(magnitude_bits(a[1]), axis=1))
    row_scale, multiplier = block_scales(bits, 1.0, "fp32")
    gl.store(scale + row.to(gl.int64) * NUM_BLOCKS + n_tile, row_scale, mask=row < end)
    for i in gl.static_range(2):
        data = encode(a[i], (bits < INFINITY_BITS)[:, None], multiplier[:, None], None, "e4m3")
        codes.index(2 * WARPGROUP + i).store(data)
    fence_async_shared()
    for i in gl.static_range(2):
        column = n_tile * HALF + CHUNK * i
        store_chunk(h_desc, chunks.index(4 * WARPGROUP + i), tile_row, end, column)
        store_chunk(h_desc, chunks.index(4 * WARPGROUP + 2 + i), tile_row, end, PIPE.columns + column)
        store_chunk(data_desc, codes.index(2 * WARPGROUP + i), tile_row, end, column)


@gluon.jit
def multiply(args, scales, row_start, ring, WARPGROUP: gl.constexpr, PIPE: gl.constexpr):
    """The role."""
    prefix, num_row_tiles = row_tile_prefix(row_start, PIPE)
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), num_row_tiles * PIPE.num_n_tiles, gl.num_programs(0)):
        group, first_row, end, n_tile = locate_tile(tile, prefix, row_start, PIPE)
        gate, up, stage, phase = product(scales, ring, group, first_row, end, n_tile, stage, phase, WARPGROUP, PIPE)
        store_tile(gate, up, args, first_row, end, n_tile, WARPGROUP, PIPE)
    tma.store_wait(0)


@fast_launch
@gluon.jit(
    do_not_specialize_on_alignment=["row_scale", "weight_scale", "row_start", "row_factor", "scale"],
)
def hopper_fp8_act_kernel(
    rows_desc,  # [N, C], block [BLOCK_M, BLOCK_K]
    weight_desc,  # [G, 2, I, C], block [1, 2, HALF, BLOCK_K]
    h_desc,  # [N, 2I], ragged, block [CHUNK, CHUNK]
    data_desc,  # bytes [N, I], ragged, block [CHUNK, CHUNK]
    row_scale,  # fp32[N, blocks of C]
    weight_scale,  # fp32[G, 2 * blocks of I, blocks of C]
    row_start,
    row_factor,  # fp32[N]
    scale,  # fp32[N, blocks of I]
    PIPE: gl.constexpr,
):
    gl.static_assert(PIPE.columns % HALF == 0)  # or gates would be stored among ups
    a = gl.allocate_shared_memory(rows_desc.dtype, [PIPE.stages] + rows_desc.block_shape, rows_desc.layout)  # noqa: RUF005
    b = gl.allocate_shared_memory(weight_desc.dtype, [PIPE.stages] + weight_desc.block_shape, weight_desc.layout)  # noqa: RUF005
    chunks = gl.allocate_shared_memory(h_desc.dtype, [8, CHUNK, CHUNK], gl.NVMMASharedLayout(128, 16, 2))
    codes = gl.allocate_shared_memory(gl.uint8, [4, CHUNK, CHUNK], gl.NVMMASharedLayout(64, 8, 2))
    ring = (a, b, make_barriers(PIPE.stages, 1), make_barriers(PIPE.stages, 2), make_barriers(2, 1))
    scales = (row_scale, weight_scale)
    args = (h_desc, data_desc, chunks, codes, row_factor, scale)
    fence_async_shared()
    gl.warp_specialize(
        [
            (multiply, (args, scales, row_start, ring, 0, PIPE)),
            (multiply, (args, scales, row_start, ring, 1, PIPE)),
            (load, (rows_desc, weight_desc, row_start, ring, PIPE)),
        ],
        [4, 1],
        [PIPE.multiply_registers, PIPE.load_registers],
    )


def launch_fp8_act(
    rows: torch.Tensor,
    row_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    row_start: torch.Tensor,
    row_factor: torch.Tensor,
    h: torch.Tensor,
    data: torch.Tensor,
    scale: torch.Tensor,
    activation: Activation,
    *,
    num_sms: int | None = None,
    **options: int,
) -> None:
    """grouped_gemm_fp8_act of at least one row, for what takes_fp8_act of hopper takes. options: of the pipeline."""
    num_rows, ffn = data.shape
    num_groups, _, in_width = weight.shape
    pipe, constants = _plan(num_groups, ffn, in_width, h.dtype, activation, tuple(options.items()))
    launch(
        hopper_fp8_act_kernel,
        grid(pipe, num_rows, num_sms, h.device),
        constants,
        rows,
        weight,
        h,
        data.view(torch.uint8),
        row_scale,
        weight_scale,
        row_start,
        row_factor,
        scale,
    )


@functools.cache
def _plan(
    num_groups: int, ffn: int, in_width: int, dtype: torch.dtype, activation: Activation, options: tuple[Any, ...]
) -> tuple[Fp8Pipeline, Constants]:
    pipe = Fp8Pipeline(
        num_groups=num_groups,
        columns=ffn,
        in_width=in_width,
        activation=activation,
        tile_columns=HALF.value,
        **{**REGISTERS, "group_m": 16, **dict(options)},
    )
    describe_halves = describe([1, 2, HALF.value, BLOCK_K.value], E4M3)

    def describe_gates_and_ups(weight: torch.Tensor) -> TensorDescriptor:
        return describe_halves(weight.view(num_groups, 2, ffn, in_width))

    descriptors = {
        0: describe([BLOCK_M.value, BLOCK_K.value], E4M3),
        1: describe_gates_and_ups,
        2: describe_ragged(dtype),
        3: describe_ragged(torch.uint8),
    }
    return pipe, Constants({"PIPE": pipe, "num_warps": NUM_WARPS}, descriptors)
