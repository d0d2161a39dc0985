"""What ranks run for the tests of Megatron's distributed optimizer, on CPUs. Everything runs on ranks."""

from __future__ import annotations

from typing import Any

import megatron_shim
import torch
from megatron_cases import batch_of, config_of, differences, forms_of, model_of, opened_heap, reference_spec, use_groups
from megatron_cases import named_parameters as parameters_of

NUM_STEPS = 3


def trained(rank: int, num_ranks: int, *, ep: int) -> dict[str, Any]:
    """A few steps with Megatron's plain and its distributed optimizer, of Megatron's layers and of ours.

    Without its checkpoints: with torch's Adam, which Megatron takes without Apex and Transformer Engine, its loader
    asks for a "step" that its writer has not written.

    Returns:
        differences of parameters, distributed to plain and ours to Megatron's, and how many numbers of Adam's state
        this rank has with both.
    """
    use_groups(ep=ep)
    config = config_of()
    found, sizes = {}, []
    with opened_heap() as heap, megatron_shim.CudaIsCpu():
        forms = forms_of(reference_spec(config), heap)
        for form in ("megatron", "experts"):
            for distributed in (False, True):
                run = _Run(config, forms[form], distributed)
                before = run.parameters()
                run.steps(NUM_STEPS)
                found[form, distributed] = run.parameters()
                if form == "experts":
                    sizes.append(run.state_size())
        moved = differences(run.parameters(), before)
        changes = {
            "distributed to plain": differences(found["experts", True], found["experts", False]),
            "experts to megatron": differences(found["experts", True], found["megatron", True]),
        }
    return {**changes, "num_moved": len(moved), "num_parameters": len(before), "state_sizes": sizes}


class _Run:
    """A GPTModel in Megatron's DDP, with Adam."""

    def __init__(self, config: Any, spec: Any, distributed: bool) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        choice = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=distributed)
        self.model = DistributedDataParallel(config, choice, model_of(config, spec))
        settings = OptimizerConfig(
            optimizer="adam", lr=1e-2, weight_decay=0.01, clip_grad=0.5, use_distributed_optimizer=distributed
        )
        self.optimizer = get_megatron_optimizer(settings, [self.model])

    def steps(self, number: int) -> None:
        from megatron.core.distributed import finalize_model_grads

        for _ in range(number):
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()
            self.model(**batch_of()).mean().backward()
            finalize_model_grads([self.model])
            is_done, norm, _ = self.optimizer.step()
            assert is_done
            assert norm > 0.5, "the gradients are clipped"

    def parameters(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach().clone() for name, parameter in parameters_of(self.model)}

    def state_size(self) -> int:
        states = [state for part in self.optimizer.chained_optimizers for state in part.optimizer.state.values()]
        return sum(state["exp_avg"].numel() for state in states)
