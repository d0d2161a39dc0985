"""A call with exact capacity gets a row budget before its routing is known. Results do not depend on the budget."""

import gc
import itertools
from contextlib import nullcontext
from dataclasses import replace
from unittest import mock

import pytest
import torch
from cluster import run_on
from heap_calls import outcome
from torch.utils.checkpoint import checkpoint
from worker import Findings, free_bytes, open_heap

from symmoe import MoEConfig, MoELayer, SymmetricHeap
from symmoe.errors import HeapExhausted
from symmoe.moe import routed_experts
from symmoe.symm_mem.row_budget import RowBudget, RowHistory

H, I, E, K, CALLS = 16, 24, 8, 3, 12


# -- how many rows ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rows", [1, 7, 100, 65_536, 524_288])
def test_budgets_have_a_margin_and_repeat(rows: int):
    results = set()
    for num_more in range(-(-rows // 200)):
        history = RowHistory()
        history.note(8, rows + num_more, rows // 2)
        budget = history.budget(9, None)
        assert budget.rows >= rows + num_more + rows // 32
        assert budget.rows <= 1.1 * (rows + num_more + 4 * (rows + num_more) ** 0.5) + 2
        assert budget.packed_rows >= rows // 2
        assert rows + num_more <= budget.expected_rows <= 1.125 * (rows + num_more) + 1
        results.add(budget.rows)
    assert len(results) <= 2


def test_a_budget_shrinks_when_routing_does():
    history = RowHistory()
    history.note(8, 10_000, 5_000)
    budgets = []
    for _ in range(200):
        history.note(8, 1_000, 500)
        budgets.append(history.budget(8, None).rows)
    assert budgets[60] >= 10_000
    assert budgets[-1] < 1_300
    assert budgets == sorted(budgets, reverse=True)


def test_the_first_call_measures_and_later_ones_get_no_more_than_the_user_allows():
    history = RowHistory()
    assert history.budget(8, None) is None
    history.note(8, 1_000, 500)
    assert history.budget(8, 1_010).rows == 1_010
    too_much = history.budget(8, 999)
    assert (too_much.rows, too_much.packed_rows, too_much.expected_rows) == (None, None, 1_024)
    assert "1000 rows" in too_much.why_it_waits


def test_a_small_call_gets_a_small_budget_after_a_large_one():
    history = RowHistory()
    history.note(4096, 10_000, 5_000)
    unknown = history.budget(8, None)
    assert (unknown.rows, unknown.expected_rows, unknown.rail_rows) == (None, 10_240, 8)
    history.note(8, 30, 20, 3)
    assert history.budget(8, None).rows < 80
    assert [history.budget(tokens, None).rail_rows for tokens in (8, 15)] == [8, 8]
    assert history.budget(4096, None).rows > 10_000


# -- calls ------------------------------------------------------------------------------------------------------------
def counted_repeats():
    """A context that counts repeated plans of calls, whose budgets were too small."""
    return mock.patch.object(routed_experts, "plan_call", wraps=routed_experts.plan_call)


def make_layers(heap, limit: int | None = None, **options) -> list[MoELayer]:
    """A layer with row budgets of at most `limit`, and the same layer, which waits for each plan."""
    layers = []
    for max_row_budget in (limit, 1):
        torch.manual_seed(heap.rank)
        config = MoEConfig(
            hidden=H,
            ffn=I,
            num_experts=E,
            top_k=K,
            max_row_budget=max_row_budget,
            router=None,
            **options,
        )
        layers.append(MoELayer(config, heap))
    return layers


def make_calls(rank: int, seed: int, count: int = CALLS):
    """x, ids, probs and dy of calls that need more and fewer rows: T differs by rank, and experts are skewed."""
    generator = torch.Generator().manual_seed(seed)
    for number in range(count):
        tokens = torch.randint(0, 5 + 48 // count * number, (8,), generator=generator)[rank]
        skew = torch.randint(
            1, E + 1, (), generator=generator
        )  # tokens choose among so many experts
        rank_generator = torch.Generator().manual_seed(
            int(torch.randint(1 << 30, (), generator=generator)) + rank
        )
        ids = torch.rand(int(tokens), E, generator=rank_generator).argsort(1)[:, :K] % skew
        x = torch.randn(int(tokens), H, generator=rank_generator)
        yield (
            x,
            ids,
            torch.rand(int(tokens), K, generator=rank_generator),
            torch.randn(int(tokens), H, generator=rank_generator),
        )


def few_fit_on_rails(rank: int):
    """In this context a message to another node has room for one token in some of this rank's calls."""
    budget = RowHistory.budget
    calls = itertools.count(rank)

    def limited(*args) -> RowBudget | None:
        row_budget = budget(*args)
        return (
            row_budget
            if row_budget is None or next(calls) % 5
            else replace(row_budget, rail_rows=min(1, row_budget.rail_rows))
        )

    return mock.patch.object(RowHistory, "budget", limited)


def run(layer: MoELayer, call, *, recomputes: bool) -> list[torch.Tensor]:
    x, ids, probs, dy = call
    x = x.clone().requires_grad_()
    probs = probs.clone().requires_grad_()

    def forward(x: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        return layer(x, topk_idx=ids, probs=probs)[0]

    y = checkpoint(forward, x, probs, use_reentrant=False) if recomputes else forward(x, probs)
    return [y.detach(), *torch.autograd.grad(y, (x, probs, *layer.parameters()), dy)]


def without_memory(rank: int, heap: SymmetricHeap):
    """In this context the heap has no memory for budgets on every third rank."""
    return mock.patch.object(type(heap.memory), "lacks", return_value=rank % 3 == 0)


def check_same_bits(
    rank: int,
    num_ranks: int,
    options: dict,
    recomputes: bool,
    ranks_per_node: int | None,
    is_full: bool,
    num_calls: int,
):
    findings = Findings()
    opened = open_heap("cpu", num_bytes=16 << 20, ranks_per_node=ranks_per_node)
    with (
        opened as heap,
        counted_repeats() as spy,
        few_fit_on_rails(rank),
        without_memory(rank, heap) if is_full else nullcontext(),
    ):
        layer, waits = make_layers(heap, **options)
        for number, call in enumerate(make_calls(rank, num_ranks, num_calls)):
            findings.where = f"rank {rank} of {num_ranks}, call {number}"
            findings.same_bits(
                *(run(module, call, recomputes=recomputes) for module in (layer, waits))
            )
        findings.check(heap.leased_bytes == 0, "leases are left")
        return spy.call_count, findings.texts


ONE_NODE = (2, None)
TWO_NODES = (4, 2)
NODES_OF_ONE = (2, 1)
NONE_KEPT = {"stash": "none", "layout": "expert-major"}
OVERLAPPED = {"schedule": "always-overlapped", "order": "slot"}
# is_full: every third rank waits for the routing, and others have budgets, enough or too small.
REPLICAS = {"limit": 100, "balance": "replicas"}
QUICK = [
    ({}, ONE_NODE, False),
    (NONE_KEPT, ONE_NODE, False),
    (OVERLAPPED, NODES_OF_ONE, False),
    ({"limit": 24}, ONE_NODE, False),
    ({**OVERLAPPED, "limit": 200, "stash": "none"}, TWO_NODES, True),
]
SLOW = [
    ({}, TWO_NODES, False),
    (NONE_KEPT, TWO_NODES, False),
    (OVERLAPPED, ONE_NODE, False),
    (OVERLAPPED, TWO_NODES, False),
    ({"limit": 24}, TWO_NODES, False),
    *(
        (options, layout, True)
        for layout in (ONE_NODE, TWO_NODES, (4, 1))
        for options in ({}, {"limit": 24}, REPLICAS)
    ),
]


@pytest.mark.parametrize("recomputes", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("options", "layout", "is_full"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
    ids=str,
)
def test_results_do_not_depend_on_whether_a_call_fits(
    cluster, options, layout, is_full, recomputes
):
    num_calls = CALLS if (options, layout, is_full) in QUICK else 2 * CALLS
    arguments = options, recomputes, layout[1], is_full, num_calls
    results = cluster(layout[0]).run(check_same_bits, *arguments)
    assert [text for _, texts in results for text in texts] == []
    (repeats,) = {count for count, _ in results}  # on all ranks in the same calls
    assert repeats > 2


@pytest.mark.parametrize("layout", [ONE_NODE, TWO_NODES], ids=str)
def test_calls_after_errors_have_the_same_bits(cluster, layout):
    """One rank causes the errors, some of them after its plan: all ranks clear their histories, and continue."""
    assert cluster(layout[0]).findings(fail_at_times, layout[1]) == []


def fail_at_times(rank: int, num_ranks: int, ranks_per_node: int | None) -> list[str]:
    findings = Findings()
    opened = open_heap("cpu", num_bytes=16 << 20, ranks_per_node=ranks_per_node)
    with opened as heap, without_memory(rank, heap):
        layer, waits = make_layers(heap)
        for number, call in enumerate(make_calls(rank, seed=3)):
            (x, ids, probs, _), findings.where = call, f"rank {rank}, call {number}"
            is_culprit = rank == number % num_ranks
            if number % 5 == 4:
                bad = ids.clone()
                if is_culprit:
                    bad = bad.float() if number % 2 else bad[:, :1]
                findings.equal(
                    "error", outcome(layer, x, topk_idx=bad, probs=probs)[0], "ArgumentError"
                )
            if number % 5 == 2:
                bad = torch.full((9, K), E if is_culprit else 0)
                nine = {"topk_idx": bad, "probs": torch.ones(9, K)}
                error, _ = outcome(layer, torch.ones(9, H), **nine)
                findings.equal("error", error, "ExpertIdError")
            if number % 7 == 6:
                error = RuntimeError("an error of the user's, between plan and dispatch")
                fails = mock.patch.object(
                    routed_experts.ExpertParallelMLP, "apply", side_effect=error
                )
                with (
                    pytest.raises(Exception, match="user"),
                    fails if rank == 0 else nullcontext(),
                ):
                    layer(x, topk_idx=ids, probs=probs)
            findings.same_bits(*(run(module, call, recomputes=False) for module in (layer, waits)))
    return findings.texts


@run_on(2)
def test_recomputed_calls_that_do_not_fit_have_the_same_bits(
    rank: int, num_ranks: int, findings: Findings
) -> None:
    """Between forward and backward of a checkpoint, the history has only much smaller calls."""
    with (
        open_heap("cpu", num_bytes=16 << 20) as heap,
        counted_repeats() as spy,
    ):
        layer, waits = make_layers(heap)
        for number, call in enumerate([*make_calls(rank, seed=5)][-4:]):
            x, ids, probs, dy = call
            x = x.clone().requires_grad_()
            y = checkpoint(
                lambda x, ids=ids, p=probs: layer(x, topk_idx=ids, probs=p)[0],
                x,
                use_reentrant=False,
            )
            heap.row_histories.clear()
            heap.row_histories[E, K, 0].note(len(x), 1, 1)
            got = torch.autograd.grad(y, (x, *layer.parameters()), dy)
            _, *expected = run(waits, call, recomputes=False)
            findings.where = f"rank {rank}, call {number}"
            findings.same_bits(got, [expected[0], *expected[2:]])  # no gradient of probs here
        findings.check(heap.leased_bytes == 0, "leases are left")
        assert spy.call_count >= 4


@pytest.mark.parametrize("ranks_per_node", [None, pytest.param(1, marks=pytest.mark.slow)])
@run_on(2)
def test_a_call_with_a_budget_needs_no_more_memory_than_one_without(
    rank: int, num_ranks: int, findings: Findings, ranks_per_node: int | None
) -> None:
    """The last rank has less and less memory: a call fits with a budget if it fits without one, also backward."""
    results = []
    generator = torch.Generator().manual_seed(rank)
    ids = torch.rand(100, E, generator=generator).argsort(1)[:, :K]
    x, dy = (torch.randn(100, H, generator=generator) for _ in range(2))
    call = x, ids, torch.rand(100, K, generator=generator), dy
    with open_heap("cpu", num_bytes=1 << 20, ranks_per_node=ranks_per_node) as heap:
        layer, waits = make_layers(heap, stash="rows")
        is_last = rank == num_ranks - 1
        for num_bytes in range(24 << 10, 96 << 10, 8 << 10):
            findings.where = f"rank {rank}, {num_bytes} bytes"
            expected = run(waits, call, recomputes=False)
            run(layer, call, recomputes=False)  # after an error all measure
            outcomes = []
            for module in (waits, layer):
                gc.collect()  # the memory that an error keeps
                findings.check(heap.leased_bytes == 0, "leases are left")
                with (
                    heap.lease((free_bytes(heap) - num_bytes,), torch.uint8)
                    if is_last
                    else nullcontext()
                ):
                    try:
                        same = map(torch.equal, run(module, call, recomputes=False), expected)
                        outcomes.append("right" if all(same) else "wrong")
                    except HeapExhausted:
                        outcomes.append("exhausted")
            results.append(outcomes[0])
            findings.check(
                outcomes[0] == outcomes[1] != "wrong", f"without and with a budget: {outcomes}"
            )
    assert (results, {*results}) == (sorted(results), {"exhausted", "right"})


@run_on(2)
def test_a_small_call_keeps_few_bytes_after_a_large_one(
    rank: int, num_ranks: int, heap: SymmetricHeap
) -> None:
    """Bytes that a small call keeps for backward at first, and after a large call of another layer of these sizes."""
    (large, small), num_bytes = (make_layers(heap)[0] for _ in range(2)), []

    def call(layer: MoELayer, num_tokens: int) -> int:
        x = torch.randn(num_tokens, H)
        ids = torch.arange(num_tokens * K).view(-1, K) % E
        y, _ = layer(x, topk_idx=ids, probs=torch.ones(num_tokens, K).requires_grad_())
        return heap.leased_bytes * bool(y.requires_grad)

    for _ in range(4):
        alone = call(small, 8)
    for number in range(6):
        if number % 3 == 0:
            call(large, 2048 * (rank + 1))  # ranks have different budgets
        num_bytes.append(call(small, 8))
    assert max(num_bytes) <= alone <= 16 << 10
