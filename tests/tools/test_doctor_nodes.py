"""`symmoe doctor --nodes`: nodes made by hand, each with one thing wrong; virtual nodes of this machine."""

import contextlib
import json
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from cluster import run_on
from doctor_cases import fake_smi, torch_says, wrong
from limits import PROMPT_S
from node_calls import refuses  # noqa: F401 - found by its name
from torchrun_nodes import nodes, run

from symmoe.cli import main
from symmoe.errors import BackendUnavailable
from symmoe.nodes.rail import GlooRail
from symmoe.nodes.reach import Endpoint
from symmoe.nodes.topology import Topology
from symmoe.tools.doctor import nodes as doctor_nodes
from symmoe.tools.doctor.findings import Finding
from symmoe.tools.doctor.nodes import (
    Board,
    Facts,
    Rail,
    RanksMissing,
    check_network,
    check_nodes,
    check_rails,
    examine_nodes,
    listed,
    read_facts,
    read_nics,
    try_rail,
)

# -- made by hand -----------------------------------------------------------------------------------------------------

TWO_BY_TWO = Topology(0, ((0, 1), (2, 3)))


def ranks(on=range(4), **other) -> list[Facts]:
    """Four ranks of two machines with two GPUs and two NICs each, with something else on some."""
    found = []
    for rank in range(4):
        node = rank // 2
        known: dict = {
            "host": f"host-{node}",
            "machine": f"machine-{node}",
            "domain": f"machine-{node}",
            "endpoint": Endpoint("eth0", f"10.0.0.{node + 1}", 40000 + rank),
            "launch_order": "1",
            "versions": {"symmoe": "0.1.0", "torch": "2.11.0+cu130"},
            "gpu": "NVIDIA H200",
            "nics_up": ["mlx5_0 (InfiniBand, 400 Gb/sec (4X NDR))", "mlx5_1"],
        }
        found.append(Facts(**known | (other if rank in on else {})))
    return found


def exchanged(*gbs: float) -> list[Rail]:
    """What four ranks say of their rails, by their speeds."""
    return [Rail(gbs=each) for each in gbs]


FINE = exchanged(48.0, 49.0, 47.5, 49.0)


def everything(
    facts: list[Facts],
    exchanges: list[Rail] = FINE,
    topology: Topology = TWO_BY_TWO,
    **refused: dict[int, str],
) -> list[Finding]:
    """Refused: by "r0" for rank 0, and so on."""
    found = [*check_nodes(facts, topology)]
    found += check_network(facts, topology, [refused.get(f"r{rank}", {}) for rank in range(4)])
    return [*found, *(check_rails(topology, exchanges) if topology.num_nodes > 1 else [])]


def test_nodes_with_nothing_wrong():
    findings = everything(ranks())
    assert wrong(findings) == []
    by_subject = {finding.subject: finding.text for finding in findings}
    assert (
        by_subject["nodes"]
        == "4 ranks on 2 nodes of 2; node 0 (host-0): 0, 1; node 1 (host-1): 2, 3; "
        "rails: 0, 2 | 1, 3"
    )
    assert by_subject["nics"] == "host-0, host-1: mlx5_0 (InfiniBand, 400 Gb/sec (4X NDR)), mlx5_1"
    assert "eth0 (10.0.0.1) on node 0; eth0 (10.0.0.2) on node 1" in by_subject["sockets"]
    assert by_subject["rails"].startswith("rail 0: 47.5 GB/s; rail 1: 49 GB/s (")
    assert by_subject["rails"].endswith("slowest: rank 2 on node 1")


