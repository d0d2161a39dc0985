"""Combine against the oracle's rounding spec, bit for bit, and the gradients of dispatch and combine."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
import routings
import torch
import torch.distributed as dist
from worker import Findings, is_poison, on_device, open_heap, poison, poisoned_lease

from symmoe import SymmetricHeap, combine_tokens, dispatch_tokens, make_plan
from symmoe.combine.trip import Collection
from symmoe.dispatch.plan import Plan

ORDERS = ("rank", "slot")


def dispatched(
    heap: SymmetricHeap, case: routings.Case, hidden: int
) -> tuple[torch.Tensor, torch.Tensor, Plan, oracle.Layout] | None:
    """x, probs, a plan whose tokens have been dispatched, and the layout; None if the routing is to overflow."""
    routing, rank = case.routing(heap.num_ranks), heap.rank
    ids = torch.from_numpy(routing.topk_idx[rank])
    layout = oracle.lay_out([t.numpy() for t in oracle.gather(ids)], routing.num_experts, capacity=routing.capacity)
    if routing.overflow == "raise" and layout.num_dropped:
        return None
    x = on_device(case.random_rows(case.generator(200 + rank), len(ids), hidden), heap)
    probs = on_device(case.probs(rank, len(ids)), heap)
    plan = make_plan(on_device(ids, heap), **routing.arguments, heap=heap)
    dispatch_tokens(x, plan, probs=probs)
    return x, probs, plan, layout


def check_combine(
    rank: int, num_ranks: int, numbers: list[int], device: str, ranks_per_node: int | None = None
) -> list[str]:
    findings = Findings()
    with open_heap(device, ranks_per_node=ranks_per_node) as heap:
        for number in numbers:
            case = routings.case_on(number, device)
            findings.where = f"rank {rank} of {num_ranks}, {case}"
            try:
                _check_sums(heap, case, case.shape(device), findings)
            except Exception as error:
                raise AssertionError(findings.where) from error
            findings.equal("leased bytes after the sums", heap.leased_bytes, 0)
            for order in ORDERS:
                _check_backward(heap, case, case.shape(device), order, findings)
            findings.equal("leased bytes after the backward pass", heap.leased_bytes, 0)
    return findings.texts


def sum_of_ranks(
    heap: SymmetricHeap, layout: oracle.Layout, out_bits: list[np.ndarray], dtype: torch.dtype
) -> np.ndarray:
    """What order="rank" gives for this rank's tokens; between nodes the sums of nodes."""
    if len(heap.topology.nodes) == 1:
        reduced = [oracle.reduce_primary(layout, r, bits, dtype) for r, bits in enumerate(out_bits)]
        return oracle.sum_ranks(layout, heap.rank, reduced, dtype)
    size = len(heap.topology.ranks)
    nodes = [list(range(first, first + size)) for first in range(0, heap.num_ranks, size)]
    return oracle.sum_nodes(layout, heap.rank, out_bits, nodes, dtype)


