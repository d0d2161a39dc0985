"""Grouped expert MLP: FC1, SwiGLU times prob, FC2, for all experts of a rank at once.

H hidden, I ffn, G groups (experts of this rank), N rows sorted by group. The prob multiplies the activation before
FC2, so that combining rows is a plain sum and FC2's output is not needed in backward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn
from torch.autograd.function import FunctionCtx, once_differentiable

from symmoe import kernels
from symmoe.errors import ArgumentError
from symmoe.kernels import control
from symmoe.symm_mem.buffers import buffer_problem

_GPU_MULTIPLE = 8  # TMA needs rows of a multiple of 16 bytes, also when fp32 weights are used in 16 bits


def experts_forward(
    rows: torch.Tensor,
    row_start: torch.Tensor,
    row_probs: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    out: torch.Tensor,
    *,
    num_rows: int,
    row_index: torch.Tensor | None = None,
) -> torch.Tensor:
    """out[i] = W2 (silu(gate) * up * prob) of row i, with [gate, up] = W1 row. No autograd, no synchronisation.

    Args:
        rows: [., H]; row i is `rows[row_index[i]]`, or `rows[i]` without an index.
        row_start: int32 [G + 1].
        row_probs: fp32 [N].
        w1, w2: [G, 2I, H], [G, H, I].
        out: [N, H], written up to row_start[G].
        num_rows: rows the intermediates get, at least row_start[G].

    Returns:
        h [num_rows, 2I], all that backward needs beside the inputs.
    """
    ops, ffn = kernels.for_device(rows.device), w2.shape[2]
    h = torch.empty((num_rows, 2 * ffn), dtype=rows.dtype, device=rows.device)
    a = torch.empty((num_rows, ffn), dtype=rows.dtype, device=rows.device)
    ops.grouped_gemm_swiglu(rows, w1, row_start, row_probs, h, a, row_index=row_index)
    ops.grouped_gemm(a, w2, row_start, out)
    return h


def experts_backward(
    d_out: torch.Tensor,
    rows: torch.Tensor,
    row_start: torch.Tensor,
    row_probs: torch.Tensor,
    h: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    d_rows: torch.Tensor,
    *,
    row_index: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Backward of :func:`experts_forward`. No autograd, no synchronisation.

    Args:
        d_out, rows: [., H]; row i is at `row_index[i]` of both, or at i without an index.
        d_rows: [N, H], gets the gradient of row i (not summed over rows that share a packed row).

    Returns:
        d_row_probs fp32 [num_rows], dw1 [G, 2I, H], dw2 [G, H, I].
    """
    ops = kernels.for_device(rows.device)
    num_rows, ffn = h.shape[0], w2.shape[2]
    dh = torch.empty_like(h)
    a = torch.empty((num_rows, ffn), dtype=h.dtype, device=h.device)
    d_row_probs = torch.empty(num_rows, dtype=torch.float32, device=h.device)
    partials = torch.empty(ops.dswiglu_partials_shape(num_rows, ffn), dtype=torch.float32, device=h.device)
    ops.grouped_gemm_dswiglu(
        d_out, w2, row_start, h, row_probs, dh, a, d_row_probs, partials, row_index=row_index
    )
    ops.grouped_gemm_dgrad(dh, w1, row_start, d_rows)
    dw1, dw2 = torch.empty_like(w1), torch.empty_like(w2)
    ops.grouped_gemm_wgrad(d_out, a, row_start, dw2, dout_index=row_index)
    ops.grouped_gemm_wgrad(dh, rows, row_start, dw1, rows_index=row_index)
    return d_row_probs, dw1, dw2


