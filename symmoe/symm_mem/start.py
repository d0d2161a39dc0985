"""How a heap begins: ranks agree on its arguments, find who shares memory with whom, and map each other's arenas."""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections import defaultdict
from collections.abc import Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist

from symmoe.errors import ArgumentError, BackendUnavailable, ConfigMismatch, PeerError, raise_for
from symmoe.kernels.control import ControlLayout, Peers
from symmoe.nodes.topology import find_place, find_topology
from symmoe.symm_mem import host_backend, nvshmem_backend
from symmoe.symm_mem.bootstrap import MAX_S, Bootstrap
from symmoe.symm_mem.faults import Faults, OneNode
from symmoe.symm_mem.memory import ALIGNMENT_BYTES, Memory
from symmoe.symm_mem.reports import Configurations
from symmoe.symm_mem.row_budget import RowHistory
from symmoe.symm_mem.streams import Access, NoStreams, OneCall, StreamOrder, Streams
from symmoe.symm_mem.waits import Waits
from symmoe.tape.recorder import MODES

logger = logging.getLogger("symmoe")

_PROTOCOL_VERSION = 6
START_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class HeapOptions:
    """The arguments of SymmetricHeap but for the group; HeapParts replaces the backend "auto"."""

    num_bytes: int
    backend: str
    timeout_s: float
    start_timeout_s: float
    ranks_per_node: int | None


class HeapParts:
    """What a heap is made of. Construction is collective over the group, and zeroes the control blocks of all ranks.
    Attributes: as in SymmetricHeap, and the right to use it, what holds the memory and frees it, and one of
    tapes.MODES."""

    def __init__(self, group: dist.ProcessGroup | None, options: HeapOptions) -> None:
        _warn_of_missing_group(group)
        name, reason = options.backend, "asked for"
        if name == "auto":
            has_gpu = torch.cuda.is_available()
            seen = torch.cuda.get_device_name() if has_gpu else "no CUDA device"
            name, reason = "nvshmem" if has_gpu else "host", f"auto: torch sees {seen}"
        options = replace(options, backend=name)
        # Every rank has a bound, also where the argument is wrong: messages without one would not meet those of peers.
        is_usable = _timeout_problem("start_timeout_s", options.start_timeout_s) is None
        start_s = min(options.start_timeout_s, MAX_S) if is_usable else START_TIMEOUT_S
        self.bootstrap, whole = Bootstrap(group), Bootstrap(group, start_s)
        self._tape_mode = whole.attempt(partial(_check_options, options, whole))
        _agree_on(options, whole)
        gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid) if name == "nvshmem" else None
        domains = whole.gather(whole.attempt(partial(find_place, gpu)).domain)  # by rank, whose memory it can reach
        self.topology = topology = find_topology(domains, whole.rank, options.ranks_per_node)
        node, is_single = topology.ranks, topology.num_nodes == 1
        logger.info("rank %d: backend %s (%s)", whole.rank, name, reason)
        self.rank, self.num_ranks, self.num_bytes = whole.rank, whole.num_ranks, options.num_bytes
        self.backend, self.backend_reason = name, reason
        backend_class = host_backend.HostBackend if name == "host" else nvshmem_backend.NvshmemBackend
        self._arenas = arenas = backend_class(whole, topology, options.num_bytes)
        device, views = arenas.device, tuple(make() for make in arenas.arenas)
        bases = torch.tensor(arenas.bases, dtype=torch.int64, device=device)
        layout, group_ranks = ControlLayout(len(node), whole.num_ranks), () if is_single else node
        self.peers = peers = Peers(topology.local_rank, len(node), bases, views, layout, group_ranks)
        order, self._access = StreamOrder(device) if device.type == "cuda" else None, Access()
        self.streams: Streams = NoStreams() if order is None else order
        self.memory = Memory(peers, arenas.arenas, self._access, order)
        self.one_call: AbstractContextManager[None] = self._access
        if order is not None:
            self.one_call = OneCall(self._access, self.memory.lock, order)
        self.configurations, self.row_histories = Configurations(whole), defaultdict[Hashable, RowHistory](RowHistory)
        self.waits = Waits(peers, self.configurations, options.timeout_s, options.start_timeout_s)
        self.nodes, self.count_peers = None, peers
        if not is_single:
            from symmoe.symm_mem import several_nodes

            try:
                rail = several_nodes.start_rail(whole, topology, device, start_s)
            except BackendUnavailable:  # on every rank: the memory is given back together
                arenas.close()
                raise
            except PeerError:
                arenas.abandon()
                raise
            self.nodes = several_nodes.Nodes(topology, self.waits, self.streams, self._access, *rail)
            self.count_peers = several_nodes.make_count_peers(peers, topology)
        self.faults = Faults(self.waits, self.streams, self.one_call, self.row_histories.clear, self.nodes or OneNode())
        if self.nodes is not None:
            self.nodes.start(self.faults)
        peers.views[peers.rank][: peers.layout.num_bytes].zero_()
        self.streams.synchronize()
        whole.barrier()  # no rank may signal into a control block that is not zeroed yet


