"""The model families that are known: how each stores its experts, in memory and on disk.

In memory, transformers 5 has one module `experts` per MoE block with gate_up_proj [E, 2I, H] and down_proj [E, H, I],
or, transposed, [E, H, 2I] and [E, I, H]. On disk the experts are one by one, or fused as in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from torch import nn

from symmoe.errors import ArgumentError
from symmoe.grouped.activations import ScaledActivation, ScaledClampedSwiGLU
from symmoe.integrations.transformers.adapters import unwrapped
from symmoe.kernels.activation import Activation

if TYPE_CHECKING:
    from transformers import PretrainedConfig

BLOCK = "mlp"  # every family's name of its MoE block in memory

# By transformers' names of the function of the gate. Those of GELU differ in how they write the same formula.
ACTIVATIONS = {
    "silu": Activation(),
    "swish": Activation(),
    "quick_gelu": Activation(alpha=1.702),
    "gelu": Activation(function="gelu"),
    "gelu_python": Activation(function="gelu"),
    "gelu_pytorch_tanh": Activation(function="gelu_tanh"),
    "gelu_new": Activation(function="gelu_tanh"),
    "gelu_fast": Activation(function="gelu_tanh"),
    "relu2": Activation(function="relu2"),
}


class StockExperts(Protocol):
    """An experts module of transformers, of any family. The second group is what only those of gpt-oss have."""

    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter
    num_experts: int
    config: PretrainedConfig
    training: bool

    gate_up_proj_bias: nn.Parameter
    down_proj_bias: nn.Parameter
    alpha: float
    limit: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """How one model type stores its experts."""

    block_on_disk: str = BLOCK  # name of the MoE block in the keys of its checkpoints
    # names of gate, up and down, in keys `{block}.experts.{i}.{name}.weight`; None: fused
    matrices_on_disk: tuple[str, str, str] | None = ("gate_proj", "up_proj", "down_proj")
    clamped: bool = False  # gpt-oss' layout: transposed, gate and up alternate, with biases, and a clamped activation

    def activation(self, experts: StockExperts) -> ScaledActivation:
        """The activation between the GEMMs of a transformers experts module. ArgumentError: symmoe does not have it."""
        if self.clamped:
            return ScaledClampedSwiGLU(alpha=experts.alpha, limit=experts.limit, interleave=1)
        hidden_act = experts.config.hidden_act
        if hidden_act not in ACTIVATIONS:
            known = ", ".join(map(repr, ACTIVATIONS))
            raise ArgumentError(f"hidden_act ({hidden_act!r}) of the model's config must be one of {known}")
        return ScaledActivation(ACTIVATIONS[hidden_act])


# Keyed by `config.model_type`.
FAMILIES = {
    "deepseek_v3": Family(),
    "gpt_oss": Family(matrices_on_disk=None, clamped=True),
    "mixtral": Family(block_on_disk="block_sparse_moe", matrices_on_disk=("w1", "w3", "w2")),
    "olmoe": Family(),
    "qwen3_moe": Family(),
}


def family_of(config: object) -> Family:
    """The family of a transformers configuration. ArgumentError: its model type is not known."""
    model_type = getattr(config, "model_type", None)
    if model_type not in FAMILIES:
        raise ArgumentError(f"model_type ({model_type!r}) must be one of {', '.join(map(repr, FAMILIES))}")
    return FAMILIES[model_type]


def experts_modules(model: nn.Module) -> Iterator[tuple[str, StockExperts]]:
    """(path, module) of every experts module of transformers' own in a model; the path is that of what peft has put
    around it, if it has."""
    for path, module in model.named_modules():
        if path.rpartition(".")[2] == "experts":
            stock, _ = unwrapped(module)
            if hasattr(stock, "gate_up_proj") and hasattr(stock, "down_proj"):
                yield path, cast(StockExperts, stock)  # torch gives all attributes of a module one type
