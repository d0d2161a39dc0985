"""Triton kernels that only MXFP8 and NVFP4 need; imported on first use."""
