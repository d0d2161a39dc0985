"""Triton kernels for every GPU, in the working dtype: plan, barrier, rows, grouped GEMMs, router.

May use `launch` and `select`. Begin with `tiles` and `gemm`; what they compute: kernels/contract.
"""
