"""The environment variables that matter: their values, and which of them cost something."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from symmoe.tools.doctor.findings import Finding, Findings

_PREFIXES = ("NVSHMEM_", "SYMMOE_", "TORCH_", "TRITON_", "CUDA_MPS_")
_NAMES = {
    *("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME"),
    *("NCCL_NVLS_ENABLE", "NCCL_P2P_DISABLE", "OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
}
_SHOWN = 80  # characters of a value
_ON = {"1", "true", "yes", "on", "y", "t"}
# Variables of ranks on GPUs: values that hurt ("on", "off", or all but these), how much, and why.
_HURTS: dict[str, tuple[str, str, str]] = {
    "TRITON_INTERPRET": ("on", "problem", "kernels run in Triton's interpreter on the CPU, not on the GPUs"),
    "NVSHMEM_DISABLE_P2P": ("on", "problem", "ranks get no address of peers' memory, and no heap can be built"),
    "NVSHMEM_DISABLE_NVLS": ("off", "note", "NVSHMEM sets up NVLink multicast, which symmoe does not use"),
    "NVSHMEM_REMOTE_TRANSPORT": ("none", "note", "NVSHMEM looks for a network at start; symmoe uses one node"),
    "NVSHMEM_DISABLE_LOCAL_ONLY_PROXY": ("off", "note", "a thread of every rank keeps a core busy"),
    "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": ("lo =lo", "note", "NVSHMEM listens outside of this machine at start"),
    "NVSHMEM_SYMMETRIC_SIZE": ("", "note", "symmoe sets it to what the heap's num_bytes needs; this has no effect"),
    "CUDA_LAUNCH_BLOCKING": ("on", "note", "every launch waits: nothing overlaps, and graphs cannot be captured"),
    "NCCL_P2P_DISABLE": ("on", "note", "NCCL goes through host memory: gradients get slow, symmoe's trips do not"),
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
    found = Findings("environment")
    matters = [name for name in sorted(environment) if name in _NAMES or name.startswith(_PREFIXES)]
    shown = {name: f"{name}={_short(environment[name])}" for name in matters}
    for name, (values, level, text) in _HURTS.items():
        if has_gpu and name in environment and _is_one_of(environment[name], values):
            found.add(level, f"{shown[name]}: {text}", f"unset {name}")
    for name in matters:
        if name.startswith("SYMMOE_") and name not in _FOLDERS:
            found.add("note", f"{name}: symmoe reads no such variable, only SYMMOE_FLIGHT_DIR", f"unset {name}")
    for name, (level, text) in _FOLDERS.items():
        folder = environment.get(name)
        if folder and (has_gpu or level == "note") and not _is_writable(Path(folder)):
            found.add(
                level, f"{shown[name]} cannot be written to: {text}", f"export {name}=... to a folder of your own"
            )
    threads = environment.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) > num_cores:
        text = f"OMP_NUM_THREADS={threads} on {num_cores} cores: every rank starts as many threads"
        found.add("note", text, "export OMP_NUM_THREADS=1")
    found.add("ok", " ".join(shown.values()) or "no variable that matters is set")
    return found


def _is_one_of(value: str, values: str) -> bool:
    """Whether a value is one of those that hurt."""
    value = value.strip().lower()
    return (value in _ON) == (values == "on") if values in ("on", "off") else value not in values.split()


def _is_writable(folder: Path) -> bool:
    """Whether files can be made there; for a folder that does not exist yet, whether it can be made."""
    existing = next((each for each in (folder, *folder.absolute().parents) if os.path.lexists(each)), Path("/"))
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


def _short(value: str) -> str:
    shown = value if len(value) <= _SHOWN else value[: _SHOWN - 3] + "..."
    return shown.encode("unicode_escape").decode() if shown else "''"
