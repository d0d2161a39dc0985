"""The dispatch trip without autograd: rows of tokens travel to the ranks of their experts.

The receive buffer has one of two layouts; H is the number of features:
* packed [P, H]: one row per (token, rank); readers gather from it through `plan.row_to_packed_row`.
* expert-major [N, H]: the token lands in its primary row and the receiver copies it to the secondary rows; a rank's own
  tokens are written to all their rows.

Forward sends rows and slots (which rows a token has here, and their probs); backward sends only rows.

Without a division of the SMs, everything travels between two barriers. With one, rows travel on a branch stream while
GEMMs run: every rank sends to the next rank first, then to the one after it, and signals each as soon as its rows are
there; in between it indexes what has come and copies it to secondary rows. So a rank can begin with its own rows, go on
with those of the rank before it, and so on (`plan.arrivals`). The bytes are the same.

Between nodes this is what the ranks of a node do with their own tokens, while foreign ones come along the rails. These
are sent to the ranks of the node after that, and are the last parts; a barrier says that they are there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass

import torch

from symmoe import kernels
from symmoe.dispatch.plan import Plan
from symmoe.errors import SymmoeError
from symmoe.kernels import control
from symmoe.kernels.gemm_parts import Division, Part
from symmoe.tape.recorder import mark, owed
from symmoe.tape.tape import EVEN, FRAGILE, OWES

PHASE = control.PHASE_DISPATCH_READY  # the trip's first barrier
READY_ROWS, READY_SLOTS, READY_PROBS = range(3)  # what a rank publishes there: where it wants each of these


@dataclass(frozen=True, slots=True)
class Arrival:
    """Rows that have come, or are on their way.

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
def dispatch(
    x: torch.Tensor,
    plan: Plan,
    buffer: torch.Tensor,
    probs: torch.Tensor | None = None,
    *,
    layout: str,
    gradients: int | None = None,
    division: Division | None = None,
) -> Iterator[Arrival]:
    """Sends rows of x [T, H] to every rank's `buffer` (on the heap); in forward slots, too. Collective.

    A context, at the end of which all rows have been sent and received. Does not synchronise the host. Forward sets the
    plan's `packed_to_row` and `row_to_packed_row`; backward needs them.

    Args:
        probs: fp32 [T, K], which travel along in forward.
        layout: layout of `buffer`: "packed" [P_cap, H] or "expert-major" [N_cap, H].
        gradients: in backward, index of control.GRADIENTS, what it will collect, the same on all ranks; None: forward.
        division: the division of the SMs until all rows have been sent; None: rows do not travel during GEMMs.
    """
    begun, heap = _begun(x, plan, buffer, probs, layout, gradients, division), plan.heap
    if division is None:
        with begun as call:
            call.send()
        yield Arrival(None, call.index.row_probs, call.index.row_to_packed_row)
        return
    with begun as call:
        mark(FRAGILE)
        try:
            with heap.timed("dispatch"):
                trip = _Overlapped(call, division)
        except Exception as error:
            heap.abort_for(error)  # peers wait for signals; only at a barrier could they be told
            raise
        mark(OWES)
        parts = trip.parts()
        # By the end all rows have been sent and received, even after an exception: peers wait for this rank's rows, and
        # what they send must not land in memory that has been leased again. Between nodes that is so for the rows of
        # this node; for the others the peers wait at a barrier, where they can be told.
        try:
            yield Arrival(parts, call.index.row_probs, call.index.row_to_packed_row)
            for _ in parts:  # the caller may have left parts
                pass
        except BaseException:
            try:
                with suppress(SymmoeError):  # a wait on a CPU may raise what will be raised again at the next call
                    trip.finish()
            except Exception as error:  # noqa: BLE001 - the exception that led here is raised
                heap.abort_for(error)
            raise
        finally:
            with owed():
                trip.branch.join()
            mark(EVEN)


