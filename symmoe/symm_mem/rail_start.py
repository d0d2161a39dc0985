"""Connects a rank with those on its rail, when a heap is made. What fails on one rank is raised on all."""

from __future__ import annotations

import os
from typing import Any

import torch

from symmoe.errors import BackendUnavailable, SymmoeError
from symmoe.nodes.lane import Lane
from symmoe.nodes.nccl import Nccl
from symmoe.nodes.nccl_rail import NcclRail
from symmoe.nodes.rail import GlooRail, Payload
from symmoe.nodes.reach import DEVICE_VARIABLE, ENDPOINT_BYTES, Endpoint, Listener, unreachable
from symmoe.nodes.topology import Topology
from symmoe.symm_mem.bootstrap import Bootstrap

_TOKEN_BYTES = 16
_REACH_S = 10.0  # for connections: three tries, as Linux does them
_HINT = f"{DEVICE_VARIABLE} on each node names its network device; firewalls must let all ports pass"


def start_rail(
    bootstrap: Bootstrap, topology: Topology, device: torch.device, timeout_s: float
) -> tuple[Lane, Payload]:
    """What hosts say to each other on this rank's rail, and what moves tensors of `device`. Collective over the group.

    Args:
        timeout_s: bound of the waits of `bootstrap`. Connections of hosts have half of it, and those of GPUs, so that
            ranks which have theirs still wait when others give up.

    Raises:
        BackendUnavailable: on every rank, if two ranks cannot connect. The text names them, and what to look at.
    """
    _check_reach(bootstrap, topology, min(_REACH_S, timeout_s / 2))
    token = bootstrap.all_gather_bytes(os.urandom(_TOKEN_BYTES), num_bytes=_TOKEN_BYTES)[0].hex()
    name, store = f"symmoe/{token}/{topology.local_rank}", bootstrap.store
    node, num_nodes = topology.node, topology.num_nodes
    options: dict[str, Any] = {"node": node, "num_nodes": num_nodes, "timeout_s": timeout_s / 2}
    of_hosts = {**options, "timeout_s": timeout_s / 4}  # there are two
    rail, last_words = bootstrap.attempt(
        lambda: [_make_rail(topology, store, each, of_hosts) for each in (name, f"{name}/last words")]
    )
    try:
        payload = _make_payload(bootstrap, device, rail, store, f"{name}/payload", options)
    except SymmoeError:
        for each in (rail, last_words):
            each.abort()
        raise
    return Lane(rail, last_words, node=node, num_nodes=num_nodes), payload


def _check_reach(bootstrap: Bootstrap, topology: Topology, timeout_s: float) -> None:
    """Raises on all ranks if two ranks of a rail cannot connect. Collective."""
    with bootstrap.attempt(Listener) as listener:
        packed = bootstrap.all_gather_bytes(listener.endpoint.pack(), num_bytes=ENDPOINT_BYTES)
        mates = {rank: Endpoint.unpack(packed[rank]) for rank in topology.rail if rank != topology.rank}
        refused, problem = unreachable(mates, timeout_s), None
        if refused:
            (rank, why), *_ = refused.items()
            problem = BackendUnavailable(
                f"rank {topology.rank} on node {topology.node} cannot connect to rank {rank} on node "
                f"{topology.node_of(rank)} at {mates[rank]}: {why}; {_HINT}"
            )
        bootstrap.agree(problem)


def _make_rail(topology: Topology, store: Any, name: str, options: dict[str, Any]) -> GlooRail:
    try:
        return GlooRail(store, name, **options)
    except RuntimeError as error:
        reason = str(error).split("\n", 1)[0]
        text = f"rank {topology.rank} on node {topology.node} does not connect to its rail, ranks {topology.rail}"
        raise BackendUnavailable(f"{text}: {reason}; {_HINT}") from error


def _make_payload(
    bootstrap: Bootstrap, device: torch.device, rail: GlooRail, store: Any, name: str, options: dict[str, Any]
) -> Payload:
    if device.type == "cpu":
        return rail
    library = bootstrap.attempt(Nccl)  # together: a rank without it would keep the others waiting
    made: list[NcclRail] = []
    try:
        bootstrap.attempt(lambda: made.append(NcclRail(library, store, name, **options)))
    except SymmoeError:
        for each in made:
            each.end()
        raise
    return made[0]
