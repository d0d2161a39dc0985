"""Checks of arguments before anything is computed: tensors, buffers for results, sizes, words.

May use the heap and the kernels' constants. Begin with `buffers`; `arguments` is for grouped layers and for words.
"""
