"""How a heap begins: ranks agree on its arguments, find who shares memory with whom, and map each other's arenas."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from symmoe.errors import ArgumentError, BackendUnavailable, ConfigMismatch, PeerError, raise_for
from symmoe.kernels.control import ControlLayout, Peers
from symmoe.nodes.topology import Topology, find_place, find_topology
from symmoe.symm_mem import host_backend, nvshmem_backend
from symmoe.symm_mem.bootstrap import Bootstrap, NodeBootstrap, read_tape_mode, warn_if_alone_by_mistake
from symmoe.symm_mem.faults import Faults, OneNode
from symmoe.symm_mem.memory import ALIGNMENT_BYTES, Memory
from symmoe.symm_mem.reports import Configurations
from symmoe.symm_mem.row_budget import RowHistory
from symmoe.symm_mem.streams import Access, NoStreams, OneCall, StreamOrder
from symmoe.symm_mem.waits import Waits

if TYPE_CHECKING:
    from symmoe.symm_mem.several_nodes import Nodes

logger = logging.getLogger("symmoe")

_PROTOCOL_VERSION = 6
_BACKENDS = ("host", "nvshmem")
START_TIMEOUT_S = 300.0
_MAX_S = 1e9  # 31 years; clocks count nanoseconds in 64 bits


@dataclass(frozen=True, slots=True)
class HeapOptions:
    """The arguments of SymmetricHeap but for the group; start_heap replaces the backend "auto"."""

    num_bytes: int
    backend: str
    timeout_s: float
    start_timeout_s: float
    ranks_per_node: int | None

    @property
    def start_bound_s(self) -> float:
        """Bound of waits before there is memory. Every rank has one, also where the argument is wrong: messages without
        one go another way, and would not meet those of the peers."""
        is_wrong = _timeout_problem("start_timeout_s", self.start_timeout_s) is not None
        return START_TIMEOUT_S if is_wrong else min(self.start_timeout_s, _MAX_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a heap is made of.

    Attributes:
        backend, backend_reason: its name, and why it was picked.
        arenas: what holds the memory, and frees it.
        bootstrap: of the whole group, with the bound of the group.
        tape_mode: one of tapes.MODES.
        nodes: what a heap has if its group spans several nodes, else None.
        others: what its errors ask of the other nodes.
        row_histories: by kind of call, what recent ones have needed; forgotten when an error is noticed.
        rank, num_ranks, topology, peers, count_peers, memory, waits, faults, streams, access, one_call,
        configurations: as in SymmetricHeap.
    """

    rank: int
    num_ranks: int
    backend: str
    backend_reason: str
    arenas: host_backend.HostBackend | nvshmem_backend.NvshmemBackend
    bootstrap: Bootstrap
    tape_mode: str
    topology: Topology
    peers: Peers
    count_peers: Peers
    memory: Memory
    streams: StreamOrder | NoStreams
    access: Access
    one_call: OneCall
    configurations: Configurations
    waits: Waits
    faults: Faults
    others: OneNode
    nodes: Nodes | None
    row_histories: defaultdict[Hashable, RowHistory]


def start_heap(group: dist.ProcessGroup | None, options: HeapOptions) -> Parts:
    """The parts of a heap whose control block is zeroed on all ranks. Collective over the group; see SymmetricHeap."""
    warn_if_alone_by_mistake(group)
    name, reason = _pick_backend(options.backend)
    options = replace(options, backend=name)
    patient, whole = Bootstrap(group), Bootstrap(group, options.start_bound_s)
    tape_mode = whole.attempt(partial(_check_options, options, whole))
    _agree_on(options, whole)
    topology = find_topology(_find_domains(options.backend, whole), whole.rank, options.ranks_per_node)
    node, is_single = topology.ranks, topology.num_nodes == 1
    logger.info("rank %d: backend %s (%s)", whole.rank, name, reason)
    backend_class = host_backend.HostBackend if options.backend == "host" else nvshmem_backend.NvshmemBackend
    backend = backend_class(whole if is_single else NodeBootstrap(whole, node), options.num_bytes)
    device = backend.device
    peers = Peers(
        rank=topology.local_rank,
        num_ranks=len(node),
        bases=torch.tensor(backend.bases, dtype=torch.int64, device=device),
        views=tuple(make() for make in backend.arenas),
        layout=ControlLayout(len(node), whole.num_ranks),
        group_ranks=() if is_single else node,
    )
    streams, access = StreamOrder(device) if device.type == "cuda" else NoStreams(), Access()
    memory = Memory(peers, backend.arenas, access, streams)
    configurations = Configurations(whole)
    waits = Waits(peers, configurations, options.timeout_s, options.start_timeout_s)
    one_call, histories = OneCall(access, memory.lock, streams), defaultdict[Hashable, RowHistory](RowHistory)
    others, nodes, count_peers = OneNode(), None, peers
    if not is_single:
        from symmoe.symm_mem import rail_peers, several_nodes

        try:
            lane, payload = several_nodes.start_rail(whole, topology, device, options.start_bound_s)
        except BackendUnavailable:  # on every rank: the memory is given back together
            backend.close()
            raise
        except PeerError:
            backend.abandon()
            raise
        others = peers_of_rail = rail_peers.RailPeers(lane, payload, topology, waits, streams, access)
    faults = Faults(waits, streams, one_call, name, others, histories.clear)
    if not is_single:
        nodes = several_nodes.Nodes(topology, peers, access, faults, peers_of_rail)
        count_peers = several_nodes.make_count_peers(peers, topology)
    peers.views[peers.rank][: peers.layout.num_bytes].zero_()
    streams.synchronize()
    whole.barrier()  # no rank may signal into a control block that is not zeroed yet
    return Parts(
        rank=whole.rank,
        num_ranks=whole.num_ranks,
        backend=name,
        backend_reason=reason,
        arenas=backend,
        bootstrap=patient,
        tape_mode=tape_mode,
        topology=topology,
        peers=peers,
        count_peers=count_peers,
        memory=memory,
        streams=streams,
        access=access,
        one_call=one_call,
        configurations=configurations,
        waits=waits,
        faults=faults,
        others=others,
        nodes=nodes,
        row_histories=histories,
    )


