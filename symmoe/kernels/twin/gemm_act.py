"""Grouped GEMMs fused with the activation between them: the definition, in PyTorch. See kernels/triton/gemm_act.py.

    N rows in G groups, C input features, I FFN width, O output features of the second GEMM; W columns of h.

Each function is the composition of the functions it fuses (gemm.py, activation.py): the kernels must give these bits
or, where they sum in another order, these numbers.
"""

import torch

from symmoe.kernels.activation import Activation
from symmoe.kernels.operands import given
from symmoe.kernels.parts import are_ranges, refuse_ranges
from symmoe.kernels.table import TensorTable
from symmoe.kernels.twin.activation import activation_gradients, scaled_activation
from symmoe.kernels.twin.gemm import grouped_gemm, groups, matrix, multiply_rows, row_ranges, spans_of, take_rows


def dact_workspace_numel(num_rows: int, num_groups: int, ffn: int, activation: Activation) -> int:
    """Elements of grouped_gemm_dact's fp32 workspace: here dscale, until sum_dact_partials."""
    return num_rows


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
    num_sms: int | None = None,
) -> None:
    """h[r] = rows[row_index[r]] @ weight[g]^T + bias[g]; a[r] = act(h[r]) * row_scale[r], from the rounded h.

    rows [N, C], or [P, C] with row_index int32[N]; weight [G, W, C]; row_scale fp32[N]; h [N, W]; a [N, I]; bias
    [G, W]. row_start: the groups' bounds int32[G+1], or ranges of rows int32[2, G]. num_sms: the kernels'.
    """
    grouped_gemm(rows, weight, row_start, h, row_index=row_index, bias=bias)
    for span in spans_of(row_start):
        scaled_activation(h[span], row_scale[span], a[span], activation)


def grouped_gemm_dact(
    dout: torch.Tensor,
    weight: torch.Tensor | TensorTable,
    row_start: torch.Tensor,
    h: torch.Tensor,
    row_scale: torch.Tensor,
    dh: torch.Tensor,
    a: torch.Tensor,
    dscale: torch.Tensor | None,
    workspace: torch.Tensor,
    activation: Activation,
    *,
    row_index: torch.Tensor | None = None,
    dbias: torch.Tensor | None = None,
    num_sms: int | None = None,
) -> int:
    """Gradient through the second GEMM and the activation: dh, dscale, the forward's a again, the first GEMM's dbias.

    dout [N, O], or [P, O] with row_index int32[N]; weight [G, O, I]; h, dh [N, W]; a [N, I]; row_scale, dscale fp32[N];
    dbias [G, W]. dscale is 0 in the tail. workspace: fp32, of dact_workspace_numel(...) elements.
    num_sms: the kernels'.

    row_start: the groups' bounds int32[G+1], or ranges of rows int32[2, G]. Then dh and a of these rows are written,
    and what dscale needs of them is left in the workspace: when all rows have been computed, in calls that differ in
    their ranges only, sum_dact_partials makes dscale of it. dscale is left alone and may be None; dbias must be None
    (ArgumentError): grouped_bias_grad sums dh.

    Returns:
        How many partial sums of dscale the workspace has for a row.
    """
    if dbias is not None:
        refuse_ranges(row_start, "dbias")
    da = torch.empty(a.shape, dtype=dout.dtype, device=dout.device)
    for g, span in row_ranges(row_start):
        multiply_rows(da[span], take_rows(dout, row_index, span), matrix(weight, g))
    for span in spans_of(row_start):
        scale = row_scale[span]
        value = activation_gradients(da[span], h[span], scale, dh[span], workspace[span], activation)
        torch.mul(value, scale[:, None], out=a[span])
    if not are_ranges(row_start):
        sum_dact_partials(workspace, row_start, given("dscale", dscale), 1)
    if dbias is not None:
        for g, span in groups(row_start):
            dbias[g] = dh[span].float().sum(dim=0)
    return 1


def sum_dact_partials(
    workspace: torch.Tensor, row_start: torch.Tensor, dscale: torch.Tensor, num_partials: int
) -> None:
    """dscale fp32[N], 0 in the tail, from the workspace that calls of grouped_gemm_dact with ranges have filled.

    row_start: the groups' bounds int32[G+1], which the ranges have covered. num_partials: what those calls returned.
    """
    refuse_ranges(row_start, "dscale")
    num_rows = int(row_start[-1])
    dscale[:num_rows] = workspace[:num_rows]
    dscale[num_rows:] = 0
