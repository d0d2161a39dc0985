"""Errors of public functions for an argument of another kind: swapped, None, or parameters in place of a model."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn

import symmoe
from symmoe.errors import ArgumentError

CONFIG = symmoe.MoEConfig(hidden=16, ffn=8, num_experts=4, top_k=2)


def step(x: torch.Tensor) -> torch.Tensor:
    return x.sum()


def entered(context: AbstractContextManager[Any]) -> None:
    with context:
        pass


# Functions of a model, with their other arguments.
OF_A_MODEL: dict[str, Callable[[Any], object]] = {
    "clip_grad_norm": lambda model: symmoe.training.clip_grad_norm(model, 1.0),
    "reduce_gradients": symmoe.reduce_gradients,
    "broadcast_parameters": symmoe.training.broadcast_parameters,
    "capture_step": lambda model: symmoe.capture_step(step, model),
    "record_routing": lambda model: entered(symmoe.routing.record_routing(model)),
    "replay_routing": lambda model: entered(symmoe.routing.replay_routing(model, {})),
    "balanced_routing": lambda model: entered(symmoe.routing.balanced_routing(model)),
    "routing_from_array": lambda model: symmoe.routing.routing_from_array(
        model, torch.zeros(1, 1, 2)
    ),
    "prepare_for_ddp": symmoe.training.prepare_for_ddp,
    "balance_step": symmoe.training.balance_step,
    "add_lora": lambda model: symmoe.lora.add_lora(model, rank=8, alpha=8),
    "merge_lora": symmoe.lora.merge_lora,
    "unmerge_lora": symmoe.lora.unmerge_lora,
    "MetricsLogger": symmoe.metrics.MetricsLogger,
    "cache_quantized_weights": lambda model: entered(symmoe.grouped.cache_quantized_weights(model)),
}


@pytest.mark.parametrize("name", OF_A_MODEL)
def test_functions_of_a_model_refuse_its_parameters(name: str):
    for argument in (nn.Linear(2, 2).parameters(), [nn.Linear(2, 2)], None):
        kind = type(argument).__name__
        with pytest.raises(
            ArgumentError, match=rf"mod\w+ \({kind}\) must be an nn.Module, not its"
        ):
            OF_A_MODEL[name](argument)


# Calls with an argument of a wrong kind, and what the text begins with.
CALLS: dict[str, Callable[[symmoe.SymmetricHeap, nn.Module], object]] = {
    "config (SymmetricHeap) must be a MoEConfig": lambda heap, _: symmoe.MoELayer(heap, CONFIG),
    "heap (NoneType) must be a SymmetricHeap": lambda *_: symmoe.MoELayer(CONFIG, None),
    "heap (str) must be a SymmetricHeap": lambda *_: symmoe.make_plan(
        torch.zeros(2, 2, dtype=torch.int64), num_experts=2, heap="host"
    ),
    "config (NoneType) must be a MoEConfig": lambda *_: symmoe.Router(None),
    "config (int) must be a MoEConfig": lambda *_: symmoe.plan_memory(1, num_ranks=1, num_tokens=1),
    "model (function) must be an nn.Module": lambda _, model: symmoe.capture_step(model, step),
    "step (NoneType) must be a function": lambda _, model: symmoe.capture_step(None, model),
    "row_budget_factor ('big') must be a number": lambda _, m: symmoe.capture_step(
        step, m, row_budget_factor="big"
    ),
    "row_budget_factor (0.5) must be finite and at least 1": lambda _, m: symmoe.capture_step(
        step, m, row_budget_factor=0.5
    ),
    "num_eager ('2') must be an int": lambda _, m: symmoe.capture_step(step, m, num_eager="2"),
    "num_eager (0) must be at least 1": lambda _, m: symmoe.capture_step(step, m, num_eager=0),
    "max_norm (str) must be a number": lambda _, model: symmoe.training.clip_grad_norm(model, "1"),
    "alpha ('8') must be a number": lambda _, m: symmoe.lora.add_lora(m, rank=8, alpha="8"),
    "routing has shapes []": lambda *_: symmoe.routing.routing_to_array({}),
    "routing has shapes [(1, 2), (3, 2)]": lambda *_: symmoe.routing.routing_to_array(
        {"a": torch.zeros(1, 2), "b": torch.zeros(3, 2)}
    ),
    "routing (list) must be a dict": lambda *_: symmoe.routing.routing_to_array([]),
    "routing (NoneType) must be of dicts": lambda _, m: entered(
        symmoe.routing.replay_routing(m, None)
    ),
    "array (NoneType) must be an array": lambda _, m: symmoe.routing.routing_from_array(m, None),
    "optimizer (Sequential) must be an optimizer": lambda _, m: symmoe.training.balance_after(m, m),
    "sink (str) must be a function": lambda _, model: symmoe.metrics.MetricsLogger(model, "wandb"),
}


def test_arguments_of_another_kind_are_named_and_the_next_call_works():
    with symmoe.SymmetricHeap(num_bytes=8 << 20, backend="host") as heap:
        model = nn.Sequential(symmoe.MoELayer(CONFIG, heap))
        for text, call in CALLS.items():
            with pytest.raises(ArgumentError) as raised:
                call(heap, model)
            assert str(raised.value).startswith(text)
        model(torch.randn(3, 16))[0].square().sum().backward()
        symmoe.reduce_gradients(model)
        assert symmoe.training.clip_grad_norm(model, torch.tensor(float("inf"))) > 0
