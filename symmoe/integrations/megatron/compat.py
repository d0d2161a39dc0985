"""Differences between the supported versions of megatron-core, and refused fields of a configuration.

Megatron's configuration has hundreds of fields. This integration refuses, by name, fields that would change the layer's
results or schedule if it does not implement them; a field that a version lacks passes.
"""

from __future__ import annotations

from collections.abc import Iterator

import megatron.core
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.transformer_config import TransformerConfig

from symmoe.dispatch.plan import MAX_TOP_K
from symmoe.errors import ArgumentError, first_problem
from symmoe.precision.recipes import Float8Block, Recipe, precision_problem
from symmoe.symm_mem.heap import SymmetricHeap

MEGATRON_VERSION = megatron.core.__version__
if tuple(int(part) for part in MEGATRON_VERSION.split(".")[:2]) < (0, 16):
    raise ImportError(f"megatron-core {MEGATRON_VERSION} is too old; install megatron-core>=0.16.1")

_Limit = tuple[
    str, tuple[object, ...], str
]  # a field of TransformerConfig, its supported values, and the reason

_LAYER_LIMITS: tuple[_Limit, ...] = (
    ("moe_token_dispatcher_type", ("alltoall", "allgather"), "symmoe takes the dispatcher's place"),
    ("expert_tensor_parallel_size", (1,), "experts are not split over tensor-parallel ranks"),
    (
        "moe_router_padding_for_quantization",
        (False, None),
        "rows are not padded for quantized GEMMs",
    ),
    ("overlap_moe_expert_parallel_comm", (False,), "it frees activations that lie on the heap"),
    (
        "overlap_dispatch_backward_with_experts_wgrad",
        (False,),
        "weight gradients run on the heap's stream",
    ),
    ("moe_expert_rank_capacity_factor", (None,), "give DispatchOptions(capacity=rows) instead"),
    ("moe_paged_stash", (False,), "saved rows lie on the heap"),
    ("transformer_impl", ("local", "transformer_engine"), "the layer is for training"),
)

_EXPERT_LIMITS: tuple[_Limit, ...] = (
    ("add_bias_linear", (False,), "the experts have no biases"),
    ("moe_apply_probs_on_input", (False,), "the probs multiply the activation"),
    ("fp4", (None, False), "the experts compute in fp32, fp16, bf16 or fp8"),
    (
        "activation_func_fp8_input_store",
        (False,),
        "the experts keep FC1's output in the working dtype",
    ),
    ("moe_mlp_glu_interleave_size", (None,), "gate and up features are two halves of FC1"),
    ("init_model_with_meta_device", (False,), "the experts are made on the device they train on"),
)

_FP8_LIMITS: tuple[_Limit, ...] = (
    ("fp8_recipe", ("blockwise",), "the experts scale blocks of 128"),
    ("fp8_param", (False,), "parameters of the experts are of params_dtype"),
    ("fp8_wgrad", (True,), "weight gradients are products of FP8 numbers too"),
    ("first_last_layers_bf16", (False,), "the experts of all layers compute in FP8"),
)


def expert_hidden(config: TransformerConfig) -> int:
    """The width of the experts' rows: Megatron's layer projects tokens to a latent width and back."""
    return int(config.moe_latent_size or config.hidden_size)


def slots_per_token(config: TransformerConfig) -> int:
    """K, the most experts of a token. Padded capacity fills experts with additional tokens of prob 0."""
    pads = config.moe_pad_expert_input_to_capacity
    return int(config.num_moe_experts if pads else config.moe_router_topk)


def layer_problem(config: TransformerConfig) -> ArgumentError | None:
    """The setting that the layer and its dispatcher do not support, or None."""
    field = (
        "moe_pad_expert_input_to_capacity (True) may send a token to all experts: num_moe_experts"
        if config.moe_pad_expert_input_to_capacity
        else "moe_router_topk"
    )
    top_k = slots_per_token(config)
    # Parts of a layer that CUDA graphs capture; the field was renamed in 0.19.
    if (scopes := getattr(config, "cuda_graph_modules", None)) is None:
        scopes = config.cuda_graph_scope
    scopes = scopes if isinstance(scopes, list) else [scopes] if scopes else []
    captured = {getattr(scope, "name", str(scope)) for scope in scopes}
    return first_problem(
        (top_k > MAX_TOP_K, f"{field} ({top_k}) must be at most {MAX_TOP_K}"),
        (
            config.cuda_graph_impl != "none" and captured != {"attn"},
            f"cuda_graph_impl ({config.cuda_graph_impl!r}) may capture ['attn'] only, not "
            f"{sorted(captured) or 'whole layers'}",
        ),
        *_rules(config, _LAYER_LIMITS),
    )


def experts_problem(config: TransformerConfig) -> ArgumentError | None:
    """The setting that SymmExperts do not support, or None. The experts check the activation."""
    offloaded = {"expert_fc1", "moe_act"} & set(getattr(config, "offload_modules", None) or ())
    return first_problem(
        (
            getattr(config, "fine_grained_activation_offloading", False) and offloaded,
            f"offload_modules ({sorted(offloaded)}) must not name parts of the experts",
        ),
        *_rules(config, (*_EXPERT_LIMITS, *(_FP8_LIMITS if config.fp8 else ()))),
    ) or precision_problem(
        precision_of(config),
        moe_ffn_hidden_size=config.moe_ffn_hidden_size,
        **{"moe_latent_size" if config.moe_latent_size else "hidden_size": expert_hidden(config)},
    )


def precision_of(config: TransformerConfig) -> Recipe | None:
    """The experts' recipe with `fp8`: Transformer Engine's blockwise recipe, whose scales are powers of two unless its
    environment variable changes this. With "hybrid" gradients are E4M3, too."""
    return Float8Block(power_of_two=True) if config.fp8 else None


def groups_problem(
    pg_collection: ProcessGroupCollection, heap: SymmetricHeap
) -> ArgumentError | None:
    """The reason why these process groups cannot use `heap`, or None."""
    ep = pg_collection.ep
    return first_problem(
        (
            pg_collection.expt_tp.size() != 1,
            f"expert_tensor_parallel_size ({pg_collection.expt_tp.size()}) must be 1: "
            "experts are not split over tensor-parallel ranks",
        ),
        (
            (ep.rank(), ep.size()) != (heap.rank, heap.num_ranks),
            f"heap is rank {heap.rank} of {heap.num_ranks}, this process is rank {ep.rank()} of {ep.size()} in "
            "the expert-parallel group; open the heap over that group (open_heap does)",
        ),
    )


def process_groups(pg_collection: ProcessGroupCollection | None) -> ProcessGroupCollection:
    """The given collection, or Megatron's default. 0.16 and 0.17 pass none to a subclass of MoELayer."""
    return get_default_pg_collection() if pg_collection is None else pg_collection


def _rules(config: TransformerConfig, limits: tuple[_Limit, ...]) -> Iterator[tuple[bool, str]]:
    """The limits as rules of first_problem."""
    for field, supported, reason in limits:
        value = getattr(config, field, supported[0])
        alternatives = " or ".join(map(repr, supported))
        yield value not in supported, f"{field} ({value!r}) must be {alternatives}: {reason}"
