"""Access to a heap: one thread in a call at a time, and only the process that made the heap."""

import gc
import os
import pickle
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.distributed as dist
from cluster import run_on
from heap_calls import outcome, round_trip
from worker import Findings

from symmoe import MoEConfig, MoELayer, SymmetricHeap, combine_tokens, dispatch_tokens, make_plan
from symmoe.errors import ArgumentError, HeapClosed, PeerError, SymmoeError

NUM_BYTES = 8 << 20
CONFIG = {"hidden": 16, "ffn": 8, "top_k": 2}
NUM_STEPS = 20


# -- threads ----------------------------------------------------------------------------------------------------------
Step = tuple[torch.Tensor, torch.Tensor]  # y and dx


def train(layer: MoELayer, seed: int) -> list[Step | str]:
    """The results of every step, or the name of its error."""
    generator = torch.Generator().manual_seed(seed)
    steps: list[Step | str] = []
    for step in range(NUM_STEPS):
        x = torch.randn(5 + step % 7, CONFIG["hidden"], generator=generator, requires_grad=True)
        try:
            y, _ = layer(x)
            y.square().sum().backward()
        except SymmoeError as error:
            steps.append(type(error).__name__)
            if isinstance(error, PeerError):
                break
        else:
            steps.append((y.detach(), x.grad))
    return steps


def in_threads(*functions: Callable[[], object]) -> list:
    """Runs the functions at the same time and returns their results. Threads are interrupted after some microseconds,
    so that few steps show races."""
    start = threading.Barrier(len(functions))
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(len(functions)) as threads:
            return [*threads.map(lambda function: [start.wait(), function()][1], functions)]
    finally:
        sys.setswitchinterval(before)


def layers_on(*heaps: SymmetricHeap) -> list[MoELayer]:
    """A layer for each heap, the same on all ranks and different between heaps."""
    layers = []
    for seed, heap in enumerate(heaps):
        torch.manual_seed(seed)
        layers.append(MoELayer(MoEConfig(num_experts=2 * heap.num_ranks, **CONFIG), heap))
    return layers


def is_same(got: Step | str, want: Step | str) -> bool:
    return all(map(torch.equal, got, want))


def test_two_threads_on_one_heap_have_no_wrong_results(heap: SymmetricHeap):
    layers = layers_on(heap, heap)
    want = [train(layer, seed) for seed, layer in enumerate(layers)]
    got = in_threads(partial(train, layers[0], 0), partial(train, layers[1], 1))
    errors = [step for steps in got for step in steps if isinstance(step, str)]
    assert set(errors) == {"ConcurrentUse"}, "they have not met, or something else was raised"
    wrong = [
        (seed, step)
        for seed in range(2)
        for step in range(NUM_STEPS)
        if not isinstance(got[seed][step], str) and not is_same(got[seed][step], want[seed][step])
    ]
    assert wrong == []
    assert all(map(is_same, train(layers[0], 0), want[0]))  # the heap is as it was
    gc.collect()
    assert heap.leased_bytes == 0


def test_a_heap_per_thread_works():
    with (
        SymmetricHeap(num_bytes=NUM_BYTES, backend="host") as first,
        SymmetricHeap(num_bytes=NUM_BYTES, backend="host") as second,
    ):
        layers = layers_on(first, second)
        want = [train(layer, seed) for seed, layer in enumerate(layers)]
        got = in_threads(partial(train, layers[0], 0), partial(train, layers[1], 1))
        assert all(map(is_same, got[0] + got[1], want[0] + want[1]))


def test_threads_may_take_turns(heap: SymmetricHeap):
    """Forward in one thread, backward in another, and so on."""
    [layer] = layers_on(heap)
    x = torch.ones(3, CONFIG["hidden"], requires_grad=True)
    for _ in range(3):
        [(y, _)] = in_threads(partial(layer, x))
        in_threads(y.sum().backward)
        assert in_threads(partial(round_trip, heap)) == [True]
        assert round_trip(heap)


