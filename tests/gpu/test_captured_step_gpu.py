"""Captured steps on GPUs: CUDA graphs, of which some have too little room; layers inside torch's own captures."""

from __future__ import annotations

import pytest
from test_captured_step import check_exact

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_every_step_is_exact(cluster, num_ranks):
    found = cluster(num_ranks, "cuda").run(check_exact, "cuda", 20)
    assert [text for *_, texts in found for text in texts] == []
    num_replays, num_repeated, num_captures, _ = found[0]
    assert num_replays >= 8
    assert num_replays + num_repeated == 18
    assert num_captures <= num_repeated + 1
    if num_ranks > 1:
        assert num_repeated >= 1
