"""One expert-parallel step in every way, and its public parts, against the float64 oracle."""

import contextlib
import math
from collections.abc import Iterator

import oracle
import routings
import torch
from layers import GPU_I, WAYS, I, global_weights, local_part
from worker import Findings, experts_of, is_unwritten, mlp_with_budget

from symmoe import GroupedMLP, SymmetricHeap, combine_tokens, dispatch_tokens, make_plan
from symmoe.dispatch.plan import Plan
from symmoe.moe.ep_step import expert_parallel_mlp

# Of the largest wanted value. fp32: sums of two dozen products. bf16: h, a, rows and y are each rounded to 2^-9,
# and the gradients go through as many roundings again.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}
GPU_SUMS = math.sqrt(GPU_I / I)  # the rounding of fp32 sums grows with the root of their length
WITH_ROOM = tuple({"with room": options} for options in (WAYS[0], WAYS[-1]))  # with exact capacity


def compare(
    findings: Findings,
    name: str,
    got: torch.Tensor,
    want: torch.Tensor,
    dtype,
    *,
    num_terms: int = 0,
) -> None:
    """Notes a tensor that is further from the oracle than the dtype explains. num_terms: that a number is the sum of,
    each about 1/2. Such sums are of any size, and where they cancel, they are no more exact for it; a single one cannot
    say of what size they mostly are."""
    scale = max(float(want.abs().max()) if want.numel() else 0.0, 0.5 * math.sqrt(num_terms), 0.1)
    tolerance = TOLERANCE[dtype] * (GPU_SUMS if got.is_cuda and dtype == torch.float32 else 1.0)
    findings.close(name, got, want, rtol=0.0, atol=tolerance * scale)


@contextlib.contextmanager
def in_parts(
    x: torch.Tensor,
    probs: torch.Tensor,
    experts: GroupedMLP,
    plan: Plan,
    order: str,
    num_rows: int,
    findings: Findings,
) -> Iterator[torch.Tensor]:
    """y of dispatch_tokens, the experts and combine_tokens, in leases; at the end their tails must be untouched."""
    names = ("rows", "expert output", "gradient of the output", "gradient of the rows")
    with contextlib.ExitStack() as stack:
        shape = (plan.row_capacity, x.shape[1])
        leases = [stack.enter_context(plan.heap.lease(shape, x.dtype, name=name)) for name in names]
        rows_out, out, d_out, d_rows = (lease.tensor for lease in leases)
        rows, row_probs, handle = dispatch_tokens(x, plan, probs=probs, out=rows_out, order=order)
        n = rows.shape[0]
        expert_out = experts(rows, plan.splits, row_probs, out=out[:n], grad_input_out=d_rows[:n])
        yield combine_tokens(expert_out, handle, order=order, grad_out=d_out[:n])
        for lease in leases:
            findings.check(
                is_unwritten(lease.tensor[num_rows:]), f"the tail of '{lease.name}' was written"
            )
        del rows, expert_out


def check_mlp(
    heap: SymmetricHeap, case: routings.Case, sizes: tuple[int, int], dtype, findings: Findings
) -> None:
    """Notes what differs in one case; sizes: hidden and ffn. The orders of sums take turns: by number, and by the case
    of a stratum."""
    rank, (hidden, ffn), routing = heap.rank, sizes, case.routing(heap.num_ranks)
    ids = torch.from_numpy(routing.topk_idx[rank])
    all_ids = oracle.gather(ids)
    layout = oracle.lay_out(
        [t.numpy() for t in all_ids], routing.num_experts, capacity=routing.capacity
    )
    if routing.overflow == "raise" and layout.num_dropped:
        return
    weights = global_weights(routing.num_experts, hidden, ffn, dtype)
    rng = case.generator(600 + rank)
    x, dy = (torch.from_numpy(rng.standard_normal((len(ids), hidden))).to(dtype) for _ in range(2))
    probs = case.probs(rank, len(ids))
    want = oracle.dense_moe(
        layout, all_ids, oracle.gather(x), oracle.gather(probs), weights, oracle.gather(dy)
    )

    x = x.to(heap.device).requires_grad_()
    probs = probs.to(heap.device).requires_grad_()
    experts = experts_of(*local_part(weights, heap))
    leaves = x, probs, experts.fc1.weight, experts.fc2.weight
    where = findings.where
    first = None
    is_of_a_layer = routing.capacity is None and ids.shape[1] <= routing.num_experts
    ways = *WAYS, *(WITH_ROOM if is_of_a_layer else ()), "parts"
    order = ("rank", "slot")[(case.number + case.number // len(routings.STRATA)) % 2]
    for options in ways:
        findings.where = f"{where}, order={order}, {options}"
        if options in WITH_ROOM:
            arguments = {"num_experts": routing.num_experts, "order": order, **options["with room"]}
            y = mlp_with_budget(heap, ids.to(heap.device), x, probs, experts, **arguments)
            step = contextlib.nullcontext(y)
        else:
            plan = make_plan(ids.to(heap.device), **routing.arguments, heap=heap)
            if options == "parts":
                step = in_parts(x, probs, experts, plan, order, len(layout.rows[rank]), findings)
            else:
                step = contextlib.nullcontext(
                    expert_parallel_mlp(x, probs, experts, plan, order=order, **options)
                )
        with step as y:
            actual = [y.detach(), *torch.autograd.grad(y, leaves, dy.to(heap.device))]
            del y
        del step
        findings.equal("leased bytes", heap.leased_bytes, 0)
        if options in (*WAYS[1:], *WITH_ROOM):
            findings.same_bits(actual, first, f"other bits than with {WAYS[0]}")
            continue
        first = actual if options == WAYS[0] else first
        y, dx, dprobs, dw1, dw2 = actual
        local = slice(rank * len(dw1), (rank + 1) * len(dw1))
        compare(findings, "y", y, want.y[rank], dtype)
        compare(findings, "dx", dx, want.dx[rank], dtype)
        compare(findings, "dprobs", dprobs, want.dprobs[rank], dtype, num_terms=ffn)
        compare(findings, "dw1", dw1, want.dweights[0][local], dtype)
        compare(findings, "dw2", dw2, want.dweights[1][local], dtype)
        # What has no row has no gradient at all, not a small one.
        nowhere = torch.from_numpy(layout.slot_to_row[rank] < 0)
        findings.check(not dprobs.cpu()[nowhere].any(), "a slot without a row has a gradient")
        for g, count in enumerate(layout.splits[rank]):
            findings.equal(f"expert {g} has a gradient", bool(dw1[g].any()), count > 0)
