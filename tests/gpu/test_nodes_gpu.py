"""Virtual nodes of GPUs on one machine: NVSHMEM inside a node, NCCL and gloo between nodes. Between two GPUs of one
machine NCCL goes over NVLink or PCIe; with an NCCL_HOSTID of its own for each process, as tests of several torchrun
agents set it, over sockets."""

from typing import Any

import pytest
import routings
import torch
from captured_cases import check_counts, check_exact
from cluster import Cluster, run_on
from graphs import captured
from node_calls import (
    EAGERLY,
    EXACT,
    ON_RAILS,
    STATIC,
    Ready,
    check_survivors,
    drop_on_rails,
    lose,
    train,
    wrong_calls,
)
from shared_gpus import are_too_few
from trip_checks import check_cases, check_combine, check_dispatch
from worker import Findings, open_heap

from symmoe import MoEConfig, MoELayer, combine_tokens, dispatch_tokens, make_plan

pytestmark = pytest.mark.timeout(300, method="thread")

LAYOUTS = [
    pytest.param(n, size, id=f"{n // size} x {size}")
    for n, size in ((2, 1), (4, 2), (8, 4), (8, 2))
]
layouts = pytest.mark.parametrize(("num_ranks", "ranks_per_node"), LAYOUTS)
STEP = 3 * (len(routings.STRATA) + 1)


@pytest.mark.parametrize(
    ("check", "first"), [(check_dispatch, 0), (check_combine, 3)], ids=["dispatch", "combine"]
)
@layouts
def test_trips_are_the_oracle_bit_for_bit(
    cluster, num_ranks: int, ranks_per_node: int, check, first: int
):
    numbers = list(range(first, len(routings.CASES), STEP))
    assert (
        cluster(num_ranks, "cuda").findings(check_cases, numbers, "cuda", check, ranks_per_node)
        == []
    )


@layouts
@pytest.mark.parametrize("options", [EXACT, STATIC, ON_RAILS], ids=["exact", "static", "rail"])
def test_order_slot_has_the_bits_of_one_node(
    cluster, num_ranks: int, ranks_per_node: int, options: dict[str, Any]
):
    ranks = cluster(num_ranks, "cuda")
    options = {**options, **EAGERLY, "order": "slot"}
    want = ranks.run(train, None, options, torch.bfloat16, "cuda")
    assert any(tensor.abs().sum() > 0 for tensor in want[0])
    got = ranks.run(train, ranks_per_node, options, torch.bfloat16, "cuda")
    for rank, (expected, actual) in enumerate(zip(want, got, strict=True)):
        different = [
            n
            for n, (a, b) in enumerate(zip(expected, actual, strict=True))
            if not torch.equal(a, b)
        ]
        assert different == [], f"rank {rank}"


@layouts
def test_order_node_repeats_and_is_near(cluster, num_ranks: int, ranks_per_node: int):
    ranks = cluster(num_ranks, "cuda")
    once, again = (ranks.run(train, ranks_per_node, {}, torch.float32, "cuda") for _ in range(2))
    near = ranks.run(train, None, {"order": "slot"}, torch.float32, "cuda")
    for first, repeated, slot_order in zip(once, again, near, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(first, repeated, strict=True))
        for a, b in zip(first, slot_order, strict=True):
            torch.testing.assert_close(a.double(), b.double(), rtol=2e-3, atol=1e-3)


@layouts
def test_rails_drop_the_last_tokens(cluster, num_ranks: int, ranks_per_node: int):
    assert cluster(num_ranks, "cuda").findings(drop_on_rails, ranks_per_node, "cuda") == []


@layouts
def test_wrong_calls(cluster, num_ranks: int, ranks_per_node: int):
    """Every rank raises an error of that class, and the calls that follow are right."""
    for errors in cluster(num_ranks, "cuda").run(
        wrong_calls, ranks_per_node, num_ranks - 1, "cuda"
    ):
        assert [error[0] for _, error in errors] == [name for name, _ in errors]


@layouts
@pytest.mark.parametrize("calls", ["rows", "layer"])
@run_on(device="cuda")
def test_captured_calls_are_replayed(
    rank: int, num_ranks: int, findings: Findings, ranks_per_node: int, calls: str
):
    """Captured calls with static capacity, replayed with other tokens and routings. calls: "rows": plan, dispatch and
    combine; "layer": forward and backward of one whose GEMMs run while rows travel."""
    generator = torch.Generator().manual_seed(rank)
    with open_heap("cuda", ranks_per_node=ranks_per_node) as heap:
        num_experts, num_tokens = 2 * num_ranks, 48
        ids = torch.zeros((num_tokens, 2), dtype=torch.int64, device=heap.device)
        x = torch.zeros((num_tokens, 64), dtype=torch.bfloat16, device=heap.device)
        sizes = {"hidden": 64, "ffn": 32, "num_experts": num_experts, "top_k": 2}
        capacity = 2 * num_tokens * num_ranks
        layer = MoELayer(
            MoEConfig(**sizes, capacity=capacity, router=None, **EAGERLY), heap, dtype=x.dtype
        )
        probs = torch.full(ids.shape, 0.5, device=heap.device)

        def step() -> torch.Tensor:
            if calls == "layer":
                tokens = x.clone().requires_grad_()
                y, _ = layer(tokens, topk_idx=ids, probs=probs)
                (dx,) = torch.autograd.grad(y, tokens, x)
                return torch.cat([y.detach(), dx])
            plan = make_plan(ids, num_experts=num_experts, heap=heap, capacity=capacity)
            rows, _, handle = dispatch_tokens(x, plan)
            return combine_tokens(rows, handle, order="slot")

        def fill() -> None:
            chosen = [
                torch.randperm(num_experts, generator=generator)[:2] for _ in range(num_tokens)
            ]
            ids.copy_(torch.stack(chosen))
            x.copy_(torch.randn(x.shape, generator=generator))

        fill()
        graph, y = captured(step)
        for _ in range(5):
            fill()
            graph.replay()
            heap.synchronize()
            if calls == "rows":
                findings.close("y", y, 2 * x, rtol=0, atol=0)
            expected = step()
            heap.synchronize()
            findings.check(torch.equal(y, expected), "a replay differs from a call")
        del graph


@layouts
def test_capture_step_is_exact(cluster, num_ranks: int, ranks_per_node: int):
    by_rank = cluster(num_ranks, "cuda").run(check_exact, "cuda", ranks_per_node)
    check_counts(by_rank)
    assert len({tuple(counts) for *counts, _ in by_rank}) == 1  # all ranks repeat the same steps


@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_a_lost_rank_is_named_within_the_bound(fault: str):
    if are_too_few(2):
        pytest.skip(f"needs 2 CUDA GPUs, this machine has {torch.cuda.device_count()}")
    survivors = Cluster(2, "cuda").run_without(
        (1,), lose, 1, (1,), fault, (Ready, "begin", None), "cuda", timeout_s=120.0
    )
    check_survivors(survivors, (1,), 1)