def _warn_of_missing_group(group: dist.ProcessGroup | None) -> None:
    """Warns of torchrun's ranks without a process group: each would train a separate model without an error."""
    num_ranks = os.environ.get("WORLD_SIZE", "1")
    if group is None and num_ranks != "1" and not dist.is_initialized():
        warnings.warn(
            f"WORLD_SIZE is {num_ranks}, but there is no process group: this heap is of one rank. Call "
            "torch.distributed.init_process_group() first, if the ranks are to train together",
            stacklevel=4,
        )


def _check_options(options: HeapOptions, bootstrap: Bootstrap) -> str:
    """Raises for what is wrong on this rank; the mode of tapes."""
    num_bytes, ranks_per_node = options.num_bytes, options.ranks_per_node
    least = ControlLayout(bootstrap.num_ranks).num_bytes + ALIGNMENT_BYTES
    if options.backend not in ("host", "nvshmem"):
        raise ArgumentError(f"backend ({options.backend!r}) must be 'auto', 'host' or 'nvshmem'")
    if not isinstance(num_bytes, int) or not least <= num_bytes < 1 << 63:
        bounds = f"at least {least} for {bootstrap.num_ranks} ranks, and less than 2**63"
        raise ArgumentError(f"num_bytes ({num_bytes!r}) must be an int of {bounds}")
    raise_for(_timeout_problem("timeout_s", options.timeout_s))
    raise_for(_timeout_problem("start_timeout_s", options.start_timeout_s))
    tape_mode = os.environ.get("SYMMOE_TAPES") or MODES[0]
    if tape_mode not in MODES:
        raise ArgumentError(f"SYMMOE_TAPES ({tape_mode!r}) must be one of {', '.join(map(repr, MODES))}")
    is_int = isinstance(ranks_per_node, int) and not isinstance(ranks_per_node, bool)
    if ranks_per_node is not None and not (is_int and 0 < ranks_per_node < 1 << 31):
        raise ArgumentError(f"ranks_per_node ({ranks_per_node!r}) must be an int of at least 1, or None")
    is_on_host = options.backend == "host"
    if missing := host_backend.preflight() if is_on_host else nvshmem_backend.preflight(num_bytes):
        raise BackendUnavailable(missing)
    if is_on_host and bootstrap.rank == 0:
        host_backend.warn_if_too_large(num_bytes, bootstrap.num_ranks)
    return tape_mode


def _timeout_problem(name: str, value: object) -> ArgumentError | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and (0 < value <= MAX_S or value == math.inf):
        return None
    return ArgumentError(f"{name} ({value!r}) must be a number greater than 0, of at most {MAX_S:.0e} s or math.inf")


def _agree_on(options: HeapOptions, bootstrap: Bootstrap) -> None:
    """Raises on every rank if ranks disagree. Collective."""
    names = ("num_bytes", "backend", "timeout_s", "ranks_per_node")
    mine = {"protocol version": _PROTOCOL_VERSION, **{name: getattr(options, name) for name in names}}
    gathered = bootstrap.gather(mine)
    for field in mine:
        values = [each[field] for each in gathered]
        if len(set(values)) > 1:
            raise ConfigMismatch(f"{field} differs between ranks: {values}")
