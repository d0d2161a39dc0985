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

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from symmoe.kernels.tensor_table import TensorTable


class GemmKernels(Protocol):
    def grouped_gemm(
        self,
        rows: Tensor,
        weight: Tensor | TensorTable,
        row_range: Tensor,
        out: Tensor,
        *,
        row_index: Tensor | None = None,
        bias: Tensor | None = None,
        bias_scale: Tensor | None = None,
        accumulate: bool = False,
        zero_tail: bool = False,
        num_sms: int | None = None,
    ) -> None:
        """out[r] = rows[row_index[r]] @ weight[g]^T + bias[g] * bias_scale[r] for every row r of every group g.

        rows [N, C], or [P, C] with row_index; weight [G, O, C]; out [N, O]; bias [G, O];
        bias_scale fp32[N], None: 1.
        """

    def grouped_gemm_dgrad(
        self,
        dout: Tensor,
        weight: Tensor | TensorTable,
        row_range: Tensor,
        out: Tensor,
        *,
        row_index: Tensor | None = None,
        accumulate: bool = False,
        zero_tail: bool = False,
        num_sms: int | None = None,
    ) -> None:
        """out[r] = dout[row_index[r]] @ weight[g] for every row r of every group g.

        dout [N, O], or [P, O] with row_index; weight [G, O, C]; out [N, C].
        """

    def grouped_gemm_wgrad(
        self,
        dout: Tensor,
        rows: Tensor,
        row_range: Tensor,
        out: Tensor | TensorTable,
        *,
        dout_index: Tensor | None = None,
        rows_index: Tensor | None = None,
        accumulate: bool = False,
        num_sms: int | None = None,
    ) -> None:
        """out[g] = sum over the rows r of group g of dout[dout_index[r]]^T rows[rows_index[r]]; no rows give zeros.

        dout [N, O], or [P, O] with dout_index; rows [N, C], or [P, C] with rows_index; out [G, O, C] in the dtype of
        dout or fp32.
        """

    def grouped_bias_grad(
        self,
        dout: Tensor,
        row_range: Tensor,
        dbias: Tensor,
        *,
        dout_index: Tensor | None = None,
        scale: Tensor | None = None,
    ) -> None:
        """dbias[g] = sum over the rows r of group g of dout[dout_index[r]] * scale[r]; no rows give zeros.

        dout [N, O], or [P, O] with dout_index; scale fp32[N], None: 1; dbias [G, O] in any dtype. The order of the
        sum is that of kernels/bias_sums.py.
        """

    def grouped_bias_dot(
        self,
        dout: Tensor,
        bias: Tensor,
        row_range: Tensor,
        dscale: Tensor,
        *,
        dout_index: Tensor | None = None,
        accumulate: bool = False,
    ) -> None:
        """dscale[r] = dout[dout_index[r]] . bias[g] for every row r of every group g: the gradient of bias_scale.

        dout [N, O], or [P, O] with dout_index; bias [G, O]; dscale fp32[N].
        """
