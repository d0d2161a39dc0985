"""What a call launches, as a table: every kernel of the programs that it runs, by the name of its twin, what that
reads and writes, and whom it waits for. The same on CPUs and GPUs."""

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
    """A tensor that a launch reads or writes, or memory of peers, whose size nobody knows here."""

    name: str  # of the parameter
    place: str  # input n, memory n (which the program makes), a lease, peers' leases, or the heap
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None  # None: of peers

    @property
    def num_bytes(self) -> int:
        return 0 if self.dtype is None else self.dtype.itemsize * math.prod(self.shape)


@dataclass(frozen=True)
class Launch:
    """One launch. kernel: that of a twin, or an operator of torch, or what meets other nodes. Bytes are of its tensors
    on this rank, FLOPs those of its products; both at most, for the room that the call has. waits_for: ranks, and
    streams; "": nothing but what is before it on its stream. stream: "", that of the call, or "branch", which on CPUs
    is the same."""

    kernel: str
    reads: tuple[Argument, ...]
    writes: tuple[Argument, ...]
    flops: int
    waits_for: str
    stream: str

    @property
    def num_bytes(self) -> int:
        return sum(each.num_bytes for each in (*self.reads, *self.writes))

    def __str__(self) -> str:
        sizes = f"{self.num_bytes / 1e6:10.3f} {self.flops / 1e9:10.3f}"
        ways = f"{_text(self.reads)} -> {_text(self.writes)}".removesuffix(" -> ").strip()
        waits = f" | waits for {self.waits_for}" * bool(self.waits_for)
        return f"{self.kernel:28}{sizes}  {ways}{waits}{' | on a branch' * bool(self.stream)}"


@dataclass(frozen=True)
class ProgramLaunches:
    """What one program launches, in order, and how often it has run."""

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
    """What :func:`record_launches` yields. print() shows a table; `programs` has it as data."""

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
    """A context that records which programs this process runs, those of all heaps, of grouped layers and of routers,
    but for those in another such context inside. Calls without a program are not in it, e.g. the first ones of a size.
    It costs next to nothing; the table is made when it is asked for."""
    before = Programs.recorded
    recorded = Programs.recorded = list[Recorded]()
    try:
        yield Launches(recorded)
    finally:
        Programs.recorded = before


class _Places:
    """Where the tensors of a program are. Memory has numbers in the order of its first use."""

    def __init__(self, program: Program, num_inputs: int) -> None:
        self._of_slot = {slot: f"input {slot}" for slot in range(num_inputs)}
        if (leases := program.leases) is not None:
            its = {part.slot: f"lease '{part.name}'" for part in (*leases.spans, *leases.parts)}
            self._of_slot.update(its)
        self._numbers = itertools.count()
        # By the slot of what a barrier returned, and column, leases of peers.
        self._published: dict[int | None, dict[int, str]] = {}

    def launch(self, operation: Operation) -> Launch:
        """What one operation launches."""
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
            found = (
                self._peers(kernel, arguments) if name == "peers" else self._tensors(name, value)
            )
            (writes if name in written else reads).extend(found)
        flops, stream = 0 if product is None else product.most_flops, "branch" * is_on_branch
        return Launch(kernel, tuple(reads), tuple(writes), flops, " and ".join(waits), stream)

    def _ranks(self, kernel: str, arguments: dict[str, Any]) -> list[str]:
        """Ranks for which a kernel waits."""
        if kernel == "wait_for_signal":
            return [f"the signal of rank {arguments['rank']}"]
        if kernel != "barrier":
            return []
        words = enumerate(word // SLOT_BYTES for word in arguments["words"])
        leases = {n: self._of_slot[slot] for n, slot in words if slot}
        self._published[arguments["received"].slot] = leases
        return [f"all ranks, '{control.PHASES[control.unpack_call(arguments['call'])['phase']]}'"]

    def _peers(self, kernel: str, arguments: dict[str, Any]) -> Iterator[Argument]:
        """What a kernel reads or writes of peers. Of what waits there is nothing to say."""
        columns = [value for name, value in arguments.items() if name.endswith("column")]
        if kernel == "send_signal":
            yield Argument("peers", f"signals of rank {arguments['rank']}")
        elif not columns and "nan_on_failure" not in arguments:
            yield Argument("peers", "count tables")
        for column in columns:
            if place := self._published.get(arguments["received"].slot, {}).get(column):
                yield Argument("peers", f"peers' {place}")

    def _tensors(self, name: str, value: Any) -> Iterator[Argument]:
        """The tensors of an argument, or the leases that a barrier publishes."""
        if isinstance(value, TensorTable):
            pointers: Any = value.pointers
            yield Argument(name, f"{self._place(pointers)}, by address", value.shape, value.dtype)
        elif isinstance(value, (tuple, list)):
            for part in value:
                yield from self._tensors(name, part)
        elif isinstance(value, TensorRef) and 0 not in value.shape:
            yield Argument(name, self._place(value), value.shape, value.dtype)
        elif name == "words" and value >= SLOT_BYTES:
            yield Argument(name, self._of_slot[value // SLOT_BYTES])

    def _place(self, memory: TensorRef) -> str:
        if memory.slot is None:
            return "the heap"
        if memory.slot not in self._of_slot:
            self._of_slot[memory.slot] = f"memory {next(self._numbers)}"
        return self._of_slot[memory.slot]


def _text(found: Sequence[Argument]) -> str:
    places: dict[str, dict[str, None]] = {}
    for each in found:
        if each.name != "status":  # which only failures write
            places.setdefault(each.name, {})[each.place] = None
    texts = [f"{name}: {', '.join(its)}" for name, its in places.items()]
    return "; ".join(texts).replace("peers: peers'", "peers'")
