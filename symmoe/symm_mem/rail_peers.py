"""What this rank and those of its rail, one of each other node (rail peers), tell each other: headers, errors, reports.

Hosts meet before every exchange between nodes. On GPUs they know nothing yet of what the device is about to find: so
with every exchange goes word of faults that it knows of. Waits are a little longer than those in a node: a peer that
waits for a rank of its own node gives that one up first, and says so. In turn a rank that misses one of its own node,
which is waiting for its rail, lets that one find out who is missing.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from symmoe.errors import FAULT_BYTES, ConfigMismatch, encode
from symmoe.kernels import control
from symmoe.nodes.lane import FAILED, GAVE_UP, GOES_ON, UNRAISED, Header, Lane
from symmoe.nodes.nccl import NcclError
from symmoe.nodes.rail import Messages, Payload, RailBroken, Started
from symmoe.nodes.topology import Topology
from symmoe.symm_mem.faults import OneNode
from symmoe.symm_mem.reports import Fault, Report, counters, mailbox, mismatch_error, write_word
from symmoe.symm_mem.streams import Access, Branch, NoStreams, StreamOrder, capture_id
from symmoe.symm_mem.waits import ALL_BUT_PLAN, Waits

logger = logging.getLogger("symmoe")

_PATIENCE = 1.25  # times the bound of a wait in a node
_OF_PAYLOAD = 0.9  # of that: who has its rows hears at the next meeting from those that have not whom they miss
_POLL_S = 1e-3
_MOMENT_S = 1.0
_WATCH_S = 0.02
_PROBE_S = 0.25  # how often an exchange that takes long is asked whether a connection has closed
_LONG_S = 1.0  # on the rail, but no more than an eighth of the bound: then the peers are told
_WORD = slice(control.ABORTED, control.RAIL_FAULT + 1)  # the counters that other nodes are told


class RailPeers(OneNode):
    """The ranks of this rank's rail. Methods return what has gone wrong; symm_mem/faults.py makes errors of it.

    A Report among the results means that a peer is gone: only give_up and close work then.

    Args:
        lane, payload: between the hosts, and for tensors of the heap's device.

    Attributes:
        lane, payload: as given.
        num_tokens: by node, what its rank has brought to the last meeting.
    """

    def __init__(
        self,
        lane: Lane,
        payload: Payload,
        topology: Topology,
        waits: Waits,
        streams: StreamOrder | NoStreams,
        access: Access,
    ) -> None:
        self.lane, self.payload, self.turn = lane, payload, access
        self.num_tokens: list[int] = []
        self._topology, self._waits, self._phase = topology, waits, control.PHASE_START
        self._peers, self._counters, self._streams = waits.peers, counters(waits.peers), streams
        self._known_calls: set[int] = set()  # others may take start_timeout_s
        self._is_first = True
        self._has_said = False
        self._watch = None if payload.progress is None else RailWatch(payload, self._mark_on_rail, lane.find_lost)
        self._watch_ends: threading.Event | None = None
        self.branch = Branch(None)
        self._started: Started = []  # tensors that travel, also where nobody waits for them any more
        with torch.inference_mode(False):
            self._told = torch.zeros_like(self._counters[_WORD])
            self._heard = self._told.new_zeros((topology.num_nodes, len(self._told)))
        self.hear()  # so that it is not launched for the first time while ranks exchange, see inbox.py

    def node_of(self, rank: int) -> int | None:
        return None if rank < 0 else self._topology.node_of(rank)

    def meet(self, call: int, sizes: int = 0, num_tokens: int = 0) -> Fault | Report | None:
        """Meets all rail peers, which must be in the same call. Collective.

        Args:
            call: as in control.pack_call.
            sizes: an integer that must be the same, of what says how long the messages are.
            num_tokens: of this rank, for the peers.

        Returns:
            None if all go on; the same Fault on all ranks of the rail if not.
        """
        kind = call & ALL_BUT_PLAN
        self._phase, self._is_first = call & 0xFF, kind not in self._known_calls
        self.lane.say(Header(GOES_ON, call=call, sizes=sizes, num_tokens=num_tokens))
        headers = self._hear()
        if isinstance(headers, Report):
            return headers
        fault = _first_fault(headers) or self._difference(headers)
        if fault is None:
            self._known_calls.add(kind)
            self.num_tokens = [header.num_tokens for header in headers]
        return fault

    def say(self, fault: Fault) -> None:
        kind = UNRAISED if fault.is_unraised else FAILED
        self.lane.say(Header(kind, origin=fault.origin, message=fault.message))
        self._has_said = True

    def tell(self, fault: Fault) -> Fault | Report:
        if not self._has_said:
            self.say(fault)
        self._has_said, self._is_first = False, not self._known_calls
        headers = self._hear()
        if isinstance(headers, Report):
            return headers
        return _first_fault(headers) or fault

    def begin(self, sends: Messages, receives: Messages) -> Report | None:
        """Begins to move tensors, see Payload.begin, after all have met and go on; and word of faults. On GPUs later
        work of the current stream runs meanwhile."""
        self._told.copy_(self._counters[_WORD])
        sends, receives = [*sends, [self._told] * len(self._heard)], [*receives, list(self._heard)]
        self.branch = Branch(self._streams.rail_stream)
        try:
            with self.branch.after(self.branch.point()):
                self._started = self.payload.begin(sends, receives, self._bound_s * _OF_PAYLOAD)
        except RailBroken as broken:
            return self._missing(broken)
        except NcclError:
            return self._absent(None, lost=1)
        return None

    def end(self) -> Report | None:
        """Waits for what has begun."""
        self.branch.join()
        try:
            with self._on_rail():
                self.payload.wait(self._started, self._bound_s * _OF_PAYLOAD)
        except RailBroken as broken:
            return self._missing(broken)
        self._started = []
        return None

    def hear(self) -> None:
        """If a peer knew of faults when it began to move, the next barrier is entered with one."""
        fault = self._counters[control.RAIL_FAULT]
        torch.maximum(fault, self._heard.amax(), out=fault)

    @property
    def failed_so_far(self) -> torch.Tensor:
        """int64 [], not 0 if what peers have sent cannot be used. On the device."""
        return self._counters[_WORD].amax()

    def watch(self, note: Callable[[Report], None]) -> None:
        """Calls `note` with what becomes `overdue`, in any thread, if nothing else bounds exchanges."""
        if self._watch is not None:
            self._note = weakref.WeakMethod(note)
            self._watch_ends = start_watch(self._look)

    def _look(self) -> bool:
        """Notes a peer that does not come to an exchange on the device. Whether to look again."""
        assert self._watch is not None
        assert self.payload.progress is not None
        found, note = self._watch.overdue(self.payload.progress), self._note()
        if found is not None and note is not None:
            self.overdue = self._absent(found[0], lost=int(found[1]))
            note(self.overdue)
        return found is None

    def give_up(self, sender: int, report: Report) -> None:
        self.lane.give_up(sender, report.pack())

    def leave(self) -> None:
        self.payload.end()

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """See OneNode. What the GPU is told in the context may wait for what runs there: an exchange, maybe, which only
        this ends."""
        timer = threading.Timer(_MOMENT_S, self.leave)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            self.leave()

    def close(self) -> None:
        if self._watch_ends is not None:
            self._watch_ends.set()
        self.payload.end()
        self.lane.close()
        self._started.clear()  # which would keep connections open

    def has_said_why(self, peer: int) -> bool:
        """See OneNode. Waits for that while the peer waits for its rail, a little longer than it can."""
        counters = self._peers.region(peer, self._peers.layout.counters, (control.NUM_COUNTERS,), torch.int64)
        own_mailbox = mailbox(self._peers, self._peers.rank)
        deadline = time.monotonic() + self._bound_s
        while True:
            with self._streams.at_once():
                is_on_rail = bool(counters[control.ON_RAIL])
                has_said = any(slots[peer][0] >= control.ABORT for slots in own_mailbox.tolist())
            if has_said or not is_on_rail or time.monotonic() > deadline:
                return has_said
            time.sleep(_POLL_S)

    @contextmanager
    def _on_rail(self) -> Iterator[None]:
        """The host waits for its rail in this context. After an error its node sees that it does until it knows."""
        if self._watch is None:
            write_word(self._counters[control.ON_RAIL], 1)
            yield
            write_word(self._counters[control.ON_RAIL], 0)
        elif capture_id(self._counters.device):
            yield  # the watch would write where peers see it, which would end the capture
        else:
            self._watch.waits_since = time.monotonic()
            yield
            self._watch.waits_since = None

    def _mark_on_rail(self, is_on_rail: bool) -> None:
        with self._streams.at_once():
            write_word(self._counters[control.ON_RAIL], int(is_on_rail))

    @property
    def _bound_s(self) -> float:
        return self._waits.bound(self._is_first)[1] * _PATIENCE

    def _hear(self) -> list[Header] | Report:
        try:
            with self._on_rail():
                headers = self.lane.hear(self._bound_s)
        except RailBroken as broken:
            return self._missing(broken)
        for each in headers:
            if each.kind == GAVE_UP:
                return replace(Report.unpack(each.message), sender=each.origin)
        return headers

    def _missing(self, broken: RailBroken) -> Report:
        if not broken.is_late and (said := self.lane.last_words(broken.node)) is not None:
            return replace(Report.unpack(said.message), sender=said.origin)
        return self._absent(broken.node, lost=int(not broken.is_late))

    def _absent(self, node: int | None, *, lost: int) -> Report:
        """Of that node, or of the first other one: NCCL does not say for which it waits."""
        node, number = int(self._topology.node == 0) if node is None else node, self.lane.number
        return Report("", self._topology.rail[node], self._phase, number, number - 1, int(self._is_first), lost=lost)

    def _difference(self, headers: list[Header]) -> Fault | None:
        """A fault if the peers are in different calls."""
        rail = self._topology.rail
        for node, header in enumerate(headers):
            if header.call != headers[0].call:
                calls = rail[0], headers[0].call, rail[node], header.call
                return Fault(-1, encode(mismatch_error(self._waits.configurations, *calls)))
            if header.sizes != headers[0].sizes:
                text = f"rail_capacity or top_k differs between rank {rail[0]} and rank {rail[node]}"
                return Fault(-1, encode(ConfigMismatch(text)))
        return None


def _first_fault(headers: list[Header]) -> Fault | None:
    """Of all errors that of the first rank; one of which a rank knows only that there is one comes last."""
    failed = [header for header in headers if header.kind in (FAILED, UNRAISED)]
    if not failed:
        return None
    first = min(failed, key=lambda header: header.origin)
    return Fault(first.origin, first.message[:FAULT_BYTES], all(header.kind == UNRAISED for header in headers))


class RailWatch:
    """Sees exchanges that were begun on the device and do not end: nothing on a device bounds them.

    A thread of the host looks at two numbers in its own memory, and calls nothing of CUDA as long as all is well: a
    call from a thread that is not capturing would end a capture.

    Args:
        payload: which moves them.
        mark: writes where the peers of this node see it whether this rank is on the rail.
        find_lost: a node whose connection has closed, or None.

    Attributes:
        waits_since: when the host has begun to wait for other nodes; None: it does not.
    """

    def __init__(self, payload: Payload, mark: Callable[[bool], None], find_lost: Callable[[], int | None]) -> None:
        self._payload, self._mark, self._find_lost = payload, mark, find_lost
        self._number, self._begun, self._probed = 0, 0.0, 0.0
        self._is_marked = False
        self.waits_since: float | None = None

    def overdue(self, progress: torch.Tensor) -> tuple[int | None, bool] | None:
        """None if all is well. Otherwise a node that is lost, None if unknown, and whether a connection has closed."""
        now, bound_s, host = time.monotonic(), self._payload.bound_s, self.waits_since
        begun, ended = progress.tolist()
        if begun != self._number:
            self._number, self._begun = begun, now
        is_moving = begun > ended
        since = min([now, *([self._begun] if is_moving else []), *([] if host is None else [host])])
        is_long = now - since > min(_LONG_S, bound_s / 8)
        if is_long != self._is_marked:
            self._mark(is_long)
            self._is_marked = is_long
        if not is_moving:
            return None
        if now - self._begun > bound_s:
            return self._find_lost(), False
        if is_long and now - self._probed > _PROBE_S:
            self._probed = now
            if (lost := self._find_lost()) is not None or self._payload.problem():
                return lost, True
        return None


def start_watch(look: Callable[[], bool]) -> threading.Event:
    """Starts a thread that calls a method until it returns False, until its object is gone, or the event is set."""
    ended, reference = threading.Event(), weakref.WeakMethod(look)
    threading.Thread(target=_watch, args=(reference, ended), name="symmoe-rail", daemon=True).start()
    return ended


def _watch(reference: weakref.WeakMethod[Callable[[], bool]], ended: threading.Event) -> None:
    try:
        while not ended.wait(_WATCH_S):
            look = reference()
            if look is None or not look():
                return
            del look
    except Exception as problem:  # noqa: BLE001 - a GPU that is out of order, say
        logger.warning("exchanges between nodes are no longer watched: %s: %s", type(problem).__name__, problem)
