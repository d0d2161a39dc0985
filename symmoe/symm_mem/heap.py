"""The symmetric heap: one arena per rank that every rank of the group can address, and the barrier over it."""

from __future__ import annotations

import itertools
import math
import operator
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from symmoe import errors, kernels
from symmoe.errors import (
    ArgumentError,
    HeapClosed,
    HeapExhausted,
    HeapPoisoned,
    StaleLease,
    SymmoeError,
)
from symmoe.kernels import control
from symmoe.program.builder import builder, noted
from symmoe.program.programs import Programs
from symmoe.symm_mem.faults import UNRAISED
from symmoe.symm_mem.memory import Lease, lease_in_build, lease_problem, with_leases_first
from symmoe.symm_mem.start import START_TIMEOUT_S, HeapParts
from symmoe.symm_mem.waits import BARRIER
from symmoe.torch_internals import STOPS_RECOMPUTATION

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from symmoe.program.program import Program
    from symmoe.symm_mem.several_nodes import RemoteNodes


_SPINS = 1000  # polls for a report between checks whether the device is still at work


def _bound(name: str) -> property:
    """A property for one bound of a heap's waits."""
    return property(
        lambda heap: getattr(heap.waits, name),
        lambda heap, seconds: setattr(heap.waits, name, seconds),
    )


