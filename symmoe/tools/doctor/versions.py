"""Versions of what symmoe runs on, and which of them do not go together."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata

import torch

from symmoe.kernels.architectures import TRITON_VERSIONS
from symmoe.tools.doctor.findings import Finding

_DISTRIBUTIONS = (
    "symmoe",
    "torch",
    "triton",
    "nvidia-nvshmem-cu12",
    "nvidia-nvshmem-cu13",
    "nvshmem4py-cu12",
    "nvshmem4py-cu13",
    "cuda-core",
    "numpy",
    "megatron-core",
    "psutil",
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


def read_versions() -> Versions:
    """What is installed for this Python. Imports none of it but torch."""
    found = {name: version for name in _DISTRIBUTIONS if (version := _version(name))}
    found["torch"] = torch.__version__  # says what it was built for, which the distribution's may not
    return Versions(installed=found, torch_cuda=torch.version.cuda, torch_pins=_pins_of("torch"))


def check_versions(versions: Versions, *, has_gpu: bool) -> list[Finding]:
    """Problems of the versions, then one line that lists them."""
    found = [
        *_check_torch(versions),
        *_check_triton(versions, has_gpu),
        *_check_nvshmem(versions),
        *_check_bindings(versions, has_gpu),
        *_check_others(versions, has_gpu),
    ]
    shown = {
        "symmoe": "symmoe",
        "torch": "torch",
        "Triton": "triton",
        "NVSHMEM": _nvshmem(versions),
        "nvshmem4py": _bindings(versions),
    }
    parts = [f"{label} {versions.installed.get(name, 'not installed')}" for label, name in shown.items()]
    built_for = f"CUDA {versions.torch_cuda}" if versions.torch_cuda else "CPUs"
    return [*found, Finding("ok", "versions", f"{', '.join(parts)}; torch is built for {built_for}")]


def cuda_major(torch_cuda: str | None) -> int:
    """Major version of torch's CUDA; that of `symmoe[nvshmem]` for a CPU build."""
    return release(torch_cuda)[0] if torch_cuda else 13


