"""How large a heap the layers of a model need."""

from __future__ import annotations

from megatron.core.transformer.transformer_config import TransformerConfig

from symmoe.kernels.control import ControlLayout

_SHARED_BUFFERS = 3  # expert output, output gradients, input gradients
_GROWTH = 2.25  # a shared buffer and the smaller one that it has replaced, which a graph may still hold
_LEASE_BYTES = 512  # what rounding adds to a lease, at most


def heap_bytes(config: TransformerConfig, *, num_tokens: int, num_layers: int, load_factor: float | None = None) -> int:
    """`num_bytes` for :func:`open_heap`. Local.

    Args:
        config: Megatron's, with expert_model_parallel_size.
        num_tokens: the most tokens that a rank has in a micro-batch.
        num_layers: MoE layers whose rows are kept for backward at one time: those of a pipeline stage times the
            micro-batches in flight, or 1 if MoE layers or whole layers are recomputed.
        load_factor: the most rows that a rank receives, over num_tokens * moe_router_topk. None: all that any routing
            can send to one rank; trained routers stay below 2.

    Returns:
        bytes per rank.
    """
    num_ranks: int = config.expert_model_parallel_size
    top_k: int = config.moe_router_topk
    tokens = num_tokens * num_ranks
    rows: int = tokens * min(top_k, config.num_moe_experts // num_ranks)
    if load_factor is not None:
        rows = min(rows, int(load_factor * num_tokens * top_k))
    row_bytes: int = config.hidden_size * config.params_dtype.itemsize
    # Slots and probs on their way, one call at a time.
    metadata_bytes = 2 * min(rows, tokens) * top_k * 4
    leases = num_layers + _SHARED_BUFFERS + 2
    kept_bytes = int(rows * row_bytes * (num_layers + _GROWTH * _SHARED_BUFFERS))
    return kept_bytes + metadata_bytes + leases * _LEASE_BYTES + ControlLayout(num_ranks).num_bytes
