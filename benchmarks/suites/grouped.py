"""The suite "grouped": GroupedLinear and GroupedMLP by themselves, on this rank's rows and experts. Local.

GroupedLinear is the first layer of the experts, H to 2I; GroupedMLP is both, with SwiGLU times the router's prob. Rows
lie in the order of the experts. Splits are on the device unless a variant's name says host. Scattered weights are
discrete ones of which each has an allocation of its own.
"""

from __future__ import annotations

import functools
import importlib
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from suites.figures import of_step
from suites.gemm import groups_error, spans_of
from suites.layer import E4M3_ERROR
from suites.problem import DTYPE, MAX_ERROR, LocalRows, Problem
from suites.records import Record, tflops
from suites.reference import expert_outputs
from suites.steps import Step
from suites.stock_torch import grouped_mm, torch_experts
from suites.timing import Run, Variant, in_steps, measure, median_ms, timed_records
from symmoe.grouped.linear import GroupedLinear
from symmoe.grouped.mlp import GroupedMLP
from symmoe.grouped.rows_function import Splits
from symmoe.precision import NVFP4, PRECISIONS
from symmoe.precision.recipes import Recipe, precision_problem
from symmoe.tools.shapes import Shape

# Two layers of E2M1 numbers and their gradients, rounded stochastically, are off by 0.3.
_E2M1_ERROR = 0.5
_E4M3_MAX = 448.0
_DISPATCHED_COPIES = tuple(
    getattr(torch.ops.aten, name) for name in ("copy_", "clone", "cat", "stack")
)
_NOTE_WIDTH = 120  # characters of a note about what is skipped
_WORKING = str(DTYPE).removeprefix("torch.").replace("bfloat", "bf")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One way to run a module of ours.

    Attributes:
        recipe: its precision.
        scattered: weights with an allocation each, instead of one packed tensor.
        host_splits: splits that are a list.
    """

    recipe: Recipe | None = None
    scattered: bool = False
    host_splits: bool = False

    @property
    def max_error(self) -> float:
        """Largest relative error of its results."""
        if self.recipe is None:
            return MAX_ERROR
        return _E2M1_ERROR if isinstance(self.recipe, NVFP4) else E4M3_ERROR

    @property
    def about(self) -> Record:
        """What its records say about it."""
        return {
            "precision": _WORKING if self.recipe is None else str(self.recipe),
            "weights": "scattered" if self.scattered else "packed",
            "splits": "host" if self.host_splits else "device",
        }


CHOICES = {f"{_WORKING}, host splits": Choice(host_splits=True)} | {
    f"{name}{', scattered' * scattered}": Choice(recipe=recipe, scattered=scattered)
    for name, recipe in {_WORKING: None, **PRECISIONS}.items()
    for scattered in (False, True)
}


@dataclass(frozen=True)
class Layer:
    """A kind of module and what it computes with. N rows, O output features, G groups.

    Attributes:
        name: the class.
        make: a module of ours on the meta device, from (weights, precision).
        inputs: the rows [N, H], and the scale [N] if it takes one; they require gradients.
        weights: [G, O, C] of each linear layer; they require gradients.
        d_out: gradient of the result.
        splits, spans: int64 [G] on the host, and the rows of each group.
        expected: the result of one group's inputs and weights, in their dtype.
        stock: the same by torch._grouped_mm.
        flops: of a forward pass, of the mean rank; a backward pass has twice as many.
    """

    name: str
    make: Callable[..., nn.Module]
    inputs: tuple[torch.Tensor, ...]
    weights: tuple[torch.Tensor, ...]
    d_out: torch.Tensor
    splits: torch.Tensor
    spans: list[slice]
    expected: Callable[..., torch.Tensor]
    stock: Callable[[], torch.Tensor]
    flops: int

    @functools.cached_property
    def scattered(self) -> list[list[torch.Tensor]]:
        """The weights, each matrix in an allocation of its own."""
        return [[matrix.detach().clone() for matrix in weight] for weight in self.weights]

    @functools.cached_property
    def reference(self) -> Callable[[int], list[torch.Tensor]]:
        """Group g's result and the gradients of its inputs and weights, in fp32, remembered."""

        def of_group(g: int) -> list[torch.Tensor]:
            parts = [tensor[self.spans[g]] for tensor in self.inputs] + [
                weight[g] for weight in self.weights
            ]
            leaves = [part.detach().float().requires_grad_() for part in parts]
            y = self.expected(*leaves)
            return [y.detach(), *torch.autograd.grad(y, leaves, self.d_out[self.spans[g]].float())]

        return functools.cache(of_group)

    def variant(
        self,
        name: str,
        forward: Callable[[], torch.Tensor],
        weights: Sequence[Sequence[torch.Tensor]],
        max_error: float = MAX_ERROR,
    ) -> Variant:
        """`forward` and its backward pass; weights: of each linear layer the packed tensor, or G matrices."""

        def error(y: torch.Tensor, *gradients: torch.Tensor) -> float:
            remaining = iter(gradients)
            outputs = [y, *(next(remaining) for _ in self.inputs)]
            for of_layer in weights:
                d_weights = [next(remaining) for _ in of_layer]
                outputs.append(d_weights[0] if d_weights[0].ndim == 3 else torch.stack(d_weights))
            return groups_error(self.reference, outputs, self.spans)

        leaves = [*self.inputs, *(weight for of_layer in weights for weight in of_layer)]
        return Step(name, forward, leaves, self.d_out, error, max_error).eager()

    def ours(self, name: str, choice: Choice) -> tuple[Variant, list[torch.Tensor]]:
        """A module of ours as a variant, and its weights."""
        module = self.make(
            weights="discrete" if choice.scattered else "packed",
            precision=choice.recipe,
            dtype=DTYPE,
            device="meta",
        )
        linears = [part for part in module.modules() if isinstance(part, GroupedLinear)]
        matrices = (
            self.scattered if choice.scattered else [[weight.detach()] for weight in self.weights]
        )
        for linear, of_layer in zip(linears, matrices, strict=True):
            for g, matrix in enumerate(of_layer):
                setattr(
                    linear, f"weight{g}" if choice.scattered else "weight", nn.Parameter(matrix)
                )
        rows, *scale = self.inputs
        splits: Splits = self.splits.tolist() if choice.host_splits else self.splits.to(rows.device)
        weights = [linear.weight_parameters() for linear in linears]
        variant = self.variant(
            name, lambda: module(rows, splits, *scale), weights, choice.max_error
        )
        return variant, [weight for of_layer in weights for weight in of_layer]


