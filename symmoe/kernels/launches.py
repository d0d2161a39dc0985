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

import torch

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
    """A tensor that a launch reads or writes, or memory of peers, whose size nobody knows."""

    name: str  # of the parameter
    place: str  # input n, memory n (which the program makes), a lease, peers' leases, or the heap
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None  # None: of peers

    @property
    def num_bytes(self) -> int:
        return 0 if self.dtype is None else self.dtype.itemsize * math.prod(self.shape)


@dataclass(frozen=True)
class Launch:
    """One launch. kernel: of the contract, or an operator of torch, or what meets other nodes. Bytes are of its tensors
    on this rank, FLOPs those of its products; both at most, for the room that the call has. stream: "", that of the
    call, or "branch", which on CPUs is the same. waits_for: ranks, and streams; "": nothing but what is before it."""

    kernel: str
    reads: tuple[Use, ...]
    writes: tuple[Use, ...]
    waits_for: str
    stream: str
    flops: int

    @property
    def num_bytes(self) -> int:
        return sum(use.num_bytes for use in (*self.reads, *self.writes))

    def __str__(self) -> str:
        sizes = f"{_scaled(self.num_bytes):>6} {_scaled(self.flops) if self.flops else '':>6}"
        ways = " -> ".join(_text(uses) for uses in (self.reads, self.writes)).strip()
        waits = f" | waits for {self.waits_for}" if self.waits_for else ""
        return f"{self.kernel:29}{sizes}  {ways}{waits}{' | on a branch' * bool(self.stream)}"


@dataclass(frozen=True)
class ProgramLaunches:
    """What one program launches, in order, and how often it has run."""

    name: str
    num_runs: int
    launches: tuple[Launch, ...]

    def __str__(self) -> str:
        lines = [f"{self.name}: {len(self.launches)} launches, run {self.num_runs} times"]
        for launch in self.launches:
            lines += textwrap.wrap(f"  {launch}", _WIDTH, subsequent_indent=" " * 48)
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

        function, args, kwargs, result, is_on_branch, is_after_other = operation
        other = "the call's stream" if is_on_branch else "the branch"
        waits, product, written = [other] * is_after_other, None, list[str]()
        if isinstance(function, str):
            kernel, arguments = function, arguments_of(function, args, kwargs)
            product, written = product_of(kernel, arguments), getattr(Kernels, kernel).writes
            waits += self._ranks(kernel, arguments)
        elif inspect.isfunction(function):
            kernel, waits = function.__name__, [*waits, "other nodes"]
            arguments = inspect.signature(function).bind(*args, **kwargs).arguments
        else:
            kernel, schema = str(function), schema_of(function).arguments
            arguments = dict(zip((each.name for each in schema), args, strict=False))
            arguments |= {**kwargs, "result": result}
            aliases = {each.name: each.alias_info for each in schema}
            written = ["result", *(name for name, of in aliases.items() if of and of.is_write)]
        reads, writes = list[Use](), list[Use]()
        for name, value in arguments.items():
            if name == "peers":
                (writes if name in written else reads).extend(self._peers(kernel, arguments))
            elif f"{name}.0" in written:
                for n, part in enumerate(value or ()):
                    (writes if f"{name}.{n}" in written else reads).extend(self._uses(name, part))
            else:
                (writes if name in written else reads).extend(self._uses(name, value))
        stream, flops = "branch" * is_on_branch, 0 if product is None else product.most_flops
        return Launch(kernel, tuple(reads), tuple(writes), " and ".join(waits), stream, flops)

    def _ranks(self, kernel: str, arguments: dict[str, Any]) -> list[str]:
        """Ranks for which a kernel waits."""
        if kernel == "wait_for_signal":
            return [f"the signal of rank {arguments['rank']}"]
        if kernel != "barrier":
            return []
        words = [self._of_slot.get(word // SLOT_BYTES, "") for word in arguments["words"]]
        self._published[arguments["received"].slot] = words
        return [f"all ranks, '{control.PHASES[control.unpack_call(arguments['call'])['phase']]}'"]

    def _peers(self, kernel: str, arguments: dict[str, Any]) -> Iterator[Use]:
        """What a kernel reads or writes of peers."""
        columns = [value for name, value in arguments.items() if name.endswith("column")]
        if columns:
            published = self._published.get(arguments["received"].slot, ())
            places = [published[column] for column in columns if column < len(published)]
            yield from (Use("peers", f"peers' {place}") for place in places if place)
        elif kernel == "send_signal":
            yield Use("peers", f"signals of rank {arguments['rank']}")
        elif "nan_on_failure" not in arguments:  # which only waits have
            yield Use("peers", "count tables")

    def _uses(self, name: str, value: Any) -> Iterator[Use]:
        """The tensors of an argument, or the leases that a barrier publishes."""
        if isinstance(value, TensorTable):
            pointers: Any = value.pointers
            place = f"{self._place(pointers)}, by address"
            yield Use(name, place, value.shape, value.dtype)
        elif isinstance(value, (tuple, list)):
            for part in value:
                yield from self._uses(name, part)
        elif isinstance(value, Memory) and 0 not in value.shape:
            yield Use(name, self._place(value), value.shape, value.dtype)
        elif name == "words" and value >= SLOT_BYTES:
            yield Use(name, self._of_slot[value // SLOT_BYTES])

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
    of_peers = places.pop("peers", [])
    texts = [f"{its}: {', '.join(where)}" for its, where in places.items()]
    return "; ".join([*texts, *of_peers])


def _scaled(number: float) -> str:
    """With a thousandth of the precision, e.g. 1.23M."""
    for unit in ("", "k", "M", "G"):
        if number < 999.5:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}T"
