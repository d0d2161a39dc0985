"""A wait for a compilation, as on GPUs, lasts up to `start_timeout_s`, whatever `timeout_s` is; all other waits last up
to `timeout_s`."""

import contextlib
import os
import sys
import time
import types
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cluster import Cluster, run_on
from reliability.delays import before_steps

from symmoe import MoEConfig, MoELayer, SymmetricHeap, combine_tokens, dispatch_tokens, make_plan
from symmoe.errors import PeerError, PeerTimeout
from symmoe.kernels import control, twin
from symmoe.symm_mem.waits import StartupGrace

H = 256
COLD_S, SHORT_S = 0.1, 0.02
WAITS = ("barrier", "send_signal", "wait_for_signal")


@contextlib.contextmanager
def cold_kernels() -> Iterator[list[str]]:
    """Simulates a process that must compile every kernel: its first call lasts longer than any peer's wait. Yields the
    kernels that were cold."""
    cold: list[str] = []

    def slow_at_first(name: str) -> None:
        if name not in cold:
            cold.append(name)
            time.sleep(COLD_S)

    with before_steps(torch.device("cpu"), slow_at_first, set(twin.__all__) - set(WAITS)):
        yield cold


def step_of_layer(heap: SymmetricHeap, **options: object) -> Callable[[], torch.Tensor]:
    layer = MoELayer(
        MoEConfig(hidden=H, ffn=32, num_experts=2 * heap.num_ranks, top_k=2, **options), heap
    )
    x = torch.randn(12, H, requires_grad=True)

    def step() -> torch.Tensor:
        y, _ = layer(x)
        y.sum().backward()
        return y

    return step


def step_of_parts(heap: SymmetricHeap) -> Callable[[], torch.Tensor]:
    ids = torch.arange(12)[:, None] % heap.num_ranks
    x = torch.randn(12, H, requires_grad=True)

    def step() -> torch.Tensor:
        plan = make_plan(ids, num_experts=heap.num_ranks, heap=heap)
        rows, _, handle = dispatch_tokens(x, plan)
        y = combine_tokens(rows * 2, handle)
        y.sum().backward()
        return y

    return step


STEPS = {
    "layer": step_of_layer,
    "overlapped": lambda heap: step_of_layer(heap, schedule="always-overlapped", layout="packed"),
    "static": lambda heap: step_of_layer(heap, capacity=64, stash="none", layout="expert-major"),
    "parts": step_of_parts,
}


@pytest.mark.parametrize(
    ("steps", "num_ranks"), [("layer", 2), ("overlapped", 3), ("static", 2), ("parts", 3)]
)
@run_on()
def test_peers_wait_for_a_cold_first_step(rank: int, num_ranks: int, steps: str) -> None:
    """The last rank runs every kernel of a step for the first time; its peers' waits would end earlier if they did not
    include the compilation."""
    with contextlib.ExitStack() as stack:
        heap = stack.enter_context(SymmetricHeap(num_bytes=4 << 20, backend="host"))
        cold = stack.enter_context(cold_kernels()) if rank == num_ranks - 1 else []
        step = STEPS[steps](heap)
        heap.waits.compiles = True  # as on GPUs
        heap.timeout_s = SHORT_S
        fine = bool(step().isfinite().all())
        # The next step begins with what the first one may have left cold after its last barrier.
        if rank == num_ranks - 1:
            time.sleep(COLD_S)
        plan = make_plan(torch.zeros(1, 1, dtype=torch.int64), num_experts=num_ranks, heap=heap)
        heap.timeout_s = 60.0
        assert fine
        assert plan.num_tokens == 1
        assert len(cold) >= 9 if rank == num_ranks - 1 else not cold, cold


def build_on_one_rank(rank: int, num_ranks: int) -> tuple[int, set[str], bool]:
    """The number of calls that ran a program, modules that steps imported, and whether torch's compiler is imported.
    Ranks build programs in different steps."""
    tokens = ([8, 9, 10, 10, 10, 10, 8, 8], [8, 8, 9, 11, 11, 9, 9, 9])[rank]
    with mock.patch.dict(os.environ, SYMMOE_PROGRAMS="on"):
        heap = SymmetricHeap(num_bytes=4 << 20, backend="host")
    with heap:
        heap.timeout_s, heap.waits.compiles = 10.0, True  # as on GPUs
        layer = MoELayer(MoEConfig(hidden=H, ffn=32, num_experts=2 * num_ranks, top_k=2), heap)
        before = set(sys.modules)
        for num_tokens in tokens * 2:
            layer(torch.randn(num_tokens, H))[0].sum().backward()
        return heap.programs.num_runs, sys.modules.keys() - before, "torch._dynamo" in sys.modules


