"""Grouped layers: one weight for each group of rows, on one rank. Linear layer, activation, MLP, Sequential.

May use kernels and precision, nothing of expert parallelism. Begin with `linear`, then `rows_function`, `experts`.
"""
