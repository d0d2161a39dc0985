"""Versions of what symmoe runs on, and which of them do not go together."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata

import torch

from symmoe.kernels.architectures import TRITON_VERSIONS
from symmoe.tools.doctor.findings import Said, about

_DISTRIBUTIONS = (
    *("symmoe", "torch", "triton", "nvidia-nvshmem-cu12", "nvidia-nvshmem-cu13", "nvshmem4py-cu12", "nvshmem4py-cu13"),
    *("cuda-core", "numpy", "megatron-core", "psutil"),
)
_PIN = re.compile(r"([A-Za-z0-9_.-]+)\s*(==|~=)\s*([^\s;,]+)")
_TORCH = ("2.11", "2.15")  # from, which pyproject.toml says, to: what tests have been run with
_TRITON = ("3.6", "3.9")  # the same; of architectures.TRITON_VERSIONS
_OLDER = f"pip install 'torch=={_TORCH[1]}.*', or make test-newest in a checkout"
_BINDINGS_NEEDED, _BINDINGS_TESTED = (0, 3, 1), (0, 4, 1)
_CUDA_CORE = (0, 5)  # has cuda.core, which was cuda.core.experimental before


@dataclass(frozen=True, kw_only=True)
class Versions:
    """What is installed.

    Attributes:
        installed: version by name of the distribution.
        torch_cuda: the CUDA that torch was built with; None for a CPU build.
        torch_pins: what torch asks for, by name of the distribution: a version, or 3.8.* for all that begin so.
    """

    installed: Mapping[str, str]
    torch_cuda: str | None
    torch_pins: Mapping[str, str] = field(default_factory=dict)

    @property
    def cuda_major(self) -> int:
        """Major version of torch's CUDA; that of `symmoe[nvshmem]` for a CPU build."""
        return release(self.torch_cuda)[0] if self.torch_cuda else 13

    @property
    def nvshmem(self) -> str:
        """Name of NVSHMEM's distribution."""
        return f"nvidia-nvshmem-cu{self.cuda_major}"

    @property
    def bindings(self) -> str:
        """Name of nvshmem4py's distribution."""
        return f"nvshmem4py-cu{self.cuda_major}"


def read_versions() -> Versions:
    """What is installed for this Python. Imports none of it but torch."""
    found = {name: version for name in _DISTRIBUTIONS if (version := version_of(name))}
    found["torch"] = torch.__version__  # says what it was built for, which the distribution's may not
    return Versions(installed=found, torch_cuda=torch.version.cuda, torch_pins=_pins_of_torch())


def version_of(distribution: str) -> str | None:
    """What is installed; None if it is not."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def release(version: str) -> tuple[int, ...]:
    """The numbers at the beginning of a version: (2, 13, 0) of "2.13.0+cpu"."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match.group().split("."))) if match else (0,)


@about("versions")
def check_versions(versions: Versions, *, has_gpu: bool) -> Iterator[Said]:
    """Problems of the versions, then one line that lists them."""
    yield from _check_torch(versions.installed["torch"])
    yield from _check_triton(versions, has_gpu)
    yield from _check_nvshmem(versions)
    yield from _check_bindings(versions, has_gpu and versions.torch_cuda is not None)
    installed = versions.installed
    triton, numpy = installed.get("triton"), installed.get("numpy", "0")
    if not has_gpu and triton and release(triton)[:2] == (3, 6) and release(numpy) >= (2, 4):
        text = f"numpy {numpy} with Triton {triton}: kernels do not run in Triton's interpreter, as some tests want"
        yield "note", text, "pip install 'numpy<2.4'"
    if "megatron-core" in installed and "psutil" not in installed:
        yield "note", "megatron-core without psutil: its distributed checkpoints hang", "pip install 'psutil>=5'"
    shown = {"symmoe": "symmoe", "torch": "torch", "Triton": "triton"}
    shown |= {"NVSHMEM": versions.nvshmem, "nvshmem4py": versions.bindings}
    parts = ", ".join(f"{label} {installed.get(name, 'not installed')}" for label, name in shown.items())
    built_for = f"CUDA {versions.torch_cuda}" if versions.torch_cuda else "CPUs"
    yield "ok", f"{parts}; torch is built for {built_for}", ""


