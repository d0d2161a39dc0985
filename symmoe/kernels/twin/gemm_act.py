"""Twins of the grouped GEMMs fused with an activation of contract/activation.py.

Each function is the composition of the functions it fuses (gemm.py, activation.py): the kernels must give these bits
or, where they sum in another order, these numbers.
"""

import torch

from symmoe.kernels.activation import Activation
from symmoe.kernels.tensor_table import TensorTable
from symmoe.kernels.twin.activation import activation_gradients, scaled_activation
from symmoe.kernels.twin.bias import grouped_bias_grad
from symmoe.kernels.twin.gemm import filled_groups, grouped_gemm, matrix, multiply_rows, spans_of, take_rows


def dact_workspace_numel(num_rows: int, num_groups: int, ffn: int, activation: Activation) -> int:
    return num_rows


def grouped_gemm_act(
    rows: torch.Tensor,
    weight: torch.Tensor | TensorTable,
    row_range: torch.Tensor,
    row_scale: torch.Tensor,
    h: torch.Tensor,
    a: torch.Tensor,
    activation: Activation,
    *,
    row_index: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    num_sms: int | None = None,
) -> None:
    grouped_gemm(rows, weight, row_range, h, row_index=row_index, bias=bias)
    for span in spans_of(row_range):
        scaled_activation(h[span], row_scale[span], a[span], activation)


def grouped_gemm_dact(
    dout: torch.Tensor,
    weight: torch.Tensor | TensorTable,
    row_range: torch.Tensor,
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
    da = torch.empty(a.shape, dtype=dout.dtype, device=dout.device)
    for g, span in filled_groups(row_range):
        multiply_rows(da[span], take_rows(dout, row_index, span), matrix(weight, g))
    for span in spans_of(row_range):
        scale = row_scale[span]
        value = activation_gradients(da[span], h[span], scale, dh[span], workspace[span], activation)
        torch.mul(value, scale[:, None], out=a[span])
    if dscale is not None:
        sum_dact_partials(workspace, row_range, dscale, 1)
    if dbias is not None:
        grouped_bias_grad(dh, row_range, dbias)
    return 1


def sum_dact_partials(
    workspace: torch.Tensor, row_range: torch.Tensor, dscale: torch.Tensor, num_partials: int
) -> None:
    num_rows = int(row_range[1, -1])
    dscale[:num_rows] = workspace[:num_rows]
    dscale[num_rows:] = 0
