"""Tables of what programs launch: as data, as text, in docs/design/programs.md, on GPUs as on CPUs."""

import re
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import step_table
import torch
from cluster import run_on
from torch.utils.flop_counter import FlopCounterMode
from worker import Findings, open_heap

import symmoe
from symmoe import kernels
from symmoe.program.builder import Builder

DESIGN = Path(__file__).resolve().parents[2] / "docs" / "design" / "programs.md"
STATIC = {"capacity": 256, "overflow": "drop", "max_tokens": 64, "layout": "packed"}
WAYS = [
    {**STATIC, "schedule": "serial"},
    {**STATIC, "schedule": "always-overlapped", "stash": "none"},
    {**STATIC, "schedule": "always-overlapped", "layout": "expert-major", "order": "slot"},
]


def test_the_page_shows_the_launches_of_a_step(cluster):
    table = cluster(2).run(step_table.recorded)[0][1]
    assert f"\n\n{table}\n\n" in DESIGN.read_text("utf-8"), "tests/support/step_table.py prints it"


def recorded_as_on_gpus(rank: int, num_ranks: int, **options) -> tuple[str, str]:
    """The tables of a build on GPUs, where functions run down to kernels. The kernels do nothing here."""
    make = Builder.__init__

    def make_as_on_gpu(self: Builder, *args, **kwargs) -> None:
        make(self, *args, **kwargs)
        self.on_gpu = True

    def hook(name: str, kernel, /, *args, **kwargs):
        return kernel(*args, **kwargs) if name in ("read_addresses", "dact_workspace_numel") else 0

    stream = SimpleNamespace(cuda_stream=0)
    with (
        patch.object(Builder, "__init__", make_as_on_gpu),
        patch.object(torch.cuda, "current_stream", lambda device: stream),
        patch("symmoe.moe.router.check_finite"),  # for CPUs
        kernels.hooked(torch.device("cpu"), hook),
    ):
        return step_table.recorded(rank, num_ranks, **options)


@pytest.mark.parametrize("options", WAYS, ids=["serial", "overlapped", "expert-major"])
def test_builds_on_gpus_record_the_same_launches(cluster, options: dict):
    actual = cluster(2).run(recorded_as_on_gpus, **options)[0][0]
    assert actual.splitlines() == cluster(2).run(step_table.recorded, **options)[0][0].splitlines()


@pytest.mark.gpu
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("options", WAYS, ids=["serial", "overlapped", "expert-major"])
def test_tables_are_the_same_on_gpus(cluster, num_ranks: int, options: dict):
    on_cpus, on_gpus = (
        cluster(num_ranks, device).run(step_table.recorded, device, **options)
        for device in ("cpu", "cuda")
    )
    assert words_of(on_gpus[0][0]) == words_of(on_cpus[0][0])


def words_of(table: str) -> list[list[str]]:
    """The words of each launch of a table, which may take several lines."""
    launches = [launch.split() for launch in re.split(r"\n(?=\S)", table)]
    for words in launches:
        if "workspace:" in words:
            del words[1]  # bytes: those of the workspace are the device's own
    return launches


def test_only_bytes_of_a_workspace_may_differ():
    table = "kernel 1.0  0.1  x: input 0\n         workspace: memory 1\nother 2.0  0.1  y: input 1"
    assert words_of(table) == words_of(table.replace("1.0", "1.5"))
    assert words_of(table) != words_of(table.replace("2.0", "2.5"))


@run_on(2)
def test_launches_name_memory_streams_and_waits(
    rank: int, num_ranks: int, findings: Findings
) -> None:
    with open_heap("cpu", num_bytes=64 << 20, programs="on") as heap:
        layer = symmoe.MoELayer(symmoe.MoEConfig(**step_table.SIZES, **WAYS[1]), heap)
        x = torch.randn(64, step_table.SIZES["hidden"])
        with symmoe.timeline.record_launches() as launches:
            for _ in range(3):
                layer(x)
        (program,) = launches.programs
    findings.equal("name and runs", (program.name, program.num_runs), ("forward", 2))
    by_kernel = {launch.kernel: launch for launch in program.launches}  # the last of each
    push, wait, act = (
        by_kernel[name] for name in ("push_rows", "wait_for_signal", "grouped_gemm_act")
    )
    findings.equal("peers", push.writes[0].place, "peers' lease 'received rows'")
    findings.equal("x", (push.reads[0].name, push.reads[0].place), ("x", "input 0"))
    findings.equal("signal", wait.waits_for, f"the signal of rank {1 - rank}")
    findings.equal(
        "streams", (push.stream, act.stream, act.waits_for), ("branch", "", "the branch")
    )
    findings.equal("FLOPs", act.flops, 2 * STATIC["capacity"] * 512 * 512)
    barriers = [recorded.waits_for for recorded in program.launches if recorded.kernel == "barrier"]
    findings.check(barriers[1].endswith("all ranks, 'dispatch: ready'"), f"{barriers}")
    weights = sum(use.num_bytes for use in act.reads if use.name == "weight")
    findings.equal("bytes", weights, 4 * layer.experts.fc1.weight.numel())


@pytest.mark.parametrize("weights", ["packed", "discrete"])
def test_flops_of_full_groups_are_those_that_torch_counts(weights: str):
    layer = symmoe.GroupedMLP(2, 16, 24, weights=weights)

    def step() -> None:
        x = torch.ones(7, 16, requires_grad=True)
        layer(x, [3, 4], torch.ones(7)).sum().backward()

    for weight in layer.parameters():
        weight.data = torch.stack([weight.data, weight.data])[0]  # no two are adjacent
    step()
    with symmoe.timeline.record_launches() as launches:
        step()
    with FlopCounterMode(display=False) as counter:
        step()
    all_launches = [launch for program in launches.programs for launch in program.launches]
    assert sum(launch.flops for launch in all_launches) == counter.get_total_flops() > 0
    by_address = {"by address" in use.place for recorded in all_launches for use in recorded.reads}
    assert by_address == {False, weights == "discrete"}


def test_operators_of_torch_are_launches_too(heap):
    x = torch.ones(3)
    with symmoe.timeline.record_launches() as launches:
        for _ in range(2):
            heap._run(("some",), lambda: (x.add_(1) * 2,), [x])
    first, second = launches.programs[0].launches
    assert [first.kernel, second.kernel] == ["aten.add_.Tensor", "aten.mul.Tensor"]
    assert (first.writes[0].place, second.writes[0].place) == ("input 0", "memory 0")


def test_only_programs_are_recorded_and_in_the_innermost_context():
    with symmoe.timeline.record_launches() as launches:
        with symmoe.timeline.record_launches() as inner:
            for _ in range(2):
                symmoe.GroupedLinear(1, 4, 4)(torch.ones(2, 4), [2])
    symmoe.GroupedLinear(1, 4, 4)(torch.ones(2, 4), [2])
    assert (len(inner.programs), launches.programs) == (1, ())
    assert "no program has run" in str(launches)
