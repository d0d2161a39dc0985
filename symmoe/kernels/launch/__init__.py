"""Launches of Triton kernels at low cost for the host, through internals of Triton and CUDA.

This package may import errors only. Begin with `launch`; README.md lists what a new Triton may break.
"""
