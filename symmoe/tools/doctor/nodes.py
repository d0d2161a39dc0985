"""`symmoe doctor --nodes`: the placement of ranks, their networks, and the speed of rails. Collective. Ranks exchange
facts through torchrun's store, so all ranks learn of failures and have the same findings. Rails are created as by
a heap that spans nodes, and measured between GPUs, all at the same time."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from symmoe.errors import ArgumentError, BackendUnavailable
from symmoe.nodes.nccl import Nccl, NcclRail
from symmoe.nodes.rail import GlooRail, Payload
from symmoe.nodes.reach import DEVICE_VARIABLE, REACH_S, Endpoint, Listener, connect
from symmoe.nodes.topology import Topology, find_domain, find_machine, find_topology
from symmoe.symm_mem.host_backend import text_of
from symmoe.tools.doctor.findings import (
    Finding,
    Row,
    findings_about,
    first,
    first_line,
    worst_level,
)
from symmoe.tools.doctor.gpus import ask, read_gpus
from symmoe.tools.doctor.versions import read_versions

LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"
_WAIT_S = 90.0  # per wait for other ranks
_CONNECT_S = 30.0
_SLOW = 0.7  # of the median rail's speed
_SHOWN = 3  # entries of a long list


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts of one rank."""

    host: str
    machine: str  # equal for ranks on one machine
    domain: str  # equal for ranks that can access each other's memory
    endpoint: Endpoint  # gloo's address
    problem: str = ""  # why gloo has no address
    versions: Mapping[str, str]
    gpu: str = ""  # the GPU's name
    nics_up: Sequence[str] = ()  # the machine's RDMA devices with a link
    nics_down: Sequence[str] = ()
    launch_order: str = ""  # value of NCCL_LAUNCH_ORDER_IMPLICIT


@dataclass(frozen=True, kw_only=True)
class Rail:
    """The result of one rank's rail: GB/s that the rank sends, infinite if not measured; or the error."""

    gbs: float = 0.0
    error: str = ""


class RanksMissing(Exception):
    """Ranks did not answer in time."""


class Board(NamedTuple):
    """This process among torchrun's ranks, and a torch store in which ranks publish values for each other.
    Collective."""

    store: Any
    rank: int
    num_ranks: int
    local_rank: int
    wait_s: float = _WAIT_S

    def gather(self, name: str, value: Any, ranks: Iterable[int] | None = None) -> list[Any]:
        """Publishes a JSON value under a name; the values of all ranks (or of `ranks`), in rank order. Raises
        RanksMissing."""
        self.store.set(f"symmoe-doctor/{name}/{self.rank}", json.dumps(value))
        deadline, values, missing = time.monotonic() + self.wait_s, [], []
        for rank in range(self.num_ranks) if ranks is None else ranks:
            key, left_s = f"symmoe-doctor/{name}/{rank}", max(1e-3, deadline - time.monotonic())
            try:
                self.store.wait([key], timedelta(seconds=left_s))
                values.append(json.loads(self.store.get(key)))
            except RuntimeError:  # some stores raise a DistError, others do not
                missing.append(rank)
        if missing:
            raise RanksMissing(f"ranks {listed(missing)} did not answer in time, at '{name}'")
        return values


