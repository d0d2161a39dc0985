"""Adapters: y += B[g] (A[g] x) in addition to a grouped linear layer, as grouped GEMMs of rank r; without autograd.

G groups, C input features, O output features, r rank, N rows sorted by group. Neither B A nor a gradient of its size is
ever made: forward is t = x A^T and y += t B^T, backward dt = dy B, dx += dt A, dA = dt^T x and dB = dy^T t. A sum is
made where the frozen weight's GEMM has put its result, e.g. in the heap; it is computed in fp32, and rounded again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from symmoe import kernels
from symmoe.kernels.contract.operands import Rows
from symmoe.kernels.gemm_parts import Part

RANK_MULTIPLE = 8  # kernels want matrices with rows of a multiple of 16 bytes


@dataclass(frozen=True, slots=True)
class LowRank:
    """The adapters of one layer, and its GEMMs in both directions; row_range is int32 [2, G] (kernels/contract)."""

    a: torch.Tensor  # [G, r, C]; r is a multiple of RANK_MULTIPLE on GPUs
    b: torch.Tensor  # [G, O, r], times the adapters' scaling

    def new_rows(self, num_rows: int) -> torch.Tensor:
        """[num_rows, r], uninitialised: for t or dt."""
        return self.a.new_empty((num_rows, self.a.shape[1]))

    def new_gradients(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Uninitialised dA and dB, each None if it is not required."""
        d_a, d_b = (torch.empty_like(adapter) if adapter.requires_grad else None for adapter in (self.a, self.b))
        return d_a, d_b

    def down(self, rows: Rows, part: Part, t: torch.Tensor) -> None:
        """t [N, r] = rows A^T."""
        kernels.for_device(t.device).grouped_gemm(rows, self.a, part.rows, t, num_sms=part.num_sms)

    def add_up(self, t: torch.Tensor, part: Part, y: torch.Tensor) -> None:
        """y [N, O] += t B^T."""
        kernels.for_device(t.device).grouped_gemm(t, self.b, part.rows, y, accumulate=True, num_sms=part.num_sms)

    def down_gradient(self, dy: Rows, part: Part, dt: torch.Tensor) -> None:
        """dt [N, r] = dy B."""
        kernels.for_device(dt.device).grouped_gemm_dgrad(dy, self.b, part.rows, dt, num_sms=part.num_sms)

    def add_up_gradient(self, dt: torch.Tensor, part: Part, dx: torch.Tensor) -> None:
        """dx [N, C] += dt A."""
        ops = kernels.for_device(dt.device)
        ops.grouped_gemm_dgrad(dt, self.a, part.rows, dx, accumulate=True, num_sms=part.num_sms)


def write_gradients(
    operands: tuple[Rows, torch.Tensor, Rows, torch.Tensor],
    row_range: torch.Tensor,
    gradients: Sequence[torch.Tensor | None],
) -> None:
    """dA = dt^T rows and dB = dy^T t of operands (rows, t, dy, dt), each if there is a tensor for it; a group without
    rows has zeros."""
    (rows, t, dy, dt), (d_a, d_b) = operands, gradients
    ops = kernels.for_device(t.device)
    if d_a is not None:
        ops.grouped_gemm_wgrad(dt, rows, row_range, d_a)
    if d_b is not None:
        ops.grouped_gemm_wgrad(dy, t, row_range, d_b)
