"""DDP and FSDP2 around the model of a captured step: whether it can be captured, and who repeats it together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist

from symmoe.errors import ArgumentError
from symmoe.moe.layer import MoELayer
from symmoe.torch_internals import ddp_parameters, may_redirect_streams
from symmoe.training.step_kind import Modules


def wrapper_problem(modules: Modules) -> ArgumentError | None:
    """Why steps with the DDP that is around layers of a model cannot be captured, or None."""
    if any((ddp := layer.replicas.its_ddp()) is not None and ddp not in modules.ddps for layer in modules.layers):
        return ArgumentError("model must be the DistributedDataParallel that the step calls, not what it wraps")
    if any(ddp.find_unused_parameters and not ddp.static_graph for ddp in modules.ddps):
        return ArgumentError("find_unused_parameters (True) of DistributedDataParallel must be False: hosts would wait")
    if modules.ddp_on_default_stream:
        return ArgumentError(
            "DistributedDataParallel was built on CUDA's default stream, which no capture may use: build it in `with "
            f"torch.cuda.stream(torch.cuda.Stream()):`, or take torch 2.13 or newer (this is {torch.__version__})"
        )
    return None


@contextmanager
def noted_streams(modules: Modules) -> Iterator[None]:
    """In this context backward notes whether a DDP adds gradients up on the default stream: it keeps nodes of autograd,
    and these the stream on which they were made. Not where torch can redirect them."""

    def note(_: object) -> None:
        modules.ddp_on_default_stream |= torch.cuda.current_stream() == torch.cuda.default_stream()

    modules.ddp_on_default_stream = False
    ddps = modules.ddps if torch.cuda.is_available() and not may_redirect_streams else ()
    with ExitStack() as stack:
        for parameter in (each for ddp in ddps for each in ddp_parameters(ddp) if each.requires_grad):
            stack.callback(torch.autograd.graph.get_gradient_edge(parameter).node.register_prehook(note).remove)
        yield


def deciding_groups(modules: Modules) -> list[dist.ProcessGroup]:
    """Groups over which a step reduces gradients or loads, so that their ranks must repeat it together; the same order
    on all ranks. Without those in an EP group, whose ranks see the same plans, and those in another one of these."""
    groups = [ddp.process_group for ddp in modules.ddps]
    for layer in modules.layers:
        is_global = isinstance(layer, MoELayer) and layer.config.aux_loss == "global" and layer.config.aux_loss_coef
        if is_global and layer.replicas.group is not None:
            groups.append(layer.replicas.group)
    for mesh in dict.fromkeys(parameter.device_mesh for parameter in modules.sharded):
        groups += mesh.get_all_groups()
    known = [set(layer.heap.bootstrap.global_ranks) for layer in modules.layers]
    found = []
    for group in sorted(groups, key=dist.get_world_size, reverse=True):
        ranks = set(dist.get_process_group_ranks(group))
        if not any(ranks <= others for others in known):
            found.append(group)
            known.append(ranks)
    return found
