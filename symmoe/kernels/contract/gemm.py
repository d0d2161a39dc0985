"""Grouped GEMMs: plain ones, those fused with the activation, and those of quantised numbers.

GemmKernels
-----------
Grouped GEMMs over rows that are sorted by expert, and the gradients of their biases.

    C, O  features that the forward GEMM contracts, and features of its result

Tensors are of one dtype (bf16, fp16 or fp32), 16-byte aligned, their features multiples of 16 bytes; callers check it.
Products and sums are fp32 (IEEE, not TF32, for fp32 numbers); a result is rounded once. No sum uses atomics. A row's
bits in grouped_gemm and grouped_gemm_dgrad do not depend on where the row lies or on how rows are cut into
parts; tiles and the order of sums depend only on the features, never on N or R.

Matrices are a tensor [G, O, C] or a TensorTable of G matrices [O, C] that lie anywhere, with the same bits.

* accumulate: the result is added to out in fp32, and rounded with it; groups without rows leave out as it is.
* zero_tail: the tail of out becomes 0; needs whole groups.

ActivationKernels
-----------------
The activation of an expert times the row's scale, separate and fused with the grouped GEMMs before and after it.

    C, I, O  input features of the first GEMM, FFN width, output features of the second GEMM
    W        columns of h: 2I for gated activations, else I (Activation.hidden_width)

    forward   h = round(rows @ weight^T + bias);  a = round(act(h) * scale)
    backward  da = round(dout @ weight);  dscale = sum_I(da * act(h));  dh = round(da * scale * act'(h));
              dbias = sum_rows(dh);  a again

Between the roundings everything is fp32, so the fused functions give the bits of the separate ones in h, a, da, dh and
dscale, whose order of sums is that of kernels/activation.py; only dbias is summed in another order. NaN goes through
clamps and relu; derivatives at a limit are those of torch.clamp (1 at equality).

QuantizedGemmKernels
--------------------
Grouped GEMMs of quantised numbers (kernels/quantized_gemm.py has the formats): E4M3 with fp32 scales, MXFP8, NVFP4.

C, O, accumulate and zero_tail are those of contract/gemm.py, P is that of contract/quantize.py; BLOCK is 128
and B(n) = ceil(n / BLOCK). Operands are data and scales of quantize_rows, quantize_columns and quantize_weights; an
NVFP4 operand also has a global scale, fp32[G], by which sums are multiplied, others have none. out is bf16, fp16 or
fp32, its rows multiples of 16 bytes. The input gradient is the forward product, with gradients for rows and the
transposed weight [G, C, O], quantised along O, with its scales. ArgumentError if an operand does not fit.

A product of two E4M3 or E2M1 numbers is exact, sums are fp32, the bias is added in fp32, the result is rounded once,
and a row's bits do not depend on parts. (Tensor cores add in another order, and keep fewer bits than fp32 of terms that
are much smaller than the largest one: about 14 bits in sums of E4M3 products.)
"""

from typing import Protocol

from torch import Tensor

from symmoe.kernels.activation import Activation
from symmoe.kernels.contract.operands import Bias, Matrices, MaybeTensor, Rows, writes
from symmoe.kernels.operands import Operand, ScatteredWeight


