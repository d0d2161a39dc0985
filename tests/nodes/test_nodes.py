"""Groups that span nodes, here virtual ones: processes that share memory only inside a node, and gloo between nodes.
Dispatch and combine run against the oracles of one node, byte for byte; a layer against itself on one node."""

import ctypes
import itertools
import os
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import routings
import torch
import torch.distributed as dist
from cluster import run_on
from heap_calls import outcome
from node_calls import EAGERLY, EXACT, ON_RAILS, STATIC, drop_on_rails, train
from stacks import EXACT as BIG_EXACT
from stacks import MOST_TOKENS as MOST_BIG_TOKENS
from stacks import STATIC as BIG_STATIC
from stacks import check_ways
from trip_checks import check_cases, check_combine, check_dispatch
from worker import Findings, assert_refused, open_heap

from symmoe import MoEConfig, MoELayer, SymmetricHeap, combine_tokens, dispatch_tokens, make_plan
from symmoe.checkpoint import load_checkpoint, save_checkpoint
from symmoe.combine import trip as combine_trip
from symmoe.dispatch import trip
from symmoe.errors import ArgumentError, BackendUnavailable
from symmoe.kernels.gemm_parts import Part
from symmoe.nodes import topology as topology_module
from symmoe.nodes.topology import find_domain, find_topology
from symmoe.precision import Float8Block
from symmoe.symm_mem import start

# (ranks, ranks per node)
LAYOUTS = [
    pytest.param(4, 2, id="2 x 2"),
    pytest.param(3, 1, id="3 x 1", marks=pytest.mark.slow),
    pytest.param(6, 3, id="2 x 3", marks=pytest.mark.slow),
    pytest.param(8, 2, id="4 x 2", marks=pytest.mark.slow),
]
STEP = 2 * len(routings.STRATA) + 2  # a case of every second stratum


# -- topology ---------------------------------------------------------------------------------------------------------
def test_hosts_are_nodes():
    topology = find_topology("aabb", 2, None)
    assert topology.nodes == ((0, 1), (2, 3))
    assert (topology.node, topology.local_rank, topology.ranks, topology.rail) == (
        1,
        0,
        (2, 3),
        (0, 2),
    )
    topology = find_topology("abab", 3, None)  # ranks of hosts may alternate
    assert topology.nodes == ((0, 2), (1, 3))
    assert (topology.node, topology.local_rank, topology.rail) == (1, 1, (2, 3))


def test_a_host_may_be_cut_and_hosts_are_not_joined():
    assert find_topology("aaaabbbb", 5, 2).nodes == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert find_topology("abab", 0, 1).nodes == ((0,), (1,), (2,), (3,))
    assert find_topology("aaa", 0, None).num_nodes == find_topology("aaa", 0, 3).num_nodes == 1
    for hosts, ranks_per_node, error, text in (
        ("aabb", 4, ArgumentError, r"node \(4\) must divide the 2 ranks .* node of rank 0"),
        ("aabbb", 2, ArgumentError, r"node \(2\) must divide the 3 ranks .* node of rank 2"),
        ("aabbc", None, BackendUnavailable, "rank 4 is on a node with 1 .* rank 0 on one with 2"),
    ):
        with pytest.raises(error, match=text):
            find_topology(hosts, 0, ranks_per_node)


class FakeNvml:
    """Replaces the library: one GPU, and its report of the fabric."""

    def __init__(self, *, cluster: bytes, clique: int = 7, state: int = 3, status: int = 0) -> None:
        self.info = struct.pack("<16sIIB", cluster, status, clique, state)
        self.num_open = 0

    def nvmlInit_v2(self) -> int:
        self.num_open += 1
        return 0

    def nvmlShutdown(self) -> int:
        self.num_open -= 1
        return 0

    def nvmlDeviceGetHandleByUUID(self, name: bytes, device: Any) -> int:
        return 0 if name == b"GPU-1a-2b" else 6

    def nvmlDeviceGetGpuFabricInfo(self, device: Any, info: Any) -> int:
        ctypes.memmove(info, self.info, len(self.info))
        return 0


