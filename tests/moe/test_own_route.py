"""A layer whose router nobody else looks at chooses experts inside the step: same bits as with a call of the router."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from cluster import run_on
from layers import config_for, make_layer, tokens_of
from torch.utils.checkpoint import checkpoint
from worker import open_heap

from symmoe import MoELayer, SymmetricHeap
from symmoe.errors import SymmoeError
from symmoe.moe import router
from symmoe.moe.router import Route

OPTIONS = {
    "defaults": {},
    "static": {"capacity": 64, "overflow": "drop"},
    "losses": {"aux_loss_coef": 0.1, "z_loss_coef": 0.1},
    "sigmoid with a bias": {"score": "sigmoid", "expert_bias": True, "stash": "none"},
}


def results(layer: MoELayer, x: torch.Tensor, around: str, which: str) -> list[torch.Tensor | None]:
    """Results and gradients of a call; the loss is of y, of the losses, or of both."""
    y, metrics = checkpoint(layer, x, use_reentrant=False) if around == "checkpoint" else layer(x)
    y = x + y  # gradients of three parts of x are added up
    parts = {"y": (y * y).sum(), "losses": metrics.aux_loss}
    loss = sum(part for name, part in parts.items() if name in which and part.requires_grad)
    inputs = (x, *layer.parameters()) if x.requires_grad else tuple(layer.parameters())
    found = torch.autograd.grad(loss, inputs, allow_unused=True)
    return [y.detach(), metrics.aux_loss.detach(), metrics.topk_idx, metrics.expert_load, *found]


@pytest.mark.parametrize("around", ["", "checkpoint"])
@pytest.mark.parametrize("name", OPTIONS)
@run_on(2, on_gpus=(2,))
def test_bits_are_those_of_a_called_router(
    rank: int, num_ranks: int, device: str, name: str, around: str
) -> list[str]:
    texts = []
    with open_heap(device) as heap:
        own, called = (
            make_layer(heap, config_for(num_ranks, device, **OPTIONS[name]))[0] for _ in range(2)
        )
        called.router.register_forward_hook(lambda *_: None)
        for number in range(6):
            x = (
                tokens_of(rank, 9, own.config.hidden, salt=number)
                .to(heap.device)
                .requires_grad_(number != 3)
            )
            which = "losses" if number == 4 and name == "losses" else "y, losses"
            with mock.patch.object(router, "route_tokens", wraps=router.route_tokens) as chosen:
                found = results(own, x, around, which)
                num_own = chosen.call_count
                wanted = results(called, x, around, which)
            for a, b in zip(found, wanted, strict=True):
                if (a is None) != (b is None) or (
                    a is not None and b is not None and not torch.equal(a, b)
                ):
                    texts.append(f"rank {rank}, call {number}: other bits")
            if not 0 == num_own < chosen.call_count:
                texts.append(
                    f"rank {rank}: {num_own} and {chosen.call_count} calls chose outside of the step"
                )
    return texts


@run_on(2)
def test_an_exception_before_the_plan_fails_the_call_on_all_ranks(
    rank: int, num_ranks: int
) -> list[str]:
    with SymmetricHeap(num_bytes=4 << 20, backend="host") as heap:
        layer, _ = make_layer(heap, config_for(num_ranks, "cpu"))
        x = tokens_of(rank, 9, layer.config.hidden)
        wanted, _ = layer(x)
        layer(x)
        broken = mock.patch.object(Route, "compute", side_effect=RuntimeError("out of memory"))
        with mock.patch.object(heap, "_plays", False), broken if rank == 1 else nullcontext():
            with pytest.raises(RuntimeError if rank == 1 else SymmoeError, match="out of memory"):
                layer(x)
        return (
            [] if torch.equal(layer(x)[0], wanted) else [f"rank {rank}: other bits after the error"]
        )
