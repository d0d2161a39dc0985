"""Gradients of a model whose dense parameters are data-parallel and whose experts are expert-parallel.

Let W ranks each have a loss L_r, a mean over the rank's own tokens, and the training loss be L = (1/W) * sum_r L_r.
Backward leaves dL_r/dw of a dense parameter on each rank: sum over all, divide by W. Combine's backward carries each
rank's dL_r to an expert's rank, so backward leaves their sum over the EP group there. Where the world is cut into D EP
groups, the expert has D replicas that saw different tokens: sum over these (the heap's `expert_group`), and divide by
W, too, not by that group's size.

The module that owns a parameter decides its kind (grouped/parameters.py). Only `.grad` is reduced here: with
`accumulate_into_main_grad`, the trainer that owns `main_grad` reduces it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from symmoe.checks.arguments import check_kind, modules_of
from symmoe.errors import ArgumentError, first_problem, raise_for
from symmoe.grouped.parameters import named_parameters, tensors_of_experts, trainable
from symmoe.moe.ddp_and_fsdp import (
    ExpertParallelModule,
    all_reduce_together,
    expert_group_of,
    experts_heap,
    group_size,
)
from symmoe.torch_internals import version_of

REDUCED = "_symmoe_reduced"  # on a gradient: its version after the reduction


@torch.no_grad()
def reduce_gradients(model: nn.Module, *, group: dist.ProcessGroup | None = None) -> None:
    """Reduces `.grad` of every parameter to the gradient of the mean loss. Collective over `group`, and over the
    `expert_group` of the layers' heap.

    Dense gradients travel in one buffer and one all-reduce per dtype, in the order of `model.parameters()`,
    so the result does not depend on when each gradient became ready. A missing gradient is filled in with
    zeros: all ranks then send the same sizes, even if a rank had no tokens. Gradients of a submodule that was
    reduced separately stay unchanged. Call it once per step, after the last micro-batch: backward must not add to
    reduced gradients.

    Args:
        model: the same modules on every rank of `group`. Experts of the user's own classes belong to the heap that a
            module has as its attribute `heap`; without a heap, as in a bare GroupedMLP, they have no replicas.
        group: all ranks that train together (W of them). None: the default group, or this process if there is none.

    Raises:
        ArgumentError: a parameter is a DTensor, a layer is inside a DistributedDataParallel, layers have different
            expert groups, the gradients were reduced before, or W is not the number of ranks of the heap times that of
            its `expert_group`.
    """
    group = group or dist.group.WORLD
    layers = modules_of(model, ExpertParallelModule)
    dense, experts = trainable(model)
    parameters = dense + experts
    num_ranks = group_size(group)
    heap = experts_heap(model)
    if heap is not None and heap.num_ranks * len(heap.expert_ranks) != num_ranks:
        raise ArgumentError(
            f"group has {num_ranks} ranks; the heap has {heap.num_ranks}, and its expert_group "
            f"{len(heap.expert_ranks)}: group must have as many as both, multiplied"
        )
    # A reduced gradient has its version of then. Replays of a graph do not change versions.
    has_versions = num_ranks > 1 and not any(layer.heap.memory.graph_bytes for layer in layers)
    # All ranks must agree, even if an expert of one rank has no gradient.
    present = [parameter.grad for parameter in parameters if parameter.grad is not None]
    raise_for(
        first_problem(
            (
                any(layer._ddp_ref() is not None for layer in layers),
                "a layer is inside a DistributedDataParallel, which reduces gradients in backward, the experts' too: "
                "reduce_gradients would do it again",
            ),
            (
                has_versions and present and all(map(_is_reduced, present)),
                "reduce_gradients has been called for these gradients already, and there was no backward since: again "
                f"it would divide those of experts by the number of ranks ({num_ranks}) once more",
            ),
            *(
                (
                    True,
                    f"a parameter of shape {list(parameter.shape)} is a DTensor ({cast(Any, parameter).placements}): "
                    "FSDP reduces its gradient in backward, and reduce_gradients would do it again",
                )
                for parameter in parameters
                if hasattr(parameter, "device_mesh")
            ),
        )
    )
    # Gradients that a submodule reduced before travel again, so that all ranks send the same sizes.
    reduced = [
        p.grad for p in experts if has_versions and p.grad is not None and _is_reduced(p.grad)
    ]
    saved = [gradient.clone() for gradient in reduced]
    _sum_gradients(experts, group=None if heap is None else heap.expert_group)
    _sum_gradients(dense, group=group)
    if num_ranks > 1:
        gradients = [p.grad for p in parameters if p.grad is not None]
        torch._foreach_div_(gradients, num_ranks)
        for gradient, value in zip(reduced, saved, strict=True):
            gradient.copy_(value)
        _mark_reduced(gradients)


@torch.no_grad()
def clip_grad_norm(
    model: nn.Module,
    max_norm: float,
    *,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Scales the gradients down to a norm of at most `max_norm`. Collective over `group`; no host synchronisation.

    Call it after :func:`reduce_gradients`, or after backward under DDP or FSDP, which reduce gradients themselves;
    DTensors record their sharding. Every dense parameter and every expert counts once, wherever it is stored, so
    the norm does not depend on the number of ranks or on how parameters are sharded (up to rounding), and all ranks
    scale by the same bits.

    Args:
        model, group: as in :func:`reduce_gradients`.

    Returns:
        [] fp32, the norm before clipping, on the parameters' device.

    Raises:
        ArgumentError: the gradient of a DTensor is a partial sum, which has no norm yet; or layers have different
            expert groups.
    """
    check_kind("max_norm", max_norm, (int, float, torch.Tensor), "a number")
    group = group or dist.group.WORLD
    num_ranks = group_size(group)
    heap = experts_heap(model)
    num_replicas = 1 if heap is None else max(1, num_ranks // heap.num_ranks)
    copies = _local_gradients(model, num_ranks=num_ranks, num_replicas=num_replicas)
    device = next(
        model.parameters()
    ).device  # without gradients, torch would return the norm on the CPU
    shared_square, local_square = torch.zeros(
        2, device=device
    )  # squares of shared parts, and of parts to sum over ranks
    for num_copies, gradients in sorted(copies.items()):
        # Computes in fp32 or wider: the norm of a half-precision gradient may overflow its dtype.
        dtype = functools.reduce(
            torch.promote_types, (gradient.dtype for gradient in gradients), torch.float32
        )
        square = (
            torch.stack(torch._foreach_norm(gradients, 2.0, dtype=dtype))
            .square()
            .sum()
            .float()
            .to(device)
        )
        if num_copies == num_ranks:
            shared_square += square
        else:
            local_square += square / num_copies  # the sum over ranks repeats it
    if group is not None:
        dist.all_reduce(local_square, group=group)
    total_norm: torch.Tensor = (shared_square + local_square).sqrt()
    factor = (max_norm / (total_norm + 1e-6)).clamp(max=1.0)
    for gradients in copies.values():
        reduced = [gradient for gradient in gradients if _is_reduced(gradient)]
        torch._foreach_mul_(gradients, factor)
        _mark_reduced(reduced)
    return total_norm


@torch.no_grad()
def broadcast_parameters(model: nn.Module, *, group: dist.ProcessGroup | None = None) -> None:
    """Broadcasts the first rank's dense parameters and buffers. Collective over the groups of `reduce_gradients`.
    Modules of experts stay unchanged; if the layers' heap has an `expert_group`, its first rank broadcasts its experts
    too. For loops that call `reduce_gradients`, with its arguments: DDP broadcasts itself, and FSDP shards one model.
    ArgumentError: a parameter or buffer is a DTensor, or has no memory, or layers have different expert groups; nothing
    was sent."""
    experts = tensors_of_experts(model)
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    rules = (
        (
            hasattr(tensor, "device_mesh") or tensor.is_meta,
            f"{name} is {'on meta' if tensor.is_meta else 'a DTensor'}: only tensors that are whole, with memory, can "
            "be made equal",
        )
        for name, tensor in tensors.items()
    )
    raise_for(first_problem(*rules))
    group = group or dist.group.WORLD
    expert_group = expert_group_of(model)
    for tensor in tensors.values():
        tensor_group = expert_group if id(tensor) in experts else group
        if group_size(tensor_group) == 1 or not tensor.numel():
            continue
        sent = tensor.contiguous().view(-1).view(torch.uint8)  # of any dtype
        dist.broadcast(sent, group=tensor_group, group_src=0)
        tensor.copy_(
            sent.view(tensor.dtype).view(tensor.shape)
        )  # usually its own memory; values derived from it are stale


def _local_gradients(
    model: nn.Module, *, num_ranks: int, num_replicas: int
) -> dict[int, list[torch.Tensor]]:
    """This rank's parts of all gradients, keyed by the number of ranks with the same part."""
    parts: dict[int, list[torch.Tensor]] = {}
    for name, parameter, is_expert in named_parameters(model):
        gradient = parameter.grad
        if gradient is None or not parameter.requires_grad:
            continue
        num_copies = num_replicas if is_expert else num_ranks
        if hasattr(gradient, "device_mesh"):
            dtensor: Any = gradient  # a DTensor, whose module is not imported here
            if any(placement.is_partial() for placement in dtensor.placements):
                raise ArgumentError(
                    f"{name}.grad is a partial sum {dtensor.placements}: it has no norm yet"
                )
            sizes = zip(dtensor.device_mesh.shape, dtensor.placements, strict=True)
            num_copies = num_ranks // math.prod(
                size for size, placement in sizes if not placement.is_replicate()
            )
            gradient = dtensor.to_local()
        parts.setdefault(num_copies, []).append(gradient)
    return parts


def _sum_gradients(parameters: Iterable[nn.Parameter], *, group: dist.ProcessGroup | None) -> None:
    """All-reduces the gradients in place, one flat buffer per dtype; fills in missing ones."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        by_dtype.setdefault(parameter.grad.dtype, []).append(parameter.grad)
    for gradients in by_dtype.values():
        all_reduce_together(gradients, group)


def _is_reduced(gradient: torch.Tensor | None) -> bool:
    """Whether reduce_gradients reduced the gradient, and only clip_grad_norm has written into it since."""
    return gradient is not None and getattr(gradient, REDUCED, None) == version_of(gradient)


def _mark_reduced(gradients: Iterable[torch.Tensor]) -> None:
    for gradient in gradients:
        setattr(gradient, REDUCED, version_of(gradient))
