"""What is to be said of several nodes, from what their ranks have told. Pure functions: all ranks find the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from symmoe.nodes.reach import DEVICE_VARIABLE, Endpoint
from symmoe.nodes.topology import Topology
from symmoe.tools.doctor.findings import Finding
from symmoe.tools.doctor.nics import Nic, check_nics
from symmoe.tools.doctor.pairs import PairResult

LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"
_KNOWS_LAUNCH_ORDER = 22600  # the NCCL that has it, 2.26
_SHOWN = 3  # of what may be many
_SLOW = 0.7  # of the median rail's speed
_SEE_LOG = "NCCL_DEBUG=INFO torchrun ... benchmarks/bench.py rail shows NCCL's log"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a rank says of itself.

    Attributes:
        host: its name.
        machine, domain: what ranks on one machine, and ranks that reach each other's memory, have in common.
        endpoint: where gloo listens.
        problem: why it cannot; "" if it can.
        rate: of that network device; "" if it is not known.
        versions: by name.
        nccl: as NCCL numbers its versions; 0: the rank has no GPU.
        gpu: name of its GPU; "" without one.
        gpu_index: how nvidia-smi numbers it, else torch.
        nics: of its machine.
        distances: by name of a NIC, how far it is from the GPU, see check_nics.
        launch_order: value of NCCL_LAUNCH_ORDER_IMPLICIT; "" if it is not set.
    """

    host: str
    machine: str
    domain: str
    endpoint: Endpoint
    problem: str = ""
    rate: str = ""
    versions: Mapping[str, str]
    nccl: int = 0
    gpu: str = ""
    gpu_index: int = -1
    nics: tuple[Nic, ...] = ()
    distances: Mapping[str, str]
    launch_order: str = ""

    def as_json(self) -> dict[str, Any]:
        """For :meth:`of_json`."""
        return asdict(self)

    @classmethod
    def of_json(cls, said: dict[str, Any]) -> Facts:
        """What :meth:`as_json` gave."""
        nics = tuple(Nic(**nic) for nic in said["nics"])
        return cls(**{**said, "endpoint": Endpoint(**said["endpoint"]), "nics": nics})


@dataclass(frozen=True, kw_only=True)
class Exchanges:
    """What a rank says of the pair test.

    Attributes:
        pairs: its results, if all went well.
        error: else what went wrong.
        mate: with whom, if that is known; -1: it is not.
        transports: ways that NCCL speaks of, see parse_transports.
    """

    pairs: tuple[PairResult, ...] = ()
    error: str = ""
    mate: int = -1
    transports: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """For :meth:`of_json`."""
        return asdict(self)

    @classmethod
    def of_json(cls, said: dict[str, Any]) -> Exchanges:
        """What :meth:`as_json` gave."""
        pairs = tuple(PairResult(**pair) for pair in said["pairs"])
        return cls(**{**said, "pairs": pairs, "transports": tuple(said["transports"])})


def check_nodes(facts: Sequence[Facts], topology: Topology) -> list[Finding]:
    """Who is where, and whether they have the same software."""
    found = []
    for name in sorted({name for each in facts for name in each.versions}):
        by_version: dict[str, list[int]] = {}
        for rank, each in enumerate(facts):
            by_version.setdefault(each.versions.get(name, "none"), []).append(rank)
        if len(by_version) > 1:
            has = "; ".join(f"ranks {listed(ranks)} have {version}" for version, ranks in by_version.items())
            fix = f"pip install {name}==..., the same on every node"
            found.append(Finding("problem", "versions", f"{name} is not the same everywhere: {has}", fix))
    without = [rank for rank, each in enumerate(facts) if not each.gpu]
    if 0 < len(without) < len(facts):
        text = f"ranks {listed(without)} have no GPU, the others have: a rank needs one of its own"
        fix = "torchrun --nproc-per-node with no more than each node's GPUs; symmoe doctor there says which torch sees"
        found.append(Finding("problem", "nodes", text, fix))
    num_nodes, num_machines = topology.num_nodes, len({each.machine for each in facts})
    places = [f"node {node} ({facts[ranks[0]].host}): {listed(ranks)}" for node, ranks in enumerate(topology.nodes)]
    of_nodes = "1 node" if num_nodes == 1 else f"{num_nodes} nodes of {len(topology.ranks)}"
    text = f"{len(facts)} ranks on {of_nodes}; {'; '.join(places)}"
    if num_nodes == 1:
        fix = "torchrun --nnodes=... on every node; --ranks-per-node N cuts a machine into virtual nodes"
        return [*found, Finding("note", "nodes", f"{text}: there is no network between ranks to look at", fix)]
    rails = " | ".join(", ".join(map(str, rail)) for rail in zip(*topology.nodes, strict=True))
    if num_machines < num_nodes:
        text += f" (virtual nodes of {'1 machine' if num_machines == 1 else f'{num_machines} machines'})"
    return [*found, Finding("ok", "nodes", f"{text}; rails: {rails}")]