def release(version: str) -> tuple[int, ...]:
    """The numbers at the beginning of a version: (2, 13, 0) of "2.13.0+cpu"."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match.group().split("."))) if match else (0,)


def _check_torch(versions: Versions) -> list[Finding]:
    torch_version = versions.installed["torch"]
    first, last = _TORCH
    if release(torch_version) < release(first):
        text = f"torch {torch_version} is older than what symmoe is made for, {first}"
        return [Finding("problem", "versions", text, f"pip install 'torch>={first}'")]
    if release(torch_version)[:2] > release(last):
        text = (
            f"torch {torch_version} has not been tested, {first} to {last} have: where it lacks a private name that "
            "symmoe reads, there is a slower way, or an error that says so"
        )
        return [Finding("note", "versions", text, _OLDER)]
    return []


def _check_triton(versions: Versions, has_gpu: bool) -> list[Finding]:
    triton, pin = versions.installed.get("triton"), versions.torch_pins.get("triton")
    fix = "pip install " + shlex.quote("triton==" + (pin or f"{_TRITON[1]}.*"))
    if triton is None:
        text = "Triton is not installed: the kernels for GPUs are written in it"
        return [Finding("problem", "versions", text, fix)] if has_gpu else []
    if release(triton)[:2] not in TRITON_VERSIONS:
        text = (
            f"Triton {triton} has not been tested, {_TRITON[0]} to {_TRITON[1]} have: Hopper's own kernels are not "
            "used, and Triton's JIT makes every launch, which takes the host 34 us instead of 2 to 6"
        )
        if pin and release(pin)[:2] not in TRITON_VERSIONS:  # another Triton would not go with this torch
            fix = _OLDER
        return [Finding("note", "versions", text, fix)]
    if pin and release(triton)[: len(release(pin))] != release(pin):
        text = f"Triton {triton} is not the one that torch {versions.installed['torch']} asks for, {pin}"
        return [Finding("note", "versions", text, fix)]
    return []


def _check_nvshmem(versions: Versions) -> list[Finding]:
    name = _nvshmem(versions)
    installed, pin = versions.installed.get(name), versions.torch_pins.get(name)
    triton = versions.installed.get("triton")
    if installed is None:
        return []
    fix = f"pip install {name}=={pin or '3.4.5'}"
    if triton and release(installed) >= (3, 7) and release(triton)[:2] == (3, 6):
        text = (
            f"NVSHMEM {installed} with Triton {triton} is known to be bad: from 3.7 on torch does not find NVSHMEM's "
            "device library, and Triton 3.6 cannot read that of 3.8"
        )
        return [Finding("problem", "versions", text, fix)]
    if pin and release(installed) != release(pin):
        text = f"NVSHMEM {installed} is not the one that torch is built with and loads, {pin}"
        return [Finding("note", "versions", text, fix)]
    return []


def _check_bindings(versions: Versions, has_gpu: bool) -> list[Finding]:
    name, major = _bindings(versions), cuda_major(versions.torch_cuda)
    fix = f"pip install 'symmoe[nvshmem{'' if major == 13 else f'-cu{major}'}]'"
    installed = versions.installed.get(name)
    if installed is None:
        if not has_gpu or versions.torch_cuda is None:
            return []
        others = [each for each in versions.installed if each.startswith("nvshmem4py-")]
        besides = f"; {others[0]} is, which is not for torch's CUDA {versions.torch_cuda}" if others else ""
        text = f"{name} is not installed{besides}: heaps on GPUs need it"
        return [Finding("problem", "versions", text, fix)]
    found = []
    if release(installed) < _BINDINGS_TESTED:
        level = "problem" if release(installed) < _BINDINGS_NEEDED else "note"
        works = "does not work" if level == "problem" else "is older than what was tested"
        found.append(Finding(level, "versions", f"{name} {installed} {works}: 0.4.1 does", fix))
    if _nvshmem(versions) not in versions.installed:
        library = f"nvidia-nvshmem-cu{major}"
        text = f"{name} is installed without {library}, the library that it binds"
        pin = versions.torch_pins.get(library, "3.4.5")
        found.append(Finding("problem", "versions", text, f"pip install {library}=={pin}"))
    core = versions.installed.get("cuda-core")
    if core is None or release(core) < _CUDA_CORE:
        text = f"cuda-core {core or '(not installed)'} has no cuda.core: {name} and symmoe need 0.5 or newer"
        found.append(Finding("problem", "versions", text, "pip install 'cuda-core>=0.7'"))
    return found


def _check_others(versions: Versions, has_gpu: bool) -> list[Finding]:
    found, installed = [], versions.installed
    triton, numpy = installed.get("triton"), installed.get("numpy", "0")
    if not has_gpu and triton and release(triton)[:2] == (3, 6) and release(numpy) >= (2, 4):
        text = f"numpy {numpy} with Triton {triton}: kernels do not run in Triton's interpreter, as some tests want"
        found.append(Finding("note", "versions", text, "pip install 'numpy<2.4'"))
    if "megatron-core" in installed and "psutil" not in installed:
        text = "megatron-core without psutil: its distributed checkpoints hang"
        found.append(Finding("note", "versions", text, "pip install 'psutil>=5'"))
    return found


def _nvshmem(versions: Versions) -> str:
    return f"nvidia-nvshmem-cu{cuda_major(versions.torch_cuda)}"


def _bindings(versions: Versions) -> str:
    return f"nvshmem4py-cu{cuda_major(versions.torch_cuda)}"


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _pins_of(distribution: str) -> dict[str, str]:
    """What a distribution asks for as `name==version` or `name~=version`, with or without conditions."""
    try:
        wanted = metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        return {}
    pins = (match.groups() for each in wanted if (match := _PIN.match(each)))
    return {name: pin if kind == "==" else pin.rpartition(".")[0] + ".*" for name, kind, pin in pins}
