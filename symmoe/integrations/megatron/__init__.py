"""symmoe in Megatron-Core: a MoELayer whose tokens travel over the symmetric heap, and its grouped experts.

    # once per process, after initialize_model_parallel
    heap = open_heap(heap_bytes(config, num_tokens=4096, num_layers=8))
    spec = use_symmoe(get_gpt_layer_local_spec(num_experts=8), heap)
    model = GPTModel(config, spec, ...)                       # everything else as before

Needs megatron-core 0.16.1 or newer. docs/megatron.md lists supported and refused options.
"""

from __future__ import annotations

from symmoe.integrations.megatron.compat import MEGATRON_VERSION
from symmoe.integrations.megatron.experts import SymmExperts
from symmoe.integrations.megatron.layer import DispatchOptions, SymmMoELayer, SymmTokenDispatcher
from symmoe.integrations.megatron.spec import (
    heap_bytes,
    open_heap,
    use_symmoe,
    use_symmoe_dispatcher,
    use_symmoe_experts,
)

__all__ = [
    "MEGATRON_VERSION",
    "DispatchOptions",
    "SymmExperts",
    "SymmMoELayer",
    "SymmTokenDispatcher",
    "heap_bytes",
    "open_heap",
    "use_symmoe",
    "use_symmoe_dispatcher",
    "use_symmoe_experts",
]
