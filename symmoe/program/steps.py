"""The steps of a program: its entries in the form in which a call runs them. Every argument of a step lies in a slot:
constants from the beginning; views of memory, offsets and tuples after a step of their own."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from symmoe.program.program import (
    CLEAN,
    MARK,
    Address,
    Call,
    LeaseOffset,
    Mark,
    Number,
    ObjectSlot,
    Program,
    ResultField,
    Step,
    TensorRef,
    operands_of,
)
from symmoe.torch_internals import over_memory_of


def with_steps(program: Program) -> Program:
    """The program with its steps."""
    steps = _Steps(program)
    for entry in program.entries:
        steps.must_complete = entry.must_complete
        if isinstance(entry, Mark):
            steps.add(None, operator.itemgetter(steps.slot_of(entry.meaning)), MARK)
        else:
            assert isinstance(entry, Call)
            args, kwargs = entry.template
            names = {"names": tuple(kwargs), "named": steps.picker_of(kwargs.values())}
            steps.add(entry.function, steps.picker_of(args), entry.slot, **names)
    steps.must_complete = False
    result = steps.picker_of(program.outputs)
    slot_values = (*steps.slot_values, None, CLEAN)  # the last two in VALUES and MARK
    return replace(program, steps=tuple(steps.steps), slot_values=slot_values, result=result)


def run_steps(steps: Iterable[Step], slot_values: list[Any], kernels: Callable[[], object]) -> None:
    """Runs steps in order. kernels: returns the kernels, by name."""
    for function, arguments, slot, names, named, _ in steps:
        result = arguments(slot_values)
        if isinstance(function, str):
            function = getattr(kernels(), function)
        if function is not None:
            kwargs = dict(zip(names, named(slot_values), strict=True)) if names else {}
            result = function(*result, **kwargs)
        if slot is not None:
            slot_values[slot] = result


class _Steps:
    """Steps in order, and the values of the slots before the first one. must_complete: of new steps. No two uses of an
    operand share a step: work owed to the peers depends on nothing else, and no two outputs are one tensor."""

    def __init__(self, program: Program) -> None:
        self.steps: list[Step] = []
        self.slot_values: list[Any] = [None] * program.num_slots
        self.must_complete = False
        self._leased = {lease.slot for lease in program.leases.leased} if program.leases else set()

    def add(self, function: Any, arguments: Any, slot: int | None, **names: Any) -> None:
        """Adds a step."""
        self.steps.append(
            Step(function, arguments, slot, must_complete=self.must_complete, **names)
        )

    def picker_of(self, values: Iterable[Any]) -> Callable[[list[Any]], Any]:
        """Function from the slot_values to the sequence of these values, with their operands filled in."""
        slots = [self.slot_of(value) for value in values]
        if len(slots) > 1:
            return operator.itemgetter(*slots)
        first = slots[0] if slots else 0
        # itemgetter of one place would return the element itself.
        return operator.itemgetter(slice(first, first + len(slots)))

    def slot_of(self, value: Any) -> int:
        """The slot of a value with its operands filled in, maybe by new steps."""
        if isinstance(value, (ObjectSlot, Number)):
            return value.slot
        if isinstance(value, TensorRef) and value.constant is not None and value.constant.numel():
            value = value.constant
        if next(operands_of(value), None) is None:
            self.slot_values.append(value)
            return len(self.slot_values) - 1
        if isinstance(value, dict):
            values = self._derive(None, *value.values())
            return self._derive(partial(_with_keys, tuple(value)), ObjectSlot(values))
        if isinstance(value, (tuple, list)):
            values = self._derive(None, *value)
            return self._derive(getattr(value, "_make", type(value)), ObjectSlot(values))
        return self._operand(value)

    def _derive(self, function: Callable[..., Any] | None, *args: Any) -> int:
        """The slot of a new step's result."""
        picker = self.picker_of(args)
        self.slot_values.append(None)
        self.add(function, picker, slot := len(self.slot_values) - 1)
        return slot

    def _operand(self, value: Any) -> int:
        match value:
            case TensorRef(slot=None, constant=empty):
                # A returned empty tensor joins a graph of autograd: each call needs a new one.
                return self._derive(torch.empty_like, empty)
            case TensorRef(slot=int() as slot):
                base = ObjectSlot(slot)
                if slot in self._leased:
                    base = ObjectSlot(self._derive(operator.attrgetter("tensor"), base))
                return self._derive(partial(_view, value), base)
            case Address(tensor=tensor):
                return self._derive(torch.Tensor.data_ptr, tensor)
            case LeaseOffset(slot=slot, offset_bytes=inside):
                start = self._derive(operator.attrgetter("offset"), ObjectSlot(slot))
                return self._derive(operator.add, ObjectSlot(start), inside)
            case ResultField(slot=slot, index=index):
                return self._derive(operator.getitem, ObjectSlot(slot), index)
        raise AssertionError(f"an unknown operand: {value}")


def _with_keys(keys: Iterable[str], values: Iterable[Any]) -> dict[str, Any]:
    return dict(zip(keys, values, strict=True))


def _view(ref: TensorRef, base: torch.Tensor) -> torch.Tensor:
    """The tensor over memory that begins with the base's first element; the base itself if it has the same meta."""
    meta = ref.shape, ref.stride, ref.dtype
    if ref.offset_bytes == 0 and (base.shape, base.stride(), base.dtype) == meta:
        return base
    item_bytes = ref.dtype.itemsize
    if base.dtype == ref.dtype:
        return over_memory_of(base, ref.shape, ref.stride, ref.offset_bytes // item_bytes)
    storage = base.untyped_storage()
    first_byte = base.data_ptr() - storage.data_ptr() + ref.offset_bytes
    empty = torch.empty(0, dtype=ref.dtype, device=base.device)
    return empty.set_(storage, first_byte // item_bytes, ref.shape, ref.stride)
