"""A swapped model straight from a checkpoint: no rank ever holds another's experts."""

from __future__ import annotations

import copy
import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel

from symmoe.checkpoint.peers import Peers
from symmoe.errors import CheckpointError
from symmoe.integrations.transformers.checkpoint import load_checkpoint
from symmoe.integrations.transformers.experts import StepConfig
from symmoe.integrations.transformers.swap import swap_moe
from symmoe.symm_mem.heap import SymmetricHeap
from symmoe.torch_internals import non_persistent_buffers


def from_pretrained(
    folder: str | os.PathLike[str],
    heap: SymmetricHeap,
    *,
    config: PretrainedConfig | None = None,
    dtype: torch.dtype | None = None,
    model_class: Any = AutoModelForCausalLM,
    step: StepConfig | None = None,
) -> PreTrainedModel:
    """A model of transformers with this rank's experts, read from a local checkpoint. Collective over the heap's group.

    Args:
        folder: config.json, and weights as load_checkpoint reads them; huggingface_hub.snapshot_download makes one.
        heap: the EP group's; the model is built on its device.
        config: in place of the folder's, e.g. with another attn_implementation.
        dtype: of the parameters; None is the config's. What the model keeps in fp32 stays fp32.
        model_class: an auto class or a model class.
        step: see swap_moe.

    Returns:
        the model in evaluation mode, as transformers' from_pretrained does.

    Raises:
        ArgumentError, CheckpointError: see swap_moe and load_checkpoint; on every rank.
    """
    folder = Path(folder)

    def read_config() -> PretrainedConfig:
        if not folder.is_dir():
            raise CheckpointError(f"folder ({folder}) is not there; huggingface_hub.snapshot_download makes one")
        return AutoConfig.from_pretrained(folder) if config is None else copy.deepcopy(config)  # building changes it

    with Peers(heap.bootstrap) as peers:
        config = peers.together(read_config, is_last=True)
    with torch.device("meta"):
        build = getattr(model_class, "from_config", None) or model_class._from_config
        model: PreTrainedModel = build(config, dtype=dtype or config.dtype or torch.get_default_dtype())
    swap_moe(model, heap, step=step)
    _materialise(model, heap.device)
    load_checkpoint(model, folder)
    if model.can_generate() and (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    model.eval()
    return model


def _materialise(model: PreTrainedModel, device: torch.device) -> None:
    """Memory for everything on the meta device; ties and marks of parameters stay."""
    # What transformers loads in fp32 whatever the dtype asked for: patterns, which it searches for in names.
    kept_in_fp32 = set(model._keep_in_fp32_modules_strict or ())
    kept_in_fp32 |= set(model._keep_in_fp32_modules or ()) if model.dtype == torch.float16 else set()
    kept = [re.compile(pattern.replace("*", ".*")) for pattern in kept_in_fp32]
    made: dict[torch.Tensor, torch.Tensor] = {}
    for path, module in model.named_modules():
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if tensor not in made:
                is_kept = tensor.is_floating_point() and any(each.search(f"{path}.{name}") for each in kept)
                value = torch.empty_like(tensor, device=device, dtype=torch.float32 if is_kept else None)
                is_parameter = isinstance(tensor, nn.Parameter)
                made[tensor] = nn.Parameter(value, requires_grad=tensor.requires_grad) if is_parameter else value
                vars(made[tensor]).update(vars(tensor))
            setattr(module, name, made[tensor])
    # transformers computes what is in no checkpoint, e.g. buffers of rotary embeddings.
    for module in model.modules():
        vars(module)["_is_hf_initialized"] = not non_persistent_buffers(module)
    for tensor in model.state_dict(keep_vars=True).values():
        vars(tensor)["_is_hf_initialized"] = True
    model.initialize_weights()
