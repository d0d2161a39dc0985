"""The form of weights in an experts module of transformers, and its activation between the GEMMs.

Every module that transformers >= 5 dispatches through its experts interface (`use_experts_implementation`) describes
itself: `has_gate`, `has_bias` and `is_transposed` are attributes; symmoe calls the activation to identify it. Weights
are gate_up_proj [E, 2I, H], or up_proj [E, I, H] without a gate, and down_proj [E, H, I]; or, transposed, [E, H, 2I],
[E, H, I] and [E, I, H]; the biases have two dimensions.

peft's `target_parameters` wraps an experts module in nested ParamWrappers, one for each parameter. A wrapper computes
W + B A of all experts in every call, and replaces a parameter that swapped experts do not have. So symmoe takes the
adapters' values out of the wrappers, and writes them to peft's files by peft's names. Nothing here imports peft. Of
E experts, e on this rank, r rank, C input features, O output features, peft has A [E r, C], expert by expert, and
B [O, r E], whose columns are numbered r first. If peft interprets a weight [E, C, O] as [E, O, C], or the reverse, A
and B are exchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from symmoe.errors import ArgumentError
from symmoe.grouped.activations import ScaledActivation
from symmoe.kernels.activation import FUNCTIONS, SILU, Activation
from symmoe.lora import LoRAGroupedLinear
from symmoe.symm_mem.heap import SymmetricHeap

_SMALL, _HUGE = (
    0.125,
    2.0**40,
)  # arguments of a gate; limits beyond these are not recognised
_DIGITS = 5  # of alpha, limit and offset: a gate may compute in fp32
_PLAIN: Any = {"dtype": torch.float32, "device": "cpu"}  # whatever the caller's defaults are


StockExperts = (
    Any  # an experts module of transformers: torch gives all attributes of a module one type
)


@dataclass(frozen=True, slots=True)
class ExpertsForm:
    """An experts module's form of weights, and its activation."""

    has_bias: bool
    is_transposed: bool
    activation: Activation

    @classmethod
    def of(cls, experts: StockExperts) -> ExpertsForm:
        """ArgumentError: the module computes a function that GroupedMLP lacks."""
        form = cls(experts.has_bias, experts.is_transposed, _activation_of(experts))
        names = {name for name, _ in experts.named_parameters()}
        if names != form.parameters.keys() or getattr(experts, "has_post_expert_norm", False):
            raise ArgumentError(
                f"{type(experts).__name__} has parameters {', '.join(sorted(names))}; experts on several ranks can "
                f"have {', '.join(form.parameters)}, and no norm behind them"
            )
        return form

    @property
    def parameters(self) -> dict[str, str]:
        """The names in GroupedMLP ("fc1.weight", ..) by transformers' names."""
        stems = {
            "gate_up_proj" if self.activation.is_gated else "up_proj": "fc1",
            "down_proj": "fc2",
        }
        kinds = {"": "weight", "_bias": "bias"} if self.has_bias else {"": "weight"}
        return {
            stem + end: f"{linear}.{kind}"
            for stem, linear in stems.items()
            for end, kind in kinds.items()
        }

    def convert_layout(self, tensor: torch.Tensor) -> torch.Tensor:
        """A view of weights or biases [E, ..] in transformers' layout, from GroupedMLP's, or the reverse."""
        return tensor.transpose(1, 2) if self.is_transposed and tensor.dim() == 3 else tensor

    def local_weights(self, experts: StockExperts) -> dict[str, torch.Tensor]:
        """All weights of a module, by the names and in the layout of GroupedMLP."""
        return {
            grouped_name: self.convert_layout(getattr(experts, name))
            for name, grouped_name in self.parameters.items()
        }


def experts_modules(model: nn.Module) -> Iterator[tuple[str, StockExperts]]:
    """(path, module) of every transformers experts module in a model; the path is that of peft's outermost wrapper, if
    any."""
    outer = None
    for path, module in model.named_modules():
        stock, _ = unwrapped(module)
        if (
            hasattr(stock, "is_transposed")
            and hasattr(stock, "down_proj")
            and not f"{path}.".startswith(f"{outer}.")
        ):
            outer = path
            yield path, stock


