"""What a layer's call keeps until backward, and what a step takes at its peak."""

from dataclasses import fields

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from symmoe import MoEConfig, MoELayer, SymmetricHeap
from symmoe.dispatch.plan import Plan
from symmoe.kernels import hooked
from symmoe.moe.ep_step import ExpertParallelMLP


def bytes_kept(config: MoEConfig, num_tokens: int) -> tuple[int, int]:
    """Bytes of (heap, ordinary memory) between forward and backward of one layer on one rank."""
    with SymmetricHeap(num_bytes=4 << 20, backend="host") as heap:
        layer = MoELayer(config, heap)
        x = torch.randn(num_tokens, config.hidden, requires_grad=True)
        layer(x)  # the first call measures how much room the others get
        y, _ = layer(x)
        node = y.grad_fn
        while type(node).__name__ != f"{ExpertParallelMLP.__name__}Backward":
            node = node.next_functions[0][0]
        plan: Plan = node.step.plan
        saved = [
            *(getattr(plan, field.name) for field in fields(Plan)),
            *node.index,
            *node.saved_tensors[4:],
        ]  # first the router's
        weights, storages = {id(p) for p in layer.parameters()}, {}
        for tensor in saved:
            if isinstance(tensor, torch.Tensor) and id(tensor) not in weights:
                storage = tensor.untyped_storage()
                is_leased = heap.owns(tensor)
                base = tensor if tensor._base is None else tensor._base
                storages[storage.data_ptr()] = (
                    is_leased,
                    base.nbytes if is_leased else storage.nbytes(),
                )
        leased = sum(size for is_leased, size in storages.values() if is_leased)
        # A plan counts the room that the call got; what its routing did not need of it has gone back to the heap.
        assert (leased <= heap.leased_bytes) == (config.capacity is not None or leased == 0)
        return leased, sum(size for is_leased, size in storages.values() if not is_leased)


def bytes_at_peak(layer: MoELayer, x: torch.Tensor, dy: torch.Tensor) -> int:
    """Ordinary memory and leases at the worst moment of a step on CPUs, as torch's profiler sees it, beyond what was
    there before. What a kernel's twin takes while it runs is not the step's."""

    def kernel_seen(name: str, kernel, /, *args, **options):
        with record_function(f"leased {layer.heap.leased_bytes}"):
            return kernel(*args, **options)

    torch.autograd.grad(
        layer(x)[0], (x, *layer.parameters()), dy
    )  # measures how much room the next call gets
    with (
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
        hooked(x.device, kernel_seen),
    ):
        y = layer(x)[0]
        gradients = torch.autograd.grad(y, (x, *layer.parameters()), dy)
    assert len(gradients) == 4
    ordinary = leased = peak = kernel_end = 0
    for event in sorted(
        profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()
    ):
        if event.name().startswith("leased "):
            leased = int(event.name().split()[1])
            kernel_end = event.start_ns() + event.duration_ns()
        elif event.name() == "[memory]" and event.start_ns() > kernel_end:
            ordinary += event.nbytes()
        peak = max(peak, ordinary + leased)
    return peak
