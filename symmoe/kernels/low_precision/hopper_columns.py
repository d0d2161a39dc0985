"""Quantising along tokens in blocks of TILE for Hopper (Gluon): rows, and rows that have travelled quantised.

Programs are persistent. A tile is TILE tokens by TILE features. cp.async loads it to shared memory, 16 bytes of a row
at a time, then the program reads it to registers. During the tile's arithmetic, a later tile loads into its shared
memory. Indices of gathered rows are read one tile ahead of the rows.

Instructions are the bottleneck, so numbers stay in words of two features as long as possible:

    amax        of both numbers of a word at once
    transposing a thread has 32 tokens of two features, 16 of them neighbours: codes do not go through shared memory
    scales      four threads share a feature: two shuffles of words; each thread divides
    not finite  the multiplier of a block that is not finite is NaN, so all of its codes are NaN

The layout of shared memory permutes pieces of eight words by their 16 tokens. Only the ldmatrix with which the compiler
reads words of the wire has bank conflicts: this ldmatrix takes the cycles of single words. Formulas and numbers are the
same as in low_precision/quantize.py, so the bits are equal.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch

from symmoe.kernels import control, formats
from symmoe.kernels.hopper.act import unpack
from symmoe.kernels.hopper.gluon_names import async_copy, copy_async, gl, gluon
from symmoe.kernels.hopper.pipeline import Groups, add
from symmoe.kernels.hopper.table import GLUON_DTYPES
from symmoe.kernels.launch.launch import Constants, fast_jit, launch
from symmoe.kernels.low_precision.codes import block_scales_or_nan, e4m3_code, magnitude_bits
from symmoe.kernels.operands import Buffers
from symmoe.kernels.triton.tiles import launch_grid

TILE = gl.constexpr(formats.TILE)  # tokens, and features
PAIRS = gl.constexpr(formats.TILE // 2)  # words of a tile's row
PANEL = 4  # tiles of features; for 16384 rows in all, a panel is 17 MB, which stay in L2
NUM_WARPS = 8
WITHOUT_SIGNS = gl.constexpr(0x7FFF7FFF)
STAGES = gl.constexpr(2)  # tiles of a program in shared memory
PROGRAMS_PER_SM = 3  # bf16 programs have up to 192 kB per SM in flight
REGISTERS = 80  # of a thread

# The layout in which words of two features are read and multiplied, and their codes are written.
HELD = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[1, 0], [2, 0], [4, 0], [8, 0], [64, 0]],
        lane_bases=[[16, 0], [32, 0], [0, 1], [0, 2], [0, 4]],
        warp_bases=[[0, 8], [0, 16], [0, 32]],
        block_bases=[],
        shape=[128, 64],
    )
)
SHARED = gl.constexpr(gl.SwizzledSharedLayout(8, 16, 4, [1, 0]))
SHARED_LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnPlan(Groups):
    """The constants of one kernel: rows [N, width] in num_groups groups, of dtype (of Gluon) before they are quantised.

    row_words: words of two numbers from a row to the next row. word_bytes: 4, or 2 on the wire. scale: BlockFormat's.
    """

    width: int
    scale: str
    dtype: Any
    row_words: int
    word_bytes: int

    @property
    def num_feature_tiles(self) -> int:
        """Tiles across the rows."""
        return -(-self.width // TILE.value)

    @property
    def panel(self) -> int:
        """Consecutive tiles of features in the order of tiles; the next tokens follow."""
        return PANEL if self.num_feature_tiles % PANEL == 0 else self.num_feature_tiles

    @property
    def copied_pairs(self) -> int:
        """Words of a row that are read, in whole copies. On the wire, scales follow a row's codes."""
        words = control.ACCESS_BYTES // self.word_bytes
        return -(-self.width // (2 * words)) * words

    @property
    def groups(self) -> Any:
        """Layout of groups, replicated in every warp."""
        return gl.BlockedLayout([self.group_lanes // 32], [32], [NUM_WARPS], [0])

    @property
    def copied(self) -> Any:
        """Layout of words for copies to shared memory."""
        return copied_layout(self.word_bytes)


def copied_layout(word_bytes: int) -> Any:
    """Layout of words [TILE, PAIRS] for copies to shared memory: rows of threads with 16 bytes each."""
    words = control.ACCESS_BYTES // word_bytes
    across = PAIRS.value // words
    return gl.BlockedLayout([1, words], [32 // across, across], [NUM_WARPS, 1], [1, 0])


@gluon.jit
def larger_bf16(a, b):
    """The larger of two |x|, NaN if one of them is NaN, for both bf16 numbers of words; signs are arbitrary."""
    return gl.inline_asm_elementwise(
        "max.NaN.xorsign.abs.bf16x2 $0, $1, $2;",
        "=r,r,r",
        [a, b],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def larger_fp16(a, b):
    """As larger_bf16, for fp16 numbers."""
    return gl.inline_asm_elementwise(
        "max.NaN.xorsign.abs.f16x2 $0, $1, $2;",
        "=r,r,r",
        [a, b],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def largest(words, DTYPE: gl.constexpr):
    """Words of the largest |x| of words [TILE, PAIRS] along the tokens; NaN if one of them is NaN."""
    result = (
        gl.reduce(words, 0, larger_bf16)
        if DTYPE == gl.bfloat16
        else gl.reduce(words, 0, larger_fp16)
    )
    return result & WITHOUT_SIGNS


@gluon.jit
def decoded(codes, scale, DTYPE: gl.constexpr):
    """Words of two rounded numbers code * scale, from words of two E4M3 codes (int16) and scales fp32."""
    ROUND: gl.constexpr = "cvt.rn.bf16x2.f32" if DTYPE == gl.bfloat16 else "cvt.rn.f16x2.f32"
    PRODUCTS: gl.constexpr = """{
        .reg .b32 both;
        .reg .b16 low, high;
        .reg .f32 x, y;
        cvt.rn.f16x2.e4m3x2 both, $1;
        mov.b32 {low, high}, both;
        cvt.f32.f16 x, low;
        cvt.f32.f16 y, high;
        mul.f32 x, x, $2;
        mul.f32 y, y, $2;
        """
    return gl.inline_asm_elementwise(
        PRODUCTS + ROUND + " $0, y, x; }",
        "=r,h,f",
        [codes, scale],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def group_tiles(row_range, PLAN: gl.constexpr):
    """Groups' first rows and ends, the inclusive prefix sum of their tiles of tokens, and the number of tiles."""
    group = gl.arange(0, PLAN.group_lanes, PLAN.groups)
    start = gl.load(row_range + group, mask=group < PLAN.num_groups, other=0)
    end = gl.load(row_range + PLAN.num_groups + group, mask=group < PLAN.num_groups, other=0)
    num_tiles = (end - start + (TILE - 1)) // TILE
    return start, end, gl.associative_scan(num_tiles, 0, add), gl.sum(num_tiles, axis=0)


@gluon.jit
def stride(number, num_used, PLAN: gl.constexpr):
    """Splits a number of tiles into whole panels and the rest: a panel's tiles are consecutive."""
    in_panel = gl.maximum(num_used, 1) * PLAN.panel
    return number // in_panel, number % in_panel


@gluon.jit
def further(at, step, num_used, PLAN: gl.constexpr):
    """The panel, and the tile in it, a step of `stride` after `at`. No division."""
    in_panel = gl.maximum(num_used, 1) * PLAN.panel
    tile = at[1] + step[1]
    is_past = (tile >= in_panel).to(gl.int32)
    return at[0] + step[0] + is_past, tile - is_past * in_panel


@gluon.jit
def tile_at(at, PLAN: gl.constexpr):
    """Tile of tokens, and of features."""
    return at[1] // PLAN.panel, at[0] * PLAN.panel + at[1] % PLAN.panel


@gluon.jit
def locate(tile, groups):
    """First row of a tile of tokens, and the end of its group."""
    start, end, after, _num_used = groups
    num_tiles = (end - start + (TILE - 1)) // TILE
    before = after - num_tiles
    is_here = (before <= tile) & (tile < after)
    first_row = gl.sum(gl.where(is_here, start + (tile - before) * TILE, 0), axis=0)
    return first_row, gl.sum(gl.where(is_here, end, 0), axis=0)


@gluon.jit
def source_of(at, row_index, groups, PLAN: gl.constexpr):
    """The source of a tile: first row, end (0 past the last tile), tile of features, row_index of its rows (without an
    index, the first row)."""
    tile, feature_tile = tile_at(at, PLAN)
    first_row, end = locate(tile, groups)
    end = gl.where(feature_tile < PLAN.num_feature_tiles, end, 0)
    if row_index is None:
        index = first_row
    else:
        row = gl.arange(0, TILE, gl.SliceLayout(1, PLAN.copied))
        index = gl.load(row_index + first_row + row, mask=row < end - first_row, other=0)
    return first_row, end, feature_tile, index


@gluon.jit
def begin_copy(stage, source, rows, row_scales, row_index, PLAN: gl.constexpr):
    """Begins to copy a tile, on the wire with its rows' scales, to a stage of shared memory; zeros past the end."""
    first_row, end, feature_tile, index = source
    row = gl.arange(0, TILE, gl.SliceLayout(1, PLAN.copied))
    is_row = row < end - first_row
    if row_index is None:
        rows += first_row.to(gl.int64) * PLAN.row_words
    else:
        row = index
    pair = feature_tile * PAIRS + gl.arange(0, PAIRS, gl.SliceLayout(0, PLAN.copied))
    mask = is_row[:, None]
    if PLAN.width % TILE != 0:
        mask = mask & (pair < PLAN.copied_pairs)[None, :]
    pointers = rows + pair[None, :] + (row.to(gl.int64) * PLAN.row_words)[:, None]
    copy_async(stage[0], pointers, mask=mask)
    if row_scales is not None:
        # A tile's features are one block.
        if row_index is None:
            row_scales += first_row.to(gl.int64) * (PLAN.row_words // 2)
        pointers = (
            row_scales + (PLAN.width // 4 + feature_tile) + row.to(gl.int64) * (PLAN.row_words // 2)
        )
        copy_async(stage[1], pointers, mask=is_row)
    async_copy.commit_group()


@gluon.jit
def scales_of(amax, PLAN: gl.constexpr):
    """Stored scales, and multipliers, of blocks whose largest |x| is amax."""
    SCALE: gl.constexpr = PLAN.scale
    return block_scales_or_nan(magnitude_bits(amax), SCALE)


@gluon.jit
def store_feature(codes, stored, tile, feature, data, scale, num_tiles, PLAN: gl.constexpr):
    """Stores codes [TILE, PAIRS] and scales [PAIRS] of one feature of every word."""
    token = tile * TILE + gl.arange(0, TILE, gl.SliceLayout(1, HELD))
    pointers = data + (feature.to(gl.int64) * (num_tiles * TILE))[None, :] + token[:, None]
    if PLAN.width % TILE == 0:
        gl.store(pointers, codes)
        gl.store(scale + tile.to(gl.int64) * PLAN.width + feature, stored)
    else:
        gl.store(pointers, codes, mask=(feature < PLAN.width)[None, :])
        gl.store(
            scale + tile.to(gl.int64) * PLAN.width + feature, stored, mask=feature < PLAN.width
        )


@gluon.jit
def store_tile(words, at, data, scale, num_tiles, PLAN: gl.constexpr):
    """Quantises words [TILE, PAIRS] along the tokens. Words are unpacked late: two fp32 need twice the registers."""
    largest_words = largest(words, PLAN.dtype)
    first_stored, first_multiplier = scales_of(unpack(largest_words, PLAN.dtype)[0], PLAN)
    second_stored, second_multiplier = scales_of(unpack(largest_words, PLAN.dtype)[1], PLAN)
    tile, feature_tile = tile_at(at, PLAN)
    feature = feature_tile * TILE + 2 * gl.arange(0, PAIRS, gl.SliceLayout(0, HELD))
    codes = e4m3_code(unpack(words, PLAN.dtype)[0] * first_multiplier[None, :])
    store_feature(codes, first_stored, tile, feature, data, scale, num_tiles, PLAN)
    codes = e4m3_code(unpack(words, PLAN.dtype)[1] * second_multiplier[None, :])
    store_feature(codes, second_stored, tile, feature + 1, data, scale, num_tiles, PLAN)


@fast_jit(["rows", "data"], jit=gluon.jit)
def hopper_quantize_columns_kernel(
    rows,  # words of two numbers, int32 [N, C / 2]; of the wire, of two codes, int16 [N, bytes of a row / 2]
    row_scales,  # None; the wire as fp32, whose rows are decoded to PLAN.dtype
    row_index,  # int32[N] or None
    row_range,
    data,  # bytes [C, num_tiles * TILE]
    scale,  # fp32 [num_tiles, C]
    num_tiles: gl.int32,
    PLAN: gl.constexpr,
):
    ring = gl.allocate_shared_memory(rows.dtype.element_ty, [STAGES, TILE, PAIRS], SHARED)
    scale_ring = (
        ring
        if row_scales is None
        else gl.allocate_shared_memory(gl.float32, [STAGES, TILE], SHARED_LINE)
    )
    groups = group_tiles(row_range, PLAN)
    num_used = groups[3]
    step = stride(gl.num_programs(0), num_used, PLAN)
    at = stride(gl.program_id(0), num_used, PLAN)
    ahead = at
    for i in gl.static_range(STAGES):
        source = source_of(ahead, row_index, groups, PLAN)
        begin_copy((ring.index(i), scale_ring.index(i)), source, rows, row_scales, row_index, PLAN)
        ahead = further(ahead, step, num_used, PLAN)
    source = source_of(ahead, row_index, groups, PLAN)
    turn = 0
    for _ in range(gl.program_id(0), num_used * PLAN.num_feature_tiles, gl.num_programs(0)):
        async_copy.wait_group(STAGES - 1)
        stage = ring.index(turn), scale_ring.index(turn)
        words = stage[0].load(HELD)
        if row_scales is not None:
            words = decoded(words, stage[1].load(gl.SliceLayout(1, HELD))[:, None], PLAN.dtype)
        begin_copy(stage, source, rows, row_scales, row_index, PLAN)
        ahead = further(ahead, step, num_used, PLAN)
        source = source_of(ahead, row_index, groups, PLAN)
        store_tile(words, at, data, scale, num_tiles, PLAN)
        at = further(at, step, num_used, PLAN)
        turn = (turn + 1) % STAGES
    async_copy.wait_group(0)


def takes_columns(block_format: formats.BlockFormat, rows: torch.Tensor, width: int) -> bool:
    """Whether these kernels support the format, for rows or for rows of the wire: E4M3 in blocks of TILE tokens."""
    in_tiles = block_format.element == "e4m3" and block_format.block == formats.TILE
    return in_tiles and width % 8 == 0 and rows.data_ptr() % control.ACCESS_BYTES == 0


def launch_quantize_columns(rows, row_range, out, block_format, *, row_index=None, num_sms=None):
    """quantize_columns of at least one tile, if takes_columns."""
    _launch(
        _plan(rows.shape[1], row_range.shape[1], block_format.scale, rows.dtype, None),
        (rows.view(torch.int32), None, row_index, row_range),
        out,
        num_sms,
    )


def launch_requantize_columns(
    wire, row_range, out, block_format, dtype, *, row_index=None, num_sms=None
):
    """requantize_columns of at least one tile, if takes_columns."""
    _launch(
        _plan(out[0].shape[0], row_range.shape[1], block_format.scale, dtype, wire.shape[1]),
        (wire.view(torch.int16), wire.view(torch.float32), row_index, row_range),
        out,
        num_sms,
    )


def _launch(
    plan_and_constants: tuple[ColumnPlan, Constants],
    inputs: tuple[torch.Tensor | None, ...],
    out: Buffers,
    num_sms: int | None,
) -> None:
    plan, constants = plan_and_constants
    data, scale = out
    launch(
        hopper_quantize_columns_kernel,
        launch_grid(scale.shape[1] * plan.num_feature_tiles, num_sms, data.device, PROGRAMS_PER_SM),
        constants,
        *inputs,
        data.view(torch.uint8),
        scale.t(),
        scale.shape[1],  # tiles of tokens
    )


@functools.cache
def _plan(
    width: int, num_groups: int, scale: str, dtype: torch.dtype, wire_bytes: int | None
) -> tuple[ColumnPlan, Constants]:
    """The constants. wire_bytes: bytes of a row of the wire; None: rows are not quantised."""
    row_words, word_bytes = (width // 2, 4) if wire_bytes is None else (wire_bytes // 2, 2)
    plan = ColumnPlan(
        width=width,
        num_groups=num_groups,
        scale=scale,
        dtype=GLUON_DTYPES[dtype],
        row_words=row_words,
        word_bytes=word_bytes,
    )
    return plan, Constants({"PLAN": plan, "num_warps": NUM_WARPS, "maxnreg": REGISTERS})
