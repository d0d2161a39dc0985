"""The dispatch trip while GEMMs run: rows travel on a branch stream, and what has arrived can be computed in parts.

Every rank sends to the next rank first, then to the one after it, and signals each as soon as its rows are there; in
between it indexes what has come and copies it to secondary rows. So a rank can begin with its own rows, go on with
those of the rank before it, and so on (`plan.arrivals`), and `plan.source_to_rows` says which rows each of these parts
has. The bytes are those of trip.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch

from symmoe import kernels
from symmoe.dispatch.plan import Plan
from symmoe.dispatch.slots import PHASE, READY_ROWS, Slots
from symmoe.dispatch.trip import agreed_fields, place_own_rows, token_to_row
from symmoe.errors import SymmoeError
from symmoe.kernels import control
from symmoe.kernels.gemm_parts import Division, Part
from symmoe.tape.recorder import mark, owed
from symmoe.tape.tape import EVEN, FRAGILE, OWES


@dataclass(frozen=True, slots=True)
class Arrival:
    """Rows that are on their way.

    Attributes:
        parts: an iterator with a part per source rank, in the order of arrival: rows of the local experts that the
            current stream may read from then on, and SMs for their GEMMs. Together the parts are all rows. None: all
            rows have arrived.
        row_probs: fp32 [N_cap], complete for the parts that have been handed out; None without probs.
        row_to_packed_row: int32 [N_cap], complete for the same parts.
    """

    parts: Iterator[Part] | None
    row_probs: torch.Tensor | None
    row_to_packed_row: torch.Tensor


@contextmanager
def arriving(
    x: torch.Tensor,
    plan: Plan,
    buffer: torch.Tensor,
    probs: torch.Tensor,
    *,
    layout: str,
    division: Division,
) -> Iterator[Arrival]:
    """Sends rows, slots and probs of x [T, H] to every rank's `buffer` (on the heap), in forward. Collective.

    Does not synchronise the host. Sets the plan's `packed_to_row` and `row_to_packed_row`.

    Args:
        layout: layout of `buffer`: "packed" [P_cap, H] or "expert-major" [N_cap, H].
        division: the division of the SMs until all rows have been sent.
    """
    heap, agreed = plan.heap, agreed_fields(x, plan, probs, layout, "overlapped")
    with Slots(plan, probs) as slots, heap.one_call():
        offsets = (heap.offset_of(buffer, phase=PHASE), *slots.offsets)
        with heap.timed("dispatch"):
            ready = heap.barrier(PHASE, publish=offsets, spoils=buffer, **agreed)
            mark(FRAGILE)
            try:
                slots.push(ready)
            except Exception as error:
                heap.abort_for(error)  # peers wait for signals; only at a barrier could they be told
                raise

        def receive(source: int, arrived: torch.Tensor) -> None:
            start = plan.source_to_packed_start
            slots.index(start[source : source + 1], start[source + 1 : source + 2], ready, arrived)
            if layout == "expert-major":
                _copy(buffer, slots.packed_to_row, plan, source, division)

        with _travelling(x, plan, buffer, ready, layout, division, receive) as parts:
            yield Arrival(parts, slots.row_probs, slots.row_to_packed_row)


@contextmanager
def rows_arriving(
    x: torch.Tensor, plan: Plan, buffer: torch.Tensor, *, layout: str, division: Division, gradients: int
) -> Iterator[Iterator[Part]]:
    """Same as :func:`arriving`, but sends only rows, over a plan that has dispatched: for backward. Yields the parts.

    gradients: index of control.GRADIENTS, what the backward pass will collect; the same on all ranks.
    """
    heap = plan.heap
    agreed = agreed_fields(x, plan, None, layout, "overlapped", gradients=gradients)
    packed_to_row, _ = plan.received_index()

    def receive(source: int, arrived: torch.Tensor) -> None:
        if layout == "expert-major":
            _copy(buffer, packed_to_row, plan, source, division)

    with heap.one_call():
        ready = heap.barrier(PHASE, publish=(heap.offset_of(buffer, phase=PHASE),), spoils=buffer, **agreed)
        with _travelling(x, plan, buffer, ready, layout, division, receive) as parts:
            yield parts


def _copy(buffer: torch.Tensor, packed_to_row: torch.Tensor, plan: Plan, source: int, division: Division) -> None:
    """Copies a peer's rows, which have come to an expert-major buffer, to their secondary rows."""
    kernels.for_device(buffer.device).fan_out(
        buffer,
        packed_to_row,
        plan.source_to_packed_start,
        rank=plan.heap.rank,
        source=source,
        num_ctas=division.num_ctas,
    )


