"""Grouped GEMMs over expert-sorted rows (Triton, persistent; TMA and WGMMA on Hopper). Letters: twin/gemm.py.

Every launch has one program per SM; a program visits the output tiles with the stride of the grid. An output's tile
depends on the static dimensions and on the row's place in its group.

Rows beyond a group's end (the next group's rows, tail rows, NaN) are read but have no effect. Rows are independent in
the first two GEMMs, so masked stores are enough; wgrad sums over rows, so it reads zeros there.

Tiles begin where a group's row_range begins.

TMA reads a packed weight. A table's matrices have no common base, and the host cannot make a descriptor for each
without their addresses. So pointers and cp.async read them, in the same way as gathered rows.

Hopper has other kernels for the common cases (hopper/), with the same bits.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from symmoe.kernels import hopper_choice
from symmoe.kernels.launch.launch import (
    Constants,
    Describe,
    Named,
    cached_constants,
    ceil_div,
    fast_jit,
    launch,
)
from symmoe.kernels.operands import TensorTable, as_pair, packed_and_table
from symmoe.kernels.triton.tiles import (
    MAX_COLUMNS,
    TRITON_DTYPES,
    ZERO_BLOCK,
    TileConfig,
    Wgrad,
    column_parts,
    describe,
    gradient_of,
    lanes_inside,
    launch_grid,
    load_k_rows,
    load_tile,
    locate_tile,
    matrix_pointer,
    max_columns,
    max_row_tiles,
    plus,
    ragged_descriptor,
    row_tile_prefix,
    source_rows,
    store_gradient,
    store_rounded,
    tile_mask,
    wgrad_location,
)

# Columns of a tile that are added to out at a time: a whole tile of loads exceeds the registers.
ACCUMULATE_COLUMNS = tl.constexpr(64)


# FP32 (IEEE products) cannot use tensor cores: with larger tiles, the unrolled FMAs exceed the registers.
FP32_CONFIG = TileConfig(block_m=64, block_n=64, block_k=16, num_stages=3, num_warps=8)

# 16-bit tiles by output features: the widest tile that the output fills.
GEMM_CONFIGS = (
    (
        256,
        TileConfig(block_m=128, block_n=256, block_k=64, num_stages=3, num_warps=8, flatten=True),
    ),
    (
        128,
        TileConfig(block_m=128, block_n=128, block_k=64, num_stages=4, num_warps=8, flatten=True),
    ),
    (0, TileConfig(block_m=128, block_n=64, block_k=64, num_stages=4, num_warps=4)),
)


@functools.lru_cache
def gemm_config(
    out_features: int, dtype: torch.dtype, max_columns: int = MAX_COLUMNS
) -> TileConfig:
    """Tiles of grouped_gemm, grouped_gemm_dgrad and grouped_gemm_wgrad, from the width of the output."""
    if dtype == torch.float32:
        return FP32_CONFIG
    return next(
        config
        for min_features, config in GEMM_CONFIGS
        if min(out_features, max_columns) >= min_features
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemm:
    """The constants of a kernel that multiplies rows of groups.

    columns: features of a row of the result, with an activation the FFN width. in_width: contracted features.
    weight_k_first: weights are [G, in_width, columns], else [G, columns, in_width], or gates and ups of an activation.
    """

    config: TileConfig
    num_groups: int
    columns: int
    in_width: int
    weight_k_first: bool = False
    accumulate: bool = False
    activation: Named | None = None

    @property
    def num_n_tiles(self) -> int:
        """Tiles across the result."""
        return ceil_div(self.columns, self.config.block_n)

    @property
    def sides(self) -> int:
        """Features of the weight for a column of the result: 2 with gates and ups."""
        return (
            2
            if self.activation is not None and self.activation.is_gated and not self.weight_k_first
            else 1
        )

    @property
    def in_halves(self) -> bool:
        """Whether the gates are the first half of the weight's features, and the ups the second."""
        return (
            self.sides == 2 and self.activation is not None and self.activation.interleave is None
        )

    def constants(self, descriptors: Mapping[int, Describe] | None = None) -> Constants:
        """Constants of a kernel with these descriptors, or of a kernel whose first arguments are operands_of(...)."""
        if descriptors is None:
            descriptors = {
                0: describe([self.config.block_m, self.config.block_k]),
                3: self._describe_weight(),
            }
        return Constants({"GEMM": self, **self.config.options}, descriptors)

    def grid(self, num_rows: int, num_sms: int | None, device: torch.device) -> tuple[int]:
        """The grid for num_rows rows."""
        num_row_tiles = max_row_tiles(num_rows, self.num_groups, self.config.block_m)
        return launch_grid(num_row_tiles * self.num_n_tiles, num_sms, device)

    def _describe_weight(self) -> Describe:
        """Function from a packed weight to the descriptor that load_weight takes."""
        block_k, block_n = self.config.block_k, self.config.block_n
        if not self.in_halves:
            return describe(
                [1, block_k, block_n] if self.weight_k_first else [1, self.sides * block_n, block_k]
            )

        def describe_halves(weight: torch.Tensor) -> TensorDescriptor:
            return TensorDescriptor.from_tensor(
                weight.unflatten(1, (2, -1)), [1, 2, block_n, block_k]
            )

        return describe_halves


