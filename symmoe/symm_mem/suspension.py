"""How a heap gives its memory back, and gets it back at the same addresses.

The control block holds epochs on which the hosts count, so it is kept meanwhile. Nobody may touch an arena between the
two: Access sees to it. Where ranks have no arenas to meet in, they meet over the process group.
"""

from __future__ import annotations

from symmoe.errors import ArgumentError, BackendUnavailable, HeapPoisoned, SymmoeError
from symmoe.kernels.control import PHASE_SUSPEND
from symmoe.symm_mem.start import HeapParts

_MOST_NAMED = 5  # leases; an error that travels has few bytes


def _problem(heap: HeapParts) -> SymmoeError | None:
    """What keeps this rank from giving its memory back, or None."""
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
    """Frees the arenas, after the last call of all ranks; if a rank cannot, all go on. Collective."""
    group = heap.bootstrap.within(heap.waits.timeout_s, PHASE_SUSPEND)
    is_agreed = False
    heap._access.is_open = False  # no thread makes a lease any more
    try:
        group.agree(_problem(heap))  # then what peers had launched is done, too
        is_agreed = True
        heap._kept = heap.peers.control_block.to("cpu", copy=True)
        group.attempt(heap._arenas.suspend)
    except BaseException as error:
        heap._access.is_open = not is_agreed
        if is_agreed or not isinstance(error, (ArgumentError, BackendUnavailable)):
            heap.faults.poison = f"suspend failed: {error}"
        raise


def bring_back(heap: HeapParts) -> None:
    """Makes the arenas what they were, without the rows. Collective."""
    group = heap.bootstrap.within(heap.waits.timeout_s, PHASE_SUSPEND)
    poison = heap.faults.poison
    group.agree(None if poison is None else HeapPoisoned(f"an earlier call failed: {poison}"))
    heap._arenas.resume(group)
    heap.peers.control_block.copy_(heap._kept)
    heap.streams.synchronize()
    group.barrier()  # nobody may signal into a block that is not written yet
    heap._access.is_open = True
