"""Checks of arguments before any computation: words, sizes, tensors, buffers for results, grouped layers.

May use the heap and the kernels' constants.
"""
