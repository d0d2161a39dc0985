"""The expert bias over an optimizer step: what counts as load, when it is counted, and the update.

A call of a layer is counted when its gradient is computed. So each micro-batch counts once, whether its activations
were kept or computed again (torch.utils.checkpoint, either variant), and evaluation counts for nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from symmoe.autograd import Context, Function
from symmoe.moe.balance import update_expert_bias
from symmoe.moe.router import Router

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle


@torch.no_grad()
def balance_step(model: nn.Module, *, expert_group: dist.ProcessGroup | None = None) -> None:
    """Moves every expert bias towards balance, and starts the counts of the next step. Once per optimizer step.

    Collective over `expert_group` (one all-reduce for all layers) if that is given. Does not synchronise the host, and
    can be captured in a CUDA graph. In training mode a layer counts the load of a call (of its whole EP group) when
    backward passes through the call; micro-batches add up.

    Args:
        model: holds the layers, in the same order on every rank.
        expert_group: as in reduce_gradients: the ranks that hold this rank's experts in the other EP groups, and this
            one. None: the world is one EP group.
    """
    routers = [module for module in model.modules() if isinstance(module, Router)]
    counts = {router: router.step_load for router in routers if router.step_load is not None}
    if not counts:
        return
    if expert_group is not None:
        loads = torch.cat(list(counts.values()))
        dist.all_reduce(loads, group=expert_group)
        for step_load, load in zip(counts.values(), loads.split([len(c) for c in counts.values()]), strict=True):
            step_load.copy_(load)
    for router, step_load in counts.items():
        if router.expert_bias is not None:
            update_expert_bias(router.expert_bias, step_load, router.config.bias_update_rate)
        step_load.zero_()


def balance_after(
    optimizer: torch.optim.Optimizer, model: nn.Module, *, expert_group: dist.ProcessGroup | None = None
) -> RemovableHandle:
    """Makes every `optimizer.step()` end with :func:`balance_step`. Not if a gradient scaler skips the step.

    Returns:
        a handle; its `remove()` ends this.
    """

    def hook(*_: Any) -> None:
        balance_step(model, expert_group=expert_group)

    return optimizer.register_step_post_hook(hook)


def count_in_backward(y: torch.Tensor, expert_load: torch.Tensor, step_load: torch.Tensor) -> torch.Tensor:
    """y, the result of a call, whose load [E] is added to `step_load` when backward comes to y.

    By then autograd has been through the balance loss of the call, which is newer than y. So what a checkpoint computes
    again for that loss still sees the count of forward.
    """
    if torch.compiler.is_compiling():
        counted: torch.Tensor = _CountInBackward.apply(y, expert_load, step_load)
        return counted
    loads = [expert_load.long()]  # a copy: the caller's is in the metrics, where users may write to it

    def add(_: torch.Tensor) -> None:
        while loads:  # once, also if the graph is retained
            step_load.add_(loads.pop())

    if y.requires_grad:
        y.register_hook(add)
    return y


class _CountInBackwardContext(Context, Protocol):
    load: torch.Tensor
    step_load: torch.Tensor


class _CountInBackward(Function):
    """Does what the hook does, for torch.compile."""

    @staticmethod
    def forward(
        ctx: _CountInBackwardContext, y: torch.Tensor, load: torch.Tensor, step_load: torch.Tensor
    ) -> torch.Tensor:
        ctx.load, ctx.step_load = load, step_load
        return y.view_as(y)

    @staticmethod
    def backward(ctx: _CountInBackwardContext, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        _add_load(ctx.step_load, ctx.load)
        return dy, None, None


# Operators: a compiler would merge the two sums, or compute the first again in backward, when its input has changed.


@torch.library.custom_op("symmoe::load_so_far", mutates_args=())
def load_so_far(step_load: torch.Tensor, expert_load: torch.Tensor) -> torch.Tensor:
    """int64 [E]: the load that the step has counted, plus that of a call."""
    return step_load + expert_load


@load_so_far.register_fake
def _(step_load: torch.Tensor, expert_load: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(step_load)


@torch.library.custom_op("symmoe::add_load", mutates_args=("step_load",))
def _add_load(step_load: torch.Tensor, expert_load: torch.Tensor) -> None:
    step_load.add_(expert_load)
