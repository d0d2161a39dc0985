"""Bytes that cross the wire, counted from a plan; and the plain copy of as many bytes between peers."""

from __future__ import annotations

import gc

import numpy as np
import numpy.typing as npt
import torch

from symmoe.dispatch.plan import Plan
from symmoe.errors import SymmoeError
from symmoe.symm_mem.heap import SymmetricHeap
from symmoe.tools.bench.ranks import Ranks
from symmoe.tools.bench.timing import Variant, in_steps


def dispatch_bytes(plan: Plan, row_bytes: int) -> npt.NDArray[np.int64]:
    """int64 [R]: bytes of rows that this rank sends to each rank, itself included."""
    return (plan.token_to_packed_row >= 0).sum(0).cpu().numpy().astype(np.int64) * row_bytes


def combine_bytes(plan: Plan, order: str, row_bytes: int) -> npt.NDArray[np.int64]:
    """int64 [R]: bytes of rows that come to this rank from each rank in a combine, itself included."""
    if order == "rank":
        count = (plan.token_to_primary_row >= 0).sum(0)
    else:
        ranks = plan.slot_to_rank[plan.slot_to_row >= 0].long()
        count = torch.bincount(ranks, minlength=plan.heap.num_ranks)
    return count.cpu().numpy().astype(np.int64) * row_bytes


def wire_bytes(moved: npt.NDArray[np.int64], ranks: Ranks) -> int:
    """The bytes that leave a rank, from the bytes that move to or from each: the largest of all ranks. Collective."""
    return int(ranks.largest(float(moved.sum() - moved[ranks.rank])))


class PeerCopy:
    """A plain copy of as many bytes to each peer, all ranks at once: what the links give. Collective.

    Args:
        name: the variant's name.
        sent: int64 [R], bytes to each rank; bytes to this rank are left out.

    Raises:
        SymmoeError: on every rank, if the ranks' leases do not lie at the same place.
    """

    def __init__(self, name: str, sent: npt.NDArray[np.int64], heap: SymmetricHeap, ranks: Ranks) -> None:
        matrix = ranks.gather(sent)
        np.fill_diagonal(matrix, 0)
        self._ranks, self._sent = ranks, matrix[ranks.rank]
        # Where each rank's bytes lie at their destination; leases are of one size everywhere, as peer() needs.
        self._first = np.cumsum(matrix, axis=0) - matrix
        self._received = matrix[:, ranks.rank]
        gc.collect()  # leases of dead objects, or the ranks' arenas may differ
        self._source = heap.lease((max(1, int(np.max(matrix.sum(1)))),), torch.uint8, name="copy source")
        self._target = heap.lease((max(1, int(np.max(matrix.sum(0)))),), torch.uint8, name="copy target")
        places = ranks.gather(np.array([self._target.offset]))
        if (places != places[0]).any():
            raise SymmoeError(f"the targets of '{name}' lie at different offsets: {places.reshape(-1).tolist()}")
        self._pairs = self._copies()
        self.variant = Variant(name, ("forward",), in_steps(self._run), self._verify)

    def _copies(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(destination, source), the next rank first, so that not all ranks write to the same one at a time."""
        rank, pairs, offset = self._ranks.rank, [], 0
        for step in range(1, self._ranks.num_ranks):
            peer = (rank + step) % self._ranks.num_ranks
            first, size = int(self._first[rank, peer]), int(self._sent[peer])
            pairs.append((self._target.peer(peer)[first : first + size], self._source.tensor[offset : offset + size]))
            offset += size
        return pairs

    def _run(self) -> None:
        for destination, source in self._pairs:
            destination.copy_(source)

    def _verify(self) -> float:
        """The error, which must be 0: every rank sends its number plus one."""
        self._target.tensor.zero_()
        self._source.tensor.fill_(self._ranks.rank + 1)
        self._ranks.barrier()
        self._run()
        self._ranks.barrier()
        expected = torch.arange(1, self._ranks.num_ranks + 1, dtype=torch.uint8)
        expected = expected.repeat_interleave(torch.from_numpy(self._received)).to(self._target.tensor.device)
        wrong = (self._target.tensor[: len(expected)] != expected).sum()
        return float(wrong)

    def close(self) -> None:
        """Releases the leases."""
        self._pairs = []
        self._target.release()
        self._source.release()
