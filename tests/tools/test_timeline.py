"""Timelines: exposed times against counting, clocks against known offsets, real steps against their order by hand."""

import ast
import json
import operator
import random
import time
from collections.abc import Callable, Iterable
from itertools import chain, groupby, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import trace_layer
from cluster import Cluster, run_on
from suites.cases import Case
from suites.layer import Choice
from worker import Findings, open_heap

from symmoe import MoEConfig, MoELayer, RouterConfig, SymmetricHeap, kernels, timeline
from symmoe.errors import ArgumentError, PeerAborted
from symmoe.kernels import twin
from symmoe.timeline.events import DIRECTIONS, Event, Timeline, chrome_trace, lanes_of, table
from symmoe.timeline.phases import _TABLE, BY_KERNEL, BY_OPERATOR, COMMUNICATION, GEMMS, PHASES
from symmoe.timeline.recording import align, events_of, record, timeline_of
from symmoe.tools.shapes import Shape

KERNELS = Path(kernels.__file__).parent


# -- exposed times ----------------------------------------------------------------------------------------------------
def event(
    phase: str, begin: float, end: float, direction: str = "", lane: str = "host", name: str = "x"
) -> Event:
    return Event(lane, phase, direction, name, begin, end)


def random_timeline(seed: int, num_ranks: int = 3, end_us: int = 400) -> Timeline:
    """Events at whole microseconds on two streams, which may overlap and touch."""
    choose = random.Random(seed)

    def any_event() -> Event:
        begin = choose.randrange(end_us)
        phase = choose.choice(PHASES)
        direction = choose.choice(DIRECTIONS)
        end = min(end_us, begin + choose.randrange(60))
        return event(phase, begin, end, direction, f"stream {choose.randrange(2)}")

    begin_of = operator.attrgetter("begin_us")
    ranks = (
        sorted((any_event() for _ in range(choose.randrange(1, 40))), key=begin_of)
        for _ in range(num_ranks)
    )
    return Timeline(
        ranks=tuple(map(tuple, ranks)), clock_error_us=(0.0,) * num_ranks, device="made up"
    )


def cells(events: Iterable[Event], end_us: int = 400) -> np.ndarray:
    """Whether any event runs in each microsecond."""
    running = np.zeros(end_us, dtype=bool)
    for e in events:
        running[int(e.begin_us) : int(e.end_us)] = True
    return running


@pytest.mark.parametrize("seed", range(25))
def test_exposed_times_equal_a_count_of_microseconds(seed: int):
    timeline_ = random_timeline(seed)
    times_by_key = {(times.phase, times.direction): times for times in timeline_.phases()}
    assert set(times_by_key) == {
        (e.phase, e.direction) for events in timeline_.ranks for e in events
    }
    last = int(max(e.end_us for events in timeline_.ranks for e in events))
    for rank, events in enumerate(timeline_.ranks):
        gemms = cells(e for e in events if e.phase in GEMMS)
        for key, times in times_by_key.items():
            running = cells(e for e in events if (e.phase, e.direction) == key)
            assert (times.busy_us[rank], times.exposed_us[rank]) == (
                running.sum(),
                (running & ~gemms).sum(),
            )
        exposed = timeline_.exposed_communication(rank)
        communication = cells(e for e in events if e.phase in COMMUNICATION)
        assert (cells(event("push", *span) for span in exposed) == (communication & ~gemms)).all()
        assert all(first[1] < second[0] for first, second in pairwise(exposed))
        assert timeline_.idle_us(rank) == last - cells(events).sum()


# -- clocks -----------------------------------------------------------------------------------------------------------
def barriers_of_clocks(
    offsets_us: list[float], seed: int, rounds: int = 16
) -> list[list[tuple[float, float]]]:
    """The barriers of ranks whose clocks are ahead by an offset; ranks enter and exit at random times."""
    choose = random.Random(seed)
    now = 0.0
    barriers = [[] for _ in offsets_us]
    for _ in range(rounds):
        entered = [now + choose.expovariate(1 / 30) for _ in offsets_us]
        exited = [max(entered) + 2 + choose.expovariate(1 / 5) for _ in offsets_us]
        for spans, offset, begin, end in zip(barriers, offsets_us, entered, exited, strict=True):
            spans.append((begin + offset, end + offset))
        now = max(exited)
    return barriers


