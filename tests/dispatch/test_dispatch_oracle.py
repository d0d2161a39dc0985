"""Plan and dispatch against the oracle, byte for byte, over every routing of routings.py."""

from __future__ import annotations

import re

import numpy as np
import oracle
import routings
import torch
from worker import Findings, is_poison, on_device, open_heap, poison, poisoned_lease

from symmoe import dispatch_tokens, make_plan
from symmoe.dispatch.plan import Plan
from symmoe.dispatch.trip import dispatch
from symmoe.errors import CapacityError
from symmoe.symm_mem.heap import SymmetricHeap


def check_dispatch(
    rank: int, num_ranks: int, numbers: list[int], device: str, ranks_per_node: int | None = None
) -> list[str]:
    findings = Findings()
    with open_heap(device, ranks_per_node=ranks_per_node) as heap:
        for number in numbers:
            findings.where = f"rank {rank} of {num_ranks}, {routings.case_on(number, device)}"
            try:
                _check_case(heap, routings.case_on(number, device), findings, device)
            except Exception as error:
                raise AssertionError(findings.where) from error
            findings.equal("leased bytes after the case", heap.leased_bytes, 0)
    return findings.texts


def _check_case(heap: SymmetricHeap, case: routings.Case, findings: Findings, device: str) -> None:
    routing, rank = case.routing(heap.num_ranks), heap.rank
    ids = torch.from_numpy(routing.topk_idx[rank])
    hidden = case.shape(device)
    x = case.encoded_rows(rank, len(ids), hidden)
    probs = case.probs(rank, len(ids))
    # From here on the oracle knows what the collectives say, not what the generator says.
    all_ids = [ids.numpy() for ids in oracle.gather(ids)]
    x_bits = [oracle.bits_of(t) for t in oracle.gather(x)]
    all_probs = [t.numpy() for t in oracle.gather(probs)]
    layout = oracle.lay_out(all_ids, routing.num_experts, capacity=routing.capacity)

    topk_idx = on_device(ids.int() if case.number % 2 else ids, heap)
    x, probs = on_device(x, heap), on_device(probs, heap)
    if case.number % 3 == 0:  # strided inputs
        topk_idx, x, probs = (torch.stack([t, t], -1)[..., 0] for t in (topk_idx, x, probs))
    poison(heap)
    if routing.overflow == "raise" and layout.num_dropped:
        _check_overflow(heap, topk_idx, routing, layout, findings)
        return

    plan = make_plan(topk_idx, **routing.arguments, heap=heap, hidden=hidden, dtype=x.dtype)
    _check_maps(plan, routing, layout, rank, findings)
    num_rows, num_packed = len(layout.rows[rank]), len(layout.packed[rank])
    want_rows = oracle.expert_major(layout, rank, x_bits)
    want_probs = oracle.row_probs(layout, rank, all_probs).view(np.uint32)

    # expert-major, with a neighbour on either side that must stay as it is
    with (
        poisoned_lease(heap, (16,), torch.int32, name="below") as below,
        poisoned_lease(heap, (plan.row_capacity, hidden), x.dtype, name="rows") as buffer,
        poisoned_lease(heap, (16,), torch.int32, name="above") as above,
    ):
        rows, row_probs = dispatch_tokens(x, plan, probs=probs, out=buffer.tensor)
        visible = plan.row_capacity if routing.capacity is not None else num_rows
        findings.equal("number of rows", rows.shape[0], visible)
        findings.check(rows.data_ptr() == buffer.tensor.data_ptr() or not visible, "rows are not in `out`")
        findings.equal("rows", oracle.bits_of(buffer.tensor[:num_rows]), want_rows)
        findings.check(is_poison(buffer.tensor[num_rows:]), "the tail of rows was written")
        findings.check(is_poison(below.tensor) and is_poison(above.tensor), "a neighbouring lease was written")
        findings.equal("row_probs", oracle.bits_of(row_probs[:num_rows]), want_probs)
        _check_index(plan, layout, rank, findings)

        # once more over the same plan, rows alone: the trip of backward
        buffer.tensor.view(torch.uint8).fill_(0xFF)
        with dispatch(x.contiguous(), plan, buffer.tensor, layout="expert-major", gradients=0):
            pass
        findings.equal("rows of the second trip", oracle.bits_of(buffer.tensor[:num_rows]), want_rows)
        findings.check(is_poison(buffer.tensor[num_rows:]), "the second trip wrote the tail of rows")

    # without a buffer of the caller's and without probs
    copies = heap.statistics.num_staging_copies
    rows, row_probs = dispatch_tokens(x, plan)
    findings.equal("row_probs without probs", row_probs, None)
    findings.equal("number of rows", rows.shape[0], plan.row_capacity if routing.capacity is not None else num_rows)
    findings.equal("rows in memory of their own", oracle.bits_of(rows[:num_rows]), want_rows)
    findings.check(rows.numel() == 0 or not heap.owns(rows), "rows lie in a lease that nobody holds")
    findings.equal("staging copies", heap.statistics.num_staging_copies, copies + 1)

    # packed, over a plan of its own
    plan = make_plan(topk_idx, **routing.arguments, heap=heap)
    with poisoned_lease(heap, (plan.packed_row_capacity, hidden), x.dtype, name="packed") as buffer:
        with dispatch(x.contiguous(), plan, buffer.tensor, probs.contiguous(), layout="packed") as arrival:
            row_probs = arrival.row_probs
        got = oracle.bits_of(buffer.tensor)
        for place, owner in enumerate(layout.packed[rank]):
            if owner is None:
                findings.check(is_poison(buffer.tensor[place]), f"unused packed row {place} was written")
            else:
                source, token = owner
                findings.equal(f"packed row {place} (of {owner})", got[place], x_bits[source][token])
        findings.check(is_poison(buffer.tensor[num_packed:]), "the tail of packed was written")
        findings.equal("row_probs, packed", oracle.bits_of(row_probs[:num_rows]), want_probs)
        _check_index(plan, layout, rank, findings)
        index = plan.row_to_packed_row[:num_rows].cpu().numpy()
        findings.equal("gathered rows", got[index], want_rows)
        buffer.tensor.view(torch.uint8).fill_(0xFF)
        with dispatch(x.contiguous(), plan, buffer.tensor, layout="packed", gradients=0):
            pass
        used = [place for place, owner in enumerate(layout.packed[rank]) if owner is not None]
        again = oracle.bits_of(buffer.tensor)
        findings.equal("packed rows of the second trip", again[used], got[used])
        unused = [place for place in range(plan.packed_row_capacity) if place not in used]
        findings.check(is_poison(buffer.tensor[unused]), "the second trip wrote packed rows that are nobody's")


