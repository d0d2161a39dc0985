"""A layer whose router has no hooks chooses experts inside the step, with the same bits as a call of the router."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import wraps
from unittest import mock

import pytest
import torch
from cluster import run_on
from layers import config_for, make_layer, tokens_of
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint
from worker import Findings, open_heap

from symmoe import MoELayer, SymmetricHeap
from symmoe.errors import SymmoeError
from symmoe.moe import router
from symmoe.moe.router import Route, Router, RouterOutput

OPTIONS = {
    "defaults": {},
    "static": {"capacity": 64, "overflow": "drop"},
    "losses": {"aux_loss_coef": 0.1, "z_loss_coef": 0.1},
    "sigmoid with a bias": {"score": "sigmoid", "expert_bias": True, "stash": "none"},
}


def results(layer: MoELayer, x: torch.Tensor, around: str, which: str) -> list[torch.Tensor | None]:
    """Results and gradients of a call, for a loss of y, of the router's losses, or of both."""
    y, metrics = checkpoint(layer, x, use_reentrant=False) if around == "checkpoint" else layer(x)
    y = x + y  # gradients of three parts of x are added up
    parts = {"y": (y * y).sum(), "losses": metrics.aux_loss}
    loss = sum(part for name, part in parts.items() if name in which and part.requires_grad)
    inputs = (x, *layer.parameters()) if x.requires_grad else tuple(layer.parameters())
    gradients = torch.autograd.grad(loss, inputs, allow_unused=True)
    return [
        y.detach(),
        metrics.aux_loss.detach(),
        metrics.topk_idx,
        metrics.expert_load,
        *gradients,
    ]


@pytest.mark.parametrize(
    ("name", "around"),
    [
        ("defaults", ""),
        ("static", "checkpoint"),
        ("losses", ""),
        ("losses", "checkpoint"),
        ("sigmoid with a bias", "checkpoint"),
    ],
)
@run_on(2, on_gpus=(2,))
def test_bits_are_those_of_a_called_router(
    rank: int, num_ranks: int, findings: Findings, device: str, name: str, around: str
) -> None:
    with open_heap(device) as heap:
        inside, called = (
            make_layer(heap, config_for(num_ranks, device, **OPTIONS[name]))[0] for _ in range(2)
        )
        called.router.register_forward_hook(lambda *_: None)
        for number in range(5):
            findings.where = f"rank {rank}, call {number}"
            x = tokens_of(rank, 9, inside.config.hidden, salt=number).to(heap.device)
            x.requires_grad_(number != 3)
            which = "losses" if number == 4 and name == "losses" else "y, losses"
            with mock.patch.object(router, "route_tokens", wraps=router.route_tokens) as chosen:
                actual = results(inside, x, around, which)
                num_own = chosen.call_count
                expected = results(called, x, around, which)
            findings.same_bits(actual, expected)
            findings.equal("calls that chose outside of the step", num_own, 0)
            findings.check(chosen.call_count > 0, "the router was not called")


def doubled(output: RouterOutput) -> RouterOutput:
    return replace(output, probs=2 * output.probs)


def by_subclass(router: Router) -> None:
    class Doubling(Router):
        def forward(self, *args: torch.Tensor, **options: torch.Tensor) -> RouterOutput:
            return doubled(super().forward(*args, **options))

    router.__class__ = Doubling


def by_instance(router: Router) -> None:
    original = router.forward
    router.forward = wraps(original)(lambda *args, **options: doubled(original(*args, **options)))


DOUBLES: dict[str, Callable[[Router], object]] = {
    "subclass": by_subclass,
    "instance": by_instance,
    "hook": lambda router: router.register_forward_hook(lambda *args: doubled(args[2])),
    "parametrization": lambda router: (
        router.weight.data.mul_(0.5),
        parametrize.register_parametrization(router, "weight", Doubled()),
    ),
}


class Doubled(torch.nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


@pytest.mark.parametrize("change", DOUBLES)
@run_on(2)
def test_replacements_of_a_router_run_in_every_path(
    rank: int, num_ranks: int, findings: Findings, heap: SymmetricHeap, change: str
) -> None:
    """All probs, or the weight, are doubled from one call to the next. (torch.compile ignores hooks that are added
    after a compiled call: docs/concepts.md.)"""
    layer, _ = make_layer(heap, config_for(num_ranks, "cpu"))
    shared = torch.nn.Linear(layer.config.hidden, layer.config.hidden)
    calls: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "plain": lambda x: layer(x)[0],
        "mask": lambda x: layer(x, torch.ones(9, dtype=torch.bool))[0],
        "given experts": lambda x: layer(x, topk_idx=torch.tensor([[0, 1]] * 9))[0],
        "shared": lambda x: with_shared(layer, shared, x),
        "checkpoint": lambda x: checkpoint(layer, x, use_reentrant=False)[0],
        "compile": lambda x: torch.compile(layer, backend="aot_eager")(x)[0],
        "evaluation": torch.no_grad()(lambda x: layer(x)[0]),
    }
    x = tokens_of(rank, 9, layer.config.hidden).requires_grad_()
    eager = {name: call for name, call in calls.items() if name != "compile"}
    before = {name: call(x).detach() for name, call in eager.items() for _ in range(2)}
    before["compile"] = before["plain"]
    if change != "instance":  # it takes long
        del calls["compile"]
    DOUBLES[change](layer.router)
    factor = 1 if change == "parametrization" else 2
    for name, call in calls.items():
        findings.where = f"rank {rank}, {change}, {name}"
        y = call(x)
        findings.check(torch.allclose(y, factor * before[name], rtol=1e-5), "y is another")
        if y.requires_grad:
            (dx,) = torch.autograd.grad(y.sum(), x)
            findings.check(bool(dx.any()), "no gradient")


def with_shared(layer: MoELayer, shared: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The experts' part of y, of a layer with a shared expert."""
    layer.shared_expert = shared
    y = layer(x)[0] - shared(x)
    layer.shared_expert = None
    return y


@run_on(2)
def test_an_exception_before_the_plan_fails_the_call_on_all_ranks(
    rank: int, num_ranks: int, findings: Findings, heap: SymmetricHeap
) -> None:
    layer, _ = make_layer(heap, config_for(num_ranks, "cpu"))
    x = tokens_of(rank, 9, layer.config.hidden)
    expected, _ = layer(x)
    layer(x)
    broken = mock.patch.object(Route, "compute", side_effect=RuntimeError("out of memory"))
    with mock.patch.object(heap, "_plays", False), broken if rank == 1 else nullcontext():
        with pytest.raises(RuntimeError if rank == 1 else SymmoeError, match="out of memory"):
            layer(x)
    findings.check(torch.equal(layer(x)[0], expected), "other bits after the error")