class GroupedMLP(nn.Module):
    """The experts of one rank: for group g, `W2[g] (silu(gate) * up * prob)` with `[gate, up] = W1[g] x`.

    Args:
        num_groups: G, experts on this rank.
        hidden, ffn: H, I. On GPUs both must be multiples of 8.

    Attributes:
        w1: [G, 2I, H]; the first I rows of a group make the gate, the last I the up projection.
        w2: [G, H, I].
        Both carry `is_expert = True`, by which reduce_gradients tells them from data-parallel parameters.
    """

    def __init__(
        self,
        num_groups: int,
        hidden: int,
        ffn: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("num_groups", num_groups), ("hidden", hidden), ("ffn", ffn)):
            if value < 1:
                raise ArgumentError(f"{name} ({value}) must be at least 1")
        if torch.device("cpu" if device is None else device).type == "cuda":
            for name, value in (("hidden", hidden), ("ffn", ffn)):
                if value % _GPU_MULTIPLE:
                    raise ArgumentError(f"{name} ({value}) must be a multiple of {_GPU_MULTIPLE} on GPUs")
        self.num_groups, self.hidden, self.ffn = num_groups, hidden, ffn
        self.w1 = nn.Parameter(torch.empty((num_groups, 2 * ffn, hidden), dtype=dtype, device=device))
        self.w2 = nn.Parameter(torch.empty((num_groups, hidden, ffn), dtype=dtype, device=device))
        self.w1.is_expert = self.w2.is_expert = True
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform weights of the bound of nn.Linear, 1 / sqrt(inputs)."""
        nn.init.uniform_(self.w1, -1 / math.sqrt(self.hidden), 1 / math.sqrt(self.hidden))
        nn.init.uniform_(self.w2, -1 / math.sqrt(self.ffn), 1 / math.sqrt(self.ffn))

    def forward(
        self,
        rows: torch.Tensor,
        splits: torch.Tensor | Sequence[int],
        row_probs: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        grad_input_out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Applies expert g to the g-th run of rows. Not collective; device splits do not synchronise the host.

        Args:
            rows: [N, H] sorted by group; rows past sum(splits) are a tail that is neither read nor written.
            splits: int32 or int64 [G] on the device of the rows. A list or CPU tensor is copied there.
            row_probs: fp32 [N], scale of each row.
            out: [N, H] buffer for the result, e.g. of a heap lease.
            grad_input_out: [N, H] buffer for the gradient of `rows`.

        Returns:
            [N, H], in the memory of `out` if given. The tail is undefined.

        Raises:
            ArgumentError: an argument is wrong.
        """
        error = self._problem(rows, splits, row_probs, out, grad_input_out)
        if error is not None:
            raise error
        on_device = torch.as_tensor(splits, device=rows.device)
        row_start = torch.zeros(self.num_groups + 1, dtype=torch.int32, device=rows.device)
        # Splits on the device cannot be checked without waiting for them: kernels must stay inside the buffers.
        row_start[1:] = on_device.clamp(min=0).cumsum(0).clamp(max=rows.shape[0])
        return _GroupedMLP.apply(rows, row_probs, self.w1, self.w2, row_start, out, grad_input_out)

    def _problem(
        self,
        rows: torch.Tensor,
        splits: torch.Tensor | Sequence[int],
        row_probs: torch.Tensor,
        out: torch.Tensor | None,
        grad_input_out: torch.Tensor | None,
    ) -> ArgumentError | None:
        for name, tensor in (("rows", rows), ("row_probs", row_probs)):
            if not isinstance(tensor, torch.Tensor):
                return ArgumentError(f"{name} ({type(tensor).__name__}) must be a tensor")
        if rows.dim() != 2 or rows.shape[1] != self.hidden:
            return ArgumentError(f"rows has shape {list(rows.shape)}; it must be [N, {self.hidden}]")
        if rows.dtype != self.w1.dtype or rows.dtype not in control.DTYPES or rows.device != self.w1.device:
            return ArgumentError(
                f"rows is {rows.dtype} on {rows.device}; the weights are {self.w1.dtype} on {self.w1.device}"
            )
        if (row_probs.dtype, tuple(row_probs.shape), row_probs.device) != (torch.float32, rows.shape[:1], rows.device):
            given = f"{row_probs.dtype} {list(row_probs.shape)} on {row_probs.device}"
            return ArgumentError(f"row_probs is {given}; it must be torch.float32 [{rows.shape[0]}] on {rows.device}")
        shape = tuple(splits.shape) if isinstance(splits, torch.Tensor) else (len(splits),)
        if shape != (self.num_groups,):
            return ArgumentError(f"splits has shape {list(shape)}; it must be [{self.num_groups}] (num_groups)")
        if isinstance(splits, torch.Tensor) and splits.dtype not in (torch.int32, torch.int64):
            return ArgumentError(f"splits has dtype {splits.dtype}; it must be torch.int32 or torch.int64")
        if not isinstance(splits, torch.Tensor) or splits.device.type == "cpu":
            total = int(sum(int(n) for n in splits))
            if total > rows.shape[0] or any(int(n) < 0 for n in splits):
                given = [int(n) for n in splits]
                return ArgumentError(f"splits ({given}) must be counts that add up to at most {rows.shape[0]} rows")
        for name, buffer in (("out", out), ("grad_input_out", grad_input_out)):
            error = None
            if buffer is not None:
                error = buffer_problem(name, buffer, shape=tuple(rows.shape), like=rows, inputs=(rows,))
            if error is not None:
                return error
        return None


class _GroupedMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        rows: torch.Tensor,
        row_probs: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        row_start: torch.Tensor,
        out: torch.Tensor | None,
        grad_input_out: torch.Tensor | None,
    ) -> torch.Tensor:
        rows, row_probs = rows.contiguous(), row_probs.contiguous()
        result = torch.empty_like(rows) if out is None else out
        h = experts_forward(rows, row_start, row_probs, w1, w2, result, num_rows=rows.shape[0])
        ctx.save_for_backward(rows, row_probs, w1, w2, row_start, h)
        ctx.grad_input_out = grad_input_out
        # Not `mark_dirty(out)`: for a slice of a lease, autograd would make that a copy into the lease's gradient.
        return result if out is None else out.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, d_out: torch.Tensor):
        rows, row_probs, w1, w2, row_start, h = ctx.saved_tensors
        d_rows = torch.empty_like(rows) if ctx.grad_input_out is None else ctx.grad_input_out
        d_row_probs, dw1, dw2 = experts_backward(
            d_out.contiguous(), rows, row_start, row_probs, h, w1, w2, d_rows
        )
        return d_rows, d_row_probs, dw1, dw2, None, None, None
