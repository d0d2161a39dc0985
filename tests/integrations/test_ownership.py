"""The module that owns a parameter decides whether it is an expert's, whatever has replaced the parameter."""

import copy
from pathlib import Path

import pytest
import torch
from cluster import run_on
from small_model import (
    CONFIG,
    TOKENS,
    Model,
    equal_shares,
    first_gradients,
    model_of,
    open_heap,
    rank_loss,
    set_weights,
)
from torch import nn
from torch.nn.utils import parametrize

import symmoe
from symmoe.checkpoint import load_checkpoint, save_checkpoint
from symmoe.grouped.parameters import named_parameters
from symmoe.training.parallel import parameter_groups


def assigned(model: nn.Module) -> nn.Module:
    model.load_state_dict(
        {name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True
    )
    return model


def converted(model: nn.Module) -> nn.Module:
    was = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        return model.double().float()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(was)


class Doubled(nn.Module):
    def forward(self, half: torch.Tensor) -> torch.Tensor:
        return half * 2

    def right_inverse(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / 2


def parametrized(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        parametrize.register_parametrization(block.moe.experts.fc1, "weight", Doubled())
    return model


# Parameters are other objects after each of these.
WAYS = {"copied": copy.deepcopy, "assigned": assigned, "converted": converted}
WAYS["materialised"] = lambda model: model.to("meta").to_empty(device="cpu")


@run_on(2)
def test_gradients_are_those_of_one_process(
    rank: int, num_ranks: int, heap: symmoe.SymmetricHeap
) -> None:
    """Clipped gradients on all ranks, and their norm, are those of one process with all experts."""
    with open_heap(None) as own_heap:
        alone = first_gradients(model_of(own_heap), 0, (TOKENS,))
    norm = torch.stack([gradient.norm() for gradient in alone.values()]).norm()
    for change, changed in WAYS.items():
        model = changed(Model(heap))
        assert experts_of(model) == FOUR
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        dense, experts = (group["params"] for group in parameter_groups(model))
        assert {names.pop(id(parameter)) for parameter in experts} == FOUR
        assert set(names) == set(map(id, dense))
        set_weights(model, heap)
        rank_loss(model, 0, rank, equal_shares(num_ranks)).backward()
        symmoe.reduce_gradients(model)
        actual = symmoe.training.clip_grad_norm(model, norm / 2)
        torch.testing.assert_close(actual, norm, msg=change)
        for name, parameter in model.named_parameters():
            expected = alone[name].chunk(num_ranks)[rank] if name in FOUR else alone[name]
            torch.testing.assert_close(
                parameter.grad, expected / 2, rtol=1e-4, atol=1e-7, msg=change
            )


def experts_of(model: nn.Module) -> set[str]:
    return {name for name, _, is_expert in named_parameters(model) if is_expert}


FOUR = {
    f"blocks.{block}.moe.experts.{linear}.weight" for block in (0, 1) for linear in ("fc1", "fc2")
}


def test_parametrized_experts_adapters_of_a_copy_and_wrapped_experts_are_experts(
    heap: symmoe.SymmetricHeap,
):
    originals = {
        name.replace("fc1.weight", "fc1.parametrizations.weight.original") for name in FOUR
    }
    assert experts_of(parametrized(Model(heap))) == originals
    model = Model(heap)
    symmoe.lora.add_lora(model, rank=2, alpha=1.0)
    adapters = {name.replace("weight", kind) for name in FOUR for kind in ("lora_a", "lora_b")}
    assert experts_of(copy.deepcopy(model)) == FOUR | adapters
    assert experts_of(torch.compile(Model(heap))) == {f"_orig_mod.{name}" for name in FOUR}
    assert experts_of(nn.ModuleDict({"module": Model(heap)})) == {f"module.{name}" for name in FOUR}


def test_shared_parameters_are_named_once_by_default(heap: symmoe.SymmetricHeap):
    """A parameter in any module of experts is an expert's, under all its names."""
    layer = symmoe.MoELayer(CONFIG, heap)
    plain = nn.Module()
    plain.weight = layer.experts.fc1.weight
    model = nn.ModuleList([plain, layer, layer])
    once = [(name, is_expert) for name, _, is_expert in named_parameters(model)]
    assert once == [("0.weight", True), ("1.router.weight", False), ("1.experts.fc2.weight", True)]
    every = [name for name, _, is_expert in named_parameters(model, shared=True) if is_expert]
    assert every == [
        "0.weight",
        *(f"{i}.experts.{fc}.weight" for i in (1, 2) for fc in ("fc1", "fc2")),
    ]


def test_a_users_module_declares_its_experts():
    class Experts(nn.Module):
        holds_experts = True

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2, bias=False)

    assert experts_of(nn.Sequential(nn.Linear(2, 2, bias=False), Experts())) == {"1.inner.weight"}


@pytest.mark.parametrize("change", ["copied", "assigned"])
@run_on(2)
def test_replaced_parameters_are_saved_and_loaded(
    rank: int, num_ranks: int, heap: symmoe.SymmetricHeap, tmp_path: Path, change: str
) -> None:
    """A model with replaced parameters saves, and an unchanged model loads that checkpoint."""
    folder = str(tmp_path / "checkpoint")
    model = WAYS[change](Model(heap))
    set_weights(model, heap)
    save_checkpoint(folder, 1, model=model)
    target = Model(heap)
    load_checkpoint(folder, model=target)
    torch.testing.assert_close(target.state_dict(), model.state_dict(), rtol=0, atol=0)


@run_on(2)
def test_the_error_of_differing_tensors_names_holds_experts(
    rank: int, num_ranks: int, heap: symmoe.SymmetricHeap, tmp_path: Path
) -> None:
    folder = str(tmp_path / "checkpoint")

    class UndeclaredExperts(nn.Module):
        """A user's own experts, without the attribute `holds_experts`."""

        def __init__(self, heap: symmoe.SymmetricHeap) -> None:
            super().__init__()
            self.heap, self.weight = heap, nn.Parameter(torch.full((2, 3), float(rank)))

    model = UndeclaredExperts(heap)
    text = "model.weight differs between rank 0 and rank 1.*holds_experts"
    with pytest.raises(symmoe.errors.CheckpointError, match=text):
        save_checkpoint(folder, 1, model=model)
    model.holds_experts = True
    save_checkpoint(folder, 1, model=model)
