"""A model with MoE layers on a device mesh: experts as DTensors, FSDP2 or DDP around them, correctly scaled gradients.
docs/fsdp.md describes the mesh, the sharding, and the divisor of the gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from symmoe.checks.arguments import check_kind, check_model, modules_of
from symmoe.errors import ArgumentError, first_problem, raise_for
from symmoe.grouped.parameters import trainable
from symmoe.moe.ddp_and_fsdp import gradients_elsewhere, join_ddp, prepare_for_ddp
from symmoe.moe.layer import MoELayer
from symmoe.moe.router import RouterOutput
from symmoe.torch_internals import base_of, pytree, reshaped_result

EP = "ep"


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    dense_mesh: DeviceMesh | None = None,
    units: Iterable[nn.Module] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool = True,
    gradient_divide_factor: float | None = None,
) -> nn.Module:
    """Applies FSDP2 to a model that was built on this rank, in place: experts over `mesh`, the rest over all its ranks.

    Experts, router (always fp32) and shared expert of a MoELayer become FSDP units. Experts are sharded over the
    replicas on dimension 0, or on the next one that divides evenly where a rank has too few of them. Collective over
    the mesh; build the optimizer afterwards. Returns the model. ArgumentError, the same on all ranks: the mesh does not
    fit the heaps or the other mesh, or this sharding of the experts is impossible.

    Args:
        model: parameters of replicas must hold the same values; FSDP does not broadcast.
        mesh: has a dimension "ep", whose group is every layer's heap group, and one or two other dimensions, whose
            ranks are those of the heap's `expert_group`: see SymmetricHeap.from_mesh.
        dense_mesh: shards dense parameters: 1 dimension, or 2 for hybrid sharding. None: all ranks.
        units: modules to shard one by one; the rest of the model is the last unit. None: the elements of its
            outermost ModuleLists.
        mp_policy: for all units; the router keeps its fp32 weights.
        reshard_after_forward: free the gathered parameters of all but the last unit between forward and backward.
        gradient_divide_factor: the divisor of the sum over all tokens' gradients; None: W, for losses that are a mean
            over each rank's tokens. 1.0 for losses that are already divided by the tokens of all ranks.
    """
    check_model(model)
    check_kind("mesh", mesh, DeviceMesh)
    mp_policy = MixedPrecisionPolicy() if mp_policy is None else mp_policy
    replicas = _replica_names(mesh)
    dense_mesh = mesh._flatten("symmoe_dense") if dense_mesh is None else dense_mesh
    raise_for(
        first_problem(
            (
                dense_mesh.size() != mesh.size(),
                f"dense_mesh has {dense_mesh.size()} ranks; it must have the {mesh.size()} of mesh",
            ),
            (
                torch.float16 in (mp_policy.param_dtype, mp_policy.reduce_dtype)
                and mp_policy.reduce_dtype != torch.float32,
                f"mp_policy.reduce_dtype ({mp_policy.reduce_dtype}) must be torch.float32 with float16",
            ),
        )
    )
    divisor = mesh.size() if gradient_divide_factor is None else gradient_divide_factor
    units = list(_outermost_units(model) if units is None else units)
    if (
        RouterOutput not in pytree.SUPPORTED_NODES
    ):  # FSDP hooks output tensors to detect the start of backward
        pytree.register_dataclass(RouterOutput)
    # The router computes in fp32 and takes tokens of any dtype; the layer's second output is an fp32 loss.
    of_router = MixedPrecisionPolicy(reduce_dtype=mp_policy.reduce_dtype, cast_forward_inputs=False)
    of_experts = dataclasses.replace(mp_policy, output_dtype=None)
    expert_mesh = mesh[replicas]
    shard = partial(fully_shard, reshard_after_forward=reshard_after_forward)
    placement = partial(_expert_placement, num_shards=expert_mesh.size(expert_mesh.ndim - 1))
    for layer in shard_experts(model, mesh[EP], expert_mesh):
        if layer.router is not None:
            shard(layer.router, mesh=dense_mesh, mp_policy=of_router)
        if layer.shared_expert is not None and any(True for _ in layer.shared_expert.parameters()):
            layer.shared_expert.register_forward_hook(_without_view)
            shard(layer.shared_expert, mesh=dense_mesh, mp_policy=mp_policy)
        sharded = shard(layer, mesh=expert_mesh, shard_placement_fn=placement, mp_policy=of_experts)
        _divide_gradients(sharded, expert_mesh, divisor)
    for unit in units:
        if not isinstance(unit, FSDPModule):
            shard(unit, mesh=dense_mesh, mp_policy=mp_policy)
    if not isinstance(model, FSDPModule):
        fully_shard(
            model, mesh=dense_mesh, mp_policy=mp_policy
        )  # stays gathered: backward begins with it
    for module in model.modules():
        if isinstance(module, FSDPModule) and not isinstance(module, MoELayer):
            _divide_gradients(module, dense_mesh, divisor)
    return model


def _without_view(_module: nn.Module, _args: object, output: torch.Tensor) -> torch.Tensor:
    """The output of a shared expert, e.g. of a linear layer on [B, S, H], as a tensor that is no view: FSDP, the next
    reader, warns of views. This is safe: the layer never writes into it."""
    return output if base_of(output) is None else reshaped_result(output, output.shape)


def data_parallel(
    model: nn.Module, mesh: DeviceMesh, **ddp_options: Any
) -> DistributedDataParallel:
    """Plain DDP for the dense parameters. Experts become DTensors (for checkpoints), stay spread over `ep`, are
    broadcast over the replicas, and are left out of DDP's buckets; their gradients are scaled when they are computed,
    and averaged over the replicas when they are complete. DDP's `no_sync` works for both. Collective. Mesh and errors:
    see :func:`parallelize`."""
    shard_experts(model, mesh, mesh[_replica_names(mesh)])
    prepare_for_ddp(model)
    ddp = DistributedDataParallel(
        model, process_group=mesh._flatten("symmoe_dense").get_group(), **ddp_options
    )
    raise_for(join_ddp(ddp))
    return ddp


def shard_experts(model: nn.Module, mesh: DeviceMesh, expert_mesh: DeviceMesh) -> list[MoELayer]:
    """Makes the expert parameters of every MoELayer DTensors of global shape [E, ...] over the parameters' memory, in
    place: `Shard(0)` on the mesh's dimension "ep", `Replicate()` on others. Returns the layers. Local. expert_mesh: the
    ranks with this rank's experts. ArgumentError: the model has no MoELayer, or one does not fit."""
    layers = modules_of(model, MoELayer, needs=f"MoELayer to put on mesh {mesh.mesh_dim_names}")
    for layer in layers:
        _check_layer(layer, mesh[EP] if mesh.ndim > 1 else mesh, expert_mesh)
    placements = [Shard(0) if name == EP else Replicate() for name in mesh.mesh_dim_names or ()]
    for layer in layers:
        for linear in (layer.experts.fc1, layer.experts.fc2):
            for name, parameter in list(linear.named_parameters()):
                dtensor = DTensor.from_local(parameter.detach(), mesh, placements, run_check=False)
                setattr(linear, name, nn.Parameter(dtensor, requires_grad=parameter.requires_grad))
    return layers