def _pick_backend(backend: str) -> tuple[str, str]:
    """The backend, and why it is this one."""
    if backend != "auto":
        return backend, "asked for"
    if torch.cuda.is_available():
        return "nvshmem", f"auto: torch sees {torch.cuda.get_device_name()}"
    return "host", "auto: torch sees no CUDA device"


def _check_options(options: HeapOptions, bootstrap: Bootstrap) -> str:
    """Raises for what is wrong on this rank; the mode of tapes."""
    num_bytes, ranks_per_node = options.num_bytes, options.ranks_per_node
    least = ControlLayout(bootstrap.num_ranks).num_bytes + ALIGNMENT_BYTES
    if options.backend not in _BACKENDS:
        raise ArgumentError(f"backend ({options.backend!r}) must be 'auto', 'host' or 'nvshmem'")
    if not isinstance(num_bytes, int) or not least <= num_bytes < 1 << 63:
        raise ArgumentError(
            f"num_bytes ({num_bytes!r}) must be an int of at least {least} for {bootstrap.num_ranks} ranks, "
            "and less than 2**63"
        )
    raise_for(_timeout_problem("timeout_s", options.timeout_s))
    raise_for(_timeout_problem("start_timeout_s", options.start_timeout_s))
    tape_mode = read_tape_mode()
    if ranks_per_node is not None and not (
        isinstance(ranks_per_node, int) and not isinstance(ranks_per_node, bool) and 0 < ranks_per_node < 1 << 31
    ):
        raise ArgumentError(f"ranks_per_node ({ranks_per_node!r}) must be an int of at least 1, or None")
    is_on_host = options.backend == "host"
    missing = host_backend.preflight() if is_on_host else nvshmem_backend.preflight(num_bytes)
    if missing:
        raise BackendUnavailable(missing)
    if is_on_host and bootstrap.rank == 0:
        host_backend.warn_if_too_large(num_bytes, bootstrap.num_ranks)
    return tape_mode


def _timeout_problem(name: str, value: object) -> ArgumentError | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and (0 < value <= _MAX_S or value == math.inf):
        return None
    return ArgumentError(f"{name} ({value!r}) must be a number greater than 0, of at most {_MAX_S:.0e} s or math.inf")


def _agree_on(options: HeapOptions, bootstrap: Bootstrap) -> None:
    """Raises on every rank if ranks disagree. Collective."""
    names = ("num_bytes", "backend", "timeout_s", "ranks_per_node")
    gathered = bootstrap.gather(
        {"protocol version": _PROTOCOL_VERSION, **{name: getattr(options, name) for name in names}}
    )
    for field in gathered[0]:
        values = [each[field] for each in gathered]
        if len(set(values)) > 1:
            raise ConfigMismatch(f"{field} differs between ranks: {values}")


def _find_domains(backend: str, bootstrap: Bootstrap) -> list[str]:
    """Of each rank, what it has in common with those whose memory it can reach. Collective."""
    gpu = None
    if backend == "nvshmem":
        gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    place = bootstrap.attempt(partial(find_place, gpu))
    return bootstrap.gather(place.domain)