def _check_backward(heap: SymmetricHeap, case: routings.Case, hidden: int, order: str, findings: Findings) -> None:
    """The backward of dispatch is combine, the backward of combine is dispatch: bit for bit, in the order asked for."""
    rank = heap.rank
    ready = dispatched(heap, case, hidden)
    if ready is None:
        return
    x, probs, plan, layout = ready
    num_rows = len(layout.rows[rank])
    d_rows = case.random_rows(case.generator(350 + rank), plan.row_capacity, hidden)
    d_bits = [oracle.bits_of(t) for t in oracle.gather(d_rows[:num_rows])]
    if order == "rank":
        want = sum_of_ranks(heap, layout, d_bits, case.dtype)
    else:
        want = oracle.sum_slots(layout, rank, d_bits, case.dtype)
    d_probs = torch.arange(plan.row_capacity).float() + 1000.0 * rank
    rows, row_probs = dispatch_tokens(x.requires_grad_(), plan, probs=probs.requires_grad_(), order=order)
    n = rows.shape[0]
    torch.autograd.backward([rows, row_probs], [on_device(d_rows[:n], heap), on_device(d_probs[:n], heap)])
    findings.equal("leased bytes after backward, with the plan still there", heap.leased_bytes, 0)
    same = oracle.same_numbers(oracle.bits_of(x.grad), want, case.dtype)
    findings.check(same, f"dx of dispatch_tokens, order={order}, differs from the oracle")
    to_rank, to_row = layout.slot_to_rank[rank], layout.slot_to_row[rank]
    want = np.where(to_row >= 0, 1000.0 * to_rank + to_row, 0).astype(np.float32)
    findings.equal(f"dprobs of dispatch_tokens, order={order}", probs.grad, want)

    dy = case.encoded_rows(rank, x.shape[0], hidden)
    want = oracle.expert_major(layout, rank, [oracle.bits_of(t) for t in oracle.gather(dy)])
    expert_out = torch.zeros((n, hidden), dtype=case.dtype, device=heap.device, requires_grad=True)
    combine_tokens(expert_out, plan, order=order).backward(on_device(dy, heap))
    got = oracle.bits_of(expert_out.grad[:num_rows])
    findings.check((got == want).all(), f"the gradient of expert_out, order={order}, differs from the oracle")


def _check_sums(heap: SymmetricHeap, case: routings.Case, hidden: int, findings: Findings) -> None:
    rank = heap.rank
    poison(heap)
    ready = dispatched(heap, case, hidden)
    if ready is None:
        return
    _, _, plan, layout = ready
    num_rows = len(layout.rows[rank])
    expert_out = case.random_rows(case.generator(300 + rank), num_rows, hidden)
    out_bits = [oracle.bits_of(t) for t in oracle.gather(expert_out)]
    want = {
        "slot": oracle.sum_slots(layout, rank, out_bits, case.dtype),
        "rank": sum_of_ranks(heap, layout, out_bits, case.dtype),
    }
    expert_out = on_device(expert_out, heap)
    whole = torch.full((plan.row_capacity, hidden), float("nan"), dtype=case.dtype, device=heap.device)
    whole[:num_rows] = expert_out
    for order in ORDERS:
        with poisoned_lease(heap, (plan.row_capacity, hidden), case.dtype, name="expert output") as lease:
            rows = lease.tensor
            rows[:num_rows] = expert_out
            copies, version = heap.statistics.num_staging_copies, rows._version
            y = combine_tokens(rows, plan, order=order)
            same = oracle.same_numbers(oracle.bits_of(y), want[order], case.dtype)
            findings.check(same, f"y of order={order} differs from the oracle")
            left = oracle.bits_of(rows[:num_rows])
            findings.check((left == out_bits[rank]).all(), f"order={order} wrote rows")
            findings.check(is_poison(rows[num_rows:]), f"order={order} wrote the tail")
            findings.equal("staging copies in place", heap.statistics.num_staging_copies, copies)
            findings.equal(f"version after order={order}", rows._version, version)
        # an ordinary tensor, of the visible size and of the whole capacity, and strided ones, elsewhere and on the heap
        visible = whole if plan.num_rows is None else whole[:num_rows]
        strided = torch.stack([visible, visible], -1)[..., 1]
        wide = heap.lease((visible.shape[0], 2 * hidden), case.dtype, name="twice as wide")
        narrow = wide.tensor[:, hidden:]
        narrow.copy_(visible)
        shifted = wide.tensor.view(-1)[1 : 1 + visible.numel()].view_as(visible)  # on the heap, at an odd address
        for ordinary in ((visible, narrow), (whole, strided), (shifted,))[case.number % 3]:
            if ordinary is shifted:
                shifted.copy_(visible)
            before = oracle.bits_of(ordinary).copy()
            staged = combine_tokens(ordinary, plan, order=order)
            same = oracle.same_numbers(oracle.bits_of(staged), oracle.bits_of(y), case.dtype)
            findings.check(same, f"order={order} gives other bits when it has to stage")
            findings.check((oracle.bits_of(ordinary) == before).all(), "an ordinary tensor was overwritten")
            # Nothing is copied of an empty tensor, nor of a single row on the heap.
            pushes = order == "rank" and heap.nodes is None
            in_place = (pushes or heap.owns(ordinary)) and ordinary.is_contiguous()
            copies += ordinary.numel() > 0 and not (in_place and ordinary.data_ptr() % 16 == 0)
        findings.equal("staging copies", heap.statistics.num_staging_copies, copies)
        del ordinary, narrow, shifted
        wide.release()
    _check_values(plan, layout, rank, findings)


