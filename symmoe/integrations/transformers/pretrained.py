"""Builds a swapped model from a checkpoint: a rank reads only its own experts."""

from __future__ import annotations

import copy
import os
import re
from pathlib import Path
from typing import Any

import torch

from symmoe.checkpoint.peers import Peers
from symmoe.checks.extras import extra
from symmoe.errors import CheckpointError
from symmoe.integrations.transformers.checkpoint import load_checkpoint
from symmoe.integrations.transformers.experts import StepConfig
from symmoe.integrations.transformers.swap import swap_moe
from symmoe.symm_mem.heap import SymmetricHeap
from symmoe.torch_internals import non_persistent_buffers

with extra("transformers"):
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        GenerationConfig,
        PretrainedConfig,
        PreTrainedModel,
    )


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
        folder: config.json, and weights for load_checkpoint; e.g. from huggingface_hub.snapshot_download.
        heap: the EP group's heap; the model is built on its device.
        config: replaces the folder's, e.g. with another attn_implementation.
        dtype: dtype of the parameters; None: the config's. Parameters that the model keeps in fp32 stay fp32.
        model_class: an auto class or a model class.
        step: see swap_moe.

    Returns:
        the model in evaluation mode, like transformers' from_pretrained.

    Raises:
        ArgumentError, CheckpointError: see swap_moe and load_checkpoint; on every rank.
    """
    folder = Path(folder)
    with Peers(heap.bootstrap) as peers, peers.step(is_last=True):
        if not folder.is_dir():
            raise CheckpointError(
                f"folder ({folder}) is not there; huggingface_hub.snapshot_download makes one"
            )
        # A copy: building changes it.
        config = AutoConfig.from_pretrained(folder) if config is None else copy.deepcopy(config)
    with torch.device("meta"):
        build = getattr(model_class, "from_config", None) or model_class._from_config
        model: PreTrainedModel = build(
            config, dtype=dtype or config.dtype or torch.get_default_dtype()
        )
    swap_moe(model, heap, step=step)
    model.to_empty(device=heap.device)
    # Name patterns of parameters that transformers loads in fp32 for any requested dtype.
    in_fp32 = [
        re.compile(pattern.replace("*", ".*")) for pattern in model._get_dtype_plan(model.dtype)
    ]
    for name, tensor in model.state_dict(keep_vars=True).items():
        vars(tensor)["_is_hf_initialized"] = True
        if tensor.is_floating_point() and any(regex.search(name) for regex in in_fp32):
            tensor.data = tensor.data.float()
    for module in model.modules():
        vars(module)["_is_hf_initialized"] = not non_persistent_buffers(module)
    model.initialize_weights()  # for tensors outside checkpoints, e.g. buffers of rotary embeddings
    model.tie_weights()
    load_checkpoint(model, folder)
    if model.can_generate() and (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    model.eval()
    return model
