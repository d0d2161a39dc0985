"""What the ranks of a rail say to each other before anything travels: where they are, and what has gone wrong. A header
comes before every exchange. A rank with an error sends it in place of that, and nobody goes on; a rank that gives up
sends that, for whoever waits for it next, before it closes. Where an exchange on the devices does not end, hosts tell
each other how far theirs have come."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import astuple, dataclass, replace

from symmoe.errors import FAULT_BYTES
from symmoe.nodes.rail import RailBroken
from symmoe.nodes.reach import Link

GOES_ON, FAILED, UNRAISED, GAVE_UP, WAITS, COUNTED = range(6)
_WORDS = struct.Struct("<qqqqqq")
DETAIL_BYTES = 64
_HEADER_BYTES = _WORDS.size + FAULT_BYTES + DETAIL_BYTES
_PEEKED_BYTES = 16 * _HEADER_BYTES  # more than hosts can be ahead
_MAX_S = 1e6  # of a wait, which is counted in ms
_LONGER_S = {
    WAITS: 0.25,
    COUNTED: 0.5,
}  # that a rank waits which hears this: its sender is to say who is missing
ANSWER_S = 0.4  # that a host which lives takes at most to say what its device has counted
_LAST_WORDS_S = (
    2.0  # a rail peer that has broken off gets that long to say why, if it lives; it takes no time
)


@dataclass(frozen=True, slots=True)
class Header:
    """What a rank says."""

    kind: int  # GOES_ON, FAILED, GAVE_UP, WAITS; UNRAISED: the rank has left the call that failed, and keeps the error
    number: int = 0  # how many headers it has sent; COUNTED: begins and ends of exchanges that its device has counted
    call: int = 0  # what the ranks must agree on, as in control.pack_call
    sizes: int = 0  # the same, of what says how long the messages are that follow
    rail_rows: int = (
        0  # that fit in a message of the rank, where that says it; ranks need not have the same
    )
    origin: int = -1  # the rank of the group that has the error, or that gave up; -1: no one rank
    message: bytes = b""  # of an error or of a report

    def pack(self) -> bytes:
        """_HEADER_BYTES bytes."""
        return (_WORDS.pack(*astuple(self)[:-1]) + self.message).ljust(_HEADER_BYTES, b"\0")

    @classmethod
    def unpack(cls, packed: bytes) -> Header:
        """The header that was packed."""
        return cls(*[*_WORDS.unpack_from(packed), packed[_WORDS.size :]])


class ControlChannel:
    """This rank's place on its rail. What a rank says when it gives up waits until somebody listens. links: by node, of
    all others; the channel closes them.

    Attributes:
        number: how many headers this rank has sent for others to wait for.
        counted: by other node, what its host has said that its device has COUNTED; -1: nothing.
    """

    def __init__(self, links: Mapping[int, Link]) -> None:
        self._links = links
        self._is_open = True
        self._said_once = set[int]()
        self._sends = threading.Lock()
        self._takes = threading.RLock()  # a signal handler may give up
        self._incomplete = dict.fromkeys(links, b"")  # what has come of the next header
        self.number = 0
        self.counted = dict.fromkeys(links, -1)
        for link in links.values():
            link.receives.setblocking(False)

    def announce(self, header: Header) -> None:
        """Sends a header to all nodes; :meth:`hear` comes next. Does not wait."""
        self.number += 1
        self._said = replace(header, number=self.number)
        self._problem = self._send(self._said)

    def receive(self, timeout_s: float) -> list[Header]:
        """The headers of all nodes, this one's included. Collective over the rail. RailBroken: a node did not answer in
        time, or its connection has closed, or a node has said that it gave up."""
        deadline = time.monotonic() + timeout_s
        headers = [self._said] * (len(self._links) + 1)
        try:
            if self._problem is not None:
                raise self._problem
            for node in self._links:
                while (said := self._receive(node, deadline)).kind in _LONGER_S:
                    deadline += _LONGER_S[said.kind]
                headers[node] = said
                if said.kind == GAVE_UP:  # the others may be waiting for it
                    raise RailBroken(node, is_late=False, problem="it gave up", said=said)
        except RailBroken as broken:
            broken.said = (
                broken.said or self.look()[1]
            )  # before this rank came, or while another one is late
            raise
        return headers

    def announce_once(self, kind: int, number: int = 0) -> None:
        """Tells all nodes what nobody waits for. WAITS: this rank waits for one of its own node, which may wait for its
        rail. COUNTED: see Header; it asks the others for theirs. Does not wait. From any thread."""
        if kind not in self._said_once:
            self._said_once.add(kind)
            self._send(Header(kind, number))

    def look(self) -> tuple[set[int], Header | None]:
        """The nodes whose connections are known to have closed, and what one has said that gave up; notes
        :attr:`counted`. Takes nothing that :meth:`hear` waits for. Local; from any thread."""
        asked = select.poll()
        lost = set[int]()
        gave_up = None
        nodes = {link.receives.fileno(): node for node, link in self._links.items()}
        with contextlib.suppress(ValueError):  # this rank has closed
            for file in nodes:
                asked.register(file, select.POLLIN | select.POLLRDHUP)
        for file, events in asked.poll(0):
            node = nodes[file]
            come = b""
            if events != select.POLLIN:
                lost.add(node)
            with contextlib.suppress(OSError), self._takes:
                come = self._incomplete[node] + self._links[node].receives.recv(
                    _PEEKED_BYTES, socket.MSG_PEEK
                )
            for first in range(0, len(come) - _HEADER_BYTES + 1, _HEADER_BYTES):
                said = self._unpack(node, come[first : first + _HEADER_BYTES])
                gave_up = said if gave_up is None and said.kind == GAVE_UP else gave_up
        return lost, gave_up

    def give_up(self, origin: int, message: bytes) -> None:
        """Tells whoever can still be told, once; those that have gone are not to hear that they have. Local; waits for
        nobody. From any thread."""
        is_open = self._is_open
        self._is_open = False
        if is_open:
            self._send(
                Header(GAVE_UP, self.number + 1, origin=origin, message=message), but=self.look()[0]
            )

    def last_message(self, node: int) -> Header | None:
        """What a node whose connection has closed has said when it gave up, after all that it has said before, if it
        did."""
        deadline = time.monotonic() + _LAST_WORDS_S
        with contextlib.suppress(RailBroken):
            while (said := self._receive(node, deadline)).kind != GAVE_UP:
                pass
            return said
        return None

    def close(self) -> None:
        """Ends the rail. Local."""
        self._is_open = False
        for link in self._links.values():
            link.close()

    def _send(self, header: Header, but: Collection[int] = ()) -> RailBroken | None:
        problem = None
        packed = header.pack()
        with self._sends:  # a header is not cut by one of another thread
            for node in [each for each in self._links if each not in but]:
                try:
                    self._links[node].sends.sendall(packed)
                except OSError as error:  # the others may stand
                    problem = problem or RailBroken(
                        node, is_late=isinstance(error, TimeoutError), problem=error
                    )
        return problem

    def _receive(self, node: int, deadline: float) -> Header:
        """The next header of a node."""
        receives = self._links[node].receives
        asked = select.poll()
        try:
            asked.register(receives, select.POLLIN)
            while (missing := _HEADER_BYTES - len(self._incomplete[node])) > 0:
                if not asked.poll(min(max(1e-3, deadline - time.monotonic()), _MAX_S) * 1e3):
                    raise TimeoutError("timed out")
                with self._takes:
                    piece = receives.recv(missing)
                    self._incomplete[node] += piece
                if not piece:
                    raise ConnectionResetError("the connection has closed")
        except (OSError, ValueError) as error:  # ValueError: this rank has closed
            raise RailBroken(
                node, is_late=isinstance(error, TimeoutError), problem=error
            ) from error
        packed, self._incomplete[node] = self._incomplete[node], b""
        return self._unpack(node, packed)

    def _unpack(self, node: int, packed: bytes) -> Header:
        """What a node has said; notes :attr:`counted`."""
        said = Header.unpack(packed)
        if said.kind == COUNTED:
            self.counted[node] = said.number
        return said
