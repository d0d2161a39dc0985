"""Grouped GEMMs over expert-sorted rows: the definition, in PyTorch. Contract and names as in kernels/triton/gemm.py.

    N rows in G groups; group g owns rows row_start[g]:row_start[g+1] (row_start int32[G+1]).
    O, C output and contracted features of the forward GEMM; P packed rows that a row_index points into.

Products and sums are fp32, results are rounded once. Rows past row_start[G] are not read into a sum, and written only
by zero_tail.

A row's result in the first two GEMMs has the same bits wherever it lies and however the rows of its group and the
columns of the output are cut into parts (kernels/parts.py). MKL promises no such thing, so it gets operands aligned to
ALIGNMENT, never fewer than min_rows() rows, and at most PANEL_COLUMNS columns at a time.
"""

import ctypes
import itertools
from collections.abc import Iterator

import torch

from symmoe.errors import ArgumentError
from symmoe.kernels.parts import PANEL_COLUMNS, are_ranges, panel, refuse_ranges
from symmoe.kernels.table import TensorTable

ALIGNMENT = 64  # bytes: what torch gives a fresh CPU tensor, and one vector of the widest CPUs


def groups(row_start: torch.Tensor) -> Iterator[tuple[int, slice]]:
    """Every group and its rows, in order, groups without rows included."""
    bounds = row_start.tolist()
    return ((g, slice(bounds[g], bounds[g + 1])) for g in range(len(bounds) - 1))


def row_ranges(row_start: torch.Tensor) -> Iterator[tuple[int, slice]]:
    """Every group that has rows to compute, and these: its own, or with row_start int32[2, G] its range of them."""
    bounds = row_start.tolist()
    spans = zip(*bounds, strict=True) if are_ranges(row_start) else itertools.pairwise(bounds)
    return ((g, slice(begin, end)) for g, (begin, end) in enumerate(spans) if begin < end)


def spans_of(row_start: torch.Tensor) -> list[slice]:
    """The rows to compute, in as few pieces as there are."""
    if are_ranges(row_start):
        return [span for _, span in row_ranges(row_start)]
    return [slice(0, int(row_start[-1]))]


def take_rows(rows: torch.Tensor, row_index: torch.Tensor | None, span: slice) -> torch.Tensor:
    """The rows of one group, gathered if there is an index."""
    return rows[span] if row_index is None else rows.index_select(0, row_index[span])


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


def zero_rows(out: torch.Tensor, row_start: torch.Tensor, columns: tuple[int, int] | None) -> None:
    """Zeros in out's tail: rows at and past row_start[G], in all columns or in these."""
    first, end = columns or (0, out.shape[1])
    out[int(row_start[-1]) :, first:end].zero_()


def min_rows() -> int:
    """Rows that MKL is given at least: it sums in another order for fewer than 4, or for 10 that two threads share."""
    return 8 if torch.get_num_threads() == 1 else 16


def multiply_rows(
    out: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    columns: tuple[int, int] | None = None,
    addend: torch.Tensor | None = None,
) -> None:
    """out = left @ right + addend, only in `columns`, summed in fp32 and rounded to out's dtype."""
    num_rows, least = left.shape[0], min_rows()
    may_write = out.dtype == left.dtype == torch.float32 and addend is None and num_rows >= least and _is_aligned(out)
    if num_rows < least:
        filled = torch.zeros((least, left.shape[1]), dtype=torch.float32, device=left.device)
        filled[:num_rows] = left
        left = filled
    left = _aligned(left.float())
    first, end = columns or (0, out.shape[1])
    for column in range(first, end, PANEL_COLUMNS):
        block = slice(column, min(column + PANEL_COLUMNS, end))
        part, out_part = right[:, block], out[:, block]
        if may_write:
            torch.mm(left, _aligned(part), out=out_part)
            continue
        product = torch.mm(left, _aligned(part.float()))[:num_rows]
        out_part.copy_(product if addend is None else product + addend[..., block])


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
    columns: tuple[int, int] | None = None,
    accumulate: bool = False,
    zero_tail: bool = False,
    num_sms: int | None = None,
) -> None:
    """out[r] = rows[row_index[r]] @ weight[g]^T + bias[g] * bias_scale[r] for every row r of every group g.

    rows [N, C], or [P, C] with row_index int32[N]; weight [G, O, C]; out [N, O]; bias [G, O]; bias_scale fp32[N],
    without: 1. row_start: the groups' bounds int32[G+1], or ranges of rows int32[2, G]. columns: only these are
    computed and written. accumulate: the result is added to out[r] in fp32, and rounded with it. zero_tail: rows of out
    that belong to no group become 0 (in these columns); not with ranges. num_sms: the kernels'. Ranges and columns:
    kernels/parts.py, and the errors there.
    """
    columns = panel(columns, out.shape[1])
    if zero_tail:
        refuse_ranges(row_start, "zero_tail")
    for g, span in row_ranges(row_start):
        addend = None
        if bias is not None:
            addend = bias[g].float() if bias_scale is None else bias[g].float() * bias_scale[span, None]
        if accumulate:
            addend = out[span].float() if addend is None else out[span].float() + addend
        multiply_rows(out[span], take_rows(rows, row_index, span), matrix(weight, g).t(), columns, addend)
    if zero_tail:
        zero_rows(out, row_start, columns)


def grouped_gemm_dgrad(
    dout: torch.Tensor,
    weight: torch.Tensor | TensorTable,
    row_start: torch.Tensor,
    out: torch.Tensor,
    *,
    row_index: torch.Tensor | None = None,
    columns: tuple[int, int] | None = None,
    accumulate: bool = False,
    zero_tail: bool = False,
    num_sms: int | None = None,
) -> None:
    """out[r] = dout[row_index[r]] @ weight[g] for every row r of every group g.

    dout [N, O], or [P, O] with row_index int32[N]; weight [G, O, C]; out [N, C]. row_start, columns, accumulate,
    zero_tail, num_sms: as in grouped_gemm.
    """
    columns = panel(columns, out.shape[1])
    if zero_tail:
        refuse_ranges(row_start, "zero_tail")
    for g, span in row_ranges(row_start):
        addend = out[span].float() if accumulate else None
        multiply_rows(out[span], take_rows(dout, row_index, span), matrix(weight, g), columns, addend)
    if zero_tail:
        zero_rows(out, row_start, columns)


def grouped_gemm_wgrad(
    dout: torch.Tensor,
    rows: torch.Tensor,
    row_start: torch.Tensor,
    out: torch.Tensor | TensorTable,
    *,
    dout_index: torch.Tensor | None = None,
    rows_index: torch.Tensor | None = None,
    accumulate: bool = False,
    num_sms: int | None = None,
) -> None:
    """out[g] = sum over the rows r of group g of dout[dout_index[r]]^T rows[rows_index[r]]; no rows give zeros.

    dout [N, O] or [P, O] with dout_index int32[N]; rows [N, C] or [P, C] with rows_index int32[N]; out [G, O, C] in
    the dtype of dout or fp32. accumulate: the sum is added to out[g] in fp32; no rows leave it alone. row_start: the
    groups' bounds. num_sms: the kernels'.
    """
    refuse_ranges(row_start, "a weight gradient")
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
