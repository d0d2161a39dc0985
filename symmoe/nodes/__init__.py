"""Groups that span nodes: which ranks share a node, and how bytes get from one node to another.

A node is a set of ranks that reach each other's memory. Ranks with the same index on all nodes are a *rail*: only they
communicate between nodes. Begin with topology.py. It may use errors and kernels/control; it is independent of heaps,
plans and the user's process groups.
"""
