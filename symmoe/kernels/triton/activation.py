"""The activation of an expert times the row's scale, and its gradient (Triton). Letters: twin/activation.py.

This module has the only device definition of each activation, of its derivative, and of the places of the two halves of
h. The fused kernels of gemm_act.py use the same functions on the same rounded numbers, so they give the same bits.

Every kernel takes the activation as a constant: missing parts (limits, an offset, a gate) cost nothing.
"""

import math

import triton
import triton.language as tl

from symmoe.errors import ArgumentError
from symmoe.kernels import activation as definition
from symmoe.kernels.activation import Activation
from symmoe.kernels.launch.launch import Constants, cached_sizes, ceil_div, fast_jit, launch
from symmoe.kernels.triton.tiles import constants_of, store_rounded, tile_mask

DEFINITION = constants_of(definition)
LOG2_E = tl.constexpr(math.log2(math.e))
SQRT_HALF = tl.constexpr(math.sqrt(0.5))
DENSITY_AT_0 = tl.constexpr(1 / math.sqrt(2 * math.pi))
NO_LIMIT = tl.constexpr(math.inf)
SUM_COLUMNS = tl.constexpr(definition.SUM_COLUMNS)
SUM_STEPS = tl.constexpr(
    definition.SUM_COLUMNS.bit_length() - 1
)  # steps from a block's columns to its sum
MAX_INTERLEAVE = 32  # a tile has at least this many columns
ACCESS_BITS = 128  # the widest access of a thread

ROWS, COLUMNS = (
    8,
    256,
)  # a program's block: 16 bytes per thread of 8 warps, whole rows per warp
NUM_WARPS = 8


def addressable(activation: Activation, ffn: int) -> Activation:
    """The activation; rejects layouts that the kernels cannot address."""
    block = activation.interleave
    if block is not None:
        if block > MAX_INTERLEAVE or block & (block - 1):
            raise ArgumentError(
                f"interleave ({block}) must be a power of two up to {MAX_INTERLEAVE} on GPUs"
            )
        if ffn % block:
            raise ArgumentError(f"interleave ({block}) must divide the FFN width ({ffn})")
    return activation


@triton.constexpr_function
def is_scattered(activation, dtype):
    """Whether blocks of gate features are shorter than one access: then one access has gates and ups."""
    return (
        activation.interleave is not None
        and activation.interleave * dtype.primitive_bitwidth < ACCESS_BITS
    )


@triton.constexpr_function
def up_distance(activation, ffn):
    """Columns of h from a gate feature to its up feature."""
    return ffn if activation.interleave is None else activation.interleave


@triton.jit
def function_and_slope(x, ACTIVATION: tl.constexpr):
    """f(x) and f'(x) of the activation's function, in fp32.

    Explicit fmas leave no sum of products that the compiler could fuse in one kernel and not in another.
    """
    if ACTIVATION.function == DEFINITION.SILU:
        sigmoid = 1.0 / (1.0 + tl.exp2(x * (-ACTIVATION.alpha * LOG2_E)))
        value = x * sigmoid
        slope = sigmoid * tl.fma(x * ACTIVATION.alpha, 1.0 - sigmoid, 1.0)
    elif ACTIVATION.function == DEFINITION.GELU:
        cdf = 0.5 * (1.0 + tl.erf(x * SQRT_HALF))
        density = tl.exp2(x * x * (-0.5 * LOG2_E)) * DENSITY_AT_0
        value = x * cdf
        slope = tl.fma(x, density, cdf)
    elif ACTIVATION.function == DEFINITION.GELU_TANH:
        square = x * x
        sigmoid = 1.0 / (
            1.0
            + tl.exp2(
                x
                * tl.fma(square, -DEFINITION.GELU_CUBIC * LOG2_E, -DEFINITION.GELU_LINEAR * LOG2_E)
            )
        )
        value = x * sigmoid
        slope = sigmoid * tl.fma(
            x * (1.0 - sigmoid),
            tl.fma(square, 3 * DEFINITION.GELU_CUBIC, DEFINITION.GELU_LINEAR),
            1.0,
        )
    else:  # "relu2"
        positive = tl.where(x < 0.0, 0.0, x)
        value = positive * positive
        slope = 2.0 * positive
    return value, slope


