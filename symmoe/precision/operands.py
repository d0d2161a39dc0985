"""The operands of grouped GEMMs in a recipe's numbers, and their two products, for all kernels.

    multiply          forward: rows x weight; dgrad: gradient rows x transposed weight
    multiply_columns  wgrad: gradient columns x columns of the rows

An operand has its scales as the kernel reads them: compact fp32 ones for E4M3 in blocks of 128 (kernels/fp8.py),
one-byte ones in 128x4 tiles (kernels/scaled.py). No function synchronises the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from symmoe import kernels
from symmoe.errors import ArgumentError
from symmoe.kernels.tensor_table import TensorTable
from symmoe.precision.quantized import Quantized
from symmoe.precision.recipes import Recipe


class Operand(NamedTuple):
    """Quantised rows, columns or weights, ready for a grouped GEMM.

    Attributes:
        data: quantised numbers, as in Quantized.
        scale: compact fp32 scales, or tiles of uint8 scales.
        global_scale: fp32[G], or None where the format has none.
    """

    data: torch.Tensor
    scale: torch.Tensor
    global_scale: torch.Tensor | None


class ScatteredWeight(NamedTuple):
    """Quantised weights of G experts, each with memory of its own, e.g. from :func:`pack_weight_ptrs`. Nothing here
    keeps that memory alive.

    Attributes:
        data: the matrices of Quantized.data.
        scale: the matrices of its compact fp32 scales; or of uint8 scales in tiles, [tiles down, tiles across * 512].
        global_scale: as in Operand.
    """

    data: TensorTable
    scale: TensorTable
    global_scale: torch.Tensor | None


def operand(quantized: Quantized) -> Operand:
    """The numbers of a recipe with their scales laid out."""
    if quantized.scale.dtype != torch.float32:
        return Operand(quantized.data, quantized.swizzled_scale(), quantized.global_scale)
    return Operand(quantized.data, quantized.scale, None)


def multiply(
    rows: Operand,
    weight: Operand | ScatteredWeight,
    row_range: torch.Tensor,
    out: torch.Tensor,
    *,
    group_range: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    bias_scale: torch.Tensor | None = None,
    zero_tail: bool = False,
    num_sms: int | None = None,
) -> None:
    """out[r] = rows[r] @ weight[g]^T + bias[g] * bias_scale[r] for every row r of every group g, same as grouped_gemm.

    Rounded once. out [N, O], bias [G, O]: bf16, fp16 or fp32; bias_scale fp32[N], None: 1. group_range: the row_range
    of the whole groups, by which scales lie in tiles, if row_range has only some of their rows; else None.
    """
    ops, operands = kernels.for_device(out.device), (rows.data, rows.scale, weight.data, weight.scale, row_range, out)
    if rows.scale.dtype == torch.float32:
        ops.grouped_gemm_fp8(*operands, bias=bias, bias_scale=bias_scale, zero_tail=zero_tail, num_sms=num_sms)
        return
    ops.grouped_gemm_scaled(
        *operands,
        row_global_scale=rows.global_scale,
        weight_global_scale=weight.global_scale,
        group_range=group_range,
        bias=bias,
        bias_scale=bias_scale,
        zero_tail=zero_tail,
        num_sms=num_sms,
    )


def multiply_columns(
    dout: Operand,
    rows: Operand,
    row_range: torch.Tensor,
    out: torch.Tensor | TensorTable,
    *,
    accumulate: bool,
    num_sms: int | None = None,
) -> None:
    """out[g] (+)= dout_g @ rows_g^T over the tokens of group g, same as grouped_gemm_wgrad; out [G, O, C]."""
    ops, operands = kernels.for_device(out.device), (dout.data, dout.scale, rows.data, rows.scale, row_range, out)
    if rows.scale.dtype == torch.float32:
        ops.grouped_gemm_wgrad_fp8(*operands, accumulate=accumulate, num_sms=num_sms)
        return
    ops.grouped_gemm_wgrad_scaled(
        *operands,
        dout_global_scale=dout.global_scale,
        rows_global_scale=rows.global_scale,
        accumulate=accumulate,
        num_sms=num_sms,
    )


def gradient_seeds(
    recipe: Recipe, rows: torch.Tensor, row_range: torch.Tensor, row_index: torch.Tensor | None
) -> torch.Tensor | None:
    """int64[G]: seeds of the stochastic rounding of every group's gradients [N, C]; None if rounding is not stochastic.

    A seed is the sum of the bits of a group's rows. So different steps are rounded differently; equal gradients are
    rounded equally, on any number of ranks and however often; and there is no state to save or to replay.
    """
    if not recipe.stochastic_gradients:
        return None
    if rows.numel() == 0:
        return torch.zeros(row_range.shape[1], dtype=torch.int64, device=rows.device)
    words = rows.view(torch.int64).sum(1)  # wraps around
    words = words if row_index is None else words.index_select(0, row_index)
    up_to = torch.nn.functional.pad(words.cumsum(0), (1, 0))  # includes rows of the tail, but these cancel
    return up_to[row_range].diff(dim=0)[0]


def precision_problem(precision: object, **widths: int) -> ArgumentError | None:
    """What keeps a layer with these numbers of features from computing with a precision, or None."""
    if precision is None:
        return None
    if not isinstance(precision, Recipe):
        return ArgumentError(f"precision ({precision!r}) must be a recipe of symmoe.precision, or None")
    for name, width in widths.items():
        if width % precision.feature_multiple:
            return ArgumentError(f"{name} ({width}) must be a multiple of {precision.feature_multiple} for {precision}")
    return None
