"""The pair test: the ranks of a rail exchange messages two by two, by the same means as a heap that spans nodes.

All pairs of all rails do it at the same time, so that they share what they would share in training. Both ends send at
once; what has come is compared byte for byte.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from symmoe.nodes.rail import GlooRail, Payload, RailBroken
from symmoe.nodes.topology import Topology

LASTS_S = 10.0  # of all rounds, if the network moves 64 KiB in a moment
_WAIT_S = 20.0  # for one message
_FIRST_BYTES, _MOST_BYTES = 1 << 16, 32 << 20
_PATTERN_BYTES = 65521  # a prime: a message that is shifted by a round number of bytes is another one
_SHORT = 8  # bytes of a message whose time is latency
_REPETITIONS = 9
_POLL_S, _BUSY_POLL_S = 1e-3, 0.1  # between two looks, and how long without a pause: latencies are some us


@dataclass(frozen=True, kw_only=True)
class PairResult:
    """What a rank has seen of its exchanges with one other.

    Attributes:
        rank, mate: in the group.
        gbs: gigabytes (1e9) per second that each of the two sends, median.
        latency_us: of an exchange of 8 bytes, median.
        is_wrong: whether other bytes have come than those that were sent.
    """

    rank: int
    mate: int
    gbs: float
    latency_us: float
    is_wrong: bool


def schedule(node: int, num_nodes: int) -> Iterator[int | None]:
    """With which node a node is in each round, None: with none. Each meets each other one once, in as few rounds as
    can be, and two nodes agree on when."""
    last = num_nodes - 1 + num_nodes % 2  # where N is odd, the one that is in a circle's middle is nobody
    for turn in range(last):
        mate = turn if node == last else (2 * turn - node) % last
        mate = last if mate == node else mate
        yield mate if mate < num_nodes else None


class PairTest:
    """Messages between this rank and its rail, see the file's text.

    Args:
        topology: of the group.
        payload: what moves tensors of `device` along this rank's rail.
        hosts: the same for tensors of CPUs, by which two ranks agree.
        lasts_s: of all rounds together, about.
    """

    def __init__(
        self, topology: Topology, payload: Payload, hosts: GlooRail, device: torch.device, *, lasts_s: float = LASTS_S
    ) -> None:
        self._topology, self._payload, self._hosts, self._device = topology, payload, hosts, device
        self._num_nodes = topology.num_nodes
        self._round_s = lasts_s / max(1, len([*schedule(0, self._num_nodes)]))

    def run(self) -> list[PairResult]:
        """One result for each other rank of the rail. Collective.

        Raises:
            RailBroken: a rank did not answer, or its connection has closed. Of NCCL only: it did not answer.
        """
        mates = schedule(self._topology.node, self._num_nodes)
        return [self._measure(mate) for mate in mates if mate is not None]

    def _measure(self, node: int) -> PairResult:
        self._agree(node, 0)  # both are here
        is_wrong = self._differs(node, _FIRST_BYTES)
        latency_s = self._median_s(node, _SHORT)
        first_s = self._median_s(node, _FIRST_BYTES)
        left_s = max(0.0, self._round_s - _REPETITIONS * (latency_s + 2 * first_s))
        fitting = int(_FIRST_BYTES * left_s / first_s / (_REPETITIONS + 2))
        size = self._agree(node, min(_MOST_BYTES, max(_FIRST_BYTES, fitting)))
        is_wrong |= self._differs(node, size)
        seconds = self._median_s(node, size)
        return PairResult(
            rank=self._topology.rank,
            mate=self._topology.rail[node],
            gbs=size / seconds / 1e9,
            latency_us=latency_s * 1e6,
            is_wrong=is_wrong,
        )

    def _differs(self, node: int, num_bytes: int) -> bool:
        """Whether a message of which each byte says where it is, and from whom, arrives as another one."""
        sent = self._message(self._topology.rank, num_bytes)
        received = ~self._message(self._topology.rail[node], num_bytes)
        self._exchange(node, sent, received)
        return not torch.equal(received, self._message(self._topology.rail[node], num_bytes))

    def _message(self, rank: int, num_bytes: int) -> torch.Tensor:
        places = torch.arange(_PATTERN_BYTES, device=self._device)
        pattern = ((places + places // 251 + 17 * rank) % 253).to(torch.uint8)
        return pattern.repeat(1 + num_bytes // _PATTERN_BYTES)[:num_bytes]

    def _median_s(self, node: int, num_bytes: int) -> float:
        sent = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        received = torch.zeros_like(sent)
        times = []
        for _ in range(_REPETITIONS):
            start = time.perf_counter()
            self._exchange(node, sent, received)
            times.append(time.perf_counter() - start)
        return sorted(times)[len(times) // 2]

    def _exchange(self, node: int, sent: torch.Tensor, received: torch.Tensor) -> None:
        """Returns when both messages have arrived."""
        self._move(self._payload, node, sent, received)
        if self._device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
            wait_for(event.query, node)

    def _agree(self, node: int, number: int) -> int:
        """The smaller one of both ranks' numbers."""
        mine = torch.tensor([number], dtype=torch.int64, device="cpu")
        its = torch.empty_like(mine)
        self._move(self._hosts, node, mine, its)
        return min(number, int(its))

    def _move(self, by: Payload, node: int, sent: torch.Tensor, received: torch.Tensor) -> None:
        by.wait(by.begin([self._only(node, sent)], [self._only(node, received)], _WAIT_S), _WAIT_S)

    def _only(self, node: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor if each == node else tensor[:0] for each in range(self._num_nodes)]


def wait_for(is_done: Callable[[], bool], node: int, timeout_s: float = _WAIT_S) -> None:
    """Returns when something on the device is done.

    Raises:
        RailBroken: that took longer: the node does not answer.
    """
    start = time.monotonic()
    while not is_done():
        waited_s = time.monotonic() - start
        if waited_s > timeout_s:
            raise RailBroken(node, is_late=True, problem=f"no answer within {timeout_s:g} s")
        time.sleep(_POLL_S if waited_s > _BUSY_POLL_S else 0.0)
