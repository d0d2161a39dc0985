"""Triton kernels for every GPU, in the working dtype: plan, barrier, rows, grouped GEMMs, router.

This package may import `launch` and `hopper_choice`. Begin with `tiles` and `gemm`; the twins define the results.
"""
