"""The step that `symmoe trace` records: one layer, random tokens, forward and backward."""

from __future__ import annotations

import torch

from symmoe.bench.cases import Case, Shape, check_case
from symmoe.bench.problem import DTYPE
from symmoe.bench.ranks import join
from symmoe.moe.config import MoEConfig, Schedule
from symmoe.moe.layer import MoELayer
from symmoe.moe.memory import plan_memory
from symmoe.symm_mem.heap import SymmetricHeap
from symmoe.timeline.recording import record
from symmoe.timeline.report import table

_WARM_UP_STEPS = 3
_PROFILED_STEPS = 3  # under the profiler, before what is recorded: its start makes hosts late
_HEAP_TIMEOUT_S = 120.0  # a rank may compile kernels while the others wait in a barrier


def trace_layer(shape: Shape, *, num_tokens: int, schedule: Schedule, capacity: int, num_steps: int, path: str) -> str:
    """Records steps of a layer with random weights, tokens and routing, bf16. Collective.

    Args:
        capacity: rows, static; more are dropped.
        path: of the trace, see :func:`symmoe.timeline.record`.

    Returns:
        the table on rank 0; "" elsewhere.
    """
    with join() as ranks:
        check_case(Case(shape, num_tokens, "uniform"), ranks.num_ranks)
        config = MoEConfig(
            hidden=shape.hidden,
            ffn=shape.ffn,
            num_experts=shape.num_experts,
            top_k=shape.top_k,
            capacity=capacity,
            overflow="drop",
            schedule=schedule,
            aux_loss_coef=1e-2,
        )
        plan = plan_memory(config, num_ranks=ranks.num_ranks, num_tokens=num_tokens, dtype=DTYPE)
        with SymmetricHeap(num_bytes=plan.heap_bytes, timeout_s=_HEAP_TIMEOUT_S) as heap:
            torch.manual_seed(0)  # the router is the same on all ranks
            layer = MoELayer(config, heap, dtype=DTYPE)
            torch.manual_seed(1 + heap.rank)
            x = torch.randn(num_tokens, shape.hidden, dtype=DTYPE, device=heap.device, requires_grad=True)
            dy = torch.randn_like(x)
            for _ in range(_WARM_UP_STEPS):
                _step(layer, x, dy)
            with record(path, heap) as recording:
                for _ in range(_PROFILED_STEPS):
                    _step(layer, x, dy)
                recording.start()
                for _ in range(num_steps):
                    _step(layer, x, dy)
            return table(recording.timeline) if recording.timeline is not None and heap.rank == 0 else ""


def _step(layer: MoELayer, x: torch.Tensor, dy: torch.Tensor) -> None:
    y, metrics = layer(x)
    torch.autograd.backward((y, metrics.aux_loss), (dy, torch.ones_like(metrics.aux_loss)))
