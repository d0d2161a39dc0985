"""What ranks run for the tests of Megatron's distributed optimizer, on CPUs. Everything runs on ranks."""

from __future__ import annotations

import multiprocessing as mp
from typing import Any

import megatron_shim
import torch
from megatron_cases import batch_of, config_of, differences, forms_of, model_of, opened_heap, reference_spec, use_groups
from megatron_cases import named_parameters as parameters_of
from megatron_checkpoints import end_writers

NUM_STEPS = 3


def trained(rank: int, num_ranks: int, *, ep: int, path: str | None) -> dict[str, Any]:
    """A few steps with Megatron's plain and its distributed optimizer, of Megatron's layers and of ours.

    Args:
        path: a folder for a checkpoint, from which a new model and optimizer go on; None: without.

    Returns:
        differences of parameters: distributed to plain, ours to Megatron's, and continued to loaded.
    """
    use_groups(ep=ep)
    config = config_of()
    found, moved = {}, {}
    with opened_heap() as heap, megatron_shim.CudaIsCpu():
        forms = forms_of(reference_spec(config), heap)
        for form in ("megatron", "experts"):
            for distributed in (False, True):
                run = _Run(config, forms[form], distributed)
                before = run.parameters()
                run.steps(NUM_STEPS)
                found[form, distributed] = run.parameters()
        moved = differences(run.parameters(), before)
        changes = {
            "distributed to plain": differences(found["experts", True], found["experts", False]),
            "experts to megatron": differences(found["experts", True], found["megatron", True]),
        }
        if path is not None:
            run.save(path)
            other = _Run(config, forms["experts"], True)
            changes["loaded to new"] = differences(other.parameters(), run.parameters())  # it starts elsewhere
            other.load(path)
            changes["loaded to saved"] = differences(other.parameters(), run.parameters())
            run.steps(1)
            other.steps(1)
            changes["loaded to continued"] = differences(other.parameters(), run.parameters())
    shards = sum(len(states) for states in run.states())
    return {**changes, "num_moved": len(moved), "num_parameters": len(before), "shards": shards}


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

    def states(self) -> list[Any]:
        return [optimizer.optimizer.state for optimizer in self.optimizer.chained_optimizers]

    def save(self, path: str) -> None:
        from megatron.core import dist_checkpointing

        # Megatron writes from processes of its own, which daemons may not have.
        mp.current_process()._config["daemon"] = False
        try:
            dist_checkpointing.save(self._state(is_loading=False), path, content_metadata=_metadata())
        finally:
            end_writers()

    def load(self, path: str) -> None:
        from megatron.core import dist_checkpointing

        loaded = dist_checkpointing.load(self._state(is_loading=True), path)
        self.model.load_state_dict(loaded["model"], strict=True)
        self.optimizer.load_state_dict(loaded["optimizer"])

    def _state(self, *, is_loading: bool) -> dict[str, Any]:
        model = self.model.module.sharded_state_dict(metadata=_metadata())
        optimizer = self.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=_metadata())
        return {"model": model, "optimizer": optimizer}


def _metadata() -> dict[str, Any]:
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return {"distrib_optim_sharding_type": "fully_reshardable", "dp_cp_group": group}
