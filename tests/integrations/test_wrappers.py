"""DDP and FSDP that other code puts around experts: correct from the start, or an error of the first forward pass."""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import small_model as small
import torch
import torch.distributed as dist
from cluster import run_on
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import symmoe
from symmoe.integrations.transformers import swap_moe

# Sums in another order: DDP adds dense gradients up in buckets.
BOUND = 2e-6


def accelerated(model: nn.Module) -> nn.Module:
    from accelerate import Accelerator

    return Accelerator(cpu=True).prepare(model)


def in_fabric(model: nn.Module) -> nn.Module:
    from lightning.fabric import Fabric

    from symmoe.integrations.lightning import FabricStrategy

    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=FabricStrategy())
    fabric.launch()
    return fabric.setup(model)


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="aot_eager")


def recomputed(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model


def prepared(model: nn.Module) -> nn.Module:
    symmoe.training.prepare_for_ddp(model)
    return model


def adapted(model: nn.Module) -> nn.Module:
    for adapter in symmoe.lora.add_lora(model, rank=2, alpha=3.0):
        generator = torch.Generator().manual_seed(adapter.numel())
        adapter.data = torch.randn(adapter.shape, generator=generator) / 10
    return model


WRAPS = {
    "DDP": lambda model: DistributedDataParallel(prepared(model)),
    "DDP of a copy": lambda model: DistributedDataParallel(copy.deepcopy(prepared(model))),
    "DDP, static graph": lambda model: DistributedDataParallel(prepared(model), static_graph=True),
    "DDP of compiled": lambda model: DistributedDataParallel(compiled(prepared(model))),
    "compiled DDP": lambda model: compiled(DistributedDataParallel(prepared(model))),
    "DDP of recomputed": lambda model: DistributedDataParallel(recomputed(prepared(model))),
    "accelerate": lambda model: accelerated(prepared(model)),
}


def with_adapters(heap: symmoe.SymmetricHeap) -> nn.Module:
    return adapted(small.model_of(heap))


def losses_of(
    model: nn.Module,
    rank: int,
    num_ranks: int,
    reduce: Callable[[], object] = lambda: None,
) -> list[float]:
    """The mean loss of every step."""
    curve = small.curve_of(model, rank, small.equal_shares(num_ranks), reduce)
    return [loss for loss, _ in curve]


def assert_same_gradients(model: nn.Module, expected: nn.Module) -> None:
    small.assert_close(small.whole_gradients(model), small.whole_gradients(expected))


@pytest.mark.parametrize(
    ("wrap", "build"), [*((wrap, small.model_of) for wrap in WRAPS), ("DDP", with_adapters)]
)
@run_on(2)
def test_prepared_models_train_as_with_reduce_gradients(
    rank: int,
    num_ranks: int,
    trainer_heap: symmoe.SymmetricHeap,
    wrap: str,
    build: Callable[[symmoe.SymmetricHeap], nn.Module],
) -> None:
    """Losses in a wrapper are those with reduce_gradients."""
    plain = build(trainer_heap)
    expected = losses_of(plain, rank, num_ranks, lambda: symmoe.reduce_gradients(plain))
    losses = losses_of(WRAPS[wrap](build(trainer_heap)), rank, num_ranks)
    assert losses == pytest.approx(expected, rel=BOUND)
    assert build is with_adapters or losses[-1] < 0.95 * losses[0]


@pytest.mark.parametrize(
    "wrapper",
    ["DDP", "accelerate", "Fabric", pytest.param("DDP of compiled", marks=pytest.mark.slow)],
)
@run_on(2)
def test_a_bare_layer_needs_no_preparation(
    rank: int, num_ranks: int, trainer_heap: symmoe.SymmetricHeap, wrapper: str
) -> None:
    """DDP ignores the experts of a bare MoELayer without a call of prepare_for_ddp."""
    wrap = {
        "DDP": DistributedDataParallel,
        "accelerate": accelerated,
        "Fabric": in_fabric,
        "DDP of compiled": lambda layer: DistributedDataParallel(compiled(layer)),
    }[wrapper]
    torch.manual_seed(rank)
    x = torch.randn(13 + rank, small.HIDDEN)
    layer = symmoe.MoELayer(small.CONFIG, trainer_heap)
    dist.broadcast(layer.router.weight.data, 0)
    plain = copy.deepcopy(layer)
    for model in (plain, wrap(layer)):
        y, metrics = model(x)
        (y.square().mean() + metrics.aux_loss).backward()
    symmoe.reduce_gradients(plain)
    assert_same_gradients(layer, plain)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [False, True], ids=["one batch", "no_sync"])