@contextmanager
def _begun(
    x: torch.Tensor,
    plan: Plan,
    buffer: torch.Tensor,
    probs: torch.Tensor | None,
    layout: str,
    gradients: int | None,
    division: Division | None,
) -> Iterator[_Call]:
    """The context of a dispatch, after its first barrier."""
    heap = plan.heap
    agreed: control.CallFields = {  # so that rows fit the peers' buffers
        "hidden": x.shape[1],
        "dtype": control.DTYPES.index(x.dtype),
        "probs": int(probs is not None),
        "gradients": gradients or 0,
        "layout": control.LAYOUTS.index(layout),
        "schedule": control.SCHEDULES.index("serial" if division is None else "overlapped"),
        "plan": plan.generation,
    }
    tensors = [x] if probs is None else [x, probs]
    known = None if gradients is None else _Index(*plan.received_index())
    with (
        _new_index(plan, has_probs=probs is not None) if known is None else nullcontext(known) as index,
        heap.one_call(),
        heap.timed("dispatch") if division is None else nullcontext(),
        _travelling(tensors, plan, agreed) as travelling,
    ):
        with nullcontext() if division is None else heap.timed("dispatch"):
            offsets = heap.offset_of(buffer, phase=PHASE), *index.offsets
            ready = heap.barrier(PHASE, publish=offsets, spoils=buffer, **agreed)

        def with_slots() -> Iterator[tuple[Plan, torch.Tensor]]:
            for tokens, (rows, *values) in travelling:
                index.push(tokens, values[0] if values else None, ready)
                yield tokens, rows

        yield _Call(plan, buffer, layout, agreed, index, ready, with_slots())


@contextmanager
def _travelling(
    tensors: list[torch.Tensor], plan: Plan, agreed: control.CallFields
) -> Iterator[Iterator[tuple[Plan, list[torch.Tensor]]]]:
    """A context in which a dispatch sends tensors [T, .] to the ranks of its node. The trip's two barriers are in it.

    Yields:
        an iterator over what is sent, with the plan of its tokens: this rank's own, and between nodes, once they have
        come, the foreign ones. It ends with a meeting, see SymmetricHeap.meet: the last barrier comes next.
    """
    if (nodes := plan.nodes) is None:
        yield iter([(plan, tensors)])
        return
    rails = nodes.rails
    with rails.bring_in(tensors, control.PHASE_NODES_OUT, agreed) as come:

        def both() -> Iterator[tuple[Plan, list[torch.Tensor]]]:
            yield nodes.own, tensors
            yield nodes.foreign, come()
            plan.heap.meet(control.PHASE_NODES_OUT, **rails.agreed_on_rail(agreed))

        yield both()


@dataclass(frozen=True, slots=True, eq=False)
class _Index:
    """The slots of a dispatch: what they say of the rows that come. Tensors as in Plan and Arrival.

    Attributes:
        slots, probs: where they come, int32 and fp32 [P_cap, K], and the offsets of both; None and () in backward.
    """

    packed_to_row: torch.Tensor
    row_to_packed_row: torch.Tensor
    row_probs: torch.Tensor | None = None
    slots: torch.Tensor | None = None
    probs: torch.Tensor | None = None
    offsets: tuple[int, ...] = ()

    def push(self, tokens: Plan, probs: torch.Tensor | None, ready: torch.Tensor) -> None:
        """Writes slots and probs of tokens to all ranks. probs: fp32 [T, K], or None on all ranks."""
        if self.slots is None:
            return
        for region in tokens.regions:
            kernels.for_device(self.slots.device).push_slots(
                region.slot_to_row,
                region.slot_to_rank,
                probs if region.tokens is None or probs is None else probs[region.tokens],
                region.token_to_packed_row,
                region.block_tokens,
                region.packed_start,
                region.packed_limit,
                tokens.heap.peers,
                ready,
                row_column=READY_SLOTS,
                prob_column=READY_PROBS,
            )

    def read(self, begin: torch.Tensor, end: torch.Tensor, ready: torch.Tensor, arrived: torch.Tensor) -> None:
        """Reads the slots of packed rows that have arrived: see the kernel `index_rows`."""
        if self.slots is None:
            return
        made = self.packed_to_row, self.row_to_packed_row, self.row_probs
        probs = None if self.row_probs is None else self.probs
        kernels.for_device(self.slots.device).index_rows(self.slots, probs, begin, end, ready, arrived, *made)


