"""`symmoe doctor --nodes`: nodes made by hand, each with one thing wrong; virtual nodes of this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from limits import HANG_S, PROMPT_S
from test_doctor_findings import NVLINK, QUERY, wrong
from test_several_nodes import nodes, run

from symmoe.cli import main
from symmoe.errors import BackendUnavailable
from symmoe.nodes import reach
from symmoe.nodes.rail import GlooRail, Messages, RailBroken, Started
from symmoe.nodes.reach import Endpoint
from symmoe.nodes.topology import Topology
from symmoe.tools.doctor import nodes as doctor_nodes
from symmoe.tools.doctor import pairs as doctor_pairs
from symmoe.tools.doctor.board import Board, RanksMissing
from symmoe.tools.doctor.findings import Finding
from symmoe.tools.doctor.nccl_log import nccl_log, parse_transports
from symmoe.tools.doctor.nics import Nic, read_nics
from symmoe.tools.doctor.node_checks import (
    Exchanges,
    Facts,
    check_cards,
    check_nccl,
    check_nodes,
    check_rails,
    check_sockets,
    listed,
)
from symmoe.tools.doctor.nodes import Worker, examine_nodes, read_facts, try_pairs
from symmoe.tools.doctor.nvidia_smi import parse_nics
from symmoe.tools.doctor.pairs import PairResult, schedule, wait_for

LASTS_S = 0.2

# -- made by hand -----------------------------------------------------------------------------------------------------

TWO_BY_TWO = Topology(0, ((0, 1), (2, 3)))
NICS = tuple(Nic(name=f"mlx5_{n}", kind="InfiniBand", rate="400 Gb/sec (4X NDR)", is_up=True) for n in range(2))
DIRECT = ("NET/IB/GDRDMA",)


def rank_of(rank: int, **other: Any) -> Facts:
    """A rank of two machines with two GPUs and two NICs each."""
    node = rank // 2
    known: dict[str, Any] = {
        "host": f"host-{node}",
        "machine": f"machine-{node}",
        "domain": f"machine-{node}",
        "endpoint": Endpoint("eth0", f"10.0.0.{node + 1}", 40000 + rank),
        "rate": "25 Gb/s",
        "versions": {"symmoe": "0.1.0", "torch": "2.11.0+cu130"},
        "nccl": 22809,
        "gpu": "NVIDIA H200",
        "gpu_index": rank % 2,
        "nics": NICS,
        "distances": {f"mlx5_{n}": "PIX" if n == rank % 2 else "SYS" for n in range(2)},
        "launch_order": "1",
    }
    return Facts(**(known | other))


def ranks(**other: Any) -> list[Facts]:
    """All four, with something else on each."""
    return [rank_of(rank, **other) for rank in range(4)]


def with_rank(number: int, **other: Any) -> list[Facts]:
    return [rank_of(rank, **(other if rank == number else {})) for rank in range(4)]


def exchanged(*gbs: float, transports: tuple[str, ...] = DIRECT, wrong_on: int = -1) -> list[Exchanges]:
    """What four ranks say of a pair test, by their speeds."""
    return [
        Exchanges(
            pairs=(
                PairResult(rank=rank, mate=(rank + 2) % 4, gbs=gbs[rank], latency_us=30.0, is_wrong=rank == wrong_on),
            ),
            transports=transports,
        )
        for rank in range(4)
    ]


def everything(
    facts: list[Facts], *, refused: dict[int, dict[int, str]] | None = None, exchanges: list[Exchanges] | None = None
) -> list[Finding]:
    refused_of = [(refused or {}).get(rank, {}) for rank in range(4)]
    exchanges = exchanged(48.0, 49.0, 47.5, 49.0) if exchanges is None else exchanges
    return [
        *check_nodes(facts, TWO_BY_TWO),
        *check_cards(facts),
        *check_sockets(facts, TWO_BY_TWO, refused_of),
        *check_nccl(facts, TWO_BY_TWO, exchanges),
        *check_rails(TWO_BY_TWO, exchanges),
    ]


def test_nodes_with_nothing_wrong():
    findings = everything(ranks())
    assert wrong(findings) == []
    by_subject = {finding.subject: finding.text for finding in findings}
    assert (
        by_subject["nodes"] == "4 ranks on 2 nodes of 2; node 0 (host-0): 0, 1; node 1 (host-1): 2, 3; "
        "rails: 0, 2 | 1, 3"
    )
    assert by_subject["nics"].startswith("all 2 machines: mlx5_0 (InfiniBand, 400 Gb/sec (4X NDR)), mlx5_1 (")
    assert "nearest to GPU 0: mlx5_0 (PIX), GPU 1: mlx5_1 (PIX)" in by_subject["nics"]
    assert "eth0 (10.0.0.1, 25 Gb/s) on node 0; eth0 (10.0.0.2, 25 Gb/s) on node 1" in by_subject["sockets"]
    assert by_subject["nccl"] == "NCCL 2.28.9 of ranks 0-3 goes by NET/IB/GDRDMA"
    assert by_subject["rails"].startswith("rail 0: 47.5 GB/s, 30 us; rail 1: 49 GB/s, 30 us")
    assert by_subject["rails"].endswith("slowest: rail 0, rank 2 on node 1 and rank 0 on node 0")


HIDDEN = Endpoint("lo", "127.0.1.1", 40002)
OF_TCP = tuple(dataclasses.replace(nic, kind="", name=f"eth{n}") for n, nic in enumerate(NICS))
DOWN = (NICS[0], dataclasses.replace(NICS[1], is_up=False))
FAILED = [*exchanged(1, 1, 1, 1)[:2], Exchanges(error="no answer within 20 s", mate=0), Exchanges(error="no NCCL")]
WRONG: dict[str, tuple[list[Finding], str, str, str]] = {
    "another torch": (
        everything(with_rank(3, versions={"symmoe": "0.1.0", "torch": "2.12.0"})),
        "problem",
        "torch is not the same everywhere: ranks 0-2 have 2.11.0+cu130; ranks 3 have 2.12.0",
        "pip install torch==",
    ),
    "a rank without a GPU": (
        wrong(check_nodes(with_rank(1, gpu=""), TWO_BY_TWO)),
        "problem",
        "ranks 1 have no GPU, the others have",
        "torchrun --nproc-per-node",
    ),
    "one node": (
        check_nodes(ranks()[:2], Topology(0, ((0, 1),))),
        "note",
        "2 ranks on 1 node; node 0 (host-0): 0, 1: there is no network",
        "--ranks-per-node",
    ),
    "a link that is down": (check_cards(ranks(nics=DOWN))[:1], "note", "all 2 machines: no link at mlx5_1", "ibstat"),
    "a NIC that is far": (
        everything(with_rank(2, distances={"mlx5_0": "NODE", "mlx5_1": "SYS"})),
        "note",
        "host-1: no NIC is near to GPU 0 (NODE)",
        "nvidia-smi topo -m",
    ),
    "only TCP": (
        check_cards(ranks(nics=OF_TCP)),
        "note",
        "all 2 machines: no RDMA NIC: what goes between nodes goes over TCP; eth0 (400 Gb",
        "--device=/dev/infiniband",
    ),
    "no such device": (
        everything(with_rank(2, problem="GLOO_SOCKET_IFNAME=eth9: no such network device: lo")),
        "problem",
        "rank 2: GLOO_SOCKET_IFNAME=eth9: no such network device",
        "export GLOO_SOCKET_IFNAME=",
    ),
    "an address of one machine": (
        everything(with_rank(2, endpoint=HIDDEN), refused={0: {2: "Connection refused"}}),
        "problem",
        "rank 0 on node 0 cannot connect to rank 2 on node 1 at 127.0.1.1:40002 (lo): Connection refused",
        "export GLOO_SOCKET_IFNAME=",
    ),
    "a firewall": (
        everything(ranks(), refused={n: {m: "Connection refused" for m in range(4) if m % 2 == n % 2} for n in (0, 1)}),
        "problem",
        "and 1 pairs more",
        "let the firewall pass",
    ),
    "orders that differ": (
        everything(with_rank(3, launch_order="")),
        "note",
        "NCCL_LAUNCH_ORDER_IMPLICIT=1 is not set on ranks 3",
        "export NCCL_LAUNCH_ORDER_IMPLICIT=1",
    ),
    "an old NCCL": (everything(ranks(nccl=22505)), "note", "NCCL of ranks 0-3 is older than 2.26", "newer NCCL"),
    "sockets in place of RDMA": (
        everything(ranks(), exchanges=exchanged(2.0, 2.0, 2.0, 2.0, transports=("NET/Socket",))),
        "note",
        "NCCL 2.28.9 of ranks 0-3 goes by NET/Socket, TCP, although there is mlx5_0, mlx5_1",
        "NCCL_IB_DISABLE",
    ),
    "no GPUDirect": (
        everything(ranks(), exchanges=exchanged(9.0, 9.0, 9.0, 9.0, transports=("NET/IB", "NET/IB/GDRDMA"))),
        "note",
        "through the host's memory",
        "nvidia-peermem",
    ),
    "a log that says nothing": (
        everything(ranks(), exchanges=exchanged(9.0, 9.0, 9.0, 9.0, transports=())),
        "note",
        "does not say by what it goes between nodes: not known",
        "NCCL_DEBUG=INFO",
    ),
    "a slow rail": (
        everything(ranks(), exchanges=exchanged(48.0, 20.0, 48.0, 49.0)),
        "note",
        "rail 1 is slow: 20 GB/s between rank 1 on node 0 and rank 3 on node 1",
        "ibstat",
    ),
    "wrong bytes": (
        everything(ranks(), exchanges=exchanged(48.0, 48.0, 48.0, 48.0, wrong_on=2)),
        "problem",
        "rank 2 has got other bytes than rank 0 has sent",
        "take these nodes out",
    ),
    "a rank that does not answer": (
        wrong(check_rails(TWO_BY_TWO, FAILED)),
        "problem",
        "between rank 2 on node 1 and rank 0 on node 0: no answer within 20 s; between rank 3 on node 1: no NCCL",
        "NCCL_DEBUG=INFO",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_one_finding_with_what_helps(name: str):
    findings, level, text, fix = WRONG[name]
    [finding] = wrong(findings)
    assert (finding.level, text in finding.text, fix in finding.fix) == (level, True, True), finding


def test_what_is_fine():
    tcp = check_nccl(ranks(nics=OF_TCP), TWO_BY_TWO, exchanged(1, 1, 1, 1, transports=("NET/Socket",)))
    assert [each.level for each in tcp] == ["ok"]
    virtual = check_nccl(ranks(), TWO_BY_TWO, exchanged(1, 1, 1, 1, transports=("P2P/CUMEM",)))
    assert [each.level for each in virtual] == ["ok"]
    assert "no network is used" in virtual[0].text
    assert check_nccl(ranks(), TWO_BY_TWO, []) == []  # nothing was sent
    assert check_rails(TWO_BY_TWO, []) == []
    cpus = check_cards(ranks(gpu="", nics=(), distances={}))
    assert [(each.level, each.text) for each in cpus] == [
        ("ok", "all 2 machines: no GPU; no RDMA NIC; no network device that is hardware")
    ]
    unknown = check_cards(ranks(distances={}))
    assert [each.level for each in unknown] == ["ok"]
    assert "nvidia-smi does not say which is near to GPU 0, GPU 1" in unknown[0].text
    same = [rank_of(rank, machine="one") for rank in range(4)]
    assert "(virtual nodes of 1 machine)" in check_nodes(same, TWO_BY_TWO)[-1].text
    assert [listed(each) for each in ([], [0, 1], [0, 1, 2, 5], [3, 5, 6])] == ["", "0, 1", "0-2, 5", "3, 5, 6"]


def test_what_ranks_tell_each_other_arrives():
    for rank, each in enumerate(ranks()):
        assert Facts.of_json(json.loads(json.dumps(each.as_json()))) == each, rank
    for said in FAILED:
        assert Exchanges.of_json(json.loads(json.dumps(said.as_json()))) == said


MATRIX = (
    "\t\x1b[4mGPU0\tGPU1\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tPIX\tSYS\t0-31\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tSYS\tPXB\t32-63\t1\t\tN/A\n"
    "NIC0\tPIX\tSYS\t X \tSYS\t\t\t\t\n"
    "NIC1\tSYS\tPXB\tSYS\t X \t\t\t\t\n"
    "\nLegend:\n\n  X    = Self\n  PIX  = Connection traversing at most a single PCIe bridge\n"
    "\nNIC Legend:\n\n  NIC0: mlx5_0\n  NIC1: mlx5_bond_0\n"
)


def test_nics_that_nvidia_smi_lists():
    expected = {0: {"mlx5_0": "PIX", "mlx5_bond_0": "SYS"}, 1: {"mlx5_0": "SYS", "mlx5_bond_0": "PXB"}}
    assert parse_nics(MATRIX) == expected
    assert parse_nics(MATRIX.replace("NIC Legend", "").replace("NIC0: ", "").replace("NIC1: ", "")) == {
        0: {"NIC0": "PIX", "NIC1": "SYS"},
        1: {"NIC0": "SYS", "NIC1": "PXB"},
    }
    assert parse_nics("") == {}
    assert parse_nics("\tGPU0\tCPU Affinity\nGPU0\t X \t0-31\n") == {}


def test_nics_that_the_kernel_lists(tmp_path: Path):
    def write(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    assert read_nics(tmp_path) == []
    for name, layer, state in (("mlx5_1", "Ethernet", "1: DOWN"), ("mlx5_0", "InfiniBand", "4: ACTIVE")):
        for file, text in (("link_layer", layer), ("state", state), ("rate", "400 Gb/sec (4X NDR)")):
            write(f"infiniband/{name}/ports/1/{file}", f"{text}\n")
    write("infiniband/efa_0/node_type", "7\n")
    for device, state, speed in (("eth0", "up", "25000\n"), ("eth1", "down", "-1\n"), ("veth", "up", "10000\n")):
        write(f"net/{device}/operstate", f"{state}\n")
        write(f"net/{device}/speed", speed)
        if device != "veth":
            write(f"net/{device}/device/vendor", "0x15b3\n")
    assert [str(nic) for nic in read_nics(tmp_path)] == [
        "efa_0 (RDMA, down)",
        "mlx5_0 (InfiniBand, 400 Gb/sec (4X NDR))",
        "mlx5_1 (RoCE, 400 Gb/sec (4X NDR), down)",
        "eth0 (25 Gb/s)",
    ]


# As NCCL 2.28 writes them (src/transport/net.cc, p2p.cc, shm.cc), with other names.
LOG = """\
a:10:20 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.1<0>
a:10:20 [0] NCCL INFO Channel 00/02 : 0 1
a:10:20 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/IB/0/GDRDMA
a:10:20 [0] NCCL INFO Channel 01/1 : 0[0] -> 1[0] [send] via NET/IBext_v8/3/GDRDMA(PCI)/Shared
a:10:20 [0] NCCL INFO Channel 01/1 : 0[0] -> 1[0] [send] via NET/AWS Libfabric/1
a:10:20 [0] NCCL INFO Channel 01/1 : 0[0] -> 1[0] [send] via NET/Socket/0/Shared
a:10:20 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
a:10:20 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via SHM/direct/direct
"""


def test_the_log_of_nccl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found = ["NET/AWS Libfabric", "NET/IB/GDRDMA", "NET/IBext_v8/GDRDMA", "NET/Socket", "P2P/CUMEM", "SHM/direct"]
    assert parse_transports(LOG) == found
    assert parse_transports(LOG.replace("via", "by")) == []
    environment = {"NCCL_DEBUG": "WARN"}
    with nccl_log(environment) as log:
        assert log.transports() == []
        assert environment["NCCL_DEBUG"] == "INFO"
        path = Path(environment["NCCL_DEBUG_FILE"])
        path.write_text(LOG)
        assert log.transports() == found
    assert environment == {"NCCL_DEBUG": "WARN"}
    assert not path.parent.exists()


def test_a_rank_with_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What torch and nvidia-smi number otherwise is the same GPU."""
    program = tmp_path / "nvidia-smi"
    answers = {"--query*": QUERY, "topo": MATRIX, "nvlink": NVLINK}
    cases = "".join(f"{name}) printf '%s' '{text}';;\n" for name, text in answers.items())
    program.write_text(f'#!/bin/sh\ncase "$1" in\n{cases}esac\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    from test_doctor_findings import TORCH

    for name, function in TORCH.items():
        monkeypatch.setattr(f"torch.cuda.{name}", function)
    monkeypatch.setattr(doctor_nodes, "Nccl", lambda: dataclasses.make_dataclass("Library", ["version"])(22809))
    endpoint = Endpoint("lo", "127.0.0.1", 1)
    facts = [
        read_facts(Worker(rank=5, num_ranks=8, local_rank=local), {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}, endpoint, "")
        for local in (0, 2)
    ]
    assert (facts[0].gpu, facts[0].gpu_index, facts[0].nccl) == ("NVIDIA H200", 1, 22809)
    assert facts[0].distances == {"mlx5_0": "SYS", "mlx5_bond_0": "PXB"}
    assert facts[0].launch_order == "1"
    assert (facts[1].gpu, facts[1].nccl, facts[1].distances) == ("", 0, {})  # more ranks than GPUs


# -- the pair test ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_nodes", range(1, 12))
def test_each_node_meets_each_other_one_once(num_nodes: int):
    rounds = [[*schedule(node, num_nodes)] for node in range(num_nodes)]
    assert {len(its) for its in rounds} == {max(1, num_nodes - 1 + num_nodes % 2)}
    met = Counter()
    for turn in range(len(rounds[0])):
        for node, its in enumerate(rounds):
            if (mate := its[turn]) is not None:
                assert rounds[mate][turn] == node
                met[node, mate] += 1
    assert met == Counter(itertools.permutations(range(num_nodes), 2))


def test_a_device_that_does_not_answer():
    wait_for(iter([False, False, True]).__next__, 1)
    start = time.monotonic()
    with pytest.raises(RailBroken, match=r"no answer within 0\.2 s") as caught:
        wait_for(lambda: False, 1, 0.2)
    assert (caught.value.node, caught.value.is_late) == (1, True)
    assert 0.2 <= time.monotonic() - start < PROMPT_S


# -- virtual nodes ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def as_it_is() -> Iterator[None]:
    yield


@contextlib.contextmanager
def a_bit_flips() -> Iterator[None]:
    """One bit of what rank 2 gets that is longer than a word."""
    begin, wait = GlooRail.begin, GlooRail.wait
    longer: list[torch.Tensor] = []

    def noting_begin(self: GlooRail, sends: Messages, receives: Messages, timeout_s: float) -> Started:
        longer[:] = [received for received in receives[0] if received.numel() > 8]
        return begin(self, sends, receives, timeout_s)

    def wrong_wait(self: GlooRail, started: Started, timeout_s: float) -> None:
        wait(self, started, timeout_s)
        for received in longer:
            received[received.numel() // 2] ^= 4

    with patch.object(GlooRail, "begin", noting_begin), patch.object(GlooRail, "wait", wrong_wait):
        yield


@contextlib.contextmanager
def leaves_the_test() -> Iterator[None]:
    def run_not(self: Any) -> list[PairResult]:
        raise BackendUnavailable("a GPU that is out of order")

    with patch.object(doctor_pairs.PairTest, "run", run_not):
        yield


@contextlib.contextmanager
def listens_no_more() -> Iterator[None]:
    """What a port that a firewall closes is to the others."""

    def listen(self: reach.Listener) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.endpoint = Endpoint("lo", "127.0.0.1", listener.getsockname()[1])
        self._socket = None

    with patch.object(reach.Listener, "__init__", listen):
        yield


@contextlib.contextmanager
def a_wrong_device() -> Iterator[None]:
    with patch.dict(os.environ, {"GLOO_SOCKET_IFNAME": "eth-none"}):
        yield


def look(
    rank: int, num_ranks: int, ranks_per_node: int, how: str, culprit: int, store_name: str
) -> tuple[list[Finding], float]:
    """What a rank finds, and how long that takes, where something is wrong on one rank."""
    store = dist.PrefixStore(store_name, dist.distributed_c10d._get_default_store())
    trouble: Callable[[], contextlib.AbstractContextManager[None]] = globals()[how] if rank == culprit else as_it_is
    worker, start = Worker(rank=rank, num_ranks=num_ranks, local_rank=rank), time.monotonic()
    with trouble():
        board = Board(store, rank, num_ranks, PROMPT_S)
        found = examine_nodes(worker, store, board, {}, ranks_per_node=ranks_per_node, lasts_s=LASTS_S)
    return found, time.monotonic() - start


def look_everywhere(
    cluster, num_ranks: int, ranks_per_node: int, how: str = "as_it_is", culprit: int = -1
) -> list[Finding]:
    """What all ranks find, which is the same."""
    name = f"{num_ranks}/{ranks_per_node}/{how}"
    results = cluster(num_ranks).run(look, ranks_per_node, how, culprit, name)
    assert all(found == results[0][0] for found, _ in results)
    assert all(seconds < PROMPT_S for _, seconds in results)
    findings: list[Finding] = results[0][0]
    return findings


@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), [(4, 2), pytest.param(3, 1, marks=pytest.mark.slow)])
def test_virtual_nodes(cluster, num_ranks: int, ranks_per_node: int):
    found = {finding.subject: finding for finding in look_everywhere(cluster, num_ranks, ranks_per_node)}
    assert {finding.level for finding in found.values()} <= {"ok", "note"}  # a busy machine may have a slow rail
    rails = {4: "0, 2 | 1, 3", 3: "0, 1, 2"}[num_ranks]
    assert found["nodes"].text.endswith(f"(virtual nodes of 1 machine); rails: {rails}")
    assert found["sockets"].text == f"gloo goes by lo (127.0.0.1) on node {listed(range(num_ranks // ranks_per_node))}"
    assert "rail 0: " in found["rails"].text
    assert ("rail 1: " in found["rails"].text) == (num_ranks == 4)
    assert {"no GPU" in found["nics"].text, "nccl" in found} == {True, False}


