"""The dispatch trip without autograd: rows of tokens travel to the ranks of their experts (docs/design/trips.md).

The receive buffer is packed [P, H], one row per (token, rank), from which readers gather through
`row_to_packed_row`, or expert-major [N, H]. Forward sends rows and slots (a token's rows on the rank, and their
probs); backward sends only rows.

Without a division of the SMs, all rows travel between two barriers. With a division, rows travel on a branch stream
while GEMMs run ("Overlap"): a rank can begin with its own rows, continue with the rows of the rank before it, and so on
(`plan.arrivals`). Between nodes, the ranks of a node do this with their own tokens. Foreign tokens are the last parts,
and a barrier signals their arrival.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Protocol

import torch

from symmoe import kernels
from symmoe.dispatch.plan import Plan, ReceivedIndex
from symmoe.errors import SymmoeError
from symmoe.kernels import control
from symmoe.kernels.gemm_parts import Division, Part
from symmoe.program.builder import mark, must_complete
from symmoe.program.program import CLEAN, MUST_ABORT, MUST_SIGNAL

PHASE = control.PHASE_DISPATCH_READY  # the trip's first barrier
# Columns of the words that the ready barrier publishes: where a rank receives each of these, the last for replicas.
READY_ROWS, READY_SLOTS, READY_PROBS, READY_WEIGHTS = range(4)


@dataclass(frozen=True, slots=True)
class Arrival:
    """Rows that have arrived (no parts), or are in flight. In flight, there is a part per source rank, in order of
    arrival: rows of the local experts, readable on the current stream from then on, and SMs for their GEMMs. Tensors
    [N_cap] are complete for the yielded parts."""

    parts: Iterator[Part] | None
    row_probs: torch.Tensor | None  # fp32; None without probs
    index: ReceivedIndex


class ExtraPayload(Protocol):
    """The weights of replicas, which travel before rows. agreed: values that ranks must agree on, by name, so that the
    weights fit. weights_offset: where this rank receives them."""

    agreed: Mapping[str, object]
    weights_offset: int

    def send(self, ready: torch.Tensor) -> None:
        """Sends the weights to the published offsets of all ranks, int64 [R, NUM_PUBLISHED], on the current stream."""


@contextmanager
def dispatch(
    x: torch.Tensor,
    plan: Plan,
    buffer: torch.Tensor,
    probs: torch.Tensor | None = None,
    *,
    layout: str,
    index: ReceivedIndex | None = None,
    gradients: int = 0,
    division: Division | None = None,
    is_last: bool = True,
    extra_payload: ExtraPayload | None = None,
) -> Iterator[Arrival]:
    """Sends rows of x [T, H], and in forward slots, to every rank's `buffer` (on the heap). Collective. A context: at
    its end all rows have been sent and received. Does not synchronise the host.

    Args:
        probs: fp32 [T, K], which travel along in forward.
        layout: layout of `buffer`: "packed" [P_cap, H] or "expert-major" [N_cap, H].
        index: in backward, of the forward dispatch; None: forward, which also sends slots and makes the index.
        gradients: in backward, index of control.GRADIENTS, the gradients to collect, equal on all ranks.
        division: the division of the SMs until all rows have been sent; None: rows do not travel during GEMMs.
        is_last: False if another trip of the same call follows, which ends with a barrier of nodes.
        extra_payload: other data that travels, complete when all rows are.
    """
    agreed: control.CallFields = {  # rows must fit the peers' buffers
        "hidden": x.shape[1],
        "dtype": control.DTYPES.index(x.dtype),
        "probs": int(probs is not None),
        "gradients": gradients,
        "layout": control.LAYOUTS.index(layout),
        "schedule": control.SCHEDULES.index("serial" if division is None else "overlapped"),
    }
    if extra_payload is not None:
        config = plan.heap.configurations.number({**agreed, **extra_payload.agreed})
        agreed = {"replicas": 1, "config": config}
    agreed["plan"] = plan.generation
    with ExitStack() as stack:
        if index is None:
            slots = stack.enter_context(_received_slots(plan, has_probs=probs is not None))
        else:
            slots = _ReceivedSlots(index)
        stack.enter_context(plan.heap.one_call)
        if division is None:
            stack.enter_context(plan.heap._timed("dispatch"))
        tensors = [x] if probs is None else [x, probs]
        wait_for_foreign = (
            None
            if plan.nodes is None
            else stack.enter_context(
                plan.nodes.rails.exchange_tokens(
                    tensors, control.PHASE_NODES_OUT, agreed, sends_maps=index is None
                )
            )
        )
        sources = _token_sources(plan, tensors, wait_for_foreign, agreed if is_last else None)
        trip = _Trip(plan, buffer, layout, slots, sources, agreed, division, extra_payload)
        if division is not None:
            with trip.arriving() as parts:
                yield Arrival(parts, slots.row_probs, slots.index)
            return
        trip.send()
    yield Arrival(None, slots.row_probs, slots.index)


def _token_sources(
    plan: Plan,
    tensors: list[torch.Tensor],
    wait_for_foreign: Callable[[], list[torch.Tensor]] | None,
    agreed: control.CallFields | None,
) -> Iterator[tuple[Plan, list[torch.Tensor]]]:
    """Yields tensors [T, .] to send to the ranks of a node, with the plan of their tokens: this rank's own tokens, and
    between nodes the foreign ones. The last trip of a call (`agreed` is not None) ends with a barrier of nodes, see
    RemoteNodes.rendezvous, before its last barrier."""
    yield plan.in_node, tensors
    if plan.nodes is not None and wait_for_foreign is not None:
        yield plan.nodes.foreign_plan, wait_for_foreign()
        if agreed is not None:
            plan.nodes.rails.rendezvous(control.PHASE_NODES_OUT, agreed)


@dataclass(frozen=True, slots=True, eq=False)
class _ReceivedSlots:
    """The slots that travel with rows. The index of received rows is computed from them: tensors as in Arrival."""

    index: ReceivedIndex
    row_probs: torch.Tensor | None = None
    slots: torch.Tensor | None = None  # their buffer, int32 [P_cap, K]; None in backward
    probs: torch.Tensor | None = None  # fp32
    offsets: tuple[int, ...] = ()

    def push(self, tokens: Plan, probs: torch.Tensor | None, ready: torch.Tensor) -> None:
        """Writes slots and probs of tokens to all ranks. probs: fp32 [T, K], or None on all ranks."""
        for region, slots, maps in () if self.slots is None else tokens.regions:
            kernels.for_device(ready.device).push_slots(
                (*slots, None if probs is None else probs[region]),
                maps,
                tokens.heap.peers,
                ready,
                row_column=READY_SLOTS,
                prob_column=READY_PROBS,
            )

    def read(
        self,
        packed: tuple[torch.Tensor, torch.Tensor],
        num_rows: torch.Tensor,
        trip: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Reads the slots of the packed rows that have arrived: see the kernel `index_rows`."""
        if self.slots is not None:
            wire = self.slots, None if self.row_probs is None else self.probs
            kernels.for_device(self.slots.device).index_rows(
                wire,
                packed,
                num_rows,
                trip,
                (*self.index, self.row_probs),
            )


