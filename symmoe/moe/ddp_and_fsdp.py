"""Supports DDP and FSDP around a layer when other code adds the wrapper: accelerate, transformers' Trainer, Lightning
Fabric, or a user's script. Both would mix experts, which differ from rank to rank (docs/ddp.md).

A layer names its experts where DDP looks for parameters to ignore, and `prepare_for_ddp` makes a whole model do so.
(DDP asks the module that it wraps, no other.) Every forward pass inside a DDP ensures that the experts' gradients get
the scale of DDP's own: with D replicas of every expert, the sum over all tokens divided by W = R * D, as in
reduce_gradients. That forward pass raises the errors so far, on every rank.

Loops without DDP sum over the same replicas: :func:`expert_group_of` returns their group for a model.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from symmoe.checks.arguments import modules_of
from symmoe.errors import ArgumentError, SymmoeError, first_problem
from symmoe.grouped.linear import GroupedLinear
from symmoe.grouped.mlp import GroupedMLP, experts_call_problem
from symmoe.grouped.parameters import local_part
from symmoe.symm_mem.heap import SymmetricHeap
from symmoe.torch_internals import DDP_IGNORED, active_ddp_of, ddp_parameters, modules_key

_JOINED = "_symmoe_joined"  # on a DDP: its _Joined
_NUM_COMPARED = 8  # dense parameters, the smallest
_COMPILED = "_orig_mod."  # prefix of the names in a compiled model


class _Joined:
    """The layers and expert parameters (equal on all replicas) that have joined a DDP. Keeps no object alive."""

    def __init__(self) -> None:
        self.layers: weakref.WeakKeyDictionary[ExpertParallelModule, None] = (
            weakref.WeakKeyDictionary()
        )  # in order
        self.experts = WeakTensorKeyDictionary()  # to whether their gradients have hooks
        self.num_calls = 0  # of layers that are spread over ranks, in the DDP's forward

    def contains(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter has joined in its current state."""
        has_hooks = self.experts.get(parameter)
        return has_hooks is not None and has_hooks >= parameter.requires_grad


class ExpertParallelModule(nn.Module):
    """A layer whose experts are spread over the ranks of its EP group's heap."""

    heap: SymmetricHeap
    experts: GroupedMLP  # this rank's

    def __init__(self) -> None:
        super().__init__()
        # To the DDP that last called the layer, if any.
        self._ddp_ref: Callable[[], DistributedDataParallel | None] = lambda: None
        self._valid_key: list[object] = []  # of the parts, when they were valid

    @property
    def is_expert_parallel(self) -> bool:
        """Whether ranks of a DDP have, or may have, other experts than this one."""
        return self.heap.num_ranks > 1 or self.heap.expert_group is not None

    def __getstate__(self) -> dict[str, object]:
        """The attributes of a copy, which starts without a DDP."""
        return {**vars(self), "_ddp_ref": lambda: None}

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        """The names that DDP ignores in a layer that it wraps."""
        return [*vars(self).get("_other_ignored_names", ()), *_expert_names(self)]

    @_ddp_params_and_buffers_to_ignore.setter
    def _ddp_params_and_buffers_to_ignore(self, names: Iterable[str]) -> None:
        self._other_ignored_names = list(names)

    def prepare_call(self) -> SymmoeError | None:
        """In the forward of a DDP the layer joins that DDP, see :func:`attach_to_ddp`. Returns the error of a wrapper
        that would mix experts, or of the layer's parts, or None."""
        problem: SymmoeError | None = (
            None if active_ddp_of(DistributedDataParallel) is None else attach_to_ddp(self)
        )
        # The key of the parts, not of the layer, which would keep itself alive.
        if problem is None and (key := modules_key(*self._modules.values())) != self._valid_key:
            problem = self.parts_problem()
            if problem is None:
                self._valid_key = key
        return problem

    def parts_problem(self) -> SymmoeError | None:
        """The reason why the layer cannot use its current parts, or None. Depends on their modules_key only."""
        experts = self.experts
        device = self.heap.device
        return (
            experts_problem(experts, self.heap.num_ranks)
            or experts.fc1.width_problem(device)
            or experts.fc2.width_problem(device)
            or device_problem("experts", experts, device)
        )