class SymmetricHeap(HeapParts, AbstractContextManager["SymmetricHeap"]):
    """Symmetric memory over the ranks of an expert-parallel group.

    Construction is collective over `group` and synchronises the host. All ranks must make every later collective call
    on a heap in the same order. Calls on several CUDA streams run in the order in which the host makes them. Calls can
    be captured in a CUDA graph: leases made there belong to the graph until :meth:`release_graphs`.

    Args:
        group: the EP process group; None is the default group, or a group of one without an initialised one.
        expert_group: this rank, and the ranks with the same experts in other EP groups, which share no other rank with
            `group`. Gradients of experts and loads are summed over it. None: the world is one EP group.
        num_bytes: size of each rank's arena, the same on all ranks.
        backend: "nvshmem" (CUDA), "host" (CPU shared memory) or "auto": nvshmem where torch sees a GPU, else host.
        timeout_s: bound of every wait for a peer. math.inf means no bound.
        start_timeout_s: bound, if longer, of waits for a peer that may be doing one-time work: during construction, and
            on GPUs in the first calls of each kind, which compile kernels.
        ranks_per_node: number of ranks that share memory; the others are reached over the network. None: all ranks on
            one machine, or in one NVLink domain. A number may split these into nodes, for trials, but joins none.

    With `SYMMOE_FLIGHT_DIR` set in the environment, the last calls are written there when a barrier's error is raised
    (docs/reliability.md). `SYMMOE_PROGRAMS=off` disables programs (docs/design/programs.md). With
    `SYMMOE_FILL_MEMORY=1`, leases and memory of programs start as NaN (docs/troubleshooting.md). The constructor reads
    all variables.

    Attributes:
        rank, num_ranks: this rank in the group, and the group's size.
        expert_group, expert_ranks: as given, and its ranks in the default group; without it, only this rank.
        topology: the ranks of each node.
        device: the device of leases.
        backend, backend_reason: the selected backend, and why.
        memory, waits, faults, streams, programs: this rank's arena and leases; its barriers and signals; its errors;
            the order of calls on CUDA streams and in captures; the programs of calls.
        one_call: a context for the kernels of a collective call, which start after those of the last call.
        nodes: the connection to other nodes, see :func:`nodes_of`; None: the group is on one node.
        bootstrap: the group as plain bytes, for slow work on the host; the group's timeout bounds it.
        peers, status: kernel arguments to reach the arenas of this node and to report to the host.
        count_peers: `peers` for the count table, which has a row for each rank of the group.
        statistics: counters.
        row_histories: by kind of call, the rows that recent calls needed; cleared when an error is raised.
        captured_reports, row_budget_factor: in :func:`fixed_rows`, the list for plans' reports, and its factor; else
            None.
        configurations: numbers of configurations, which barriers compare.
        trip_timer: None, or a function that returns a context for the kernels of a trip ("dispatch", "combine") on the
            current stream.
        timeout_s, start_timeout_s: as given; may be set at any time.

    Raises:
        ArgumentError: `num_bytes`, `expert_group`, `backend`, `ranks_per_node` or a timeout is not usable, on every
            rank; or this rank is not in `group`, on this rank only.
        BackendUnavailable: on every rank, if any rank cannot take part, or nodes differ in size or cannot connect.
        ConfigMismatch: on every rank, if ranks disagree on an argument.
        PeerTimeout, PeerLost: a rank is missing, or has ended.
    """

    timeout_s = _bound("timeout_s")
    start_timeout_s = _bound("start_timeout_s")

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        num_bytes: int,
        expert_group: dist.ProcessGroup | None = None,
        backend: str = "auto",
        timeout_s: float = 30.0,
        start_timeout_s: float = START_TIMEOUT_S,
        ranks_per_node: int | None = None,
    ) -> None:
        super().__init__(
            group, expert_group, num_bytes, backend, timeout_s, start_timeout_s, ranks_per_node
        )
        self._begin()
        # Compiles the barrier, and shows that ranks reach each other in both halves of the mailbox.
        for _ in range(2):
            self.waits.wait(control.pack_call(phase=control.PHASE_START))
        self.synchronize()
        if self.nodes is not None:
            self.nodes.rendezvous(control.PHASE_START)
        self.waits.compiles = self.device.type == "cuda"

    def _begin(self) -> None:
        """Sets the attributes that follow from the parts. Local."""
        self.device = self.waits.device
        self.statistics = self.memory.statistics
        self.status = self.waits.status
        self.captured_reports: list[torch.Tensor] | None = None
        self.row_budget_factor: float | None = None
        self.trip_timer: Callable[[str], AbstractContextManager[None]] | None = None
        self._closed = False
        self._plays = self._program_mode != "off"
        self._status_words, self._report_rows = self.status.numpy(), self.waits.reports.numpy()
        self._may_run_programs = kernels.may_run_programs(self.device)
        constants = [
            *(self.peers.bases, self.count_peers.bases, *self.peers.views),
            *(self.status, self.waits.reports),
            *(() if self.nodes is None else self.nodes.constants),
        ]
        self.programs = Programs(
            self.device,
            self.abort,
            constants,
            self.waits.kernels,
            partial(_compiled, self),
            fills=self.memory.fills,
        )

    @classmethod
    def from_mesh(
        cls, mesh: DeviceMesh, *, expert_mesh: DeviceMesh | None = None, **options: Any
    ) -> SymmetricHeap:
        """The heap of a mesh of one dimension, such as `mesh["ep"]`. expert_mesh: the ranks of `expert_group`, such as
        `mesh["efsdp"]`, or `mesh["replicate", "efsdp"]`; options: other arguments of the class. Collective over the
        mesh; with an `expert_mesh` of several dimensions, over all ranks of the mesh that has both. ArgumentError:
        `mesh` has more dimensions."""
        if mesh.ndim != 1:
            raise ArgumentError(
                f"mesh {mesh.mesh_dim_names} has {mesh.ndim} dimensions; it must have one: mesh['ep']"
            )
        if expert_mesh is not None:
            options["expert_group"] = expert_mesh._flatten().get_group()  # itself, if it is flat
        return cls(mesh.get_group(), **options)

    # -- memory ---------------------------------------------------------------------------------------------------

    def lease(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        name: str = "lease",
        phase: int | None = None,
    ) -> Lease:
        """Memory for a contiguous tensor. Local; does not synchronise; contents are undefined.

        All ranks must make leases that peers reach through :meth:`Lease.peer` in the same order.

        Args:
            phase: the next barrier of the lease's collective call, if the peers are about to enter it: a rank without
                room then fails the call on every rank (see :meth:`_fail`).

        Raises:
            HeapExhausted: no free range is large enough.
        """
        self.check()
        self._fail_for(lease_problem(shape, dtype), phase)
        lease = _lease(self, tuple(operator.index(size) for size in shape), dtype, name, phase)
        _ = lease.tensor  # now, not on first use: the heap may be closed by then
        return lease

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies in this rank's arena. Local."""
        return self.memory.owns(tensor)

    def _offset_of(self, tensor: torch.Tensor, *, phase: int | None = None) -> int:
        """Byte offset in the arena of a tensor that lies in a live lease. Local.

        Args:
            phase: as in :meth:`lease`.

        Raises:
            StaleLease: the heap owns the memory, but it belongs to no live lease.
        """
        if (current := builder()) is not None:
            return current.offset_of(tensor)
        offset, is_leased = self.memory.offset_of(tensor)
        if not is_leased:
            self._fail(
                StaleLease(
                    f"the {list(tensor.shape)} tensor at arena offset {offset} belongs to no live "
                    "lease"
                ),
                phase,
            )
        return offset

    @property
    def high_water_bytes(self) -> int:
        """The most bytes that were leased at one time."""
        return self.memory.arena.high_water_bytes

    @property
    def leased_bytes(self) -> int:
        """Bytes that are leased now, plus all bytes of captured graphs."""
        return self.memory.leased_bytes

    def release_graphs(self) -> None:
        """Frees the memory of every graph captured so far; none of them may be replayed any more. Local."""
        self.memory.release_graphs()

    # -- calls ----------------------------------------------------------------------------------------------------

    def _run(
        self,
        key: tuple[Hashable, ...] | None,
        function: Callable[[], Sequence[Any]],
        inputs: Sequence[torch.Tensor | None],
        **numbers: int,
    ) -> Sequence[Any]:
        """The result of function(), which launches a part of a call, by the program of its kind. The caller has its
        turn on the heap (`one_call`). The arguments are those of Programs.run; without a key there is no program."""
        if (
            key is None
            or self._closed
            or not self._plays
            or not self._access.is_usable
            or self.trip_timer is not None
            or self.faults.poison is not None
            or self.faults.unraised is not None
            or self._status_words[control.STATUS_KIND] != control.STATUS_OK
            or not self._may_run_programs()
        ):
            return function()
        if self.nodes is None:
            return self.programs.run(key, function, inputs, numbers)
        with self.nodes.playing():
            return self.programs.run(key, function, inputs, numbers)

    def _timed(self, trip: str) -> AbstractContextManager[None]:
        """A context for the work of a trip on the current stream, which `trip_timer` may time."""
        return nullcontext() if self.trip_timer is None else self.trip_timer(trip)

    def check(self, phase: int | None = None, *, waits: bool = False) -> None:
        """Raises an error that a kernel or a peer has reported, if it was not raised before. Local; no synchronisation.

        One exception: a rank that left the failed call by another error and enters the next plan does not raise here;
        the ranks settle the error in that plan's barrier (see symm_mem/faults.py).

        Args:
            phase: the first barrier of the collective call that begins here.
            waits: whether the call waits for its stream anyway, so that the check may wait, too.

        Raises:
            HeapClosed, HeapPoisoned, HeapSuspended: the heap is unusable, for good or until it is resumed.
            ConcurrentUse: there is an error to raise, and another thread is in a call.
            PeerTimeout, PeerAborted: a peer did not arrive, or aborted; the heap is poisoned from now on.
            SymmoeError: an error of another rank, as that rank's class.
        """
        if not self._access.is_open:
            self._access.check()
        if self._closed:
            raise HeapClosed("the symmetric heap has been closed")
        if self.faults.poison is not None:
            raise HeapPoisoned(f"an earlier call failed: {self.faults.poison}")
        if (
            waits
            and not self.streams.raises_at_once
            and self.waits.flight.is_in_dispatch
            and not self.streams.capture
        ):
            self.streams.synchronize()  # an error of that dispatch may still be on its way
        if self._status_words[control.STATUS_KIND] != control.STATUS_OK:
            with self._access:
                errors.raise_for(self.faults.find(phase))

    def barrier(
        self,
        phase: int,
        *,
        publish: tuple[int, ...] = (),
        nan_on_failure: torch.Tensor | None = None,
        plan: int | None = None,
        **agreed: int,
    ) -> torch.Tensor:
        """Waits (on the device) for every rank, bounded by `timeout_s`, or by `start_timeout_s` where ranks may compile
        first. Collective; does not synchronise the host.

        Args:
            phase: one of control.PHASE_*; error texts show its name.
            publish: up to control.NUM_PUBLISHED offsets in the arena, or other integers, for the peers.
            nan_on_failure: rows that are filled with NaN if the call has failed.
            plan: the generation of a plan, which must be equal on all ranks, like the phase.
            agreed: other arguments of control.pack_call that must be equal.

        Returns:
            int64[R, NUM_PUBLISHED]: the published words of every rank; all -1 if the call has failed.
        """
        with self._access:
            if self.faults.unraised is not None:
                if phase != control.PHASE_PLAN:
                    self._fail(self.faults.unraised, phase)
                publish = UNRAISED
            received = _wait(
                self,
                control.pack_call(phase=phase, **agreed),
                publish=publish,
                nan_on_failure=nan_on_failure,
                **({} if plan is None else {"plan": plan}),
            )
            if self.faults.unraised is not None:
                errors.raise_for(self.faults.settle(received.tolist()))
            return received

    def _send_signal(self, rank: int) -> None:
        """Signals to `rank` that the current stream's writes to it since the last barrier are complete."""
        kernels.for_device(self.device).send_signal(self.peers, rank)

    def _wait_for_signal(
        self, rank: int, phase: int, *, nan_on_failure: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Waits (on the device) for `rank`'s signal since the last barrier, with the bound and the `nan_on_failure` of
        a barrier. Returns int64[1]: 0, or -1 if the call has failed."""
        return _wait(self, phase, peer=rank, nan_on_failure=nan_on_failure)

    def await_report(self, plan: int) -> list[int]:
        """The report of the plan of this generation, int[SUMMARY_WORDS]; waits until the device has posted it."""
        row = self._report_rows[plan % control.REPORT_SLOTS]
        tag = plan % 2**control.GENERATION_BITS
        is_device_idle = False
        for turn in itertools.count(1):
            words: list[int] = row.tolist()
            if min(words) >> 32 == max(words) >> 32 == tag:
                break
            if is_device_idle:
                raise SymmoeError(f"the device has not posted the report of plan {plan}")
            time.sleep(0)  # for other threads
            is_device_idle = turn % _SPINS == 0 and self.streams.is_idle()
        return [((word & 0xFFFFFFFF) ^ 1 << 31) - (1 << 31) for word in words]

    @property
    def epoch(self) -> int:
        """Epoch of the last barrier that this host has launched; the same on all ranks after the same calls."""
        return self.waits.flight.epoch

    def synchronize(self) -> None:
        """Waits for this rank's stream and raises a reported error. Local.

        On GPUs this raises an error of a peer's `dispatch_tokens`, `combine_tokens` or static-capacity plan in the call
        of the error, instead of at this rank's next call on the heap.
        """
        self.streams.synchronize()
        self.check()

    def _fail(self, error: SymmoeError, phase: int | None) -> NoReturn:
        """Fails the collective call whose next barrier is `phase`: every rank raises `error`. Always raises.

        Synchronises; moves no payload. If several ranks fail the call, all raise the error of the first of them.
        Without a phase, or in a CUDA graph capture, only this rank raises `error`.
        """
        try:
            raise self.faults.fail(error, phase)
        finally:
            # A local name would keep the traceback in a cycle, and with it the leases of the frames it passed.
            del error

    def _fail_for(self, problem: SymmoeError | None, phase: int | None) -> None:
        """Fails the call if there is a problem and no earlier call has failed, see :meth:`check`. The caller must not
        keep a name for it, see :meth:`_fail`."""
        try:
            if problem is not None:
                self.check(phase)
                self._fail(problem, phase)
        finally:
            del problem

    def abort(self, reason: str | BaseException) -> None:
        """Aborts: peers that wait for this rank, or will, raise PeerAborted at once instead of after `timeout_s`.

        For a rank with an error between two collective calls; an exception that leaves a `with heap:` block calls it.
        Local; does not wait. Only :meth:`close` works on the heap afterwards. Does nothing if the heap is closed, if a
        peer's failure was raised already, or in a fork of the heap's process. May be called from any thread at any
        time.

        Args:
            reason: for the peers' error text, a few hundred bytes at most. An error is sent as its class and text.
        """
        text = reason if isinstance(reason, str) else f"{type(reason).__name__}: {reason}"
        if self._access.is_suspended:  # without an arena for a report, the peers raise it in resume
            self.faults.poison = self.faults.poison or f"this rank gave up: {text}"
        elif not self._closed and self._access.is_usable:
            self.faults.abort(text)

    # -- lifetime -------------------------------------------------------------------------------------------------

    def suspend(self) -> None:
        """Returns the memory to the system until :meth:`resume`. Collective, synchronises; waits for peers at most
        `timeout_s`. Does nothing on a suspended heap.

        Other calls raise HeapSuspended meanwhile; :meth:`close` and :meth:`abort` work, and are local. Leases of
        captured graphs lose their contents, and these graphs must not be replayed meanwhile (a CapturedStep raises).

        Raises:
            ArgumentError, BackendUnavailable: on every rank, if a rank has live leases outside of graphs, or cannot
                restore its memory at the same addresses; or the heap spans nodes, or a graph is being captured.
            PeerTimeout, PeerLost, SymmoeError: as in other calls; only :meth:`close` works afterwards.
        """
        if self._access.is_suspended and self.faults.poison is None:
            return
        with self._access:
            if self.nodes is not None:
                raise ArgumentError(
                    "suspend: a heap that spans nodes cannot, their connections hold its memory"
                )
            if self.streams.capture:
                raise ArgumentError(
                    "suspend: a CUDA graph is being captured; suspend before or after it"
                )
            self.synchronize()
            self.barrier(control.PHASE_SUSPEND)
            self.synchronize()
            self._free_memory()

    def resume(self) -> None:
        """Restores the memory at the same addresses, filled with zeros: graphs, programs and row histories stay valid.
        Collective, synchronises; waits for peers at most `timeout_s` over the process group, which a failure may break,
        as in construction. Does nothing on a heap that has its memory.

        Raises:
            BackendUnavailable: on every rank, if a rank has too little memory; the heap stays suspended.
            HeapPoisoned: on every rank, if one has called :meth:`abort` since then.
            PeerTimeout, PeerLost: a rank is missing, or has ended.
            ConcurrentUse: another thread is resuming the heap, or closing it.
        """
        if self._access.is_suspended:
            with self._access.even_suspended():
                self._restore_memory()
        self.check()

    def close(self) -> None:
        """Ends the heap: collective, idempotent, synchronises. Waits for the peers at most `timeout_s`.

        After a timeout (even of this call) or an abort it is local. The arena is zeroed and freed; NVSHMEM frees only
        collectively, otherwise the memory goes with the process. Tensors over the arena must not be used afterwards.

        Does nothing in a fork of the heap's process: the arena belongs to that process.

        Raises:
            PeerTimeout, PeerAborted: a peer did not enter close.
            SymmoeError: an error of an earlier call that no call has raised yet; the heap is closed nevertheless.
            ConcurrentUse: another thread is in a call; the heap stays open.
        """
        if self._closed or not self._access.is_usable:
            return
        if self._access.is_suspended:  # there is no arena for a barrier
            with self._access.even_suspended():
                _end(self, together=False)
            return
        # On a poisoned heap close need not wait for other calls.
        with self._access if self.faults.poison is None else nullcontext():
            error = None
            together = False
            try:
                error, together = self.faults.wait_to_close()
                errors.raise_for(error)
            finally:
                del error  # as in `fail`
                _end(self, together=together)

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: object
    ) -> None:
        if exc_type is None:
            self.close()
        elif not self._closed and self._access.is_usable:
            # The peers may be in any call: no collective here.
            self.abort(f"{exc_type.__name__}: {exc}")
            _end(self, together=False)

    def __repr__(self) -> str:
        if getattr(self, "_closed", True):  # or construction has not ended
            return "SymmetricHeap(closed)"
        state = "suspended" if self._access.is_suspended else "open"
        state = state if self.faults.poison is None else f"poisoned: {self.faults.poison}"
        nodes = "" if self.nodes is None else f" on {self.topology.num_nodes} nodes"
        # Measured on GPUs.
        if self.nodes is not None and self.nodes.payload.bytes_per_s != math.inf:
            nodes += f" ({self.nodes.payload.bytes_per_s / 1e9:.3g} GB/s between them)"
        return (
            f"SymmetricHeap(rank {self.rank} of {self.num_ranks}{nodes}, {self.backend} backend on "
            f"{self.device}, {self.leased_bytes} of {self.memory.arena.capacity_bytes} bytes leased, {state})"
        )

    def __deepcopy__(self, memo: dict[int, object]) -> SymmetricHeap:
        """A copy of a model shares the heap, like the process group."""
        return self

    def __reduce__(self) -> NoReturn:
        """Raises: objects with a heap (a layer, a model, a plan) cannot be pickled or sent to another process."""
        raise ArgumentError(
            "a SymmetricHeap, and a layer with it, belongs to this process and cannot be pickled: save the layer's "
            "state_dict() or call symmoe.checkpoint.save_checkpoint, and load that into a layer on a heap of its own"
        )


# By group and number of bytes. Not weak: ranks could collect garbage at different times.
_SHARED: dict[tuple[dist.ProcessGroup | None, int], SymmetricHeap] = {}


def shared_heap(
    group: dist.ProcessGroup | None = None, *, num_bytes: int, **options: Any
) -> SymmetricHeap:
    """The open heap that an earlier such call made for the group and `num_bytes`, or a new one: so modules that are
    built apart share a heap. options: other arguments of SymmetricHeap, used for a new heap. Collective over the group
    if the heap is new. Errors: as of SymmetricHeap."""
    heap = _SHARED.get((group, num_bytes))
    if heap is None or heap._closed:
        heap = _SHARED[group, num_bytes] = SymmetricHeap(group, num_bytes=num_bytes, **options)
    return heap


class FailPeersOnError(AbstractContextManager[None]):
    """A context around the part of a collective call after which the peers wait for this rank again: in `phase`, or in
    `later_phase`, if given, once the context has launched a barrier.

    An exception that leaves it (no memory, a user's hook, a defect) fails the call on every rank, like a wrong
    argument: the peers raise a SymmoeError with its class and text, and the next correct call works. This rank raises
    the exception unchanged, except that the traceback of a SymmoeError omits the package's frames. Errors that all
    ranks raise anyway pass. KeyboardInterrupt, which is no Exception, passes too: a process that must stop at once does
    not wait for peers.
    """

    __slots__ = ("_epoch", "_heap", "_later_phase", "_phase")

    def __init__(self, heap: SymmetricHeap, phase: int, later_phase: int | None = None) -> None:
        self._heap = heap
        self._phase = phase
        self._later_phase = later_phase
        self._epoch = heap.waits.flight.epoch

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        if isinstance(error, Exception) and not _is_reported(error):
            error._symmoe_reported = True  # type: ignore[attr-defined]  # contexts may be nested
            phase = self._phase
            if self._later_phase is not None and self._heap.epoch > self._epoch:
                phase = self._later_phase
            self._heap.faults.fail_peers(error, phase)
        try:
            if isinstance(error, SymmoeError):
                raise error.with_traceback(None)
        finally:
            del error, trace  # see SymmetricHeap.fail


def _is_reported(error: Exception) -> bool:
    """Whether all ranks raise the error already, after a barrier, or the error ends recomputation early."""
    is_agreed = (
        error.flight is not None
        if isinstance(error, SymmoeError)
        else isinstance(error, STOPS_RECOMPUTATION)
    )
    return is_agreed or getattr(error, "_symmoe_reported", False)


def _wait_in_build(
    heap: SymmetricHeap,
    call: int,
    *,
    nan_on_failure: torch.Tensor | None,
    peer: int = BARRIER,
    publish: Any = (),
    plan: int = 0,
) -> torch.Tensor:
    """Records the kernel that a wait on CPUs launches; returns a stand-in for its result."""
    current = builder()
    assert current is not None
    shape = (heap.peers.num_ranks, control.NUM_PUBLISHED) if peer == BARRIER else (1,)
    result = current.tensor(shape, (shape[-1], 1)[-len(shape) :], torch.int64)
    options = {"timeout_ns": 0, "nan_on_failure": nan_on_failure}
    if peer == BARRIER:
        args = heap.peers, publish, result, heap.status
        current.note("barrier", args, {**options, "call": call, "fault": False})
    else:
        args = heap.peers, peer, result, heap.status
        current.note("wait_for_signal", args, {**options, "phase": call})
    return result


@noted(on_gpus=False, stands_for=_wait_in_build)
def _wait(heap: SymmetricHeap, call: int, **options: Any) -> torch.Tensor:
    """The result of Waits.wait. On CPUs the host knows then whether the call has failed, and raises the error."""
    result = heap.waits.wait(call, **options)
    if heap.streams.raises_at_once and (
        heap._status_words[control.STATUS_KIND] != control.STATUS_OK
        or heap.faults.poison is not None
        or heap._closed
    ):
        heap.check()
    return result


@noted(stands_for=lease_in_build)
def _lease(
    heap: SymmetricHeap, shape: tuple[int, ...], dtype: torch.dtype, name: str, phase: int | None
) -> Lease:
    num_bytes = dtype.itemsize * math.prod(shape)
    memory = heap.memory
    span = memory.take(num_bytes, name)
    if span is None:
        arena = memory.arena
        heap._fail(
            HeapExhausted(
                f"lease '{name}' {list(shape)} {dtype} needs {num_bytes} bytes: the largest free range has "
                f"{arena.largest_free_bytes}, {arena.used_bytes} of {arena.capacity_bytes} bytes are leased, "
                f"high-water mark {arena.high_water_bytes}; a heap with num_bytes={arena.end_for(num_bytes)} (now "
                f"{heap.num_bytes}) has room for it as well, `symmoe plan` says what a whole step needs"
            ),
            phase,
        )
    return Lease(memory, span, shape, dtype, num_bytes)


def _end(heap: SymmetricHeap, *, together: bool) -> None:
    """Frees and zeroes the arena: `together` with all ranks, or locally once the peers have been informed."""
    heap._closed = heap.memory.is_closed = heap._access.is_open = True
    heap.programs.forget()
    if heap.nodes is not None:
        heap.nodes.close()
    heap._arenas.close(together=together)


@contextmanager
def fixed_rows(heap: SymmetricHeap, factor: float, reports: list[torch.Tensor]) -> Iterator[None]:
    """In this context, calls with exact capacity get `factor` times the rows that recent calls needed, even if
    that is too little. The host reads no plan: its report is added to `reports`. For captures."""
    heap.captured_reports = reports
    heap.row_budget_factor = factor
    try:
        yield
    finally:
        heap.captured_reports = heap.row_budget_factor = None


def _compiled(heap: SymmetricHeap, program: Program) -> Program:
    """The runnable form of a program."""
    take = _lease.__wrapped__  # type: ignore[attr-defined]  # the function in programs
    return kernels.program_compiler(heap.device)(with_leases_first(program, take, heap.memory))


def nodes_of(heap: SymmetricHeap) -> RemoteNodes:
    """The nodes of a heap that spans several nodes."""
    assert heap.nodes is not None
    return heap.nodes
