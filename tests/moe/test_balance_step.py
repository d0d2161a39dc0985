"""The expert bias over optimizer steps: each micro-batch counts once, also with recomputation."""

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from layers import layer_config
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from symmoe import MoELayer, Router, SymmetricHeap
from symmoe.errors import ArgumentError
from symmoe.moe.balance import balance_after, balance_step

EXPERTS, TOP_K, H, I, RATE = 4, 2, 16, 8, 0.01

FORWARDS: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "kept": lambda block, x: block(x),
    "reentrant": lambda block, x: checkpoint(block, x, use_reentrant=True),
    "non-reentrant": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "non-reentrant to the end": lambda block, x: _to_the_end(block, x),
}


def _to_the_end(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with set_checkpoint_early_stop(False):
        return checkpoint(block, x, use_reentrant=False)


class Block(nn.Module):
    def __init__(self, heap: SymmetricHeap, **options) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense = nn.Linear(H, H)
        fields = {"expert_bias": True, "bias_update_rate": RATE} | options
        self.moe = MoELayer(
            layer_config(hidden=H, ffn=I, num_experts=EXPERTS, top_k=TOP_K, **fields), heap
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dense(x)
        y, metrics = self.moe(x)
        return x + y + metrics.aux_loss  # to keep the loss inside of the checkpoint


class Model(nn.Module):
    def __init__(self, heap: SymmetricHeap, block: type[Block] = Block, **options) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block(heap, **options) for _ in range(2))

    def forward(self, x: torch.Tensor, forward: Callable = FORWARDS["kept"]) -> torch.Tensor:
        for block in self.blocks:
            x = forward(block, x)
        return x


def batch(rank: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * rank + number)
    return (torch.randn(9 + number, H, generator=generator) + 0.5).requires_grad_()


def loads_of(model: Model, numbers: range) -> np.ndarray:
    """Slots [layers, E] of these micro-batches in one process, counted in plain Python from the routers' choices."""
    loads = np.zeros((2, EXPERTS), dtype=np.int64)
    ids: list[torch.Tensor] = []
    hooks = [
        b.moe.router.register_forward_hook(lambda *a: ids.append(a[2].topk_idx))
        for b in model.blocks
    ]
    for number in numbers:
        ids.clear()
        with torch.no_grad():
            model(batch(0, number))
        loads += [np.bincount(layer.flatten().numpy(), minlength=EXPERTS) for layer in ids]
    for hook in hooks:
        hook.remove()
    return loads


def biases(model: Model) -> np.ndarray:
    return np.array([block.moe.router.expert_bias.tolist() for block in model.blocks])


def counted(model: Model) -> np.ndarray:
    return np.array([block.moe.router.step_load.tolist() for block in model.blocks])


def expected_bias(loads: np.ndarray) -> np.ndarray:
    return np.sign(loads.mean(1, keepdims=True) - loads) * RATE


@pytest.mark.parametrize("forward", FORWARDS)
def test_micro_batches_count_once(heap: SymmetricHeap, forward: str):
    model = Model(heap)
    loads = loads_of(model, range(3))
    for number in range(3):
        model(batch(0, number), FORWARDS[forward]).sum().backward()
    np.testing.assert_array_equal(counted(model), loads)
    balance_step(model)
    want = expected_bias(loads)
    np.testing.assert_allclose(biases(model), want, rtol=1e-6)
    assert np.abs(want).max() > 0
    assert not counted(model).any()


def test_order_of_backwards_does_not_matter(heap: SymmetricHeap):
    """As in pipelines: several forwards before their backwards; one forward without a backward."""
    model = Model(heap)
    loads = loads_of(model, range(3))
    flying = [model(batch(0, number), FORWARDS["non-reentrant"]) for number in range(3)]
    model(batch(0, 3))
    for y in (flying[1], flying[0], flying[2]):
        y.sum().backward()
    np.testing.assert_array_equal(counted(model), loads)


class Wrapped(nn.Module):
    """A router with an adapter."""

    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.router = router
        self.adapter = nn.Parameter(torch.zeros(H))

    @property
    def step_load(self) -> torch.Tensor:
        return self.router.step_load

    def route_of(self, x: torch.Tensor) -> None:
        """A wrapper's route, which differs from the router's."""

    def forward(self, x: torch.Tensor, **arguments) -> object:
        return self.router(x + self.adapter, **arguments)


def test_a_retained_graph_and_a_frozen_router_count_once(heap: SymmetricHeap):
    """No parameter before the experts is trained. The router keeps its bias until the router or its wrapper is
    trained."""
    block = Block(heap)
    block.dense.requires_grad_(False)
    block.moe.router.requires_grad_(False)
    y = block(batch(0, 0).detach())
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    router = block.moe.router
    assert router.step_load.sum().item() == 9 * TOP_K
    balance_step(block)
    assert not router.step_load.any()
    assert not router.expert_bias.any()
    block.moe.router = Wrapped(router)
    block(batch(0, 0).detach()).sum().backward()
    balance_step(block)
    assert router.expert_bias.any()


def test_evaluation_does_not_count(heap: SymmetricHeap):
    model = Model(heap)
    with torch.no_grad():
        model(batch(0, 0))
    model.eval()
    model(batch(0, 0)).sum().backward()
    assert not counted(model).any()
    balance_step(model)
    assert not biases(model).any()
    model.train()(batch(0, 0)).sum().backward()
    assert counted(model).any(1).all()


def test_balance_after_runs_after_each_optimizer_step(heap: SymmetricHeap):
    model = Model(heap)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    handle = balance_after(optimizer, model)
    want = expected_bias(loads_of(model, range(1)))
    for _ in range(2):
        model(batch(0, 0)).sum().backward()
        optimizer.step()
        np.testing.assert_allclose(biases(model), want, rtol=1e-6)
        handle.remove()


def test_a_router_without_a_bias_counts_nothing(heap: SymmetricHeap):
    model = Model(heap, expert_bias=False)
    model(batch(0, 0)).sum().backward()
    balance_step(model)
    assert all(block.moe.router.step_load is None for block in model.blocks)


@pytest.mark.parametrize(
    "cast", [nn.Module.half, nn.Module.bfloat16, lambda m: m.to(torch.bfloat16)]
)
def test_casts_do_not_change_the_bias(heap: SymmetricHeap, cast: Callable):
    model = Model(heap)
    for block in model.blocks:
        block.moe.router.expert_bias.fill_(1 + 2.0**-20)
    cast(model)
    router = model.blocks[0].moe.router
    assert router.weight.dtype == router.expert_bias.dtype == torch.float32
    assert (router.step_load.dtype, router.expert_bias[0].item()) == (torch.int64, 1 + 2.0**-20)
    assert model.blocks[0].moe.experts.fc1.weight.dtype in (torch.float16, torch.bfloat16)
    state = model.state_dict()
    assert state["blocks.0.moe.router.expert_bias"].dtype == torch.float32
    assert not any("step_load" in name for name in state)
    target = Model(heap)
    target.load_state_dict(state)
    np.testing.assert_array_equal(biases(target), biases(model))


def meta_then_assigned(model: Model, heap: SymmetricHeap) -> Model:
    on_meta = model.to("meta")
    on_meta.load_state_dict(Model(heap).state_dict(), assign=True)
    return on_meta


def meta_then_empty(model: Model, heap: SymmetricHeap) -> Model:
    used = [
        torch.full((EXPERTS,), 10**9) for _ in range(1000)
    ]  # what lies in the allocator's memory
    del used
    emptied = model.to("meta").to_empty(device=heap.device)
    emptied.load_state_dict(Model(heap).state_dict())
    return emptied


MOVES: dict[str, Callable[[Model, SymmetricHeap], Model]] = {
    "assigned": meta_then_assigned,
    "emptied": meta_then_empty,
    "copied": lambda model, _: copy.deepcopy(model),
    "cast": lambda model, _: model.double().float(),
    "router without a heap": lambda model, _: _with_own_routers(model),
}


def _with_own_routers(model: Model) -> Model:
    for block in model.blocks:
        router = Router(block.moe.config, device="meta")
        router.load_state_dict(block.moe.router.state_dict(), assign=True)
        block.moe.router = router
    return model


@pytest.mark.parametrize("move", MOVES)
def test_counts_survive_moves_of_parameters_and_buffers(heap: SymmetricHeap, move: str):
    options = {"aux_loss_coef": 1.0, "aux_loss": "global"}
    expected = Model(heap, **options)
    model = MOVES[move](Model(heap, **options), heap)
    for number in range(2):
        want, got = (candidate(batch(0, number)) for candidate in (expected, model))
        torch.testing.assert_close(got, want)
        (want + got).sum().backward()
    np.testing.assert_array_equal(counted(model), counted(expected))
    for candidate in (expected, model):
        balance_step(candidate)
    np.testing.assert_array_equal(biases(model), biases(expected))
    assert biases(model).any()


class Normed(Block):
    """Has autograd functions before the layer; the forward of a checkpoint numbers their nodes, too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(Doubled.apply(Doubled.apply(x)))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx, dy: torch.Tensor) -> torch.Tensor:
        return 2 * dy


def gradients_of(model: Model, forward: str, order: tuple[int, ...]) -> list[torch.Tensor]:
    """Gradients of micro-batches, two of which are in flight at a time, with backward in this order."""
    model.zero_grad()
    flying: list[torch.Tensor] = []
    for turn, number in enumerate(order):
        for begun in range(len(flying), min(turn + 2, len(order))):
            flying.append(model(batch(0, begun), FORWARDS[forward]))
        flying[number].sum().backward()
    return [parameter.grad for parameter in model.parameters()]


GLOBAL = {"aux_loss_coef": 1.0, "aux_loss": "global"}


@pytest.mark.parametrize(
    ("block", "forward", "order"),
    [
        (Block, "reentrant", (0, 1)),
        (Block, "non-reentrant", (1, 0, 2)),
        (Block, "non-reentrant to the end", (1, 0)),
        (Normed, "reentrant", (1, 0, 2)),
        (Normed, "non-reentrant", (1, 0)),
        (Normed, "non-reentrant to the end", (1, 0, 2)),
    ],
)
def test_a_recomputed_call_has_the_loss_of_its_forward(
    heap: SymmetricHeap, block: type[Block], forward: str, order: tuple[int, ...]
):
    """Backward of one micro-batch counts its load before another one is recomputed."""
    plain, repeated = (
        gradients_of(Model(heap, block, **GLOBAL), mode, order) for mode in ("kept", forward)
    )
    torch.testing.assert_close(repeated, plain)


def test_a_copy_recomputes_its_own_calls(heap: SymmetricHeap):
    """Also a copy that is made in the middle of a step of the original."""
    model = Model(heap, **GLOBAL)
    model(batch(0, 0)).sum().backward()
    plain, repeated = (
        gradients_of(copy.deepcopy(model), forward, (0,)) for forward in ("kept", "non-reentrant")
    )
    torch.testing.assert_close(repeated, plain)


def test_without_a_coefficient_a_global_loss_has_no_effect(heap: SymmetricHeap):
    block = Block(heap, aux_loss="global")
    y = FORWARDS["non-reentrant"](block, batch(0, 0))
    balance_step(block)
    y.sum().backward()


def test_recomputing_a_call_of_an_earlier_step_is_refused(heap: SymmetricHeap):
    model = Model(heap, aux_loss_coef=1.0, aux_loss="global")
    y = model(batch(0, 0), FORWARDS["non-reentrant"])
    balance_step(model)
    with pytest.raises(ArgumentError, match="aux_loss \\('global'\\)"):
        y.sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_calls_count(heap: SymmetricHeap, backend: str, request: pytest.FixtureRequest):
    if backend == "inductor":
        request.getfixturevalue(backend)
    options = {"aux_loss_coef": 1.0, "aux_loss": "global"}
    model = Model(heap, **options)
    loads = loads_of(model, range(2))
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    flying = [compiled(batch(0, number)) for number in range(2)]
    with torch.no_grad():
        compiled(batch(0, 0))
    for y in flying:
        y.sum().backward()
    np.testing.assert_array_equal(counted(model), loads)
    eager = Model(heap, **options)
    for y in [eager(batch(0, number)) for number in range(2)]:
        y.sum().backward()
    for a, b in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)
