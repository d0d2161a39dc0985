"""What ranks run for the tests of checkpoints and of Megatron's distributed optimizer. Everything runs on ranks."""

from __future__ import annotations

import multiprocessing as mp
from typing import Any

import megatron_shim
import torch
from megatron_cases import (
    ROUNDING,
    batch_of,
    config_of,
    differences,
    forms_of,
    model_of,
    named_parameters,
    named_parts,
    opened_heap,
    reference_spec,
    use_groups,
)

NUM_STEPS = 3
MOMENT = 3.0  # exp_avg of the saved optimizer is this times the parameter


def save(rank: int, num_ranks: int, *, path: str, ep: int, form: str, per_expert_keys: bool, fault: bool) -> None:
    """Saves a model and its Adam with Megatron's distributed checkpoint.

    With `fault`, gate and up of one expert have changed places.
    """
    from megatron.core import dist_checkpointing

    # Megatron writes from processes of its own, which daemons may not have.
    mp.current_process()._config["daemon"] = False
    use_groups(ep=ep)
    with opened_heap() as heap:
        model = model_of(config_of(), _spec(form, heap))
        with torch.no_grad():
            for name, parameter in named_parameters(model):
                parameter.copy_(torch.randn(parameter.shape, generator=_generator(name)))
                if fault and name.endswith("experts.5.linear_fc1.weight"):
                    parameter.copy_(parameter.roll(parameter.shape[0] // 2, 0))
        state = _state(model, per_expert_keys, [MOMENT * parameter.detach() for parameter in model.parameters()])
        try:
            dist_checkpointing.save(state, path, content_metadata={"singleton_local_shards": per_expert_keys})
        finally:
            _end_writers()


def load(rank: int, num_ranks: int, *, path: str, ep: int, form: str, per_expert_keys: bool) -> dict[str, Any]:
    """Loads it into a model of another layout or kind, and counts what is not what was saved.

    The expectation is made from names and seeds alone: the checkpoint is not its own oracle.
    """
    from megatron.core import dist_checkpointing

    use_groups(ep=ep)
    with opened_heap() as heap:
        model = model_of(config_of(), _spec(form, heap))
        parameters = named_parameters(model)
        with torch.no_grad():
            for _, parameter in parameters:
                parameter.zero_()
        state = _state(model, per_expert_keys, [torch.zeros_like(parameter) for parameter in model.parameters()])
        loaded = dist_checkpointing.load(state, path)
        model.load_state_dict(loaded["model"], strict=True)
        wrong = []
        states = loaded["optimizer"]["state"]
        moments = dict(
            part
            for i, (name, _) in enumerate(model.named_parameters())
            for part in named_parts(name, states[i]["exp_avg"])
        )
        for name, parameter in parameters:
            want = torch.randn(parameter.shape, generator=_generator(name))
            if not torch.equal(parameter, want):
                wrong.append(name)
            if not torch.equal(moments[name], MOMENT * want):
                wrong.append(f"exp_avg of {name}")
        experts = [name for name, _ in parameters if ".mlp.experts." in name]
        return {"wrong": wrong, "num_tensors": len(parameters), "experts": experts}


def _end_writers() -> None:
    """Ends the process of the queue that Megatron's writers share. It would outlive this one, which ends in a hurry."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = None  # the next save makes another
    for child in mp.active_children():
        child.terminate()
        child.join()


def _spec(form: str, heap: Any) -> Any:
    from symmoe.integrations.megatron import use_symmoe

    spec = reference_spec(config_of())
    return use_symmoe(spec, heap) if form == "symmoe" else spec


def _generator(name: str) -> torch.Generator:
    """By the parameter's name, in which experts have their global numbers: the same on every rank that has it."""
    return torch.Generator().manual_seed(sum(ord(c) * 31**i for i, c in enumerate(name)) % 2**62)


def _state(model: Any, per_expert_keys: bool, moments: list[torch.Tensor]) -> dict[str, Any]:
    """Sharded state of the model and of an Adam over its parameters, by Megatron's own functions for optimizers."""
    from megatron.core.dist_checkpointing.optimizer import (
        get_param_id_to_sharded_param_map,
        optim_state_to_sharding_state,
    )

    sharded = model.sharded_state_dict(metadata=_metadata(per_expert_keys))
    parameters = list(model.parameters())
    by_id = get_param_id_to_sharded_param_map(sharded, parameters)
    assert len(by_id) == len(parameters), "an optimizer finds the sharded tensor of every parameter"
    state = {i: {"exp_avg": moment} for i, moment in enumerate(moments)}
    optimizer = {"state": state, "param_groups": [{"params": list(range(len(parameters)))}]}
    optim_state_to_sharding_state(optimizer, by_id)
    return {"model": sharded, "optimizer": optimizer}


def _metadata(per_expert_keys: bool) -> dict[str, Any]:
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return {"singleton_local_shards": per_expert_keys, "dp_cp_group": group}


# -- the distributed optimizer ---------------------------------------------------------------------------------------


def trained(rank: int, num_ranks: int, *, ep: int) -> None:
    """A few steps with Megatron's plain and its distributed optimizer, of Megatron's layers and of ours, are the same.

    Without its checkpoints: with torch's Adam, which Megatron takes without Apex and Transformer Engine, its loader
    asks for a "step" that its writer has not written.
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
        assert len(differences(run.parameters(), before)) == len(before)
        to_plain, to_megatrons = (found[other] for other in (("experts", False), ("megatron", True)))
        assert max(differences(found["experts", True], to_plain).values(), default=0.0) < ROUNDING
        # Adam divides by small numbers.
        assert max(differences(found["experts", True], to_megatrons).values()) < 100 * ROUNDING
        plain, sharded = sizes  # numbers of Adam's state on this rank
        assert sharded < 0.7 * plain if ep == 1 else sharded < plain


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
        return {name: parameter.detach().clone() for name, parameter in named_parameters(self.model)}

    def state_size(self) -> int:
        states = [state for part in self.optimizer.chained_optimizers for state in part.optimizer.state.values()]
        return sum(state["exp_avg"].numel() for state in states)
