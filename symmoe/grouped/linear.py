"""GroupedLinear: y_g = x_g W_g^T + b_g for every group g of rows, with results in buffers of the caller.

G groups (experts of this rank), C input features, O output features. Rows are sorted by group; rows past sum(splits)
are a tail that is never read: it stays as it is in a buffer of the caller, and is zero in what is allocated here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from symmoe.checks.arguments import working_dtype
from symmoe.grouped.parameters import GroupedParameters, local_tensors
from symmoe.grouped.products import LinearProducts
from symmoe.grouped.rows_function import RowArguments, run_rows
from symmoe.grouped.splits import Splits


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
