"""A model whose steps are captured, and what may change in it. On CPUs a function that runs again is its graph."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from small_model import set_weights
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from worker import Findings, open_heap

import symmoe
from symmoe.grouped.parameters import local_part
from symmoe.symm_mem.row_budget import RowHistory
from symmoe.symm_mem.several_nodes import RemoteNodes
from symmoe.symm_mem.streams import NoStreams

H, I, E, K, T = 16, 24, 8, 3, 200
NUM_EAGER, NUM_STEPS = 2, 10
NUM_REPLAYS = 6  # of check_wrapped, besides NUM_EAGER calls at first and four around errors
CAPTURE = 1  # the number of every graph of the stand-in


@contextmanager
def in_a_graph(by_host: Callable) -> Iterator[None]:
    """In this context calls do what a graph has of them: no host looks for errors. What hosts find out, room and what
    they are told by those of other nodes, is left to `by_host`, which is given the method that finds it out."""
    with ExitStack() as patches:
        for name, value in (("capture", CAPTURE), ("raises_at_once", False)):
            patches.enter_context(mock.patch.object(NoStreams, name, value))
        patches.enter_context(mock.patch.object(symmoe.SymmetricHeap, "check", return_value=None))
        patches.enter_context(
            mock.patch.object(
                symmoe.SymmetricHeap, "_run", lambda heap, key, function, *_, **numbers: function()
            )
        )
        for owner, name in ((RemoteNodes, "rendezvous"), (RowHistory, "budget")):
            patches.enter_context(mock.patch.object(owner, name, by_host(getattr(owner, name))))
        yield


class HostGraph:
    """A model of a CUDA graph: the function runs once for its memory, and again in every replay, with what the host has
    found out then."""

    def __init__(
        self,
        model: nn.Module,
        states: list[torch.Tensor],
        function: Callable[[], None],
        heaps: list[symmoe.SymmetricHeap],
    ) -> None:
        self._parameters, self._function, self._heaps = list(model.parameters()), function, heaps
        self._results: list = []
        before = [state.clone() for state in states]

        def noting(method: Callable) -> Callable:
            def call(owner, *arguments, **options):
                result = method(owner, *arguments, **options)
                self._results.append((result, getattr(owner, "rail_rows", None)))
                return result

            return call

        with in_a_graph(noting):
            function()
        for state, saved in zip(states, before, strict=True):
            state.copy_(saved)
        self._gradients = [parameter.grad for parameter in self._parameters]

    def replay(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        results = iter(self._results)

        def again(owner, *_arguments, **_options):
            result, rail_rows = next(results)
            if rail_rows is not None:
                owner.rail_rows = rail_rows
            return result

        with in_a_graph(lambda method: again):
            self._function()
        assert list(results) == []
        for gradient, parameter in zip(self._gradients, self._parameters, strict=True):
            if gradient is not None:
                gradient.copy_(parameter.grad)

    def end(self) -> None:
        self._gradients.clear()
        for heap in self._heaps:
            heap.memory.release_graphs(CAPTURE)


def capture(
    model: nn.Module, step: Callable | None = None, **options: float
) -> symmoe.training.CapturedStep:
    """The step, or that of make_step; on CPUs with a stand-in for CUDA graphs."""
    captured = symmoe.capture_step(step or make_step(model), model, **options)
    if next(model.parameters()).device.type == "cpu":
        captured.make_graph = lambda function, heaps: HostGraph(
            model, captured.modules.states(), function, heaps
        )
    return captured


class Model(nn.Module):
    """Two layers of experts, and a buffer that every step changes."""

    def __init__(self, heap: symmoe.SymmetricHeap, **options) -> None:
        super().__init__()
        torch.manual_seed(heap.rank)
        config = symmoe.MoEConfig(
            hidden=H,
            ffn=I,
            num_experts=E,
            top_k=K,
            router=symmoe.RouterConfig(aux_loss_coef=0.1, expert_bias=True),
            **options,
        )
        self.layers = nn.ModuleList([symmoe.MoELayer(config, heap) for _ in range(2)]).to(
            heap.device
        )
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
            is_alone = (
                isinstance(model, DistributedDataParallel)
                and not model.static_graph
                and x is not batch[-1]
            )
            with model.no_sync() if is_alone else nullcontext():
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
        generator = torch.Generator().manual_seed(1000 * number + rank)
        batch = [torch.randn(T - 7 * rank, H, generator=generator) for _ in range(2)]
        yield [x[:1] + 0.01 * x for x in batch] if number % 4 == 3 else batch


def results(model: Model, loss: torch.Tensor) -> list[torch.Tensor]:
    loads = [layer.router.step_load for layer in model.layers]
    return [loss, *(p.grad for p in model.parameters()), *loads, *model.buffers()]


def check_counts(by_rank: list[tuple[int, int, int, list[str]]]) -> None:
    """No rank of check_exact has a finding, and it replays and repeats steps."""
    assert [text for *_, texts in by_rank for text in texts] == []
    num_replays, num_repeated, num_captures, _ = by_rank[0]
    assert num_replays >= 2
    assert num_replays + num_repeated == NUM_STEPS - NUM_EAGER
    assert num_captures <= num_repeated + 1
    assert num_repeated >= 1 or len(by_rank) == 1


def check_exact(
    rank: int,
    num_ranks: int,
    device: str,
    ranks_per_node: int | None = None,
    balance: str = "none",
) -> tuple[int, int, int, list[str]]:
    findings = Findings()
    with open_heap(device, num_bytes=64 << 20, ranks_per_node=ranks_per_node) as heap:
        torch.use_deterministic_algorithms(False)
        model = Model(heap, balance=balance)
        plain = Model(heap, balance=balance)
        plain.load_state_dict(model.state_dict())
        loggers = symmoe.metrics.MetricsLogger(model), symmoe.metrics.MetricsLogger(plain)
        captured = capture(model, row_budget_factor=1.0, num_eager=NUM_EAGER)
        eager = make_step(plain)
        for number, batch in enumerate(batches(rank, NUM_STEPS)):
            batch = [x.to(heap.device) for x in batch]
            torch.manual_seed(number)
            actual = captured(batch, scale=0.5)["loss"]
            plain.zero_grad()
            torch.manual_seed(number)
            expected = eager(batch, scale=0.5)["loss"]
            findings.where = f"rank {rank}, step {number}"
            findings.same_bits(results(model, actual), results(plain, expected))
            captured_metrics, eager_metrics = (
                [
                    dataclasses.replace(metrics, heap_high_water_bytes=0)
                    for metrics in logger.step(number)
                ]
                for logger in loggers
            )
            findings.equal("what is logged", captured_metrics, eager_metrics)
        captured.close()
        model.zero_grad()
        plain.zero_grad()
        del actual, expected
        findings.check(heap.memory.graph_bytes == 0, f"graphs hold {heap.memory.graph_bytes} bytes")
        findings.check(heap.leased_bytes == 0, f"{heap.leased_bytes} bytes are leased")
        return captured.num_replays, captured.num_repeated, captured.num_captures, findings.texts


class Chosen(nn.Module):
    """Experts behind a dense layer and a router, which is told what to choose."""

    def __init__(self, heap: symmoe.SymmetricHeap) -> None:
        super().__init__()
        config = symmoe.MoEConfig(
            hidden=H,
            ffn=I,
            num_experts=E,
            top_k=2,
            router=symmoe.RouterConfig(aux_loss="global", aux_loss_coef=0.1),
            order="slot",
        )
        self.dense = nn.Linear(H, H)
        self.moe = symmoe.MoELayer(config, heap)
        self.register_buffer("num_tokens", torch.zeros((), dtype=torch.int64))
        set_weights(self, heap)
        self.to(heap.device)

    def forward(
        self, inputs: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, ids = inputs
        y, metrics = self.moe(self.dense(x), topk_idx=ids)
        self.num_tokens += len(x)
        return y, metrics.aux_loss


Wrap = Callable[[nn.Module, DeviceMesh], nn.Module]


def put_around(wrap: Wrap | None, heap: symmoe.SymmetricHeap, mesh: DeviceMesh) -> nn.Module:
    """A model in FSDP2 or DDP, or as it is. torch before 2.13 captures no DDP that was built on the default stream."""
    model = Chosen(heap)
    if wrap is None or heap.device.type == "cpu":
        return model if wrap is None else wrap(model, mesh)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        wrapped = wrap(model, mesh)
    torch.cuda.current_stream().wait_stream(stream)
    return wrapped


def check_wrapped(
    rank: int,
    num_ranks: int,
    device: str,
    ep: int,
    wrap: Wrap | None,
    num_eager: int,
    init_method: str,
    ranks_per_node: int | None = None,
) -> tuple[tuple[int, int, int], list[str]]:
    """Counts, and what is wrong: steps of a model in DDP or FSDP2, each with an optimizer's, have the bits of eager
    ones. After a first replay ranks of the first EP group need more room, then the last rank has an id out of range."""
    findings = Findings(f"rank {rank}")
    if device == "cuda":  # gloo's collectives cannot be captured
        dist.destroy_process_group()
        dist.init_process_group(
            "cpu:gloo,cuda:nccl", init_method=init_method, rank=rank, world_size=num_ranks
        )
    mesh = init_device_mesh(device, (num_ranks // ep, ep), mesh_dim_names=("efsdp", "ep"))
    groups = {"group": mesh.get_group("ep"), "expert_group": mesh.get_group("efsdp")}
    options = {"num_bytes": 64 << 20, "ranks_per_node": ranks_per_node}
    with open_heap(device, **groups, **options) as heap:
        torch.use_deterministic_algorithms(False)
        model = put_around(wrap, heap, mesh)
        plain = put_around(wrap, heap, mesh)
        captured = capture(model, row_budget_factor=1.0, num_eager=2)
        eager = make_step(plain)
        optimizers = [
            torch.optim.SGD(module.parameters(), lr=0.05, foreach=False)
            for module in (model, plain)
        ]
        slots = torch.arange(80, device=heap.device).view(40, 2)
        is_hot, is_bad = num_eager + 2, num_eager + 4
        for number in range(num_eager + 4 + NUM_REPLAYS):
            x = torch.randn(
                2, 40, H, generator=torch.Generator().manual_seed(100 * number + rank)
            ).to(heap.device)
            ids = slots % 2 if number == is_hot and rank < ep else (slots + number) % E
            batch = [(x[0], ids), (x[1], ids.flip(0))]
            if number == is_bad:
                ids[3, 1] += E * (rank == num_ranks - 1)
                states = [(state, state.clone()) for state in captured.modules.states()]
                with pytest.raises(
                    symmoe.errors.SymmoeError,
                    match=f"{E}" if rank >= num_ranks - ep else "in another EP group",
                ):
                    captured(batch, scale=0.5)
                for state, before in states:
                    state.copy_(before)
                continue
            actual = captured(batch, scale=0.5)["loss"]
            plain.zero_grad()
            expected = eager(batch, scale=0.5)["loss"]
            findings.where = f"rank {rank}, step {number}"
            findings.same_bits(
                *(
                    map(
                        local_part,
                        (loss, *(p.grad for p in module.parameters()), *module.buffers()),
                    )
                    for module, loss in ((model, actual), (plain, expected))
                )
            )
            is_trained = number == is_hot or all(
                bool(parameter.grad.any()) for parameter in model.parameters()
            )
            findings.check(is_trained, "gradients are 0")
            for module, optimizer in zip((model, plain), optimizers, strict=True):
                if wrap is None:
                    symmoe.reduce_gradients(module)
                optimizer.step()
        captured.close()
        counts = captured.num_replays, captured.num_repeated, captured.num_captures
    return counts, findings.texts


@dataclasses.dataclass(frozen=True)
class Batch:
    x: torch.Tensor
    y: torch.Tensor
    scale: float = 1.0


def double(module: nn.Module, args: object, outputs: tuple) -> tuple:
    return 2 * outputs[0], outputs[1]


def new_experts(layer: symmoe.MoELayer) -> None:
    experts = symmoe.GroupedMLP(layer.experts.num_groups, H, I, device=layer.heap.device)
    experts.load_state_dict(
        {name: 2 * tensor for name, tensor in layer.experts.state_dict().items()}
    )
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
    "gradient hook": lambda model: model.layers[0].router.weight.register_hook(
        lambda gradient: 3 * gradient
    ),
    "experts": lambda model: new_experts(model.layers[0]),
    "frozen": lambda model: model.layers[1].requires_grad_(False),
}


@contextmanager
def deterministic(_: str) -> Iterator[None]:
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.deterministic = False


AROUND: dict[str, Callable[[str], object]] = {
    "autocast": lambda device: torch.autocast(device, torch.bfloat16),
    "autocast in fp16": lambda device: torch.autocast(device, torch.float16),
    "deterministic": deterministic,
}


def check_changes(rank: int, num_ranks: int, findings: Findings, device: str) -> None:
    """After each change the step is captured once more, and has the bits of an eager one."""
    with open_heap(device, num_bytes=64 << 20) as heap:
        torch.use_deterministic_algorithms(False)
        model = Model(heap)
        plain = Model(heap)
        plain.load_state_dict(model.state_dict())
        for either in (model, plain):
            either.layers[0].experts.requires_grad_(False)
        captured = capture(model, num_eager=1)
        eager = make_step(plain)
        x = torch.randn(T, H, generator=torch.Generator().manual_seed(rank)).to(heap.device)
        num_captures = 0
        for name in (*CHANGES, *AROUND):
            findings.where = f"{name}, rank {rank}"
            for either in (model, plain):
                CHANGES.get(name, CHANGES["nothing"])(either)
            for number in range(3):
                plain.zero_grad()
                with AROUND.get(name, nullcontext)(device):
                    torch.manual_seed(number)
                    actual = captured([x], scale=0.5)["loss"]
                    torch.manual_seed(number)
                    expected = eager([x], scale=0.5)["loss"]
                findings.same_bits(
                    results(model, actual), results(plain, expected), f"other bits in call {number}"
                )
            num_captures += 1
            findings.equal("captures", captured.num_captures, num_captures)
        findings.equal("repeated", captured.num_repeated, 0)
        captured.close()
