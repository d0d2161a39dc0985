"""GroupedLinear: y_g = x_g W_g^T + b_g for every group g of rows, with results in buffers of the caller.

G groups (experts of this rank), C input features, O output features, N rows sorted by group; rows past sum(splits) are
a tail, which is never read. The tail does not change in a buffer of the caller, and is zero in memory allocated here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from symmoe import kernels
from symmoe.checks.arguments import modules_of
from symmoe.grouped.parameters import GroupedParameters
from symmoe.grouped.rows_function import (
    ExpertRows,
    Gradients,
    MaybeTensor,
    Needs,
    RowArguments,
    RowGradients,
    Splits,
    run_rows,
)
from symmoe.grouped.weights import LayerWeights, WeightProduct, kernel_matrices
from symmoe.kernels import flops  # noqa: F401 - registers formulas, before a FLOP counter is made
from symmoe.kernels.operands import Operand, Rows, require_tensor
from symmoe.precision.operands import CachedWeight, gradient_columns, gradient_rows, weight_operands
from symmoe.precision.recipes import Recipe
from symmoe.torch_internals import replaceable


class GroupedLinear(GroupedParameters):
    """One linear layer for each group of rows.

    Args:
        num_groups: G.
        in_features, out_features: C, O. On GPUs both must be multiples of 8.
        bias: whether there is a bias [G, O].
        return_bias: forward returns (y, bias) and does not add the bias.
        weights: "packed": one parameter `weight` [G, O, C], with views `weight0` .. of its groups. "discrete": G
            parameters `weight0` .. [O, C]. They start adjacent in one storage, and while they stay adjacent, also after
            `.to()`, the kernels treat them as a packed weight. A trainer may move them: on GPUs the kernels then use
            their addresses, which is slower. State dicts of either form load into either.
        accumulate_into_main_grad: the wgrad kernel adds to the fp32 `main_grad` of each weight instead of making
            `.grad` (see symmoe.grouped.weights).
        delay_wgrad: backward leaves the weight gradients to :meth:`backward_dw`.
        precision: the number format of the three products (docs/precision.md); None: the working dtype. Parameters,
            their gradients and state dicts do not depend on it. C and O must be multiples of its `feature_multiple`.
        init_method: fills one group's [O, C] in place; None: uniform with the bound of nn.Linear.

    `holds_experts = True` marks the parameters as not data-parallel, e.g. for reduce_gradients.

    Raises:
        ArgumentError: a size is no int or out of range, the dtype is not fp32, fp16 or bf16, or the device does not
            support the precision.
    """

    num_extra_inputs = 1  # Sequential passes the splits

    @replaceable
    def forward(
        self,
        x: torch.Tensor,
        splits: Splits,
        *,
        out: torch.Tensor | None = None,
        grad_input_out: torch.Tensor | None = None,
        bias_scale: torch.Tensor | None = None,
        is_first_microbatch: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]:
        """Applies group g's weight to the g-th run of rows. Not collective; device splits do not synchronise the host.

        Args:
            x: [..., C] in the dtype of the weights (or any, under autocast); the leading dimensions, flattened, are
                the rows.
            splits: integers [G] on the device of x: rows of each group. Outside CUDA-graph capture, a list, a NumPy
                array or a CPU tensor is checked and copied. Device values are not checked: kernels stay inside the
                rows.
            out: [..., O] buffer for the result, e.g. of a heap lease.
            grad_input_out: [..., C] buffer for the gradient of x. Autograd passes it on uncopied to a single producer
                of x, and copies it for a leaf or a second consumer.
            bias_scale: [...], a factor on the bias of each row; differentiable.
            is_first_microbatch: the weight gradient overwrites `main_grad`.

        Returns:
            [..., O], in the memory of `out` if given; with `return_bias` also the bias [G, O] or None.

        Raises:
            ArgumentError, StaleLease: an argument is wrong; no kernel has run.
        """
        arguments = RowArguments(splits, bias_scale, out, grad_input_out, (is_first_microbatch,))
        x, biases, tensors = arguments.check("x", x, (self,))
        products = LinearProducts((self,), trains_rows=torch.is_grad_enabled() and x.requires_grad)
        added_biases = (None,) if self.return_bias else tuple(biases)
        y = run_rows(products, arguments, x, added_biases, tensors)
        return (y, biases[0]) if self.return_bias else y

    @torch.no_grad()
    def backward_dw(self) -> None:
        """Computes the weight gradients that delay_wgrad postponed in the oldest backward pass, if any, and adds them
        to `.grad` or `main_grad`, as autograd would. Not collective, no host synchronisation. StaleRows: the layer's
        input or the gradient of its output has been overwritten since."""
        if not self._delayed:
            return
        self._delayed.popleft()()
        for hook in self._after_backward_dw:
            hook()

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], object]) -> None:
        """`hook()` runs after each backward_dw that computed a gradient (Megatron's protocol)."""
        self._after_backward_dw.append(hook)

    def extra_repr(self) -> str:
        precision = "" if self.precision is None else f", precision={self.precision}"
        return (
            f"num_groups={self.num_groups}, in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.has_bias}, weights={'packed' if self.is_packed else 'discrete'}{precision}"
        )


@dataclass(frozen=True, slots=True)
class LinearProducts:
    """The computation of a layer in a call, without autograd: y = W x + bias * scale, += B (A x) with adapters."""

    layers: tuple[GroupedParameters]
    trains_rows: bool  # whether backward needs the gradient of the rows
    scale_bias: bool = True  # whether the scale multiplies the bias

    @property
    def key(self) -> Hashable:
        """The values other than tensors and weights that determine the launches."""
        return self.layers[0].precision, self.trains_rows

    def weights(self, tensors: Sequence[Any], *, is_forward: bool) -> LayerWeights:
        """The weights of a pass, from a bias or None, the weights, and the adapters."""
        (layer,), (bias, *matrices) = self.layers, tensors
        end = len(layer.weight_names)
        (weight,) = kernel_matrices({"weight": matrices[:end]})
        weights = LayerWeights(weight, bias, *matrices[end:])
        if is_forward and layer.cached_weight is not None and layer.precision is not None:
            return weights.with_cached(layer.cached_weight, layer.precision, self.trains_rows)
        return weights

    def forward(
        self, weights: LayerWeights, rows: ExpertRows, out: torch.Tensor, *, zero_tail: bool
    ) -> Gradients:
        """Fills out [N, O], and returns backward's tensors besides the inputs: A x, and if rows are trained the
        transposed weight in the recipe's numbers."""
        recipe = self.layers[0].precision
        transposed = None
        ops = kernels.for_device(out.device)
        bias = (weights.bias, rows.bias_scale)
        if recipe is None:
            ops.grouped_gemm(
                rows.rows, weights.weight, rows.row_range, out, bias=bias, zero_tail=zero_tail
            )
        else:
            lhs = recipe.quantize(rows.rows, rows.row_range).operand()
            rhs, transposed = weights.cached or weight_operands(
                recipe, weights.weight, transposed=self.trains_rows
            )
            ops.grouped_gemm_quantized(
                lhs, rhs, rows.row_range, out, bias=bias, zero_tail=zero_tail
            )
        t = None
        if weights.a is not None:
            t = rows.rows.new_empty((len(rows.rows), weights.a.shape[1]))
            ops.grouped_gemm(rows.rows, weights.a, rows.row_range, t)
            ops.grouped_gemm(t, weights.b, rows.row_range, out, accumulate=True)
        return t, *(transposed or (None, None, None))

    def backward(
        self,
        weights: LayerWeights,
        rows: ExpertRows,
        saved: Sequence[Any],
        d_out: torch.Tensor,
        needs: Needs,
        d_rows: MaybeTensor,
        *,
        zero_tail: bool,
    ) -> RowGradients:
        """The gradients from d_out [N, O]; saved: result of forward. d_rows [N, C] gets the rows' gradient, with zeros
        past the last group if `zero_tail`. With a recipe the pass that quantises d_out for it also makes the bias
        gradient, by the same formula."""
        recipe = self.layers[0].precision
        ops = kernels.for_device(d_out.device)
        row_range = rows.row_range
        (_, needs_scale, needs_bias), (t, *transposed) = needs, saved
        bias: Any = weights.bias  # not None if it or its scale needs a gradient
        d_bias = torch.empty_like(bias) if needs_bias else None
        d_scale = None
        d_t = None if t is None else torch.empty_like(t)
        if d_t is not None:
            ops.grouped_gemm_dgrad(d_out, weights.b, row_range, d_t)
        if d_bias is not None and (recipe is None or d_rows is None):
            ops.grouped_bias_grad(d_out, row_range, d_bias, scale=rows.bias_scale)
        if needs_scale:
            d_scale = torch.zeros_like(require_tensor("bias_scale", rows.bias_scale))
            ops.grouped_bias_dot(d_out, bias, row_range, d_scale)
        if d_rows is not None and recipe is None:
            ops.grouped_gemm_dgrad(d_out, weights.weight, row_range, d_rows, zero_tail=zero_tail)
        elif d_rows is not None and recipe is not None:
            sums = {"dbias": d_bias, "bias_scale": rows.bias_scale}
            operands = gradient_rows(recipe, d_out, row_range, **sums), Operand(*transposed)
            ops.grouped_gemm_quantized(*operands, row_range, d_rows, zero_tail=zero_tail)
        if d_rows is not None and d_t is not None:
            ops.grouped_gemm_dgrad(d_t, weights.a, row_range, d_rows, accumulate=True)

        def adapter_gradients() -> Gradients:
            if d_t is None:
                return ()
            gradients = [torch.empty_like(m) if m.requires_grad else None for m in weights[2:4]]
            write_gradients((rows.rows, t, d_out, d_t), row_range, gradients)
            return tuple(gradients)

        product = partial(_weight_product, recipe, rows, d_out)
        return RowGradients(d_scale, (d_bias,), (product,), adapter_gradients)


def _weight_product(recipe: Recipe | None, rows: ExpertRows, d_out: torch.Tensor) -> WeightProduct:
    """The product d_out_g^T x_g."""
    x = rows.rows
    row_range = rows.row_range
    if recipe is None:
        return WeightProduct(d_out, x, row_range, {"x": x, "d_y": d_out})
    return WeightProduct(
        gradient_columns(recipe, d_out, row_range),
        recipe.quantize_columns(x, row_range).operand(),
        row_range,
    )


@contextmanager
def cache_quantized_weights(module: nn.Module) -> Iterator[None]:
    """A block in which no weight of a GroupedLinear in `module` (also inside GroupedMLP and MoELayer) changes: each
    weight with a `precision` is quantised once for all calls in the block, e.g. of the micro-batches before an
    optimizer's step. Cached tensors and CUDA graphs: docs/tuning.md. If the first forward pass was without gradients,
    the first one with gradients quantises again. Results have the same bits as without the block; backward passes may
    run after it. Blocks may be nested; the outer one counts. Inside torch.compile, and under a TorchDispatchMode, the
    block has no effect.

    Not collective, but all ranks of an expert-parallel group must use it alike. Does not synchronise the host.

    Raises:
        ArgumentError: on entering: `module` has no GroupedLinear. In the block, by a forward pass, before it computes:
            since the first pass a weight was written to, e.g. by an optimizer's step, or replaced, e.g. by loading with
            `assign=True`, or only one of the two passes is captured in a CUDA graph. A write that bypasses autograd
            (`weight.data.copy_`) is not detected: results then use the old weight.
    """
    needs = "GroupedLinear whose weights could be constant"
    linears = [
        linear
        for linear in modules_of(module, GroupedLinear, name="module", needs=needs)
        if linear.precision is not None and linear.cached_weight is None
    ]
    with ExitStack() as caches:
        for linear in linears:
            weight = CachedWeight(
                [linear.weight] if linear.is_packed else linear.weight_parameters()
            )
            linear.cached_weight = caches.enter_context(closing(weight))
            caches.callback(setattr, linear, "cached_weight", None)
        yield


# -- adapters ----------------------------------------------------------------------------------------------------------
#
# y += B[g] (A[g] x), as grouped GEMMs of rank r: A [G, r, C], and B [G, O, r] times the adapters' scaling; r is a
# multiple of RANK_MULTIPLE on GPUs. Neither B A nor a gradient of its size is made. Forward: t = x A^T, y += t B^T;
# backward: dt = dy B, dx += dt A, dA = dt^T x, dB = dy^T t. A sum is added in place to the result of the frozen
# weight's GEMM, e.g. in the heap; it is computed in fp32, and rounded again.


def write_gradients(
    operands: tuple[Rows, torch.Tensor, Rows, torch.Tensor],
    row_range: torch.Tensor,
    gradients: Sequence[torch.Tensor | None],
) -> None:
    """dA = dt^T rows and dB = dy^T t of operands (rows, t, dy, dt), each if it has a tensor; a group without rows gets
    zeros."""
    (rows, t, dy, dt), (d_a, d_b) = operands, gradients
    ops = kernels.for_device(t.device)
    if d_a is not None:
        ops.grouped_gemm_wgrad(dt, rows, row_range, d_a)
    if d_b is not None:
        ops.grouped_gemm_wgrad(dy, t, row_range, d_b)