def _check_values(plan: Plan, layout: oracle.Layout, rank: int, findings: Findings) -> None:
    """One fp32 value per row comes home to its slot: the way of the probs' gradient."""
    values = torch.full((plan.row_capacity,), float("nan"), device=plan.heap.device)
    encoded = [1000.0 * rank + row for row in range(len(layout.rows[rank]))]
    values[: len(encoded)] = torch.tensor(encoded, device=values.device)
    with plan.heap.lease((plan.row_capacity, 8), torch.float32) as lease:
        lease.tensor.zero_()
        with Collection(lease.tensor, plan, order="slot", row_values=values) as collection:
            collection.collect()
        got = collection.values
    to_rank, to_row = layout.slot_to_rank[rank], layout.slot_to_row[rank]
    findings.equal("values", got, np.where(to_row >= 0, 1000.0 * to_rank + to_row, 0).astype(np.float32))


def _check_adjoint(heap: SymmetricHeap, case: routings.Case, hidden: int, findings: Findings) -> None:
    """<dispatch(x), g> = <x, combine(g)> over the group, exactly: small integers, whose sums no dtype rounds."""
    rank, routing = heap.rank, case.routing(heap.num_ranks)
    ids = torch.from_numpy(routing.topk_idx[rank])
    rng = case.generator(400 + rank)
    x = torch.from_numpy(rng.integers(-8, 9, (len(ids), hidden))).to(heap.device, case.dtype)
    plan = make_plan(on_device(ids, heap), num_experts=routing.num_experts, heap=heap)
    rows, _ = dispatch_tokens(x, plan)
    g = torch.from_numpy(rng.integers(-8, 9, (plan.num_rows, hidden))).to(heap.device, case.dtype)
    for order in ORDERS:
        y = combine_tokens(g, plan, order=order)
        products = torch.stack([(rows.double() * g).sum(), (x.double() * y).sum()]).cpu()
        dist.all_reduce(products)
        findings.equal(f"<x, combine(g)>, order={order}", float(products[1]), float(products[0]))


def check_stale_use(rank: int, num_ranks: int) -> list[str]:
    """Combine writes into no rows that autograd has saved."""
    findings = Findings()
    findings.where = f"rank {rank}"
    with open_heap("cpu") as heap:
        ids = torch.tensor([[0, 1], [1, 0], [0, 1]])
        plan = make_plan(ids, num_experts=2 * num_ranks, heap=heap)
        dispatch_tokens(torch.ones(3, 8), plan)
        for order in ORDERS:
            factor = torch.ones((), requires_grad=True)
            with heap.lease((plan.row_capacity, 8), torch.float32) as lease:
                lease.tensor.fill_(1.0)
                product = factor * lease.tensor  # backward wants the lease's contents
                combine_tokens(lease.tensor, plan, order=order)
                product.sum().backward()
                findings.equal(f"gradient after order={order}", float(factor.grad), float(lease.tensor.numel()))
        # Another lease is another tensor: writing to it leaves this one's version alone.
        with heap.lease((4,), torch.float32) as one, heap.lease((4,), torch.float32) as other:
            version = one.tensor._version
            other.tensor.zero_()
            findings.equal("version of a lease after a write to its neighbour", one.tensor._version, version)
    return findings.texts


@routings.RANKS_AND_CASES
def test_sums_are_the_oracle_bit_for_bit(cluster, num_ranks: int, device: str, numbers: list[int]):
    assert cluster(num_ranks, device).findings(check_combine, numbers, device) == []


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_autograd_refuses_rows_that_combine_overwrote(cluster, num_ranks: int):
    assert cluster(num_ranks).findings(check_stale_use) == []
