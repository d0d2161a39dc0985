"""What `symmoe check` runs: a model of transformers, or what a function of the user's makes."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from symmoe.errors import ArgumentError
from symmoe.symm_mem.heap import SymmetricHeap


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """What the function gets: this rank of the default process group, which has `num_ranks`, and a heap over it. torch
    is seeded alike on all ranks. dtype: what parameters shall have, or autocast compute in."""

    rank: int
    num_ranks: int
    device: torch.device
    dtype: torch.dtype
    heap: SymmetricHeap


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """What the function returns: a model, and how it is trained where that is not the default. All is called once.

    Attributes:
        model: in no wrapper. Modules with `holds_experts` have parameters of experts, as those of symmoe do.
        backward: of tokens, int64 [B, S], those of this rank: forward, a loss that is their mean, backward; then `grad`
            or `main_grad` have the gradient of the mean over ranks. None: model(input_ids, labels) and
            symmoe.reduce_gradients.
        clip: scales gradients to a norm over all ranks of at most its argument. None: symmoe.clip_grad_norm.
        step: the optimizer's. None: AdamW's with a rate of 1e-3.
        save, load: all that is trained, to and from a folder that all ranks see. None: symmoe.checkpoint's.
    """

    model: nn.Module
    backward: Callable[[torch.Tensor], object] | None = None
    clip: Callable[[float], object] | None = None
    step: Callable[[], object] | None = None
    save: Callable[[str], object] | None = None
    load: Callable[[str], object] | None = None


def module_of(target: str) -> str | None:
    """The module of a function, which can be imported then; None for a model of transformers. ArgumentError: neither."""
    where, _, _ = target.rpartition(":")
    path, is_file = Path(where or target), where.endswith(".py")
    sys.path.insert(0, str(path.resolve().parent if is_file else Path.cwd()))
    try:
        if not where:
            is_there = (path / "config.json").is_file() or (target.count("/") == 1 and not path.exists())
        else:
            is_there = path.is_file() if is_file else importlib.util.find_spec(where) is not None
    except ImportError:
        is_there = False
    if not is_there:
        fix = "a folder with config.json, a name such as Qwen/Qwen3-30B-A3B, file.py:function, package.module:function"
        raise ArgumentError(f"target ({target}) is not there; it must be {fix}")
    return None if not where else path.stem if is_file else where


def make(target: str, context: Context, num_layers: int | None) -> Trained:
    """The model of this rank."""
    if (module := module_of(target)) is None:
        return _of_transformers(target, context, num_layers)
    made = getattr(importlib.import_module(module), target.rpartition(":")[2])(context)
    return made if isinstance(made, Trained) else Trained(model=made)


def _of_transformers(target: str, context: Context, num_layers: int | None) -> Trained:
    """A model with weights of the checkpoint, or random ones where a folder has only config.json; in evaluation mode,
    which has no dropout, and without the balance loss, which each rank has of its own tokens."""
    from transformers import AutoConfig, AutoModelForCausalLM  # of packages that need not be installed

    from symmoe.integrations.transformers import StepConfig, load_checkpoint, save_checkpoint, swap_moe

    config = AutoConfig.from_pretrained(target)
    config.use_cache = config.output_router_logits = False
    if num_layers is not None:
        config.num_hidden_layers = num_layers
        if kinds := getattr(config, "layer_types", None):
            config.layer_types = kinds[:num_layers]
    if Path(target).is_dir() and not any(Path(target).glob("*.safetensors")):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=context.dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(target, config=config, dtype=context.dtype)
    # Sums in the order of slots are the same on any number of ranks: in bf16 too, routers then choose the same.
    swap_moe(model.eval(), context.heap, step=StepConfig(order="slot"))
    return Trained(model=model, save=partial(save_checkpoint, model), load=partial(load_checkpoint, model))