# Called for rows that have come, with their source rank and the result of the wait for them.
Receive = Callable[[int, torch.Tensor], None]


@contextmanager
def _travelling(
    x: torch.Tensor,
    plan: Plan,
    buffer: torch.Tensor,
    ready: torch.Tensor,
    layout: str,
    division: Division,
    receive: Receive,
) -> Iterator[Iterator[Part]]:
    """Yields the parts. By the end of the context all rows have been sent and received, even after an exception:
    peers wait for this rank's rows, and what they send must not land in memory that has been leased again."""
    trip = _Trip(x, plan, buffer, ready, layout, division)
    mark(OWES)
    parts = trip.parts(receive)
    try:
        yield parts
        for _ in parts:  # the caller may have left parts
            pass
    except BaseException:
        try:
            with suppress(SymmoeError):  # a wait on a CPU may raise what will be raised again at the next call
                trip.finish()
        except Exception as error:  # noqa: BLE001 - the exception that led here is raised
            plan.heap.abort_for(error)
        raise
    finally:
        with owed():
            trip.branch.join()
        mark(EVEN)


class _Trip:
    """Rows of x on their way: this rank's own on the current stream, the others on a branch."""

    def __init__(
        self,
        x: torch.Tensor,
        plan: Plan,
        buffer: torch.Tensor,
        ready: torch.Tensor,
        layout: str,
        division: Division,
    ) -> None:
        self._x, self._plan, self._buffer, self._ready, self._division = x, plan, buffer, ready, division
        self._layout, self._token_to_row = layout, token_to_row(plan, layout)
        self.branch = plan.heap.branch()
        self._start = self.branch.point()
        self._num_sent = self._num_received = 0  # steps of _exchange: rows sent, rows received
        self._come: dict[int, torch.cuda.Event | None] = {}  # key: the source whose rows are complete after the event

    def parts(self, receive: Receive) -> Iterator[Part]:
        """Rows of each source rank, after which the current stream comes, once `receive` has been called for them."""
        plan, own, num_sms = self._plan, self._plan.heap.rank, self._division.num_sms
        last = plan.arrivals[-1]
        with plan.heap.timed("dispatch"):
            if self._layout == "packed":
                self._push(own, None)
            else:
                place_own_rows(self._x, plan, self._buffer, self._ready)
            receive(own, self._ready)
        yield Part(plan.source_to_rows[own], num_sms)
        # Only after the own part has been launched: where streams share a hardware queue
        # (CUDA_DEVICE_MAX_CONNECTIONS=1) it would start after the last push.
        self._exchange(receive)
        for source in plan.arrivals[1:]:
            self.branch.wait_for(self._come[source])
            yield Part(plan.source_to_rows[source], None if source == last else num_sms)

    def finish(self) -> None:
        """Sends and receives the remaining rows, which nobody reads."""
        self._exchange(lambda source, arrived: None)

    def _exchange(self, receive: Receive) -> None:
        """Launches, on the branch, what has not been launched: a push to one rank, then what another one has pushed.

        All ranks wait for a push only after their own one of the same step: no two wait for each other.
        """
        heap = self._plan.heap
        with self.branch.after(self._start), heap.timed("dispatch"):
            for step in range(self._num_received + 1, heap.num_ranks):
                to, source = (heap.rank + step) % heap.num_ranks, (heap.rank - step) % heap.num_ranks
                with owed():
                    if step > self._num_sent:  # once: after the signal the peer may use its buffer for other rows
                        self._push(to, self._division.num_ctas)
                        heap.send_signal(to)
                        self._num_sent = step
                    arrived = heap.wait_for_signal(source, control.PHASE_DISPATCH_DONE, spoils=self._buffer)
                receive(source, arrived)
                self._come[source] = self.branch.point()
                self._num_received = step

    def _push(self, rank: int, num_ctas: int | None) -> None:
        kernels.for_device(self._x.device).push_rows(
            self._x,
            self._token_to_row,
            self._plan.heap.peers,
            self._ready,
            column=READY_ROWS,
            ranks=range(rank, rank + 1),
            num_ctas=num_ctas,
        )
