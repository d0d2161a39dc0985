"""The router's GEMMs (Triton): bf16 tokens, fp32 weights and fp32 logits.

Tensor cores multiply bf16 numbers exactly and add in fp32. An fp32 number is the sum of three bf16 numbers (8 bits
each). So a product of bf16 tokens and fp32 weights is three products of bf16 matrices, without an fp32 copy of the
tokens: "Leveraging the bfloat16 Artificial Intelligence Datatype for Higher-Precision Computations" (Henry, Tang,
Heinecke, arXiv:1904.06376). Tensor cores truncate sums. So they sum BLOCK_K terms at a time from zero, the small
products first, and these sums are added in fp32 registers.

A token's logits depend only on the token: tiles do not depend on T.
"""

import functools

import torch
import triton
import triton.language as tl

from symmoe.kernels.launch.launch import (
    cached_constants,
    cached_sizes,
    ceil_div,
    fast_jit,
    launch,
    next_power_of_2,
)

BLOCK_K = 64
TOKENS = (
    64  # tokens of a tile of logits or of dx: 8192 tokens give 128 programs for an H200's 132 SMs
)
TILE = 128  # columns of a gradient; experts, at most
SPLIT_PROGRAMS = 132  # programs for weight gradients, if there are enough tokens
SPLIT_TOKENS = 512  # the fewest tokens of a part
PARTS = tl.constexpr(3)  # bf16 numbers whose sum is an fp32 number
PART_ELEMENTS = 1024


@triton.jit
def next_part(remainder):
    """fp32 numbers as bf16, and the exact rest. The rest of Inf and NaN is 0."""
    part = remainder.to(tl.bfloat16)
    rounded = part.to(tl.float32)
    return part, tl.where(tl.abs(rounded) < float("inf"), remainder - rounded, 0.0)


@fast_jit()
def bf16_parts_kernel(
    matrix, second, parts, num_elements: tl.int32, num_second: tl.int32, BLOCK: tl.constexpr
):
    first = tl.program_id(0) * BLOCK
    if second is not None:
        end = tl.cdiv(num_elements, BLOCK) * BLOCK
        if first >= end:
            matrix, parts = second, parts + PARTS * num_elements.to(tl.int64)
            first, num_elements = first - end, num_second
    index = first + tl.arange(0, BLOCK)
    mask = index < num_elements
    remainder = tl.load(matrix + index, mask=mask, other=0.0)
    for _ in tl.static_range(PARTS):
        part, remainder = next_part(remainder)
        tl.store(parts + index, part, mask=mask)
        parts += num_elements


@triton.jit
def matrix_tile(matrix, row, column, num_rows, WIDTH: tl.constexpr):
    """Tile [rows, columns] of a row-major matrix of WIDTH columns, zeros outside."""
    mask = (row < num_rows)[:, None] & (column < WIDTH)[None, :]
    return tl.load(
        matrix + row.to(tl.int64)[:, None] * WIDTH + column[None, :], mask=mask, other=0.0
    )


@fast_jit()
def router_gemm_kernel(x, parts, logits, num_tokens: tl.int32, SIZES: tl.constexpr):
    token = tl.program_id(0) * SIZES.block_m + tl.arange(0, SIZES.block_m)
    expert = tl.program_id(1) * SIZES.block_n + tl.arange(0, SIZES.block_n)
    total = tl.full((SIZES.block_m, SIZES.block_n), 0.0, tl.float32)
    for k in tl.range(0, SIZES.width, SIZES.block_k):
        column = k + tl.arange(0, SIZES.block_k)
        rows = matrix_tile(x, token, column, num_tokens, SIZES.width)
        high = matrix_tile(parts, expert, column, SIZES.num_experts, SIZES.width)
        middle = matrix_tile(
            parts + SIZES.num_experts * SIZES.width, expert, column, SIZES.num_experts, SIZES.width
        )
        low = matrix_tile(
            parts + 2 * SIZES.num_experts * SIZES.width,
            expert,
            column,
            SIZES.num_experts,
            SIZES.width,
        )
        terms = tl.dot(rows, low.T)
        terms = tl.dot(rows, middle.T, terms)
        terms = tl.dot(rows, high.T, terms)
        total += terms
    mask = (token < num_tokens)[:, None] & (expert < SIZES.num_experts)[None, :]
    tl.store(
        logits + token.to(tl.int64)[:, None] * SIZES.num_experts + expert[None, :], total, mask=mask
    )