def _check_overflow(
    heap: SymmetricHeap, topk_idx: torch.Tensor, routing: routings.Routing, layout: oracle.Layout, findings: Findings
) -> None:
    fullest = int(np.argmax(layout.wanted_rows))
    wanted = f"rank {fullest} is routed {layout.wanted_rows[fullest]} rows, more than capacity ({routing.capacity})"
    try:
        make_plan(topk_idx, **routing.arguments, heap=heap)
        if heap.device.type == "cuda":
            torch.cuda.synchronize()
            heap.check()
    except CapacityError as error:
        findings.equal("the error's text", str(error), wanted)
    else:
        findings.check(False, f"no CapacityError: {wanted}")
    with heap.lease((1 << 16,), torch.uint8) as lease:
        findings.check(is_poison(lease.tensor), "something was moved in spite of the overflow")


def _check_maps(plan: Plan, routing: routings.Routing, layout: oracle.Layout, rank: int, findings: Findings) -> None:
    splits = layout.splits[rank]
    findings.equal("splits", plan.splits, np.array(splits))
    findings.equal("row_start", plan.row_start, np.cumsum([0, *splits]))
    findings.equal("slot_to_row", plan.slot_to_row, layout.slot_to_row[rank])
    findings.equal("slot_to_rank", plan.slot_to_rank, layout.slot_to_rank[rank])
    findings.equal("token_to_primary_row", plan.token_to_primary_row, layout.token_to_primary_row[rank])
    findings.equal("token_to_packed_row", plan.token_to_packed_row, layout.token_to_packed_row[rank])
    findings.equal("source_to_packed_start", plan.source_to_packed_start, np.array(layout.packed_start[rank]))
    findings.equal("expert_load", plan.expert_load, np.array(layout.expert_load))
    findings.equal("num_dropped", plan.num_dropped, np.array([layout.num_dropped]))
    for name in ("splits", "row_start", "slot_to_row", "expert_load", "num_dropped"):
        findings.equal(f"dtype of {name}", getattr(plan, name).dtype, torch.int32)
    if routing.capacity is None:
        findings.equal("num_rows", plan.num_rows, len(layout.rows[rank]))
        findings.equal("row_capacity", plan.row_capacity, max(1, *map(len, layout.rows)))
        findings.equal("packed_row_capacity", plan.packed_row_capacity, max(1, *map(len, layout.packed)))
        findings.equal("expected_rows", plan.expected_rows, plan.row_capacity)
    else:
        findings.equal("num_rows", plan.num_rows, None)
        findings.equal("row_capacity", plan.row_capacity, routing.capacity)
        num_tokens, top_k = routing.topk_idx[rank].shape
        most_tokens = num_tokens if routing.max_tokens is None else routing.max_tokens
        findings.equal("expected_rows", plan.expected_rows, max(1, min(routing.capacity, most_tokens * top_k)))
        findings.check(plan.packed_row_capacity >= len(layout.packed[rank]), "packed rows may not fit their buffer")


