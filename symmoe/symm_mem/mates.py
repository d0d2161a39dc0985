"""What this rank and the ranks of its rail, one of each other node, tell each other: headers, errors, reports.

The heap meets its mates before every exchange between nodes. Waits are bounded as those in a node are, and a little
longer: a mate that waits for a rank of its own node gives that one up first, and says so. In turn a rank that misses
one of its own node, which is waiting for a mate, lets that one find out who is missing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from symmoe.errors import FAULT_BYTES, encode
from symmoe.kernels import control
from symmoe.nodes.lane import FAILED, GAVE_UP, GOES_ON, Header, Lane
from symmoe.nodes.rail import RailBroken
from symmoe.nodes.topology import Topology
from symmoe.symm_mem.inbox import Fault, Report, counters
from symmoe.symm_mem.status_errors import mismatch_error
from symmoe.symm_mem.waits import Waits

_PATIENCE = 1.25  # times the bound of a wait in a node
_POLL_S = 1e-3
_ALL_BUT_PLAN = control.pack_call(**{name: -1 for name in control.CALL_FIELDS if name != "plan"})


class Mates:
    """The ranks of this rank's rail. Methods return what has gone wrong; symm_mem/faults.py makes errors of it.

    A Report among the results means that a mate is gone: only give_up and close work then.

    Attributes:
        topology: of the group.
    """

    def __init__(self, lane: Lane, topology: Topology, waits: Waits) -> None:
        self.topology = topology
        self._lane, self._waits, self._phase = lane, waits, control.PHASE_START
        self._peers, self._counters = waits.peers, counters(waits.peers)
        self._known_calls: set[int] = set()  # others may take start_timeout_s
        self._is_first = True

    def meet(self, call: int) -> Fault | Report | None:
        """Meets all mates, which must be in the same call. Collective.

        Returns:
            None if all go on; the same Fault on all ranks of the rail if not.
        """
        kind = call & _ALL_BUT_PLAN
        self._phase, self._is_first = call & 0xFF, kind not in self._known_calls
        headers = self._exchange(Header(GOES_ON, call=call))
        if isinstance(headers, Report):
            return headers
        fault = _first_fault(headers)
        if fault is None:
            fault = self._difference(headers)
        if fault is None:
            self._known_calls.add(kind)
        return fault

    def tell(self, fault: Fault) -> Fault | Report:
        """Meets all mates with an error; the error that all ranks raise, this one or another. Collective."""
        self._is_first = not self._known_calls
        headers = self._exchange(Header(FAILED, origin=fault.origin, message=fault.message))
        if isinstance(headers, Report):
            return headers
        return _first_fault(headers) or fault

    def move(
        self, sends: Sequence[Sequence[torch.Tensor]], receives: Sequence[Sequence[torch.Tensor]]
    ) -> Report | None:
        """Moves tensors, see Lane.move, after all have met and go on. Collective."""
        try:
            with self._on_rail():
                self._lane.move(sends, receives, self._bound_s)
        except RailBroken as broken:
            return self._missing(broken)
        return None

    @property
    def num_meetings(self) -> int:
        """So far; the same for all mates."""
        return self._lane.number

    def give_up(self, sender: int, report: Report) -> None:
        """Tells the mates that `sender` (rank in the EP group) has given up. Local; waits for nobody."""
        self._lane.give_up(sender, report.pack())

    def close(self) -> None:
        """Ends the rail. Local."""
        self._lane.close()

    def verdict_of(self, peer: int) -> bool:
        """Whether a rank of this node that is missed has given up, and said why. Waits for that while it waits for its
        mates, a little longer than it can."""
        counters = self._peers.region(peer, self._peers.layout.counters, (control.NUM_COUNTERS,), torch.int64)
        shape = (2, self._peers.num_ranks, control.MAIL_WORDS)
        mail = self._peers.region(self._peers.rank, self._peers.layout.mailbox, shape, torch.int64)[:, peer, 0]
        deadline = time.monotonic() + self._bound_s
        while counters[control.ON_RAIL] and not (mail >= control.ABORT).any() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return bool((mail >= control.ABORT).any())

    @contextmanager
    def _on_rail(self) -> Iterator[None]:
        self._counters[control.ON_RAIL] = 1
        yield
        self._counters[control.ON_RAIL] = 0  # after an error it stays, until the peers know of that

    @property
    def _bound_s(self) -> float:
        return self._waits.bound(self._is_first)[1] * _PATIENCE

    def _exchange(self, header: Header) -> list[Header] | Report:
        try:
            with self._on_rail():
                headers = self._lane.meet(header, self._bound_s)
        except RailBroken as broken:
            return self._missing(broken)
        for each in headers:
            if each.kind == GAVE_UP:
                return replace(Report.unpack(each.message), sender=each.origin)
        return headers

    def _missing(self, broken: RailBroken) -> Report:
        number = self._lane.number
        rank, first, lost = self.topology.rail[broken.node], int(self._is_first), int(not broken.is_late)
        return Report("", rank, self._phase, number, number - 1, first, lost=lost)

    def _difference(self, headers: list[Header]) -> Fault | None:
        """A fault if the mates are in different calls."""
        rail = self.topology.rail
        for node, header in enumerate(headers):
            if header.call != headers[0].call:
                return Fault(-1, encode(mismatch_error(rail[0], headers[0].call, rail[node], header.call)))
        return None


def _first_fault(headers: list[Header]) -> Fault | None:
    """Of all errors that of the first rank."""
    failed = [header for header in headers if header.kind == FAILED]
    if not failed:
        return None
    first = min(failed, key=lambda header: header.origin)
    return Fault(first.origin, first.message[:FAULT_BYTES])
