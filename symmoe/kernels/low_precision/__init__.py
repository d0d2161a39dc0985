"""Kernels for low-precision numbers: quantisers, products, rows on the wire. Those for Hopper are named hopper_*.

May use `launch`, `triton` and `hopper`. Begin with `codes`, then `quantize` and `fp8`.
"""
