"""Triton kernels for every GPU, in the working dtype: plan, barrier, rows, grouped GEMMs, router.

May use `launch` and `select`. Begin with `tiles` and `gemm`; the contract is in the twins.
"""