def _check_torch(installed: str) -> Iterator[Said]:
    first, last = _TORCH
    if release(installed) < release(first):
        text = f"torch {installed} is older than what symmoe is made for, {first}"
        yield "problem", text, f"pip install 'torch>={first}'"
    elif release(installed)[:2] > release(last):
        text = f"torch {installed} has not been tested, {first} to {last} have: where it lacks a private name that "
        yield "note", text + "symmoe reads, there is a slower way, or an error that says so", _OLDER


def _check_triton(versions: Versions, has_gpu: bool) -> Iterator[Said]:
    triton, pin = versions.installed.get("triton"), versions.torch_pins.get("triton")
    fix = "pip install " + shlex.quote("triton==" + (pin or f"{_TRITON[1]}.*"))
    if triton is None:
        if has_gpu:
            yield "problem", "Triton is not installed: the kernels for GPUs are written in it", fix
    elif release(triton)[:2] not in TRITON_VERSIONS:
        text = f"Triton {triton} has not been tested, {_TRITON[0]} to {_TRITON[1]} have: Hopper's own kernels are not "
        text += "used, and Triton's JIT makes every launch, which takes the host 34 us instead of 2 to 6"
        # If torch asks for such a one, another would not go with it.
        yield "note", text, _OLDER if pin and release(pin)[:2] not in TRITON_VERSIONS else fix
    elif pin and release(triton)[: len(release(pin))] != release(pin):
        text = f"Triton {triton} is not the one that torch {versions.installed['torch']} asks for, {pin}"
        yield "note", text, fix


def _check_nvshmem(versions: Versions) -> Iterator[Said]:
    installed, triton = versions.installed.get(versions.nvshmem), versions.installed.get("triton")
    if installed is None:
        return
    pin = versions.torch_pins.get(versions.nvshmem)
    fix = f"pip install {versions.nvshmem}=={pin or '3.4.5'}"
    if triton and release(installed) >= (3, 7) and release(triton)[:2] == (3, 6):
        text = (
            f"NVSHMEM {installed} with Triton {triton} is known to be bad: from 3.7 on torch does not find NVSHMEM's "
        )
        yield "problem", text + "device library, and Triton 3.6 cannot read that of 3.8", fix
    elif pin and release(installed) != release(pin):
        yield "note", f"NVSHMEM {installed} is not the one that torch is built with and loads, {pin}", fix


def _check_bindings(versions: Versions, are_needed: bool) -> Iterator[Said]:
    name = versions.bindings
    fix = f"pip install '{name}>=0.4.1,<0.5'"
    installed, core = versions.installed.get(name), versions.installed.get("cuda-core")
    if installed is None:
        if are_needed:
            others = [each for each in versions.installed if each.startswith("nvshmem4py-")]
            besides = f"; {others[0]} is, which is not for torch's CUDA {versions.torch_cuda}" if others else ""
            yield "problem", f"{name} is not installed{besides}: heaps on GPUs need it", fix
        return
    if release(installed) < _BINDINGS_NEEDED:
        yield "problem", f"{name} {installed} does not work: 0.4.1 does", fix
    elif release(installed) < _BINDINGS_TESTED:
        yield "note", f"{name} {installed} is older than what was tested: 0.4.1 does", fix
    if versions.nvshmem not in versions.installed:
        text = f"{name} is installed without {versions.nvshmem}, the library that it binds"
        yield "problem", text, f"pip install {versions.nvshmem}=={versions.torch_pins.get(versions.nvshmem, '3.4.5')}"
    if core is None or release(core) < _CUDA_CORE:
        text = f"cuda-core {core or '(not installed)'} has no cuda.core: {name} and symmoe need 0.5 or newer"
        yield "problem", text, "pip install 'cuda-core>=0.7'"


def _pins_of_torch() -> dict[str, str]:
    """What torch asks for as `name==version` or `name~=version`, with or without conditions."""
    try:
        wanted = metadata.requires("torch") or []
    except metadata.PackageNotFoundError:
        return {}
    pins = (match.groups() for each in wanted if (match := _PIN.match(each)))
    return {name: pin if kind == "==" else pin.rpartition(".")[0] + ".*" for name, kind, pin in pins}
