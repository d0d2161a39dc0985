"""grouped_gemm_act of contiguous rows, and the GEMM of grouped_gemm_dact, for Hopper. h, a and dh have Triton's bits.

Formulas and rounded numbers are the same as in triton/activation.py. Two features of 16 bits share a register (int32)
from memory to arithmetic; otherwise the compiler keeps one feature in each register.
"""

import functools

from symmoe.kernels.activation import Activation
from symmoe.kernels.hopper.gemm import describe_ragged, describe_rows, describe_weight, grid
from symmoe.kernels.hopper.gluon_names import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    tma,
)
from symmoe.kernels.hopper.pipeline import (
    BLOCK_K,
    CHUNK,
    MAX_ROWS,
    Pipeline,
    run,
    store_chunk,
    write_dump,
)
from symmoe.kernels.hopper.table import describe_as
from symmoe.kernels.launch.launch import Constants, fast_jit, launch
from symmoe.kernels.operands import as_pair
from symmoe.kernels.triton.activation import (
    SUM_COLUMNS,
    SUM_STEPS,
    act_gradients,
    act_value,
    add_neighbours,
)

# The epilogue runs in another warpgroup, in two warps of another warpgroup, or during the other tile's products.
SEPARATE = {
    "instruction_n": 128,
    "finish_warps": 4,
    "multiply_registers": 160,
    "finish_registers": 144,
    "load_registers": 48,
}
GATHERED = SEPARATE | {"finish_registers": 128, "load_registers": 64}
TWO_WARPS = {
    "finish_warps": 2,
    "multiply_registers": 160,
    "finish_registers": 184,
    "load_registers": 184,
}
ALTERNATE = {
    "alternate": True,
    "block_n": 128,
    "tile_columns": 128,
    "instruction_n": 128,
    "stages": 5,
}
LONG_PRODUCT = 4096  # from so many contracted features on, two warps finish dact before the next tile's products
WIDE_OUTPUT = 8192  # from so many features on, wider tiles of FC1 save more than alternating ones

PAIRS = gl.constexpr(32)  # pairs of features in a chunk's row
ROWS_PER_WARP = gl.constexpr(8)  # rows of a piece of a chunk


@gluon.jit
def unpack(pair, DTYPE: gl.constexpr):
    """Both numbers of each pair in fp32; the first is in the lower half of a word."""
    return (
        ((pair << 16).to(gl.float32, bitcast=True), (pair & -65536).to(gl.float32, bitcast=True))
        if DTYPE == gl.bfloat16
        else (
            pair.to(gl.int16).to(DTYPE, bitcast=True).to(gl.float32),
            (pair >> 16).to(gl.int16).to(DTYPE, bitcast=True).to(gl.float32),
        )
    )