@triton.jit
def clamped(gate, up, ACTIVATION: tl.constexpr):
    """g and u + offset of a gated activation, in fp32; comparisons propagate NaN."""
    if ACTIVATION.limit < NO_LIMIT:
        gate = tl.where(gate > ACTIVATION.limit, ACTIVATION.limit, gate)
        up = tl.where(up > ACTIVATION.limit, ACTIVATION.limit, up)
        up = tl.where(up < -ACTIVATION.limit, -ACTIVATION.limit, up)
    if ACTIVATION.offset != 0:
        up = up + ACTIVATION.offset
    return gate, up


@triton.jit
def act_value(gate, up, ACTIVATION: tl.constexpr):
    """act(h) in fp32 from the gate and the up features in fp32; not gated: from gate only."""
    if ACTIVATION.is_gated:
        g, u = clamped(gate, up, ACTIVATION)
        value, _ = function_and_slope(g, ACTIVATION)
        value = u * value
    else:
        value, _ = function_and_slope(gate, ACTIVATION)
    return value


@triton.jit
def act_slopes(gate, up, ACTIVATION: tl.constexpr):
    """Derivatives of act_value by gate and by up in fp32; not gated: only the first is valid."""
    if ACTIVATION.is_gated:
        g, u = clamped(gate, up, ACTIVATION)
        by_up, slope = function_and_slope(g, ACTIVATION)
        by_gate = u * slope
        if ACTIVATION.limit < NO_LIMIT:
            by_gate = tl.where(gate > ACTIVATION.limit, 0.0, by_gate)
            by_up = tl.where(tl.abs(up) > ACTIVATION.limit, 0.0, by_up)
    else:
        by_up, by_gate = function_and_slope(gate, ACTIVATION)
    return by_gate, by_up


@triton.jit
def scale_terms(da, value):
    """da * act(h), the terms of dscale. An fma adds 0, so the compiler cannot fuse the product with a sum."""
    return tl.fma(da, value, 0.0)


@triton.jit
def act_gradients(gate, up, da, scale, ACTIVATION: tl.constexpr):
    """a, dgate, dup and the terms of dscale, in fp32, of features in fp32 and scales of rows."""
    value = act_value(gate, up, ACTIVATION)
    by_gate, by_up = act_slopes(gate, up, ACTIVATION)
    ds = da * scale
    return value * scale, ds * by_gate, ds * by_up, scale_terms(da, value)