def check_cards(facts: Sequence[Facts]) -> list[Finding]:
    """NICs of every machine; machines of which the same is to be said have one finding."""
    machines: dict[str, list[Facts]] = {}
    for each in facts:
        machines.setdefault(each.machine, []).append(each)
    hosts: dict[Finding, list[str]] = {}
    for its in machines.values():
        distances = {each.gpu_index: each.distances for each in its if each.gpu}
        for finding in check_nics(its[0].nics, distances, sorted(distances)):
            hosts.setdefault(finding, []).append(its[0].host)
    found = []
    for finding, where in hosts.items():
        of = ", ".join(where) if len(where) < len(machines) or len(machines) == 1 else f"all {len(machines)} machines"
        found.append(Finding(finding.level, finding.subject, f"{of}: {finding.text}", finding.fix))
    return found


def check_sockets(facts: Sequence[Facts], topology: Topology, refused: Sequence[Mapping[int, str]]) -> list[Finding]:
    """By which network devices hosts talk to each other, and which ranks cannot connect to which.

    Args:
        refused: by rank, why it cannot connect to some of its rail.
    """
    found = []
    deaf = {each.problem: rank for rank, each in reversed([*enumerate(facts)]) if each.problem}
    for problem, rank in deaf.items():
        fix = f"export {DEVICE_VARIABLE}=... with a device that `ip -br addr` lists there"
        found.append(Finding("problem", "sockets", f"rank {rank}: {problem}", fix))
    pairs = [(rank, mate, why) for rank, its in enumerate(refused) for mate, why in its.items()]
    if pairs:
        shown = [
            f"rank {rank} on node {topology.node_of(rank)} cannot connect to rank {mate} on node "
            f"{topology.node_of(mate)} at {facts[mate].endpoint}: {why}"
            for rank, mate, why in pairs[:_SHOWN]
        ]
        text = "; ".join(shown) + (f"; and {len(pairs) - _SHOWN} pairs more" if len(pairs) > _SHOWN else "")
        fix = f"export {DEVICE_VARIABLE}=... on every node: the device of the network between them (`ip -br addr`)"
        if any(not facts[mate].endpoint.is_loopback for _, mate, _ in pairs):
            fix += "; let the firewall pass all TCP ports between the nodes"
        found.append(Finding("problem", "sockets", text, fix))
    if not found:
        devices: dict[str, list[int]] = {}
        for node, ranks in enumerate(topology.nodes):
            first = facts[ranks[0]]
            name = first.endpoint.device or "a device that is not known"
            rate = f", {first.rate}" if first.rate else ""
            devices.setdefault(f"{name} ({first.endpoint.host or 'no IPv4 address'}{rate})", []).append(node)
        text = "; ".join(f"{device} on node {listed(nodes)}" for device, nodes in devices.items())
        found.append(Finding("ok", "sockets", f"gloo goes by {text}"))
    return found


def check_nccl(facts: Sequence[Facts], topology: Topology, exchanges: Sequence[Exchanges]) -> list[Finding]:
    """What NCCL goes by between nodes, as far as it says so, and what it needs to know. For ranks with GPUs.

    Args:
        exchanges: by rank; empty without a pair test.
    """
    found = []
    unordered = [rank for rank, each in enumerate(facts) if each.launch_order != "1"]
    old = [rank for rank, each in enumerate(facts) if each.nccl < _KNOWS_LAUNCH_ORDER]
    if unordered:
        text = (
            f"{LAUNCH_ORDER}=1 is not set on ranks {listed(unordered)}: where FSDP or DDP run at the same time as "
            "rails, GPUs may start the two communicators in different orders, and wait for each other"
        )
        found.append(Finding("note", "nccl", text, f"export {LAUNCH_ORDER}=1 on every node"))
    elif old:
        text = f"NCCL of ranks {listed(old)} is older than 2.26, and does not know {LAUNCH_ORDER}"
        found.append(Finding("note", "nccl", text, "a torch with a newer NCCL: 2.11 brings 2.28"))
    if not exchanges:
        return found
    ways: dict[tuple[str, ...], list[int]] = {}
    for rank, each in enumerate(exchanges):
        ways.setdefault(each.transports, []).append(rank)
    cards = {rank: [nic.name for nic in facts[rank].nics if nic.kind and nic.is_up] for rank in range(len(facts))}
    for way, ranks in ways.items():
        who, version = f"ranks {listed(ranks)}", _nccl_version(facts[ranks[0]].nccl)
        if not way:
            text = f"NCCL {version} of {who} does not say by what it goes between nodes: not known"
            found.append(Finding("note", "nccl", text, _SEE_LOG))
            continue
        by = " and ".join(way)
        passed_over = next((cards[rank] for rank in ranks if cards[rank]), [])
        if "NET/Socket" in way and passed_over:
            text = f"NCCL {version} of {who} goes by {by}, TCP, although there is {', '.join(passed_over)}"
            fix = f"unset NCCL_IB_DISABLE NCCL_NET NCCL_IB_HCA; ibv_devinfo has to list {passed_over[0]}; {_SEE_LOG}"
            found.append(Finding("note", "nccl", text, fix))
        elif any(map(_is_through_the_host, way)):
            text = f"NCCL {version} of {who} goes by {by}, through the host's memory: the NIC does not read the GPU's"
            fix = "as root: modprobe nvidia-peermem; or a kernel with dma-buf; NCCL_NET_GDR_LEVEL must not forbid it"
            found.append(Finding("note", "nccl", text, fix))
        elif not any(each.startswith("NET/") for each in way):
            text = f"NCCL {version} of {who} goes by {by}: the nodes are virtual, and no network is used"
            found.append(Finding("ok", "nccl", f"{text}; NCCL_HOSTID=... of its own for each node makes NCCL use it"))
        else:
            found.append(Finding("ok", "nccl", f"NCCL {version} of {who} goes by {by}"))
    return found


