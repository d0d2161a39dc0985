"""Captured steps are exact for any routing. On CPUs a function that runs again replaces the graph."""

import contextlib
import dataclasses
import gc
import weakref
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from unittest import mock

import captured_cases as cases
import numpy as np
import pytest
import torch
from cluster import Cluster, on_ranks, run_on
from heap_calls import outcome
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import register_pytree_node
from worker import open_heap

import symmoe
from symmoe.training import captured_step
from symmoe.training.captured_step import CapturedStep
from symmoe.training.parallel import data_parallel, parallelize
from symmoe.training.step_kind import Tree


@pytest.mark.parametrize(
    ("num_ranks", "ranks_per_node", "device", "balance"),
    [
        pytest.param(1, None, "cpu", "none", id="1", marks=pytest.mark.slow),
        pytest.param(2, None, "cpu", "none", id="2", marks=pytest.mark.slow),
        pytest.param(2, 1, "cpu", "none", id="2 x 1"),
        pytest.param(4, 2, "cpu", "none", id="2 x 2", marks=pytest.mark.slow),
        pytest.param(2, None, "cpu", "replicas", id="replicas"),
        *(
            pytest.param(n, None, "cuda", "none", id=f"{n} GPUs", marks=pytest.mark.gpu)
            for n in (1, 2)
        ),
        pytest.param(2, None, "cuda", "replicas", id="replicas on GPUs", marks=pytest.mark.gpu),
    ],
)
def test_every_step_is_exact(cluster, num_ranks, ranks_per_node, device, balance):
    results = cluster(num_ranks, device).run(cases.check_exact, device, ranks_per_node, balance)
    cases.check_counts(results)
    assert len({tuple(counts) for *counts, _ in results}) == 1  # all ranks repeat the same steps


# What is around a model, and how many steps are eager before one is captured: DDP has 11 passes of its own.
WRAPS = {
    "FSDP2": (parallelize, 2),
    "DDP": (partial(data_parallel, bucket_cap_mb=0.001, gradient_as_bucket_view=True), 11),
    "DDP, static graph": (partial(data_parallel, static_graph=True), 6),
    "nothing": (None, 2),
}


@pytest.mark.parametrize(
    ("num_ranks", "ep", "device", "ranks_per_node"),
    [
        pytest.param(2, 2, "cpu", None, id="2"),
        pytest.param(2, 1, "cpu", None, id="2 x 1", marks=pytest.mark.slow),
        pytest.param(4, 2, "cpu", None, id="2 x 2"),
        pytest.param(2, 2, "cpu", 1, id="2 nodes", marks=pytest.mark.slow),
        *(
            pytest.param(2, ep, "cuda", None, id=f"2 GPUs, EP of {ep}", marks=pytest.mark.gpu)
            for ep in (1, 2)
        ),
    ],
)
@pytest.mark.parametrize("wrap", WRAPS)
def test_steps_that_reduce_are_exact(
    cluster, num_ranks: int, ep: int, device: str, ranks_per_node, wrap: str, tmp_path
):
    """Ranks of all EP groups repeat the same steps, and fail together: the graph reduces gradients or loads."""
    with (
        Cluster(num_ranks, device) if device == "cuda" else nullcontext(cluster(num_ranks)) as ranks
    ):
        results = ranks.run(
            cases.check_wrapped,
            device,
            ep,
            *WRAPS[wrap],
            f"file://{tmp_path}/store",
            ranks_per_node,
        )
    assert [text for _, texts in results for text in texts] == []
    num_repeated = int(ep > 1)  # one rank always needs the same budget
    assert {counts for counts, _ in results} == {
        (cases.NUM_REPLAYS + 1 - num_repeated, num_repeated, 1 + num_repeated)
    }


