"""Leases: separate tensors, their ends, and the errors of a rank that gets none."""

import gc
import itertools
import random
import re
import types

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cluster import run_on
from heap_calls import outcome, round_trip
from worker import Findings

from symmoe import SymmetricHeap
from symmoe.errors import HeapExhausted, StaleLease
from symmoe.kernels import control
from symmoe.symm_mem import memory
from symmoe.symm_mem.memory import ALIGNMENT_BYTES

NUM_BYTES = 1 << 20


@pytest.fixture
def heap():
    """A group of one without a process group, in the test process itself."""
    assert not dist.is_initialized()
    with SymmetricHeap(num_bytes=NUM_BYTES, backend="host") as heap:
        yield heap


def test_an_arena_of_odd_bytes_fits_every_dtype():
    with SymmetricHeap(num_bytes=NUM_BYTES + 3, backend="host") as heap:
        for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.float64):
            with heap.lease((5, 3), dtype) as lease:
                assert lease.tensor.fill_(2).sum() == 30


@pytest.mark.parametrize("seed", range(4))
def test_leases_are_separate_tensors(heap: SymmetricHeap, seed: int):
    """Random leases and releases: every tensor lies at its lease's offset, and no other tensor writes into it."""
    draw, live, generations, highest = random.Random(seed), [], [], 0
    for turn in range(60):
        shape = [draw.choice((0, 1, 3, 130)) for _ in range(draw.randint(1, 3))]
        dtype = draw.choice((torch.float32, torch.bfloat16, torch.int32, torch.uint8))
        lease = heap.lease(shape, dtype, name=f"of {turn}")
        actual = lease.tensor.shape, lease.tensor.dtype, lease.tensor.device, lease.name
        assert actual == (torch.Size(shape), dtype, heap.device, f"of {turn}")
        assert lease.tensor.is_contiguous()
        assert lease.num_bytes == lease.tensor.nbytes
        assert lease.offset % ALIGNMENT_BYTES == lease.tensor.data_ptr() % 128 == 0  # TMA
        assert (lease.peer(0).data_ptr(), lease.peer(0).shape) == (
            lease.tensor.data_ptr(),
            actual[0],
        )
        assert lease.num_bytes == 0 or heap.owns(lease.tensor)
        assert lease.num_bytes == 0 or heap._offset_of(lease.tensor) == lease.offset
        generations.append(lease.generation)
        live.append((lease, lease.tensor.fill_(turn), turn))
        # Empty leases count, too, so that equal calls give equal offsets.
        spans = [
            max(1, -(-lease_of_span.num_bytes // ALIGNMENT_BYTES)) for lease_of_span, *_ in live
        ]
        assert heap.leased_bytes == ALIGNMENT_BYTES * sum(spans)
        highest = max(highest, heap.leased_bytes)
        assert all((tensor == value).all() for _, tensor, value in live)
        if draw.random() < 0.6:
            draw.shuffle(live)
            live.pop()[0].release()
    assert generations == sorted(set(generations))
    assert heap.high_water_bytes == highest
    lease = heap.lease((16, 16), torch.float32)
    with SymmetricHeap(num_bytes=NUM_BYTES, backend="host") as second_heap:
        foreign = second_heap.lease((16, 16), torch.float32)
        for tensor in (foreign.tensor, torch.empty(16), torch.empty(16, device="meta")):
            assert not heap.owns(tensor)
        assert not second_heap.owns(lease.tensor)  # one of the two arenas lies above the other
    assert not heap.owns(heap.peers.control_block)
    assert heap._offset_of(lease.tensor[3:]) == lease.offset + 3 * 64
    with pytest.raises(StaleLease):  # half of it is past the end of the lease
        heap._offset_of(heap.peers.views[0][lease.offset + 512 : lease.offset + 1536])


def test_released_lease_is_stale(heap: SymmetricHeap):
    lease = heap.lease((4, 4), torch.float32, name="short-lived")
    tensor = lease.tensor
    lease.release()
    with pytest.raises(
        StaleLease, match=rf"'short-lived' \(generation {lease.generation}\) was released twice"
    ):
        lease.release()
    for use in (lambda: lease.tensor, lambda: lease.peer(0)):
        with pytest.raises(
            StaleLease, match=rf"'short-lived' \(generation {lease.generation}\) has been released"
        ):
            use()
    with pytest.raises(StaleLease, match="belongs to no live lease"):
        heap._offset_of(tensor)
    assert heap.leased_bytes == 0


def test_a_lease_ends_with_its_block_or_its_last_reference(heap: SymmetricHeap):
    """The end is the end of the block, a release in it, or the end of the last reference: to the lease, to a tensor
    over it, or of autograd's saved tensors."""
    with heap.lease((8,), torch.float32) as lease:
        assert heap.leased_bytes == ALIGNMENT_BYTES
    assert heap.leased_bytes == 0
    with heap.lease((8,), torch.float32) as lease:
        lease.release()
    reference = lease = heap.lease((8,), torch.float32)
    del lease
    gc.collect()
    assert heap.leased_bytes == ALIGNMENT_BYTES
    del reference
    gc.collect()
    assert heap.leased_bytes == 0
    tensor = heap.lease((8,), torch.float32).tensor
    offset = heap._offset_of(tensor)
    view = tensor.view(2, 4)[1:]
    del tensor
    gc.collect()
    assert heap._offset_of(view) == offset + 16
    weight = torch.ones(1, 4, requires_grad=True)
    y = weight * view
    del view
    gc.collect()
    assert heap.leased_bytes == ALIGNMENT_BYTES
    y.sum().backward()
    gc.collect()
    assert heap.leased_bytes == 0


def test_exhaustion_names_the_lease_and_the_sizes(heap: SymmetricHeap):
    capacity = NUM_BYTES - control.ControlLayout(1).num_bytes
    lease = heap.lease((1000, 10), torch.float32)
    with pytest.raises(HeapExhausted) as caught:
        heap.lease((512, 1024), torch.bfloat16, name="too much")
    for part in (
        "lease 'too much' [512, 1024] torch.bfloat16 needs 1048576 bytes",
        f"largest free range has {capacity - 40448}",  # 40000 rounded up
        f"40448 of {capacity} bytes are leased",
        "high-water mark 40448",
        f"num_bytes={NUM_BYTES - capacity + 40448 + 1048576} (now {NUM_BYTES})",
    ):
        assert part in str(caught.value)
    assert heap.leased_bytes == lease.num_bytes + 448


@pytest.mark.parametrize("is_fragmented", [False, True])
def test_a_heap_of_the_size_that_exhaustion_names_has_room(is_fragmented: bool):
    """The size is enough for all live leases and the refused one; 512 bytes less are too few."""

    def lease_all(num_bytes: int) -> tuple[str, str]:
        with SymmetricHeap(num_bytes=num_bytes, backend="host") as heap:
            first, second = (heap.lease((100_000,), torch.uint8) for _ in range(2))
            if is_fragmented:
                first.release()
            actual = outcome(heap.lease, (150_000,), torch.uint8)
            second.release()
            return actual

    name, text = lease_all(300_000)
    assert name == "HeapExhausted"
    needed = int(re.search(r"a heap with num_bytes=(\d+) \(now 300000\) has room", text).group(1))
    assert lease_all(needed) == ("", "")
    assert lease_all(needed - 1)[0] == "HeapExhausted"


@pytest.mark.parametrize(
    ("shape", "dtype", "text"),
    [
        ((-1, 4), torch.float32, "shape ((-1, 4)) must be of ints of at least 0"),
        ((2.5, 4), torch.float32, "shape ((2.5, 4)) must be of ints of at least 0"),
        ((True, 4), torch.float32, "shape ((True, 4)) must be of ints of at least 0"),
        (("3",), torch.float32, "shape (('3',)) must be of ints of at least 0"),
        (4, torch.float32, "shape (4) must be a tuple of ints"),
        (None, torch.float32, "shape (None) must be a tuple of ints"),
        ((4, 4), "float32", "dtype ('float32') must be a torch.dtype"),
        ((4, 4), float, "dtype (<class 'float'>) must be a torch.dtype"),
        ((4, 4), None, "dtype (None) must be a torch.dtype"),
    ],
)
def test_wrong_arguments_of_a_lease_are_refused(
    heap: SymmetricHeap, shape: object, dtype: object, text: str
):
    assert outcome(heap.lease, shape, dtype) == ("ArgumentError", text)
    assert (heap.leased_bytes, heap.statistics.num_leases) == (0, 0)
    lease = heap.lease([np.int64(2), torch.tensor(3)], torch.float32)
    assert lease.tensor.shape == (2, 3)


@run_on(2)
def test_errors_of_a_lease_raise_on_all_ranks_of_its_call(
    rank: int, num_ranks: int, findings: Findings, heap: SymmetricHeap
) -> None:
    """Outside of a collective call, and for a peer that does not exist, only this rank raises."""
    if rank == 1:
        actual = outcome(heap.lease, (-1,), torch.uint8, phase=control.PHASE_DISPATCH_READY)
    else:
        actual = outcome(heap.barrier, control.PHASE_DISPATCH_READY)
    text = "shape ((-1,)) must be of ints of at least 0"
    findings.equal("error", actual, ("ArgumentError", text if rank == 1 else f"on rank 1: {text}"))
    lease = heap.lease((1,), torch.uint8)
    for peer in (-1, num_ranks, 5, True, 0.0, "0"):
        expected = ("ArgumentError", f"rank ({peer!r}) must be an int in [0, 2)")
        findings.equal("error of a peer", outcome(lease.peer, peer), expected)
    findings.check(
        all(lease.peer(peer).shape == (1,) for peer in range(num_ranks)), "a peer's lease"
    )
    findings.check(round_trip(heap), "the next correct call is wrong")


def test_a_lease_without_room_collects_where_it_may_help(
    heap: SymmetricHeap, monkeypatch: pytest.MonkeyPatch
):
    now, full = itertools.count(1000.0, 0.01), []  # a collection takes 0.01 s

    def note(phase: str, info: dict[str, int]) -> None:
        full.extend([phase] * (phase == "start" and info["generation"] == 2))

    def fails(num_bytes: int, times: int = 1) -> None:
        for _ in range(times):
            assert outcome(heap.lease, (num_bytes,), torch.uint8)[0] == "HeapExhausted"

    monkeypatch.setattr(memory, "time", types.SimpleNamespace(monotonic=lambda: next(now)))
    gc.disable()
    gc.callbacks.append(note)
    try:
        fails(NUM_BYTES, 50)  # without live leases
        largest_bytes = heap.memory.arena.largest_free_bytes
        lease = heap.lease((512,), torch.uint8)
        fails(2 * NUM_BYTES, 50)  # more than the whole heap
        assert len(full) == 0
        fails(largest_bytes, 5)
        assert len(full) == 1
        now = itertools.count(2000.0, 0.01)  # objects may have died meanwhile
        fails(largest_bytes)
        assert len(full) == 2
        cycle = [heap.lease((1024,), torch.uint8)]
        cycle.append(cycle)
        del cycle
        lease.release()  # the set of live leases has changed
        heap.lease((largest_bytes,), torch.uint8).release()
        assert len(full) == 3
    finally:
        gc.callbacks.remove(note)
        gc.enable()
