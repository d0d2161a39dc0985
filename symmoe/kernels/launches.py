"""The launches of a call, as a table: every kernel of its programs, by the name of its twin, the tensors that it reads
and writes, and the ranks that it waits for. CPUs and GPUs have the same table."""

import inspect
import itertools
import math
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from symmoe.kernels import control
from symmoe.kernels.operands import TensorTable, in_parts
from symmoe.kernels.twin import Kernels
from symmoe.program.builder import SLOT_BYTES
from symmoe.program.program import Operation, Program, TensorRef
from symmoe.program.programs import Programs, Recorded

_NOTHING = "no program has run: the first calls of a size have none (docs/design/programs.md)"


class Argument(NamedTuple):
    """A tensor that a launch reads or writes, or memory of peers, whose size is unknown here."""

    name: str  # the parameter's name
    place: str  # input n, memory n (allocated by the program), a lease, peers' leases, or the heap
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None  # None: of peers

    @property
    def num_bytes(self) -> int:
        return 0 if self.dtype is None else self.dtype.itemsize * math.prod(self.shape)


@dataclass(frozen=True)
class Launch:
    """One launch. kernel: the name of a twin, an operator of torch, or an exchange with other nodes. Bytes count its
    tensors on this rank, FLOPs its products; both are upper bounds, for the call's full capacity. waits_for: ranks and
    streams; "": only earlier work of its stream. stream: "", the call's stream, or "branch", on CPUs the same
    stream."""

    kernel: str
    reads: tuple[Argument, ...]
    writes: tuple[Argument, ...]
    flops: int
    waits_for: str
    stream: str

    @property
    def num_bytes(self) -> int:
        return sum(argument.num_bytes for argument in (*self.reads, *self.writes))

    def __str__(self) -> str:
        sizes = f"{self.num_bytes / 1e6:10.3f} {self.flops / 1e9:10.3f}"
        ways = f"{_text(self.reads)} -> {_text(self.writes)}".removesuffix(" -> ").strip()
        waits = f" | waits for {self.waits_for}" * bool(self.waits_for)
        return f"{self.kernel:28}{sizes}  {ways}{waits}{' | on a branch' * bool(self.stream)}"


@dataclass(frozen=True)
class ProgramLaunches:
    """The launches of one program, in order, and the number of its runs."""

    name: str
    num_runs: int
    launches: tuple[Launch, ...]

    def __str__(self) -> str:
        title = f"{self.name}, {self.num_runs} times"
        lines = [f"{title:28}{'MB':>10} {'GFLOP':>10}  reads -> writes (sizes are at most these)"]
        for launch in self.launches:
            lines += textwrap.wrap(str(launch), 120, subsequent_indent=" " * 53)
        return "\n".join(lines)


class Launches:
    """The result of :func:`record_launches`. print() shows a table; `programs` has it as data."""

    def __init__(self, recorded: Sequence[Recorded]) -> None:
        self._recorded = recorded

    @property
    def programs(self) -> tuple[ProgramLaunches, ...]:
        """Each program that has run, in the order of the first runs."""
        return tuple(
            ProgramLaunches(
                str(key[0]),
                num_runs,
                tuple(map(_Places(program, num_inputs).launch, program.operations)),
            )
            for (key, program, num_inputs), num_runs in Counter(self._recorded).items()
        )

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.programs)) or _NOTHING


@contextmanager
def record_launches() -> Iterator[Launches]:
    """A context that records the programs that this process runs: of all heaps, of grouped layers and of routers,
    except inside a nested context. Calls without a program are omitted, e.g. the first calls of a size. The cost is
    negligible; the table is made on access."""
    before = Programs.recorded
    recorded = Programs.recorded = list[Recorded]()
    try:
        yield Launches(recorded)
    finally:
        Programs.recorded = before


