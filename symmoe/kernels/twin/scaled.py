"""Grouped GEMMs of MXFP8 and NVFP4 numbers: the definition, in PyTorch. Operands and formats: kernels/scaled.py.

    N rows in G groups; group g owns rows row_start[g]:row_start[g+1] (row_start int32[G+1]).
    P tokens, where rows lie side by side: every group begins at the first multiple of TILE after the group before.

    grouped_gemm_scaled        out[N,O] = sum over C: (rows * row_scale) @ (weight * weight_scale)^T
    grouped_gemm_wgrad_scaled  out[G,O,C] (+)= sum over P: (dout * dout_scale) @ (rows * rows_scale)^T

data * scale is exact, and so is the product of two of them, unless it leaves the range of fp32. Sums are fp32; in NVFP4
a sum is then multiplied by the group's global scale of the left operand, and by that of the right one; the result is
rounded once. (Tensor cores add in an order of their own, and keep fewer bits than fp32 of terms that are small beside
the largest one.) As in twin/gemm.py, a row's bits do not depend on parts.
"""

from __future__ import annotations

import torch

from symmoe.kernels.formats import TILE, BlockFormat
from symmoe.kernels.parts import panel, refuse_ranges
from symmoe.kernels.scaled import check_scaled_gemm, check_scaled_wgrad, tiles_down
from symmoe.kernels.twin.gemm import groups, multiply, multiply_rows, row_ranges, zero_rows
from symmoe.kernels.twin.scale_tiles import unswizzle_group_scales

E2M1_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)  # by code


def grouped_gemm_scaled(
    rows: torch.Tensor,
    row_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    row_start: torch.Tensor,
    out: torch.Tensor,
    *,
    row_global_scale: torch.Tensor | None = None,
    weight_global_scale: torch.Tensor | None = None,
    group_start: torch.Tensor | None = None,
    columns: tuple[int, int] | None = None,
    zero_tail: bool = False,
    num_sms: int | None = None,
) -> None:
    """out[r] = (rows[r] * row_scale[r]) @ (weight[g] * weight_scale[g])^T for every row r of every group g.

    rows E4M3 [N, C] (MXFP8) or uint8 [N, C / 2] (NVFP4), C a multiple of 32; row_scale: the rows' scales in tiles,
    every group from a tile of its own. weight E4M3 [G, O, C] or uint8 [G, O, C / 2]; weight_scale: tiles of one matrix
    after the other. out bf16, fp16 or fp32 [N, O], its rows multiples of 16 bytes. NVFP4 needs row_global_scale and
    weight_global_scale, fp32[G]; MXFP8 has none. The input gradient is the same product, with gradients for rows and
    the transposed weight [G, C, O], quantised along O.

    row_start, columns, zero_tail, num_sms: as in grouped_gemm. group_start int32[G+1], the groups' bounds: with ranges
    of rows, where row_scale is that of whole groups. ArgumentError if an operand is anything else.
    """
    block_format = check_scaled_gemm(
        rows, row_scale, weight, weight_scale, row_start, out, row_global_scale, weight_global_scale, group_start
    )
    columns = panel(columns, out.shape[1])
    if zero_tail:
        refuse_ranges(row_start, "zero_tail")
    inside = slice(*columns) if columns else slice(None)
    num_groups, out_width, _ = weight.shape
    left = _numbers(rows, row_scale, row_start if group_start is None else group_start, block_format)
    lines = torch.arange(num_groups + 1, dtype=torch.int32, device=row_start.device) * out_width
    right = _numbers(weight.flatten(0, 1), weight_scale, lines, block_format).view(num_groups, out_width, -1)
    for g, span in row_ranges(row_start):
        total = torch.zeros((span.stop - span.start, out_width), dtype=torch.float32, device=out.device)
        multiply_rows(total, left[span], right[g].t(), columns)
        if row_global_scale is not None and weight_global_scale is not None:
            total = total * row_global_scale[g] * weight_global_scale[g]
        out[span, inside] = total[:, inside].to(out.dtype)
    if zero_tail:
        zero_rows(out, row_start, columns)


def grouped_gemm_wgrad_scaled(
    dout: torch.Tensor,
    dout_scale: torch.Tensor,
    rows: torch.Tensor,
    rows_scale: torch.Tensor,
    row_start: torch.Tensor,
    out: torch.Tensor,
    *,
    dout_global_scale: torch.Tensor | None = None,
    rows_global_scale: torch.Tensor | None = None,
    accumulate: bool = False,
    num_sms: int | None = None,
) -> None:
    """out[g] = (dout * dout_scale) @ (rows * rows_scale)^T over the tokens of group g; no tokens give zeros.

    dout [O, P] and rows [C, P] in E4M3 (MXFP8), or [O, P / 2] and [C, P / 2] in uint8 (NVFP4), as quantize_columns
    makes them: what fills a group's last tile is summed as well (zeros, or what a Hadamard transform has made of tokens
    and zeros), what comes after the last group may be anything. dout_scale, rows_scale: in tiles, as one matrix. NVFP4
    needs dout_global_scale and rows_global_scale, fp32[G], of groups with tokens; MXFP8 has none. out [G, O, C] in
    bf16, fp16 or fp32, its rows multiples of 16 bytes. accumulate: the sum is added to out[g] in fp32; no tokens leave
    it alone. row_start: the groups' bounds. num_sms: the kernels'.
    ArgumentError if an operand is anything else.
    """
    block_format = check_scaled_wgrad(dout, dout_scale, rows, rows_scale, out, dout_global_scale, rows_global_scale)
    refuse_ranges(row_start, "a weight gradient")
    left, right = (
        _numbers(data, scale, torch.tensor([0, data.shape[0]], dtype=torch.int32, device=data.device), block_format)
        for data, scale in ((dout, dout_scale), (rows, rows_scale))
    )
    first = 0
    for g, span in groups(row_start):
        end = first + tiles_down(span.stop - span.start)
        if first < end:
            tokens = slice(first * TILE, end * TILE)
            total = multiply(left[:, tokens], right[:, tokens].t())
            if dout_global_scale is not None and rows_global_scale is not None:
                total = total * dout_global_scale[g] * rows_global_scale[g]
            out[g] = out[g].float() + total if accumulate else total
        elif not accumulate:
            out[g] = 0
        first = end


def _numbers(data: torch.Tensor, scale: torch.Tensor, bounds: torch.Tensor, block_format: BlockFormat) -> torch.Tensor:
    """data * scale in fp32, of lines in groups that begin at tiles of their own; lines of no group may be anything."""
    values = data.float() if block_format.elements_per_byte == 1 else _e2m1(data)
    compact = torch.zeros(
        (data.shape[0], block_format.num_blocks(values.shape[1])), dtype=torch.uint8, device=data.device
    )
    unswizzle_group_scales(scale, bounds, compact)
    scales = compact.view(block_format.scale_dtype).float()
    return values * scales.repeat_interleave(block_format.block or values.shape[1], dim=1)


def _e2m1(data: torch.Tensor) -> torch.Tensor:
    """The numbers of packed codes, fp32."""
    codes = torch.stack((data & 0xF, data >> 4), dim=-1).flatten(-2)
    return torch.tensor(E2M1_NUMBERS, device=data.device)[codes.int()]
