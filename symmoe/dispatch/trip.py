"""The dispatch trip without autograd: rows of tokens travel to the ranks of their experts (docs/design/trips.md).

The receive buffer is packed [P, H], one row per (token, rank), from which readers gather through
`plan.row_to_packed_row`, or expert-major [N, H]. Forward sends rows and slots (which rows a token has here, and their
probs); backward sends only rows.

Without a division of the SMs, everything travels between two barriers. With one, rows travel on a branch stream while
GEMMs run ("Overlap"): a rank can begin with its own rows, go on with those of the rank before it, and so on
(`plan.arrivals`). Between nodes this is what the ranks of a node do with their own tokens; foreign ones are the last
parts, and a barrier says that they are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Protocol

import torch

from symmoe import kernels
from symmoe.dispatch.plan import Plan
from symmoe.errors import SymmoeError
from symmoe.kernels import control
from symmoe.kernels.gemm_parts import Division, Part
from symmoe.program.builder import mark, must_complete
from symmoe.program.program import CLEAN, MUST_ABORT, MUST_SIGNAL

PHASE = control.PHASE_DISPATCH_READY  # the trip's first barrier
# What a rank publishes there: where it wants each of these, the last for replicas.
READY_ROWS, READY_SLOTS, READY_PROBS, READY_WEIGHTS = range(4)


@dataclass(frozen=True, slots=True)
class Arrival:
    """Rows that have come (no parts), or are on their way: a part per source rank, in the order of arrival, has rows of
    the local experts that the current stream may read from then on, and SMs for their GEMMs. Tensors [N_cap] are
    complete for the parts that have been handed out."""

    parts: Iterator[Part] | None
    row_probs: torch.Tensor | None  # fp32; None without probs
    row_to_packed_row: torch.Tensor  # int32


class ExtraPayload(Protocol):
    """The weights of replicas, which travel before rows. agreed: what ranks must agree on, by name, so that they fit.
    weights_offset: where this rank wants them."""

    agreed: Mapping[str, object]
    weights_offset: int

    def send(self, ready: torch.Tensor) -> None:
        """Sends them to where all ranks want them, int64 [R, NUM_PUBLISHED], on the current stream."""


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
    is_last: bool = True,
    extra_payload: ExtraPayload | None = None,
) -> Iterator[Arrival]:
    """Sends rows of x [T, H] to every rank's `buffer` (on the heap); in forward slots, too. Collective. A context, at
    the end of which all rows have been sent and received. Does not synchronise the host. Forward sets the plan's
    `packed_to_row` and `row_to_packed_row`; backward needs them.

    Args:
        probs: fp32 [T, K], which travel along in forward.
        layout: layout of `buffer`: "packed" [P_cap, H] or "expert-major" [N_cap, H].
        gradients: in backward, index of control.GRADIENTS, what it will collect, the same on all ranks; None: forward.
        division: the division of the SMs until all rows have been sent; None: rows do not travel during GEMMs.
        is_last: False if another trip of the same call follows, which ends with a meeting of nodes.
        rider: what else travels, and has come when all rows have.
    """
    agreed: control.CallFields = {  # so that rows fit the peers' buffers
        "hidden": x.shape[1],
        "dtype": control.DTYPES.index(x.dtype),
        "probs": int(probs is not None),
        "gradients": gradients or 0,
        "layout": control.LAYOUTS.index(layout),
        "schedule": control.SCHEDULES.index("serial" if division is None else "overlapped"),
    }
    if extra_payload is not None:
        number = plan.heap.configurations.number({**agreed, **extra_payload.agreed})
        agreed = {"replicas": 1, "config": number}
    agreed["plan"] = plan.generation
    index = None if gradients is None else _Index(*plan.received_index())
    with ExitStack() as stack:
        if index is None:
            index = stack.enter_context(_new_index(plan, has_probs=probs is not None))
        stack.enter_context(plan.heap.one_call)
        if division is None:
            stack.enter_context(plan.heap._timed("dispatch"))
        tensors = [x] if probs is None else [x, probs]
        come = None
        if plan.nodes is not None:
            come = stack.enter_context(
                plan.nodes.rails.bring_in(tensors, control.PHASE_NODES_OUT, agreed)
            )
        travelling = _token_sources(plan, tensors, come, agreed if is_last else None)
        trip = _Trip(plan, buffer, layout, index, travelling, agreed, division, extra_payload)
        if division is not None:
            with trip.arriving() as parts:
                yield Arrival(parts, index.row_probs, index.row_to_packed_row)
            return
        trip.send()
    yield Arrival(None, index.row_probs, index.row_to_packed_row)


def _token_sources(
    plan: Plan,
    tensors: list[torch.Tensor],
    come: Callable[[], list[torch.Tensor]] | None,
    agreed: control.CallFields | None,
) -> Iterator[tuple[Plan, list[torch.Tensor]]]:
    """What is sent to the ranks of a node, tensors [T, .] with the plan of their tokens: this rank's own, and between
    nodes, once they `come`, the foreign ones. If it is the last trip of its call, which has `agreed` on that, it ends
    with a meeting, see RemoteNodes.meet: its last barrier is next."""
    yield plan.in_node, tensors
    if plan.nodes is not None and come is not None:
        yield plan.nodes.foreign, come()
        if agreed is not None:
            plan.nodes.rails.meet(control.PHASE_NODES_OUT, agreed)


@dataclass(frozen=True, slots=True, eq=False)
class _Index:
    """What the slots of a dispatch say of the rows that come: tensors as in Plan and Arrival."""

    packed_to_row: torch.Tensor
    row_to_packed_row: torch.Tensor
    row_probs: torch.Tensor | None = None
    slots: torch.Tensor | None = None  # where they come, int32 [P_cap, K]; None in backward
    probs: torch.Tensor | None = None  # fp32
    offsets: tuple[int, ...] = ()

    def push(self, tokens: Plan, probs: torch.Tensor | None, ready: torch.Tensor) -> None:
        """Writes slots and probs of tokens to all ranks. probs: fp32 [T, K], or None on all ranks."""
        for region, slots, places in () if self.slots is None else tokens.regions:
            its = (
                (*slots, None if probs is None else probs[region]),
                places,
                tokens.heap.peers,
                ready,
            )
            kernels.for_device(ready.device).push_slots(
                *its, row_column=READY_SLOTS, prob_column=READY_PROBS
            )

    def read(
        self,
        packed: tuple[torch.Tensor, torch.Tensor],
        num_rows: torch.Tensor,
        trip: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Reads the slots of packed rows that have arrived: see the kernel `index_rows`."""
        if self.slots is not None:
            wire = self.slots, None if self.row_probs is None else self.probs
            kernels.for_device(self.slots.device).index_rows(
                wire,
                packed,
                num_rows,
                trip,
                (self.packed_to_row, self.row_to_packed_row, self.row_probs),
            )


