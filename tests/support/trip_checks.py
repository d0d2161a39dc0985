"""What plan, dispatch and combine make of a routing, against the oracle."""

from collections.abc import Callable

import numpy as np
import oracle
import routings
import torch
import torch.distributed as dist
from heap_calls import outcome
from worker import Findings, is_unwritten, on_device, open_heap

from symmoe import SymmetricHeap, combine_tokens, dispatch_tokens, make_plan
from symmoe.combine.trip import CombineTrip
from symmoe.dispatch.plan import DispatchHandle, Plan, ReceivedIndex
from symmoe.dispatch.trip import dispatch
from symmoe.program.builder import fill

ORDERS = ("rank", "slot")


def check_cases(
    rank,
    num_ranks,
    findings: Findings,
    numbers: list[int],
    device: str,
    check: Callable,
    ranks_per_node=None,
) -> None:
    """Of the cases with these numbers."""
    with open_heap(device, ranks_per_node=ranks_per_node) as heap:
        for number in numbers:
            case = routings.case_on(number, device)
            findings.where = f"rank {rank} of {num_ranks}, {case}"
            try:
                check(heap, case, findings)
            except Exception as error:
                raise AssertionError(findings.where) from error
            findings.equal("leased bytes after the case", heap.leased_bytes, 0)


def check_combine(heap: SymmetricHeap, case: routings.Case, findings: Findings) -> None:
    """Sums in both orders, and both backward passes, over one plan."""
    ready = dispatched(heap, case)
    if ready is None:
        return
    _check_sums(case, ready, findings)
    for order in ORDERS:
        _check_gradients(case, ready, order, findings)