def experts_heap(model: nn.Module) -> SymmetricHeap | None:
    """The heap of a model's layers: of all modules, of the user's classes, too, with an attribute `heap`; None without
    one. ArgumentError: the model has heaps with different expert groups."""
    heaps = [
        heap
        for module in modules_of(model, nn.Module)
        if isinstance(heap := getattr(module, "heap", None), SymmetricHeap)
    ]
    expert_ranks = {tuple(heap.expert_ranks) for heap in heaps}
    if len(expert_ranks) > 1:
        raise ArgumentError(
            f"model has heaps with expert_group of the ranks {sorted(expert_ranks)}; all heaps must have the same ranks"
        )
    return next(iter(heaps), None)


def expert_group_of(model: nn.Module) -> dist.ProcessGroup | None:
    """The `expert_group` of :func:`experts_heap`; None without a heap, or without a group."""
    heap = experts_heap(model)
    return None if heap is None else heap.expert_group


def group_size(group: dist.ProcessGroup | None) -> int:
    """The group's size; 1 for None."""
    return 1 if group is None else dist.get_world_size(group)


def all_reduce_together(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Sums tensors of one dtype over the group, in place, in one buffer. None: the group is this rank."""
    if group_size(group) == 1 or not tensors:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat, group=group)
    for tensor, summed in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(summed.view_as(tensor))


def prepare_for_ddp(model: nn.Module) -> None:
    """Keeps the experts of `model` out of any DistributedDataParallel that wraps the model afterwards, for users who
    leave the wrapping to accelerate, transformers' Trainer or Lightning Fabric. Local. Backward makes the gradients
    that `reduce_gradients` would make: do not call that. A MoELayer that is wrapped itself, and models of `swap_moe`,
    need no call. Replicas of experts, the ranks of the heap's `expert_group`, become equal in their first forward pass,
    and their gradients are averaged.

    Args:
        model: the module to wrap, not a part of it; may be compiled before or after. Adapters may still be added.

    Raises:
        ArgumentError: the model has no MoELayer, and no layer of symmoe's transformers integration.
    """
    modules_of(model, ExpertParallelModule, needs="MoELayer, whose experts DDP must not touch")
    if not isinstance(model, ExpertParallelModule):
        names = vars(model).get(DDP_IGNORED, ())
        other_names = names.other_names if isinstance(names, _ExpertNames) else names
        vars(model)[DDP_IGNORED] = _ExpertNames(model, other_names)


def attach_to_ddp(layer: ExpertParallelModule | None = None) -> ArgumentError | None:
    """The error of the DDP whose forward is running, if any, or None. Layers and expert parameters join it if they are
    new in its forward or have since become trainable: their gradients get hooks, and replicas of new parameters are
    made equal (collective over the replicas). layer: the layer being called; None: any layer in the DDP."""
    ddp = active_ddp_of(DistributedDataParallel)
    if ddp is None:
        return None
    joined: _Joined | None = vars(ddp).get(_JOINED)
    if joined is None or not joined.layers or not (layer is None or layer in joined.layers):
        return join_ddp(ddp, [] if layer is None else [layer])
    if layer is not None and not layer.is_expert_parallel:
        return None
    # An operator does not know its layer.
    for joining in [*joined.layers] if layer is None else [layer]:
        if joining.is_expert_parallel and not all(
            map(joined.contains, _parameters(joining.experts))
        ):
            if (problem := gradients_elsewhere(joining.experts)) is not None:
                return problem
            _average_gradients(ddp, joining, joined)
    joined.num_calls += 1
    return (
        None if joined.num_calls & (joined.num_calls - 1) else _drift_problem(ddp)
    )  # at 1, 2, 4, 8 ..


def join_ddp(
    ddp: DistributedDataParallel, layers: Iterable[ExpertParallelModule] = ()
) -> ArgumentError | None:
    """Joins the layers in a DDP, and others, to it, or returns the reason why they cannot join."""
    inside = [module for module in ddp.module.modules() if isinstance(module, ExpertParallelModule)]
    joined: _Joined = vars(ddp).setdefault(_JOINED, _Joined())
    new_layers = [
        layer for layer in dict.fromkeys([*inside, *layers]) if layer not in joined.layers
    ]
    for layer in new_layers:
        if (problem := _group_problem(ddp, layer)) is not None:
            return problem
    for layer in new_layers:
        if layer.is_expert_parallel:
            _average_gradients(ddp, layer, joined)
        joined.layers[layer] = None
    return None


def experts_problem(experts: GroupedMLP, num_ranks: int) -> ArgumentError | None:
    """The error of a wrapper around the calls of this rank's experts, or of FSDP's sharding of them, or None. symmoe's
    own sharding makes DTensors of all experts, [E, ...], before FSDP sees them. Otherwise FSDP treats the experts of
    different ranks as equal."""
    modules = experts._modules  # in every call: attributes of modules take a microsecond each
    for name in ("fc1", "fc2") if num_ranks > 1 else ():
        linear = cast(GroupedLinear, modules[name])
        if getattr(linear, "_is_fsdp_managed_module", False) and not (  # it may have a wrapper
            linear.is_packed
            and hasattr(linear.weight, "device_mesh")
            and linear.weight.shape[0] == num_ranks * linear.num_groups
        ):
            return ArgumentError(
                "FSDP has taken experts, which differ from rank to rank, for parts of the same: build the model anew, "
                "and call symmoe.training.parallel.parallelize(model, mesh) in place of fully_shard (for models of "
                "transformers: symmoe.integrations.transformers.register in place of swap_moe)"
            )
    return experts_call_problem(experts)


def device_problem(
    name: str, module: nn.Module | None, device: torch.device
) -> ArgumentError | None:
    """The error of a parameter on another device than the heap, or without memory, or None. Skips parameters that move
    there before use: parts of DTensors, modules with accelerate's hooks."""
    if module is None or {parameter.device for parameter in _parameters(module)} <= {device}:
        return None
    hooked = [submodule for submodule in module.modules() if hasattr(submodule, "_hf_hook")]
    ignored = {id(parameter) for submodule in hooked for parameter in submodule.parameters()}
    for path, parameter in module.named_parameters():
        is_part = hasattr(parameter, "device_mesh") and not parameter.is_meta
        if parameter.device != device and not is_part and id(parameter) not in ignored:
            return ArgumentError(
                f"{name}.{path} is on {parameter.device}; it must be on {device}, as the heap: move the layer there, "
                "or give it memory with to_empty and then values"
            )
    return None


def _parameters(module: nn.Module) -> list[nn.Parameter]:
    """All parameters of a module. Every call runs this function, and `parameters()` would take far longer."""
    parameters = [parameter for parameter in module._parameters.values() if parameter is not None]
    for child in module._modules.values():
        if child is not None:
            parameters += _parameters(child)
    return parameters


def gradients_elsewhere(
    experts: GroupedMLP, reason: str = "FSDP and DDP read `.grad` when backward is over"
) -> ArgumentError | None:
    """The error if an option sends weight gradients of these experts elsewhere than to `.grad`, or None."""
    for option in ("delay_wgrad", "accumulate_into_main_grad"):
        if getattr(experts.fc1, option) or getattr(experts.fc2, option):
            return ArgumentError(f"experts.{option} (True) must be False: {reason}")
    return None


class _ExpertNames:
    """The names of a model's experts, read again at each iteration, and other names."""

    def __init__(self, model: nn.Module, other_names: Iterable[str]) -> None:
        self._model = weakref.ref(model)
        self.other_names = tuple(other_names)

    def __iter__(self) -> Iterator[str]:
        yield from self.other_names
        if (model := self._model()) is not None:
            yield from _expert_names(model)

    def __deepcopy__(self, memo: dict[int, nn.Module]) -> _ExpertNames:
        return _ExpertNames(memo[id(self._model())], self.other_names)


def _expert_names(model: nn.Module) -> Iterator[str]:
    """Names of all experts in layers that are spread over ranks, both plain and as torch.compile changes them."""
    layers = [
        module
        for module in model.modules()
        if isinstance(module, ExpertParallelModule) and module.is_expert_parallel
    ]
    experts = {id(parameter) for layer in layers for parameter in _parameters(layer.experts)}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in experts:
            yield name
            yield f"{_COMPILED}{name}"


def _group_problem(
    ddp: DistributedDataParallel, layer: ExpertParallelModule
) -> ArgumentError | None:
    if not layer.is_expert_parallel:
        return None  # if every rank has all experts, they are like any parameter for DDP
    reduced = {id(parameter) for parameter in ddp_parameters(ddp)}
    world = dist.get_process_group_ranks(ddp.process_group)
    ep_group = layer.heap.bootstrap.global_ranks
    num_replicas = len(layer.heap.expert_ranks)
    return first_problem(
        (
            any(id(parameter) in reduced for parameter in _parameters(layer.experts)),
            "DistributedDataParallel has overwritten experts, which differ from rank to rank, with those of rank 0: "
            "build the model anew, and call symmoe.training.parallel.data_parallel(model, mesh) in its place, or "
            "symmoe.training.prepare_for_ddp(model) before something else wraps it",
        ),
        (
            not set(ep_group) <= set(world) or len(world) != num_replicas * len(ep_group),
            f"DistributedDataParallel has the ranks {world}, the experts are spread over {ep_group} and have "
            f"{num_replicas} replica(s): build the heap with expert_group, the ranks with this rank's "
            "experts, or over a mesh, and call symmoe.training.parallel.data_parallel(model, mesh)",
        ),
    ) or gradients_elsewhere(layer.experts)


@torch.no_grad()
def _drift_problem(ddp: DistributedDataParallel) -> ArgumentError | None:
    """The error if dense parameters, which DDP keeps equal, differ between ranks, or None. Collective, and
    synchronises. Clipping by a norm over `model.parameters()` counts only this rank's experts, so each rank scales by
    another factor. No other check detects that."""
    trained = [parameter for parameter in ddp_parameters(ddp) if parameter.requires_grad]
    if not trained or (trained[0].is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    smallest = sorted(trained, key=torch.Tensor.numel)[:_NUM_COMPARED]
    local_sums = torch.stack([p.detach().double().sum() for p in smallest]).nan_to_num()
    sums_by_rank = [
        torch.empty_like(local_sums) for _ in range(dist.get_world_size(ddp.process_group))
    ]
    dist.all_gather(sums_by_rank, local_sums, group=ddp.process_group)
    return first_problem(
        (
            not all(torch.equal(sums, sums_by_rank[0]) for sums in sums_by_rank),
            "dense parameters differ between the ranks of a DistributedDataParallel: gradients were changed after it "
            "had reduced them, otherwise on each rank. Clip with symmoe.training.clip_grad_norm (transformers: take "
            "symmoe.integrations.transformers.Trainer): torch's clip_grad_norm_ counts only this rank's experts",
        )
    )


def _average_gradients(
    ddp: DistributedDataParallel, layer: ExpertParallelModule, joined: _Joined
) -> None:
    """Makes backward leave the gradient of the mean loss in the experts' `.grad`. Collective over replicas. joined:
    records the parameters that have these hooks, e.g. of experts that layers share; updated here."""
    num_ranks = layer.heap.num_ranks
    group = layer.heap.expert_group
    num_replicas = group_size(group)
    layer_ref = weakref.ref(layer)
    layer._ddp_ref = ddp_ref = weakref.ref(ddp)

    def current() -> DistributedDataParallel | None:
        """The DDP, or None if it or the layer is freed, or another DDP has wrapped the layer since."""
        wrapper = ddp_ref()
        owner = layer_ref()
        return (
            wrapper
            if wrapper is not None and owner is not None and owner._ddp_ref() is wrapper
            else None
        )

    def scale(
        gradient: torch.Tensor | None,
    ) -> torch.Tensor | None:  # None: torch 2.11, of a compiled graph
        return gradient if gradient is None or current() is None else gradient / num_ranks

    def average(parameter: torch.Tensor) -> None:
        wrapper = current()
        if (
            wrapper is not None
            and wrapper.require_backward_grad_sync
            and parameter.grad is not None
        ):
            gradient = local_part(parameter.grad)
            # A mean, like DDP's own: an averaged gradient stays the same.
            dist.all_reduce(gradient, group=group)
            gradient.div_(num_replicas)

    for parameter in _parameters(layer.experts):
        if joined.contains(parameter):
            continue
        is_new = parameter not in joined.experts
        joined.experts[parameter] = parameter.requires_grad
        if is_new and num_replicas > 1:
            dist.broadcast(local_part(parameter.detach()), group=group, group_src=0)
        if parameter.requires_grad:
            if num_ranks > 1:
                parameter.register_hook(scale)
            if num_replicas > 1:
                parameter.register_post_accumulate_grad_hook(average)
