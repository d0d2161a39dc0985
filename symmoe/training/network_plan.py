"""How long a layer's forward pass takes on several nodes, from bytes and FLOPs: a model, measured on no network.

T tokens per rank, E experts, K slots per token; N nodes of G ranks, R ranks in all. Every GPU has a NIC. A token goes
once to every node that has an expert for it, to the rank on its rail, and from there to the ranks of that node. Routing
is uniform: a token's groups of experts are drawn first, then its K experts from those groups. What is left out: ids,
probs and maps (1.2 % of the bytes of qwen3-30b, 0.3 % of DeepSeek-V3), latency, barriers, local copies and sums.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from symmoe.checks.arguments import size_problem
from symmoe.errors import ArgumentError, raise_for
from symmoe.moe.config import MoEConfig
from symmoe.moe.overlap import H200, Sizes, chance_of_part, rates_of


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a rank sends in one trip over one kind of link, one direction."""

    rows: float  # per token
    num_bytes: float  # of those rows, for all T tokens
    seconds: float  # at the link's rate


@dataclass(frozen=True, kw_only=True, slots=True)
class Trip:
    """Dispatch or combine of one rank, over the network and, inside the nodes, over NVLink."""

    slots: Traffic  # if a row travelled for each (token, slot), to compare
    ranks: Traffic  # or for each (token, rank)
    nodes: Traffic  # a row for each (token, node), as symmoe sends them with exact capacity
    fixed: Traffic  # the same with a static capacity: `rail_capacity` rows to every other node
    link: Traffic  # over NVLink


@dataclass(frozen=True, kw_only=True, slots=True)
class Forward:
    """Seconds of a forward pass: both trips over the network and over NVLink, and both GEMMs."""

    network_s: float
    link_s: float
    gemms_s: float

    @property
    def serial_s(self) -> float:
        """One after the other."""
        return self.network_s + self.link_s + self.gemms_s

    @property
    def hidden_s(self) -> float:
        """If all ran at the same time and none slowed another: no schedule is faster."""
        return max(self.network_s, self.link_s, self.gemms_s)

    @property
    def bound(self) -> str:
        """What takes the longest."""
        times = {"GEMMs": self.gemms_s, "network": self.network_s, "NVLink": self.link_s}
        return max(times, key=times.__getitem__)


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkPlan:
    """What :func:`plan_network` returns, for one rank: the trips, and the pass with exact and with static capacity."""

    dispatch: Trip
    combine: Trip
    exact: Forward
    fixed: Forward


def plan_network(
    config: MoEConfig,
    *,
    num_ranks: int,
    num_nodes: int,
    num_tokens: int,
    nic_gbs: float = 50.0,
    dtype: torch.dtype = torch.bfloat16,
) -> NetworkPlan:
    """Traffic and seconds of a layer with gated experts and order="node". Local; allocates nothing.

    NVLink and GEMMs have the rates of an H200 (moe/overlap.py). Inside a node dispatch sends a row for each
    (token, rank), and combine reads one for each (token, slot).

    Args:
        config: rail_capacity None is num_tokens.
        num_ranks: R.
        num_nodes: N.
        num_tokens: T, on every rank.
        nic_gbs: 1e9 bytes per second that one rank sends over the network.
        dtype: the dtype of the rows; with a `quantized_wire`, of those that come home.

    Raises:
        ArgumentError: a number is out of range, or does not divide another.
    """
    raise_for(size_problem(num_ranks=num_ranks, num_nodes=num_nodes, num_tokens=num_tokens))
    if not (math.isfinite(nic_gbs) and nic_gbs > 0):
        raise ArgumentError(f"nic_gbs ({nic_gbs}) must be finite and greater than 0")
    if num_ranks % num_nodes:
        raise ArgumentError(f"num_ranks ({num_ranks}) must be divisible by num_nodes ({num_nodes})")
    config.experts_per_rank(num_ranks)
    for name, parts in (("num_ranks", num_ranks), ("num_nodes", num_nodes)):
        if max(parts, config.num_groups) % min(parts, config.num_groups):
            raise ArgumentError(
                f"num_groups ({config.num_groups}) must divide {name} ({parts}), or be divisible by it: the model "
                "knows no groups that share a rank or a node in part"
            )
    sizes = Sizes(
        num_rows=num_tokens * config.top_k,
        hidden=config.hidden,
        ffn=config.ffn,
        top_k=config.top_k,
        num_experts=config.num_experts,
        num_ranks=num_ranks,
        item_bytes=dtype.itemsize,
    )
    rates, per_node = rates_of(H200, config.precision), num_ranks // num_nodes
    of_rank, of_node = (
        chance_of_part(config.num_experts, parts, config.top_k, config.num_groups, config.top_groups)
        for parts in (num_ranks, num_nodes)
    )
    fixed_rows = (num_nodes - 1) * (config.rail_capacity or num_tokens) / num_tokens

    def traffic(rows: float, row_bytes: int, rate: float) -> Traffic:
        num_bytes = rows * num_tokens * row_bytes
        return Traffic(rows, num_bytes, num_bytes / rate)

    def trip(row_bytes: int, link_rows: float) -> Trip:
        nic = nic_gbs * 1e9
        return Trip(
            slots=traffic(config.top_k * (1 - 1 / num_nodes), row_bytes, nic),
            ranks=traffic((num_ranks - per_node) * of_rank, row_bytes, nic),
            nodes=traffic((num_nodes - 1) * of_node, row_bytes, nic),
            fixed=traffic(fixed_rows, row_bytes, nic),
            link=traffic(link_rows, row_bytes, rates.link_bytes),
        )

    dispatch = trip(config.sent_row_bytes("forward", dtype.itemsize), num_nodes * (per_node - 1) * of_rank)
    combine = trip(config.hidden * dtype.itemsize, config.top_k * (1 - 1 / per_node))

    def forward(network_s: float) -> Forward:
        gemms_s = (sizes.fc1_flops + sizes.product_flops) / rates.flops
        return Forward(network_s=network_s, link_s=dispatch.link.seconds + combine.link.seconds, gemms_s=gemms_s)

    return NetworkPlan(
        dispatch=dispatch,
        combine=combine,
        exact=forward(dispatch.nodes.seconds + combine.nodes.seconds),
        fixed=forward(dispatch.fixed.seconds + combine.fixed.seconds),
    )
