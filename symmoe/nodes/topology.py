"""The domain of a rank's memory, and the ranks of each node, which all ranks compute alike from all domains."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from symmoe.errors import ArgumentError, BackendUnavailable
from symmoe.kernels.control import RankMaps

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NVML = "libnvidia-ml.so.1"
_SUCCESS = 0
_COMPLETED = 3  # nvmlReturn_t, nvmlGpuFabricState_t


def find_machine() -> str:
    """This machine since its boot, comparable between ranks."""
    return _BOOT_ID.read_text().strip()


def find_domain(gpu: str | None) -> str:
    """The domain that this rank shares with all ranks whose memory it can reach: an NVLink domain, which may have GPUs
    on several machines, or else the machine. gpu: the UUID of the rank's GPU, or None."""
    return (_find_fabric(gpu) if gpu else "") or find_machine()


class _FabricInfo(ctypes.Structure):  # nvmlGpuFabricInfo_t
    _fields_ = (
        ("cluster", ctypes.c_ubyte * 16),
        ("status", ctypes.c_uint),
        ("clique", ctypes.c_uint32),
        ("state", ctypes.c_ubyte),
    )


def _find_fabric(gpu: str) -> str:
    """The cluster and the clique of a GPU; "" if NVML has none: within one machine the cluster is all zeros."""
    device = ctypes.c_void_p()
    info = _FabricInfo()
    try:
        nvml = ctypes.CDLL(_NVML)
        if nvml.nvmlInit_v2() != _SUCCESS:
            return ""
        try:
            if (
                nvml.nvmlDeviceGetHandleByUUID(
                    b"GPU-" + gpu.removeprefix("GPU-").encode(), ctypes.byref(device)
                )
                != _SUCCESS
                or nvml.nvmlDeviceGetGpuFabricInfo(device, ctypes.byref(info)) != _SUCCESS
            ):
                return ""
        finally:
            nvml.nvmlShutdown()
    except (OSError, AttributeError):  # no driver, or one too old for domains
        return ""
    if info.state != _COMPLETED or info.status != _SUCCESS or not any(info.cluster):
        return ""
    return f"{bytes(info.cluster).hex()} {info.clique}"


@dataclass(unsafe_hash=True)
class Topology:
    """The nodes of a group, from the point of view of `rank`: the ranks of each in ascending order. Nodes are ordered
    by their first rank, and have equal sizes.

    Attributes:
        num_nodes: N.
        node, ranks: this rank's node, and the ranks of it.
        local_rank: this rank's index in its node.
        rail: the ranks with this rank's index, one of each node.
        is_in_order: whether the ranks of each node are consecutive.
    """

    rank: int
    nodes: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        self.num_nodes = len(self.nodes)
        self.node = self.node_of(self.rank)
        self.ranks = self.nodes[self.node]
        self.local_rank = self.ranks.index(self.rank)
        self.rail = tuple(ranks[self.local_rank] for ranks in self.nodes)
        self.is_in_order = all(ranks[-1] - ranks[0] < len(ranks) for ranks in self.nodes)

    def node_of(self, rank: int) -> int:
        """The node of a rank of the group."""
        return next(node for node, ranks in enumerate(self.nodes) if rank in ranks)


def find_topology(domains: Sequence[Hashable], rank: int, ranks_per_node: int | None) -> Topology:
    """The topology of a group, for `rank`. domains: by rank, the domain that it shares with exactly the ranks whose
    memory it can reach. ranks_per_node: size of a node, which may be a part of a domain; None: each domain is a node.
    ArgumentError: domains cannot be split into nodes of ranks_per_node ranks. BackendUnavailable: nodes would differ in
    size."""
    members: dict[Hashable, list[int]] = {}
    for domain_rank, domain in enumerate(domains):
        members.setdefault(domain, []).append(domain_rank)
    sizes = Counter(map(len, members.values()))
    if ranks_per_node is None:
        usual_size = max(sizes, key=lambda size: (sizes[size], size))
        like = next(ranks[0] for ranks in members.values() if len(ranks) == usual_size)
        for ranks in members.values():
            if len(ranks) != usual_size:
                raise BackendUnavailable(
                    f"rank {ranks[0]} is on a node with {len(ranks)} ranks of the group, but rank {like} on one with "
                    f"{usual_size}: every node must have the same number, or ranks_per_node must cut them"
                )
        ranks_per_node = usual_size
    for ranks in members.values():
        if len(ranks) % ranks_per_node:
            raise ArgumentError(
                f"ranks_per_node ({ranks_per_node}) must divide the {len(ranks)} ranks of the group on the node of "
                f"rank {ranks[0]}: it can cut a node, and joins none"
            )
    nodes = [
        tuple(ranks[first : first + ranks_per_node])
        for ranks in members.values()
        for first in range(0, len(ranks), ranks_per_node)
    ]
    return Topology(rank, tuple(sorted(nodes)))


def make_rank_maps(topology: Topology, device: torch.device) -> RankMaps:
    """The maps of a topology. Synchronises."""
    nodes = topology.nodes
    own_ranks = topology.ranks
    num_ranks = len(nodes) * len(own_ranks)
    to_local = [
        ranks.index(rank) if rank in ranks else -1
        for ranks in nodes
        for rank in range(num_ranks + 1)
    ]
    first_with = [
        own_ranks[0] if rank < own_ranks[0] else min(rank, own_ranks[-1] + 1)
        for rank in range(1, num_ranks)
    ]
    with torch.inference_mode(False):
        return RankMaps(
            own_node=topology.node,
            first=own_ranks[0] if topology.is_in_order else 0,
            to_node=torch.tensor(
                [*map(topology.node_of, range(num_ranks)), topology.node], device=device
            ),
            to_local=torch.tensor(to_local, dtype=torch.int32, device=device),
            by_node=torch.tensor(nodes, device=device),
            own_ranks=torch.tensor(own_ranks, device=device),
            other_ranks=torch.tensor(
                [ranks for ranks in nodes if ranks != own_ranks], device=device
            ).flatten(),
            first_with=torch.tensor([0, *first_with, num_ranks], device=device),
        )