@run_on(2)
def test_unsupported_ddps_are_refused(
    rank: int, num_ranks: int, heap: symmoe.SymmetricHeap
) -> None:
    """Also a DDP that accumulates gradients on the default stream: the test makes every stream the default."""
    model = cases.Model(heap)
    symmoe.training.prepare_for_ddp(model)
    ddp = DistributedDataParallel(model)
    step = cases.make_step(ddp)
    batch = [torch.ones(3, cases.H)]
    step(batch, scale=1.0)
    with pytest.raises(
        symmoe.errors.ArgumentError,
        match="model must be the DistributedDataParallel that the step calls",
    ):
        symmoe.capture_step(step, model)
    ddp.find_unused_parameters = True
    with pytest.raises(symmoe.errors.ArgumentError, match=r"find_unused_parameters \(True\)"):
        symmoe.capture_step(step, ddp)
    ddp.find_unused_parameters = False
    captured = cases.capture(ddp, num_eager=1)
    cuda = dict.fromkeys(("is_available", "current_stream", "default_stream"), lambda: True)
    with (
        mock.patch.multiple(torch.cuda, **cuda),
        mock.patch.object(captured_step, "may_redirect_streams", False),
    ):
        captured(batch, scale=1.0)
    with pytest.raises(
        symmoe.errors.ArgumentError,
        match=r"built on CUDA's default stream.*torch\.cuda\.stream\(torch.*2\.13",
    ):
        captured(batch, scale=1.0)


@pytest.fixture
def model(heap: symmoe.SymmetricHeap) -> cases.Model:
    return cases.Model(heap)


def test_on_cpus_every_call_is_eager(model):
    captured = symmoe.capture_step(cases.make_step(model), model)
    for batch in cases.batches(0, 5):
        captured(batch, scale=1.0)
    assert (captured.num_replays, captured.num_captures) == (0, 0)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_step_with_listeners_is_captured_separately(model):
    captured = cases.capture(model, num_eager=1)
    batch = [torch.ones(5, cases.H)]
    num_captures = []
    for watches in (False, True, False):
        with contextlib.closing(symmoe.metrics.MetricsLogger(model)) if watches else nullcontext():
            for _ in range(3):
                captured(batch, scale=1.0)
        num_captures.append(captured.num_captures)
    assert num_captures == [1, 2, 3]


def test_a_layer_that_was_not_called_before(model):
    switch = []
    captured = cases.capture(model, lambda x: model(x)[0].sum() if switch else x.sum(), num_eager=1)
    captured(torch.ones(3, cases.H))
    switch.append(True)
    with pytest.raises(
        symmoe.errors.ArgumentError, match="calls a layer that earlier calls did not"
    ):
        captured(torch.ones(3, cases.H))
    assert model.layers[0].heap.captured_reports is None


def test_more_rows_than_max_row_budget_raise(model):
    tight = cases.Model(model.layers[0].heap, max_row_budget=4)
    captured = cases.capture(tight, num_eager=1)
    captured([torch.ones(3, cases.H)], scale=1.0)
    with pytest.raises(
        symmoe.errors.ArgumentError, match=r"needs 9 rows.*more than max_row_budget \(4\)"
    ):
        captured([torch.ones(3, cases.H)], scale=1.0)


def test_a_suspended_heap_replays_nothing(model):
    captured = cases.capture(model, num_eager=1)
    for _ in range(2):
        captured([torch.ones(3, cases.H)], scale=1.0)
    model.layers[0].heap.abort("enough")
    with (
        mock.patch.object(cases.HostGraph, "replay") as replay,
        pytest.raises(symmoe.errors.HeapPoisoned, match="enough"),
    ):
        captured([torch.ones(3, cases.H)], scale=1.0)
    assert not replay.called


def test_steps_that_cannot_be_undone_are_refused(model):
    for option in ("accumulate_into_main_grad", "delay_wgrad"):
        fc2 = model.layers[1].experts.fc2
        setattr(fc2, option, True)
        with pytest.raises(symmoe.errors.ArgumentError, match=rf"{option} \(True\) must be False"):
            symmoe.capture_step(cases.make_step(model), model)
        setattr(fc2, option, False)
    with symmoe.SymmetricHeap(num_bytes=16 << 20, backend="host") as second_heap:
        both = nn.ModuleList([model, cases.Model(second_heap)])
        with pytest.raises(symmoe.errors.ArgumentError, match="layers on several heaps"):
            symmoe.capture_step(cases.make_step(model), both)


