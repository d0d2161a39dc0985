"""The environment variables that matter: their values, and which of them cost something."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
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
_SHOWN = 80  # characters of a value
_YES = ("1", "true", "yes", "on", "y", "t")


def _is_on(value: str) -> bool:
    return value.strip().lower() in _YES


def _is_off(value: str) -> bool:
    return not _is_on(value)


# Variables of ranks on GPUs: when a value hurts, how much, and why.
_HURTS: dict[str, tuple[Callable[[str], bool], str, str]] = {
    "TRITON_INTERPRET": (_is_on, "problem", "kernels run in Triton's interpreter on the CPU, not on the GPUs"),
    "NVSHMEM_DISABLE_P2P": (
        _is_on,
        "problem",
        "ranks get no address of their peers' memory, and no heap can be built",
    ),
    "NVSHMEM_DISABLE_NVLS": (_is_off, "note", "NVSHMEM sets up NVLink multicast, which symmoe does not use"),
    "NVSHMEM_REMOTE_TRANSPORT": (
        lambda value: value.lower() != "none",
        "note",
        "NVSHMEM looks for a network at start; symmoe uses one node",
    ),
    "NVSHMEM_DISABLE_LOCAL_ONLY_PROXY": (_is_off, "note", "a thread of every rank keeps a core busy"),
    "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": (
        lambda value: value.lstrip("=") != "lo",
        "note",
        "NVSHMEM listens outside of this machine at start",
    ),
    "NVSHMEM_SYMMETRIC_SIZE": (
        lambda value: True,
        "note",
        "symmoe sets it to what the heap's num_bytes needs; this value has no effect",
    ),
    "CUDA_LAUNCH_BLOCKING": (
        _is_on,
        "note",
        "every launch waits for its kernel: nothing overlaps, and graphs cannot be captured",
    ),
    "NCCL_P2P_DISABLE": (
        _is_on,
        "note",
        "NCCL goes through host memory: gradients and yardsticks get slow, symmoe's trips do not",
    ),
}
# Folders that are made and written to, if they cannot be: how bad that is, and why.
_FOLDERS = {
    "SYMMOE_FLIGHT_DIR": ("note", "ranks leave no flight records"),
    "TRITON_CACHE_DIR": ("problem", "Triton cannot compile kernels"),
}


def check_environment(environment: Mapping[str, str], *, has_gpu: bool, num_cores: int) -> list[Finding]:
    """Problems of the variables that matter, then one line with their values.

    symmoe sets what NVSHMEM needs unless the environment has it already: such values win.
    """
    found = []

    def add(level: str, text: str, fix: str) -> None:
        found.append(Finding(level, "environment", text, fix))

    matters = [name for name in sorted(environment) if name in _NAMES or name.startswith(_PREFIXES)]
    shown = {name: f"{name}={_short(environment[name])}" for name in matters}
    for name, (hurts, level, text) in _HURTS.items():
        if has_gpu and name in environment and hurts(environment[name]):
            add(level, f"{shown[name]}: {text}", f"unset {name}")
    for name in matters:
        if name.startswith("SYMMOE_") and name not in _FOLDERS:
            add("note", f"{name}: symmoe reads no such variable, only SYMMOE_FLIGHT_DIR", f"unset {name}")
    for name, (level, text) in _FOLDERS.items():
        folder = environment.get(name)
        if folder and (has_gpu or level == "note") and not _is_writable(Path(folder)):
            fix = f"export {name}=... to a folder of your own, or unset it"
            add(level, f"{shown[name]} cannot be written to: {text}", fix)
    threads = environment.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) > num_cores:
        text = f"OMP_NUM_THREADS={threads} on {num_cores} cores: every rank starts as many threads"
        add("note", text, "export OMP_NUM_THREADS=1")
    add("ok", " ".join(shown.values()) or "no variable that matters is set", "")
    return found


def _is_writable(folder: Path) -> bool:
    """Whether files can be made there; for a folder that does not exist yet, whether it can be made."""
    existing = next((each for each in (folder, *folder.absolute().parents) if os.path.lexists(each)), Path("/"))
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


def _short(value: str) -> str:
    shown = value if len(value) <= _SHOWN else value[: _SHOWN - 3] + "..."
    return shown.encode("unicode_escape").decode() if shown else "''"
