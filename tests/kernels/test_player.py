"""Sections of programs: their launches, the entries around them, and the driver's launches."""

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from fake_cuda import STREAM, FakeCompiled, FakeCuda, FakeJIT

from symmoe.errors import SymmoeError
from symmoe.kernels import twin
from symmoe.kernels.hopper import gemm as hopper_gemm
from symmoe.kernels.launch import driver, player, triton_internals
from symmoe.kernels.launch import launch as launches
from symmoe.kernels.launch.launch import Constants, FastLaunch
from symmoe.kernels.launch.player import known_kernel
from symmoe.kernels.triton import gemm
from symmoe.kernels.triton.tiles import describe
from symmoe.program.builder import builder
from symmoe.program.program import (
    IN_ORDER,
    NEW,
    NOTE,
    OPERATOR,
    VALUES,
    Call,
    Entry,
    Event,
    Launch,
    Mark,
    ObjectSlot,
    Program,
    TensorRef,
)
from symmoe.program.programs import Programs
from symmoe.program.steps import run_steps, with_steps


# -- sections -------------------------------------------------------------------------------------------------------
class Section(list):
    must_complete = False


@pytest.fixture
def lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sections are lists of their launches."""
    monkeypatch.setattr(driver, "can_launch", lambda: True)
    monkeypatch.setattr(
        player, "Section", lambda launches, layout: SimpleNamespace(call=Section(launches))
    )


def launch(*slots: int, stream: int | None = None) -> Launch:
    return Launch(
        None, (1,), tuple(TensorRef(slot, 0, (2,), (1,), torch.float32) for slot in slots), stream
    )


def new_memory(slot: int, num_bytes: int = 8) -> Call:
    return Call(print, (((num_bytes,), (1,), torch.uint8), {}), slot, NEW)


def lease(slot: int) -> Call:
    return Call(print, (((2,),), {}), slot)


def end_of(slot: int) -> Call:
    return Call(print, ((ObjectSlot(slot),), {}), None)


def operator(slot: int) -> Call:
    return Call(torch.neg, ((TensorRef(slot, 0, (2,), (1,), torch.float32),), {}), None, OPERATOR)


def note(slot: int) -> Call:
    return Call(print, ((ObjectSlot(slot),), {}), 9, NOTE)


def in_order(*entries: Entry, returned: tuple[int, ...] = (0, 1)) -> tuple[object, ...]:
    program = player.in_sections(Program(10, entries, tuple(map(ObjectSlot, returned))))
    return program.entries


def test_memory_and_leases_come_before_the_launches_and_leases_end_after_them(lists):
    first = launch()
    second = launch()
    noted = note(1)
    ends = end_of(1)
    memory = new_memory(0)
    leased = lease(1)
    actual = in_order(memory, first, leased, Mark("clean"), noted, second, ends)
    assert actual == (memory, leased, noted, [first, second], Mark("clean"), ends)


def test_an_operator_stays_between_the_launches_that_it_was_between(lists):
    first = launch()
    last = launch()
    wait = Event(5, 7, is_wait=True)
    first_memory = new_memory(0)
    actual = in_order(
        first_memory, first, operators := operator(0), second_memory := new_memory(1), wait, last
    )
    assert actual == (first_memory, second_memory, [first], operators, [wait, last])
    assert in_order(first_memory, first, operators) == (first_memory, [first], operators)


@pytest.mark.parametrize(
    "entry", [operator(0), Call(print, ((ObjectSlot(0),), {}), 1)], ids=["operator", "call"]
)
def test_a_lease_gets_no_memory_that_is_in_use(lists, entry):
    first = launch()
    second = launch()
    entries = lease(0), first, end_of(0), lease(1), second, end_of(1)
    assert in_order(*entries) == (entries[0], [first], entries[2], entries[3], [second], entries[5])
    entries = first, entry, lease(1), second
    assert in_order(*entries) == ([first], entry, entries[2], [second])


def test_small_memory_that_only_launches_use_is_one_allocation(lists):
    entries = (
        new_memory(0),
        new_memory(1, 300),
        new_memory(2),
        launch(0, 1),
        launch(1, 2, stream=7),
        new_memory(3),
        operator(3),
    )
    *allocations, section, used = in_order(*entries, returned=(0,))
    assert (allocations[0], allocations[1], section, used) == (
        entries[0],
        entries[5],
        [entries[3], entries[4]],
        entries[6],
    )
    assert (allocations[2].slot, allocations[2].template[0]) == (
        1,
        ((512 + 256,), (1,), torch.uint8),
    )
    assert player._with_memory_planned(Program(10, entries, ()), [], parts := {}) == [
        entries[3],
        entries[4],
        entries[6],
    ]
    assert parts == {0: (0, 0), 1: (0, 256), 2: (0, 256 + 512)}


def test_large_memory_ends_before_more_is_made_unless_it_is_used_later_or_elsewhere(lists):
    large = [new_memory(slot, 40 << 20) for slot in range(2)]
    uses = [launch(slot) for slot in range(2)]
    entries = large[0], uses[0], large[1], uses[1]
    actual = in_order(*entries, returned=(1,))
    assert (actual[:2], actual[3:]) == ((large[0], [uses[0]]), (large[1], [uses[1]]))
    program = with_steps(Program(1, (actual[2],), ()))
    slot_values = ["memory", *program.slot_values[1:]]
    run_steps(program.steps, slot_values, lambda: twin)
    assert slot_values[0] is None
    assert in_order(*entries)[:2] == (large[0], large[1])
    for later in (uses[0], launch(0, stream=7), launch(1, stream=7)):
        assert in_order(*entries, later, returned=(1,))[:2] == (large[0], large[1])


def test_an_interruption_between_sections_aborts_the_heap_where_peers_wait(lists):
    """Owed launches share a section with other launches, so an interruption before the section cannot launch them."""
    marks = [Mark(text) for text in ("must abort", "must signal", "clean")]
    first = launch()
    second = launch()
    between = operator(0)
    actual = in_order(marks[0], first, marks[1], between, second, marks[2])
    assert actual == ([first], marks[0], between, [second], marks[2])


# -- launches -------------------------------------------------------------------------------------------------------
@triton.jit
def example_kernel(
    desc, x, index, count: tl.int64, typed: tl.int64, fraction: tl.float32, WIDTH: tl.constexpr
):
    pass


@pytest.fixture
def calls(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch):
    """A function of tensors that launches the example twice, on memory that it makes."""
    monkeypatch.setattr(example_kernel, "run", FakeJIT(example_kernel, fake_cuda), raising=False)
    kernel = FastLaunch(example_kernel)
    constants = Constants({"WIDTH": 64}, {0: describe([4, 8])})

    def function(rows: torch.Tensor, scale: torch.Tensor, number: int) -> tuple[torch.Tensor]:
        y = torch.empty(8, 8)
        small = torch.empty(8)
        if (current := builder()) is not None:
            current.launches_with(lambda: (-1, number), (), {}, ("count", "typed"), None)
        launches.launch(kernel, (3, 2), constants, rows[8:], y, small, -1, number, 0.5)
        y.neg_()
        launches.launch(kernel, (1,), constants, y, scale[4:], small[2:], 7, -(2**62), -0.25)
        return (y,)

    return function


def test_launches_get_the_arguments_of_the_call(calls, fake_cuda: FakeCuda):
    programs = Programs(
        torch.device("cpu"), lambda error: None, (), lambda: twin, player.in_sections
    )
    for number in range(6):
        fake_cuda.happened.clear()
        rows = torch.zeros(24, 8)
        scale = torch.zeros(8)
        (y,) = programs.run(("some",), lambda r=rows, s=scale: calls(r, s, 3), [rows, scale], {})
        assert (programs.num_built, programs.num_runs) == (min(1, number), number)
        first, second = fake_cuda.launches
        small, half, quarter = (
            first.words[6],
            *(torch.tensor(value).view(torch.int32).item() for value in (0.5, -0.25)),
        )
        assert (first.grid, second.grid) == ((3, 2, 1), (1, 1, 1))
        assert first.words == (
            rows[8:].data_ptr(),
            16,
            8,
            8,
            1,
            y.data_ptr(),
            small,
            -1,
            3,
            half,
            0,
            0,
        )
        values = scale[4:].data_ptr(), small + 8, 7, -(2**62), quarter
        assert second.words == (y.data_ptr(), 8, 8, 8, 1, *values, 0, 0)


class FakeEvent:
    """An event of torch, with a number."""

    count = 0

    def __init__(self) -> None:
        FakeEvent.count += 1
        self.cuda_event = FakeEvent.count

    def record(self) -> None:
        """Creates the event."""


@pytest.fixture
def sections(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch):
    """A function from the entries of a program to the driver's calls in its run; a number is a launch on that
    stream."""
    kernel = FakeJIT(example_kernel, fake_cuda)
    monkeypatch.setattr(example_kernel, "run", kernel, raising=False)
    fast = FastLaunch(example_kernel)
    args = torch.empty(8), torch.empty(8), torch.empty(8), 1, 2, 0.5
    launches.launch(fast, (1,), Constants({"WIDTH": 64}), *args)
    ((_, kernel_of_example),) = next(iter(fast._calls.values())).variants.values()
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(FakeEvent, "count", 100)

    places = [TensorRef(0, 0, (8,), (1,), torch.float32)] * 3

    def happened(*entries: Entry | int | None) -> list[Any]:
        entries_of = [
            entry
            if isinstance(entry, Entry)
            else Launch(kernel_of_example, (1,), (*places, 1, 2, 0.5), entry, {})
            for entry in entries
        ]
        program = with_steps(player.in_sections(Program(3, tuple(entries_of), ())))
        slot_values = [args[0], *program.slot_values[1:]]
        slot_values[VALUES] = array("q", [STREAM, *program.values[1:]])
        fake_cuda.happened.clear()
        run_steps(program.steps, slot_values, lambda: twin)
        return [getattr(entry, "after", entry) for entry in fake_cuda.happened]

    return happened


def recorded(slot: int, stream: int | None = None) -> Event:
    return Event(slot, stream, "a stream")


def waited(slot: int, stream: int | None = None) -> Event:
    return Event(slot, stream, is_wait=True)


def test_streams_and_events_are_edges_of_a_graph(sections):
    # Launches on the current stream before and during the work of stream 5, which then joins.
    entries = None, recorded(0), None, waited(0, 5), 5, 5, recorded(1, 5), None, waited(1), None
    assert sections(*entries) == [(), (0,), (0,), (2,), (1,), (4, 3)]


def test_an_event_of_an_earlier_section_has_happened(sections):
    entries = None, recorded(0), 5, recorded(1, 5), operator(0), waited(0), waited(1), None
    assert sections(*entries) == [(), (), ()]


def test_a_graph_waits_for_work_between_sections_and_is_waited_for(sections):
    """Stream 5 exchanges messages between sections: separate events order its work before and after them."""

    def exchange() -> None:
        happened.append("exchange")

    exchange.is_in_order = True
    happened: list[str] = []
    in_order = Call(exchange, ((), {}), None, IN_ORDER)
    entries = None, recorded(0), waited(0, 5), in_order, recorded(1, 5), None, waited(1), None
    first = [(), ("record", 101, (0,)), ("wait", 5, 101)]
    second = [("record", 102, 5), (), ("wait", STREAM, 102), (0, 1)]
    assert sections(*entries) == [*first, *second]
    assert happened == ["exchange"]


def test_a_launch_that_fails_is_made_whole_by_the_next(
    calls, fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
):
    programs = Programs(
        torch.device("cpu"), lambda error: None, (), lambda: twin, player.in_sections
    )
    rows = torch.zeros(24, 8)
    scale = torch.zeros(8)

    def run() -> None:
        programs.run(("some",), lambda: calls(rows, scale, 3), [rows, scale], {})

    for _ in range(4):
        run()
    before = fake_cuda.num_changed
    with monkeypatch.context() as patch:
        patch.setattr(fake_cuda, "cuGraphExecKernelNodeSetParams_v2", lambda *_: 1)
        rows = torch.zeros(24, 8)
        with pytest.raises(SymmoeError, match="cuGraphExecKernelNodeSetParams"):
            run()
    fake_cuda.happened.clear()
    run()
    assert fake_cuda.launches[0].words[0] == rows[8:].data_ptr()
    assert fake_cuda.num_changed == before + 2
    fake_cuda.fails = 700
    with pytest.raises(SymmoeError, match="cuGraphLaunch returned 700"):
        run()


def test_parameters_are_those_of_the_compiled_kernel(
    fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
):
    """The parameters of a kernel in Gluon and of one in Triton: their number, with tensor maps where PTX has 128
    bytes."""
    by_name = {}

    def kernel_of(
        fast: FastLaunch, grid: tuple[int, ...], constants: Constants, *args: Any
    ) -> None:
        options = {**launches.OPTIONS, **constants.named}
        compiled = fast.kernel.run(*constants.described(args), grid=grid, warmup=True, **options)
        compiled._run, compiled.function = FakeCompiled().run, 7
        fake_cuda.num_parameters[7] = compiled.asm["ptx"].count("\t.param ")
        parts = (
            triton_internals.read_compiled(compiled),
            args,
            [i for i, arg in enumerate(args) if arg is not None],
        )
        by_name[compiled.name] = (
            known_kernel(compiled.name, *parts, constants.descriptors),
            args,
            compiled.asm["ptx"],
        )

    for module in (hopper_gemm, gemm):
        monkeypatch.setattr(module, "launch", kernel_of)
    rows, weight, out = (
        torch.empty(shape, dtype=torch.bfloat16) for shape in ((128, 64), (4, 256, 64), (128, 256))
    )
    row_range = torch.empty(2, 4, dtype=torch.int32)
    hopper_gemm.launch_gemm(rows, weight, row_range, out, weight_k_first=False, num_sms=8)
    gemm.grouped_gemm(rows, weight, row_range, out, num_sms=8)
    assert sorted(by_name) == ["grouped_gemm_kernel", "hopper_gemm_kernel"]
    for kernel, args, ptx in by_name.values():
        entry = ptx[ptx.index(".entry") : ptx.index(")", ptx.index(".entry"))].split(",")
        parts = {position: [-2] * len(words) for position, (words, _) in kernel.maps(args).items()}
        values = dict.fromkeys(range(len(kernel.kinds)), (1, 0))
        maps = [index != -1 for _, _, index in kernel.parameters(values, parts)]
        assert maps == [".b8" in parameter and "[128]" in parameter for parameter in entry]
