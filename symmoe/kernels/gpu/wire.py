"""Rows that have travelled as bytes, taken apart (Triton). Contract as in the twin.

Bound by memory: one read, one write. A row of the wire begins at a multiple of 16 bytes, and so do its scales.
"""

import functools

import torch
import triton
import triton.language as tl

from symmoe.kernels.formats import BlockFormat
from symmoe.kernels.gpu.integers import ceil_div, next_power_of_2
from symmoe.kernels.gpu.launch import Constants, fast_launch, launch

LINES, COLUMNS = 16, 1024  # bytes of a program's tile
DECODED_LINES, DECODED_COLUMNS = 16, 256  # features
NUM_WARPS = 4
E8M0_NAN = tl.constexpr(255)


@fast_launch
@triton.jit(do_not_specialize_on_alignment=["row_index", "row_start", "scale"])
def unpack_rows_kernel(
    wire,
    row_index,  # int32[N] or None
    row_start,
    data,
    scale,
    NUM_GROUPS: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    WIDTH: tl.constexpr,  # of data
    SCALE_BYTES: tl.constexpr,
    SCALE_LANES: tl.constexpr,
    LINES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid (tiles of rows, tiles of columns of data)."""
    end = tl.load(row_start + NUM_GROUPS)
    row = tl.program_id(0) * LINES + tl.arange(0, LINES)
    if tl.program_id(0) * LINES < end:
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        source = row if row_index is None else tl.load(row_index + row, mask=row < end, other=0)
        lines = wire + source.to(tl.int64)[:, None] * ROW_BYTES
        mask = (row < end)[:, None] & (column < WIDTH)[None, :]
        values = tl.load(lines + column[None, :], mask=mask)
        tl.store(data + row.to(tl.int64)[:, None] * WIDTH + column[None, :], values, mask=mask)
        if tl.program_id(1) == 0:
            lane = tl.arange(0, SCALE_LANES)
            is_scale = (row < end)[:, None] & (lane < SCALE_BYTES)[None, :]
            scales = tl.load(lines + WIDTH + lane[None, :], mask=is_scale)
            tl.store(scale + row.to(tl.int64)[:, None] * SCALE_BYTES + lane[None, :], scales, mask=is_scale)


@triton.jit
def scale_number(scale, SCALE: tl.constexpr):
    """fp32 of scales as they are stored."""
    if SCALE == "e8m0":
        number = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)  # codes begin at 1
        number = tl.where(scale == E8M0_NAN, float("nan"), number)
    else:
        number = scale
    return number


@triton.jit
def e4m3_number(code):
    """fp32 of E4M3 numbers."""
    return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@fast_launch
@triton.jit(do_not_specialize=["num_rows"])
def decode_rows_kernel(
    wire,  # bytes
    scales,  # the wire as fp32, or as bytes
    out,
    num_rows,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,  # features that share a scale
    ROW_BYTES: tl.constexpr,
    SCALE_ITEMS: tl.constexpr,  # scales that would fill a row of the wire
    FIRST_SCALE: tl.constexpr,
    WIDTH: tl.constexpr,
    LINES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid (tiles of rows, tiles of columns)."""
    row = tl.program_id(0) * LINES + tl.arange(0, LINES)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < num_rows)[:, None] & (column < WIDTH)[None, :]
    code = tl.load(wire + row.to(tl.int64)[:, None] * ROW_BYTES + column[None, :], mask=mask, other=0)
    block = FIRST_SCALE + column // BLOCK
    scale = tl.load(scales + row.to(tl.int64)[:, None] * SCALE_ITEMS + block[None, :], mask=mask, other=0)
    values = e4m3_number(code) * scale_number(scale, SCALE)
    pointers = out + row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(pointers, values.to(out.dtype.element_ty), mask=mask)


def unpack_rows(
    wire: torch.Tensor,
    row_start: torch.Tensor,
    data: torch.Tensor,
    scale: torch.Tensor,
    *,
    row_index: torch.Tensor | None = None,
) -> None:
    """data[r], scale[r] = what row row_index[r] of the wire holds, for every row r of every group; no index: row r.

    row_start int32[G+1]; data uint8 [N, C] and scale uint8 [N, S], the bytes of scales; row_index int32[N]. Rows past
    row_start[G] are neither read nor written.
    """
    num_rows, width = data.shape
    if num_rows == 0:
        return
    grid = (ceil_div(num_rows, LINES), ceil_div(width, COLUMNS))
    constants = _unpack_constants(row_start.shape[0] - 1, wire.shape[1], width, scale.shape[1])
    launch(unpack_rows_kernel, grid, constants, wire, row_index, row_start, data, scale)


def decode_rows(wire: torch.Tensor, out: torch.Tensor, block_format: BlockFormat) -> None:
    """out [P, C] = data * scale of every row of the wire, rounded to out's dtype: bf16, fp16 or fp32."""
    num_rows, width = out.shape
    if num_rows == 0:
        return
    scales = wire.view(torch.float32) if block_format.scale_dtype == torch.float32 else wire
    grid = (ceil_div(num_rows, DECODED_LINES), ceil_div(width, DECODED_COLUMNS))
    launch(decode_rows_kernel, grid, _decode_constants(block_format, wire.shape[1], width), wire, scales, out, num_rows)


@functools.cache
def _unpack_constants(num_groups: int, row_bytes: int, width: int, scale_bytes: int) -> Constants:
    return Constants(
        {
            "NUM_GROUPS": num_groups,
            "ROW_BYTES": row_bytes,
            "WIDTH": width,
            "SCALE_BYTES": scale_bytes,
            "SCALE_LANES": next_power_of_2(scale_bytes),
            "LINES": LINES,
            "COLUMNS": COLUMNS,
            "num_warps": NUM_WARPS,
        }
    )


@functools.cache
def _decode_constants(block_format: BlockFormat, row_bytes: int, width: int) -> Constants:
    item_bytes = block_format.scale_dtype.itemsize
    return Constants(
        {
            "SCALE": block_format.scale,
            "BLOCK": block_format.block or width,
            "ROW_BYTES": row_bytes,
            "SCALE_ITEMS": row_bytes // item_bytes,
            "FIRST_SCALE": width // item_bytes,
            "WIDTH": width,
            "LINES": DECODED_LINES,
            "COLUMNS": DECODED_COLUMNS,
            "num_warps": NUM_WARPS,
        }
    )
