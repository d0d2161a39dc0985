"""GroupedLinear: y_g = x_g W_g^T + b_g for every group g of rows, with results in buffers of the caller.

G groups (experts of this rank), C input features, O output features, N rows sorted by group; rows past sum(splits) are
a tail that is never read: it stays as it is in a buffer of the caller, and is zero in what is allocated here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from symmoe import kernels
from symmoe.autograd import Unmodified
from symmoe.checks.arguments import modules_of, working_dtype
from symmoe.grouped.parameters import GroupedParameters, local_tensors
from symmoe.grouped.rows_function import Gradients, Needs, RowArguments, RowInputs, Splits, run_rows
from symmoe.grouped.weights import Compute, kernel_matrices
from symmoe.kernels import flops  # noqa: F401 - a counter of FLOPs knows only the formulas that are there when it is made
from symmoe.kernels.contract.operands import Matrices, Rows
from symmoe.kernels.gemm_parts import Part
from symmoe.kernels.operands import Operand, address_or_self, given, given_of
from symmoe.kernels.tensor_table import TensorTable
from symmoe.precision.operands import (
    Directions,
    HeldWeight,
    gradient_columns,
    gradient_rows,
    weight_operands,
)
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
            parameters `weight0` .. [O, C]. They are made one after the other in one storage, and as long as they lie
            so, also after `.to()`, the kernels take them for a packed weight. A trainer may put them anywhere: on GPUs
            the kernels then find them by their addresses, which is slower. State dicts of either form load into either.
        accumulate_into_main_grad: the wgrad kernel adds to the fp32 `main_grad` of each weight instead of making
            `.grad` (see symmoe.grouped.weights).
        delay_wgrad: backward leaves the weight gradients to :meth:`backward_dw`.
        precision: which numbers the three products multiply (docs/precision.md); None: those of the working dtype.
            Parameters, their gradients and state dicts are the same with all of them. C and O must be multiples of
            its `feature_multiple`.
        init_method: fills one group's [O, C] in place; None: uniform with the bound of nn.Linear.

    `holds_experts = True` tells reduce_gradients and others that the parameters are not data-parallel.

    Raises:
        ArgumentError: a size is no int or out of range, the dtype is none of fp32, fp16 and bf16, or the device cannot
            compute with the precision.
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
            splits: integers [G] on the device of x: rows of each group. A list, a NumPy array or a CPU tensor is
                checked and copied, outside of CUDA-graph capture. Device values are not checked: kernels stay inside
                the rows.
            out: [..., O] buffer for the result, e.g. of a heap lease.
            grad_input_out: [..., C] buffer for the gradient of x. Autograd hands it on as it is to a single producer
                of x, and copies it for a leaf or a second consumer.
            bias_scale: [...], a factor on the bias of each row; differentiable.
            is_first_microbatch: the weight gradient overwrites `main_grad`.

        Returns:
            [..., O], in the memory of `out` if given; with `return_bias` also the bias [G, O] or None.

        Raises:
            ArgumentError, StaleLease: an argument is wrong; nothing has been computed.
        """
        arguments = RowArguments(splits, bias_scale, out, grad_input_out, (is_first_microbatch,))
        arguments.check("x", x, (self,))
        x, is_autocast = x.to(working_dtype(x)), torch.is_autocast_enabled(x.device.type)
        biases, tensors = local_tensors((self,), x.dtype, cast_biases=is_autocast)
        products = LinearProducts((self,), trains_rows=torch.is_grad_enabled() and x.requires_grad)
        added = (None,) if self.return_bias else tuple(biases)
        y = run_rows(products, arguments, x, added, tensors)
        return (y, biases[0]) if self.return_bias else y

    @torch.no_grad()
    def backward_dw(self) -> None:
        """Computes the weight gradients that delay_wgrad has left out of the oldest backward pass, if there are any,
        and adds them to `.grad` or `main_grad`, as autograd would. Not collective, no host synchronisation. StaleRows:
        the layer's input or the gradient of its output has been overwritten since."""
        if not self._delayed:
            return
        self._delayed.popleft()()
        for hook in self._after_backward_dw:
            hook()

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], object]) -> None:
        """`hook()` runs after each backward_dw that computed something (Megatron's protocol)."""
        self._after_backward_dw.append(hook)

    def extra_repr(self) -> str:
        precision = "" if self.precision is None else f", precision={self.precision}"
        return (
            f"num_groups={self.num_groups}, in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.has_bias}, weights={'packed' if self.is_packed else 'discrete'}{precision}"
        )


