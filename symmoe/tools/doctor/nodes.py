"""`symmoe doctor --nodes`: who is where, by which network, and what goes over each rail. Every rank takes part.

The ranks talk by torchrun's store, so that what does not work is told by all, and all come to the same findings.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from symmoe.errors import ArgumentError, BackendUnavailable
from symmoe.nodes.nccl import Nccl
from symmoe.nodes.nccl_rail import NcclRail
from symmoe.nodes.place import find_place
from symmoe.nodes.rail import GlooRail, Payload, RailBroken
from symmoe.nodes.reach import Endpoint, Listener, unreachable
from symmoe.nodes.topology import Topology, find_topology
from symmoe.tools.doctor import nvidia_smi
from symmoe.tools.doctor.board import Board, RanksMissing
from symmoe.tools.doctor.findings import Finding, worst_level
from symmoe.tools.doctor.gpus import read_gpus
from symmoe.tools.doctor.nccl_log import nccl_log
from symmoe.tools.doctor.nics import rate_of, read_nics
from symmoe.tools.doctor.node_checks import (
    LAUNCH_ORDER,
    Exchanges,
    Facts,
    check_cards,
    check_nccl,
    check_nodes,
    check_rails,
    check_sockets,
    listed,
)
from symmoe.tools.doctor.pairs import LASTS_S, PairTest
from symmoe.tools.doctor.versions import read_versions

_WAIT_S = 90.0  # for other ranks, each time: a pair test that fails takes less
_REACH_S = 10.0  # for connections: three tries, as Linux does them
_CONNECT_S = 30.0
_COMPARED = ("symmoe", "torch")
_SAME_NUMBER = "torchrun --nproc-per-node=... with the same number on every node, or --ranks-per-node, which cuts nodes"


@dataclass(frozen=True, kw_only=True)
class Worker:
    """This process, as torchrun has numbered it."""

    rank: int
    num_ranks: int
    local_rank: int


def join_and_examine(
    worker: Worker,
    environment: MutableMapping[str, str],
    tell: Callable[[list[Finding]], None],
    *,
    ranks_per_node: int | None,
    lasts_s: float | None,
) -> list[Finding]:
    """:func:`examine_nodes` of the job that torchrun has started. Rank 0 tells; where ranks do not find each other, the
    first one of each node."""
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=_WAIT_S)))  # type: ignore[attr-defined]
        board = Board(store, worker.rank, worker.num_ranks, _WAIT_S)
        findings = examine_nodes(worker, store, board, environment, ranks_per_node=ranks_per_node, lasts_s=lasts_s)
    except RanksMissing as missing:
        text = f"ranks {listed(missing.ranks)} did not answer within {_WAIT_S:g} s, at '{missing}'"
        fix = "see what they have printed; py-spy dump --pid ... says where they are"
        findings = [Finding("problem", "nodes", text, fix)]
    except (dist.DistError, ValueError) as error:
        where = ":".join(environment.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
        text = f"rank {worker.rank} on {socket.gethostname()} does not reach torch's store at MASTER_ADDR:MASTER_PORT="
        fix = "getent hosts $MASTER_ADDR; a firewall must let that port through; torchrun's own output says more"
        findings = [Finding("problem", "nodes", f"{text}{where}: {_first_line(error)}", fix)]
    else:
        if worker.rank == 0:
            tell(findings)
        board.leave()
        return findings
    if worker.local_rank == 0:
        tell(findings)
    return findings


def examine_nodes(
    worker: Worker,
    store: Any,
    board: Board,
    environment: MutableMapping[str, str],
    *,
    ranks_per_node: int | None,
    lasts_s: float | None = LASTS_S,
) -> list[Finding]:
    """What is to be said of the nodes of a job. Collective over its ranks, which all find the same. Waits are bounded.

    Args:
        store: of torch, of all ranks, on which no rails have been tested yet; `board` is over it.
        ranks_per_node: cuts machines into virtual nodes; None: each machine is a node.
        lasts_s: see PairTest; None: ranks send each other nothing.

    Raises:
        RanksMissing: of the ranks that are there.
    """
    with contextlib.ExitStack() as stack:
        endpoint, problem = Endpoint(""), ""
        try:
            endpoint = stack.enter_context(Listener()).endpoint
        except (BackendUnavailable, OSError) as error:
            problem = str(error)
        mine = read_facts(worker, environment, endpoint, problem)
        facts = [Facts.of_json(said) for said in board.gather("facts", mine.as_json())]
        try:
            topology = find_topology([each.domain for each in facts], worker.rank, ranks_per_node)
        except (ArgumentError, BackendUnavailable) as error:
            return [Finding("problem", "nodes", str(error), _SAME_NUMBER)]
        mates = {rank: facts[rank].endpoint for rank in topology.rail if rank != worker.rank}
        said = board.gather("reach", [*unreachable(mates, _REACH_S).items()])
        refused = [dict(its) for its in said]
    found = [*check_nodes(facts, topology), *check_cards(facts), *check_sockets(facts, topology, refused)]
    exchanges: list[Exchanges] = []
    if lasts_s and topology.num_nodes > 1 and worst_level(found) != "problem":
        tried = try_pairs(worker, store, topology, environment, has_gpu=bool(mine.gpu), lasts_s=lasts_s)
        exchanges = [Exchanges.of_json(said) for said in board.gather("pairs", tried.as_json())]
    if mine.gpu and topology.num_nodes > 1:
        found += check_nccl(facts, topology, exchanges)
    return [*found, *check_rails(topology, exchanges)]


def read_facts(worker: Worker, environment: MutableMapping[str, str], endpoint: Endpoint, problem: str) -> Facts:
    """What this rank has to say."""
    smi = nvidia_smi.ask()
    gpus = read_gpus(smi).gpus
    gpu = gpus[worker.local_rank] if worker.local_rank < len(gpus) else None
    index = -1 if gpu is None else gpu.index if gpu.smi_index is None else gpu.smi_index
    place = find_place(next((device.uuid for device in smi.devices if device.index == index), None))
    installed = read_versions().installed
    return Facts(
        host=socket.gethostname(),
        machine=place.machine.hex(),
        domain=place.domain.hex(),
        endpoint=endpoint,
        problem=problem,
        rate=rate_of(endpoint.device),
        versions={name: installed[name] for name in _COMPARED if name in installed},
        nccl=_nccl() if gpu is not None else 0,
        gpu=gpu.name if gpu is not None else "",
        gpu_index=index,
        nics=tuple(read_nics()),
        distances=smi.nics.get(index, {}),
        launch_order=environment.get(LAUNCH_ORDER, ""),
    )


def device_of(worker: Worker, has_gpu: bool) -> torch.device:
    """Where messages of the pair test lie."""
    return torch.device("cuda", worker.local_rank) if has_gpu else torch.device("cpu")


def try_pairs(
    worker: Worker,
    store: Any,
    topology: Topology,
    environment: MutableMapping[str, str],
    *,
    has_gpu: bool,
    lasts_s: float,
) -> Exchanges:
    """The pair test. Collective over the ranks of a rail; what goes wrong is in the result."""
    device = device_of(worker, has_gpu)
    options: dict[str, Any] = {"node": topology.node, "num_nodes": topology.num_nodes, "timeout_s": _CONNECT_S}
    name = f"symmoe-doctor/rail/{topology.local_rank}"
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(nccl_log(environment)) if has_gpu else None
        try:
            hosts = GlooRail(store, name, **options)
            stack.callback(hosts.abort)
            payload: Payload = hosts
            if has_gpu:
                torch.cuda.set_device(device)
                payload = NcclRail(Nccl(), store, f"{name}/payload", **options)
                stack.callback(payload.end)
            pairs = PairTest(topology, payload, hosts, device, lasts_s=lasts_s).run()
        except RailBroken as broken:
            return Exchanges(error=str(broken), mate=topology.rail[broken.node])
        except (BackendUnavailable, RuntimeError) as error:
            return Exchanges(error=_first_line(error))
        return Exchanges(pairs=tuple(pairs), transports=tuple(log.transports()) if log else ())


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0]


def _nccl() -> int:
    try:
        return Nccl().version
    except BackendUnavailable:
        return 0
