"""A small model with MoE layers whose whole weights, data and loss do not depend on the layout of the ranks."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist
from activation_formula import SCORES
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import symmoe
from symmoe.training.parallel import data_parallel, parallelize

HIDDEN, FFN, EXPERTS, TOP_K, FEATURES = 16, 8, 4, 2, 8
TOKENS = 48  # of the global batch
LEARNING_RATE = 0.1
STEPS = 6
CONFIG = symmoe.MoEConfig(
    hidden=HIDDEN,
    ffn=FFN,
    num_experts=EXPERTS,
    top_k=TOP_K,
    order="slot",
    router=symmoe.RouterConfig(z_loss_coef=1e-2, route_scale=2.0),
)


class Block(nn.Module):
    def __init__(
        self, config: symmoe.MoEConfig, heap: symmoe.SymmetricHeap, *, shared: bool = False
    ) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden)
        self.dense = nn.Linear(config.hidden, config.hidden)
        shared_expert = nn.Linear(config.hidden, config.hidden) if shared else None
        self.moe = symmoe.MoELayer(config, heap, shared_expert=shared_expert)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x + self.dense(self.norm(x)).relu()
        y, metrics = self.moe(x)
        return x + y, metrics.aux_loss


class Model(nn.Module):
    """Two blocks, the second with a shared expert. Returns the output and the sum of the auxiliary losses."""

    def __init__(self, heap: symmoe.SymmetricHeap, config: symmoe.MoEConfig = CONFIG) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, HIDDEN)
        self.blocks = nn.ModuleList([Block(config, heap), Block(config, heap, shared=True)])
        self.last = nn.Linear(HIDDEN, FEATURES)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, aux_loss = self.first(x), x.new_zeros(())
        for block in self.blocks:
            x, block_loss = block(x)
            aux_loss = aux_loss + block_loss
        return self.last(x), aux_loss


def model_of(heap: symmoe.SymmetricHeap, config: symmoe.MoEConfig = CONFIG) -> Model:
    model = Model(heap, config)
    set_weights(model, heap)
    return model


def on_mesh(
    mesh: DeviceMesh, heap: symmoe.SymmetricHeap, wrap: str, config: symmoe.MoEConfig = CONFIG
) -> nn.Module:
    """The model in FSDP2 ("fsdp") or in DDP ("ddp")."""
    return {"fsdp": parallelize, "ddp": data_parallel}[wrap](model_of(heap, config), mesh)


@torch.no_grad()
def set_weights(model: nn.Module, heap: symmoe.SymmetricHeap) -> None:
    """Each parameter from a generator of its own; a rank takes its experts from the whole."""
    for number, (name, parameter) in enumerate(model.named_parameters()):
        generator = torch.Generator().manual_seed(number)
        shape = list(parameter.shape)
        is_expert = ".experts." in name
        if is_expert:
            shape[0] *= heap.num_ranks
        full = torch.randn(shape, generator=generator) / shape[-1] ** 0.5 / 2
        parameter.copy_(full.chunk(heap.num_ranks)[heap.rank] if is_expert else full)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of the global batch, [TOKENS, FEATURES] each; the targets can be learnt."""
    x = torch.randn(TOKENS, FEATURES, generator=torch.Generator().manual_seed(1000 + step))
    return x, x.roll(1, dims=1) * 0.7 + x.abs() * 0.3


def share(rank: int, shares: tuple[int, ...]) -> slice:
    """Where the tokens of `rank` lie in the global batch, if rank r brings shares[r] of them."""
    start = sum(shares[:rank])
    return slice(start, start + shares[rank])


def rank_loss(model: nn.Module, step: int, rank: int, shares: tuple[int, ...]) -> torch.Tensor:
    """This rank's loss: the mean over ranks is the mean over the tokens of the global batch, also for unequal shares.
    The auxiliary loss is a mean over the rank's own tokens and weighs as much as they are."""
    x, target = batch(step)
    local = share(rank, shares)
    y, aux_loss = model(x[local])
    weight = len(shares) / TOKENS
    return weight * ((y - target[local]).square().mean(1).sum() + shares[rank] * aux_loss)


def curve_of(
    model: nn.Module,
    rank: int,
    shares,
    after_backward: Callable = lambda: None,
    *,
    group=None,
) -> list[tuple[float, object]]:
    """(loss of the global batch, what `after_backward` returns) of every step. Collective. SGD, because Adam would hide
    a gradient of the wrong scale."""
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE
    )
    curve = []
    for number in range(STEPS):
        loss = rank_loss(model, number, rank, shares)
        loss.backward()
        results = after_backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total, group=group)
        curve.append((total.item() / len(shares), results))
    return curve


