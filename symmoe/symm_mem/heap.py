"""The symmetric heap: one arena per rank that every rank of the group can address, and the barrier over it."""

from __future__ import annotations

import itertools
import logging
import math
import operator
import struct
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist

from symmoe import kernels
from symmoe.errors import (
    ArgumentError,
    BackendUnavailable,
    ConcurrentUse,
    ConfigMismatch,
    HeapClosed,
    HeapExhausted,
    HeapPoisoned,
    PeerError,
    StaleLease,
    SymmoeError,
    raise_for,
)
from symmoe.kernels import control
from symmoe.kernels.control import ControlLayout, Peers
from symmoe.nodes.place import Place, find_place
from symmoe.nodes.rail import Messages
from symmoe.nodes.topology import RankMaps, find_topology, make_rank_maps
from symmoe.symm_mem import host_backend, nvshmem_backend
from symmoe.symm_mem.arena import ALIGNMENT_BYTES
from symmoe.symm_mem.bootstrap import Bootstrap, NodeBootstrap, read_tape_mode, warn_if_alone_by_mistake
from symmoe.symm_mem.configurations import Configurations
from symmoe.symm_mem.faults import UNRAISED, Faults
from symmoe.symm_mem.inbox import Report
from symmoe.symm_mem.lease import Lease, lease_problem
from symmoe.symm_mem.mates import Mates
from symmoe.symm_mem.memory import Memory
from symmoe.symm_mem.rail_start import start_rail
from symmoe.symm_mem.room_for_rows import RowHistory
from symmoe.symm_mem.streams import Branch, NoStreams, StreamOrder, capture_id
from symmoe.symm_mem.thread_access import Access, OneCall
from symmoe.symm_mem.waits import Waits
from symmoe.tape.recorder import Tapes, recorded, recorded_on_cpus
from symmoe.torch_internals import STOPS_RECOMPUTATION

logger = logging.getLogger("symmoe")

_PROTOCOL_VERSION = 6
_FINGERPRINT = struct.Struct("<q q q d q")  # protocol version, num_bytes, backend, timeout_s, ranks_per_node
_BACKENDS = ("host", "nvshmem")
_START_TIMEOUT_S = 300.0
_MAX_S = 1e9  # 31 years; clocks count nanoseconds in 64 bits

_NUMBERS = itertools.count()
_HEAPS: weakref.WeakValueDictionary[int, SymmetricHeap] = weakref.WeakValueDictionary()


def heap_numbered(number: int | None) -> SymmetricHeap | None:
    """The heap of this process with that number; None if there is none any more, or for None."""
    return None if number is None else _HEAPS.get(number)


class Compared(Protocol):
    """What ranks tell each other in the barrier of one plan."""

    def words(self) -> tuple[int, ...]:
        """Of this rank, none below 0."""

    def compare(self, received: Sequence[Sequence[int]]) -> None:
        """Looks at those of all ranks."""


