"""As much of Gluon as the GEMMs for Hopper use, on CPU tensors: their sources run as they are, with threads for roles.
`install()` puts stand-ins in the place of kernels/hopper/gluon_names.py; call it before any kernel is imported, in a
process of its own. Then a launcher of kernels/hopper computes on CPU tensors.

What is checked while kernels run: no load or store lies outside of a tensor; memory that a copy is on its way to is NaN
until it lands, some time later, in random order; stores by TMA read when their role waits for them; waits for barriers
have parities, and it is noticed when no role can go on. Layouts, registers and the fences between the threads of a role
are not modelled; compiling checks the first two."""

from __future__ import annotations

import functools
import random
import sys
import threading
import types
from dataclasses import dataclass
from unittest import mock

import pytest
import torch

ADDRESSES = 2**64
ELSEWHERE: list[torch.Tensor] = []  # memory that kernels get addresses of, and no pointers to
NAN_BYTE = 0xFF
CHOICE = random.Random(0)


# ------------------------------------------------------------------------------------------------------ a program
class Machine:
    """The state that the roles of the running program share."""

    def __init__(self):
        self.changed = threading.Condition()
        self.landing = []  # copies to shared memory that have not landed
        self.waiting = []  # what roles wait for
        self.role = threading.local()  # copies that a role has asked for
        self.program, self.num_programs, self.num_roles, self.failures = 0, 1, 0, []

    def wait(self, passes) -> None:
        """Until passes(); meanwhile copies land. Raises if no role can go on, or one has failed."""
        with self.changed:
            self.waiting.append(passes)
            while not passes():
                if self.failures:
                    raise RuntimeError("another role has failed")
                if self.landing:
                    self.landing.pop(CHOICE.randrange(len(self.landing)))()
                    self.changed.notify_all()
                elif len(self.waiting) == self.num_roles and not any(
                    ends() for ends in self.waiting
                ):
                    raise RuntimeError("no role can go on")
                else:
                    self.changed.wait()
            self.waiting.remove(passes)

    def run_role(self, function, args, num_warps) -> None:
        self.role.num_warps = int(num_warps)
        try:
            function(*args)
        except BaseException as failure:  # noqa: BLE001 - raised again by run_roles
            self.failures.append(failure)
        with self.changed:
            self.num_roles -= 1
            self.changed.notify_all()

    def run_roles(self, roles, warps) -> None:
        self.num_roles, self.waiting, self.failures = len(roles), [], []
        roles = [(*role, num_warps) for role, num_warps in zip(roles, warps, strict=True)]
        threads = [threading.Thread(target=self.run_role, args=role) for role in roles]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failures:
            self.landing.clear()
            raise self.failures[0]


MACHINE = Machine()


class Kernel:
    """A decorated function: called by others as it is, launched as kernel[grid](...), one program after the other."""

    def __init__(self, function):
        self.function = function
        functools.update_wrapper(self, function)
        function.__globals__["range"] = device_range

    def __call__(self, *args, **kwargs):
        return self.function(*args, **kwargs)

    def __getitem__(self, grid):
        def launch(*args, num_warps, maxnreg=None, **constants):
            (MACHINE.num_programs,) = grid
            constants = {name: plain(value) for name, value in constants.items()}
            for program in range(MACHINE.num_programs):
                MACHINE.program = program
                self.function(*map(argument, args), **constants)
                assert not MACHINE.landing, "copies that nobody has waited for"

        return launch


def device_range(*bounds):
    """range of int32 scalars, which is what a kernel's loop variables are."""
    return (scalar(i) for i in range(*map(int, bounds)))


def scalar(number: int) -> torch.Tensor:
    return torch.tensor(number, dtype=torch.int32)


def argument(value):
    """The form in which a kernel gets an argument."""
    if isinstance(value, torch.Tensor):
        return Pointer.over(value)
    return scalar(value) if isinstance(value, int) else value


def plain(constant):
    """A constant without the marks that the compiler needs on the attributes of SIZES."""
    if type(constant).__name__ != "Sizes":
        return constant
    return types.SimpleNamespace(
        **{name: getattr(value, "value", value) for name, value in vars(constant).items()}
    )


def jit(function=None, **options):
    return Kernel(function) if function is not None else Kernel