@gluon.jit
def pack(low, high, DTYPE: gl.constexpr):
    """Pairs of rounded features."""
    ROUND: gl.constexpr = "cvt.rn.bf16x2.f32" if DTYPE == gl.bfloat16 else "cvt.rn.f16x2.f32"
    return gl.inline_asm_elementwise(
        ROUND + " $0, $1, $2;", "=r,f,f", [high, low], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def piece_lanes():
    """Rows and pairs of a piece: 16 bytes of a row to a thread, whole lines of 128 bytes to 8 threads."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0])
    row = gl.arange(0, ROWS_PER_WARP * gl.num_warps(), gl.SliceLayout(1, layout))
    return row, gl.arange(0, PAIRS, gl.SliceLayout(0, layout))


@gluon.jit
def piece_mask(row, pair, first_row, end, first_pair, PIPE: gl.constexpr):
    """Mask of the part of a piece that lies in the group and in the matrix."""
    mask = (first_row + row < end)[:, None]
    if PIPE.columns % PIPE.tile_columns != 0:
        mask = mask & (pair < PIPE.columns // 2 - first_pair)[None, :]
    return mask


@gluon.jit
def piece_pointers(matrix, row, pair, first_row, first_pair, WIDTH: gl.constexpr):
    """Pointers to the pairs of a piece of a matrix of WIDTH features."""
    first = matrix + (first_row.to(gl.int64) * (WIDTH // 2) + first_pair)
    return first + (row[:, None] * (WIDTH // 2) + pair[None, :])


@gluon.jit
def load_piece(h, row_scale, first_row, end, first_pair, PIPE: gl.constexpr):
    """Pairs of gates and of ups (not gated: of features, twice) of a piece, and the rows' scales."""
    row, pair = piece_lanes()
    mask = piece_mask(row, pair, first_row, end, first_pair, PIPE)
    pointers = piece_pointers(h, row, pair, first_row, first_pair, PIPE.hidden_width)
    gate = gl.load(pointers, mask=mask, other=0)
    up = (
        gl.load(pointers + PIPE.columns // 2, mask=mask, other=0)
        if PIPE.activation.is_gated
        else gate
    )
    return gate, up, gl.load(row_scale + first_row + row, mask=first_row + row < end, other=0.0)


@gluon.jit
def dact_piece(
    piece, hidden, results, first_row, end, first_pair, DTYPE: gl.constexpr, PIPE: gl.constexpr
):
    """dh, a and the sums of dscale of a piece, from its da in shared memory."""
    dh, a, scale_sums, num_rows = results
    gl.static_assert(SUM_COLUMNS == CHUNK)
    row, pair = piece_lanes()
    mask = piece_mask(row, pair, first_row, end, first_pair, PIPE)
    ACTIVATION: gl.constexpr = PIPE.activation
    gates, ups, scale = hidden
    gate_low, gate_high = unpack(gates, DTYPE)
    up_low, up_high = unpack(ups, DTYPE)
    da_low, da_high = unpack(piece.load(gates.type.layout), DTYPE)
    scale = scale[:, None]
    a_low, dgate_low, dup_low, term_low = act_gradients(gate_low, up_low, da_low, scale, ACTIVATION)
    a_high, dgate_high, dup_high, term_high = act_gradients(
        gate_high, up_high, da_high, scale, ACTIVATION
    )
    pointers = piece_pointers(a, row, pair, first_row, first_pair, PIPE.columns)
    gl.store(pointers, pack(a_low, a_high, DTYPE), mask=mask)
    pointers = piece_pointers(dh, row, pair, first_row, first_pair, PIPE.hidden_width)
    gl.store(pointers, pack(dgate_low, dgate_high, DTYPE), mask=mask)
    if PIPE.activation.is_gated:
        gl.store(pointers + PIPE.columns // 2, pack(dup_low, dup_high, DTYPE), mask=mask)
    sums = gl.convert_layout(
        gl.sum(add_neighbours(term_low + term_high, SUM_STEPS - 1), axis=1), row.type.layout
    )
    sum_pointers = scale_sums + (first_pair // PAIRS).to(gl.int64) * num_rows + first_row + row
    gl.store(sum_pointers, sums, mask=(first_row + row < end) & (first_pair < PIPE.columns // 2))


@gluon.jit
def dact_tile(args, dump, turn, first_chunk, tile_row, end, n_tile, PIPE: gl.constexpr):
    """dh, a and sums of dscale of a tile of 128 rows, from chunks first_chunk.. of rounded da.

    A piece is a few rows of a chunk; pieces go from left to right. Two pieces of h load while one is computed. They
    alternate between two sets of registers, because a copy between registers would wait for the load.
    """
    h, row_scale, dh, a, scale_sums, num_rows = args
    chunks, dumped, freed = dump
    DTYPE: gl.constexpr = h.dtype.element_ty
    h = h.to(gl.pointer_type(gl.int32))
    results = (
        dh.to(gl.pointer_type(gl.int32)),
        a.to(gl.pointer_type(gl.int32)),
        scale_sums,
        num_rows,
    )
    ROWS: gl.constexpr = ROWS_PER_WARP * gl.num_warps()
    STRIPS: gl.constexpr = CHUNK // ROWS  # of a chunk
    PIECES: gl.constexpr = STRIPS * PIPE.tile_chunks  # in CHUNK rows
    pieces = reinterpret(
        chunks, gl.int32, [8 * STRIPS, ROWS, PAIRS], gl.NVMMASharedLayout(128, 32, 2)
    )
    tile_pair = n_tile * (PIPE.tile_columns // 2)
    even = load_piece(h, row_scale, tile_row, end, tile_pair, PIPE)
    odd = load_piece(h, row_scale, tile_row, end, tile_pair + PAIRS, PIPE)
    for half in range(2):
        if PIPE.finish_warps > 0:
            mbarrier.wait(dumped.index(half), turn)
        for i in range(PIECES // 2):
            strip = 2 * i // PIPE.tile_chunks
            c = 2 * i % PIPE.tile_chunks
            piece = (first_chunk + half * PIPE.tile_chunks + c) * STRIPS + strip
            first_row = tile_row + half * CHUNK + strip * ROWS
            first_pair = tile_pair + c * PAIRS
            following = half * PIECES + 2 * i + 2
            next_row = tile_row + following // PIPE.tile_chunks * ROWS
            next_pair = tile_pair + following % PIPE.tile_chunks * PAIRS
            next_end = gl.where(following < 2 * PIECES, end, 0)
            even_piece = pieces.index(piece)
            dact_piece(even_piece, even, results, first_row, end, first_pair, DTYPE, PIPE)
            even = load_piece(h, row_scale, next_row, next_end, next_pair, PIPE)
            odd_piece = pieces.index(piece + STRIPS)
            dact_piece(odd_piece, odd, results, first_row, end, first_pair + PAIRS, DTYPE, PIPE)
            odd = load_piece(h, row_scale, next_row, next_end, next_pair + PAIRS, PIPE)
        if PIPE.finish_warps > 0:
            mbarrier.arrive(freed.index(half))


@gluon.jit
def dact_epilogue(
    acc, args, dump, turn, first_row, end, n_tile, WARPGROUP: gl.constexpr, PIPE: gl.constexpr
):
    """The epilogue of a multiplying warpgroup."""
    chunks, _, _ = dump
    write_dump(acc, chunks, WARPGROUP, PIPE)
    dact_tile(args, dump, turn, 4 * WARPGROUP, first_row, end, n_tile, PIPE)


@gluon.jit
def act_piece(
    both, row_scale, a, first_row, end, first_pair, DTYPE: gl.constexpr, PIPE: gl.constexpr
):
    """The result a of a piece, from its gates and ups in shared memory."""
    gates, ups = both
    ACTIVATION: gl.constexpr = PIPE.activation
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0])
    row, pair = piece_lanes()
    mask = piece_mask(row, pair, first_row, end, first_pair, PIPE)
    scale = gl.load(row_scale + first_row + row, mask=first_row + row < end, other=0.0)[:, None]
    gate_low, gate_high = unpack(gates.load(layout), DTYPE)
    up_low, up_high = unpack(ups.load(layout), DTYPE)
    low = act_value(gate_low, up_low, ACTIVATION) * scale
    high = act_value(gate_high, up_high, ACTIVATION) * scale
    pointers = piece_pointers(a, row, pair, first_row, first_pair, PIPE.columns)
    gl.store(pointers, pack(low, high, DTYPE), mask=mask)


@gluon.jit
def act_tile(args, dump, turn, first_chunk, tile_row, end, n_tile, PIPE: gl.constexpr):
    """h, by TMA, and a of a tile of 128 rows, from chunks first_chunk.. of rounded h: gates, then as many of ups."""
    h_desc, row_scale, a = args
    chunks, dumped, freed = dump
    DTYPE: gl.constexpr = a.dtype.element_ty
    a = a.to(gl.pointer_type(gl.int32))
    ROWS: gl.constexpr = ROWS_PER_WARP * gl.num_warps()
    STRIPS: gl.constexpr = CHUNK // ROWS  # strips of a chunk
    ACROSS: gl.constexpr = PIPE.tile_chunks // 2  # chunks of gates from left to right
    pieces = reinterpret(
        chunks, gl.int32, [8 * STRIPS, ROWS, PAIRS], gl.NVMMASharedLayout(128, 32, 2)
    )
    column = n_tile * PIPE.tile_columns
    for half in range(2):
        if PIPE.finish_warps > 0:
            mbarrier.wait(dumped.index(half), turn)
        first_row = tile_row + half * CHUNK
        gates = first_chunk + half * (2 * ACROSS)
        for i in gl.static_range(ACROSS):
            store_chunk(h_desc, chunks.index(gates + i), first_row, end, column + i * CHUNK)
            store_chunk(
                h_desc,
                chunks.index(gates + ACROSS + i),
                first_row,
                end,
                PIPE.columns + column + i * CHUNK,
            )
        for i in range(ACROSS * STRIPS):
            piece = (gates + i // STRIPS) * STRIPS + i % STRIPS
            both = (pieces.index(piece), pieces.index(piece + ACROSS * STRIPS))
            row = first_row + i % STRIPS * ROWS
            first_pair = n_tile * (PIPE.tile_columns // 2) + i // STRIPS * PAIRS
            act_piece(both, row_scale, a, row, end, first_pair, DTYPE, PIPE)
        if PIPE.finish_warps > 0:
            tma.store_wait(0)
            mbarrier.arrive(freed.index(half))


@gluon.jit
def act_epilogue(
    acc, args, dump, turn, first_row, end, n_tile, WARPGROUP: gl.constexpr, PIPE: gl.constexpr
):
    """The epilogue of a multiplying warpgroup."""
    chunks, _, _ = dump
    tma.store_wait(0)
    write_dump(acc, chunks, WARPGROUP, PIPE)
    fence_async_shared()
    act_tile(args, dump, turn, 4 * WARPGROUP, first_row, end, n_tile, PIPE)


@fast_jit(["rows_desc", "weight_desc", "h_desc", "a"], jit=gluon.jit)
def hopper_act_kernel(
    rows_desc,  # [N, C], block [BLOCK_M, BLOCK_K]
    weight_desc,  # [G, 2, I, C], block [1, 2, tile_columns, BLOCK_K]
    row_range,
    row_scale,
    h_desc,  # [N, 2I], ragged, block [CHUNK, CHUNK]
    a,  # [N, I]
    PIPE: gl.constexpr,
):
    gl.static_assert(PIPE.columns % PIPE.tile_columns == 0)  # otherwise gates would overwrite ups
    EPILOGUE: gl.constexpr = act_tile if PIPE.finish_warps > 0 else act_epilogue
    run(
        rows_desc,
        weight_desc,
        row_range,
        EPILOGUE,
        (h_desc, row_scale, a),
        a.dtype.element_ty,
        PIPE,
    )


@fast_jit(
    ["dout_desc", "dout", "weight_desc", "h", "dh", "a"], optional=["num_rows"], jit=gluon.jit
)
def hopper_dact_kernel(
    dout_desc,  # [N, O], block [BLOCK_M, BLOCK_K]; None when gathering
    dout,  # [P, O], for gathering
    row_index,  # int32[N] or None
    weight_desc,  # [G, O, I], block [1, BLOCK_K, block_n]
    row_range,
    h,  # [N, W]
    row_scale,
    dh,  # [N, W]
    a,  # [N, I]
    scale_sums,  # [blocks of columns, num_rows]
    num_rows,
    PIPE: gl.constexpr,
):
    args = (h, row_scale, dh, a, scale_sums, num_rows)
    source = dout_desc if row_index is None else (dout, row_index)
    EPILOGUE: gl.constexpr = dact_tile if PIPE.finish_warps > 0 else dact_epilogue
    run(source, weight_desc, row_range, EPILOGUE, args, dout.dtype.element_ty, PIPE)


def launch_dact(
    dout, weight, row_range, hidden, results, activation, *, num_sms=None, variant=None
):
    """Computes dh and a of grouped_gemm_dact, and the block sums of dscale [num_scale_sums(I), N].

    results: dh, a and the block sums. variant: options of the Pipeline, for comparisons.
    """
    dout, row_index = as_pair(dout)
    num_rows, ffn = results[1].shape
    num_groups, dout_width, _ = weight.shape
    gathered = row_index is not None
    if variant is None:
        variant = GATHERED if gathered else TWO_WARPS if dout_width >= LONG_PRODUCT else ALTERNATE
    pipe, constants = _dact_plan(
        num_groups, ffn, dout_width, dout.dtype, activation, gathered, tuple(variant.items())
    )
    launch(
        hopper_dact_kernel,
        grid(pipe, num_rows, num_sms, dout.device),
        constants,
        None if gathered else dout,
        dout,
        row_index,
        weight,
        row_range,
        *hidden,
        *results,
        num_rows,
    )


@functools.cache
def _dact_plan(
    num_groups, ffn, dout_width, dtype, activation, gathered, variant
) -> tuple[Pipeline, Constants]:
    pipe = Pipeline(
        num_groups=num_groups,
        columns=ffn,
        in_width=dout_width,
        activation=activation,
        weight_k_first=True,
        gathered=gathered,
        **dict(variant),
    )
    return pipe, pipe.constants({0: describe_rows(dtype), 3: describe_weight(pipe, dtype)})


def takes_act(num_rows: int, ffn: int, activation: Activation) -> bool:
    """Whether launch_act takes contiguous rows of this size: gates and ups in halves that whole tiles fill."""
    fills = ffn % ALTERNATE["tile_columns"] == 0 and num_rows <= MAX_ROWS
    return activation.is_gated and activation.interleave is None and fills


def launch_act(
    rows, weight, row_range, row_scale, results, activation, *, num_sms=None, variant=None
):
    """grouped_gemm_act of contiguous rows, for gated activations with two halves and widths that whole tiles fill.

    variant: options of the Pipeline, for comparisons.
    """
    num_rows, ffn = results[1].shape
    num_groups, _, in_width = weight.shape
    variant = variant or (SEPARATE if ffn >= WIDE_OUTPUT else ALTERNATE)
    pipe, constants = _act_plan(
        num_groups, ffn, in_width, rows.dtype, activation, tuple(variant.items())
    )
    launch(
        hopper_act_kernel,
        grid(pipe, num_rows, num_sms, rows.device),
        constants,
        rows,
        weight,
        row_range,
        row_scale,
        *results,
    )


@functools.cache
def _act_plan(num_groups, ffn, in_width, dtype, activation, variant) -> tuple[Pipeline, Constants]:
    options = {"block_n": 256, **dict(variant)}
    options["tile_columns"] = options["block_n"] // 2
    pipe = Pipeline(
        num_groups=num_groups, columns=ffn, in_width=in_width, activation=activation, **options
    )
    gates_and_ups = (
        [num_groups, 2, ffn, in_width],
        [2 * ffn * in_width, ffn * in_width, in_width, 1],
    )
    return pipe, pipe.constants(
        {
            0: describe_rows(dtype),
            1: describe_as(
                lambda weight: gates_and_ups, [1, 2, pipe.tile_columns, BLOCK_K.value], dtype
            ),
            4: describe_ragged(dtype),
        }
    )
