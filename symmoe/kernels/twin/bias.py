"""Twins of the gradients of biases of contract/gemm.py. The order of the sum is that of kernels/bias_sums.py."""

import torch

from symmoe.kernels.bias_sums import SLOT_ROWS
from symmoe.kernels.formats import TILE
from symmoe.kernels.twin.activation import sum_in_blocks
from symmoe.kernels.twin.gemm import groups, take_rows


def grouped_bias_grad(
    dout: torch.Tensor,
    row_range: torch.Tensor,
    dbias: torch.Tensor,
    *,
    dout_index: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> None:
    for g, span in groups(row_range):
        addends = take_rows(dout, dout_index, span).float()
        if scale is not None:
            addends = addends * scale[span, None]
        dbias[g] = sum_in_blocks(addends.t(), TILE)


def sum_dbias(bias_sums: torch.Tensor, row_range: torch.Tensor, dbias: torch.Tensor) -> None:
    for g, span in groups(row_range):
        first = span.start // SLOT_ROWS + g
        num_slots = -(-(span.stop - span.start) // SLOT_ROWS)
        dbias[g] = sum_in_blocks(bias_sums[first : first + num_slots].t(), TILE // SLOT_ROWS)


def grouped_bias_dot(
    dout: torch.Tensor,
    bias: torch.Tensor,
    row_range: torch.Tensor,
    dscale: torch.Tensor,
    *,
    dout_index: torch.Tensor | None = None,
    accumulate: bool = False,
) -> None:
    for g, span in groups(row_range):
        dots = (take_rows(dout, dout_index, span).float() * bias[g].float()).sum(dim=1)
        dscale[span] = dscale[span] + dots if accumulate else dots