@pytest.mark.parametrize("prefix", ["", "GPU-"])
def test_an_nvlink_domain_may_have_several_machines(monkeypatch: pytest.MonkeyPatch, prefix: str):
    nvml = FakeNvml(cluster=b"one cluster of 9")
    monkeypatch.setattr(topology_module.ctypes, "CDLL", lambda name: nvml)
    assert find_domain(prefix + "1a-2b") == b"one cluster of 9".hex() + " 7"
    assert nvml.num_open == 0


@pytest.mark.parametrize(
    "nvml",
    [
        FakeNvml(cluster=bytes(16)),
        FakeNvml(cluster=b"one cluster of 9", state=2),
        FakeNvml(cluster=b"one cluster of 9", status=999),
        object(),
        OSError("no driver"),
    ],
    ids=["one machine", "not complete", "failed", "too old", "no driver"],
)
def test_without_an_nvlink_domain_the_domain_is_the_machine(
    monkeypatch: pytest.MonkeyPatch, nvml: object
):
    def load(name: str) -> object:
        if isinstance(nvml, OSError):
            raise nvml
        return nvml

    monkeypatch.setattr(topology_module.ctypes, "CDLL", load)
    assert find_domain("1a-2b") == find_domain(None)
    assert find_domain(None) == Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@run_on(4)
def test_machines_of_one_domain_are_one_node(rank: int, num_ranks: int, findings: Findings) -> None:
    """Two machines, fake ones for the heap, in one NVLink domain are one node, unless ranks_per_node cuts them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topology_module, "find_machine", lambda: f"machine {rank // 2}")
        patch.setattr(start, "find_domain", lambda gpu: "one domain")
        for ranks_per_node, want in ((None, ((0, 1, 2, 3),)), (2, ((0, 1), (2, 3)))):
            with open_heap("cpu", ranks_per_node=ranks_per_node) as heap:
                findings.equal("nodes", heap.topology.nodes, want)


@run_on(3)
def test_wrong_numbers_of_ranks_per_node_are_refused(rank: int, num_ranks: int) -> None:
    """symm_mem/test_heap_start.py has other wrong numbers."""
    options = {"num_bytes": 4 << 20, "backend": "host"}
    name, text = outcome(SymmetricHeap, **options, ranks_per_node=2)
    assert name == "ArgumentError"
    assert "ranks_per_node (2) must divide the 3 ranks of the group on the node of rank 0" in text
    expected = ("ConfigMismatch", "ranks_per_node differs between ranks: [1, 3, 1]")
    assert outcome(SymmetricHeap, **options, ranks_per_node=(1, 3, 1)[rank]) == expected


# -- bits -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("check", "first"), [(check_dispatch, 0), (check_combine, 3)], ids=["dispatch", "combine"]
)
@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), LAYOUTS)
def test_trips_have_the_bits_of_the_oracle(
    cluster, num_ranks: int, ranks_per_node: int, check, first: int
):
    """Dispatch with the even strata, combine with the odd ones."""
    numbers = list(range(first, len(routings.CASES), STEP))
    assert cluster(num_ranks).findings(check_cases, numbers, "cpu", check, ranks_per_node) == []


@pytest.mark.slow
@pytest.mark.parametrize("check", [check_dispatch, check_combine])
def test_all_cases_have_the_bits_of_the_oracle(cluster, check):
    assert cluster(4).findings(check_cases, list(range(len(routings.CASES))), "cpu", check, 2) == []


BIG_LIMITS = {
    "capacity": 500,
    "max_tokens": MOST_BIG_TOKENS,
    "overflow": "drop",
    "rail_capacity": 350,
}
BIG_KINDS = {"exact": BIG_EXACT, "static": BIG_STATIC, "drop": ("node", "hidden", BIG_LIMITS)}
IN_SHORT = "2 x 2, static", "2 x 2, drop", "3 x 1, exact"
BIG_CALLS = [
    pytest.param(*layout.values, kind, id=name, marks=[pytest.mark.slow] * (name not in IN_SHORT))
    for layout in LAYOUTS
    for name, kind in ((f"{layout.id}, {name}", kind) for name, kind in BIG_KINDS.items())
]


@pytest.mark.parametrize(("num_ranks", "ranks_per_node", "kind"), BIG_CALLS)
def test_all_ways_give_the_same_bits(
    cluster, num_ranks: int, ranks_per_node: int, kind: tuple[Any, ...]
):
    """Experts have rows of several tiles. Rows of other nodes arrive, and their sums leave, during the computation of
    this node's rows."""
    assert (
        cluster(num_ranks).findings(check_ways, "cpu", torch.float32, (kind,), ranks_per_node) == []
    )


