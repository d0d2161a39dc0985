"""What a call launches, as a table: every kernel of the programs that it runs, by its name in the contract, what that
reads and writes, and whom it waits for. The same on CPUs and GPUs."""

from __future__ import annotations

import inspect
import math
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from symmoe.errors import ArgumentError
from symmoe.kernels import control
from symmoe.kernels.contract import Kernels
from symmoe.kernels.tensor_table import TensorTable
from symmoe.program.builder import SLOT_BYTES
from symmoe.program.program import Memory, Operation, Program
from symmoe.program.programs import Programs, Recorded
from symmoe.torch_internals import schema_of

_WIDTH = 120
_OF_HEAP = "the heap"  # constants; not in the text


class Use(NamedTuple):
    """A tensor that a launch reads or writes."""

    name: str  # of the parameter
    place: str  # input n, memory n (which the program makes), a lease, peers' leases, or the heap
    num_bytes: int = 0  # of the tensor; 0 if it is not this rank's


@dataclass(frozen=True)
class Launch:
    """One launch. kernel: of the contract, or an operator of torch, or what meets other nodes. Bytes are of its tensors
    on this rank, FLOPs those of its products; both at most, for the room that the call has. waits_for: "" or whom."""

    kernel: str
    reads: tuple[Use, ...]
    writes: tuple[Use, ...]
    waits_for: str
    flops: int

    @property
    def num_bytes(self) -> int:
        return sum(use.num_bytes for use in (*self.reads, *self.writes))

    def __str__(self) -> str:
        ways = " -> ".join(_text(uses) for uses in (self.reads, self.writes))
        waits = f" | waits for {self.waits_for}" if self.waits_for else ""
        sizes = f"{_scaled(self.num_bytes):>6}B {_scaled(self.flops) if self.flops else '':>7} "
        return f"{self.kernel:22}{sizes} {ways.strip()}{waits}"


@dataclass(frozen=True)
class ProgramLaunches:
    """What one program launches, in order, and how often it has run."""

    name: str
    num_runs: int
    launches: tuple[Launch, ...]

    def __str__(self) -> str:
        lines = [f"{self.name}: {len(self.launches)} launches, run {self.num_runs} times"]
        for launch in self.launches:
            lines += textwrap.wrap(f"  {launch}", _WIDTH, subsequent_indent=" " * 41)
        return "\n".join(lines)


class Launches:
    """What :func:`record_launches` yields. print() shows a table; `programs` has it as data."""

    def __init__(self, recorded: Sequence[Recorded]) -> None:
        self._recorded = recorded

    @property
    def programs(self) -> tuple[ProgramLaunches, ...]:
        """Each program that has run, in the order of the first runs."""
        return tuple(
            ProgramLaunches(str(key[0]), num_runs, _launches_of(program, num_inputs))
            for (key, num_inputs, program), num_runs in Counter(self._recorded).items()
        )

    def __str__(self) -> str:
        nothing = (
            "no program has run: the first calls of a size have none (docs/design.md, Programs)"
        )
        return "\n\n".join(map(str, self.programs)) or nothing


@contextmanager
def record_launches() -> Iterator[Launches]:
    """A context that records which programs this process runs, those of all heaps, of grouped layers and of routers.
    Calls without a program are not in it, e.g. the first ones of a size. It costs next to nothing; the table is made
    when it is asked for. ArgumentError in another one."""
    if Programs.recorded is not None:
        raise ArgumentError("record_launches: launches are being recorded already")
    recorded = Programs.recorded = list[Recorded]()
    try:
        yield Launches(recorded)
    finally:
        Programs.recorded = None


def _launches_of(program: Program, num_inputs: int) -> tuple[Launch, ...]:
    places = _Places(program, num_inputs)
    return tuple(map(places.launch, program.operations))