def operands_of(rows, row_index, weight):
    """The first arguments of a kernel: descriptor and tensor of rows, their index, descriptor and table of weights."""
    return (rows if row_index is None else None, rows, row_index, *packed_and_table(weight))


@triton.jit
def group_tiles(row_range, GEMM: tl.constexpr):
    """Inclusive prefix sum of the groups' row tiles, and the number of all tiles."""
    prefix, num_row_tiles = row_tile_prefix(row_range, GEMM.num_groups, GEMM.config.block_m)
    return prefix, num_row_tiles * GEMM.num_n_tiles


@triton.jit
def tile_location(tile, prefix, row_range, GEMM: tl.constexpr):
    """Group, first row, end of the group's rows, and first column of a tile."""
    group, first_row, end, _, n_tile = locate_tile(
        tile,
        prefix,
        row_range,
        GEMM.num_groups,
        GEMM.num_n_tiles,
        GEMM.config.group_m,
        GEMM.config.block_m,
    )
    return group, first_row, end, n_tile * GEMM.config.block_n


@triton.jit
def product(operands, location, GEMM: tl.constexpr):
    """The products of a tile [block_m, block_n] in fp32; of gates and ups side by side [block_m, 2 * block_n]: one wide
    product instead of two narrow ones reads rows only once."""
    rows_desc, rows, row_index, weight_desc, weight_table = operands
    group, first_row, end, first_column = location
    pointers = None
    if row_index is not None:
        # Entries past the group's end are arbitrary; row 0 exists wherever a group has rows.
        row = first_row + tl.arange(0, GEMM.config.block_m)
        source = source_rows(row_index, row, end)
        pointers = (
            rows
            + source.to(tl.int64)[:, None] * GEMM.in_width
            + tl.arange(0, GEMM.config.block_k)[None, :]
        )
    # Before the loop: otherwise its loads wait for this load.
    weight = (
        None if weight_table is None else matrix_pointer(weight_table, group, rows.dtype.element_ty)
    )
    acc = tl.full((GEMM.config.block_m, GEMM.sides * GEMM.config.block_n), 0.0, dtype=tl.float32)
    for k in tl.range(0, GEMM.in_width, GEMM.config.block_k):
        if row_index is None:
            a = rows_desc.load([first_row, k])
        elif GEMM.in_width % GEMM.config.block_k == 0:
            a = tl.load(pointers + k)
        else:  # zeros past the last column
            a = tl.load(
                pointers + k,
                mask=(k + tl.arange(0, GEMM.config.block_k) < GEMM.in_width)[None, :],
                other=0.0,
            )
        b = load_weight(weight_desc, weight, group, first_column, k, GEMM)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc


