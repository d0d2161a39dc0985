"""Launches of Triton kernels that cost the host little, and what they read of Triton's and CUDA's insides.

May use errors only. Begin with `launch`; README.md says what breaks with a new Triton.
"""