@pytest.mark.parametrize("seed", range(20))
def test_align_finds_clock_offsets_within_the_stated_error(seed: int):
    true_offsets = [0.0, 1e6 * (seed - 10), -37.5, 3.25e9]
    offsets, errors = align(barriers_of_clocks(true_offsets, seed))
    for offset, error, true_offset in zip(offsets, errors, true_offsets, strict=True):
        assert abs(offset - true_offset) <= error + 1e-3
        assert error < 60
    shifted = barriers_of_clocks(true_offsets, seed)
    shifted[1] = [(begin + 500, end + 500) for begin, end in shifted[1]]
    assert abs(align(shifted)[0][1] - true_offsets[1]) > errors[1]


def test_a_timeline_has_one_clock_and_no_aligning_barriers():
    true_offsets, ranks = [0.0, 7000.0], []
    for spans, offset in zip(barriers_of_clocks(true_offsets, 3), true_offsets, strict=True):
        barriers = [event("wait", *span, name="barrier_kernel") for span in spans]
        begin = 9000 + offset
        ranks.append(
            [
                *barriers,
                event("push", begin, begin + 5),
                event("wait", begin + 5, begin + 6, name="barrier_kernel"),
            ]
        )
    aligned = timeline_of(ranks, "cpu", 16)
    assert [[e.phase for e in events] for events in aligned.ranks] == [["push", "wait"]] * 2
    begins = [events[0].begin_us for events in aligned.ranks]
    assert abs(begins[0] - begins[1]) <= aligned.clock_error_us[1] < 60
    assert min(begins) > 0
    assert aligned.ranks[1][0].end_us - aligned.ranks[1][0].begin_us == pytest.approx(5)


# -- the table of phases ----------------------------------------------------------------------------------------------
def launched_kernels() -> set[str]:
    """The kernels of the package: jitted functions that the host launches."""
    paths = [*KERNELS.rglob("*.py")]
    trees = [ast.parse(path.read_bytes()) for path in paths if b"jit" in path.read_bytes()]
    return {
        node.name
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and node.name.endswith("_kernel")
        and any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    }


def test_every_kernel_and_every_operator_has_a_phase():
    kernels_of_package = launched_kernels()
    assert kernels_of_package - set(BY_KERNEL) == set()
    assert len(kernels_of_package) >= 30
    assert set(twin.__all__) - set(BY_OPERATOR) == {"dact_workspace_numel"}  # computes a number
    assert {"FC1", "FC2", "FC1 dgrad", "FC2 dgrad", "wgrad", "GEMM"} == GEMMS < set(PHASES)
    travel = {"plan", "push", "replicas", "index", "fan-out", "send sums", "sum at home", "wait"}
    assert travel == COMMUNICATION < set(PHASES)
    for column in (1, 2):  # an operator has one phase, and so has a kernel
        names = [name for row in _TABLE.values() for name in f"{row[0]} {row[column]}".split()]
        assert len(names) == len(set(names))


# -- GPU events from a profiler's trace -------------------------------------------------------------------------------
def kernel(
    name: str, begin: float, correlation: int, stream: int = 7, category: str = "kernel"
) -> dict:
    args = {"stream": stream, "correlation": correlation, "device": 0}
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 0,
        "tid": stream,
        "ts": begin,
        "dur": 4.0,
        "args": args,
    }


def launch(begin: float, correlation: int, thread: int, category: str = "cuda_driver") -> dict:
    return {
        "ph": "X",
        "cat": category,
        "name": "cuLaunchKernelEx",
        "pid": 9,
        "tid": thread,
        "ts": begin,
        "dur": 1.0,
        "args": {"correlation": correlation},
    }


def annotation(name: str, begin: float, end: float, thread: int) -> dict:
    times = {"ts": begin, "dur": end - begin}
    return {"ph": "X", "cat": "user_annotation", "name": name, "pid": 9, "tid": thread, **times}