def join_and_examine(
    environment: Mapping[str, str],
    publish: Callable[[list[Finding]], None],
    ranks_per_node: int | None,
    *,
    sends: bool,
) -> list[Finding]:
    """Runs :func:`examine_nodes` in torchrun's job. Rank 0 publishes the findings; if a rank cannot reach the store or
    the other ranks, the first rank of each node does. Raises ArgumentError without torchrun."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    if missing := [name for name in names if not environment.get(name, "").isdigit()]:
        raise ArgumentError(
            f"--nodes needs ranks of torchrun: {', '.join(missing)} not set (docs/nodes.md)"
        )
    rank, num_ranks, local_rank = (int(environment[name]) for name in names)
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=_WAIT_S)))  # type: ignore[attr-defined]
        board = Board(store, rank, num_ranks, local_rank)
        findings = examine_nodes(board, environment, ranks_per_node, sends=sends)
        if rank == 0:
            publish(findings)
        # Rank 0 may host the store, and torchrun ends a node's ranks when one fails: all exit together.
        with contextlib.suppress(RanksMissing):
            board.gather("leaves", None, None if rank == 0 else [0])
        return findings
    except RanksMissing as error:
        finding = Finding(
            "problem",
            "nodes",
            str(error),
            "see what they have printed; py-spy dump --pid ... says where they are",
        )
    except (dist.DistError, ValueError) as error:
        where = ":".join(environment.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
        finding = Finding(
            "problem",
            "nodes",
            f"rank {rank} on {socket.gethostname()} does not reach torch's store at MASTER_ADDR:MASTER_PORT={where}: "
            f"{first_line(error)}",
            "getent hosts $MASTER_ADDR; a firewall must let that port through; torchrun's own output says more",
        )
    if local_rank == 0:
        publish([finding])
    return [finding]


def examine_nodes(
    board: Board, environment: Mapping[str, str], ranks_per_node: int | None, *, sends: bool = True
) -> list[Finding]:
    """Findings about the nodes of a job, the same on all ranks. Collective over the job. Waits are bounded: raises
    RanksMissing. The board's store must be new, without earlier rails; ranks_per_node splits machines into virtual
    nodes."""
    with contextlib.ExitStack() as stack:
        endpoint, problem = Endpoint(""), ""
        try:
            endpoint = stack.enter_context(Listener()).endpoint
        except (BackendUnavailable, OSError) as error:
            problem = str(error)
        local = read_facts(board.local_rank, environment, endpoint, problem)
        facts = [
            Facts(**item | {"endpoint": Endpoint(*item["endpoint"])})
            for item in board.gather("facts", asdict(local))
        ]
        try:
            topology = find_topology([item.domain for item in facts], board.rank, ranks_per_node)
        except (ArgumentError, BackendUnavailable) as error:
            fix = "torchrun --nproc-per-node=... with the same number on every node, or --ranks-per-node"
            return [Finding("problem", "nodes", str(error), fix)]
        mates = {
            rank: facts[rank].endpoint
            for rank in topology.rail
            if rank != board.rank and facts[rank].endpoint.port
        }
        connections, failures = connect(mates, REACH_S)
        for item in connections.values():
            stack.callback(item.close)
        refused = [dict(item) for item in board.gather("reach", [*failures.items()])]
    findings = [*check_nodes(facts, topology), *check_network(facts, topology, refused)]
    if sends and topology.num_nodes > 1 and worst_level(findings) != "problem":
        with contextlib.ExitStack() as stack:
            rails = board.gather(
                "rails", asdict(try_rail(board, topology, stack, has_gpu=bool(local.gpu)))
            )
        findings += check_rails(topology, [Rail(**item) for item in rails])
    return findings


def read_facts(
    local_rank: int, environment: Mapping[str, str], endpoint: Endpoint, problem: str
) -> Facts:
    """The facts of this rank."""
    smi = ask()
    gpu = next(iter(read_gpus(smi).gpus[local_rank:]), None)
    index = None if gpu is None else smi.index_of(gpu)
    installed, nics = read_versions().installed, read_nics()
    return Facts(
        host=socket.gethostname(),
        machine=find_machine(),
        domain=find_domain(None if index is None else smi.devices[index]["uuid"]),
        endpoint=endpoint,
        problem=problem,
        versions={name: installed[name] for name in ("symmoe", "torch") if name in installed},
        gpu=gpu.name if gpu is not None else "",
        nics_up=[name for name, is_up in nics.items() if is_up],
        nics_down=[name for name, is_up in nics.items() if not is_up],
        launch_order=environment.get(LAUNCH_ORDER, ""),
    )


def read_nics(folder: Path = Path("/sys/class/infiniband")) -> dict[str, bool]:
    """By RDMA device, e.g. "mlx5_0 (InfiniBand, 400 Gb/sec (4X NDR))", whether a link is up."""
    nics = {}
    for device in sorted(folder.glob("*")):
        about = [text_of(device / "ports/1" / name).strip() for name in ("link_layer", "rate")]
        nics[f"{device.name} ({', '.join(filter(None, about)) or 'RDMA'})"] = any(
            "ACTIVE" in text_of(path) for path in device.glob("ports/*/state")
        )
    return nics


def try_rail(
    board: Board, topology: Topology, stack: contextlib.ExitStack, *, has_gpu: bool
) -> Rail:
    """Connects the ranks of a rail like a heap; on GPUs also sends messages, compares and measures them. Collective
    over the rail. The result contains an error, if any. The rail is open until the stack ends: peers may still use
    it."""
    options: dict[str, Any] = {
        "node": topology.node,
        "num_nodes": topology.num_nodes,
        "timeout_s": _CONNECT_S,
    }
    store = dist.PrefixStore(f"symmoe-doctor/rail/{topology.local_rank}", board.store)  # type: ignore[attr-defined]
    try:
        if has_gpu:
            torch.cuda.set_device(board.local_rank)
        payload: Payload = (
            NcclRail(Nccl(), store, **options) if has_gpu else GlooRail(store, **options)
        )
    except (BackendUnavailable, RuntimeError) as error:
        return Rail(error=first_line(error))
    stack.callback(payload.close)
    return Rail(gbs=payload.bytes_per_s / 1e9)


# -- findings: pure functions, so that all ranks agree ----------------------------------------------------------------


def check_nodes(facts: Sequence[Facts], topology: Topology) -> list[Finding]:
    """The placement of ranks, and differences in software."""
    versions = {
        name: _ranks_by([fact.versions.get(name, "none") for fact in facts])
        for name in sorted({name for fact in facts for name in fact.versions})
    }
    without = [rank for rank, fact in enumerate(facts) if not fact.gpu]
    num_machines = len({fact.machine for fact in facts})
    places = [
        f"node {node} ({facts[ranks[0]].host}): {listed(ranks)}"
        for node, ranks in enumerate(topology.nodes)
    ]
    of_nodes = (
        "1 node"
        if topology.num_nodes == 1
        else f"{topology.num_nodes} nodes of {len(topology.ranks)}"
    )
    text = f"{len(facts)} ranks on {of_nodes}; {'; '.join(places)}"
    virtual = f" (virtual nodes of {num_machines} machine{'s' * (num_machines > 1)})"
    rails = " | ".join(", ".join(map(str, rail)) for rail in zip(*topology.nodes, strict=True))
    return findings_about(
        "nodes",
        *(
            (
                len(ranks_by_version) > 1,
                "problem",
                f"{name} is not the same everywhere: "
                + "; ".join(
                    f"ranks {listed(ranks)} have {version}"
                    for version, ranks in ranks_by_version.items()
                ),
                f"pip install {name}==... on every node",
            )
            for name, ranks_by_version in versions.items()
        ),
        (
            0 < len(without) < len(facts),
            "problem",
            f"ranks {listed(without)} have no GPU, the others have: a rank needs one of its own",
            "torchrun --nproc-per-node with no more than each node's GPUs",
        ),
        *first(
            (
                topology.num_nodes == 1,
                "note",
                f"{text}: there is no network between ranks to look at",
                "torchrun --nnodes=... on every node; --ranks-per-node N cuts a machine into virtual nodes",
            ),
            (
                True,
                "ok",
                f"{text}{virtual * (num_machines < topology.num_nodes)}; rails: {rails}",
                "",
            ),
        ),
    )


def check_network(
    facts: Sequence[Facts], topology: Topology, refused: Sequence[Mapping[int, str]]
) -> list[Finding]:
    """RDMA devices of every machine; network devices between hosts, and pairs of ranks that cannot connect; settings
    for NCCL. refused: by rank, the ranks of its rail that the rank cannot connect to, and why."""
    return [
        *findings_about("nics", *_nic_rows(facts)),
        *_check_sockets(facts, topology, refused),
        *_check_nccl(facts, topology),
    ]


def _nic_rows(facts: Sequence[Facts]) -> Iterator[Row]:
    has_gpu = any(fact.gpu for fact in facts)
    by_nics = _ranks_by([(tuple(fact.nics_up), tuple(fact.nics_down)) for fact in facts])
    for (up, down), ranks in by_nics.items():
        where = ", ".join(dict.fromkeys(facts[rank].host for rank in ranks))
        yield (
            down,
            "note",
            f"{where}: no link at {', '.join(down)}",
            "ibstat says why; NCCL_IB_HCA=... names those that are up",
        )
        yield from first(
            (
                has_gpu and not up,
                "note",
                f"{where}: no RDMA NIC: what goes between nodes goes over TCP",
                "in a container: docker run --device=/dev/infiniband --cap-add=IPC_LOCK, if the host has NICs",
            ),
            (True, "ok", f"{where}: {', '.join(up) or 'no RDMA NIC'}", ""),
        )


def _check_sockets(
    facts: Sequence[Facts], topology: Topology, refused: Sequence[Mapping[int, str]]
) -> list[Finding]:
    problems = _ranks_by([fact.problem for fact in facts])
    pairs = [
        (rank, mate, why) for rank, failures in enumerate(refused) for mate, why in failures.items()
    ]
    where = _places(topology, len(facts))
    shown = [
        f"{where[a]} cannot connect to {where[b]} at {facts[b].endpoint}: {why}"
        for a, b, why in pairs
    ]
    fix = f"export {DEVICE_VARIABLE}=... on every node: the device of the network between them (`ip -br addr`)"
    if any(not facts[mate].endpoint.is_loopback for _, mate, _ in pairs):
        fix += "; let the firewall pass all TCP ports between the nodes"
    names = [
        f"{end.device or 'an unknown device'} ({end.host or 'no IPv4 address'})"
        for end in (facts[ranks[0]].endpoint for ranks in topology.nodes)
    ]
    text = "; ".join(f"{name} on node {listed(nodes)}" for name, nodes in _ranks_by(names).items())
    return findings_about(
        "sockets",
        *(
            (
                problem,
                "problem",
                f"rank {listed(ranks)}: {problem}",
                f"export {DEVICE_VARIABLE}=... with a device that `ip -br addr` lists there",
            )
            for problem, ranks in problems.items()
        ),
        (pairs, "problem", _some(shown), fix),
        (not pairs and not any(problems), "ok", f"gloo goes by {text}", ""),
    )


def _check_nccl(facts: Sequence[Facts], topology: Topology) -> list[Finding]:
    unordered = [rank for rank, fact in enumerate(facts) if fact.gpu and fact.launch_order != "1"]
    return findings_about(
        "nccl",
        (
            unordered and topology.num_nodes > 1,
            "note",
            f"{LAUNCH_ORDER}=1 is not set on ranks {listed(unordered)}: where FSDP or DDP run at the same time as "
            "rails, GPUs may start the two communicators in different orders, and wait for each other",
            f"export {LAUNCH_ORDER}=1 on every node",
        ),
    )


def check_rails(topology: Topology, rails: Sequence[Rail]) -> list[Finding]:
    """Findings about rails: which connect, their speed, and the slowest one. rails: each rank's result."""
    where = _places(topology, len(rails))
    log = "NCCL_DEBUG=INFO shows by what NCCL goes"
    failed = [f"{where[rank]}: {rail.error}" for rank, rail in enumerate(rails) if rail.error]
    slowest = [
        min(ranks, key=lambda rank: rails[rank].gbs) for ranks in zip(*topology.nodes, strict=True)
    ]
    gbs = [rails[rank].gbs for rank in slowest]
    usual = median(gbs)
    last = gbs.index(min(gbs))
    slowest_rank = where[slowest[last]]
    speeds = "; ".join(f"rail {number}: {speed:.3g} GB/s" for number, speed in enumerate(gbs))
    return findings_about(
        "rails",
        (
            not failed and gbs[last] < _SLOW * usual < math.inf,
            "note",
            f"rail {last} is slow: {gbs[last]:.3g} GB/s at {slowest_rank}, the median rail has {usual:.3g}",
            f"NICs of its ranks: ibstat or ethtool for the rate; what else uses them; {log}",
        ),
        *first(
            (
                failed,
                "problem",
                f"rails do not connect: {_some(failed)}",
                f"firewalls; cables; {log}",
            ),
            (
                math.isinf(usual),
                "ok",
                f"rails {listed(range(len(gbs)))} connect; between CPUs nothing is measured",
                "",
            ),
            (
                True,
                "ok",
                f"{speeds} (each rank sends and receives; of its slowest); slowest: {slowest_rank}",
                "",
            ),
        ),
    )


def _places(topology: Topology, num_ranks: int) -> list[str]:
    return [f"rank {rank} on node {topology.node_of(rank)}" for rank in range(num_ranks)]


def listed(numbers: Sequence[int]) -> str:
    """Numbers as text, with ranges of three and more joined: "0-3, 8"."""
    # Numbers minus their indices are equal within a range.
    ranges = itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    parts = [[number for _, number in run] for _, run in ranges]
    return ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 2 else ", ".join(map(str, p)) for p in parts)


def _ranks_by(values: Sequence[Any]) -> dict[Any, list[int]]:
    return {
        value: [rank for rank, entry in enumerate(values) if entry == value] for value in values
    }


def _some(texts: Sequence[str]) -> str:
    return "; ".join(
        [*texts[:_SHOWN], *[f"and {len(texts) - _SHOWN} more"] * (len(texts) > _SHOWN)]
    )
