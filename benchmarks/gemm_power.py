"""At which clock and power grouped GEMMs run, in FP8 and in bf16, and how that depends on the numbers. One GPU.

    python benchmarks/gemm_power.py --json gemm-power.json

Each product or weight gradient of fp8_gemm.py runs for --seconds without a pause, with normal numbers and with zeros:
zeros switch no bits, so that they take less power, and the instructions are the same. Prints the mean time of a call,
median clock and power of the later half as torch.cuda reports them (it needs nvidia-ml-py), and cycles for 128 x 256 x
128 products on one SM: a stage of the FP8 kernels. The tensor core needs 1,024 for them in E4M3, 2,048 in bf16.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from fp8_gemm import E4M3, ORDER, Numbers, gradient, product
from gemm import SHAPES, uneven_groups

from symmoe.tools.bench.records import machine

STAGE_FLOPS = 2 * 128 * 256 * 128
WAYS = {"fc1": ("hopper", "torch rows", "bf16"), "wgrad1": ("hopper", "bf16")}
WARM_UP, BATCH = 3, 10  # calls
POLL_S = 0.02


class Zeros(Numbers):
    """No data at all, and scales as ever."""

    def normal(self, *shape: int) -> torch.Tensor:
        return super().normal(*shape).zero_()

    def data(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.uint8, device=self.device).view(E4M3)


@dataclass(frozen=True)
class Result:
    """Of one way to compute one thing."""

    shape: str
    op: str
    way: str
    numbers: str
    ms: float
    tflops: float
    sm_mhz: float
    watts: float
    stage_cycles: float

    def __str__(self) -> str:
        return (
            f"{self.shape:14}{self.op:8}{self.way:12}{self.numbers:8}{self.ms:7.3f} ms {self.tflops:6.0f} TFLOP/s "
            f"{self.sm_mhz:5.0f} MHz {self.watts:4.0f} W {self.stage_cycles:6.0f} cycles"
        )


class Watch:
    """Samples (MHz, watts) of the GPU from a thread of its own, while the context lasts."""

    def __init__(self) -> None:
        self._stop, self._thread = threading.Event(), threading.Thread(target=self._run, daemon=True)
        self.samples: list[tuple[int, float]] = []

    def _run(self) -> None:
        while not self._stop.wait(POLL_S):
            self.samples.append((torch.cuda.clock_rate(), torch.cuda.power_draw() / 1000))

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()


def measure(run: Callable[[], object], seconds: float) -> tuple[float, float, float]:
    """Mean milliseconds of a call; median MHz and watts of the later half, once they have settled."""
    for _ in range(WARM_UP):
        run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    calls, until = 0, time.monotonic() + seconds
    with Watch() as watch:
        start.record()
        while time.monotonic() < until:
            for _ in range(BATCH):
                run()
            calls += BATCH
            torch.cuda.synchronize()
        end.record()
        torch.cuda.synchronize()
    sm_mhz, watts = map(statistics.median, zip(*watch.samples[len(watch.samples) // 2 :], strict=True))
    return start.elapsed_time(end) / calls, sm_mhz, watts


def results_of(shape: str, numbers: Numbers, seconds: float) -> list[Result]:
    """Of all WAYS of one shape."""
    G, H, I, N = SHAPES[shape]
    on_host = uneven_groups(G, N, torch.Generator().manual_seed(0))
    num_sms = torch.cuda.get_device_properties(numbers.device).multi_processor_count
    results = []
    for name, ways in WAYS.items():
        op = (product if name == "fc1" else gradient)(name, (G, 2 * I, H, N), numbers, on_host)
        for way in ways:
            ms, sm_mhz, watts = measure(op.ways[way], seconds)
            cycles = ms * 1e3 * sm_mhz * num_sms * STAGE_FLOPS / op.flops
            kind, tflops = "zeros" if isinstance(numbers, Zeros) else "normal", op.flops / ms / 1e9
            results.append(Result(shape, name, way, kind, ms, tflops, sm_mhz, watts, cycles))
            print(results[-1], flush=True)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(ORDER), help="comma-separated shapes (%(default)s)")
    parser.add_argument("--seconds", type=float, default=1.2, help="of each measurement (%(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write results to FILE")
    args = parser.parse_args()
    device = torch.device("cuda")
    env = machine(device) | {"command": " ".join(sys.argv)}
    results = []
    for shape in args.shapes.split(","):
        for numbers in (Numbers(device), Zeros(device)):
            results += [asdict(result) for result in results_of(shape, numbers, args.seconds)]
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"env": env, "results": results}, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
