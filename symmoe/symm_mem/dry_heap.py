"""A heap for dry steps: it notes the leases that a step makes and ends, and has no memory for them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import torch

from symmoe.errors import SymmoeError
from symmoe.kernels import control
from symmoe.symm_mem.heap import SymmetricHeap
from symmoe.symm_mem.lease import Lease
from symmoe.symm_mem.memory import Memory, Span
from symmoe.symm_mem.streams import NoStreams

_META = torch.device("meta")
_nothing: Any = lambda *args, **options: 0  # noqa: E731 - a method that does nothing
Event = tuple[int | None, Any]  # (bytes of a lease where it begins or None where it ends, the lease)


class DryHeap(SymmetricHeap):
    """Rank 0's heap of a group whose other ranks are not there. Calls on it are local; they move and compute nothing.

    Args:
        num_ranks: R.
        num_rows, num_packed_rows: N and P of every plan with exact capacity.

    Attributes:
        num_ranks, num_rows, num_packed_rows: as given.
        events: begins and ends of leases, in order.
    """

    rank, device, epoch = 0, _META, 0
    status: Any = None
    configurations: Any = SimpleNamespace(number=lambda fields: 0)
    trip_timer = captured_reports = first_step = None
    spans_nodes = False
    base = 0
    one_call: Any = nullcontext
    _streams = NoStreams()
    _closed = True  # no peers to tell of errors
    is_closed = False
    barrier = send_signal = wait_for_signal = check = note_counts = offset_of = _nothing
    lacks = shrink = _nothing  # memory is planned for leases that stay as large as they are made

    def __init__(self, num_ranks: int, *, num_rows: int, num_packed_rows: int) -> None:
        self.num_ranks, self.num_rows, self.num_packed_rows = num_ranks, num_rows, num_packed_rows
        self.peers: Any = SimpleNamespace(rank=0, num_ranks=num_ranks)
        self.count_peers: Any = self.peers
        self._report = torch.zeros(control.SUMMARY_WORDS, dtype=torch.int64, device="cpu")
        self._report[[control.SUM_NUM_ROWS, control.SUM_MAX_ROWS]] = num_rows
        self._report[[control.SUM_NUM_PACKED, control.SUM_MAX_PACKED]] = num_packed_rows
        self.events: list[Event] = []
        self.dropped = self.events  # a dropped lease appends its end

    def lease(
        self, shape: tuple[int, ...], dtype: torch.dtype, *, name: str = "lease", phase: int | None = None
    ) -> Lease:
        """See SymmetricHeap."""
        number, memory = len(self.events), cast(Memory, self)
        place: Any = None, (0, number)
        lease = _DryLease(memory, Span(memory, name, number, place), shape, dtype)
        self.events.append((lease.num_bytes, place[1]))
        return lease

    def give_back(self, arena: Any, span: tuple[int, int]) -> None:
        """Notes the end of a lease."""
        self.events.append((arena, span))

    def run(
        self,
        key: tuple[Hashable, ...],
        function: Callable[[], Sequence[Any]],
        inputs: Sequence[torch.Tensor],
        **numbers: int,
    ) -> Sequence[Any]:
        """See SymmetricHeap."""
        return function()

    def owns(self, tensor: torch.Tensor) -> bool:
        """See SymmetricHeap."""
        return hasattr(tensor.untyped_storage(), "_lease_span")

    def read_back(self, tensor: torch.Tensor) -> Callable[[], list[int]]:
        """The report of a plan: a call reads nothing else."""
        return self._report.tolist

    def fail(self, error: SymmoeError, phase: int | None) -> NoReturn:
        """See SymmetricHeap."""
        raise error


class _DryLease(Lease):
    def _over(self, memory: Memory, rank: int) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=_META)