HIDDEN = Endpoint("lo", "127.0.1.1", 40002)
REFUSED = "Connection refused"
FAILED = [*exchanged(1, 1), Rail(error="no answer within 30 s"), Rail(error="no NCCL")]
OTHER_TORCH = {"symmoe": "0.1.0", "torch": "2.12.0"}
WRONG: dict[str, tuple[list[Finding], str, str, str]] = {  # findings; level and words of the one that is not ok
    "another torch": (everything(ranks([3], versions=OTHER_TORCH)), "problem",
        "torch is not the same everywhere: ranks 0-2 have 2.11.0+cu130; ranks 3 have 2.12.0", "pip install torch=="),
    "a rank without a GPU": (everything(ranks([1], gpu="")), "problem",
        "ranks 1 have no GPU, the others have", "torchrun --nproc-per-node"),
    "one node": (everything(ranks(), topology=Topology(0, ((0, 1, 2, 3),))), "note",
        "4 ranks on 1 node; node 0 (host-0): 0-3: there is no network", "--ranks-per-node"),
    "a link that is down": (everything(ranks(nics_down=["mlx5_2"])), "note", "host-1: no link at mlx5_2", "ibstat"),
    "only TCP": (everything(ranks([2], nics_up=[])), "note",
        "host-1: no RDMA NIC: what goes between nodes goes over TCP", "--device=/dev/infiniband"),
    "no such device": (everything(ranks([2], problem="GLOO_SOCKET_IFNAME=eth9: no such network device: lo")), "problem",
        "rank 2: GLOO_SOCKET_IFNAME=eth9: no such network device", "export GLOO_SOCKET_IFNAME="),
    "an address of one machine": (everything(ranks([2], endpoint=HIDDEN), r0={2: REFUSED}), "problem",
        "rank 0 on node 0 cannot connect to rank 2 on node 1 at 127.0.1.1:40002 (lo): Connection refused",
        "export GLOO_SOCKET_IFNAME="),
    "a firewall": (everything(ranks(), r0={0: REFUSED, 2: REFUSED}, r1={1: REFUSED, 3: REFUSED}), "problem",
        "and 1 more", "let the firewall pass"),
    "orders that differ": (everything(ranks([3], launch_order="")), "note",
        "NCCL_LAUNCH_ORDER_IMPLICIT=1 is not set on ranks 3", "export NCCL_LAUNCH_ORDER_IMPLICIT=1"),
    "a slow rail": (everything(ranks(), exchanged(48.0, 20.0, 48.0, 49.0)), "note",
        "rail 1 is slow: 20 GB/s at rank 1 on node 0, the median rail has 34", "ibstat"),
    "a rank that does not answer": (everything(ranks(), FAILED), "problem",
        "rails do not connect: rank 2 on node 1: no answer within 30 s; rank 3 on node 1: no NCCL",
        "NCCL_DEBUG=INFO"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_one_finding_with_what_helps(name: str):
    findings, level, text, fix = WRONG[name]
    [finding] = wrong(findings)
    assert (finding.level, text in finding.text, fix in finding.fix) == (level, True, True), finding


def test_what_is_fine():
    cpus = everything(ranks(gpu="", nics_up=[], launch_order=""))
    assert wrong(cpus) == []
    assert {each.subject: each.text for each in cpus}["nics"] == "host-0, host-1: no RDMA NIC"
    assert "(virtual nodes of 1 machine)" in check_nodes(ranks(machine="one"), TWO_BY_TWO)[-1].text
    assert [listed(each) for each in ([], [0, 1], [0, 1, 2, 5], [3, 5, 6])] == [
        "",
        "0, 1",
        "0-2, 5",
        "3, 5, 6",
    ]


def test_nics_that_the_kernel_lists(tmp_path: Path):
    assert read_nics(tmp_path) == {}
    for name, layer, state in (
        ("mlx5_1", "Ethernet", "1: DOWN"),
        ("mlx5_0", "InfiniBand", "4: ACTIVE"),
    ):
        for file, text in (
            ("link_layer", layer),
            ("state", state),
            ("rate", "400 Gb/sec (4X NDR)"),
        ):
            path = tmp_path / name / "ports" / "1" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")
    (tmp_path / "efa_0").mkdir()
    assert read_nics(tmp_path) == {
        "efa_0 (RDMA)": False,
        "mlx5_0 (InfiniBand, 400 Gb/sec (4X NDR))": True,
        "mlx5_1 (Ethernet, 400 Gb/sec (4X NDR))": False,
    }


def test_a_rank_with_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What torch and nvidia-smi number otherwise is the same GPU."""
    asked: list[str | None] = []
    fake_smi(tmp_path, monkeypatch)
    torch_says(monkeypatch)
    monkeypatch.setattr(doctor_nodes, "find_domain", lambda uuid: asked.append(uuid) or "a domain")
    variables = {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}
    endpoint = Endpoint("lo", "127.0.0.1", 1)
    facts = [read_facts(local, variables, endpoint, "") for local in (0, 2)]
    assert (facts[0].gpu, facts[0].launch_order) == ("NVIDIA H200", "1")
    assert facts[1].gpu == ""  # more ranks than GPUs
    assert asked == ["GPU-22222222-bbbb", None]


# -- virtual nodes ----------------------------------------------------------------------------------------------------


def leaves_the_test() -> contextlib.AbstractContextManager:
    class Leaving(GlooRail):
        def __init__(self, *arguments, **options) -> None:
            super().__init__(*arguments, **options)
            raise BackendUnavailable("a GPU that is out of order")

    return patch.object(doctor_nodes, "GlooRail", Leaving)


def a_wrong_device() -> contextlib.AbstractContextManager:
    return patch.dict(os.environ, {"GLOO_SOCKET_IFNAME": "eth-none"})


def look(
    rank: int, num_ranks: int, ranks_per_node: int, how: str, culprit: int, store_name: str
) -> tuple[list[Finding], float]:
    """What a rank finds, and how long that takes, where something is wrong on one rank."""
    store = dist.PrefixStore(store_name, dist.distributed_c10d._get_default_store())
    trouble: Callable[[], contextlib.AbstractContextManager[None]] = (
        globals()[how] if rank == culprit else nullcontext
    )
    board = Board(store, rank, num_ranks, rank, PROMPT_S)
    start = time.monotonic()
    with trouble():
        found = examine_nodes(board, {}, ranks_per_node)
    return found, time.monotonic() - start


def look_everywhere(
    cluster, num_ranks: int, ranks_per_node: int, how: str = "", culprit: int = -1
) -> list[Finding]:
    """What all ranks find, which is the same."""
    name = f"{num_ranks}/{ranks_per_node}/{how}"
    results = cluster(num_ranks).run(look, ranks_per_node, how, culprit, name)
    assert all(found == results[0][0] for found, _ in results)
    assert all(seconds < PROMPT_S for _, seconds in results)
    findings: list[Finding] = results[0][0]
    return findings


@pytest.mark.parametrize(
    ("num_ranks", "ranks_per_node"), [(4, 2), pytest.param(3, 1, marks=pytest.mark.slow)]
)
def test_virtual_nodes(cluster, num_ranks: int, ranks_per_node: int):
    found = {
        finding.subject: finding for finding in look_everywhere(cluster, num_ranks, ranks_per_node)
    }
    assert {finding.level for finding in found.values()} <= {
        "ok",
        "note",
    }  # a busy machine may have a slow rail
    rails = {4: "0, 2 | 1, 3", 3: "0, 1, 2"}[num_ranks]
    assert found["nodes"].text.endswith(f"(virtual nodes of 1 machine); rails: {rails}")
    assert (
        found["sockets"].text
        == f"gloo goes by lo (127.0.0.1) on node {listed(range(num_ranks // ranks_per_node))}"
    )
    assert found["rails"].text.startswith(
        "rails 0, 1 connect;" if num_ranks == 4 else "rails 0 connect;"
    )
    assert "nccl" not in found


def test_ranks_on_one_node(cluster):
    found = look_everywhere(cluster, 4, 4)
    assert [(each.subject, each.level) for each in found] == [
        ("nodes", "note"),
        ("nics", "ok"),
        ("sockets", "ok"),
    ]


PROBLEMS = {  # the rank, the subject, what is said, and a rank of whom nothing is to be said
    "leaves_the_test": (3, "rails", "rank 3 on node 1: a GPU that is out of order", "rank 2"),
    "refuses": (
        1,
        "sockets",
        "rank 3 on node 1 cannot connect to rank 1 on node 0 at 127.0.0.1:",
        "rank 2",
    ),
    "a_wrong_device": (
        2,
        "sockets",
        "rank 2: GLOO_SOCKET_IFNAME=eth-none: this machine (",
        "rank 1",
    ),
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
    assert (subject == "rails") == any(
        finding.subject == "rails" for finding in found
    )  # else nothing was tried


@run_on(4)
def test_a_rank_that_does_not_come_is_named(rank: int, num_ranks: int) -> None:
    store = dist.PrefixStore("missing", dist.distributed_c10d._get_default_store())
    start = time.monotonic()
    if rank != 1:
        with pytest.raises(RanksMissing, match=r"^ranks 1 did not answer in time, at 'facts'$"):
            Board(store, rank, num_ranks, rank, 1.0).gather("facts", {})
    assert time.monotonic() - start < PROMPT_S


# -- ranks with GPUs, of which there are none -------------------------------------------------------------------------


def look_on_gpus(rank: int, num_ranks: int, connects: bool) -> Rail:
    """The test of rails as on GPUs, where NCCL is gloo."""
    store = dist.PrefixStore(f"gpus/{connects}", dist.distributed_c10d._get_default_store())
    ended = []

    class FakeNccl(GlooRail):
        bytes_per_s = 48e9

        def __init__(self, library: str, *arguments, **options) -> None:
            super().__init__(*arguments, **options)
            if (
                not connects
            ):  # once all of them have come, or a rank would find its connection closed
                store.set(f"came/{rank}", "")
                store.wait([f"came/{other}" for other in range(num_ranks)])
                raise BackendUnavailable(
                    "NCCL does not connect the nodes: ncclCommInitRank: remote process exited"
                )

        def close(self) -> None:
            ended.append(True)
            super().close()

    with contextlib.ExitStack() as stack:
        for name, fake in (("Nccl", lambda: "library"), ("NcclRail", FakeNccl)):
            stack.enter_context(patch.object(doctor_nodes, name, fake))
        stack.enter_context(patch.object(torch.cuda, "set_device", lambda device: None))
        board = Board(store, rank, num_ranks, rank % 2)
        topology = Topology(rank, ((0, 1), (2, 3)))
        found = try_rail(board, topology, stack, has_gpu=True)
        board.gather("rails", None)  # as the command does: a mate may still connect
    assert ended or not connects
    return found


def test_rails_of_gpus_go_by_nccl(cluster):
    for found in cluster(4).run(look_on_gpus, True):
        assert (found.error, found.gbs) == ("", 48.0)
    for found in cluster(4).run(look_on_gpus, False):
        assert found.error.startswith("NCCL does not connect the nodes")


# -- the command ------------------------------------------------------------------------------------------------------


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
            assert (
                "does not reach torch's store at MASTER_ADDR:MASTER_PORT=127.0.0.1:1: "
                in finding["text"]
            )


@pytest.mark.slow
def test_two_agents():
    """Ranks of two torchruns, and a status that says what is wrong."""
    program = ["-m", "symmoe", "doctor", "--nodes", "--ranks-per-node=2", "--json"]
    texts = run(nodes(2, 2), *program)
    assert "rails: 0, 2 | 1, 3" in texts[0]
    assert texts[1].strip() == ""
    with pytest.raises(AssertionError, match=r"must divide the 4 ranks of the group"):
        run(nodes(2, 2), *program[:-2], "--ranks-per-node=3", "--json")
