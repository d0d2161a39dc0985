"""The MoE layer: router, balance, and the expert-parallel step that joins dispatch, experts and combine.

May use the trips and the grouped layers. Begin with `layer`, then `routed_experts` and `ep_step`.
"""
