"""Kernels in Gluon for Hopper only, with the bits of those in `triton`: warp-specialised, persistent.

May use `launch` and `triton`. Begin with `pipeline`. What they launch: hopper_launchers.py.
"""
