"""GroupedLinear: y_g = x_g W_g^T + b_g for every group g of rows, with results in buffers of the caller.

G groups (experts of this rank), C input features, O output features. Rows are sorted by group; rows past sum(splits)
are a tail that is never read: it stays as it is in a buffer of the caller, and is zero in what is allocated here.
"""

from __future__ import annotations

import functools
import math
import re
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import nn

from symmoe.checks.arguments import parameter_dtype_problem, size_problem, working_dtype
from symmoe.errors import ArgumentError, raise_for
from symmoe.grouped.experts import local_tensors
from symmoe.grouped.products import LinearProducts
from symmoe.grouped.rows_function import RowArguments, run_rows
from symmoe.grouped.splits import Splits
from symmoe.grouped.weight_gradients import DelayedGradients, MainGrads, NewGradients, Target
from symmoe.grouped.weights import addresses, lay_side_by_side
from symmoe.kernels.architectures import e4m3_problem
from symmoe.precision.cached_weights import HeldWeight
from symmoe.precision.operands import precision_problem
from symmoe.precision.recipes import Recipe

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
        self.weight_names = ("weight",) if weights == "packed" else weight_names(num_groups)
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

    @property
    def is_packed(self) -> bool:
        """Whether there is one weight [G, O, C], not G."""
        return self.weight_names == ("weight",)

    @property
    def num_weights(self) -> int:
        """1 or G."""
        return len(self.weight_names)

    def weight_parameters(self) -> tuple[torch.Tensor, ...]:
        """The one packed weight, or the G discrete ones; for a DTensor this rank's part, differentiable."""
        if self.is_packed:
            return (local_part(self.weight),)
        try:
            return cast("tuple[nn.Parameter, ...]", tuple(map(self._parameters.__getitem__, self.weight_names)))
        except KeyError:  # parametrized
            return tuple(getattr(self, name) for name in self.weight_names)

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
        given = RowArguments(splits, bias_scale, out, grad_input_out, (is_first_microbatch,))
        given.check("x", x, (self,))
        x, is_autocast = x.to(working_dtype(x)), torch.is_autocast_enabled(x.device.type)
        biases, weights, adapters = local_tensors((self,), x.dtype, cast_biases=is_autocast)
        products = LinearProducts((self,), trains_rows=torch.is_grad_enabled() and x.requires_grad)
        added = (None,) if self.return_bias else tuple(biases)
        y = run_rows(products, given, x, added, (*weights, *adapters))
        return (y, biases[0]) if self.return_bias else y

    def gradient_target(self, weights: tuple[torch.Tensor, ...], *, overwrite_main_grad: bool) -> Target:
        """Where the gradients of `weights`, as the computation takes them, go: as the options are now.

        Raises:
            ArgumentError: an option wants parameters of this module, and the weights are made of others.
        """
        if not any(weight.requires_grad for weight in weights):
            return Target()
        if not (self.delay_wgrad or self.accumulate_into_main_grad):
            return NewGradients()
        parameters = tuple(map(self._parameters.get, self.weight_names))
        if any(parameter is None or hasattr(parameter, "device_mesh") for parameter in parameters):
            option = "delay_wgrad" if self.delay_wgrad else "accumulate_into_main_grad"
            raise ArgumentError(f"{option} (True) must be False: weights of a {type(self).__name__} are made of others")
        found = cast("tuple[nn.Parameter, ...]", parameters)
        if not self.delay_wgrad:
            return MainGrads(found, overwrite=overwrite_main_grad)
        overwrite = overwrite_main_grad if self.accumulate_into_main_grad else None
        return DelayedGradients(found, self._delayed, overwrite)

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

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> GroupedLinear:
        before = None if self.is_packed else addresses(self.weight_parameters())
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # untyped in torch
        self._restate_marks()
        if self.is_packed:
            return self
        weights = self.weight_parameters()
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
            for name in self.weight_names:
                vars(self._parameters[name]).update(self._weight_marks)


@functools.cache
def weight_names(num_groups: int) -> tuple[str, ...]:
    """The names of discrete weights."""
    return tuple(f"weight{g}" for g in range(num_groups))


def local_part(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, differentiable; any other tensor as it is."""
    # Not isinstance: torch.distributed.tensor takes long to import, and most users have no DTensors.
    return cast("DTensor", parameter).to_local() if hasattr(parameter, "device_mesh") else parameter
