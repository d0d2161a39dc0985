"""A heap's part for a group that spans several nodes: rendezvous and exchanges with the ranks of this rank's rail, one
of each other node (docs/design/nodes.md). A heap on one node has :class:`faults.NoRemoteNodes` instead.

Waits are a little longer than those in a node: a peer that waits for a rank of its own node stops waiting first, and
reports it. In turn, a rank that misses a rank of its own node, which is waiting for its rail, lets that rank find out
which one is missing.
"""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist

from symmoe import kernels
from symmoe.errors import (
    FAULT_BYTES,
    BackendUnavailable,
    ConfigMismatch,
    SymmoeError,
    encode,
    logger,
    raise_for,
)
from symmoe.kernels import control
from symmoe.nodes.control_channel import (
    ANSWER_S,
    COUNTED,
    FAILED,
    GOES_ON,
    UNRAISED,
    WAITS,
    ControlChannel,
    Header,
)
from symmoe.nodes.nccl import Nccl, NcclError, NcclRail
from symmoe.nodes.rail import BEGUN, ENDED, GlooRail, Pairs, Payload, RailBroken, Started
from symmoe.nodes.reach import DEVICE_VARIABLE, REACH_S, Endpoint, Link, Listener, connect, hello
from symmoe.nodes.topology import Topology, make_rank_maps
from symmoe.program.builder import noted
from symmoe.symm_mem.bootstrap import Bootstrap
from symmoe.symm_mem.faults import Faults, NoRemoteNodes
from symmoe.symm_mem.reports import Fault, Report, mismatch_error, write_word
from symmoe.symm_mem.streams import Access, Branch, Streams, capture_id
from symmoe.symm_mem.waits import ALL_BUT_PLAN, Waits

_HINT = (
    f"{DEVICE_VARIABLE} on each node names its network device; firewalls must let all ports pass"
)
_PATIENCE = 1.25  # times the bound of a wait in a node
_OF_PAYLOAD = (
    0.9  # of that: a rank that has its rows learns at the next rendezvous which rank its peers miss
)
_POLL_S = 1e-3
_MOMENT_S = 1.0
_WATCH_S = 0.05
_LONG_S = 1.0  # on the rail, at most an eighth of the bound: then the peers are informed
_WORD = slice(control.ABORTED, control.RAIL_FAULT + 1)  # the counters that are sent to other nodes


