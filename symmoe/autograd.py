"""What autograd must know of memory that kernels write into behind its back."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch

from symmoe import torch_internals
from symmoe.errors import ArgumentError, StaleRows
from symmoe.torch_internals import keeps_graph, version_of


class Function(torch.autograd.Function):
    """torch's Function, but whoever differentiates its gradients gets an error. `of`: what users know it by.

    torch's once_differentiable sees only the gradients that backward is given. The results depend on what forward has
    saved, too: where only that takes a gradient, the second order would be dropped without a word.
    """

    of: str

    if TYPE_CHECKING:  # torch's has no annotations

        @classmethod
        def apply(cls, *args: Any) -> Any:
            """What forward returns."""

    def __init_subclass__(cls) -> None:
        first_order = cls.backward
        of = cls.of

        def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
            if not torch.is_grad_enabled():  # without create_graph
                return first_order(ctx, *gradients)
            # On what the results depend are inputs of the node, too: torch.autograd.grad goes to some tensors only, and
            # must not go past it.
            ctx = _Unpacked(ctx)
            with torch.no_grad():
                found = first_order(ctx, *gradients)
            start = torch.empty(0, device="cpu", requires_grad=True)
            tensors = *found, *gradients, *ctx.saved_tensors
            return _EndOfGraph.apply(of, len(found), start, *tensors)  # type: ignore[no-untyped-call]

        cls.backward = staticmethod(backward)  # type: ignore[method-assign]


class _Unpacked:
    """A context of autograd whose saved tensors are unpacked, which checkpoints allow once."""

    def __init__(self, ctx: Any) -> None:
        vars(self).update(ctx=ctx, saved_tensors=ctx.saved_tensors)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ctx, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.ctx, name, value)


class _EndOfGraph(torch.autograd.Function):
    """Gradients that raise where they are differentiated: autograd goes there before it goes through any call of the
    forward pass, so all ranks raise, and none waits for another."""

    @staticmethod
    def forward(
        ctx: Any, of: str, num_found: int, _: torch.Tensor, *tensors: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        ctx.of = of
        return tuple(None if each is None else each.view_as(each) for each in tensors[:num_found])

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        no_second_order(ctx.of)


def no_second_order(of: str) -> NoReturn:
    """ArgumentError: gradients of what users know as `of` are differentiated."""
    raise ArgumentError(
        f"create_graph (True) was given to differentiate gradients of {of} again, as a gradient penalty does; second "
        "order gradients of it are not supported, the kernels compute those of the first order"
    )


class Context(Protocol):
    """What autograd gives to forward and backward of a Function. (torch's own FunctionCtx leaves half of it out.) Other
    attributes are what forward sets for backward."""

    saved_tensors: tuple[Any, ...]  # each a tensor, or None
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        """Keeps tensors for backward, which finds them in `saved_tensors`."""

    def mark_non_differentiable(self, *outputs: torch.Tensor) -> None:
        """Outputs that have no gradient."""

    def set_materialize_grads(self, value: bool) -> None:
        """False: backward gets None, not zeros, for an output that nobody differentiates."""

    def __getattr__(self, name: str) -> Any:
        """What forward has set."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets it."""


def is_in_backward() -> bool:
    """Whether autograd's engine runs the caller, e.g. the forward pass that a checkpoint repeats."""
    return torch_internals.graph_task_id() >= 0


def transform_problem() -> ArgumentError | None:
    """The error inside a transform of torch.func and in forward-mode AD, or None."""
    if not torch_internals.is_transformed():
        return None
    return ArgumentError(
        "kernels have no rules for transforms of torch.func (grad, vjp, jvp, vmap) and for forward-mode AD; call this "
        "outside of them, and take gradients by backward or torch.autograd.grad"
    )


def wrote_into(tensor: torch.Tensor) -> torch.Tensor:
    """Tells autograd that a kernel has written into `tensor`, so that backward refuses its earlier saved contents."""
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)
    return tensor


class Unmodified:
    """Tensors that backward reads after autograd has checked its saved tensors."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self._versions = [(name, tensor, version_of(tensor)) for name, tensor in tensors.items()]

    def check(self) -> None:
        """StaleRows: one of the tensors has been written to, or is memory of a lease that has been released."""
        for name, tensor, version in self._versions:
            if version_of(tensor) != version:
                raise StaleRows(
                    f"{name} {list(tensor.shape)} is at version {version_of(tensor)}, a gradient that was left for "
                    f"later needs version {version}: it has been written to, or its lease released, in between"
                )


class GradientBuffer:
    """A caller's buffer for the gradient of one input, in the context of a graph node, until the graph is spent.

    Autograd does not save the buffer: its contents do not matter until backward, and hooks on saved tensors may return
    a copy. It is released when autograd frees its saved tensors: no lease lives as long as a loss that is kept. tensor:
    the buffer; None if the caller gave none, or if it has been released.
    """

    def __init__(self, name: str, tensor: torch.Tensor | None) -> None:
        self.tensor = tensor
        self._name = name
        self._is_given = tensor is not None

    def problem(self) -> ArgumentError | None:
        """What keeps a backward pass from writing into the buffer, or None."""
        if self.tensor is not None:
            return in_flight_problem(self._name, self.tensor)
        if not self._is_given:
            return None
        return ArgumentError(
            f"{self._name} was let go of when the first backward pass (retain_graph=False) ended; a second one through "
            "the same graph needs retain_graph=True in the first"
        )

    def hand_on(self, gradient: torch.Tensor) -> torch.Tensor:
        """What backward returns for `gradient`, which is the buffer if there is one and it has been written.

        A second reference to it lives until the pass ends: it keeps autograd from making the buffer's memory the
        `.grad` of a leaf, and it tells :func:`in_flight_problem` whether autograd still needs it.
        """
        if self.tensor is None:
            return gradient
        storage = gradient.untyped_storage()
        gradient = wrote_into(gradient).detach()
        held = [gradient]
        start = gradient.data_ptr()
        # Cleared, not only dropped: a thread of autograd may keep the callback a little longer than the pass.
        torch_internals.call_after_backward(held.clear)
        pending = [entry for entry in getattr(storage, "_gradients", ()) if _is_in_flight(entry[2])]
        pending.append((start, start + gradient.nbytes, weakref.ref(gradient)))
        storage._gradients = pending  # type: ignore[attr-defined]  # our attribute; lives as long as the memory
        return gradient

    def end_backward(self) -> None:
        """Releases the buffer unless the graph is retained. Called at the end of a successful backward."""
        if not keeps_graph():
            self.tensor = None


def in_flight_problem(name: str, buffer: torch.Tensor) -> ArgumentError | None:
    """The error if `buffer` holds a gradient that autograd has been given and has not used up, or None."""
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
    # Autograd holds one more than Python until the gradient has been used or added up.
    return gradient is not None and torch_internals.num_references(gradient) > 1
