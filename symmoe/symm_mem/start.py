"""How a heap begins: ranks agree on its arguments, find the ranks that share memory, and map each other's arenas. And
how it returns its memory to the system, and restores it at the same addresses.

The hosts rely on the epochs in the control block, so a suspended heap keeps a copy of it. Access prevents any use of an
arena meanwhile. Without arenas, ranks wait for each other over the process group.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Hashable
from contextlib import AbstractContextManager
from functools import partial

import torch
import torch.distributed as dist

from symmoe.errors import (
    ArgumentError,
    BackendUnavailable,
    ConfigMismatch,
    HeapPoisoned,
    PeerError,
    SymmoeError,
    choice_problem,
    logger,
    raise_for,
    warn,
)
from symmoe.kernels.control import PHASE_SUSPEND, ControlLayout, Peers
from symmoe.nodes.topology import find_domain, find_topology
from symmoe.program.programs import MODES
from symmoe.symm_mem import host_backend, nvshmem_backend
from symmoe.symm_mem.bootstrap import MAX_S, Bootstrap, group_problem
from symmoe.symm_mem.faults import Faults, NoRemoteNodes
from symmoe.symm_mem.memory import ALIGNMENT_BYTES, Memory
from symmoe.symm_mem.reports import Configurations
from symmoe.symm_mem.row_budget import RowHistory
from symmoe.symm_mem.streams import Access, NoStreams, OneCall, StreamOrder, Streams
from symmoe.symm_mem.waits import Waits

_PROTOCOL_VERSION = 6
_MAX_NAMED = 5  # leases; an error for peers has few bytes
START_TIMEOUT_S = 300.0


class HeapParts:
    """The parts of a heap. Construction is collective over the group, and zeroes the control blocks of all ranks.
    Attributes: as in SymmetricHeap, and the right to use the heap, the owner of the memory, and one of
    programs.MODES."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        expert_group: dist.ProcessGroup | None,
        num_bytes: int,
        backend: str,
        timeout_s: float,
        start_timeout_s: float,
        ranks_per_node: int | None,
    ) -> None:
        _warn_of_missing_group(group)
        self.expert_group = expert_group
        self.num_bytes = num_bytes
        self.backend = backend
        self.backend_reason = "asked for"
        if backend == "auto":
            has_gpu = torch.cuda.is_available()
            device_name = torch.cuda.get_device_name() if has_gpu else "no CUDA device"
            self.backend = "nvshmem" if has_gpu else "host"
            self.backend_reason = f"auto: torch sees {device_name}"
        # Every rank has a bound, even if the argument is wrong: without one, its messages would not match the peers'
        # messages.
        problem = _timeout_problem("start_timeout_s", start_timeout_s)
        start_s = min(start_timeout_s, MAX_S) if problem is None else START_TIMEOUT_S
        self.bootstrap = Bootstrap(group)
        bootstrap = Bootstrap(group, start_s)
        self.rank = bootstrap.rank
        self.num_ranks = bootstrap.num_ranks
        is_on_host = self.backend == "host"
        self._program_mode, fills, self.expert_ranks = bootstrap.attempt(
            partial(
                _check,
                *(bootstrap, expert_group, num_bytes, self.backend, ranks_per_node),
                {"timeout_s": timeout_s, "start_timeout_s": start_timeout_s},
            )
        )
        _agree_on(
            bootstrap,
            num_bytes=num_bytes,
            backend=self.backend,
            timeout_s=timeout_s,
            ranks_per_node=ranks_per_node,
            **{"size of expert_group": len(self.expert_ranks)},
        )
        gpu = (
            None
            if is_on_host
            else str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        )
        domains = bootstrap.gather(bootstrap.attempt(partial(find_domain, gpu)))  # by rank
        self.topology = topology = find_topology(domains, bootstrap.rank, ranks_per_node)
        node = topology.ranks
        is_single = topology.num_nodes == 1
        logger.info("rank %d: backend %s (%s)", bootstrap.rank, self.backend, self.backend_reason)
        backend_class = host_backend.HostBackend if is_on_host else nvshmem_backend.NvshmemBackend
        # Whole units, so that the arena can be viewed as any dtype.
        arena_bytes = num_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        self._arenas = arenas = backend_class(bootstrap, topology, arena_bytes)
        device = arenas.device
        self.peers = peers = Peers(
            rank=topology.local_rank,
            num_ranks=len(node),
            bases=torch.tensor(arenas.bases, dtype=torch.int64, device=device),
            views=tuple(make() for make in arenas.arenas),
            layout=ControlLayout(len(node), bootstrap.num_ranks),
            group_ranks=() if is_single else node,
        )
        self._access = access = Access()
        self.streams: Streams = NoStreams() if is_on_host else StreamOrder(device)
        self.memory = Memory(peers, arenas.arenas, access, self.streams, fills=fills)
        self.one_call: AbstractContextManager[None] = (
            access
            if isinstance(self.streams, NoStreams)
            else OneCall(access, self.memory.lock, self.streams)
        )
        self.configurations = Configurations(bootstrap)
        self.row_histories = defaultdict[Hashable, RowHistory](RowHistory)
        self.waits = Waits(peers, self.configurations, timeout_s, start_timeout_s)
        self.nodes = None
        self.count_peers = peers
        if not is_single:
            from symmoe.symm_mem import several_nodes

            try:
                rail = several_nodes.start_rail(bootstrap, topology, device, start_s)
            except (BackendUnavailable, PeerError) as error:
                # BackendUnavailable is raised on every rank: they free the memory together.
                arenas.close(together=isinstance(error, BackendUnavailable))
                raise
            self.nodes = several_nodes.RemoteNodes(
                topology, self.waits, self.streams, access, *rail
            )
            self.count_peers = several_nodes.make_count_peers(peers, topology)
        self.faults = Faults(
            self.waits,
            self.streams,
            self.one_call,
            self.row_histories.clear,
            self.nodes or NoRemoteNodes(),
        )
        if self.nodes is not None:
            self.nodes.start(self.faults)
        peers.control_block.zero_()
        self.streams.synchronize()
        bootstrap.barrier()  # no rank may signal into a control block that is not zeroed yet

    def _free_memory(self) -> None:
        """Frees the arenas after the last call of all ranks; if one rank cannot, all keep theirs. Collective."""
        group = self.bootstrap.within(self.waits.timeout_s, PHASE_SUSPEND)
        is_agreed = False
        self._access.is_open = False  # from now on no thread makes a lease
        try:
            group.agree(self._suspend_problem())  # then the peers' launched work is done, too
            is_agreed = True
            self._control_block = self.peers.control_block.to("cpu", copy=True)
            group.attempt(self._arenas.suspend)
        except BaseException as error:
            self._access.is_open = not is_agreed
            if is_agreed or not isinstance(error, (ArgumentError, BackendUnavailable)):
                self.faults.poison = f"suspend failed: {error}"
            raise

    def _suspend_problem(self) -> SymmoeError | None:
        """The error if this rank cannot return its memory, or None."""
        if leases := self.memory.live_leases():
            named = ", ".join(f"'{name}' of {size} bytes" for name, size in leases[:_MAX_NAMED])
            return ArgumentError(
                f"suspend: {len(leases)} leases of {sum(size for _, size in leases)} bytes are live, the largest are "
                f"{named}: suspend when no backward pass is to come, and drop what keeps them"
            )
        missing = self._arenas.suspend_problem
        return BackendUnavailable(f"suspend: {missing}") if missing else None

    def _restore_memory(self) -> None:
        """Restores the arenas without the rows. Collective."""
        group = self.bootstrap.within(self.waits.timeout_s, PHASE_SUSPEND)
        poison = self.faults.poison
        group.agree(None if poison is None else HeapPoisoned(f"an earlier call failed: {poison}"))
        self._arenas.resume(group)
        self.peers.control_block.copy_(self._control_block)
        self.streams.synchronize()
        group.barrier()  # no rank may signal into a block before it is written
        self._access.is_open = True