@contextmanager
def _new_index(plan: Plan, *, has_probs: bool) -> Iterator[_Index]:
    """A context that leases buffers for slots. If no exception is raised, the plan has the index after it."""
    heap, shape = plan.heap, (plan.packed_row_capacity, plan.top_k)
    packed_to_row = torch.empty(shape, dtype=torch.int32, device=heap.device)
    # Zeros in the tail: a kernel that gathers by it stays inside the buffer.
    row_to_packed_row = torch.zeros(plan.row_capacity, dtype=torch.int32, device=heap.device)
    row_probs = torch.empty(plan.row_capacity, dtype=torch.float32, device=heap.device) if has_probs else None
    with (
        heap.lease(shape, torch.int32, name="received slots", phase=PHASE) as slots,
        heap.lease(shape, torch.float32, name="received probs", phase=PHASE) as probs,
    ):
        offsets = slots.offset, probs.offset
        yield _Index(packed_to_row, row_to_packed_row, row_probs, slots.tensor, probs.tensor, offsets)
    plan.packed_to_row, plan.row_to_packed_row = packed_to_row, row_to_packed_row


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """A dispatch after its first barrier.

    Attributes:
        agreed: fields of the call on which all ranks must agree.
        ready: what the barrier returned.
        travelling: the plan and the rows [T, H] of this rank's tokens, and between nodes of the foreign ones; their
            slots have been sent.
    """

    plan: Plan
    buffer: torch.Tensor
    layout: str
    agreed: control.CallFields
    index: _Index
    ready: torch.Tensor
    travelling: Iterator[tuple[Plan, torch.Tensor]]

    def push(
        self,
        rows: torch.Tensor,
        tokens: Plan,
        *,
        ranks: range | None = None,
        but: int | None = None,
        num_ctas: int | None = None,
    ) -> None:
        """Writes the rows of tokens to ranks of the node, see the kernel `push_rows`."""
        kernels.for_device(rows.device).push_rows(
            rows,
            tokens.token_to_packed_row if self.layout == "packed" else tokens.token_to_primary_row,
            self.plan.heap.peers,
            self.ready,
            column=READY_ROWS,
            ranks=ranks,
            but=but,
            num_ctas=num_ctas,
        )

    def place_own(self, rows: torch.Tensor, tokens: Plan) -> None:
        """Writes tokens to all rows that they have on this rank, in an expert-major buffer."""
        slots, rank = (tokens.slot_to_rank, tokens.slot_to_row), self.plan.heap.peers.rank
        kernels.for_device(rows.device).place_rows(rows, *slots, self.buffer, self.ready, rank=rank)

    def send(self) -> None:
        """Sends and receives everything."""
        for tokens, rows in self.travelling:
            if self.layout == "packed":
                self.push(rows, tokens)
            else:
                self.push(rows, tokens, but=self.plan.heap.peers.rank)
                self.place_own(rows, tokens)
        self.receive(None, self.barrier())

    def barrier(self) -> torch.Tensor:
        """The last barrier of a trip that is not overlapped, or that goes between nodes."""
        return self.plan.heap.barrier(control.PHASE_DISPATCH_DONE, spoils=self.buffer, **self.agreed)

    def receive(self, source: int | None, arrived: torch.Tensor, num_ctas: int | None = None) -> None:
        """Indexes the rows that have come from one source rank or from all, and copies them to secondary rows.

        arrived: result of the wait for them.
        """
        start, rank = self.plan.in_node.source_to_packed_start, self.plan.heap.rank
        first, end = (0, len(start) - 1) if source is None else (source, source + 1)
        self.index.read(start[first : first + 1], start[end : end + 1], self.ready, arrived)
        if self.layout == "expert-major":
            fan_out, index = kernels.for_device(start.device).fan_out, (self.index.packed_to_row, start)
            fan_out(self.buffer, *index, rank=rank, source=source, num_ctas=num_ctas)


