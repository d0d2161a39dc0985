"""A heap for dry steps, which records the leases that a step makes and ends, and has no memory for them."""

from __future__ import annotations

from collections import defaultdict
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch

from symmoe.kernels import control
from symmoe.symm_mem.heap import SymmetricHeap
from symmoe.symm_mem.memory import Arena, HeapStatistics, Memory, Span
from symmoe.symm_mem.row_budget import RowHistory
from symmoe.symm_mem.streams import Access, NoStreams
from symmoe.symm_mem.waits import Waits

_META = torch.device("meta")
ENDLESS_BYTES = 1 << 62
Event = tuple[
    int | None, Any
]  # (bytes of a lease where it begins or None where it ends, the lease)


def _nothing(*args: object, **options: object) -> int:
    """Replaces operations that a dry step skips."""
    return 0


class DryHeap(SymmetricHeap):
    """Rank 0's heap in a group of R ranks of which only this one exists. Its plans with exact capacity have N rows and
    P packed rows. Calls on it are local; they move and compute nothing. events: begins and ends of leases, in order."""

    def __init__(self, num_ranks: int, *, num_rows: int, num_packed_rows: int) -> None:
        self.num_rows = num_rows
        self.num_packed_rows = num_packed_rows
        self.events = list[Event]()
        peers = control.Peers(
            rank=0,
            num_ranks=num_ranks,
            bases=torch.empty(num_ranks, dtype=torch.int64, device=_META),
            views=(),
            layout=control.ControlLayout(num_ranks),
        )
        self.memory = cast(Any, _DryMemory(peers, self.events))
        self.faults = cast(
            Any,
            SimpleNamespace(
                poison=None, unraised=None, fail=lambda error, phase: error, fail_peers=_nothing
            ),
        )
        self.configurations = cast(Any, SimpleNamespace(number=lambda fields: 0))
        self.topology = self.bootstrap = self._arenas = cast(Any, None)
        self.rank = 0
        self.num_ranks = num_ranks
        self.expert_group = None
        self.num_bytes = ENDLESS_BYTES
        self.backend = "none"
        self.backend_reason = "a dry step"
        self._program_mode = "off"
        self.peers = self.count_peers = peers
        self.nodes = None
        self.streams = NoStreams()
        self.streams.raises_at_once = False
        self.one_call = nullcontext()
        self._access = Access()
        self.waits = Waits(peers, self.configurations, 1.0, 1.0)
        self.row_histories = defaultdict(RowHistory)
        self._begin()

    def await_report(self, plan: int) -> list[int]:
        report = [0] * control.SUMMARY_WORDS
        report[control.SUM_NUM_ROWS] = report[control.SUM_MAX_ROWS] = self.num_rows
        report[control.SUM_NUM_PACKED] = report[control.SUM_MAX_PACKED] = self.num_packed_rows
        return report


class _DryMemory:
    """Replaces Memory. A plan of memory assumes that leases keep their first size."""

    base = 0
    is_closed = False
    fills = False
    lacks = shrink = _nothing

    def __init__(self, peers: control.Peers, events: list[Event]) -> None:
        self.peers = peers
        self.statistics = HeapStatistics()
        self._events = events
        self.dropped = events  # a dropped lease appends its end
        self.arenas = [partial(torch.empty, ENDLESS_BYTES, dtype=torch.uint8, device=_META)]

    def take(self, num_bytes: int, name: str) -> Span:
        """Records the begin of a lease."""
        number = len(self._events)
        location = cast(Arena, None), (0, number)
        self._events.append((num_bytes, location[1]))
        return Span(cast(Memory, self), name, number, location)

    def give_back(self, arena: Any, span: tuple[int, int]) -> None:
        """Records the end of a lease."""
        self._events.append((arena, span))

    def owns(self, tensor: torch.Tensor) -> bool:
        return hasattr(tensor.untyped_storage(), "_lease_span")

    def offset_of(self, tensor: torch.Tensor) -> tuple[int, bool]:
        return 0, True