@fast_jit()
def router_dgrad_kernel(d_parts, parts, dx, num_tokens: tl.int32, SIZES: tl.constexpr):
    # Programs of the same tokens run at the same time, and read their parts from L2.
    token = tl.program_id(1) * SIZES.block_m + tl.arange(0, SIZES.block_m)
    column = tl.program_id(0) * SIZES.block_n + tl.arange(0, SIZES.block_n)
    total = tl.full((SIZES.block_m, SIZES.block_n), 0.0, tl.float32)
    for k in tl.range(0, SIZES.num_experts, SIZES.block_k):
        expert = k + tl.arange(0, SIZES.block_k)
        d_high = matrix_tile(d_parts, token, expert, num_tokens, SIZES.num_experts)
        d_middle = matrix_tile(
            d_parts + num_tokens.to(tl.int64) * SIZES.num_experts,
            token,
            expert,
            num_tokens,
            SIZES.num_experts,
        )
        high = matrix_tile(parts, expert, column, SIZES.num_experts, SIZES.width)
        middle = matrix_tile(
            parts + SIZES.num_experts * SIZES.width, expert, column, SIZES.num_experts, SIZES.width
        )
        # The result is rounded to bf16: products of 2^-16 and less have no effect.
        terms = tl.dot(d_middle, high)
        terms = tl.dot(d_high, middle, terms)
        terms = tl.dot(d_high, high, terms)
        total += terms
    mask = (token < num_tokens)[:, None] & (column < SIZES.width)[None, :]
    tl.store(
        dx + token.to(tl.int64)[:, None] * SIZES.width + column[None, :],
        total.to(tl.bfloat16),
        mask=mask,
    )


@fast_jit()
def router_wgrad_kernel(
    d_parts, x, sums, num_tokens: tl.int32, split_tokens: tl.int32, SIZES: tl.constexpr
):
    expert = tl.program_id(1) * SIZES.block_m + tl.arange(0, SIZES.block_m)
    column = tl.program_id(0) * SIZES.block_n + tl.arange(0, SIZES.block_n)
    first = tl.program_id(2) * split_tokens
    end = tl.minimum(first + split_tokens, num_tokens)
    part_numel = num_tokens.to(tl.int64) * SIZES.num_experts
    total = tl.full((SIZES.block_m, SIZES.block_n), 0.0, tl.float32)
    for k in tl.range(first, end, SIZES.block_k):
        token = k + tl.arange(0, SIZES.block_k)
        high = matrix_tile(d_parts, token, expert, end, SIZES.num_experts)
        middle = matrix_tile(d_parts + part_numel, token, expert, end, SIZES.num_experts)
        low = matrix_tile(d_parts + 2 * part_numel, token, expert, end, SIZES.num_experts)
        rows = matrix_tile(x, token, column, end, SIZES.width)
        terms = tl.dot(low.T, rows)
        terms = tl.dot(middle.T, rows, terms)
        terms = tl.dot(high.T, rows, terms)
        total += terms
    mask = (expert < SIZES.num_experts)[:, None] & (column < SIZES.width)[None, :]
    out = sums + tl.program_id(2) * (SIZES.num_experts * SIZES.width)
    tl.store(out + expert[:, None] * SIZES.width + column[None, :], total, mask=mask)


