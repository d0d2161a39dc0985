"""Kernels in Gluon for Hopper only, with the bits of those in `triton`: warp-specialised, persistent.

May use `launch` and `triton`. Begin with `pipeline`; other rooms use only `launchers`.
"""
