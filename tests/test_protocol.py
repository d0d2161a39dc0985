"""Ranks that are out of step, disagree or fail: the same typed error everywhere, and the next correct call is right."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from test_heap import round_trip
from worker import Findings, open_heap

from symmoe import GroupedMLP, MoEConfig, MoELayer, SymmetricHeap, combine_tokens, dispatch_tokens, make_plan
from symmoe.errors import ConfigMismatch, HeapExhausted, PeerTimeout, SymmoeError

T, K, H = 12, 2, 16


def attempt(heap: SymmetricHeap, call: Callable[[], object]) -> tuple[str, str]:
    """(class, text) of what the call raises on this rank, at the latest when the rank waits for its stream."""
    try:
        call()
        heap.synchronize()
    except SymmoeError as error:
        return type(error).__name__, str(error)
    return "", ""


def tokens(heap: SymmetricHeap, hidden: int = H, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(T, hidden, device=heap.device).to(dtype)


def new_plan(heap: SymmetricHeap, **kwargs):
    ids = (torch.arange(T)[:, None] + torch.tensor([0, 1])) % (2 * heap.num_ranks)
    return make_plan(ids.to(heap.device), num_experts=2 * heap.num_ranks, heap=heap, **kwargs)


def check_disagreement(rank: int, num_ranks: int, device: str) -> list[str]:
    findings = Findings()
    last = rank == num_ranks - 1
    with open_heap(device) as heap:
        findings.check(round_trip(heap), "the first call is wrong")

        def hidden() -> None:
            # A neighbour of the receive buffers: rows that are too long must not reach it.
            plan = new_plan(heap)
            with heap.lease((512,), torch.int32, name="neighbour") as lease:
                lease.tensor.fill_(7)
                try:
                    dispatch_tokens(tokens(heap, 4 * H if last else H), plan)
                    heap.synchronize()
                finally:
                    findings.check(bool((lease.tensor == 7).all()), "a neighbour was overwritten")

        def dtype() -> None:
            dispatch_tokens(tokens(heap, dtype=torch.bfloat16 if last else torch.float32), new_plan(heap))

        def probs() -> None:
            weights = torch.rand(T, K, device=heap.device)
            dispatch_tokens(tokens(heap), new_plan(heap), probs=weights if last else None)

        def order() -> None:
            plan = new_plan(heap)
            rows, _ = dispatch_tokens(tokens(heap), plan)
            combine_tokens(rows, plan, order="rank" if last else "slot")

        def another_call() -> None:
            plan = new_plan(heap)
            rows, _ = dispatch_tokens(tokens(heap), plan)
            if last:
                new_plan(heap)
            else:
                combine_tokens(rows, plan)

        def layout() -> None:
            different(layout="expert-major" if last else "packed")

        def schedule() -> None:
            different(schedule="overlapped" if last else "serial")

        def buffers() -> None:
            plan = new_plan(heap)
            with heap.lease((plan.row_capacity, H), torch.float32, name="rows") as rows:
                dispatch_tokens(tokens(heap), plan, out=rows.tensor if last else None)

        def different(**options: str) -> None:
            # Rows in another layout would land beyond the peers' buffers.
            sizes = {"hidden": H, "ffn": H, "num_experts": 2 * num_ranks, "top_k": K}
            with heap.lease((4096,), torch.int32, name="neighbour") as lease:
                lease.tensor.fill_(7)
                try:
                    MoELayer(MoEConfig(**sizes, **options), heap)(tokens(heap))
                    heap.synchronize()
                finally:
                    findings.check(bool((lease.tensor == 7).all()), "a neighbour was overwritten")

        wanted = {
            hidden: f"hidden differs at 'dispatch: ready': rank 0 has {H}, rank {num_ranks - 1} has {4 * H}",
            dtype: "dtype differs at 'dispatch: ready': rank 0 has torch.float32, "
            f"rank {num_ranks - 1} has torch.bfloat16",
            probs: f"probs differs at 'dispatch: ready': rank 0 has without, rank {num_ranks - 1} has with",
            order: f"order differs at 'combine: ready': rank 0 has slot, rank {num_ranks - 1} has rank",
            layout: f"layout differs at 'dispatch: ready': rank 0 has packed, rank {num_ranks - 1} has expert-major",
            schedule: f"schedule differs at 'dispatch: ready': rank 0 has serial, rank {num_ranks - 1} has overlapped",
            buffers: f"layout differs at 'dispatch: ready': rank 0 has packed, rank {num_ranks - 1} has expert-major",
            another_call: "ranks are in different calls: rank 0 at 'combine: ready', "
            f"rank {num_ranks - 1} at 'plan: counts'",
        }
        for turn, (call, text) in enumerate(wanted.items()):
            findings.where = f"{call.__name__}, rank {rank} of {num_ranks}"
            findings.equal("the error", attempt(heap, call), (ConfigMismatch.__name__, text))
            findings.check(round_trip(heap, turn), "the next correct call is wrong")
            findings.equal("leased bytes", heap.leased_bytes, 0)
    return findings.texts


def check_faults(rank: int, num_ranks: int, device: str, schedule: str) -> list[str]:
    """Hosts on GPUs run ahead of their peers' faults; wherever they are, all go on from the same epoch."""
    findings = Findings()
    last = rank == num_ranks - 1
    experts = 2 * num_ranks
    with open_heap(device) as heap:
        sizes = {"hidden": H, "ffn": H, "num_experts": experts, "top_k": K, "schedule": schedule}
        exact = MoELayer(MoEConfig(**sizes), heap)
        static = MoELayer(MoEConfig(**sizes, capacity=T * K * num_ranks), heap)
        tight = MoELayer(MoEConfig(**sizes, capacity=1), heap)

        def wrong_shape(layer: MoELayer) -> None:
            layer(tokens(heap, H + 8 if last else H))

        def no_room() -> None:
            taken = []
            while last and heap._arena.largest_free_bytes > 1024:
                taken.append(heap.lease((heap._arena.largest_free_bytes,), torch.uint8, name="everything"))
            try:
                static(tokens(heap))
                heap.synchronize()
            finally:
                for lease in taken:
                    lease.release()

        def in_backward() -> None:
            y, _ = static(tokens(heap).requires_grad_())
            taken = [heap.lease((heap._arena.largest_free_bytes,), torch.uint8, name="everything")] if last else []
            try:
                y.sum().backward()
                heap.synchronize()
            finally:
                for lease in taken:
                    lease.release()

        def two_at_once() -> None:
            plan = new_plan(heap)
            if rank == 0:
                dispatch_tokens(tokens(heap), plan, order="no such order")
            elif last:
                dispatch_tokens(tokens(heap)[1:], plan)
            else:
                dispatch_tokens(tokens(heap), plan)

        cases = [
            ("wrong shape, exact", lambda: wrong_shape(exact), "ArgumentError", f"hidden ({H})"),
            ("wrong shape, static", lambda: wrong_shape(static), "ArgumentError", f"hidden ({H})"),
            ("overflow", lambda: tight(tokens(heap)), "CapacityError", "more than capacity (1)"),
            ("no room in forward", no_room, HeapExhausted.__name__, "high-water mark"),
            ("no room in backward", in_backward, HeapExhausted.__name__, "high-water mark"),
            ("two at once", two_at_once, "ArgumentError", "order ('no such order')"),
        ]
        for turn, (name, call, error, text) in enumerate(cases):
            for again in range(2):
                findings.where = f"{name}, rank {rank} of {num_ranks}, time {again}"
                raised = attempt(heap, call)
                findings.check(raised[0] == error and text in raised[1], f"raised {raised}, want {error} with {text!r}")
                findings.check(round_trip(heap, turn), "the next correct call is wrong")
                findings.equal("leased bytes", heap.leased_bytes, 0)
    return findings.texts