def check_dispatch(heap: SymmetricHeap, case: routings.Case, findings: Findings) -> None:
    """The plan, rows, slots and probs in both layouts."""
    routing, rank = case.routing(heap.num_ranks), heap.rank
    ids = torch.from_numpy(routing.topk_idx[rank])
    hidden = case.shape(heap.device.type)
    x = case.encoded_rows(rank, len(ids), hidden)
    probs = case.probs(rank, len(ids))
    # From here on the oracle knows what the collectives say, not what the generator says.
    all_ids = [ids.numpy() for ids in oracle.gather(ids)]
    x_bits = [oracle.bits_of(t) for t in oracle.gather(x)]
    all_probs = [t.numpy() for t in oracle.gather(probs)]
    layout = oracle.lay_out(all_ids, routing.num_experts, capacity=routing.capacity)

    topk_idx = on_device(ids.int() if case.number % 2 else ids, heap)
    x = on_device(x, heap)
    probs = on_device(probs, heap)
    if case.number % 3 == 0:  # strided inputs
        topk_idx, x, probs = (torch.stack([t, t], -1)[..., 0] for t in (topk_idx, x, probs))
    if routing.overflow == "raise" and layout.num_dropped:
        _check_overflow(heap, topk_idx, routing, layout, findings)
        return

    plan = make_plan(topk_idx, **routing.arguments, heap=heap, hidden=hidden, dtype=x.dtype)
    _check_maps(plan, routing, layout, rank, findings)
    num_rows = len(layout.rows[rank])
    num_packed = len(layout.packed[rank])
    want_rows = oracle.expert_major(layout, rank, x_bits)
    want_probs = oracle.row_probs(layout, rank, all_probs).view(np.uint32)

    # expert-major, with a neighbour on either side that must stay as it is
    with (
        heap.lease((16,), torch.int32, name="below") as below,
        heap.lease((plan.row_capacity, hidden), x.dtype, name="rows") as buffer,
        heap.lease((16,), torch.int32, name="above") as above,
    ):
        rows, row_probs, handle = dispatch_tokens(x, plan, probs=probs, out=buffer.tensor)
        visible = plan.row_capacity if routing.capacity is not None else num_rows
        findings.equal("number of rows", rows.shape[0], visible)
        findings.check(
            rows.data_ptr() == buffer.tensor.data_ptr() or not visible, "rows are not in `out`"
        )
        findings.equal("rows", oracle.bits_of(buffer.tensor[:num_rows]), want_rows)
        findings.check(is_unwritten(buffer.tensor[num_rows:]), "the tail of rows was written")
        findings.check(
            is_unwritten(below.tensor) and is_unwritten(above.tensor),
            "a neighbouring lease was written",
        )
        findings.equal("row_probs", oracle.bits_of(row_probs[:num_rows]), want_probs)
        _check_index(handle.received_index, layout, rank, findings)

        # once more over the same plan, rows alone: the trip of backward
        fill(buffer.tensor)
        index = handle.received_index
        with dispatch(x.contiguous(), plan, buffer.tensor, layout="expert-major", index=index):
            pass
        findings.equal(
            "rows of the second trip", oracle.bits_of(buffer.tensor[:num_rows]), want_rows
        )
        findings.check(
            is_unwritten(buffer.tensor[num_rows:]), "the second trip wrote the tail of rows"
        )

    # without a buffer of the caller's and without probs
    copies = heap.statistics.num_staging_copies
    rows, row_probs, _ = dispatch_tokens(x, plan)
    findings.equal("row_probs without probs", row_probs, None)
    findings.equal(
        "number of rows",
        rows.shape[0],
        plan.row_capacity if routing.capacity is not None else num_rows,
    )
    findings.equal("rows in memory of their own", oracle.bits_of(rows[:num_rows]), want_rows)
    findings.check(
        rows.numel() == 0 or not heap.owns(rows), "rows lie in a lease that nobody holds"
    )
    findings.equal("staging copies", heap.statistics.num_staging_copies, copies + 1)

    # packed, over a plan of its own
    plan = make_plan(topk_idx, **routing.arguments, heap=heap)
    with heap.lease((plan.packed_row_capacity, hidden), x.dtype, name="packed") as buffer:
        with dispatch(
            x.contiguous(), plan, buffer.tensor, probs.contiguous(), layout="packed"
        ) as arrival:
            row_probs = arrival.row_probs
            index = arrival.index
        got = oracle.bits_of(buffer.tensor)
        for packed_row, owner in enumerate(layout.packed[rank]):
            if owner is None:
                findings.check(
                    is_unwritten(buffer.tensor[packed_row]),
                    f"unused packed row {packed_row} was written",
                )
            else:
                source, token = owner
                findings.equal(
                    f"packed row {packed_row} (of {owner})", got[packed_row], x_bits[source][token]
                )
        findings.check(is_unwritten(buffer.tensor[num_packed:]), "the tail of packed was written")
        findings.equal("row_probs, packed", oracle.bits_of(row_probs[:num_rows]), want_probs)
        _check_index(index, layout, rank, findings)
        findings.equal(
            "gathered rows", got[index.row_to_packed_row[:num_rows].cpu().numpy()], want_rows
        )
        fill(buffer.tensor)
        with dispatch(x.contiguous(), plan, buffer.tensor, layout="packed", index=index):
            pass
        used = [
            packed_row for packed_row, owner in enumerate(layout.packed[rank]) if owner is not None
        ]
        findings.equal(
            "packed rows of the second trip", oracle.bits_of(buffer.tensor)[used], got[used]
        )
        unused = [
            packed_row for packed_row in range(plan.packed_row_capacity) if packed_row not in used
        ]
        findings.check(
            is_unwritten(buffer.tensor[unused]),
            "the second trip wrote packed rows that are nobody's",
        )


def _check_overflow(
    heap: SymmetricHeap,
    topk_idx: torch.Tensor,
    routing: routings.Routing,
    layout: oracle.Layout,
    findings: Findings,
) -> None:
    fullest = int(np.argmax(layout.wanted_rows))
    message = f"rank {fullest} is routed {layout.wanted_rows[fullest]} rows, more than capacity ({routing.capacity})"
    error = outcome(make_plan, topk_idx, **routing.arguments, heap=heap)
    if heap.device.type == "cuda" and error == ("", ""):
        error = outcome(heap.synchronize)
    findings.equal("the error", error, ("CapacityError", message))


