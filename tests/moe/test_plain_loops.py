"""Mistakes in training loops without a trainer, and correct loops: the messages of each, in the first step at latest.
The reference is one process with all experts and all tokens."""

import gc
import os
import warnings
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from cluster import on_ranks, run_on
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from worker import open_heap

import symmoe
from symmoe.errors import ArgumentError

HIDDEN, EXPERTS, TOKENS = 16, 4, 12
CONFIG = symmoe.MoEConfig(hidden=HIDDEN, ffn=8, num_experts=EXPERTS, top_k=2, order="slot")


class Model(nn.Module):
    def __init__(self, heap: symmoe.SymmetricHeap, seed: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(heap.rank + 1 if seed is None else seed)
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.moe = symmoe.MoELayer(CONFIG, heap, shared_expert=nn.Linear(HIDDEN, HIDDEN))
        self.register_buffer("scale", torch.full((), 1.0 + heap.rank))
        self.to(heap.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.moe(self.first(x))[0] * self.scale


def loss_of(model: nn.Module, rank: int, step: int = 0) -> torch.Tensor:
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(100 * step + rank))
    return model(x.to(next(model.parameters()).device)).square().mean()


PACKAGE = os.path.dirname(symmoe.__file__) + os.sep


def texts_of(loop: Callable[[], object]) -> list[str]:
    """The warnings and the error of a loop."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        errors = []
        try:
            loop()
        except ArgumentError as error:
            errors.append(str(error))
    user_warnings = [message for message in caught if message.category is UserWarning]
    assert not [
        message.filename for message in user_warnings if message.filename.startswith(PACKAGE)
    ]
    texts = [str(message.message) for message in user_warnings]
    # torch's own, of the streams of DDP, on GPUs:
    return [
        text for text in texts if not text.startswith("The AccumulateGrad node's stream")
    ] + errors


Loop = Callable[[symmoe.SymmetricHeap], object]


def trains(
    model, rank, after_backward, *, make=torch.optim.SGD, zero_first=False, num_micro_batches=1
) -> None:
    """Two steps of training."""
    optimizer = make([p for p in model.parameters() if p.requires_grad], lr=0.1)
    symmoe.training.check_first_step(model, optimizer)
    for step in range(2):
        with torch.no_grad():
            loss_of(model.eval(), rank)
        model.train()
        for number in range(num_micro_batches):
            loss = loss_of(model, rank, step + 10 * number)
            if zero_first and number == 0:
                optimizer.zero_grad(set_to_none=False)
            loss.backward()
        after_backward()
        optimizer.step()
        if not zero_first:
            optimizer.zero_grad()


def right(heap: symmoe.SymmetricHeap) -> Model:
    model = Model(heap)
    symmoe.training.broadcast_parameters(model)
    return model


def loop(
    prepare=lambda model: None,
    after_backward=symmoe.reduce_gradients,
    *,
    in_ddp=False,
    make_model=right,
    **options,
) -> Loop:
    """A correct loop, except for these replaced parts."""

    def run(heap: symmoe.SymmetricHeap) -> None:
        model = make_model(heap)
        prepare(model)
        if in_ddp:
            symmoe.training.prepare_for_ddp(model)
        wrapped = DistributedDataParallel(model) if in_ddp else model
        trains(wrapped, heap.rank, lambda: after_backward(model), **options)

    return run


def reduce_and_clip(model: Model) -> None:
    symmoe.reduce_gradients(model)
    symmoe.training.clip_grad_norm(model, 1e-3)


def reduce_and_clip_by_torch(model: Model) -> None:
    symmoe.reduce_gradients(model)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def reduce_twice(model: Model) -> None:
    symmoe.reduce_gradients(model)
    symmoe.reduce_gradients(model)


def with_zero(heap: symmoe.SymmetricHeap) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def make(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=lr)

    model = right(heap)
    before = [p.detach().clone() for p in model.moe.experts.parameters()]
    try:
        trains(model, heap.rank, lambda: symmoe.reduce_gradients(model), make=make)
    finally:
        assert all(map(torch.equal, before, model.moe.experts.parameters()))


# The loop, and words of its text.
MISTAKES: dict[str, tuple[Loop, str]] = {
    "no reduce_gradients": (
        loop(after_backward=lambda model: None),
        "call symmoe.reduce_gradients",
    ),
    "reduce_gradients twice": (
        loop(after_backward=reduce_twice),
        "called for these gradients already",
    ),
    "reduce_gradients of the layer": (
        loop(after_backward=lambda model: symmoe.reduce_gradients(model.moe)),
        "of the whole model, not of its layers only",
    ),
    "torch's clip_grad_norm_": (
        loop(after_backward=reduce_and_clip_by_torch),
        "Clip with symmoe.training.clip_grad_norm",
    ),
    "nothing is broadcast": (
        loop(make_model=Model),
        "symmoe.training.broadcast_parameters(model) when",
    ),
    "equal seeds": (
        loop(make_model=lambda heap: Model(heap, seed=3)),
        "experts are equal on all ranks",
    ),
    "equal seeds in DDP": (
        loop(
            after_backward=lambda model: None,
            in_ddp=True,
            make_model=lambda heap: Model(heap, seed=3),
        ),
        "experts are equal on all ranks",
    ),
    "ZeroRedundancyOptimizer": (with_zero, "ZeroRedundancyOptimizer"),
}


def freeze(model: Model) -> None:
    model.moe.router.requires_grad_(False)
    model.moe.shared_expert.requires_grad_(False)


def reduce_by_hand(model: Model) -> None:
    for name, parameter in model.named_parameters():
        if ".experts." not in name:
            dist.all_reduce(parameter.grad)
        parameter.grad /= model.moe.heap.num_ranks


@torch.no_grad()
def upcycle(model: Model) -> None:
    for parameter in model.moe.experts.parameters():
        parameter.copy_(
            torch.randn(parameter.shape[1:], generator=torch.Generator().manual_seed(1))
        )


def add_users_experts(model: Model) -> None:
    """Adds a user's own experts, which differ between ranks."""
    model.user_experts = nn.Linear(HIDDEN, HIDDEN)
    model.user_experts.holds_experts = True


def in_groups_of_one(heap: symmoe.SymmetricHeap) -> None:
    with open_heap(
        "cpu", group=dist.new_group([dist.get_rank()], use_local_synchronization=True)
    ) as own_heap:
        loop(
            after_backward=lambda model: None, make_model=lambda _: Model(own_heap, seed=heap.rank)
        )(heap)


RIGHT: dict[str, Loop] = {
    "plain": loop(),
    "clipped": loop(after_backward=reduce_and_clip),
    "gradients are zeroed in place": loop(zero_first=True),
    "accumulation": loop(num_micro_batches=3),
    "AdamW": loop(make=torch.optim.AdamW),
    "frozen router": loop(freeze),
    "LoRA": loop(lambda model: symmoe.lora.add_lora(model, rank=2, alpha=1.0)),
    "DDP": loop(
        after_backward=lambda model: symmoe.training.clip_grad_norm(model, 1e-3), in_ddp=True
    ),
    "own reduction": loop(after_backward=reduce_by_hand),
    "upcycled": loop(upcycle),
    "own experts": loop(add_users_experts),
    "groups of one rank": in_groups_of_one,
}


def texts_of_loop(rank: int, num_ranks: int, device: str, kind: str, name: str) -> list[str]:
    loop = MISTAKES[name][0] if kind == "mistake" else RIGHT[name]
    with open_heap(device) as heap:
        texts = texts_of(lambda: loop(heap))
        assert loss_of(right(heap), rank).isfinite()  # the next correct call
    return texts


@on_ranks(cpu=(2,), cuda=(2,))
@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(cluster, name: str, num_ranks: int, device: str):
    for texts in cluster(num_ranks, device).run(texts_of_loop, device, "mistake", name):
        assert len(texts) == 1, texts
        assert MISTAKES[name][1] in texts[0]


@on_ranks(cpu=(2,), cuda=(2,))
@pytest.mark.parametrize("name", RIGHT)
def test_right_loops_are_not_warned(cluster, name: str, num_ranks: int, device: str):
    if device == "cuda" and name == "groups of one rank":
        pytest.skip("NVSHMEM has one heap per process")
    assert cluster(num_ranks, device).run(texts_of_loop, device, "right", name) == [[], []]


@run_on(2, on_gpus=(2,))
def test_parameters_on_another_device_are_refused(rank: int, num_ranks: int, device: str) -> None:
    """Experts of one rank are temporarily on another device than the heap."""
    with open_heap(device) as heap:
        model = right(heap)
        expected = loss_of(model, rank)
        elsewhere, where = ("cpu", "cuda:1") if device == "cuda" else ("meta", "cpu")
        weight = model.moe.experts.fc2.weight
        if rank == 1:
            model.moe.experts.fc2.weight = nn.Parameter(weight.to(elsewhere))
        with pytest.raises(
            ArgumentError, match=f"experts.fc2.weight is on {elsewhere}; it must be on {where}"
        ):
            loss_of(model, rank)
        model.moe.experts.fc2.weight = weight
        assert torch.equal(loss_of(model, rank), expected)


@run_on(4)
def test_broadcast_parameters_copies_rank_0_without_its_experts(rank: int, num_ranks: int) -> None:
    """Two EP groups. With an expert_group, experts of the first group are broadcast, too."""
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    with (
        open_heap("cpu", group=pairs[rank // 2]) as alone,
        open_heap("cpu", group=pairs[rank // 2], expert_group=pairs[2 + rank % 2]) as heap,
    ):

        def model_of(number: int, heap: symmoe.SymmetricHeap) -> Model:
            model = Model(heap, seed=number)
            model.transposed = nn.Parameter(torch.full((2, 3), number, dtype=torch.float64).t())
            model.flags = nn.Buffer(torch.tensor([number > 0]))
            model.scale.fill_(number)
            return model

        for its_heap, source in ((alone, rank), (heap, rank % 2)):
            model = model_of(rank, its_heap)
            symmoe.training.broadcast_parameters(model)
            first = model_of(0, alone).state_dict()
            state = model_of(source, alone).state_dict()
            for name, tensor in model.state_dict().items():
                assert torch.equal(tensor, (state if ".experts." in name else first)[name]), name
        model.meta = nn.Parameter(torch.empty(2, device="meta"))
        with pytest.raises(ArgumentError, match="meta is on meta"):
            symmoe.training.broadcast_parameters(model)


class Repeats(torch.optim.SGD):
    """An optimizer whose step calls another one, with hooks of its own if torch knows its class; and may raise."""

    fails = False

    def step(self, closure: object = None) -> None:
        if self.fails:
            raise RuntimeError("no step")
        super().step(closure)


@run_on(2)
def test_a_failed_first_step_is_compared_in_the_next_one(
    rank: int, num_ranks: int, heap: symmoe.SymmetricHeap
) -> None:
    torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    model = right(heap)
    optimizer = Repeats(model.parameters(), lr=0.1)
    symmoe.training.check_first_step(model, optimizer)
    optimizer.register_step_post_hook(lambda *_: None)
    loss_of(model, rank).backward()
    optimizer.fails = rank == 0
    if rank == 0:
        with pytest.raises(RuntimeError, match="no step"):
            optimizer.step()
        optimizer.fails = False
    (text,) = texts_of(optimizer.step)
    model_ref = weakref.ref(model)
    assert "call symmoe.reduce_gradients" in text
    assert texts_of(optimizer.step) == []
    del model
    gc.collect()
    assert model_ref() is None  # an optimizer has hooks as long as it lives


@run_on(2)
def test_only_the_first_step_is_compared(
    rank: int, num_ranks: int, heap: symmoe.SymmetricHeap
) -> None:
    """Ranks may diverge later on purpose, and no step after the first waits for a peer."""
    model = right(heap)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    symmoe.training.check_first_step(model, optimizer)
    loss_of(model, rank).backward()
    symmoe.reduce_gradients(model)
    assert texts_of(optimizer.step) == []
    if rank == 1:
        model.first.weight.grad.add_(1)
        assert texts_of(optimizer.step) == []


@pytest.mark.parametrize("model", [nn.Linear(2, 2), [nn.Parameter(torch.ones(2))]])
def test_a_model_without_a_layer_is_refused(model: object):
    with pytest.raises(ArgumentError, match="model \\("):
        symmoe.training.check_first_step(
            model, torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
        )