@dataclass(frozen=True, slots=True)
class LinearWeights:
    """The weights of a layer as kernels take them."""

    matrices: Matrices  # [G, O, C]
    low: LowRank | None  # the adapters
    held: Directions | None  # the operands that several calls share; None: a call makes its own

    @property
    def operands(self) -> list[torch.Tensor]:
        """All tensors that kernels read of them."""
        adapters = [] if self.low is None else [self.low.a, self.low.b]
        held = [tensor for operand in self.held or () for tensor in operand or ()]
        return [address_or_self(self.matrices), *adapters, *given_of(*held)]

    @property
    def key(self) -> Hashable:
        """On what it depends what is launched, besides operands."""
        return isinstance(self.matrices, TensorTable), self.low is None, self.held is None


@dataclass(frozen=True, slots=True)
class LinearProducts:
    """What a layer computes in a call, without autograd: y = W x + bias * scale, += B (A x) with adapters."""

    layers: tuple[GroupedParameters]
    trains_rows: bool  # whether backward will ask for the gradient of the rows

    @property
    def key(self) -> Hashable:
        """On what it depends what is launched, besides tensors and weights."""
        return self.layers[0].precision, self.trains_rows

    def weights(self, rows: RowInputs, *, is_forward: bool) -> LinearWeights:
        """Those of a pass."""
        (layer,) = self.layers
        num_weights = len(layer.weight_names)
        (matrices,) = kernel_matrices({"weight": rows.tensors[:num_weights]})
        adapters, held = rows.tensors[num_weights:], None
        if layer.precision is not None and layer.held_weight is not None and is_forward:
            held = layer.held_weight.operands(
                layer.precision, matrices, transposed=self.trains_rows
            )
        return LinearWeights(matrices, LowRank(*adapters) if adapters else None, held)

    def forward(
        self, weights: LinearWeights, rows: RowInputs, out: torch.Tensor, *, zero_tail: bool
    ) -> Gradients:
        """Fills out [N, O], and returns what backward needs besides the inputs: A x, and the transposed weight in the
        recipe's numbers if rows are trained."""
        recipe, low, transposed = self.layers[0].precision, weights.low, None
        ops, bias = kernels.for_device(out.device), (rows.biases[0], rows.scale)
        if recipe is None:
            ops.grouped_gemm(
                rows.x, weights.matrices, rows.row_range, out, bias=bias, zero_tail=zero_tail
            )
        else:
            left = recipe.quantize(rows.x, rows.row_range).operand()
            right, transposed = weights.held or weight_operands(
                recipe, weights.matrices, transposed=self.trains_rows
            )
            ops.grouped_gemm_quantized(
                left, right, rows.row_range, out, bias=bias, zero_tail=zero_tail
            )
        t = None
        if low is not None:
            low.down(rows.x, Part(rows.row_range), t := low.new_rows(len(rows.x)))
            low.add_up(t, Part(rows.row_range), out)
        return t, *(transposed or (None, None, None))

    def backward(
        self,
        weights: LinearWeights,
        rows: RowInputs,
        kept: Gradients,
        d_out: torch.Tensor,
        needs: Needs,
    ) -> LinearGradients:
        """The gradients of d_out [N, O]; kept: what forward has returned. input_gradient comes first, if wanted."""
        return LinearGradients(self.layers[0].precision, weights, rows, kept, d_out, needs)