@run_on(4)
def test_replicas_are_averaged(rank: int, num_ranks: int, accumulate: bool) -> None:
    """Two EP groups of two ranks: gradients are those of reduce_gradients, with the experts of rank 0 and 1."""
    shares = small.equal_shares(num_ranks)
    with small.on_layout(2, 2) as (_, heap):
        plain = small.model_of(heap)
        small.rank_loss(plain, 0, rank, shares).backward()
        symmoe.reduce_gradients(plain)
        model = small.model_of(heap)
        if rank >= 2:
            for parameter in model.parameters():
                parameter.data.mul_(3)  # DDP makes replicas equal, and so it is with experts
        ddp = DistributedDataParallel(prepared(model))
        if accumulate:
            with ddp.no_sync():
                (small.rank_loss(ddp, 0, rank, shares) / 4).backward()
            (small.rank_loss(ddp, 0, rank, shares) * 3 / 4).backward()
        else:
            small.rank_loss(ddp, 0, rank, shares).backward()
        assert_same_gradients(model, plain)
        with pytest.raises(symmoe.errors.ArgumentError, match="reduce_gradients would do it again"):
            symmoe.reduce_gradients(ddp)


@run_on(2)
def test_groups_of_one_rank_are_plain_data_parallel(rank: int, num_ranks: int) -> None:
    """EP groups of one rank: every rank has all experts, and DDP treats them like any parameter."""
    groups = [dist.new_group([r]) for r in range(num_ranks)]
    shares = small.equal_shares(num_ranks)
    with (
        symmoe.SymmetricHeap(groups[rank], num_bytes=4 << 20) as heap,
        small.on_layout(2, 1) as (_, heap_with_replicas),
    ):
        plain = small.model_of(heap_with_replicas)
        small.rank_loss(plain, 0, rank, shares).backward()
        symmoe.reduce_gradients(plain)
        model = small.model_of(heap)
        ddp = DistributedDataParallel(model)
        small.rank_loss(ddp, 0, rank, shares).backward()
        assert_same_gradients(model, plain)
        norm = (
            torch.stack([parameter.grad.norm() for parameter in plain.parameters()]).norm().item()
        )
        for clipped in (plain, ddp):
            assert symmoe.training.clip_grad_norm(clipped, norm / 2).item() == pytest.approx(
                norm, rel=BOUND
            )
        assert_same_gradients(model, plain)


def unfreeze(model: nn.Module, may_train: bool = True) -> None:
    for block in model.blocks:
        block.moe.experts.requires_grad_(may_train)


def assign(model: nn.Module) -> None:
    for block in model.blocks:
        linear = block.moe.experts.fc1
        linear.weight = nn.Parameter(linear.weight.detach().clone())
        block.moe.experts.fc2 = copy.deepcopy(block.moe.experts.fc2)


def replace_experts(model: nn.Module) -> None:
    for block in model.blocks:
        block.moe.set_experts(copy.deepcopy(block.moe.experts))


# What changes, when the model has been wrapped; and whether experts are frozen until then.
LATE = {
    "unfrozen": (unfreeze, True),
    "one layer of experts unfrozen": (
        lambda model: model.blocks[1].moe.experts.fc2.requires_grad_(True),
        True,
    ),
    "frozen for a while": (
        lambda model: (
            unfreeze(model, False),
            model(torch.randn(5, small.FEATURES)),
            unfreeze(model),
        ),
        False,
    ),
    "assigned": (assign, False),
    "set_experts": (replace_experts, False),
    "add_lora": (adapted, False),
}

NEW = dict.fromkeys(LATE, "no name") | {
    "assigned": ".experts.",
    "set_experts": ".experts.",
    "add_lora": "lora",
}


