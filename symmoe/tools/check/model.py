"""The model of `symmoe check`: from transformers, or from a function of the user."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from symmoe.errors import ArgumentError
from symmoe.symm_mem.heap import SymmetricHeap


class BadTarget(ArgumentError):
    """The target's function is missing, or returns no model."""


@dataclass(frozen=True, slots=True)
class Context:
    """The function's argument: this rank of the default process group, and a heap over it. All ranks have the same
    torch seed. dtype: for parameters, or for autocast. folder: empty for the run on one rank, which is first; the run
    on several ranks finds its files there."""

    rank: int
    num_ranks: int
    device: torch.device
    dtype: torch.dtype
    heap: SymmetricHeap
    folder: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """The function's result: a model, and its training functions if not the defaults. Each is called once.

    Attributes:
        model: without wrapper; experts are in modules with `holds_experts`, or have Megatron's mark.
        backward: receives this rank's tokens, int64 [B, S]; runs forward, a loss that is their mean, backward; then
            `grad` or `main_grad` have the gradient of the mean over ranks. None: model(input_ids, labels) and
            symmoe.reduce_gradients.
        clip: scales gradients to a norm over all ranks of at most its argument. None: symmoe.training.clip_grad_norm.
        optimizer: its state is compared too, and `load` must restore it. None: AdamW with a rate of 1e-3 unless `step`
            is given.
        step: the optimizer's step, with related updates. None: optimizer.step.
        save, load: all trained state, to and from a folder that all ranks see. None: symmoe.checkpoint's.
        own_buffers: name patterns of buffers that may differ by rank, e.g. statistics of a rank's own tokens.
            Other buffers must be equal on all ranks.
    """

    model: nn.Module
    backward: Callable[[torch.Tensor], object] | None = None
    clip: Callable[[float], object] | None = None
    optimizer: torch.optim.Optimizer | None = None
    step: Callable[[], object] | None = None
    save: Callable[[str], object] | None = None
    load: Callable[[str], object] | None = None
    own_buffers: Sequence[str] = ("*running_mean", "*running_var")


def make(target: str, context: Context, num_layers: int | None) -> Trained:
    """Builds this rank's model."""
    where, _, name = target.rpartition(":")
    if not where:
        return _of_transformers(target, context, num_layers)
    if where.endswith(".py"):
        sys.path.insert(0, str(Path(where).resolve().parent))
        where = Path(where).stem
    if importlib.util.find_spec(where.partition(".")[0]) is None:
        raise BadTarget(f"target ({target}): there is no module {where}")
    module = importlib.import_module(where)
    if not callable(function := getattr(module, name, None)):
        raise BadTarget(f"target ({target}): {module.__file__} has no function '{name}'")
    result = function(context)
    if not isinstance(result, Trained | nn.Module):
        raise BadTarget(
            f"target ({target}) returns {type(result).__name__}; it must return a Trained, or a torch Module"
        )
    return result if isinstance(result, Trained) else Trained(model=result)


def _of_transformers(target: str, context: Context, num_layers: int | None) -> Trained:
    """A model of transformers, with random weights if the folder has only config.json. Evaluation mode disables
    dropout. The balance loss is off, because each rank computes it for its own tokens."""
    from transformers import AutoConfig, AutoModelForCausalLM  # needs optional packages

    from symmoe.integrations.transformers import (
        StepConfig,
        load_checkpoint,
        save_checkpoint,
        swap_moe,
    )

    config: Any = AutoConfig.from_pretrained(target)
    config.use_cache = config.output_router_logits = False
    if num_layers is not None:
        config.num_hidden_layers = num_layers
        config.layer_types = (getattr(config, "layer_types", None) or [])[:num_layers] or None
    if Path(target).is_dir() and not any(Path(target).glob("*.safetensors")):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=context.dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(target, config=config, dtype=context.dtype)
    # Sums in slot order are equal on any number of ranks: routers then choose equally, in bf16 too.
    swap_moe(model.eval(), context.heap, step=StepConfig(order="slot"))
    return Trained(
        model=model, save=partial(save_checkpoint, model), load=partial(load_checkpoint, model)
    )
