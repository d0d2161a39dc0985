"""Variants of the suite "overhead" that put the addresses of experts' weights on the device, and swizzle their scales.

Ours are compared with torch.tensor of all addresses, and with a copy for each address; both swizzle one expert after
the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from suites.timing import Variant, in_steps
from symmoe.pointers import (
    PackedPointers,
    Swizzle,
    copy_data_ptrs_to_device,
    copy_host_to_device,
    pack_weight_ptrs,
)

NUM_EXPERTS = (8, 64, 256)
# Layout, elements in a byte of data, elements that share a scale.
_SCALES: dict[str, tuple[Swizzle, int, int]] = {
    "mxfp8 scales": ("mxfp8_rowwise", 1, 32),
    "nvfp4 scales": ("nvfp4", 2, 16),
}
LOADED = ("one layer", "both layers", *_SCALES)
_TORCH, _COPIES = "torch.tensor", "a copy each"

Matrices = list[torch.Tensor]
Loaded = tuple[
    torch.Tensor, Matrices
]  # addresses of the weights and then of swizzled scales, and what these point at


def yardsticks(loaded: str) -> tuple[str, str]:
    """The names of the variants that are not ours; torch.tensor is the first."""
    return f"{_TORCH}, {loaded}", f"{_COPIES}, {loaded}"


def pointer_variants(
    num_experts: int, shapes: Sequence[tuple[int, int]], loaded: str, device: torch.device
) -> list[Variant]:
    """All ways to load the same addresses.

    Args:
        shapes: numbers in an expert's matrix, of either layer.
        loaded: one of LOADED.
    """
    layout, in_byte, block = _SCALES.get(loaded, (None, 1, 1))
    generator = torch.Generator(device).manual_seed(0)

    def matrices(num_rows: int, num_columns: int) -> Matrices:
        size = (num_rows, num_columns)
        draw = (
            torch.randint(256, size, dtype=torch.uint8, generator=generator, device=device)
            for _ in everyone
        )
        return list(draw)

    everyone, shapes = range(num_experts), shapes[:1] if loaded == "one layer" else shapes
    weights = [matrices(rows, columns // in_byte) for rows, columns in shapes]
    scales = [matrices(rows, -(-columns // block)) for rows, columns in shapes if layout]
    all_weights, all_scales = (
        list(itertools.chain.from_iterable(each)) for each in (weights, scales)
    )
    expected = [_swizzled(scale) for scale in all_scales]

    def variant(name: str, load: Callable[[], Any], looked_at: Callable[[Any], Loaded]) -> Variant:
        def num_wrong() -> float:
            pointers, swizzled = looked_at(load())
            wanted = torch.tensor([tensor.data_ptr() for tensor in (*all_weights, *swizzled)])
            pairs = zip(swizzled, expected, strict=True)
            return float((pointers.cpu() != wanted).sum()) + sum(
                not torch.equal(*pair) for pair in pairs
            )

        return Variant(name, ("forward",), in_steps(load), num_wrong)

    def by_torch() -> Loaded:
        swizzled = [_swizzled(scale) for scale in all_scales]
        return torch.tensor(
            [tensor.data_ptr() for tensor in (*all_weights, *swizzled)], device=device
        ), swizzled

    def by_copies() -> Loaded:
        swizzled = [_swizzled(scale) for scale in all_scales]
        pointers = torch.empty(len(all_weights) + len(swizzled), dtype=torch.int64, device=device)
        for tensor, pointer in zip((*all_weights, *swizzled), pointers, strict=True):
            pointer.copy_(torch.tensor(tensor.data_ptr()))
        return pointers, swizzled

    others = zip(yardsticks(loaded), (by_torch, by_copies), strict=True)
    theirs = [variant(name, load, lambda result: result) for name, load in others]
    if loaded != "one layer":
        sizes = [tiles.numel() for tiles in expected]
        packed = variant(
            f"pack_weight_ptrs, {loaded}",
            lambda: _pack(weights, scales, layout),
            lambda got: _looked_at(got, sizes),
        )
        return [packed, *theirs]
    on_host = torch.tensor([tensor.data_ptr() for tensor in all_weights]).numpy().tobytes()
    destination = torch.zeros(num_experts, dtype=torch.int64, device=device)
    return [
        variant(
            f"copy_data_ptrs_to_device, {loaded}",
            lambda: copy_data_ptrs_to_device(all_weights, device),
            lambda pointers: (pointers, []),
        ),
        variant(
            f"copy_host_to_device, {loaded}",
            lambda: copy_host_to_device(on_host, destination),
            lambda _: (destination, []),
        ),
        *theirs,
    ]


def _pack(
    weights: list[Matrices], scales: list[Matrices], layout: Swizzle | None
) -> PackedPointers:
    fc1_scales, fc2_scales = scales or (None, None)
    return pack_weight_ptrs(*weights, fc1_scales=fc1_scales, fc2_scales=fc2_scales, swizzle=layout)


def _looked_at(packed: PackedPointers, sizes: list[int]) -> Loaded:
    """What the addresses of swizzled scales point at is taken from the memory that holds it."""
    pointers = [packed.fc1, packed.fc2]
    if packed.fc1_scales is None or packed.fc2_scales is None or packed.swizzled is None:
        return torch.cat(pointers), []
    of_scales, memory = torch.cat([packed.fc1_scales, packed.fc2_scales]), packed.swizzled.view(-1)
    starts = (of_scales - memory.data_ptr()).tolist()
    return torch.cat([*pointers, of_scales]), [
        memory[s : s + n] for s, n in zip(starts, sizes, strict=True)
    ]


def _swizzled(scale: torch.Tensor) -> torch.Tensor:
    """One-byte scales [M, Q] in 128x4 tiles, zeros for padding, by torch's operators: uint8 [.]."""
    padded = torch.nn.functional.pad(scale, (0, -scale.shape[1] % 4, 0, -scale.shape[0] % 128))
    tiles = padded.view(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)
