"""The step that `symmoe trace` records: one layer, random tokens, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from symmoe.moe.config import MoEConfig
from symmoe.moe.layer import MoELayer
from symmoe.symm_mem.heap import SymmetricHeap
from symmoe.timeline.events import Timeline
from symmoe.timeline.recording import Recording, record
from symmoe.timeline.replays import capture_step, record_replays
from symmoe.timeline.report import table
from symmoe.tools.bench.problem import DTYPE
from symmoe.tools.bench.ranks import join
from symmoe.training.memory_plan import plan_memory

_WARM_UP_STEPS = 3
_PROFILED_STEPS = 3  # under the profiler, before what is recorded: its start makes hosts late
_REPLAYED_HEAP = 3  # times an eager step's: a graph's leases do not take over what was freed on other streams


@dataclass(frozen=True, slots=True)
class _LayerStep:
    """A step from the router to the gradients. They do not accumulate, which would take additional time."""

    layer: MoELayer
    x: torch.Tensor
    dy: torch.Tensor

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        y, metrics = self.layer(self.x)
        return y, metrics.aux_loss

    def backward(self, outputs: tuple[torch.Tensor, torch.Tensor]) -> None:
        torch.autograd.grad(outputs, (self.x, *self.layer.parameters()), (self.dy, torch.ones_like(outputs[1])))

    def run(self) -> None:
        self.backward(self.forward())


def trace_layer(config: MoEConfig, *, num_tokens: int, path: str, eager: bool = False) -> str:
    """Records a step of a layer with random weights, tokens and routing, bf16. Collective.

    Args:
        config: the layer's configuration: with a balance loss; a step that is captured needs a static capacity.
        num_tokens: T, tokens of a rank.
        path: path of the trace, see :func:`symmoe.timeline.record`.
        eager: the step as the host launches it, as always on CPUs, instead of a replay of the captured step.

    Returns:
        the table on rank 0; "" elsewhere.

    Raises:
        ArgumentError: experts cannot be divided among the ranks.
    """
    with join() as ranks:
        plan = plan_memory(config, num_ranks=ranks.num_ranks, num_tokens=num_tokens, dtype=DTYPE)
        replays = not eager and ranks.device.type == "cuda"
        heap_bytes = plan.heap_bytes * (_REPLAYED_HEAP if replays else 1)
        with SymmetricHeap(num_bytes=heap_bytes) as heap:
            torch.manual_seed(0)  # the router is the same on all ranks
            layer = MoELayer(config, heap, dtype=DTYPE)
            torch.manual_seed(1 + heap.rank)
            x = torch.randn(num_tokens, config.hidden, dtype=DTYPE, device=heap.device, requires_grad=True)
            step = _LayerStep(layer, x, torch.randn_like(x))
            for _ in range(_WARM_UP_STEPS):
                step.run()
            if replays:
                graph = capture_step(step.forward, step.backward)
                try:
                    timeline = _record(record_replays(path, heap), graph.replay)
                finally:
                    del graph
                    heap.release_graphs()
            else:
                timeline = _record(record(path, heap), step.run)
            return table(timeline) if heap.rank == 0 else ""


def _record(recording_of: AbstractContextManager[Recording], run: Callable[[], object]) -> Timeline:
    """One run, after some that are not recorded."""
    with recording_of as recording:
        for _ in range(_PROFILED_STEPS):
            run()
        recording.start()
        run()
    assert recording.timeline is not None
    return recording.timeline
