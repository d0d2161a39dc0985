"""Mistakes of training loops that nothing else would show: ranks that train apart, found by their first optimizer step.

The first step of an optimizer that has parameters of a layer takes a checksum before, and the next plan on the heap one
after it. They travel in words of the plan's barrier that are free, and every rank warns of what they say: equal
experts, or dense parameters, in the layers or elsewhere, that differ before or after. From then on there is
nothing to do.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from symmoe.errors import ArgumentError, warn
from symmoe.grouped.parameters import local_part, named_parameters

if TYPE_CHECKING:
    from symmoe.moe.ddp_and_fsdp import ExpertParallelModule

_MOST_STEPS = (
    16  # of optimizers that have no parameter of a layer; then nobody looks for one any more
)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WORD_BYTES = 7  # of positive words
_HALF = 1 << 28  # two checksums in one word

_AT_START = (
    "dense parameters differ between ranks before the first optimizer step: make them equal with "
    "symmoe.broadcast_parameters(model) when the model is built"
)
_NOT_REDUCED = (
    "dense parameters differ between ranks after the first optimizer step: call symmoe.reduce_gradients(model) after "
    "backward and before the optimizer"
)
_ONLY_LAYERS = (
    "dense parameters outside of the MoE layers differ between ranks after the first optimizer step, and were equal "
    "before: call symmoe.reduce_gradients(model) of the whole model, not of its layers only"
)
_CHANGED = (
    "dense parameters differ between ranks after the first optimizer step: gradients were changed after "
    "symmoe.reduce_gradients, otherwise on each rank. Clip with symmoe.clip_grad_norm: torch's clip_grad_norm_ counts "
    "only this rank's experts"
)
_EQUAL_EXPERTS = (
    "experts are equal on all ranks, as from equal seeds; those of different ranks are different parameters. Seed them "
    "with heap.rank, and make the others equal with symmoe.broadcast_parameters(model)"
)

_layers: weakref.WeakSet[ExpertParallelModule] = weakref.WeakSet()  # whose first step has not come
_num_steps = 0  # of optimizers that have none of them
_hooks: list[Any] = []


def watch_first_step(layer: ExpertParallelModule) -> None:
    """Looks at the first step of an optimizer that has parameters of a layer, which is new or has new experts."""
    global _num_steps
    if layer.heap.num_ranks == 1 or layer.heap.device.type == "meta":
        return
    _layers.add(layer)
    _num_steps = 0
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))


class FirstStep:
    """What the ranks of a heap compare in the plan after a first step: the layers' dense parameters, which must be
    equal, unless DDP or FSDP reduces their gradients; and their experts, which must not. Parameters elsewhere may be a
    rank's own, but if they were equal before the step, they must be after it. given: what the optimizer has, by id;
    elsewhere: those of them that are of no layer."""

    @torch.no_grad()
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        layers: Sequence[ExpertParallelModule],
        given: dict[int, torch.Tensor],
        elsewhere: list[torch.Tensor],
    ) -> None:
        parameters = [each for layer in layers for each in named_parameters(layer)]
        experts = [parameter for _, parameter, is_expert in parameters if is_expert]
        dense: list[torch.Tensor] = [
            parameter for _, parameter, is_expert in parameters if not is_expert
        ]
        kinds = [kind.__name__ for kind in type(optimizer).__mro__]
        if "ZeroRedundancyOptimizer" in kinds and not given.keys().isdisjoint(map(id, experts)):
            raise ArgumentError(
                "optimizer (ZeroRedundancyOptimizer) has experts, which differ from rank to rank, and overwrites "
                "them with those of the rank to which it gives their update: give it the dense parameters only, "
                "and the experts an optimizer of their own"
            )
        in_ddp = any(layer.replicas.its_ddp() is not None for layer in layers)
        if in_ddp or any(hasattr(parameter, "device_mesh") for parameter in given.values()):
            dense = elsewhere = []
        elif not any(
            parameter.requires_grad for parameter in dense
        ):  # then what is outside of the layers tells more
            dense = dense + elsewhere
            elsewhere = []
        self._layers = [weakref.ref(layer) for layer in layers]
        self._dense = [weakref.ref(parameter) for parameter in dense]
        self._elsewhere = [weakref.ref(parameter) for parameter in elsewhere]
        parts = [part for parameter in experts if (part := local_part(parameter)).numel()]
        # Copies of one expert (upcycling) say nothing.
        says_nothing = not parts or _are_copies(layers[0])
        self._experts = layers[0].heap.rank + 1 if says_nothing else _checksum(parts)
        self._before = (
            _checksum(dense) << 1
        )  # even: a plan's barrier has a word 1 for something else
        self._before_elsewhere = _checksum(elsewhere) % _HALF

    def words(self) -> tuple[int, ...]:
        """Of this rank."""
        dense = [parameter for its in self._dense if (parameter := its()) is not None]
        elsewhere = [parameter for its in self._elsewhere if (parameter := its()) is not None]
        if len(dense) + len(elsewhere) < len(self._dense) + len(self._elsewhere):
            return ()
        halves = self._before_elsewhere * _HALF + _checksum(elsewhere) % _HALF
        return self._before, _checksum(dense), self._experts, halves

    def compare(self, received: Sequence[Sequence[int]]) -> None:
        """Warns of what the ranks of a node have published; ranks that have had no step have published zeros."""
        rows = [words for words in received if words[1] > 0]
        before, after, experts = (len({row[column] for row in rows}) for column in range(3))
        if before > 1:
            warn(_AT_START)
        elif after > 1:
            are_reduced = any(
                layer.replicas.are_reduced for its in self._layers if (layer := its()) is not None
            )
            warn(_CHANGED if are_reduced else _NOT_REDUCED)
        elif len({row[3] for row in rows}) > len({row[3] // _HALF for row in rows}) == 1:
            warn(_ONLY_LAYERS)
        if experts == 1 and len(rows) > 1:
            warn(_EQUAL_EXPERTS)


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    global _num_steps
    if (
        torch.compiler.is_compiling()
        or not _layers
        or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
    ):
        return
    given = {
        id(parameter): parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    layers = [
        layer
        for layer in _layers
        if any(id(parameter) in given for parameter in layer.parameters())
    ]
    _num_steps += 1
    if not layers and _num_steps >= _MOST_STEPS:
        _layers.clear()
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    elsewhere = [each for number, each in given.items() if number not in inside and _has_bits(each)]
    for heap in {layer.heap for layer in layers}:
        its_layers = [layer for layer in layers if layer.heap is heap]
        heap.first_step = FirstStep(optimizer, its_layers, given, elsewhere)
    _layers.difference_update(layers)


def _sums(tensors: Iterable[torch.Tensor], *, by_row: bool = False) -> list[list[int]]:
    """Sums of the bits of tensors, or of the rows of their first dimension, whatever the order. Synchronises."""
    found = [
        tensor.detach().view(_INTEGERS[tensor.element_size()]).flatten(int(by_row))
        for tensor in tensors
    ]
    return [sums.view(-1).tolist() for sums in [bits.sum(-1, dtype=torch.int64) for bits in found]]


def _checksum(tensors: Iterable[torch.Tensor]) -> int:
    """Whatever the order of the tensors: layers stand in a WeakSet, whose order differs from rank to rank."""
    return 1 + int.from_bytes(
        hashlib.sha256(repr(sorted(_sums(tensors))).encode()).digest()[:_WORD_BYTES], "little"
    )


def _has_bits(parameter: torch.Tensor) -> bool:
    """Whether its own memory, which can be summed up, is all that there is of it."""
    return (
        type(parameter) in (torch.Tensor, torch.nn.Parameter)
        and parameter.layout is torch.strided
        and not parameter.is_meta
        and parameter.element_size() in _INTEGERS
    )


def _are_copies(layer: ExpertParallelModule) -> bool:
    """Whether this rank has several experts, all of them equal."""
    weights = [weight.detach() for weight in layer.experts.fc1.weight_parameters()]
    sums = [each for found in _sums(weights, by_row=len(weights) == 1) for each in found]
    return len(sums) > 1 and len(set(sums)) == 1
