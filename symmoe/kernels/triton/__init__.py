"""Triton kernels for every GPU, in the working dtype: plan, barrier, rows, grouped GEMMs, router.

May use `launch` and `hopper_choice`. Begin with `tiles` and `gemm`; the twins say what kernels compute.
"""