def check_maps(plan: Plan, layout: oracle.Layout, rank: int, findings: Findings) -> None:
    """The maps of a plan's rows equal the oracle's."""
    splits = layout.splits[rank]
    expected = {
        "splits": np.array(splits),
        "row_start": np.cumsum([0, *splits]),
        "slot_to_row": layout.slot_to_row[rank],
        "slot_to_rank": layout.slot_to_rank[rank],
        "token_to_primary_row": layout.token_to_primary_row[rank],
        "token_to_packed_row": layout.token_to_packed_row[rank],
        "source_to_packed_start": np.array(layout.packed_start[rank]),
        "expert_load": np.array(layout.expert_load),
        "num_dropped": np.array([layout.num_dropped]),
    }
    for name, want in expected.items():
        findings.equal(name, getattr(plan, name), want)
    for name in ("splits", "row_start", "slot_to_row", "expert_load", "num_dropped"):
        findings.equal(f"dtype of {name}", getattr(plan, name).dtype, torch.int32)


def _check_maps(
    plan: Plan, routing: routings.Routing, layout: oracle.Layout, rank: int, findings: Findings
) -> None:
    check_maps(plan, layout, rank, findings)
    if routing.capacity is None:
        most_rows = max(1, *map(len, layout.rows))
        expected = {
            "num_rows": len(layout.rows[rank]),
            "row_capacity": most_rows,
            "packed_row_capacity": max(1, *map(len, layout.packed)),
            "expected_rows": about(most_rows),
        }
    else:
        num_tokens, top_k = routing.topk_idx[rank].shape
        most_tokens = num_tokens if routing.max_tokens is None else routing.max_tokens
        expected = {
            "num_rows": None,
            "row_capacity": routing.capacity,
            "expected_rows": about(max(1, min(routing.capacity, most_tokens * top_k))),
        }
        findings.check(
            plan.packed_row_capacity >= len(layout.packed[rank]),
            "packed rows may not fit their buffer",
        )
    for name, want in expected.items():
        findings.equal(name, getattr(plan, name), want)


