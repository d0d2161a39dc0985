"""MoEConfig: what it accepts, and that its errors name the field and both values."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from layers import layer_config

from symmoe.checks.arguments import CHOICES
from symmoe.errors import ArgumentError
from symmoe.kernels import control
from symmoe.kernels.formats import BlockFormat
from symmoe.kernels.routing_rule import RoutingRule
from symmoe.moe.config import MoEConfig
from symmoe.moe.router import drop_over_capacity
from symmoe.precision import Float8Block


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


def test_kernels_number_the_words_that_a_configuration_takes():
    """But for those that are another word by the time of a call."""
    assert CHOICES["order"] == (*control.ORDERS, "node")  # which is "rank" inside a node
    assert CHOICES["layout"] == ("auto", *control.LAYOUTS)
    assert CHOICES["schedule"] == (*control.SCHEDULES, "always-overlapped")
    assert CHOICES["quantized_wire"] == control.QUANTIZED_WIRES


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 9}, r"top_k \(9\) must be at most num_experts \(8\)"),
        (
            {"num_expert_groups": 3},
            r"num_experts \(8\) must be divisible by num_expert_groups \(3\)",
        ),
        (
            {"num_expert_groups": 2, "topk_groups": 3},
            r"topk_groups \(3\) must be at most num_expert_groups \(2\)",
        ),
        (
            {"num_expert_groups": 4, "topk_groups": 1, "top_k": 3},
            r"top_k \(3\) must be at most .* in topk_groups groups \(2\)",
        ),
        ({"hidden": 0}, r"hidden \(0\) must be at least 1"),
        ({"ffn": -4}, r"ffn \(-4\) must be at least 1"),
        ({"num_experts": 8.0}, r"num_experts \(8.0\) must be an int, not float"),
        ({"top_k": True}, r"top_k \(True\) must be an int, not bool"),
        ({"capacity": 0}, r"capacity \(0\) must be at least 1"),
        ({"max_tokens": "many"}, r"max_tokens \('many'\) must be an int, not str"),
        (
            {"overflow": "drop"},
            r"overflow \('drop'\) needs a static capacity, but capacity is None",
        ),
        ({"max_tokens": 64}, r"max_tokens \(64\) needs a static capacity, but capacity is None"),
        (
            {"activation": "gelu"},
            r"activation \('gelu'\) must be .*: symmoe.Activation\(function='gelu', .*silu",
        ),
        ({"overflow": "wrap"}, r"overflow \('wrap'\) must be one of \('raise', 'drop'\)"),
        ({"order": "any"}, r"order \('any'\) must be one of \('rank', 'slot', 'node'\)"),
        (
            {"score": "relu"},
            r"score \('relu'\) must be one of \('softmax', 'sigmoid', 'sqrtsoftplus'\)",
        ),
        ({"renormalize": 1}, r"renormalize \(1\) must be True or False"),
        ({"route_scale": float("nan")}, r"route_scale \(nan\) must be finite"),
        ({"aux_loss_coef": -0.1}, r"aux_loss_coef \(-0.1\) must be finite and at least 0"),
        ({"z_loss_coef": None}, r"z_loss_coef \(None\) must be a number, not NoneType"),
        ({"capacity_factor": 0.0}, r"capacity_factor \(0.0\) must be more than 0"),
        ({"capacity_factor": -1.0}, r"capacity_factor \(-1.0\)"),
        ({"drop_policy": "position"}, r"drop_policy \('position'\) needs a capacity_factor"),
        ({"capacity_factor": 1.0, "drop_policy": "last"}, r"drop_policy \('last'\) must be one of"),
        (
            {"capacity_factor": 1.0, "aux_loss": "global"},
            r"aux_loss \('global'\) must be .* capacity_factor \(1.0\)",
        ),
        ({"aux_loss": "batch"}, r"aux_loss \('batch'\) must be one of"),
    ],
)
def test_error_names_field_and_values(changes: dict[str, object], message: str):
    with pytest.raises(ArgumentError, match=message):
        make(**changes)


IDS = torch.zeros((2, 1), dtype=torch.int32)
TILE = torch.zeros(128, 128)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("score", lambda word: RoutingRule(score=word)),
        ("element", lambda word: BlockFormat(element=word, scale="fp32", block=128)),
        ("scale", lambda word: BlockFormat(element="e4m3", scale=word, block=128)),
        (
            "layout",
            lambda word: dataclasses.replace(Float8Block().quantize(TILE), layout=word),
        ),
        (
            "drop_policy",
            lambda word: drop_over_capacity(
                IDS, IDS.float(), num_experts=2, capacity=1, policy=word
            ),
        ),
        ("direction", lambda word: make().sent_row_bytes(word, 2)),
    ],
)
def test_what_takes_words_refuses_others(name: str, call: Callable[[str], object]):
    """Each of these took one word for another: what is no softmax was a sigmoid."""
    with pytest.raises(ArgumentError, match=rf"{name} \('soft-max'\) must be one of \("):
        call("soft-max")
