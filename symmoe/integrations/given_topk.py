"""A choice of experts that is given to a router which chooses with torch.topk, whatever it does before and after.

So scores, weights and their gradients are the router's own rule, of whichever model. T tokens, E experts, K of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from symmoe.errors import ArgumentError
from symmoe.moe.listeners import Choose


def give_topk(router: nn.Module, experts: nn.Module, choose: Choose, *, position: int) -> Callable[[], None]:
    """From now on `router`, or what it calls, takes `choose`'s experts; until the function that this returns is called.

    Args:
        router: a module with the router in it, which may have `experts` in it too.
        experts: a module with `num_experts`, E, or in `inner_experts`. The argument of its calls at `position`, the
            ids, gets -1 for tokens that have no expert. To the router these have its own choice, so that its
            statistics see them as they do without a replay.
    """
    given = _GivenTopK(int(getattr(experts, "inner_experts", experts).num_experts), choose)
    before, forward = vars(router).get("forward"), router.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        given.is_none = None
        with given:
            return forward(*args, **kwargs)

    def drop(_experts: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        ids, is_none = args[position], given.is_none
        if is_none is None:
            raise ArgumentError(f"routing cannot be given to {type(router).__name__}: it does not choose by torch.topk")
        return *args[:position], ids.masked_fill(is_none.view(ids.shape), -1), *args[position + 1 :]

    hook = experts.register_forward_pre_hook(drop)
    vars(router)["forward"] = run

    def end() -> None:
        hook.remove()
        del vars(router)["forward"]
        if before is not None:
            vars(router)["forward"] = before

    return end


class _GivenTopK(TorchFunctionMode):
    """Where torch.topk chooses of E, it returns what is given. `is_none`: bool [..., K], slots without an expert;
    None: it has chosen nothing yet."""

    def __init__(self, num_experts: int, choose: Choose) -> None:
        super().__init__()
        self._num_experts, self._choose = num_experts, choose
        self.is_none: torch.Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found if func not in (torch.topk, torch.Tensor.topk) else self._given(found, *args, **(kwargs or {}))

    def _given(self, found: Any, scores: torch.Tensor, k: int, *_: Any, **__: Any) -> Any:
        width, num_experts = scores.shape[-1], self._num_experts
        if width == num_experts and (k, *scores.shape[1:-1]) != (2, 1):  # which is the score of the only group
            ids = self._ids(scores, k)
            self.is_none = ids < 0
            ids = torch.where(self.is_none, found.indices, ids)
            return torch.return_types.topk((scores.gather(-1, ids), ids))
        if scores.dim() == 2 and 1 < width < num_experts and num_experts % width == 0:
            # Groups of experts: what is not in one of the best may get no score (DeepSeek-V2).
            ids = self._ids(scores, None)
            groups = torch.where(ids < 0, found.indices[:, :1], ids // (num_experts // width))
            return torch.return_types.topk((scores.gather(-1, groups), groups))
        return found

    def _ids(self, scores: torch.Tensor, k: int | None) -> torch.Tensor:
        """int64 [..., K] for scores [..., E], spread over a mesh as they are."""
        shape = (scores.to_local() if isinstance(scores, DTensor) else scores).shape[:-1]
        ids = self._choose(shape.numel(), k).long()
        ids = ids.view(*shape, ids.shape[-1])
        if isinstance(scores, DTensor):
            return DTensor.from_local(ids, scores.device_mesh, scores.placements, run_check=False)
        return ids
