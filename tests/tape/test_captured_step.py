"""Captured steps: exact whatever the routing does. On CPUs a function that runs again takes the place of a graph."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._pytree import register_pytree_node
from worker import Findings, open_heap

import symmoe
from symmoe import GroupedMLP, MoEConfig, MoELayer, SymmetricHeap
from symmoe.errors import ArgumentError, ExpertIdError, HeapPoisoned
from symmoe.symm_mem.row_budget import RowHistory
from symmoe.symm_mem.several_nodes import Nodes
from symmoe.symm_mem.streams import NoStreams
from symmoe.training.captured_step import CapturedStep
from symmoe.training.step_kind import Tree

H, I, E, K, T = 16, 24, 8, 3, 200


@contextmanager
def in_a_graph(by_host: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """In this context calls do what a graph has of them: no host looks for errors. What hosts find out, room and what
    they are told by those of other nodes, is left to `by_host`, which is given the method that finds it out."""
    with ExitStack() as patches:
        for name, value in (("capture", 1), ("raises_at_once", False)):
            patches.enter_context(mock.patch.object(NoStreams, name, value))
        patches.enter_context(mock.patch.object(SymmetricHeap, "check", return_value=None))
        for owner, name in ((Nodes, "meet"), (RowHistory, "room")):
            patches.enter_context(mock.patch.object(owner, name, by_host(getattr(owner, name))))
        yield


class HostGraph:
    """What a CUDA graph does: the function runs once for its memory, and again in every replay, with what the host has
    found out then."""

    def __init__(self, model: nn.Module, states: list[torch.Tensor], function: Callable[[], None]) -> None:
        self._parameters, self._function = list(model.parameters()), function
        self._found: list[Any] = []
        before = [state.clone() for state in states]

        def noting(method: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *given, **options: (self._found.append(method(*given, **options)), self._found[-1])[1]

        with in_a_graph(noting):
            function()
        for state, kept in zip(states, before, strict=True):
            state.copy_(kept)
        self._gradients = [parameter.grad for parameter in self._parameters]

    def replay(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        found = iter(self._found)
        with in_a_graph(lambda method: lambda *given, **options: next(found)):
            self._function()
        assert list(found) == []
        for kept, parameter in zip(self._gradients, self._parameters, strict=True):
            if kept is not None:
                kept.copy_(parameter.grad)

    def end(self) -> None:
        self._gradients.clear()


def captured_on_host(model: nn.Module, **options: int) -> symmoe.CapturedStep:
    """The step of make_step, with a stand-in for CUDA graphs."""
    captured = symmoe.capture_step(make_step(model), model, **options)
    captured.make_graph = lambda function, heaps: HostGraph(model, captured.modules.states(), function)
    return captured


class Model(nn.Module):
    """Two layers of experts, and a buffer that every step changes."""

    def __init__(self, heap: SymmetricHeap, **options) -> None:
        super().__init__()
        torch.manual_seed(heap.rank)
        config = MoEConfig(hidden=H, ffn=I, num_experts=E, top_k=K, aux_loss_coef=0.1, expert_bias=True, **options)
        self.layers = nn.ModuleList([MoELayer(config, heap) for _ in range(2)]).to(heap.device)
        # Graphs on GPUs bring the random numbers of eager steps; the stand-in for them on CPUs does not.
        self.dropout = nn.Dropout(0.1 if heap.device.type == "cuda" else 0.0)
        self.activation: Callable[[torch.Tensor], torch.Tensor] = torch.clone
        self.register_buffer("num_tokens", torch.zeros((), dtype=torch.int64, device=heap.device))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        aux_loss = 0.0
        for layer in self.layers:
            y, metrics = layer(x)
            x, aux_loss = self.activation(x + self.dropout(y)), aux_loss + metrics.aux_loss
        self.num_tokens += len(x)
        return x, aux_loss


def make_step(model: Model) -> Callable[..., dict[str, torch.Tensor]]:
    def step(batch: list[torch.Tensor], *, scale: float) -> dict[str, torch.Tensor]:
        losses = []
        for x in batch:  # micro-batches
            y, aux_loss = model(x)
            loss = scale * y.float().square().mean() + aux_loss
            loss.backward()
            losses.append(loss)
        return {"loss": torch.stack(losses).mean()}

    return step


def batches(rank: int, count: int):
    """Two micro-batches of each step, of fewer tokens on later ranks; tokens of every fourth step are alike, so few
    experts get them all."""
    for number in range(count):
        own = torch.Generator().manual_seed(1000 * number + rank)
        batch = [torch.randn(T - 7 * rank, H, generator=own) for _ in range(2)]
        yield [x[:1] + 0.01 * x for x in batch] if number % 4 == 3 else batch


def results(model: Model, loss: torch.Tensor) -> list[torch.Tensor]:
    loads = [layer.router.step_load for layer in model.layers]
    return [loss, *(p.grad for p in model.parameters()), *loads, *model.buffers()]


def check_exact(
    rank: int, num_ranks: int, device: str, count: int, ranks_per_node: int | None = None
) -> tuple[int, int, int, list[str]]:
    findings = Findings()
    with open_heap(device, num_bytes=64 << 20, ranks_per_node=ranks_per_node) as heap:
        torch.use_deterministic_algorithms(False)
        model, plain = Model(heap), Model(heap)
        plain.load_state_dict(model.state_dict())
        captured, eager = symmoe.capture_step(make_step(model), model, room=1.0, num_eager=2), make_step(plain)
        if device == "cpu":
            states = captured.modules.states()
            captured.make_graph = lambda function, heaps: HostGraph(model, states, function)
        for number, batch in enumerate(batches(rank, count)):
            batch = [x.to(heap.device) for x in batch]
            torch.manual_seed(number)
            found = captured(batch, scale=0.5)["loss"]
            plain.zero_grad()
            torch.manual_seed(number)
            wanted = eager(batch, scale=0.5)["loss"]
            pairs = zip(results(model, found), results(plain, wanted), strict=True)
            same = [torch.equal(a, b) for a, b in pairs]
            findings.check(all(same), f"rank {rank}, step {number}: {same}")
        captured.close()
        model.zero_grad()
        plain.zero_grad()
        del found, wanted, pairs
        findings.check(heap.memory.graph_bytes == 0, f"graphs hold {heap.memory.graph_bytes} bytes")
        findings.check(heap.leased_bytes == 0, f"{heap.leased_bytes} bytes are leased")
        return captured.num_replays, captured.num_repeated, captured.num_captures, findings.texts


@pytest.mark.parametrize(
    ("num_ranks", "ranks_per_node"),
    [
        pytest.param(1, None, id="1", marks=pytest.mark.slow),
        pytest.param(2, None, id="2"),
        pytest.param(2, 1, id="2 x 1"),
        pytest.param(4, 2, id="2 x 2", marks=pytest.mark.slow),
    ],
)
def test_every_step_is_exact(cluster, num_ranks, ranks_per_node):
    found = cluster(num_ranks).run(check_exact, "cpu", 14, ranks_per_node)
    assert [text for *_, texts in found for text in texts] == []
    assert len({tuple(counts) for *counts, _ in found}) == 1  # all ranks repeat the same steps
    num_replays, num_repeated, num_captures, _ = found[0]
    assert num_replays >= 6
    assert num_replays + num_repeated == 12
    assert num_captures <= num_repeated + 1
    if num_ranks > 1:
        assert num_repeated >= 1


def train(rank: int, num_ranks: int, ranks_per_node: int | None, room: float | None) -> tuple[tuple[int, ...], list]:
    """Steps with given routings: counts of a captured step, or no counts, and of each step its tensors or its error.

    In step 3 all tokens go to the last rank, in step 5 the first one has an id that is out of range.
    """
    generator = torch.Generator().manual_seed(num_ranks)
    num_tokens, found = (24, 5, 0, 17)[rank], []
    with open_heap("cpu", ranks_per_node=ranks_per_node) as heap:
        num_experts = 2 * num_ranks
        sizes = {"hidden": H, "ffn": I, "num_experts": num_experts, "top_k": 2}
        model = nn.ModuleList([nn.Linear(H, H), MoELayer(MoEConfig(**sizes, order="slot", router="none"), heap)])
        for parameter in model.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 + 0.01 * rank)

        def step(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            y, _ = model[1](model[0](x), topk_idx=ids, probs=torch.full(ids.shape, 0.5))
            y.square().sum().backward()
            return y

        captured: CapturedStep = symmoe.capture_step(step, model, room=room or 1.0, num_eager=2)
        if room is not None:
            captured.make_graph = lambda function, heaps: HostGraph(model, [], function)
        for number in range(10):
            slots = torch.arange(2 * num_tokens).view(-1, 2)
            ids = (slots + number) % num_experts
            if number == 3:
                ids = slots % 2 + num_experts - 2
            if number == 5 and rank == 0:
                ids[3, 1] = num_experts
            x = torch.randn((num_tokens, H), generator=torch.Generator().manual_seed(10 * number + rank))
            try:
                y = captured(x, ids)
                found.append([y, *(parameter.grad.clone() for parameter in model.parameters())])
                del y
            except ExpertIdError as error:
                found.append(str(error))
        captured.close()
        assert heap.leased_bytes == 0
        return (captured.num_replays, captured.num_repeated, captured.num_captures), found


@pytest.mark.parametrize(
    ("num_ranks", "ranks_per_node"), [pytest.param(2, 1, id="2 x 1"), pytest.param(4, 2, id="2 x 2")]
)
def test_steps_between_nodes_have_the_bits_of_eager_ones_on_one_node(cluster, num_ranks, ranks_per_node):
    """Also one that has too little room on one rank of one node, and those after an error."""
    by_rank = cluster(num_ranks).run(train, ranks_per_node, 1.5)
    for (counts, found), (_, wanted) in zip(by_rank, cluster(num_ranks).run(train, None, None), strict=True):
        assert counts == (4, 1, 2)
        assert found[5] == wanted[5]
        assert "rank 0" in found[5]
        for number in (0, 1, 2, 3, 4, 6, 7, 8, 9):
            assert all(map(torch.equal, found[number], wanted[number])), number
        assert all(float(gradient.abs().sum()) > 0 for gradient in by_rank[0][1][9])


def heap_and_model() -> tuple[SymmetricHeap, Model]:
    heap = SymmetricHeap(num_bytes=16 << 20, backend="host")
    return heap, Model(heap)


def test_on_cpus_every_call_is_eager():
    heap, model = heap_and_model()
    with heap:
        captured = symmoe.capture_step(make_step(model), model)
        for batch in batches(0, 5):
            captured(batch, scale=1.0)
        assert (captured.num_replays, captured.num_captures) == (0, 0)
        assert all(parameter.grad is not None for parameter in model.parameters())


def test_arguments_that_require_gradients_are_refused():
    heap, model = heap_and_model()
    with heap:
        captured = symmoe.capture_step(make_step(model), model)
        with pytest.raises(ArgumentError, match=r"batch\[0\] \[5, 16\] requires a gradient"):
            captured([torch.ones(5, H, requires_grad=True)], scale=1.0)
        captured([torch.ones(5, H)], scale=1.0)


def test_inputs_of_other_shapes_are_captured_apart():
    heap, model = heap_and_model()
    with heap:
        captured = captured_on_host(model, num_eager=1)
        for num_tokens in (5, 5, 9, 9, 5, 9):
            captured([torch.ones(num_tokens, H)], scale=1.0)
        assert captured.num_captures == 2
        captured([torch.ones(5, H)], scale=2.0)  # another constant: another step
        assert captured.num_captures == 2
        captured([torch.ones(5, H)], scale=2.0)
        assert captured.num_captures == 3
        captured.close()


def test_a_result_stays_when_the_next_call_writes_its_own():
    heap, model = heap_and_model()
    with heap:
        captured = captured_on_host(model, num_eager=1)
        losses = [captured(batch, scale=1.0)["loss"] for batch in batches(0, 3)]
        assert len({float(loss) for loss in losses}) == 3
        captured.close()


@pytest.mark.parametrize(
    ("options", "text"),
    [({"room": 0.9}, r"room \(0.9\) must be at least 1"), ({"num_eager": 0}, r"num_eager \(0\) must be at least 1")],
)
def test_numbers_out_of_range(options, text):
    with pytest.raises(ArgumentError, match=text):
        symmoe.capture_step(lambda: None, nn.Linear(2, 2), **options)


def test_a_layer_that_was_not_called_before():
    heap, model = heap_and_model()
    with heap:
        switch = []
        captured: CapturedStep = symmoe.capture_step(
            lambda x: model(x)[0].sum() if switch else x.sum(), model, num_eager=1
        )
        captured.make_graph = lambda function, heaps: HostGraph(model, captured.modules.states(), function)
        captured(torch.ones(3, H))
        switch.append(True)
        with pytest.raises(ArgumentError, match="calls a layer that earlier calls did not"):
            captured(torch.ones(3, H))
        assert heap.captured_reports is None


def test_nothing_is_replayed_on_a_heap_on_which_nothing_works():
    heap, model = heap_and_model()
    with heap:
        captured = captured_on_host(model, num_eager=1)
        for _ in range(2):
            captured([torch.ones(3, H)], scale=1.0)
        heap.abort("enough")
        with mock.patch.object(HostGraph, "replay") as replay, pytest.raises(HeapPoisoned, match="enough"):
            captured([torch.ones(3, H)], scale=1.0)
        assert not replay.called


def test_what_could_not_be_taken_back_is_refused():
    heap, model = heap_and_model()
    with heap:
        for option in ("accumulate_into_main_grad", "delay_wgrad"):
            fc2 = model.layers[1].experts.fc2
            setattr(fc2, option, True)
            with pytest.raises(ArgumentError, match=rf"{option} \(True\) must be False"):
                symmoe.capture_step(make_step(model), model)
            setattr(fc2, option, False)
        with SymmetricHeap(num_bytes=16 << 20, backend="host") as other:
            both = nn.ModuleList([model, Model(other)])
            with pytest.raises(ArgumentError, match="layers on several heaps"):
                symmoe.capture_step(make_step(model), both)


# -- what decides a step -----------------------------------------------------------------------------------------------


def double(module: nn.Module, args: object, outputs: tuple) -> tuple:
    return 2 * outputs[0], outputs[1]


def new_experts(layer: MoELayer) -> None:
    experts = GroupedMLP(layer.experts.num_groups, H, I, device=layer.heap.device)
    experts.load_state_dict({name: 2 * tensor for name, tensor in layer.experts.state_dict().items()})
    layer.set_experts(experts)


def other_memory(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data * 2


def other_load(router: nn.Module) -> None:
    router.step_load = router.step_load.clone()


CHANGES: dict[str, Callable[[Model], object]] = {
    "nothing": lambda model: None,
    "unfrozen": lambda model: model.requires_grad_(True),
    "memory of a parameter": lambda model: other_memory(model.layers[1].experts.fc1.weight),
    "memory of a buffer": lambda model: other_memory(model.num_tokens),
    "a tensor of a module": lambda model: other_load(model.layers[0].router),
    "a number of a module": lambda model: setattr(model.dropout, "p", 1.0),
    "an object of a module": lambda model: setattr(model, "activation", torch.relu),
    "mode": lambda model: model.eval(),
    "forward hook": lambda model: model.layers[0].register_forward_hook(double),
    "gradient hook": lambda model: model.layers[0].router.weight.register_hook(lambda gradient: 3 * gradient),
    "experts": lambda model: new_experts(model.layers[0]),
    "frozen": lambda model: model.layers[1].requires_grad_(False),
}


@contextmanager
def deterministic(_: str) -> Iterator[None]:
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.deterministic = False


AROUND: dict[str, Callable[[str], Any]] = {
    "autocast": lambda device: torch.autocast(device, torch.bfloat16),
    "autocast in fp16": lambda device: torch.autocast(device, torch.float16),
    "deterministic": deterministic,
}


def check_changes(rank: int, num_ranks: int, device: str) -> list[str]:
    """After each change the step is captured once more, and has the bits of an eager one."""
    findings = Findings()
    with open_heap(device, num_bytes=64 << 20) as heap:
        torch.use_deterministic_algorithms(False)
        model, plain = Model(heap), Model(heap)
        plain.load_state_dict(model.state_dict())
        for either in (model, plain):
            either.layers[0].experts.requires_grad_(False)
        captured, eager = symmoe.capture_step(make_step(model), model, num_eager=1), make_step(plain)
        if device == "cpu":
            captured.make_graph = lambda function, heaps: HostGraph(model, captured.modules.states(), function)
        x, num_captures = torch.randn(T, H, generator=torch.Generator().manual_seed(rank)).to(heap.device), 0
        for name in (*CHANGES, *AROUND):
            findings.where = f"{name}, rank {rank}"
            for either in (model, plain):
                CHANGES.get(name, CHANGES["nothing"])(either)
            for number in range(3):
                plain.zero_grad()
                with AROUND.get(name, nullcontext)(device):
                    torch.manual_seed(number)
                    found = captured([x], scale=0.5)["loss"]
                    torch.manual_seed(number)
                    wanted = eager([x], scale=0.5)["loss"]
                pairs = zip(results(model, found), results(plain, wanted), strict=True)
                same = [a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs]
                findings.check(all(same), f"call {number}: {same}")
            num_captures += 1
            findings.equal("captures", captured.num_captures, num_captures)
        findings.equal("repeated", captured.num_repeated, 0)
        captured.close()
    return findings.texts


def test_what_decides_a_step_is_captured_apart(cluster):
    assert cluster(2).run(check_changes, "cpu") == [[], []]


Pair = namedtuple("Pair", ["x", "y"])


@dataclasses.dataclass(frozen=True)
class Batch:
    x: torch.Tensor
    y: torch.Tensor
    scale: float = 1.0


@dataclasses.dataclass
class Slots:
    __slots__ = ("x", "y")
    x: torch.Tensor
    y: torch.Tensor


class Attributes(dict):
    """A dict whose values are attributes, as ModelOutput of transformers is."""

    def __init__(self, **values: object) -> None:
        super().__init__(**values)
        self.__dict__.update(values)


class Registered:
    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y


register_pytree_node(Registered, lambda node: ([node.x, node.y], "xy"), lambda parts, _: Registered(*parts))
BATCHES: dict[str, tuple[Callable[..., Any], Callable[[Any], tuple[torch.Tensor, torch.Tensor]]]] = {
    "list": (lambda x, y: [x, [y]], lambda batch: (batch[0], batch[1][0])),
    "tuple": (lambda x, y: (x, y), tuple),
    "NamedTuple": (Pair, tuple),
    "dict": (lambda x, y: {"x": x, 1: y}, lambda batch: tuple(batch.values())),
    "OrderedDict": (lambda x, y: OrderedDict(x=x, y=y), lambda batch: tuple(batch.values())),
    "defaultdict": (lambda x, y: defaultdict(list, x=x, y=y), lambda batch: tuple(batch.values())),
    "attributes of a dict": (lambda x, y: Attributes(x=x, y=y), lambda batch: (batch.x, batch["y"])),
    "dataclass": (Batch, lambda batch: (batch.x, batch.scale * batch.y)),
    "slots": (Slots, lambda batch: (batch.x, batch.y)),
    "namespace": (lambda x, y: SimpleNamespace(x=x, y=y), lambda batch: (batch.x, batch.y)),
    "registered": (Registered, lambda batch: (batch.x, batch.y)),
    "nested": (lambda x, y: {"a": [Batch(x, (y,))]}, lambda batch: (batch["a"][0].x, batch["a"][0].y[0])),
    "slice": (lambda x, y: (x, y, slice(0, 2)), lambda batch: (batch[0][batch[2]], batch[1][batch[2]])),
    "others": (lambda x, y: (x, y, None, torch.int8, 1 + 2j, np.float32(1)), lambda batch: batch[:2]),
}


def captured_linear(step: Callable[..., Any], **options) -> tuple[CapturedStep, nn.Linear]:
    """A captured step of `step(linear, *arguments)`, with a stand-in for its graph."""
    linear = nn.Linear(2, 2)
    captured: CapturedStep = symmoe.capture_step(lambda batch: step(linear, batch), linear, num_eager=1, **options)
    captured.make_graph = lambda function, heaps: HostGraph(linear, [], function)
    return captured, linear


@pytest.mark.parametrize("kind", BATCHES)
def test_arguments_and_results_of_all_kinds(kind: str):
    """A replay reads the tensors that it is given, and what it returns stays."""
    make, tensors_of = BATCHES[kind]

    def step(linear: nn.Linear, batch: Any) -> Any:
        x, y = tensors_of(batch)
        return make(linear(x).sum(0), (x * y).sum(0))

    captured, linear = captured_linear(step)
    found, wanted = [], []
    for number in range(1, 5):
        x, y = torch.full((3, 2), float(number)), torch.full((3, 2), number / 2)
        found.append(tensors_of(captured(make(x, y))))
        x, y = tensors_of(make(x, y))
        wanted.append((linear(x).sum(0).detach(), (x * y).sum(0)))
    assert all(map(torch.equal, sum(map(tuple, found), ()), sum(wanted, ())))
    assert (captured.num_captures, captured.num_replays) == (1, 3)


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ({1, 2}, r"batch\.y \(set\) cannot be captured"),
        (np.zeros(3), r"batch\.y \(ndarray\) cannot be captured: .* \(torch\.from_numpy makes them"),
        (object(), r"batch\.y \(object\) cannot be captured"),
        ([len], r"batch\.y\[0\] \(builtin_function_or_method\) cannot be captured"),
        ({"a": nn.Linear(1, 1)}, r"batch\.y\['a'\] \(Linear\) cannot be captured"),
        ({object(): 1}, r"batch\.y \(dict\) cannot be captured"),
        (Batch(torch.ones(2), torch.ones(2, requires_grad=True)), r"batch\.y\.y \[2\] requires a gradient"),
        (torch.ones(2).to_sparse(), r"batch\.y \(torch\.sparse_coo\) must be a strided tensor"),
    ],
    ids=["set", "array", "object", "function", "module", "key", "gradient", "sparse"],
)
def test_what_is_not_understood_is_refused_by_name(argument: object, text: str):
    captured, _ = captured_linear(lambda linear, batch: linear(batch.x).sum())
    for _ in range(3):
        with pytest.raises(ArgumentError, match=text):
            captured(Batch(torch.ones(3, 2), argument))
    assert captured(Batch(torch.ones(3, 2), torch.ones(2))).dim() == 0


def test_a_result_that_is_not_understood_is_refused_by_name():
    captured, _ = captured_linear(lambda linear, batch: {"loss": linear(batch).sum(), "x": {1}})
    with pytest.raises(ArgumentError, match=r"result\['x'\] \(set\) cannot be captured"):
        captured(torch.ones(3, 2))


def test_constants_and_tensors_given_twice_decide_a_step():
    captured, _ = captured_linear(lambda linear, batch: batch[0] * batch[1])
    x, y = torch.ones(2), torch.full((2,), 2.0)
    for batch, wanted in (((x, 0.0), 0.0), ((x, -0.0), -0.0), ((x, float("nan")), None), ((x, x), 1.0), ((x, y), 2.0)):
        before = captured.num_captures
        for _ in range(3):
            found = captured(batch)
            assert wanted is None or (found.tolist() == [wanted] * 2 and str(found[0].item()) == str(wanted))
        assert captured.num_captures == before + 1


def test_numbers_on_the_cpu_and_tensors_elsewhere():
    """Of arguments for a model on a GPU: a graph would have numbers on the CPU as they were, and read nothing else."""
    gpu = torch.device("cuda", 0)
    one, other = (Tree({"scale": torch.tensor(number)}, gpu) for number in (1.0, 2.0))
    assert one.kind != other.kind
    assert one.kind == Tree({"scale": torch.tensor(1.0)}, gpu).kind
    assert one.tensors == []
    assert float(one.with_tensors([])["scale"]) == 1.0
    with pytest.raises(ArgumentError, match=r"lengths\[1\] \[3\] is on cpu, the model on cuda:0: .* move it there"):
        Tree({"lengths": (1, torch.ones(3))}, gpu)


def test_arguments_do_not_stay_alive():
    captured, _ = captured_linear(lambda linear, batch: linear(batch.x).sum())
    found = []
    for _ in range(4):
        batch = Batch(torch.ones(3, 2), torch.ones(2))
        found += [weakref.ref(batch), weakref.ref(batch.x), weakref.ref(batch.y)]
        captured(batch)
    del batch
    gc.collect()
    assert [reference() for reference in found] == [None] * len(found)
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
def test_what_a_replay_would_not_do_is_refused(change: Callable[..., None], text: str):
    captured, _ = captured_linear(lambda linear, batch: (change(linear, batch), linear(batch).sum())[1])
    with pytest.raises(ArgumentError, match=text):
        call_often(captured)
    assert captured.num_replays == 0


def test_attributes_that_the_step_itself_sets_are_warned_of():
    def step(linear: nn.Linear, batch: torch.Tensor) -> torch.Tensor:
        linear.num_calls, linear.last = linear.num_calls + 1, batch
        return linear(batch).sum()

    captured, linear = captured_linear(step)
    linear.num_calls, linear.last = 0, torch.zeros(1)
    with pytest.warns(UserWarning, match=r"the step sets \['last', 'num_calls'\] of modules") as warned:
        call_often(captured)
    assert len(warned) == 1
    assert (captured.num_captures, captured.num_replays) == (1, 3)


def test_modes_that_take_turns_are_captured_once():
    captured, linear = captured_linear(lambda linear, batch: linear(batch).sum())
    for turn in range(6):
        linear.train(turn % 2 == 0)
        captured(torch.ones(3, 2))
    assert (captured.num_captures, captured.num_replays) == (2, 4)


def test_memory_that_moves_after_an_error():
    """Then no heap knows how many rows calls need: the step is not captured before eager calls have said so."""
    heap, model = heap_and_model()
    with heap:
        captured = captured_on_host(model, num_eager=1)
        for batch in ([torch.ones(3, H)], [torch.ones(3, H)], [torch.ones(3, H), {1}]):
            with pytest.raises(ArgumentError, match="set") if len(batch) == 2 else nullcontext():
                captured(batch, scale=1.0)
        other_memory(model.layers[0].experts.fc1.weight)
        for _ in range(2):
            captured([torch.ones(3, H)], scale=1.0)
        assert (captured.num_captures, captured.num_replays) == (2, 2)
        captured.close()


def test_options_set_later_that_could_not_be_taken_back_are_refused():
    heap, model = heap_and_model()
    with heap:
        captured = captured_on_host(model, num_eager=1)
        for _ in range(2):
            captured([torch.ones(3, H)], scale=1.0)
        model.layers[0].experts.fc1.delay_wgrad = True
        captured([torch.ones(3, H)], scale=1.0)  # eager, and so right
        with pytest.raises(ArgumentError, match=r"delay_wgrad \(True\) must be False"):
            captured([torch.ones(3, H)], scale=1.0)
        captured.close()


def refuse_on(rank: int, num_ranks: int, culprits: tuple[int, ...]) -> list[str]:
    """The errors of calls of which the second and the fifth have an argument that some ranks refuse."""
    found = []
    with open_heap("cpu", num_bytes=16 << 20, timeout_s=20.0) as heap:
        model = Model(heap)
        captured = captured_on_host(model, num_eager=2)
        for number in range(6):
            batch: Any = [torch.ones(5, H)]
            if number in (1, 4) and rank in culprits:
                batch = [torch.ones(5, H), {1}]
            try:
                captured(batch, scale=1.0)
                found.append("")
            except ArgumentError as error:
                found.append(str(error).split(": ")[-2])
        captured.close()
    return found


@pytest.mark.parametrize("culprits", [(0,), (1,), (0, 1)])
def test_what_one_rank_refuses_all_do(cluster, culprits: tuple[int, ...]):
    text = "batch[1] (set) cannot be captured"
    for found in cluster(2).run(refuse_on, culprits):
        assert found == ["", text, "", "", text, ""]
