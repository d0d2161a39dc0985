"""The roles and barriers of the kernels for Hopper (kernels/hopper/pipeline.py), played in random order.

Every role is a generator that waits and arrives as the kernels do, with the same stages and parities. Checked: nobody
waits for ever, every wait ends for what it is meant for, and nothing is overwritten while it is read.
"""

import random

import pytest
from barrier_roles import Barrier, Roles


class Program(Roles):
    """Shared memory of one program; `landing` holds copies that TMA has not finished."""

    def __init__(self, kind, lengths, stages):
        """lengths: stages that each tile takes; all the same where the ring skips another warpgroup's tiles."""
        self.alternate, self.gathered, self.finishes = kind == "alternate", kind == "gathered", kind != "alternate"
        self.finishes &= kind != "together"
        self.tiles, self.lengths, self.stages = range(len(lengths)), lengths, stages
        # The bytes of TMA count as one more arrival.
        self.full = [Barrier(3 if self.gathered else 2) for _ in range(stages)]
        self.empty = [Barrier(1 if self.alternate else 2) for _ in range(stages)]
        self.turn, self.dumped, self.taken = ([Barrier(1) for _ in range(2)] for _ in range(3))
        self.a, self.b, self.readers = [None] * stages, [None] * stages, [0] * stages
        self.dump = [None, None]
        self.landing, self.done = [], []
        self.roles = {"load": self.load(), "multiply 0": self.multiply(0), "multiply 1": self.multiply(1)}
        if self.finishes:
            self.roles["finish"] = self.finish()

    def skip_tile(self, stage, phase):
        position = phase * self.stages + stage + (self.lengths or [1])[0]
        return position % self.stages, position // self.stages & 1

    def load(self):
        stage, phase, landed, copies = 0, 1, 0, []
        for tile in self.tiles:
            for k in range(self.lengths[tile]):
                yield self.empty[stage], phase
                assert self.readers[stage] == 0
                self.full[stage].arrive()
                self.a[stage] = self.b[stage] = None
                self.landing.append((stage, (tile, k)))
                if self.gathered:  # by cp.async; the copies of all stages but one have landed
                    copies.append((stage, (tile, k)))
                    yield None
                    if len(copies) > 1:
                        landed = self.announce(landed, copies)
                stage, phase = self.next_stage(stage, phase)
        if copies:
            self.announce(landed, copies)

    def announce(self, landed, copies):
        stage, what = copies.pop(0)
        assert stage == landed
        self.a[stage] = what
        self.full[stage].arrive()
        return self.next_stage(stage, 0)[0]

    def land(self, place):
        stage, what = self.landing.pop(place)
        self.b[stage] = what
        if not self.gathered:
            self.a[stage] = what
        self.full[stage].arrive()

    def multiply(self, warpgroup):
        stage, phase, turn, tiles = 0, 0, 0, self.tiles
        if self.alternate:
            tiles = tiles[warpgroup::2]
            if warpgroup == 1:
                stage, phase = self.skip_tile(stage, phase)
        for tile in tiles:
            if self.alternate:
                yield self.turn[warpgroup], turn ^ (1 - warpgroup)
            for k in range(self.lengths[tile]):
                yield self.full[stage], phase
                assert self.a[stage] == self.b[stage] == (tile, k)
                self.readers[stage] += 1
                yield None
                if k > 0:
                    self.free(stage - 1)
                stage, phase = self.next_stage(stage, phase)
            if self.alternate:
                self.turn[1 - warpgroup].arrive()
            yield None
            if self.lengths[tile] > 0:
                self.free(stage - 1)
            if self.alternate:
                stage, phase = self.skip_tile(stage, phase)
            if self.finishes:
                yield self.taken[warpgroup], turn ^ 1
                assert self.dump[warpgroup] is None
                self.dump[warpgroup] = tile
                yield None
                self.dumped[warpgroup].arrive()
            else:
                for _ in range(5):
                    yield None
                self.done.append((tile, warpgroup))
            turn ^= 1

    def free(self, stage):
        self.readers[stage] -= 1
        self.empty[stage].arrive()

    def finish(self):
        for tile in self.tiles:
            for half in range(2):
                yield self.dumped[half], tile & 1
                assert self.dump[half] == tile
                for _ in range(3):
                    yield None
                self.dump[half] = None
                self.done.append((tile, half))
                self.taken[half].arrive()


@pytest.mark.parametrize("num_k", [1, 2, 3, 4, 5, 12])
@pytest.mark.parametrize("kind", ["together", "separate", "gathered", "alternate"])
def test_no_order_of_the_warps_hangs_or_mixes_up_tiles(kind, num_k):
    choice = random.Random(num_k)
    for num_tiles in (0, 1, 2, 3, 4, 7):
        for stages in (3, 4, 5):
            for _ in range(6):
                program = Program(kind, [num_k] * num_tiles, stages)
                program.play(choice)
                halves = [(t, t % 2) for t in range(num_tiles)]
                both = [(t, half) for t in range(num_tiles) for half in range(2)]
                assert sorted(program.done) == (halves if program.alternate else both)


def test_tiles_of_different_lengths():
    """A weight gradient's tiles take as many stages as their group's rows do, which may be none."""
    choice = random.Random(0)
    for num_tiles in (1, 2, 3, 5, 8):
        for _ in range(60):
            lengths = [choice.choice([0, 0, 1, 2, 3, 4, 7]) for _ in range(num_tiles)]
            program = Program("together", lengths, 3)
            program.play(choice)
            assert sorted(program.done) == [(t, half) for t in range(num_tiles) for half in range(2)]
