"""Calls that are played from a tape: the bits of calls that are not, errors on all ranks, and what is not played."""

import itertools
import random
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import tape_cases as taped
import torch
from cluster import run_on
from heap_calls import expect, outcome
from reliability.delays import before_steps
from torch.utils.flop_counter import FlopCounterMode
from worker import Findings, is_unwritten, open_heap

from symmoe import MoEConfig, MoELayer, SymmetricHeap
from symmoe.errors import ArgumentError, HeapExhausted, HeapPoisoned, StaleTape, raise_for
from symmoe.kernels import twin
from symmoe.moe.ep_step import _Forward
from symmoe.moe.router import Router
from symmoe.symm_mem.memory import Lease
from symmoe.symm_mem.row_budget import RowBudget, RowHistory
from symmoe.tape.recorder import Recorder, Tapes, recorded
from symmoe.tape.tape import CallInteger, Playing

OUTSIDE = torch.ones(3)


@pytest.fixture(autouse=True)
def plays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heaps of this process play tapes. (Those of a cluster get the same by open_heap.)"""
    monkeypatch.setenv("SYMMOE_TAPES", "on")


# -- same bits --------------------------------------------------------------------------------------------------------
SLOW = (
    "hidden kept",
    "nothing kept",
    "main_grad",
    "main_grad of one layer",
    "biases",
    "static",
)  # others have most


def cases() -> Iterator[object]:
    """Quick ones: on two ranks with nothing around it, and the defaults in a checkpoint."""
    for name, options in taped.OPTIONS.items():
        for num_ranks in (1, 2):
            for around in taped.AROUND:
                is_usual = not around or (name, around) == ("defaults", "checkpoint")
                is_quick = num_ranks == 2 and is_usual and name not in SLOW
                words = [name, str(num_ranks), *around.split()]
                marks = () if is_quick else (pytest.mark.slow,)
                # Of 20 calls with two parts each, some of which do not fit.
                yield pytest.param(
                    "cpu", options, num_ranks, around, 9, id="-".join(words), marks=marks
                )
    on_gpus = [
        (name, {**taped.LARGE, **options} if options.get("bias") else options, num_ranks, "")
        for name, options in [*taped.OPTIONS.items(), ("large", taped.LARGE)]
        for num_ranks in (1, 2)
    ]
    for name, options, num_ranks, around in [
        *on_gpus,
        *(("large", taped.LARGE, 2, each) for each in taped.AROUND[1:]),
    ]:
        words = [name, f"{num_ranks} GPUs", *around.split()]
        # A copy has the size of the routing, so hardly any backward has the sizes of another.
        least = 8 if around == "saved copies" else 16
        yield pytest.param(
            "cuda", options, num_ranks, around, least, id="-".join(words), marks=pytest.mark.gpu
        )


@pytest.mark.parametrize(("device", "options", "num_ranks", "around", "least"), list(cases()))
def test_played_calls_have_the_bits_of_others(cluster, device, options, num_ranks, around, least):
    results = cluster(num_ranks, device).run(taped.check_bits, options, around, device)
    assert [text for *_, texts in results for text in texts] == []
    for num_played, repeats, _ in results:
        assert num_played >= least
        if device == "cpu" and num_ranks > 1 and "capacity" not in options:
            assert repeats > 0


@pytest.mark.parametrize("fills", ["0", "1"])  # without, leases that are parts of one may overlap
@run_on(2)
def test_calls_in_flight(rank: int, num_ranks: int, findings: Findings, fills: str) -> None:
    """Backward of a call comes after two more forward calls, and results stay as they are."""
    flying = []
    with open_heap("cpu", tapes="on", fills=fills, num_bytes=16 << 20) as heap:
        layer, plain = taped.make_layer(heap), taped.make_layer(heap)
        for x, dy in taped.make_calls(rank, 22, torch.float32):
            x = x.requires_grad_()
            y, _ = layer(x)
            flying.append((x, dy, y, y.detach().clone()))
            if len(flying) == 3:
                x, dy, y, copy = flying.pop(0)
                found = torch.autograd.grad(y, (x, *layer.parameters()), dy)
                with taped.without_tapes(heap):
                    _, _, _, *wanted = taped.step(plain, x.detach(), dy, "")
                findings.check(
                    all(map(torch.equal, found, wanted)), f"rank {rank}: other gradients"
                )
                findings.check(torch.equal(y, copy), f"rank {rank}: y has changed")
        findings.check(heap.tapes.num_played > 8, "nothing was played")


@run_on(2)
def test_main_grads_that_change(rank: int, num_ranks: int, findings: Findings) -> None:
    """main_grad is another tensor in each call, every third call overwrites it, and on rank 0 one is missing once."""
    with open_heap("cpu", tapes="on", num_bytes=16 << 20) as heap:
        layer = taped.make_layer(heap, overwrites=(False, False))
        weights = [fc.weight for fc in (layer.experts.fc1, layer.experts.fc2)]
        x, dy = next(taped.make_calls(rank, 1, torch.float32))
        before = [grad.clone() for grad in taped.main_grads(layer)]
        *_, first, second = taped.step(layer, x, dy, "")
        added = first - before[0], second - before[1]
        for number in range(20):
            findings.where = f"rank {rank}, call {number}"
            for weight, wanted in zip(weights, added, strict=True):
                weight.main_grad = torch.ones(weight.shape)
                weight.overwrite_main_grad = number % 3 == 0
                weight.wanted = wanted + (number % 3 > 0)
            if number == 15:
                if rank == 0:
                    del weights[1].main_grad
                expect(
                    findings,
                    outcome(taped.step, layer, x, dy, ""),
                    "ArgumentError",
                    "main_grad is missing",
                )
                weights[1].main_grad = torch.ones(weights[1].shape)
                weights[0].main_grad = torch.ones(weights[0].shape)
            played = heap.tapes.num_played
            taped.step(layer, x, dy, "")
            close = [torch.allclose(w.main_grad, w.wanted, atol=1e-4) for w in weights]
            findings.check(all(close), f"other gradients: {close}")
            if number >= 10 and number != 15:  # the first call after an error measures again
                findings.check(heap.tapes.num_played > played, "it was not played")
        findings.check(heap.tapes.problems == [], f"{heap.tapes.problems}")


BETWEEN = ("frozen", "delay_wgrad", "main_grad")


@pytest.mark.parametrize("what", BETWEEN)
@run_on(2)
def test_options_that_change_between_forward_and_backward(
    rank, num_ranks, findings: Findings, what: str
) -> None:
    """What decides where gradients go changes between forward and backward of some calls, before, while and after calls
    of their kind are recorded."""
    with open_heap("cpu", tapes="on", num_bytes=16 << 20) as heap:
        layer = taped.make_layer(heap)
        linears = layer.experts.fc1, layer.experts.fc2
        weights = [fc.weight for fc in linears]
        x, dy = next(taped.make_calls(rank, 1, torch.float32))
        *_, first, second = taped.step(layer, x, dy, "")

        def change(changes: bool) -> None:
            for fc in linears:
                if what == "frozen":
                    fc.weight.requires_grad_(not changes)
                elif what == "delay_wgrad":
                    fc.delay_wgrad = changes
                else:
                    fc.accumulate_into_main_grad = changes
                    fc.weight.main_grad = torch.zeros_like(fc.weight)

        for number in range(24):
            findings.where = f"rank {rank}, call {number}"
            for weight in weights:
                weight.grad = None
            y, _ = layer(x)
            change(number < 6 or number in (12, 13))
            y.backward(dy)
            is_changed = number < 6 or number in (12, 13)
            if what == "delay_wgrad" and is_changed:
                findings.check(weights[0].grad is None, "it was not delayed")
                layer.experts.backward_dw()
            change(False)
            found = [weight.grad for weight in weights]
            if is_changed and what != "delay_wgrad":
                findings.check(found == [None, None], "there are gradients")
            else:
                same = [
                    a is not None and torch.equal(a, b)
                    for a, b in zip(found, (first, second), strict=True)
                ]
                findings.check(all(same), f"other gradients: {same}")
        findings.check(heap.tapes.num_played > 30, "nothing was played")
        findings.check(heap.tapes.problems == [], f"{heap.tapes.problems}")


@pytest.fixture
def alone() -> Iterator[tuple[SymmetricHeap, MoELayer, Callable[..., None]]]:
    """A heap of one rank, a layer, and steps of it."""
    with SymmetricHeap(num_bytes=16 << 20, backend="host") as heap:
        layer = taped.make_layer(heap)
        x, dy = next(taped.make_calls(0, 1, torch.float32))
        yield heap, layer, lambda times=6: [taped.step(layer, x, dy, "") for _ in range(times)]


# -- audits -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("tapes", ["on", "audit"])
@run_on(2)
def test_an_audit_finds_a_difference(
    rank: int, num_ranks: int, findings: Findings, tapes: str
) -> None:
    """From some step on rank 1 does more in one part of a call than its tape does: both ranks raise when that call is
    compared, and not before; steps after it are right."""
    added = []
    real = _Forward.second_half

    def more(self: _Forward, a: torch.Tensor, *rest: object) -> torch.Tensor:
        if added:
            a.mul_(1.0)
        return real(self, a, *rest)

    with (
        pytest.MonkeyPatch.context() as patch,
        open_heap("cpu", tapes=tapes, num_bytes=16 << 20) as heap,
    ):
        patch.setattr(_Forward, "second_half", more)
        layer = taped.make_layer(heap)
        x, dy = next(taped.make_calls(rank, 1, torch.float32))
        wanted, raised = taped.step(layer, x, dy, ""), []
        for number in range(1, 30):
            if number == 6 and rank == 1:
                added.append(True)
            try:
                found = taped.step(layer, x, dy, "")
                findings.check(
                    all(map(torch.equal, found, wanted)), f"rank {rank}, step {number}: other bits"
                )
            except StaleTape as error:
                raised.append((number, str(error)))
        findings.check(heap.leased_bytes == 0, "leases are left")
        findings.check(len(raised) == 1, f"rank {rank}: {raised}")
        number, text = raised[0]
        for part in ("'forward'", " was Call", "and is Operator aten::mul_"):
            findings.check(part in text, f"rank {rank}: {part} is not in {text}")
        findings.check(
            number == (10 if tapes == "on" else 6), f"rank {rank}: found in step {number}"
        )
        assert (heap.tapes.num_played > 0) == (tapes == "on")
        assert heap.tapes.num_audited >= (2 if tapes == "on" else 40)


def test_calls_are_compared_at_last():
    tapes, extra = make_tapes(), []

    def function(x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x + 1 if not extra else (x + 1) * extra[0],)

    run_often(tapes, function, lambda: [torch.rand(3)], times=9)
    assert (tapes.num_played, tapes.num_audited) == (6, 0)
    run_often(tapes, function, lambda: [torch.rand(3)], times=90)
    assert (tapes.num_played, tapes.num_audited) == (95, 1)
    extra.append(3.0)
    with pytest.raises(StaleTape, match="step 1 was None, and is Operator aten"):
        run_often(tapes, function, lambda: [torch.rand(3)], times=1)
    (y,) = run_often(tapes, function, lambda: [torch.ones(3)], times=1)
    assert torch.equal(y, torch.full((3,), 6.0))


@pytest.mark.parametrize("mode", ["off", "audit"])
def test_the_variable_decides_what_is_played_and_compared(mode, monkeypatch, request):
    monkeypatch.setenv("SYMMOE_TAPES", mode)
    heap, _, steps = request.getfixturevalue("alone")
    steps()
    assert (heap.tapes.num_played, heap.tapes.num_audited > 0) == (0, mode == "audit")


@pytest.mark.parametrize(
    ("name", "words"),
    [("SYMMOE_TAPES", "'on', 'audit', 'off'"), ("SYMMOE_FILL_MEMORY", "'0', '1'")],
)
def test_another_value_of_a_variable_is_refused(monkeypatch, name: str, words: str):
    monkeypatch.setenv(name, "twice")
    with pytest.raises(ArgumentError, match=rf"{name} \('twice'\) must be one of {words}"):
        SymmetricHeap(num_bytes=16 << 20, backend="host")


@pytest.mark.parametrize("fills", ["0", "1"])
def test_leases_and_memory_of_tapes_begin_as_nan(monkeypatch, fills: str):
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
            (made,) = heap.run(("some",), lambda: (x.new_empty(3, 5).t(),), [x])
        assert heap.tapes.num_played > 0
        assert made.isnan().all() or fills == "0"


@pytest.mark.parametrize("fills", ["0", "1"])
def test_leases_that_end_in_the_call_are_parts_of_one(monkeypatch, fills: str):
    monkeypatch.setenv("SYMMOE_FILL_MEMORY", fills)
    offsets = []

    @recorded
    def note(*leases: Lease) -> None:
        offsets.append([lease.offset for lease in leases])

    with SymmetricHeap(num_bytes=1 << 20, backend="host") as heap:

        def function() -> tuple[torch.Tensor]:
            kept = heap.lease((7,), torch.float32, name="kept")
            first, second = heap.lease((1000,), torch.int8), heap.lease((3, 5), torch.bfloat16)
            second.tensor.fill_(2)
            first.release()
            third = heap.lease((10,), torch.float64)
            third.tensor.fill_(3)
            note(kept, first, second, third)
            total = second.tensor.sum() + third.tensor.sum()
            second.release()
            third.release()
            return (kept.tensor.fill_(total),)

        for turn in range(5):
            before = heap.statistics.num_leases
            (y,) = heap.run(("some",), function, [torch.ones(2)])
            kept, first, second, third = offsets[-1]
            assert y.tolist() == [60.0] * 7
            assert heap.statistics.num_leases - before == (2 if turn > 2 else 4)
            assert (third == first) == (turn < 3 or fills == "0")
            assert len({kept, first, second}) == 3
            del y
            heap.lease((1,), torch.int8).release()  # takes back what has been dropped
            assert heap.leased_bytes == 0
        taken = heap.lease((heap.memory.arena.largest_free_bytes - 1024,), torch.int8)
        num_played = heap.tapes.num_played
        with pytest.raises(HeapExhausted, match="lease 'lease'"):
            heap.run(("some",), function, [torch.ones(2)])
        taken.release()
        assert (heap.leased_bytes, heap.tapes.num_played) == (0, num_played)
        assert heap.run(("some",), function, [torch.ones(2)])[0].tolist() == [60.0] * 7
        assert heap.tapes.num_played == num_played + 1


# -- errors in the middle of a played call ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    "options", [{}, {"schedule": "always-overlapped"}], ids=["defaults", "overlapped"]
)
@run_on(2)
def test_an_error_in_a_played_call_is_every_ranks(
    rank: int, num_ranks: int, findings: Findings, options: dict
) -> None:
    """An error of rank 0 before each of the kernels of a played step: all ranks raise, and the next call is right."""
    names: list[str] = []
    with open_heap("cpu", tapes="on", num_bytes=16 << 20, timeout_s=30, start_timeout_s=30) as heap:
        layer = taped.make_layer(heap, **options)
        x, dy = next(taped.make_calls(rank, 1, torch.float32))
        wanted = taped.step(layer, x, dy, "")
        for _ in range(4):
            taped.step(layer, x, dy, "")
        with before_steps(taped.CPU, names.append, twin.__all__):
            taped.step(layer, x, dy, "")
        last = (
            len(names) - 1 - names[::-1].index("barrier")
        )  # of errors after it peers learn in the next call
        for fails_at, name in enumerate(names[:last]):
            # Errors of the heap; one that peers could not be told of.
            if name in ("barrier", "push_slots"):
                continue
            left = [fails_at]

            def fail(_: str, left: list[int] = left) -> None:
                left[0] -= 1
                if left[0] == -1:
                    raise RuntimeError("no memory, say")

            findings.where = f"rank {rank}, error before {name} ({fails_at} of {len(names)})"
            with before_steps(taped.CPU, fail, twin.__all__) if rank == 0 else nullcontext():
                error = outcome(taped.step, layer, x, dy, "")
            expect(findings, error, "SymmoeError" if rank else "RuntimeError", "no memory, say")
            for _ in range(2):  # the first one measures again
                found = taped.step(layer, x, dy, "")
                findings.check(all(map(torch.equal, found, wanted)), "other bits afterwards")
        findings.check(heap.leased_bytes == 0, "leases are left")
        assert heap.tapes.num_played > 20


# -- what is played, and what is not ----------------------------------------------------------------------------------
def make_tapes() -> Tapes:
    return Tapes(taped.CPU, lambda error: None, raise_for, (), lambda: twin, lambda tape: tape)


def run_often(tapes: Tapes, function, make_inputs, *, times: int = 6, **numbers) -> list[object]:
    found = []
    for n in range(times):
        inputs = make_inputs()
        now = {name: value + n for name, value in numbers.items()}
        found.append(tapes.run(("some",), lambda inputs=inputs: function(*inputs), inputs, now)[0])
    return found


def test_a_call_is_played_once_two_recordings_agree():
    tapes = make_tapes()
    found = run_often(tapes, lambda x: (x * 2 + 1,), lambda: [torch.rand(3)], times=3)
    assert tapes.num_played == 0
    x = torch.rand(3)
    (again,) = tapes.run(("some",), lambda: pytest.fail("it was called"), [x], {})
    assert torch.equal(again, x * 2 + 1)
    assert (len({y.data_ptr() for y in (*found, again)}), tapes.num_played) == (4, 1)
    assert tapes.problems == []


def test_what_is_compiled_to_play_is_compiled_before_the_first_call():
    seen: list[object] = []
    tapes = Tapes(
        taped.CPU,
        lambda error: None,
        raise_for,
        (),
        lambda: twin,
        lambda tape: seen.append(tape) or tape,
    )
    tapes.run(("some",), lambda: seen.append("call") or (), [torch.rand(3)], {})
    assert seen[1:] == ["call"]


def test_other_shapes_strides_and_dtypes_are_other_kinds():
    tapes = make_tapes()
    run_often(tapes, lambda x: (x + 1,), lambda: [torch.rand(4, 3)])
    played = tapes.num_played
    for other in (torch.rand(3, 3), torch.rand(3, 4).t(), torch.rand(4, 3, dtype=torch.float64)):
        (y,) = tapes.run(("some",), lambda x=other: (x + 1,), [other], {})
        assert torch.equal(y, other + 1)
    assert tapes.num_played == played


def test_what_requires_gradients_is_another_kind():
    tapes, turns = make_tapes(), itertools.count()
    found = run_often(
        tapes,
        lambda x: (x.detach() * (2 if x.requires_grad else 3),),
        lambda: [torch.ones(3).requires_grad_(next(turns) % 3 == 0)],
        times=12,
    )
    assert [int(y[0]) for y in found] == [2, 3, 3] * 4
    assert tapes.num_played > 3


def test_nothing_is_played_on_a_poisoned_heap(alone):
    heap, layer, steps = alone
    steps()
    x, dy = next(taped.make_calls(0, 1, torch.float32))
    y, _ = layer(x.requires_grad_())
    heap.abort("a test")
    played = heap.tapes.num_played
    with pytest.raises(HeapPoisoned):
        y.backward(dy)
    assert heap.tapes.num_played == played


def test_a_number_that_changes_keeps_a_call_off_the_tape():
    tapes, counter = make_tapes(), iter(range(100))
    found = run_often(tapes, lambda x: (x + next(counter),), lambda: [torch.zeros(2)], times=8)
    assert ([int(y[0]) for y in found], tapes.num_played) == (list(range(8)), 0)
    assert tapes.problems == ["two calls differ in more than memory"]


def test_a_number_that_the_call_brings_may_change():
    tapes = make_tapes()
    seen: list[int] = []

    @recorded
    def note(*, generation: int) -> None:
        seen.append(generation)

    numbers = iter(range(7, 100))

    def function(x: torch.Tensor) -> tuple[torch.Tensor]:
        note(generation=next(numbers))
        return (x + 1,)

    run_often(tapes, function, lambda: [torch.zeros(2)], times=6, generation=7)
    assert (seen, tapes.num_played) == ([7, 8, 9, 10, 11, 12], 3)


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (lambda x: (x + OUTSIDE,), "memory of a [3] torch.float32 tensor is not known"),
        (lambda x: (x * x[0].item(),), "the host reads a tensor"),
        (lambda x: (x.sort()[0],), "aten.sort.default returns tuple"),
        (lambda x: (x[:0] + 1,), "memory of a [0] torch.float32 tensor is not known"),
    ],
    ids=["outside", "read back", "several results", "empty"],
)
def test_what_is_not_understood_is_not_played(function, problem):
    tapes = make_tapes()
    found = run_often(tapes, function, lambda: [torch.full((3,), 2.0)])
    assert all(torch.equal(y, function(torch.full((3,), 2.0))[0]) for y in found)
    assert tapes.num_played == 0
    assert problem in tapes.problems[0]


def test_inputs_that_share_memory_are_not_played():
    tapes = make_tapes()

    def inputs() -> list[torch.Tensor]:
        whole = torch.rand(4)
        return [whole[:3], whole[1:]]

    run_often(tapes, lambda a, b: (a + b,), inputs)
    assert (tapes.num_played, tapes.problems) == (0, ["inputs share memory"])


def test_views_and_writes_in_place_land_where_they_should():
    tapes = make_tapes()

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        whole = torch.empty(4, 3)
        whole[1:3].copy_(x)
        whole[0].zero_()
        whole[3].fill_(5)
        return whole[1:], whole.view(12)[4:]

    for _ in range(6):
        x = torch.rand(2, 3)
        a, b = tapes.run(("some",), lambda x=x: function(x), [x], {})
        assert torch.equal(a, torch.cat([x, torch.full((1, 3), 5.0)]))
        assert torch.equal(b, a.reshape(-1)[1:])
        assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    assert tapes.num_played == 3


def test_a_large_integer_of_a_kernel_may_be_an_address():
    x = torch.rand(3)
    with Recorder([x], {}, ()) as recording:
        recording.launch(None, ["x", "where"], (1,), 0, (x, 1 << 45), None)
    assert recording.finish(()) is None
    assert "where is an integer" in recording.problem


def test_there_is_no_tape_where_somebody_sees_every_operator():
    tapes = make_tapes()
    run_often(tapes, lambda x: (x + 1,), lambda: [torch.rand(2)])
    with FlopCounterMode(display=False) as counter:
        tapes.run(("some",), lambda: (torch.rand(2, 2) @ torch.rand(2, 2),), [torch.rand(2)], {})
    assert counter.get_total_flops() == 16


def test_numbers_of_equal_kinds_are_equal():
    tapes = make_tapes()
    assert tapes.number(("a", 1)) == tapes.number(("a", 1)) != tapes.number(("a", 2))
    assert CallInteger("x").get(Playing([], array("q"), {"x": 5}, lambda: twin)) == 5


def test_steps_of_layers_of_one_size_share_tapes(alone):
    heap, _, steps = alone
    steps()
    kinds = len(heap.tapes._kinds)
    x, dy = next(taped.make_calls(0, 1, torch.float32))
    taped.step(taped.make_layer(heap), x, dy, "")
    assert len(heap.tapes._kinds) == kinds
    assert heap.tapes.num_played > 5


def test_a_consumer_of_probs_may_give_no_gradient():
    class NoGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, probs: torch.Tensor) -> torch.Tensor:
            return probs.sum()

        @staticmethod
        def backward(ctx, grad: torch.Tensor) -> None:
            return None

    router = Router(MoEConfig(hidden=taped.H, ffn=taped.I, num_experts=taped.E, top_k=taped.K))
    x = torch.randn(5, taped.H, requires_grad=True)
    (NoGradient.apply(router(x).probs) + x.sum()).backward()
    assert x.grad.eq(1).all()


def test_a_closed_heap_keeps_no_tapes(alone):
    heap, _, steps = alone
    steps(5)
    heap.close()
    assert not heap.tapes._kinds


@pytest.mark.parametrize(
    ("name", "around"),
    [
        ("defaults", "checkpoint"),
        pytest.param("overlapped, expert-major, nothing kept", "", marks=pytest.mark.slow),
        pytest.param("losses", "checkpoint", marks=pytest.mark.slow),
    ],
)
@run_on(2)
def test_calls_that_get_too_little_room_at_random(
    rank: int, num_ranks: int, name: str, around: str
) -> list[str]:
    """check_bits, where a third of the calls get far too little room, recomputed ones and those of backward too."""
    room, calls = RowHistory.room, itertools.count()

    def random_room(self: RowHistory, *args: int | None) -> RowBudget | None:
        found = room(self, *args)
        too_little = random.Random(next(calls)).random() < 1 / 3  # in the same calls on all ranks
        return RowBudget(1, 0, 1, 1) if found is not None and too_little else found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowHistory, "room", random_room)
        num_played, _, texts = taped.check_bits(rank, num_ranks, taped.OPTIONS[name], around)
    assert num_played >= 16, (
        num_played
    )  # of 20 calls with two parts each, a third of which are repeated
    return texts


@run_on(1)
def test_a_router_needs_no_turn_on_the_heap(rank: int, num_ranks: int) -> None:
    """A router that runs by itself while another thread is in a call of the heap."""
    with SymmetricHeap(num_bytes=16 << 20, backend="host") as heap:
        layer = taped.make_layer(heap)
        x, _ = next(taped.make_calls(rank, 1, torch.float32))
        wanted = layer.router(x).probs
        with heap.one_call, ThreadPoolExecutor(1) as pool:
            assert torch.equal(pool.submit(layer.router, x).result().probs, wanted)


@pytest.mark.slow
def test_compiled_layers_are_played_too(alone):
    heap, layer, _ = alone
    compiled = torch.compile(layer, backend="aot_eager")
    for x, dy in taped.make_calls(0, 8, torch.float32):
        num_played = heap.tapes.num_played
        found, wanted = (
            torch.autograd.grad(each(x)[0], tuple(layer.parameters()), dy)
            for each in (compiled, layer)
        )
        assert all(map(torch.equal, found, wanted))
    assert (
        heap.tapes.num_played - num_played == 6
    )  # two of the eager call; router, plan and step of the compiled one
    assert heap.tapes.problems == []