@torch.no_grad()
def _activation_of(experts: StockExperts) -> Activation:
    """The activation with the same outputs as the module's own, by measurement."""
    act, is_gated = (experts._apply_gate, True) if experts.has_gate else (experts.act_fn, False)

    def output(gate: float, up: float) -> float:
        # With two columns, halves and single columns coincide.
        row = torch.tensor([[gate, up][: 1 + is_gated]], dtype=torch.float64, device="cpu")
        return float(act(row))

    try:
        # f(_SMALL)
        value = (
            (output(_SMALL, _SMALL) - output(_SMALL, 0.0)) / _SMALL
            if is_gated
            else output(_SMALL, 0.0)
        )
        silu = (
            {"alpha": _rounded(math.log(value / (_SMALL - value)) / _SMALL)}
            if 0 < value < _SMALL
            else {}
        )
        gate: dict[str, Any] = {}
        if is_gated:
            gate["offset"] = _rounded(output(_SMALL, 0.0) / value)
            limit = output(_SMALL, _HUGE) / value - gate["offset"]
            gate["limit"] = _rounded(limit) if 0 < limit < _HUGE / 2 else math.inf
        candidates = [
            Activation(
                function=function,
                is_gated=is_gated,
                interleave=interleave,
                **gate,
                **(silu if function == SILU else {}),
            )
            for function in FUNCTIONS
            for interleave in ((None, 1) if is_gated else (None,))
        ]
        return next(candidate for candidate in candidates if _is_same(candidate, act))
    except (StopIteration, ArithmeticError, ArgumentError, RuntimeError, TypeError, ValueError):
        inner = type(getattr(experts, "act_fn", None)).__name__
        raise ArgumentError(
            f"{type(experts).__name__} computes {getattr(act, '__qualname__', '')} with {inner} between its GEMMs; "
            f"symmoe has {', '.join(FUNCTIONS)}, as in Activation, and none gives the same numbers"
        ) from None


def _is_same(activation: Activation, act: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    scaled, generator = ScaledActivation(activation), torch.Generator("cpu").manual_seed(0)
    h = torch.randn(64, 32, generator=generator, **_PLAIN)
    probs = torch.ones(64, **_PLAIN)
    return all(
        torch.allclose(
            scaled(size * h, probs), act(size * h).float(), rtol=1e-4, atol=1e-6 * size**2
        )
        for size in (1.0, 8.0, 64.0, 2 * min(activation.limit, 64.0))
    )


def _rounded(number: float) -> float:
    return float(f"{number:.{_DIGITS}g}")


@dataclass(frozen=True, slots=True)
class PeftNames:
    """The form of one grouped layer's adapters in peft's files."""

    prefix: str  # of "lora_A.weight" and "lora_B.weight", after the name of the experts
    exchanged: bool  # whether A and B are exchanged

    def to_peft(self, a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
        """A file's A [E r, C] and B [O, r E], from symmoe's a [E, r, C] and b [E, O, r]."""
        first, second = (b.transpose(1, 2), a.transpose(1, 2)) if self.exchanged else (a, b)
        return {
            f"{self.prefix}lora_A.weight": first.reshape(-1, first.shape[2]).contiguous(),
            f"{self.prefix}lora_B.weight": second.permute(1, 2, 0)
            .reshape(second.shape[1], -1)
            .contiguous(),
        }

    def fill(
        self, layer: LoRAGroupedLinear, a: torch.Tensor, b: torch.Tensor, heap: SymmetricHeap
    ) -> None:
        """Copies this rank's part of a file's A [E r, C] and B [O, r E] to its layer."""
        first = a.reshape(heap.num_ranks * layer.num_groups, -1, a.shape[1])
        second = b.reshape(b.shape[0], -1, len(first)).permute(2, 0, 1)
        matrices = (
            (second.transpose(1, 2), first.transpose(1, 2)) if self.exchanged else (first, second)
        )
        for matrix, values in zip((layer.lora_a, layer.lora_b), matrices, strict=True):
            matrix.copy_(values.chunk(heap.num_ranks)[heap.rank])


def unwrapped(module: nn.Module) -> tuple[nn.Module, list[nn.Module]]:
    """The module inside peft's ParamWrappers, and the wrappers, outermost first."""
    wrappers = []
    while hasattr(module, "parameter_name") and isinstance(
        inner := getattr(module, "base_layer", None), nn.Module
    ):
        wrappers.append(module)
        module = inner
    return module, wrappers
