"""Models the time of a layer on several nodes, from bytes and FLOPs. docs/nodes.md has its assumptions, its limits,
and the measurements that it was compared with.

T tokens per rank, E experts, K slots per token; N nodes of G ranks, R ranks in all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from symmoe.checks.arguments import size_problem
from symmoe.errors import first_problem, raise_for
from symmoe.kernels.gemm_parts import PART_ROWS, Division
from symmoe.moe.config import MoEConfig, RouterConfig
from symmoe.moe.overlap import H200, H200_SMS, Rates, Sizes, chance_of_part, overlap, rates_of

# Measured on H100s (docs/decisions/0007-rows-under-gemms.md).
_RAIL_DURING_GEMM = 1.2  # factor on rows' time on rails
_FIXED_S = 375e-6
_TOKEN_S = 20e-9  # for launches, the router and the plan
_WEIGHTS_SEEN = 0.5  # fraction of their bytes' time; fitted to eight steps


@dataclass(frozen=True, slots=True)
class Traffic:
    """A rank's traffic in one trip over one kind of link, one direction."""

    rows: float  # per token
    num_bytes: float  # of those rows, for all T tokens
    seconds: float  # at the link's rate


@dataclass(frozen=True, kw_only=True, slots=True)
class Trip:
    """Dispatch or combine of one rank, over the network and, inside the nodes, over NVLink."""

    slots: Traffic  # a row for each (token, slot), for comparison
    ranks: Traffic  # a row for each (token, rank)
    nodes: Traffic  # a row for each (token, node), as symmoe sends them with exact capacity
    fixed: Traffic  # with a static capacity: `rail_capacity` rows to every other node
    link: Traffic  # over NVLink


@dataclass(frozen=True, kw_only=True, slots=True)
class Forward:
    """Seconds of a forward pass: both trips over the network and over NVLink, and both GEMMs."""

    network_s: float
    link_s: float
    gemms_s: float

    @property
    def serial_s(self) -> float:
        """All in sequence."""
        return self.network_s + self.link_s + self.gemms_s

    @property
    def hidden_s(self) -> float:
        """All fully overlapped, none slowed by another: a lower bound of any schedule."""
        return max(self.network_s, self.link_s, self.gemms_s)

    @property
    def bound(self) -> str:
        """The slowest part."""
        times = {"GEMMs": self.gemms_s, "network": self.network_s, "NVLink": self.link_s}
        return max(times, key=times.__getitem__)


@dataclass(frozen=True, slots=True)
class NetworkPlan:
    """The result of :func:`plan_network`, for one rank: the trips, the pass with exact and with static capacity, and
    seconds of a GPU per step, without waits for its host, with exact capacity and the default schedule."""

    dispatch: Trip
    combine: Trip
    exact: Forward
    fixed: Forward
    step_forward_s: float
    step_backward_s: float


def plan_network(
    config: MoEConfig,
    *,
    num_ranks: int,
    num_nodes: int,
    num_tokens: int,
    nic_gbs: float = 50.0,
    dtype: torch.dtype = torch.bfloat16,
) -> NetworkPlan:
    """Traffic and seconds of a layer with gated experts and order="node", on GPUs with the rates of an H200
    (moe/overlap.py). Local; allocates nothing. ArgumentError: a number is out of range, or does not divide another.

    Args:
        config: rail_capacity None is num_tokens.
        num_ranks, num_nodes, num_tokens: R, N, and T on every rank.
        nic_gbs: 1e9 bytes per second that one rank sends over the network.
        dtype: the dtype of the rows; with a `quantized_wire`, of the returned rows.
    """
    raise_for(
        size_problem(num_ranks=num_ranks, num_nodes=num_nodes, num_tokens=num_tokens)
        or first_problem(
            (
                not (math.isfinite(nic_gbs) and nic_gbs > 0),
                f"nic_gbs ({nic_gbs}) must be finite and greater than 0",
            ),
            (
                num_ranks % num_nodes,
                f"num_ranks ({num_ranks}) must be divisible by num_nodes ({num_nodes})",
            ),
        )
    )
    config.experts_per_rank(num_ranks)
    router = config.router or RouterConfig()
    num_groups = router.num_expert_groups
    rules = (
        (
            max(parts, num_groups) % min(parts, num_groups),
            f"num_expert_groups ({num_groups}) must divide {name} ({parts}), or be divisible by it: the model "
            "knows no groups that share a rank or a node in part",
        )
        for name, parts in (("num_ranks", num_ranks), ("num_nodes", num_nodes))
    )
    raise_for(first_problem(*rules))
    rates = rates_of(H200, config.precision)
    per_node = num_ranks // num_nodes
    nic = nic_gbs * 1e9
    of_rank, of_node = (
        chance_of_part(config.num_experts, parts, config.top_k, num_groups, router.topk_groups)
        for parts in (num_ranks, num_nodes)
    )

    def traffic(rows: float, row_bytes: int, rate: float) -> Traffic:
        num_bytes = rows * num_tokens * row_bytes
        return Traffic(rows, num_bytes, num_bytes / rate)

    def trip(row_bytes: int, link_rows: float) -> Trip:
        return Trip(
            slots=traffic(config.top_k * (1 - 1 / num_nodes), row_bytes, nic),
            ranks=traffic((num_ranks - per_node) * of_rank, row_bytes, nic),
            nodes=traffic((num_nodes - 1) * of_node, row_bytes, nic),
            fixed=traffic(
                (num_nodes - 1) * (config.rail_capacity or num_tokens) / num_tokens, row_bytes, nic
            ),
            link=traffic(link_rows, row_bytes, rates.link_bytes),
        )

    sizes = Sizes(
        num_rows=num_tokens * config.top_k,
        hidden=config.expert_hidden,
        ffn=config.ffn,
        top_k=config.top_k,
        num_experts=config.num_experts,
        num_ranks=num_ranks,
        item_bytes=dtype.itemsize,
        num_nodes=num_nodes,
        rail_bytes_per_s=nic,
        sums_travel=False,
        is_expert_major=config.received_layout == "expert-major",
        sent_row_bytes=config.sent_row_bytes("forward", dtype.itemsize),
        sent_gradient_row_bytes=config.sent_row_bytes("backward", dtype.itemsize),
    )
    dispatch = trip(
        config.sent_row_bytes("forward", dtype.itemsize), num_nodes * (per_node - 1) * of_rank
    )
    combine = trip(config.expert_hidden * dtype.itemsize, config.top_k * (1 - 1 / per_node))

    exact = Forward(
        network_s=dispatch.nodes.seconds + combine.nodes.seconds,
        link_s=dispatch.link.seconds + combine.link.seconds,
        gemms_s=(sizes.fc1_flops + sizes.product_flops) / rates.flops,
    )
    fixed = replace(exact, network_s=dispatch.fixed.seconds + combine.fixed.seconds)
    return NetworkPlan(dispatch, combine, exact, fixed, *_step_s(sizes, rates))