def bench_grouped(problem: Problem, run: Run) -> list[Record]:
    """Both modules in all precisions, with torch's grouped products and Transformer Engine to compare with."""
    return [record for layer in _layers(problem) for record in _bench(layer, problem, run)]


def _bench(layer: Layer, problem: Problem, run: Run) -> list[Record]:
    symmoe_variants, skipped = _symmoe_variants(layer, problem.case.shape)
    yardsticks, unusable = _yardsticks(layer)
    variants = symmoe_variants | {name: (variant, {}) for name, variant in yardsticks.items()}
    times, errors = measure(run, [variant for variant, _ in variants.values()])
    stock = times.get(_stock_name(layer))
    about_of = {
        name: about | of_step(variant.once, problem, run.ranks)
        for name, (variant, about) in variants.items()
    }

    def figures(name: str, column: int) -> Record:
        flops = (1 + column) * layer.flops
        figures: Record = {
            "tflops": tflops(flops, times[name][:, column]),
            "error": errors[name],
            "skipped": skipped | unusable,
            **about_of[name],
        }
        if name not in symmoe_variants or stock is None:
            return figures
        return figures | {
            "stock_tflops": tflops(flops, stock[:, column]),
            "stock_ms": median_ms(stock[:, column]),
            "yardstick": "stock_tflops",
        }

    return timed_records(problem, "grouped", times, figures)


def _symmoe_variants(
    layer: Layer, shape: Shape
) -> tuple[dict[str, tuple[Variant, Record]], dict[str, str]]:
    """Variants by name, with what their records say about them; and why others cannot have these sizes."""
    variants = dict[str, tuple[Variant, Record]]()
    skipped = dict[str, str]()
    for key, choice in CHOICES.items():
        name = f"{layer.name}, {key}"
        unfit = precision_problem(choice.recipe, hidden=shape.hidden, ffn=shape.ffn)
        if unfit is not None:
            skipped[name] = str(unfit)
            continue
        variant, weights = layer.ours(name, choice)
        with CopiesOf(weights) as copies:
            variant.once()
        variants[name] = variant, choice.about | {"weight_copy_bytes": copies.num_bytes}
    return variants, skipped


def _yardsticks(layer: Layer) -> tuple[dict[str, Variant], dict[str, str]]:
    """Yardsticks by name, and why this machine cannot run others."""
    usable = dict[str, Variant]()
    skipped = dict[str, str]()
    of_linear = _LINEAR_YARDSTICKS if len(layer.weights) == 1 else {}
    for name, make in ({_stock_name(layer): stock_variant} | of_linear).items():
        try:
            variant = make(name, layer)
            variant.once()
            usable[name] = variant
        except (ImportError, RuntimeError) as error:
            skipped[name] = textwrap.shorten(str(error), _NOTE_WIDTH)
    return usable, skipped


