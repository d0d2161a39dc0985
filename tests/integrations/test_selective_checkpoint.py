"""Activation checkpointing around a block: what is recomputed, and what crosses the wire again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from cluster import run_on
from small_model import Block, counted_barriers
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from worker import without_semaphores

import symmoe
import symmoe.moe.torch_operators  # registers torch.ops.symmoe

# Barriers of one step (plan 1, dispatch 2, combine 2), and of its backward (dispatch 2, combine 2).
FORWARD, BACKWARD = 5, 4


def save_experts(ctx, op, *args, **kwargs) -> CheckpointPolicy:
    if op is torch.ops.symmoe.moe_forward.default:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def save_nothing(ctx, op, *args, **kwargs) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE


def selective(policy) -> Callable:
    contexts = partial(create_selective_checkpoint_contexts, policy)
    return partial(checkpoint, use_reentrant=False, context_fn=contexts)


# How a block runs; barriers of its step, calls of its dense layer, and whether received rows stay until backward.
CHECKPOINTS: dict[str, tuple[Callable, int, int, bool]] = {
    "none": (lambda block, x: block(x), FORWARD + BACKWARD, 1, True),
    "full": (partial(checkpoint, use_reentrant=False), 2 * FORWARD + BACKWARD, 2, False),
    "full, reentrant": (partial(checkpoint, use_reentrant=True), 2 * FORWARD + BACKWARD, 2, False),
    "selective, experts saved": (selective(save_experts), FORWARD + BACKWARD, 2, True),
    "selective, list of operators": (selective([torch.ops.symmoe.moe_forward.default]), *(FORWARD + BACKWARD, 2, True)),
    "selective, nothing saved": (selective(save_nothing), 2 * FORWARD + BACKWARD, 2, False),
}
FIELDS = {
    "static": {"capacity": 256, "max_tokens": 64},
    "exact": {},
    "stash rows": {"capacity": 256, "max_tokens": 64, "stash": "rows"},
}


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
@run_on(2)
def test_checkpoints_recompute_only_what_they_do_not_save(rank: int, num_ranks: int, fields: dict) -> None:
    """What is saved does not communicate again, the rest is recomputed, and gradients have the bits of neither."""
    config = symmoe.MoEConfig(hidden=16, ffn=8, num_experts=4, top_k=2, z_loss_coef=0.01, **fields)
    x = torch.randn(20 + 7 * rank, 16, generator=torch.Generator().manual_seed(rank), requires_grad=True)
    expected: list[torch.Tensor] = []
    with symmoe.SymmetricHeap(num_bytes=4 << 20) as heap:
        torch.manual_seed(0)
        block, calls = Block(config, heap), []
        block.dense.register_forward_pre_hook(lambda *_: calls.append(1))
        for name, (run, num_barriers, num_calls, keeps_rows) in CHECKPOINTS.items():
            calls.clear()
            with counted_barriers(heap) as phases:
                y, aux_loss = run(block, x)
                leased = heap.leased_bytes
                (y.square().sum() + aux_loss).backward()
            assert (len(phases), len(calls), leased > 0) == (num_barriers, num_calls, keeps_rows), name
            gradients = [x.grad.clone(), *(p.grad.clone() for p in block.parameters())]
            expected = expected or gradients
            assert all(map(torch.equal, gradients, expected)), name
            x.grad = None
            block.zero_grad()
            del y, aux_loss
            assert heap.leased_bytes == 0


@run_on(2)
def test_compiled_checkpoints_recompute_only_what_they_do_not_save(rank: int, num_ranks: int) -> None:
    """The same inside torch.compile: the partitioner follows the policy."""
    without_semaphores()
    config = symmoe.MoEConfig(hidden=16, ffn=8, num_experts=4, top_k=2, capacity=256, max_tokens=64)
    x = torch.randn(20, 16, generator=torch.Generator().manual_seed(rank))
    with symmoe.SymmetricHeap(num_bytes=4 << 20) as heap:
        torch.manual_seed(0)
        block = Block(config, heap)
        block(x)[0].square().sum().backward()
        expected = [parameter.grad for parameter in block.parameters()]
        for name in ("full", "selective, experts saved"):
            how, num_barriers, *_ = CHECKPOINTS[name]
            block.zero_grad()
            torch._dynamo.reset()
            run = torch.compile(partial(how, block), fullgraph=True, backend="aot_eager")
            with counted_barriers(heap) as phases:
                run(x)[0].square().sum().backward()
            assert len(phases) == num_barriers, name
            for parameter, gradient in zip(block.parameters(), expected, strict=True):
                torch.testing.assert_close(parameter.grad, gradient)
    torch._dynamo.reset()
