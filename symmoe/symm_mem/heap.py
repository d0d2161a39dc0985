"""The symmetric heap: one arena per rank that every rank of the group can address, and the barrier over it."""

from __future__ import annotations

import logging
import math
import operator
import struct
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.distributed as dist

from symmoe import kernels
from symmoe.errors import (
    FAULT_BYTES,
    TRAVELLING,
    ArgumentError,
    BackendUnavailable,
    ConfigMismatch,
    HeapClosed,
    HeapExhausted,
    HeapPoisoned,
    PeerError,
    StaleLease,
    SymmoeError,
    decode,
    encode,
    raise_for,
)
from symmoe.kernels import control
from symmoe.kernels.control import ControlLayout, Peers
from symmoe.symm_mem import host, nvshmem
from symmoe.symm_mem.abort import Report, read_report, tell_peers
from symmoe.symm_mem.access import Access, OneCall
from symmoe.symm_mem.arena import ALIGNMENT_BYTES, Arena
from symmoe.symm_mem.bootstrap import Bootstrap, warn_if_alone_by_mistake
from symmoe.symm_mem.first_times import FirstTimes
from symmoe.symm_mem.flight import FlightRecorder, flight_folder
from symmoe.symm_mem.garbage import Garbage
from symmoe.symm_mem.lease import Lease, lease_problem
from symmoe.symm_mem.machine import warn_if_too_large
from symmoe.symm_mem.records import abort_error, mismatch_error, plan_error, timeout_error
from symmoe.symm_mem.streams import Branch, capture_id, stream_order
from symmoe.symm_mem.unraised import UNRAISED, nobody_has_raised, was_left

logger = logging.getLogger("symmoe")

_PROTOCOL_VERSION = 4
_FINGERPRINT = struct.Struct("<q q q d")  # protocol version, num_bytes, backend, timeout_s
_BACKENDS = ("host", "nvshmem")
_START_TIMEOUT_S = 300.0
_MAX_S = 1e9  # 31 years; clocks count nanoseconds in 64 bits


@dataclass
class HeapStatistics:
    """Counters of one heap since its construction.

    Attributes:
        num_leases: leases made.
        num_staging_copies: times rows were copied to or from the heap because the caller brought no buffer on it (the
            slow path of dispatch_tokens and combine_tokens; MoELayer never takes it).
    """

    num_leases: int = 0
    num_staging_copies: int = 0


