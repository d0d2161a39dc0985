"""GroupedLinear: y_g = x_g W_g^T + b_g for every group g of rows, with results in buffers of the caller.

G groups (experts of this rank), C input features, O output features. Rows are sorted by group; rows past sum(splits)
are a tail that is never read: it stays as it is in a buffer of the caller, and is zero in what is allocated here.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from symmoe import kernels
from symmoe.autograd import Context, Function, GradientBuffer, Unmodified, wrote_into
from symmoe.checks.arguments import (
    RowsLike,
    check_gradient,
    gradient_rows,
    kernel_rows,
    parameter_dtype_problem,
    result_buffers_problem,
    rows_problem,
    scale_problem,
    shared_memory_problem,
    size_problem,
)
from symmoe.errors import ArgumentError, StaleLease, raise_for
from symmoe.grouped import products
from symmoe.grouped.low_rank import LowRank
from symmoe.grouped.splits import Splits, splits_problem, splits_to_row_range
from symmoe.grouped.weight_gradients import Compute, DelayedGradients, MainGrads, NewGradients, Target
from symmoe.grouped.weights import addresses, lay_side_by_side
from symmoe.kernels.architectures import e4m3_problem
from symmoe.kernels.tensor_table import TensorTable
from symmoe.precision.operands import HeldWeight
from symmoe.precision.recipes import Recipe, precision_problem

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_INDEXED = re.compile(r"(weight|bias)(\d+)")


class GroupedLinear(nn.Module):
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
            `.grad` (see symmoe.grouped.weight_gradients).
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
    holds_experts = True
    _is_fsdp_managed_module = False  # FSDP sets it

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        return_bias: bool = False,
        weights: Literal["packed", "discrete"] = "packed",
        accumulate_into_main_grad: bool = False,
        delay_wgrad: bool = False,
        precision: Recipe | None = None,
        init_method: Callable[[torch.Tensor], object] | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        raise_for(size_problem(num_groups=num_groups, in_features=in_features, out_features=out_features))
        dtype = torch.get_default_dtype() if dtype is None else dtype
        raise_for(parameter_dtype_problem(dtype))
        if weights not in ("packed", "discrete"):
            raise ArgumentError(f"weights ({weights!r}) must be 'packed' or 'discrete'")
        raise_for(precision_problem(precision, in_features=in_features, out_features=out_features))
        self.num_groups, self.in_features, self.out_features = num_groups, in_features, out_features
        self.return_bias, self.precision = return_bias, precision
        self.precision_name = str(precision)  # equal where precisions are, for torch.compile to compare
        self.accumulate_into_main_grad, self.delay_wgrad = accumulate_into_main_grad, delay_wgrad
        self.is_packed = weights == "packed"
        self.held_weight: HeldWeight | None = None  # symmoe.constant_weights sets it
        self._init_method = init_method
        self._delayed: deque[Callable[[], None]] = deque()
        self._after_backward_dw: list[Callable[[], object]] = []
        whole = torch.empty((num_groups, out_features, in_features), dtype=dtype, device=device)
        raise_for(e4m3_problem(precision, whole.device))
        if self.is_packed:
            self.weight = nn.Parameter(whole)
        else:
            for g, weight in enumerate(whole.unbind(0)):  # in one storage: see packed_view
                setattr(self, f"weight{g}", nn.Parameter(weight))
        self.bias = nn.Parameter(whole.new_empty((num_groups, out_features))) if bias else None
        self._weight_marks: dict[str, object] = {}
        if delay_wgrad:
            self.mark_weights(skip_backward_post_hook=True)  # Megatron's DDP: the gradient comes later
        self.reset_parameters()

    def __getattr__(self, name: str) -> torch.Tensor | nn.Module:
        match = _INDEXED.fullmatch(name)
        if match and match[1] in self.__dict__.get("_parameters", {}) and int(match[2]) < self.num_groups:
            packed = self._parameters[match[1]]
            if packed is not None:
                return packed[int(match[2])]
        return super().__getattr__(name)

    def weight_parameters(self) -> tuple[torch.Tensor, ...]:
        """The one packed weight, or the G discrete ones; for a DTensor this rank's part, differentiable."""
        return (local_part(self.weight),) if self.is_packed else self._discrete_weights()

    def mark_weights(self, **marks: object) -> None:
        """Sets attributes of every weight, for trainers to read. Parameters that replace the weights get them too."""
        self._weight_marks |= marks
        self._restate_marks()

    def held_problem(self) -> ArgumentError | None:
        """Why a forward pass cannot use the weights that symmoe.constant_weights holds, or None."""
        return None if self.held_weight is None else self.held_weight.problem()

    def adapters(self) -> tuple[torch.Tensor, ...]:
        """A [G, r, C] and B [G, O, r], differentiable, if a subclass adds B (A x) to W x; none here."""
        return ()

    def bias_parameter(self) -> torch.Tensor | None:
        """The bias, if there is one; for a DTensor this rank's part, differentiable."""
        bias = self.bias  # once: a parametrization evaluates it
        return None if bias is None else local_part(bias)

    @property
    def has_bias(self) -> bool:
        """Whether there is a bias. Evaluates none."""
        return not any("bias" in found and found["bias"] is None for found in (self._parameters, self.__dict__))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """With `init_method`, fills the weights by it and the biases with zeros; else both uniformly like nn.Linear."""
        bound, bias = 1 / math.sqrt(self.in_features), self.bias_parameter()
        if self._init_method is None:
            for weight in self.weight_parameters():
                weight.uniform_(-bound, bound)
            if bias is not None:
                bias.uniform_(-bound, bound)
            return
        for g in range(self.num_groups):
            self._init_method(getattr(self, f"weight{g}"))
        if bias is not None:
            bias.zero_()

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
        raise_for(rows_problem("x", x, self) or self.held_problem())
        raise_for(
            linear_problem(self, RowsLike.of(x), splits, out, grad_input_out, bias_scale)
            or shared_memory_problem(out, grad_input_out, itertools.chain((x, splits, bias_scale), self.parameters()))
        )
        x, weights, bias = self.operands(x)
        settings = _LinearSettings(
            linear=self, overwrite_main_grad=is_first_microbatch, trains_x=torch.is_grad_enabled() and x.requires_grad
        )
        row_range = splits_to_row_range(splits, device=x.device, num_rows=math.prod(x.shape[:-1]))
        buffers = (out, grad_input_out)
        added_bias = None if self.return_bias else bias
        scale = None if bias_scale is None else bias_scale.float()
        adapters = (adapter.to(x.dtype) for adapter in self.adapters())
        y: torch.Tensor = _GroupedLinear.apply(settings, buffers, row_range, x, added_bias, scale, *weights, *adapters)
        return (y, bias) if self.return_bias else y

    def operands(self, x: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], torch.Tensor | None]:
        """x, the weights and the bias in the dtype of the computation: their own, or that of autocast."""
        bias = self.bias_parameter()
        if not torch.is_autocast_enabled(x.device.type):
            return x, self.weight_parameters(), bias
        dtype = torch.get_autocast_dtype(x.device.type)
        bias = None if bias is None else bias.to(dtype)
        return x.to(dtype), tuple(weight.to(dtype) for weight in self.weight_parameters()), bias

    def weight_gradients(
        self, weights: tuple[torch.Tensor, ...], compute: Compute, *, overwrite_main_grad: bool
    ) -> Sequence[torch.Tensor | None]:
        """What the backward of an autograd function returns for `weights`; runs `compute` now or in backward_dw.

        Args:
            weights: as :meth:`operands` gave them.
            compute: launches the wgrad kernel; keeps what it reads alive.
            overwrite_main_grad: see forward.
        """
        target = self.gradient_target(weights, overwrite_main_grad=overwrite_main_grad)
        found = target.add(weights, compute)
        return found if target.option == "new" else target.placeholders(weights)

    def gradient_target(self, weights: tuple[torch.Tensor, ...], *, overwrite_main_grad: bool) -> Target:
        """Where the gradients of `weights` go, as the options are now.

        Raises:
            ArgumentError: an option wants parameters of this module, and the weights are made of others.
        """
        if not any(weight.requires_grad for weight in weights):
            return Target()
        if not (self.delay_wgrad or self.accumulate_into_main_grad):
            return NewGradients()
        names = ("weight",) if self.is_packed else weight_names(self.num_groups)
        parameters = tuple(self._parameters.get(name) for name in names)
        if any(parameter is None or hasattr(parameter, "device_mesh") for parameter in parameters):
            option = "delay_wgrad" if self.delay_wgrad else "accumulate_into_main_grad"
            raise ArgumentError(f"{option} (True) must be False: weights of a {type(self).__name__} are made of others")
        found = cast("tuple[nn.Parameter, ...]", parameters)
        if not self.delay_wgrad:
            return MainGrads(found, overwrite=overwrite_main_grad)
        overwrite = overwrite_main_grad if self.accumulate_into_main_grad else None
        return DelayedGradients(found, self._delayed, overwrite)

    def split(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """The first tensors, as many as the layer has weights, and the tensors after them."""
        num_weights = 1 if self.is_packed else self.num_groups
        return tuple(tensors[:num_weights]), tuple(tensors[num_weights:])

    @torch.no_grad()
    def backward_dw(self) -> None:
        """Computes the weight gradients that delay_wgrad has left out of the oldest backward pass.

        Adds them to `.grad` or `main_grad`, as autograd would. Does nothing if there are none. Not collective, no host
        synchronisation.

        Raises:
            StaleRows: the layer's input or the gradient of its output has been overwritten since.
        """
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

    def _discrete_weights(self) -> tuple[nn.Parameter, ...]:
        names = weight_names(self.num_groups)
        try:
            return cast("tuple[nn.Parameter, ...]", tuple(map(self._parameters.__getitem__, names)))
        except KeyError:  # parametrized
            return tuple(getattr(self, name) for name in names)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> GroupedLinear:
        before = None if self.is_packed else addresses(self._discrete_weights())
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # untyped in torch
        self._restate_marks()
        if self.is_packed:
            return self
        weights = self._discrete_weights()
        after = addresses(weights)
        # A parameter that has moved has new memory. One that has not may lie in a trainer's buffer, and stays there.
        if after is not None and (before is None or all(old != new for old, new in zip(before, after, strict=True))):
            lay_side_by_side(weights)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: object) -> None:
        for kind in ("weight", "bias"):
            indexed = [f"{prefix}{kind}{g}" for g in range(self.num_groups)]
            packed = f"{prefix}{kind}"
            if kind in self._parameters and all(key in state_dict for key in indexed):
                state_dict[packed] = torch.stack([state_dict.pop(key) for key in indexed])
            elif f"{kind}0" in self._parameters and packed in state_dict:
                whole = state_dict.pop(packed)
                if whole.shape[:1] == (self.num_groups,):
                    state_dict.update(zip(indexed, whole.unbind(0), strict=True))
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._restate_marks()  # loading may assign new parameters

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # untyped in torch
        self._restate_marks()  # the parameters of a copy are new

    def _restate_marks(self) -> None:
        if self._weight_marks:
            for name in ["weight"] if self.is_packed else weight_names(self.num_groups):
                vars(self._parameters[name]).update(self._weight_marks)