class SymmetricHeap:
    """Symmetric memory over the ranks of an expert-parallel group.

    Construction is collective over `group` and synchronises the host. Every later collective call on a heap has to be
    made by all its ranks in the same order. Calls on several CUDA streams run in the order in which the host makes
    them. Calls can be captured in a CUDA graph: leases made there are the graph's until :meth:`release_graphs`.

    Args:
        group: the EP process group; None is the default group, or a group of one without an initialised one.
        num_bytes: size of each rank's arena, the same on all ranks.
        backend: "nvshmem" (CUDA), "host" (CPU shared memory) or "auto": nvshmem where torch sees a GPU, else host.
        timeout_s: bound of every wait for a peer. math.inf means no bound, to measure what the bound costs.
        start_timeout_s: bound, if longer, of waits for a peer that may be doing work which is done once: during
            construction, and in the first calls of each kind, for which ranks compile kernels.
        ranks_per_node: ranks whose memory is shared; the others are reached over the network. None: all ranks on one
            machine, or of one NVLink domain. It may cut these into nodes, to try what several do; it joins none.

    With `SYMMOE_FLIGHT_DIR` set in the environment, the last calls are written there when an error of a barrier is
    raised (docs/reliability.md). `SYMMOE_TAPES` says whether calls that repeat are played from tapes: "on", "off", or
    "audit", where each runs and is compared with its tape (docs/design.md). Both are read here, once.

    Attributes:
        rank, num_ranks: in the group.
        topology: which ranks are on which node.
        number: of this heap in this process: operators of torch take it, see :func:`heap_numbered`.
        device: where leases live.
        backend, backend_reason: the picked backend, and why.
        peers, status: arguments by which kernels reach the arenas of this node and report to the host.
        count_peers: the same for the count table, which has a row for each rank of the group: in place of a rank of
            another node, the rank with its index here.
        statistics: counters.
        captured_reports, room_factor: None, or where the reports of plans go in :meth:`fixed_room`, and its factor.
        configurations: numbers of layers' configurations, which plans compare.
        first_step: None, or what the next plan compares between the ranks of a node.
        trip_timer: None, or gives a context for the kernels of a trip ("dispatch", "combine") on the current stream.

    Raises:
        ArgumentError: `num_bytes`, `backend`, `ranks_per_node` or a timeout is not usable, on every rank; or this rank
            is not in `group`, only on this rank.
        BackendUnavailable: on every rank, if any rank cannot take part, or nodes differ in size or cannot connect.
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
        ranks_per_node: int | None = None,
    ) -> None:
        warn_if_alone_by_mistake(group)
        self._closed = True  # until everything below has worked
        self._access = Access()
        self._patient_bootstrap = Bootstrap(group)
        # Every rank sets a bound: messages without one go another way, and would not meet those of the peers.
        problem = _timeout_problem("start_timeout_s", start_timeout_s)
        self._bootstrap = Bootstrap(group, _START_TIMEOUT_S if problem else min(start_timeout_s, _MAX_S))
        self.rank, self.num_ranks = self._bootstrap.rank, self._bootstrap.num_ranks
        self.number = next(_NUMBERS)
        _HEAPS[self.number] = self
        self.num_bytes = num_bytes
        self.backend, self.backend_reason = _pick_backend(backend)
        self._bootstrap.attempt(partial(self._check_arguments, timeout_s, start_timeout_s, ranks_per_node))
        self._agree_on_configuration(timeout_s, ranks_per_node)
        self.topology = find_topology(self._find_domains(), self.rank, ranks_per_node)
        node = self.topology.ranks
        bootstrap = NodeBootstrap(self._bootstrap, node) if self.spans_nodes else self._bootstrap
        self._layout = ControlLayout(len(node), self.num_ranks)
        logger.info("rank %d: backend %s (%s)", self.rank, self.backend, self.backend_reason)

        backend_class = host_backend.HostBackend if self.backend == "host" else nvshmem_backend.NvshmemBackend
        self._backend = backend_class(bootstrap, num_bytes)
        self.device = self._backend.device
        self.peers = Peers(
            rank=self.topology.local_rank,
            num_ranks=len(node),
            bases=torch.tensor(self._backend.bases, dtype=torch.int64, device=self.device),
            views=tuple(self._backend.arena_tensor(rank) for rank in range(len(node))),
            layout=self._layout,
            group_ranks=node if self.spans_nodes else (),
        )
        self._rank_maps = make_rank_maps(self.topology, self.device) if self.spans_nodes else None
        self.count_peers = self._make_count_peers() if self.spans_nodes else self.peers
        self._streams = StreamOrder(self.device) if self.device.type == "cuda" else NoStreams()
        self._memory = Memory(self.peers, self._backend.arena_tensor, self._access, self._streams)
        self._one_call = OneCall(self._access, self._memory.lock, self._streams)
        self.configurations = Configurations(self._bootstrap)
        self._waits = Waits(self.peers, self.configurations, timeout_s, start_timeout_s)
        self._mates = self._make_mates(start_timeout_s) if self.spans_nodes else None
        self._faults = Faults(self._waits, self._streams, self._one_call, self.backend, self._mates)
        self.statistics = self._memory.statistics
        self._row_histories: dict[Hashable, RowHistory] = {}
        self._num_errors = 0
        self.captured_reports: list[torch.Tensor] | None = None
        self.first_step: Compared | None = None
        self.room_factor: float | None = None
        self._spare_copies: dict[Hashable, list[tuple[torch.Tensor, torch.cuda.Event]]] = {}
        self.status, self._status_words = self._waits.status, self._waits.status.numpy()
        self._is_watched = kernels.watcher(self.device)
        constants = self.peers.bases, self.status, *self.peers.views
        fail = partial(self.fail, phase=control.PHASE_PLAN)  # in the next barrier, whichever it is
        seam = self._waits.kernels, kernels.tape_compiler(self.device)
        self.tapes = Tapes(self.device, self.abort_for, fail, constants, *seam, audits=self._tape_mode == "audit")
        self.trip_timer: Callable[[str], AbstractContextManager[None]] | None = None
        self.peers.views[self.peers.rank][: self._layout.num_bytes].zero_()
        self._streams.synchronize()
        self._bootstrap.barrier()  # no rank may signal into a control block that is not zeroed yet
        self._closed = False
        for _ in range(2):  # compiles the barrier, and shows that ranks reach each other in both halves of the mailbox
            self._waits.barrier(control.pack_call(phase=control.PHASE_START))
        self.synchronize()
        if self.spans_nodes:
            self.meet(control.PHASE_START)

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
        lease = self._lease(tuple(operator.index(size) for size in shape), dtype, name, phase)
        _ = lease.tensor  # now, not on first use: the heap may be closed by then
        return lease

    @recorded
    def _lease(self, shape: tuple[int, ...], dtype: torch.dtype, name: str, phase: int | None) -> Lease:
        num_bytes = dtype.itemsize * math.prod(shape)
        span = self._memory.take(num_bytes, name)
        if span is None:
            arena = self._memory.arena
            problem = (
                f"lease '{name}' {list(shape)} {dtype} needs {num_bytes} bytes: the largest free range has "
                f"{arena.largest_free_bytes}, {arena.used_bytes} of {arena.capacity_bytes} bytes are leased, "
                f"high-water mark {arena.high_water_bytes}; give the heap more num_bytes (now {self.num_bytes})"
            )
            self.fail(HeapExhausted(problem), phase)
        return Lease(self._memory, span, shape, dtype)

    def lacks(self, num_bytes: int) -> bool:
        """Whether leases of so many bytes in all might not find memory one after the other. Local."""
        return self._memory.lacks(num_bytes)

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies in this rank's arena. Local."""
        return not self._closed and self._memory.owns(tensor)

    def offset_of(self, tensor: torch.Tensor, *, phase: int | None = None) -> int:
        """Byte offset in the arena of a tensor that lies in a live lease. Local.

        Args:
            phase: as in :meth:`lease`.

        Raises:
            StaleLease: the heap owns the memory, but no live lease holds it.
        """
        offset, is_leased = self._memory.offset_of(tensor)
        if not is_leased:
            problem = f"the {list(tensor.shape)} tensor at arena offset {offset} belongs to no live lease"
            self.fail(StaleLease(problem), phase)
        return offset

    @property
    def high_water_bytes(self) -> int:
        """The most bytes that were leased at one time."""
        return self._memory.arena.high_water_bytes

    @property
    def leased_bytes(self) -> int:
        """Bytes that are leased now, plus all bytes that captured graphs hold."""
        return self._memory.leased_bytes

    @property
    def graph_bytes(self) -> int:
        """Bytes that captured CUDA graphs hold, leased in them or not."""
        return self._memory.graph_bytes

    @property
    def capture(self) -> int:
        """The number of the graph that the current stream is capturing, for :meth:`release_graph`; 0: none."""
        return capture_id(self.device)

    def release_graph(self, capture: int) -> None:
        """Same as :meth:`release_graphs`, for one graph."""
        self._memory.release_graph(capture)

    def release_graphs(self) -> None:
        """Gives back the memory of every graph captured so far; none of them may be replayed any more. Local."""
        self._memory.release_graphs()

    @property
    def side_stream(self) -> torch.cuda.Stream | None:
        """A CUDA stream for callers' work at the same time as the heap's calls, always the same; None on CPUs."""
        return self._streams.side_stream

    def branch(self) -> Branch:
        """Where a collective call moves rows while GEMMs run on the current stream. Joined before the call ends."""
        return Branch(self._streams.wire_stream)

    def one_call(self) -> AbstractContextManager[None]:
        """A context for the kernels of a collective call, which start after those of the last call (see streams.py)."""
        return self._one_call

    def run(
        self,
        key: tuple[Hashable, ...],
        function: Callable[[], Sequence[Any]],
        inputs: Sequence[torch.Tensor],
        **numbers: int,
    ) -> Sequence[Any]:
        """The result of function(), which launches a part of a call; from a tape, if calls of this kind repeat.

        Args: see Tapes.run.
        """
        if (
            self._closed
            or self._tape_mode == "off"
            or not self._access.is_given
            or self.trip_timer is not None
            or self._faults.poison is not None
            or self._faults.unraised is not None
            or self._status_words[control.STATUS_KIND] != control.STATUS_OK
            or self._waits.some_are_bounded
            or self._is_watched()
            or capture_id(self.device)
            or (self.device.type == "cuda" and torch.cuda.current_device() != self.device.index)
        ):
            return function()
        try:
            self._one_call.__enter__()
        except ConcurrentUse:
            return function()  # which raises if it needs the turn, too
        try:
            return self.tapes.run((*key, self.timeout_s == math.inf), function, inputs, numbers)
        finally:
            self._one_call.__exit__()

    def timed(self, trip: str) -> AbstractContextManager[None]:
        """A context for the work of a trip on the current stream, which `trip_timer` may time."""
        return nullcontext() if self.trip_timer is None else self.trip_timer(trip)

    # -- barrier and faults ---------------------------------------------------------------------------------------

    def check(self, phase: int | None = None, *, waits: bool = False) -> None:
        """Raises an error that a kernel or a peer has reported, if it was not raised before. Local; no synchronisation.

        One exception: a rank that has left the failed call by another error and goes on to the next plan does not raise
        here; the ranks settle it in that plan's barrier (see symm_mem/faults.py).

        Args:
            phase: the first barrier of the collective call that begins here.
            waits: whether the call waits for its stream anyway, so that this may wait, too.

        Raises:
            HeapClosed, HeapPoisoned: the heap cannot be used any more.
            ConcurrentUse: there is something to raise, and another thread is in a call.
            PeerTimeout, PeerAborted: a peer did not arrive, or gave up; the heap is poisoned from now on.
            SymmoeError: an error of another rank, as that rank's class.
        """
        if not self._access.is_given:
            self._access.check()
        if self._closed:
            raise HeapClosed("the symmetric heap has been closed")
        if self._faults.poison is not None:
            raise HeapPoisoned(f"an earlier call failed: {self._faults.poison}")
        if waits and self._waits.flight.is_in_dispatch and not capture_id(self.device):
            self._streams.synchronize()  # an error of that dispatch may still be on its way
        if self._status_words[control.STATUS_KIND] != control.STATUS_OK:
            with self._access:
                raise_for(self._faults.find(phase))

    @recorded_on_cpus
    def barrier(
        self, phase: int, *, publish: tuple[int, ...] = (), spoils: torch.Tensor | None = None, **agreed: int
    ) -> torch.Tensor:
        """Waits (on the device) for every rank, bounded by `timeout_s`, or by `start_timeout_s` where ranks may have to
        compile first. Collective; does not synchronise the host.

        Args:
            phase: one of control.PHASE_*; error texts show its name.
            publish: up to control.NUM_PUBLISHED offsets in the arena, or other integers, for the peers.
            spoils: rows that are filled with NaN if the call has failed.
            agreed: arguments of control.pack_call that must be equal on all ranks, as the phase must be.

        Returns:
            int64[R, NUM_PUBLISHED]: what every rank published; all -1 if the call has failed.
        """
        with self._access:
            if self._faults.unraised is not None:
                if phase != control.PHASE_PLAN:
                    self.fail(self._faults.unraised, phase)
                publish = UNRAISED
            received = self._waits.barrier(control.pack_call(phase=phase, **agreed), publish, spoils=spoils)
            if self.raises_at_once:
                self.check()
            if self._faults.unraised is not None:
                raise_for(self._faults.settle(self.read_back(received)()))
            return received

    @property
    def spans_nodes(self) -> bool:
        """Whether ranks of the group are on several nodes."""
        return self.topology.num_nodes > 1

    @property
    def rank_maps(self) -> RankMaps:
        """Which ranks are on which node, as tensors on the device. For heaps that span nodes."""
        assert self._rank_maps is not None
        return self._rank_maps

    @property
    def raises_at_once(self) -> bool:
        """Whether the host knows at the end of a barrier how it went; else it does when it next looks."""
        return self.device.type == "cpu"

    def meet(self, phase: int, *, sizes: int = 0, num_tokens: int = 0, **agreed: int) -> list[int]:
        """The host waits for those of the ranks with this rank's index on the other nodes, bounded a little longer than
        a barrier is. Collective over the group. If the last barrier of a call comes right after a meeting, an error of
        any rank before that gets to all ranks of all nodes. For heaps that span nodes. Does not wait for the device.

        Args:
            sizes: a number on which these ranks must agree, as on the other arguments: of what says how long messages
                are.
            num_tokens: of this rank, if the others have to know.
            phase, agreed: as in :meth:`barrier`.

        Returns:
            by node, the num_tokens of the rank with this rank's index.
        """
        assert self._mates is not None
        with self._access:
            raise_for(self._faults.meet(control.pack_call(phase=phase, **agreed), sizes, num_tokens))
            return self._mates.num_tokens

    @property
    def num_meetings(self) -> int:
        """Meetings of this rank's rail so far: it is the same for the ranks on it. 0 on one node."""
        return 0 if self._mates is None else self._mates.num_meetings

    def exchange(self, sends: Messages, receives: Messages, phase: int, **options: int) -> list[int]:
        """Meets as :meth:`meet` does, then sends tensors to every other node, and receives what it sends. On GPUs that
        is work of the current stream. What is received may be used as it is only after the next barrier, or where
        :attr:`failed_so_far` is 0.

        Args:
            sends, receives: by message, and in it by node; contiguous, and of sizes that fit each other. Tensors for
                this node itself do not travel.
            phase, options: of :meth:`meet`, whose result this returns.
        """
        with self._access:
            num_tokens = self.meet(phase, **options)
            with self.moving(sends, receives):
                pass
        return num_tokens

    @contextmanager
    def moving(self, sends: Messages, receives: Messages) -> Iterator[Callable[[], None]]:
        """A context in which tensors travel as in :meth:`exchange`, after :meth:`meet`, while the host, and on GPUs the
        current stream, do other things. Collective over the group; one at a time. By the end of the context all have
        come, also after an exception, unless a peer is gone.

        Yields:
            a function that waits for them, on GPUs for later work of the current stream.
        """
        with self._access:
            raise_for(self._faults.begin_to_move(sends, receives))
        is_moving = True

        def end(by: Callable[[], SymmoeError | None]) -> None:
            nonlocal is_moving
            if is_moving:
                is_moving = False
                with self._access:
                    raise_for(by())

        wait = partial(end, self._faults.end_to_move)
        try:
            yield wait
        except BaseException:
            with suppress(SymmoeError):  # of a mate that is gone: what led here is raised
                end(self._faults.end_to_move_in_vain)
            raise
        wait()

    @property
    def failed_so_far(self) -> torch.Tensor:
        """int64 [] on the device: not 0 if the call has failed here, or on a node of which this rank has heard. For
        heaps that span nodes."""
        assert self._mates is not None
        return self._mates.failed_so_far

    @recorded_on_cpus
    def send_signal(self, rank: int) -> None:
        """Tells `rank` that what the current stream has written there since the last barrier is complete."""
        self._waits.kernels().send_signal(self.peers, rank)

    @recorded_on_cpus
    def wait_for_signal(self, rank: int, phase: int, *, spoils: torch.Tensor | None = None) -> torch.Tensor:
        """Waits (on the device) for `rank`'s signal since the last barrier, bounded as a barrier is.

        Args:
            spoils: rows that are filled with NaN if the call has failed.

        Returns:
            int64[1]: 0, or -1 if the call has failed.
        """
        arrived = self._waits.signal(rank, phase, spoils)
        if self.raises_at_once:
            self.check()
        return arrived

    @property
    def epoch(self) -> int:
        """Epoch of the last barrier that this host has launched; the same on all ranks after the same calls."""
        return self._waits.flight.epoch

    def note_counts(self, epoch: int, **counts: int) -> None:
        """Adds numbers that the host knows to the line of that barrier in the flight record."""
        self._waits.flight.note(epoch, **counts)

    def row_history(self, kind: Hashable) -> RowHistory:
        """What recent calls of this kind have needed. It is forgotten when an error is raised."""
        if self._num_errors != self._faults.num_errors:
            self._num_errors = self._faults.num_errors
            self._row_histories.clear()
        return self._row_histories.setdefault(kind, RowHistory())

    @contextmanager
    def fixed_room(self, factor: float, reports: list[torch.Tensor]) -> Iterator[None]:
        """In this context calls with exact capacity get room for `factor` times what recent ones needed, whether that
        is enough or not, and the host reads no plan: `reports` gets what it would have read. For captures."""
        self.captured_reports, self.room_factor = reports, factor
        try:
            yield
        finally:
            self.captured_reports = self.room_factor = None

    def synchronize(self) -> None:
        """Waits for this rank's stream and raises what has been reported. Local.

        On GPUs this is how an error of a peer's `dispatch_tokens`, `combine_tokens` or static-capacity plan is raised
        in the call it belongs to, instead of at this rank's next call on the heap.
        """
        self._streams.synchronize()
        self.check()

    def read_back(self, tensor: torch.Tensor) -> Callable[[], list[Any]]:
        """Starts a copy of a small device tensor to the CPU; the result waits for it (only for this rank's stream up to
        here) and returns the numbers."""
        if self.device.type == "cpu":
            return tensor.tolist
        spare = self._spare_copies.setdefault((tensor.shape, tensor.dtype), [])
        if spare:
            copy, event = spare.pop()
        else:
            with torch.inference_mode(False):  # a later call may be outside of it
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            event = torch.cuda.Event()
        copy.copy_(tensor, non_blocking=True)
        event.record(torch.cuda.current_stream(self.device))

        def wait() -> list[Any]:
            event.synchronize()
            numbers: list[Any] = copy.tolist()
            spare.append((copy, event))
            return numbers

        return wait

    def fail(self, error: SymmoeError, phase: int | None) -> NoReturn:
        """Fails the collective call whose next barrier is `phase`: every rank raises `error`. Always raises.

        Synchronises; moves no payload. If several ranks fail the call, all raise the error of the first of them.
        Without a phase, and while a CUDA graph is captured, it only raises `error` on this rank.
        """
        try:
            raise self._faults.fail(error, phase)
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
        if not self._closed:
            self._faults.tell(error, phase)

    @property
    def global_ranks(self) -> list[int]:
        """Ranks of the heap's group in the default process group, in the order of the group. Local."""
        return self._bootstrap.global_ranks

    def agree(self, problem: SymmoeError | None) -> None:
        """Raises the first rank's problem on every rank; returns if nobody has one. For slow work on the host: it is
        collective over the process group, waits as long as the group does, and uses no symmetric memory."""
        self._patient_bootstrap.agree(problem)

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        """Every rank's payload, of any length, in rank order; collective as :meth:`agree` is."""
        lengths = self._patient_bootstrap.all_gather_bytes(len(payload).to_bytes(8, "little"), num_bytes=8)
        sizes = [int.from_bytes(length, "little") for length in lengths]
        gathered = self._patient_bootstrap.all_gather_bytes(payload, num_bytes=max(1, *sizes))
        return [data[:size] for data, size in zip(gathered, sizes, strict=True)]

    def abort(self, reason: str) -> None:
        """Gives up: peers that wait for this rank, or will, raise PeerAborted at once instead of after `timeout_s`.

        For a rank that has an error between two collective calls; leaving a `with heap:` block by an exception calls
        it. Local, and waits for no rank. Only :meth:`close` works on the heap afterwards.
        Does nothing if the heap is closed or a peer's failure has been raised already, or in a fork of the process that
        made the heap. May be called from any thread at any time.

        Args:
            reason: for the peers' error text; a few hundred bytes of it travel.
        """
        if not self._closed and self._access.is_given:
            self._faults.abort(reason)

    def abort_for(self, error: BaseException) -> None:
        """Same as :meth:`abort`, because of an error."""
        self.abort(f"{type(error).__name__}: {error}")

    def plan_failure(self, report: list[int]) -> SymmoeError:
        """The error of a plan whose report (control.SUM_*) the host has read itself. Collective between nodes."""
        with self._access if self.spans_nodes else nullcontext():
            return self._faults.of_plan(report)

    @property
    def timeout_s(self) -> float:
        """Bound of every wait for a peer; may be set at any time."""
        return self._waits.timeout_s

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        self._waits.timeout_s = seconds

    @property
    def start_timeout_s(self) -> float:
        """Bound of waits for a peer that may be doing work which is done once; may be set at any time."""
        return self._waits.start_timeout_s

    @start_timeout_s.setter
    def start_timeout_s(self, seconds: float) -> None:
        self._waits.start_timeout_s = seconds

    # -- lifetime -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends the heap: collective, idempotent, synchronises. Waits for the peers at most `timeout_s`.

        After a timeout (even of this call) or an abort it is local. The arena is zeroed and freed; NVSHMEM frees only
        collectively, otherwise the memory goes with the process. Tensors over the arena must not be used afterwards.

        In a process that has been forked from the one that made the heap it does nothing: the arena is the maker's.

        Raises:
            PeerTimeout, PeerAborted: a peer did not come to close.
            ConcurrentUse: another thread is in a call; the heap stays open.
        """
        if self._closed or not self._access.is_given:
            return
        # On a heap on which nothing works any more, no call is worth waiting for.
        with self._access if self._faults.poison is None else nullcontext():
            error, together = None, False
            try:
                error, together = self._meet_to_close()
                raise_for(error)
            finally:
                del error  # as in `fail`
                self._end(together)

    def _meet_to_close(self) -> tuple[SymmoeError | None, bool]:
        """What :meth:`close` raises, and whether all ranks have come to close."""
        faults, error, together = self._faults, None, False
        try:
            self._streams.synchronize()
            if faults.poison is None and self._status_words[control.STATUS_KIND] != control.STATUS_OK:
                error = faults.take()  # no rank has raised it yet; unless it is a timeout, the peers are there
            if faults.poison is None:
                self._waits.barrier(control.pack_call(phase=control.PHASE_CLOSE))
                self._streams.synchronize()
                together = self._status_words[control.STATUS_KIND] == control.STATUS_OK
                if not together:
                    error = faults.take()
                elif self._mates is not None:
                    error = faults.meet(control.pack_call(phase=control.PHASE_CLOSE))
                    together = error is None
        except BaseException as problem:  # from a signal handler or the GPU: the peers wait, and must be told
            self.abort_for(problem)
            raise
        if not together and faults.poison is None:
            faults.give_up(Report("it has closed its heap"))  # the peers were in another call, and go on
        return error, together

    def _end(self, together: bool) -> None:
        """Frees the arena; no tokens are left. `together` with all ranks, or locally once the peers are told."""
        self._closed = self._memory.is_closed = True
        self.tapes.forget()
        if self._mates is not None:
            self._mates.close()
        (self._backend.close if together else self._backend.abandon)()

    def __enter__(self) -> SymmetricHeap:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: object) -> None:
        if exc_type is None:
            self.close()
        elif not self._closed and self._access.is_given:  # the peers may be anywhere: no collective on the way out
            self.abort(f"{exc_type.__name__}: {exc}")
            self._end(together=False)

    def __repr__(self) -> str:
        if getattr(self, "_closed", True):  # or construction has not ended
            return "SymmetricHeap(closed)"
        state = "open" if self._faults.poison is None else f"poisoned: {self._faults.poison}"
        nodes = f" on {self.topology.num_nodes} nodes" if self.spans_nodes else ""
        return (
            f"SymmetricHeap(rank {self.rank} of {self.num_ranks}{nodes}, {self.backend} backend on "
            f"{self.device}, {self.leased_bytes} of {self._memory.arena.capacity_bytes} bytes leased, {state})"
        )

    def __deepcopy__(self, memo: dict[int, object]) -> SymmetricHeap:
        """A copy of a model shares the heap, as it shares the process group."""
        return self

    def __reduce__(self) -> NoReturn:
        """Raises: what holds a heap (a layer, a model, a plan) cannot be pickled or sent to another process."""
        raise ArgumentError(
            "a SymmetricHeap, and a layer with it, belongs to this process and cannot be pickled: save the layer's "
            "state_dict() or call symmoe.checkpoint.save_checkpoint, and load that into a layer on a heap of its own"
        )

    # -- construction ---------------------------------------------------------------------------------------------

    def _check_arguments(self, timeout_s: object, start_timeout_s: object, ranks_per_node: object) -> None:
        least = ControlLayout(self.num_ranks).num_bytes + ALIGNMENT_BYTES
        if self.backend not in _BACKENDS:
            raise ArgumentError(f"backend ({self.backend!r}) must be 'auto', 'host' or 'nvshmem'")
        if not isinstance(self.num_bytes, int) or not least <= self.num_bytes < 1 << 63:
            raise ArgumentError(
                f"num_bytes ({self.num_bytes!r}) must be an int of at least {least} for {self.num_ranks} ranks, "
                "and less than 2**63"
            )
        raise_for(_timeout_problem("timeout_s", timeout_s))
        raise_for(_timeout_problem("start_timeout_s", start_timeout_s))
        self._tape_mode = read_tape_mode()
        if ranks_per_node is not None and not (
            isinstance(ranks_per_node, int) and not isinstance(ranks_per_node, bool) and 0 < ranks_per_node < 1 << 31
        ):
            raise ArgumentError(f"ranks_per_node ({ranks_per_node!r}) must be an int of at least 1, or None")
        missing = host_backend.preflight() if self.backend == "host" else nvshmem_backend.preflight(self.num_bytes)
        if missing:
            raise BackendUnavailable(missing)
        if self.backend == "host" and self.rank == 0:
            host_backend.warn_if_too_large(self.num_bytes, self.num_ranks)

    def _find_domains(self) -> list[bytes]:
        """Of each rank, what it has in common with those whose memory it can reach. Collective."""
        gpu = None
        if self.backend == "nvshmem":
            gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        place = self._bootstrap.attempt(partial(find_place, gpu))
        places = self._bootstrap.all_gather_bytes(place.pack(), num_bytes=Place.NUM_BYTES)
        return [Place.unpack(packed).domain for packed in places]

    def _make_count_peers(self) -> Peers:
        local = [ranks.index(rank) for rank in range(self.num_ranks) for ranks in self.topology.nodes if rank in ranks]
        return Peers(
            rank=self.rank,
            num_ranks=self.num_ranks,
            bases=self.peers.bases[torch.tensor(local, device=self.device)],
            views=tuple(self.peers.views[rank] for rank in local),
            layout=self._layout,
        )

    def _make_mates(self, start_timeout_s: float) -> Mates:
        """The ranks of this rank's rail. Collective."""
        try:
            lane, payload = start_rail(self._bootstrap, self.topology, self.device, min(start_timeout_s, _MAX_S))
        except BackendUnavailable:  # on every rank: the memory is given back together
            self._backend.close()
            raise
        except PeerError:
            self._backend.abandon()
            raise
        return Mates(lane, payload, self.topology, self._waits, self._streams)

    def _agree_on_configuration(self, timeout_s: float, ranks_per_node: int | None) -> None:
        """Raises on every rank if ranks disagree. Collective."""
        numbers = _PROTOCOL_VERSION, self.num_bytes, _BACKENDS.index(self.backend), timeout_s, ranks_per_node or 0
        mine = _FINGERPRINT.pack(*numbers)
        gathered = [_FINGERPRINT.unpack(f) for f in self._bootstrap.all_gather_bytes(mine, num_bytes=_FINGERPRINT.size)]
        fields = ("protocol version", "num_bytes", "backend", "timeout_s", "ranks_per_node")
        for field, values in zip(fields, zip(*gathered, strict=True), strict=True):
            if len(set(values)) > 1:
                shown = [_BACKENDS[v] for v in values] if field == "backend" else list(values)
                shown = [v or None for v in values] if field == "ranks_per_node" else shown
                raise ConfigMismatch(f"{field} differs between ranks: {shown}")


class told:
    """A context around the part of a collective call after which the peers wait for this rank once more.

    An exception that leaves it (no memory, a hook of the user, a defect) makes the call fail on every rank, same as a
    wrong argument: the peers raise a SymmoeError with its class and text, and the next correct call works. This rank
    raises the exception unchanged. Errors that all ranks raise anyway pass, and so does KeyboardInterrupt, which is no
    Exception: a process that has to stop at once does not wait for peers.

    Args:
        heap: heap of the call.
        phase: name of the wait, for the heap's records.
    """

    __slots__ = ("_heap", "_phase")

    def __init__(self, heap: SymmetricHeap, phase: int) -> None:
        self._heap, self._phase = heap, phase

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not _is_known(error):
            error._symmoe_told = True  # type: ignore[attr-defined]  # contexts may be nested
            self._heap.tell(error, self._phase)


def _is_known(error: Exception) -> bool:
    """Whether all ranks raise the error already: a barrier has found it, or recomputation ends early."""
    if getattr(error, "_symmoe_told", False):
        return True
    if isinstance(error, SymmoeError):
        return error.flight is not None
    return isinstance(error, STOPS_RECOMPUTATION)


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
