"""Grouped GEMMs over rows sorted by expert, and the gradients of their biases.

    C, O  features that the forward GEMM contracts, and features of its result

Tensors have one dtype (bf16, fp16 or fp32), are 16-byte aligned, and their features are multiples of 16 bytes; callers
check this. Products and sums are fp32 (IEEE, not TF32, for fp32 numbers); a result is rounded once. No sum uses
atomics. A row's bits in grouped_gemm and grouped_gemm_dgrad do not depend on the row's place or on the parts of rows;
tiles and the order of sums depend only on the features, never on N or R.

Matrices are a tensor [G, O, C] or a TensorTable of G matrices [O, C] anywhere in memory; bits are equal.

* accumulate: the result is added to out in fp32, and the sum is rounded; groups without rows leave out unchanged.
* zero_tail: the tail of out becomes 0; needs whole groups.

MKL does not guarantee that a row's bits are independent of its place and of parts of rows. So it gets aligned operands,
and at least MIN_ROWS rows. Sums of biases have the order of kernels/bias_sums.py.
"""

import ctypes

import torch

from symmoe.errors import ArgumentError
from symmoe.kernels.formats import TILE
from symmoe.kernels.operands import Bias, Matrices, MaybeTensor, Rows, TensorTable, as_pair, writes

MIN_ROWS = 16  # with fewer rows (4 or 16, by CPU), or if two threads share them, MKL has another order of sums


def groups(row_range: torch.Tensor) -> list[tuple[int, slice]]:
    """Every group and its rows, in order, including empty groups."""
    begins = row_range[0].tolist()
    ends = row_range.amax(0).tolist()  # an empty group may end before its begin
    return list(enumerate(map(slice, begins, ends)))


def rows_of(row_range: torch.Tensor) -> torch.Tensor:
    """The rows of all groups, int64."""
    rows = torch.arange(int(row_range.max()), device=row_range.device)
    return torch.cat([rows[begin : max(begin, end)] for begin, end in row_range.t().tolist()])


def take_rows(rows: Rows, span: slice) -> torch.Tensor:
    """The rows of one group, gathered if there is an index."""
    tensor, row_index = rows if isinstance(rows, tuple) else (rows, None)
    return tensor[span] if row_index is None else tensor.index_select(0, row_index[span])


def matrix(matrices: torch.Tensor | TensorTable, group: int) -> torch.Tensor:
    """Matrix `group` of a packed tensor [G, rows, columns] or of a table; writable, not a copy."""
    if isinstance(matrices, torch.Tensor):
        return matrices[group]
    if matrices.device.type != "cpu":
        raise ArgumentError(
            f"a table of matrices on {matrices.device} must be given to the kernels of that device"
        )
    _, num_rows, num_columns = matrices.shape
    num_bytes = num_rows * num_columns * matrices.dtype.itemsize
    memory = (ctypes.c_char * num_bytes).from_address(int(matrices.pointers[group]))
    return torch.frombuffer(memory, dtype=matrices.dtype).view(num_rows, num_columns)


def packed(matrices: torch.Tensor | TensorTable) -> torch.Tensor:
    """[G, rows, columns]: the packed tensor itself, or a copy of a table's matrices."""
    if isinstance(matrices, torch.Tensor):
        return matrices
    return torch.stack([matrix(matrices, group) for group in range(matrices.shape[0])])


def bias_rows(features: torch.Tensor, scale: MaybeTensor, group: int, span: slice) -> torch.Tensor:
    """The bias for a group's rows in fp32: [rows, O], or [O] without a scale."""
    return features[group].float() if scale is None else features[group].float() * scale[span, None]


def store_sum(
    out: torch.Tensor | TensorTable, group: int, total: torch.Tensor, *, accumulate: bool
) -> None:
    """Stores an fp32 sum in matrix `group` of out, or adds it in fp32."""
    out_g = matrix(out, group)
    out_g.copy_(out_g.float() + total if accumulate else total)