def _check_index(plan: Plan, layout: oracle.Layout, rank: int, findings: Findings) -> None:
    num_rows, num_packed = len(layout.rows[rank]), len(layout.packed[rank])
    findings.equal("packed_to_row", plan.packed_to_row[:num_packed], layout.packed_to_row[rank])
    findings.equal("row_to_packed_row", plan.row_to_packed_row[:num_rows], layout.row_to_packed_row[rank])


@routings.RANKS_AND_CASES
def test_dispatch_is_the_oracle_byte_for_byte(cluster, num_ranks: int, device: str, numbers: list[int]):
    assert cluster(num_ranks, device).findings(check_dispatch, numbers, device) == []


def test_the_cases_hold_what_they_promise():
    """Every stratum is there, in more than one dtype and capacity, and shows what it is named for on 4 ranks."""
    assert len(routings.CASES) >= 200
    assert {case.top_k for case in routings.CASES} == set(range(1, 9))
    assert {case.hidden for case in routings.CASES} == set(routings.HIDDEN_SIZES)
    found = dict.fromkeys(("all-masked token", "dropped", "raises", "idle expert", "unused packed row", "2 blocks"), 0)
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
    """The oracle's rule and the level of docs/design.md: min(load, level), what is left to the first ones above."""
    rng = np.random.default_rng(7)
    for _ in range(300):
        loads = rng.integers(0, 12, rng.integers(1, 9)).tolist()
        capacity = int(rng.integers(0, sum(loads) + 3))
        (kept,) = oracle.keep_within([loads], capacity)
        if sum(loads) <= capacity:
            assert kept == loads
            continue
        assert sum(kept) == capacity
        level = max(n for n in range(capacity + 1) if sum(min(load, n) for load in loads) <= capacity)
        left = capacity - sum(min(load, level) for load in loads)
        above = [g for g, load in enumerate(loads) if load > level]
        assert kept == [min(load, level) + (g in above[:left]) for g, load in enumerate(loads)]


def test_the_oracle_imports_nothing_of_the_package():
    with open(oracle.__file__, encoding="utf-8") as file:
        assert not re.search(r"^\s*(import|from)\s+symmoe", file.read(), re.MULTILINE)