class RemoteNodes(NoRemoteNodes):
    """The nodes of a heap that spans several, from one rank's point of view: the ranks of each node, also as tensors on
    the device (maps); the channel between the hosts of this rank's rail, and the payload for tensors of the heap's
    device. rail_rows: by node, the `rail_rows` of the rank with this rank's index, from the last :meth:`rendezvous`
    that had them."""

    def __init__(
        self,
        topology: Topology,
        waits: Waits,
        streams: Streams,
        access: Access,
        channel: ControlChannel,
        payload: Payload,
    ) -> None:
        self.topology = topology
        self.maps = make_rank_maps(topology, waits.device)
        self.channel = channel
        self.payload = payload
        self.turn = access
        self._waits = waits
        self._streams = streams
        self._counters = waits.peers.counters(waits.peers.rank)
        self._phase = control.PHASE_START
        self.rail_rows: list[int] = []
        self._past_calls: set[int] = set()  # others may take start_timeout_s
        self._is_first = True
        self._has_announced = False
        self._ends = threading.Event()
        self._waits_since = math.inf  # when the host began to wait for other nodes
        self._exchange = 0
        self._begun_s = 0.0
        self._is_marked = False  # as _check_exchange has seen it
        self._branch = Branch(streams.rail_stream)
        self._is_moving = False
        self._started: Started = []  # tensors in transfer, also after the wait for them has ended
        with torch.inference_mode(False):
            word = self._counters[_WORD]
            self._fault = self._counters[control.RAIL_FAULT :][:1]
            self._peer_words = torch.zeros(
                (topology.num_nodes, len(word)), dtype=torch.int64, device=waits.device
            )
            self._word_to_nodes = [(node, word) for node in range(topology.num_nodes)]
            self._words_from_nodes = [*enumerate(self._peer_words)]
        # Its first launch must not come while ranks exchange, see reports.py.
        kernels.for_device(waits.device).receive_fault_flags(self._peer_words, self._fault)

    @property
    def constants(self) -> list[torch.Tensor]:
        """Tensors of this object that programs use."""
        values = (
            *vars(self.maps).values(),
            self._peer_words,
            self._fault,
            self.payload.progress,
            self.payload.counts,
        )
        return [value for value in values if isinstance(value, torch.Tensor)]

    # -- calls: errors are raised ---------------------------------------------------------------------------------

    @noted(is_in_order=True)
    def rendezvous(
        self,
        phase: int,
        *,
        sizes: int = 0,
        rail_rows: int | None = None,
        rail_plan: int = 0,
        **agreed: Any,
    ) -> None:
        """The host waits for the hosts of its rail, with a bound a little longer than a barrier's. Collective over the
        group. If the last barrier of a call comes right after a rendezvous, an earlier error of any rank reaches all
        ranks of all nodes. Does not wait for the device.

        Args:
            sizes: a number for the lengths of messages, on which these ranks must agree, as on the other arguments.
            rail_rows: rows that fit in this rank's messages, or None on all ranks: see :attr:`rail_rows`.
            rail_plan: the number of the plan for these ranks, instead of the number for the ranks of a node.
            phase, agreed: as in :meth:`SymmetricHeap.barrier`.
        """
        call = control.pack_call(**{**agreed, "phase": phase, "plan": rail_plan})
        with self.turn:
            raise_for(self.faults.resolve_answer(self.enter(call, sizes, rail_rows), call))

    @contextmanager
    def transfer(self, sends: Pairs, receives: Pairs) -> Iterator[Callable[[], None]]:
        """A context after :meth:`rendezvous` in which tensors go to and come from every other node (see Payload.begin),
        while the host, and on GPUs the current stream, do other work. Collective over the group; one at a time. At its
        end all tensors have arrived, also after an exception, unless a peer is lost. Yields a function that waits for
        them, on GPUs for later work of the current stream. Received tensors are valid only after the next barrier, or
        if the kernel `other_counts` has found no failure."""
        with self.turn:
            self.begin(sends, receives)
        try:
            yield self._complete_transfer
        except BaseException:
            self.abandon()
            raise
        self._complete_transfer()

    @contextmanager
    def playing(self) -> Iterator[None]:
        """A context for a program that repeats calls of this object."""
        try:
            with self._reporting():
                yield
        except BaseException:
            self.abandon()
            raise

    def _complete_transfer(self) -> None:
        """Waits for the transfer, unless it was waited for. The next barrier gets the peers' fault flags."""
        if self._is_moving:
            self.end()
            if self.faults.poison is None:
                kernels.for_device(self._peer_words.device).receive_fault_flags(
                    self._peer_words, self._fault
                )

    def abandon(self) -> None:
        """Waits for the transfer after an exception. The exception is raised, not the error of a lost peer. The peers'
        fault flags belong to a call that is over."""
        with suppress(SymmoeError):
            self.end()
        self.payload.settle()

    def begin(self, sends: Pairs, receives: Pairs) -> None:
        """Begins to move tensors, see Payload.begin, after all ranks have met and continue; also fault flags, which may
        be set meanwhile. On GPUs later work of the current stream runs at the same time."""
        self._is_moving = True
        with self._branch.after(self._branch.point()):
            self.payload.count(BEGUN)
            try:
                self._move(sends, receives)
            finally:
                self.payload.count(ENDED)

    @noted(is_in_order=True)
    def _move(self, sends: Pairs, receives: Pairs) -> None:
        with self._reporting():
            self._started = self.payload.begin(
                [*sends, *self._word_to_nodes],
                [*receives, *self._words_from_nodes],
                self._streams.rail_stream,  # not the current stream, in a program
            )

    def end(self) -> None:
        """Waits for the transfer. After a failure only the device waits: data that may still arrive keeps its memory
        until the rail ends."""
        self._is_moving = False
        self._branch.join()
        if self.payload.counts is None and self.faults.poison is None:
            self._wait()

    @noted(is_in_order=True)
    def _wait(self) -> None:
        with self._on_rail(), self._reporting():
            self.payload.wait(self._started, self._bound_s * _OF_PAYLOAD)
        self._started = []

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """A context in which errors of the rail become errors of the heap."""
        try:
            yield
            return
        except RailBroken as broken:
            report = self._report_missing(broken)
        except NcclError:
            report = self._find_missing(is_lost=True)
        with self.turn:
            raise_for(self.faults.poison_with(report))

    # -- for errors, see NoRemoteNodes: a Report as the result means that a peer is gone --------------------------

    def node_of(self, rank: int) -> int | None:
        return None if rank < 0 else self.topology.node_of(rank)

    def enter(
        self, call: int, sizes: int = 0, rail_rows: int | None = None
    ) -> Fault | Report | None:
        kind = call & ALL_BUT_PLAN
        self._phase = call & 0xFF
        self._is_first = self._waits.compiles and kind not in self._past_calls
        self.channel.announce(Header(GOES_ON, call=call, sizes=sizes, rail_rows=rail_rows or 0))
        headers = self._receive_headers()
        if isinstance(headers, Report):
            return headers
        fault = _first_fault(headers) or self._mismatch(headers)
        if fault is None:
            self._past_calls.add(kind)
            self.payload.bound(self._bound_s * _OF_PAYLOAD)  # of later transfers
            if rail_rows is not None:
                self.rail_rows = [header.rail_rows for header in headers]
        return fault

    def announce(self, fault: Fault) -> None:
        self.channel.announce(
            Header(
                UNRAISED if fault.is_unraised else FAILED,
                origin=fault.origin,
                message=fault.message,
            )
        )
        self._has_announced = True

    def exchange(self, fault: Fault) -> Fault | Report:
        if not self._has_announced:
            self.announce(fault)
        self._has_announced = False
        self._is_first = self._waits.compiles and not self._past_calls
        headers = self._receive_headers()
        return headers if isinstance(headers, Report) else _first_fault(headers) or fault

    def has_reported_cause(self, peer: int) -> bool:
        """See NoRemoteNodes. Waits while the peer waits for its rail, a little longer than the peer can."""
        peer_counters = self._waits.peers.counters(peer)
        own_mailbox = self._waits.peers.mailbox(self._waits.peers.rank)
        deadline = time.monotonic() + self._bound_s
        self.channel.announce_once(Header(WAITS))
        while True:
            with self._streams.at_once():
                is_on_rail = bool(peer_counters[control.ON_RAIL])
                has_reported = any(
                    slots[peer][0] >= control.ABORT for slots in own_mailbox.tolist()
                )
            if has_reported or not is_on_rail or time.monotonic() > deadline:
                return has_reported
            time.sleep(_POLL_S)

    @contextmanager
    def reporting_abort(self, sender: int, report: Report) -> Iterator[None]:
        """See NoRemoteNodes. GPU work of the context may wait for running work, such as an exchange that only the
        payload's end ends."""
        self.channel.abort(sender, report.pack())
        timer = threading.Timer(_MOMENT_S, self.payload.end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            self.payload.end()

    # -- on the rail ----------------------------------------------------------------------------------------------

    def start(self, faults: Faults) -> None:
        """Takes the heap's faults, and starts a thread that looks for exchanges that do not end, if nothing else bounds
        them. The thread ends with this object."""
        # The faults refer to this object: a cycle would keep a dropped heap's memory.
        self.faults: Faults = weakref.proxy(faults)
        ended = self._ends
        reference = weakref.ref(self)

        def run() -> None:
            try:
                while not ended.wait(_WATCH_S):
                    nodes = reference()
                    if nodes is None or not nodes._check_exchange():
                        return
                    del nodes
            except Exception as problem:  # noqa: BLE001 - e.g. a broken GPU
                logger.warning(
                    "exchanges between nodes are no longer watched: %s: %s",
                    type(problem).__name__,
                    problem,
                )

        if self.payload.progress is not None:
            threading.Thread(target=run, name="symmoe-rail", daemon=True).start()

    def close(self) -> None:
        """Ends the connections. Local."""
        self._ends.set()
        self.payload.close()
        self.channel.close()
        self._started.clear()  # these tensors would keep connections open

    def _check_exchange(self) -> bool:
        """Records an overdue exchange, and shows this node's peers whether this rank waits for its rail. Whether to go
        on. Without a problem it calls no CUDA function: a call from a thread that is not capturing would end a
        capture."""
        begun, ended = self.payload.moved
        now = time.monotonic()
        bound_s = self.payload.bound_s
        if begun != self._exchange:
            self._exchange = begun
            self._begun_s = now
        is_moving = begun > ended
        since = min(now, self._waits_since, self._begun_s if is_moving else now)
        is_long = now - since > min(_LONG_S, bound_s / 8)
        if is_long != self._is_marked:
            with self._streams.at_once():
                write_word(self._counters[control.ON_RAIL], int(is_long))
            self._is_marked = is_long
        lost, abort_header = self.channel.look()
        if max(self.channel.counted.values()) >= 0:  # a host asks
            self.channel.announce_once(Header(COUNTED, begun + ended))
        if not (is_moving and is_long):
            return True
        is_lost = bool(lost or self.payload.problem())
        if not (is_lost or abort_header or now - self._begun_s > bound_s):
            return True
        with suppress(ReferenceError):  # the heap was freed
            self.overdue = self._find_missing(is_lost)
            self.faults.note_overdue(self.overdue)
            self.payload.end()  # also if an earlier error has blocked the heap
        return False

    def _find_missing(self, is_lost: bool) -> Report:
        """The report of the rank that is missing in an exchange on the device, found here or by another rank. NCCL does
        not name it. So hosts exchange the progress of their devices: missing is a host without an answer, or else the
        host whose device is behind, the first of several. is_lost: whether the network reports a closed connection."""
        self.channel.announce_once(Header(COUNTED, sum(self.payload.moved)))
        counted = self.channel.counted
        deadline = time.monotonic() + ANSWER_S
        while True:
            lost, abort_header = self.channel.look()
            is_settled = abort_header or lost or len(counted) == 1 or min(counted.values()) >= 0
            if is_settled or time.monotonic() > deadline or self._ends.wait(_WATCH_S):
                node = min(lost or counted, key=lambda node: (counted[node], node))
                return self._missing_report(node, abort_header, lost=bool(is_lost or lost))

    @contextmanager
    def _on_rail(self) -> Iterator[None]:
        """The host waits for its rail in this context. After an error its node sees the wait until it ends."""
        if self.payload.progress is None:
            write_word(self._counters[control.ON_RAIL], 1)
            yield
            write_word(self._counters[control.ON_RAIL], 0)
        elif capture_id(self._counters.device):
            yield  # the watch would write for peers, which would end the capture
        else:
            self._waits_since = time.monotonic()
            yield
            self._waits_since = math.inf

    @property
    def _bound_s(self) -> float:
        return self._waits.bound(self._is_first)[1] * _PATIENCE

    def _receive_headers(self) -> list[Header] | Report:
        try:
            with self._on_rail():
                return self.channel.receive(self._bound_s)
        except RailBroken as broken:
            return self.overdue or self._report_missing(broken)

    def _report_missing(self, broken: RailBroken) -> Report:
        abort_header = broken.abort_header or (
            None if broken.is_late else self.channel.last_message(broken.node)
        )
        return self._missing_report(broken.node, abort_header, lost=not broken.is_late)

    def _missing_report(self, node: int, abort_header: Header | None, *, lost: bool) -> Report:
        """The report of a missing node, or of a node that has aborted."""
        if abort_header is not None:
            return Report.unpack(abort_header.message)._replace(sender=abort_header.origin)
        return Report(
            "",
            missing=self.topology.rail[node],
            phase=self._phase,
            expected=self.channel.number,
            seen=self.channel.number - 1,
            first=int(self._is_first),
            lost=int(lost),
        )

    def _mismatch(self, headers: list[Header]) -> Fault | None:
        """The fault if the peers are in different calls."""
        first = self.topology.rail[0]
        for rank, header in zip(self.topology.rail, headers, strict=True):
            if header.call != headers[0].call:
                error = mismatch_error(
                    self._waits.configurations, first, headers[0].call, rank, header.call
                )
                return Fault(-1, encode(error))
            if header.sizes != headers[0].sizes:
                error = ConfigMismatch(
                    f"rail_capacity or top_k differs between rank {first} and rank {rank}"
                )
                return Fault(-1, encode(error))
        return None


def _first_fault(headers: list[Header]) -> Fault | None:
    """The fault of the first rank that has one; faults of UNKNOWN origin come last."""
    failed = [header for header in headers if header.kind in (FAILED, UNRAISED)]
    if not failed:
        return None
    first = min(failed, key=lambda header: header.origin)
    return Fault(
        first.origin,
        first.message[:FAULT_BYTES],
        all(header.kind == UNRAISED for header in headers),
    )


# -- construction -------------------------------------------------------------------------------------------------


def make_count_peers(peers: control.Peers, topology: Topology) -> control.Peers:
    """The peers of the count table, which has a row for each rank of the group: a rank of another node is replaced by
    the rank with its index here."""
    local = [
        ranks.index(rank)
        for rank in range(peers.layout.num_rows)
        for ranks in topology.nodes
        if rank in ranks
    ]
    return control.Peers(
        rank=topology.rank,
        num_ranks=peers.layout.num_rows,
        bases=peers.bases[torch.tensor(local, device=peers.bases.device)],
        views=tuple(peers.views[rank] for rank in local),
        layout=peers.layout,
    )


def start_rail(
    bootstrap: Bootstrap, topology: Topology, device: torch.device, timeout_s: float
) -> tuple[ControlChannel, Payload]:
    """The channel between the hosts of this rank's rail, and the payload for tensors of `device`. Collective over the
    group. Connections of hosts and connections of GPUs each have half of the bound, so that connected ranks still wait
    when other ranks abort. BackendUnavailable: on every rank, if two ranks cannot connect. The text names both ranks,
    and what to check."""
    token = bytes.fromhex(bootstrap.gather(os.urandom(16).hex())[0])
    options = {"node": topology.node, "num_nodes": topology.num_nodes, "timeout_s": timeout_s / 2}
    with ExitStack() as unused:
        channel = ControlChannel(
            _connect_hosts(bootstrap, topology, token, min(REACH_S, timeout_s / 2))
        )
        unused.callback(channel.close)
        # A rail's own part of the store, so that attempts do not meet.
        store = dist.PrefixStore(f"symmoe/{token.hex()}/{topology.local_rank}", bootstrap.store)  # type: ignore[attr-defined]
        payload = _make_payload(bootstrap, topology, device, store, options, unused)
        # Ranks must cut their calls alike.
        payload.bytes_per_s = min(bootstrap.gather(payload.bytes_per_s))
        unused.pop_all()
    return channel, payload


def _connect_hosts(
    bootstrap: Bootstrap, topology: Topology, token: bytes, timeout_s: float
) -> dict[int, Link]:
    """The links by node. Raises on all ranks if two ranks of a rail cannot connect. Collective."""
    peers = [rank for rank in topology.rail if rank != topology.rank]
    with bootstrap.attempt(Listener) as listener, ExitStack() as unused:
        gathered = bootstrap.gather(listener.endpoint)
        endpoints = {rank: Endpoint(*gathered[rank]) for rank in peers}
        connected, failed = connect(endpoints, timeout_s, hello(token, topology.rank))
        problem = None
        for connection in connected.values():
            unused.callback(connection.close)
        if failed:
            (rank, reason), *_ = failed.items()
            problem = BackendUnavailable(
                f"rank {topology.rank} on node {topology.node} cannot connect to rank {rank} on node "
                f"{topology.node_of(rank)} at {endpoints[rank]}: {reason}; {_HINT}"
            )
        bootstrap.agree(problem)
        accepted = bootstrap.attempt(lambda: listener.accept(peers, token, timeout_s))
        unused.pop_all()
    return {topology.node_of(rank): Link(connected[rank], accepted[rank]) for rank in peers}


def _make_payload(
    bootstrap: Bootstrap,
    topology: Topology,
    device: torch.device,
    store: Any,
    options: dict[str, Any],
    unused: ExitStack,
) -> Payload:
    """The payload, which `unused` closes. Collective."""
    # Together: a rank without NCCL would keep the others waiting.
    library = None if device.type == "cpu" else bootstrap.attempt(Nccl)

    def make() -> Payload:
        try:
            payload = (
                GlooRail(store, **options)
                if library is None
                else NcclRail(library, store, **options)
            )
        except RuntimeError as error:
            if library is not None:
                raise  # an error of CUDA's
            reason = str(error).split("\n", 1)[0]
            raise BackendUnavailable(
                f"rank {topology.rank} on node {topology.node} does not connect to its rail, ranks {topology.rail}: "
                f"{reason}; {_HINT}"
            ) from error
        unused.callback(payload.close)
        return payload

    return bootstrap.attempt(make)
