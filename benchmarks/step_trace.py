"""What a training step of MoELayer launches, from torch.profiler: kernels, copies and calls that wait for the GPU.

    torchrun --nproc-per-node=2 benchmarks/step_trace.py --out trace.txt

The step is router, plan, dispatch, experts, combine, a loss, and backward into accumulated gradients, with static
capacity. A copy from device to device, or any call that makes the host wait, is a finding; so is a torch operator that
copies a tensor of row size by a kernel (clone, copy_). Exits with 1 if there are any.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.autograd import DeviceType

import symmoe

STEP = "traced step"
# CUDA runtime and driver calls that return only when the GPU has got somewhere.
WAITING_CALLS = (
    "cudaDeviceSynchronize",
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
    "cuCtxSynchronize",
    "cuStreamSynchronize",
    "cuEventSynchronize",
    "cudaMemcpy",
    "cuMemcpyDtoH_v2",
    "cuMemcpyHtoD_v2",
)
COPYING_OPERATORS = ("aten::copy_", "aten::clone", "aten::contiguous")


@dataclass(frozen=True)
class StepTrace:
    """One step as the profiler saw it.

    Attributes:
        kernels: name to launches.
        copies: kind ("Memcpy DtoD (Device -> Device)", "Memset (Device)", ...) to launches.
        waits: waiting call to how often it was made.
        row_copies: copying operator and shape to how often, for tensors of at least `row_numel` elements.
    """

    kernels: Counter[str]
    copies: Counter[str]
    waits: Counter[str]
    row_copies: Counter[str]

    @property
    def findings(self) -> list[str]:
        """What a zero-copy step with static capacity must not have."""
        found = [f"{count} x {name}" for name, count in self.copies.items() if "DtoD" in name or "PtoP" in name]
        found += [f"{count} x {name}" for name, count in self.waits.items()]
        return found + [f"{count} x {name}" for name, count in self.row_copies.items()]


def trace_step(step: Callable[[], object], *, row_numel: int) -> StepTrace:
    """Profiles one call of `step`, which has run before. Synchronises.

    Args:
        row_numel: elements from which a copy by a torch operator counts.
    """
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        with torch.profiler.record_function(STEP):
            step()
        torch.cuda.synchronize()  # outside of the step: everything it launched is in the trace
    events = profiler.events()
    whole = next(e.time_range for e in events if e.name == STEP and e.device_type == DeviceType.CPU)
    kernels, copies, waits, row_copies = (Counter() for _ in range(4))
    for event in events:
        if event.device_type == DeviceType.CUDA:
            if event.name.startswith(("Memcpy", "Memset")):
                copies[event.name] += 1
            elif event.name != STEP:
                kernels[event.name] += 1
        elif whole.start <= event.time_range.start <= whole.end:
            if event.name in WAITING_CALLS:
                waits[event.name] += 1
            elif event.name in COPYING_OPERATORS and event.input_shapes and event.input_shapes[0]:
                shape = event.input_shapes[0]
                if torch.Size(shape).numel() >= row_numel:
                    row_copies[f"{event.name} {shape}"] += 1
    return StepTrace(kernels, copies, waits, row_copies)


def training_step(layer: symmoe.MoELayer, num_tokens: int) -> Callable[[], None]:
    """A step on fixed tokens; gradients accumulate."""
    dtype = next(layer.experts.parameters()).dtype
    x = torch.randn(num_tokens, layer.config.hidden, device=layer.heap.device, dtype=dtype, requires_grad=True)
    dy = torch.randn_like(x)

    def step() -> None:
        y, metrics = layer(x)
        torch.autograd.backward((y, metrics.aux_loss), (dy, torch.ones_like(metrics.aux_loss)))

    return step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192, help="T, tokens per rank")
    parser.add_argument("--out", help="file for the summary of rank 0")
    args = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo")
    config = symmoe.MoEConfig(
        hidden=2048,
        ffn=768,
        num_experts=128,
        top_k=8,
        capacity=int(1.25 * args.tokens * 8),
        overflow="drop",
        aux_loss_coef=1e-2,
        z_loss_coef=1e-3,
    )
    num_ranks = dist.get_world_size()
    plan = symmoe.plan_memory(config, num_ranks=num_ranks, num_tokens=args.tokens)
    heap = symmoe.SymmetricHeap(num_bytes=plan.heap_bytes)
    layer = symmoe.MoELayer(config, heap, dtype=torch.bfloat16)
    step = training_step(layer, args.tokens)
    for _ in range(3):
        step()
    found = trace_step(step, row_numel=args.tokens * config.top_k * config.hidden)
    if heap.rank == 0:
        text = summary(found, config, num_ranks, args.tokens)
        print(text)
        if args.out:
            with open(args.out, "w") as file:
                print(text, file=file)
    heap.close()
    dist.destroy_process_group()
    return 1 if found.findings else 0


def summary(trace: StepTrace, config: symmoe.MoEConfig, num_ranks: int, num_tokens: int) -> str:
    """The trace as text."""
    lines = [
        f"{torch.cuda.get_device_name()} x {num_ranks}, torch {torch.__version__}, {datetime.date.today()}",
        f"{config}, T {num_tokens}",
        f"device-to-device copies: {sum(n for name, n in trace.copies.items() if 'DtoD' in name or 'PtoP' in name)}",
        f"calls that wait for the GPU: {trace.waits.total()}",
        f"copies of tensors of row size by operators: {trace.row_copies.total()}",
        *(f"finding: {text}" for text in trace.findings),
        "copies and fills by the driver:",
        *(f"{count:5d}  {name}" for name, count in sorted(trace.copies.items())),
        f"kernels: {trace.kernels.total()}",
        *(f"{count:5d}  {name[:100]}" for name, count in sorted(trace.kernels.items())),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