@run_on(2)
def test_two_threads_on_two_ranks_have_no_wrong_results(
    rank: int, num_ranks: int, findings: Findings
) -> None:
    """Two threads on each rank: calls may raise, but no result is wrong."""
    heap = SymmetricHeap(num_bytes=NUM_BYTES, backend="host")
    [layer] = layers_on(heap)
    want = train(layer, 0)
    heap.timeout_s = 2.0
    dist.barrier()
    got = in_threads(partial(train, layer, 0), partial(train, layer, 1))
    for step in range(NUM_STEPS):
        result = got[0][step] if step < len(got[0]) else ""
        if not isinstance(result, str):
            findings.check(is_same(result, want[step]), f"step {step} is wrong")
    names = {step for steps in got for step in steps if isinstance(step, str)}
    findings.check(bool(names), "nothing was raised")
    allowed = {
        "ConcurrentUse",
        "ConfigMismatch",
        "PeerTimeout",
        "PeerAborted",
        "HeapPoisoned",
        "SymmoeError",
    }
    findings.check(names <= allowed, f"{names} were raised")
    heap.abort("the test is over")
    heap.close()
    dist.barrier()
    with SymmetricHeap(num_bytes=NUM_BYTES, backend="host") as again:
        findings.check(round_trip(again), "a new heap does not work")


def test_any_thread_may_make_and_end_leases(heap: SymmetricHeap):
    """No lease overlaps another, and no memory is lost, whether a thread releases a lease or the garbage collector
    drops it. The collector may run in any thread, also in the middle of the arena's work."""
    wrong: list[str] = []

    def churn(value: int) -> None:
        leases = []
        for turn in range(150):
            lease = heap.lease((64 + turn % 5,), torch.int64, name=f"of {value}")
            lease.tensor.fill_(value)
            if not heap.owns(lease.tensor) or heap._offset_of(lease.tensor) != lease.offset:
                wrong.append("a lease is not found")
            leases = [*leases[-15:], lease]
            if not all(bool((live.tensor == value).all()) for live in leases):
                wrong.append("a lease is written to by another thread")
            if turn % 3 == 0:
                leases.pop().release()
            elif turn % 3 == 1:
                holder = {"lease": leases.pop()}
                holder["self"] = holder  # only the collector can free it

    def collect() -> None:
        for _ in range(1000):
            gc.collect(0)

    in_threads(collect, *(partial(churn, value) for value in range(4)))
    assert wrong == []
    gc.collect()
    assert (heap.leased_bytes, heap.statistics.num_leases) == (0, 4 * 150)


def test_an_error_is_raised_by_the_thread_whose_call_it_is(heap: SymmetricHeap):
    """A second thread that calls check while the first is in a call does not raise the first thread's error."""
    ids, names = torch.zeros(8, 1, dtype=torch.int64), []

    def look() -> None:
        while len(names) < 100:
            outcome(heap.check)

    def call() -> None:
        for _ in range(100):
            names.append(outcome(make_plan, ids, num_experts=1, heap=heap, capacity=4)[0])

    in_threads(look, call)
    assert set(names) == {"CapacityError"}


def test_another_thread_may_abort_a_heap_in_a_call_but_not_close_it():
    heap = SymmetricHeap(num_bytes=NUM_BYTES, backend="host")
    inside = threading.Event()
    over = threading.Event()

    def call() -> None:
        with heap.one_call:
            inside.set()
            over.wait()

    thread = threading.Thread(target=call, name="the first")
    thread.start()
    inside.wait()
    try:
        for use in (heap.close, lambda: heap.barrier(0), lambda: round_trip(heap)):
            name, text = outcome(use)
            assert name == "ConcurrentUse"
            assert "'MainThread' calls a heap on which thread 'the first' is in a call" in text
        heap.abort("it takes too long")
        assert outcome(heap.check)[0] == "HeapPoisoned"
        heap.close()
    finally:
        over.set()
        thread.join()
    assert outcome(heap.check)[0] == "HeapClosed"


# -- forks ------------------------------------------------------------------------------------------------------------
def outcome_of(step: Callable[[], object]) -> object:
    try:
        return step()
    except BaseException:  # noqa: BLE001 - the test has to see it
        return traceback.format_exc()


