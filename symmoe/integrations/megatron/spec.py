"""Putting the layer into Megatron's specs, of any supported version."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec

from symmoe.errors import ArgumentError
from symmoe.integrations.megatron.compat import process_groups
from symmoe.integrations.megatron.dispatcher import DispatchOptions
from symmoe.integrations.megatron.experts import SymmExperts
from symmoe.integrations.megatron.layer import SymmMoELayer
from symmoe.symm_mem.heap import SymmetricHeap

Spec = TypeVar("Spec")


def open_heap(
    num_bytes: int,
    *,
    pg_collection: ProcessGroupCollection | None = None,
    timeout_s: float = 30.0,
    ranks_per_node: int | None = None,
) -> SymmetricHeap:
    """A symmetric heap over this rank's expert-parallel group. Collective over that group.

    Args:
        num_bytes: size of each rank's arena; docs/megatron.md says how much is needed.
        pg_collection: process groups; None: those of initialize_model_parallel.
        timeout_s: bound of every wait for a peer.
        ranks_per_node: see SymmetricHeap.

    Raises:
        ArgumentError, BackendUnavailable, ConfigMismatch: see SymmetricHeap.
    """
    group = process_groups(pg_collection).ep
    return SymmetricHeap(group, num_bytes=num_bytes, timeout_s=timeout_s, ranks_per_node=ranks_per_node)


def use_symmoe(
    spec: Spec,
    heap: SymmetricHeap,
    *,
    options: DispatchOptions | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> Spec:
    """A copy of `spec` in which every MoE layer is a SymmMoELayer with SymmExperts. Local.

    Args:
        spec: of a layer, of a block of layers (its dense layers do not change), or only of an MoE layer.
        heap: the heap of the expert-parallel group (:func:`open_heap`).
        options: how rows travel; None: the defaults.
        pg_collection: the model's process groups. Needed with megatron-core 0.16 and 0.17 if they are not those of
            initialize_model_parallel; newer versions hand them to the layer themselves.

    Raises:
        ArgumentError: there is no MoE layer in the spec.
    """
    params = _layer_params(heap, options, pg_collection)
    return _replaced(spec, lambda layer: layer.replaced(SymmMoELayer, experts=SymmExperts, params=params))


def use_symmoe_dispatcher(
    spec: Spec,
    heap: SymmetricHeap,
    *,
    options: DispatchOptions | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> Spec:
    """Same as :func:`use_symmoe`, but keeps the experts of the spec: TEGroupedMLP, SequentialMLP or your own.

    Their results and gradients are copied to the heap, and they read their row counts on the host.
    """
    params = _layer_params(heap, options, pg_collection)
    return _replaced(spec, lambda layer: layer.replaced(SymmMoELayer, experts=layer.submodules.experts, params=params))


def use_symmoe_experts(spec: Spec) -> Spec:
    """A copy of `spec` in which the MoE layers have SymmExperts and Megatron's own dispatcher. Needs no heap."""
    return _replaced(spec, lambda layer: layer.replaced(layer.module, experts=SymmExperts, params={}))


@dataclasses.dataclass(frozen=True, slots=True)
class _LayerSpec:
    """The spec of an MoE layer in either form: ModuleSpec in 0.16 and 0.17, functools.partial since 0.18."""

    spec: Any

    @property
    def module(self) -> Any:
        """The class of the layer, if this is the spec of a module at all."""
        return self.spec.module if isinstance(self.spec, ModuleSpec) else getattr(self.spec, "func", None)

    @property
    def is_moe(self) -> bool:
        """Whether the layer is an MoELayer."""
        return isinstance(self.module, type) and issubclass(self.module, MoELayer)

    @property
    def submodules(self) -> MoESubmodules:
        """The submodules of the layer."""
        return self.spec.submodules if isinstance(self.spec, ModuleSpec) else self.spec.keywords["submodules"]

    def replaced(self, module: type, *, experts: Any, params: dict[str, Any]) -> Any:
        """A spec of the same form for `module`, with these experts and with more arguments."""
        submodules = dataclasses.replace(self.submodules, experts=experts)
        if isinstance(self.spec, ModuleSpec):
            params = {**self.spec.params, **params}
            return dataclasses.replace(self.spec, module=module, submodules=submodules, params=params)
        return functools.partial(module, *self.spec.args, **{**self.spec.keywords, **params, "submodules": submodules})


def _layer_params(
    heap: SymmetricHeap, options: DispatchOptions | None, pg_collection: ProcessGroupCollection | None
) -> dict[str, Any]:
    params: dict[str, Any] = {"heap": heap, "options": options or DispatchOptions()}
    return params if pg_collection is None else {**params, "pg_collection": pg_collection}


def _replaced(spec: Spec, replace: Callable[[_LayerSpec], Any]) -> Spec:
    replaced: Spec
    replaced, num_layers = _replace_layers(spec, replace)
    if not num_layers:
        raise ArgumentError(f"spec ({type(spec).__name__}) has no MoE layer; make it with num_experts")
    return replaced


def _replace_layers(spec: Any, replace: Callable[[_LayerSpec], Any]) -> tuple[Any, int]:
    """A copy of `spec`, and how many MoE layers have been replaced in it."""
    layer = _LayerSpec(spec)
    if layer.is_moe:
        return replace(layer), 1
    if isinstance(spec, list):
        pairs = [_replace_layers(part, replace) for part in spec]
        return [part for part, _ in pairs], sum(count for _, count in pairs)
    if isinstance(spec, functools.partial):
        submodules, count = _replace_layers(spec.keywords.get("submodules"), replace)
        return (functools.partial(spec, submodules=submodules) if count else spec), count
    if not dataclasses.is_dataclass(spec) or isinstance(spec, type):
        return spec, 0
    new, total = copy.copy(spec), 0
    for field in dataclasses.fields(spec):
        part, count = _replace_layers(getattr(spec, field.name), replace)
        if count:
            setattr(new, field.name, part)
        total += count
    return new, total
