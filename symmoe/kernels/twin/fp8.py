"""Grouped GEMMs of E4M3 numbers with a scale per block: the definition, in PyTorch. Operands: kernels/fp8.py.

    N rows in G groups; group g owns rows row_start[g]:row_start[g+1] (row_start int32[G+1]).
    P tokens, where rows lie side by side: every group begins at the first multiple of BLOCK after the group before.

    grouped_gemm_fp8        out[N,O] = sum over blocks b of C: (rows_b @ weight_b^T) * (row_scale_b * weight_scale_b)
                            or (sum over b: rows_b @ weight_b^T) * (row_scale * weight_scale), of scales of lines
    grouped_gemm_wgrad_fp8  out[G,O,C] (+)= sum over blocks b of P: (dout_b @ rows_b^T) * rows_scale_b * dout_scale_b

The products of two E4M3 numbers are exact; a block's sum, the multiplication by its scales from left to right, and the
addition to the blocks before it are fp32; the result is rounded once. (On GPUs a block's sum has about 14 bits, and a
multiplication and an addition may be one operation.) As in twin/gemm.py, a row's bits do not depend on parts.
"""

import torch

from symmoe.kernels.fp8 import BLOCK, check_fp8_gemm, check_fp8_wgrad, num_blocks
from symmoe.kernels.parts import panel, refuse_ranges
from symmoe.kernels.twin.gemm import groups, multiply, multiply_rows, row_ranges, zero_rows


def grouped_gemm_fp8(
    rows: torch.Tensor,
    row_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    row_start: torch.Tensor,
    out: torch.Tensor,
    *,
    columns: tuple[int, int] | None = None,
    zero_tail: bool = False,
    num_sms: int | None = None,
) -> None:
    """out[r] = (rows[r] * row_scale[r]) @ (weight[g] * weight_scale[g])^T for every row r of every group g.

    rows E4M3 [N, C], row_scale fp32 [N, B(C)]: a scale for BLOCK features of a row; weight E4M3 [G, O, C], weight_scale
    fp32 [G, B(O), B(C)]: a scale for BLOCK x BLOCK features. Or row_scale [N, 1] and weight_scale [G, O, 1]: one for
    a row and one for a line of the weight. out bf16, fp16 or fp32 [N, O]. C is a multiple of 16, rows of out are
    multiples of 16 bytes. The input gradient is the same product, with gradients for rows and the transposed weight
    [G, C, O] with its transposed scales. row_start, columns, zero_tail, num_sms: as in grouped_gemm.
    ArgumentError if an operand is anything else.
    """
    of_lines = check_fp8_gemm(rows, row_scale, weight, weight_scale, out)
    columns = panel(columns, out.shape[1])
    if zero_tail:
        refuse_ranges(row_start, "zero_tail")
    inside = slice(*columns) if columns else slice(None)
    for g, span in row_ranges(row_start):
        total = torch.zeros((span.stop - span.start, out.shape[1]), dtype=torch.float32, device=out.device)
        partial = torch.empty_like(total)
        for b in range(num_blocks(rows.shape[1])):
            block = slice(b * BLOCK, (b + 1) * BLOCK)
            multiply_rows(partial, rows[span, block].float(), weight[g, :, block].float().t(), columns)
            if of_lines:
                total[:, inside] += partial[:, inside]
                continue
            features = weight_scale[g, :, b].repeat_interleave(BLOCK)[: out.shape[1]]
            total[:, inside] += partial[:, inside] * (row_scale[span, b, None] * features[inside])
        if of_lines:
            total[:, inside] *= row_scale[span] * weight_scale[g, inside].T
        out[span, inside] = total[:, inside].to(out.dtype)
    if zero_tail:
        zero_rows(out, row_start, columns)


def grouped_gemm_wgrad_fp8(
    dout: torch.Tensor,
    dout_scale: torch.Tensor,
    rows: torch.Tensor,
    rows_scale: torch.Tensor,
    row_start: torch.Tensor,
    out: torch.Tensor,
    *,
    accumulate: bool = False,
    num_sms: int | None = None,
) -> None:
    """out[g] = (dout * dout_scale) @ (rows * rows_scale)^T over the tokens of group g; no tokens give zeros.

    dout E4M3 [O, P], rows E4M3 [C, P], as quantize_columns makes them: the tokens between a group's last and the next
    multiple of BLOCK are zeros, those past the last group may be anything. dout_scale fp32 [O, P / BLOCK], rows_scale
    fp32 [C, P / BLOCK]: a scale for BLOCK tokens of a feature, block-major (strides (1, O) and (1, C)). O is a multiple
    of 4. out [G, O, C] in bf16, fp16 or fp32, its rows multiples of 16 bytes. accumulate: the sum is added to out[g] in
    fp32; no tokens leave it alone. row_start: the groups' bounds. num_sms: the kernels'.
    ArgumentError if an operand is anything else.
    """
    check_fp8_wgrad(dout, dout_scale, rows, rows_scale, out)
    refuse_ranges(row_start, "a weight gradient")
    first = 0
    for g, span in groups(row_start):
        end = first + num_blocks(span.stop - span.start)
        total = torch.zeros(out.shape[1:], dtype=torch.float32, device=out.device)
        for b in range(first, end):
            block = slice(b * BLOCK, (b + 1) * BLOCK)
            partial = multiply(dout[:, block].float(), rows[:, block].float().t())
            total += partial * rows_scale[:, b] * dout_scale[:, b, None]
        if not accumulate:
            out[g] = total
        elif first < end:
            out[g] = out[g].float() + total
        first = end