@functools.cache
def weight_names(num_groups: int) -> tuple[str, ...]:
    """The names of discrete weights."""
    return tuple(f"weight{g}" for g in range(num_groups))


def local_part(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, differentiable; any other tensor as it is."""
    # Not isinstance: torch.distributed.tensor takes long to import, and most users have no DTensors.
    return cast("DTensor", parameter).to_local() if hasattr(parameter, "device_mesh") else parameter


def linear_problem(
    linear: GroupedLinear,
    rows: RowsLike,
    splits: Splits,
    out: torch.Tensor | None,
    grad_input_out: torch.Tensor | None,
    bias_scale: torch.Tensor | None,
) -> ArgumentError | StaleLease | None:
    """What is wrong with an argument of a forward pass other than the rows, or None. Reads no device memory."""
    error = splits_problem(splits, num_groups=linear.num_groups, device=rows.device, num_rows=rows.num_rows)
    if error is None and bias_scale is not None:
        if not linear.has_bias or linear.return_bias:
            found = list(bias_scale.shape) if isinstance(bias_scale, torch.Tensor) else type(bias_scale).__name__
            return ArgumentError(f"bias_scale ({found}) needs a bias that is added; {linear} adds none")
        error = scale_problem("bias_scale", bias_scale, rows)
    return error or result_buffers_problem(rows, linear.in_features, linear.out_features, out, grad_input_out)


@dataclass(frozen=True, slots=True)
class _LinearSettings:
    """The arguments of one call of a linear layer that are not tensors."""

    linear: GroupedLinear
    overwrite_main_grad: bool
    trains_x: bool


class _GroupedLinearContext(Context, Protocol):
    settings: _LinearSettings
    grad_input_out: GradientBuffer


class _GroupedLinear(Function):
    @staticmethod
    def forward(
        ctx: _GroupedLinearContext,
        settings: _LinearSettings,
        buffers: tuple[torch.Tensor | None, torch.Tensor | None],
        row_range: torch.Tensor,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        bias_scale: torch.Tensor | None,
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        linear, (out, grad_input_out) = settings.linear, buffers
        weights, adapters = linear.split(tensors)
        x = kernel_rows(x)
        bias_scale = None if bias_scale is None else bias_scale.contiguous()
        shape = (*x.shape[:-1], linear.out_features)
        y = x.new_empty(shape) if out is None else out
        kept = products.forward(
            linear.precision,
            weights,
            x.view(-1, linear.in_features),
            row_range,
            y.view(-1, linear.out_features),
            bias=bias,
            bias_scale=None if bias_scale is None else bias_scale.view(-1),
            zero_tail=out is None,
            trains_rows=settings.trains_x,
            held=linear.held_weight,
        )
        low, t = LowRank(*adapters) if adapters else None, None
        if low is not None:
            t = low.new_rows(math.prod(x.shape[:-1]))
            low.down(x.view(-1, linear.in_features), row_range, t)
            low.add_up(t, row_range, y.view(-1, linear.out_features))
        ctx.save_for_backward(row_range, x, bias, bias_scale, t, *kept, *tensors)
        ctx.settings, ctx.grad_input_out = settings, GradientBuffer("grad_input_out", grad_input_out)
        # Not `mark_dirty(out)`: for a slice of a lease, autograd would make that a copy into the lease's gradient.
        return y if out is None else wrote_into(y).detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: _GroupedLinearContext, d_y: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        check_gradient(d_y)
        row_range, x, bias, bias_scale, t, *rest = ctx.saved_tensors
        settings = ctx.settings
        linear, ops = settings.linear, kernels.for_device(x.device)
        kept, tensors = (rest[0], rest[1], rest[2]), rest[3:]
        weights, adapters = linear.split(tensors)
        _, _, _, needs_x, needs_bias, needs_scale, *_ = ctx.needs_input_grad
        d_y = kernel_rows(d_y).view(-1, linear.out_features)
        rows = x.view(-1, linear.in_features)
        d_x = d_scale = None
        d_bias = torch.empty_like(bias) if needs_bias else None
        scale = None if bias_scale is None else bias_scale.view(-1)
        low = LowRank(*adapters) if adapters else None
        d_adapters: tuple[torch.Tensor | None, ...] = ()
        if low is not None:
            d_t = low.new_rows(rows.shape[0])
            low.down_gradient(d_y, row_range, d_t)
            d_adapters = low.gradients(rows, t, d_y, d_t, row_range)
        if needs_x:
            d_x = gradient_rows(ctx.grad_input_out, x, d_y)
            d_rows, zero_tail = d_x.view(-1, linear.in_features), ctx.grad_input_out.tensor is None
            options = {"dbias": d_bias, "bias_scale": scale}
            products.input_gradient(
                linear.precision, weights, kept, d_y, row_range, d_rows, zero_tail=zero_tail, **options
            )
            if low is not None:
                low.add_up_gradient(d_t, row_range, d_x.view(-1, linear.in_features))
            d_x = ctx.grad_input_out.hand_on(d_x)
        elif d_bias is not None:
            ops.grouped_bias_grad(d_y, row_range, d_bias, scale=scale)
        if needs_scale:
            d_scale = torch.zeros_like(bias_scale)
            ops.grouped_bias_dot(d_y, bias, row_range, d_scale.view(-1))

        inputs = Unmodified(x=x, d_y=d_y)

        def wgrad(out: torch.Tensor | TensorTable, accumulate: bool) -> None:
            inputs.check()
            products.weight_gradient(linear.precision, d_y, rows, row_range, out, accumulate=accumulate)

        d_weights = linear.weight_gradients(weights, wgrad, overwrite_main_grad=settings.overwrite_main_grad)
        ctx.grad_input_out.end_backward()
        return None, None, None, d_x, d_bias, d_scale, *d_weights, *d_adapters
