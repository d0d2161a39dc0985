"""What travels in addition to the rows of a forward dispatch: which rows each token has on a rank, and their probs."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from symmoe import kernels
from symmoe.dispatch.plan import Plan
from symmoe.kernels import control

PHASE = control.PHASE_DISPATCH_READY  # the trip's first barrier
READY_ROWS, READY_SLOTS, READY_PROBS = range(3)  # what a rank publishes there: where it wants each of these


class Slots:
    """The slots of one dispatch: a context that leases their receive buffers, and makes index tensors of them.

    P_cap and N_cap are the plan's capacities. If no exception is raised, the plan has `packed_to_row` and
    `row_to_packed_row` after the context.

    Args:
        has_probs: whether probs travel as well.

    Attributes:
        packed_to_row: int32 [P_cap, K].
        row_to_packed_row: int32 [N_cap]; 0 in the tail.
        row_probs: fp32 [N_cap], or None without probs.
    """

    def __init__(self, plan: Plan, *, has_probs: bool) -> None:
        device = plan.heap.device
        self._plan, self._ops = plan, kernels.for_device(device)
        self._shape, self._leases = (plan.packed_row_capacity, plan.top_k), ExitStack()
        self.packed_to_row = torch.empty(self._shape, dtype=torch.int32, device=device)
        # Zeros in the tail: a kernel that gathers by it stays inside the buffer.
        self.row_to_packed_row = torch.zeros(plan.row_capacity, dtype=torch.int32, device=device)
        self.row_probs = None
        if has_probs:
            self.row_probs = torch.empty(plan.row_capacity, dtype=torch.float32, device=device)

    def __enter__(self) -> Slots:
        heap = self._plan.heap
        with self._leases:
            lease = heap.lease(self._shape, torch.int32, name="received slots", phase=PHASE)
            self._slots = self._leases.enter_context(lease)
            lease = heap.lease(self._shape, torch.float32, name="received probs", phase=PHASE)
            self._received_probs = self._leases.enter_context(lease)
            self._leases = self._leases.pop_all()
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *exc: object) -> None:
        self._leases.close()
        if exc_type is None:
            self._plan.packed_to_row, self._plan.row_to_packed_row = self.packed_to_row, self.row_to_packed_row

    @property
    def offsets(self) -> tuple[int, int]:
        """What the ready barrier publishes as READY_SLOTS and READY_PROBS."""
        return self._slots.offset, self._received_probs.offset

    def push(self, leg: Plan, probs: torch.Tensor | None, ready: torch.Tensor) -> None:
        """Writes slots and probs of tokens to all ranks.

        Args:
            leg: the plan of the tokens.
            probs: fp32 [T, K], or None on all ranks.
            ready: the result of the ready barrier.
        """
        for region in leg.regions:
            of_region = probs if region.tokens is None or probs is None else probs[region.tokens]
            self._ops.push_slots(
                region.slot_to_row,
                region.slot_to_rank,
                of_region,
                region.token_to_packed_row,
                region.block_tokens,
                region.packed_start,
                region.packed_limit,
                leg.heap.peers,
                ready,
                row_column=READY_SLOTS,
                prob_column=READY_PROBS,
            )

    def index(
        self, packed_begin: torch.Tensor, packed_end: torch.Tensor, ready: torch.Tensor, arrived: torch.Tensor
    ) -> None:
        """Reads the slots of packed rows that have arrived: see the kernel `index_rows`."""
        self._ops.index_rows(
            self._slots.tensor,
            None if self.row_probs is None else self._received_probs.tensor,
            packed_begin,
            packed_end,
            ready,
            arrived,
            self.packed_to_row,
            self.row_to_packed_row,
            self.row_probs,
        )
