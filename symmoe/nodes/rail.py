"""Transfers of tensors between nodes, by gloo or, on GPUs, by NCCL. Hosts have a control channel.

Gloo's process group is made here, on a store that the ranks share, and is private: a rail that breaks, or is aborted,
leaves the trainer's groups unchanged.
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
_CONNECTS_LONGER = 5  # times its timeout gloo waits for a connection by another rank


class RailBroken(Exception):
    """A node did not answer in time (`is_late`), or its connection has closed, or some node has aborted
    (`abort_header`). The heap reports this to the user in terms of ranks."""

    def __init__(
        self, node: int, *, is_late: bool, problem: object, abort_header: Any = None
    ) -> None:
        super().__init__(str(problem).split("\n", 1)[0])
        self.node = node
        self.is_late = is_late
        self.abort_header = abort_header


Started = list[tuple[int, Any]]  # the node, and torch's work
Pairs = Sequence[tuple[int, torch.Tensor]]  # nodes, and messages for them or from them
BEGUN, ENDED = range(2)  # indices of Payload.progress


class Payload:
    """Moves the tensors of exchanges between the ranks of a rail, after they have met.

    Attributes:
        progress: int64 [2] in the host's memory, the numbers of exchanges that the device has begun and ended, if they
            are on its stream; then a thread must watch them. None: :meth:`wait` bounds them.
        counts: `progress` on the device; None: the host waits in :meth:`wait`.
        num_launched: number of exchanges that the host has begun.
        is_captured: whether graphs contain exchanges, whose replays the host does not count.
        bytes_per_s: the rate of a rank while all send, measured at the start; infinite where it is unused (CPUs).
    """

    progress: torch.Tensor | None = None
    counts: torch.Tensor | None = None
    bytes_per_s = math.inf
    num_launched = 0
    is_captured = False
    _bounds: tuple[tuple[int, float], ...] = ((0, math.inf),)  # from this exchange on each holds
    _num_others = 0  # exchanges that the device has counted, and the host has not

    @property
    def moved(self) -> list[int]:
        """`progress` as numbers; zeros without it."""
        return [0, 0] if self.progress is None else self.progress.tolist()

    def bound(self, timeout_s: float) -> None:
        """Sets the bound of later exchanges, for the watching thread. Call it before BEGUN is counted: after that, the
        next exchange counts as moving."""
        if not self.is_moving:
            self._num_others = self.moved[ENDED] - self.num_launched
            self._bounds = ()
        if not self._bounds or self._bounds[-1][1] != timeout_s:
            self._bounds = *self._bounds, (self.num_launched, timeout_s)

    @property
    def bound_s(self) -> float:
        """The bound of the moving exchange; the longest bound if replays may be moving."""
        ended = self.moved[ENDED] - self._num_others
        bounds_s = [
            bound_s for first, bound_s in self._bounds if first <= ended or self.is_captured
        ]
        return max(bounds_s) if self.is_captured else bounds_s[-1]

    @property
    def is_moving(self) -> bool:
        """Whether an exchange that has begun, or is about to, has not ended on the device."""
        begun, ended = self.moved
        return begun > ended or ended < self.num_launched

    def count(self, which: int) -> None:
        """Records on the device that its stream is about to begin an exchange, or has ended it: BEGUN, ENDED. Before
        and after :meth:`begin`."""

    def settle(self) -> None:
        """After an exception, maybe one between two counts: every begun exchange counts as ended after the current
        stream's earlier work."""

    def begin(self, sends: Pairs, receives: Pairs, stream: Any = None) -> Started:
        """Begins to send and to receive messages. Messages to a node keep their order. Does not wait. On GPUs the
        transfer is work of the stream (None: the current one), and no error is raised. sends, receives: contiguous
        tensors of matching sizes, which must stay unchanged until :meth:`wait` has returned. Empty tensors, and
        tensors for this node, are skipped. RailBroken: a connection has closed."""
        raise NotImplementedError

    def wait(self, started: Started, timeout_s: float) -> None:
        """Returns when the transfer has ended; on GPUs at once: later work of its stream follows the transfer.
        RailBroken: the transfer takes longer, or a connection has closed."""

    def problem(self) -> str:
        """The network's error in exchanges on the device, or ""."""
        return ""

    def end(self) -> None:
        """Ends exchanges that are moving on the device, a moment later. Local; a second call does nothing."""

    def close(self) -> None:
        """Ends the rail. Local; does not wait for peers."""
        self.end()


class GlooRail(Payload):
    """A rail for tensors on CPUs, by a torch store for its ranks and this attempt. Construction is collective over
    the rail, within timeout_s. RuntimeError: ranks cannot connect; raised after timeout_s on the ranks that wait for a
    connection."""

    def __init__(self, store: Any, *, node: int, num_nodes: int, timeout_s: float) -> None:
        self._node = node
        self._group: Any = dist.ProcessGroupGloo(
            store,
            node,
            num_nodes,
            timeout=timedelta(seconds=min(timeout_s, _MAX_S) / _CONNECTS_LONGER),
        )

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
                # Gloo counts milliseconds, and must not return before the deadline.
                work.wait(timedelta(milliseconds=math.ceil(left_s * 1e3)))
            except RuntimeError as error:
                raise RailBroken(
                    node, is_late=time.monotonic() >= deadline, problem=error
                ) from error

    def close(self) -> None:
        if self._group is not None:
            self._group.abort()
            self._group = None  # this closes the connections
