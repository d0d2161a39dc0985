"""`make lint` reports no problem, and the bounds of support/budgets.py hold: statements, files of a folder, and the
files and frames of the package that one step runs through."""

import ast
import os
import sys
import threading
from collections.abc import Callable
from types import FrameType

import budgets
import pytest
import torch
from layers import make_layer
from programs import printed_by
from worker import open_heap

import symmoe

OF_A_STEP = (
    "files of a step",
    "frames in forward",
    "calls in forward",
    "calls before the first kernel",
)
FOLDER = os.path.dirname(symmoe.__file__) + os.sep
KERNELS = os.path.join(FOLDER, "kernels", "twin") + os.sep
STEADY = 6  # by then programs have been built


class CallTrace:
    """The files and frames of the package that a call runs through."""

    def __init__(self) -> None:
        self.files: set[str] = set()  # that have run
        self.num_calls = 0
        self.num_before_kernel: int | None = None  # calls before the first one of a kernel
        self.depth = 0  # of the stack, counting the package's own frames

    def record(self, frame: FrameType, event: str, _: object) -> None:
        """A profiling function for sys.setprofile."""
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(FOLDER):
            return
        if self.num_before_kernel is None and file.startswith(KERNELS):
            self.num_before_kernel = self.num_calls
        self.files.add(file)
        self.num_calls += 1
        depth = 0
        outer: FrameType | None = frame
        while outer is not None:
            depth += outer.f_code.co_filename.startswith(FOLDER)
            outer = outer.f_back
        self.depth = max(self.depth, depth)

    def run(self, function: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Calls the function and records its frames."""
        threading.setprofile(self.record)
        sys.setprofile(self.record)
        try:
            return function()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)


def trace_of_a_step(rank: int, num_ranks: int, programs: str) -> dict[str, int]:
    """Counts of a bf16 layer's step with default options, by the names of BUDGETS; on rank 0, whose peers run
    freely."""
    forward = CallTrace()
    backward = CallTrace()
    with open_heap("cpu", num_bytes=64 << 20, programs=programs, fills="0") as heap:
        config = symmoe.MoEConfig(hidden=64, ffn=512, num_experts=4 * num_ranks, top_k=2)
        layer = make_layer(heap, config)[0].to(torch.bfloat16)
        torch.manual_seed(rank)
        x = torch.randn(64, 64, dtype=torch.bfloat16, requires_grad=True)
        for step in range(STEADY + 1):
            if rank == 0 and step == STEADY:
                loss = forward.run(lambda: layer(x)[0]).float().square().mean()
                backward.run(loss.backward)
            else:
                layer(x)[0].float().square().mean().backward()
    if rank != 0:
        return {}
    assert forward.num_before_kernel is not None
    num_files = len(forward.files | backward.files)
    counts = (num_files, forward.depth, forward.num_calls, forward.num_before_kernel)
    return dict(zip(OF_A_STEP, counts, strict=True))


@pytest.mark.parametrize("programs", ["on", "off"])
def test_a_steady_step_stays_within_its_bounds(cluster, programs: str):
    counts = cluster(2).run(trace_of_a_step, programs)[0]
    assert min(counts.values()) > 5
    assert not {
        name: number for name, number in counts.items() if number > max(budgets.BUDGETS[name])
    }


def test_sources_stay_within_their_bounds():
    sizes = budgets.measured()
    assert {*sizes, *OF_A_STEP} == set(budgets.BUDGETS)
    assert min(sizes.values()) > 0
    assert {name: size for name, size in sizes.items() if size > max(budgets.BUDGETS[name])} == {}


def test_functions_with_many_parameters_are_counted():
    many = ", ".join(f"p{i}" for i in range(9))
    source = f"def f({many}): ...\ndef g({many[4:]}): ...\n@triton.jit\ndef k({many}): ...\n"
    nodes = budgets.statements_of(ast.parse(source))
    assert [node.name for node in budgets._with_many_parameters(nodes)] == ["f"]


SOURCES = ("symmoe", "tests", "examples", "benchmarks", "docs")


@pytest.mark.parametrize(
    "command",
    [
        ("ruff", "check", *SOURCES),
        ("ruff", "format", "--check", *SOURCES, "README.md"),
        pytest.param(("mypy",), marks=pytest.mark.slow),
    ],
    ids=lambda words: "-".join(words[:2]),
)
def test_lint_reports_no_problem(command: tuple[str, ...]):
    pytest.importorskip(command[0], reason="looks for faults in sources: pip install '.[dev]'")
    printed_by("-m", *command, cwd=budgets.ROOT)


def test_statements_are_counted_without_docstrings():
    source = '"""Doc."""\ndef f():\n    """Doc."""\n    a, b = 1, 2\n    return a\n'
    clauses = "\ntry: a\nexcept E: a\nelse: a\nfinally: a\nmatch a:\n    case 1: a\n"
    statements = budgets.statements_of(ast.parse(source + clauses))
    assert len(statements) == 3 + 5 + 2
    assert budgets.num_packed(statements) == 1