class LinearGradients:
    """Backward of LinearProducts. With a recipe the bias has its gradient after input_gradient, if rows get one."""

    def __init__(
        self,
        recipe: Recipe | None,
        weights: LinearWeights,
        rows: RowInputs,
        kept: Gradients,
        d_out: torch.Tensor,
        needs: Needs,
    ) -> None:
        (needs_x, needs_scale, needs_bias, *_), (bias,) = needs, rows.biases
        self._recipe, self._rows, self._d_out, self._kept = recipe, rows, d_out, kept
        self._weights, self._low = weights.matrices, weights.low
        self._ops = ops = kernels.for_device(d_out.device)
        self._d_bias = torch.empty_like(bias) if bias is not None and needs_bias else None
        self.d_biases: Gradients = (self._d_bias,)  # [G, O], or None
        self.d_scale: torch.Tensor | None = None
        if self._low is not None:
            self._low.down_gradient(
                d_out, Part(rows.row_range), d_t := self._low.new_rows(len(d_out))
            )
            self._d_t = d_t
        if self._d_bias is not None and (self._recipe is None or not needs_x):
            ops.grouped_bias_grad(d_out, rows.row_range, self._d_bias, scale=rows.scale)
        if needs_scale and bias is not None:
            self.d_scale = torch.zeros_like(given("bias_scale", rows.scale))
            ops.grouped_bias_dot(d_out, bias, rows.row_range, self.d_scale)

    def input_gradient(self, d_rows: torch.Tensor, *, zero_tail: bool) -> None:
        """Fills d_rows [N, C], and with a recipe the gradient of the bias by grouped_bias_grad's formula."""
        d_out, row_range = self._d_out, self._rows.row_range
        if self._recipe is None:
            self._ops.grouped_gemm_dgrad(
                d_out, self._weights, row_range, d_rows, zero_tail=zero_tail
            )
        else:
            lines = gradient_rows(
                self._recipe, d_out, row_range, dbias=self._d_bias, bias_scale=self._rows.scale
            )
            _, data, scale, global_scale = self._kept
            transposed = Operand(given("data", data), given("scale", scale), global_scale)
            self._ops.grouped_gemm_quantized(
                lines, transposed, row_range, d_rows, zero_tail=zero_tail
            )
        if self._low is not None:
            self._low.add_up_gradient(self._d_t, Part(row_range), d_rows)

    def weight_gradients(self) -> tuple[Compute, ...]:
        """Needs no weights, so a delayed gradient keeps none of them alive."""
        recipe, x, row_range, d_out = self._recipe, self._rows.x, self._rows.row_range, self._d_out
        inputs = Unmodified(x=x, d_y=d_out)

        def compute(out: torch.Tensor | TensorTable, accumulate: bool) -> None:  # d_out_g^T x_g
            inputs.check()
            ops = kernels.for_device(x.device)
            if recipe is None:
                ops.grouped_gemm_wgrad(d_out, x, row_range, out, accumulate=accumulate)
                return
            left, right = (
                gradient_columns(recipe, d_out, row_range),
                recipe.quantize_columns(x, row_range).operand(),
            )
            ops.grouped_gemm_wgrad_quantized(left, right, row_range, out, accumulate=accumulate)

        return (compute,)

    def adapter_gradients(self) -> Gradients:
        """dA and dB; none without adapters."""
        if self._low is None:
            return ()
        adapters, t = (self._low.a, self._low.b), given("t", self._kept[0])
        gradients = [
            torch.empty_like(adapter) if adapter.requires_grad else None for adapter in adapters
        ]
        write_gradients((self._rows.x, t, self._d_out, self._d_t), self._rows.row_range, gradients)
        return tuple(gradients)


