"""Plan, dispatch and combine against the oracle, bit for bit, over every routing of routings.py; and the oracle."""

import re
from collections import Counter

import numpy as np
import oracle
import routings
from trip_checks import check_cases, check_combine, check_dispatch


@routings.RANKS_AND_CASES
def test_dispatch_has_the_bytes_of_the_oracle(
    cluster, num_ranks: int, device: str, numbers: list[int]
):
    assert cluster(num_ranks, device).findings(check_cases, numbers, device, check_dispatch) == []


@routings.RANKS_AND_CASES
def test_sums_and_gradients_have_the_bits_of_the_oracle(
    cluster, num_ranks: int, device: str, numbers: list[int]
):
    assert cluster(num_ranks, device).findings(check_cases, numbers, device, check_combine) == []


def test_every_stratum_has_cases_that_show_its_name():
    """Every stratum has cases, in more than one dtype and capacity, and shows the property in its name on 4 ranks."""
    assert len(routings.CASES) >= 200
    assert {case.top_k for case in routings.CASES} == set(range(1, 9))
    assert {case.hidden for case in routings.CASES} == set(routings.HIDDEN_SIZES)
    for stratum in routings.STRATA:
        cases = [case for case in routings.CASES if case.stratum == stratum]
        assert len({case.dtype for case in cases}) == 3
        assert len({case.capacity for case in cases}) >= 3
    results = Counter()
    for case in routings.CASES:
        routing = case.routing(4)
        layout = oracle.lay_out(routing.topk_idx, routing.num_experts, capacity=routing.capacity)
        counts = [len(ids) for ids in routing.topk_idx]
        used = [g for g, load in enumerate(layout.expert_load) if load]
        drops = routing.overflow == "drop"
        shown = {
            "dropped": layout.num_dropped and drops,
            "raises": layout.num_dropped and not drops,
            "idle expert": 0 < len(used) < routing.num_experts,
            "unused packed row": drops and any(None in packed for packed in layout.packed),
            "all-masked token": any((ids < 0).all(1).any() for ids in routing.topk_idx),
            "2 blocks": max(counts) > 32,
        }
        results.update(name for name, is_shown in shown.items() if is_shown)
        holds = {
            "one_expert": len(used) == 1,
            "one_rank": len({g // case.experts_per_rank for g in used}) == 1,
            "no_tokens_on_one_rank": min(counts) == 0 < max(counts),
            "no_tokens_at_all": max(counts) == 0,
            "one_token": counts == [1] * 4,
        }
        assert holds.get(case.stratum, True), case
    assert min(results[name] for name in shown) >= 8, results


def test_drops_of_the_oracle_follow_the_documented_level():
    """The oracle's rule and the level of docs/design/plan.md: min(load, level), the rest to the first ones above."""
    rng = np.random.default_rng(7)
    for _ in range(300):
        loads = rng.integers(0, 12, rng.integers(1, 9)).tolist()
        capacity = int(rng.integers(0, sum(loads) + 3))
        (remaining,) = oracle.keep_within([loads], capacity)
        if sum(loads) <= capacity:
            assert remaining == loads
            continue
        assert sum(remaining) == capacity
        level = max(
            n for n in range(capacity + 1) if sum(min(load, n) for load in loads) <= capacity
        )
        free = capacity - sum(min(load, level) for load in loads)
        above = [g for g, load in enumerate(loads) if load > level]
        assert remaining == [min(load, level) + (g in above[:free]) for g, load in enumerate(loads)]


def test_the_oracle_imports_nothing_of_the_package():
    with open(oracle.__file__, encoding="utf-8") as file:
        assert not re.search(r"^\s*(import|from)\s+symmoe", file.read(), re.MULTILINE)
