"""Steps of programs: their arguments, in tests without kernels."""

from typing import Any, NamedTuple

import pytest
import torch

from symmoe.kernels import twin
from symmoe.program.program import (
    CLEAN,
    MARK,
    MUST_SIGNAL,
    Call,
    Entry,
    LeaseOffset,
    Mark,
    Number,
    ObjectSlot,
    Program,
    ResultField,
    TensorRef,
)
from symmoe.program.steps import run_steps, with_steps

BASE = torch.arange(12.0)
EMPTY = TensorRef(None, 0, (0, 3), (3, 1), torch.float32, torch.empty(0, 3))


class Pair(NamedTuple):
    first: Any
    second: Any


class Leased(NamedTuple):
    slot: int


class Leases(NamedTuple):
    leased: list[Leased]


class Lease(NamedTuple):
    tensor: torch.Tensor
    offset: int


def view(offset_bytes: int, *shape: int, dtype: torch.dtype = torch.float32) -> TensorRef:
    """A contiguous tensor in the memory of slot 0."""
    strides = torch.empty(shape, device="meta").stride()
    return TensorRef(0, offset_bytes, shape, strides, dtype)


def run(*entries: Entry, inputs: tuple[Any, ...] = (BASE, 7), **fields: Any) -> Program:
    """Runs entries with these inputs in the first slots; returns the program, and the values of all slots."""
    program = with_steps(Program(len(inputs) + 2, entries, (), **fields))
    slot_values = [*inputs, *program.slot_values[len(inputs) :]]
    run_steps(program.steps, slot_values, lambda: twin)
    return slot_values


@pytest.mark.parametrize(
    ("operand", "value"),
    [
        (ObjectSlot(0), BASE),
        (Number(1), 7),
        (view(0, 12), BASE),
        (view(8, 2, 3), BASE[2:8].view(2, 3)),
        (view(4, 4, dtype=torch.int16), BASE[1:3].view(torch.int16)),
        ((view(8, 2), 5), (BASE[2:4], 5)),
        ([view(8, 2)], [BASE[2:4]]),
        ({"a": view(8, 2), "b": 5}, {"a": BASE[2:4], "b": 5}),
        (Pair(view(8, 2), (view(12, 1),)), Pair(BASE[2:4], (BASE[3:4],))),
        (EMPTY, torch.empty(0, 3)),
        (5, 5),
    ],
)
@pytest.mark.parametrize("by_name", [False, True])
def test_an_operand_gets_its_value_in_each_call(operand, value, by_name: bool):
    calls = []
    template = ((), {"value": operand}) if by_name else ((operand,), {})
    call = Call(lambda value: calls.append(value), template, None)
    for _ in range(2):
        run(call)
    for actual in calls:
        torch.testing.assert_close(actual, value, rtol=0, atol=0)
        assert type(actual) is type(value)


def test_leases_and_results_have_parts():
    lease, calls = Lease(BASE, 256), []
    run(
        Call(lambda: (1, 2, 3), ((), {}), 2),
        Call(
            lambda *values: calls.extend(values),
            ((LeaseOffset(0, 8), ResultField(2, 1), view(8, 2)), {}),
            None,
        ),
        inputs=(lease, 7),
        leases=Leases([Leased(0)]),
    )
    assert calls[:2] == [264, 2]
    assert torch.equal(calls[2], BASE[2:4])


def test_two_outputs_are_two_tensors_and_an_empty_one_is_new_in_each_call():
    program = with_steps(Program(1, (), (view(0, 3), view(0, 3), EMPTY, EMPTY)))
    results = []
    for _ in range(2):
        slot_values = [BASE, *program.slot_values[1:]]
        run_steps(program.steps, slot_values, lambda: twin)
        results += program.result(slot_values)
    assert len({id(tensor) for tensor in results}) == 8
    assert results[0].data_ptr() == results[1].data_ptr() == BASE.data_ptr()


def test_work_owed_to_peers_depends_on_no_other_step():
    calls = []
    entries = [
        Mark(MUST_SIGNAL),
        Call(calls.append, ((view(8, 2),), {}), None),
        Call(calls.append, (((view(8, 2), 1),), {}), None, must_complete=True),
        Mark(CLEAN),
    ]
    program = with_steps(Program(1, tuple(entries), ()))
    slot_values = [BASE, *program.slot_values[1:]]
    run_steps([step for step in program.steps if step.must_complete], slot_values, lambda: twin)
    ((owed, further),) = calls
    assert further == 1
    assert torch.equal(owed, BASE[2:4])
    assert slot_values[MARK] == CLEAN
    assert [step.slot for step in program.steps].count(MARK) == 2
