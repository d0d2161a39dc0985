"""How the soak suite judges growth: what it finds, and that judging grows nothing itself."""

from __future__ import annotations

import pytest
from reliability.soak import slope, what_grew

STEPS = range(100, 20_001, 50)


def samples(bytes_per_step: float, **last: int) -> list[tuple[int, ...]]:
    """Memory that grows at that rate, and by turns is 100 KB more; `last` changes the last sample."""
    found = [(step, int(bytes_per_step * step) + 100_000 * (i % 2), 4096, 0, 13, 0) for i, step in enumerate(STEPS)]
    names = ("step", "resident", "high_water", "leased", "files", "device")
    found[-1] = tuple(last.get(name, value) for name, value in zip(names, found[-1], strict=True))
    return found


@pytest.mark.parametrize("bytes_per_step", [0.0, 100.0, 900.0])
def test_growth_that_is_allowed(bytes_per_step: float):
    assert what_grew(samples(bytes_per_step)) == []


def test_growth_that_is_not():
    (problem,) = what_grew(samples(1500.0))
    assert problem.startswith("host memory grew by 298")  # 1500 * 19,900, and what the 100 KB do to the line
    assert what_grew(samples(0.0, files=14)) == ["open files went from 13 to [13, 14]"]
    assert what_grew(samples(0.0, leased=512)) == ["leased bytes went from 0 to [0, 512]"]


def test_slope():
    assert slope([0, 1, 2, 3], [1, 3, 5, 7]) == 2.0
    assert slope([0, 1, 2], [0, 0, 3]) == 1.5
    assert slope([5], [7]) == slope([5, 5], [7, 8]) == 0.0