def _stock_name(layer: Layer) -> str:
    return f"torch._grouped_mm, {layer.name.removeprefix('Grouped')}"


def stock_variant(name: str, layer: Layer) -> Variant:
    """The same by torch._grouped_mm."""
    return layer.variant(name, layer.stock, [[weight] for weight in layer.weights])


def _layers(problem: Problem) -> Iterator[Layer]:
    """Both, on the same rows."""
    shape = problem.case.shape
    local = LocalRows.of(problem)
    _, _, w1, w2 = problem.inputs
    rows = local.in_order(local.packed).requires_grad_()
    scale = local.row_probs.clone().requires_grad_()
    generator = torch.Generator(problem.device).manual_seed(problem.rank)
    splits = {
        "splits": problem.routing.splits[problem.rank],
        "spans": spans_of(local.row_range),
    }
    yield Layer(
        name="GroupedLinear",
        make=functools.partial(GroupedLinear, len(w1), shape.hidden, w1.shape[1], bias=False),
        inputs=(rows,),
        weights=(w1,),
        d_out=rows.new_empty(len(rows), w1.shape[1]).normal_(generator=generator),
        expected=lambda x, w: x @ w.t(),
        stock=lambda: grouped_mm(rows, w1.transpose(1, 2), local.row_range[1]),
        flops=2 * problem.case.num_slots * shape.hidden * w1.shape[1],
        **splits,
    )
    yield Layer(
        name="GroupedMLP",
        make=functools.partial(GroupedMLP, len(w1), shape.hidden, shape.ffn),
        inputs=(rows, scale),
        weights=(w1, w2),
        d_out=local.in_order(local.d_packed),
        expected=expert_outputs,
        stock=lambda: torch_experts(w1, w2)(rows, scale, local.row_range[1]),
        flops=problem.case.forward_flops,
        **splits,
    )


def _scaled_grouped_mm(name: str, layer: Layer) -> Variant:
    """torch._scaled_grouped_mm forward, of operands that have been quantised before: E4M3 with an fp32 scale per row of
    either operand, which no recipe of ours has."""
    (rows,), (weight,) = layer.inputs, layer.weights
    (x, x_scale), (w, w_scale) = _by_rows(rows), _by_rows(weight)
    ends = layer.splits.cumsum(0).int().to(rows.device)

    def forward() -> torch.Tensor:
        return torch._scaled_grouped_mm(
            x, w.mT, x_scale, w_scale, offs=ends, out_dtype=DTYPE, use_fast_accum=True
        )

    def verify() -> float:
        return groups_error(lambda g: layer.reference(g)[:1], [forward()], layer.spans)

    return Variant(name, ("forward",), in_steps(forward), verify, E4M3_ERROR)


@torch.no_grad()
def _by_rows(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 numbers and their fp32 scales, one for the last dimension."""
    scale = tensor.abs().amax(-1).float().clamp(min=1e-12) / _E4M3_MAX
    return (tensor / scale[..., None]).to(torch.float8_e4m3fn), scale


def _transformer_engine(name: str, layer: Layer) -> Variant:
    """Transformer Engine's GroupedLinear in bf16, whose splits are on the host and whose weights are G parameters."""
    module_of = importlib.import_module("transformer_engine.pytorch").GroupedLinear
    (rows,), (weight,), splits = layer.inputs, layer.weights, layer.splits.tolist()
    num_groups, out_features, in_features = weight.shape
    module = module_of(
        num_groups, in_features, out_features, bias=False, params_dtype=DTYPE, device=weight.device
    )
    matrices = [getattr(module, f"weight{g}") for g in range(num_groups)]
    with torch.no_grad():
        for parameter, matrix in zip(matrices, weight, strict=True):
            parameter.copy_(matrix)
    return layer.variant(name, lambda: module(rows, splits), [matrices])


_LINEAR_YARDSTICKS = {
    "torch._scaled_grouped_mm, row-wise FP8": _scaled_grouped_mm,
    "Transformer Engine GroupedLinear": _transformer_engine,
}


class CopiesOf(TorchDispatchMode):
    """Adds up the bytes of these tensors' memory that torch's operators copy in a block, on any device. It is passed on
    to the threads in which autograd runs backward.

    Counts copy_, clone, cat and stack; no casts, and not what kernels of this package or of others copy.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        self.num_bytes = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func.overloadpacket in _DISPATCHED_COPIES:
            self.num_bytes += sum(
                leaf.nbytes
                for leaf in tree_leaves((args, kwargs))
                if isinstance(leaf, torch.Tensor)
                and leaf.untyped_storage().data_ptr() in self._storages
            )
        return func(*args, **(kwargs or {}))