def check_rails(topology: Topology, exchanges: Sequence[Exchanges]) -> list[Finding]:
    """How fast rails are, which one is the slowest, and what has come that was not sent."""
    found = []
    failed = [(rank, each) for rank, each in enumerate(exchanges) if each.error]
    if failed:
        shown = []
        for rank, each in failed[:_SHOWN]:
            mate = f" and rank {each.mate} on node {topology.node_of(each.mate)}" if each.mate >= 0 else ""
            shown.append(f"between rank {rank} on node {topology.node_of(rank)}{mate}: {each.error}")
        text = "; ".join(shown) + (f"; and {len(failed) - _SHOWN} more" if len(failed) > _SHOWN else "")
        found.append(Finding("problem", "rails", f"the pair test failed {text}", f"firewalls; cables; {_SEE_LOG}"))
    pairs = [pair for each in exchanges for pair in each.pairs]
    wrong = [pair for pair in pairs if pair.is_wrong]
    if wrong:
        text = "; ".join(
            f"rank {pair.rank} has got other bytes than rank {pair.mate} has sent" for pair in wrong[:_SHOWN]
        )
        found.append(Finding("problem", "rails", text, "memory or network are broken: take these nodes out of the job"))
    rails = [[pair for pair in pairs if pair.rank in rail] for rail in zip(*topology.nodes, strict=True)]
    slowest_of = {number: min(its, key=lambda pair: pair.gbs) for number, its in enumerate(rails) if its}
    if not slowest_of:
        return found
    speeds = []
    for number, slowest in slowest_of.items():
        latency_us = max(pair.latency_us for pair in rails[number])
        speeds.append(f"rail {number}: {slowest.gbs:.3g} GB/s, {latency_us:.0f} us")
    number, slowest = min(slowest_of.items(), key=lambda item: item[1].gbs)
    between = f"rank {slowest.rank} on node {topology.node_of(slowest.rank)} and rank {slowest.mate} on node "
    between += str(topology.node_of(slowest.mate))
    usual = median(each.gbs for each in slowest_of.values())
    if slowest.gbs < _SLOW * usual:
        text = f"rail {number} is slow: {slowest.gbs:.3g} GB/s between {between}, the median rail has {usual:.3g}"
        fix = (
            "NICs of both ranks: ibstat or ethtool for the rate; what else uses them; benchmarks/bench.py rail measures longer"
        )
        found.append(Finding("note", "rails", text, fix))
    text = f"{'; '.join(speeds)} (each rank sends and receives; of the slowest pair); slowest: rail {number}, {between}"
    return [*found, Finding("ok", "rails", text)]


def listed(numbers: Sequence[int]) -> str:
    """ "0-3, 8": ranges of three and more are drawn together."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    shown: list[str] = []
    for part in parts:
        shown += [f"{part[0]}-{part[-1]}"] if len(part) > 2 else map(str, part)
    return ", ".join(shown)


def _is_through_the_host(way: str) -> bool:
    """Whether a NIC could read the GPU's memory, and does not."""
    return way.startswith("NET/") and way != "NET/Socket" and not way.endswith("/GDRDMA")


def _nccl_version(number: int) -> str:
    """ "2.28.9" of 22809."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