def about(num_rows: int) -> int:
    """The least number with four significant bits that is not below."""
    steps = (step for step in (1 << bit for bit in range(40)) if num_rows <= 16 * step)
    return -(-num_rows // (step := next(steps))) * step


def _check_index(
    index: ReceivedIndex, layout: oracle.Layout, rank: int, findings: Findings
) -> None:
    num_packed = len(layout.packed[rank])
    findings.equal("packed_to_row", index.packed_to_row[:num_packed], layout.packed_to_row[rank])
    want = np.zeros(
        len(index.row_to_packed_row), np.int64
    )  # in the tail, by which a backward gathers, too
    want[: len(layout.rows[rank])] = layout.row_to_packed_row[rank]
    findings.equal("row_to_packed_row", index.row_to_packed_row, want)


Dispatched = tuple[torch.Tensor, torch.Tensor, DispatchHandle, oracle.Layout]


def dispatched(heap: SymmetricHeap, case: routings.Case) -> Dispatched | None:
    """x, probs, the handle of their dispatch, and the layout; None if the routing is to overflow."""
    routing, rank, hidden = case.routing(heap.num_ranks), heap.rank, case.shape(heap.device.type)
    ids = torch.from_numpy(routing.topk_idx[rank])
    layout = oracle.lay_out(
        [t.numpy() for t in oracle.gather(ids)], routing.num_experts, capacity=routing.capacity
    )
    if routing.overflow == "raise" and layout.num_dropped:
        return None
    x = on_device(case.random_rows(case.generator(200 + rank), len(ids), hidden), heap)
    probs = on_device(case.probs(rank, len(ids)), heap)
    plan = make_plan(on_device(ids, heap), **routing.arguments, heap=heap)
    with heap.lease((plan.row_capacity, hidden), x.dtype) as lease:
        out = lease.tensor if case.number % 2 else None
        *_, handle = dispatch_tokens(x, plan, probs=probs, out=out)
    return x, probs, handle, layout


def sum_of_ranks(
    heap, layout: oracle.Layout, out_bits: list[np.ndarray], dtype: torch.dtype
) -> np.ndarray:
    """The expected result of order="rank" for this rank's tokens; between nodes the sums of nodes."""
    if len(heap.topology.nodes) == 1:
        reduced = [oracle.reduce_primary(layout, r, bits, dtype) for r, bits in enumerate(out_bits)]
        return oracle.sum_ranks(layout, heap.rank, reduced, dtype)
    size = len(heap.topology.ranks)
    nodes = [list(range(first, first + size)) for first in range(0, heap.num_ranks, size)]
    return oracle.sum_nodes(layout, heap.rank, out_bits, nodes, dtype)


def _check_gradients(
    case: routings.Case, ready: Dispatched, order: str, findings: Findings
) -> None:
    """The backward of dispatch is combine, the backward of combine is dispatch: bit for bit, in the order asked for."""
    x, probs = (tensor.clone().requires_grad_() for tensor in ready[:2])
    _, _, handle, layout = ready
    plan, hidden = handle.plan, x.shape[1]
    heap, rank = plan.heap, plan.heap.rank
    num_rows = len(layout.rows[rank])
    d_rows = case.random_rows(case.generator(350 + rank), plan.row_capacity, hidden)
    d_bits = [oracle.bits_of(t) for t in oracle.gather(d_rows[:num_rows])]
    if order == "rank":
        want = sum_of_ranks(heap, layout, d_bits, case.dtype)
    else:
        want = oracle.sum_slots(layout, rank, d_bits, case.dtype)
    d_probs = torch.arange(plan.row_capacity).float() + 1000.0 * rank
    rows, row_probs, handle = dispatch_tokens(x, plan, probs=probs, order=order)
    n = rows.shape[0]
    torch.autograd.backward(
        [rows, row_probs], [on_device(d_rows[:n], heap), on_device(d_probs[:n], heap)]
    )
    findings.equal("leased bytes after backward, with the plan still there", heap.leased_bytes, 0)
    same = oracle.same_numbers(oracle.bits_of(x.grad), want, case.dtype)
    findings.check(same, f"dx of dispatch_tokens, order={order}, differs from the oracle")
    to_row = layout.slot_to_row[rank]
    want = np.where(to_row >= 0, 1000.0 * layout.slot_to_rank[rank] + to_row, 0).astype(np.float32)
    findings.equal(f"dprobs of dispatch_tokens, order={order}", probs.grad, want)

    dy = case.encoded_rows(rank, x.shape[0], hidden)
    want = oracle.expert_major(layout, rank, [oracle.bits_of(t) for t in oracle.gather(dy)])
    expert_out = torch.zeros((n, hidden), dtype=case.dtype, device=heap.device, requires_grad=True)
    combine_tokens(expert_out, handle, order=order).backward(on_device(dy, heap))
    got = oracle.bits_of(expert_out.grad[:num_rows])
    findings.check(
        (got == want).all(), f"the gradient of expert_out, order={order}, differs from the oracle"
    )


def _check_sums(case: routings.Case, ready: Dispatched, findings: Findings) -> None:
    x, _, handle, layout = ready
    plan, hidden = handle.plan, x.shape[1]
    heap, rank = plan.heap, plan.heap.rank
    num_rows = len(layout.rows[rank])
    expert_out = case.random_rows(case.generator(300 + rank), num_rows, hidden)
    out_bits = [oracle.bits_of(t) for t in oracle.gather(expert_out)]
    want = {
        "slot": oracle.sum_slots(layout, rank, out_bits, case.dtype),
        "rank": sum_of_ranks(heap, layout, out_bits, case.dtype),
    }
    expert_out = on_device(expert_out, heap)
    padded = torch.full(
        (plan.row_capacity, hidden), float("nan"), dtype=case.dtype, device=heap.device
    )
    padded[:num_rows] = expert_out
    for order in ORDERS:
        with heap.lease((plan.row_capacity, hidden), case.dtype, name="expert output") as lease:
            rows = lease.tensor
            rows[:num_rows] = expert_out
            copies, version = heap.statistics.num_staging_copies, rows._version
            y = combine_tokens(rows, handle, order=order)
            same = oracle.same_numbers(oracle.bits_of(y), want[order], case.dtype)
            findings.check(same, f"y of order={order} differs from the oracle")
            row_bits = oracle.bits_of(rows[:num_rows])
            findings.check((row_bits == out_bits[rank]).all(), f"order={order} wrote rows")
            findings.check(is_unwritten(rows[num_rows:]), f"order={order} wrote the tail")
            findings.equal("staging copies in place", heap.statistics.num_staging_copies, copies)
            findings.equal(f"version after order={order}", rows._version, version)
        # an ordinary tensor, of the visible size and of the whole capacity, and strided ones, elsewhere and on the heap
        visible = padded if plan.num_rows is None else padded[:num_rows]
        strided = torch.stack([visible, visible], -1)[..., 1]
        wide = heap.lease((visible.shape[0], 2 * hidden), case.dtype, name="twice as wide")
        narrow = wide.tensor[:, hidden:]
        narrow.copy_(visible)
        shifted = wide.tensor.view(-1)[1 : 1 + visible.numel()].view_as(
            visible
        )  # on the heap, at an odd address
        for ordinary in ((visible, narrow), (padded, strided), (shifted,))[case.number % 3]:
            if ordinary is shifted:
                shifted.copy_(visible)
            before = oracle.bits_of(ordinary).copy()
            staged = combine_tokens(ordinary, handle, order=order)
            same = oracle.same_numbers(oracle.bits_of(staged), oracle.bits_of(y), case.dtype)
            findings.check(same, f"order={order} gives other bits when it has to stage")
            findings.check(
                (oracle.bits_of(ordinary) == before).all(), "an ordinary tensor was overwritten"
            )
            # Nothing is copied of an empty tensor, nor of a single row on the heap.
            pushes = order == "rank" and heap.nodes is None
            in_place = (pushes or heap.owns(ordinary)) and ordinary.is_contiguous()
            copies += ordinary.numel() > 0 and not (in_place and ordinary.data_ptr() % 16 == 0)
        findings.equal("staging copies", heap.statistics.num_staging_copies, copies)
        del ordinary, narrow, shifted
        wide.release()
    _check_values(handle, layout, rank, findings)


def _check_values(
    handle: DispatchHandle, layout: oracle.Layout, rank: int, findings: Findings
) -> None:
    """One fp32 value per row comes home to its slot: the way of the probs' gradient."""
    plan = handle.plan
    values = torch.full((plan.row_capacity,), float("nan"), device=plan.heap.device)
    encoded = [1000.0 * rank + row for row in range(len(layout.rows[rank]))]
    values[: len(encoded)] = torch.tensor(encoded, device=values.device)
    with plan.heap.lease((plan.row_capacity, 8), torch.float32) as lease:
        lease.tensor.zero_()
        with CombineTrip(lease.tensor, *handle, order="slot", row_values=values) as collection:
            collection.collect()
        got = collection.values
    to_row = layout.slot_to_row[rank]
    findings.equal(
        "values",
        got,
        np.where(to_row >= 0, 1000.0 * layout.slot_to_rank[rank] + to_row, 0).astype(np.float32),
    )


def check_adjoint(
    heap: SymmetricHeap, case: routings.Case, hidden: int, findings: Findings
) -> None:
    """<dispatch(x), g> = <x, combine(g)> over the group, exactly: small integers, whose sums no dtype rounds."""
    rank, routing = heap.rank, case.routing(heap.num_ranks)
    ids = torch.from_numpy(routing.topk_idx[rank])
    rng = case.generator(400 + rank)
    x = torch.from_numpy(rng.integers(-8, 9, (len(ids), hidden))).to(heap.device, case.dtype)
    plan = make_plan(on_device(ids, heap), num_experts=routing.num_experts, heap=heap)
    rows, _, handle = dispatch_tokens(x, plan)
    g = torch.from_numpy(rng.integers(-8, 9, (plan.num_rows, hidden))).to(heap.device, case.dtype)
    for order in ORDERS:
        y = combine_tokens(g, handle, order=order)
        products = torch.stack([(rows.double() * g).sum(), (x.double() * y).sum()]).cpu()
        dist.all_reduce(products)
        findings.equal(f"<x, combine(g)>, order={order}", float(products[1]), float(products[0]))