@contextmanager
def _new_index(plan: Plan, *, has_probs: bool) -> Iterator[_Index]:
    """A context that leases buffers for slots. If no exception is raised, the plan has the index after it."""
    heap = plan.heap
    shape = (plan.packed_row_capacity, plan.top_k)
    packed_to_row = torch.empty(shape, dtype=torch.int32, device=heap.device)
    row_to_packed_row = torch.empty(plan.row_capacity, dtype=torch.int32, device=heap.device)
    row_probs = (
        torch.empty(plan.row_capacity, dtype=torch.float32, device=heap.device)
        if has_probs
        else None
    )
    with (
        heap.lease(shape, torch.int32, name="received slots", phase=PHASE) as slots,
        heap.lease(shape, torch.float32, name="received probs", phase=PHASE) as probs,
    ):
        offsets = slots.offset, probs.offset
        yield _Index(
            packed_to_row, row_to_packed_row, row_probs, slots.tensor, probs.tensor, offsets
        )
    plan.packed_to_row = packed_to_row
    plan.row_to_packed_row = row_to_packed_row


@dataclass(eq=False)
class _Trip:
    """A dispatch after its first barrier. This rank's own rows travel on the current stream, the others, with a
    division, on a branch."""

    _plan: Plan
    _buffer: torch.Tensor
    _layout: str
    _index: _Index
    _token_sources: Iterator[tuple[Plan, list[torch.Tensor]]]  # see there
    _agreed: control.CallFields
    _division: Division | None
    _rider: ExtraPayload | None
    _num_sent = 0  # steps of _exchange that have sent their rows
    _are_read = True  # whether somebody reads what comes

    def __post_init__(self) -> None:
        self._heap = self._plan.heap
        division = self._division
        extra_payload = self._rider
        self._ops = kernels.for_device(self._buffer.device)
        self._num_ctas = None if division is None else division.num_ctas
        self._rank = self._heap.peers.rank
        self._num_ranks = self._heap.peers.num_ranks
        self._signalled: torch.cuda.Event | None = None  # after which all ranks have sent
        self._come: dict[
            int, torch.cuda.Event | None
        ] = {}  # key: the source whose rows are complete after the event
        with nullcontext() if division is None else self._heap._timed("dispatch"):
            offsets = self._heap._offset_of(self._buffer, phase=PHASE), *self._index.offsets
            if extra_payload is not None:
                offsets = *(*offsets, 0, 0)[:READY_WEIGHTS], extra_payload.weights_offset
            self._ready = self._heap.barrier(
                PHASE, publish=offsets, nan_on_failure=self._buffer, **self._agreed
            )

    def _tokens(self) -> Iterator[tuple[Plan, torch.Tensor]]:
        """The plan and the rows [T, H] of what travels next; its slots have been sent."""
        for tokens, (rows, *values) in self._token_sources:
            self._index.push(tokens, values[0] if values else None, self._ready)
            yield tokens, rows

    def send(self) -> None:
        """Sends and receives everything."""
        if self._rider is not None:
            self._rider.send(self._ready)
        for tokens, rows in self._tokens():
            if self._layout == "packed":
                self._push(rows, tokens)
            else:
                self._push(rows, tokens, but=self._rank)
                self._place_own(rows, tokens)
        arrived = self._heap.barrier(
            control.PHASE_DISPATCH_DONE, nan_on_failure=self._buffer, **self._agreed
        )
        self._receive(None, arrived, None)

    @contextmanager
    def arriving(self) -> Iterator[Iterator[Part]]:
        """The parts. By the end of the context all rows have been sent and received, even after an exception: peers
        wait for this rank's rows, and what they send must not land in memory that has been leased again. Between nodes
        that is so for the rows of this node; for the others the peers wait at a barrier, where they can be told."""
        heap = self._heap
        mark(MUST_ABORT)
        try:
            with heap._timed("dispatch"):
                self._own, self._x = next(self._tokens())
                if (
                    self._rider is not None
                ):  # with all SMs, and before all signals, which say that it has come
                    self._rider.send(self._ready)
                self._branch = heap.streams.branch()
                self._start = self._branch.point()
        except Exception as error:
            heap.abort(error)  # peers wait for signals; only at a barrier could they be told
            raise
        mark(MUST_SIGNAL)
        parts = self._parts()
        try:
            yield parts
            for _ in parts:  # the caller may have left parts
                pass
        except BaseException:
            try:
                self._are_read = False
                with suppress(
                    SymmoeError
                ):  # a wait on a CPU may raise what will be raised again at the next call
                    self._exchange()
            except Exception as error:  # noqa: BLE001 - the exception that led here is raised
                heap.abort(error)
            raise
        finally:
            with must_complete():
                self._branch.join()
            mark(CLEAN)

    def _parts(self) -> Iterator[Part]:
        """Rows of each source rank, after which the current stream comes."""
        plan = self._own
        num_sms = None if self._division is None else self._division.num_sms
        (own, *others), (before, of_own, after) = (
            plan.arrivals,
            self._plan.parts_of_replicas(num_sms),
        )
        with self._heap._timed("dispatch"):
            if self._layout == "packed":
                self._push(self._x, plan, to=self._rank)
            else:
                self._place_own(self._x, plan)
            self._receive(own, self._ready, self._num_ctas)
        yield Part(plan.source_to_rows[own], num_sms)
        # Only after the own part has been launched: where streams share a hardware queue
        # (CUDA_DEVICE_MAX_CONNECTIONS=1) it would start after the last push.
        self._exchange()
        for source in others:
            if source == others[-1]:
                self._branch.wait_for(self._signalled)
                yield from of_own
            if source not in self._come:
                self._forward()
            self._branch.wait_for(self._come[source])
            yield Part(plan.source_to_rows[source], None if source == others[-1] else num_sms)
        yield from (*before, *after)

    def _exchange(self) -> None:
        """Launches, on the branch, what has not been launched: a push to one rank, then what another one has pushed.

        All ranks wait for a push only after their own one of the same step: no two wait for each other.
        """
        heap = self._heap
        num_ranks = self._num_ranks
        with self._branch.after(self._start), heap._timed("dispatch"):
            for step in range(len(self._come) + 1, num_ranks):
                to = (self._rank + step) % num_ranks
                peer = (self._rank - step) % num_ranks
                with must_complete():
                    if (
                        step > self._num_sent
                    ):  # once: after the signal the peer may use its buffer for other rows
                        self._push(self._x, self._own, to=to, num_ctas=self._num_ctas)
                        heap._send_signal(to)
                        self._num_sent = step
                    arrived = heap._wait_for_signal(
                        peer, control.PHASE_DISPATCH_DONE, nan_on_failure=self._buffer
                    )
                source = self._own.arrivals[step]
                self._signalled = self._branch.point()
                if self._are_read:
                    self._receive(source, arrived, self._num_ctas)
                self._come[source] = self._branch.point()

    def _forward(self) -> None:
        """Sends foreign tokens to all ranks of this node, and receives what they have sent of those."""
        with self._branch.after(self._start), self._heap._timed("dispatch"):
            for tokens, rows in self._tokens():  # the foreign ones
                if self._num_ranks == 1 and self._layout == "expert-major":
                    self._place_own(rows, tokens)
                    continue
                for step in range(1, self._num_ranks + 1):
                    self._push(rows, tokens, to=(self._rank + step) % self._num_ranks)
            arrived = self._heap.barrier(
                control.PHASE_DISPATCH_DONE, nan_on_failure=self._buffer, **self._agreed
            )
            for source in self._own.arrivals[self._num_ranks :]:
                self._receive(source, arrived, None)
                self._come[source] = self._branch.point()

    def _push(
        self,
        x: torch.Tensor,
        tokens: Plan,
        to: int | None = None,
        but: int | None = None,
        num_ctas: int | None = None,
    ) -> None:
        """Writes the rows of tokens to one rank of the node, or to all but one."""
        ranks = None if to is None else range(to, to + 1)
        to_row = (
            tokens.token_to_packed_row if self._layout == "packed" else tokens.token_to_primary_row
        )
        trip = self._heap.peers, self._ready
        self._ops.push_rows(
            x, to_row, *trip, column=READY_ROWS, ranks=ranks, but=but, num_ctas=num_ctas
        )

    def _place_own(self, rows: torch.Tensor, tokens: Plan) -> None:
        """Writes tokens to all rows that they have on this rank, in an expert-major buffer."""
        slots = tokens.slot_to_rank, tokens.slot_to_row
        self._ops.place_rows(rows, *slots, self._buffer, self._ready, rank=self._rank)

    def _receive(self, source: int | None, arrived: torch.Tensor, num_ctas: int | None) -> None:
        """Indexes the rows that have come from one source rank or from all, and copies them to secondary rows. arrived:
        result of the wait for them."""
        start = self._plan.in_node.source_to_packed_start
        first, end = (0, len(start) - 1) if source is None else (source, source + 1)
        self._index.read(
            (start[first : first + 1], start[end : end + 1]),
            self._plan.num_present,
            (self._ready, arrived),
        )
        if (
            self._layout == "expert-major" and self._num_ranks > 1
        ):  # the only rank of a node has placed all rows
            index = self._index.packed_to_row, start
            self._ops.fan_out(
                self._buffer, *index, rank=self._heap.rank, source=source, num_ctas=num_ctas
            )