@triton.jit
def add_neighbours(x, STEPS: tl.constexpr):
    """Sums of 2 ** STEPS columns of x [ROWS, COLUMNS]: of neighbours, then of neighbouring sums, and so on.

    The sum of two numbers does not depend on their threads, so the layout of x has no effect.
    """
    for _ in tl.static_range(STEPS):
        x = tl.sum(x.reshape(x.shape[0], x.shape[1] // 2, 2), axis=2)
    return x


@triton.jit
def gate_column(column, ACTIVATION: tl.constexpr):
    """Column of h with the gate feature (not gated: the feature) of a column of the result."""
    return (
        column
        if ACTIVATION.interleave is None
        else column // ACTIVATION.interleave * (2 * ACTIVATION.interleave)
        + column % ACTIVATION.interleave
    )


@triton.jit
def split_blocks(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INTERLEAVE: tl.constexpr):
    """x [ROWS, 2 * COLUMNS] of alternating blocks of features: the gate and the up features [ROWS, COLUMNS]."""
    blocks = x.reshape(ROWS, COLUMNS // INTERLEAVE, 2, INTERLEAVE).permute(0, 1, 3, 2)
    gate, up = tl.split(blocks)
    return gate.reshape(ROWS, COLUMNS), up.reshape(ROWS, COLUMNS)


@triton.jit
def join_blocks(gate, up, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INTERLEAVE: tl.constexpr):
    """The inverse of split_blocks."""
    gates = gate.reshape(ROWS, COLUMNS // INTERLEAVE, INTERLEAVE)
    ups = up.reshape(ROWS, COLUMNS // INTERLEAVE, INTERLEAVE)
    return tl.join(gates, ups).permute(0, 1, 3, 2).reshape(ROWS, 2 * COLUMNS)


# SIZES has `activation` and `columns`: I. A part of a tile has COLUMNS columns, the tile TILE.


@triton.jit
def hidden_pointers(
    h, row, end, first_column, COLUMNS: tl.constexpr, TILE: tl.constexpr, SIZES: tl.constexpr
):
    """Pointers to COLUMNS gate features of a tile (not gated: features; is_scattered: gates and ups), and the mask of
    those before row `end` and in the matrix."""
    SIDES: tl.constexpr = 2 if is_scattered(SIZES.activation, h.dtype.element_ty) else 1
    column = SIDES * first_column + tl.arange(0, SIDES * COLUMNS)
    feature = column if SIDES == 2 else gate_column(column, SIZES.activation)
    pointers = (
        h
        + row.to(tl.int64)[:, None] * SIZES.activation.hidden_width(SIZES.columns)
        + feature[None, :]
    )
    return pointers, tile_mask(row, end, column, SIDES * SIZES.columns, SIDES * TILE)


@triton.jit
def load_hidden(
    h, row, end, first_column, COLUMNS: tl.constexpr, TILE: tl.constexpr, SIZES: tl.constexpr
):
    """Gate and up features of a part of a tile; not gated: the features, twice.

    Zeros at and past row `end` and past the matrix.
    """
    pointers, mask = hidden_pointers(h, row, end, first_column, COLUMNS, TILE, SIZES)
    gate = tl.load(pointers, mask=mask, other=0.0)
    if is_scattered(SIZES.activation, h.dtype.element_ty):
        gate, up = split_blocks(gate, row.shape[0], COLUMNS, SIZES.activation.interleave)
    elif SIZES.activation.is_gated:
        up = tl.load(pointers + up_distance(SIZES.activation, SIZES.columns), mask=mask, other=0.0)
    else:
        up = gate
    return gate, up


@triton.jit
def store_hidden(h, gate, up, row, end, first_column, TILE: tl.constexpr, SIZES: tl.constexpr):
    """Stores the features where load_hidden reads them; not gated: only `gate`."""
    COLUMNS: tl.constexpr = gate.shape[1]
    pointers, mask = hidden_pointers(h, row, end, first_column, COLUMNS, TILE, SIZES)
    if is_scattered(SIZES.activation, h.dtype.element_ty):
        both = join_blocks(gate, up, row.shape[0], COLUMNS, SIZES.activation.interleave)
        tl.store(pointers, both, mask=mask)
    else:
        tl.store(pointers, gate, mask=mask)
        if SIZES.activation.is_gated:
            tl.store(pointers + up_distance(SIZES.activation, SIZES.columns), up, mask=mask)


@triton.jit
def act_part(h, row_scale, row, end, first, COLUMNS: tl.constexpr, SIZES: tl.constexpr):
    """a [rows, COLUMNS], rounded, from feature `first` on; zeros from row `end` on and past the features."""
    gate, up = load_hidden(h, row, end, first, COLUMNS, COLUMNS, SIZES)
    value = act_value(gate.to(tl.float32), up.to(tl.float32), SIZES.activation)
    return (value * tl.load(row_scale + row, mask=row < end, other=0.0)[:, None]).to(
        h.dtype.element_ty
    )


@triton.jit
def dact_part(da, h, scale, row, end, first, COLUMNS: tl.constexpr, SIZES: tl.constexpr):
    """a, dgate, dup [rows, COLUMNS], rounded, from feature `first` on, and the terms of dscale. scale: of the rows."""
    DTYPE: tl.constexpr = h.dtype.element_ty
    gate, up = load_hidden(h, row, end, first, COLUMNS, COLUMNS, SIZES)
    column = first + tl.arange(0, COLUMNS)
    pointers = da + row.to(tl.int64)[:, None] * SIZES.columns + column[None, :]
    dout = tl.load(
        pointers, mask=tile_mask(row, end, column, SIZES.columns, COLUMNS), other=0.0
    ).to(tl.float32)
    gate, up = gate.to(tl.float32), up.to(tl.float32)
    a, dgate, dup, terms = act_gradients(gate, up, dout, scale[:, None], SIZES.activation)
    return a.to(DTYPE), dgate.to(DTYPE), dup.to(DTYPE), terms


@fast_jit(["h", "out"])
def scaled_activation_kernel(
    h,  # [N, W]
    scale,  # fp32[N]
    out,  # [N, I]
    num_rows: tl.int32,
    SIZES: tl.constexpr,
):
    """Grid (blocks of rows, blocks of columns)."""
    row = tl.program_id(0) * SIZES.rows + tl.arange(0, SIZES.rows)
    first_column = tl.program_id(1) * SIZES.block
    a = act_part(h, scale, row, num_rows, first_column, SIZES.block, SIZES)
    column = first_column + tl.arange(0, SIZES.block)
    store_rounded(a, out, row, num_rows, column, SIZES.columns, SIZES.block)


@fast_jit(["dout", "h", "dh"])
def scaled_activation_grad_kernel(
    dout,  # [N, I]
    h,  # [N, W]
    scale,  # fp32[N]
    dh,  # [N, W]
    dscale,  # fp32[N]
    num_rows: tl.int32,
    SIZES: tl.constexpr,
):
    """One program per block of rows."""
    BLOCKS: tl.constexpr = SIZES.block // SUM_COLUMNS
    row = tl.program_id(0) * SIZES.rows + tl.arange(0, SIZES.rows)
    row_scale = tl.load(scale + row, mask=row < num_rows, other=0.0)
    total = tl.full((SIZES.rows,), 0.0, dtype=tl.float32)
    for first_column in tl.range(0, SIZES.columns, SIZES.block):
        _, dgate, dup, terms = dact_part(
            dout, h, row_scale, row, num_rows, first_column, SIZES.block, SIZES
        )
        sums = add_neighbours(terms, SUM_STEPS)
        for block in tl.static_range(BLOCKS):  # the other sums are 0 and change no bits
            total += tl.sum(tl.where(tl.arange(0, BLOCKS)[None, :] == block, sums, 0.0), axis=1)
        store_hidden(dh, dgate, dup, row, num_rows, first_column, SIZES.block, SIZES)
    tl.store(dscale + row, total, mask=row < num_rows)


def scaled_activation(h, scale, out, activation):
    num_rows, ffn = out.shape
    launch(
        scaled_activation_kernel,
        (ceil_div(num_rows, ROWS), ceil_div(ffn, COLUMNS)),
        _constants(activation, ffn),
        h,
        scale,
        out,
        num_rows,
    )


def scaled_activation_grad(dout, h, scale, dh, dscale, activation):
    num_rows, ffn = dout.shape
    launch(
        scaled_activation_grad_kernel,
        (ceil_div(num_rows, ROWS),),
        _constants(activation, ffn),
        dout,
        h,
        scale,
        dh,
        dscale,
        num_rows,
    )


def _constants(activation: Activation, ffn: int) -> Constants:
    return cached_sizes(
        activation=addressable(activation, ffn),
        columns=ffn,
        rows=ROWS,
        block=COLUMNS,
        num_warps=NUM_WARPS,
    )
