"""Grouped GEMMs over rows that are sorted by expert, and the gradients of their biases.

    C, O  features that the forward GEMM contracts, and features of its result

Tensors are of one dtype (bf16, fp16 or fp32), 16-byte aligned, their features multiples of 16 bytes; callers check it.
Products and sums are fp32 (IEEE, not TF32, for fp32 numbers); a result is rounded once. No sum uses atomics. A row's
bits in grouped_gemm and grouped_gemm_dgrad do not depend on where the row lies or on how rows are cut into
parts; tiles and the order of sums depend only on the features, never on N or R.

Matrices are a tensor [G, O, C] or a TensorTable of G matrices [O, C] that lie anywhere, with the same bits.

* accumulate: the result is added to out in fp32, and rounded with it; groups without rows leave out as it is.
* zero_tail: the tail of out becomes 0; needs whole groups.
"""

from typing import Protocol

from torch import Tensor

from symmoe.kernels.contract.operands import Bias, Matrices, MaybeTensor, Rows, writes


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
