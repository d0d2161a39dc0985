"""Grouped GEMMs of quantised numbers: which kernel multiplies them (twin/quantized_gemm.py).

Operands with fp32 scales go to fp8.py, or on Hopper to hopper_fp8.py and hopper_fp8_wgrad.py. Operands with scales in
tiles go to block_scaled/scaled.py. `tile`: fields of TileConfig, for comparisons; a tile excludes the kernels for
Hopper.
"""

import torch

from symmoe.kernels import hopper_choice
from symmoe.kernels.launch.launch import launch
from symmoe.kernels.low_precision import fp8
from symmoe.kernels.operands import as_pair, packed_and_table
from symmoe.kernels.quantized_gemm import FLOAT8_BLOCK, check_gemm, check_wgrad
from symmoe.kernels.triton.gemm import zero_matrices
from symmoe.kernels.triton.tiles import launch_grid


def grouped_gemm_quantized(
    rows,
    weight,
    row_range,
    out,
    *,
    group_range=None,
    bias=None,
    zero_tail=False,
    num_sms=None,
    **tile,
):
    block_format = check_gemm(rows, weight, row_range, out, bias, group_range)
    (num_rows, out_width), num_groups = out.shape, weight.data.shape[0]
    sizes = num_groups, out_width, rows.data.shape[1]
    if block_format is FLOAT8_BLOCK:
        if not tile and hopper_choice.launched(
            "grouped_gemm_fp8",
            (out.device, out.dtype, out_width),
            (num_rows,),
            *(rows, weight, row_range, out),
            bias=bias,
            zero_tail=zero_tail,
            num_sms=num_sms,
        ):
            return
        kernel, arguments = fp8.grouped_gemm_fp8_kernel, (row_range,)
        gemm, constants = fp8.plan_gemm(*sizes, **tile)
    else:
        from symmoe.kernels.low_precision.block_scaled import scaled

        kernel, unit = scaled.grouped_gemm_scaled_kernel, scaled.scaled_products(out.device)
        gemm, constants = scaled.plan_gemm(block_format, unit, *sizes, **tile)
        arguments = rows.global_scale, weight.global_scale, row_range, group_range
    launch(
        kernel,
        gemm.grid(num_rows, num_sms, out.device),
        constants,
        rows.data,
        rows.scale,
        *packed_and_table(weight.data),
        *packed_and_table(weight.scale),
        *arguments,
        out,
        *as_pair(bias),
        num_rows if zero_tail else None,
    )


def grouped_gemm_wgrad_quantized(
    dout, rows, row_range, out, *, accumulate=False, num_sms=None, **tile
):
    block_format = check_wgrad(dout, rows, out)
    if dout.data.shape[1] == 0:
        if not accumulate:
            zero_matrices(out)
        return
    sizes = out.dtype, accumulate, out.shape
    arguments = dout.data, dout.scale, rows.data, rows.scale
    if block_format is FLOAT8_BLOCK:
        operands = (
            torch.bfloat16 if out.dtype == torch.float32 else out.dtype
        )  # fp32 results are also stored
        if not tile and hopper_choice.launched(
            "grouped_gemm_wgrad_fp8",
            (out.device, operands, out.shape[2]),
            (out,),
            *(dout, rows, row_range, out),
            accumulate=accumulate,
            num_sms=num_sms,
        ):
            return
        kernel, (wgrad, constants) = (
            fp8.grouped_gemm_wgrad_fp8_kernel,
            fp8.plan_wgrad(*sizes, **tile),
        )
    else:
        from symmoe.kernels.low_precision.block_scaled import scaled

        kernel, unit = scaled.grouped_gemm_wgrad_scaled_kernel, scaled.scaled_products(out.device)
        wgrad, constants = scaled.plan_wgrad(block_format, unit, *sizes, **tile)
        arguments = *arguments, dout.global_scale, rows.global_scale
    launch(
        kernel,
        launch_grid(wgrad.num_tiles, num_sms, out.device),
        constants,
        *arguments,
        row_range,
        *packed_and_table(out),
    )
