"""Equal parameters on all ranks that have the same ones, at the start of training."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from symmoe.errors import ArgumentError
from symmoe.moe.ownership import named_parameters
from symmoe.training.gradients import default_group, group_size


@torch.no_grad()
def broadcast_parameters(
    model: nn.Module,
    *,
    group: dist.ProcessGroup | None = None,
    expert_group: dist.ProcessGroup | None = None,
) -> None:
    """Gives all ranks the dense parameters and buffers of the first one. Collective over both groups.

    Experts stay as they are, with all that their modules hold. For loops that call `reduce_gradients`: DDP does the
    same by itself, and FSDP's parts are of one model.

    Args:
        model: the same modules on every rank of `group`.
        group: all ranks that train together. None is the default group, or only this process if there is none.
        expert_group: the ranks that hold this rank's experts in the other EP groups, and this one: all get those of its
            first rank. None: the world is one EP group.

    Raises:
        ArgumentError: a parameter or buffer is a DTensor, or has no memory. Nothing has been sent.
    """
    names = {id(parameter): is_expert for _, parameter, is_expert in named_parameters(model)}
    holders = [module for module in model.modules() if getattr(module, "holds_experts", False)]
    names |= {id(buffer): True for module in holders for buffer in module.buffers()}
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    for name, tensor in tensors.items():
        if hasattr(tensor, "device_mesh") or tensor.is_meta:
            kind = "on meta" if tensor.is_meta else "a DTensor"
            raise ArgumentError(f"{name} is {kind}: only tensors that are whole, with memory, can be made equal")
    group = group or default_group()
    for tensor in tensors.values():
        its_group = expert_group if names.get(id(tensor), False) else group
        if group_size(its_group) == 1 or not tensor.numel():
            continue
        sent = tensor.contiguous().view(-1).view(torch.uint8)  # of any dtype
        dist.broadcast(sent, group=its_group, group_src=0)
        tensor.copy_(sent.view(tensor.dtype).view(tensor.shape))  # its own memory, mostly; what was made of it is stale
