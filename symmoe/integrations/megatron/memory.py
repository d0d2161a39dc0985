"""How large a heap the layers of a model need."""

from __future__ import annotations

from megatron.core.transformer.transformer_config import TransformerConfig

from symmoe.integrations.megatron.compat import slots_per_token
from symmoe.integrations.megatron.experts import activation_of
from symmoe.moe.config import MoEConfig
from symmoe.symm_mem.row_budget import RowHistory
from symmoe.training.memory_plan import plan_memory


def heap_bytes(config: TransformerConfig, *, num_tokens: int, num_layers: int, load_factor: float | None = None) -> int:
    """`num_bytes` for :func:`open_heap`. Local.

    Args:
        config: Megatron's, with expert_model_parallel_size.
        num_tokens: the most tokens that a rank has in a micro-batch.
        num_layers: MoE layers whose rows are kept for backward at one time: those of a pipeline stage, or of one of its
            chunks, times the micro-batches in flight (docs/megatron.md, Memory), or 1 if MoE layers or whole layers
            are recomputed.
        load_factor: the most rows that a rank receives, over num_tokens * moe_router_topk
            (with padded capacity: num_moe_experts). None: all that any routing
            can send to one rank; trained routers stay below 2.

    Returns:
        bytes per rank.
    """
    num_ranks: int = config.expert_model_parallel_size
    top_k = slots_per_token(config)
    tokens = num_tokens * num_ranks
    rows: int = tokens * min(top_k, config.num_moe_experts // num_ranks)
    if load_factor is not None:
        rows = min(rows, int(load_factor * num_tokens * top_k))
    history = RowHistory()
    history.note(num_tokens, rows, min(rows, tokens))
    room = history.room(num_tokens, None)
    assert room is not None  # there is a call to go by
    settings = MoEConfig(
        hidden=config.hidden_size,
        ffn=config.moe_ffn_hidden_size,
        num_experts=config.num_moe_experts,
        top_k=top_k,
        activation=activation_of(config).activation,
        router="none",
        capacity=room.rows,
        layout="expert-major",  # the larger one
    )
    return plan_memory(
        settings,
        num_ranks=num_ranks,
        num_tokens=num_tokens,
        num_layers=num_layers,
        dtype=config.params_dtype,
    ).heap_bytes
