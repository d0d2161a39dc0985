"""The activation of an expert times the row's scale, separate and fused with the grouped GEMMs before and after it.

    C, I, O  input features of the first GEMM, FFN width, output features of the second GEMM
    W        columns of h: 2I for gated activations, else I (Activation.hidden_width)

    forward   h = round(rows @ weight^T + bias);  a = round(act(h) * scale)
    backward  da = round(dout @ weight);  dscale = sum_I(da * act(h));  dh = round(da * scale * act'(h));
              dbias = sum_rows(dh);  a again

Between the roundings everything is fp32, so the fused functions give the bits of the separate ones in h, a, da, dh and
dscale, whose order of sums is that of kernels/activation.py; only dbias is summed in another order. NaN goes through
clamps and relu; derivatives at a limit are those of torch.clamp (1 at equality).
"""

from typing import Protocol

from torch import Tensor

from symmoe.kernels.activation import Activation
from symmoe.kernels.contract.operands import Matrices, MaybeTensor, Rows, writes


class ActivationKernels(Protocol):
    @writes("out")
    def scaled_activation(
        self, h: Tensor, scale: Tensor, out: Tensor, activation: Activation
    ) -> None:
        """out[r] = act(h[r]) * scale[r], every row: h [N, W]; scale fp32[N]; out [N, I]."""

    @writes("dh", "dscale")
    def scaled_activation_grad(
        self,
        dout: Tensor,
        h: Tensor,
        scale: Tensor,
        dh: Tensor,
        dscale: Tensor,
        activation: Activation,
    ) -> None:
        """Gradient of scaled_activation, every row: dout [N, I]; h, dh [N, W], may be one; scale, dscale fp32[N]."""

    @writes("results")
    def grouped_gemm_act(
        self,
        rows: Rows,
        weight: Matrices,
        row_range: Tensor,
        row_scale: Tensor,
        results: tuple[Tensor, Tensor],
        activation: Activation,
        *,
        bias: MaybeTensor = None,
        num_sms: int | None = None,
    ) -> None:
        """results h, a: h[r] = rows[r] @ weight[g]^T + bias[g]; a[r] = act(h[r]) * row_scale[r], from the rounded h.

        rows of C features; weight [G, W, C]; row_scale fp32[N]; h [N, W]; a [N, I]; bias [G, W].
        """

    @writes("gradients", "workspace")
    def grouped_gemm_dact(
        self,
        dout: Rows,
        weight: Matrices,
        row_range: Tensor,
        hidden: tuple[Tensor, Tensor],
        gradients: tuple[Tensor, Tensor, MaybeTensor, MaybeTensor],
        workspace: Tensor,
        activation: Activation,
        *,
        num_sms: int | None = None,
    ) -> int:
        """Gradient through the second GEMM and the activation of hidden (h, row_scale): gradients dh, a of forward
        again, dscale, and the first GEMM's dbias.

        dout of O features; weight [G, O, I]; h, dh [N, W], which may be one; a [N, I]; row_scale, dscale fp32[N]; dbias
        [G, W] or None; workspace: fp32, of dact_workspace_numel(...) elements. dscale and dbias need whole groups;
        dscale is 0 in the tail. dscale None: its partial sums stay in the workspace. When calls that differ only in
        row_range have computed all rows, sum_dact_partials sums them (and grouped_bias_grad dh). Returns how many
        partial sums of dscale the workspace has for a row.
        """

    @writes()
    def dact_workspace_numel(
        self, num_rows: int, num_groups: int, ffn: int, activation: Activation
    ) -> int:
        """Elements of grouped_gemm_dact's fp32 workspace, enough for every dtype, with dbias or without."""

    @writes("dscale")
    def sum_dact_partials(
        self, workspace: Tensor, row_range: Tensor, dscale: Tensor, num_partials: int
    ) -> None:
        """dscale fp32[N], 0 in the tail, from the workspace that calls of grouped_gemm_dact have filled.

        row_range: whole groups, which the calls have covered. num_partials: the result of those calls.
        """
