"""Groups that span nodes: which ranks share a node, and how bytes get from one node to another.

A node is a set of ranks that reach each other's memory. Ranks with the same index on all nodes are a *rail*: only they
communicate between nodes. May use errors and kernels/control; independent of heaps, plans and the user's process
groups. Begin with topology.py.
"""
