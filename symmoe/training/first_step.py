"""Finds a silent mistake of training loops in the first optimizer step: ranks whose parameters diverge."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from symmoe.checks.arguments import check_kind, modules_of
from symmoe.errors import ArgumentError, warn
from symmoe.grouped.parameters import local_part, named_parameters
from symmoe.moe.ddp_and_fsdp import ExpertParallelModule
from symmoe.training.gradients import REDUCED

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_first_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Compares the ranks of an EP group before and after the optimizer's next step. Warns on every rank if dense
    parameters differ before or after it (parameters outside of the layers only if they were equal before), or if
    experts are equal. Where DDP or FSDP reduces gradients, it compares experts only.

    Call it once, before the loop, on all ranks. The next step is collective over the heap's group, and synchronises
    the host; this call and later steps do neither. All ranks must make that step: if a loss scaler skips it on one
    rank only, the others wait until the process group's timeout. `symmoe check` compares whole runs.

    Args:
        model: the trained model, with layers of one heap.
        optimizer: holds parameters of the model.

    Raises:
        ArgumentError: the model has no MoELayer; or the optimizer is a ZeroRedundancyOptimizer that has experts.
    """
    check_kind("optimizer", optimizer, torch.optim.Optimizer)
    layers = _layers(model)
    trained_ids = {id(param) for group in optimizer.param_groups for param in group["params"]}
    kinds = [kind.__name__ for kind in type(optimizer).__mro__]
    experts = [parameter for _, parameter, is_expert in named_parameters(model) if is_expert]
    if "ZeroRedundancyOptimizer" in kinds and not trained_ids.isdisjoint(map(id, experts)):
        raise ArgumentError(
            "optimizer (ZeroRedundancyOptimizer) has experts, which differ from rank to rank, and overwrites "
            "them with those of the rank to which it gives their update: give it the dense parameters only, "
            "and the experts an optimizer of their own"
        )
    if layers[0].heap.num_ranks == 1:
        return
    before: list[int] = []
    watched = [model]  # until its first step is over

    def record_checksums(*_: Any) -> None:
        for module in watched:  # again where a step calls another one, or has failed
            before[:] = _experts_checksum(_layers(module)), *_checksums(module, trained_ids)

    def compare(*_: Any) -> None:
        while watched:
            module = watched.pop()
            layers = _layers(module)
            are_reduced = any(
                hasattr(parameter.grad, REDUCED)
                for layer in layers
                for parameter in layer.parameters()
            )
            sums = layers[0].heap.bootstrap.gather([*before, *_checksums(module, trained_ids)])
            for text in _mistakes(sums, are_reduced=are_reduced):
                warn(text)

    # torch iterates over hooks while it runs them, so a hook cannot remove itself. It stays, without the model.
    optimizer.register_step_pre_hook(record_checksums)
    optimizer.register_step_post_hook(compare)


def _layers(model: nn.Module) -> list[ExpertParallelModule]:
    return modules_of(model, ExpertParallelModule, needs="MoELayer")


def _mistakes(rows: list[list[int]], *, are_reduced: bool) -> list[str]:
    """Mistakes that all ranks' checksums show. A row: experts, the layers' dense parameters and other dense parameters
    before the step, and both dense groups after it."""
    experts, before, before_elsewhere, after, after_elsewhere = (
        len(set(column)) for column in zip(*rows, strict=True)
    )
    before_step = "dense parameters differ between ranks before the first optimizer step: "
    after_step = "dense parameters differ between ranks after the first optimizer step: "
    of_dense = (
        (
            before > 1,
            f"{before_step}make them equal with symmoe.training.broadcast_parameters(model) when the model is built",
        ),
        (
            after > 1 and are_reduced,
            f"{after_step}gradients were changed after symmoe.reduce_gradients, otherwise on each rank. Clip with "
            "symmoe.training.clip_grad_norm: torch's clip_grad_norm_ counts only this rank's experts",
        ),
        (
            after > 1,
            f"{after_step}call symmoe.reduce_gradients(model) after backward and before the optimizer",
        ),
        (
            after_elsewhere > before_elsewhere == 1,
            "dense parameters outside of the MoE layers differ between ranks after the first optimizer step, and were "
            "equal before: call symmoe.reduce_gradients(model) of the whole model, not of its layers only",
        ),
    )
    of_experts = (
        "experts are equal on all ranks, as from equal seeds; those of different ranks are different parameters. Seed "
        "them with heap.rank, and make the others equal with symmoe.training.broadcast_parameters(model)"
    )
    texts = [text for is_so, text in of_dense if is_so][:1]
    return [*texts, of_experts] if experts == 1 else texts


def _checksums(model: nn.Module, trained_ids: set[int]) -> tuple[int, int]:
    """Checksums of the layers' dense parameters, which must be equal on all ranks, and of the optimizer's other dense
    parameters, which may differ. If it trains none of the layers', all are one."""
    layers = _layers(model)
    if any(layer._ddp_ref() is not None for layer in layers) or any(
        hasattr(parameter, "device_mesh") for parameter in model.parameters()
    ):
        return 0, 0
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    named = [
        (parameter, id(parameter) in inside)
        for _, parameter, is_expert in named_parameters(model)
        if not is_expert and _has_bits(parameter)
    ]
    of_layers = [parameter for parameter, is_inside in named if is_inside]
    elsewhere = [param for param, is_inside in named if not is_inside and id(param) in trained_ids]
    if not any(parameter.requires_grad for parameter in of_layers):
        return _checksum(of_layers + elsewhere), 0
    return _checksum(of_layers), _checksum(elsewhere)


def _experts_checksum(layers: list[ExpertParallelModule]) -> int:
    """Checksum of this rank's experts; the rank, if they cannot differ: copies of one expert (upcycling), or none."""
    experts = [
        local_part(parameter) for layer in layers for parameter in layer.experts.parameters()
    ]
    parts = [part for part in experts if part.numel()]
    return layers[0].heap.rank if not parts or _are_copies(layers[0]) else _checksum(parts)


def _checksum(tensors: Iterable[torch.Tensor]) -> int:
    """Checksum of the bits of tensors, whatever their order. Synchronises."""
    bits = [tensor.detach().view(_INTEGERS[tensor.element_size()]) for tensor in tensors]
    sums = [tensor.sum(dtype=torch.int64) for tensor in bits]
    digest = hashlib.sha256(repr(sorted(map(int, sums))).encode()).digest()
    return int.from_bytes(digest[:8], "little")


def _has_bits(parameter: torch.Tensor) -> bool:
    """Whether the parameter has memory of its own for all elements, whose bits can be summed."""
    return (
        type(parameter) in (torch.Tensor, torch.nn.Parameter)
        and parameter.layout is torch.strided
        and not parameter.is_meta
        and parameter.element_size() in _INTEGERS
    )


def _are_copies(layer: ExpertParallelModule) -> bool:
    """Whether this rank has several experts, all of them equal."""
    weights = layer.experts.fc1.weight_parameters()
    of_experts = weights[0] if layer.experts.fc1.is_packed else weights
    return len(of_experts) > 1 and len({_checksum([weight]) for weight in of_experts}) == 1
