"""Weights that are quantised once for several calls, e.g. those of gradient accumulation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from symmoe.errors import ArgumentError
from symmoe.grouped.linear import GroupedLinear
from symmoe.precision.operands import HeldWeight


@contextmanager
def constant_weights(module: nn.Module) -> Iterator[None]:
    """A block in which no weight of a GroupedLinear in `module` changes: each is quantised once, for all calls in it.

        with symmoe.constant_weights(model):
            for batch in micro_batches:
                loss(model(batch)).backward()
        optimizer.step()

    The block changes only layers with a `precision`, also those of GroupedMLP and MoELayer. The first forward pass in
    the block quantises the weights; if it was without gradients, the first one with gradients quantises them again.
    Results have the same bits as without the block. Backward passes may run after it: they use what forward has kept.

    The operands of both directions are held, a byte each for a parameter (plus scales), until the block is left, also
    by an exception. Calls that wait for their backward pass share them. Blocks may be nested; the outer one counts.

    In CUDA graphs: the block is entered and left inside of one capture. Every replay then quantises the weights as they
    are. Inside torch.compile, and under a TorchDispatchMode, calls quantise as without the block.

    Not collective, but it must be the same on all ranks of an expert-parallel group, as the calls are. Does not
    synchronise the host.

    Raises:
        ArgumentError: in the block, by a forward pass, before anything is computed: a weight has been written to since
            the first one, e.g. by an optimizer's step, or only one of the two is captured in a CUDA graph.
            A write that autograd does not see (`weight.data.copy_`) is not found, nor is a parameter that replaces
            another: then results are those of the old weight. On entering: `module` has no GroupedLinear.
    """
    linears = [found for found in module.modules() if isinstance(found, GroupedLinear)]
    if not linears:
        raise ArgumentError(f"module ({type(module).__name__}) has no GroupedLinear whose weights could be constant")
    entered = [linear for linear in linears if linear.precision is not None and linear.held_weight is None]
    for linear in entered:
        linear.held_weight = HeldWeight([linear.weight] if linear.is_packed else linear.weight_parameters())
    try:
        yield
    finally:
        for linear in entered:
            if linear.held_weight is not None:
                linear.held_weight.close()
            linear.held_weight = None