def test_a_build_on_one_rank_imports_no_module():
    """An import in a step may take seconds, for which the peers would wait."""
    with Cluster(2, start="spawn") as ranks:  # new processes, which have imported nothing yet
        results = ranks.run(build_on_one_rank)
    for num_runs, imported, is_compiler_imported in results:
        assert num_runs > 0
        assert (imported, is_compiler_imported) == (set(), False)


@pytest.mark.parametrize(("num_steps", "compiles"), [(0, False), (0, True), (1, True), (2, True)])
@run_on(2)
def test_waits_for_a_lost_rank_end_in_time(
    rank: int, num_ranks: int, num_steps: int, compiles: bool
) -> None:
    """The last rank leaves after so many steps, and returns after its peers have raised. On CPUs, where nothing
    compiles, a first call waits no longer than a later one."""
    bound = "start_timeout_s=0.4" if compiles and num_steps < 2 else "timeout_s=0.2"
    heap = SymmetricHeap(num_bytes=4 << 20, backend="host", timeout_s=60.0, start_timeout_s=61.0)
    heap.waits.compiles |= compiles
    step, text, took_s = step_of_layer(heap), "", 0.0
    for _ in range(num_steps):
        step()
    dist.barrier()
    if rank < num_ranks - 1:
        heap.timeout_s, heap.start_timeout_s = (
            (0.2, 0.4) if compiles and num_steps < 2 else (0.2, 60.0)
        )
        start = time.monotonic()
        try:
            step()
        except PeerTimeout as error:
            text = str(error)
            took_s = time.monotonic() - start
    dist.barrier()
    with contextlib.suppress(PeerError):  # the last rank learns of it
        heap.close()
    if rank == 0:
        assert text.startswith(
            f"rank 1 did not reach 'plan: counts' within {bound}: expected epoch"
        )
        assert float(bound.split("=")[1]) <= took_s < 60.0


# -- what counts as the first time ------------------------------------------------------------------------------------
PLAN = control.pack_call(phase=control.PHASE_PLAN, hidden=8, plan=77)
READY = control.pack_call(phase=control.PHASE_DISPATCH_READY, hidden=8, plan=77)
OTHER_WIDTH = control.pack_call(phase=control.PHASE_DISPATCH_READY, hidden=16, plan=77)


def barrier(times: StartupGrace, call: int, *, epoch: int = 0, fault: bool = False) -> bool:
    return times.may_compile(call, epoch=epoch, fault=fault)


def test_the_preceding_calls_identify_a_wait():
    times = StartupGrace(int)

    def step(call: int) -> list[bool]:
        barriers = [barrier(times, PLAN), barrier(times, call)]
        return [
            *barriers,
            *(times.may_compile(control.PHASE_DISPATCH_DONE, peer, epoch=0) for peer in (1, 2)),
        ]

    assert [step(READY) for _ in range(3)] == [[True] * 4, [True, False, False, False], [False] * 4]
    assert step(OTHER_WIDTH) == [False, True, True, True]
    assert (step(OTHER_WIDTH), step(READY)) == ([True, False, False, False], [False] * 4)


def test_waits_of_all_plans_are_one_kind():
    times = StartupGrace(int)
    for plan in range(3):
        firsts = [barrier(times, control.pack_call(phase=phase, plan=plan)) for phase in (1, 2)]
    assert firsts == [False, False]


def test_a_first_wait_is_remembered():
    times = StartupGrace(int)
    phase = control.PHASE_DISPATCH_DONE
    assert [barrier(times, READY, epoch=epoch) for epoch in (4, 5, 6)] == [True, True, False]
    assert [times.may_compile(phase, peer, epoch=6) for peer in (1, 2)] == [True, True]
    firsts = [times.was_first(epoch, control.PHASE_DISPATCH_READY, 2) for epoch in (3, 4, 5, 6)]
    assert firsts == [False, True, True, False]
    assert [times.was_first(6, phase, peer) for peer in (0, 1, 2)] == [False, True, True]


@pytest.mark.parametrize("name", ["a kernel is compiled", "a module is imported"])
def test_other_first_work_extends_a_wait(name: str, monkeypatch):
    num_compiled = 7
    times = StartupGrace(lambda: num_compiled)
    assert [barrier(times, PLAN) for _ in range(3)] == [True, True, False]
    if name == "a kernel is compiled":
        num_compiled += 1
    else:
        monkeypatch.setitem(
            sys.modules, "a_part_that_nobody_needed", types.ModuleType("a_part_that_nobody_needed")
        )
    assert [barrier(times, PLAN) for _ in range(2)] == [True, False]


def test_closing_and_faults_have_no_kind_of_wait():
    times = StartupGrace(int)
    barrier(times, control.PHASE_START)
    assert not barrier(times, control.PHASE_CLOSE)
    assert barrier(times, control.PHASE_PLAN, fault=True)  # the peers may be cold
    assert [barrier(times, PLAN) for _ in range(3)] == [True, True, False]
    assert not barrier(times, control.PHASE_PLAN, fault=True)
