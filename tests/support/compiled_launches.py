"""Launches of the table, caught and compiled without a GPU, with the specialisations that the JIT would choose. The
tensors have no memory, so the shapes can be real ones."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
from ahead_of_time import Code, compile_for
from launch_table import Launch
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

from symmoe.kernels import gpu, twin
from symmoe.kernels.architectures import ARCHITECTURES
from symmoe.kernels.launch.launch import OPTIONS, FastLaunch, one_stage_less

TYPE_NAMES = {
    torch.bool: "i1",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.float8_e4m3fn: "fp8e4nv",
}
HOPPER, BLACKWELL, WORKSTATION = 90, 100, 120  # WORKSTATION: Blackwell without tensor memory
MAX_SHARED = {
    10 * major + minor: kind.shared_kib << 10 for (major, minor), kind in ARCHITECTURES.items()
}
LITTLE_SHARED = {arch for arch, num_bytes in MAX_SHARED.items() if num_bytes < 128 << 10}
REGISTERS = 65536  # of an SM

# Modules of general kernels, and of those for Hopper.
GENERAL = sorted({getattr(gpu, name).__module__ for name in twin.__all__})
GENERAL += [f"symmoe.kernels.low_precision.{name}" for name in ("fp8", "block_scaled.scaled")]
OF_HOPPER = [f"hopper.{name}" for name in ("act", "gemm", "rows", "wgrad")]
OF_HOPPER += [
    f"low_precision.hopper_{name}"
    for name in ("columns", "dact_quantize", "fp8", "fp8_wgrad", "weights")
]
GENERAL_MODULES = [import_module(name) for name in GENERAL]
HOPPER_MODULES = [import_module(f"symmoe.kernels.{name}") for name in OF_HOPPER]


@dataclass(frozen=True)
class CaughtLaunch:
    """kernel[grid](*args, **kwargs), which has not happened."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        return self.kernel.__name__

    def source(self) -> tuple[Any, dict[str, Any]]:
        """The source that the JIT would compile, and the options. Tensors are of 16-byte alignment unless the
        kernel does not specialise on it; integers that it specialises on must be multiples of 16."""
        is_gluon = isinstance(self.kernel, GluonJITFunction)
        values = {**dict(zip(self.kernel.arg_names, self.args, strict=False)), **self.kwargs}
        signature, constants, attributes = {}, {}, {}
        for i, parameter in enumerate(self.kernel.params):
            value = values.pop(parameter.name, None)
            if parameter.is_constexpr or value is None:
                signature[parameter.name], constants[parameter.name] = "constexpr", value
            elif hasattr(value, "block_shape"):
                layout = f",{value.layout!r}" if is_gluon else ""
                kind = TYPE_NAMES[value.base.dtype]
                signature[parameter.name] = f"tensordesc<{kind}{list(value.block_shape)}{layout}>"
            elif isinstance(value, torch.Tensor):
                signature[parameter.name] = "*" + TYPE_NAMES[value.dtype]
                if not parameter.do_not_specialize_on_alignment:
                    attributes[i,] = [["tt.divisibility", 16]]
            else:
                if not parameter.do_not_specialize:
                    assert value % 16 == 0, parameter.name  # always: the JIT makes one variant
                    attributes[i,] = [["tt.divisibility", 16]]
                signature[parameter.name] = parameter.annotation_type or "i32"
        options = OPTIONS | {name: value for name, value in values.items() if value is not None}
        return (GluonASTSource if is_gluon else ASTSource)(
            self.kernel, signature, constants, attributes
        ), options

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for launches of the same code."""
        source, options = self.source()
        return source.hash(), tuple(sorted(options.items()))

    def compile(self, arch: int = HOPPER) -> Code:
        """For sm_`arch`: it must fit, with fewer stages where a launch would take fewer; its WGMMAs must run
        asynchronously."""
        source, options = self.source()
        while (code := compile_for(arch, source, options)).shared > MAX_SHARED[arch]:
            assert arch in LITTLE_SHARED, f"{self.name}: {code.shared} bytes"
            options = one_stage_less(options) or pytest.fail(
                f"{self.name}: {code.shared} bytes, without stages"
            )
        print(
            f"{self.name}, sm_{arch}: {code.registers} registers, {code.spilled} spilled, {code.shared} bytes shared"
        )
        assert (
            "C75" not in code.log
        )  # "Potential Performance Loss: wgmma.mma_async instructions are serialized"
        return code


class Launches(list):
    """CaughtLaunch after CaughtLaunch of the kernels that :func:`catch_launches` has replaced."""

    def catch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
        self.append(CaughtLaunch(kernel, grid, args, kwargs))

    def latest(self, name: str) -> CaughtLaunch:
        """The latest one of the kernel of that name."""
        return next(launch for launch in reversed(self) if launch.name == name)

    def made_by(self, call: Callable[[], object]) -> "Launches":
        """The launches of one call."""
        self.clear()
        call()
        return Launches(self)


class _StandIn:
    """Stands in for a kernel: kernel[grid](*args, **kwargs) is launch(grid, *args, **kwargs)."""

    def __init__(self, launch: Callable[..., object]) -> None:
        self.launch = launch

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        assert all(size > 0 for size in grid)
        return partial(self.launch, grid)


def kernels_of(*modules: ModuleType) -> Iterator[tuple[ModuleType, str, Any]]:
    """(module, name, kernel) of all kernels that they launch."""
    for module in modules:
        for name, kernel in list(vars(module).items()):
            if isinstance(kernel, FastLaunch):
                yield module, name, kernel.kernel


def catch_launches(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> Launches:
    """The launches of their kernels from now on, none of which happens."""
    launches = Launches()
    for module, name, kernel in kernels_of(*modules):
        monkeypatch.setattr(module, name, _StandIn(partial(launches.catch, kernel)))
    return launches


@dataclass(frozen=True)
class Case:
    """A launch to be compiled, and what the code must have. kernel: of several that it launches; count: of how many.

    ptx: for words, whether PTX has them, or how often; bounds: for properties of the code, their largest values.
    also: what else is checked."""

    launch: Launch
    kernel: str | None = None
    arch: int = HOPPER
    ptx: Mapping[str, bool | int] = field(default_factory=dict)
    bounds: Mapping[str, int] = field(default_factory=dict)
    also: tuple[Callable[[Code], None], ...] = ()
    count: int = 1

    def check(self, launches: Launches) -> None:
        """Compiles it."""
        launched = launches.made_by(self.launch)
        of_kernel = [launch for launch in launched if self.kernel in (None, launch.name)]
        assert len(of_kernel) == self.count
        for launch in of_kernel:
            self.check_code(launch.compile(self.arch))

    def check_code(self, code: Code) -> None:
        for word, count in self.ptx.items():
            assert type(count)(code.ptx.count(word)) == count, word
        for name, limit in ({"spilled": 0} | dict(self.bounds)).items():
            assert getattr(code, name) <= limit, name
        for check in self.also:
            check(code)

    def __str__(self) -> str:
        return f"{self.launch}, {self.kernel}, {self.arch}"


def code_cases(sections: Mapping[str, Collection[Case]]) -> pytest.MarkDecorator:
    """Parametrises by cases of sections. Of a kernel the first case is for every run; the others are slow."""
    assert all(sections.values())
    parameters = []
    compiled = set()
    for section, case in ((name, case) for name, cases in sections.items() for case in cases):
        kernel = case.kernel or f"{case.launch.kernel}_kernel"
        marks = [pytest.mark.slow] * (kernel in compiled)
        compiled.add(kernel)
        parameters.append(pytest.param(case, id=f"{section}: {case}", marks=marks))
    return pytest.mark.parametrize("case", parameters)


def no_atomics(code: Code) -> None:
    assert not atomics(code.ptx)


def access_bits(ptx: str, instruction: str) -> list[int]:
    """How many bits each access of a kind moves: "ld.global" or "st.global"."""
    return [
        int(vector or 1) * int(bits)
        for vector, bits in re.findall(instruction + r"(?:\.v(\d))?\.b(\d+)", ptx)
    ]


def atomics(ptx: str) -> list[str]:
    """Lines with an atomic operation."""
    return [line for line in ptx.splitlines() if re.search(r"\b(atom|red)\.", line)]
