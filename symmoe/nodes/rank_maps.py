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
        to_other_node: int64 [R + 2], the same, but -1 for ranks of this node, and for R, which is no rank.
        to_local: int32 [R + 1], the index of a rank in this node; -1 for ranks of other nodes, and for -1.
        by_node: int64 [N, G], the ranks of each node.
        nodes: int64 [N], their numbers.
        other_nodes: int64 [N - 1], the numbers of the others.
        others_before: int32 [N], how many other nodes have smaller numbers.
    """

    to_node: torch.Tensor
    to_other_node: torch.Tensor
    to_local: torch.Tensor
    by_node: torch.Tensor
    nodes: torch.Tensor
    other_nodes: torch.Tensor
    others_before: torch.Tensor


def make_rank_maps(topology: Topology, device: torch.device) -> RankMaps:
    """The maps of a topology. Synchronises."""
    everyone, nodes, here = range(topology.num_nodes * len(topology.ranks)), range(topology.num_nodes), topology.node
    to_node = [topology.node_of(rank) for rank in everyone]
    to_local = [topology.ranks.index(rank) if rank in topology.ranks else -1 for rank in everyone]
    with torch.inference_mode(False):
        return RankMaps(
            to_node=torch.tensor([*to_node, -1], device=device),
            to_other_node=torch.tensor([*(-1 if node == here else node for node in to_node), -1, -1], device=device),
            to_local=torch.tensor([*to_local, -1], dtype=torch.int32, device=device),
            by_node=torch.tensor(topology.nodes, device=device),
            nodes=torch.tensor(nodes, device=device),
            other_nodes=torch.tensor([node for node in nodes if node != here], device=device),
            others_before=torch.tensor([node - (node > here) for node in nodes], dtype=torch.int32, device=device),
        )
