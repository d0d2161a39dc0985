"""The two schedules of an expert-parallel step: one thing after the other, or rows travel while GEMMs run.

They launch the same kernels on the same rows and give the same bits. A schedule has four parts, each a collective call
of the heap: dispatch, dispatch_rows, combine, combine_while.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch

from symmoe.combine.trip import Collection, collect_rows
from symmoe.dispatch.maps import Across
from symmoe.dispatch.overlapped_trip import Arrival, arriving, rows_arriving
from symmoe.dispatch.plan import Plan
from symmoe.dispatch.trip import send, send_rows
from symmoe.kernels.gemm_parts import Division, Part
from symmoe.kernels.operands import given
from symmoe.moe.overlap import Overlap

ComputePart = Callable[[Part | None], None]  # computes a part of the rows that combine reads; None: all


@dataclass(frozen=True)
class Serial:
    """One thing after the other.

    Attributes:
        gradient_combine_sms: SMs for GEMMs that run while rows travel in :meth:`combine_while`; None: all.
    """

    layout: str

    gradient_combine_sms: ClassVar[int | None] = None

    @contextmanager
    def dispatch(self, x: torch.Tensor, plan: Plan, buffer: torch.Tensor, probs: torch.Tensor) -> Iterator[Arrival]:
        """Context of an :class:`Arrival`: rows, slots and probs of x go to every rank's buffer."""
        row_probs = send(x, plan, buffer, probs, layout=self.layout)
        _, row_to_packed_row = plan.received_index()
        yield Arrival(None, row_probs, row_to_packed_row)

    @contextmanager
    def dispatch_rows(self, x: torch.Tensor, plan: Plan, buffer: torch.Tensor, *, gradients: int) -> Iterator[None]:
        """Context of the parts of an :class:`Arrival`: only rows of x go to every buffer, along a plan in use.

        gradients: one of control.GRADIENTS, what the backward pass will collect, the same on all ranks.
        """
        send_rows(x, plan, buffer, layout=self.layout, gradients=gradients)
        yield None

    def combine(self, rows: torch.Tensor, plan: Plan, order: str, compute: ComputePart) -> torch.Tensor:
        """Calls `compute` to fill `rows`, and sums them on the ranks of their tokens: [T, H]."""
        compute(None)
        return collect_rows(rows, plan, order=order)

    @contextmanager
    def combine_while(
        self, rows: torch.Tensor | None, plan: Plan, order: str, row_values: torch.Tensor | None, *, gradients: int
    ) -> Iterator[Collection]:
        """Context of a :class:`Collection`, complete after it. The caller may compute other things in it.

        gradients: as in :meth:`dispatch_rows`.
        """
        collection = Collection(rows, plan, order=order, row_values=row_values, gradients=gradients)
        yield collection
        with collection:
            collection.collect()


@dataclass(frozen=True, eq=False)
class Overlapped:
    """Rows travel on a branch stream while the current one runs GEMMs, where that pays (moe/overlap.py).

    * Forward: FC1 begins with this rank's own rows and goes on with each peer's as they arrive. FC2 takes the same
      parts in the opposite order; a peer's sums go home while the next part is computed.
    * Backward: FC2's dgrad also begins with the own rows. The input gradients go home under both weight gradients.
    * Between nodes: FC1 and FC2's dgrad compute rows from other nodes last, FC2 computes them first.

    Where it does not pay, one thing comes after the other.
    """

    layout: str
    overlap: Overlap

    @property
    def gradient_combine_sms(self) -> int | None:
        """See Serial."""
        division = self.overlap.gradient_combine
        return None if division is None else division.num_sms

    @property
    def _serial(self) -> Serial:
        return Serial(self.layout)

    def dispatch(
        self, x: torch.Tensor, plan: Plan, buffer: torch.Tensor, probs: torch.Tensor
    ) -> AbstractContextManager[Arrival]:
        """See Serial."""
        division = self.overlap.dispatch
        if division is None:
            return self._serial.dispatch(x, plan, buffer, probs)
        return arriving(x, plan, buffer, probs, layout=self.layout, division=division)

    def dispatch_rows(
        self, x: torch.Tensor, plan: Plan, buffer: torch.Tensor, *, gradients: int
    ) -> AbstractContextManager[Iterator[Part] | None]:
        """See Serial."""
        division = self.overlap.gradient_dispatch
        if division is None:
            return self._serial.dispatch_rows(x, plan, buffer, gradients=gradients)
        return rows_arriving(x, plan, buffer, layout=self.layout, division=division, gradients=gradients)

    def combine(self, rows: torch.Tensor, plan: Plan, order: str, compute: ComputePart) -> torch.Tensor:
        """See Serial."""
        division = self.overlap.combine
        if division is None:
            return self._serial.combine(rows, plan, order, compute)
        if plan.across is not None:
            return self._combine_between_nodes(rows, plan, plan.across, order, compute, division)
        # A tile with rows of two ranks belongs to the one that arrives later: so after its part all its rows are there.
        branch, sources = plan.heap.streams.branch(), plan.arrivals[::-1]
        with Collection(rows, plan, order=order) as collection:
            compute(Part(plan.source_to_rows[sources[0]]))
            try:
                for source, following in pairwise(sources):
                    point = branch.point()
                    compute(Part(plan.source_to_rows[following], division.num_sms))
                    with branch.after(point):
                        if source == sources[0]:
                            collection.open()
                        collection.send(source, num_ctas=division.num_ctas)
            finally:
                branch.join()
            collection.finish()  # nothing else runs meanwhile
        return given("rows", collection.out)

    def _combine_between_nodes(
        self, rows: torch.Tensor, plan: Plan, across: Across, order: str, compute: ComputePart, division: Division
    ) -> torch.Tensor:
        """Rows of other nodes' tokens first: their sums go home while those of this node's are computed."""
        branch, inside = plan.heap.streams.branch(), across.own
        with Collection(rows, plan, order=order) as collection:
            for source in inside.arrivals[len(plan.heap.topology.ranks) :]:
                compute(Part(inside.source_to_rows[source]))
            try:
                point = branch.point()
                compute(Part(given("own_rows", across.own_rows), division.num_sms))
                with branch.after(point):
                    collection.open()
            finally:
                branch.join()
            collection.open_again()
            collection.finish()
        return given("rows", collection.out)

    def combine_while(
        self, rows: torch.Tensor | None, plan: Plan, order: str, row_values: torch.Tensor | None, *, gradients: int
    ) -> AbstractContextManager[Collection]:
        """See Serial."""
        if self.overlap.gradient_combine is None:
            return self._serial.combine_while(rows, plan, order, row_values, gradients=gradients)
        collection = Collection(rows, plan, order=order, row_values=row_values, gradients=gradients)
        return self._combine_while(collection, plan, self.overlap.gradient_combine.num_ctas)

    @contextmanager
    def _combine_while(self, collection: Collection, plan: Plan, num_ctas: int) -> Iterator[Collection]:
        branch = plan.heap.streams.branch()
        with collection:
            point = branch.point()
            yield collection
            try:
                with branch.after(point):
                    collection.collect(num_ctas=num_ctas)
            finally:
                branch.join()


# What moe/ep_step.py asks for: equal ones launch the same kernels.
Schedule = Serial | Overlapped