@contextmanager
def _received_slots(plan: Plan, *, has_probs: bool) -> Iterator[_ReceivedSlots]:
    """A context that leases buffers for slots."""
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
        index = ReceivedIndex(packed_to_row, row_to_packed_row)
        yield _ReceivedSlots(index, row_probs, slots.tensor, probs.tensor, offsets)


@dataclass(eq=False)
class _Trip:
    """A dispatch after its first barrier. This rank's own rows travel on the current stream; with a division, the other
    rows travel on a branch."""

    _plan: Plan
    _buffer: torch.Tensor
    _layout: str
    _slots: _ReceivedSlots
    _token_sources: Iterator[tuple[Plan, list[torch.Tensor]]]  # see _token_sources
    _agreed: control.CallFields
    _division: Division | None
    _extra_payload: ExtraPayload | None
    _num_sent = 0  # steps of _exchange that have sent their rows
    _indexes_rows = True  # whether received rows are indexed; False after an exception

    def __post_init__(self) -> None:
        self._heap = self._plan.heap
        division = self._division
        self._ops = kernels.for_device(self._buffer.device)
        self._num_ctas = None if division is None else division.num_ctas
        self._rank = self._heap.peers.rank
        self._num_ranks = self._heap.peers.num_ranks
        self._signalled: torch.cuda.Event | None = None  # after which all ranks have sent
        # By source rank, the event after which the rows of its tokens are complete.
        self._complete: dict[int, torch.cuda.Event | None] = {}
        with nullcontext() if division is None else self._heap._timed("dispatch"):
            offsets = self._heap._offset_of(self._buffer, phase=PHASE), *self._slots.offsets
            if self._extra_payload is not None:
                # A pass may carry fewer: zeros up to the column of the weights.
                offsets = *(*offsets, 0, 0)[:READY_WEIGHTS], self._extra_payload.weights_offset
            self._ready = self._heap.barrier(
                PHASE, publish=offsets, nan_on_failure=self._buffer, **self._agreed
            )

    def _tokens(self) -> Iterator[tuple[Plan, torch.Tensor]]:
        """Yields the plan and the rows [T, H] to send next, after their slots have been sent."""
        for tokens, (rows, *values) in self._token_sources:
            self._slots.push(tokens, values[0] if values else None, self._ready)
            yield tokens, rows

    def send(self) -> None:
        """Sends and receives all rows."""
        if self._extra_payload is not None:
            self._extra_payload.send(self._ready)
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
        wait for this rank's rows, and their rows must not arrive in memory that has been leased again. Between nodes
        this holds for the rows of this node; for other rows the peers wait at a barrier, which can signal an error."""
        heap = self._heap
        mark(MUST_ABORT)
        try:
            with heap._timed("dispatch"):
                self._own_plan, self._x_TH = next(self._tokens())
                # With all SMs, and before the signals of its arrival.
                if self._extra_payload is not None:
                    self._extra_payload.send(self._ready)
                self._branch = heap.streams.branch()
                self._start = self._branch.point()
        except Exception as error:
            heap.abort(error)  # peers wait for signals, which carry no error
            raise
        mark(MUST_SIGNAL)
        parts = self._parts()
        try:
            yield parts
            for _ in parts:  # the caller may have stopped early
                pass
        except BaseException:
            try:
                self._indexes_rows = False
                # A wait on a CPU may raise an error that the next call raises again.
                with suppress(SymmoeError):
                    self._exchange()
            except Exception as error:  # noqa: BLE001 - the first exception is raised
                heap.abort(error)
            raise
        finally:
            with must_complete():
                self._branch.join()
            mark(CLEAN)

    def _parts(self) -> Iterator[Part]:
        """Yields the rows of each source rank, ready on the current stream."""
        plan = self._own_plan
        num_sms = None if self._division is None else self._division.num_sms
        own_source, *peers = plan.arrivals
        before, own_replicas, after = self._plan.parts_of_replicas(num_sms)
        with self._heap._timed("dispatch"):
            if self._layout == "packed":
                self._push(self._x_TH, plan, to=self._rank)
            else:
                self._place_own(self._x_TH, plan)
            self._receive(own_source, self._ready, self._num_ctas)
        yield Part(plan.source_to_rows[own_source], num_sms)
        # Only after the own part has been launched: where streams share a hardware queue
        # (CUDA_DEVICE_MAX_CONNECTIONS=1) it would start after the last push.
        self._exchange()
        for source in peers:
            if source == peers[-1]:
                self._branch.wait_for(self._signalled)
                yield from own_replicas
            if source not in self._complete:
                self._exchange_foreign()
            self._branch.wait_for(self._complete[source])
            yield Part(plan.source_to_rows[source], None if source == peers[-1] else num_sms)
        yield from (*before, *after)

    def _exchange(self) -> None:
        """Launches the remaining steps on the branch: a push to one rank, then the receipt of another rank's push.

        All ranks wait for a push only after their own push of the same step, so there is no deadlock.
        """
        heap = self._heap
        num_ranks = self._num_ranks
        with self._branch.after(self._start), heap._timed("dispatch"):
            for step in range(len(self._complete) + 1, num_ranks):
                to = (self._rank + step) % num_ranks
                peer = (self._rank - step) % num_ranks
                with must_complete():
                    # Once: after the signal the peer may reuse its buffer.
                    if step > self._num_sent:
                        self._push(self._x_TH, self._own_plan, to=to, num_ctas=self._num_ctas)
                        heap._send_signal(to)
                        self._num_sent = step
                    arrived = heap._wait_for_signal(
                        peer, control.PHASE_DISPATCH_DONE, nan_on_failure=self._buffer
                    )
                source = self._own_plan.arrivals[step]
                self._signalled = self._branch.point()
                if self._indexes_rows:
                    self._receive(source, arrived, self._num_ctas)
                self._complete[source] = self._branch.point()

    def _exchange_foreign(self) -> None:
        """Sends foreign tokens to all ranks of this node, and receives the foreign tokens that they send."""
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
            for source in self._own_plan.arrivals[self._num_ranks :]:
                self._receive(source, arrived, None)
                self._complete[source] = self._branch.point()

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
        token_to_row_TR = (
            tokens.token_to_packed_row if self._layout == "packed" else tokens.token_to_primary_row
        )
        self._ops.push_rows(
            x,
            token_to_row_TR,
            self._heap.peers,
            self._ready,
            column=READY_ROWS,
            ranks=ranks,
            but=but,
            num_ctas=num_ctas,
        )

    def _place_own(self, rows: torch.Tensor, tokens: Plan) -> None:
        """Writes tokens to all of their rows on this rank, in an expert-major buffer."""
        self._ops.place_rows(
            rows,
            tokens.slot_to_rank,
            tokens.slot_to_row,
            self._buffer,
            self._ready,
            rank=self._rank,
        )

    def _receive(self, source: int | None, arrived: torch.Tensor, num_ctas: int | None) -> None:
        """Indexes the rows received from one source rank or from all, and copies them to secondary rows. arrived: the
        result of the wait for these rows."""
        start = self._plan.in_node.source_to_packed_start
        first, end = (0, len(start) - 1) if source is None else (source, source + 1)
        self._slots.read(
            (start[first : first + 1], start[end : end + 1]),
            self._plan.num_present,
            (self._ready, arrived),
        )
        # The only rank of a node has placed all rows.
        if self._layout == "expert-major" and self._num_ranks > 1:
            self._ops.fan_out(
                self._buffer,
                self._slots.index.packed_to_row,
                start,
                rank=self._heap.rank,
                source=source,
                num_ctas=num_ctas,
            )
