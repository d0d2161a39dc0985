"""How a heap returns its memory to the system, and restores it at the same addresses.

The hosts rely on the epochs in the control block, so a copy of it is kept. Access prevents any use of an arena in
between. Without arenas, ranks wait for each other over the process group.
"""

from __future__ import annotations

from symmoe.errors import ArgumentError, BackendUnavailable, HeapPoisoned, SymmoeError
from symmoe.kernels.control import PHASE_SUSPEND
from symmoe.symm_mem.start import HeapParts

_MOST_NAMED = 5  # leases; an error for peers has few bytes


def _problem(heap: HeapParts) -> SymmoeError | None:
    """The error if this rank cannot return its memory, or None."""
    if leases := heap.memory.live_leases():
        named = ", ".join(f"'{name}' of {size} bytes" for name, size in leases[:_MOST_NAMED])
        num_bytes = sum(size for _, size in leases)
        return ArgumentError(
            f"suspend: {len(leases)} leases of {num_bytes} bytes are live, the largest are {named}: suspend when no "
            "backward pass is to come, and drop what keeps them"
        )
    missing = heap._arenas.suspend_problem
    return BackendUnavailable(f"suspend: {missing}") if missing else None


def give_back(heap: HeapParts) -> None:
    """Frees the arenas after the last call of all ranks; if one rank cannot, all keep theirs. Collective."""
    group = heap.bootstrap.within(heap.waits.timeout_s, PHASE_SUSPEND)
    is_agreed = False
    heap._access.is_open = False  # from now on no thread makes a lease
    try:
        group.agree(_problem(heap))  # then the peers' launched work is done, too
        is_agreed = True
        heap._kept = heap.peers.control_block.to("cpu", copy=True)
        group.attempt(heap._arenas.suspend)
    except BaseException as error:
        heap._access.is_open = not is_agreed
        if is_agreed or not isinstance(error, (ArgumentError, BackendUnavailable)):
            heap.faults.poison = f"suspend failed: {error}"
        raise


def bring_back(heap: HeapParts) -> None:
    """Restores the arenas without the rows. Collective."""
    group = heap.bootstrap.within(heap.waits.timeout_s, PHASE_SUSPEND)
    poison = heap.faults.poison
    group.agree(None if poison is None else HeapPoisoned(f"an earlier call failed: {poison}"))
    heap._arenas.resume(group)
    heap.peers.control_block.copy_(heap._kept)
    heap.streams.synchronize()
    group.barrier()  # no rank may signal into a block before it is written
    heap._access.is_open = True
