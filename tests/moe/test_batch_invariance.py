"""A token's y, dx and experts are the same in any batch and with any padding, as the only token, and on any ranks."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from cluster import run_on
from layers import layer_config
from worker import Findings, open_heap

from symmoe import MoELayer, SymmetricHeap
from symmoe.precision import Float8Block

H, I, E, K, PADDING = 128, 128, 8, 3, 9
KINDS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "bf16": (torch.bfloat16, {}),
    "order rank, sigmoid": (torch.bfloat16, {"order": "rank", "score": "sigmoid", "stash": "none"}),
    "sqrtsoftplus": (torch.float32, {"score": "sqrtsoftplus"}),
    "static": (torch.bfloat16, {"capacity": -1, "layout": "expert-major"}),
    "FP8": (torch.bfloat16, {"precision": Float8Block()}),
}


def layer_of(heap: SymmetricHeap, name: str, num_tokens: int) -> MoELayer:
    """A layer of this kind; experts have the same numbers on any number of ranks."""
    dtype, options = KINDS[name]
    if "capacity" in options:
        options = options | {"capacity": num_tokens * K * heap.num_ranks, "max_tokens": num_tokens}
    torch.manual_seed(1)
    config = layer_config(hidden=H, ffn=I, num_experts=E, top_k=K, **{"order": "slot", **options})
    layer = MoELayer(config, heap, dtype=dtype)
    with torch.no_grad():
        for seed, weight in enumerate(layer.experts.parameters()):
            all_experts = (
                torch.randn(E, *weight.shape[1:], generator=torch.Generator().manual_seed(seed))
                * H**-0.5
            )
            weight.copy_(all_experts.chunk(heap.num_ranks)[heap.rank])
    return layer


def step(
    layer: MoELayer, x: torch.Tensor, dy: torch.Tensor, num_padding: int = 0
) -> list[torch.Tensor]:
    """y, dx and experts of the tokens, followed by so many tokens of padding."""
    padding = torch.full((num_padding, H), math.pi).to(x)
    tokens = torch.cat([x, padding]).requires_grad_()
    mask = torch.arange(len(tokens), device=x.device) < len(x)
    y, metrics = layer(tokens, token_mask=mask if num_padding else None)
    y.backward(torch.cat([dy, padding]))
    assert tokens.grad is not None
    return [tensor.detach()[: len(x)].clone() for tensor in (y, tokens.grad, metrics.topk_idx)]


@run_on(1, 2, 4, on_gpus=(1, 2))
def test_results_of_a_token_do_not_depend_on_its_batch(
    rank: int, num_ranks: int, findings: Findings, device: str
) -> None:
    on_gpu = device == "cuda"
    num_tokens, memory = (32768, 2**30) if on_gpu else (400, 2**26)
    names = [
        name for name in KINDS if not (on_gpu and name == "fp32")
    ]  # cuBLAS chooses sums by the number of tokens
    expected: dict[str, list[torch.Tensor]] = {}

    def tokens_of(heap: SymmetricHeap, name: str) -> torch.Tensor:
        numbers = torch.randn(2, num_tokens, H, generator=torch.Generator().manual_seed(rank))
        return numbers.to(heap.device, KINDS[name][0])

    def check(name: str, actual: list[torch.Tensor], idx: torch.Tensor, where: str) -> None:
        for label, got, all_of_it in zip(
            ("y", "dx", "experts"), actual, expected[name], strict=True
        ):
            findings.check(
                torch.equal(got, all_of_it[idx]), f"{name}, {where}: other bits of {label}"
            )

    with open_heap(device, num_bytes=memory) as heap:
        for name in names:
            layer, (x, dy) = layer_of(heap, name, num_tokens), tokens_of(heap, name)
            expected[name] = step(layer, x, dy)
            every = torch.arange(num_tokens)
            for chosen in (
                [5 + rank],
                [num_tokens - 1, 5],
                every[: max(1, 33 - 32 * rank)],
                every[1::2],
                every.flip(0),
                every[:130],
            ):
                idx = torch.as_tensor(chosen, device=heap.device)
                for num_padding in (0, PADDING) if len(idx) < 200 else (0,):
                    where = f"rank {rank} of {num_ranks}, {len(idx)} tokens and {num_padding}"
                    check(name, step(layer, x[idx], dy[idx], num_padding), idx, where)
    alone, _ = dist.new_subgroups(1)
    nodes = {"ranks_per_node": 2} if num_ranks == 4 else None
    for where, options in ("alone", {"group": alone}), ("nodes", nodes):
        if options is None or num_ranks == 1:
            continue
        with open_heap(device, num_bytes=memory, **options) as heap:
            for name in names:
                if KINDS[name][1].get("order") != "rank":
                    layer, (x, dy) = layer_of(heap, name, num_tokens), tokens_of(heap, name)
                    idx = torch.arange(3, num_tokens, 5, device=heap.device)
                    check(name, step(layer, x[idx], dy[idx]), idx, where)
