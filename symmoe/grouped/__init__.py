"""Grouped layers: one weight for each group of rows, on one rank. Linear layer, activation, MLP, Sequential.

May use kernels and precision, but no expert parallelism. Begin with `linear`, then `rows_function`, `experts`.
"""

from symmoe.grouped.activations import (
    ScaledActivation,
    ScaledClampedSwiGLU,
    ScaledSReLU,
    ScaledSwiGLU,
    deinterleave_gate_up,
    interleave_gate_up,
)
from symmoe.grouped.linear import GroupedLinear, cache_quantized_weights
from symmoe.grouped.mlp import GroupedMLP
from symmoe.grouped.sequential import Sequential

__all__ = [
    "GroupedLinear",
    "GroupedMLP",
    "ScaledActivation",
    "ScaledClampedSwiGLU",
    "ScaledSReLU",
    "ScaledSwiGLU",
    "Sequential",
    "cache_quantized_weights",
    "deinterleave_gate_up",
    "interleave_gate_up",
]
