"""A pytest plugin that runs the experts of transformers' own model tests with symmoe, on one rank. Where transformers
would take `grouped_mm`, its default, symmoe's step runs on the module's own weights: plan, dispatch, fused experts,
combine, and their backward. So tests that compare this implementation with eager compare symmoe with it."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from recorder import recorder_of

HEAP_BYTES = 1 << 30  # untouched pages cost nothing


def pytest_configure(config: pytest.Config) -> None:
    """Before the tests are imported."""
    if config.getoption("--symmoe-form") == "plain":
        return
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    from symmoe import SymmetricHeap
    from symmoe.errors import ArgumentError
    from symmoe.integrations.transformers.experts import StepConfig, empty_experts
    from symmoe.integrations.transformers.forms import ExpertsForm

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    heap = SymmetricHeap(num_bytes=HEAP_BYTES)
    recorder = recorder_of(config)
    grouped_mm = ALL_EXPERTS_FUNCTIONS["grouped_mm"]

    def experts_forward(
        experts: Any, hidden: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        try:
            form = ExpertsForm.of(experts)
        except ArgumentError:  # a test of a model that symmoe refuses
            return grouped_mm(experts, hidden, idx, weights)
        step = empty_experts(form, experts, len(experts.down_proj), heap, step=StepConfig())
        parameters = {
            f"mlp.{name}": weight.contiguous()
            for name, weight in form.local_weights(experts).items()
        }
        y = torch.func.functional_call(step, parameters, (hidden, idx, weights))
        recorder.num_calls += 1
        return y

    ALL_EXPERTS_FUNCTIONS.register("grouped_mm", experts_forward)