# -- what decides a step -----------------------------------------------------------------------------------------------


@on_ranks(cpu=(1,), cuda=(1, 2))
def test_changed_settings_are_captured_separately(cluster, num_ranks, device):
    assert cluster(num_ranks, device).findings(cases.check_changes, device) == []


Pair = namedtuple("Pair", ["x", "y"])


@dataclasses.dataclass
class Slots:
    __slots__ = ("x", "y")
    x: torch.Tensor
    y: torch.Tensor


class Attributes(dict):
    """A dict whose values are attributes, like ModelOutput of transformers."""

    def __init__(self, **values: object) -> None:
        super().__init__(**values)
        self.__dict__.update(values)


class Registered:
    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y


register_pytree_node(
    Registered, lambda node: ([node.x, node.y], "xy"), lambda parts, _: Registered(*parts)
)
BATCHES: dict[str, tuple[Callable, Callable]] = {
    "list": (lambda x, y: [x, [y]], lambda batch: (batch[0], batch[1][0])),
    "tuple": (lambda x, y: (x, y), tuple),
    "NamedTuple": (Pair, tuple),
    "dict": (lambda x, y: {"x": x, 1: y}, lambda batch: tuple(batch.values())),
    "OrderedDict": (lambda x, y: OrderedDict(x=x, y=y), lambda batch: tuple(batch.values())),
    "defaultdict": (lambda x, y: defaultdict(list, x=x, y=y), lambda batch: tuple(batch.values())),
    "attributes of a dict": (
        lambda x, y: Attributes(x=x, y=y),
        lambda batch: (batch.x, batch["y"]),
    ),
    "dataclass": (cases.Batch, lambda batch: (batch.x, batch.scale * batch.y)),
    "slots": (Slots, lambda batch: (batch.x, batch.y)),
    "namespace": (lambda x, y: SimpleNamespace(x=x, y=y), lambda batch: (batch.x, batch.y)),
    "registered": (Registered, lambda batch: (batch.x, batch.y)),
    "nested": (
        lambda x, y: {"a": [cases.Batch(x, (y,))]},
        lambda batch: (batch["a"][0].x, batch["a"][0].y[0]),
    ),
    "slice": (
        lambda x, y: (x, y, slice(0, 2)),
        lambda batch: (batch[0][batch[2]], batch[1][batch[2]]),
    ),
    "others": (
        lambda x, y: (x, y, None, torch.int8, 1 + 2j, np.float32(1)),
        lambda batch: batch[:2],
    ),
}


def captured_linear(step: Callable, **options) -> tuple[CapturedStep, nn.Linear]:
    """A captured step of `step(linear, *arguments)`, with a stand-in for its graph."""
    linear = nn.Linear(2, 2)
    return cases.capture(linear, lambda batch: step(linear, batch), num_eager=1, **options), linear


