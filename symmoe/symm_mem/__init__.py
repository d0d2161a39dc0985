"""The symmetric heap: memory that every rank of an expert-parallel group can reach, its leases, barrier and faults.

May use the kernels. Begin with `heap`: `memory` has its leases, `waits` its barriers and signals, `faults` its errors;
`bootstrap`, `host_backend` and `nvshmem_backend` make the memory.
"""

from symmoe.symm_mem.heap import shared_heap
from symmoe.symm_mem.memory import Lease

__all__ = ["Lease", "shared_heap"]