def multiply_rows(lhs: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
    """lhs @ rhs in fp32: a row's bits do not depend on the other rows, or on their number."""
    num_missing = max(0, MIN_ROWS - len(lhs))
    filled = torch.nn.functional.pad(lhs, (0, 0, 0, num_missing))
    return multiply(filled, rhs)[: len(lhs)]


def multiply(lhs: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
    """lhs @ rhs in fp32, also under autocast, which does not change `out=`."""
    # Copies, because torch aligns new CPU tensors to the widest CPU vector.
    lhs = lhs.to(torch.float32, copy=True)
    out = lhs.new_empty(len(lhs), rhs.shape[1])
    return torch.mm(lhs, rhs.to(torch.float32, copy=True), out=out)


class GemmKernels:
    @staticmethod
    @writes("out")
    def grouped_gemm(
        rows: Rows,
        weight: Matrices,
        row_range: torch.Tensor,
        out: torch.Tensor,
        *,
        bias: Bias = None,
        accumulate: bool = False,
        zero_tail: bool = False,
        num_sms: int | None = None,
    ) -> None:
        """out[r] = rows[r] @ weight[g]^T + bias for every row r of every group g.

        rows of C features; weight [G, O, C]; out [N, O]; bias of O features.
        """
        matrices_GOC = packed(weight)
        bias_GO, scale_N = as_pair(bias)
        for g, span in groups(row_range):
            product = multiply_rows(take_rows(rows, span), matrices_GOC[g].t())
            addend = None if bias_GO is None else bias_rows(bias_GO, scale_N, g, span)
            if accumulate:
                addend = out[span].float() if addend is None else out[span].float() + addend
            out[span] = product if addend is None else product + addend
        if zero_tail:
            out[int(row_range[1, -1]) :] = 0

    @staticmethod
    @writes("out")
    def grouped_gemm_dgrad(
        dout: Rows,
        weight: Matrices,
        row_range: torch.Tensor,
        out: torch.Tensor,
        *,
        accumulate: bool = False,
        zero_tail: bool = False,
        num_sms: int | None = None,
    ) -> None:
        """out[r] = dout[r] @ weight[g] for every row r of every group g: dout of O features; weight [G, O, C];
        out [N, C]."""
        GemmKernels.grouped_gemm(
            dout, packed(weight).mT, row_range, out, accumulate=accumulate, zero_tail=zero_tail
        )

    @staticmethod
    @writes("out")
    def grouped_gemm_wgrad(
        dout: Rows,
        rows: Rows,
        row_range: torch.Tensor,
        out: Matrices,
        *,
        accumulate: bool = False,
        num_sms: int | None = None,
    ) -> None:
        """out[g] = sum over the rows r of group g of dout[r]^T rows[r]; no rows give zeros.

        dout of O features, rows of C; out [G, O, C] in the dtype of dout or fp32.
        """
        for g, span in groups(row_range):
            if span.start < span.stop or not accumulate:
                total = multiply(take_rows(dout, span).t(), take_rows(rows, span))
                store_sum(out, g, total, accumulate=accumulate)

    @staticmethod
    @writes("dbias")
    def grouped_bias_grad(
        dout: Rows, row_range: torch.Tensor, dbias: torch.Tensor, *, scale: MaybeTensor = None
    ) -> None:
        """dbias[g] = sum over the rows r of group g of dout[r] * scale[r]; no rows give zeros.

        dout of O features; scale fp32[N], None: 1; dbias [G, O] in any dtype. Order of the sum: kernels/bias_sums.py.
        """
        for g, span in groups(row_range):
            addends = take_rows(dout, span).float()
            if scale is not None:
                addends = addends * scale[span, None]
            dbias[g] = sum_in_blocks(addends.t(), TILE)

    @staticmethod
    @writes("dscale")
    def grouped_bias_dot(
        dout: Rows,
        bias: torch.Tensor,
        row_range: torch.Tensor,
        dscale: torch.Tensor,
        *,
        accumulate: bool = False,
    ) -> None:
        """dscale[r] = dout[r] . bias[g] for every row r of every group g: the gradient of bias_scale.

        dout of O features; bias [G, O]; dscale fp32[N].
        """
        for g, span in groups(row_range):
            dots = (take_rows(dout, span).float() * bias[g].float()).sum(dim=1)
            dscale[span] = dscale[span] + dots if accumulate else dots


def sum_in_blocks(x: torch.Tensor, block: int) -> torch.Tensor:
    """Sums fp32 [N] of fp32 [N, I]: in blocks of columns neighbours, then neighbouring sums, and so on; then blocks."""
    total = x.new_zeros(x.shape[0])
    for sums in block_sums(x, block).unbind(1):
        total += sums
    return total


def block_sums(x: torch.Tensor, block: int) -> torch.Tensor:
    """The sums of the blocks, fp32 [N, blocks]; zeros fill the last one."""
    num_blocks = -(-x.shape[1] // block)
    x = torch.nn.functional.pad(x, (0, num_blocks * block - x.shape[1])).view(
        x.shape[0], num_blocks, block
    )
    while x.shape[2] > 1:
        x = x[..., ::2] + x[..., 1::2]
    return x.squeeze(2)