@pytest.mark.parametrize("kind", BATCHES)
def test_arguments_and_results_of_all_kinds(kind: str):
    """A replay reads its argument tensors, and later replays do not change its result."""
    make, tensors_of = BATCHES[kind]

    def step(linear: nn.Linear, batch):
        x, y = tensors_of(batch)
        return make(linear(x).sum(0), (x * y).sum(0))

    captured, linear = captured_linear(step)
    actual, expected = [], []
    for number in range(1, 5):
        x = torch.full((3, 2), float(number))
        y = torch.full((3, 2), number / 2)
        actual.append(tensors_of(captured(make(x, y))))
        x, y = tensors_of(make(x, y))
        expected.append((linear(x).sum(0).detach(), (x * y).sum(0)))
    assert all(map(torch.equal, sum(map(tuple, actual), ()), sum(expected, ())))
    assert (captured.num_captures, captured.num_replays) == (1, 3)


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ({1, 2}, r"batch\.y \(set\) cannot be captured"),
        (
            np.zeros(3),
            r"batch\.y \(ndarray\) cannot be captured: .* \(torch\.from_numpy makes them",
        ),
        (object(), r"batch\.y \(object\) cannot be captured"),
        ([len], r"batch\.y\[0\] \(builtin_function_or_method\) cannot be captured"),
        ({"a": nn.Linear(1, 1)}, r"batch\.y\['a'\] \(Linear\) cannot be captured"),
        ({object(): 1}, r"batch\.y \(dict\) cannot be captured"),
        (
            cases.Batch(torch.ones(2), torch.ones(2, requires_grad=True)),
            r"batch\.y\.y \[2\] requires a gradient",
        ),
        (torch.ones(2).to_sparse(), r"batch\.y \(torch\.sparse_coo\) must be a strided tensor"),
    ],
    ids=["set", "array", "object", "function", "module", "key", "gradient", "sparse"],
)
def test_arguments_of_unknown_types_are_refused_by_name(argument: object, text: str):
    captured, _ = captured_linear(lambda linear, batch: linear(batch.x).sum())
    for _ in range(3):
        with pytest.raises(symmoe.errors.ArgumentError, match=text):
            captured(cases.Batch(torch.ones(3, 2), argument))
    assert captured(cases.Batch(torch.ones(3, 2), torch.ones(2))).dim() == 0


def test_a_result_of_unknown_type_is_refused_by_name():
    captured, _ = captured_linear(lambda linear, batch: {"loss": linear(batch).sum(), "x": {1}})
    with pytest.raises(
        symmoe.errors.ArgumentError, match=r"result\['x'\] \(set\) cannot be captured"
    ):
        captured(torch.ones(3, 2))


def test_shapes_constants_and_repeated_tensors_identify_a_step():
    captured, _ = captured_linear(lambda linear, batch: batch[0] * batch[1])
    x = torch.ones(2)
    for batch, expected in (
        ((x, 0.0), 0.0),
        ((x, -0.0), -0.0),
        ((x, float("nan")), None),
        ((x, x), 1.0),
        ((x, torch.full((2,), 2.0)), 2.0),
        ((torch.ones(3), 2.0), 2.0),
        ((x, 2.0), 2.0),
    ):
        before = captured.num_captures
        for _ in range(3):
            actual = captured(batch)
            assert expected is None or (
                actual.tolist() == [expected] * len(batch[0])
                and str(actual[0].item()) == str(expected)
            )
        assert captured.num_captures == before + 1


def test_cpu_scalars_are_constants_and_tensors_elsewhere_are_refused():
    """Arguments of a model on a GPU: a graph has CPU scalars as constants, and cannot read other CPU memory."""
    gpu = torch.device("cuda", 0)
    first, second = (Tree({"scale": torch.tensor(number)}, gpu) for number in (1.0, 2.0))
    assert first.kind != second.kind
    assert first.kind == Tree({"scale": torch.tensor(1.0)}, gpu).kind
    assert first.tensors == []
    assert float(first.with_tensors([])["scale"]) == 1.0
    with pytest.raises(
        symmoe.errors.ArgumentError,
        match=r"lengths\[1\] \[3\] is on cpu, the model on cuda:0: .* move it there",
    ):
        Tree({"lengths": (1, torch.ones(3))}, gpu)


def test_arguments_are_freed_after_the_call():
    captured, _ = captured_linear(lambda linear, batch: linear(batch.x).sum())
    actual = []
    for _ in range(4):
        batch = cases.Batch(torch.ones(3, 2), torch.ones(2))
        actual += [weakref.ref(batch), weakref.ref(batch.x), weakref.ref(batch.y)]
        captured(batch)
    del batch
    gc.collect()
    assert [reference() for reference in actual] == [None] * len(actual)
    assert captured.num_replays == 3


def call_often(captured: CapturedStep) -> None:
    for _ in range(4):
        captured(torch.ones(3, 2))


def replace_buffer(linear: nn.Linear, x: torch.Tensor) -> None:
    linear.register_buffer("seen", x.sum())


