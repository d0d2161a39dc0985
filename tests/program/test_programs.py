"""Calls that run programs: bits of calls without programs, errors on all ranks, and calls without a program."""

import itertools
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import program_cases as cases
import pytest
import torch
from cluster import run_on
from heap_calls import expect, outcome
from reliability.delays import before_steps
from torch.utils.flop_counter import FlopCounterMode
from worker import Findings, is_unwritten, open_heap

from symmoe import MoEConfig, MoELayer, SymmetricHeap
from symmoe.errors import ArgumentError, HeapExhausted, HeapPoisoned
from symmoe.kernels import twin
from symmoe.moe.router import Router
from symmoe.program.builder import Builder, BuildError, noted
from symmoe.program.programs import Programs
from symmoe.symm_mem.row_budget import RowBudget, RowHistory

OUTSIDE = torch.ones(3)


@pytest.fixture(autouse=True)
def plays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heaps of this process run programs. (Those of a cluster get the same by open_heap.)"""
    monkeypatch.setenv("SYMMOE_PROGRAMS", "on")


# -- same bits --------------------------------------------------------------------------------------------------------
SLOW = (
    "hidden kept",
    "nothing kept",
    "main_grad",
    "main_grad of one layer",
    "delayed gradients of one layer",
    "biases",
    "static",
)  # others have most


def bit_cases() -> Iterator[object]:
    """The quick cases: on two ranks without a surrounding call, and the defaults in a checkpoint."""
    for name, options in cases.OPTIONS.items():
        for num_ranks in (1, 2):
            for around in cases.AROUND:
                is_usual = not around or (name, around) == ("defaults", "checkpoint")
                is_quick = num_ranks == 2 and is_usual and name not in SLOW
                words = [name, str(num_ranks), *around.split()]
                marks = () if is_quick else (pytest.mark.slow,)
                # Of 13 calls with two parts each, some of which do not fit.
                yield pytest.param(
                    "cpu", options, num_ranks, around, 5, id="-".join(words), marks=marks
                )
    on_gpus = [
        (name, {**cases.LARGE, **options} if options.get("bias") else options, num_ranks, "")
        for name, options in [*cases.OPTIONS.items(), ("large", cases.LARGE)]
        for num_ranks in (1, 2)
    ]
    for name, options, num_ranks, around in [
        *on_gpus,
        *(("large", cases.LARGE, 2, around) for around in cases.AROUND[1:]),
    ]:
        words = [name, f"{num_ranks} GPUs", *around.split()]
        # A copy has the size of the routing, so hardly any backward has the sizes of another.
        min_runs = 8 if around == "saved copies" else 16
        yield pytest.param(
            "cuda", options, num_ranks, around, min_runs, id="-".join(words), marks=pytest.mark.gpu
        )


@pytest.mark.parametrize(
    ("device", "options", "num_ranks", "around", "min_runs"), list(bit_cases())
)
def test_calls_with_programs_have_the_bits_of_calls_without(
    cluster, device, options, num_ranks, around, min_runs
):
    results = cluster(num_ranks, device).run(cases.check_bits, options, around, device)
    assert [text for *_, texts in results for text in texts] == []
    for num_runs, repeats, _ in results:
        assert num_runs >= min_runs
        if device == "cpu" and num_ranks > 1 and "capacity" not in options:
            assert repeats > 0


@run_on(2)
def test_calls_in_flight_do_not_change_each_other(
    rank: int, num_ranks: int, findings: Findings
) -> None:
    """Backward of a call follows two more forward calls, and results stay unchanged. Memory is not filled, so leases
    that are parts of one may overlap; test_features.py has filled memory."""
    flying = []
    with open_heap("cpu", programs="on", fills="0", num_bytes=16 << 20) as heap:
        layer = cases.make_layer(heap)
        plain = cases.make_layer(heap)
        for x, dy in cases.make_calls(rank, 14, torch.float32):
            x = x.requires_grad_()
            y, _ = layer(x)
            flying.append((x, dy, y, y.detach().clone()))
            if len(flying) == 3:
                x, dy, y, copy = flying.pop(0)
                actual = torch.autograd.grad(y, (x, *layer.parameters()), dy)
                with cases.without_programs(heap):
                    _, _, _, *expected = cases.step(plain, x.detach(), dy, "")
                findings.same_bits(actual, expected, f"rank {rank}: other gradients")
                findings.check(torch.equal(y, copy), f"rank {rank}: y has changed")
        findings.check(heap.programs.num_runs > 12, "no program has run")


@run_on(2)
def test_main_grads_may_change_between_calls(rank: int, num_ranks: int, findings: Findings) -> None:
    """main_grad is another tensor in each call, every third call overwrites it, and on rank 0 one is missing once."""
    with open_heap("cpu", programs="on", num_bytes=16 << 20) as heap:
        layer = cases.make_layer(heap, overwrites=(False, False))
        weights = [fc.weight for fc in (layer.experts.fc1, layer.experts.fc2)]
        x, dy = next(cases.make_calls(rank, 1, torch.float32))
        before = [grad.clone() for grad in cases.main_grads(layer)]
        *_, first, second = cases.step(layer, x, dy, "")
        added = first - before[0], second - before[1]
        for number in range(20):
            findings.where = f"rank {rank}, call {number}"
            for weight, expected in zip(weights, added, strict=True):
                weight.main_grad = torch.ones(weight.shape)
                weight.overwrite_main_grad = number % 3 == 0
                weight.expected = expected + (number % 3 > 0)
            if number == 15:
                if rank == 0:
                    del weights[1].main_grad
                expect(
                    findings,
                    outcome(cases.step, layer, x, dy, ""),
                    "ArgumentError",
                    "main_grad is missing",
                )
                weights[1].main_grad = torch.ones(weights[1].shape)
                weights[0].main_grad = torch.ones(weights[0].shape)
            played = heap.programs.num_runs
            cases.step(layer, x, dy, "")
            close = [torch.allclose(w.main_grad, w.expected, atol=1e-4) for w in weights]
            findings.check(all(close), f"other gradients: {close}")
            if number >= 10 and number != 15:  # the first call after an error measures again
                findings.check(heap.programs.num_runs > played, "it was not played")


BETWEEN = ("frozen", "delay_wgrad", "main_grad")


@pytest.mark.parametrize("option", BETWEEN)
@run_on(2)
def test_options_may_change_between_forward_and_backward(
    rank, num_ranks, findings: Findings, option: str
) -> None:
    """An option that decides the destination of gradients changes between forward and backward of some calls, before,
    during and after the recording of their kind."""
    with open_heap("cpu", programs="on", num_bytes=16 << 20) as heap:
        layer = cases.make_layer(heap)
        linears = layer.experts.fc1, layer.experts.fc2
        weights = [fc.weight for fc in linears]
        x, dy = next(cases.make_calls(rank, 1, torch.float32))
        *_, first, second = cases.step(layer, x, dy, "")

        def change(changes: bool) -> None:
            for fc in linears:
                if option == "frozen":
                    fc.weight.requires_grad_(not changes)
                elif option == "delay_wgrad":
                    fc.delay_wgrad = changes
                else:
                    fc.accumulate_into_main_grad = changes
                    fc.weight.main_grad = torch.zeros_like(fc.weight)

        for number in range(14):
            findings.where = f"rank {rank}, call {number}"
            for weight in weights:
                weight.grad = None
            y, _ = layer(x)
            is_changed = number < 4 or number in (8, 9)
            change(is_changed)
            y.backward(dy)
            if option == "delay_wgrad" and is_changed:
                findings.check(weights[0].grad is None, "it was not delayed")
                layer.experts.backward_dw()
            change(False)
            actual = [weight.grad for weight in weights]
            if is_changed and option != "delay_wgrad":
                findings.check(actual == [None, None], "there are gradients")
            else:
                same = [
                    a is not None and torch.equal(a, b)
                    for a, b in zip(actual, (first, second), strict=True)
                ]
                findings.check(all(same), f"other gradients: {same}")
        findings.check(heap.programs.num_runs > 15, "nothing was played")


@pytest.fixture
def alone() -> Iterator[tuple[SymmetricHeap, MoELayer, Callable[..., None]]]:
    """A heap of one rank, a layer, and steps of it."""
    with SymmetricHeap(num_bytes=16 << 20, backend="host") as heap:
        layer = cases.make_layer(heap)
        x, dy = next(cases.make_calls(0, 1, torch.float32))
        yield heap, layer, lambda times=6: [cases.step(layer, x, dy, "") for _ in range(times)]


# -- when programs are built ------------------------------------------------------------------------------------------
def test_the_variable_decides_whether_programs_run(monkeypatch, request):
    monkeypatch.setenv("SYMMOE_PROGRAMS", "off")
    heap, _, steps = request.getfixturevalue("alone")
    steps()
    assert (heap.programs.num_built, heap.programs.num_runs) == (0, 0)


@pytest.mark.parametrize(
    ("name", "words"),
    [("SYMMOE_PROGRAMS", r"\('on', 'off'\)"), ("SYMMOE_FILL_MEMORY", r"\('0', '1'\)")],
)
def test_another_value_of_a_variable_is_refused(monkeypatch, name: str, words: str):
    monkeypatch.setenv(name, "twice")
    with pytest.raises(ArgumentError, match=rf"{name} \('twice'\) must be one of {words}"):
        SymmetricHeap(num_bytes=16 << 20, backend="host")


@pytest.mark.parametrize("fills", ["0", "1"])
def test_leases_and_memory_of_programs_begin_as_nan(monkeypatch, fills: str):
    monkeypatch.setenv("SYMMOE_FILL_MEMORY", fills)
    x = torch.ones(2)
    with SymmetricHeap(num_bytes=1 << 20, backend="host") as heap:
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32):
            with heap.lease((1000,), dtype) as lease:
                lease.tensor.fill_(1)
            with heap.lease((3, 5), dtype) as lease:
                assert is_unwritten(lease.tensor) == (fills == "1")
                assert lease.tensor.isnan().all() or lease.tensor.min() >= 1
        for _ in range(5):
            (result,) = heap._run(("some",), lambda: (x.new_empty(3, 5).t(),), [x])
        assert heap.programs.num_runs > 0
        assert result.isnan().all() or fills == "0"


@pytest.mark.parametrize("fills", ["0", "1"])
def test_leases_that_end_in_the_call_are_parts_of_one(monkeypatch, fills: str):
    monkeypatch.setenv("SYMMOE_FILL_MEMORY", fills)
    offsets = []

    @noted()
    def note(*leased: torch.Tensor) -> None:
        offsets.append([tensor.data_ptr() for tensor in leased])

    with SymmetricHeap(num_bytes=1 << 20, backend="host") as heap:

        def function() -> tuple[torch.Tensor]:
            remaining = heap.lease((7,), torch.float32, name="kept")
            first = heap.lease((1000,), torch.int8)
            first_tensor = first.tensor
            second = heap.lease((3, 5), torch.bfloat16)
            second.tensor.fill_(2)
            first.release()
            third = heap.lease((10,), torch.float64)
            third.tensor.fill_(3)
            note(remaining.tensor, first_tensor, second.tensor, third.tensor)
            total = second.tensor.sum() + third.tensor.sum()
            second.release()
            third.release()
            return (remaining.tensor.fill_(total),)

        for turn in range(4):
            before = heap.statistics.num_leases
            (y,) = heap._run(("some",), function, [torch.ones(2)])
            remaining, first, second, third = offsets[-1]
            assert y.tolist() == [60.0] * 7
            assert heap.statistics.num_leases - before == (2 if turn else 4)
            assert (third == first) == (turn == 0 or fills == "0")
            assert len({remaining, first, second}) == 3
            del y
            heap.lease((1,), torch.int8).release()  # takes back what has been dropped
            assert heap.leased_bytes == 0
        filler = heap.lease((heap.memory.arena.largest_free_bytes - 1024,), torch.int8)
        num_runs = heap.programs.num_runs
        with pytest.raises(HeapExhausted, match="lease 'lease'"):
            heap._run(("some",), function, [torch.ones(2)])
        filler.release()
        assert (heap.leased_bytes, heap.programs.num_runs) == (0, num_runs)
        assert heap._run(("some",), function, [torch.ones(2)])[0].tolist() == [60.0] * 7
        assert heap.programs.num_runs == num_runs + 1


# -- errors in the middle of a played call ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.slow), {"schedule": "always-overlapped"}],
    ids=["defaults", "overlapped"],
)
@run_on(2)
def test_an_error_in_a_program_raises_on_every_rank(
    rank: int, num_ranks: int, findings: Findings, options: dict
) -> None:
    """An error of rank 0 before each kernel of a program: all ranks raise, and the next call works."""
    names: list[str] = []
    with open_heap(
        "cpu", programs="on", num_bytes=16 << 20, timeout_s=30, start_timeout_s=30
    ) as heap:
        layer = cases.make_layer(heap, **options)
        x, dy = next(cases.make_calls(rank, 1, torch.float32))
        expected = cases.step(layer, x, dy, "")
        for _ in range(4):
            cases.step(layer, x, dy, "")
        with before_steps(cases.CPU, names.append, twin.__all__):
            cases.step(layer, x, dy, "")
        last = (
            len(names) - 1 - names[::-1].index("barrier")
        )  # peers raise later errors in the next call
        for fails_at, name in enumerate(names[:last]):
            # Errors of the heap itself; an error that cannot be reported to peers.
            if name in ("barrier", "push_slots"):
                continue
            remaining = [fails_at]

            def fail(_: str, remaining: list[int] = remaining) -> None:
                remaining[0] -= 1
                if remaining[0] == -1:
                    raise RuntimeError("no memory, say")

            findings.where = f"rank {rank}, error before {name} ({fails_at} of {len(names)})"
            with before_steps(cases.CPU, fail, twin.__all__) if rank == 0 else nullcontext():
                error = outcome(cases.step, layer, x, dy, "")
            expect(findings, error, "SymmoeError" if rank else "RuntimeError", "no memory, say")
            for _ in range(2):  # the first one measures again
                actual = cases.step(layer, x, dy, "")
                findings.same_bits(actual, expected, "other bits afterwards")
        findings.check(heap.leased_bytes == 0, "leases are left")
        assert heap.programs.num_runs > 20


# -- calls with and without programs ----------------------------------------------------------------------------------
def make_programs() -> Programs:
    return Programs(cases.CPU, lambda error: None, (), lambda: twin, lambda program: program)


def run_often(
    programs: Programs, function, make_inputs, *, times: int = 6, **numbers
) -> list[object]:
    results = []
    for n in range(times):
        inputs = make_inputs()
        now = {name: value + n for name, value in numbers.items()}
        results.append(
            programs.run(("some",), lambda inputs=inputs: function(*inputs), inputs, now)[0]
        )
    return results


def test_the_second_call_of_a_kind_builds_and_later_ones_run_its_program():
    programs = make_programs()
    num_calls = []

    def function(x: torch.Tensor) -> tuple[torch.Tensor]:
        num_calls.append(1)
        return (x * 2 + 1,)

    inputs: list[torch.Tensor] = []
    actual = run_often(programs, function, lambda: inputs.append(torch.rand(3)) or inputs[-1:])
    assert all(torch.equal(y, x * 2 + 1) for x, y in zip(inputs, actual, strict=True))
    assert len({y.data_ptr() for y in actual}) == 6
    assert (len(num_calls), programs.num_built, programs.num_runs) == (2, 1, 5)


def test_absent_inputs_are_a_part_of_the_key():
    """Calls with the same tensors at other positions differ only in the positions of None."""
    programs = make_programs()
    a = torch.ones(3)
    b = torch.full((3,), 2.0)

    def combined(x: torch.Tensor, y: torch.Tensor | None, z: torch.Tensor | None) -> tuple:
        return (x + (10 * y if y is not None else 0) + (100 * z if z is not None else 0),)

    calls = [(a, b, None), (a, None, b), (a, None, None), (a, b, b + 1)]
    for _ in range(4):
        for call in calls:
            (actual,) = programs.run(("some",), lambda call=call: combined(*call), call, {})
            assert torch.equal(actual, combined(*call)[0])
    assert (programs.num_built, programs.num_runs) == (4, 12)


def test_nothing_happens_while_a_program_is_built():
    """A build runs no operator and no kernel: inputs stay unchanged, and new tensors have no memory."""
    x = torch.ones(3)
    called = []

    @noted()
    def note(number: int) -> None:
        called.append(number)

    with Builder([x], {}, ()) as builder:
        y = x.add_(1) * torch.empty(1 << 40, dtype=torch.int8)[:3]
        note(5)
        assert y.data_ptr() > 1 << 59
    assert (x.tolist(), called, len(builder.entries)) == ([1.0] * 3, [], 4)


def test_other_shapes_strides_and_dtypes_are_other_programs():
    programs = make_programs()
    run_often(programs, lambda x: (x + 1,), lambda: [torch.rand(4, 3)])
    played = programs.num_runs
    for tensor in (torch.rand(3, 3), torch.rand(3, 4).t(), torch.rand(4, 3, dtype=torch.float64)):
        (y,) = programs.run(("some",), lambda x=tensor: (x + 1,), [tensor], {})
        assert torch.equal(y, tensor + 1)
    assert (programs.num_built, programs.num_runs) == (1, played)


def test_inputs_that_require_gradients_are_another_kind():
    programs = make_programs()
    turns = itertools.count()
    actual = run_often(
        programs,
        lambda x: (x.detach() * (2 if x.requires_grad else 3),),
        lambda: [torch.ones(3).requires_grad_(next(turns) % 3 == 0)],
        times=12,
    )
    assert [int(y[0]) for y in actual] == [2, 3, 3] * 4
    assert programs.num_runs > 3


def test_no_program_runs_on_a_poisoned_heap(alone):
    heap, layer, steps = alone
    steps()
    x, dy = next(cases.make_calls(0, 1, torch.float32))
    y, _ = layer(x.requires_grad_())
    heap.abort("a test")
    played = heap.programs.num_runs
    with pytest.raises(HeapPoisoned):
        y.backward(dy)
    assert heap.programs.num_runs == played


def test_numbers_of_a_call_may_change():
    programs = make_programs()
    values: list[int] = []

    @noted()
    def note(*, generation: int) -> None:
        values.append(generation)

    numbers = iter(range(7, 100))

    def function(x: torch.Tensor) -> tuple[torch.Tensor]:
        note(generation=next(numbers))
        return (x + 1,)

    run_often(programs, function, lambda: [torch.zeros(2)], times=6, generation=7)
    assert (values, programs.num_runs) == ([7, 8, 9, 10, 11, 12], 5)


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (lambda x: (x + OUTSIDE,), r"memory of a \[3\] torch.float32 is not known"),
        (lambda x: (x * x[0].item(),), "the host reads a tensor"),
        (lambda x: (x.sort()[0],), "aten.sort.default returns tuple"),
    ],
    ids=["outside", "read back", "several results"],
)
def test_functions_that_no_program_supports_are_defects(function, problem):
    x = torch.full((3,), 2.0)
    programs = make_programs()
    programs.run(("some",), lambda: function(x), [x], {})
    with pytest.raises(BuildError, match=problem):
        programs.run(("some",), lambda: function(x), [x], {})


@pytest.mark.parametrize("size", [0, 3])
def test_empty_tensors_are_inputs_memory_and_results(size: int):
    """Empty tensors may be inputs, new memory and results."""
    programs = make_programs()
    tensors = list[torch.Tensor]()

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.empty(size, 2)
        rows.fill_(1)
        return x.new_zeros(0, 4), torch.cat([rows, x[:, None] * x.new_ones(1, 2)])

    for _ in range(3):
        x = torch.rand(size)
        empty, both = programs.run(("some",), lambda x=x: function(x), [x], {})
        assert empty.shape == (0, 4)
        assert all(empty is not tensor for tensor in tensors)  # autograd will know it by itself
        tensors.append(empty)
        assert torch.equal(both, torch.cat([torch.ones(size, 2), x[:, None].expand(size, 2)]))
    assert programs.num_runs == 2


@pytest.mark.parametrize("size", [0, 3])
def test_programs_of_inference_mode_serve_training(size: int):
    """Memory of a build in inference mode does not disturb builds and calls outside of it."""
    programs = make_programs()
    rows = torch.rand(size)
    ones = torch.ones(size, requires_grad=True)

    def run(x: torch.Tensor) -> torch.Tensor:
        (y,) = programs.run(("some",), lambda: (x * x.new_ones(size),), [x], {})
        return y

    with torch.inference_mode():
        for _ in range(2):
            run(rows)
    for _ in range(2):
        (run(rows.clone()) * ones).sum().backward()
    assert torch.equal(ones.grad, rows * 2)


def test_inputs_that_share_memory_have_no_program():
    programs = make_programs()

    def inputs() -> list[torch.Tensor]:
        memory = torch.rand(4)
        return [memory[:3], memory[1:]]

    run_often(programs, lambda a, b: (a + b,), inputs)
    assert (programs.num_built, programs.num_runs) == (0, 0)


def test_views_and_writes_in_place_reach_the_right_memory():
    programs = make_programs()

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        memory = torch.empty(4, 3)
        memory[1:3].copy_(x)
        memory[0].zero_()
        memory[3].fill_(5)
        return memory[1:], memory.view(12)[4:]

    for _ in range(6):
        x = torch.rand(2, 3)
        a, b = programs.run(("some",), lambda x=x: function(x), [x], {})
        assert torch.equal(a, torch.cat([x, torch.full((1, 3), 5.0)]))
        assert torch.equal(b, a.reshape(-1)[1:])
        assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    assert programs.num_runs == 5


def test_no_program_runs_under_a_dispatch_mode():
    programs = make_programs()
    run_often(programs, lambda x: (x + 1,), lambda: [torch.rand(2)])
    with FlopCounterMode(display=False) as counter:
        programs.run(("some",), lambda: (torch.rand(2, 2) @ torch.rand(2, 2),), [torch.rand(2)], {})
    assert counter.get_total_flops() == 16


def test_numbers_of_equal_programs_are_equal():
    programs = make_programs()
    assert programs.number(("a", 1)) == programs.number(("a", 1)) != programs.number(("a", 2))


def test_steps_of_layers_of_one_size_share_programs(alone):
    heap, _, steps = alone
    steps()
    kinds = len(heap.programs._programs)
    x, dy = next(cases.make_calls(0, 1, torch.float32))
    cases.step(cases.make_layer(heap), x, dy, "")
    assert len(heap.programs._programs) == kinds
    assert heap.programs.num_runs > 5


def test_a_consumer_of_probs_may_give_no_gradient():
    class NoGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, probs: torch.Tensor) -> torch.Tensor:
            return probs.sum()

        @staticmethod
        def backward(ctx, grad: torch.Tensor) -> None:
            return None

    router = Router(MoEConfig(hidden=cases.H, ffn=cases.I, num_experts=cases.E, top_k=cases.K))
    x = torch.randn(5, cases.H, requires_grad=True)
    (NoGradient.apply(router(x).probs) + x.sum()).backward()
    assert x.grad.eq(1).all()


def test_a_closed_heap_keeps_no_programs(alone):
    heap, _, steps = alone
    steps(5)
    heap.close()
    assert not heap.programs._programs


@pytest.mark.parametrize(
    ("name", "around"),
    [
        ("defaults", "checkpoint"),
        pytest.param("overlapped, expert-major, nothing kept", "", marks=pytest.mark.slow),
        pytest.param("losses", "checkpoint", marks=pytest.mark.slow),
    ],
)
@run_on(2)
def test_calls_with_random_small_budgets_have_the_same_bits(
    rank: int, num_ranks: int, name: str, around: str
) -> list[str]:
    """check_bits, where a third of the calls get far too small a row budget, also recomputed calls and calls of
    backward."""
    budget = RowHistory.budget
    calls = itertools.count()

    def random_budget(self: RowHistory, *args: int | None) -> RowBudget | None:
        row_budget = budget(self, *args)
        too_little = random.Random(next(calls)).random() < 1 / 3  # in the same calls on all ranks
        return RowBudget(1, 0, 1, 1) if row_budget is not None and too_little else row_budget

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowHistory, "budget", random_budget)
        num_runs, _, texts = cases.check_bits(rank, num_ranks, cases.OPTIONS[name], around)
    # Of 13 calls with two parts each, a third of which are repeated.
    assert num_runs >= 8, num_runs
    return texts


@run_on(1)
def test_a_router_needs_no_turn_on_the_heap(rank: int, num_ranks: int) -> None:
    """A router that runs by itself while another thread is in a call of the heap."""
    with SymmetricHeap(num_bytes=16 << 20, backend="host") as heap:
        layer = cases.make_layer(heap)
        x, _ = next(cases.make_calls(rank, 1, torch.float32))
        expected = layer.router(x).probs
        with heap.one_call, ThreadPoolExecutor(1) as pool:
            assert torch.equal(pool.submit(layer.router, x).result().probs, expected)


@pytest.mark.slow
def test_compiled_layers_run_programs_too(alone):
    heap, layer, _ = alone
    compiled = torch.compile(layer, backend="aot_eager")
    for x, dy in cases.make_calls(0, 8, torch.float32):
        num_runs = heap.programs.num_runs
        actual, expected = (
            torch.autograd.grad(module(x)[0], tuple(layer.parameters()), dy)
            for module in (compiled, layer)
        )
        assert all(map(torch.equal, actual, expected))
    # Forward and backward, of the compiled call and of the eager one. The compiled router is not one of the heap's.
    assert heap.programs.num_runs - num_runs == 4
