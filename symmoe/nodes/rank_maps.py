"""Where the ranks of a group are, as tensors on a device: what kernels between nodes look up."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from symmoe.nodes.topology import Topology


@dataclass(frozen=True, eq=False)
class RankMaps:
    """Made once, because a host that copies numbers to a GPU waits for it.

    Attributes:
        to_node: int64 [R + 1], the node of a rank; the last one is that of -1, which is -1.
        to_local: by node, int32 [R + 1], the index of a rank there; -1 for ranks of other nodes, and for -1.
        ranks: by node, int64 [G], its ranks.
        nodes: int64 [N], their numbers.
    """

    to_node: torch.Tensor
    to_local: tuple[torch.Tensor, ...]
    ranks: tuple[torch.Tensor, ...]
    nodes: torch.Tensor


def make_rank_maps(topology: Topology, device: torch.device) -> RankMaps:
    """The maps of a topology. Synchronises."""
    everyone = range(topology.num_nodes * len(topology.ranks))
    with torch.inference_mode(False):
        return RankMaps(
            to_node=torch.tensor([*map(topology.node_of, everyone), -1], device=device),
            to_local=tuple(
                torch.tensor(
                    [ranks.index(rank) if rank in ranks else -1 for rank in (*everyone, -1)],
                    dtype=torch.int32,
                    device=device,
                )
                for ranks in topology.nodes
            ),
            ranks=tuple(torch.tensor(ranks, device=device) for ranks in topology.nodes),
            nodes=torch.arange(topology.num_nodes, device=device),
        )
