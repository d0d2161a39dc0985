"""Messages between the hosts of a rail before data travels: their positions and errors. A header precedes every
exchange. A rank with an error sends the error instead, and no rank continues. A rank that aborts sends that, for the
next rank that waits for it, before it closes. If an exchange on the devices does not end, hosts report the progress of
their devices to each other."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Collection, Mapping
from typing import NamedTuple

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
}  # more wait after such a header: its sender will name the missing rank
ANSWER_S = 0.4  # the longest time in which a live host reports its device's count
_ABORT_MESSAGE_S = (
    2.0  # for a disconnected rail peer to send the reason, if it lives; without load, at once
)


class Header(NamedTuple):
    """A message of a rank."""

    kind: int  # GOES_ON, FAILED, GAVE_UP, WAITS; UNRAISED: the rank has left the call that failed, and keeps the error
    number: int = (
        0  # of headers sent so far; COUNTED: of begins and ends of exchanges on its device
    )
    call: int = 0  # the values on which ranks must agree, as in control.pack_call
    sizes: int = 0  # also to agree on, for the lengths of the messages that follow
    rail_rows: int = 0  # rows that fit in the rank's messages, if sent; may differ between ranks
    origin: int = -1  # the rank of the group that has the error or aborted; -1: not a single rank
    message: bytes = b""  # of an error or of a report

    def pack(self) -> bytes:
        """The header as _HEADER_BYTES bytes."""
        return (_WORDS.pack(*self[:-1]) + self.message).ljust(_HEADER_BYTES, b"\0")

    @classmethod
    def unpack(cls, packed: bytes) -> Header:
        """The header from packed bytes."""
        return cls(*[*_WORDS.unpack_from(packed), packed[_WORDS.size :]])


class ControlChannel:
    """This rank's place on its rail. The last message of an aborting rank stays until a peer reads it. links: to all
    other nodes, by node; the channel closes them.

    Attributes:
        number: number of headers that this rank has sent and others wait for.
        counted: by other node, the COUNTED number of its device; -1: not received.
    """

    def __init__(self, links: Mapping[int, Link]) -> None:
        self._links = links
        self._kinds_sent_once = set[int]()
        self._sends_lock = threading.Lock()
        self._receives_lock = threading.RLock()  # a signal handler may abort
        self._incomplete = dict.fromkeys(links, b"")  # the received part of the next header
        self.number = 0
        self.counted = dict.fromkeys(links, -1)
        for link in links.values():
            link.receives.setblocking(False)

    def announce(self, header: Header) -> None:
        """Sends a header to all nodes; :meth:`receive` comes next. Does not wait."""
        self.number += 1
        self._last_header = header._replace(number=self.number)
        self._problem = self._send(self._last_header, ())

    def receive(self, timeout_s: float) -> list[Header]:
        """The headers of all nodes, this one's included. Collective over the rail. RailBroken: a node did not answer in
        time, or its connection has closed, or a node has aborted."""
        deadline = time.monotonic() + timeout_s
        headers = [self._last_header] * (len(self._links) + 1)
        try:
            if self._problem is not None:
                raise self._problem
            for node in self._links:
                while (header := self._receive(node, deadline)).kind in _LONGER_S:
                    deadline += _LONGER_S[header.kind]
                headers[node] = header
                if header.kind == GAVE_UP:  # other nodes may wait for it
                    raise RailBroken(node, is_late=False, problem="it gave up", abort_header=header)
        except RailBroken as broken:
            # Another node may have aborted before this rank waited, or while one is late.
            broken.abort_header = broken.abort_header or self.look()[1]
            raise
        return headers

    def announce_once(self, header: Header, but: Collection[int] = ()) -> None:
        """Sends a message that no node waits for, the first of its kind, to all nodes but these. WAITS: this rank waits
        for a rank of its own node, which may wait for its rail. COUNTED: see Header; requests the numbers of the other
        nodes. Does not wait. From any thread."""
        if header.kind not in self._kinds_sent_once:
            self._kinds_sent_once.add(header.kind)
            self._send(header, but)

    def look(self) -> tuple[set[int], Header | None]:
        """The nodes whose connections have closed, and the message of one that has aborted; records :attr:`counted`.
        Leaves all headers for :meth:`receive`. Local; from any thread."""
        poll = select.poll()
        lost = set[int]()
        abort_header = None
        nodes = {link.receives.fileno(): node for node, link in self._links.items()}
        with contextlib.suppress(ValueError):  # this rank has closed
            for file in nodes:
                poll.register(file, select.POLLIN | select.POLLRDHUP)
        for file, events in poll.poll(0):
            node = nodes[file]
            received = b""
            if events != select.POLLIN:
                lost.add(node)
            with contextlib.suppress(OSError), self._receives_lock:
                received = self._incomplete[node] + self._links[node].receives.recv(
                    _PEEKED_BYTES, socket.MSG_PEEK
                )
            for first in range(0, len(received) - _HEADER_BYTES + 1, _HEADER_BYTES):
                header = self._unpack(node, received[first : first + _HEADER_BYTES])
                if abort_header is None and header.kind == GAVE_UP:
                    abort_header = header
        return lost, abort_header

    def abort(self, origin: int, message: bytes) -> None:
        """Sends the abort message, once, to all nodes with an open connection; other nodes need none. Local; does not
        wait. From any thread."""
        self.announce_once(
            Header(GAVE_UP, self.number + 1, origin=origin, message=message), but=self.look()[0]
        )

    def last_message(self, node: int) -> Header | None:
        """The abort message of a node whose connection has closed, after all its earlier messages, or None."""
        deadline = time.monotonic() + _ABORT_MESSAGE_S
        with contextlib.suppress(RailBroken):
            while (header := self._receive(node, deadline)).kind != GAVE_UP:
                pass
            return header
        return None

    def close(self) -> None:
        """Ends the rail. Local."""
        for link in self._links.values():
            for connection in link:
                connection.close()

    def _send(self, header: Header, but: Collection[int]) -> RailBroken | None:
        problem = None
        packed = header.pack()
        with self._sends_lock:  # headers of two threads must not mix
            for node in [node for node in self._links if node not in but]:
                try:
                    self._links[node].sends.sendall(packed)
                except OSError as error:  # other connections may be open
                    problem = problem or RailBroken(
                        node, is_late=isinstance(error, TimeoutError), problem=error
                    )
        return problem

    def _receive(self, node: int, deadline: float) -> Header:
        """The next header of a node."""
        receives = self._links[node].receives
        poll = select.poll()
        try:
            poll.register(receives, select.POLLIN)
            while (missing := _HEADER_BYTES - len(self._incomplete[node])) > 0:
                if not poll.poll(min(max(1e-3, deadline - time.monotonic()), _MAX_S) * 1e3):
                    raise TimeoutError("timed out")
                with self._receives_lock:
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
        """The header of a node; records :attr:`counted`."""
        header = Header.unpack(packed)
        if header.kind == COUNTED:
            self.counted[node] = header.number
        return header