class SymmetricHeap:
    """Symmetric memory over the ranks of an expert-parallel group.

    Construction is collective over `group` and synchronises the host. Every later collective call on a heap has to be
    made by all its ranks in the same order. Calls on several CUDA streams run in the order in which the host makes
    them. Calls can be captured in a CUDA graph: leases made there are the graph's until :meth:`release_graphs`.

    Args:
        group: the EP process group; None is the default group, or a group of one without an initialised one.
        num_bytes: size of each rank's arena, the same on all ranks.
        backend: "nvshmem" (CUDA), "host" (CPU shared memory) or "auto": nvshmem where torch sees a GPU, else host.
        timeout_s: bound of every wait for a peer. math.inf is no bound, for measuring what the bound costs.
        start_timeout_s: bound, if it is longer, of waits for a peer that comes from something that ranks do once:
            during construction, and in the first calls of each kind, for which they compile kernels.

    With `SYMMOE_FLIGHT_DIR` set in the environment, the last calls are written there when an error of a barrier is
    raised (docs/reliability.md).

    Attributes:
        rank, num_ranks: in the group.
        device: where leases live.
        backend, backend_reason: what was picked, and why.
        peers, status: what kernels are given to reach the arenas and to report to the host.
        statistics: counters.
        trip_timer: gives a context for the kernels of a trip ("dispatch", "combine") on the current stream, or None.

    Raises:
        ArgumentError: `num_bytes`, `backend` or a timeout is not usable, on every rank; or `group` is none of this
            rank, here alone.
        BackendUnavailable: on every rank, if any rank cannot take part.
        ConfigMismatch: on every rank, if ranks disagree on an argument.
        PeerTimeout, PeerLost: a rank did not come, or has ended.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        num_bytes: int,
        backend: str = "auto",
        timeout_s: float = 30.0,
        start_timeout_s: float = _START_TIMEOUT_S,
    ) -> None:
        warn_if_alone_by_mistake(group)
        self._closed = True  # until everything below has worked
        self._poison: str | None = None  # why; an exception would keep frames alive
        self._unraised: SymmoeError | None = None  # see `check`
        self._access = Access()
        self._flight = FlightRecorder(flight_folder())
        self._patient_bootstrap = Bootstrap(group)
        # With a bound on every rank: messages without one go another way, and would not meet those of the peers.
        problem = _timeout_problem("start_timeout_s", start_timeout_s)
        self._bootstrap = Bootstrap(group, _START_TIMEOUT_S if problem else min(start_timeout_s, _MAX_S))
        self.rank, self.num_ranks = self._bootstrap.rank, self._bootstrap.num_ranks
        self._layout = ControlLayout(self.num_ranks)
        self.timeout_s, self.start_timeout_s = timeout_s, start_timeout_s
        self.num_bytes = num_bytes
        self.backend, self.backend_reason = _pick_backend(backend)
        self.statistics = HeapStatistics()
        self.trip_timer: Callable[[str], AbstractContextManager[None]] | None = None
        self._bootstrap.attempt(self._check_arguments)
        self._agree_on_configuration()
        logger.info("rank %d: backend %s (%s)", self.rank, self.backend, self.backend_reason)

        backend_class = host.HostBackend if self.backend == "host" else nvshmem.NvshmemBackend
        self._backend = backend_class(self._bootstrap, num_bytes)
        self.device = self._backend.device
        self._kernels = kernels.for_device(self.device)
        self._first_times = FirstTimes(kernels.compiled_counter(self.device))
        self.peers = Peers(
            rank=self.rank,
            num_ranks=self.num_ranks,
            bases=torch.tensor(self._backend.bases, dtype=torch.int64, device=self.device),
            views=tuple(self._backend.arena_tensor(rank) for rank in range(self.num_ranks)),
            layout=self._layout,
        )
        self.status = torch.zeros(
            control.STATUS_WORDS, dtype=torch.int64, device="cpu", pin_memory=self.device.type == "cuda"
        )
        self._status_words = self.status.numpy()
        self._arena = Arena(self._layout.num_bytes, num_bytes)
        self._graph_arenas: dict[int, Arena] = {}  # what captured graphs use: no call outside may get it
        self._streams = stream_order(self.device)
        self._num_faults = 0
        self._is_waiting = False
        # Leases may come and go in any thread.
        self._memory = threading.RLock()
        # Spans and whose they are; without the lock, because the collector may be in the middle of what holds it.
        self._dropped: deque[tuple[Arena, tuple[int, int]]] = deque()
        self._live: dict[int, int] = {}  # offset to size of every lease; the leases themselves are not held
        self._garbage = Garbage()
        self._one_call = OneCall(self._access, self._memory, self._streams)
        self.peers.views[self.rank][: self._layout.num_bytes].zero_()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self._bootstrap.barrier()  # nobody may signal into a control block that is not zeroed yet
        self._closed = False
        self._warm_up()

    # -- memory ---------------------------------------------------------------------------------------------------

    def lease(
        self, shape: tuple[int, ...], dtype: torch.dtype, *, name: str = "lease", phase: int | None = None
    ) -> Lease:
        """Memory for a contiguous tensor. Local; does not synchronise; contents are undefined.

        Leases that peers shall reach through :meth:`Lease.peer` must be made in the same order on all ranks.

        Args:
            phase: the next barrier of the collective call that the lease is for, if the peers are about to enter it:
                a rank that has no room then fails the call on every rank (see :meth:`fail`).

        Raises:
            HeapExhausted: no free range is large enough.
        """
        self.check()
        self.fail_for(lease_problem(shape, dtype), phase)
        shape = tuple(operator.index(size) for size in shape)
        num_bytes = dtype.itemsize * math.prod(shape)
        lease = self._new_lease(name, shape, dtype)
        if lease is None and num_bytes <= self._arena.capacity_bytes and self._garbage.collect(self._live_offsets()):
            lease = self._new_lease(name, shape, dtype)
        if lease is None:
            arena = self._arena
            problem = (
                f"lease '{name}' {list(shape)} {dtype} needs {num_bytes} bytes: the largest free range has "
                f"{arena.largest_free_bytes}, {arena.used_bytes} of {arena.capacity_bytes} bytes are leased, "
                f"high-water mark {arena.high_water_bytes}; give the heap more num_bytes (now {self.num_bytes})"
            )
            self.fail(HeapExhausted(problem), phase)
        return lease

    def _new_lease(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Lease | None:
        """A lease, or None if no free range is large enough."""
        with self._memory:
            self._take_back_dropped()
            arena, span = self._take(dtype.itemsize * math.prod(shape))
            if span is None:
                return None
            self.statistics.num_leases += 1
            self._streams.taken(span)
            lease = Lease(self, name, shape, dtype, (arena, span), self.statistics.num_leases)
            self._live[lease.offset] = lease.num_bytes
            return lease

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies in this rank's arena. Local."""
        if tensor.device != self.device or self._closed:
            return False
        if tensor.numel() == 0:  # torch gives an empty tensor no address
            return True
        start = self._backend.bases[self.rank]
        end = tensor.data_ptr() + tensor.numel() * tensor.element_size()
        return start + self._layout.num_bytes <= tensor.data_ptr() and end <= start + self.num_bytes

    def offset_of(self, tensor: torch.Tensor, *, phase: int | None = None) -> int:
        """Byte offset in the arena of a tensor that lies in a live lease. Local.

        Args:
            phase: as in :meth:`lease`.

        Raises:
            StaleLease: the heap owns the memory, but no live lease holds it.
        """
        if tensor.numel() == 0:
            return self._layout.num_bytes
        offset = tensor.data_ptr() - self._backend.bases[self.rank]
        end = offset + tensor.numel() * tensor.element_size()
        with self._memory:
            self._take_back_dropped()
            is_leased = any(start <= offset and end <= start + size for start, size in self._live.items())
        if not is_leased:
            problem = f"the {list(tensor.shape)} tensor at arena offset {offset} belongs to no live lease"
            self.fail(StaleLease(problem), phase)
        return offset

    def _live_offsets(self) -> tuple[int, ...]:
        with self._memory:
            return tuple(self._live)

    @property
    def high_water_bytes(self) -> int:
        """The most bytes that were leased at one time."""
        return self._arena.high_water_bytes

    @property
    def leased_bytes(self) -> int:
        """Bytes that are leased now, with all that captured graphs hold."""
        with self._memory:
            self._take_back_dropped()
            return self._arena.used_bytes

    @property
    def graph_bytes(self) -> int:
        """Bytes that captured CUDA graphs hold, leased in them or not."""
        return sum(arena.capacity_bytes for arena in self._graph_arenas.values())

    def release_graphs(self) -> None:
        """Gives back the memory of every graph captured so far; none of them may be replayed any more. Local."""
        with self._memory:
            graph_arenas = list(self._graph_arenas.values())
            self._graph_arenas.clear()
            for arena in graph_arenas:
                for span in arena.clear():
                    self._give_back(self._arena, span)

    def _take(self, num_bytes: int) -> tuple[Arena, tuple[int, int] | None]:
        """A span, and the arena that it goes back to. The calls of a captured graph share spans among themselves."""
        capture = capture_id(self.device)
        if not capture:
            return self._arena, self._arena.take(num_bytes)
        arena = self._graph_arenas.setdefault(capture, Arena(0, 0))
        span = arena.take_or_grow(num_bytes, self._arena)
        return (arena, span) if span is not None else (self._arena, None)

    def _give_back(self, arena: Arena, span: tuple[int, int]) -> None:
        if self._access.is_given:
            with self._memory:
                self._return(arena, span, self._streams.released)

    def _return(self, arena: Arena, span: tuple[int, int], note: Callable[[tuple[int, int]], None]) -> None:
        self._live.pop(span[0], None)
        if arena is not self._arena or not capture_id(self.device):  # a capture begins when all before it is done
            note(span)
        if arena is not self._arena and arena not in self._graph_arenas.values():
            arena = self._arena  # the graph has been released meanwhile
        arena.give_back(*span)

    def _take_back_dropped(self) -> None:
        """Takes back the spans of leases that were dropped without release; see lease.py."""
        while self._dropped:
            self._return(*self._dropped.popleft(), self._streams.dropped)

    @property
    def side_stream(self) -> torch.cuda.Stream | None:
        """A CUDA stream for what callers want to run beside the heap's calls, always the same one; None on CPUs."""
        return self._streams.side_stream

    def branch(self) -> Branch:
        """Where a collective call moves rows beside the GEMMs of the current stream. Joined before the call ends."""
        return Branch(self._streams.wire_stream)

    def one_call(self) -> AbstractContextManager[None]:
        """Goes around the kernels of a collective call, which start after those of the last one (see streams.py)."""
        return self._one_call

    def timed(self, trip: str) -> AbstractContextManager[None]:
        """Goes around what a trip does on the current stream, whose time the `trip_timer` may want to know."""
        return nullcontext() if self.trip_timer is None else self.trip_timer(trip)

    # -- barrier and faults ---------------------------------------------------------------------------------------

    def check(self, phase: int | None = None, *, waits: bool = False) -> None:
        """Raises what a kernel or a peer has reported and nobody has raised yet. Local; does not synchronise.

        But for one case: a rank that has left the call in which the error was found by an exception of its own, and
        comes with the next plan, settles it with its peers in that plan's barrier (see symm_mem/unraised.py).

        Args:
            phase: the first barrier of the collective call that begins here.
            waits: the call waits for its stream anyway, so that this may do so too.

        Raises:
            HeapClosed, HeapPoisoned: the heap is not usable any more.
            ConcurrentUse: there is something to raise, and another thread is in a call.
            PeerTimeout, PeerAborted: a peer did not arrive, or gave up; the heap is poisoned from now on.
            SymmoeError: an error of another rank, as that rank's class.
        """
        self._access.check()
        if self._closed:
            raise HeapClosed("the symmetric heap has been closed")
        if self._poison is not None:
            raise HeapPoisoned(f"an earlier call failed: {self._poison}")
        if waits and self._flight.is_in_dispatch and not capture_id(self.device):
            self._synchronize()  # an error of that dispatch may still be on its way
        if self._status_words[control.STATUS_KIND] != control.STATUS_OK:
            with self._access:
                self._raise_status(phase)

    def _raise_status(self, phase: int | None) -> None:
        """Raises the error on record if there is one, or keeps it for the plan's barrier that is next."""
        if self._status_words[control.STATUS_KIND] == control.STATUS_OK:
            return  # or another thread has raised it meanwhile
        failed_phase = int(self._status_words[control.STATUS_PHASE])
        error = self._take_status()
        try:
            if self._poison is None and not capture_id(self.device):
                since = self._flight.phases_since(self._flight.epoch)  # by now that of the error
                if was_left(failed_phase, [*since, phase]):
                    if control.PHASE_PLAN in since:  # which was no barrier on the device: the peers are still in it
                        self.fail(error, control.PHASE_PLAN)
                    self._unraised = error
                    return
            raise error
        finally:
            del error  # as in `fail`

    def _settle(self, received: torch.Tensor) -> None:
        """Raises, or drops, the error that :meth:`check` has kept for this barrier."""
        error, self._unraised = self._unraised, None
        try:
            if nobody_has_raised(self.read_back(received)):
                raise_for(error)
            logger.warning(
                "rank %d has left a call by an exception of its own, in which its peers have raised: %s",
                self.rank,
                error,
            )
        finally:
            del error

    def barrier(
        self, phase: int, *, publish: tuple[int, ...] = (), spoils: torch.Tensor | None = None, **agreed: int
    ) -> torch.Tensor:
        """Waits (on the device) for every rank, bounded by `timeout_s`, or by `start_timeout_s` where ranks may have to
        compile first. Collective; does not synchronise the host.

        Args:
            phase: one of control.PHASE_*; error texts show its name.
            publish: up to control.NUM_PUBLISHED integers for the peers.
            spoils: rows that are filled with NaN if the call has failed.
            agreed: fields of control.CALL_FIELDS that must be equal on all ranks, like the phase itself.

        Returns:
            int64[R, NUM_PUBLISHED]: what every rank published; all -1 if the call has failed.
        """
        with self._access:
            if self._unraised is not None:
                if phase != control.PHASE_PLAN:
                    self.fail(self._unraised, phase)
                publish = UNRAISED
            call = control.pack_call(phase=phase, **agreed)
            received = self._launch_barrier(call, publish, fault=False, spoils=spoils)
            if self.device.type == "cpu":
                self.check()
            if self._unraised is not None:
                self._settle(received)
            return received

    def send_signal(self, rank: int) -> None:
        """Tells `rank` that what the current stream has written there since the last barrier is complete."""
        self._kernels.send_signal(self.peers, rank)

    def wait_for_signal(self, rank: int, phase: int, *, spoils: torch.Tensor | None = None) -> torch.Tensor:
        """Waits (on the device) for `rank`'s signal since the last barrier, bounded as a barrier is.

        Args:
            spoils: rows that are filled with NaN if the call has failed.

        Returns:
            int64[1]: 0, or -1 if the call has failed.
        """
        arrived = torch.empty(1, dtype=torch.int64, device=self.device)
        self._flight.wait_launched(phase, rank)
        timeout_ns = self._timeout_ns(self._first_times.is_first_signal(phase, rank, epoch=self.epoch))
        self._is_waiting = True
        self._kernels.wait_for_signal(
            self.peers, rank, arrived, self.status, phase=phase, timeout_ns=timeout_ns, spoils=spoils
        )
        self._is_waiting = False
        if self.device.type == "cpu":
            self.check()
        return arrived

    @property
    def epoch(self) -> int:
        """Epoch of the last barrier that this host has launched; the same on all ranks after the same calls."""
        return self._flight.epoch

    def note_counts(self, **counts: int) -> None:
        """Adds numbers that the host knows to the last call's line in the flight record."""
        self._flight.note(**counts)

    def synchronize(self) -> None:
        """Waits for this rank's stream and raises what has been reported. Local.

        On GPUs this is how an error of a peer's `dispatch_tokens`, `combine_tokens` or static-capacity plan is raised
        in the call it belongs to, instead of at this rank's next call on the heap.
        """
        self._synchronize()
        self.check()

    def read_back(self, tensor: torch.Tensor) -> torch.Tensor:
        """A CPU copy of a small device tensor. Waits for this rank's stream up to here, and for nothing else."""
        if self.device.type == "cpu":
            return tensor
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        copy.copy_(tensor, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        event.synchronize()
        return copy

    def fail(self, error: SymmoeError, phase: int | None) -> NoReturn:
        """Fails the collective call whose next barrier is `phase`: every rank raises `error`. Always raises.

        Synchronises; moves no payload. If several ranks fail the call, all raise the error of the first of them.
        Without a phase, and while a CUDA graph is captured, it raises `error` here and does nothing else.
        """
        try:
            if phase is not None and not capture_id(self.device):
                with self.one_call():
                    error = self._launch_fault(error, phase)
            raise error
        finally:
            # A local name would keep the traceback in a cycle, and with it the leases of the frames it passed.
            del error

    def fail_for(self, problem: SymmoeError | None, phase: int | None) -> None:
        """Fails the call if there is a problem. The caller keeps no name for it, see :meth:`fail`."""
        try:
            if problem is not None:
                self.fail(problem, phase)
        finally:
            del problem

    def tell(self, error: Exception, phase: int) -> None:
        """Has the peers raise an error that only this rank has, as :meth:`fail` does; the caller raises it here.

        Synchronises. Does nothing if the peers cannot be told any more.
        """
        if self._closed or self._poison is not None:
            return
        text = str(error) if isinstance(error, SymmoeError) else f"{type(error).__name__}: {error}"
        kind = next((kind for kind in TRAVELLING if kind is type(error)), SymmoeError)
        try:
            self.fail(kind(text), phase)
        except SymmoeError:
            pass  # of this rank or of an earlier one: what it says is for the others
        except Exception as problem:  # noqa: BLE001 - a GPU that is out of order
            logger.warning("rank %d cannot tell its peers of an error: %s", self.rank, problem)
            self.abort(text)

    @property
    def global_ranks(self) -> list[int]:
        """Ranks of the heap's group in the default process group, in the order of the group. Local."""
        return self._bootstrap.global_ranks

    def agree(self, problem: SymmoeError | None) -> None:
        """Raises the first rank's problem on every rank; returns if nobody has one. For slow work on the host: it is
        collective over the process group, waits as long as the group does, and uses no symmetric memory."""
        self._patient_bootstrap.agree(problem)

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        """Every rank's payload, of whatever length, in rank order; collective as :meth:`agree` is."""
        lengths = self._patient_bootstrap.all_gather_bytes(len(payload).to_bytes(8, "little"), num_bytes=8)
        sizes = [int.from_bytes(length, "little") for length in lengths]
        gathered = self._patient_bootstrap.all_gather_bytes(payload, num_bytes=max(1, *sizes))
        return [data[:size] for data, size in zip(gathered, sizes, strict=True)]

    def abort(self, reason: str) -> None:
        """Gives up: peers that wait for this rank, or will, raise PeerAborted at once instead of after `timeout_s`.

        For a rank that has an error of its own between two collective calls; leaving a `with heap:` block by an
        exception does it. Local, and does not wait for anybody. Nothing but :meth:`close` works on the heap afterwards.
        Does nothing if the heap is closed or a peer's failure has been raised already, or in a fork of the process that
        made the heap. May be called from any thread, whatever the others do.

        Args:
            reason: for the peers' error text; a few hundred bytes of it travel.
        """
        if self._closed or self._poison is not None or not self._access.is_given:
            return
        self._poison = f"this rank gave up: {reason}"
        record = SymmoeError(self._poison)
        self._describe(record, [0] * control.STATUS_WORDS)
        self._give_up(Report(reason))
        self._write_down(record)

    def _give_up(self, report: Report) -> None:
        """Tells the peers; a GPU that is out of order, or a capture, keeps them waiting until their own bound."""
        self._num_faults += 1
        if capture_id(self.device):
            return
        try:
            with self._streams.at_once():
                kept_bits = 0 if self._is_waiting or report.missing >= 0 else control.EPOCH_MASK
                tell_peers(self.peers, report, turn=self._num_faults & 1, kept_bits=kept_bits)
        except RuntimeError as problem:
            logger.warning("rank %d cannot tell its peers that it gives up: %s", self.rank, problem)

    def _describe(self, error: SymmoeError, status: list[int]) -> None:
        """Gives the error its flight record."""
        if capture_id(self.device):
            return
        facts = {"backend": self.backend, "timeout_s": self.timeout_s}
        try:
            with self._streams.at_once():
                error.flight = self._flight.describe(error, status, self.peers, facts)
        except RuntimeError as problem:
            logger.warning("rank %d cannot make a flight record: %s", self.rank, problem)

    def _write_down(self, error: SymmoeError) -> None:
        """Writes the error's flight record where records go, and says so in its text."""
        if error.flight is not None and (where := self._flight.write(error.flight)):
            error.args = (f"{error}{where}",)

    def _launch_fault(self, error: SymmoeError, phase: int) -> SymmoeError:
        """Tells the peers, and returns what every rank raises."""
        epoch = int(self._counters[control.BARRIER_EPOCH]) + 1
        payload = torch.frombuffer(bytearray(epoch.to_bytes(8, "little") + encode(error)), dtype=torch.uint8)
        # Two slots in turn: a peer may still have to read the last fault, but has read the one before.
        self._num_faults += 1
        for rank in range(self.num_ranks):
            self._inbox(rank, sender=self.rank)[self._num_faults & 1, : payload.numel()].copy_(payload)
        self._launch_barrier(control.pack_call(phase=phase), (), fault=True)
        self._synchronize()
        return self._take_status(error)

    def _launch_barrier(
        self, call: int, publish: tuple[int, ...], *, fault: bool, spoils: torch.Tensor | None = None
    ) -> torch.Tensor:
        received = torch.empty((self.num_ranks, control.NUM_PUBLISHED), dtype=torch.int64, device=self.device)
        words = tuple(publish) + (0,) * (control.NUM_PUBLISHED - len(publish))
        self._flight.barrier_launched(call)
        timeout_ns = self._timeout_ns(self._first_times.is_first_barrier(call, epoch=self.epoch, fault=fault))
        self._is_waiting = True  # stays so if a signal handler raises in a wait of the host
        self._kernels.barrier(
            self.peers,
            words,
            received,
            self.status,
            call=call,
            fault=fault,
            timeout_ns=timeout_ns,
            spoils=spoils,
        )
        self._is_waiting = False
        return received

    def _timeout_ns(self, first: bool) -> int | None:
        """Bound of a wait, `first` as in FirstTimes; in a graph, where every replay has it, never the longer one."""
        _, bound_s = self._bound(first and not capture_id(self.device))
        return None if bound_s == math.inf else int(bound_s * 1e9)

    def _bound(self, first: bool) -> tuple[str, float]:
        """Name and value of the bound of a wait."""
        if first and self.start_timeout_s > self.timeout_s:
            return "start_timeout_s", self.start_timeout_s
        return "timeout_s", self.timeout_s

    def _take_status(self, own: SymmoeError | None = None) -> SymmoeError:
        """The error on record. All but those of peers that are gone are over with it: the next barrier counts again.

        Args:
            own: the error of a fault of this rank.
        """
        words = [int(word) for word in self._status_words]
        kind = words[control.STATUS_KIND]
        self._unraised = None  # every rank raises this one instead
        error: SymmoeError
        if kind in (control.STATUS_TIMEOUT, control.STATUS_ABORT):
            error = self._peer_failure(words)
            self._poison = str(error)
            self._write_down(error)
            return error
        if capture_id(self.device):
            return SymmoeError("an earlier call has failed; end the capture and call heap.check() for the error")
        self._synchronize()  # barriers of the failed call that are on their way must still find the flag
        self._counters[control.FAULTED] = 0
        self._flight.epoch = int(self._counters[control.BARRIER_EPOCH])  # not all that were launched have counted
        self._synchronize()  # the next call may come on another stream
        self._status_words[control.STATUS_KIND] = control.STATUS_OK
        if kind == control.STATUS_FAULT and words[control.STATUS_PEER] == self.rank and own is not None:
            error = own
        elif kind == control.STATUS_FAULT:
            error = self._peer_error(words[control.STATUS_PEER], words[control.STATUS_EPOCH])
        else:
            error = plan_error(words) if kind == control.STATUS_PLAN else mismatch_error(words)
        self._describe(error, words)
        self._write_down(error)
        return error

    def plan_failure(self, report: list[int]) -> SymmoeError:
        """The error of a plan whose report (control.SUM_*) the host has read itself. Local."""
        words = [0] * control.STATUS_WORDS
        words[control.STATUS_KIND], words[control.STATUS_PHASE] = control.STATUS_PLAN, control.PHASE_PLAN
        words[control.STATUS_PEER] = report[control.SUM_ERROR_RANK]
        words[control.STATUS_EXPECTED], words[control.STATUS_SEEN] = (
            report[control.SUM_LIMIT],
            report[control.SUM_VALUE],
        )
        words[control.STATUS_EPOCH], words[control.STATUS_WHERE] = report[control.SUM_ERROR], report[control.SUM_WHERE]
        error = plan_error(words)
        self._describe(error, words)
        self._write_down(error)
        return error

    def _peer_failure(self, words: list[int]) -> PeerError:
        """The error of a peer that did not come or gave up. Of the former, all ranks shall name the same one."""
        if words[control.STATUS_KIND] == control.STATUS_TIMEOUT:
            phase = words[control.STATUS_PHASE]
            first = self._first_times.was_first(words[control.STATUS_EPOCH], phase, words[control.STATUS_PEER])
            timeout = timeout_error(words, *self._bound(first))
            self._describe(timeout, words)  # before this rank writes over what its peers have sent
            self._give_up(Report(str(timeout), timeout.rank, phase, timeout.expected, timeout.seen, int(first)))
            return timeout
        sender, report = words[control.STATUS_PEER], Report("it has not said why")
        if not capture_id(self.device):  # which may not read
            with self._streams.at_once():
                report = read_report(self.peers, sender)
        error = abort_error(report, sender, self.rank, *self._bound(bool(report.first)))
        self._describe(error, words)
        return error

    @property
    def _counters(self) -> torch.Tensor:
        """int64 [NUM_COUNTERS], this rank's."""
        return self.peers.region(self.rank, self._layout.counters, (control.NUM_COUNTERS,), torch.int64)

    def _peer_error(self, rank: int, epoch: int) -> SymmoeError:
        for slot in self._inbox(self.rank, sender=rank).cpu():
            payload = slot.numpy().tobytes()
            if int.from_bytes(payload[:8], "little") == epoch:
                return decode(payload[8 : 8 + FAULT_BYTES], rank=rank)
        return SymmoeError(f"rank {rank} failed in epoch {epoch}, and has failed again since")

    def _inbox(self, rank: int, *, sender: int) -> torch.Tensor:
        """uint8 [2, INBOX_BYTES]: where `sender` puts its faults for `rank`."""
        shape = (2, self.num_ranks, control.INBOX_BYTES)
        return self.peers.region(rank, self._layout.fault_inbox, shape, torch.uint8)[:, sender]

    # -- lifetime -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends the heap: collective, idempotent, synchronises. Waits for the peers at most `timeout_s`.

        After a timeout, its own included, or an abort it is local. The arena is zeroed and freed; NVSHMEM can free it
        collectively only, else it goes with the process. Tensors over the arena must not be used afterwards.

        In a process that has been forked from the one that made the heap it does nothing: the arena is not its own.

        Raises:
            PeerTimeout, PeerAborted: a peer did not come to close.
            ConcurrentUse: another thread is in a call; the heap stays open.
        """
        if self._closed or not self._access.is_given:
            return
        # Of a heap that nothing works on any more, no call is worth waiting for.
        with self._access if self._poison is None else nullcontext():
            error, together = None, False
            try:
                error, together = self._meet_to_close()
                raise_for(error)
            finally:
                del error  # as in `fail`
                self._end(together)

    def _meet_to_close(self) -> tuple[SymmoeError | None, bool]:
        """What :meth:`close` raises, and whether all ranks have come to close."""
        error, together = None, False
        try:
            self._synchronize()
            if self._poison is None and self._status_words[control.STATUS_KIND] != control.STATUS_OK:
                error = self._take_status()  # nobody has raised it yet; unless it is a timeout, the peers are there
            if self._poison is None:
                self._launch_barrier(control.pack_call(phase=control.PHASE_CLOSE), (), fault=False)
                self._synchronize()
                together = self._status_words[control.STATUS_KIND] == control.STATUS_OK
                if not together:
                    error = self._take_status()
        except BaseException as problem:  # a signal handler's, the GPU's: the peers wait, and shall not do so in vain
            self.abort(f"{type(problem).__name__}: {problem}")
            raise
        if not together and self._poison is None:
            self._give_up(Report("it has closed its heap"))  # the peers were in another call, and go on
        return error, together

    def _end(self, together: bool) -> None:
        """No trace of tokens is left here; `together` or, once the peers have been told, alone."""
        self._closed = True
        if together:
            self._backend.close()
        else:
            self._backend.abandon()

    def __enter__(self) -> SymmetricHeap:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: object) -> None:
        if exc_type is None:
            self.close()
        elif not self._closed and self._access.is_given:  # the peers may be anywhere: no collective on the way out
            self.abort(f"{exc_type.__name__}: {exc}")
            self._end(together=False)

    def __repr__(self) -> str:
        if getattr(self, "_closed", True):  # or not made yet
            return "SymmetricHeap(closed)"
        state = "open" if self._poison is None else f"poisoned: {self._poison}"
        return (
            f"SymmetricHeap(rank {self.rank} of {self.num_ranks}, {self.backend} backend on {self.device}, "
            f"{self.leased_bytes} of {self._arena.capacity_bytes} bytes leased, {state})"
        )

    def __deepcopy__(self, memo: dict[int, object]) -> SymmetricHeap:
        """A copy of a model shares the heap, as it shares the process group."""
        return self

    def __reduce__(self) -> NoReturn:
        """What holds a heap (a layer, a model, a plan) cannot be pickled, nor sent to another process."""
        raise ArgumentError(
            "a SymmetricHeap, and a layer with it, belongs to this process and cannot be pickled: save the layer's "
            "state_dict() or call symmoe.checkpoint.save_checkpoint, and load that into a layer on a heap of its own"
        )

    # -- construction ---------------------------------------------------------------------------------------------

    def _check_arguments(self) -> None:
        least = self._layout.num_bytes + ALIGNMENT_BYTES
        if self.backend not in _BACKENDS:
            raise ArgumentError(f"backend ({self.backend!r}) must be 'auto', 'host' or 'nvshmem'")
        if not isinstance(self.num_bytes, int) or not least <= self.num_bytes < 1 << 63:
            raise ArgumentError(
                f"num_bytes ({self.num_bytes!r}) must be an int of at least {least} for {self.num_ranks} ranks, "
                "and less than 2**63"
            )
        raise_for(_timeout_problem("timeout_s", self.timeout_s))
        raise_for(_timeout_problem("start_timeout_s", self.start_timeout_s))
        missing = host.preflight() if self.backend == "host" else nvshmem.preflight(self.num_bytes)
        if missing:
            raise BackendUnavailable(missing)
        if self.backend == "host" and self.rank == 0:
            warn_if_too_large(self.num_bytes, self.num_ranks)

    def _agree_on_configuration(self) -> None:
        """Raises on every rank if ranks disagree. Collective."""
        mine = _FINGERPRINT.pack(_PROTOCOL_VERSION, self.num_bytes, _BACKENDS.index(self.backend), self.timeout_s)
        gathered = [_FINGERPRINT.unpack(f) for f in self._bootstrap.all_gather_bytes(mine, num_bytes=_FINGERPRINT.size)]
        for index, field in enumerate(("protocol version", "num_bytes", "backend", "timeout_s")):
            values = [fingerprint[index] for fingerprint in gathered]
            if len(set(values)) > 1:
                shown = [_BACKENDS[v] for v in values] if field == "backend" else values
                raise ConfigMismatch(f"{field} differs between ranks: {shown}")

    def _warm_up(self) -> None:
        """Compiles the barrier, and shows that ranks reach each other."""
        for _ in range(2):  # both halves of the mailbox
            self._launch_barrier(control.pack_call(phase=control.PHASE_START), (), fault=False)
        self._synchronize()
        self.check()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _timeout_problem(name: str, value: object) -> ArgumentError | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and (0 < value <= _MAX_S or value == math.inf):
        return None
    return ArgumentError(f"{name} ({value!r}) must be a number greater than 0, of at most {_MAX_S:.0e} s or math.inf")


def _pick_backend(backend: str) -> tuple[str, str]:
    if backend != "auto":
        return backend, "asked for"
    if torch.cuda.is_available():
        return "nvshmem", f"auto: torch sees {torch.cuda.get_device_name()}"
    return "host", "auto: torch sees no CUDA device"
