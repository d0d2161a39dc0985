"""Fixed-size messages over a process group, for the time before the heap has memory. No pickle."""

from __future__ import annotations

import atexit
import copy
import functools
import json
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from symmoe.errors import (
    FAULT_BYTES,
    ArgumentError,
    BackendUnavailable,
    PeerError,
    PeerLost,
    PeerTimeout,
    SymmoeError,
    decode,
    encode,
)
from symmoe.kernels import control
from symmoe.torch_internals import store_of

_T = TypeVar("_T")

MAX_S = 1e9  # the longest bound, 31 years: clocks count nanoseconds in 64 bits
_TAG = 0x5E41  # messages of the group's user have other tags
_GLOO_THREAD = "pt_gloo_runloop"
_LONGEST_S = 5.0  # enough for a thread to free its tensors
_NUM_LOOKS = 3  # in a single look the thread may be waiting for the lock


class Bootstrap:
    """The EP group as plain bytes. All methods are collective over the group; properties are local. `group=None`
    without an initialised process group is a group of one. timeout_s: bound of each wait for a peer; None: the group's
    timeout. A failed wait may break the group.

    Every method raises:
        PeerTimeout: a peer did not arrive in time; rank -1 in a group without CPU tensors (only NCCL).
        PeerLost: the connection to a peer broke.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout_s: float | None = None) -> None:
        if (problem := group_problem(group, "group")) is not None:
            raise problem
        self._is_single = group is None and not dist.is_initialized()
        if not self._is_single:
            _once_at_exit(_wait_for_gloo)
        self._group = group
        self._timeout_s = timeout_s
        self._num_exchanges = 0
        self._phase = control.PHASE_START
        self.rank = 0 if self._is_single else dist.get_rank(group)
        self.num_ranks = 1 if self._is_single else dist.get_world_size(group)
        # A group with a CPU backend takes CPU tensors. An NCCL-only group takes tensors of this thread's current GPU:
        # another thread may call the methods, with another current GPU.
        takes_cpu = (
            self._is_single
            or "cpu" in dist.get_backend_config(group)
            or dist.get_backend(group) == "gloo"
        )
        self._device = (
            torch.device("cpu") if takes_cpu else torch.device("cuda", torch.cuda.current_device())
        )

    def within(self, timeout_s: float, phase: int) -> Bootstrap:
        """A bootstrap for work of another phase, whose waits are bounded by the heap's timeout_s. Not collective."""
        bounded = copy.copy(self)
        bounded._phase = phase
        bounded._timeout_s = min(timeout_s, MAX_S)
        bounded._num_exchanges = 0
        return bounded

    @property
    def global_ranks(self) -> list[int]:
        """The group's ranks in the default group, in rank order. Not collective."""
        return [0] if self._is_single else dist.get_process_group_ranks(self._group)

    @property
    def store(self) -> Any:
        """A torch store that the group's ranks share, maybe with other ranks. Not collective."""
        return store_of(self._group or dist.group.WORLD)

    def all_gather_bytes(self, payload: bytes, *, num_bytes: int) -> list[bytes]:
        """Every rank's `payload`, zero-padded to `num_bytes`, in rank order."""
        if len(payload) > num_bytes:
            raise AssertionError(f"a payload of {len(payload)} bytes does not fit {num_bytes}")
        self._num_exchanges += 1
        data = torch.frombuffer(bytearray(payload.ljust(num_bytes, b"\0")), dtype=torch.uint8)
        gathered = (
            self._exchange(data)
            if self._device.type == "cpu"
            else self._gather(data.to(self._device))
        )
        return [bytes(t.cpu().numpy().tobytes()) for t in gathered]

    def agree(self, problem: SymmoeError | None) -> None:
        """Raises the first rank's problem on every rank; returns if no rank has one."""
        message = b"" if problem is None else encode(problem)
        for rank, payload in enumerate(self.all_gather_bytes(message, num_bytes=FAULT_BYTES)):
            if payload.strip(b"\0"):
                raise decode(payload, rank=rank)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order. A value's JSON has at most 512 bytes."""
        gathered = self.all_gather_bytes(json.dumps(value).encode(), num_bytes=512)
        return [json.loads(payload.rstrip(b"\0")) for payload in gathered]

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        """Every rank's payload, of any length, in rank order."""
        lengths = self.all_gather_bytes(len(payload).to_bytes(8, "little"), num_bytes=8)
        sizes = [int.from_bytes(length, "little") for length in lengths]
        gathered = self.all_gather_bytes(payload, num_bytes=max(1, *sizes))
        return [data[:size] for data, size in zip(gathered, sizes, strict=True)]

    def attempt(self, step: Callable[[], _T]) -> _T:
        """Runs `step` on each rank and returns its result; raises the first rank's error on every rank. Errors from
        outside symmoe are raised as BackendUnavailable: something that a heap needs is missing."""
        problem: SymmoeError | None = None
        try:
            result = step()
        except Exception as error:  # noqa: BLE001 - peers wait after any error
            problem = (
                error
                if isinstance(error, SymmoeError)
                else BackendUnavailable(f"{type(error).__name__}: {error}")
            )
        try:
            self.agree(problem)
        finally:
            problem = None  # its traceback refers to this frame: a cycle that would keep the result of `step`
        return result

    def barrier(self) -> None:
        """Returns when every rank has arrived."""
        self.all_gather_bytes(b"", num_bytes=8)

    def _gather(self, data: torch.Tensor) -> list[torch.Tensor]:
        gathered = [torch.empty_like(data) for _ in range(self.num_ranks)]
        start = time.monotonic()
        try:
            self._wait(dist.all_gather(gathered, data, group=self._group, async_op=True), start)
        except RuntimeError as error:
            raise self._failure(-1, start, error) from error
        return gathered

    def _exchange(self, data: torch.Tensor) -> list[torch.Tensor]:
        """Does the work of _gather message by message, so that a missing message has a known sender."""
        gathered = [
            data if rank == self.rank else torch.empty_like(data) for rank in range(self.num_ranks)
        ]
        peers = [rank for rank in range(self.num_ranks) if rank != self.rank]
        start = time.monotonic()
        failures = list[PeerError]()

        def attempt(peer: int, action: Callable[..., _T], *args: Any, **options: Any) -> _T | None:
            try:
                return action(*args, **options)
            except RuntimeError as error:
                failures.append(self._failure(peer, start, error))
                failures[-1].__cause__ = error
                return None

        options = {"group": self._group, "tag": _TAG}
        sent = {peer: attempt(peer, dist.isend, data, group_dst=peer, **options) for peer in peers}
        received = {
            peer: attempt(peer, dist.irecv, gathered[peer], group_src=peer, **options)
            for peer in peers
        }
        for peer in peers:
            if not failures:
                attempt(peer, self._wait, received[peer], start)
        for peer in peers:
            # Wait for all sends, even if one peer is lost: a message that is unread when this rank ends never arrives,
            # and its receiver would wait. After a timeout gloo has closed all connections.
            if sent[peer] is not None and PeerTimeout not in map(type, failures):
                attempt(peer, self._wait, sent[peer], start)
        try:
            if failures:
                raise failures[0]
        finally:
            failures.clear()  # their tracebacks and this frame keep each other alive
        return gathered

    def _wait(self, work: dist.Work, start: float) -> None:
        if self._timeout_s is None:
            work.wait()
        else:
            work.wait(timedelta(seconds=max(1e-3, start + self._timeout_s - time.monotonic())))

    def _failure(self, rank: int, start: float, error: RuntimeError) -> PeerError:
        waited_s = time.monotonic() - start
        timeout_s = self._timeout_s
        name = "start_timeout_s" if self._phase == control.PHASE_START else "timeout_s"
        # gloo rounds bounds down to milliseconds, so its timeout may come before this clock reaches the bound.
        if "imed out" not in str(error) and (timeout_s is None or waited_s < timeout_s):
            return PeerLost(rank=rank, problem=str(error).split("\n", 1)[0])
        return PeerTimeout(
            rank=rank,
            phase=control.PHASES[self._phase],
            expected=self._num_exchanges,
            seen=self._num_exchanges - 1,
            bound=("the process group's timeout", waited_s)
            if timeout_s is None
            else (name, timeout_s),
        )


def group_problem(group: object, name: str) -> ArgumentError | None:
    """The error if this rank cannot communicate over the group in the argument `name`, or None."""
    not_in_it = "is one that this rank is not in"
    if group is None:
        return None
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return ArgumentError(f"{name} (GroupMember.NON_GROUP_MEMBER) {not_in_it}")
    if not isinstance(group, dist.ProcessGroup):
        return ArgumentError(
            f"{name} ({group!r}) must be a torch.distributed.ProcessGroup, or None"
        )
    try:
        rank = dist.get_rank(group)
    except ValueError as error:
        return ArgumentError(f"{name} is not usable: {error}")
    return None if rank >= 0 else ArgumentError(f"{name} {not_in_it}")


_once_at_exit = functools.cache(atexit.register)


def _wait_for_gloo() -> None:
    """Lets gloo's threads finish before the interpreter ends. Waits for no peer.

    A gloo thread reports the end of a collective and then frees its tensors, for which it needs Python's lock. If the
    interpreter begins to end in between, Python (before 3.14) ends the thread inside a destructor, which aborts the
    process: "terminate called without an active exception" (torch 2.13, busy machines).
    """
    deadline = time.monotonic() + _LONGEST_S
    num_looks = 0
    while num_looks < _NUM_LOOKS and time.monotonic() < deadline:
        num_looks = num_looks + 1 if _is_gloo_asleep() else 0
        time.sleep(1e-3)  # releases the lock


def _is_gloo_asleep() -> bool:
    """Whether all threads of gloo sleep."""
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # the thread has ended
            name, _, state = (
                (thread / "stat").read_text(encoding="utf-8").partition("(")[2].rpartition(") ")
            )
            if name == _GLOO_THREAD and not state.startswith("S"):
                return False
    return True
