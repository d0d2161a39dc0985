"""Adapters: y += B[g] (A[g] x) in addition to a grouped linear layer, as grouped GEMMs of rank r; without autograd.

G groups, C input features, O output features, r rank, N rows sorted by group. Neither
B A nor a gradient of its size is ever made: forward is t = x A^T and y += t B^T, backward dt = dy B, dx += dt A,
dA = dt^T x and dB = dy^T t. That is 2 r (C + O) FLOPs a row forward and twice as many backward, in addition to 2 C O of
the frozen weight in each direction. A sum is made where the frozen weight's GEMM has put its result, e.g. in the heap;
it is computed in fp32, and rounded a second time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from symmoe import kernels

RANK_MULTIPLE = 8  # kernels want matrices with rows of a multiple of 16 bytes


@dataclass(frozen=True, slots=True)
class LowRank:
    """The adapters of one layer, and its GEMMs in both directions; row_range and **options are theirs
    (kernels/contract).

    Attributes:
        a: [G, r, C]; r is a multiple of RANK_MULTIPLE on GPUs.
        b: [G, O, r], times the adapters' scaling.
    """

    a: torch.Tensor
    b: torch.Tensor

    def new_rows(self, num_rows: int) -> torch.Tensor:
        """[num_rows, r], uninitialised: for t or dt."""
        return self.a.new_empty((num_rows, self.a.shape[1]))

    def down(
        self, rows: torch.Tensor, row_range: torch.Tensor, t: torch.Tensor | None = None, **options: Any
    ) -> torch.Tensor:
        """t [N, r] = rows A^T, in a new tensor for N rows, or in the one given."""
        t = self.new_rows(rows.shape[0]) if t is None else t
        kernels.for_device(t.device).grouped_gemm(rows, self.a, row_range, t, **options)
        return t

    def add_up(self, t: torch.Tensor, row_range: torch.Tensor, y: torch.Tensor, **options: Any) -> None:
        """y [N, O] += t B^T."""
        kernels.for_device(t.device).grouped_gemm(t, self.b, row_range, y, accumulate=True, **options)

    def down_gradient(
        self, dy: torch.Tensor, row_range: torch.Tensor, dt: torch.Tensor | None = None, **options: Any
    ) -> torch.Tensor:
        """dt [N, r] = dy B, as in :meth:`down`."""
        dt = self.new_rows(dy.shape[0]) if dt is None else dt
        kernels.for_device(dt.device).grouped_gemm_dgrad(dy, self.b, row_range, dt, **options)
        return dt

    def add_up_gradient(self, dt: torch.Tensor, row_range: torch.Tensor, dx: torch.Tensor, **options: Any) -> None:
        """dx [N, C] += dt A."""
        kernels.for_device(dt.device).grouped_gemm_dgrad(dt, self.a, row_range, dx, accumulate=True, **options)

    def gradients(
        self,
        rows: torch.Tensor,
        t: torch.Tensor,
        dy: torch.Tensor,
        dt: torch.Tensor,
        row_range: torch.Tensor,
        *,
        rows_index: torch.Tensor | None = None,
        dy_index: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """dA = dt^T rows and dB = dy^T t, each None if it is not required; a group without rows has zeros."""
        ops = kernels.for_device(t.device)
        d_a, d_b = (torch.empty_like(adapter) if adapter.requires_grad else None for adapter in (self.a, self.b))
        if d_a is not None:
            ops.grouped_gemm_wgrad(dt, rows, row_range, d_a, rows_index=rows_index)
        if d_b is not None:
            ops.grouped_gemm_wgrad(dy, t, row_range, d_b, dout_index=dy_index)
        return d_a, d_b