# ------------------------------------------------------------------------------------------------------ memory
@dataclass
class Pointer:
    """Pointers into a tensor: its elements in a row, and offsets."""

    memory: torch.Tensor
    offset: object  # int or integer tensor

    @staticmethod
    def over(tensor: torch.Tensor) -> Pointer:
        return Pointer(tensor.view(-1), 0)

    def to(self, dtype: torch.dtype | tuple[str, torch.dtype]) -> torch.Tensor | Pointer:
        """The address; or a pointer to other numbers."""
        if dtype != torch.int64:
            assert self.offset == 0
            return Pointer(self.memory.view(dtype[1]), 0)
        return torch.tensor(self.memory.data_ptr() + int(self.offset) * self.memory.itemsize)

    @property
    def dtype(self):
        return types.SimpleNamespace(element_ty=self.memory.dtype)

    def __add__(self, offset) -> Pointer:
        return Pointer(self.memory, self.offset + offset)

    __radd__ = __add__

    def places(self, mask) -> tuple[torch.Tensor, torch.Tensor]:
        """Offsets, and which of them are used, which must lie in the tensor."""
        offset = torch.as_tensor(self.offset)
        mask = torch.as_tensor(True if mask is None else mask).expand(offset.shape)
        used = offset[mask]
        if used.numel():
            assert 0 <= int(used.min()), "before the first element"
            assert int(used.max()) < self.memory.numel(), "past the last element"
        return offset.where(mask, 0), mask


def pointer_in_table(table, group, dtype) -> Pointer:
    """Stands for triton/tiles.py's matrix_pointer."""
    address = int(load(table + group))
    tensor = next(tensor for tensor in ELSEWHERE if tensor.data_ptr() == address)
    return Pointer(tensor.view(-1).view(dtype), 0)


def load(pointer, mask=None, other=0):
    offset, mask = pointer.places(mask)
    if not mask.any():
        return torch.full(offset.shape, other, dtype=pointer.memory.dtype)
    values = pointer.memory[offset.long()]
    return values.where(mask, torch.tensor(other, dtype=values.dtype))


def store(pointer, value, mask=None):
    offset, mask = pointer.places(mask)
    pointer.memory[offset[mask].long()] = value[mask]


@dataclass
class Shared:
    """A view of shared memory. data: bytes for one-byte numbers."""

    data: torch.Tensor
    dtype: torch.dtype

    @property
    def shape(self):
        return self.data.shape

    def index(self, i):
        return Shared(self.data[int(i)], self.dtype)

    def slice(self, start, length, dim=0):
        return Shared(self.data.narrow(dim, int(start), int(length)), self.dtype)

    def reshape(self, shape):
        return Shared(self.data.view([int(size) for size in shape]), self.dtype)

    def permute(self, order):
        return Shared(self.data.permute(order), self.dtype)

    def load(self, layout):
        return self.data.clone()

    def store(self, value):
        assert value.dtype == self.dtype
        self.data.copy_(value)

    def numbers(self) -> torch.Tensor:
        """Its numbers in fp32."""
        return self.data.contiguous().view(self.dtype).float()


class Barrier:
    """An mbarrier, which also counts bytes."""

    def __init__(self):
        self.arrivals = self.pending = self.num_bytes = self.phase = 0

    def arrive(self, number=1, num_bytes=0):
        """With the lock."""
        self.pending -= number
        self.num_bytes += num_bytes
        assert self.pending >= 0, "too many arrivals"
        if self.pending == 0 and self.num_bytes == 0:
            self.pending, self.phase = self.arrivals, self.phase + 1
            MACHINE.changed.notify_all()


class Barriers:
    def __init__(self, number):
        self.barriers = [Barrier() for _ in range(number)]

    def index(self, i):
        return self.barriers[int(i)]


def allocate_shared_memory(dtype, shape, layout):
    if layout == "barriers":
        return Barriers(int(shape[0]))
    data = torch.empty(
        [int(size) for size in shape], dtype=torch.uint8 if dtype.itemsize == 1 else dtype
    )
    data.view(torch.uint8).fill_(NAN_BYTE)
    return Shared(data, dtype)