def test_ranks_on_one_node(cluster):
    found = look_everywhere(cluster, 4, 4)
    assert [(each.subject, each.level) for each in found] == [("nodes", "note"), ("nics", "ok"), ("sockets", "ok")]


PROBLEMS = {  # the rank, the subject, what is said, and a rank of whom nothing is to be said
    "a_bit_flips": (2, "rails", "rank 2 has got other bytes than rank 0 has sent", "rank 3"),
    "leaves_the_test": (3, "rails", "between rank 3 on node 1: a GPU that is out of order", "rank 2"),
    "listens_no_more": (1, "sockets", "rank 3 on node 1 cannot connect to rank 1 on node 0 at 127.0.0.1:", "rank 2"),
    "a_wrong_device": (2, "sockets", "rank 2: GLOO_SOCKET_IFNAME=eth-none: this machine (", "rank 1"),
}


@pytest.mark.parametrize("how", PROBLEMS)
def test_trouble_on_one_rank(cluster, how: str):
    culprit, subject, text, others = PROBLEMS[how]
    found = look_everywhere(cluster, 4, 2, how, culprit)
    [problem] = [finding for finding in found if finding.level == "problem"]
    assert problem.subject == subject
    assert text in problem.text
    assert others not in problem.text
    assert problem.fix
    assert (subject == "rails") == any("rail " in finding.text for finding in found)  # else nothing was sent


