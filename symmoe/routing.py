"""Fixed routing in place of the router's choice: recorded in one forward and replayed in another, or forced balance.

Replay makes a policy's training forward use the experts of its rollout (routing replay for RL, arXiv:2510.11370).
The forward recomputes scores, probs and their gradients for the given experts. For one MoELayer: `layer(x,
topk_idx=recorded)`. A trainer's own router receives it from its layer's `listeners` (moe/listeners.py).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from symmoe.autograd import is_in_backward
from symmoe.checks.arguments import check_kind
from symmoe.errors import ArgumentError, first_problem, raise_for
from symmoe.kernels import control
from symmoe.moe.layer import MoELayer
from symmoe.moe.listeners import Listeners, RoutingReport, layers_with_listeners
from symmoe.moe.recomputed import Recomputed
from symmoe.torch_internals import next_node_number

Routing = dict[str, torch.Tensor]
_Array = np.ndarray[Any, Any] | torch.Tensor
_SIGNED = {
    torch.uint8: torch.int16,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
}
_Layers = dict[str, tuple[nn.Module, Listeners]]


@contextmanager
def record_routing(model: nn.Module) -> Iterator[Routing]:
    """Records one forward of `model`: the yielded dict receives the choice of every layer. Local.

    The ids are the router's choice before the capacity factor's drops; a replay drops again, with its own probs.

    Yields:
        name of each layer, in the model's order, to int32 [T, K] on the device: for MoELayers, and for the layers of
        symmoe's integrations in transformers, Megatron and torchtitan models, except hash layers (DeepSeek-V4).

    Raises:
        ArgumentError: the model has no such layer, or a layer is called a second time, or not at all.
    """
    routing: Routing = {}
    layers = _routed_layers(model)

    def record(name: str, report: RoutingReport) -> None:
        if name in routing:
            raise ArgumentError(
                f"layer {name!r} is called twice; record one forward, and no backward"
            )
        routing[name] = report.chosen_idx.to(torch.int32, copy=True)  # the caller may change ids

    with ExitStack() as removals:
        for name, (_, listeners) in layers.items():
            removals.callback(listeners.add(partial(record, name)))
        yield routing
        _check_all_called(layers.keys() - routing.keys())
        for name in layers:  # in the order of the model, not of the calls
            routing[name] = routing.pop(name)


@contextmanager
def replay_routing(
    model: nn.Module, routing: Mapping[str, torch.Tensor] | Sequence[Mapping[str, torch.Tensor]]
) -> Iterator[None]:
    """In this context, every layer of `model` uses the experts of `routing`. Local, except that all ranks of the EP
    group raise an error, in their next layer call.

    If backward recomputes activations, it must run in the context too; each recomputation uses its own micro-batch's
    routing, whatever the order in which backwards begin. The host reads `routing` of trainers' routers.

    Args:
        routing: from :func:`record_routing` for the same tokens, or from :func:`routing_from_array`: any integers, on
            the host or the device; -1 is no expert (for trainers' routers, in all K slots of a token). For several
            micro-batches, a sequence in the order of `model`'s calls. Backward identifies a call by its autograd
            graph, so `model` must not be wholly in a reentrant checkpoint, nor be one compiled graph.

    Raises:
        ArgumentError: `routing` does not fit the layers, tokens, K, experts or calls of `model`, or backward
            recomputes activations of a call outside this context; a router cannot use a given choice, or has one
            from another context; or a layer has not used it: a model that torch.compile has compiled before
            ignores it.
    """
    layers = _routed_layers(model)
    routings: Sequence[Mapping[str, torch.Tensor]] = (
        [*routing]
        if isinstance(routing, Iterable) and not isinstance(routing, Mapping)
        else [routing]
    )
    _fail_for(
        first_problem(
            (
                not all(isinstance(item, Mapping) for item in routings),
                f"routing ({type(routing).__name__}) must be of dicts, see routing_from_array",
            )
        ),
        layers,
    )
    micro_batches = [{name: _signed(ids) for name, ids in item.items()} for item in routings]
    for micro_batch in micro_batches:
        _fail_for(_problem(layers, micro_batch), layers)

    def choice(name: str, num_tokens: int, top_k: int | None) -> torch.Tensor:
        number = calls.number
        if number is None or not 0 <= number < len(micro_batches):
            _fail_for(
                ArgumentError(
                    f"routing is of {len(micro_batches)} micro-batches; layer {name!r} runs in call {number} (None: "
                    "not known)"
                ),
                layers,
            )
        assert number is not None  # raised above
        ids_TK = micro_batches[number][name]
        if ids_TK.shape != (num_tokens, top_k or ids_TK.shape[-1]):
            _fail_for(
                ArgumentError(
                    f"routing[{name!r}] has shape {list(ids_TK.shape)}; the call has [tokens, K] {[num_tokens, top_k]}"
                ),
                layers,
            )
        listeners = layers[name][1]
        # The plan reports ids that int32 cannot represent.
        keeps_int64 = listeners.override_router is None and ids_TK.dtype == torch.int64
        dtype = torch.int64 if keeps_int64 else torch.int32
        return ids_TK.to(listeners.heap.device, dtype, non_blocking=True)

    with ExitStack() as hooks, _choose(model, layers, choice):
        calls = _Calls(model, hooks, None if isinstance(routing, Mapping) else len(micro_batches))
        yield
        if not isinstance(routing, Mapping) and calls.num != len(micro_batches):
            raise ArgumentError(
                f"routing is of {len(micro_batches)} micro-batches; the model has been called {calls.num} times"
            )


@contextmanager
def balanced_routing(model: nn.Module) -> Iterator[None]:
    """In this context, every layer of `model` assigns equally many slots to each expert. For benchmarks. Local."""
    layers = _routed_layers(model)

    def choice(name: str, num_tokens: int, top_k: int | None) -> torch.Tensor:
        listeners = layers[name][1]
        num_experts = listeners.num_experts
        # top_k None: all groups.
        return balanced_choice(
            num_tokens, top_k or num_experts, num_experts, device=listeners.heap.device
        )

    with _choose(model, layers, choice):
        yield


def balanced_choice(
    num_tokens: int, top_k: int, num_experts: int, *, device: torch.device | str | None = None
) -> torch.Tensor:
    """int32 [T, K]: experts with loads that differ by at most 1, distinct in a token, spread over the ranks. Slot n = t
    * K + k goes to expert n * g modulo E. g is coprime to E, so any E consecutive slots use all E experts. g is close
    to E / golden ratio, so a token's experts are far apart."""
    step = max(1, round(num_experts / ((1 + math.sqrt(5)) / 2)))
    while math.gcd(step, num_experts) > 1:
        step += 1
    return (
        torch.arange(num_tokens * top_k, device=device).view(num_tokens, top_k) * step % num_experts
    ).int()


def routing_from_array(
    model: nn.Module,
    array: _Array,
    *,
    layers: Iterable[int] | None = None,
    rows: _Array | None = None,
) -> Routing:
    """Converts an inference engine's array to :func:`replay_routing`'s argument, on the host; raises its errors.

    Args:
        array: any integers [N, L, K] on the host, -1 is no expert. Packed sequences are concatenated.
        layers: index in L of every layer of `model` (or of this pipeline stage), in its order; None: all.
        rows: one entry for each token of this rank's layers, with padding (any shape). bool: whether the token is one
            of the N, in order; or int: its index in N, -1 is none. None: the N are the tokens.
    """
    check_kind("array", array, (np.ndarray, torch.Tensor, Sequence), "an array of integers")
    model_layers = _routed_layers(model)
    array_NLK = _signed(array)
    _fail_for(
        first_problem(
            (
                array_NLK.dim() != 3,
                f"array has shape {list(array_NLK.shape)}; it must be [tokens, layers, K]",
            )
        ),
        model_layers,
    )
    num_rows, num_layers = array_NLK.shape[:2]
    indices = list(range(num_layers) if layers is None else layers)
    _fail_for(
        first_problem(
            (
                len(indices) != len(model_layers)
                or not all(0 <= index < num_layers for index in indices),
                f"layers are {indices} of the {num_layers} of array; the model has {len(model_layers)}",
            )
        ),
        model_layers,
    )
    if rows is not None:
        selection = _signed(rows).flatten().cpu()
        is_mask = selection.dtype == torch.bool
        index_of_row = (
            torch.where(selection, selection.cumsum(0) - 1, -1)
            if is_mask
            else selection.long().clamp(min=-1)
        )
        num_selected = int(index_of_row.max()) + 1 if len(index_of_row) else 0
        is_numeric_mask = (
            not is_mask and len(index_of_row) > 2 and index_of_row.min() >= 0 and num_selected <= 2
        )
        _fail_for(
            first_problem(
                (
                    selection.is_floating_point() or is_numeric_mask,
                    f"rows ({selection.dtype}) must be a mask of torch.bool, or numbers of tokens",
                ),
                (
                    num_selected > num_rows or (is_mask and num_selected < num_rows),
                    f"rows has {num_selected} tokens; array has {num_rows}",
                ),
            ),
            model_layers,
        )
        no_expert_1LK = array_NLK.new_full((1, *array_NLK.shape[1:]), -1)  # for index -1
        array_NLK = torch.cat([array_NLK, no_expert_1LK])[index_of_row]
    return {
        name: array_NLK[:, index].contiguous()
        for name, index in zip(model_layers, indices, strict=True)
    }


def routing_to_array(routing: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Converts the result of :func:`record_routing` to int16 [T, L, K] on the host. Waits for the device once.
    ArgumentError: it has no layer, or its layers differ in T or K."""
    check_kind("routing", routing, Mapping, "a dict of what record_routing has recorded")
    shapes = {tuple(ids.shape) for ids in routing.values()}
    if len(shapes) != 1:
        raise ArgumentError(f"routing has shapes {sorted(shapes)}; it must have one, [tokens, K]")
    return torch.stack(list(routing.values()), 1).to(torch.int16).cpu()


class _Calls:
    """Counts a model's calls from now on, and identifies them when backward recomputes. `hooks` end it.

    num_routings: length of a sequence; with 1, all later nodes belong to it. None: one routing, for all calls.
    """

    def __init__(self, model: nn.Module, hooks: ExitStack, num_routings: int | None) -> None:
        self._num_routings = num_routings
        self._start: int | None = None  # first node of the current call
        self._recomputed = Recomputed()
        if num_routings in (None, 1):
            self._recomputed.nodes.append(range(next_node_number(), sys.maxsize))
        self.num = 0  # calls that have ended
        if num_routings is not None:
            hooks.callback(
                model.register_forward_pre_hook(self._begin, prepend=True).remove
            )  # it may be a layer
            hooks.callback(model.register_forward_hook(self._end).remove)

    @property
    def number(self) -> int | None:
        """The number of the current call, or of the call that backward recomputes; None: unknown."""
        # torch.compile cannot trace whether backward runs, and would break its graph.
        if self._num_routings is None and (torch.compiler.is_compiling() or not is_in_backward()):
            return 0
        if not is_in_backward():
            return None if self._start is None else self.num
        return self._recomputed.number()

    def _begin(self, *_: object) -> None:
        if not is_in_backward():
            self._start = next_node_number()

    def _end(self, *_: object) -> None:
        if self._start is None or is_in_backward():
            return
        self.num += 1
        if self._num_routings != 1:
            self._recomputed.nodes.append(range(self._start, next_node_number()))
        self._start = None


def _routed_layers(model: nn.Module) -> _Layers:
    """The layers of a model whose experts a router chooses. ArgumentError: it has no layer with experts."""
    return {
        name: (layer, listeners)
        for name, (layer, listeners) in layers_with_listeners(model).items()
        if not listeners.is_fixed
    }


def _signed(ids: _Array) -> torch.Tensor:
    """Casts ids to a dtype that has -1, and that torch can compare."""
    tensor = ids if isinstance(ids, torch.Tensor) else torch.as_tensor(ids, device="cpu")
    return tensor.to(_SIGNED.get(tensor.dtype, tensor.dtype))


def _fail_for(problem: ArgumentError | None, layers: _Layers) -> None:
    if problem is not None:
        for _, listeners in layers.values():
            listeners.heap._fail_for(problem, control.PHASE_PLAN)
        raise problem  # there is no layer


def _problem(layers: _Layers, routing: Mapping[str, torch.Tensor]) -> ArgumentError | None:
    """The reason why this routing cannot fit these layers, for any tokens, or None."""
    if routing.keys() != layers.keys():
        return ArgumentError(
            f"routing is for the layers {sorted(routing)}; the model has {sorted(layers)}"
        )
    for name, ids in routing.items():
        listeners = layers[name][1]
        is_none_TK = ids < 0
        if ids.dim() != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
            return ArgumentError(
                f"routing[{name!r}] ({ids.dtype} {list(ids.shape)}) must be of integers, [tokens, K]"
            )
        if listeners.override_router is None and ids.device.type != "cpu":
            continue  # the plan checks it, without a wait for the device
        is_wrong_TK = (ids < -1) | (ids >= listeners.num_experts)
        if listeners.override_router is not None:
            is_wrong_TK |= is_none_TK != is_none_TK.all(-1, keepdim=True)
        if is_wrong_TK.any():
            token = int(is_wrong_TK.any(-1).nonzero()[0])
            return ArgumentError(
                f"routing[{name!r}] has for token {token} {ids[token].tolist()}; the layer has {listeners.num_experts} "
                "experts, and -1 for none (to a trainer's router: in all slots of a token)"
            )
    return None


@contextmanager
def _choose(
    model: nn.Module, layers: _Layers, choice: Callable[[str, int, int | None], torch.Tensor]
) -> Iterator[None]:
    uncalled = set(layers)

    def choose(name: str, num_tokens: int, top_k: int | None) -> torch.Tensor:
        uncalled.discard(name)
        return choice(name, num_tokens, top_k)

    def add_choice(
        name: str, module: MoELayer, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        if kwargs.get("probs") is not None:
            module.heap._fail_for(
                ArgumentError(f"layer {name!r} is called with probs, which are of another choice"),
                control.PHASE_PLAN,
            )
        num_tokens = math.prod((args[0] if args else kwargs["x"]).shape[:-1])
        return args, {**kwargs, "topk_idx": choose(name, num_tokens, module.config.top_k)}

    with ExitStack() as removals:
        for name, (layer, listeners) in layers.items():
            raise_for(
                first_problem(
                    (
                        isinstance(layer, MoELayer) and layer.router is None,
                        f"layer {name!r} has no router (router=None) that could weigh what it is given",
                    ),
                    (
                        listeners.is_overridden,
                        f"layer {name!r} is given its experts by another context already; of several micro-batches "
                        "give replay_routing a list",
                    ),
                )
            )
            listeners.is_overridden = True
            removals.callback(setattr, listeners, "is_overridden", False)
            if listeners.override_router is None:
                removals.callback(
                    layer.register_forward_pre_hook(
                        partial(add_choice, name), with_kwargs=True
                    ).remove
                )
            else:
                removals.callback(listeners.override_router(model, name, partial(choose, name)))
        yield
        _check_all_called(uncalled)


def _check_all_called(uncalled: set[str]) -> None:
    if uncalled:
        raise ArgumentError(
            f"the layers {sorted(uncalled)} have not been called, or in a model compiled before"
        )