def test_kernels_have_the_phase_of_the_range_of_their_launch():
    items = [
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "python"}},
        annotation("symmoe/forward/grouped_gemm", 10, 20, thread=1),
        annotation("symmoe/backward/grouped_gemm_dgrad", 11, 30, thread=2),
        annotation("somebody/forward/grouped_gemm", 40, 50, thread=1),
        annotation("symmoe/my own", 41, 49, thread=1),
        annotation("symmoe/forward/push_rows", 60, 70, thread=1),
        launch(12, 1, thread=1),
        launch(13, 2, thread=2, category="cuda_runtime"),
        launch(25, 3, thread=1),  # after the range of its thread, within the range of thread 2
        launch(45, 4, thread=1),
        launch(61, 5, thread=1),
        kernel("hopper_gemm_kernel", 1000, 1),
        kernel("hopper_gemm_kernel", 1010, 2, stream=13),
        kernel("hopper_gemm_kernel", 1020, 3),
        kernel("barrier_kernel", 1030, 4),
        kernel("void at::native::vectorized_elementwise_kernel<4>" + "x" * 500, 990, 5),
        kernel("sum_home_kernel", 1040, 99),  # of a CUDA graph: the trace has no launch
        kernel("ncclDevKernel_AllReduce", 1050, 98),
        kernel("Memcpy DtoH (Device -> Pinned)", 1060, 97, category="gpu_memcpy"),
    ]
    events = events_of({"traceEvents": items}, on_gpu=True)
    assert [(e.phase, e.direction, e.lane) for e in events] == [
        ("push", "forward", "stream 7"),  # torch's kernel, launched by an operator of ours
        ("FC2", "forward", "stream 7"),
        ("FC1 dgrad", "backward", "stream 13"),
        ("GEMM", "", "stream 7"),
        ("wait", "", "stream 7"),
        ("sum at home", "", "stream 7"),
        ("other", "", "stream 7"),
        ("other", "", "stream 7"),
    ]
    assert (events[1].begin_us, events[1].end_us) == (1000.0, 1004.0)
    assert max(len(e.name) for e in events) <= 120


def test_launches_before_the_start_are_excluded():
    """The time of the launch decides: the clocks of GPU and host differ."""
    items = [
        annotation("symmoe/forward/push_rows", 10, 20, thread=1),
        launch(11, 1, thread=1),
        annotation("symmoe/start", 15, 15, thread=1),
        launch(16, 2, thread=1),  # a graph: all kernels of a replay carry its correlation
        annotation("symmoe/start", 40, 41, thread=1),  # started again: the last one counts
        launch(42, 3, thread=1),
        launch(50, 4, thread=2),  # autograd's thread
        kernel("push_rows_kernel", 45, 1),
        kernel("push_sums_kernel", 46, 2),
        kernel("push_sums_kernel", 62, 2),
        kernel("barrier_kernel", 39, 3),
        kernel("fan_out_kernel", 60, 4),
        kernel(
            "gather_values_kernel", 38, 98
        ),  # without a launch in the trace: the kernel's time decides
        kernel("lay_out_kernel", 61, 99),
    ]
    assert [e.phase for e in events_of({"traceEvents": items}, on_gpu=True)] == [
        "wait",
        "fan-out",
        "plan",
    ]


# -- replays ----------------------------------------------------------------------------------------------------------
SPIN = "at::cuda::(anonymous namespace)::spin_kernel(long)"
REPLAY = (  # begin, end, phase by the kernel's name, name; then the expected phase, direction, lane
    ((0, 1, "other", SPIN), None),
    ((1, 5, "route", "choose_experts_kernel"), ("route", "forward", "compute")),
    ((5, 20, "push", "hopper_push_kernel"), ("push", "forward", "communication")),
    ((8, 12, "wait", "wait_for_signal_kernel"), ("wait", "forward", "communication 2")),
    ((9, 30, "FC1", "hopper_act_kernel"), ("FC1", "forward", "compute")),
    ((30, 40, "GEMM", "hopper_gemm_kernel"), ("FC2", "forward", "compute")),
    (
        (40, 50, "sum at home", "hopper_sum_home_kernel"),
        ("sum at home", "forward", "communication"),
    ),
    ((50, 51, "other", SPIN), None),
    ((51, 60, "push", "hopper_push_kernel"), ("push", "backward", "communication")),
    ((60, 80, "GEMM", "hopper_gemm_kernel"), ("FC1 dgrad", "backward", "compute")),
    ((70, 90, "wgrad", "hopper_wgrad_kernel"), ("wgrad", "backward", "compute 2")),
)


def replayed(turns: int) -> tuple[list[Event], list[tuple[str, str, str, float]]]:
    """The events of replays, on streams in turn, and the expected phase, direction, lane and begin."""
    events = [event("wait", -9, -8, name="barrier_kernel", lane="stream 7")]
    expected = [("wait", "", "communication", -9.0)]
    for turn in range(turns):
        for index, ((begin, end, phase, name), labels) in enumerate(REPLAY):
            events.append(
                event(
                    phase,
                    100 * turn + begin,
                    100 * turn + end,
                    name=name,
                    lane=f"stream {index % 5}",
                )
            )
            if labels is not None:
                expected.append((*labels, 100.0 * turn + begin))
    return events, expected


