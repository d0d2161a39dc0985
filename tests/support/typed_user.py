"""A program of a user, read by mypy --strict: what the annotations say outside of the package (test_types.py).
`assert_type` fails where an annotation is lost: what mypy knows nothing of is Any."""

import torch
from typing_extensions import assert_type

import symmoe


def layer_step(heap: symmoe.SymmetricHeap, x: torch.Tensor) -> torch.Tensor:
    """Forward and backward of the whole layer."""
    config = symmoe.MoEConfig(
        hidden=16, ffn=8, num_experts=4, top_k=2, router=symmoe.RouterConfig(aux_loss_coef=0.01)
    )
    moe = symmoe.MoELayer(config, heap, dtype=x.dtype)
    y, metrics = moe(x)
    assert_type(y, torch.Tensor)
    assert_type(metrics, symmoe.MoEMetrics)
    assert_type(metrics.aux_loss, torch.Tensor)
    loss = y.square().mean() + metrics.aux_loss
    loss.backward()
    symmoe.reduce_gradients(moe)
    assert_type(symmoe.training.clip_grad_norm(moe, 1.0), torch.Tensor)
    assert_type(moe.experts, symmoe.GroupedMLP)
    return y.detach()


def parts_step(heap: symmoe.SymmetricHeap, x: torch.Tensor) -> torch.Tensor:
    """The parts on their own, without a copy."""
    router = symmoe.Router(symmoe.MoEConfig(hidden=16, ffn=8, num_experts=4, top_k=2))
    routed = router(x)
    plan = symmoe.make_plan(routed.topk_idx, num_experts=4, heap=heap)
    assert_type(plan, symmoe.dispatch.Plan)
    assert_type(plan.num_rows, int | None)
    mlp = symmoe.GroupedMLP(4 // heap.num_ranks, 16, 8, dtype=x.dtype)
    with heap.lease((plan.row_capacity, 16), x.dtype, name="rows") as lease:
        assert_type(lease, symmoe.symm_mem.Lease)
        rows, row_probs, handle = symmoe.dispatch_tokens(
            x, plan, probs=routed.probs, out=lease.tensor
        )
        assert_type(row_probs, torch.Tensor)
        out = mlp(rows, plan.splits, row_probs)
        assert_type(out, torch.Tensor)
        y = symmoe.combine_tokens(out, handle, order="slot")
    assert_type(y, torch.Tensor)
    return y.detach()


def without_probs(
    heap: symmoe.SymmetricHeap, x: torch.Tensor, topk_idx: torch.Tensor
) -> torch.Tensor:
    """Rows alone."""
    plan = symmoe.make_plan(topk_idx, num_experts=4, heap=heap, capacity=64, overflow="drop")
    rows, nothing, _handle = symmoe.dispatch_tokens(x, plan)
    assert_type(nothing, None)
    return rows


def grouped_layers(rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Without a heap."""
    activation = symmoe.grouped.ScaledSwiGLU()
    h = torch.cat([rows, rows], dim=1)
    assert_type(activation(h, scale), torch.Tensor)
    return activation(h, scale)


def planned_bytes() -> int:
    """Before anything is allocated."""
    config = symmoe.MoEConfig(hidden=16, ffn=8, num_experts=4, top_k=2)
    plan = symmoe.plan_memory(config, num_ranks=1, num_tokens=32)
    assert_type(plan, symmoe.training.MemoryPlan)
    assert_type(plan.heap_bytes, int)
    return plan.heap_bytes


def main() -> None:
    """On one rank, without a process group."""
    with symmoe.SymmetricHeap(num_bytes=planned_bytes() + (1 << 20)) as heap:
        assert_type(heap, symmoe.SymmetricHeap)
        x = torch.randn(5, 16, device=heap.device)
        print(list(layer_step(heap, x).shape), list(parts_step(heap, x).shape))
        topk_idx = torch.tensor(
            [[0, 1], [1, 2], [2, 3], [3, 0], [-1, 1]], dtype=torch.int32, device=heap.device
        )
        print(list(without_probs(heap, x, topk_idx).shape), list(grouped_layers(x, x[:, 0]).shape))


if __name__ == "__main__":
    main()
