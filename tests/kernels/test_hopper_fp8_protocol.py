"""The roles and barriers of the E4M3 kernels for Hopper (hopper_fp8.py, hopper_fp8_wgrad.py), in random order.

Nobody waits for ever, every wait ends for what it is meant for, and nothing is
overwritten while it is read. Wrong protocols are noticed.
"""

import random

import pytest
from barrier_roles import Barrier, Roles

COPIES = {"product": 2, "gradient": 4}  # of a stage: two operands, and the scales of either


class Program(Roles):
    """Shared memory of one program; `landing` holds copies that have not finished."""

    def __init__(self, lengths, stages, kind, *, frees_early=False, scales_late=False, forgets=0):
        """lengths: stages that each tile takes. The last three: to get it wrong."""
        self.lengths, self.stages, self.kind = lengths, stages, kind
        self.ahead = kind == "gradient"  # the columns' scales are read a stage ahead
        self.frees_early, self.scales_late = frees_early, scales_late
        copies = COPIES[kind]
        self.full = [Barrier(1 + copies - forgets) for _ in range(stages)]  # a copy's bytes count as one arrival
        self.empty = [Barrier(2) for _ in range(stages)]
        self.places = [[None] * copies for _ in range(stages)]
        self.readers = [0] * stages
        self.landing, self.done = [], []
        self.roles = {"load": self.load(), "multiply 0": self.multiply(0), "multiply 1": self.multiply(1)}

    def load(self):
        stage, phase = 0, 1
        for tile, length in enumerate(self.lengths):
            for k in range(length):
                yield self.empty[stage], phase
                assert self.readers[stage] == 0
                self.full[stage].arrive()
                for place in range(COPIES[self.kind]):
                    self.places[stage][place] = None
                    self.landing.append((stage, place, (tile, k)))
                stage, phase = self.next_stage(stage, phase)

    def land(self, number):
        stage, place, what = self.landing.pop(number)
        assert self.readers[stage] == 0
        self.places[stage][place] = what
        self.full[stage].arrive()

    def holds(self, stage, what):
        return self.places[stage] == [what] * COPIES[self.kind]

    def multiply(self, warpgroup):
        stage, phase = 0, 0
        for tile, length in enumerate(self.lengths):
            if self.ahead and length:
                yield self.full[stage], phase
                assert self.holds(stage, (tile, 0))
            for k in range(length):
                if not self.ahead:
                    yield self.full[stage], phase
                assert self.holds(stage, (tile, k))
                self.readers[stage] += 1
                following, following_phase = self.next_stage(stage, phase)
                for half in range(2):
                    if half == 0 and self.frees_early:
                        self.empty[stage].arrive()
                    yield None
                    if self.ahead and half == 1 and k + 1 < length:
                        yield self.full[following], following_phase
                    yield None
                    assert self.holds(stage, (tile, k))
                self.readers[stage] -= 1
                if not self.frees_early:
                    self.empty[stage].arrive()
                if self.scales_late:
                    yield None
                    assert self.holds(stage, (tile, k))
                yield None
                if self.ahead and k + 1 < length:
                    assert self.holds(following, (tile, k + 1))  # its scales are read
                stage, phase = following, following_phase
            for _ in range(5):
                yield None
            self.done.append((tile, warpgroup))

    def check(self):
        assert sorted(self.done) == [(tile, half) for tile in range(len(self.lengths)) for half in range(2)]


WRONG = [{"frees_early": True}, {"scales_late": True}, {"forgets": 1}]


@pytest.mark.parametrize("kind", COPIES)
def test_no_order_of_the_warps_hangs_or_mixes_up_tiles(kind):
    choice = random.Random(0)
    for number in range(300):
        longest, tiles = choice.choice([1, 2, 3, 7]), choice.choice([0, 1, 2, 5])
        shortest = 0 if kind == "gradient" else longest  # a group may have no tokens; all rows have the same features
        lengths = [choice.randint(shortest, longest) for _ in range(tiles)]
        program = Program(lengths, 2 + number % 3, kind)
        program.play(choice)
        program.check()


@pytest.mark.parametrize("wrong", WRONG, ids=str)
@pytest.mark.parametrize("kind", COPIES)
def test_wrong_protocols_are_noticed(kind, wrong):
    def is_noticed(seed):
        program = Program([4, 4, 4], 3, kind, **wrong)
        try:
            program.play(random.Random(seed))
            program.check()
        except AssertionError:
            return True
        return False

    assert any(is_noticed(seed) for seed in range(20))
