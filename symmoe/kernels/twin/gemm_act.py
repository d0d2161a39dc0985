"""Grouped GEMMs fused with the activation between them: the definition, in PyTorch. See kernels/gpu/gemm_act.py.

    N rows in G groups, C input features, I FFN width, O output features of the second GEMM; W columns of h.

Each function is the composition of the functions it fuses (gemm.py, activation.py): the kernels must give these bits
or, where they sum in another order, these numbers.
"""

import torch

from symmoe.kernels.activation import Activation
from symmoe.kernels.table import TensorTable
from symmoe.kernels.twin.activation import scaled_activation, scaled_activation_grad
from symmoe.kernels.twin.gemm import grouped_gemm, grouped_gemm_dgrad, groups


def dact_workspace_numel(num_rows: int, num_groups: int, ffn: int, activation: Activation) -> int:
    """Elements of grouped_gemm_dact's fp32 workspace: the twin sums at once and needs none."""
    return 0


def grouped_gemm_act(
    rows: torch.Tensor,
    weight: torch.Tensor | TensorTable,
    row_start: torch.Tensor,
    row_scale: torch.Tensor,
    h: torch.Tensor,
    a: torch.Tensor,
    activation: Activation,
    *,
    row_index: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> None:
    """h[r] = rows[row_index[r]] @ weight[g]^T + bias[g]; a[r] = act(h[r]) * row_scale[r], from the rounded h.

    rows [N, C], or [P, C] with row_index int32[N]; weight [G, W, C]; row_scale fp32[N]; h [N, W]; a [N, I]; bias
    [G, W].
    """
    num_rows = int(row_start[-1])
    options = {} if bias is None else {"bias": bias}
    grouped_gemm(rows, weight, row_start, h, row_index=row_index, **options)
    scaled_activation(h[:num_rows], row_scale[:num_rows], a[:num_rows], activation)


def grouped_gemm_dact(
    dout: torch.Tensor,
    weight: torch.Tensor | TensorTable,
    row_start: torch.Tensor,
    h: torch.Tensor,
    row_scale: torch.Tensor,
    dh: torch.Tensor,
    a: torch.Tensor,
    dscale: torch.Tensor,
    workspace: torch.Tensor,
    activation: Activation,
    *,
    row_index: torch.Tensor | None = None,
    dbias: torch.Tensor | None = None,
) -> None:
    """Gradient through the second GEMM and the activation: dh, dscale, the forward's a again, the first GEMM's dbias.

    dout [N, O], or [P, O] with row_index int32[N]; weight [G, O, I]; h, dh [N, W]; a [N, I]; row_scale, dscale fp32[N];
    dbias [G, W]. dscale is 0 in the tail. workspace is the kernels'; the twin leaves it alone.
    """
    num_rows = int(row_start[-1])
    da = torch.empty((num_rows, a.shape[1]), dtype=dout.dtype, device=dout.device)
    gathered = dout if row_index is None else dout[row_index[:num_rows].long()]
    grouped_gemm_dgrad(gathered, weight, row_start, da)
    kept = h[:num_rows], row_scale[:num_rows]
    scaled_activation_grad(da, *kept, dh[:num_rows], dscale[:num_rows], activation)
    scaled_activation(*kept, a[:num_rows], activation)
    dscale[num_rows:] = 0
    if dbias is not None:
        for g, span in groups(row_start):
            dbias[g] = dh[span].float().sum(dim=0)
