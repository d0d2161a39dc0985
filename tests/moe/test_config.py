"""MoEConfig: its valid values, and errors that name the field and both values."""

import dataclasses
import re
from collections.abc import Callable
from math import inf, nan
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch
from heap_calls import outcome
from layers import layer_config

from symmoe import Activation, MoEConfig, RouterConfig
from symmoe.checks.arguments import CHOICES
from symmoe.errors import ArgumentError
from symmoe.kernels import control
from symmoe.kernels.formats import BlockFormat
from symmoe.kernels.routing_rule import RoutingRule
from symmoe.moe.router import drop_over_capacity
from symmoe.precision import MXFP8, NVFP4, Float8Block, Recipe


def make(**changes: object) -> MoEConfig:
    return layer_config(**({"hidden": 16, "ffn": 32, "num_experts": 8, "top_k": 2} | changes))


def test_is_frozen_slotted_and_comparable_and_replace_checks_again():
    config = make()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.top_k = 3  # type: ignore[misc]
    assert not hasattr(config, "__dict__")
    assert (config, hash(config)) == (make(), hash(make()))
    assert config != make(top_k=3)
    assert repr(make(hidden=np.int64(16), capacity=np.int32(9))) == repr(make(capacity=9))
    with pytest.raises(ArgumentError, match=r"top_k \(4\) must be at most num_experts \(3\)"):
        dataclasses.replace(make(top_k=4), num_experts=3)


def test_kernels_number_every_choice_of_a_configuration():
    """Except choices that are resolved to another one before a call."""
    assert CHOICES["order"] == (*control.ORDERS, "node")  # which is "rank" inside a node
    assert CHOICES["layout"] == ("auto", *control.LAYOUTS)
    assert CHOICES["schedule"] == (*control.SCHEDULES, "always-overlapped")
    assert CHOICES["quantized_wire"] == control.QUANTIZED_WIRES


