"""Timelines of real steps on GPUs: what Kineto writes is understood."""

import json
from collections.abc import Callable
from itertools import groupby, pairwise
from pathlib import Path

import pytest
import torch
from cluster import Cluster
from gpu_steps import TOKENS, config_for, layer_for, training_step
from trace_layer import capture_step, directed
from worker import open_heap

from symmoe import timeline
from symmoe.timeline.events import Timeline

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() < 2,
    reason="needs 2 CUDA GPUs: the clocks of ranks that share one differ",
)
FORWARD = ("plan", "push", "FC1", "FC2", "send sums", "sum at home")
LATE_US = 1000  # the start of a profiler makes hosts several times as late
APART_US = 200  # that ranks may begin a pass of a replay, where no host is in the way
BACKWARD = ("push", "FC2 dgrad", "FC1 dgrad", "wgrad", "send sums", "sum at home")


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


@pytest.mark.parametrize("schedule", ["serial", "always-overlapped"])
def test_kernels_of_a_step_have_phases_and_directions(
    schedule: str, cluster: Callable[..., Cluster], tmp_path: Path
):
    first, second = cluster(2, "cuda").run(recorded, str(tmp_path / "step.json"), schedule)
    assert first == second
    for events in first.ranks:
        assert {e.direction for e in events if e.phase != "other"} == {"forward", "backward"}
        assert "GEMM" not in {e.phase for e in events}  # FC2 and FC1 dgrad are told apart
        for direction, phases in (("forward", FORWARD), ("backward", BACKWARD)):
            begins = [
                min(e.begin_us for e in events if (e.phase, e.direction) == (p, direction))
                for p in phases
            ]
            if schedule == "serial":
                order = (
                    [0, 1, 2, 3, 4, 5] if direction == "forward" else [0, 1, 3, 2]
                )  # dW2 before FC1's dgrad
                assert [begins[kernel] for kernel in order] == sorted(
                    begins[kernel] for kernel in order
                )
        assert len({e.lane for e in events}) >= (1 if schedule == "serial" else 2)
    assert max(first.clock_error_us) < 100
    assert (
        apart_us(first, "forward") < LATE_US
    )  # backward, a host may be late by as much as the profiler makes it
    if schedule == "serial":  # one stream: nothing hides anything
        for times in first.phases():
            if times.phase in ("push", "send sums", "sum at home"):
                assert times.exposed_us == pytest.approx(times.busy_us)
    # One step was recorded, not those before its start: the router runs once.
    assert [sum(e.name == "choose_experts_kernel" for e in events) for events in first.ranks] == [
        1,
        1,
    ]
    trace = json.loads((tmp_path / "step.json").read_text(encoding="utf-8"))
    assert sum(item["name"] == "FC1" for item in trace["traceEvents"]) >= 2


def apart_us(timeline: Timeline, direction: str) -> float:
    """How far apart the ranks begin their first pass in a direction."""
    starts = [
        min(e.begin_us for e in events if e.direction == direction) for events in timeline.ranks
    ]
    return max(starts) - min(starts)


NUM_REPLAYS = 2


def replayed(rank: int, num_ranks: int, path: str, schedule: str) -> tuple[Timeline, float]:
    """The timeline, and the milliseconds of as many replays without a profiler."""
    with open_heap("cuda", num_bytes=256 << 20) as heap:
        torch.use_deterministic_algorithms(False)
        layer = layer_for(heap, config_for(num_ranks, schedule=schedule))
        x = torch.randn(
            TOKENS,
            layer.config.hidden,
            device=heap.device,
            dtype=torch.bfloat16,
            requires_grad=True,
        )
        inputs = (x, *layer.parameters())
        dy = torch.randn_like(x)

        def forward() -> tuple[torch.Tensor, torch.Tensor]:
            y, metrics = layer(x)
            return y, metrics.aux_loss

        def backward(outputs: tuple[torch.Tensor, torch.Tensor]) -> None:
            torch.autograd.grad(outputs, inputs, (dy, torch.ones_like(outputs[1])))

        for _ in range(2):
            backward(forward())
        graph = capture_step(forward, backward)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        for event in events:  # the first turn warms up
            heap.synchronize()
            torch.cuda._sleep(1_000_000)
            event.record()
            for _ in range(NUM_REPLAYS):
                graph.replay()
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        heap.synchronize()
        with timeline.record(path, heap, directed) as recording:
            graph.replay()
            recording.start()
            for _ in range(NUM_REPLAYS):
                graph.replay()
        del graph
        heap.release_graphs()
        return recording.timeline, events[-1].elapsed_time(end)


@pytest.mark.parametrize("schedule", ["serial", "always-overlapped"])
def test_kernels_of_replays_have_phases_and_directions(
    schedule: str, cluster: Callable[..., Cluster], tmp_path: Path
):
    (first, ms), (second, _) = cluster(2, "cuda").run(
        replayed, str(tmp_path / "step.json"), schedule
    )
    assert first == second
    for events in first.ranks:
        passes = [direction for direction, _ in groupby(e.direction for e in events if e.direction)]
        assert passes == ["forward", "backward"] * NUM_REPLAYS
        assert {e.direction for e in events if e.phase != "other"} == {"forward", "backward"}
        phases = {(e.phase, e.direction) for e in events}
        assert {(phase, "forward") for phase in FORWARD} | {
            (phase, "backward") for phase in BACKWARD
        } <= phases
        assert not {phase for phase, _ in phases} & {"GEMM"}
        assert {("FC2", "backward"), ("FC1 dgrad", "forward"), ("wgrad", "forward")}.isdisjoint(
            phases
        )
        assert [e.name for e in events].count("choose_experts_kernel") == NUM_REPLAYS
        assert not any("spin" in e.name for e in events)
        lanes = {e.lane for e in events}
        assert {"compute", "communication"} <= lanes
        assert len(lanes) <= 5
        for lane in lanes:
            assert all(
                a.end_us <= b.begin_us for a, b in pairwise([e for e in events if e.lane == lane])
            )
    assert max(first.clock_error_us) < 100
    for direction in ("forward", "backward"):
        assert apart_us(first, direction) < APART_US
    # A profiler waits between kernels, but not like a host that launches them.
    assert first.end_us < 3 * 1e3 * ms + LATE_US
