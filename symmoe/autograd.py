"""Functions and checks of autograd for memory that kernels write without autograd."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch

from symmoe import torch_internals
from symmoe.errors import ArgumentError, StaleRows
from symmoe.torch_internals import keeps_graph, version_of


class Function(torch.autograd.Function):
    """torch's Function, but differentiating its gradients is an error. `label`: the
    function's name in error texts.

    torch's once_differentiable sees only the gradients that backward gets. The results also depend on forward's saved
    tensors: if only these require a gradient, the second order would be dropped silently.
    """

    label: str

    if TYPE_CHECKING:  # torch's has no annotations

        @classmethod
        def apply(cls, *args: Any) -> Any:
            """Returns the result of forward."""

    def __init_subclass__(cls) -> None:
        first_order = cls.backward
        label = cls.label

        def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
            if not torch.is_grad_enabled():  # without create_graph
                return first_order(ctx, *gradients)
            # All tensors on which the results depend are inputs of the node: torch.autograd.grad visits only some
            # tensors, and must not bypass it.
            ctx = _Unpacked(ctx)
            with torch.no_grad():
                results = first_order(ctx, *gradients)
            start = torch.empty(0, device="cpu", requires_grad=True)
            tensors = *results, *gradients, *ctx.saved_tensors
            return _EndOfGraph.apply(label, len(results), start, *tensors)  # type: ignore[no-untyped-call]

        cls.backward = staticmethod(backward)  # type: ignore[method-assign]


class _Unpacked:
    """A context of autograd whose saved tensors are unpacked: checkpoints allow that only once."""

    def __init__(self, ctx: Any) -> None:
        vars(self).update(ctx=ctx, saved_tensors=ctx.saved_tensors)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ctx, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.ctx, name, value)


class _EndOfGraph(torch.autograd.Function):
    """Gradients that raise when they are differentiated: autograd reaches them before any call of the forward pass, so
    all ranks raise, and no rank waits for another."""

    @staticmethod
    def forward(
        ctx: Any, label: str, num_results: int, _: torch.Tensor, *tensors: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        ctx.label = label
        return tuple(
            None if tensor is None else tensor.view_as(tensor) for tensor in tensors[:num_results]
        )

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        no_second_order(ctx.label)


def no_second_order(label: str) -> NoReturn:
    """Raises ArgumentError: the gradients of a function, which the text calls `label`, are differentiated."""
    raise ArgumentError(
        f"create_graph (True) was given to differentiate gradients of {label} again, as a gradient penalty does; "
        "second order gradients of it are not supported, the kernels compute those of the first order"
    )


class Context(Protocol):
    """The argument of a Function's forward and backward. (torch's own FunctionCtx omits half of it.) Forward sets other
    attributes for backward."""

    saved_tensors: tuple[Any, ...]  # each a tensor, or None
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        """Keeps tensors for backward, which reads `saved_tensors`."""

    def mark_non_differentiable(self, *outputs: torch.Tensor) -> None:
        """Marks outputs that have no gradient."""

    def set_materialize_grads(self, value: bool) -> None:
        """False: backward gets None, not zeros, for an output without a gradient."""

    def __getattr__(self, name: str) -> Any:
        """An attribute that forward has set."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute."""


def is_in_backward() -> bool:
    """Whether autograd's engine runs the caller, e.g. a forward pass that a checkpoint repeats."""
    return torch_internals.graph_task_id() >= 0


def transform_problem() -> ArgumentError | None:
    """The error of a call inside a transform of torch.func or in forward-mode AD, or None."""
    if not torch_internals.is_transformed():
        return None
    return ArgumentError(
        "kernels have no rules for transforms of torch.func (grad, vjp, jvp, vmap) and for forward-mode AD; call this "
        "outside of them, and take gradients by backward or torch.autograd.grad"
    )


def wrote_into(tensor: torch.Tensor) -> torch.Tensor:
    """Reports to autograd that a kernel wrote into `tensor`, so that backward rejects its earlier saved contents."""
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)
    return tensor


class Unmodified:
    """Tensors that backward reads after autograd has checked its saved tensors."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self._versions = [(name, tensor, version_of(tensor)) for name, tensor in tensors.items()]

    def check(self) -> None:
        """StaleRows: one of the tensors was written to, or its lease was released."""
        for name, tensor, version in self._versions:
            if version_of(tensor) != version:
                raise StaleRows(
                    f"{name} {list(tensor.shape)} is at version {version_of(tensor)}, a gradient that was left for "
                    f"later needs version {version}: it has been written to, or its lease released, in between"
                )


class GradientBuffer:
    """A caller's buffer for the gradient of one input, in the context of a graph node, until the graph is freed.

    Autograd does not save the buffer: its contents do not matter until backward, and hooks on saved tensors may return
    a copy. It is released when autograd frees its saved tensors, so a kept loss keeps no lease alive. tensor: the
    buffer; None if the caller gave none, or after its release.
    """

    def __init__(self, name: str, tensor: torch.Tensor | None) -> None:
        self.tensor = tensor
        self._name = name
        self._had_tensor = tensor is not None

    def problem(self) -> ArgumentError | None:
        """The error if a backward pass cannot write into the buffer, or None."""
        if self.tensor is not None:
            return in_flight_problem(self._name, self.tensor)
        if not self._had_tensor:
            return None
        return ArgumentError(
            f"{self._name} was let go of when the first backward pass (retain_graph=False) ended; a second one through "
            "the same graph needs retain_graph=True in the first"
        )

    def pass_on(self, gradient: torch.Tensor) -> torch.Tensor:
        """The tensor that backward returns for `gradient`, which is the written buffer if there is one.

        A second reference to it lives until the pass ends. So autograd cannot make the buffer's memory the `.grad` of a
        leaf, and :func:`in_flight_problem` sees whether autograd still needs it.
        """
        if self.tensor is None:
            return gradient
        storage = gradient.untyped_storage()
        gradient = wrote_into(gradient).detach()
        references = [gradient]
        start = gradient.data_ptr()
        # Cleared, not only dropped: a thread of autograd may keep the callback a little longer than the pass.
        torch_internals.call_after_backward(references.clear)
        pending = [entry for entry in getattr(storage, "_gradients", ()) if _is_in_flight(entry[2])]
        pending.append((start, start + gradient.nbytes, weakref.ref(gradient)))
        storage._gradients = pending  # type: ignore[attr-defined]  # our attribute; lives as long as the memory
        return gradient

    def end_backward(self) -> None:
        """Releases the buffer unless the graph is retained. Called at the end of a successful backward."""
        if not keeps_graph():
            self.tensor = None


def in_flight_problem(name: str, buffer: torch.Tensor) -> ArgumentError | None:
    """The error if `buffer` contains a gradient that autograd has received and not yet used, or None."""
    start = buffer.data_ptr()
    end = buffer.data_ptr() + buffer.nbytes
    for other_start, other_end, gradient in getattr(buffer.untyped_storage(), "_gradients", ()):
        if start < other_end and other_start < end and _is_in_flight(gradient):
            return ArgumentError(
                f"{name} {list(buffer.shape)} still holds another gradient of this backward pass, of "
                f"{other_end - other_start} bytes, that autograd has not used up; give each its own buffer"
            )
    return None


def _is_in_flight(reference: weakref.ref[torch.Tensor]) -> bool:
    gradient = reference()
    # Autograd has one more reference than Python until it has used or added up the gradient.
    return gradient is not None and torch_internals.num_references(gradient) > 1
