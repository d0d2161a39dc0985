"""The dispatch trip while GEMMs run: rows travel on a branch stream, and what has arrived can be computed in parts.

Every rank sends to the next rank first, then to the one after it, and signals each as soon as its rows are there; in
between it indexes what has come and copies it to secondary rows. So a rank can begin with its own rows, go on with
those of the rank before it, and so on (`plan.arrivals`), and `plan.source_to_rows` says which rows each of these parts
has. The bytes are those of trip.py.

Between nodes this is what the ranks of a node do with their own tokens, while those of other nodes come along the
rails. These are sent to the ranks of the node after that, and are the last parts; a barrier says that they are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch

from symmoe import kernels
from symmoe.dispatch.plan import Plan
from symmoe.dispatch.slots import PHASE, READY_ROWS, Slots
from symmoe.dispatch.trip import agreed_fields, fan_out, legs, place_own_rows
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
    x: torch.Tensor, plan: Plan, buffer: torch.Tensor, probs: torch.Tensor, *, layout: str, division: Division
) -> Iterator[Arrival]:
    """Sends rows, slots and probs of x [T, H] to every rank's `buffer` (on the heap), in forward. Collective.

    Does not synchronise the host. Sets the plan's `packed_to_row` and `row_to_packed_row`.

    Args:
        layout: layout of `buffer`: "packed" [P_cap, H] or "expert-major" [N_cap, H].
        division: the division of the SMs until all rows have been sent.
    """
    heap, agreed = plan.heap, agreed_fields(x, plan, probs, layout, "overlapped")
    with (
        Slots(plan, has_probs=True) as slots,
        heap.one_call,
        legs([x, probs], plan, agreed) as travelling,
    ):
        offsets = (heap.offset_of(buffer, phase=PHASE), *slots.offsets)

        def with_slots() -> Iterator[tuple[Plan, torch.Tensor]]:
            for leg, (rows, its_probs) in travelling:
                slots.push(leg, its_probs, ready)
                yield leg, rows

        with heap.timed("dispatch"):
            ready = heap.barrier(PHASE, publish=offsets, nan_on_failure=buffer, **agreed)
            mark(FRAGILE)
            try:
                trip = _Trip(with_slots(), buffer, ready, layout, division, agreed)
            except Exception as error:
                heap.abort(error)  # peers wait for signals; only at a barrier could they be told
                raise

        def receive(source: int, arrived: torch.Tensor) -> None:
            start = plan.inside.source_to_packed_start
            slots.index(start[source : source + 1], start[source + 1 : source + 2], ready, arrived)
            fan_out(buffer, slots.packed_to_row, plan.inside, layout, source=source, num_ctas=division.num_ctas)

        with _travelling(trip, receive) as parts:
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
        fan_out(buffer, packed_to_row, plan.inside, layout, source=source, num_ctas=division.num_ctas)

    with heap.one_call, legs([x], plan, agreed) as travelling:
        ready = heap.barrier(PHASE, publish=(heap.offset_of(buffer, phase=PHASE),), nan_on_failure=buffer, **agreed)
        trip = _Trip(((leg, rows) for leg, (rows,) in travelling), buffer, ready, layout, division, agreed)
        with _travelling(trip, receive) as parts:
            yield parts


# Called for rows that have come, with their source rank and the result of the wait for them.
Receive = Callable[[int, torch.Tensor], None]


@contextmanager
def _travelling(trip: _Trip, receive: Receive) -> Iterator[Iterator[Part]]:
    """Yields the parts. By the end of the context all rows have been sent and received, even after an exception: peers
    wait for this rank's rows, and what they send must not land in memory that has been leased again. Between nodes that
    is so for the rows of this node; for the others the peers wait at a barrier, where they can be told."""
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
            trip.heap.abort(error)
        raise
    finally:
        with owed():
            trip.branch.join()
        mark(EVEN)


class _Trip:
    """Rows on their way: this rank's own on the current stream, the others on a branch.

    Args:
        legs: the plan and the rows [T, H] of this rank's tokens, and between nodes of those that come from others.
        agreed: fields of the call.
    """

    def __init__(
        self,
        legs: Iterator[tuple[Plan, torch.Tensor]],
        buffer: torch.Tensor,
        ready: torch.Tensor,
        layout: str,
        division: Division,
        agreed: control.CallFields,
    ) -> None:
        (self._plan, self._x), self._legs = next(legs), legs
        self._buffer, self._ready, self._division = buffer, ready, division
        self._layout, self._agreed = layout, agreed
        self.heap = heap = self._plan.heap
        self.branch = heap.streams.branch()
        self._start = self.branch.point()
        self._rank, self._num_ranks = heap.peers.rank, heap.peers.num_ranks
        self._num_sent = self._num_received = 0  # steps of _exchange: rows sent, rows received
        self._come: dict[int, torch.cuda.Event | None] = {}  # key: the source whose rows are complete after the event

    def parts(self, receive: Receive) -> Iterator[Part]:
        """Rows of each source rank, after which the current stream comes, once `receive` has been called for them."""
        plan, num_sms = self._plan, self._division.num_sms
        own, *others = plan.arrivals
        with plan.heap.timed("dispatch"):
            if self._layout == "packed":
                self._push(self._x, plan, self._rank, None)
            else:
                place_own_rows(self._x, plan, self._buffer, self._ready)
            receive(own, self._ready)
        yield Part(plan.source_to_rows[own], num_sms)
        # Only after the own part has been launched: where streams share a hardware queue
        # (CUDA_DEVICE_MAX_CONNECTIONS=1) it would start after the last push.
        self._exchange(receive)
        for source in others:
            if source not in self._come:
                self._forward(receive)
            self.branch.wait_for(self._come[source])
            yield Part(plan.source_to_rows[source], None if source == others[-1] else num_sms)

    def finish(self) -> None:
        """Sends and receives the remaining rows of this node, which nobody reads."""
        self._exchange(lambda source, arrived: None)

    def _exchange(self, receive: Receive) -> None:
        """Launches, on the branch, what has not been launched: a push to one rank, then what another one has pushed.

        All ranks wait for a push only after their own one of the same step: no two wait for each other.
        """
        heap, num_ranks = self.heap, self._num_ranks
        with self.branch.after(self._start), heap.timed("dispatch"):
            for step in range(self._num_received + 1, num_ranks):
                to, peer = (self._rank + step) % num_ranks, (self._rank - step) % num_ranks
                with owed():
                    if step > self._num_sent:  # once: after the signal the peer may use its buffer for other rows
                        self._push(self._x, self._plan, to, self._division.num_ctas)
                        heap.send_signal(to)
                        self._num_sent = step
                    arrived = heap.wait_for_signal(peer, control.PHASE_DISPATCH_DONE, nan_on_failure=self._buffer)
                source = self._plan.arrivals[step]
                receive(source, arrived)
                self._come[source] = self.branch.point()
                self._num_received = step

    def _forward(self, receive: Receive) -> None:
        """Sends what has come from other nodes to all ranks of this one, and receives what they have sent of that."""
        with self.branch.after(self._start), self.heap.timed("dispatch"):
            for plan, rows in self._legs:
                for step in range(1, self._num_ranks + 1):
                    self._push(rows, plan, (self._rank + step) % self._num_ranks, self._division.num_ctas)
            arrived = self.heap.barrier(control.PHASE_DISPATCH_DONE, nan_on_failure=self._buffer, **self._agreed)
            for source in self._plan.arrivals[self._num_ranks :]:
                receive(source, arrived)
                self._come[source] = self.branch.point()

    def _push(self, rows: torch.Tensor, plan: Plan, rank: int, num_ctas: int | None) -> None:
        kernels.for_device(rows.device).push_rows(
            rows,
            plan.token_to_packed_row if self._layout == "packed" else plan.token_to_primary_row,
            self.heap.peers,
            self._ready,
            column=READY_ROWS,
            ranks=range(rank, rank + 1),
            num_ctas=num_ctas,
        )