@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), LAYOUTS)
@run_on()
def test_rails_are_under_way_while_own_rows_are_computed(
    rank: int, num_ranks: int, ranks_per_node: int
) -> None:
    """The order of events in forward and backward: begins and ends on the rails, and parts of GEMMs with or without
    rows."""
    events: list[tuple[str, bool]] = []
    part_of = trip.Part

    def noting_part(rows: torch.Tensor, num_sms: int | None = None) -> Part:
        events.append(("part", bool((rows[1] > rows[0]).any())))
        return part_of(rows, num_sms)

    def noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments, **options: (
            events.append((name, True)),
            function(*arguments, **options),
        )[1]

    with open_heap("cpu", num_bytes=16 << 20, ranks_per_node=ranks_per_node) as heap:
        config = MoEConfig(hidden=16, ffn=8, num_experts=num_ranks, top_k=2, router=None, **EAGERLY)
        layer = MoELayer(config, heap)
        rail, by_direction = heap.nodes, []
        with pytest.MonkeyPatch.context() as patch:
            for module in (combine_trip, trip):
                patch.setattr(module, "Part", noting_part)
            num_tokens, plan_exchanges = (
                150 * num_ranks,
                1,
            )  # 300 rows from each rank to each: a whole tile and more
            x = torch.randn(num_tokens, 16, requires_grad=True)
            ids = (torch.arange(num_tokens)[:, None] + torch.arange(2)) % num_ranks
            patch.setattr(rail, "begin", noting("begin", rail.begin))
            patch.setattr(rail, "end", noting("end", rail.end))
            y, _ = layer(x, topk_idx=ids, probs=torch.full((num_tokens, 2), 0.5))
            by_direction.append(events[2 * plan_exchanges :])
            events.clear()
            y.sum().backward()
            by_direction.append(events)
    forward, backward = by_direction
    begin = ("begin", True)
    end = ("end", True)
    part = ("part", True)
    num_nodes = num_ranks // ranks_per_node
    ends = [part] * (
        1 + (0 < rank // ranks_per_node < num_nodes - 1)
    )  # ranks before the node, and after it
    dispatch = [begin, *[part] * ranks_per_node, end, *ends]
    assert forward == backward == [*dispatch, *ends, part, begin, end], by_direction


# Tokens and gradients travel as E4M3 numbers.
QUANTIZED = {"hidden": 256, "ffn": 128, "precision": Float8Block(), "quantized_wire": "both"}
KINDS = [
    pytest.param({**EXACT, **EAGERLY, "layout": "packed"}, torch.bfloat16, id="exact"),
    pytest.param(
        {**STATIC, **EAGERLY, "layout": "expert-major", "stash": "none"}, torch.float32, id="static"
    ),
    pytest.param(
        {**ON_RAILS, "stash": "hidden"}, torch.bfloat16, id="rail", marks=pytest.mark.slow
    ),
    pytest.param(
        {**EXACT, "stash": "rows", "schedule": "serial"},
        torch.float32,
        id="serial",
        marks=pytest.mark.slow,
    ),
    pytest.param(QUANTIZED, torch.bfloat16, id="quantized", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("options", "dtype"), KINDS)
def test_order_slot_has_the_bits_of_one_node(cluster, options: dict[str, Any], dtype: torch.dtype):
    """1 x 4, 2 x 2 and 4 x 1: outputs, losses, gradients of tokens, router and experts."""
    options = {**options, "order": "slot"}
    want = cluster(4).run(train, None, options, dtype)
    assert any(tensor.abs().sum() > 0 for tensor in want[0])
    for ranks_per_node in (2, 1):
        got = cluster(4).run(train, ranks_per_node, options, dtype)
        for rank, (expected, actual) in enumerate(zip(want, got, strict=True)):
            assert int(actual[-1]) == 0
            different = [
                n
                for n, (a, b) in enumerate(zip(expected, actual, strict=True))
                if not torch.equal(a, b)
            ]
            assert different == [], f"rank {rank}, {ranks_per_node} ranks per node"


def on_alternating_hosts(rank: int, num_ranks: int, folder: str, options: dict[str, Any]):
    """Trains with ranks 0 and 2 on one fake host, 1 and 3 on another: the nodes, and the results."""
    machine = Path(folder) / f"host {rank % 2}"
    machine.write_text(f"host {rank % 2}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topology_module, "_BOOT_ID", machine)
        with open_heap("cpu") as heap:
            nodes = heap.topology.nodes
        return nodes, train(rank, num_ranks, None, options, torch.bfloat16)


def test_ranks_of_a_node_need_not_be_neighbours(cluster, tmp_path: Path):
    options = {"order": "slot"}
    want = cluster(4).run(train, None, options, torch.bfloat16)
    for (nodes, got), expected in zip(
        cluster(4).run(on_alternating_hosts, str(tmp_path), options), want, strict=True
    ):
        assert nodes == ((0, 2), (1, 3))
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@run_on(4)
def test_two_groups_of_two_nodes_work_at_once(
    rank: int, num_ranks: int, findings: Findings
) -> None:
    """Two EP groups of two nodes each, and in each two heaps that are used in turn."""
    group = [dist.new_group(ranks) for ranks in ((0, 2), (1, 3))][rank % 2]
    with (
        open_heap("cpu", group=group, ranks_per_node=1) as first_heap,
        open_heap("cpu", group=group) as second_heap,
    ):
        findings.equal(
            "ranks",
            (first_heap.bootstrap.global_ranks, first_heap.topology.num_nodes),
            ([rank % 2, rank % 2 + 2], 2),
        )
        findings.equal("nodes of the other", second_heap.topology.num_nodes, 1)
        x = torch.full((3, 8), float(rank))
        ids = torch.tensor([[0, 1], [1, 2], [3, -1]])
        for heap in (first_heap, second_heap, first_heap):
            plan = make_plan(ids, num_experts=4, heap=heap)
            rows, _, handle = dispatch_tokens(x, plan)
            sources = [int(source) for source in sorted(set(rows[:, 0].tolist()))]
            findings.equal("sources of rows", sources, [*first_heap.bootstrap.global_ranks])
            findings.equal(
                "y",
                combine_tokens(rows, handle)[:, 0].tolist(),
                [2.0 * rank, 2.0 * rank, float(rank)],
            )


def test_order_node_differs_by_roundings_only(cluster):
    """The default differs from order="slot" by roundings, and is the same for "rank" and "node"."""

    def trained(order: str, ranks_per_node: int | None) -> list[torch.Tensor]:
        return [
            *itertools.chain(
                *cluster(4).run(train, ranks_per_node, {"order": order}, torch.float32)
            )
        ]

    for a, b, c in zip(trained("slot", 2), trained("rank", 2), trained("node", 2), strict=True):
        assert torch.equal(b, c)
        assert torch.allclose(a.double(), b.double(), rtol=1e-4, atol=1e-5)
    assert all(
        torch.equal(a, b) for a, b in zip(trained("node", None), trained("slot", None), strict=True)
    )


def keep_or_load(
    rank: int, num_ranks: int, ranks_per_node: int | None, folder: str, keeps: bool
) -> torch.Tensor:
    """The result of a layer for some tokens: of a layer that is saved, or of one that is loaded."""
    torch.manual_seed(rank)
    with open_heap("cpu", ranks_per_node=ranks_per_node) as heap:
        layer = MoELayer(MoEConfig(hidden=16, ffn=8, num_experts=8, top_k=2, order="slot"), heap)
        dist.broadcast(layer.router.weight.data, src=0)
        if keeps:
            save_checkpoint(folder, 1, model=layer)
        else:
            load_checkpoint(folder, model=layer)
        return layer(torch.arange(128.0).view(8, 16) / 100)[0].detach()


def test_checkpoints_do_not_depend_on_nodes(cluster, tmp_path: Path):
    saved = cluster(4).run(keep_or_load, 2, str(tmp_path), True)
    assert float(saved[0].abs().sum()) > 0
    for num_ranks, ranks_per_node in ((2, 1), (4, None)):
        for y in cluster(num_ranks).run(keep_or_load, ranks_per_node, str(tmp_path), False):
            assert torch.equal(y, saved[0])


# -- capacity of the rails --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), LAYOUTS)
def test_rails_drop_the_last_tokens(cluster, num_ranks: int, ranks_per_node: int):
    assert cluster(num_ranks).findings(drop_on_rails, ranks_per_node) == []


def test_rail_capacity_needs_a_static_capacity(heap: SymmetricHeap):
    ids = torch.zeros((2, 1), dtype=torch.int64)
    plan = partial(make_plan, ids, num_experts=2, heap=heap)
    assert_refused(
        (partial(plan, rail_capacity=3), r"rail_capacity \(3\) needs a static capacity, and"),
        (partial(plan, capacity=4, rail_capacity=0), r"rail_capacity \(0\) must be at least 1"),
    )
    plan(capacity=4, rail_capacity=1)  # one node: no effect


@pytest.mark.parametrize("capacity", [None, 160])
@run_on(2)
def test_steps_between_nodes_are_played(rank: int, num_ranks: int, capacity: int | None) -> None:
    """The plan, with the router, in two parts, the step and its gradient."""
    torch.manual_seed(rank)
    on = mock.patch.dict(os.environ, SYMMOE_PROGRAMS="on")
    with on, open_heap("cpu", num_bytes=16 << 20, ranks_per_node=1) as heap:
        layer = MoELayer(
            MoEConfig(hidden=16, ffn=8, num_experts=4, top_k=2, capacity=capacity), heap
        )
        x, results, num_runs = torch.randn((40, 16), requires_grad=True), [], 0
        for _ in range(6):
            num_runs = heap.programs.num_runs
            y, _ = layer(x)
            results.append(
                torch.cat(
                    [
                        g.flatten()
                        for g in (y, *torch.autograd.grad(y.sum(), (x, *layer.parameters())))
                    ]
                )
            )
        assert all(torch.equal(result, results[0]) for result in results)
        assert (num_runs > 0, heap.programs.num_runs - num_runs) == (True, 4)
        y, _ = layer(x)
        del y, _
        assert (
            heap.leased_bytes == 0
        )  # without references to its results, the graph of a step is freed


@run_on(2)
def test_a_profile_ends_between_calls(rank: int, num_ranks: int) -> None:
    """torch ends the process if the profile records messages that arrive after its end, so all must have arrived."""
    with open_heap("cpu", ranks_per_node=1) as heap:
        for _ in range(6):
            with torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU]
            ) as profile:
                plan = make_plan(
                    torch.arange(num_ranks).repeat(64, 1), num_experts=num_ranks, heap=heap
                )
                rows, _, handle = dispatch_tokens(torch.ones((64, 8)), plan)
                combine_tokens(rows, handle)
        assert len(profile.events()) > 20