def in_a_fork(step: Callable[[], object]) -> object:
    """The result of `step` in a child process, which ends without a cleanup, as a DataLoader's worker does."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, pickle.dumps(outcome_of(step)))
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as stream:
        result = pickle.loads(stream.read())
    os.waitpid(child, 0)
    return result


WAYS: dict[str, Callable[[list[SymmetricHeap]], object]] = {
    "close": lambda holder: holder[0].close(),
    "with": lambda holder: holder[0].__enter__().__exit__(None, None, None),
    "exception": lambda holder: (
        holder[0].__enter__().__exit__(ZeroDivisionError, ZeroDivisionError(), None)
    ),
    "abort": lambda holder: holder[0].abort("of a child"),
    "drop": lambda holder: [holder.clear(), gc.collect()] and None,
    "exit": lambda holder: None,
    "release": lambda holder: holder[0].release_graphs(),
}


@run_on(1, pytest.param(2, marks=pytest.mark.slow))
def test_a_forked_process_does_not_change_the_heap(
    rank: int, num_ranks: int, findings: Findings
) -> None:
    """One rank forks between forward and backward; the child leaves the heap in every way, without effect."""
    with SymmetricHeap(num_bytes=NUM_BYTES, backend="host", timeout_s=20.0) as heap:
        [layer] = layers_on(heap)
        holder = [heap]
        x = torch.randn(
            9, CONFIG["hidden"], generator=torch.Generator().manual_seed(rank), requires_grad=True
        )
        want = train(layer, rank)
        y, _ = layer(x)
        y.square().sum().backward()
        gradient = x.grad
        for name, leave in WAYS.items():
            findings.where = f"{name} in a child of rank {rank}"
            x.grad = None
            y, _ = layer(x)
            lease = heap.lease((100,), torch.int64, name="of the parent")
            lease.tensor.fill_(7)
            if rank == 0:
                findings.equal("result", in_a_fork(lambda leave=leave: leave(holder)), None)
            dist.barrier()
            y.square().sum().backward()
            findings.check(torch.equal(x.grad, gradient), "the gradient is another one")
            findings.check(bool((lease.tensor == 7).all()), "a lease has been overwritten")
            lease.release()
            del y
        findings.check(all(map(is_same, train(layer, rank), want)), "later steps are wrong")


def test_calls_of_a_forked_process_name_the_owner_of_the_heap(heap: SymmetricHeap):
    [layer] = layers_on(heap)
    x = torch.ones(3, CONFIG["hidden"], requires_grad=True)
    loss = layer(x)[0].sum()
    lease = heap.lease((4,), torch.float32)
    parent = os.getpid()

    def use() -> list[tuple[str, str]]:
        uses = (
            heap.check,
            lambda: heap.lease((4,), torch.float32),
            lambda: heap.barrier(0),
            lambda: round_trip(heap),
        )
        outcomes = [outcome(use) for use in (*uses, lambda: layer(x), loss.backward)]
        lease.release()  # giving back does no harm
        return [*outcomes, ("", repr(heap.owns(x)))]

    *errors, last = in_a_fork(use)
    if (
        errors[-1][0] == "RuntimeError"
    ):  # torch has started threads for an earlier test, and refuses any backward pass
        assert "fork-based multiprocessing" in errors.pop()[1]
    for name, text in errors:
        assert name == HeapClosed.__name__
        assert f"is that of process {parent}, of which this process (" in text
    assert (last, heap._offset_of(lease.tensor)) == (("", "False"), lease.offset)
    loss.backward()
    assert round_trip(heap)


def test_dispatch_does_not_write_over_a_gradient_that_autograd_needs(heap: SymmetricHeap):
    """As a checkpoint does that repeats a dispatch inside backward."""
    plan = make_plan(torch.tensor([[0], [1], [1]]), num_experts=2, heap=heap)
    x = torch.randn(3, 8)
    rows, _, handle = dispatch_tokens(x, plan)
    lease = heap.lease((plan.row_capacity, 8), torch.float32, name="shared")
    expert_out = rows.clone().requires_grad_() * 2
    errors = []

    def repeat_dispatch(_gradient: torch.Tensor) -> None:
        with pytest.raises(ArgumentError, match=r"out .* another gradient") as raised:
            dispatch_tokens(x, plan, out=lease.tensor)
        errors.append(raised.value)

    expert_out.register_hook(repeat_dispatch)
    combine_tokens(expert_out, handle, grad_out=lease.tensor).sum().backward()
    assert len(errors) == 1
    assert torch.equal(dispatch_tokens(x, plan, out=lease.tensor)[0], rows)
