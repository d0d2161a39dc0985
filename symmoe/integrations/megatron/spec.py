"""Creates the heap of a model's layers, and puts the layers into Megatron's specs of any supported version."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, TypeVar

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from symmoe.errors import ArgumentError
from symmoe.integrations.megatron.compat import process_groups, slots_per_token
from symmoe.integrations.megatron.experts import SymmExperts, routed_config
from symmoe.integrations.megatron.layer import DispatchOptions, SymmMoELayer
from symmoe.symm_mem.heap import SymmetricHeap
from symmoe.symm_mem.row_budget import with_margin
from symmoe.training.memory_plan import plan_memory

Spec = TypeVar("Spec")


def heap_bytes(
    config: TransformerConfig, *, num_tokens: int, num_layers: int, load_factor: float | None = None
) -> int:
    """`num_bytes` for :func:`open_heap`. Local.

    Args:
        config: Megatron's, with expert_model_parallel_size.
        num_tokens: the maximum of tokens of a rank in a micro-batch.
        num_layers: MoE layers that keep rows for backward at the same time (docs/megatron.md, Memory); 1 if they are
            recomputed.
        load_factor: the maximum of rows that a rank receives, over num_tokens * moe_router_topk (with padded capacity:
            num_moe_experts). None: the worst routing; trained routers stay below 2.
    """
    num_ranks: int = config.expert_model_parallel_size
    top_k = slots_per_token(config)
    rows: int = num_tokens * num_ranks * min(top_k, config.num_moe_experts // num_ranks)
    if load_factor is not None:
        rows = min(rows, int(load_factor * num_tokens * top_k))
    return plan_memory(
        # The larger layout.
        routed_config(config, capacity=with_margin(rows), layout="expert-major"),
        num_ranks=num_ranks,
        num_tokens=num_tokens,
        num_layers=num_layers,
        dtype=config.params_dtype,
    ).heap_bytes


def open_heap(
    num_bytes: int,
    *,
    pg_collection: ProcessGroupCollection | None = None,
    timeout_s: float = 30.0,
    ranks_per_node: int | None = None,
) -> SymmetricHeap:
    """A symmetric heap over this rank's expert-parallel group (`pg_collection=None`: of initialize_model_parallel).
    Collective over that group. `num_bytes`: :func:`heap_bytes`; other arguments and errors are SymmetricHeap's."""
    return SymmetricHeap(
        process_groups(pg_collection).ep,
        num_bytes=num_bytes,
        timeout_s=timeout_s,
        ranks_per_node=ranks_per_node,
    )


def use_symmoe(
    spec: Spec,
    heap: SymmetricHeap,
    *,
    options: DispatchOptions | None = None,
    pg_collection: ProcessGroupCollection | None = None,
    keeps_experts: bool = False,
) -> Spec:
    """A copy of `spec` in which every MoE layer is a SymmMoELayer with SymmExperts. Local.

    Args:
        spec: of a layer, of a block of layers (its dense layers do not change), or only of an MoE layer.
        heap: the heap of the expert-parallel group (:func:`open_heap`).
        options: how rows travel; None: the defaults.
        pg_collection: the model's process groups. Needed with megatron-core 0.16 and 0.17 if they are not those of
            initialize_model_parallel; newer versions pass them to the layer themselves.
        keeps_experts: as :func:`use_symmoe_dispatcher`.

    Raises:
        ArgumentError: the spec has no MoE layer.
    """
    params: dict[str, Any] = {"heap": heap, "options": options or DispatchOptions()}
    if pg_collection is not None:
        params["pg_collection"] = pg_collection
    return _replaced(spec, None if keeps_experts else SymmExperts, SymmMoELayer, params)


def use_symmoe_dispatcher(spec: Spec, heap: SymmetricHeap, **kwargs: Any) -> Spec:
    """:func:`use_symmoe`, but keeps the experts of the spec: TEGroupedMLP, SequentialMLP or custom experts.

    Copies their results and gradients to the heap; these experts read their row counts on the host.
    """
    return use_symmoe(spec, heap, keeps_experts=True, **kwargs)


def use_symmoe_experts(spec: Spec) -> Spec:
    """A copy of `spec` in which the MoE layers have SymmExperts and Megatron's own dispatcher. Needs no heap."""
    return _replaced(spec, SymmExperts, None, {})


def _replaced(
    spec: Spec, experts: type | None, module: type | None, params: dict[str, Any]
) -> Spec:
    """A copy of `spec` whose MoE layers have these experts, this class and more arguments; None: the spec's own."""

    def replace(layer: Any) -> Any:
        is_spec = isinstance(layer, ModuleSpec)  # in 0.16 and 0.17; since 0.18 functools.partial
        submodules = layer.submodules if is_spec else layer.keywords["submodules"]
        if experts is not None:
            submodules = dataclasses.replace(submodules, experts=experts)
        if is_spec:
            return dataclasses.replace(
                layer,
                module=module or layer.module,
                submodules=submodules,
                params=layer.params | params,
            )
        keywords = layer.keywords | params | {"submodules": submodules}
        return functools.partial(module or layer.func, *layer.args, **keywords)

    result: Spec = _with_layers(spec, replace)
    if result is spec:
        raise ArgumentError(
            f"spec ({type(spec).__name__}) has no MoE layer; make it with num_experts"
        )
    return result


def _with_layers(spec: Any, replace: Callable[[Any], Any]) -> Any:
    """A copy of `spec` in which MoE layers are replaced; `spec` itself if it has none."""
    module = spec.module if isinstance(spec, ModuleSpec) else getattr(spec, "func", None)
    if isinstance(module, type) and issubclass(module, MoELayer):
        return replace(spec)
    if isinstance(spec, list):
        layers = [_with_layers(layer, replace) for layer in spec]
        return spec if all(map(operator.is_, layers, spec)) else layers
    if isinstance(spec, functools.partial):
        parts = spec.keywords
    elif dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        parts = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    else:
        return spec
    replacements = {
        name: replaced
        for name, part in parts.items()
        if (replaced := _with_layers(part, replace)) is not part
    }
    copy_with: Any = (
        functools.partial if isinstance(spec, functools.partial) else dataclasses.replace
    )
    return copy_with(spec, **replacements) if replacements else spec
