"""Plan, dispatch, a grouped MLP into leased buffers, and combine, forward and backward, on every rank.

torchrun --nproc-per-node=2 examples/dispatch_roundtrip.py
"""

import os

import torch
import torch.distributed as dist

import symmoe

TOKENS, HIDDEN, FFN, EXPERTS, TOP_K = 1024, 256, 512, 8, 2


def main() -> None:
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    heap = symmoe.SymmetricHeap(num_bytes=64 << 20)
    device, dtype = heap.device, torch.bfloat16 if on_gpu else torch.float32

    torch.manual_seed(heap.rank)
    x = torch.randn(TOKENS, HIDDEN, device=device, dtype=dtype, requires_grad=True)
    probs, topk_idx = torch.randn(TOKENS, EXPERTS, device=device).softmax(-1).topk(TOP_K)
    experts = symmoe.GroupedMLP(EXPERTS // heap.num_ranks, HIDDEN, FFN, dtype=dtype, device=device)

    plan = symmoe.make_plan(topk_idx, num_experts=EXPERTS, heap=heap)

    # All data on the wire lies in leases, which peers write and read directly: no copy is made.
    names = ("rows", "expert output", "output gradient", "input gradient")
    leases = [heap.lease((plan.row_capacity, HIDDEN), dtype, name=name) for name in names]
    rows_out, out, grad_out, grad_input_out = (lease.tensor for lease in leases)
    n = plan.num_rows
    rows, row_probs, handle = symmoe.dispatch_tokens(x, plan, probs=probs, out=rows_out)
    expert_out = experts(
        rows, plan.splits, row_probs, out=out[:n], grad_input_out=grad_input_out[:n]
    )
    y = symmoe.combine_tokens(expert_out, handle, grad_out=grad_out[:n])
    y.float().square().mean().backward()

    print(
        f"rank {heap.rank} of {heap.num_ranks} on {heap.backend}: {TOKENS} tokens became {n} rows, "
        f"|y| = {y.float().norm():.3f}, |dx| = {x.grad.float().norm():.3e}, copies {heap.statistics.num_staging_copies}"
    )
    heap.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