def equal_shares(num_ranks: int) -> tuple[int, ...]:
    return (TOKENS // num_ranks,) * num_ranks


def step(module: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Output and every gradient of one step, and the auxiliary loss where the module returns one; clears gradients."""
    y, *extras = outputs if isinstance(outputs := module(x), tuple) else (outputs,)
    loss = y.square().sum()
    results = {"y": y.detach()}
    if (
        extras and isinstance(extras[0], torch.Tensor) and extras[0].dim() == 0
    ):  # in the mean over y, so that it counts
        loss, results["aux_loss"] = loss / max(1, y.numel()) + extras[0], extras[0].detach()
    loss.backward()
    results["x"] = x.grad
    results |= {name.removeprefix("_orig_mod."): p.grad for name, p in module.named_parameters()}
    x.grad = None
    module.zero_grad()
    return results


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """The operators give the eager bits; what torch's own decompositions round differently is around them."""
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=1e-6)


@contextmanager
def counted_barriers(heap: symmoe.SymmetricHeap) -> Iterator[list[int]]:
    """The phases of the barriers that this rank enters."""
    phases: list[int] = []
    wait = heap.waits.wait

    def count(call: int, **options) -> torch.Tensor:
        if "peer" not in options:
            phases.append(call & 0xFF)
        return wait(call, **options)

    with mock.patch.object(heap.waits, "wait", count):
        yield phases


@contextmanager
def on_layout(
    *layout: int, ranks_per_node: int | None = None
) -> Iterator[tuple[DeviceMesh, symmoe.SymmetricHeap]]:
    """A mesh, as `open_mesh` makes it, and a heap over its EP group."""
    mesh = open_mesh(*layout)
    with open_heap(mesh, ranks_per_node) as heap:
        yield mesh, heap


def open_heap(mesh: DeviceMesh | None, ranks_per_node: int | None = None) -> symmoe.SymmetricHeap:
    """A heap over the EP group of a mesh, with its replicas, or of this process only."""
    options = {"num_bytes": 4 << 20, "ranks_per_node": ranks_per_node}
    if mesh is not None:
        replicas = mesh[tuple(name for name in mesh.mesh_dim_names if name != "ep")]
        return symmoe.SymmetricHeap.from_mesh(mesh["ep"], expert_mesh=replicas, **options)
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return symmoe.SymmetricHeap(group, **options)


@functools.cache  # a mesh is process groups
def open_mesh(*layout: int) -> DeviceMesh:
    """Of a number of replicas and of ranks of an EP group; three numbers: with hybrid sharding of the replicas."""
    names = ("replicate", "efsdp", "ep")[-len(layout) :]
    return init_device_mesh("cpu", layout, mesh_dim_names=names)


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """All values of a DTensor. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def first_gradients(
    model: nn.Module, rank: int, shares: tuple[int, ...]
) -> dict[str, torch.Tensor]:
    """The full gradients of the loss of step 0. Collective."""
    rank_loss(model, 0, rank, shares).backward()
    return whole_gradients(model)


def whole_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    names = {
        name.removeprefix("module."): parameter for name, parameter in model.named_parameters()
    }
    return {name: full_tensor(parameter.grad).clone() for name, parameter in names.items()}


def assert_close(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Equal but for the rounding of sums in another order, as DDP adds gradients up in buckets."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        deviation = (actual[name] - tensor).abs().max() / tensor.abs().max()
        assert deviation <= 2e-6, f"{name} deviates by {deviation:.1e}"


def check_metrics(
    model: nn.Module,
    expected: dict[str, tuple[torch.Tensor, int, int]],
    loss_of: Callable[[], torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Metrics of two steps of a model whose 8 experts are on two ranks and whose router is a trainer's; they count
    neither what is recomputed nor what runs in eval mode. Collective.

    Args:
        expected: by layer, the experts that this rank's tokens choose, and bytes sent and read.

    Returns:
        the routing of one forward more, as record_routing has it.
    """
    logger = symmoe.metrics.MetricsLogger(model.train(), times_forward=True)
    for _ in range(2):
        loss_of().backward()
    with torch.no_grad():
        model.eval()
        loss_of()
    records = {record.name: record for record in logger.step(0)}
    logger.close()
    with torch.no_grad(), symmoe.routing.record_routing(model) as routing:
        loss_of()
    assert records.keys() == routing.keys() == expected.keys()
    for path, (chosen, sent, read) in expected.items():
        record = records[path]
        load = chosen[chosen >= 0].bincount(minlength=8)
        dist.all_reduce(load)
        assert record.num_calls == 2
        assert record.tokens_per_expert == tuple(2 * slots for slots in load.tolist())
        assert record.tokens_per_rank == (2 * load[:4].sum().item(), 2 * load[4:].sum().item())
        assert (record.dispatch_bytes, record.combine_bytes) == (2 * sent, 2 * read)
        assert min(sent, read) > 0
        assert record.num_dropped == 0
        assert record.aux_loss is None  # the trainer's own
        assert 0 < record.dispatch_s + record.combine_s < record.forward_s
    return routing


def other_routing(routing: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """For the same tokens other experts, of 8, as an engine has them; and none for every fifth token."""
    generator, changed = torch.Generator().manual_seed(seed), {}
    for name, ids in routing.items():
        changed[name] = (
            torch.rand(len(ids), 8, generator=generator).argsort(1)[:, : ids.shape[1]].short()
        )
        changed[name][::5] = -1
    return changed


def weigh(
    logits: torch.Tensor,
    ids: torch.Tensor,
    score: str,
    *,
    scale: float = 1.0,
    renormalize: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [..., K] of these experts, by the formula, and ids; for -1 a weight of 0 and any experts."""
    is_none = ids < 0
    ids = torch.where(ids < 0, torch.arange(ids.shape[-1]), ids.long())
    picked = SCORES[score](logits).gather(-1, ids)
    weights = scale * (picked / picked.sum(-1, keepdim=True) if renormalize else picked)
    return weights.masked_fill(is_none, 0.0), ids
