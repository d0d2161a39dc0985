"""The supported kinds of NVIDIA GPUs and versions of Triton. The choice of kernels, doctor and tests read them."""

import functools
from dataclasses import dataclass

import torch

from symmoe.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class Architecture:
    """GPUs of one compute capability."""

    gpus: str  # the generation, and examples
    shared_kib: int  # shared memory that a program can have
    is_measured: bool = False  # whether the kernels have run there; False: only compiled


Capability = tuple[int, int]
ARCHITECTURES: dict[Capability, Architecture] = {
    (8, 0): Architecture("Ampere: A100", 163),
    (8, 6): Architecture("Ampere: A10, A40, RTX 3090", 99),
    (8, 9): Architecture("Ada: L4, L40S, RTX 4090", 99),
    (9, 0): Architecture("Hopper: H100, H200", 227, is_measured=True),
    (10, 0): Architecture("Blackwell: B200, GB200", 227),
    (12, 0): Architecture("Blackwell: RTX PRO 6000, RTX 5090", 99),
}
TRITON_VERSIONS = (
    (3, 6),
    (3, 7),
    (3, 8),
    (3, 9),
)  # supported internals and Gluon, which change in every version
MIN_CAPABILITY: Capability = (8, 0)  # multiplies bf16
MIN_E4M3_CAPABILITY: Capability = (
    8,
    9,
)  # converts to E4M3; every recipe needs it, for numbers or scales


def status(capability: Capability) -> str:
    """The support status of such GPUs, as text for users."""
    if capability < MIN_CAPABILITY:
        return "refused: no bf16 products"
    kind = ARCHITECTURES.get(capability)
    support = (
        "not compiled" if kind is None else "measured" if kind.is_measured else "compiled only"
    )
    return (
        support
        if capability >= MIN_E4M3_CAPABILITY
        else f"{support}; FP8, MXFP8 and NVFP4 are refused"
    )


@functools.cache
def capability(device: torch.device) -> Capability:
    """The compute capability of a CUDA device. Kernels for another device are compiled as for Hopper."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


def multiplies_shared(device: torch.device) -> bool:
    """Whether tensor cores read operands from shared memory (WGMMA, tcgen05); elsewhere these go through registers."""
    return capability(device)[0] in (9, 10, 11)


def e4m3_problem(precision: object, device: torch.device) -> ArgumentError | None:
    """Why a device cannot compute with a precision (None: the working dtype), or None if it can."""
    if (
        precision is None
        or torch.compiler.is_compiling()
        or capability(device) >= MIN_E4M3_CAPABILITY
    ):
        return None
    needed, actual = (
        ".".join(map(str, version)) for version in (MIN_E4M3_CAPABILITY, capability(device))
    )
    text = f"precision ({precision}) needs a GPU of compute capability {needed} or more; {device} has {actual}"
    return ArgumentError(text)
