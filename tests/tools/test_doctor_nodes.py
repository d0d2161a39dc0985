"""`symmoe doctor --nodes`: nodes made by hand, each with one defect; virtual nodes of this machine."""

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
from doctor_cases import assert_one_wrong, fake_smi, fake_torch, wrong
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


def make_facts(changed_ranks=range(4), **overrides) -> list[Facts]:
    """The facts of four ranks on two machines with two GPUs and two NICs each. overrides: of the changed ranks."""
    facts = []
    for rank in range(4):
        node = rank // 2
        defaults: dict = {
            "host": f"host-{node}",
            "machine": f"machine-{node}",
            "domain": f"machine-{node}",
            "endpoint": Endpoint("eth0", f"10.0.0.{node + 1}", 40000 + rank),
            "launch_order": "1",
            "versions": {"symmoe": "0.1.0", "torch": "2.11.0+cu130"},
            "gpu": "NVIDIA H200",
            "nics_up": ["mlx5_0 (InfiniBand, 400 Gb/sec (4X NDR))", "mlx5_1"],
        }
        facts.append(Facts(**defaults | (overrides if rank in changed_ranks else {})))
    return facts


def rails_of(*gbs: float) -> list[Rail]:
    """The results of ranks with these speeds."""
    return [Rail(gbs=speed) for speed in gbs]


FINE = rails_of(48.0, 49.0, 47.5, 49.0)


def findings_of(
    facts: list[Facts],
    exchanges: list[Rail] = FINE,
    topology: Topology = TWO_BY_TWO,
    **refused: dict[int, str],
) -> list[Finding]:
    """All findings. refused: r0={...} has the failed connections of rank 0, and so on."""
    findings = [*check_nodes(facts, topology)]
    findings += check_network(facts, topology, [refused.get(f"r{rank}", {}) for rank in range(4)])
    return [*findings, *(check_rails(topology, exchanges) if topology.num_nodes > 1 else [])]


