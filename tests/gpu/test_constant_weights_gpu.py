"""cache_quantized_weights on a GPU: the bits of calls without it, on any stream, and in CUDA graphs."""

from contextlib import nullcontext

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
    pytest.skip("needs a GPU that converts to E4M3: Hopper and newer", allow_module_level=True)

from graphs import captured

from symmoe import GroupedMLP
from symmoe.errors import ArgumentError
from symmoe.grouped import cache_quantized_weights
from symmoe.precision import Float8Block

pytestmark = pytest.mark.timeout(300, method="thread")

SPLITS = (300, 0, 1, 211)


class Problem:
    """Experts, and the rows of several micro-batches, which stay where they are."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.experts = GroupedMLP(
            4, 512, 256, precision=Float8Block(), dtype=torch.bfloat16, device="cuda"
        )
        self.splits = torch.tensor(SPLITS, dtype=torch.int32, device="cuda")
        self.scale = torch.rand(512, device="cuda")
        self.rows = [
            torch.randn(512, 512, device="cuda").bfloat16().requires_grad_() for _ in range(3)
        ]

    def call(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """y, the gradient of the rows and those of both weights."""
        y = self.experts(rows, self.splits, self.scale)
        leaves = rows, self.experts.fc1.weight, self.experts.fc2.weight
        return [y.detach(), *torch.autograd.grad(y, leaves, torch.ones_like(y))]

    def accumulate(self, block=nullcontext) -> list[torch.Tensor]:
        """Of all micro-batches."""
        with block():
            return [tensor for rows in self.rows for tensor in self.call(rows)]

    def hold(self):
        """The block."""
        return cache_quantized_weights(self.experts)


def assert_same(actual: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    torch.cuda.synchronize()
    for number, (tensor, reference) in enumerate(zip(actual, want, strict=True)):
        assert torch.equal(tensor, reference), number


def test_the_bits_of_calls_without_it():
    problem = Problem()
    want = problem.accumulate()
    assert_same(problem.accumulate(problem.hold), want)
    with torch.no_grad():
        problem.experts.fc1.weight.mul_(-1)
    assert not torch.equal(problem.accumulate()[0], want[0])


def test_readers_on_other_streams_wait():
    """The operands are made on a stream that is late; memory that is freed early is written to at once."""
    problem = Problem()
    want = problem.accumulate()
    for _ in range(5):
        late = torch.cuda.Stream()
        second = torch.cuda.Stream()
        for stream in (late, second):
            stream.wait_stream(torch.cuda.current_stream())
        with problem.hold():
            with torch.cuda.stream(late):
                torch.cuda._sleep(50_000_000)
                actual = problem.call(problem.rows[0])
            with torch.cuda.stream(second):
                actual += problem.call(problem.rows[1])
                torch.cuda._sleep(50_000_000)
                actual += problem.call(problem.rows[2])
        with torch.cuda.stream(late):
            spoiled = [
                torch.full((1 << 20,), 0xFF, dtype=torch.uint8, device="cuda") for _ in range(16)
            ]
        assert_same(actual, want)
        del spoiled


def test_a_block_inside_of_a_graph_quantises_in_every_replay():
    problem = Problem()
    graph, actual = captured(lambda: problem.accumulate(problem.hold))
    for factor in (1.0, -0.5, 3.0):
        with torch.no_grad():
            problem.experts.fc1.weight.mul_(factor)
            problem.experts.fc2.weight.mul_(factor)
        graph.replay()
        assert_same(actual, problem.accumulate())


def test_a_graph_gets_nothing_from_outside():
    problem = Problem()
    want = problem.call(problem.rows[0])
    graph = torch.cuda.CUDAGraph()
    with problem.hold():
        problem.call(problem.rows[0])
        with torch.cuda.graph(graph):
            torch.zeros(1, device="cuda")  # an empty graph warns
            with pytest.raises(ArgumentError, match="enter and leave it in one CUDA graph"):
                problem.call(problem.rows[0])
        assert_same(problem.call(problem.rows[0]), want)