ALL_CHECKS = [(check_disagreement,), (check_faults, "serial"), (check_faults, "overlapped")]


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("check", ALL_CHECKS, ids=str)
def test_every_rank_raises_and_all_go_on(cluster, num_ranks: int, check):
    assert [text for texts in cluster(num_ranks).run(check[0], "cpu", *check[1:]) for text in texts] == []


@pytest.mark.gpu
@pytest.mark.parametrize("check", ALL_CHECKS, ids=str)
def test_every_rank_raises_and_all_go_on_on_gpus(cluster, check):
    assert [text for texts in cluster(2, "cuda").run(check[0], "cuda", *check[1:]) for text in texts] == []


def lose_a_signal(rank: int, num_ranks: int) -> tuple[str, bool]:
    """Rows of the last rank that never arrive while the experts compute: the next rank names it, and nobody hangs."""
    heap = SymmetricHeap(num_bytes=1 << 20, backend="host", timeout_s=1.0)
    layer = MoELayer(MoEConfig(hidden=H, ffn=H, num_experts=2 * num_ranks, top_k=K, schedule="overlapped"), heap)
    y, _ = layer(tokens(heap))
    if rank == num_ranks - 1:
        heap.send_signal = lambda peer: None
    raised = ""
    try:
        layer(tokens(heap))
    except PeerTimeout as error:
        raised = str(error)
    heap.close()
    return raised, bool(y.isfinite().all())