def parameter_groups(model: nn.Module) -> list[dict[str, list[nn.Parameter]]]:
    """Dense and expert parameters as two optimizer groups: under :func:`data_parallel` only experts are DTensors, and
    foreach and fused optimizers refuse groups that mix both."""
    dense, experts = trainable(model)
    return [{"params": dense}, {"params": experts}]


def _replica_names(mesh: DeviceMesh) -> tuple[str, ...]:
    names = tuple(mesh.mesh_dim_names or ())
    replica_names = tuple(name for name in names if name != EP)
    if EP not in names or len(replica_names) not in (1, 2):
        raise ArgumentError(
            f"mesh has dimensions {names}; it must have '{EP}' and one or two others, e.g. 'efsdp'"
        )
    return replica_names


def _check_layer(layer: MoELayer, ep_mesh: DeviceMesh, expert_mesh: DeviceMesh) -> None:
    ranks = [layer.heap.bootstrap.global_ranks, sorted(layer.heap.expert_ranks)]
    ranks_of_mesh = [ep_mesh.mesh.tolist(), sorted(expert_mesh.mesh.flatten().tolist())]
    raise_for(
        first_problem(
            (
                ranks != ranks_of_mesh,
                f"the heap's group and expert_group have the ranks {ranks}; '{EP}' and {expert_mesh.mesh_dim_names} of "
                f"the mesh have {ranks_of_mesh}: build the heap by "
                f"SymmetricHeap.from_mesh(mesh['{EP}'], expert_mesh=...)",
            ),
            (
                not layer.experts.fc1.is_packed,
                "experts.fc1.weights ('discrete') must be 'packed': a DTensor holds all experts of a rank",
            ),
            (
                any(isinstance(parameter, DTensor) for parameter in layer.experts.parameters()),
                "the experts of a layer are DTensors already; a model is put on a mesh once",
            ),
        )
        or gradients_elsewhere(layer.experts)
    )


def _expert_placement(parameter: nn.Parameter, *, num_shards: int) -> Shard:
    """The first dimension of the local part that FSDP can cut evenly."""
    shape = cast(DTensor, parameter).to_local().shape  # torch does not annotate its type
    for dim, size in enumerate(shape):
        if size % num_shards == 0:
            return Shard(dim)
    raise ArgumentError(
        f"no dimension of an expert weight {list(shape)} is divisible by the {num_shards} replicas"
    )


def _divide_gradients(module: FSDPModule, mesh: DeviceMesh, divisor: float) -> None:
    module.set_gradient_divide_factor(float(divisor))
    # NCCL multiplies while it sums. Other backends cannot, and FSDP then divides afterwards; with one shard FSDP always
    # divides itself, and this setting would make it divide twice (torch 2.13).
    if mesh.device_type == "cpu" and mesh.size(mesh.ndim - 1) > 1:
        module.set_force_sum_reduction_for_comms(True)


def _outermost_units(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        elif not isinstance(child, MoELayer):
            yield from _outermost_units(child)
