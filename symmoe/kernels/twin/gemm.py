"""Grouped GEMMs over expert-sorted rows: the definition, in PyTorch. Contract and names as in kernels/gpu/gemm.py.

    N rows in G groups; group g owns rows row_start[g]:row_start[g+1] (row_start int32[G+1]).
    O, C output and contracted features of the forward GEMM; P packed rows that a row_index points into.

Products and sums are fp32, results are rounded once. Rows past row_start[G] are neither written nor read into a sum.
A group's result has the same bits wherever its rows lie: MKL promises equal bits for equally aligned operands only,
so operands that are not aligned to ALIGNMENT go through a copy that is.
"""

from collections.abc import Iterator

import torch

ALIGNMENT = 64  # bytes: what torch gives a fresh CPU tensor, and one vector of the widest CPUs


def groups(row_start: torch.Tensor) -> Iterator[tuple[int, slice]]:
    """Every group and its rows, in order, groups without rows included."""
    bounds = row_start.tolist()
    return ((g, slice(bounds[g], bounds[g + 1])) for g in range(len(bounds) - 1))


def take_rows(rows: torch.Tensor, row_index: torch.Tensor | None, span: slice) -> torch.Tensor:
    """The rows of one group, gathered if there is an index."""
    return rows[span] if row_index is None else rows[row_index[span].long()]


def multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left @ right in fp32."""
    return torch.mm(_aligned(left.float()), _aligned(right.float()))


def multiply_into(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """out = left @ right, rounded to out's dtype."""
    if out.dtype == torch.float32 and _is_aligned(out):
        torch.mm(_aligned(left), _aligned(right), out=out)
    else:
        out.copy_(multiply(left, right))


def _is_aligned(tensor: torch.Tensor) -> bool:
    return tensor.data_ptr() % ALIGNMENT == 0


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if _is_aligned(tensor) else tensor.clone()


def grouped_gemm(
    rows: torch.Tensor,
    weight: torch.Tensor,
    row_start: torch.Tensor,
    out: torch.Tensor,
    *,
    row_index: torch.Tensor | None = None,
) -> None:
    """out[r] = rows[row_index[r]] @ weight[g]^T for every row r of every group g.

    rows [N, C], or [P, C] with row_index int32[N]; weight [G, O, C]; out [N, O].
    """
    for g, span in groups(row_start):
        if span.start < span.stop:
            multiply_into(out[span], take_rows(rows, row_index, span), weight[g].t())


def grouped_gemm_dgrad(dout: torch.Tensor, weight: torch.Tensor, row_start: torch.Tensor, out: torch.Tensor) -> None:
    """out[r] = dout[r] @ weight[g] for every row r of every group g: dout [N, O], weight [G, O, C], out [N, C]."""
    for g, span in groups(row_start):
        if span.start < span.stop:
            multiply_into(out[span], dout[span], weight[g])


def grouped_gemm_wgrad(
    dout: torch.Tensor,
    rows: torch.Tensor,
    row_start: torch.Tensor,
    out: torch.Tensor,
    *,
    dout_index: torch.Tensor | None = None,
    rows_index: torch.Tensor | None = None,
) -> None:
    """out[g] = sum over the rows r of group g of dout[dout_index[r]]^T rows[rows_index[r]]; no rows give zeros.

    dout [N, O] or [P, O] with dout_index int32[N]; rows [N, C] or [P, C] with rows_index int32[N]; out [G, O, C].
    """
    for g, span in groups(row_start):
        if span.start < span.stop:
            multiply_into(out[g], take_rows(dout, dout_index, span).t(), take_rows(rows, rows_index, span))
        else:
            out[g].zero_()
