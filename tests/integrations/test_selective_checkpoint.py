"""Activation checkpointing around a block: what is recomputed, and what crosses the wire again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
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


CHECKPOINTS = {
    "none": lambda block, x: block(x),
    "full": partial(checkpoint, use_reentrant=False),
    "full, reentrant": partial(checkpoint, use_reentrant=True),
    "selective, experts saved": selective(save_experts),
    "selective, list of operators": selective([torch.ops.symmoe.moe_forward.default]),
    "selective, nothing saved": selective(save_nothing),
}


KEEP_ROWS = {"none", "selective, experts saved", "selective, list of operators"}


def train(rank: int, num_ranks: int, fields: dict) -> dict[str, dict]:
    """Per kind of checkpointing: barriers, calls of the dense layer, gradients, bytes leased after forward."""
    config = symmoe.MoEConfig(hidden=16, ffn=8, num_experts=4, top_k=2, z_loss_coef=0.01, **fields)
    x = torch.randn(20 + 7 * rank, 16, generator=torch.Generator().manual_seed(rank), requires_grad=True)
    results = {}
    with symmoe.SymmetricHeap(num_bytes=4 << 20) as heap:
        torch.manual_seed(0)
        block = Block(config, heap)
        calls = []
        block.dense.register_forward_pre_hook(lambda *_: calls.append(1))
        for name, run in CHECKPOINTS.items():
            calls.clear()
            with counted_barriers(heap) as phases:
                y, aux_loss = run(block, x)
                leased = heap.leased_bytes
                (y.square().sum() + aux_loss).backward()
            results[name] = {
                "barriers": len(phases),
                "dense calls": len(calls),
                "leased": leased,
                "gradients": [x.grad.clone(), *(p.grad.clone() for p in block.parameters())],
            }
            x.grad = None
            block.zero_grad()
            del y, aux_loss
            assert heap.leased_bytes == 0
    return results


def compiled(rank: int, num_ranks: int) -> None:
    """The same inside torch.compile: the partitioner follows the policy."""
    without_semaphores()
    config = symmoe.MoEConfig(hidden=16, ffn=8, num_experts=4, top_k=2, capacity=256, max_tokens=64)
    x = torch.randn(20, 16, generator=torch.Generator().manual_seed(rank))
    with symmoe.SymmetricHeap(num_bytes=4 << 20) as heap:
        torch.manual_seed(0)
        block = Block(config, heap)
        block(x)[0].square().sum().backward()
        expected = [parameter.grad for parameter in block.parameters()]
        counts = {"full": 2 * FORWARD + BACKWARD, "selective, experts saved": FORWARD + BACKWARD}
        for name, num_barriers in counts.items():
            block.zero_grad()
            torch._dynamo.reset()
            run = torch.compile(partial(CHECKPOINTS[name], block), fullgraph=True, backend="aot_eager")
            with counted_barriers(heap) as phases:
                run(x)[0].square().sum().backward()
            assert len(phases) == num_barriers, name
            for parameter, gradient in zip(block.parameters(), expected, strict=True):
                torch.testing.assert_close(parameter.grad, gradient)
    torch._dynamo.reset()


def test_compiled_checkpoints(cluster):
    cluster(2).run(compiled)


FIELDS = {
    "static": {"capacity": 256, "max_tokens": 64},
    "exact": {},
    "stash rows": {"capacity": 256, "max_tokens": 64, "stash": "rows"},
}


@pytest.fixture(scope="module", params=FIELDS.values(), ids=FIELDS)
def results(request, cluster) -> list[dict[str, dict]]:
    return cluster(2).run(train, request.param)


@pytest.mark.parametrize("name", [name for name in CHECKPOINTS if name != "none"])
def test_gradients_have_the_bits_of_no_checkpointing(results: list[dict[str, dict]], name: str):
    for result in results:
        assert all(map(torch.equal, result[name]["gradients"], result["none"]["gradients"]))


def test_saved_experts_do_not_communicate_again(results: list[dict[str, dict]]):
    for result in results:
        barriers = {name: found["barriers"] for name, found in result.items()}
        assert barriers == {
            "none": FORWARD + BACKWARD,
            "full": 2 * FORWARD + BACKWARD,
            "full, reentrant": 2 * FORWARD + BACKWARD,
            "selective, experts saved": FORWARD + BACKWARD,
            "selective, list of operators": FORWARD + BACKWARD,
            "selective, nothing saved": 2 * FORWARD + BACKWARD,
        }


def test_the_rest_of_the_block_is_recomputed(results: list[dict[str, dict]]):
    for result in results:
        for name, found in result.items():
            assert found["dense calls"] == (1 if name == "none" else 2), name


def test_received_rows_are_kept_only_where_they_are_saved(results: list[dict[str, dict]]):
    for result in results:
        for name, found in result.items():
            assert (found["leased"] > 0) == (name in KEEP_ROWS), name