@contextmanager
def constant_weights(module: nn.Module) -> Iterator[None]:
    """A block in which no weight of a GroupedLinear in `module` (also those of GroupedMLP and MoELayer) changes: each
    that has a `precision` is quantised once, for all calls in it, e.g. of the micro-batches before an optimizer's step.
    What is held, and CUDA graphs: docs/tuning.md. If the first forward pass was without gradients, the first one with
    gradients quantises again. Results have the same bits as without the block; backward passes may run after it. Blocks
    may be nested; the outer one counts. Inside torch.compile, and under a TorchDispatchMode, calls quantise as without
    the block.

    Not collective, but it must be the same on all ranks of an expert-parallel group, as the calls are. Does not
    synchronise the host.

    Raises:
        ArgumentError: in the block, by a forward pass, before anything is computed: a weight has been written to since
            the first one, e.g. by an optimizer's step, or another parameter has taken its place, e.g. by loading with
            `assign=True`, or only one of the two is captured in a CUDA graph. A write that autograd does not see
            (`weight.data.copy_`) is not found: then results are those of the old weight. On entering: `module` has no
            GroupedLinear.
    """
    linears = modules_of(
        module, GroupedLinear, name="module", needs="GroupedLinear whose weights could be constant"
    )
    entered = [
        linear for linear in linears if linear.precision is not None and linear.held_weight is None
    ]
    with ExitStack() as held:
        for linear in entered:
            weight = HeldWeight([linear.weight] if linear.is_packed else linear.weight_parameters())
            linear.held_weight = held.enter_context(closing(weight))
            held.callback(setattr, linear, "held_weight", None)
        yield


# -- adapters ----------------------------------------------------------------------------------------------------------
#
# y += B[g] (A[g] x), as grouped GEMMs of rank r. Neither B A nor a gradient of its size is ever made: forward is
# t = x A^T and y += t B^T, backward dt = dy B, dx += dt A, dA = dt^T x and dB = dy^T t. A sum is made where the frozen
# weight's GEMM has put its result, e.g. in the heap; it is computed in fp32, and rounded again.


@dataclass(frozen=True, slots=True)
class LowRank:
    """The adapters of one layer, and its GEMMs in both directions; row_range is int32 [2, G] (kernels/contract)."""

    a: torch.Tensor  # [G, r, C]; r is a multiple of RANK_MULTIPLE on GPUs
    b: torch.Tensor  # [G, O, r], times the adapters' scaling

    def new_rows(self, num_rows: int) -> torch.Tensor:
        """[num_rows, r], uninitialised: for t or dt."""
        return self.a.new_empty((num_rows, self.a.shape[1]))

    def down(self, rows: Rows, part: Part, t: torch.Tensor) -> None:
        """t [N, r] = rows A^T."""
        kernels.for_device(t.device).grouped_gemm(rows, self.a, part.rows, t, num_sms=part.num_sms)

    def add_up(self, t: torch.Tensor, part: Part, y: torch.Tensor) -> None:
        """y [N, O] += t B^T."""
        kernels.for_device(t.device).grouped_gemm(
            t, self.b, part.rows, y, accumulate=True, num_sms=part.num_sms
        )

    def down_gradient(self, dy: Rows, part: Part, dt: torch.Tensor) -> None:
        """dt [N, r] = dy B."""
        kernels.for_device(dt.device).grouped_gemm_dgrad(
            dy, self.b, part.rows, dt, num_sms=part.num_sms
        )

    def add_up_gradient(self, dt: torch.Tensor, part: Part, dx: torch.Tensor) -> None:
        """dx [N, C] += dt A."""
        ops = kernels.for_device(dt.device)
        ops.grouped_gemm_dgrad(dt, self.a, part.rows, dx, accumulate=True, num_sms=part.num_sms)


def write_gradients(
    operands: tuple[Rows, torch.Tensor, Rows, torch.Tensor],
    row_range: torch.Tensor,
    gradients: Sequence[torch.Tensor | None],
) -> None:
    """dA = dt^T rows and dB = dy^T t of operands (rows, t, dy, dt), each if there is a tensor for it; a group without
    rows has zeros."""
    (rows, t, dy, dt), (d_a, d_b) = operands, gradients
    ops = kernels.for_device(t.device)
    if d_a is not None:
        ops.grouped_gemm_wgrad(dt, rows, row_range, d_a)
    if d_b is not None:
        ops.grouped_gemm_wgrad(dy, t, row_range, d_b)
