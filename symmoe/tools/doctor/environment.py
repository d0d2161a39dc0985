"""The environment variables that matter: their values, and which of them cost something."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from symmoe.tools.doctor.findings import Finding

_PREFIXES = ("NVSHMEM_", "SYMMOE_", "TORCH_", "TRITON_", "CUDA_MPS_")
_NAMES = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES",
    "GLOO_SOCKET_IFNAME",
    "NCCL_NVLS_ENABLE",
    "NCCL_P2P_DISABLE",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)
_OURS = ("SYMMOE_FLIGHT_DIR",)
_SHOWN = 80  # characters of a value
_YES = ("1", "true", "yes", "on", "y", "t")


def relevant(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that matter, sorted by name."""
    return {name: environment[name] for name in sorted(environment) if name in _NAMES or name.startswith(_PREFIXES)}


def check_environment(environment: Mapping[str, str], *, has_gpu: bool, num_cores: int) -> list[Finding]:
    """Problems of the variables that matter, then one line with their values.

    symmoe sets what NVSHMEM needs unless the environment has it already: such values win.
    """
    found = [] if not has_gpu else [*_check_problems(environment), *_check_costs(environment)]
    found += [*_check_own(environment), *_check_folders(environment, has_gpu)]
    threads = environment.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) > num_cores:
        text = f"OMP_NUM_THREADS={threads} on {num_cores} cores: every rank starts as many threads"
        found.append(Finding("note", "environment", text, "export OMP_NUM_THREADS=1"))
    values = [f"{name}={_short(value)}" for name, value in relevant(environment).items()]
    text = " ".join(values) if values else "no variable that matters is set"
    return [*found, Finding("ok", "environment", text)]


def _check_problems(environment: Mapping[str, str]) -> list[Finding]:
    """Values with which ranks on GPUs do not work."""
    found = []
    if _is_on(environment, "TRITON_INTERPRET"):
        text = "TRITON_INTERPRET=1: kernels run in Triton's interpreter on the CPU, not on the GPUs"
        found.append(Finding("problem", "environment", text, "unset TRITON_INTERPRET"))
    if _is_on(environment, "NVSHMEM_DISABLE_P2P"):
        text = "NVSHMEM_DISABLE_P2P=1: ranks get no address of their peers' memory, and no heap can be built"
        found.append(Finding("problem", "environment", text, "unset NVSHMEM_DISABLE_P2P"))
    return found


def _check_costs(environment: Mapping[str, str]) -> list[Finding]:
    """Values that work, and cost something."""
    interface = environment.get("NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", "lo").lstrip("=")
    transport = environment.get("NVSHMEM_REMOTE_TRANSPORT", "none")
    costs = {
        "NVSHMEM_DISABLE_NVLS": (
            _is_off(environment, "NVSHMEM_DISABLE_NVLS"),
            "NVSHMEM sets up NVLink multicast, which symmoe does not use",
        ),
        "NVSHMEM_REMOTE_TRANSPORT": (
            transport.lower() != "none",
            "NVSHMEM looks for a network at start; symmoe uses one node",
        ),
        "NVSHMEM_DISABLE_LOCAL_ONLY_PROXY": (
            _is_off(environment, "NVSHMEM_DISABLE_LOCAL_ONLY_PROXY"),
            "a thread of every rank keeps a core busy",
        ),
        "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": (interface != "lo", "NVSHMEM listens outside of this machine at start"),
        "NVSHMEM_SYMMETRIC_SIZE": (
            "NVSHMEM_SYMMETRIC_SIZE" in environment,
            "symmoe sets it to what the heap's num_bytes needs; this value has no effect",
        ),
        "CUDA_LAUNCH_BLOCKING": (
            _is_on(environment, "CUDA_LAUNCH_BLOCKING"),
            "every launch waits for its kernel: nothing overlaps, and graphs cannot be captured",
        ),
        "NCCL_P2P_DISABLE": (
            _is_on(environment, "NCCL_P2P_DISABLE"),
            "NCCL goes through host memory: gradients and yardsticks get slow, symmoe's trips do not",
        ),
    }
    return [
        Finding("note", "environment", f"{name}={_short(environment[name])}: {text}", f"unset {name}")
        for name, (does_cost, text) in costs.items()
        if does_cost
    ]


def _check_own(environment: Mapping[str, str]) -> list[Finding]:
    unknown = [name for name in sorted(environment) if name.startswith("SYMMOE_") and name not in _OURS]
    known = ", ".join(_OURS)
    return [
        Finding("note", "environment", f"{name}: symmoe reads no such variable, only {known}", f"unset {name}")
        for name in unknown
    ]


def _check_folders(environment: Mapping[str, str], has_gpu: bool) -> list[Finding]:
    """Checks the folders that are made and written to."""
    needs = {"SYMMOE_FLIGHT_DIR": ("note", "ranks leave no flight records")}
    if has_gpu:
        needs["TRITON_CACHE_DIR"] = ("problem", "Triton cannot compile kernels")
    found = []
    for name, (level, text) in needs.items():
        folder = environment.get(name)
        if folder and not _is_writable(Path(folder)):
            text = f"{name}={_short(folder)} cannot be written to: {text}"
            found.append(Finding(level, "environment", text, f"export {name}=... to a folder of your own, or unset it"))
    return found


def _is_writable(folder: Path) -> bool:
    """Whether files can be made there; for a folder that does not exist yet, whether it can be made."""
    existing = next((each for each in (folder, *folder.absolute().parents) if os.path.lexists(each)), Path("/"))
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


def _is_on(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "").strip().lower() in _YES


def _is_off(environment: Mapping[str, str], name: str) -> bool:
    """Whether a variable is set to a value that does not mean yes."""
    return name in environment and not _is_on(environment, name)


def _short(value: str) -> str:
    shown = value if len(value) <= _SHOWN else value[: _SHOWN - 3] + "..."
    return shown.encode("unicode_escape").decode() if shown else "''"
