"""Launches of Triton kernels that cost the host little, by means of internals of Triton and CUDA.

May use errors only. Begin with `launch`; README.md says what breaks with a new Triton.
"""
