"""What callers bring, looked at before anything is computed: tensors, buffers for results, sizes.

May use the heap and the kernels' constants. Begin with `buffers`; `arguments` is for grouped layers.
"""
