"""peft's LoRA on transformers models with swapped experts, and its files (docs/peft.md). Experts use the adapters of
grouped layers (symmoe.lora), which peft cannot save. E experts in all, H hidden, I ffn."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from symmoe.checkpoint.peers import Peers
from symmoe.checkpoint.tensors import bare, own_state_dict
from symmoe.checks.extras import extra
from symmoe.errors import CheckpointError
from symmoe.integrations.transformers.checkpoint import compare
from symmoe.integrations.transformers.experts import ExpertParallelExperts
from symmoe.integrations.transformers.forms import PeftNames, unwrapped
from symmoe.integrations.transformers.swap import adapt, heap_of, refuse_methods_of_peft
from symmoe.lora import LoRAGroupedLinear
from symmoe.moe.ddp_and_fsdp import prepare_for_ddp

with extra("peft"):
    import peft
    from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
    from safetensors.torch import load_file, save_file

WEIGHTS = "adapter_model.safetensors"


def get_peft_model(model: nn.Module, config: peft.LoraConfig, **options: Any) -> peft.PeftModel:
    """peft.get_peft_model for a swapped model: the same adapters as on the plain model, with the same values if
    ranks seed torch alike; each rank has its part of the experts' adapters, and all other adapters. Local. config: if
    it targets gate_up_proj or down_proj of experts, it must target both. Refuses options that peft lacks for parameters
    (dropout, DoRA, bias ..). ArgumentError: the model is not swapped, or its experts cannot have these adapters. peft's
    changes to the model stay."""
    heap_of(model)
    swapped = {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, ExpertParallelExperts)
    }
    for path, experts in swapped.items():
        model.set_submodule(path, _StandIn(experts))
    try:
        wrapped = peft.get_peft_model(model, config, **options)
    finally:
        wrappers = {path: unwrapped(model.get_submodule(path))[1] for path in swapped}
        for path, experts in swapped.items():
            model.set_submodule(path, experts)
    for path, experts in swapped.items():
        experts.requires_grad_(False)  # as peft does with all modules that it sees
        if wrappers[path]:
            adapt(experts, wrappers[path])
    refuse_methods_of_peft(wrapped)
    prepare_for_ddp(wrapped)
    return wrapped


@torch.no_grad()
def save_adapters(model: peft.PeftModel, folder: str | os.PathLike[str]) -> None:
    """Saves only the adapters, in peft's format for the plain model: adapter_model.safetensors and
    adapter_config.json in `folder`, which all ranks see; other files there stay. Collective over the heap's process
    group; rank 0 briefly needs host memory for all experts' adapters. ArgumentError: the model is not swapped.
    CheckpointError: on every rank, if replicated tensors differ between ranks, or any rank cannot write."""
    model = bare(model)
    heap, folder = heap_of(model), Path(folder).absolute()
    partial = folder.with_name(folder.name + ".partial")
    with Peers(heap.bootstrap) as peers:
        compare(peers, _peft_state(model))
        with peers.step():
            partial.mkdir(parents=True, exist_ok=True)  # a killed save may have left it
            share = {
                f"{path}.{names.prefix}{i}": matrix.detach().cpu()
                for path, layer, names in _adapted(model)
                for i, matrix in enumerate((layer.lora_a, layer.lora_b))
            }
            save_file(share, partial / f"{heap.rank}.safetensors")
        with peers.step(is_last=True):
            if heap.rank == 0:
                _publish(model, partial, folder, heap.num_ranks)


@torch.no_grad()
def load_adapters(model: peft.PeftModel, folder: str | os.PathLike[str]) -> None:
    """Loads adapters from peft's files, from any writer; each rank loads its experts'. Collective over the heap's
    process group. Wrap the model with the files' configuration, e.g. LoraConfig.from_pretrained(folder), before.
    ArgumentError: the model is not swapped. CheckpointError: on every rank, if the file cannot be read, or keys
    or shapes do not match the model. The model is unchanged."""
    model = bare(model)
    heap, file = heap_of(model), Path(folder, WEIGHTS)
    with Peers(heap.bootstrap) as peers, peers.step(is_last=True):
        tensors = load_file(file)
        shapes = {key: tensor.shape for key, tensor in _peft_state(model).items()}
        for path, layer, names in _adapted(model):
            a, b = (
                part.to("meta").repeat(heap.num_ranks, 1, 1)
                for part in (layer.lora_a, layer.lora_b)
            )
            shapes |= {f"{path}.{key}": part.shape for key, part in names.to_peft(a, b).items()}
        for key in sorted(shapes.keys() | tensors.keys()):
            expected_shape, stored_shape = (
                shapes.get(key),
                tensors[key].shape if key in tensors else None,
            )
            if expected_shape != stored_shape:
                raise CheckpointError(
                    f"{key} has shape {stored_shape} in {file} and {expected_shape} in the model (None: is missing)"
                )
    for path, layer, names in _adapted(model):
        a, b = (tensors.pop(f"{path}.{names.prefix}lora_{which}.weight") for which in "AB")
        names.fill(layer, a, b, heap)
    set_peft_model_state_dict(model, tensors, adapter_name=model.active_adapter)


def _publish(model: peft.PeftModel, partial: Path, folder: Path, num_ranks: int) -> None:
    """Merges the ranks' shares in `partial`, and writes peft's files of them to `folder`."""
    state = {key: tensor.cpu().contiguous() for key, tensor in _peft_state(model).items()}
    shares = [load_file(partial / f"{rank}.safetensors") for rank in range(num_ranks)]
    for path, _, names in _adapted(model):
        a, b = (torch.cat([share[f"{path}.{names.prefix}{i}"] for share in shares]) for i in (0, 1))
        state |= {f"{path}.{key}": tensor for key, tensor in names.to_peft(a, b).items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state, partial / WEIGHTS, metadata={"format": "pt"})
    config = copy.copy(model.peft_config[model.active_adapter])
    config.inference_mode = True  # as peft does
    config.base_model_name_or_path = config.base_model_name_or_path or getattr(
        model, "name_or_path", None
    )
    config.save_pretrained(str(partial))
    for name in ("adapter_config.json", WEIGHTS):
        (partial / name).replace(folder / name)
    shutil.rmtree(partial)


class _StandIn(nn.Module):
    """Stands in for swapped experts: transformers' own module, with parameters of E experts and no memory."""

    def __init__(self, experts: ExpertParallelExperts) -> None:
        super().__init__()
        self.is_transposed = experts.form.is_transposed
        for name, grouped_name in experts.form.parameters.items():
            if grouped_name.endswith("weight"):
                weight = experts.mlp.get_parameter(grouped_name)
                # For peft's initialisation they need a device other than meta.
                value = torch.zeros((), dtype=weight.dtype, device=weight.device)
                shape = experts.form.convert_layout(weight).shape[1:]
                setattr(self, name, nn.Parameter(value.expand(experts.num_experts, *shape)))


def _adapted(model: nn.Module) -> Iterator[tuple[str, LoRAGroupedLinear, PeftNames]]:
    """The experts' grouped layers with adapters: the experts' path, the layer, and peft's names of its adapters."""
    for path, module in model.named_modules():
        if isinstance(module, ExpertParallelExperts):
            for linear, names in module.peft_names.items():
                yield path, getattr(module.mlp, linear), names


def _peft_state(model: peft.PeftModel) -> dict[str, torch.Tensor]:
    """The tensors that peft saves itself: all but those of swapped experts, which have other names there."""
    state: dict[str, torch.Tensor] = get_peft_model_state_dict(
        model, own_state_dict(model), adapter_name=model.active_adapter
    )
    paths = tuple(
        f"{path}."
        for path, module in model.named_modules()
        if isinstance(module, ExpertParallelExperts)
    )
    return {key: tensor for key, tensor in state.items() if not key.startswith(paths)}