def write_parameter(linear: nn.Linear, x: torch.Tensor) -> None:
    with torch.no_grad():
        linear.weight.mul_(0.5)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda linear, x: x.mul_(2), r"the step writes into batch \[3, 2\]"),
        (write_parameter, r"the step writes into weight \[2, 2\]"),
        (replace_buffer, r"the step replaces \['seen'\] of modules in every call"),
    ],
    ids=["argument", "parameter", "buffer"],
)
def test_side_effects_that_a_replay_lacks_are_refused(change: Callable[..., None], text: str):
    captured, _ = captured_linear(
        lambda linear, batch: (change(linear, batch), linear(batch).sum())[1]
    )
    with pytest.raises(symmoe.errors.ArgumentError, match=text):
        call_often(captured)
    assert captured.num_replays == 0


def test_attributes_that_the_step_itself_sets_are_warned_of():
    def step(linear: nn.Linear, batch: torch.Tensor) -> torch.Tensor:
        linear.num_calls, linear.last = linear.num_calls + 1, batch
        return linear(batch).sum()

    captured, linear = captured_linear(step)
    linear.num_calls, linear.last = 0, torch.zeros(1)
    with pytest.warns(
        UserWarning, match=r"the step sets \['last', 'num_calls'\] of modules"
    ) as warned:
        call_often(captured)
    assert [warning.filename for warning in warned] == [__file__]
    assert (captured.num_captures, captured.num_replays) == (1, 3)


def test_alternating_modes_are_captured_once():
    captured, linear = captured_linear(lambda linear, batch: linear(batch).sum())
    for turn in range(6):
        linear.train(turn % 2 == 0)
        captured(torch.ones(3, 2))
    assert (captured.num_captures, captured.num_replays) == (2, 4)


def test_moved_memory_after_an_error_runs_eagerly_first(model):
    """No heap knows the row counts of calls then: eager calls must measure them before a capture."""
    captured = cases.capture(model, num_eager=1)
    for batch in (
        [torch.ones(3, cases.H)],
        [torch.ones(3, cases.H)],
        [torch.ones(3, cases.H), {1}],
    ):
        with (
            pytest.raises(symmoe.errors.ArgumentError, match="set")
            if len(batch) == 2
            else nullcontext()
        ):
            captured(batch, scale=1.0)
    cases.other_memory(model.layers[0].experts.fc1.weight)
    for _ in range(2):
        captured([torch.ones(3, cases.H)], scale=1.0)
    assert (captured.num_captures, captured.num_replays) == (2, 2)


def test_options_set_later_that_cannot_be_undone_are_refused(model):
    captured = cases.capture(model, num_eager=1)
    for _ in range(2):
        captured([torch.ones(3, cases.H)], scale=1.0)
    model.layers[0].experts.fc1.delay_wgrad = True
    captured([torch.ones(3, cases.H)], scale=1.0)  # eager, and so right
    with pytest.raises(symmoe.errors.ArgumentError, match=r"delay_wgrad \(True\) must be False"):
        captured([torch.ones(3, cases.H)], scale=1.0)


@pytest.mark.parametrize("culprits", [(0,), (1,), (0, 1)])
@run_on(2)
def test_an_argument_refused_on_one_rank_raises_on_all(
    rank: int, num_ranks: int, culprits: tuple[int, ...]
) -> None:
    """The errors of calls, the second and the fifth of which have an argument that some ranks refuse."""
    errors = []
    with open_heap("cpu", num_bytes=16 << 20, timeout_s=20.0) as heap:
        model = cases.Model(heap)
        captured = cases.capture(model, num_eager=2)
        for number in range(6):
            batch: object = [torch.ones(5, cases.H)]
            if number in (1, 4) and rank in culprits:
                batch = [torch.ones(5, cases.H), {1}]
            error, text = outcome(captured, batch, scale=1.0)
            errors.append((error, *text.split(": ")[-2:-1]))
        captured.close()
    refused = "ArgumentError", "batch[1] (set) cannot be captured"
    assert errors == [("",), refused, ("",), ("",), refused, ("",)]
