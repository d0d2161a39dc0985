"""Kernels for low-precision numbers: quantisers, products, rows on the wire. Kernels for Hopper are named hopper_*.

This package may import `launch`, `triton` and `hopper`. Begin with `codes`, then `quantize` and `fp8`.
"""