class _Overlapped:
    """Rows on their way: this rank's own on the current stream, the others on a branch."""

    def __init__(self, call: _Call, division: Division) -> None:
        self._call, self._division = call, division
        self._plan, self._x = next(call.travelling)
        self._heap = heap = self._plan.heap
        self.branch = heap.branch()
        self._start = self.branch.point()
        self._rank, self._num_ranks = heap.peers.rank, heap.peers.num_ranks
        self._num_sent = self._num_received = 0  # steps of _exchange: rows sent, rows received
        self._are_read = True  # whether somebody reads what comes
        self._come: dict[int, torch.cuda.Event | None] = {}  # key: the source whose rows are complete after the event

    def parts(self) -> Iterator[Part]:
        """Rows of each source rank, after which the current stream comes."""
        call, plan, num_sms = self._call, self._plan, self._division.num_sms
        own, *others = plan.arrivals
        with self._heap.timed("dispatch"):
            if call.layout == "packed":
                call.push(self._x, plan, ranks=range(self._rank, self._rank + 1))
            else:
                call.place_own(self._x, plan)
            call.receive(own, call.ready, self._division.num_ctas)
        yield Part(plan.source_to_rows[own], num_sms)
        # Only after the own part has been launched: where streams share a hardware queue
        # (CUDA_DEVICE_MAX_CONNECTIONS=1) it would start after the last push.
        self._exchange()
        for source in others:
            if source not in self._come:
                self._forward()
            self.branch.wait_for(self._come[source])
            yield Part(plan.source_to_rows[source], None if source == others[-1] else num_sms)

    def finish(self) -> None:
        """Sends and receives the remaining rows of this node, which nobody reads."""
        self._are_read = False
        self._exchange()

    def _exchange(self) -> None:
        """Launches, on the branch, what has not been launched: a push to one rank, then what another one has pushed.

        All ranks wait for a push only after their own one of the same step: no two wait for each other.
        """
        heap, num_ranks = self._heap, self._num_ranks
        with self.branch.after(self._start), heap.timed("dispatch"):
            for step in range(self._num_received + 1, num_ranks):
                to, peer = (self._rank + step) % num_ranks, (self._rank - step) % num_ranks
                with owed():
                    if step > self._num_sent:  # once: after the signal the peer may use its buffer for other rows
                        self._push(self._x, self._plan, to)
                        heap.send_signal(to)
                        self._num_sent = step
                    arrived = heap.wait_for_signal(peer, control.PHASE_DISPATCH_DONE, spoils=self._call.buffer)
                self._receive(self._plan.arrivals[step], arrived)
                self._num_received = step

    def _forward(self) -> None:
        """Sends foreign tokens to all ranks of this node, and receives what they have sent of those."""
        with self.branch.after(self._start), self._heap.timed("dispatch"):
            for plan, rows in self._call.travelling:
                for step in range(1, self._num_ranks + 1):
                    self._push(rows, plan, (self._rank + step) % self._num_ranks)
            arrived = self._call.barrier()
            for source in self._plan.arrivals[self._num_ranks :]:
                self._receive(source, arrived)

    def _push(self, rows: torch.Tensor, plan: Plan, rank: int) -> None:
        self._call.push(rows, plan, ranks=range(rank, rank + 1), num_ctas=self._division.num_ctas)

    def _receive(self, source: int, arrived: torch.Tensor) -> None:
        if self._are_read:
            self._call.receive(source, arrived, self._division.num_ctas)
        self._come[source] = self.branch.point()