class _Places:
    """The places of a program's tensors. Memory is numbered in the order of its first use."""

    def __init__(self, program: Program, num_inputs: int) -> None:
        self._of_slot = {slot: f"input {slot}" for slot in range(num_inputs)}
        if (leases := program.leases) is not None:
            names = {slot: f"lease '{name}'" for slot, name in leases.names.items()}
            self._of_slot.update(names)
        self._numbers = itertools.count()
        # Leases of peers, by the slot of a barrier's result and the column.
        self._published: dict[int | None, dict[int, str]] = {}

    def launch(self, operation: Operation) -> Launch:
        """The launch of one operation."""
        from symmoe.kernels.flops import arguments_of, product_of  # which imports torch's counter

        function, args, kwargs, result, is_on_branch, is_after_other = operation
        waits = ["the call's stream" if is_on_branch else "the branch"] * is_after_other
        product, written = None, set[str]()
        if isinstance(function, str):
            kernel, arguments = function, arguments_of(function, args, kwargs)
            product, written = product_of(kernel, arguments), {*getattr(Kernels, kernel).writes}
            waits += self._ranks(kernel, arguments)
        elif inspect.isfunction(function):
            kernel, waits = function.__name__, [*waits, "other nodes"]
            arguments = dict(inspect.signature(function).bind(*args, **kwargs).arguments)
        else:
            kernel, written = str(function), {"result"}
            arguments = {"args": args, **kwargs, "result": result}
        reads, writes = list[Argument](), list[Argument]()
        for name, value in in_parts(arguments, written):
            tensors = (
                self._peers(kernel, arguments) if name == "peers" else self._tensors(name, value)
            )
            (writes if name in written else reads).extend(tensors)
        flops, stream = 0 if product is None else product.max_flops, "branch" * is_on_branch
        return Launch(kernel, tuple(reads), tuple(writes), flops, " and ".join(waits), stream)

    def _ranks(self, kernel: str, arguments: dict[str, Any]) -> list[str]:
        """The ranks that a kernel waits for."""
        if kernel == "wait_for_signal":
            return [f"the signal of rank {arguments['rank']}"]
        if kernel != "barrier":
            return []
        words = enumerate(word // SLOT_BYTES for word in arguments["words"])
        leases = {n: self._of_slot[slot] for n, slot in words if slot}
        self._published[arguments["received"].slot] = leases
        return [f"all ranks, '{control.PHASES[control.unpack_call(arguments['call'])['phase']]}'"]

    def _peers(self, kernel: str, arguments: dict[str, Any]) -> Iterator[Argument]:
        """The memory of peers that a kernel reads or writes; nothing for kernels that only wait."""
        columns = [value for name, value in arguments.items() if name.endswith("column")]
        if kernel == "send_signal":
            yield Argument("peers", f"signals of rank {arguments['rank']}")
        elif not columns and "nan_on_failure" not in arguments:
            yield Argument("peers", "count tables")
        for column in columns:
            if lease := self._published.get(arguments["received"].slot, {}).get(column):
                yield Argument("peers", f"peers' {lease}")

    def _tensors(self, name: str, value: Any) -> Iterator[Argument]:
        """The tensors of an argument, or the leases that a barrier publishes."""
        if isinstance(value, TensorTable):
            pointers: Any = value.pointers
            yield Argument(
                name, f"{self._place_of(pointers)}, by address", value.shape, value.dtype
            )
        elif isinstance(value, (tuple, list)):
            for part in value:
                yield from self._tensors(name, part)
        elif isinstance(value, TensorRef) and 0 not in value.shape:
            yield Argument(name, self._place_of(value), value.shape, value.dtype)
        elif name == "words" and value >= SLOT_BYTES:
            yield Argument(name, self._of_slot[value // SLOT_BYTES])

    def _place_of(self, memory: TensorRef) -> str:
        if memory.slot is None:
            return "the heap"
        if memory.slot not in self._of_slot:
            self._of_slot[memory.slot] = f"memory {next(self._numbers)}"
        return self._of_slot[memory.slot]


def _text(tensors: Sequence[Argument]) -> str:
    places: dict[str, dict[str, None]] = {}
    for tensor in tensors:
        if tensor.name != "status":  # only failures write it
            places.setdefault(tensor.name, {})[tensor.place] = None
    texts = [f"{name}: {', '.join(parameter_places)}" for name, parameter_places in places.items()]
    return "; ".join(texts).replace("peers: peers'", "peers'")
