"""Puts expert-parallel experts into a transformers model."""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

from symmoe.checks.arguments import check_kind, check_model, modules_of
from symmoe.errors import ArgumentError, first_problem, raise_for
from symmoe.integrations.transformers.experts import (
    ExpertParallelExperts,
    StepConfig,
    empty_experts,
)
from symmoe.integrations.transformers.forms import (
    ExpertsForm,
    PeftNames,
    StockExperts,
    experts_modules,
    unwrapped,
)
from symmoe.kernels import control
from symmoe.lora import LoRAGroupedLinear
from symmoe.moe.ddp_and_fsdp import prepare_for_ddp
from symmoe.symm_mem.heap import SymmetricHeap

Model = TypeVar("Model", bound=nn.Module)
_UNSEEN_BY_PEFT = (
    "_symmoe_unseen_by_peft"  # on a swapped model: the handle of the hook that detects peft
)
_LINEAR_OF = {"gate_up_proj": "fc1", "up_proj": "fc1", "down_proj": "fc2"}
_REFUSED_OF_PEFT = (
    "save_pretrained load_adapter add_adapter delete_adapter set_adapter disable_adapter disable_adapter_layers "
    "merge_adapter unmerge_adapter merge_and_unload unload add_weighted_adapter"
).split()


@torch.no_grad()
def swap_moe(model: Model, heap: SymmetricHeap, *, step: StepConfig | None = None) -> Model:
    """Replaces the experts of every MoE block by this rank's share of them, in place. Returns the model.

    Everything else stays transformers' own, so router logits, auxiliary losses and gradient checkpointing work as
    before; `save_pretrained` raises. Afterwards forward and backward are collective over the heap's group: each rank
    passes its own tokens. Not collective itself; copies this rank's weights and frees the others.

    Args:
        model: has experts that transformers dispatches through its experts interface; on any device: move it to the
            heap's before the first call. On the meta device the experts stay there too. A PeftModel may wrap it:
            adapters of experts become adapters of grouped layers (symmoe.lora), which symmoe.integrations.peft saves
            and loads.
        heap: the EP group's symmetric heap.
        step: options of every call; None: exact capacity, and MoEConfig's defaults.

    Raises:
        ArgumentError: experts compute a function that symmoe lacks (forms.py), the ranks do not divide the number of
            experts, the model has no such experts (e.g. it is already swapped), or adapters of peft that grouped
            layers do not support. The model is unchanged.
    """
    check_model(model)
    check_kind("heap", heap, SymmetricHeap)
    experts_by_path = dict(experts_modules(model))
    is_wrapped = hasattr(model, "peft_type")
    raise_for(
        first_problem(
            (
                not experts_by_path,
                f"{type(model).__name__} has no experts to replace: none that transformers dispatches through its "
                "experts interface; is it swapped already?",
            ),
            (
                not is_wrapped and "peft_config" in vars(model),
                f"model ({type(model).__name__}) has adapters of peft, and is no PeftModel: pass that one",
            ),
        )
    )
    swapped = {
        path: _share_of(experts, heap, step or StepConfig())
        for path, experts in experts_by_path.items()
    }
    for path, share in swapped.items():
        if wrappers := unwrapped(model.get_submodule(path))[1]:
            adapt(share, wrappers)
    for path, share in swapped.items():
        model.set_submodule(path, share)
        share.listeners.is_fixed = getattr(
            model.get_submodule(path.rpartition(".")[0]), "is_hash", False
        )
    if is_wrapped:
        refuse_methods_of_peft(model)
    else:
        vars(model)["save_pretrained"] = partial(
            _refuse,
            "save_pretrained would write only this rank's experts; "
            "symmoe.integrations.transformers.save_checkpoint(model, folder) writes those of all ranks",
        )
        vars(model)[_UNSEEN_BY_PEFT] = model.register_forward_pre_hook(_refuse_peft)
    prepare_for_ddp(model)
    return model


