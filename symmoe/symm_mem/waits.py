"""The waits for peers, at barriers and for signals: how they are launched, and how long they may take."""

from __future__ import annotations

import math

import torch

from symmoe import kernels
from symmoe.kernels import control
from symmoe.kernels.control import Peers
from symmoe.symm_mem.first_times import FirstTimes
from symmoe.symm_mem.flight import FlightRecorder
from symmoe.symm_mem.streams import capture_id


class Waits:
    """Launches the waits of this rank. Does not synchronise the host; on CPUs the host itself waits.

    Attributes:
        timeout_s, start_timeout_s: as in SymmetricHeap.
        kernels: of the heap's device.
        peers, status: what they are given.
        flight: notes what is launched.
        first_times: knows which waits `start_timeout_s` bounds.
        is_inside: whether this rank waits. It stays so if a signal handler raises in a wait of the host.
    """

    def __init__(self, peers: Peers, timeout_s: float, start_timeout_s: float) -> None:
        self.timeout_s, self.start_timeout_s = timeout_s, start_timeout_s
        self.peers, self._device = peers, peers.bases.device
        self.kernels = kernels.for_device(self._device)
        self.status = torch.zeros(
            control.STATUS_WORDS, dtype=torch.int64, device="cpu", pin_memory=self._device.type == "cuda"
        )
        self.flight = FlightRecorder()
        self.first_times = FirstTimes(kernels.compiled_counter(self._device))
        self.is_inside = False

    def barrier(
        self, call: int, publish: tuple[int, ...] = (), *, fault: bool = False, spoils: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Waits for every rank. Collective.

        Args:
            call: control.pack_call of what the ranks must agree on.
            fault: this rank fails the call.
            publish, spoils: as in SymmetricHeap.barrier, whose result this returns.
        """
        received = torch.empty((self.peers.num_ranks, control.NUM_PUBLISHED), dtype=torch.int64, device=self._device)
        words = tuple(publish) + (0,) * (control.NUM_PUBLISHED - len(publish))
        self.flight.barrier_launched(call)
        timeout_ns = self._timeout_ns(self.first_times.is_first_barrier(call, epoch=self.flight.epoch, fault=fault))
        self.is_inside = True
        self.kernels.barrier(
            self.peers, words, received, self.status, call=call, fault=fault, timeout_ns=timeout_ns, spoils=spoils
        )
        self.is_inside = False
        return received

    def signal(self, rank: int, phase: int, spoils: torch.Tensor | None) -> torch.Tensor:
        """Waits for a rank's signal; see SymmetricHeap.wait_for_signal."""
        arrived = torch.empty(1, dtype=torch.int64, device=self._device)
        self.flight.wait_launched(phase, rank)
        timeout_ns = self._timeout_ns(self.first_times.is_first_signal(phase, rank, epoch=self.flight.epoch))
        self.is_inside = True
        self.kernels.wait_for_signal(
            self.peers, rank, arrived, self.status, phase=phase, timeout_ns=timeout_ns, spoils=spoils
        )
        self.is_inside = False
        return arrived

    def bound(self, first: bool) -> tuple[str, float]:
        """Name and value of the bound of a wait, `first` as in FirstTimes."""
        if first and self.start_timeout_s > self.timeout_s:
            return "start_timeout_s", self.start_timeout_s
        return "timeout_s", self.timeout_s

    def _timeout_ns(self, first: bool) -> int | None:
        """The bound for the kernel; in a graph, where every replay has it, never the longer one."""
        _, bound_s = self.bound(first and not capture_id(self._device))
        return None if bound_s == math.inf else int(bound_s * 1e9)