@pytest.mark.parametrize("turns", [1, 3])
def test_kernels_of_replays_have_a_direction_and_a_lane(turns: int):
    replay, expected = replayed(turns)
    directed = trace_layer.directed(
        Timeline(ranks=(tuple(replay),) * 2, clock_error_us=(0.0, 1.0), device="made up")
    )
    for events in directed.ranks:
        assert [(e.phase, e.direction, e.lane, e.begin_us) for e in events] == expected
    assert lanes_of(directed, 0) == ["compute", "compute 2", "communication", "communication 2"]
    for lane in lanes_of(directed, 1):  # Perfetto and pictures show no two at a time
        assert all(
            a.end_us <= b.begin_us
            for a, b in pairwise([e for e in directed.ranks[1] if e.lane == lane])
        )
    assert directed.clock_error_us == (0.0, 1.0)
    assert problems_of(chrome_trace(directed)) == []


@pytest.fixture
def layer(heap: SymmetricHeap) -> MoELayer:
    """A layer whose rows have a width of 16."""
    config = MoEConfig(hidden=16, ffn=8, num_experts=4, top_k=2, schedule="always-overlapped")
    return MoELayer(config, heap)


def test_written_replays_equal_the_returned_timeline(tmp_path: Path, layer: MoELayer):
    with record(tmp_path / "replays.json", layer.heap, trace_layer.directed) as recording:
        recording.start()
        layer(torch.randn(8, 16))
    lanes = {e.lane for e in recording.timeline.ranks[0]}
    assert lanes == {"compute", "communication"}
    items = json.loads((tmp_path / "replays.json").read_text(encoding="utf-8"))["traceEvents"]
    names = {item["args"]["name"] for item in items if item["name"] == "thread_name"}
    assert names == lanes | {"exposed communication"}
    assert (tmp_path / "replays.txt").read_text(encoding="utf-8").startswith("cpu, 1 ranks")


def test_profilers_see_ranges_only_within_annotate(heap: SymmetricHeap, layer: MoELayer):
    x = torch.randn(8, 16, requires_grad=True)

    def profiled_ranges() -> list[str]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            layer(x)[0].sum().backward()
        return [e.name for e in profiler.events() if e.name.startswith("symmoe/")]

    with timeline.annotate(heap):
        ranges = profiled_ranges()
        with pytest.raises(ArgumentError, match="ranges are on, already"), timeline.annotate(heap):
            pass
    assert (
        ranges.count("symmoe/forward/grouped_gemm_act")
        == ranges.count("symmoe/backward/grouped_gemm_dgrad")
        == 1
    )
    assert ranges.count("symmoe/backward/grouped_gemm_wgrad") == 2
    assert profiled_ranges() == []


# -- real steps -------------------------------------------------------------------------------------------------------
# A layer's phases forward and backward, by hand from docs/design/programs.md.
START, ARRIVE = "route plan wait plan  wait push wait index", "wait send_sums wait sum_at_home"
DGRADS = "FC2_dgrad wgrad FC1_dgrad"
SUMS = "send_sums wait sum_at_home send_sums wait sum_at_home  route"
ORDERS = {
    "packed": (f"{START}  FC1 FC2  {ARRIVE}", f"wait push wait  {DGRADS} wgrad  {SUMS}"),
    "expert-major": (
        f"{START} fan-out  FC1 FC2  {ARRIVE}",
        f"wait push wait fan-out {DGRADS} wgrad {SUMS}",
    ),
    "overlapped": (  # own rows, then the peer's; which rows these are is part of the plan
        f"route plan wait plan  wait push index FC1  push wait index FC1  FC2  {ARRIVE}",
        f"wait push FC2_dgrad  push wait {DGRADS}  send_sums wgrad wait sum_at_home send_sums wait sum_at_home  route",
    ),
}
NUM_LAYERS = 2