@triton.jit
def load_weight(desc, pointer, group, first_column, k, GEMM: tl.constexpr):
    """Right operand of rows @ weight: contracted features k.., features of the columns first_column..; zeros past the
    last feature of either kind. Gates and ups lie side by side, or alternate as in the weight.

    desc: of Gemm._describe_weight; None: pointer is the result of matrix_pointer for the group.
    """
    BLOCK_N: tl.constexpr = GEMM.config.block_n
    BLOCK_K: tl.constexpr = GEMM.config.block_k
    FEATURES: tl.constexpr = GEMM.sides * BLOCK_N
    k_lane = tl.arange(0, BLOCK_K)
    lane = tl.arange(0, FEATURES)
    k_mask = lanes_inside(k, GEMM.in_width, BLOCK_K)
    if GEMM.weight_k_first:
        if desc is not None:
            tile = desc.load([group, k, first_column]).reshape(BLOCK_K, BLOCK_N)
        else:
            first = pointer + tl.cast(k, tl.int64) * GEMM.columns + first_column
            tile = load_tile(
                first,
                k_lane,
                lane,
                k_mask,
                lanes_inside(first_column, GEMM.columns, BLOCK_N),
                GEMM.columns,
            )
    elif GEMM.in_halves:
        if desc is not None:
            tile = desc.load([group, 0, first_column, k]).reshape(FEATURES, BLOCK_K).T
        else:
            column = lane % BLOCK_N
            mask = None if GEMM.columns % BLOCK_N == 0 else first_column + column < GEMM.columns
            first = pointer + first_column.to(tl.int64) * GEMM.in_width + k
            tile = load_tile(
                first, lane // BLOCK_N * GEMM.columns + column, k_lane, mask, k_mask, GEMM.in_width
            ).T
    else:
        feature = GEMM.sides * first_column
        if desc is not None:
            tile = desc.load([group, feature, k]).reshape(FEATURES, BLOCK_K).T
        else:
            first = pointer + feature.to(tl.int64) * GEMM.in_width + k
            mask = lanes_inside(feature, GEMM.sides * GEMM.columns, FEATURES)
            tile = load_tile(first, lane, k_lane, mask, k_mask, GEMM.in_width).T
    return tile


@triton.jit
def add_bias(acc, bias, bias_scale, group, row, end, column, WIDTH: tl.constexpr):
    """acc [rows, columns] + bias[group, column] * bias_scale[row] in fp32; without a bias: acc; without a scale: 1."""
    if bias is not None:
        features = tl.load(
            bias + group.to(tl.int64) * WIDTH + column, mask=column < WIDTH, other=0.0
        )
        factor = (
            1.0
            if bias_scale is None
            else tl.load(bias_scale + row, mask=row < end, other=0.0)[:, None]
        )
        acc = plus(acc, features.to(tl.float32)[None, :], factor)
    return acc


