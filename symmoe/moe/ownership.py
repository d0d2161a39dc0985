"""Which parameters belong to all ranks, and which to an expert, which lives on one rank of each EP group.

The module that owns a parameter decides this. Parameters are replaced (copies of layers, loading by assignment, the
meta device, FSDP, parametrizations), and the attributes of a Parameter are lost with it.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def named_parameters(model: nn.Module, *, shared: bool = False) -> Iterator[tuple[str, nn.Parameter, bool]]:
    """(name, parameter, whether it is an expert's) of every parameter, in the order of `model.named_parameters()`; if
    `shared`, once for each name that it has. Those of modules with `holds_experts = True` are experts', with all
    modules inside them: GroupedLinear has that, and any module of experts may. A parameter that such a module holds is
    an expert's under its other names as well."""
    holders = [module for module in model.modules() if getattr(module, "holds_experts", False)]
    experts = {id(parameter) for module in holders for parameter in module.parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=not shared):
        yield name, parameter, id(parameter) in experts


def trainable(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(dense, experts): parameters that take a gradient, each once, in the order of `model.parameters()`."""
    named = [each for each in named_parameters(model) if each[1].requires_grad]
    dense, experts = ([parameter for _, parameter, is_expert in named if is_expert == kind] for kind in (False, True))
    return dense, experts
