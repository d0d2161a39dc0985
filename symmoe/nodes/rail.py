"""What travels between nodes, and by what: tensors, by gloo or, on GPUs, by NCCL. Hosts have a control channel.

The process group of gloo is made here, on a store that the ranks have in common, and nobody else knows it: a rail that
breaks, or is aborted, leaves the groups of the trainer as they are.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_MAX_S = 1e9
_CONNECTS_LONGER = 5  # times its timeout gloo waits for a connection that another rank is to make


class RailBroken(Exception):
    """A node's end of the rail did not answer in time (`is_late`), or its connection has closed, or some node has said
    that it gave up (`said`, a Header). For the heap, which says so to the user in terms of ranks."""

    def __init__(self, node: int, *, is_late: bool, problem: object, said: Any = None) -> None:
        super().__init__(str(problem).split("\n", 1)[0])
        self.node = node
        self.is_late = is_late
        self.said = said


Started = list[tuple[int, Any]]  # the node, and torch's work
Pairs = Sequence[tuple[int, torch.Tensor]]  # nodes, and messages for them or from them
BEGUN, ENDED = range(2)  # indices of Payload.progress


class Payload:
    """Moves the tensors of exchanges between the ranks with the same index on all nodes, which have met.

    Attributes:
        progress: int64 [2] in the host's memory, how many exchanges the device has begun and how many it has ended, if
            they are on a stream of the device; somebody has to watch them then. None: :meth:`wait` bounds them.
        counts: the same on the device; None: :meth:`wait` has something to wait for.
        num_launched: how many exchanges the host has begun.
        is_captured: whether graphs have exchanges, whose replays the host does not count.
        bytes_per_s: what a rank sends while all do, measured at the start; infinite where that decides nothing (CPUs).
    """

    progress: torch.Tensor | None = None
    counts: torch.Tensor | None = None
    bytes_per_s = math.inf
    num_launched = 0
    is_captured = False
    _bounds: tuple[tuple[int, float], ...] = (
        (0, math.inf),
    )  # the exchange from which on each holds
    _num_others = 0  # exchanges that the device has counted, and the host has not

    def bound(self, timeout_s: float) -> None:
        """What begins from now on may take so long, for who watches. Before BEGUN is counted, after which what is about
        to begin moves."""
        if self.progress is None:
            return
        if not self.is_moving:
            self._num_others = self.progress.tolist()[ENDED] - self.num_launched
            self._bounds = ()
        if not self._bounds or self._bounds[-1][1] != timeout_s:
            self._bounds = *self._bounds, (self.num_launched, timeout_s)

    @property
    def bound_s(self) -> float:
        """How long the exchange may take that moves; the longest one's where replays may be among what moves."""
        ended = 0 if self.progress is None else self.progress.tolist()[ENDED] - self._num_others
        its = [bound_s for first, bound_s in self._bounds if first <= ended or self.is_captured]
        return max(its) if self.is_captured else its[-1]

    @property
    def is_moving(self) -> bool:
        """Whether an exchange has begun, or is about to, that has not ended on the device."""
        begun, ended = (0, 0) if self.progress is None else self.progress.tolist()
        return begun > ended or ended < self.num_launched

    def count(self, which: int) -> None:
        """On a device, its stream is about to begin an exchange, or has ended it: BEGUN, ENDED. Before and after
        :meth:`begin`."""

    def settle(self) -> None:
        """After an exception, which may have come between two counts: all that has begun ends with what the current
        stream has before this."""

    def begin(self, sends: Pairs, receives: Pairs, stream: Any = None) -> Started:
        """Begins to send messages, and to fill others with what comes. Messages to a node keep their order. Does not
        wait. On GPUs that is work of the stream (None: the current one), and no error is raised. sends, receives:
        contiguous tensors whose sizes fit each other, which must stay as they are until :meth:`wait` has returned.
        Empty ones, and those of this node, do not travel. RailBroken: a connection has closed."""
        raise NotImplementedError

    def wait(self, started: Started, timeout_s: float) -> None:
        """Returns when what was begun has ended; on GPUs at once: work of the stream on which it was begun comes later.
        RailBroken: that took longer, or a connection has closed."""

    def problem(self) -> str:
        """What the network has reported about exchanges on the device; "": nothing."""
        return ""

    def end(self) -> None:
        """Ends what is under way on the device, a moment later. Local; does nothing the second time."""

    def close(self) -> None:
        """Ends the rail. Local; waits for nobody."""
        self.end()


class GlooRail(Payload):
    """A rail for tensors on CPUs, by this name in a store of torch that its ranks have in common. Construction is
    collective over the rail, within timeout_s. RuntimeError: ranks cannot connect; on those that are connected to,
    after timeout_s."""

    def __init__(
        self, store: Any, name: str, *, node: int, num_nodes: int, timeout_s: float
    ) -> None:
        self._node = node
        own_store = dist.PrefixStore(name, store)  # type: ignore[attr-defined]
        bound = timedelta(seconds=min(timeout_s, _MAX_S) / _CONNECTS_LONGER)
        self._group: Any = dist.ProcessGroupGloo(own_store, node, num_nodes, timeout=bound)

    def begin(self, sends: Pairs, receives: Pairs, stream: Any = None) -> Started:
        started = []
        for move, pairs in ((self._group.recv, receives), (self._group.send, sends)):
            for node, tensor in pairs:
                try:
                    if node != self._node and tensor.numel():
                        started.append((node, move([tensor], node, 0)))
                except RuntimeError as error:
                    raise RailBroken(node, is_late=False, problem=error) from error
        return started

    def wait(self, started: Started, timeout_s: float) -> None:
        """See Payload. After an error only :meth:`close` works."""
        deadline = math.inf if timeout_s == math.inf else time.monotonic() + timeout_s
        for node, work in started:
            left_s = min(_MAX_S, max(1e-3, deadline - time.monotonic()))
            try:
                work.wait(
                    timedelta(milliseconds=math.ceil(left_s * 1e3))
                )  # as gloo counts; not before the deadline
            except RuntimeError as error:
                raise RailBroken(
                    node, is_late=time.monotonic() >= deadline, problem=error
                ) from error

    def close(self) -> None:
        if self._group is not None:
            self._group.abort()
            self._group = None  # which closes the connections
