"""A token's y, dx and experts are the same in any batch and with any padding, and as the only token."""

from __future__ import annotations

import math
from typing import Any

import torch
from cluster import run_on
from worker import Findings, open_heap

from symmoe import MoEConfig, MoELayer
from symmoe.precision import Float8Block

H, I, E, K, PADDING = 128, 128, 8, 3, 9
KINDS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "bf16": (torch.bfloat16, {}),
    "order rank, sigmoid": (torch.bfloat16, {"order": "rank", "score": "sigmoid", "stash": "none"}),
    "static": (torch.bfloat16, {"capacity": -1, "layout": "expert-major"}),
    "FP8": (torch.bfloat16, {"precision": Float8Block()}),
}


def step(layer: MoELayer, x: torch.Tensor, dy: torch.Tensor, num_padding: int = 0) -> list[torch.Tensor]:
    """y, dx and experts of the tokens, with so many more that are padding."""
    padding = torch.full((num_padding, H), math.pi).to(x)
    tokens = torch.cat([x, padding]).requires_grad_()
    mask = torch.arange(len(tokens), device=x.device) < len(x)
    y, metrics = layer(tokens, token_mask=mask if num_padding else None)
    y.backward(torch.cat([dy, padding]))
    assert tokens.grad is not None
    return [each.detach()[: len(x)] for each in (y, tokens.grad, metrics.topk_idx)]


@run_on(1, 2, on_gpus=(1, 2))
def test_a_token_does_not_see_its_batch(rank: int, num_ranks: int, findings: Findings, device: str) -> None:
    on_gpu = device == "cuda"
    num_tokens = 32768 if on_gpu else 700
    with open_heap(device, num_bytes=2**30 if on_gpu else 2**26) as heap:
        for name, (dtype, options) in KINDS.items():
            if on_gpu and dtype == torch.float32:
                continue  # cuBLAS chooses its sums by the number of tokens
            if "capacity" in options:
                options = options | {"capacity": num_tokens * K * num_ranks, "max_tokens": num_tokens}
            torch.manual_seed(1)
            config = MoEConfig(hidden=H, ffn=I, num_experts=E, top_k=K, **{"order": "slot", **options})
            layer = MoELayer(config, heap, dtype=dtype)
            x, dy = torch.randn(2, num_tokens, H, generator=torch.Generator().manual_seed(rank)).to(heap.device, dtype)
            wanted = step(layer, x, dy)
            every, last = torch.arange(num_tokens), num_tokens - 1
            for chosen in ([5 + rank], [last, 5], every[: 33 - 32 * rank], every[1::2], every.flip(0), every[:130]):
                idx = torch.as_tensor(chosen, device=heap.device)
                for num_padding in (0, PADDING) if len(idx) < 200 else (0,):
                    found = step(layer, x[idx], dy[idx], num_padding)
                    for what, got, all_of_it in zip(("y", "dx", "experts"), found, wanted, strict=True):
                        where = f"{name}, rank {rank} of {num_ranks}, {len(idx)} tokens and {num_padding}"
                        findings.check(torch.equal(got, all_of_it[idx]), f"{where}: other bits of {what}")