def router_gemm(x, weight, logits):
    (num_tokens, width), num_experts = x.shape, weight.shape[0]
    if num_tokens == 0:
        return
    block_n = _block(num_experts)
    launch(
        router_gemm_kernel,
        (ceil_div(num_tokens, TOKENS), ceil_div(num_experts, block_n)),
        cached_sizes(
            num_experts=num_experts,
            width=width,
            block_m=TOKENS,
            block_n=block_n,
            block_k=BLOCK_K,
            num_warps=4,
            num_stages=3,
        ),
        x,
        *bf16_parts(weight),
        logits,
        num_tokens,
    )


def router_gemm_grads(d_logits, x, weight, dx, d_weight):
    """A weight gradient is summed over some tokens at a time; torch.sum adds these sums, in its own order."""
    (num_tokens, num_experts), width = d_logits.shape, x.shape[1]
    if num_tokens == 0:
        if d_weight is not None:
            d_weight.zero_()
        return
    num_column_tiles, block = ceil_div(width, TILE), _block(num_experts)
    *parts, d_parts = bf16_parts(d_logits) if dx is None else bf16_parts(weight, d_logits)
    if dx is not None:
        launch(
            router_dgrad_kernel,
            (num_column_tiles, ceil_div(num_tokens, TOKENS)),
            cached_sizes(
                num_experts=num_experts,
                width=width,
                block_m=TOKENS,
                block_n=TILE,
                block_k=min(BLOCK_K, block),
                num_warps=4,
                num_stages=2,
            ),
            d_parts,
            *parts,
            dx,
            num_tokens,
        )
    if d_weight is not None:
        block = max(64, block)
        num_expert_tiles = ceil_div(num_experts, block)
        num_splits, split_tokens = _splits(num_tokens, num_column_tiles * num_expert_tiles)
        sums = (
            d_weight[None] if num_splits == 1 else d_weight.new_empty((num_splits, *d_weight.shape))
        )
        launch(
            router_wgrad_kernel,
            (num_column_tiles, num_expert_tiles, num_splits),
            cached_sizes(
                num_experts=num_experts,
                width=width,
                block_m=block,
                block_n=TILE,
                block_k=BLOCK_K,
                num_warps=4 if block == 64 else 8,
                num_stages=3,
            ),
            d_parts,
            x,
            sums,
            num_tokens,
            split_tokens,
        )
        if num_splits > 1:
            torch.sum(sums, 0, out=d_weight)


def bf16_parts(*matrices: torch.Tensor) -> list[torch.Tensor]:
    """bf16 [3, *shape] for each of one or two contiguous fp32 matrices, in one launch. The sum of the three parts is
    the matrix, exactly unless the last part is denormal."""
    sizes = [matrix.numel() for matrix in matrices]
    memory = matrices[0].new_empty(PARTS.value * sum(sizes), dtype=torch.bfloat16)
    launch(
        bf16_parts_kernel,
        (sum(ceil_div(size, PART_ELEMENTS) for size in sizes),),
        cached_constants(BLOCK=PART_ELEMENTS, num_warps=4),
        *[*matrices, None][:2],
        memory,
        *[*sizes, 0][:2],
    )
    by_matrix = memory.split([PARTS.value * size for size in sizes])
    return [
        parts.view(PARTS.value, *matrix.shape)
        for parts, matrix in zip(by_matrix, matrices, strict=True)
    ]


@functools.cache
def _splits(num_tokens: int, num_tiles: int) -> tuple[int, int]:
    """The number of parts of a wgrad's tokens, and the tokens of a part: whole steps of the contraction."""
    max_splits = max(1, min(SPLIT_PROGRAMS // num_tiles, num_tokens // SPLIT_TOKENS))
    split_tokens = ceil_div(ceil_div(num_tokens, max_splits), BLOCK_K) * BLOCK_K
    return ceil_div(num_tokens, split_tokens), split_tokens


def _block(num_experts: int) -> int:
    """Experts of a tile."""
    return min(TILE, max(16, next_power_of_2(num_experts)))