@dataclass
class TensorDescriptor:
    """A TMA descriptor: reads zeros outside of its shape, and writes nothing there. Addresses wrap around."""

    base: torch.Tensor
    shape: list[int]
    strides: list[int]
    block_shape: list[int]
    layout: object

    @staticmethod
    def from_tensor(tensor, block_shape, layout):
        return TensorDescriptor(
            tensor, list(tensor.shape), list(tensor.stride()), block_shape, layout
        )

    @property
    def dtype(self):
        return self.base.dtype

    @property
    def block_type(self):
        return types.SimpleNamespace(
            nbytes=torch.Size(self.block_shape).numel() * self.dtype.itemsize
        )

    def places(self, first) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The numbers of the tensor that a block lies in, offsets of its elements there, and which are inside of the
        shape."""
        size = self.dtype.itemsize
        assert all(stride * size % 16 == 0 for stride in self.strides[:-1]), (
            "strides of no whole 16 bytes"
        )
        address = sum(int(at) * stride for at, stride in zip(first, self.strides, strict=True))
        offset = torch.tensor(0)
        inside = torch.tensor(True)
        for at, stride, length, block in zip(
            first, self.strides, self.shape, self.block_shape, strict=True
        ):
            lane = torch.arange(block)
            offset = offset[..., None] + lane * (stride if block > 1 else 0)
            inside = inside[..., None] & (int(at) + lane >= 0) & (int(at) + lane < length)
        start = address * size % ADDRESSES // size
        offset = offset + (start if start < ADDRESSES // size // 2 else start - ADDRESSES // size)
        used, tensor = offset[inside], self.base
        if used.numel():
            address = tensor.data_ptr() + int(used.min()) * size
            tensor = next(
                (t for t in ELSEWHERE if t.data_ptr() <= address < t.data_ptr() + t.nbytes), tensor
            )
            shift = (self.base.data_ptr() - tensor.data_ptr()) // size
            offset = offset + shift
            assert tensor.dtype == self.dtype
            assert 0 <= int(used.min()) + shift, "before the first element"
            assert int(used.max()) + shift < tensor.numel(), "past the last element"
        return tensor.view(-1).view(torch.uint8 if size == 1 else self.dtype), offset, inside


# ------------------------------------------------------------------------------------------------------ copies
def copy_later(shared: Shared, values, landed) -> None:
    """Shared memory is NaN until values() are there, when landed() is called."""
    with MACHINE.changed:
        shared.data.view(torch.uint8).fill_(NAN_BYTE)

        def land():
            shared.data.copy_(values())
            landed()

        MACHINE.landing.append(land)
        MACHINE.changed.notify_all()


def tma_load(desc, first, barrier, shared):
    def values():
        memory, offset, inside = desc.places(first)
        return torch.where(
            inside, memory[offset.where(inside, 0)], torch.zeros((), dtype=memory.dtype)
        )

    num_bytes = desc.block_type.nbytes
    copy_later(shared, lambda: values().view(shared.shape), lambda: barrier.arrive(0, -num_bytes))


def tma_store(desc, first, shared, combine=lambda before, stored: stored):
    def read():
        memory, offset, inside = desc.places(first)
        stored = shared.data.reshape(offset.shape)[inside]
        memory[offset[inside]] = combine(memory[offset[inside]], stored)

    MACHINE.role.__dict__.setdefault("pending", []).append(read)


def tma_add(desc, first, shared):
    """Adds when the role waits for it, as a store would have happened; the sums are rounded once."""
    assert desc.dtype == torch.float32
    tma_store(desc, first, shared, torch.add)


def tma_store_wait(number):
    pending = MACHINE.role.__dict__.setdefault("pending", [])
    while len(pending) > number:
        pending.pop(0)()


def async_copy(shared, pointer, mask=None):
    """cp.async: what a role waits for by async_arrive, or async_wait. Zeros where it is masked."""
    values = load(pointer, mask)
    shared.data.view(torch.uint8).fill_(NAN_BYTE)
    MACHINE.role.__dict__.setdefault("copies", []).append((shared, values))


def async_arrive(barrier, increment_count):
    """The lanes of one warp arrive when their copies have landed: all of them with the last copy."""
    assert not increment_count
    copies = MACHINE.role.__dict__.pop("copies")
    remaining = [len(copies)]

    def landed():
        remaining[0] -= 1
        if remaining[0] == 0:
            barrier.arrive(32)

    for shared, values in copies:
        copy_later(shared, lambda values=values: values, landed)


def async_commit():
    """Makes a group of a role's copies since the last one."""
    MACHINE.role.__dict__.setdefault("groups", []).append(MACHINE.role.__dict__.pop("copies", []))


def async_wait(number=0):
    """Until all but so many of a role's groups have landed."""
    groups = MACHINE.role.__dict__.get("groups", [])
    while len(groups) > number:
        for shared, values in groups.pop(0):
            shared.data.copy_(values)


def barrier_init(barrier, count):
    barrier.arrivals = barrier.pending = int(count)


def barrier_expect(barrier, num_bytes):
    with MACHINE.changed:
        barrier.arrive(1, num_bytes)


def barrier_arrive(barrier, pred=True):
    with MACHINE.changed:
        if pred:
            barrier.arrive()


def barrier_wait(barrier, parity, pred=True):
    if pred:
        MACHINE.wait(lambda: barrier.phase & 1 != int(parity))


# ------------------------------------------------------------------------------------------------------ arithmetic
def warpgroup_mma(a, b, acc, *, use_acc=True, is_async=False):
    product = torch.mm(a.numbers(), b.numbers())
    return acc + product if use_acc else product


def where(condition, a, b):
    if isinstance(condition, bool):
        return a if condition else b
    result = torch.where(torch.as_tensor(condition), torch.as_tensor(a), torch.as_tensor(b))
    return result if result.is_floating_point() else result.to(torch.int32)


def reinterpret(shared, dtype, shape, layout):
    """Shared memory as other numbers."""
    return Shared(shared.data.view(dtype).view([int(size) for size in shape]), dtype)


