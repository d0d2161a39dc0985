"""Grouped GEMMs over expert-sorted rows: the definition, in PyTorch. Contract and names as in kernels/gpu/gemm.py.

    N rows in G groups; group g owns rows row_start[g]:row_start[g+1] (row_start int32[G+1]).
    O, C output and contracted features of the forward GEMM; P packed rows that a row_index points into.

Products and sums are fp32, results are rounded once. Rows past row_start[G] are not read into a sum, and written only
by zero_tail. A group's result has the same bits wherever its rows lie: MKL promises equal bits for equally aligned
operands only, so operands that are not aligned to ALIGNMENT go through a copy that is.
"""

import ctypes
from collections.abc import Iterator

import torch

from symmoe.errors import ArgumentError
from symmoe.kernels.table import TensorTable

ALIGNMENT = 64  # bytes: what torch gives a fresh CPU tensor, and one vector of the widest CPUs


def groups(row_start: torch.Tensor) -> Iterator[tuple[int, slice]]:
    """Every group and its rows, in order, groups without rows included."""
    bounds = row_start.tolist()
    return ((g, slice(bounds[g], bounds[g + 1])) for g in range(len(bounds) - 1))


def take_rows(rows: torch.Tensor, row_index: torch.Tensor | None, span: slice) -> torch.Tensor:
    """The rows of one group, gathered if there is an index."""
    return rows[span] if row_index is None else rows[row_index[span].long()]


def matrix(matrices: torch.Tensor | TensorTable, group: int) -> torch.Tensor:
    """Matrix `group` of a packed tensor [G, rows, columns] or of a table; writable, and no copy."""
    if isinstance(matrices, torch.Tensor):
        return matrices[group]
    if matrices.device.type != "cpu":
        raise ArgumentError(f"a table of matrices on {matrices.device} must be given to the kernels of that device")
    _, num_rows, num_columns = matrices.shape
    num_bytes = num_rows * num_columns * matrices.dtype.itemsize
    memory = (ctypes.c_char * num_bytes).from_address(int(matrices.pointers[group]))
    return torch.frombuffer(memory, dtype=matrices.dtype).view(num_rows, num_columns)


def zero_rows(out: torch.Tensor, row_start: torch.Tensor) -> None:
    """Zeros in out's tail: rows at and past row_start[G]."""
    out[int(row_start[-1]) :].zero_()


def multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left @ right in fp32."""
    return torch.mm(_aligned(left.float()), _aligned(right.float()))


def multiply_into(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """out = left @ right, rounded to out's dtype."""
    if out.dtype == left.dtype == torch.float32 and _is_aligned(out):
        torch.mm(_aligned(left), _aligned(right), out=out)
    else:
        out.copy_(multiply(left, right))


def _is_aligned(tensor: torch.Tensor) -> bool:
    return tensor.data_ptr() % ALIGNMENT == 0


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if _is_aligned(tensor) else tensor.clone()


def grouped_gemm(
    rows: torch.Tensor,
    weight: torch.Tensor | TensorTable,
    row_start: torch.Tensor,
    out: torch.Tensor,
    *,
    row_index: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    bias_scale: torch.Tensor | None = None,
    zero_tail: bool = False,
) -> None:
    """out[r] = rows[row_index[r]] @ weight[g]^T + bias[g] * bias_scale[r] for every row r of every group g.

    rows [N, C], or [P, C] with row_index int32[N]; weight [G, O, C]; out [N, O]; bias [G, O]; bias_scale fp32[N],
    without: 1. zero_tail: rows of out that belong to no group become 0.
    """
    for g, span in groups(row_start):
        if span.start == span.stop:
            continue
        source, weight_t = take_rows(rows, row_index, span), matrix(weight, g).t()
        if bias is None:
            multiply_into(out[span], source, weight_t)
        else:
            addend = bias[g].float() if bias_scale is None else bias[g].float() * bias_scale[span, None]
            out[span] = multiply(source, weight_t) + addend
    if zero_tail:
        zero_rows(out, row_start)


def grouped_gemm_dgrad(
    dout: torch.Tensor,
    weight: torch.Tensor | TensorTable,
    row_start: torch.Tensor,
    out: torch.Tensor,
    *,
    zero_tail: bool = False,
) -> None:
    """out[r] = dout[r] @ weight[g] for every row r of every group g: dout [N, O], weight [G, O, C], out [N, C].

    zero_tail: rows of out that belong to no group become 0.
    """
    for g, span in groups(row_start):
        if span.start < span.stop:
            multiply_into(out[span], dout[span], matrix(weight, g))
    if zero_tail:
        zero_rows(out, row_start)


def grouped_gemm_wgrad(
    dout: torch.Tensor,
    rows: torch.Tensor,
    row_start: torch.Tensor,
    out: torch.Tensor | TensorTable,
    *,
    dout_index: torch.Tensor | None = None,
    rows_index: torch.Tensor | None = None,
    accumulate: bool = False,
) -> None:
    """out[g] = sum over the rows r of group g of dout[dout_index[r]]^T rows[rows_index[r]]; no rows give zeros.

    dout [N, O] or [P, O] with dout_index int32[N]; rows [N, C] or [P, C] with rows_index int32[N]; out [G, O, C] in
    the dtype of dout or fp32. accumulate: the sum is added to out[g] in fp32; no rows leave it alone.
    """
    for g, span in groups(row_start):
        if span.start < span.stop:
            left, right = take_rows(dout, dout_index, span).t(), take_rows(rows, rows_index, span)
            if accumulate:
                out_g = matrix(out, g)
                out_g.copy_(out_g.float() + multiply(left, right))
            else:
                multiply_into(matrix(out, g), left, right)
        elif not accumulate:
            matrix(out, g).zero_()
