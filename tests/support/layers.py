"""Small layers with known weights, their tokens, and the ways that give one step the same bits."""

from dataclasses import fields

import torch

from symmoe import MoEConfig, MoELayer, RouterConfig, SymmetricHeap

ROUTER_FIELDS = {field.name for field in fields(RouterConfig)}
H, I = 16, 24
GPU_H, GPU_I = 64, 96

# Ways of an expert-parallel step: the first is compared with the oracle, the others with its bits.
WAYS = tuple(
    {"layout": layout, "schedule": schedule}
    for schedule in ("serial", "always-overlapped")
    for layout in ("packed", "expert-major")
)


def shapes(device: str) -> tuple[int, int]:
    return (H, I) if device == "cpu" else (GPU_H, GPU_I)


def layer_config(**options) -> MoEConfig:
    """A configuration; options: fields of MoEConfig and of RouterConfig."""
    of_router = {name: options.pop(name) for name in ROUTER_FIELDS & options.keys()}
    if of_router:
        options["router"] = RouterConfig(**of_router)
    return MoEConfig(**options)


def config_for(num_ranks: int, device: str, **options) -> MoEConfig:
    """Two experts per rank, two for each token."""
    hidden, ffn = shapes(device)
    sizes = {"hidden": hidden, "ffn": ffn, "num_experts": 2 * num_ranks, "top_k": 2}
    return layer_config(**sizes, **{"schedule": "always-overlapped", **options})


def global_weights(
    num_experts: int, hidden: int, ffn: int, dtype: torch.dtype, salt: int = 0
) -> list[torch.Tensor]:
    """w1 and w2 of all experts, the same on all ranks."""
    generator = torch.Generator().manual_seed(11 + salt)
    w1 = torch.randn((num_experts, 2 * ffn, hidden), generator=generator) / hidden**0.5
    w2 = torch.randn((num_experts, hidden, ffn), generator=generator) / ffn**0.5
    return [w1.to(dtype), w2.to(dtype)]


def local_part(weights: list[torch.Tensor], heap: SymmetricHeap) -> list[torch.Tensor]:
    """This rank's experts as leaves on its device."""
    local = weights[0].shape[0] // heap.num_ranks
    experts = slice(heap.rank * local, (heap.rank + 1) * local)
    return [w[experts].to(heap.device, copy=True).requires_grad_() for w in weights]


def make_layer(
    heap: SymmetricHeap, config: MoEConfig, salt: int = 0
) -> tuple[MoELayer, list[torch.Tensor]]:
    """A layer with known weights, others for each salt, and the weights of all its experts."""
    torch.manual_seed(17 + salt)  # the router is replicated
    layer = MoELayer(config, heap)
    weights = global_weights(config.num_experts, config.hidden, config.ffn, torch.float32, salt)
    with torch.no_grad():
        w1, w2 = local_part(weights, heap)
        layer.experts.fc1.weight.copy_(w1)
        layer.experts.fc2.weight.copy_(w2)
    return layer, weights


def tokens_of(rank: int, num_tokens: int, hidden: int, salt: int = 0) -> torch.Tensor:
    return torch.randn(
        (num_tokens, hidden), generator=torch.Generator().manual_seed(100 * salt + rank)
    )