FIELDS = get_type_hints(RouterConfig) | get_type_hints(MoEConfig)
VALUES = (
    None,
    False,
    0,
    -4,
    1,
    2**31,
    0.5,
    -0.1,
    nan,
    inf,
    "",
    "8",
    "Softmax",
    Float8Block,
    Activation,
)
# By the type of a field: the VALUES that it takes, and how an error goes on after "must be".
TAKEN: dict[type, tuple[Callable[[Any], bool], str]] = {
    int: (
        lambda value: type(value) is int and 1 <= value < 2**31,
        r"an int, not \w+|at least 1|less than 2\*\*31",
    ),
    float: (
        lambda value: type(value) in (int, float) and 0 <= value < inf,
        r"a number, not \w+|finite and at least 0",
    ),
    bool: (lambda value: type(value) is bool, r"True or False"),
    str: (lambda value: False, r"one of \(.*\)"),
    Activation: (lambda value: False, r"an Activation: symmoe.Activation\(function='gelu', .*"),
    Recipe: (
        lambda value: False,
        r"a recipe of symmoe.precision \(Float8Block\(\), MXFP8\(\), NVFP4\(\)\), or None",
    ),
    RouterConfig: (lambda value: False, r"a RouterConfig, or None"),
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_refuses_invalid_values(name: str):
    kinds = get_args(FIELDS[name]) or (FIELDS[name],)
    takes, must_be = TAKEN[str if name in CHOICES else kinds[0]]
    for value in VALUES:
        if not takes(value) and type(value) not in kinds[1:]:
            shown = type(value).__name__ if name == "router" else repr(value)
            error = ": ".join(outcome(make, **{name: value}))
            text = rf"ArgumentError: {name} \({re.escape(shown)}\) must be ({must_be})"
            assert re.fullmatch(text, error), f"{name}={value!r}: {error!r}"
            assert str(CHOICES.get(name, "")) in error


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"top_k": 9}, "top_k (9) must be at most num_experts (8)"),
        ({"num_expert_groups": 3}, "num_experts (8) must be divisible by num_expert_groups (3)"),
        (
            {"num_expert_groups": 2, "topk_groups": 3},
            "topk_groups (3) must be at most num_expert_groups (2)",
        ),
        (
            {"num_expert_groups": 4, "topk_groups": 1, "top_k": 3},
            "top_k (3) must be at most the experts in topk_groups groups (2)",
        ),
        ({"overflow": "drop"}, "overflow ('drop') needs a static capacity, but capacity is None"),
        ({"max_tokens": 64}, "max_tokens (64) needs a static capacity, but capacity is None"),
        ({"rail_capacity": 3}, "rail_capacity (3) needs a static capacity, but capacity is None"),
        (
            {"max_row_budget": 7, "capacity": 9},
            "max_row_budget (7) needs exact capacity, but capacity is 9",
        ),
        ({"capacity_factor": 0.0}, "capacity_factor (0.0) must be more than 0"),
        ({"drop_policy": "position"}, "drop_policy ('position') needs a capacity_factor"),
        (
            {"capacity_factor": 1.0, "aux_loss": "global"},
            "aux_loss ('global') must be 'micro_batch' or 'sequence' with capacity_factor (1.0)",
        ),
        (
            {"capacity_factor": 1.0, "expert_bias": True},
            "expert_bias (True) must be False with capacity_factor (1.0)",
        ),
        (
            {"bias_update": "quantile"},
            "bias_update ('quantile') needs expert_bias=True; it is False",
        ),
        (
            {"bias_update": "quantile", "expert_bias": True, "score": "sqrtsoftplus"},
            "bias_update ('quantile') needs scores from 0 to 1, not 'sqrtsoftplus'",
        ),
        (
            {"bias_update": "quantile", "expert_bias": True, "num_expert_groups": 2},
            "bias_update ('quantile') needs num_expert_groups=1; it is 2",
        ),
        (
            {"replicas_per_rank": 3},
            "replicas_per_rank (3) needs balance 'replicas', but balance is 'none'",
        ),
        (
            {"replica_slack": 0.1},
            "replica_slack (0.1) needs balance 'replicas', but balance is 'none'",
        ),
        ({"balance": "replicas", "replica_slack": 1.5}, "replica_slack (1.5) must be at most 1"),
        (
            {"balance": "replicas", "precision": MXFP8(), "hidden": 32},
            "balance ('replicas') must be 'none' with a precision (MXFP8(",
        ),
        ({"precision": MXFP8(), "hidden": 48}, "hidden (48) must be a multiple of 32 for MXFP8()"),
        (
            {"precision": NVFP4(), "hidden": 64, "ffn": 80},
            "ffn (80) must be a multiple of 32 for NVFP4",
        ),
        (
            {"precision": Float8Block(), "ffn": 24},
            "ffn (24) must be a multiple of 16 for Float8Block",
        ),
        (
            {"quantized_wire": "both"},
            "quantized_wire ('both'): precision (None) must be a recipe of E4M3 numbers",
        ),
        (
            {"quantized_wire": "forward", "precision": NVFP4(), "hidden": 64},
            "quantized_wire ('forward'): precision (NVFP4(",
        ),
    ],
)
def test_contradicting_fields_are_refused(changes: dict[str, object], text: str):
    with pytest.raises(ArgumentError, match="^" + re.escape(text)):
        make(**changes)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("score", lambda word: RoutingRule(score=word)),
        ("element", lambda word: BlockFormat(element=word, scale="fp32", block=128)),
        ("scale", lambda word: BlockFormat(element="e4m3", scale=word, block=128)),
        (
            "layout",
            lambda word: dataclasses.replace(
                Float8Block().quantize(torch.zeros(128, 128)), layout=word
            ),
        ),
        (
            "drop_policy",
            lambda word: drop_over_capacity(
                torch.zeros((2, 1), dtype=torch.int32),
                torch.zeros((2, 1)),
                num_experts=2,
                capacity=1,
                policy=word,
            ),
        ),
        ("direction", lambda word: make().sent_row_bytes(word, 2)),
    ],
)
def test_functions_with_choices_refuse_unknown_ones(name: str, call: Callable[[str], object]):
    """Each function once took an unknown choice for another one: any score but softmax ran as sigmoid."""
    with pytest.raises(ArgumentError, match=rf"{name} \('soft-max'\) must be one of \("):
        call("soft-max")