@pytest.mark.parametrize(
    ("num_ranks", "wrap", "has_run", "change"),
    [
        *((2, prepared, has_run, change) for change in LATE for has_run in (True, False)),
        *(pytest.param(4, prepared, True, change, marks=pytest.mark.slow) for change in LATE),
        pytest.param(2, compiled, True, "add_lora", marks=pytest.mark.slow),
        pytest.param(
            *(2, compiled, True, "unfrozen"),
            marks=[
                pytest.mark.slow,
                pytest.mark.skipif(torch.__version__ < "2.13", reason="torch itself misses it"),
            ],
        ),
    ],
)
@run_on()
def test_experts_that_change_late_get_the_right_gradients(
    rank: int, num_ranks: int, wrap: Callable[[nn.Module], nn.Module], has_run: bool, change: str
) -> None:
    """Gradients are those of one process with all experts, and replicas are equal."""
    shares = small.equal_shares(num_ranks)
    change_it, is_frozen = LATE[change]
    with small.open_heap(None) as own_heap, small.on_layout(num_ranks // 2, 2) as (_, heap):
        full_model = small.Model(own_heap)
        model = small.Model(heap)
        unfreeze(model, not is_frozen)
        ddp = DistributedDataParallel(wrap(prepared(model)))
        if has_run:
            small.rank_loss(ddp, 0, rank, shares).backward()
            model.zero_grad()
        change_it(model)
        for changed_model, model_heap in ((full_model, own_heap), (model, heap)):
            if changed_model is full_model and change == "add_lora":
                adapted(full_model)
            small.set_weights(changed_model, model_heap)
        for name, parameter in model.named_parameters():
            if rank >= 2 and NEW[change] in name:  # and differs from the first replica
                parameter.data.mul_(3)
        (
            sum(small.rank_loss(full_model, 0, r, shares) for r in range(num_ranks)) / num_ranks
        ).backward()
        for _ in range(2):  # accumulated
            (small.rank_loss(ddp, 0, rank, shares) / 2).backward()
        for (name, parameter), of_whole in zip(
            model.named_parameters(), full_model.parameters(), strict=True
        ):
            assert (parameter.grad is None) == (not parameter.requires_grad), name
            if parameter.requires_grad:
                parts = of_whole.grad.chunk(2) if ".experts." in name else (of_whole.grad,) * 2
                deviation = (parameter.grad - parts[heap.rank]).abs().max() / parts[
                    heap.rank
                ].abs().max()
                assert deviation <= BOUND, f"{name} deviates by {deviation:.1e}"


@run_on(2)
def test_gradients_outside_of_the_ddp_are_not_reduced(
    rank: int, num_ranks: int, heap: symmoe.SymmetricHeap
) -> None:
    """After the DDP is freed, for the bare model and for a copy, backward leaves local gradients, for the loop to
    reduce."""
    model = small.model_of(heap)
    shares = small.equal_shares(num_ranks)
    small.rank_loss(model, 0, rank, shares).backward()
    expected = {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if "experts" in name
    }
    model.zero_grad()
    ddp = DistributedDataParallel(prepared(model))
    small.rank_loss(ddp, 0, rank, shares).backward()
    with pytest.raises(symmoe.errors.ArgumentError, match="inside a DistributedDataParallel"):
        symmoe.reduce_gradients(model)
    for again in (copy.deepcopy(model), model):
        if again is model:
            del ddp
        again.zero_grad()
        small.rank_loss(again, 0, rank, shares).backward()
        for name, gradient in expected.items():
            assert torch.equal(again.get_parameter(name).grad, gradient), name
        symmoe.reduce_gradients(again)


@run_on(2)
def test_clipping_by_symmoe_is_right_and_by_torch_is_refused(
    rank, num_ranks, heap: symmoe.SymmetricHeap
) -> None:
    """After symmoe's clipping ranks stay equal; after torch's they diverge, and an error reports it."""
    shares = small.equal_shares(num_ranks)
    plain = small.model_of(heap)
    wrapped = DistributedDataParallel(prepared(small.model_of(heap)))

    def reduce_and_clip() -> None:
        symmoe.reduce_gradients(plain)
        symmoe.training.clip_grad_norm(plain, 0.05)

    expected = losses_of(plain, rank, num_ranks, reduce_and_clip)
    actual = losses_of(
        wrapped, rank, num_ranks, lambda: symmoe.training.clip_grad_norm(wrapped, 0.05)
    )
    assert actual == pytest.approx(expected, rel=BOUND)
    wrapped = DistributedDataParallel(prepared(small.model_of(heap)))
    with pytest.raises(
        symmoe.errors.ArgumentError,
        match=r"dense parameters differ.*symmoe\.training\.clip_grad_norm",
    ):
        losses_of(
            wrapped, rank, num_ranks, lambda: nn.utils.clip_grad_norm_(wrapped.parameters(), 0.05)
        )
    small.rank_loss(plain, 0, rank, shares).backward()


# -- what cannot be made right ----------------------------------------------------------------------------------------
def layer_by_hand(model: nn.Module) -> nn.Module:
    fully_shard(model.blocks[0].moe)
    return model


def by_hand(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


WRONG = {
    "DDP": (DistributedDataParallel, "overwritten experts.*data_parallel.*prepare_for_ddp"),
    "DDP of compiled": (
        lambda model: DistributedDataParallel(compiled(model)),
        "overwritten experts",
    ),
    "accelerate": (accelerated, "overwritten experts"),
    "adapters in DDP": (
        lambda model: DistributedDataParallel(adapted(model)),
        "overwritten experts",
    ),
    "fully_shard": (fully_shard, "FSDP has taken experts.*parallelize.*fully_shard"),
    "fully_shard of blocks": (by_hand, "FSDP has taken experts.*parallelize.*fully_shard"),
    "fully_shard of a layer": (layer_by_hand, "FSDP has taken experts.*parallelize.*fully_shard"),
    "fully_shard of compiled": (
        lambda model: fully_shard(compiled(model)),
        "FSDP has taken experts",
    ),
    "FSDP1": (
        partial(FullyShardedDataParallel, device_id=torch.device("cpu")),
        "FSDP has taken experts.*parallelize",
    ),
    "FSDP1, original parameters": (
        partial(FullyShardedDataParallel, use_orig_params=True, device_id=torch.device("cpu")),
        "FSDP has taken experts.*parallelize",
    ),
}


@pytest.mark.parametrize(
    ("wrap", "text", "in_transformers"),
    [
        *((wrap, text, False) for wrap, (_, text) in WRONG.items()),
        ("DDP", "overwritten experts", True),
        ("fully_shard", "transformers.register", True),
    ],
)
@run_on(2)
def test_wrong_wrappers_are_refused_in_the_first_forward(
    rank: int,
    num_ranks: int,
    trainer_heap: symmoe.SymmetricHeap,
    wrap: str,
    text: str,
    in_transformers: bool,
) -> None:
    """Every forward pass raises the error, and the next correct call works."""
    if in_transformers:
        from hf_cases import batch_of, random_model

        model = swap_moe(random_model("qwen3_moe"), trainer_heap)
        batch = (batch_of(rank),)
        vars(model).pop("_ddp_params_and_buffers_to_ignore", None)
    else:
        model = small.model_of(trainer_heap)
        batch = (torch.randn(5, small.FEATURES),)
    wrapped = WRONG[wrap][0](model)
    for _ in range(2):
        with pytest.raises(symmoe.errors.ArgumentError, match=text):
            wrapped(*batch)
    small.model_of(trainer_heap)(torch.randn(5, small.FEATURES))[0].sum().backward()


@run_on(4)
def test_undeclared_replicas_are_refused(rank: int, num_ranks: int) -> None:
    with (
        small.on_layout(2, 2) as (mesh, heap),
        symmoe.SymmetricHeap.from_mesh(mesh["ep"], num_bytes=4 << 20) as second_heap,
    ):
        wrapped = DistributedDataParallel(prepared(small.model_of(second_heap)))
        with pytest.raises(
            symmoe.errors.ArgumentError,
            match=r"has the ranks \[0, 1, 2, 3\].*have 1 replica.*with expert_group.*data_parallel",
        ):
            wrapped(torch.randn(5, small.FEATURES))
        wrapped = DistributedDataParallel(prepared(small.model_of(heap)))
        wrapped(torch.randn(5, small.FEATURES))[0].sum().backward()


@run_on(2)
def test_gradients_outside_of_grad_are_refused_in_ddp(
    rank: int, num_ranks: int, heap: symmoe.SymmetricHeap
) -> None:
    for option in ("delay_wgrad", "accumulate_into_main_grad"):
        experts = symmoe.GroupedMLP(
            small.CONFIG.num_experts // 2, small.HIDDEN, small.CONFIG.ffn, **{option: True}
        )
        wrapped = DistributedDataParallel(symmoe.MoELayer(small.CONFIG, heap, experts=experts))
        with pytest.raises(
            symmoe.errors.ArgumentError, match=f"experts.{option} .True. must be False"
        ):
            wrapped(torch.randn(5, small.HIDDEN))
    with pytest.raises(symmoe.errors.ArgumentError, match=r"model \(Linear\) has no MoELayer"):
        symmoe.training.prepare_for_ddp(nn.Linear(2, 2))
