"""Persistent, warp-specialised kernels in Gluon, for Hopper only, with the bits of the kernels in `triton`.

This package may import `launch` and `triton`. Begin with `pipeline`. The launchers: hopper_launchers.py.
"""
