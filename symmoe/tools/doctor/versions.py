"""Versions of symmoe's dependencies on this machine, and conflicts between them."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Mapping
from importlib import metadata
from typing import NamedTuple

import torch

from symmoe.kernels.architectures import TRITON_VERSIONS
from symmoe.tools.doctor.findings import Finding, findings_about, first

_DISTRIBUTIONS = (
    "symmoe",
    "torch",
    "triton",
    "nvidia-nvshmem-cu12",
    "nvidia-nvshmem-cu13",
    "nvshmem4py-cu12",
    "nvshmem4py-cu13",
    "cuda-core",
    "megatron-core",
    "psutil",
)
_PIN = re.compile(r"([A-Za-z0-9_.-]+)\s*(==|~=)\s*([^\s;,]+)")
_TORCH = ("2.11", "2.15")  # from: as in pyproject.toml; to: the newest tested
_TORCH_ON_GPUS = ("2.11",)  # tested on GPUs
_TRITON = ("3.6", "3.9")  # as _TORCH; of architectures.TRITON_VERSIONS
_OLDER = f"pip install 'torch=={_TORCH[1]}.*', or make test-newest in a checkout"


class Versions(NamedTuple):
    """Installed versions, by name of the distribution; torch's CUDA version, None for a CPU build; torch's
    requirements: a version, or e.g. 3.8.* for a prefix."""

    installed: Mapping[str, str]
    torch_cuda: str | None
    torch_pins: Mapping[str, str] = {}


def read_versions() -> Versions:
    """The installed versions of this Python. Imports only torch."""
    installed = {name: version for name in _DISTRIBUTIONS if (version := version_of(name))}
    installed["torch"] = torch.__version__  # includes the build's label, unlike some distributions
    try:
        of_torch = {
            match[1]: match[3] if match[2] == "==" else match[3].rpartition(".")[0] + ".*"
            for match in map(_PIN.match, metadata.requires("torch") or [])
            if match
        }
    except metadata.PackageNotFoundError:
        of_torch = {}
    return Versions(installed, torch.version.cuda, of_torch)


def output_of(*command: str, timeout_s: float = 30.0) -> str:
    """A command's output; "" if the command is missing, fails or times out."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=True, timeout=timeout_s
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def version_of(distribution: str) -> str | None:
    """The installed version, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def release(version: str) -> tuple[int, ...]:
    """The numbers at the beginning of a version: (2, 13, 0) of "2.13.0+cpu"."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match.group().split("."))) if match else (0,)


def check_versions(versions: Versions, *, has_gpu: bool) -> list[Finding]:
    """Problems of the versions, then one line that lists the versions."""
    installed, pins, cuda = versions.installed, versions.torch_pins, versions.torch_cuda
    torch_version, triton = installed["torch"], installed.get("triton", "")
    cuda_major = release(cuda)[0] if cuda else 13  # of `symmoe[nvshmem]` for a CPU build
    library, bindings = f"nvidia-nvshmem-cu{cuda_major}", f"nvshmem4py-cu{cuda_major}"
    nvshmem = installed.get(library)
    version = installed.get(bindings)
    core = installed.get("cuda-core")
    pin = pins.get("triton", "")
    other_triton = "pip install " + shlex.quote("triton==" + (pin or f"{_TRITON[1]}.*"))
    other_library = f"pip install {library}=={pins.get(library, '3.4.5')}"
    newer = f"pip install '{bindings}>=0.4.1,<0.5'"
    other_bindings = [name for name in installed if name.startswith("nvshmem4py-")]
    besides = (
        f"; {other_bindings[0]} is, which is not for torch's CUDA {cuda}" if other_bindings else ""
    )
    shown = {
        "symmoe": "symmoe",
        "torch": "torch",
        "Triton": "triton",
        "NVSHMEM": library,
        "nvshmem4py": bindings,
    }
    parts = [f"{label} {installed.get(name, 'not installed')}" for label, name in shown.items()]
    return findings_about(
        "versions",
        *first(
            (
                release(torch_version) < release(_TORCH[0]),
                "problem",
                f"torch {torch_version} is older than what symmoe is made for, {_TORCH[0]}",
                f"pip install 'torch>={_TORCH[0]}'",
            ),
            (
                release(torch_version)[:2] > release(_TORCH[1]),
                "note",
                f"torch {torch_version} has not been tested, {_TORCH[0]} to {_TORCH[1]} have: where it lacks a private "
                "name that symmoe reads, there is a slower way, or an error that says so",
                _OLDER,
            ),
            (
                has_gpu and release(torch_version)[:2] not in map(release, _TORCH_ON_GPUS),
                "note",
                f"torch {torch_version} has been tested on CPUs only; on GPUs {', '.join(_TORCH_ON_GPUS)} has",
                f"pip install 'torch=={_TORCH_ON_GPUS[-1]}.*'",
            ),
        ),
        *first(
            (
                has_gpu and not triton,
                "problem",
                "Triton is not installed: the kernels for GPUs are written in it",
                other_triton,
            ),
            (
                triton and release(triton)[:2] not in TRITON_VERSIONS,
                "note",
                f"Triton {triton} has not been tested, {_TRITON[0]} to {_TRITON[1]} have: Hopper's own kernels are not "
                "used, and Triton's JIT makes every launch, which takes the host 34 us instead of 2 to 6",
                # If torch requires an untested Triton, only another torch helps.
                _OLDER if pin and release(pin)[:2] not in TRITON_VERSIONS else other_triton,
            ),
            (
                triton and pin and release(triton)[: len(release(pin))] != release(pin),
                "note",
                f"Triton {triton} is not the one that torch {torch_version} asks for, {pin}",
                other_triton,
            ),
        ),
        *first(
            (
                nvshmem and release(triton)[:2] == (3, 6) and release(nvshmem) >= (3, 7),
                "problem",
                f"NVSHMEM {nvshmem} with Triton {triton} is known to be bad: from 3.7 on torch does not find NVSHMEM's "
                "device library, and Triton 3.6 cannot read that of 3.8",
                other_library,
            ),
            (
                nvshmem and library in pins and release(nvshmem) != release(pins[library]),
                "note",
                f"NVSHMEM {nvshmem} is not the one that torch is built with and loads, {pins.get(library)}",
                other_library,
            ),
        ),
        *first(
            (
                has_gpu and cuda is not None and version is None,
                "problem",
                f"{bindings} is not installed{besides}: heaps on GPUs need it",
                newer,
            ),
            (
                version and release(version) < (0, 3, 1),
                "problem",
                f"{bindings} {version} does not work: 0.4.1 does",
                newer,
            ),
            (
                version and release(version) < (0, 4, 1),
                "note",
                f"{bindings} {version} is older than what was tested: 0.4.1 does",
                newer,
            ),
        ),
        (
            version and release(core or "0") < (0, 5),  # older ones have cuda.core.experimental
            "problem",
            f"cuda-core {core or '(not installed)'} has no cuda.core: {bindings} and symmoe need 0.5 or newer",
            "pip install 'cuda-core>=0.7'",
        ),
        (
            version and nvshmem is None,
            "problem",
            f"{bindings} is installed without {library}, the library that it binds",
            other_library,
        ),
        (
            "megatron-core" in installed and "psutil" not in installed,
            "note",
            "megatron-core without psutil: its distributed checkpoints hang",
            "pip install 'psutil>=5'",
        ),
        (
            True,
            "ok",
            f"{', '.join(parts)}; torch is built for {f'CUDA {cuda}' if cuda else 'CPUs'}",
            "",
        ),
    )
