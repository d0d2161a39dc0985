"""Ranks that are out of step, disagree or fail: all raise the same typed error, and the next correct call works."""

import time
from collections.abc import Callable
from functools import partial
from itertools import product
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from cluster import run_on
from heap_calls import outcome, round_trip
from limits import HANG_S
from worker import Findings, difference, free_bytes, open_heap

from symmoe import (
    GroupedMLP,
    MoEConfig,
    MoELayer,
    SymmetricHeap,
    combine_tokens,
    dispatch_tokens,
    make_plan,
)
from symmoe.errors import PeerError, SymmoeError
from symmoe.kernels.twin import sync
from symmoe.moe.ep_step import expert_parallel_mlp

T, K, H = 12, 2, 16


def attempt(heap: SymmetricHeap, call: Callable[[], object]) -> tuple[str, str]:
    """(class, text) of the error that a call raises on this rank, at the latest when the rank waits for its stream."""
    return outcome(lambda: [call(), heap.synchronize()])


def tokens(
    heap: SymmetricHeap, hidden: int = H, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    return torch.randn(T, hidden, device=heap.device).to(dtype)


def new_plan(heap: SymmetricHeap, **kwargs):
    ids = (torch.arange(T)[:, None] + torch.tensor([0, 1])) % (2 * heap.num_ranks)
    return make_plan(ids.to(heap.device), num_experts=2 * heap.num_ranks, heap=heap, **kwargs)


@run_on(3, on_gpus=(2,))
def test_ranks_in_different_calls_raise_on_every_rank(
    rank: int, num_ranks: int, findings: Findings, device: str
) -> None:
    """If the calls of ranks differ, all ranks raise the error, and no rank writes beyond a peer's buffer."""
    ready, back = "dispatch: ready", "combine: ready"
    with open_heap(device) as heap:

        def dispatch(*, hidden: int = H, dtype: torch.dtype = torch.float32, **options) -> None:
            dispatch_tokens(tokens(heap, hidden, dtype), new_plan(heap), **options)

        def into_a_buffer() -> None:
            plan = new_plan(heap)
            with heap.lease((plan.row_capacity, H), torch.float32, name="rows") as rows:
                dispatch_tokens(tokens(heap), plan, out=rows.tensor)

        def combine(
            *, hidden: int = H, dtype: torch.dtype = torch.float32, order: str = "slot"
        ) -> None:
            plan = new_plan(heap)
            *_, handle = dispatch_tokens(tokens(heap), plan)
            combine_tokens(
                torch.ones(plan.num_rows, hidden, dtype=dtype, device=heap.device),
                handle,
                order=order,
            )

        def step(**options: str) -> None:  # layers find out in their plan
            experts = GroupedMLP(2, H, H, device=heap.device)
            expert_parallel_mlp(
                tokens(heap),
                torch.rand(T, K, device=heap.device),
                experts,
                new_plan(heap),
                **options,
            )

        def plan_again() -> None:
            dispatch_tokens(tokens(heap), new_plan(heap))
            new_plan(heap)

        probs, half = torch.rand(T, K, device=heap.device), torch.bfloat16
        # (field and phase, the usual value and the culprit's, both calls)
        cases = [
            ("hidden", ready, H, 4 * H, dispatch, partial(dispatch, hidden=4 * H)),
            ("dtype", ready, torch.float32, half, dispatch, partial(dispatch, dtype=half)),
            ("probs", ready, "without", "with", dispatch, partial(dispatch, probs=probs)),
            ("layout", ready, "packed", "expert-major", dispatch, into_a_buffer),
            (
                "layout",
                ready,
                "packed",
                "expert-major",
                *(partial(step, layout=x) for x in ("packed", "expert-major")),
            ),
            (
                "schedule",
                ready,
                "serial",
                "overlapped",
                step,
                partial(step, schedule="always-overlapped"),
            ),
            ("hidden", back, H, 2 * H, combine, partial(combine, hidden=2 * H)),
            ("dtype", back, torch.float32, half, combine, partial(combine, dtype=half)),
            ("order", back, "slot", "rank", combine, partial(combine, order="rank")),
            ("", "", back, "plan: counts", combine, plan_again),
            ("", "", "plan: counts", ready, lambda: [new_plan(heap), new_plan(heap)], dispatch),
        ]
        findings.check(round_trip(heap), "the first call is wrong")
        for turn, (culprit, (field, phase, usual, wrong_value, call, wrong)) in enumerate(
            product((0, num_ranks - 1), cases)
        ):
            findings.where = (
                f"{field}: {wrong_value} at {phase} on rank {culprit}, rank {rank} of {num_ranks}"
            )
            if field:
                text = difference(f"{field} differs at '{phase}'", culprit, usual, wrong_value)
            else:
                text = difference(
                    "ranks are in different calls", culprit, f"'{usual}'", f"'{wrong_value}'"
                ).replace("has", "at")
            with heap.lease((4096,), torch.int32, name="neighbour") as lease:
                lease.tensor.fill_(7)
                findings.equal(
                    "the error",
                    attempt(heap, wrong if rank == culprit else call),
                    ("ConfigMismatch", text),
                )
                findings.check(bool((lease.tensor == 7).all()), "a neighbour was overwritten")
            findings.check(round_trip(heap, turn), "the next correct call is wrong")
            findings.equal("leased bytes", heap.leased_bytes, 0)


@pytest.mark.parametrize("schedule", ["serial", "always-overlapped"])
@run_on(3, on_gpus=(2,))
def test_errors_of_one_rank_raise_on_every_rank(
    rank: int, num_ranks: int, findings: Findings, device: str, schedule: str
) -> None:
    """Hosts on GPUs run ahead of their peers' faults; after any fault all continue from the same epoch."""
    last = rank == num_ranks - 1
    with open_heap(device) as heap:
        sizes = {
            "hidden": H,
            "ffn": H,
            "num_experts": 2 * num_ranks,
            "top_k": K,
            "schedule": schedule,
        }
        exact = MoELayer(MoEConfig(**sizes), heap)
        static = MoELayer(MoEConfig(**sizes, capacity=T * K * num_ranks), heap)
        tight = MoELayer(MoEConfig(**sizes, capacity=1), heap)

        def without_room(call: Callable[[], object]) -> None:
            leases = []
            while last and free_bytes(heap) > 1024:
                leases.append(heap.lease((free_bytes(heap),), torch.uint8, name="everything"))
            try:
                call()
                heap.synchronize()
            finally:
                for lease in leases:
                    lease.release()

        def two_at_once() -> None:
            plan = new_plan(heap)
            if rank == 0:
                dispatch_tokens(tokens(heap), plan, order="no such order")
            else:
                dispatch_tokens(tokens(heap)[int(last) :], plan)

        wide = H + 8 if last else H
        cases = [
            (
                "wrong shape, exact",
                lambda: exact(tokens(heap, wide)),
                "ArgumentError",
                f"hidden ({H})",
            ),
            (
                "wrong shape, static",
                lambda: static(tokens(heap, wide)),
                "ArgumentError",
                f"hidden ({H})",
            ),
            ("overflow", lambda: tight(tokens(heap)), "CapacityError", "more than capacity (1)"),
            (
                "forward",
                lambda: without_room(lambda: static(tokens(heap))),
                "HeapExhausted",
                "high-water mark",
            ),
            (
                "backward",
                lambda: without_room(static(tokens(heap).requires_grad_())[0].sum().backward),
                "HeapExhausted",
                "high-water mark",
            ),
            ("two at once", two_at_once, "ArgumentError", "order ('no such order')"),
        ]
        for turn, (name, call, error, text) in enumerate(cases):
            for again in range(2):
                findings.where = f"{name}, rank {rank} of {num_ranks}, time {again}"
                raised = attempt(heap, call)
                findings.check(
                    raised[0] == error and text in raised[1],
                    f"raised {raised}, want {error} with {text!r}",
                )
                findings.check(round_trip(heap, turn), "the next correct call is wrong")
                findings.equal("leased bytes", heap.leased_bytes, 0)


def lose_a_signal(rank: int, num_ranks: int) -> tuple[str, bool]:
    """Rows of the last rank never arrive while the experts compute: the next rank names it, and no rank hangs."""
    heap = SymmetricHeap(num_bytes=1 << 20, backend="host", timeout_s=HANG_S)
    layer = MoELayer(
        MoEConfig(
            hidden=H, ffn=H, num_experts=2 * num_ranks, top_k=K, schedule="always-overlapped"
        ),
        heap,
    )
    raised = ""
    for _ in range(2):
        y, _ = layer(tokens(heap))
    heap.programs.run = lambda key, function, *_: (
        function()
    )  # programs would not call the changed method
    if rank == num_ranks - 1:
        heap._send_signal = lambda peer: None
    else:  # its own wait does not end first

        def wait_for_signal(rank: int, *args, **options) -> torch.Tensor:
            heap.timeout_s = 1.0 if rank == num_ranks - 1 else HANG_S
            return wait(rank, *args, **options)

        wait, heap._wait_for_signal = heap._wait_for_signal, wait_for_signal
    try:
        layer(tokens(heap))
    except PeerError as error:
        raised = f"{type(error).__name__}: {error}"
    heap.close()
    return raised, bool(y.isfinite().all())


def test_a_missing_signal_is_a_timeout_of_its_sender(cluster):
    results = cluster(3).run(lose_a_signal)
    assert all(fine for _, fine in results)
    for text, _ in results[:2]:  # the rank whose wait ends first informs the others
        assert text.startswith(
            "PeerTimeout: rank 2 did not reach 'dispatch: arrived' within timeout_s=1"
        )
    assert "gave up: rank 2 did not reach 'dispatch: arrived' within timeout_s=1" in results[2][0]


@run_on(3)
def test_an_error_of_all_ranks_is_not_hidden_by_the_first_to_leave(
    rank: int, num_ranks: int
) -> None:
    """An error that all ranks raise ends the `with heap:` of every rank; a late rank must raise it, too, and not the
    abort of a rank that has left."""
    results = []
    wait = sync._wait

    def late(*args):
        time.sleep(0.02 if rank == 0 else 0.0)
        return wait(*args)

    for turn in range(6):
        try:
            with SymmetricHeap(num_bytes=1 << 20, backend="host", timeout_s=HANG_S) as heap:
                plan = new_plan(heap)
                with patch.object(sync, "_wait", late):
                    dispatch_tokens(tokens(heap)[: T - (rank == 1 + turn % (num_ranks - 1))], plan)
        except SymmoeError as error:
            results.append(type(error).__name__)
    assert results == ["ArgumentError"] * 6


@run_on(3)
def test_an_aborted_heap_raises_in_every_call(
    rank: int, num_ranks: int, findings: Findings
) -> None:
    heap = SymmetricHeap(num_bytes=1 << 20, backend="host", timeout_s=60.0)
    plan = new_plan(heap)
    reason = "this rank gave up: first" if rank == 0 else "rank 0 gave up: first"
    dist.barrier()
    if rank == 0:
        heap.abort("first")
        heap.abort("second")  # no effect
    else:
        findings.equal(
            "error",
            attempt(heap, lambda: dispatch_tokens(tokens(heap), plan)),
            ("PeerAborted", reason),
        )
    expected = ("HeapPoisoned", f"an earlier call failed: {reason}")
    findings.equal(
        "next error", attempt(heap, lambda: dispatch_tokens(tokens(heap), plan)), expected
    )
    findings.equal("error of a plan", attempt(heap, lambda: new_plan(heap)), expected)
    dist.barrier()
    heap.close()
    heap.abort("after close: nothing happens")
    findings.equal("after close", attempt(heap, heap.check)[0], "HeapClosed")


def gradients(heap: SymmetricHeap, calls: int) -> list[torch.Tensor]:
    """Weight gradients of experts used `calls` times with one plan."""
    plan = new_plan(heap)
    experts = []
    loss = 0.0
    for call in range(calls):
        torch.manual_seed(call)
        mlp = GroupedMLP(2, H, H, device=heap.device)
        experts.append(mlp)
        rows, row_probs, handle = dispatch_tokens(
            tokens(heap), plan, probs=torch.rand(T, K, device=heap.device)
        )
        loss = loss + combine_tokens(mlp(rows, plan.splits, row_probs), handle).square().sum()
    loss.backward()
    return [mlp.fc1.weight.grad.clone() for mlp in experts]


@run_on(2)
def test_one_plan_for_several_calls(
    rank: int, num_ranks: int, findings: Findings, heap: SymmetricHeap
) -> None:
    same = torch.equal(gradients(heap, 2)[0], gradients(heap, 1)[0])
    findings.check(same, "a second call changed the first's gradients")
    findings.equal("leased bytes", heap.leased_bytes, 0)
