"""Where something was measured: the keys of a record that say so."""

from __future__ import annotations

import datetime
import platform
from pathlib import Path

import torch

from symmoe.tools.facts import output_of, version_of


def machine(device: torch.device) -> dict[str, str | None]:
    """The keys of a record that say where it was measured. Starts nvidia-smi and git if they are there."""
    on_gpu, query = (
        device.type == "cuda",
        ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
    )
    nvshmem = [(name, version_of(name)) for name in ("nvidia-nvshmem-cu13", "nvshmem4py-cu13")]
    return {
        "gpu": torch.cuda.get_device_name(device) if on_gpu else _cpu_model(),
        "driver": output_of(*query).split("\n")[0] if on_gpu else None,
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "nvshmem": ", ".join(f"{name} {number}" for name, number in nvshmem if number) or None
        if on_gpu
        else None,
        "commit": commit(Path(__file__).parent),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def commit(folder: Path) -> str:
    """The git commit of a source tree, "unknown" if git does not track it; with "-dirty" if any file of the repository
    differs or is not in it, tests and scripts that measure too."""
    git = (
        "git",
        "--no-optional-locks",
        "-C",
        str(folder),
    )  # without a lock: a commit at the same time would fail
    if not output_of(*git, "ls-files", "__init__.py"):
        return "unknown"  # installed, perhaps below somebody else's repository
    head = output_of(*git, "rev-parse", "HEAD") or "unknown"
    return f"{head}-dirty" if output_of(*git, "status", "--porcelain") else head


def _cpu_model() -> str:
    said = Path("/proc/cpuinfo")
    lines = said.read_text(encoding="utf-8").splitlines() if said.exists() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )
