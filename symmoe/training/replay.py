"""Routing that is given instead of chosen: recorded in one forward and taken again in another, or balanced by force.

Replay makes a policy's training forward use the experts of its rollout (routing replay for RL, arXiv:2510.11370).
Scores and probs are computed anew, for the given experts, and so are their gradients, by the router of a MoELayer or
the trainer's own, which hands its layer's `listeners` a way to give (moe/listeners.py). For one MoELayer:
`layer(x, topk_idx=recorded)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from symmoe.autograd import is_in_backward
from symmoe.errors import ArgumentError
from symmoe.kernels import control
from symmoe.moe.layer import MoELayer
from symmoe.moe.listeners import Listeners, RoutingReport, layers_with_listeners
from symmoe.torch_internals import pytree

Routing = dict[str, torch.Tensor]
_Layers = Mapping[str, tuple[nn.Module, Listeners]]
_Array = np.ndarray[Any, Any] | torch.Tensor


@contextmanager
def record_routing(model: nn.Module) -> Iterator[Routing]:
    """In this context, one forward of `model` leaves the choice of every layer in the dict that it yields. Local.

    The ids are the router's choice before the capacity factor's drops, which a replay makes again, with its own probs.
    What backward computes again is not recorded.

    Yields:
        name of each layer to int32 [T, K] on the device: of MoELayers, and of the layers of symmoe's integrations in
        transformers, Megatron and torchtitan models.

    Raises:
        ArgumentError: the model has no such layer; a layer is called a second time (which of the two to keep?), or not
            at all.
    """
    routing: Routing = {}
    with _recording(model, lambda: routing):
        yield routing


@contextmanager
def record_micro_batches(model: nn.Module) -> Iterator[list[Routing]]:
    """Same as :func:`record_routing` for any number of forwards of `model` (a pipeline's schedule, a loop): yields a
    list, with one such dict for each. ArgumentError, too, if layers are called outside of a call of `model`."""
    routings: list[Routing] = []
    calls = _Calls()

    def current() -> Routing:
        while len(routings) < calls.num:
            routings.append({})
        if not routings:
            raise ArgumentError(f"a layer is called, and model ({type(model).__name__}) is not; pass what is called")
        return routings[-1]

    with calls.counted(model), _recording(model, current):
        yield routings


@contextmanager
def replay_routing(model: nn.Module, routing: Mapping[str, torch.Tensor] | Sequence[Mapping[str, torch.Tensor]]):
    """In this context, every layer of `model` takes the experts of `routing`. Local, but for errors, which all ranks of
    the layers' EP group raise, if they go on to call the model.

    If activations are computed again in backward, backward must run in the context too; they take what their own
    micro-batch took. Reads `routing` on the host, where a trainer's router takes it.

    Args:
        routing: what :func:`record_routing` has recorded for the same tokens, or :func:`routing_from_array` made of an
            array: on the host or the device, any integers, -1 is no expert (to trainers' routers, in all of a token's
            slots). For several micro-batches a sequence, in the order in which `model` is called.

    Raises:
        ArgumentError: `routing` is not for the layers, tokens, K or experts of `model`, or for another number of its
            calls; a router cannot be given a choice; or a layer has not taken it: a model that torch.compile has
            compiled before takes no notice of this.
    """
    layers, is_one = _layers(model), isinstance(routing, Mapping)
    each: Sequence[Mapping[str, torch.Tensor]] = [routing] if is_one else routing
    _fail(layers, next((problem for each_one in each if (problem := _problem(layers, each_one))), None))
    calls = _Calls()

    def choice(name: str, num_tokens: int, top_k: int | None) -> torch.Tensor:
        number, what = 0 if is_one else calls.number, f"model ({type(model).__name__})"
        if number is None:
            text = f"backward computes layer {name!r} again, of which call of {what} is not known: no output of it has"
            _fail(layers, ArgumentError(f"{text} a gradient (checkpoint its layers, or all of it without reentrance)"))
        if not 0 <= number < len(each):
            text = f"routing is of {len(each)} micro-batches; layer {name!r} is called, and {what} has been"
            _fail(layers, ArgumentError(f"{text} {calls.num} times"))
        ids = each[number][name]
        wanted = num_tokens, ids.shape[-1] if top_k is None else top_k
        if ids.shape != wanted:
            text = f"routing[{name!r}] has shape {list(ids.shape)}, [tokens, experts of each]; the call has"
            _fail(layers, ArgumentError(f"{text} {list(wanted)}"))
        return ids.to(layers[name][1].heap.device, torch.int32, non_blocking=True)

    with calls.counted(model), _choose(model, layers, choice):
        yield
        if not is_one and calls.num != len(each):
            raise ArgumentError(f"routing is of {len(each)} micro-batches; the model has been called {calls.num} times")


@contextmanager
def balanced_routing(model: nn.Module) -> Iterator[None]:
    """In this context, every layer of `model` gives all its experts the same number of slots. For benchmarks. Local."""
    layers = _layers(model)

    def choice(name: str, num_tokens: int, top_k: int | None) -> torch.Tensor:
        its = layers[name][1]
        return balanced_choice(num_tokens, top_k or 1, its.num_experts, device=its.heap.device)

    with _choose(model, layers, choice):
        yield


def balanced_choice(
    num_tokens: int, top_k: int, num_experts: int, *, device: torch.device | str | None = None
) -> torch.Tensor:
    """int32 [T, K]: experts with loads that differ by at most 1, distinct in a token, spread over the ranks. Slot n = t
    * K + k goes to expert n * g modulo E. g is coprime to E, so any E slots in a row go to E experts; and close to E
    divided by the golden ratio, so that a token's experts are far apart."""
    step = max(1, round(num_experts / ((1 + math.sqrt(5)) / 2)))
    while math.gcd(step, num_experts) > 1:
        step += 1
    return (torch.arange(num_tokens * top_k, device=device).view(num_tokens, top_k) * step % num_experts).int()


def routing_from_array(
    model: nn.Module, array: _Array, *, layers: Iterable[int] | None = None, rows: torch.Tensor | None = None
) -> Routing:
    """What :func:`replay_routing` takes, on the host, of an array of an inference engine (vLLM, SGLang). Errors as
    there.

    Args:
        array: any integers [N, L, K] on the host, -1 is no expert. Packed sequences: one behind the other.
        layers: which of the L is that of each layer of `model`, in its order: those of this stage of a pipeline, or
            those that are not dense. None: the L are the layers of `model`.
        rows: of this rank's tokens, in the order in which layers see them (flattened). bool: whether it is one of the
            N, which come in order; or int: which of them it is, -1 is none (padding). None: the N are the tokens.

    Raises:
        ArgumentError: the numbers of layers differ, or there is no such layer; `rows` has more or fewer tokens than the
            array, or others.
    """
    found, given = layers_with_listeners(model), torch.as_tensor(array)
    columns = list(range(given.shape[1]) if layers is None else layers)
    num_rows, num_layers = given.shape[:2]
    problem = None
    if len(columns) != len(found):
        problem = ArgumentError(f"array has {num_layers} layers, of which {len(columns)}; model has {len(found)}")
    elif min(columns) < 0 or max(columns) >= num_layers:
        problem = ArgumentError(f"layers ({columns}) must be among the {num_layers} layers of array")
    elif rows is not None and rows.dtype == torch.bool and int(rows.sum()) != num_rows:
        problem = ArgumentError(f"rows has {int(rows.sum())} tokens; array has {num_rows}")
    elif rows is not None and rows.numel() and int(rows.max()) >= num_rows > 0:
        problem = ArgumentError(f"rows has token {int(rows.max())}; array has {num_rows} tokens")
    _fail(found, problem)
    signed = {torch.uint8: torch.int16, torch.uint16: torch.int32}
    given = given.to(signed.get(given.dtype, given.dtype))
    if rows is not None:
        rows = rows.flatten().cpu()
        rows = torch.where(rows, rows.cumsum(0) - 1, -1) if rows.dtype == torch.bool else rows.long()
        given = torch.cat([given, given.new_full((1, *given.shape[1:]), -1)])[rows]  # -1 is the last
    return {name: given[:, column].contiguous() for name, column in zip(found, columns, strict=True)}


def routing_to_array(routing: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """int16 [T, L, K] on the host, of what :func:`record_routing` has recorded. Waits for the device once."""
    return torch.stack(list(routing.values()), 1).to(torch.int16).cpu()


class _Calls:
    """The calls of a model, without those that backward repeats."""

    def __init__(self) -> None:
        self.num = 0
        self._of_backward: int | None = None

    @contextmanager
    def counted(self, model: nn.Module) -> Iterator[None]:
        """Counts those in this context."""
        with ExitStack() as hooks:
            hooks.callback(model.register_forward_pre_hook(self._begin).remove)
            hooks.callback(model.register_forward_hook(self._end).remove)
            yield

    @property
    def number(self) -> int | None:
        """That of the call that is running; in backward, of the call whose activations are computed again. None: that
        is not known, as no output of the call has a gradient."""
        if not is_in_backward() or self.num == 1:
            return self.num - 1
        return self._of_backward

    def _begin(self, *_: object) -> None:
        if not is_in_backward():
            self.num, self._of_backward = self.num + 1, None

    def _end(self, _model: nn.Module, _args: object, output: object) -> None:
        if is_in_backward():
            return
        for tensor in pytree.tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(partial(self._begin_backward, self.num - 1))  # runs before all of the model's own

    def _begin_backward(self, number: int, _gradient: torch.Tensor) -> None:
        self._of_backward = number


@contextmanager
def _recording(model: nn.Module, current: Callable[[], Routing]) -> Iterator[None]:
    layers, called = layers_with_listeners(model), set[str]()

    def keep(name: str, report: RoutingReport) -> None:
        if not torch.compiler.is_compiling() and is_in_backward():
            return
        routing = current()
        if name in routing:
            raise ArgumentError(f"layer {name!r} is called twice; record one forward, or with record_micro_batches")
        routing[name] = report.chosen_idx.int()
        called.add(name)

    with ExitStack() as added:
        for name, (_, listeners) in layers.items():
            added.callback(listeners.add(partial(keep, name)))
        yield
        _check_all_called(layers.keys() - called)


def _layers(model: nn.Module) -> _Layers:
    layers = layers_with_listeners(model)
    for name, (layer, _) in layers.items():
        if isinstance(layer, MoELayer) and layer.router is None:
            raise ArgumentError(f"layer {name!r} has no router (router='none') that could weigh a choice it is given")
    return layers


def _fail(layers: _Layers, problem: ArgumentError | None) -> None:
    """Raises the problem, on all ranks that go on to call the layers."""
    if problem is not None:
        next(iter(layers.values()))[1].heap.fail_for(problem, control.PHASE_PLAN)


def _problem(layers: _Layers, routing: Mapping[str, torch.Tensor]) -> ArgumentError | None:
    """Why this cannot be the routing of these layers, whatever their tokens are, or None."""
    if routing.keys() != layers.keys():
        return ArgumentError(f"routing is for the layers {sorted(routing)}; the model has {sorted(layers)}")
    for name, ids in routing.items():
        listeners = layers[name][1]
        if listeners.give is None and ids.device.type != "cpu":
            continue  # the plan looks, and nobody waits for the device
        smallest, largest = (int(ids.min()), int(ids.max())) if ids.numel() else (0, 0)
        if not -1 <= smallest <= largest < listeners.num_experts:
            text = f"expert {largest if largest >= listeners.num_experts else smallest}"
            return ArgumentError(f"routing[{name!r}] has {text}; the layer has {listeners.num_experts}, and -1 is none")
        is_none = ids < 0
        if listeners.give is not None and bool((is_none.any(-1) != is_none.all(-1)).any()):
            token = int((is_none.any(-1) != is_none.all(-1)).nonzero()[0])
            text = f"routing[{name!r}] has for token {token} the experts {ids[token].tolist()}; a trainer's router"
            return ArgumentError(f"{text} weighs K experts, or none at all (-1 in all of them)")
    return None


@contextmanager
def _choose(
    model: nn.Module, layers: _Layers, choice: Callable[[str, int, int | None], torch.Tensor]
) -> Iterator[None]:
    left = set(layers)

    def choose(name: str, num_tokens: int, top_k: int | None) -> torch.Tensor:
        left.discard(name)
        return choice(name, num_tokens, top_k)

    def give(name: str, module: MoELayer, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if kwargs.get("probs") is not None:
            problem = ArgumentError(f"layer {name!r} is called with probs, which are of another choice")
            module.heap.fail_for(problem, control.PHASE_PLAN)
        num_tokens = math.prod((args[0] if args else kwargs["x"]).shape[:-1])
        return args, {**kwargs, "topk_idx": choose(name, num_tokens, module.config.top_k)}

    with ExitStack() as given:
        for name, (layer, listeners) in layers.items():
            if listeners.give is None:
                given.callback(layer.register_forward_pre_hook(partial(give, name), with_kwargs=True).remove)
            else:
                given.callback(listeners.give(model, name, partial(choose, name)))
        yield
        _check_all_called(left)


def _check_all_called(left: Set[str]) -> None:
    if left:
        raise ArgumentError(f"the layers {sorted(left)} have not been called, or in a model compiled before")
