"""What a layer's call keeps until backward."""

from __future__ import annotations

from dataclasses import fields

import torch

from symmoe import MoEConfig, MoELayer, Plan, SymmetricHeap
from symmoe.moe.ep_step import _ExpertParallelMLP


def bytes_kept(config: MoEConfig, num_tokens: int) -> tuple[int, int]:
    """Bytes of (heap, ordinary memory) between forward and backward of one layer on one rank."""
    with SymmetricHeap(num_bytes=4 << 20, backend="host") as heap:
        layer = MoELayer(config, heap)
        x = torch.randn(num_tokens, config.hidden, requires_grad=True)
        layer(x)  # the first call measures how much room the others get
        y, _ = layer(x)
        node = y.grad_fn
        while type(node).__name__ != f"{_ExpertParallelMLP.__name__}Backward":
            node = node.next_functions[0][0]
        plan: Plan = node.step.plan
        kept = [getattr(plan, field.name) for field in fields(Plan)] + list(node.saved_tensors)
        weights = {id(p) for p in layer.parameters()}
        found = {}
        for tensor in kept:
            if isinstance(tensor, torch.Tensor) and id(tensor) not in weights:
                storage = tensor.untyped_storage()
                is_leased = heap.owns(tensor)
                whole = tensor if tensor._base is None else tensor._base
                found[storage.data_ptr()] = (is_leased, whole.nbytes if is_leased else storage.nbytes())
        leased = sum(size for is_leased, size in found.values() if is_leased)
        # A plan counts the room that the call got; what its routing did not need of it has gone back to the heap.
        assert (leased <= heap.leased_bytes) == (config.capacity is not None or leased == 0)
        return leased, sum(size for is_leased, size in found.values() if not is_leased)