class _Places:
    """Where the tensors of a program are. Memory has numbers in the order of its first use."""

    def __init__(self, program: Program, num_inputs: int) -> None:
        self._of_slot = {slot: f"input {slot}" for slot in range(num_inputs)}
        if (leases := program.leases) is not None:
            self._of_slot |= {each.slot: f"lease '{each.name}'" for each in leases.kept}
            self._of_slot |= {each.slot: f"lease '{each.name}'" for each in leases.parts}
        self._num_memory = 0
        self._published: dict[Any, list[str]] = {}  # by what a barrier returned, leases of peers

    def launch(self, operation: Operation) -> Launch:
        """What one operation launches."""
        from symmoe.kernels.flops import arguments_of, product_of  # which imports torch's counter

        function, args, kwargs, result = operation
        if not isinstance(function, str):
            return self._other(function, args, kwargs, result)
        arguments = arguments_of(function, args, kwargs)
        written = getattr(Kernels, function).writes
        reads, writes = list[Use](), list[Use]()
        for name, value in arguments.items():
            parts = {name: value}
            if f"{name}.0" in written:
                parts = {f"{name}.{n}": part for n, part in enumerate(value or ())}
            for part, its in parts.items():
                uses = (
                    self._peers(function, arguments) if name == "peers" else self._uses(name, its)
                )
                (writes if part in written else reads).extend(uses)
        waits_for = ""
        if function == "barrier":
            phase = control.PHASES[control.unpack_call(arguments["call"])["phase"]]
            waits_for = f"all ranks, '{phase}'"
            words = [self._of_slot.get(word // SLOT_BYTES, "") for word in arguments["words"]]
            self._published[arguments["received"].slot] = words
            reads = [
                Use("words", place)
                for word, place in zip(arguments["words"], words, strict=True)
                if word >= SLOT_BYTES
            ]
        elif function == "wait_for_signal":
            waits_for = f"the signal of rank {arguments['rank']}"
        product = product_of(function, arguments)
        flops = 0 if product is None else product.most_flops
        return Launch(function, tuple(reads), tuple(writes), waits_for, flops)

    def _other(self, function: Any, args: Any, kwargs: Any, result: Memory | None) -> Launch:
        """An operator of torch, or a function that meets other nodes."""
        reads, writes = list[Use](), list[Use]()
        if inspect.isfunction(function):
            for name, value in inspect.signature(function).bind(*args, **kwargs).arguments.items():
                reads += self._uses(name, value)
            return Launch(function.__name__, tuple(reads), (), "other nodes", 0)
        for each, value in zip(schema_of(function).arguments, args, strict=False):
            is_written = each.alias_info is not None and each.alias_info.is_write
            (writes if is_written else reads).extend(self._uses(each.name, value))
        writes += self._uses("result", result)
        return Launch(str(function), tuple(reads), tuple(writes), "", 0)

    def _peers(self, function: str, arguments: dict[str, Any]) -> Iterator[Use]:
        """What a kernel reads or writes of peers."""
        columns = [value for name, value in arguments.items() if name.endswith("column")]
        if columns:
            published = self._published.get(arguments["received"].slot, ())
            for column in columns:
                if column < len(published) and published[column]:
                    yield Use("peers", f"peers' {published[column]}")
        elif function == "send_signal":
            yield Use("peers", f"signals of rank {arguments['rank']}")
        elif "words" not in arguments and function != "wait_for_signal":
            yield Use("peers", "count tables")

    def _uses(self, name: str, value: Any) -> Iterator[Use]:
        """The tensors of an argument."""
        if isinstance(value, TensorTable):
            place = self._place(value.pointers)
            yield Use(name, f"{place}, by address", value.dtype.itemsize * math.prod(value.shape))
        elif isinstance(value, (tuple, list)):
            for part in value:
                yield from self._uses(name, part)
        elif isinstance(value, Memory) and 0 not in value.shape:
            num_bytes = value.dtype.itemsize * math.prod(value.shape)
            yield Use(name, self._place(value), num_bytes)

    def _place(self, memory: Memory) -> str:
        if memory.slot is None:
            return _OF_HEAP
        if memory.slot not in self._of_slot:
            self._of_slot[memory.slot] = f"memory {self._num_memory}"
            self._num_memory += 1
        return self._of_slot[memory.slot]


def _text(uses: tuple[Use, ...]) -> str:
    """Names of parameters and their places; those of one place together, and those with the same names."""
    names, places = dict[str, list[str]](), dict[str, list[str]]()
    for use in uses:
        if use.place != _OF_HEAP:
            its = names.setdefault(use.place, [])
            its += [use.name] * (use.name not in its)
    for place, its in names.items():
        places.setdefault(", ".join(its), []).append(place)
    return "; ".join(f"{its}: {', '.join(where)}" for its, where in places.items())


def _scaled(number: float) -> str:
    """With a thousandth of the precision, e.g. 1.23M."""
    for unit in ("", "k", "M", "G"):
        if number < 999.5:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}T"