def record_a_step(
    rank: int, num_ranks: int, findings: Findings, layout_name: str, folder: str
) -> None:
    layout, schedule = (
        ("packed", "always-overlapped") if layout_name == "overlapped" else (layout_name, "serial")
    )
    with open_heap("cpu") as heap:
        config = MoEConfig(
            hidden=32, ffn=16, num_experts=8, top_k=3, layout=layout, schedule=schedule
        )
        model = [MoELayer(config, heap) for _ in range(NUM_LAYERS)]
        x = torch.randn(12 + rank, 32, requires_grad=True)

        def step() -> None:
            y = x
            for layer in model:
                y = layer(y)[0]
            y.sum().backward()

        with timeline.record(f"{folder}/{layout_name}.json", heap) as recording:
            step()  # not recorded: before the start
            recording.start()
            step()  # not recorded: before the second start
            recording.start()
            findings.equal("not yet", recording.timeline, None)
            step()
        step()  # not recorded: after the end
    findings.equal("no hook is left", kernels.for_device(torch.device("cpu")) is twin, True)
    recorded_timeline = recording.timeline
    findings.equal("ranks", len(recorded_timeline.ranks), num_ranks)
    for index, direction in enumerate(("forward", "backward")):
        for source, events in enumerate(recorded_timeline.ranks):
            phases = [
                name for name, _ in groupby(e.phase for e in events if e.direction == direction)
            ]
            # Where one layer ends with the phase that the next begins with, the two are one.
            expected = [
                name.replace("_", " ")
                for name, _ in groupby(ORDERS[layout_name][index].split() * NUM_LAYERS)
            ]
            findings.equal(f"{direction} of rank {source}", phases, expected)
    for events in recorded_timeline.ranks:
        findings.equal(
            "one after the other", all(a.end_us <= b.begin_us for a, b in pairwise(events)), True
        )
        findings.equal("lanes", {e.lane for e in events}, {"host"})
    findings.equal("an error is stated", 0 < max(recorded_timeline.clock_error_us) < 1e6, True)


@pytest.mark.parametrize("layout", ORDERS)
def test_a_step_has_every_phase_once_per_layer_and_direction(
    layout: str, cluster: Callable[..., Cluster], tmp_path: Path
):
    assert cluster(2).run(record_a_step, layout, str(tmp_path)) == [[], []]
    trace = json.loads((tmp_path / f"{layout}.json").read_text(encoding="utf-8"))
    assert problems_of(trace) == []
    lanes = {
        (i["pid"], i["args"]["name"]) for i in trace["traceEvents"] if i["name"] == "thread_name"
    }
    assert lanes == {
        (rank, lane) for rank in range(2) for lane in ("host", "exposed communication")
    }
    text = (tmp_path / f"{layout}.txt").read_text(encoding="utf-8")
    assert "\nforward   FC1 " in text
    assert "rank clocks agree within" in text


def problems_of(trace: dict) -> list[dict]:
    """The items of a trace that Perfetto would not show (Trace Event Format, JSON object form)."""
    named = {(item["pid"], item["tid"]) for item in trace["traceEvents"] if item["ph"] == "M"}

    def is_shown(item: dict) -> bool:
        is_complete = item["ph"] == "X" and {"name", "cat", "pid", "tid", "ts", "dur"} <= set(item)
        times = is_complete and np.isfinite([item["ts"], item["dur"]]).all() and item["dur"] >= 0
        return bool(times) and (item["pid"], item["tid"]) in named

    return [item for item in trace["traceEvents"] if item["ph"] != "M" and not is_shown(item)]


def test_the_table_shows_the_timeline():
    timeline_ = Timeline(
        ranks=(
            (
                event("push", 0, 10, "forward"),
                event("FC1", 5, 20, "forward"),
                event("index", 20, 30, "backward"),
            ),
            (event("push", 0, 4, "forward"), event("FC1", 10, 30, "forward")),
        ),
        clock_error_us=(0.0, 1.5),
        device="made up",
    )
    lines = table(timeline_).splitlines()
    assert "30.0 us; rank clocks agree within 1.5 us" in lines[0]
    rows = {tuple(line.split()[:2]): line.split()[2:] for line in lines}
    assert rows["forward", "push"] == ["2", "7.0", "5.0", "4.0"]
    assert rows["forward", "FC1"] == ["2", "17.5", "0.0", "0.0"]
    assert rows["backward", "index"] == ["1", "5.0", "10.0", "0.0"]
    assert rows["communication,", "exposed"] == ["15.0", "4.0"]
    assert rows["nothing", "runs"] == ["0.0", "6.0"]


