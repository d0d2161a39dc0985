"""Routing that is given instead of chosen: recorded in one forward and taken again in another, or balanced by force.

Replay makes a policy's training forward use the experts of its rollout (routing replay for RL, arXiv:2510.11370).
Scores and probs are computed anew, for the given experts, and so are their gradients. For one layer: `layer(x,
topk_idx=recorded)`. Only MoELayers take a given choice: symmoe's router computes its probs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from symmoe.errors import ArgumentError
from symmoe.kernels import control
from symmoe.moe.layer import MoELayer
from symmoe.moe.listeners import RoutingReport, layers_with_listeners

Routing = dict[str, torch.Tensor]


@contextmanager
def record_routing(model: nn.Module) -> Iterator[Routing]:
    """In this context, one forward of `model` leaves the choice of every layer in the dict that it yields. Local.

    The ids are the router's choice before the capacity factor's drops, which a replay makes again, with its own probs.

    Yields:
        name of each layer to int32 [T, K] on the device: of MoELayers, and of the layers of symmoe's integrations in
        transformers and Megatron models (in Megatron after its capacity factor's drops).

    Raises:
        ArgumentError: the model has no such layer; a layer is called a second time (which of the two to keep?), or not
            at all.
    """
    routing: Routing = {}
    layers = layers_with_listeners(model)

    def keep(name: str, report: RoutingReport) -> None:
        if name in routing:
            raise ArgumentError(f"layer {name!r} is called twice; record one forward, and no backward")
        routing[name] = report.chosen_idx.int()

    with ExitStack() as added:
        for name, (_, listeners) in layers.items():
            added.callback(listeners.add(partial(keep, name)))
        yield routing
        _check_all_called(layers.keys() - routing.keys())


@contextmanager
def replay_routing(model: nn.Module, routing: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """In this context, every layer of `model` takes the experts of `routing`. Local.

    If activations are computed again in backward, backward must run in the context too.

    Args:
        routing: what :func:`record_routing` has recorded for the same tokens; -1 is no expert.

    Raises:
        ArgumentError: `routing` is not for the layers of `model`; or a layer has not taken it: a model that
            torch.compile has compiled before takes no notice of this.
    """
    layers = _layers(model)
    if routing.keys() != layers.keys():
        raise ArgumentError(f"routing is for the layers {sorted(routing)}; the model has {sorted(layers)}")
    with _choose(layers, lambda name, _layer, _x: routing[name]):
        yield


@contextmanager
def balanced_routing(model: nn.Module) -> Iterator[None]:
    """In this context, every layer of `model` gives all its experts the same number of slots. For benchmarks. Local."""

    def choice(_name: str, layer: MoELayer, x: torch.Tensor) -> torch.Tensor:
        return balanced_choice(math.prod(x.shape[:-1]), layer.config.top_k, layer.config.num_experts, device=x.device)

    with _choose(_layers(model), choice):
        yield


def balanced_choice(
    num_tokens: int, top_k: int, num_experts: int, *, device: torch.device | str | None = None
) -> torch.Tensor:
    """int32 [T, K]: experts with loads that differ by at most 1, distinct in a token, spread over the ranks. Slot n = t
    * K + k goes to expert n * g modulo E. g is coprime to E, so any E slots in a row go to E experts; and close to E
    divided by the golden ratio, so that a token's experts are far apart."""
    step = max(1, round(num_experts / ((1 + math.sqrt(5)) / 2)))
    while math.gcd(step, num_experts) > 1:
        step += 1
    return (torch.arange(num_tokens * top_k, device=device).view(num_tokens, top_k) * step % num_experts).int()


def _layers(model: nn.Module) -> dict[str, MoELayer]:
    layers: dict[str, MoELayer] = {}
    for name, (layer, _) in layers_with_listeners(model).items():
        if not isinstance(layer, MoELayer):
            raise ArgumentError(
                f"layer {name!r} ({type(layer).__name__}) must be a MoELayer: routing can be given to symmoe's router "
                "only, and this layer's is its trainer's (Megatron has moe_router_force_load_balancing)"
            )
        if layer.router is None:
            raise ArgumentError(f"layer {name!r} has no router (router='none') that could weigh a choice it is given")
        layers[name] = layer
    return layers


@contextmanager
def _choose(
    layers: Mapping[str, MoELayer], choice: Callable[[str, MoELayer, torch.Tensor], torch.Tensor]
) -> Iterator[None]:
    left = set(layers)

    def give(name: str, module: MoELayer, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        left.discard(name)
        if kwargs.get("probs") is not None:
            problem = ArgumentError(f"layer {name!r} is called with probs, which are of another choice")
            module.heap.fail_for(problem, control.PHASE_PLAN)
        return args, {**kwargs, "topk_idx": choice(name, module, args[0] if args else kwargs["x"])}

    with ExitStack() as hooks:
        for name, layer in layers.items():
            hooks.callback(layer.register_forward_pre_hook(partial(give, name), with_kwargs=True).remove)
        yield
        _check_all_called(left)


def _check_all_called(left: Set[str]) -> None:
    if left:
        raise ArgumentError(f"the layers {sorted(left)} have not been called, or in a model compiled before")