def test_healthy_nodes_have_only_findings_of_level_ok():
    findings = findings_of(make_facts())
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
FAILED = [*rails_of(1, 1), Rail(error="no answer within 30 s"), Rail(error="no NCCL")]
OTHER_TORCH = {"symmoe": "0.1.0", "torch": "2.12.0"}
WRONG: dict[str, tuple[list[Finding], str, str, str]] = {  # findings; level, words and fix of the one that is not ok
    "another torch": (findings_of(make_facts([3], versions=OTHER_TORCH)), "problem",
        "torch is not the same everywhere: ranks 0-2 have 2.11.0+cu130; ranks 3 have 2.12.0", "pip install torch=="),
    "a rank without a GPU": (findings_of(make_facts([1], gpu="")), "problem",
        "ranks 1 have no GPU, the others have", "torchrun --nproc-per-node"),
    "one node": (findings_of(make_facts(), topology=Topology(0, ((0, 1, 2, 3),))), "note",
        "4 ranks on 1 node; node 0 (host-0): 0-3: there is no network", "--ranks-per-node"),
    "a link that is down": (findings_of(make_facts(nics_down=["mlx5_2"])), "note",
        "host-1: no link at mlx5_2", "ibstat"),
    "only TCP": (findings_of(make_facts([2], nics_up=[])), "note",
        "host-1: no RDMA NIC: what goes between nodes goes over TCP", "--device=/dev/infiniband"),
    "no such device": (findings_of(make_facts([2], problem="GLOO_SOCKET_IFNAME=eth9: no such network device: lo")),
        "problem", "rank 2: GLOO_SOCKET_IFNAME=eth9: no such network device", "export GLOO_SOCKET_IFNAME="),
    "an address of one machine": (findings_of(make_facts([2], endpoint=HIDDEN), r0={2: REFUSED}), "problem",
        "rank 0 on node 0 cannot connect to rank 2 on node 1 at 127.0.1.1:40002 (lo): Connection refused",
        "export GLOO_SOCKET_IFNAME="),
    "a firewall": (findings_of(make_facts(), r0={0: REFUSED, 2: REFUSED}, r1={1: REFUSED, 3: REFUSED}), "problem",
        "and 1 more", "let the firewall pass"),
    "orders that differ": (findings_of(make_facts([3], launch_order="")), "note",
        "NCCL_LAUNCH_ORDER_IMPLICIT=1 is not set on ranks 3", "export NCCL_LAUNCH_ORDER_IMPLICIT=1"),
    "a slow rail": (findings_of(make_facts(), rails_of(48.0, 20.0, 48.0, 49.0)), "note",
        "rail 1 is slow: 20 GB/s at rank 1 on node 0, the median rail has 34", "ibstat"),
    "a rank that does not answer": (findings_of(make_facts(), FAILED), "problem",
        "rails do not connect: rank 2 on node 1: no answer within 30 s; rank 3 on node 1: no NCCL",
        "NCCL_DEBUG=INFO"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_defect_is_one_finding_with_its_fix(name: str):
    assert_one_wrong(*WRONG[name])


def test_ranks_on_cpus_and_virtual_nodes_are_fine():
    cpus = findings_of(make_facts(gpu="", nics_up=[], launch_order=""))
    assert wrong(cpus) == []
    assert {item.subject: item.text for item in cpus}["nics"] == "host-0, host-1: no RDMA NIC"
    assert (
        "(virtual nodes of 1 machine)"
        in check_nodes(make_facts(machine="one"), TWO_BY_TWO)[-1].text
    )
    assert [listed(item) for item in ([], [0, 1], [0, 1, 2, 5], [3, 5, 6])] == [
        "",
        "0, 1",
        "0-2, 5",
        "3, 5, 6",
    ]


def test_read_nics_lists_devices_and_links(tmp_path: Path):
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


def test_read_facts_matches_gpus_by_uuid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """torch and nvidia-smi number the same GPUs differently."""
    uuids: list[str | None] = []
    fake_smi(tmp_path, monkeypatch)
    fake_torch(monkeypatch)
    monkeypatch.setattr(doctor_nodes, "find_domain", lambda uuid: uuids.append(uuid) or "a domain")
    variables = {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}
    endpoint = Endpoint("lo", "127.0.0.1", 1)
    facts = [read_facts(local, variables, endpoint, "") for local in (0, 2)]
    assert (facts[0].gpu, facts[0].launch_order) == ("NVIDIA H200", "1")
    assert facts[1].gpu == ""  # more ranks than GPUs
    assert uuids == ["GPU-22222222-bbbb", None]


# -- virtual nodes ----------------------------------------------------------------------------------------------------


def failing_rail() -> contextlib.AbstractContextManager:
    class Leaving(GlooRail):
        def __init__(self, *arguments, **options) -> None:
            super().__init__(*arguments, **options)
            raise BackendUnavailable("a GPU that is out of order")

    return patch.object(doctor_nodes, "GlooRail", Leaving)


def unknown_device() -> contextlib.AbstractContextManager:
    return patch.dict(os.environ, {"GLOO_SOCKET_IFNAME": "eth-none"})


def board_of(store_name: str, rank: int, num_ranks: int, *, wait_s: float = 90.0) -> Board:
    """The ranks of the test on one machine, with a part of its store that no other test has used."""
    store = dist.PrefixStore(store_name, dist.distributed_c10d._get_default_store())
    return Board(store, rank, num_ranks, rank, wait_s)


def examine(
    rank: int, num_ranks: int, ranks_per_node: int, defect: str, culprit: int, store_name: str
) -> tuple[list[Finding], float]:
    """The findings of a rank, and the seconds that they take, with a defect on the culprit."""
    board = board_of(store_name, rank, num_ranks, wait_s=PROMPT_S)
    context: Callable[[], contextlib.AbstractContextManager[None]] = (
        globals()[defect] if rank == culprit else nullcontext
    )
    start = time.monotonic()
    with context():
        findings = examine_nodes(board, {}, ranks_per_node)
    return findings, time.monotonic() - start


def examine_on_all(
    cluster, num_ranks: int, ranks_per_node: int, defect: str = "", culprit: int = -1
) -> list[Finding]:
    """The findings of all ranks, which must be equal."""
    name = f"{num_ranks}/{ranks_per_node}/{defect}"
    results = cluster(num_ranks).run(examine, ranks_per_node, defect, culprit, name)
    findings: list[Finding] = results[0][0]
    for actual, seconds in results:
        assert (actual, seconds < PROMPT_S) == (findings, True), seconds
    return findings


@pytest.mark.parametrize(
    ("num_ranks", "ranks_per_node"), [(4, 2), pytest.param(3, 1, marks=pytest.mark.slow)]
)
def test_virtual_nodes_pass(cluster, num_ranks: int, ranks_per_node: int):
    by_subject = {
        finding.subject: finding for finding in examine_on_all(cluster, num_ranks, ranks_per_node)
    }
    assert {finding.level for finding in by_subject.values()} <= {
        "ok",
        "note",
    }  # a busy machine may have a slow rail
    rails = {4: "0, 2 | 1, 3", 3: "0, 1, 2"}[num_ranks]
    assert by_subject["nodes"].text.endswith(f"(virtual nodes of 1 machine); rails: {rails}")
    assert (
        by_subject["sockets"].text
        == f"gloo goes by lo (127.0.0.1) on node {listed(range(num_ranks // ranks_per_node))}"
    )
    assert by_subject["rails"].text.startswith(
        "rails 0, 1 connect;" if num_ranks == 4 else "rails 0 connect;"
    )
    assert "nccl" not in by_subject


def test_one_node_has_no_findings_about_rails(cluster):
    findings = examine_on_all(cluster, 4, 4)
    assert [(finding.subject, finding.level) for finding in findings] == [
        ("nodes", "note"),
        ("nics", "ok"),
        ("sockets", "ok"),
    ]


PROBLEMS = {  # the rank; the subject and words of the finding; a rank that it must not name
    "failing_rail": (3, "rails", "rank 3 on node 1: a GPU that is out of order", "rank 2"),
    "refuses": (
        1,
        "sockets",
        "rank 3 on node 1 cannot connect to rank 1 on node 0 at 127.0.0.1:",
        "rank 2",
    ),
    "unknown_device": (
        2,
        "sockets",
        "rank 2: GLOO_SOCKET_IFNAME=eth-none: this machine (",
        "rank 1",
    ),
}


@pytest.mark.parametrize("defect", PROBLEMS)
def test_a_defect_of_one_rank_is_a_finding_of_all(cluster, defect: str):
    culprit, subject, text, absent = PROBLEMS[defect]
    findings = examine_on_all(cluster, 4, 2, defect, culprit)
    [problem] = [finding for finding in findings if finding.level == "problem"]
    assert problem.subject == subject
    assert text in problem.text
    assert absent not in problem.text
    assert problem.fix
    assert (subject == "rails") == any(
        finding.subject == "rails" for finding in findings
    )  # else nothing was tried


@run_on(4)
def test_a_rank_that_does_not_answer_is_named(rank: int, num_ranks: int) -> None:
    board = board_of("missing", rank, num_ranks, wait_s=1.0)
    start = time.monotonic()
    if rank != 1:
        with pytest.raises(RanksMissing, match=r"^ranks 1 did not answer in time, at 'facts'$"):
            board.gather("facts", {})
    assert time.monotonic() - start < PROMPT_S


# -- fake GPUs --------------------------------------------------------------------------------------------------------


def try_rail_on_gpus(rank: int, num_ranks: int, connects: bool) -> Rail:
    """The result of try_rail with gloo in place of NCCL and GPUs."""
    board = board_of(f"gpus/{connects}", rank, num_ranks)
    closed = []

    class FakeNccl(GlooRail):
        bytes_per_s = 48e9

        def __init__(self, library: str, *arguments, **options) -> None:
            super().__init__(*arguments, **options)
            if (
                not connects
            ):  # after all ranks have arrived: else a rank would find its connection closed
                board.gather("arrived", None)
                raise BackendUnavailable(
                    "NCCL does not connect the nodes: ncclCommInitRank: remote process exited"
                )

        def close(self) -> None:
            closed.append(True)
            super().close()

    with contextlib.ExitStack() as stack:
        for name, fake in (("Nccl", lambda: "library"), ("NcclRail", FakeNccl)):
            stack.enter_context(patch.object(doctor_nodes, name, fake))
        stack.enter_context(patch.object(torch.cuda, "set_device", lambda device: None))
        topology = Topology(rank, ((0, 1), (2, 3)))
        result = try_rail(board, topology, stack, has_gpu=True)
        board.gather("rails", None)  # as the command does: a mate may still connect
    assert closed or not connects
    return result


def test_rails_of_gpus_use_nccl(cluster):
    for result in cluster(4).run(try_rail_on_gpus, True):
        assert (result.error, result.gbs) == ("", 48.0)
    for result in cluster(4).run(try_rail_on_gpus, False):
        assert result.error.startswith("NCCL does not connect the nodes")


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("local_rank", "num_printed"), [("0", 1), ("1", 0)])
def test_an_unreachable_store_is_a_problem_that_one_rank_of_a_node_prints(
    local_rank: str,
    num_printed: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
):
    monkeypatch.setattr(doctor_nodes, "_WAIT_S", 1.0)
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in {**variables, "LOCAL_RANK": local_rank}.items():
        monkeypatch.setenv(name, value)
    start = time.monotonic()
    assert main(["doctor", "--nodes", "--json"]) == 1
    assert time.monotonic() - start < PROMPT_S
    output = capsys.readouterr().out
    text = "does not reach torch's store at MASTER_ADDR:MASTER_PORT=127.0.0.1:1: "
    findings = json.loads(output)["findings"] if output else []
    assert [text in finding["text"] for finding in findings] == [True] * num_printed


@pytest.mark.slow
def test_two_torchruns_have_findings_and_an_exit_status():
    """Ranks of two torchruns examine each other; an invalid option is an error of all."""
    program = ["-m", "symmoe", "doctor", "--nodes", "--ranks-per-node=2", "--json"]
    texts = run(nodes(2, 2), *program)
    assert "rails: 0, 2 | 1, 3" in texts[0]
    assert texts[1].strip() == ""
    with pytest.raises(AssertionError, match=r"must divide the 4 ranks of the group"):
        run(nodes(2, 2), *program[:-2], "--ranks-per-node=3", "--json")
