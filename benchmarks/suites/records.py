"""One record per figure, a flat dictionary with the same keys in every suite; where it was measured; a table.

suite, variant, preset, ep, tokens, skew, direction: the case; with explicit sizes the preset is HxIxExK. ep: ranks.
    tokens: T per rank. direction: forward or backward (of calls without one: forward)
ms_median, ms_p10, ms_p90, repetitions: of the slowest rank
tflops: 6 T H I K forward and 12 T H I K backward over the median, of the mean rank; in gemm the products named, of
    GroupedLinear 4 and 8
ceiling_tflops, stock_tflops, stock_ms: the same FLOPs by the GEMMs alone and by stock torch in this run, and its
    time
wire_bytes, wire_gbs: bytes of rows that leave a rank (combine: that arrive), of the rank with the most, from the
    plan; over the median, in 1e9 bytes per second. layer: dispatch and combine together
deduplicated_bytes, slot_bytes: dispatch, combine: bytes as neutral benchmarks count them, of bf16 rows, of the rank
    with the most: one row for each pair of a token and another rank that has a slot of it, and one for each slot there.
    Equal for all variants, whatever they move; the time over them is a rate that other libraries' can be compared with
copy_gbs: as many bytes by a plain copy in this run
yardstick: the key that the figure is compared with: ceiling_tflops, stock_tflops, copy_gbs or stock_ms; null for
    yardsticks and other implementations
error: the largest relative error found in step 2
hidden, ffn, num_experts, top_k, dtype: sizes
precision, weights, splits: grouped: the recipe or bf16, packed or scattered, device or host
weight_copy_bytes: grouped: bytes of weights that torch's operators copy in a step, forward and backward, without
    copies in kernels. "copied B" in the table
host_us, launches, waits, copies, allocations: steps, grouped: see step 5; in grouped of a step, forward and
    backward; all but host_us only on GPUs
in_a_row_us: overhead: host microseconds of a call that loads pointers, among 200 of its kind, or fewer that take 50
    ms. "in a row" in the table
skipped: grouped: name and reason of each variant without a measurement
nodes: rail: number of nodes
peak_ordinary_bytes, peak_heap_bytes: layer, variants, precision, memory: peak of one step above the memory before
    it: GPU memory, leases
gpu, driver, torch, triton, nvshmem: machine and versions; gpu is the CPU's model on CPUs
commit, command, date: of the source tree (`-dirty`: with changes; unknown outside of git), the call, UTC
"""

from __future__ import annotations

import datetime
import json
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from suites.problem import DTYPE, Problem
from symmoe.tools.doctor.versions import output_of, version_of
from symmoe.tools.ranks import Ranks

Record = dict[str, Any]

# Keys of every record; None where a figure does not exist.
KEYS = (
    *(
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
    ),
    *(
        "tflops",
        "ceiling_tflops",
        "stock_tflops",
        "wire_bytes",
        "wire_gbs",
        "copy_gbs",
        "stock_ms",
        "yardstick",
    ),
    *(
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
    ),
)
_RATIOS = {  # by yardstick: above and below, more is better
    "ceiling_tflops": ("tflops", "ceiling_tflops"),
    "stock_tflops": ("tflops", "stock_tflops"),
    "copy_gbs": ("wire_gbs", "copy_gbs"),
    "stock_ms": ("stock_ms", "ms_median"),  # times: less is better
}
_COLUMNS = (  # of the table
    *(
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
        "host_us",
    ),
    *(
        "in_a_row_us",
        "tflops",
        "ceiling_tflops",
        "stock_tflops",
        "wire_gbs",
        "copy_gbs",
        "deduplicated_bytes",
        "slot_bytes",
        "weight_copy_bytes",
    ),
    *("held_ordinary_bytes", "held_heap_bytes", "peak_ordinary_bytes", "peak_heap_bytes"),
)


def new_record(times_ms: npt.NDArray[np.float64], **values: Any) -> Record:
    """A record of the milliseconds of all repetitions. Unknown keys are None; further keys may be passed, and
    `wire_bytes` adds `wire_gbs`."""
    marks = (
        np.percentile(times_ms, [10, 50, 90]) if len(times_ms) else ()
    )  # where no time is a figure
    figures: Record = dict(
        zip(("ms_p10", "ms_median", "ms_p90"), map(rounded, marks), strict=False)
    )
    figures["wire_gbs"] = gbs(values.get("wire_bytes"), times_ms)
    return {**dict.fromkeys(KEYS), **figures, "repetitions": len(times_ms), **values}


def case_record(
    problem: Problem,
    suite: str,
    variant: str,
    direction: str,
    times_ms: npt.NDArray[np.float64],
    **values: Any,
) -> Record:
    """A record of one case."""
    case = problem.case
    about = {
        "preset": case.shape.name,
        "ep": problem.num_ranks,
        "tokens": case.num_tokens,
        "skew": case.skew,
    }
    about |= {name: getattr(case.shape, name) for name in ("hidden", "ffn", "num_experts", "top_k")}
    dtype = str(DTYPE).removeprefix("torch.")
    fields = {"suite": suite, "variant": variant, "direction": direction, "dtype": dtype}
    return new_record(times_ms, **fields | about | values)


def rounded(value: float) -> float:
    """The value with six digits: more would be noise."""
    return float(f"{value:.6g}")


def tflops(flops: float, times_ms: npt.NDArray[np.float64]) -> float:
    """TFLOP/s in the median time."""
    return rounded(flops / float(np.median(times_ms)) / 1e9)


def gbs(num_bytes: float | None, times_ms: npt.NDArray[np.float64]) -> float | None:
    """Gigabytes (1e9) per second of the median time; None if nothing moves."""
    return rounded(num_bytes / float(np.median(times_ms)) / 1e6) if num_bytes else None


def ratio(record: Record) -> float | None:
    """The figure relative to the yardstick of the same run, larger is better; None without a yardstick."""
    if record.get("yardstick") not in _RATIOS:
        return None
    above, below = (record.get(key) for key in _RATIOS[record["yardstick"]])
    return above / below if above is not None and below else None


def render(records: Sequence[Record]) -> str:
    """A line for each record, with the keys that any record has, then the skipped cases and the reasons. "ratio" is
    relative to the yardstick of the same run."""
    keys = [key for key in _COLUMNS if any(record.get(key) is not None for record in records)]
    values = [[*(record.get(key) for key in keys), ratio(record)] for record in records]
    rows = [[*keys, "ratio"], *(list(map(_shown, row)) for row in values)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.rjust, row, widths)) for row in rows]
    skipped = {(name, why) for record in records for name, why in record.get("skipped", {}).items()}
    return "\n".join([*lines, *(f"skipped {name}: {why}" for name, why in sorted(skipped))])


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def save(records: list[Record] | Record, path: str | Path) -> None:
    """Writes records, or one of a whole run, to a file."""
    Path(path).write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")


def measured_on(ranks: Ranks) -> Record:
    """The keys of a record for the machine and the command. Starts nvidia-smi and git."""
    launcher = f"torchrun --nproc-per-node={ranks.num_ranks}" if ranks.num_ranks > 1 else "python"
    command = " ".join([launcher, Path(sys.argv[0]).name, *map(shlex.quote, sys.argv[1:])])
    return machine(ranks.device) | {"command": command}


def machine(device: torch.device) -> dict[str, str | None]:
    """The keys of a record for the machine. Starts nvidia-smi and git if they are installed."""
    on_gpu = device.type == "cuda"
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
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
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )
