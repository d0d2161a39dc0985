"""Plan, dispatch and combine against the oracle, bit for bit, over every routing of routings.py; and the oracle."""

import re

import numpy as np
import oracle
import routings
import torch
from cluster import run_on
from trip_checks import ORDERS, check_cases, check_combine, check_dispatch
from worker import Findings

from symmoe import SymmetricHeap, combine_tokens, dispatch_tokens, make_plan


@routings.RANKS_AND_CASES
def test_dispatch_is_the_oracle_byte_for_byte(
    cluster, num_ranks: int, device: str, numbers: list[int]
):
    assert cluster(num_ranks, device).findings(check_cases, numbers, device, check_dispatch) == []


@routings.RANKS_AND_CASES
def test_sums_and_gradients_are_the_oracle_bit_for_bit(
    cluster, num_ranks: int, device: str, numbers: list[int]
):
    assert cluster(num_ranks, device).findings(check_cases, numbers, device, check_combine) == []


def test_the_cases_hold_what_they_promise():
    """Every stratum is there, in more than one dtype and capacity, and shows what it is named for on 4 ranks."""
    assert len(routings.CASES) >= 200
    assert {case.top_k for case in routings.CASES} == set(range(1, 9))
    assert {case.hidden for case in routings.CASES} == set(routings.HIDDEN_SIZES)
    found = dict.fromkeys(
        ("all-masked token", "dropped", "raises", "idle expert", "unused packed row", "2 blocks"), 0
    )
    for stratum in routings.STRATA:
        cases = [case for case in routings.CASES if case.stratum == stratum]
        assert len({case.dtype for case in cases}) == 3
        assert len({case.capacity for case in cases}) >= 3
    for case in routings.CASES:
        routing = case.routing(4)
        layout = oracle.lay_out(routing.topk_idx, routing.num_experts, capacity=routing.capacity)
        counts = [len(ids) for ids in routing.topk_idx]
        used = [g for g, load in enumerate(layout.expert_load) if load]
        kept = routing.overflow == "drop"
        found["dropped"] += bool(layout.num_dropped and kept)
        found["raises"] += bool(layout.num_dropped and not kept)
        found["idle expert"] += 0 < len(used) < routing.num_experts
        found["unused packed row"] += kept and any(None in packed for packed in layout.packed)
        found["all-masked token"] += any(bool((ids < 0).all(1).any()) for ids in routing.topk_idx)
        found["2 blocks"] += max(counts) > 32
        if case.stratum == "one_expert":
            assert len(used) == 1
        if case.stratum == "one_rank":
            assert len({g // case.experts_per_rank for g in used}) == 1
        if case.stratum == "no_tokens_on_one_rank":
            assert min(counts) == 0 < max(counts)
        if case.stratum == "no_tokens_at_all":
            assert max(counts) == 0
        if case.stratum == "one_token":
            assert counts == [1] * 4
    assert min(found.values()) >= 8, found


def test_removing_rows_one_by_one_is_the_water_level():
    """The oracle's rule and the level of docs/design/plan.md: min(load, level), the rest to the first ones above."""
    rng = np.random.default_rng(7)
    for _ in range(300):
        loads = rng.integers(0, 12, rng.integers(1, 9)).tolist()
        capacity = int(rng.integers(0, sum(loads) + 3))
        (kept,) = oracle.keep_within([loads], capacity)
        if sum(loads) <= capacity:
            assert kept == loads
            continue
        assert sum(kept) == capacity
        level = max(
            n for n in range(capacity + 1) if sum(min(load, n) for load in loads) <= capacity
        )
        left = capacity - sum(min(load, level) for load in loads)
        above = [g for g, load in enumerate(loads) if load > level]
        assert kept == [min(load, level) + (g in above[:left]) for g, load in enumerate(loads)]


def test_the_oracle_imports_nothing_of_the_package():
    with open(oracle.__file__, encoding="utf-8") as file:
        assert not re.search(r"^\s*(import|from)\s+symmoe", file.read(), re.MULTILINE)


@run_on(1, 2)
def test_autograd_refuses_rows_that_combine_overwrote(
    rank, num_ranks, findings: Findings, heap: SymmetricHeap
) -> None:
    """Combine writes into no rows that autograd has saved."""
    plan = make_plan(torch.tensor([[0, 1], [1, 0], [0, 1]]), num_experts=2 * num_ranks, heap=heap)
    dispatch_tokens(torch.ones(3, 8), plan)
    for order in ORDERS:
        factor = torch.ones((), requires_grad=True)
        with heap.lease((plan.row_capacity, 8), torch.float32) as lease:
            lease.tensor.fill_(1.0)
            product = factor * lease.tensor  # backward wants the lease's contents
            combine_tokens(lease.tensor, plan, order=order)
            product.sum().backward()
            findings.equal(
                f"gradient after order={order}", float(factor.grad), float(lease.tensor.numel())
            )
    # Another lease is another tensor: writing to it leaves this one's version alone.
    with heap.lease((4,), torch.float32) as one, heap.lease((4,), torch.float32) as other:
        version = one.tensor._version
        other.tensor.zero_()
        findings.equal(
            "version of a lease after a write to its neighbour", one.tensor._version, version
        )
