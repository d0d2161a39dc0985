"""One training step of a layer whose routing, sizes and weights depend only on numbers, and a hash of its results."""

import hashlib
import os
from pathlib import Path

import layers
import torch

from symmoe import MoEConfig, MoELayer, SymmetricHeap

HIDDEN, FFN, TOP_K, EXPERTS_PER_RANK = 64, 96, 2, 2


def make_layer(heap: SymmetricHeap, seed: int, **options) -> MoELayer:
    """A layer whose weights depend only on the seed."""
    num_experts = EXPERTS_PER_RANK * heap.num_ranks
    config = MoEConfig(hidden=HIDDEN, ffn=FFN, num_experts=num_experts, top_k=TOP_K, **options)
    layer, _ = layers.make_layer(heap, config, seed)
    return layer


def tokens_of(heap: SymmetricHeap, seed: int, num_tokens: int) -> torch.Tensor:
    """fp32 [T, H], different on every rank."""
    x = layers.tokens_of(heap.rank, num_tokens, HIDDEN, salt=seed)
    return x.to(heap.device).requires_grad_()


def forward_backward(layer: MoELayer, x: torch.Tensor) -> torch.Tensor:
    """y; x.grad and the parameters' gradients are only those of this step."""
    layer.zero_grad(set_to_none=True)
    x.grad = None
    y, _ = layer(x)
    y.square().sum().backward()
    layer.heap.synchronize()
    return y.detach()


def hash_of_step(layer: MoELayer, x: torch.Tensor) -> str:
    """sha256 of every byte of y, dx and the gradients of all parameters."""
    y = forward_backward(layer, x)
    digest = hashlib.sha256()
    for tensor in (y, x.grad, *(parameter.grad for parameter in layer.parameters())):
        digest.update(b"none" if tensor is None else tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def num_open_files() -> int:
    """File descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def num_arenas_mapped() -> int:
    """Host arenas that this process has mapped."""
    return Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:symmoe")


def resident_bytes() -> int:
    """RSS of this process."""
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf(
        "SC_PAGE_SIZE"
    )