class GemmKernels(Protocol):
    @writes("out")
    def grouped_gemm(
        self,
        rows: Rows,
        weight: Matrices,
        row_range: Tensor,
        out: Tensor,
        *,
        bias: Bias = None,
        accumulate: bool = False,
        zero_tail: bool = False,
        num_sms: int | None = None,
    ) -> None:
        """out[r] = rows[r] @ weight[g]^T + bias for every row r of every group g.

        rows of C features; weight [G, O, C]; out [N, O]; bias of O features.
        """

    @writes("out")
    def grouped_gemm_dgrad(
        self,
        dout: Rows,
        weight: Matrices,
        row_range: Tensor,
        out: Tensor,
        *,
        accumulate: bool = False,
        zero_tail: bool = False,
        num_sms: int | None = None,
    ) -> None:
        """out[r] = dout[r] @ weight[g] for every row r of every group g: dout of O features; weight [G, O, C];
        out [N, C]."""

    @writes("out")
    def grouped_gemm_wgrad(
        self,
        dout: Rows,
        rows: Rows,
        row_range: Tensor,
        out: Matrices,
        *,
        accumulate: bool = False,
        num_sms: int | None = None,
    ) -> None:
        """out[g] = sum over the rows r of group g of dout[r]^T rows[r]; no rows give zeros.

        dout of O features, rows of C; out [G, O, C] in the dtype of dout or fp32.
        """

    @writes("dbias")
    def grouped_bias_grad(
        self, dout: Rows, row_range: Tensor, dbias: Tensor, *, scale: MaybeTensor = None
    ) -> None:
        """dbias[g] = sum over the rows r of group g of dout[r] * scale[r]; no rows give zeros.

        dout of O features; scale fp32[N], None: 1; dbias [G, O] in any dtype. The order of the sum is that of
        kernels/bias_sums.py.
        """

    @writes("dscale")
    def grouped_bias_dot(
        self,
        dout: Rows,
        bias: Tensor,
        row_range: Tensor,
        dscale: Tensor,
        *,
        accumulate: bool = False,
    ) -> None:
        """dscale[r] = dout[r] . bias[g] for every row r of every group g: the gradient of bias_scale.

        dout of O features; bias [G, O]; dscale fp32[N].
        """


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


class QuantizedGemmKernels(Protocol):
    @writes("out")
    def grouped_gemm_quantized(
        self,
        rows: Operand,
        weight: Operand | ScatteredWeight,
        row_range: Tensor,
        out: Tensor,
        *,
        group_range: Tensor | None = None,
        bias: Bias = None,
        zero_tail: bool = False,
        num_sms: int | None = None,
    ) -> None:
        """out[r] = (rows[r] * row_scale[r]) @ (weight[g] * weight_scale[g])^T + bias for every row r of every group g.

        out [N, O]; bias [G, O] in bf16, fp16 or fp32.

        fp32 scales: rows E4M3 [N, C], C a multiple of 16, row_scale [N, B(C)]: a scale for BLOCK features of a row;
        weight E4M3 [G, O, C], weight_scale [G, B(O), B(C)]: a scale for BLOCK x BLOCK features. A block's sum is
        multiplied by its scales and added to the blocks before it.

        Scales in tiles: rows E4M3 [N, C] (MXFP8) or uint8 [N, C / 2] (NVFP4), C a multiple of 32; row_scale: every
        group from a new tile on (swizzle_scales), of whole groups. group_range: theirs, if row_range has only some of
        their rows; else None. weight E4M3 [G, O, C] or uint8 [G, O, C / 2]; weight_scale: tiles of one matrix after the
        other, or a table of matrices [tiles down, tiles across * 512]. The rows' global scale is multiplied by first.
        """

    @writes("out")
    def grouped_gemm_wgrad_quantized(
        self,
        dout: Operand,
        rows: Operand,
        row_range: Tensor,
        out: Matrices,
        *,
        accumulate: bool = False,
        num_sms: int | None = None,
    ) -> None:
        """out[g] = (dout * dout_scale) @ (rows * rows_scale)^T over the tokens of group g; no tokens give zeros.

        out [G, O, C]. Whole groups. Numbers after the last group may be anything.

        fp32 scales: dout E4M3 [O, P], O a multiple of 4, rows E4M3 [C, P]; the tokens that fill a group's last BLOCK
        are zeros; dout_scale [O, P / BLOCK], rows_scale [C, P / BLOCK]: a scale for BLOCK tokens of a feature,
        block-major. On Hopper TMA adds to an fp32 out, and subnormal terms and sums count as zeros of their sign.

        Scales in tiles, as one matrix: dout [O, P] and rows [C, P] in E4M3 (MXFP8), or [O, P / 2] and [C, P / 2] in
        uint8 (NVFP4): the padding of a group's last tile is summed, too (zeros, or a Hadamard transform of tokens and
        zeros).
        """