@triton.jit
def add_tile(acc, out, row, end, first_column, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """out [., WIDTH] += acc [., COLUMNS] at these rows and from this column on, in fp32 and rounded once."""
    PART: tl.constexpr = min(COLUMNS, ACCUMULATE_COLUMNS)
    parts = column_parts(acc, acc.shape[0], COLUMNS, COLUMNS // PART)
    for i in tl.static_range(COLUMNS // PART):
        column = first_column + i * PART + tl.arange(0, PART)
        pointers = out + row.to(tl.int64)[:, None] * WIDTH + column[None, :]
        mask = tile_mask(row, end, column, WIDTH, COLUMNS)
        total = plus(parts[i], tl.load(pointers, mask=mask, other=0.0).to(tl.float32), 1.0)
        tl.store(pointers, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def zero_tail_rows(out, row_range, num_rows, GEMM: tl.constexpr):
    """Writes zeros to the tail rows of out [num_rows, columns]; the programs share the work. None: does nothing."""
    if num_rows is not None:
        first = tl.load(row_range + (2 * GEMM.num_groups - 1))  # where the last group ends
        base = out + first.to(tl.int64) * GEMM.columns
        size = (num_rows - first).to(tl.int64) * GEMM.columns
        step = tl.num_programs(0).to(tl.int64) * ZERO_BLOCK
        for i in range(tl.program_id(0).to(tl.int64) * ZERO_BLOCK, size, step):
            offset = i + tl.arange(0, ZERO_BLOCK)
            tl.store(
                base + offset, tl.zeros((ZERO_BLOCK,), out.dtype.element_ty), mask=offset < size
            )


@fast_jit(["rows_desc", "rows", "weight_desc", "out"], optional=["num_rows"])
def grouped_gemm_kernel(
    rows_desc,  # [N, K], block [BLOCK_M, BLOCK_K]; None when gathering
    rows,  # [P, K], for gathering
    row_index,  # int32[N] or None
    weight_desc,  # see load_weight; None with a table
    weight_table,  # int64[G] or None
    row_range,
    out,  # [N, M]
    bias,  # [G, M] or None
    bias_scale,  # fp32[N] or None
    num_rows,  # N; None: do not write the tail
    GEMM: tl.constexpr,
):
    prefix, num_tiles = group_tiles(row_range, GEMM)
    for tile in tl.range(
        tl.program_id(0), num_tiles, tl.num_programs(0), flatten=GEMM.config.flatten
    ):
        location = tile_location(tile, prefix, row_range, GEMM)
        acc = product((rows_desc, rows, row_index, weight_desc, weight_table), location, GEMM)
        group, first_row, end, first_column = location
        row = first_row + tl.arange(0, GEMM.config.block_m)
        column = first_column + tl.arange(0, GEMM.config.block_n)
        acc = add_bias(acc, bias, bias_scale, group, row, end, column, GEMM.columns)
        if GEMM.accumulate:
            add_tile(acc, out, row, end, first_column, GEMM.columns, GEMM.config.block_n)
        else:
            store_rounded(acc, out, row, end, column, GEMM.columns, GEMM.config.block_n)
    zero_tail_rows(out, row_range, num_rows, GEMM)


@fast_jit(["dout_desc", "dout", "rows_desc", "rows", "out"])
def grouped_gemm_wgrad_kernel(
    dout_desc,  # [N, O], ragged, block [BLOCK_K, BLOCK_M]; None when gathering
    dout,
    dout_index,  # int32[N] or None
    rows_desc,  # [N, C], ragged, block [BLOCK_K, BLOCK_N]; None when gathering
    rows,
    rows_index,  # int32[N] or None
    row_range,
    out,  # [G, O, C]; None with a table
    out_table,  # int64[G] or None
    WGRAD: tl.constexpr,
):
    BLOCK_M: tl.constexpr = WGRAD.config.block_m
    BLOCK_N: tl.constexpr = WGRAD.config.block_n
    BLOCK_K: tl.constexpr = WGRAD.config.block_k
    for tile in tl.range(
        tl.program_id(0), WGRAD.num_tiles, tl.num_programs(0), flatten=WGRAD.config.flatten
    ):
        group, m_tile, n_tile = wgrad_location(tile, WGRAD)
        m = m_tile * BLOCK_M
        n = n_tile * BLOCK_N
        start = tl.load(row_range + group)
        end = tl.load(row_range + WGRAD.num_groups + group)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        # Indices are loaded one step ahead: the pipeliner would halve its depth for loads that wait for loads.
        next_i = source_rows(dout_index, start + tl.arange(0, BLOCK_K), end)
        next_j = source_rows(rows_index, start + tl.arange(0, BLOCK_K), end)
        for k in tl.range(start, end, BLOCK_K):
            i = next_i
            j = next_j
            next_i = source_rows(dout_index, k + BLOCK_K + tl.arange(0, BLOCK_K), end)
            next_j = source_rows(rows_index, k + BLOCK_K + tl.arange(0, BLOCK_K), end)
            a = load_k_rows(dout_desc, dout, i, k, start, end, m, WGRAD.out_rows, BLOCK_M)
            b = load_k_rows(rows_desc, rows, j, k, start, end, n, WGRAD.columns, BLOCK_N)
            acc = tl.dot(a.T, b, acc, input_precision="ieee")
        row = m + tl.arange(0, BLOCK_M)
        column = n + tl.arange(0, BLOCK_N)
        out_group = gradient_of(out, out_table, group, WGRAD)
        if not WGRAD.accumulate:
            store_gradient(acc, out_group, row, column, WGRAD)
        elif start < end:  # the result of a group without rows is not read
            PART: tl.constexpr = min(BLOCK_N, ACCUMULATE_COLUMNS)
            parts = column_parts(acc, BLOCK_M, BLOCK_N, BLOCK_N // PART)
            for i in tl.static_range(BLOCK_N // PART):
                columns = n + i * PART + tl.arange(0, PART)
                store_gradient(parts[i], out_group, row, columns, WGRAD)


@fast_jit([])
def zero_matrices_kernel(table, DTYPE: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Writes zeros to BLOCK of the SIZE elements of each matrix of a table. Grid (blocks, groups)."""
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    pointers = matrix_pointer(table, tl.program_id(1), DTYPE) + offset
    tl.store(pointers, tl.zeros((BLOCK,), DTYPE), mask=offset < SIZE)


def grouped_gemm(
    rows, weight, row_range, out, *, bias=None, accumulate=False, zero_tail=False, num_sms=None
):
    _launch_gemm((rows, weight), row_range, out, bias, accumulate, zero_tail, num_sms, False)


def grouped_gemm_dgrad(
    dout, weight, row_range, out, *, accumulate=False, zero_tail=False, num_sms=None
):
    _launch_gemm((dout, weight), row_range, out, None, accumulate, zero_tail, num_sms, True)


def _launch_gemm(operands, row_range, out, bias, accumulate, zero_tail, num_sms, weight_k_first):
    (rows, row_index), (bias, bias_scale), weight = as_pair(operands[0]), as_pair(bias), operands[1]
    num_rows, out_width = out.shape
    is_indirect = row_index is not None or isinstance(weight, TensorTable)
    if not (is_indirect or bias is not None or accumulate) and hopper_choice.launched(
        "grouped_gemm",
        (out.device, out.dtype, out_width),
        (num_rows,),
        *(rows, weight, row_range, out),
        weight_k_first=weight_k_first,
        zero_tail=zero_tail,
        num_sms=num_sms,
    ):
        return
    gemm, constants = _gemm_plan(
        out.dtype,
        max_columns(out.device),
        weight.shape[0],
        out_width,
        rows.shape[1],
        weight_k_first,
        accumulate,
    )
    launch(
        grouped_gemm_kernel,
        gemm.grid(num_rows, num_sms, out.device),
        constants,
        *operands_of(rows, row_index, weight),
        row_range,
        out,
        bias,
        bias_scale,
        num_rows if zero_tail else None,
    )


@functools.cache
def _gemm_plan(
    dtype, max_columns, num_groups, columns, in_width, weight_k_first, accumulate
) -> tuple[Gemm, Constants]:
    gemm = Gemm(
        config=gemm_config(columns, dtype, max_columns),
        num_groups=num_groups,
        columns=columns,
        in_width=in_width,
        weight_k_first=weight_k_first,
        accumulate=accumulate,
    )
    return gemm, gemm.constants()


def grouped_gemm_wgrad(dout, rows, row_range, out, *, accumulate=False, num_sms=None):
    (dout, dout_index), (rows, rows_index) = as_pair(dout), as_pair(rows)
    _, out_rows, out_width = out.shape
    num_rows = (dout if dout_index is None else dout_index).shape[0]
    if num_rows == 0:
        if not accumulate:
            zero_matrices(out)
        return
    is_gathered = dout_index is not None or rows_index is not None
    is_plain = not (is_gathered or isinstance(out, TensorTable) or accumulate)
    if (is_plain and out.dtype == dout.dtype) and hopper_choice.launched(
        "grouped_gemm_wgrad",
        (out.device, out.dtype, out_width),
        (num_rows, out_rows, out_width),
        *(dout, rows, row_range, out),
        num_sms=num_sms,
    ):
        return
    wgrad, constants = _wgrad_plan(
        dout.dtype, max_columns(dout.device), out.dtype, accumulate, out.shape
    )
    launch(
        grouped_gemm_wgrad_kernel,
        launch_grid(wgrad.num_tiles, num_sms, dout.device),
        constants,
        dout if dout_index is None else None,
        dout,
        dout_index,
        rows if rows_index is None else None,
        rows,
        rows_index,
        row_range,
        *packed_and_table(out),
    )


@functools.cache
def _wgrad_plan(
    dtype, max_columns, out_dtype, accumulate, shape: tuple[int, int, int]
) -> tuple[Wgrad, Constants]:
    config = gemm_config(shape[2], dtype, max_columns)
    wgrad = Wgrad(config, *shape, TRITON_DTYPES[out_dtype], accumulate)
    return wgrad, wgrad.constants(
        {
            0: functools.partial(ragged_descriptor, block=[config.block_k, config.block_m]),
            3: functools.partial(ragged_descriptor, block=[config.block_k, config.block_n]),
        }
    )


def zero_matrices(out: torch.Tensor | TensorTable) -> None:
    """Writes zeros to every matrix: the gradient without any rows, because no descriptor can describe empty rows."""
    if isinstance(out, torch.Tensor):
        out.zero_()
        return
    num_groups, out_rows, out_width = out.shape
    size = out_rows * out_width
    launch(
        zero_matrices_kernel,
        (ceil_div(size, ZERO_BLOCK.value), num_groups),
        cached_constants(
            DTYPE=TRITON_DTYPES[out.dtype], SIZE=size, BLOCK=ZERO_BLOCK.value, num_warps=4
        ),
        out.pointers,
    )
