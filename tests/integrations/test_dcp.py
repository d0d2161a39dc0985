"""torch.distributed.checkpoint: saved at one EP x FSDP layout, loaded at another, with the same bits."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from small_model import CONFIG, FFN, HIDDEN, equal_shares, on_mesh, open_heap, open_mesh, rank_loss, whole
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import symmoe
from symmoe.integrations.parallel import parameter_groups

BIASED = dataclasses.replace(CONFIG, expert_bias=True)
State = dict[str, torch.Tensor]

# (replicas, ep) of who saves and who loads, what wraps the model that saves, and its number of experts
ROUTES = {
    "EP2 to FSDP2": ((1, 2), (2, 1), "fsdp", 4),
    "FSDP2 to EP2": ((2, 1), (1, 2), "fsdp", 4),
    "EP2 x FSDP2 to EP4": ((2, 2), (1, 4), "fsdp", 4),
    "EP4 to one process": ((1, 4), (1, 1), "fsdp", 4),
    "one process to EP2 x FSDP2": ((1, 1), (2, 2), "fsdp", 4),
    "more shards than experts, to EP2": ((2, 2), (1, 2), "fsdp", 2),
    "EP2 to more shards than experts": ((1, 2), (2, 2), "fsdp", 2),
    "DDP with EP2 to FSDP2": ((1, 2), (2, 1), "ddp", 4),
}


def build(mesh, heap: symmoe.SymmetricHeap, wrap: str, experts: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = on_mesh(mesh, heap, wrap, dataclasses.replace(BIASED, num_experts=experts))
    return model, torch.optim.AdamW(parameter_groups(model), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, num_ranks: int, steps: range) -> float:
    """The last loss of this rank."""
    for step in steps:
        loss = rank_loss(model, step, rank, equal_shares(num_ranks))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Every parameter, buffer and moment, unsharded. Collective."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state = {name: whole(tensor).clone() for name, tensor in of_model.items()}
    for name, moments in of_optimizer["state"].items():
        state |= {f"{name}/{kind}": whole(tensor).clone() for kind, tensor in moments.items()}
    return state


def save(rank: int, num_ranks: int, layout: tuple[int, int], wrap: str, experts: int, folder: str) -> State:
    mesh = open_mesh(*layout)
    with open_heap(mesh) as heap:
        model, optimizer = build(mesh, heap, wrap, experts)
        train(model, optimizer, rank, num_ranks, range(3))
        for number, moe in enumerate(module for module in model.modules() if isinstance(module, symmoe.MoELayer)):
            moe.router.expert_bias.copy_(torch.arange(experts) * 0.01 + number)
        of_model, of_optimizer = get_state_dict(model, optimizer)
        dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder)
        return whole_state(model, optimizer)


def load(rank: int, num_ranks: int, layout: tuple[int, int], experts: int, folder: str) -> tuple[State, State, tuple]:
    """State before and after loading, and the local shape of the first expert weight."""
    mesh = open_mesh(*layout)
    with open_heap(mesh) as heap:
        model, optimizer = build(mesh, heap, "fsdp", experts)
        for parameter in model.parameters():
            parameter.data.mul_(-1)
        # A new optimizer has no moments to load into until get_state_dict has made them.
        of_model, of_optimizer = get_state_dict(model, optimizer)
        before = whole_state(model, optimizer)
        state = {"model": of_model, "optimizer": of_optimizer}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        after = whole_state(model, optimizer)
        weight = model.blocks[0].moe.experts.fc1.weight
        assert weight.shape == (experts, 2 * FFN, HIDDEN)
        train(model, optimizer, rank, num_ranks, range(3, 4))  # it goes on
        return before, after, tuple(weight.to_local().shape)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


@pytest.mark.parametrize("route", ROUTES)
def test_every_value_survives_the_change_of_layout(cluster, tmp_path: Path, route: str):
    source, target, wrap, experts = ROUTES[route]
    saved = cluster(source[0] * source[1]).run(save, source, wrap, experts, str(tmp_path))[0]
    for before, after, shape in cluster(target[0] * target[1]).run(load, target, experts, str(tmp_path)):
        assert after.keys() == saved.keys()
        assert {name for name in saved if "experts" in name} >= {
            f"blocks.0.moe.experts.fc{n}.weight{suffix}" for n in (1, 2) for suffix in ("", "/exp_avg", "/exp_avg_sq")
        }
        for name, tensor in saved.items():
            assert bits(after[name]) == bits(tensor), name
        changed = [name for name in saved if bits(before[name]) != bits(saved[name])]
        assert len(changed) > 0.9 * len(saved)  # loading had something to do
        assert math.prod(shape) == experts * 2 * FFN * HIDDEN // (target[0] * target[1])
