"""Waits for peers, at barriers and for signals: how they are launched and bounded, and a record of the last ones."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from symmoe import kernels
from symmoe.kernels import control
from symmoe.program.builder import builder
from symmoe.symm_mem.reports import Configurations
from symmoe.symm_mem.streams import capture_id
from symmoe.torch_internals import num_dispatch_modes

_PLAN = control.pack_call(plan=-1)
ALL_BUT_PLAN = ~_PLAN
_GENERATION = control.pack_call(plan=1)  # the unit of a plan's generation in a call
_ENDLESS_S = 4e9  # stands for math.inf: clocks count nanoseconds in 64 bits
BARRIER = -1  # stands for all peers
_NO_WORDS = (0,) * control.NUM_PUBLISHED
NUM_CALLS = 64
# The call of the last barrier, and the peer whose signal is waited for after it.
Kind = tuple[int, int]


class StartupGrace:
    """Finds the waits for peers that follow one-time work, and may take `start_timeout_s`.

    A rank that compiles kernels, imports modules or touches memory for the first time keeps its peers waiting. All
    ranks make the same calls in the same order, so all do this work between the same two waits. So a wait is a first
    one if no wait of its kind has followed a wait of the last kind, or if this process has compiled or imported
    anything since then. num_compiled: the number of kernel variants that this process has compiled or found in a cache.
    """

    def __init__(self, num_compiled: Callable[[], int]) -> None:
        self._num_compiled = num_compiled
        self._num_ready = 0
        self._last: Kind = (0, BARRIER)
        self._stretches: set[tuple[Kind, Kind]] = set()  # (a wait, the next wait)
        self._waits: set[tuple[int, int, int]] = set()  # (epoch, phase, peer or BARRIER)

    def may_compile(
        self, call: int, peer: int = BARRIER, *, epoch: int, fault: bool = False
    ) -> bool:
        """Records a barrier before it is entered, or a wait for a peer's signal after the barrier of this epoch.
        Returns whether it is a first wait. fault: whether this rank's arguments are wrong; then `call`
        (control.pack_call) has only the phase."""
        last = self._last
        phase = call & 0xFF
        num_ready_before = self._num_ready
        self._num_ready = len(sys.modules) + self._num_compiled()
        first = num_ready_before != self._num_ready
        if fault:
            first |= not any(
                earlier == last and kind[0] & 0xFF == phase for earlier, kind in self._stretches
            )
        elif phase not in (
            control.PHASE_CLOSE,
            control.PHASE_SUSPEND,
        ):  # these phases may follow any call
            self._last = call & ALL_BUT_PLAN if peer == BARRIER else last[0], peer
            first |= (last, self._last) not in self._stretches
            self._stretches.add((last, self._last))
        if first:
            self._waits.add((epoch, phase, peer))
        return first

    def was_first(self, epoch: int, phase: int, peer: int) -> bool:
        """Whether the wait in which this peer was missing was a first wait."""
        return not self._waits.isdisjoint({(epoch, phase, BARRIER), (epoch, phase, peer)})


class FlightRing:
    """A ring of the last :data:`NUM_CALLS` barriers and waits for signals that the host has launched. Reads no device
    until an error is raised, see flight_record.py.

    Attributes:
        calls: [launch, epoch, call, peer or -1, ns, counts or None] of each.
        epoch: epoch of the last barrier that the host has launched. Barriers of a graph count when they are captured,
            not when they are replayed; otherwise it is the epoch of the device.
        num_launched: number of barriers and waits that the host has launched.
    """

    def __init__(self) -> None:
        self.calls: deque[list[Any]] = deque(maxlen=NUM_CALLS)
        self.epoch = self.num_launched = 0

    def note(self, epoch: int, **counts: int) -> None:
        """Adds counts to the barrier of that epoch; the host knows these numbers without a wait."""
        for call in reversed(self.calls):
            if call[1] == epoch and call[3] < 0:
                call[-1] = {**(call[-1] or {}), **counts}
                return

    @property
    def is_in_dispatch(self) -> bool:
        """Whether the last call was a dispatch whose rows have not been combined."""
        trip = control.PHASE_DISPATCH_READY, control.PHASE_DISPATCH_DONE
        return bool(self.calls) and self.calls[-1][2] & 0xFF in trip

    def phases_since(self, epoch: int) -> list[int]:
        """Phases launched after the barrier of `epoch`; none if that barrier is no longer in the record."""
        phases: list[int] = []
        for _, other_epoch, call, peer, *_ in reversed(self.calls):
            if other_epoch == epoch and peer < 0:
                return phases[::-1]
            phases.append(call & 0xFF)
        return []


class Waits:
    """Launches the waits of this rank. Does not synchronise the host; on CPUs the host itself waits.

    Attributes:
        reports: the reports of plans from the device, see control.REPORT_SLOTS.
        flight: the record of launched waits. Other attributes are as in SymmetricHeap.
        compiles: whether first calls may compile, as during construction and on GPUs; else no wait is a first wait.
        startup_grace: finds the waits that `start_timeout_s` bounds.
        is_inside: whether this rank waits; also after a signal handler has raised in a wait of the host.
    """

    def __init__(
        self,
        peers: control.Peers,
        configurations: Configurations,
        timeout_s: float,
        start_timeout_s: float,
    ) -> None:
        self.timeout_s = timeout_s
        self.start_timeout_s = start_timeout_s
        self.peers = peers
        self.configurations = configurations
        self.device = peers.bases.device
        self.kernels = kernels.kernel_getter(self.device)
        is_pinned = self.device.type == "cuda"
        self.status = torch.zeros(
            control.STATUS_WORDS, dtype=torch.int64, device="cpu", pin_memory=is_pinned
        )
        self.reports = torch.zeros(
            (control.REPORT_SLOTS, control.SUMMARY_WORDS),
            dtype=torch.int64,
            device="cpu",
            pin_memory=is_pinned,
        )
        self.flight = FlightRing()
        self.compiles = True
        self.is_inside = False
        self.startup_grace = StartupGrace(kernels.compiled_counter(self.device))

    def wait(
        self,
        call: int,
        *,
        plan: int | None = None,
        peer: int = BARRIER,
        publish: Sequence[int] = (),
        fault: bool = False,
        nan_on_failure: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Waits for every rank, like SymmetricHeap.barrier, or for the signal of `peer`. A barrier is collective.

        Args:
            call: control.pack_call of the values to agree on, without the plan; for a signal only the phase.
            plan: the plan's generation, on which ranks must agree, too.
            fault: whether this rank fails the call.
        """
        shape = (self.peers.num_ranks, control.NUM_PUBLISHED) if peer == BARRIER else (1,)
        result = torch.empty(shape, dtype=torch.int64, device=self.device)
        words = (*publish, *_NO_WORDS[len(publish) :])
        ops = self.kernels()
        timeout_ns = 0
        current = builder() if num_dispatch_modes() else None  # a builder is a mode
        if current is None:
            timeout_ns, call = self._record(call, plan or 0, fault, peer)
        else:
            ops = kernels.for_device(self.device)
            # Only the last bits of a plan are in the call, and may be 0.
            changes = plan is not None and "plan" in current.numbers
            generation = current.numbers["plan"] if changes else plan or 0
            current.launches_with(
                self._record,
                (call, generation, fault, peer),
                {f"word_{n}": current.offset(word) for n, word in enumerate(words)},
                ("timeout_ns", "call"),
                nan_on_failure,
            )
        options: Any = {"timeout_ns": timeout_ns, "nan_on_failure": nan_on_failure}
        self.is_inside = True
        if peer == BARRIER:
            ops.barrier(self.peers, words, result, self.status, call=call, fault=fault, **options)
        else:
            ops.wait_for_signal(self.peers, peer, result, self.status, phase=call, **options)
        self.is_inside = False
        return result

    def _record(self, call: int, generation: int, fault: bool, peer: int) -> tuple[int, int]:
        """Records a wait before its launch, for the signal of `peer` or in a barrier. Returns its bound in nanoseconds,
        and the call with the plan's generation."""
        call |= generation * _GENERATION & _PLAN
        flight = self.flight
        bound_s = self.timeout_s
        flight.epoch += peer == BARRIER
        flight.num_launched += 1
        wait_record = [flight.num_launched, flight.epoch, call, peer, time.monotonic_ns(), None]
        flight.calls.append(wait_record)
        if self.compiles and self.startup_grace.may_compile(
            call, peer, epoch=flight.epoch, fault=fault
        ):
            # Never the longer bound in a graph: every replay would have it.
            _, bound_s = self.bound(not capture_id(self.device))
        return int(min(bound_s, _ENDLESS_S) * 1e9), call

    def bound(self, first: bool) -> tuple[str, float]:
        """Name and value of the bound of a wait, `first` as in StartupGrace."""
        if first and self.start_timeout_s > self.timeout_s:
            return "start_timeout_s", self.start_timeout_s
        return "timeout_s", self.timeout_s