def refuse_methods_of_peft(model: Any) -> None:
    """Makes methods of a PeftModel raise if they would change its adapters but miss those of experts."""
    reason = (
        "of peft knows nothing of adapters of experts that are on several ranks; save them with "
        "symmoe.integrations.peft.save_adapters, and do this with the plain model"
    )
    for owner in (model, model.base_model):
        names = [name for name in _REFUSED_OF_PEFT if hasattr(owner, name)]
        vars(owner).update((name, partial(_refuse, f"{name} {reason}")) for name in names)
    if (hook := vars(model.get_base_model()).pop(_UNSEEN_BY_PEFT, None)) is not None:
        hook.remove()


def heap_of(model: nn.Module) -> SymmetricHeap:
    """The heap of a swapped model. ArgumentError: the model is not swapped."""
    return modules_of(
        model, ExpertParallelExperts, needs="expert-parallel experts: swap_moe comes first"
    )[0].heap


@torch.no_grad()
def adapt(experts: ExpertParallelExperts, wrappers: list[Any]) -> None:
    """Adds this rank's part of the `wrappers`' adapters, which cover all experts. Freezes the experts' weights.
    Local. ArgumentError: gate_up_proj and down_proj do not have exactly one unmerged adapter each; or options that
    grouped layers lack."""
    names, mlp, is_transposed = dict[str, PeftNames](), experts.mlp, experts.form.is_transposed
    for depth, peft in enumerate(wrappers):
        if peft.parameter_name not in _LINEAR_OF or len(peft.lora_A) != 1 or peft.merged_adapters:
            raise ArgumentError(
                f"peft has adapters {list(peft.lora_A)} for {peft.parameter_name}, merged {peft.merged_adapters}; "
                "experts can have one, not merged, for gate_up_proj and down_proj"
            )
        (adapter,) = peft.lora_A
        linear = _LINEAR_OF[peft.parameter_name]
        keys = PeftNames(
            "base_layer." * depth,
            getattr(peft, "_did_swap_in_out_features", False) == is_transposed,
        )
        a, b, rank = peft.lora_A[adapter].weight, peft.lora_B[adapter].weight, peft.r[adapter]
        options = {"rank": rank, "alpha": peft.scaling[adapter] * rank, "dtype": a.dtype}
        adapted = LoRAGroupedLinear.from_linear(getattr(mlp, linear), rank_dropout=0.0, **options)
        keys.fill(adapted, a, b, experts.heap)
        setattr(mlp, linear, adapted)
        names[linear] = keys
    if names.keys() != {"fc1", "fc2"}:
        raise ArgumentError(
            f"peft has adapters for {[wrapper.parameter_name for wrapper in wrappers]} of experts; "
            "they can be adapted only with both gate_up_proj and down_proj"
        )
    experts.peft_names = names
    experts.set_experts(mlp)


def _share_of(
    experts: StockExperts, heap: SymmetricHeap, step: StepConfig
) -> ExpertParallelExperts:
    """This rank's experts, on the device of `experts`."""
    form, num_experts = ExpertsForm.of(experts), len(experts.down_proj)
    if num_experts % heap.num_ranks:
        raise ArgumentError(
            f"the number of experts ({num_experts}) must be divisible by the number of ranks ({heap.num_ranks})"
        )
    num_local = num_experts // heap.num_ranks
    share = empty_experts(form, experts, num_local, heap, step=step)
    start = heap.rank * num_local
    for name, all_weights in form.local_weights(experts).items():
        linear, _, kind = name.partition(".")
        weight = all_weights[start : start + num_local].clone(memory_format=torch.contiguous_format)
        setattr(
            getattr(share.mlp, linear),
            kind,
            nn.Parameter(weight, requires_grad=all_weights.requires_grad),
        )
    return share.train(experts.training)


def _refuse_peft(model: nn.Module, _args: object) -> None:
    """Raises on all ranks if peft has wrapped the model without seeing its experts."""
    if torch.compiler.is_compiling() or "peft_config" not in vars(model):
        return
    experts = modules_of(model, ExpertParallelExperts)[0]
    problem = experts.prepare_call() or ArgumentError(
        "peft has wrapped a model whose experts are swapped: it does not see them, and would train fewer adapters "
        "than of the plain model. Wrap it with symmoe.integrations.peft.get_peft_model, or before swap_moe"
    )
    experts.heap._fail_for(problem, control.PHASE_PLAN)


def _refuse(reason: str, *args: object, **kwargs: object) -> NoReturn:
    raise ArgumentError(reason)
