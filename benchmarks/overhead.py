"""CPU time of calls whose GPU work is tiny: what the host spends on a grouped MLP and on pointer loading.

    python benchmarks/overhead.py --json overhead.json
    python benchmarks/overhead.py --device cpu --iterations 3      smoke test: CPUs compute inside the calls

64 experts, hidden 128, ffn 128, bf16, 16 rows each, SwiGLU times a scale per row, splits on the device. Compared with a
loop over 64 pairs of nn.Linear, whose splits are a list on the host, and with torch._grouped_mm, each with the same
activation made of torch's operations. A number is the median of single calls, timed on the host without waiting for
the GPU; the GPU is waited for between short batches, so that its queue never fills up.
"""

import argparse
import datetime
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

from symmoe import GroupedMLP, copy_data_ptrs_to_device, copy_host_to_device, pack_weight_ptrs

GROUPS, HIDDEN, FFN, ROWS_PER_GROUP = 64, 128, 128, 16
NUM_POINTERS = 256
BATCH = 5  # calls between synchronisations
WARMUP = 10


class LinearLoop(nn.Module):
    """One pair of nn.Linear per expert; reads the splits on the host."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        options = {"bias": False, "dtype": torch.bfloat16, "device": device}
        self.fc1 = nn.ModuleList(nn.Linear(HIDDEN, 2 * FFN, **options) for _ in range(GROUPS))
        self.fc2 = nn.ModuleList(nn.Linear(FFN, HIDDEN, **options) for _ in range(GROUPS))

    def forward(self, rows: torch.Tensor, splits: list[int], scale: torch.Tensor) -> torch.Tensor:
        parts = zip(self.fc1, self.fc2, rows.split(splits), scale.split(splits), strict=True)
        return torch.cat([fc2(activation(fc1(x), s)) for fc1, fc2, x, s in parts])


class TorchGroupedMM(nn.Module):
    """torch._grouped_mm for both layers."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        options = {"dtype": torch.bfloat16, "device": device}
        self.w1 = nn.Parameter(torch.randn(GROUPS, 2 * FFN, HIDDEN, **options) * HIDDEN**-0.5)
        self.w2 = nn.Parameter(torch.randn(GROUPS, HIDDEN, FFN, **options) * FFN**-0.5)

    def forward(self, rows: torch.Tensor, splits: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ends = splits.cumsum(0, dtype=torch.int32)
        h = torch._grouped_mm(rows, self.w1.transpose(1, 2), offs=ends)
        return torch._grouped_mm(activation(h, scale), self.w2.transpose(1, 2), offs=ends)


def activation(h: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """SwiGLU times the rows' scale."""
    gate, up = h.chunk(2, dim=-1)
    return nn.functional.silu(gate) * up * scale.to(h.dtype)[:, None]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_us(calls: list[Callable[[], object]], device: torch.device, iterations: int) -> list[float]:
    """Median microseconds of each of the calls, which run one after the other in every iteration."""
    times: list[list[float]] = [[] for _ in calls]
    for iteration in range(-WARMUP, iterations):
        if iteration % BATCH == 0:
            synchronize(device)
        for call, seen in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            if iteration >= 0:
                seen.append(time.perf_counter() - start)
    synchronize(device)
    return [statistics.median(seen) * 1e6 for seen in times]


def module_us(module: nn.Module, splits: torch.Tensor | list[int], device: torch.device, iterations: int) -> dict:
    """Forward and backward of one module. Gradients are dropped between, outside of the measured calls."""
    rows = torch.randn(GROUPS * ROWS_PER_GROUP, HIDDEN, dtype=torch.bfloat16, device=device, requires_grad=True)
    scale = torch.rand(rows.shape[0], device=device, requires_grad=True)
    grad = torch.randn_like(rows)
    out: list[torch.Tensor] = []
    parameters = [rows, scale, *module.parameters()]

    def forward() -> None:
        out.append(module(rows, splits, scale))

    def backward() -> None:
        out.pop().backward(grad)

    def drop_gradients() -> None:
        for parameter in parameters:
            parameter.grad = None

    forward_us, backward_us, _ = median_us([forward, backward, drop_gradients], device, iterations)
    return {"forward_us": forward_us, "backward_us": backward_us}


def modules(device: torch.device) -> dict[str, tuple[nn.Module, torch.Tensor | list[int]]]:
    splits = [ROWS_PER_GROUP] * GROUPS
    device_splits = torch.tensor(splits, device=device)
    options = {"dtype": torch.bfloat16, "device": device}
    return {
        "GroupedMLP packed": (GroupedMLP(GROUPS, HIDDEN, FFN, **options), device_splits),
        "GroupedMLP discrete": (GroupedMLP(GROUPS, HIDDEN, FFN, weights="discrete", **options), device_splits),
        "nn.Linear loop": (LinearLoop(device), splits),
        "torch._grouped_mm": (TorchGroupedMM(device), device_splits),
    }


def pointer_calls(device: torch.device) -> dict[str, Callable[[], object]]:
    """Calls that load pointers."""
    tensors = [nn.Parameter(torch.zeros(8, 8, device=device)) for _ in range(NUM_POINTERS)]
    data, destination = bytes(8 * NUM_POINTERS), torch.zeros(NUM_POINTERS, dtype=torch.int64, device=device)
    fc1, fc2 = tensors[:GROUPS], tensors[GROUPS : 2 * GROUPS]

    return {
        f"copy_host_to_device, {len(data)} bytes": lambda: copy_host_to_device(data, destination),
        f"copy_data_ptrs_to_device, {NUM_POINTERS}": lambda: copy_data_ptrs_to_device(tensors, device),
        f"pack_weight_ptrs, {GROUPS} + {GROUPS}": lambda: pack_weight_ptrs(fc1, fc2),
        "torch.tensor(pointers, device=...), for comparison": lambda: torch.tensor(
            [tensor.data_ptr() for tensor in tensors], device=device
        ),
    }


def environment(device: torch.device) -> dict[str, str]:
    about = {
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "command": " ".join(sys.argv),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
    if device.type == "cuda":
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split("\n")[0]
        about |= {"gpu": torch.cuda.get_device_name(device), "driver": driver, "cuda": str(torch.version.cuda)}
    return about


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--iterations", type=int, default=300, help="measured calls (%(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write results to FILE")
    args = parser.parse_args()
    device = torch.empty(0, device=args.device).device
    torch.manual_seed(0)
    env = environment(device)
    print(", ".join(f"{key} {env[key]}" for key in ("gpu", "driver", "torch", "python") if key in env), flush=True)
    results = []
    print(f"{'CPU time per call, us':52}{'forward':>10}{'backward':>10}")
    for name, (module, splits) in modules(device).items():
        times = module_us(module, splits, device, args.iterations)
        print(f"{name:52}{times['forward_us']:10.1f}{times['backward_us']:10.1f}", flush=True)
        results.append({"name": name, **times})
    for name, call in pointer_calls(device).items():
        (call_us,) = median_us([call], device, args.iterations)
        print(f"{name:52}{call_us:10.1f}", flush=True)
        results.append({"name": name, "call_us": call_us})
    if args.json:
        with open(args.json, "w") as file:
            json.dump({**env, "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
