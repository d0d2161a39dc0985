"""One record per figure: a flat dictionary with the same keys in every suite; and where and how it was measured."""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from symmoe.errors import ArgumentError

Record = dict[str, Any]
Identity = tuple[Any, ...]  # the values of IDENTITY

# Keys of every record; None where a figure does not exist. docs/benchmarking.md says what each means.
KEYS = (
    "suite",
    "variant",
    "preset",
    "ep",
    "tokens",
    "skew",
    "direction",
    "ms_median",
    "ms_p10",
    "ms_p90",
    "tflops",
    "ceiling_tflops",
    "stock_tflops",
    "wire_bytes",
    "wire_gbs",
    "copy_gbs",
    "stock_ms",
    "yardstick",
    "error",
    "repetitions",
    "gpu",
    "driver",
    "torch",
    "triton",
    "nvshmem",
    "commit",
    "command",
    "date",
)
# What makes two records the same measurement.
IDENTITY = ("suite", "variant", "preset", "ep", "tokens", "skew", "direction")
_DIGITS = 6  # significant digits; more would be noise


def new_record(times_ms: npt.NDArray[np.float64], **known: Any) -> Record:
    """A record of the milliseconds of all repetitions. Keys that are not known are None; more may be given."""
    marks = zip(("ms_p10", "ms_median", "ms_p90"), np.percentile(times_ms, [10, 50, 90]), strict=True)
    figures = {name: rounded(value) for name, value in marks}
    return {**dict.fromkeys(KEYS), **figures, "repetitions": len(times_ms), **known}


def rounded(value: float) -> float:
    """The value with as many digits as records hold."""
    return float(f"{value:.{_DIGITS}g}")


def tflops(flops: float, times_ms: npt.NDArray[np.float64]) -> float:
    """TFLOP/s in the median time."""
    return rounded(flops / float(np.median(times_ms)) / 1e9)


def gbs(num_bytes: float | None, times_ms: npt.NDArray[np.float64]) -> float | None:
    """Gigabytes (1e9) per second of the median time; None if nothing moves."""
    return rounded(num_bytes / float(np.median(times_ms)) / 1e6) if num_bytes else None


def median_ms(times_ms: npt.NDArray[np.float64]) -> float:
    """The median of all repetitions."""
    return rounded(float(np.median(times_ms)))


def ratio(record: Record) -> float | None:
    """How the figure compares with the yardstick of the same run, more is better; None without one."""
    pairs = {
        "ceiling_tflops": ("tflops", "ceiling_tflops"),
        "stock_tflops": ("tflops", "stock_tflops"),
        "copy_gbs": ("wire_gbs", "copy_gbs"),
        "stock_ms": ("stock_ms", "ms_median"),  # times: less is better
    }
    if record.get("yardstick") not in pairs:
        return None
    above, below = (record.get(key) for key in pairs[record["yardstick"]])
    return above / below if above is not None and below else None


def identity(record: Record) -> Identity:
    """The values of IDENTITY. Records from before there were variants have none."""
    return tuple(record.get(key) for key in IDENTITY)


def load(path: str) -> list[Record]:
    """The records of a file.

    Raises:
        ArgumentError: it cannot be read, or holds something else.
    """
    try:
        records = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ArgumentError(f"cannot read records from {path}: {error}") from error
    if not isinstance(records, list) or not all(isinstance(r, dict) and "suite" in r for r in records):
        raise ArgumentError(f"{path} does not hold a list of records")
    return records


def save(records: list[Record], path: str) -> None:
    """Writes records to a file."""
    Path(path).write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")


def machine(device: torch.device) -> dict[str, str | None]:
    """The keys of a record that say where it was measured. Starts nvidia-smi and git if they are there."""
    on_gpu = device.type == "cuda"
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "gpu": torch.cuda.get_device_name(device) if on_gpu else _cpu_model(),
        "driver": _output_of(*query).split("\n")[0] if on_gpu else None,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "nvshmem": _nvshmem_version() if on_gpu else None,
        "commit": commit(Path(__file__).resolve().parent.parent),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def commit(folder: Path) -> str:
    """The git commit of a source tree, "unknown" if git does not track it; with "-dirty" if any file of the repository
    differs or is not in it, tests and scripts that measure too."""
    if not _output_of("git", "-C", str(folder), "ls-files", "__init__.py"):
        return "unknown"  # installed, perhaps below somebody else's repository
    head = _output_of("git", "-C", str(folder), "rev-parse", "HEAD") or "unknown"
    # Without a lock: a commit at the same time would fail.
    changed = _output_of("git", "--no-optional-locks", "-C", str(folder), "status", "--porcelain")
    return head + ("-dirty" if changed else "")


def _output_of(*command: str) -> str:
    """What a command prints; "" if it cannot be run or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _nvshmem_version() -> str | None:
    parts = [(name, _version(name)) for name in ("nvidia-nvshmem-cu13", "nvshmem4py-cu13")]
    return ", ".join(f"{name} {number}" for name, number in parts if number) or None