def _warn_of_missing_group(group: dist.ProcessGroup | None) -> None:
    """Warns of torchrun's ranks without a process group: each would silently train a separate model."""
    num_ranks = os.environ.get("WORLD_SIZE", "1")
    if group is None and num_ranks != "1" and not dist.is_initialized():
        warn(
            f"WORLD_SIZE is {num_ranks}, but there is no process group: this heap is of one rank. Call "
            "torch.distributed.init_process_group() first, if the ranks are to train together"
        )


def _check(
    bootstrap: Bootstrap,
    expert_group: dist.ProcessGroup | None,
    num_bytes: int,
    backend: str,
    ranks_per_node: int | None,
    timeouts: dict[str, float],
) -> tuple[str, bool, list[int]]:
    """Raises errors of this rank's arguments; returns the mode of programs, whether new memory is filled, and the ranks
    with this rank's experts in the default group."""
    min_bytes = ControlLayout(bootstrap.num_ranks).num_bytes + ALIGNMENT_BYTES
    if backend not in ("host", "nvshmem"):
        raise ArgumentError(f"backend ({backend!r}) must be 'auto', 'host' or 'nvshmem'")
    if not isinstance(num_bytes, int) or not min_bytes <= num_bytes < 1 << 63:
        raise ArgumentError(
            f"num_bytes ({num_bytes!r}) must be an int of at least {min_bytes} for {bootstrap.num_ranks} ranks, and "
            "less than 2**63"
        )
    for name, timeout_s in timeouts.items():
        raise_for(_timeout_problem(name, timeout_s))
    program_mode = _from_environment("SYMMOE_PROGRAMS", MODES)
    fills = _from_environment("SYMMOE_FILL_MEMORY", ("0", "1")) == "1"
    if ranks_per_node is not None and not (
        isinstance(ranks_per_node, int)
        and not isinstance(ranks_per_node, bool)
        and 0 < ranks_per_node < 1 << 31
    ):
        raise ArgumentError(
            f"ranks_per_node ({ranks_per_node!r}) must be an int of at least 1, or None"
        )
    if (
        missing := host_backend.preflight()
        if backend == "host"
        else nvshmem_backend.preflight(num_bytes)
    ):
        raise BackendUnavailable(missing)
    if backend == "host" and bootstrap.rank == 0:
        host_backend.warn_if_too_large(num_bytes, bootstrap.num_ranks)
    raise_for(group_problem(expert_group, "expert_group"))
    ep_ranks = bootstrap.global_ranks
    own_rank = ep_ranks[bootstrap.rank]
    expert_ranks = (
        [own_rank] if expert_group is None else dist.get_process_group_ranks(expert_group)
    )
    if {*expert_ranks} & {*ep_ranks} != {own_rank}:
        raise ArgumentError(
            f"expert_group has the ranks {expert_ranks}, group has {ep_ranks}: this rank ({own_rank}), and no other, "
            "must be in both"
        )
    return program_mode, fills, expert_ranks


def _from_environment(name: str, choices: tuple[str, ...]) -> str:
    """The value of an environment variable; the first choice if the variable is not set."""
    value = os.environ.get(name) or choices[0]
    raise_for(choice_problem(name, value, choices))
    return value


def _timeout_problem(name: str, value: object) -> ArgumentError | None:
    if (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and (0 < value <= MAX_S or value == math.inf)
    ):
        return None
    return ArgumentError(
        f"{name} ({value!r}) must be a number greater than 0, of at most {MAX_S:.0e} s or math.inf"
    )


def _agree_on(bootstrap: Bootstrap, **options: object) -> None:
    """Raises on every rank if ranks disagree. Collective."""
    own_options = {"protocol version": _PROTOCOL_VERSION, **options}
    gathered = bootstrap.gather(own_options)
    for field in own_options:
        values = [rank_options[field] for rank_options in gathered]
        if len(set(values)) > 1:
            raise ConfigMismatch(f"{field} differs between ranks: {values}")