def extreme(function):
    return lambda a, b: function(torch.as_tensor(a), torch.as_tensor(b))


class Number(int):
    """A constexpr of a number."""

    @property
    def value(self):
        return int(self)


def static_assert(condition):
    assert condition


LAYOUTS = (
    "Blocked",
    "DistributedLinear",
    "Slice",
    "SwizzledShared",
    "NVMMAShared",
    "NVMMADistributed",
)
LAYOUTS = tuple(f"{kind}Layout" for kind in LAYOUTS)


def layout_of(*args, **kwargs):
    return "layout"


layout_of.get_default_for = layout_of


def language() -> types.ModuleType:
    names = {
        "constexpr": lambda value: Number(value) if isinstance(value, int) else value,
        "arange": lambda first, end, layout=None: torch.arange(first, end, dtype=torch.int32),
        "zeros": lambda shape, dtype, layout=None: torch.zeros(
            [int(size) for size in shape], dtype=dtype
        ),
        "load": load,
        "store": store,
        "where": where,
        "minimum": extreme(torch.minimum),
        "maximum": extreme(torch.maximum),
        "sum": lambda x, axis: x.sum(axis, dtype=x.dtype),
        "max": lambda x, axis: x.amax(axis),
        "abs": torch.abs,
        "reduce": lambda x, axis, function: x.amax(axis),  # with NaN where there is one
        "associative_scan": lambda x, axis, function: x.cumsum(axis, dtype=x.dtype),
        "split": lambda x: (x[..., 0], x[..., 1]),
        "convert_layout": lambda x, layout, assert_trivial=False: x,
        "allocate_shared_memory": allocate_shared_memory,
        "warp_specialize": lambda roles, warps, registers: MACHINE.run_roles(roles, [4, *warps]),
        "program_id": lambda axis: scalar(MACHINE.program),
        "num_programs": lambda axis: scalar(MACHINE.num_programs),
        "num_warps": lambda: getattr(MACHINE.role, "num_warps", 4),
        "pointer_type": lambda dtype: ("pointer", dtype),
        "static_range": range,
        "static_assert": static_assert,
        "float8e4nv": torch.float8_e4m3fn,
        **dict.fromkeys(LAYOUTS, layout_of),
        **{
            name: getattr(torch, name)
            for name in ("bfloat16", "float16", "float32", "uint8", "int32", "int64")
        },
    }
    return module("language", names)


def module(name: str, names: dict) -> types.ModuleType:
    result = types.ModuleType(f"triton.experimental.gluon.{name}")
    result.__dict__.update(names)
    return result


def install() -> None:
    """Puts the stand-ins where the kernels import Gluon from."""
    sys.setswitchinterval(1e-5)  # roles take turns in any order
    torch.Tensor.type = types.SimpleNamespace(layout="layout")  # of what is in registers
    barriers = {
        "init": barrier_init,
        "expect": barrier_expect,
        "arrive": barrier_arrive,
        "wait": barrier_wait,
    }
    copies = {
        "tma_load": tma_load,
        "tma_store": tma_store,
        "tma_add": tma_add,
        "copy_async": async_copy,
    }
    async_copies = {
        "mbarrier_arrive": async_arrive,
        "commit_group": async_commit,
        "wait_group": async_wait,
    }
    hopper = {
        "mbarrier": module("mbarrier", {**barriers, "MBarrierLayout": lambda: "barriers"}),
        "tma": module("tma", {"store_wait": tma_store_wait}),
        "async_copy": module("async_copy", async_copies),
        "fence_async_shared": lambda: None,
        "warpgroup_mma": warpgroup_mma,
        "warpgroup_mma_wait": lambda number, deps: deps if len(deps) > 1 else deps[0],
    }
    gluon = module("", {"jit": jit, "language": language()})
    names = {"gluon": gluon, "gl": gluon.language, "TensorDescriptor": TensorDescriptor}
    helpers = {"reinterpret": reinterpret, "thread_barrier": lambda: None}
    sys.modules["symmoe.kernels.hopper.gluon_names"] = module(
        "names", {**names, **hopper, **copies, **helpers}
    )
    run_as_they_are()


def run_as_they_are() -> None:
    """Kernels' functions in Triton that need no more of the language than this file has."""
    from symmoe.kernels.triton import tiles

    tiles.tl = sys.modules["symmoe.kernels.hopper.gluon_names"].gl
    for name in ("locate_tile", "swizzle_tile"):
        setattr(tiles, name, Kernel(getattr(tiles, name).fn))


def check_mistakes(check, *mistakes, errors=AssertionError) -> None:
    """check() notices each of them: (where, name, what makes the wrong one of the right one); without it is content."""
    for where, name, mistake in mistakes:
        check()
        with mock.patch.object(where, name, mistake(getattr(where, name))), pytest.raises(errors):
            check()
    check()
