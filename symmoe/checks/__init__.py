"""Checks of arguments before anything is computed: words, sizes, tensors, buffers for results, grouped layers.

May use the heap and the kernels' constants.
"""
