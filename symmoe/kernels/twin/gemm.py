"""Twins of the grouped GEMMs and gradients of biases of contract/gemm.py, and of GEMMs with an activation.

The latter (contract/gemm.py) are compositions of the functions that they fuse: the kernels must give these bits
or, where they sum in another order, these numbers. The sums of biases are in the order of kernels/bias_sums.py.

MKL does not promise that a row's bits are independent of its place and of parts of rows. It gets operands aligned to
ALIGNMENT, and never fewer than MIN_ROWS rows.
"""

import ctypes
from collections.abc import Iterator

import torch

from symmoe.errors import ArgumentError
from symmoe.kernels.bias_sums import SLOT_ROWS
from symmoe.kernels.contract.operands import Bias, Rows
from symmoe.kernels.formats import TILE
from symmoe.kernels.tensor_table import TensorTable
from symmoe.kernels.twin.activation import activation_gradients, scaled_activation, sum_in_blocks

MIN_ROWS = 16  # MKL sums in another order for fewer: than 4, or 16, as the CPU is, or if two threads share them
ALIGNMENT = 64  # bytes: that of a fresh CPU tensor of torch, and one vector of the widest CPUs


def groups(row_range: torch.Tensor) -> Iterator[tuple[int, slice]]:
    """Every group and its rows, in order; also groups without rows."""
    return (
        (g, slice(begin, max(begin, end))) for g, (begin, end) in enumerate(row_range.t().tolist())
    )


def filled_groups(row_range: torch.Tensor) -> Iterator[tuple[int, slice]]:
    """Every group that has rows, and these rows."""
    return ((g, span) for g, span in groups(row_range) if span.start < span.stop)


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
    """[G, rows, columns]: a packed tensor itself, or a copy of a table's matrices."""
    if isinstance(matrices, torch.Tensor):
        return matrices
    return torch.stack([matrix(matrices, group) for group in range(matrices.shape[0])])


def bias_rows(bias: Bias, group: int, span: slice) -> torch.Tensor | None:
    """What a bias adds to a group's rows in fp32, [rows, O], or [O] without a scale; None without a bias."""
    features, scale = bias if isinstance(bias, tuple) else (bias, None)
    if features is None:
        return None
    return features[group].float() if scale is None else features[group].float() * scale[span, None]


def store_sum(
    out: torch.Tensor | TensorTable, group: int, total: torch.Tensor, *, accumulate: bool
) -> None:
    """Stores an fp32 sum in matrix `group` of out, or adds it in fp32."""
    out_g = matrix(out, group)
    out_g.copy_(out_g.float() + total if accumulate else total)


def zero_rows(out: torch.Tensor, row_range: torch.Tensor) -> None:
    """Zeros in out's tail: rows at and past the end of the last group."""
    out[int(row_range[1, -1]) :].zero_()


def multiply_rows(
    out: torch.Tensor, left: torch.Tensor, right: torch.Tensor, addend: torch.Tensor | None = None
) -> None:
    """out = left @ right + addend, summed in fp32 and rounded to out's dtype."""
    num_rows = left.shape[0]
    if num_rows < MIN_ROWS:
        filled = torch.zeros((MIN_ROWS, left.shape[1]), dtype=torch.float32, device=left.device)
        filled[:num_rows] = left
        left = filled
    product = multiply(left, right)[:num_rows]
    out.copy_(product if addend is None else product + addend)


def multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left @ right in fp32."""
    return torch.mm(_aligned(left.float()), _aligned(right.float()))


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


def grouped_gemm(
    rows, weight, row_range, out, *, bias=None, accumulate=False, zero_tail=False, num_sms=None
):
    for g, span in filled_groups(row_range):
        addend = bias_rows(bias, g, span)
        if accumulate:
            addend = out[span].float() if addend is None else out[span].float() + addend
        multiply_rows(out[span], take_rows(rows, span), matrix(weight, g).t(), addend)
    if zero_tail:
        zero_rows(out, row_range)


def grouped_gemm_dgrad(
    dout, weight, row_range, out, *, accumulate=False, zero_tail=False, num_sms=None
):
    for g, span in filled_groups(row_range):
        addend = out[span].float() if accumulate else None
        multiply_rows(out[span], take_rows(dout, span), matrix(weight, g), addend)
    if zero_tail:
        zero_rows(out, row_range)


def grouped_gemm_wgrad(dout, rows, row_range, out, *, accumulate=False, num_sms=None):
    for g, span in groups(row_range):
        if span.start < span.stop:
            total = multiply(take_rows(dout, span).t(), take_rows(rows, span))
            store_sum(out, g, total, accumulate=accumulate)
        elif not accumulate:
            matrix(out, g).zero_()


def grouped_bias_grad(dout, row_range, dbias, *, scale=None):
    for g, span in groups(row_range):
        addends = take_rows(dout, span).float()
        if scale is not None:
            addends = addends * scale[span, None]
        dbias[g] = sum_in_blocks(addends.t(), TILE)


def sum_dbias(bias_sums, row_range, dbias):
    for g, span in groups(row_range):
        first = span.start // SLOT_ROWS + g
        num_slots = -(-(span.stop - span.start) // SLOT_ROWS)
        dbias[g] = sum_in_blocks(bias_sums[first : first + num_slots].t(), TILE // SLOT_ROWS)


def grouped_bias_dot(dout, bias, row_range, dscale, *, accumulate=False):
    for g, span in groups(row_range):
        dots = (take_rows(dout, span).float() * bias[g].float()).sum(dim=1)
        dscale[span] = dscale[span] + dots if accumulate else dots


def dact_workspace_numel(num_rows, num_groups, ffn, activation):
    return num_rows


def grouped_gemm_act(
    rows, weight, row_range, row_scale, results, activation, *, bias=None, num_sms=None
):
    h, a = results
    grouped_gemm(rows, weight, row_range, h, bias=bias)
    for _, span in filled_groups(row_range):
        scaled_activation(h[span], row_scale[span], a[span], activation)


def grouped_gemm_dact(
    dout, weight, row_range, hidden, gradients, workspace, activation, *, num_sms=None
):
    (h, row_scale), (dh, a, dscale, dbias) = hidden, gradients
    da = torch.empty_like(a)
    for g, span in filled_groups(row_range):
        multiply_rows(da[span], take_rows(dout, span), matrix(weight, g))
        scale = row_scale[span]
        value = activation_gradients(
            da[span], h[span], scale, dh[span], workspace[span], activation
        )
        torch.mul(value, scale[:, None], out=a[span])
    if dscale is not None:
        sum_dact_partials(workspace, row_range, dscale, 1)
    if dbias is not None:
        grouped_bias_grad(dh, row_range, dbias)
    return 1


def sum_dact_partials(workspace, row_range, dscale, num_partials):
    num_rows = int(row_range[1, -1])
    dscale[:num_rows] = workspace[:num_rows]
    dscale[num_rows:] = 0