def _step_s(sizes: Sizes, rates: Rates) -> tuple[float, float]:
    """Seconds of forward and of backward, trip after trip in the order of moe/overlap.py. Costs beyond that module's:
    rows that are sent, placed and summed are read and written once more; rails are slower while GEMMs run; each expert
    wastes half a tile; weights and their gradients cost a part of their time; router, plan and launches cost time."""
    chosen = overlap(sizes, H200_SMS, rates)
    local_share = 1 / sizes.num_nodes
    rail_s = sizes.rail_bytes / min(sizes.rail_bytes_per_s, rates.link_bytes)
    tokens_bytes = sizes.row_bytes / sizes.top_k
    local_s, remote_s = (
        (share * sizes.row_bytes * sizes.is_expert_major + rows_bytes) / rates.memory_bytes
        for share, rows_bytes in ((local_share, tokens_bytes), (1 - local_share, sizes.rail_bytes))
    )
    padding = 1 + PART_ROWS / 2 * sizes.num_experts / sizes.num_ranks / sizes.num_rows

    def gemm_s(flops: float, division: Division | None = None) -> float:
        share = 1 if division is None else division.num_sms / H200_SMS
        return flops * padding / rates.flops / share

    def dispatch_s(flops: float, division: Division | None, row_bytes: int | None) -> float:
        on_rails_s = sizes.sent_share(row_bytes) * rail_s
        receive_s = 2 * sizes.rail_bytes / rates.memory_bytes
        link_s = sizes.push(row_bytes).push_bytes / rates.link_bytes
        if division is None:
            return on_rails_s + local_s + remote_s + receive_s + link_s + gemm_s(flops)
        first_s = local_s + max(
            _RAIL_DURING_GEMM * on_rails_s - local_s, gemm_s(local_share * flops, division)
        )
        return (
            first_s
            + receive_s
            + remote_s
            + link_s
            + gemm_s((1 - local_share) * flops)
            + 2 * rates.launch_s
        )

    def combine_s(flops: float, division: Division | None, wgrad_flops: float) -> float:
        home_s = (sizes.num_nodes + 1) * tokens_bytes / rates.memory_bytes
        dw1_s = wgrad_flops / rates.wgrad_flops
        read_s = sizes.row_bytes * (1 + 1 / sizes.top_k) / rates.memory_bytes
        if division is None:
            return gemm_s(flops) + dw1_s + read_s + rail_s + home_s
        meanwhile_s = (
            gemm_s(local_share * flops, division)
            + dw1_s * H200_SMS / division.num_sms
            + local_share * read_s
        )
        first_s = gemm_s((1 - local_share) * flops) + (1 - local_share) * read_s
        return first_s + max(_RAIL_DURING_GEMM * rail_s, meanwhile_s) + home_s + 2 * rates.launch_s

    product = sizes.product_flops
    fc1 = sizes.fc1_flops
    weight_bytes = (
        sizes.num_experts
        / sizes.num_ranks
        * (product + fc1)
        / 2
        / sizes.num_rows
        * sizes.item_bytes
    )
    once_s = _WEIGHTS_SEEN * weight_bytes / rates.memory_bytes
    fixed_s = _FIXED_S + sizes.num_rows / sizes.top_k * _TOKEN_S
    forward_s = dispatch_s(fc1, chosen.dispatch, sizes.sent_row_bytes) + combine_s(
        product, chosen.combine, 0.0
    )
    backward_s = dispatch_s(product, chosen.gradient_dispatch, sizes.sent_gradient_row_bytes)
    backward_s += product / rates.wgrad_flops + combine_s(fc1, chosen.gradient_combine, fc1)
    return forward_s + once_s + fixed_s / 2, backward_s + 2 * once_s + fixed_s / 2
