"""Timelines of real steps on GPUs: what Kineto writes is understood."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster import Cluster
from step_trace import training_step
from test_step_gpu import TOKENS, config_for, layer_for
from worker import open_heap

from symmoe import timeline
from symmoe.timeline.events import Timeline

pytestmark = pytest.mark.gpu

FORWARD = ("plan", "push", "FC1", "FC2", "pre-reduce", "pull")
LATE_US = 1000  # the start of a profiler makes hosts several times as late
BACKWARD = ("push", "FC2 dgrad", "FC1 dgrad", "wgrad", "pre-reduce", "pull")


def recorded(rank: int, num_ranks: int, path: str, schedule: str) -> Timeline:
    with open_heap("cuda", num_bytes=256 << 20) as heap:
        step = training_step(layer_for(heap, config_for(num_ranks, schedule=schedule)), TOKENS)
        for _ in range(2):
            step()
        with timeline.record(path, heap) as recording:
            for _ in range(2):
                step()
            recording.start()
            step()
        return recording.timeline


@pytest.mark.parametrize("schedule", ["serial", "overlapped"])
def test_kernels_of_a_step_have_phases_and_directions(schedule: str, cluster: Callable[..., Cluster], tmp_path: Path):
    made, other = cluster(2, "cuda").run(recorded, str(tmp_path / "step.json"), schedule)
    assert made == other
    for events in made.ranks:
        assert {e.direction for e in events if e.phase != "other"} == {"forward", "backward"}
        assert "GEMM" not in {e.phase for e in events}  # FC2 and FC1 dgrad are told apart
        for direction, phases in (("forward", FORWARD), ("backward", BACKWARD)):
            begins = [min(e.begin_us for e in events if (e.phase, e.direction) == (p, direction)) for p in phases]
            if schedule == "serial":
                order = [0, 1, 2, 3, 4, 5] if direction == "forward" else [0, 1, 2, 3]
                assert [begins[place] for place in order] == sorted(begins[place] for place in order)
        assert len({e.lane for e in events}) >= (1 if schedule == "serial" else 2)
    assert max(made.clock_error_us) < 100
    for direction in ("forward", "backward"):
        starts = [min(e.begin_us for e in events if e.direction == direction) for events in made.ranks]
        assert max(starts) - min(starts) < LATE_US
    if schedule == "serial":  # one stream: nothing hides anything
        for times in made.phases():
            if times.phase in ("push", "pull"):
                assert times.exposed_us == pytest.approx(times.busy_us)
    # One step was recorded, not those before its start: the router runs once.
    assert [sum(e.name == "select_experts_kernel" for e in events) for events in made.ranks] == [1, 1]
    trace = json.loads((tmp_path / "step.json").read_text(encoding="utf-8"))
    assert sum(item["name"] == "FC1" for item in trace["traceEvents"]) >= 2
