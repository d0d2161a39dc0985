"""Checks of the arguments of MoELayer, before anything is computed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import nn

from symmoe import torch_internals
from symmoe.checks.arguments import tensor_problem
from symmoe.errors import ArgumentError, SymmoeError
from symmoe.kernels import control
from symmoe.moe.config import MoEConfig
from symmoe.moe.router import Choice, RouterOutput, choice_problem, mask_problem, probs_problem


def arguments_problem(
    config: MoEConfig,
    device: torch.device,
    x: torch.Tensor,
    *,
    token_mask: torch.Tensor | None,
    topk_idx: torch.Tensor | None,
    probs: torch.Tensor | None,
) -> SymmoeError | None:
    """What is wrong with the arguments of MoELayer.forward, or None. Looks at no device memory.

    Args:
        device: the device of the heap.
    """
    shape = ("...", f"hidden ({config.hidden})")
    error: SymmoeError | None = tensor_problem("x", x, shape=shape, dtypes=control.DTYPES, device=device)
    if error is not None:
        return error
    if x.shape[-1] != config.hidden:
        return ArgumentError(f"x ({list(x.shape)}) must be a tensor whose last dimension is hidden ({config.hidden})")
    error = mask_problem(token_mask, x) or choice_problem(topk_idx, x, config.top_k)
    return error or probs_problem(probs, topk_idx, x, config)


def device_problem(name: str, module: nn.Module | None, device: torch.device) -> ArgumentError | None:
    """The error of a parameter that is on another device than the heap, or has no memory, or None: kernels would read
    whatever is at its address. Not of what is brought in time: parts of DTensors, modules with accelerate's hooks."""
    if module is None or not _has_elsewhere(module, device):
        return None
    brought = [each for each in module.modules() if hasattr(each, "_hf_hook")]
    ignored = {id(parameter) for each in brought for parameter in each.parameters()}
    for path, parameter in module.named_parameters():
        is_part = hasattr(parameter, "device_mesh") and not parameter.is_meta
        if parameter.device != device and not is_part and id(parameter) not in ignored:
            return ArgumentError(
                f"{name}.{path} is on {parameter.device}; it must be on {device}, as the heap: move the layer there, "
                "or give it memory with to_empty and then values"
            )
    return None


def _has_elsewhere(module: nn.Module, device: torch.device) -> bool:
    """Whether a parameter of the module is on another device. In every call: named_parameters takes far longer."""
    for parameter in module._parameters.values():
        if parameter is not None and parameter.device != device:
            return True
    for child in module._modules.values():
        if child is not None and _has_elsewhere(child, device):
            return True
    return False


def inference_problem(layer: nn.Module, **tensors: torch.Tensor | None) -> ArgumentError | None:
    """The error that torch would raise when it saves an inference tensor for backward, or None.

    Torch would raise it when the peers already wait.
    """
    if not torch.is_grad_enabled():
        return None
    for name, tensor in tensors.items():
        if tensor is not None and tensor.is_inference() and any(p.requires_grad for p in layer.parameters()):
            return ArgumentError(f"{name} was made in inference_mode, and backward cannot use it: give its clone()")
    return None


def numbers_problem(routed: Choice) -> ArgumentError | None:
    """The error for the first token whose logits, or given probs, are not finite, or None. Synchronises the host."""
    what, numbers = (
        ("the router's logits", routed.logits) if isinstance(routed, RouterOutput) else ("probs", routed.probs)
    )
    bad = (~numbers.isfinite()).any(1).nonzero()
    if not len(bad):
        return None
    return ArgumentError(f"{what} of token {int(bad[0])} are not finite ({len(bad)} such tokens)")


def hooks_of(experts: nn.Module) -> list[str]:
    """The hooks on calls of the experts, of their layers and of their activation: the kind and the module of each."""
    modules = (experts, *cast(Iterable[nn.Module], experts._modules.values()))
    for m in modules:  # the quick way, for every call
        if torch_internals.has_hooks(m, everywhere=False):
            break
    else:
        return []
    names = ("experts", *(f"experts.{name}" for name in experts._modules))
    return [f"{kind} on {name}" for name, m in zip(names, modules, strict=True) for kind in torch_internals.hooks_of(m)]