# -- errors -----------------------------------------------------------------------------------------------------------
@run_on(2)
def test_a_failed_recording_is_the_same_error_on_every_rank(
    rank: int, num_ranks: int, tmp_path: Path
) -> None:
    """The errors: a wrong path on one rank, a path that cannot be written, no start. A later recording succeeds."""
    wrong = {
        "x.png" if rank else "x.json": "must end with .json",
        "missing/x.json": "cannot be written",
    }
    with SymmetricHeap(num_bytes=4 << 20, backend="host") as heap:
        for name, text in wrong.items():
            with (
                pytest.raises(ArgumentError, match=text),
                timeline.record(tmp_path / name, heap) as recording,
            ):
                recording.start()
        with (
            pytest.raises(ArgumentError, match=r"recording\.start\(\)"),
            timeline.record(tmp_path / "never.json", heap),
        ):
            pass
        with timeline.record(tmp_path / "x.json", heap) as recording:
            recording.start()
        assert [len(events) for events in recording.timeline.ranks] == [0, 0]
    assert rank or {path.stem for path in tmp_path.iterdir()} == {"x"}


def lag_of_rank_1(rank: int, num_ranks: int, folder: str, where: str) -> float:
    """The microseconds from rank 0's first routing to rank 1's."""
    with open_heap("cpu") as heap:
        layer = MoELayer(
            MoEConfig(hidden=32, ffn=16, num_experts=8, top_k=3, schedule="always-overlapped"), heap
        )

        def step(late: bool) -> None:
            if late and rank == 1:
                time.sleep(LATE_S)
            layer(torch.ones(12, 32))

        with timeline.record(f"{folder}/late.json", heap) as recording:
            step(late=where == "before")
            recording.start()
            step(late=where == "after")
    first = [
        min(e.begin_us for e in events if e.phase == "route") for events in recording.timeline.ranks
    ]
    return first[1] - first[0]


LATE_S = 2.0


@pytest.mark.parametrize("where", ["before", "after"])
def test_ranks_start_together_although_one_is_late_before(
    where: str, cluster: Callable[..., Cluster], tmp_path: Path
):
    lags = cluster(2).run(lag_of_rank_1, str(tmp_path), where)
    assert lags[0] == lags[1]
    if where == "before":  # on a busy machine any rank may be late, but not again and again
        again = (cluster(2).run(lag_of_rank_1, str(tmp_path), where) for _ in range(4))
        assert any(abs(lag[0]) < LATE_S * 1e6 / 2 for lag in chain([lags], again))
    else:  # the timeline shows a delay after the start
        assert lags[0] > LATE_S * 1e6 / 2


def outcome_of_a_failing_body(rank: int, num_ranks: int, folder: str) -> str:
    before = twin.push_rows
    try:
        with SymmetricHeap(num_bytes=4 << 20, backend="host", timeout_s=60.0) as heap:
            with timeline.record(f"{folder}/failed.json", heap) as recording:
                recording.start()
                if rank == 1:
                    raise ValueError("of the step")
    except (ValueError, PeerAborted) as error:
        return f"{type(error).__name__} {twin.push_rows is before}"
    return "nothing raised"


def test_a_failing_rank_ends_the_recording_of_its_peers(
    cluster: Callable[..., Cluster], tmp_path: Path
):
    assert cluster(2).run(outcome_of_a_failing_body, str(tmp_path)) == [
        "PeerAborted True",
        "ValueError True",
    ]
    assert list(tmp_path.iterdir()) == []


SIZES = "--hidden 32 --ffn 16 --experts 4 --top-k 2 --tokens 16".split()


def trace_small_layer(rank: int, num_ranks: int, path: str) -> str:
    case = Case(Shape("small", 32, 16, 4, 2), 16, "uniform")
    choice = Choice(options={"overflow": "drop", "router": RouterConfig(aux_loss_coef=0.01)})
    return trace_layer.trace_layer(case, choice, path=path)


def test_the_program_traces_several_ranks_and_one(
    cluster: Callable[..., Cluster], tmp_path: Path, capsys
):
    tables = cluster(2).run(trace_small_layer, str(tmp_path / "two.json"))
    assert tables[0] == (tmp_path / "two.txt").read_text(encoding="utf-8").rstrip()
    assert tables[1] == ""
    for options in ([], ["--eager"]):  # the same on CPUs
        trace_layer.main([*SIZES, *options, "--out", str(tmp_path / "one.json")])
        assert "1 ranks" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{n}.{e}" for n in ("one", "two") for e in ("json", "txt")
    }
    steps = json.loads((tmp_path / "two.json").read_text(encoding="utf-8"))["traceEvents"]
    assert sum(item["name"] == "FC2" for item in steps) == 2  # ranks