def test_a_signal_that_does_not_come(cluster):
    results = cluster(3).run(lose_a_signal, timeout_s=30)
    assert all(fine for _, fine in results)
    for text, _ in results[:2]:  # whichever wait of theirs ends first, theirs or that for a rank that has given up
        assert "within timeout_s=1" in text
    assert any("rank 2 did not reach 'dispatch: arrived'" in text for text, _ in results[:2])


def gradients(heap: SymmetricHeap, calls: int, times: int) -> list[torch.Tensor]:
    """Weight gradients of experts used `calls` times with one plan, after `times` backward passes."""
    plan = new_plan(heap)
    experts, loss = [], 0.0
    for call in range(calls):
        torch.manual_seed(call)
        mlp = GroupedMLP(2, H, H, device=heap.device)
        experts.append(mlp)
        probs = torch.rand(T, K, device=heap.device)
        rows, row_probs = dispatch_tokens(tokens(heap), plan, probs=probs)
        loss = loss + combine_tokens(mlp(rows, plan.splits, row_probs), plan).square().sum()
    for time_left in reversed(range(times)):
        loss.backward(retain_graph=time_left > 0)
    return [mlp.fc1.weight.grad.clone() for mlp in experts]


def check_one_plan_for_several_calls(rank: int, num_ranks: int) -> list[str]:
    findings = Findings()
    with open_heap("cpu") as heap:
        both = gradients(heap, 2, 1)
        findings.check(torch.equal(both[0], gradients(heap, 1, 1)[0]), "a second call changed the first's gradients")
        twice = gradients(heap, 1, 2)[0]
        findings.check(torch.equal(twice, 2 * both[0]), "a second backward pass does not add the same once more")
        results = []
        for order in ("slot", "rank"):
            torch.manual_seed(1)
            x, shared = tokens(heap).requires_grad_(), torch.zeros(H, requires_grad=True)
            plan = new_plan(heap)
            rows, _ = dispatch_tokens(x, plan, order=order)
            combine_tokens(rows + shared, plan, order="slot").sum().backward()
            results.append(shared.grad)
        findings.check(torch.equal(*results), "the order of sums in backward changed another gradient")
        findings.equal("leased bytes", heap.leased_bytes, 0)
    return findings.texts


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_one_plan_for_several_calls(cluster, num_ranks: int):
    assert [text for texts in cluster(num_ranks).run(check_one_plan_for_several_calls) for text in texts] == []


def close_alone(rank: int, num_ranks: int) -> tuple[str, float]:
    """Rank 0 leaves without closing; the others wait for it no longer than timeout_s."""
    heap = SymmetricHeap(num_bytes=1 << 20, backend="host", timeout_s=0.5)
    start = time.monotonic()
    try:
        if rank == 0:
            heap.__exit__(ValueError, None, None)
        else:
            heap.close()
    except PeerTimeout as error:
        return str(error), time.monotonic() - start
    return "", time.monotonic() - start


def test_close_waits_no_longer_than_the_timeout(cluster):
    first, *others = cluster(3).run(close_alone)
    assert first[0] == ""
    for text, seconds in others:
        assert text.startswith("rank 0 did not reach 'close' within timeout_s=0.5")
        assert seconds < 1.5


def test_leases_dropped_by_the_garbage_collector_never_overlap():
    """The collector may run in any thread at any time, in the middle of the arena's own work too."""
    stop = threading.Event()

    def collect() -> None:
        while not stop.is_set():
            gc.collect(0)

    thread = threading.Thread(target=collect)
    with SymmetricHeap(num_bytes=1 << 20, backend="host") as heap:
        thread.start()
        try:
            kept = []
            for turn in range(600):
                deadline = time.monotonic() + 30.0
                while heap.leased_bytes > heap.num_bytes // 2:  # the collector is behind
                    assert time.monotonic() < deadline
                    gc.collect()
                lease = heap.lease((1 + turn % 7, 128), torch.float32)
                if turn % 3:
                    holder = {"lease": lease}
                    holder["self"] = holder  # only the collector can free it
                    del holder
                elif len(kept) < 16:
                    kept.append(lease)
                else:
                    kept[turn % 16] = lease
                spans = sorted((held.offset, held.num_bytes) for held in kept)
                assert all(a + size <= b for (a, size), (b, _) in pairwise(spans))
                del lease
        finally:
            stop.set()
            thread.join()
        kept.clear()
        gc.collect()
        assert heap.leased_bytes == 0
