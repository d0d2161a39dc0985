"""Which ranks make a mistake, and transforms of torch that the package has no rules for."""

from collections.abc import Callable

import torch
from torch.autograd import forward_ad


def sets_of_culprits(num_ranks: int) -> list[list[int]]:
    """Each rank, and all."""
    return [[r] for r in range(num_ranks)] + [list(range(num_ranks))] * (num_ranks > 1)


def with_tangents(call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> object:
    with forward_ad.dual_level():
        return call(forward_ad.make_dual(x, torch.ones_like(x)))


TRANSFORMS: dict[str, Callable[[Callable[[torch.Tensor], torch.Tensor], torch.Tensor], object]] = {
    "grad": lambda call, x: torch.func.grad(call)(x),
    "vjp": lambda call, x: torch.func.vjp(call, x),
    "jvp": lambda call, x: torch.func.jvp(call, (x,), (x,)),
    "vmap": lambda call, x: torch.func.vmap(call)(x[None]),
    "tangents": with_tangents,
}
