"""Gradients of the biases of a grouped GEMM: the definition, in PyTorch. Contract as in kernels/triton/bias.py.

    N rows in G groups; group g owns rows row_start[g]:row_start[g+1] (row_start int32[G+1]).
    O output features; P packed rows that a dout_index points into.

The forward is out[r] = ... + bias[g] * scale[r]. Products and sums are fp32. Rows past row_start[G] are neither
written nor read into a sum.
"""

import torch

from symmoe.kernels.parts import refuse_ranges
from symmoe.kernels.twin.gemm import groups, take_rows


def grouped_bias_grad(
    dout: torch.Tensor,
    row_start: torch.Tensor,
    dbias: torch.Tensor,
    *,
    dout_index: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> None:
    """dbias[g] = sum over the rows r of group g of dout[dout_index[r]] * scale[r]; no rows give zeros.

    dout [N, O], or [P, O] with dout_index int32[N]; scale fp32[N], without: 1; dbias [G, O] in any dtype.
    """
    refuse_ranges(row_start, "dbias")
    for g, span in groups(row_start):
        addends = take_rows(dout, dout_index, span).float()
        if scale is not None:
            addends = addends * scale[span, None]
        dbias[g] = addends.sum(dim=0)


def grouped_bias_dot(
    dout: torch.Tensor,
    bias: torch.Tensor,
    row_start: torch.Tensor,
    dscale: torch.Tensor,
    *,
    dout_index: torch.Tensor | None = None,
    accumulate: bool = False,
) -> None:
    """dscale[r] = dout[dout_index[r]] . bias[g] for every row r of every group g: the gradient of the bias' scale.

    dout [N, O], or [P, O] with dout_index int32[N]; bias [G, O]; dscale fp32[N]. accumulate: it is added to dscale.
    """
    refuse_ranges(row_start, "dscale")
    for g, span in groups(row_start):
        dots = (take_rows(dout, dout_index, span).float() * bias[g].float()).sum(dim=1)
        dscale[span] = dscale[span] + dots if accumulate else dots
