"""What the ranks of a rail say to each other before anything travels: where they are, and what has gone wrong.

Before every exchange each rank sends a header. A rank with an error sends it in place of the header that its peers wait
for, and nobody goes on; a rank that gives up sends that, for whoever waits for it next.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import torch

from symmoe.errors import FAULT_BYTES
from symmoe.nodes.rail import TO_LANE, GlooRail, RailBroken, Started

GOES_ON, FAILED, UNRAISED, GAVE_UP = range(4)
_WORDS = struct.Struct("<qqqqqq")
DETAIL_BYTES = 64
_HEADER_BYTES = _WORDS.size + FAULT_BYTES + DETAIL_BYTES
_TO_NOBODY = 2  # a tag; TO_LANE and PAYLOAD are taken
_REPORT_S = 0.5  # closing waits that long until rail peers that listen are told; they take no time
_LAST_WORDS_S = 2.0  # a rail peer that has broken off gets that long to say why, if it lives; it takes no time


@dataclass(frozen=True, slots=True)
class Header:
    """What a rank says."""

    kind: int  # GOES_ON, FAILED, GAVE_UP; UNRAISED: the rank has left the call that has failed, and keeps the error
    number: int = 0  # how many headers it has sent
    call: int = 0  # what the ranks must agree on, as in control.pack_call
    sizes: int = 0  # the same, of what says how long the messages are that follow
    rail_rows: int = 0  # that fit in a message of the rank, where that says it; ranks need not have the same
    origin: int = -1  # the rank of the group that has the error, or that gave up; -1: no one rank
    message: bytes = b""  # of an error or of a report

    def pack(self) -> torch.Tensor:
        """uint8 [_HEADER_BYTES]."""
        words = _WORDS.pack(self.kind, self.number, self.call, self.sizes, self.rail_rows, self.origin)
        return torch.frombuffer(bytearray((words + self.message).ljust(_HEADER_BYTES, b"\0")), dtype=torch.uint8)

    @classmethod
    def unpack(cls, packed: torch.Tensor) -> Header:
        """The header that was packed."""
        data: bytes = packed.numpy().tobytes()
        kind, number, call, sizes, rail_rows, origin = _WORDS.unpack_from(data)
        return cls(kind, number, call, sizes, rail_rows, origin, data[_WORDS.size :])


class Lane:
    """This rank's place on its rail. It always listens for the next header of every peer: what a rank says when it
    gives up arrives although it waits for nobody.

    Args:
        rail: of the hosts.
        last_words: the same once more, for what a rank says when it gives up. A wait of gloo that is over its bound
            closes the connections of its rail: those that wait for this rank would take it for lost.
    """

    def __init__(self, rail: GlooRail, last_words: GlooRail, *, num_nodes: int) -> None:
        self._rail, self._last_words, self._num_nodes = rail, last_words, num_nodes
        self._is_open, self._gives_up = True, threading.Lock()
        self._last: list[torch.Tensor] = []  # while it travels
        self._sent: deque[Started] = deque(maxlen=2)  # who has answered one header has got the one before it
        self._reports, self._probes = Started(), Started()
        room = torch.zeros((2, num_nodes, _HEADER_BYTES), dtype=torch.uint8, device="cpu")
        self._words, self._received = (list(each.unbind()) for each in room)
        self._awaited_words = self._listen_on(last_words, self._words)
        self.number = 0
        self._awaited = self._listen_on(rail, self._received)

    def say(self, header: Header) -> None:
        """Sends a header to all nodes; :meth:`hear` comes next. Does not wait."""
        self.number += 1
        self._said = replace(header, number=self.number)
        packed = self._said.pack()
        self._last = [packed]  # also if a wait fails
        self._problem: RailBroken | None = None
        try:
            self._sent.append(self._rail.start([*enumerate([packed] * self._num_nodes)], [], tag=TO_LANE))
        except RailBroken as broken:
            self._problem = broken

    def hear(self, timeout_s: float) -> list[Header]:
        """The headers of all nodes, this one's included; or of one that gave up. Collective over the rail.

        Raises:
            RailBroken: see GlooRail.wait.
        """
        deadline = time.monotonic() + timeout_s
        headers = [self._said] * self._num_nodes
        try:
            if self._problem is not None:
                raise self._problem
            for node, work in self._awaited:
                headers[node] = said = self._hear(node, work, deadline - time.monotonic())
                if said.kind == GAVE_UP:  # the others may be waiting for it
                    return [said]
        except RailBroken:
            if last := self._has_given_up():
                return [last]
            raise
        self._awaited = self._listen_on(self._rail, self._received)
        return headers

    def give_up(self, origin: int, message: bytes) -> None:
        """Tells whoever can still be told, once. Local; waits for nobody. From any thread."""
        with self._gives_up:
            is_open, self._is_open = self._is_open, False
        if not is_open:
            return
        packed = Header(GAVE_UP, self.number + 1, origin=origin, message=message).pack()
        self._last.append(packed)
        for node in range(self._num_nodes):
            for rail in (self._last_words, self._rail):
                with contextlib.suppress(RailBroken):  # one by one: others may stand
                    self._reports += rail.start([(node, packed)], [], tag=TO_LANE)

    def last_words(self, node: int) -> Header | None:
        """What a node whose connection has closed has said when it gave up, if it did."""
        awaited = [each for each in self._awaited_words if each[0] == node]
        try:
            self._last_words.wait(awaited, _LAST_WORDS_S)
        except RailBroken:
            return None
        return Header.unpack(self._words[node]) if awaited else None

    def find_lost(self) -> int | None:
        """The first node whose connection is known to have closed, or None. Local; from any thread."""
        for node in range(self._num_nodes):
            try:
                awaited = torch.zeros(1, dtype=torch.uint8, device="cpu")
                self._probes += self._rail.start([], [(node, awaited)], tag=_TO_NOBODY)
            except RailBroken:
                return node
        return None

    def close(self) -> None:
        """Ends the rail. Local; what this rank has said when it gave up leaves before."""
        self._is_open = False
        with contextlib.suppress(RailBroken):
            self._rail.wait(self._reports, _REPORT_S)
        for rail in (self._last_words, self._rail):
            rail.abort()
        # What is on its way keeps the connections open, and a peer that waits would not know that this rank has gone.
        for kept in (self._reports, self._probes, self._awaited, self._awaited_words, self._last, self._sent):
            kept.clear()

    def _hear(self, node: int, work: Any, timeout_s: float) -> Header:
        """What a rail peer says."""
        self._rail.wait([(node, work)], timeout_s)
        return Header.unpack(self._received[node])

    def _has_given_up(self) -> Header | None:
        """What a rail peer has said that gave up: it has closed before this rank came, or another one is late."""
        for node, work in self._awaited:
            with contextlib.suppress(RailBroken):
                said = self._hear(node, work, 0.0)
                if said.kind == GAVE_UP:
                    return said
        return None

    def _listen_on(self, rail: GlooRail, received: list[torch.Tensor]) -> Started:
        """What brings the next headers of all nodes."""
        with contextlib.suppress(RailBroken):  # a peer has closed after the last meeting: the next one finds that out
            return rail.start([], [*enumerate(received)], tag=TO_LANE)
        return []
