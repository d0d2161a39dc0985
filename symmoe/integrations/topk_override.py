"""Replaces the choice of experts in a router that uses torch.topk. The router computes everything else itself: scores,
weights and gradients follow its model's rules. E experts, K of a token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from symmoe.errors import ArgumentError
from symmoe.moe.listeners import Choose


def override_topk(
    model: nn.Module, name: str, choose: Choose, *, router: str, position: int
) -> Callable[[], None]:
    """An OverrideRouter. Tokens without an expert keep the router's own choice until the experts are called.

    Args:
        name: a module whose argument at `position` is the ids, and that has `num_experts` or `inner_experts`.
        router: the choosing module's name in that module's parent; "": the parent.
    """
    block = name.rpartition(".")[0]
    if not name:
        raise ArgumentError(
            f"model ({type(model).__name__}) is without its router; pass what is around both"
        )
    experts, chooser = model.get_submodule(name), model.get_submodule(block).get_submodule(router)
    # torch gives all attributes of a module one type.
    counted: Any = getattr(experts, "inner_experts", experts)
    override = _TopKOverride(counted.num_experts, choose)
    before, forward = vars(chooser).get("forward"), chooser.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        override.is_none = None
        with override:
            return forward(*args, **kwargs)

    def drop(_experts: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if override.is_none is None:
            raise ArgumentError(
                f"{type(chooser).__name__} does not choose by torch.topk: it cannot be given a choice"
            )
        ids = args[position].masked_fill(override.is_none.view(args[position].shape), -1)
        return *args[:position], ids, *args[position + 1 :]

    def end() -> None:
        hook.remove()
        vars(chooser).pop("forward")
        vars(chooser).update({} if before is None else {"forward": before})

    hook = experts.register_forward_pre_hook(drop)
    vars(chooser)["forward"] = run
    return end


class _TopKOverride(TorchFunctionMode):
    """torch.topk over E returns the given choice. `is_none`: bool [..., K], slots without an expert; None: torch.topk
    was not called yet."""

    def __init__(self, num_experts: int, choose: Choose) -> None:
        super().__init__()
        self._num_experts, self._choose = num_experts, choose
        self.is_none: torch.Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return (
            result
            if func not in (torch.topk, torch.Tensor.topk)
            else self._overridden(result, *args, **(kwargs or {}))
        )

    def _overridden(self, result: Any, scores: torch.Tensor, k: int, *_: Any, **__: Any) -> Any:
        rows, width = scores.shape[:-1], scores.shape[-1]
        if width == self._num_experts and (k, *rows[1:]) != (
            2,
            1,
        ):  # the score of the only group
            ids = self._choose(rows.numel(), k).long().view(*rows, k)
            self.is_none = ids < 0
            ids = torch.where(self.is_none, result.indices, ids)
        elif len(rows) == 1 and 1 < width < self._num_experts and self._num_experts % width == 0:
            # Groups of experts: those outside the best groups may have no score (DeepSeek-V2).
            ids = self._choose(rows.numel(), None).long()
            ids = torch.where(ids < 0, result.indices[:, :1], ids // (self._num_experts // width))
        else:
            return result
        return torch.return_types.topk((scores.gather(-1, ids), ids))
