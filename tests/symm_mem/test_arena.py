"""The allocator against a model that marks blocks in a list."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from symmoe.symm_mem.memory import ALIGNMENT_BYTES, Arena

NUM_BLOCKS = 24


class Model:
    """First fit over a list of blocks: None where a block is free, else the number of its range."""

    def __init__(self) -> None:
        self.blocks: list[int | None] = [None] * NUM_BLOCKS
        self.high_water = 0

    def take(self, number: int, num_bytes: int) -> int | None:
        """First block of the range, or None."""
        num_blocks = max(1, -(-num_bytes // ALIGNMENT_BYTES))
        for first in range(NUM_BLOCKS - num_blocks + 1):
            if all(block is None for block in self.blocks[first : first + num_blocks]):
                self.blocks[first : first + num_blocks] = [number] * num_blocks
                self.high_water = max(self.high_water, self.used)
                return first
        return None

    def give_back(self, number: int) -> None:
        self.blocks = [None if block == number else block for block in self.blocks]

    @property
    def used(self) -> int:
        return sum(block is not None for block in self.blocks)

    @property
    def largest_free(self) -> int:
        runs = "".join("." if block is None else "#" for block in self.blocks).split("#")
        return max(len(run) for run in runs)


take = st.tuples(st.just("take"), st.integers(0, 6 * ALIGNMENT_BYTES))
give_back = st.tuples(st.just("give back"), st.integers(0, NUM_BLOCKS))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 5000), st.lists(st.one_of(take, take, give_back), max_size=60))
def test_the_arena_allocates_like_the_model(start: int, calls: list[tuple[str, int]]):
    first_byte = -(-start // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    arena = Arena(start, first_byte + NUM_BLOCKS * ALIGNMENT_BYTES + 511)
    model = Model()
    assert arena.capacity_bytes == NUM_BLOCKS * ALIGNMENT_BYTES
    live: dict[int, tuple[int, int]] = {}
    for number, (call, value) in enumerate(calls):
        if call == "take":
            got = arena.take(value)
            want = model.take(number, value)
            if want is None:
                assert got is None
            else:
                assert got is not None
                offset, size = got
                assert offset == first_byte + want * ALIGNMENT_BYTES
                assert size == model.blocks.count(number) * ALIGNMENT_BYTES >= value
                live[number] = got
        elif live:
            number = list(live)[value % len(live)]
            arena.give_back(*live.pop(number))
            model.give_back(number)
        assert arena.used_bytes == model.used * ALIGNMENT_BYTES
        assert arena.high_water_bytes == model.high_water * ALIGNMENT_BYTES
        assert arena.largest_free_bytes == model.largest_free * ALIGNMENT_BYTES
    for span in live.values():
        arena.give_back(*span)
    # After any order of releases, everything is one range again.
    assert arena.used_bytes == 0
    assert arena.take(arena.capacity_bytes) == (first_byte, arena.capacity_bytes)


def test_an_arena_without_room():
    arena = Arena(100, 700)  # one aligned block does not fit between 512 and 700
    assert arena.capacity_bytes == 0
    assert arena.take(0) is None
    assert arena.largest_free_bytes == 0


@settings(max_examples=80, deadline=None)
@given(st.lists(st.one_of(take, take, give_back), max_size=60), st.integers(0, NUM_BLOCKS))
def test_an_arena_grows_by_ranges_of_another(calls: list[tuple[str, int]], num_taken: int):
    """No byte is allocated twice by both arenas, and clearing the grown one returns all its ranges to the source."""
    source = Arena(0, NUM_BLOCKS * ALIGNMENT_BYTES)
    grown = Arena(0, 0)
    outside = source.take(num_taken * ALIGNMENT_BYTES) if num_taken else None
    live: dict[int, tuple[int, int]] = {}
    for number, (call, value) in enumerate(calls):
        if call == "take":
            largest = max(grown.largest_free_bytes, source.largest_free_bytes)
            span = grown.take_or_grow(value, source)
            assert (span is None) == (max(1, value) > largest)
            if span is not None:
                live[number] = span
        elif live:
            grown.give_back(*live.pop(list(live)[value % len(live)]))
        spans = sorted([*live.values(), *([outside] if outside else [])])
        assert all(start + size <= after for (start, size), (after, _) in pairwise(spans))
        assert grown.used_bytes == sum(size for _, size in live.values())
    for span in live.values():
        grown.give_back(*span)
    for span in grown.clear():
        source.give_back(*span)
    assert (grown.capacity_bytes, grown.largest_free_bytes) == (0, 0)
    if outside:
        source.give_back(*outside)
    assert (source.used_bytes, source.largest_free_bytes) == (0, NUM_BLOCKS * ALIGNMENT_BYTES)
