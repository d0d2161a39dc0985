"""What the ranks of a rail say to each other before anything travels: where they are, and what has gone wrong.

Before every exchange each rank sends a header. A rank with an error sends it in place of the header that its peers wait
for, and nobody goes on; a rank that gives up sends that, for whoever waits for it next, before it closes.
"""

from __future__ import annotations

import contextlib
import select
import struct
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from symmoe.errors import FAULT_BYTES
from symmoe.nodes.rail import RailBroken
from symmoe.nodes.reach import Link

GOES_ON, FAILED, UNRAISED, GAVE_UP, WAITS = range(5)
_WORDS = struct.Struct("<qqqqqq")
DETAIL_BYTES = 64
_HEADER_BYTES = _WORDS.size + FAULT_BYTES + DETAIL_BYTES
_MAX_S = 1e6  # of a wait, as Python's sockets count
_LONGER_S = 0.25  # that a rank waits which has heard that a peer waits in turn: that one hears first who is missing
_LAST_WORDS_S = 2.0  # a rail peer that has broken off gets that long to say why, if it lives; it takes no time


@dataclass(frozen=True, slots=True)
class Header:
    """What a rank says."""

    kind: int  # GOES_ON, FAILED, GAVE_UP, WAITS; UNRAISED: the rank has left the call that failed, and keeps the error
    number: int = 0  # how many headers it has sent
    call: int = 0  # what the ranks must agree on, as in control.pack_call
    sizes: int = 0  # the same, of what says how long the messages are that follow
    rail_rows: int = 0  # that fit in a message of the rank, where that says it; ranks need not have the same
    origin: int = -1  # the rank of the group that has the error, or that gave up; -1: no one rank
    message: bytes = b""  # of an error or of a report

    def pack(self) -> bytes:
        """_HEADER_BYTES bytes."""
        words = _WORDS.pack(self.kind, self.number, self.call, self.sizes, self.rail_rows, self.origin)
        return (words + self.message).ljust(_HEADER_BYTES, b"\0")

    @classmethod
    def unpack(cls, packed: bytes) -> Header:
        """The header that was packed."""
        kind, number, call, sizes, rail_rows, origin = _WORDS.unpack_from(packed)
        return cls(kind, number, call, sizes, rail_rows, origin, packed[_WORDS.size :])


class GaveUp(Exception):
    """A node has said that it gave up, and why. For the heap."""

    def __init__(self, said: Header) -> None:
        super().__init__()
        self.said = said


class Lane:
    """This rank's place on its rail. What a rank says when it gives up waits until somebody listens.

    Args:
        links: by node, of all others; the lane closes them.
    """

    def __init__(self, links: Mapping[int, Link]) -> None:
        self._links, self._is_open, self._sends = links, True, threading.Lock()
        self._incomplete = dict.fromkeys(links, b"")  # what has come of the next header
        self.number = 0

    def say(self, header: Header) -> None:
        """Sends a header to all nodes; :meth:`hear` comes next. Does not wait."""
        self.number += 1
        self._said = replace(header, number=self.number)
        self._problem = self._send(self._said)

    def hear(self, timeout_s: float) -> list[Header]:
        """The headers of all nodes, this one's included. Collective over the rail.

        Raises:
            GaveUp: a node has.
            RailBroken: a node did not answer in time, or its connection has closed.
        """
        deadline = time.monotonic() + timeout_s
        headers = [self._said] * (len(self._links) + 1)
        try:
            if self._problem is not None:
                raise self._problem
            for node in self._links:
                while (said := self._hear(node, deadline)).kind == WAITS:
                    deadline += _LONGER_S
                headers[node] = said
                if said.kind == GAVE_UP:  # the others may be waiting for it
                    raise GaveUp(said)
        except RailBroken:
            for node in self._links:  # it has closed before this rank came, or another one is late
                if last := self.last_words(node, 0.0):
                    raise GaveUp(last) from None
            raise
        return headers

    def say_waits(self) -> None:
        """Tells all nodes that this rank waits for one of its own node, which may wait for its rail. Does not wait."""
        self._send(Header(WAITS))

    def give_up(self, origin: int, message: bytes) -> None:
        """Tells whoever can still be told, once; those that have gone are not to hear that they have. Local; waits for
        nobody. From any thread."""
        is_open, self._is_open = self._is_open, False
        if is_open:
            self._send(Header(GAVE_UP, self.number + 1, origin=origin, message=message), but=self.find_lost())

    def last_words(self, node: int, timeout_s: float = _LAST_WORDS_S) -> Header | None:
        """What a node whose connection has closed has said when it gave up, after all that it has said before, if it
        did."""
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(RailBroken):
            while (said := self._hear(node, deadline)).kind != GAVE_UP:
                pass
            return said
        return None

    def find_lost(self) -> set[int]:
        """The nodes whose connections are known to have closed. Local; from any thread."""
        asked, nodes = select.poll(), {}
        with contextlib.suppress(ValueError):  # this rank has closed
            for node, link in self._links.items():
                asked.register(link.receives, select.POLLRDHUP)
                nodes[link.receives.fileno()] = node
        return {nodes[found] for found, _ in asked.poll(0)}

    def close(self) -> None:
        """Ends the rail. Local."""
        self._is_open = False
        for link in self._links.values():
            link.close()

    def _send(self, header: Header, but: Collection[int] = ()) -> RailBroken | None:
        problem, packed = None, header.pack()
        with self._sends:  # a header is not cut by one of another thread
            for node in [each for each in self._links if each not in but]:
                try:
                    self._links[node].sends.sendall(packed)
                except OSError as error:  # the others may stand
                    problem = problem or RailBroken(node, is_late=isinstance(error, TimeoutError), problem=error)
        return problem

    def _hear(self, node: int, deadline: float) -> Header:
        """The next header of a node."""
        receives = self._links[node].receives
        while (missing := _HEADER_BYTES - len(self._incomplete[node])) > 0:
            receives.settimeout(min(max(1e-3, deadline - time.monotonic()), _MAX_S))
            try:
                if not (piece := receives.recv(missing)):
                    raise ConnectionResetError("the connection has closed")
            except OSError as error:
                raise RailBroken(node, is_late=isinstance(error, TimeoutError), problem=error) from error
            self._incomplete[node] += piece
        packed, self._incomplete[node] = self._incomplete[node], b""
        return Header.unpack(packed)