def wait_for_rank_1(rank: int, num_ranks: int) -> tuple[tuple[int, ...], float]:
    store = dist.PrefixStore("missing", dist.distributed_c10d._get_default_store())
    start = time.monotonic()
    missing: tuple[int, ...] = ()
    if rank != 1:
        try:
            Board(store, rank, num_ranks, 1.0).gather("facts", {})
        except RanksMissing as error:
            missing = error.ranks
    return missing, time.monotonic() - start


def test_a_rank_that_does_not_come_is_named(cluster):
    found = cluster(4).run(wait_for_rank_1)
    assert [missing for missing, _ in found] == [(1,), (), (1,), (1,)]
    assert all(seconds < PROMPT_S for _, seconds in found)


# -- ranks with GPUs, of which there are none -------------------------------------------------------------------------


def look_on_gpus(rank: int, num_ranks: int, log: str) -> dict[str, Any]:
    """The pair test as on GPUs, where NCCL is gloo that writes a log."""
    store = dist.PrefixStore(f"gpus/{len(log)}", dist.distributed_c10d._get_default_store())
    ended = []

    class FakeNccl(GlooRail):
        def __init__(self, library: str, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            Path(os.environ["NCCL_DEBUG_FILE"]).write_text(log)
            if not log:
                raise BackendUnavailable("NCCL does not connect the nodes: ncclCommInitRank: remote process exited")

        def end(self) -> None:
            ended.append(True)
            self.abort()

    topology = Topology(rank, ((0, 1), (2, 3)))
    with contextlib.ExitStack() as stack:
        for name, fake in (("Nccl", lambda: "library"), ("NcclRail", FakeNccl), ("device_of", lambda *_: CPU)):
            stack.enter_context(patch.object(doctor_nodes, name, fake))
        stack.enter_context(patch.object(torch.cuda, "set_device", lambda device: None))
        worker = Worker(rank=rank, num_ranks=num_ranks, local_rank=rank % 2)
        found = try_pairs(worker, store, topology, os.environ, has_gpu=True, lasts_s=LASTS_S)
    assert ended or not log
    assert "NCCL_DEBUG_FILE" not in os.environ
    return found.as_json()


CPU = torch.device("cpu")


def test_what_nccl_has_logged(cluster):
    for rank, said in enumerate(cluster(4).run(look_on_gpus, LOG)):
        found = Exchanges.of_json(said)
        assert (found.error, [pair.mate for pair in found.pairs]) == ("", [(rank + 2) % 4])
        assert found.transports == tuple(parse_transports(LOG))
    for said in cluster(4).run(look_on_gpus, ""):
        assert said["error"].startswith("NCCL does not connect the nodes")


# -- the command ------------------------------------------------------------------------------------------------------


def test_wrong_arguments(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for arguments, text in (
        ([], "RANK, WORLD_SIZE, LOCAL_RANK not set"),
        (["--read", "x.json"], "--nodes and --read exclude each other"),
        (["--ranks-per-node", "0"], "ranks-per-node (0) must be at least 1"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["doctor", "--nodes", *arguments])
        assert ended.value.code == 2
        assert text in capsys.readouterr().err


def test_torch_has_no_store(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    monkeypatch.setattr(doctor_nodes, "_WAIT_S", 1.0)
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for local_rank, speaks in (("0", True), ("1", False)):
        for name, value in {**variables, "LOCAL_RANK": local_rank}.items():
            monkeypatch.setenv(name, value)
        start = time.monotonic()
        assert main(["doctor", "--nodes", "--json"]) == 1
        assert time.monotonic() - start < PROMPT_S
        said = capsys.readouterr().out
        assert bool(said) == speaks
        if speaks:
            [finding] = json.loads(said)["findings"]
            assert "does not reach torch's store at MASTER_ADDR:MASTER_PORT=127.0.0.1:1: " in finding["text"]


@pytest.mark.slow
def test_the_command():
    """As users start it, on virtual nodes; one rank tells, and all end with the same status."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m", "symmoe"]
    command += ["doctor", "--nodes", "--ranks-per-node=1", "--json"]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    subjects = [finding["subject"] for finding in json.loads(done.stdout)["findings"]]
    assert [subject for subject in subjects if subject != "rails"] == ["nodes", "nics", "sockets"]
    assert "rails" in subjects


@pytest.mark.slow
def test_two_agents():
    """Ranks of two torchruns, and a status that says what is wrong."""
    program = ["-m", "symmoe", "doctor", "--nodes", "--ranks-per-node=2", "--json"]
    texts = run(nodes(2, 2), *program)
    assert "rails: 0, 2 | 1, 3" in texts[0]
    assert texts[1].strip() == ""
    with pytest.raises(AssertionError, match=r"must divide the 4 ranks of the group"):
        run(nodes(2, 2), *program[:-2], "--ranks-per-node=3", "--json")
