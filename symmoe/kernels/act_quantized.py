"""Rules of the activations with quantised results on all devices: formats that they take, and checks of arguments.

Buffers are a pair (data, scale), which quantize_rows or quantize_columns would fill (contract/quantize.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from symmoe.errors import ArgumentError
from symmoe.kernels.activation import Activation, num_scale_sums
from symmoe.kernels.bias_sums import bias_slots
from symmoe.kernels.formats import TILE, BlockFormat, max_tiles
from symmoe.kernels.operands import FLOATS, check_column_scale, check_operand

Buffers = tuple[torch.Tensor, torch.Tensor]

FEATURES = 128  # features of the activation's result in a tile
ALTERNATING_FEATURES = 64  # the same for its gradient, if gate and up features alternate: a whole block of dh
# Parameters of dact_quantize's kernels that need not be aligned to 16 bytes.
ANY_ADDRESS = "row_scale row_range workspace scale column_scale a_column_scale bias_sums".split()
H, SCALE, RANGE = (torch.bfloat16, torch.float16), (torch.float32,), (torch.int32,)


def takes_act_quantize(block_format: BlockFormat) -> bool:
    """Whether act_quantize makes this format: E4M3 in blocks that divide tiles, without a scale of the group."""
    return block_format.element == "e4m3" and block_format.block in (32, 128) and not block_format.has_global_scale


def takes_dact_quantize(ffn: int, activation: Activation, block_format: BlockFormat) -> bool:
    """Whether dact_quantize makes this format of dh: no block of a row may have both gate and up features in halves."""
    in_halves = activation.is_gated and activation.interleave is None
    return takes_act_quantize(block_format) and (not in_halves or ffn % block_format.block == 0)


def dact_features(activation: Activation) -> int:
    """Features of the activation's result in a tile of dact_quantize."""
    return FEATURES if activation.interleave is None else ALTERNATING_FEATURES


def dact_quantize_workspace_numel(num_rows: int, ffn: int, dbias: torch.Tensor | None = None) -> int:
    """Elements of dact_quantize's fp32 workspace: a sum for every row and block of features, then for every row tile
    and column of dbias."""
    numel = num_rows * num_scale_sums(ffn)
    return numel if dbias is None else numel + bias_slots(num_rows, dbias.shape[0]) * dbias.shape[1]


@dataclass(frozen=True, slots=True)
class Sizes:
    """N rows, G groups, I columns of the activation's result, W columns of h."""

    num_rows: int
    num_groups: int
    ffn: int
    hidden: int


def check_act_quantize(
    h: torch.Tensor,
    row_scale: torch.Tensor,
    row_range: torch.Tensor,
    activation: Activation,
    block_format: BlockFormat,
    rows: Buffers | None,
    columns: Buffers | None,
) -> Sizes:
    """The sizes; ArgumentError unless these are arguments of act_quantize."""
    sizes = _sizes(h, row_scale, row_range, activation)
    if not takes_act_quantize(block_format):
        raise ArgumentError(f"block_format must be of E4M3 numbers in blocks of 32 or 128, got {block_format}")
    if rows is None and columns is None:
        raise ArgumentError("rows or columns must be given, got None for both")
    _check_rows("rows", rows, sizes.num_rows, sizes.ffn, block_format)
    _check_columns("columns", columns, sizes, sizes.ffn, block_format)
    return sizes


def check_dact_quantize(
    da: torch.Tensor,
    h: torch.Tensor,
    row_scale: torch.Tensor,
    row_range: torch.Tensor,
    dscale: torch.Tensor,
    workspace: torch.Tensor,
    activation: Activation,
    block_format: BlockFormat,
    rows: Buffers | None,
    columns: Buffers | None,
    a_columns: Buffers | None,
    dbias: torch.Tensor | None,
) -> Sizes:
    """The sizes; ArgumentError unless these are arguments of dact_quantize."""
    sizes = _sizes(h, row_scale, row_range, activation)
    if not takes_dact_quantize(sizes.ffn, activation, block_format):
        raise ArgumentError(
            f"block_format must be of E4M3 numbers in blocks of 32 or 128 that divide each half of h ({sizes.ffn}), "
            f"got {block_format}"
        )
    check_operand("da", da, (sizes.num_rows, sizes.ffn), (h.dtype,))
    check_operand("dscale", dscale, (sizes.num_rows,), SCALE)
    if dbias is not None:
        check_operand("dbias", dbias, (sizes.num_groups, sizes.hidden), FLOATS)
    least = dact_quantize_workspace_numel(sizes.num_rows, sizes.ffn, dbias)
    if workspace.dtype != torch.float32 or workspace.numel() < least or not workspace.is_contiguous():
        raise ArgumentError(
            f"workspace must have {least} contiguous fp32 elements, got {workspace.dtype} {list(workspace.shape)}"
        )
    _check_rows("rows", rows, sizes.num_rows, sizes.hidden, block_format)
    _check_columns("columns", columns, sizes, sizes.hidden, block_format)
    _check_columns("a_columns", a_columns, sizes, sizes.ffn, block_format)
    return sizes


def _sizes(h: torch.Tensor, row_scale: torch.Tensor, row_range: torch.Tensor, activation: Activation) -> Sizes:
    num_rows, hidden = h.shape
    parts = activation.hidden_width(activation.interleave or 1)
    if hidden == 0 or hidden % parts:
        raise ArgumentError(f"h must have a multiple of {parts} columns, got {hidden}")
    check_operand("h", h, (num_rows, hidden), H)
    check_operand("row_scale", row_scale, (num_rows,), SCALE)
    num_groups = row_range.shape[-1]
    check_operand("row_range", row_range, (2, num_groups), RANGE)
    return Sizes(num_rows, num_groups, hidden // activation.hidden_width(1), hidden)


def _check_rows(name: str, operand: Buffers | None, num_rows: int, width: int, block_format: BlockFormat) -> None:
    if operand is None:
        return
    data, scale = operand
    check_operand(f"data of {name}", data, (num_rows, width), (block_format.data_dtype,))
    blocks = block_format.num_blocks(width)
    check_operand(f"scales of {name}", scale, (num_rows, blocks), (block_format.scale_dtype,))


def _check_columns(name: str, operand: Buffers | None, sizes: Sizes, width: int, block_format: BlockFormat) -> None:
    if operand is None:
        return
    data, scale = operand
    tokens, least = data.shape[-1], TILE * max_tiles(sizes.num_rows, sizes.num_groups)
    if tokens % TILE or tokens < least:
        raise ArgumentError(
            f"data of {name} must be as wide as a multiple of {TILE} tokens, at least {least}, got {tokens}"
        )
    check_operand(f"data of {name}", data, (width, tokens), (block_format.data_dtype,))
    wanted = width, block_format.num_blocks(tokens)
    if scale.shape != wanted or scale.dtype != block_format.scale_dtype:
        raise ArgumentError(
            f"scales of {name} must be {block_format.scale_dtype} {list(wanted)}, got {scale.dtype} {list(scale.shape)}"
        )
    check_column_scale(f"scales of {name}", scale)
