"""EP x FSDP and EP x DDP layouts against one process with every expert and the whole batch."""

import dataclasses
import math
import warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import small_model as small
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_cases import raw
from cluster import run_on
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn
from torch.utils.flop_counter import FlopCounterMode
from worker import assert_refused

import symmoe
from symmoe.kernels import twin
from symmoe.precision import Float8Block
from symmoe.training.parallel import data_parallel, parallelize, parameter_groups, shard_experts

MAX_NORM = 0.5
# Sums in another order differ by fp32's rounding: in 50 steps by 2e-7 relative, measured.
CURVE_BOUND = 2e-6

# (replicas, ep): EP x FSDP is ep x replicas
LAYOUTS = {"EP2": (1, 2), "EP2 x FSDP2": (2, 2), "FSDP2": (2, 1)}
Curve = list[tuple[float, float]]


def train(
    model: nn.Module, rank: int, shares: tuple[int, ...], *, group=None
) -> tuple[Curve, dict[str, torch.Tensor]]:
    """(loss of the global batch, gradient norm before clipping) of every step; and the first gradients."""
    gradients = small.first_gradients(model, rank, shares)
    model.zero_grad()

    def clip() -> float:
        return symmoe.training.clip_grad_norm(model, MAX_NORM, group=group).item()

    return small.curve_of(model, rank, shares, clip, group=group), gradients


def reference(
    rank: int, num_ranks: int, config: symmoe.MoEConfig = small.CONFIG
) -> tuple[Curve, dict[str, torch.Tensor]]:
    """The curve and the first gradients of one process, as ordinary tensors."""
    alone = dist.new_group([rank], use_local_synchronization=True)
    with small.open_heap(None) as heap:
        return train(small.model_of(heap, config), 0, (small.TOKENS,), group=alone)


def sharded(
    rank,
    num_ranks,
    layout,
    wrap="fsdp",
    shares=None,
    config=small.CONFIG,
    ranks_per_node=None,
) -> tuple[Curve, dict[str, torch.Tensor]]:
    shares = shares or small.equal_shares(num_ranks)
    with small.on_layout(*layout, ranks_per_node=ranks_per_node) as (mesh, heap):
        assert (heap.nodes is not None) == (ranks_per_node is not None)
        return train(small.on_mesh(mesh, heap, wrap, config), rank, shares)


@pytest.fixture(scope="module")
def alone(cluster) -> tuple[Curve, dict[str, torch.Tensor]]:
    return cluster(2).run(reference)[0]


def assert_same_training(actual, expected, *, bound: float = CURVE_BOUND) -> None:
    curve, gradients = actual
    expected_curve, expected_gradients = expected
    small.assert_close(gradients, expected_gradients)
    for (loss, norm), (expected_loss, expected_norm) in zip(curve, expected_curve, strict=True):
        assert loss == pytest.approx(expected_loss, rel=bound)
        assert norm == pytest.approx(expected_norm, rel=bound)


def test_reference_learns_and_clips(alone):
    curve, gradients = alone
    assert curve[-1][0] < 0.9 * curve[0][0]
    assert sum(norm > MAX_NORM for _, norm in curve) >= 4
    assert all(gradient.abs().max() > 0 for gradient in gradients.values())


def slow(function: str, **fields):
    return pytest.param(function, fields, marks=pytest.mark.slow)


BALANCED = dataclasses.replace(
    small.CONFIG, balance="replicas", replicas_per_rank=1, replica_slack=0.0
)
CURVES = [  # (kind of case, arguments of `sharded`)
    ("FSDP", {"layout": LAYOUTS["FSDP2"]}),
    slow("FSDP", layout=LAYOUTS["EP2"]),
    slow("FSDP", layout=LAYOUTS["EP2 x FSDP2"]),
    slow("DDP", layout=(1, 2), wrap="ddp"),
    slow("DDP", layout=(2, 2), wrap="ddp"),
    ("few or no tokens", {"layout": (1, 2), "shares": (small.TOKENS, 0)}),
    slow("few or no tokens", layout=(1, 2), shares=(17, 31)),
    slow("few or no tokens", layout=(1, 2), wrap="ddp", shares=(small.TOKENS, 0)),
    ("few or no tokens", {"layout": (1, 2), "wrap": "ddp", "shares": (17, 31)}),
    *(slow("hybrid sharding of experts", layout=layout) for layout in ((2, 1, 2), (2, 2, 1))),
    *(
        ("replicas", {"layout": (1, 2), "wrap": wrap, "config": BALANCED})
        for wrap in ("fsdp", "ddp")
    ),
    # EP groups that span virtual nodes, and experts that are sharded or copied over other ranks.
    ("nodes", {"layout": (1, 2), "ranks_per_node": 1}),
    *(
        slow("nodes", layout=layout, wrap=wrap, ranks_per_node=ranks_per_node)
        for layout, ranks_per_node in (((1, 2), 1), ((2, 2), 1), ((1, 4), 2))
        for wrap in ("fsdp", "ddp")
    ),
]


@pytest.mark.parametrize(("function", "fields"), CURVES, ids=str)
def test_curves_are_those_of_one_process(cluster, alone, function: str, fields: dict):
    results = cluster(math.prod(fields["layout"])).run(sharded, **fields)
    for result in results:
        assert_same_training(result, alone)
    if function == "FSDP":
        assert len({tuple(curve) for curve, _ in results}) == 1  # the same bits on every rank


@pytest.mark.parametrize(
    ("num_ranks", "case"), [(2, "sums"), pytest.param(4, "dense mesh", marks=pytest.mark.slow)]
)
@run_on()
def test_dense_mesh_and_loss_divided_by_all_tokens(
    rank: int, num_ranks: int, alone, case: str
) -> None:
    """A dense mesh over pairs of ranks, where the first block is one more unit; or losses that are sums."""
    with small.on_layout(num_ranks // 2, 2) as (mesh, heap):
        model = small.model_of(heap)
        if case == "dense mesh":
            dense_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            parallelize(
                model,
                mesh,
                dense_mesh=dense_mesh,
                units=[model.blocks[0]],
                reshard_after_forward=False,
            )
            assert model.first.weight.to_local().shape[0] == small.HIDDEN // 2
            assert not isinstance(model.blocks[1], FSDPModule)
        else:
            parallelize(model, mesh, gradient_divide_factor=1.0)
        divisor = num_ranks if case == "sums" else 1
        (small.rank_loss(model, 0, rank, small.equal_shares(num_ranks)) / divisor).backward()
        gradients = small.whole_gradients(model)
    small.assert_close(gradients, alone[1])


# 3 experts on 2 replicas, and 1 expert for 2: the next dimension is cut.
@pytest.mark.parametrize("num_experts", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_more_shards_than_experts(cluster, num_experts: int):
    config = dataclasses.replace(small.CONFIG, num_experts=num_experts, top_k=1)
    expected = cluster(2).run(reference, config)[0]
    for result in cluster(2).run(sharded, LAYOUTS["FSDP2"], config=config):
        assert_same_training(result, expected)


@run_on(2)
def test_parameters_become_dtensors_on_the_expected_meshes(rank: int, num_ranks: int) -> None:
    with small.on_layout(2, 1) as (mesh, heap):
        model = small.on_mesh(mesh, heap, "fsdp")
        first = model.blocks[0].moe
        second = model.blocks[1].moe
        weight = first.experts.fc1.weight
        sizes = 2 * small.FFN, small.HIDDEN
        assert (weight.shape, weight.to_local().shape) == (
            (small.EXPERTS, *sizes),
            (small.EXPERTS // 2, *sizes),
        )
        assert weight.device_mesh.mesh_dim_names == ("efsdp", "ep")
        assert weight.placements[1] == Shard(0)
        assert not isinstance(weight.placements[0], Replicate)
        assert isinstance(first.router.weight, DTensor)
        assert isinstance(second.shared_expert, FSDPModule)
        assert isinstance(model.blocks[0], FSDPModule)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        dense, experts = (group["params"] for group in parameter_groups(model))
        assert len(experts) == 4
        assert len(dense) + 4 == len(list(model.parameters()))
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # FSDP warns of outputs whose hooks a write would lose
            y, _ = first(torch.randn(7, small.HIDDEN))
            y += 1
            y.square().sum().backward()
            for layer in (first, second):  # the second has a shared expert; as an operator, too
                layer(torch.randn(2, 4, small.HIDDEN))[0].square().sum().backward()
                with FlopCounterMode(display=False):
                    layer(torch.randn(2, 4, small.HIDDEN))[0].square().sum().backward()
        assert first.experts.fc1.weight.grad is not None
        odd = small.on_mesh(mesh, heap, "fsdp", dataclasses.replace(small.CONFIG, num_experts=3))
        odd_weight = odd.blocks[0].moe.experts.fc1.weight
        assert odd_weight.placements[0] == Shard(1)
        assert odd_weight.to_local().shape == (3, small.FFN, small.HIDDEN)


@pytest.mark.parametrize("wrap", ["fsdp", "ddp"])
@run_on(2)
def test_gradient_accumulation(rank: int, num_ranks: int, wrap: str) -> None:
    """Two micro-batches, reduced once, have the gradients of one batch of both; also with the sum over all tokens."""
    halves = (small.TOKENS // 4,) * 4
    with small.on_layout(1, 2) as (mesh, heap):
        whole_batch = small.on_mesh(mesh, heap, wrap)
        parts = small.on_mesh(mesh, heap, wrap)
        expected = small.first_gradients(whole_batch, rank, small.equal_shares(2))
        if wrap == "ddp":
            with parts.no_sync():
                (small.rank_loss(parts, 0, 2 * rank, halves) / 2).backward()
        else:
            parts.set_requires_gradient_sync(False)
            (small.rank_loss(parts, 0, 2 * rank, halves) / 2).backward()
            parts.set_requires_gradient_sync(True)
        (small.rank_loss(parts, 0, 2 * rank + 1, halves) / 2).backward()
        small.assert_close(small.whole_gradients(parts), expected)


@pytest.mark.parametrize("wrap", ["fsdp", pytest.param("ddp", marks=pytest.mark.slow)])
@run_on(2)
def test_every_kind_of_optimizer_accepts_the_groups(rank: int, num_ranks: int, wrap: str) -> None:
    """One step of every implementation of AdamW moves every parameter, and all implementations agree."""
    with small.on_layout(1, 2) as (mesh, heap):
        results = []
        for options in ({"foreach": False}, {"foreach": True}, {"fused": True}):
            model = small.on_mesh(mesh, heap, wrap)
            before = [small.full_tensor(parameter).clone() for parameter in model.parameters()]
            small.rank_loss(model, 0, rank, small.equal_shares(2)).backward()
            torch.optim.AdamW(parameter_groups(model), lr=1e-2, **options).step()
            after = [
                small.full_tensor(parameter).detach().clone() for parameter in model.parameters()
            ]
            assert not any(map(torch.equal, before, after))
            results.append(after)
        for actual in results[1:]:
            torch.testing.assert_close(actual, results[0])


@run_on(2)
def test_bf16_parameters_and_an_fp32_router(rank: int, num_ranks: int, alone) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with small.on_layout(2, 1) as (mesh, heap):
        model = parallelize(small.model_of(heap), mesh, mp_policy=policy)
        dtypes = {}
        experts = model.blocks[0].moe.experts
        model.blocks[0].moe.router.register_forward_pre_hook(
            lambda module, _: dtypes.update(router=module.weight.dtype)
        )
        original = type(experts.fc1).weight_parameters
        with patch.object(
            type(experts.fc1),
            "weight_parameters",
            lambda linear: dtypes.update(experts=linear.weight.dtype) or original(linear),
        ):
            loss = small.rank_loss(model, 0, rank, small.equal_shares(2))
            loss.backward()
        assert dtypes == {"router": torch.float32, "experts": torch.bfloat16}
        assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
        dist.all_reduce(loss := loss.detach().float())
        assert loss.item() / num_ranks == pytest.approx(alone[0][0][0], rel=0.02)


@pytest.mark.parametrize(
    ("extra", "wrap"), [("biases", "fsdp"), ("adapters", "ddp"), ("adapters", "fsdp")]
)
@run_on(2)
def test_biases_and_adapters(rank: int, num_ranks: int, extra: str, wrap: str) -> None:
    """Experts with biases, or with LoRA: outputs and gradients are those of this rank's layer without a wrapper."""
    with small.on_layout(1, 2) as (mesh, heap):
        torch.manual_seed(rank)
        experts = (
            symmoe.GroupedMLP(small.EXPERTS // 2, small.HIDDEN, small.FFN, bias=True)
            if extra == "biases"
            else None
        )
        layer = symmoe.MoELayer(small.CONFIG, heap, experts=experts)
        dist.broadcast(layer.router.weight.data, 0)
        for adapter in (
            symmoe.lora.add_lora(layer, rank=2, alpha=3.0) if extra == "adapters" else ()
        ):
            with torch.no_grad():
                adapter.normal_()
        x = torch.randn(9, small.HIDDEN)
        y, _ = layer(x)
        y.square().sum().backward()
        kind = "lora" if extra == "adapters" else "experts"
        expected = {
            name: parameter.grad / 2 for name, parameter in layer.named_parameters() if kind in name
        }
        assert len(expected) == 4
        layer.zero_grad()
        wrapped = {"fsdp": parallelize, "ddp": data_parallel}[wrap](nn.Sequential(layer), mesh)
        actual, _ = wrapped(x)  # a DDP that is freed before backward scales no gradients
        actual.square().sum().backward()
        torch.testing.assert_close(actual, y, rtol=0, atol=0)
        for name, gradient in expected.items():
            got = layer.get_parameter(name).grad
            got = got.to_local() if isinstance(got, DTensor) else got
            torch.testing.assert_close(
                got, gradient, rtol=1e-6 if extra == "adapters" else 0, atol=0
            )
        assert extra == "adapters" or layer.experts.fc2.bias.shape == (small.EXPERTS, small.HIDDEN)


@run_on(2)
def test_errors_name_both_values(rank: int, num_ranks: int) -> None:
    flat = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    flat_mesh = small.open_mesh(2, 1)
    with (
        small.on_layout(1, 2) as (mesh, heap),
        symmoe.SymmetricHeap.from_mesh(flat_mesh["ep"], num_bytes=4 << 20) as without_replicas,
    ):

        def layer_with(option: str) -> nn.Module:
            sizes = small.EXPERTS // 2, small.HIDDEN, small.FFN
            value = "discrete" if option == "weights" else True
            experts = symmoe.GroupedMLP(*sizes, **{option: value})
            return nn.Sequential(symmoe.MoELayer(small.CONFIG, heap, experts=experts))

        options = ("weights", "delay_wgrad", "accumulate_into_main_grad")
        wrong = [
            (nn.Linear(2, 2), mesh, "has no MoELayer"),
            (small.Model(heap), flat, r"dimensions \('ep',\).*one or two others"),
            (
                small.Model(without_replicas),
                mesh,
                rf"ranks \[\[{rank}\], \[{rank}\]\]; .* of the mesh have \[\[0, 1\], \[{rank}\]\]",
            ),
            (
                small.Model(without_replicas),
                flat_mesh,
                rf"ranks \[\[{rank}\], \[{rank}\]\]; .* of the mesh have \[\[{rank}\], \[0, 1\]\].*expert_mesh=",
            ),
            *((layer_with(option), mesh, option) for option in options),
        ]
        for wrap in (parallelize, data_parallel):
            assert_refused(*((partial(wrap, *arguments), text) for *arguments, text in wrong))
        half = MixedPrecisionPolicy(param_dtype=torch.float16)
        model = parallelize(small.Model(heap), mesh)
        assert_refused(
            (
                lambda: parallelize(small.Model(heap), mesh, dense_mesh=mesh["efsdp"]),
                "dense_mesh has 1 ranks; it must have the 2",
            ),
            (lambda: parallelize(small.Model(heap), mesh, mp_policy=half), "reduce_dtype"),
            (
                lambda: symmoe.SymmetricHeap.from_mesh(mesh, num_bytes=1),
                "has 2 dimensions; it must",
            ),
            (lambda: shard_experts(model, mesh, mesh["efsdp"]), "DTensors already"),
            (lambda: symmoe.reduce_gradients(model), "reduce_gradients would do it again"),
        )
        weight = model.last.weight
        weight.grad = DTensor.from_local(
            torch.ones(small.FEATURES, small.HIDDEN), weight.device_mesh, [Partial()]
        )
        with pytest.raises(
            symmoe.errors.ArgumentError, match=r"last\.weight\.grad is a partial sum"
        ):
            symmoe.training.clip_grad_norm(model, 1.0)


@pytest.mark.slow
@run_on(2)
def test_with_compile_and_checkpointing(rank: int, num_ranks: int) -> None:
    """FSDP with compiled and with recomputed blocks has the gradients of plain FSDP."""
    with small.on_layout(2, 1) as (mesh, heap):
        plain = small.on_mesh(mesh, heap, "fsdp")
        expected = small.first_gradients(plain, rank, small.equal_shares(2))
        saved = [torch.ops.symmoe.moe_forward.default]
        selective = partial(create_selective_checkpoint_contexts, saved)
        for contexts in (None, noop_context_fn, selective):
            model = small.on_mesh(mesh, heap, "fsdp")
            for block in model.blocks:
                if contexts is None:
                    block.compile(backend="aot_eager")
                else:
                    block.forward = partial(
                        checkpoint, block.forward, use_reentrant=False, context_fn=contexts
                    )
            actual = small.first_gradients(model, rank, small.equal_shares(2))
            small.assert_close(
                {key.replace("_orig_mod.", ""): gradient for key, gradient in actual.items()},
                expected,
            )


# -- cache_quantized_weights -------------------------------------------------------------------------------------------
QUANTIZED = dataclasses.replace(
    small.CONFIG, ffn=16, precision=Float8Block(), quantized_wire="both"
)


def counted(kernel: str):
    return patch.object(twin, kernel, wraps=getattr(twin, kernel))


@pytest.mark.parametrize("layout", [(2, 1), (1, 2)], ids=["FSDP2", "EP2"])
@pytest.mark.parametrize("wrap", ["fsdp", "ddp"])
@run_on(2)
def test_constant_weights_are_quantised_once(
    rank: int, num_ranks: int, layout: tuple[int, int], wrap: str
) -> None:
    """Micro-batches inside the context have the bits of those outside, and each weight is quantised once; an optimizer
    step inside is detected."""
    shares = small.equal_shares(num_ranks)
    with small.on_layout(*layout) as (mesh, heap):
        model = small.on_mesh(mesh, heap, wrap, QUANTIZED)
        results = []
        for is_constant in (False, True):
            context = (
                symmoe.grouped.cache_quantized_weights(model) if is_constant else nullcontext()
            )
            with (
                context,
                counted("quantize_weights") as single,
                counted("quantize_weight_pairs") as pairs,
            ):
                losses = []
                for number in range(2):
                    losses.append(small.rank_loss(model, number, rank, shares))
                    losses[-1].backward()
            results.append({"losses": torch.stack(losses).detach(), **small.whole_gradients(model)})
            assert single.call_count + pairs.call_count == 4 * (
                1 if is_constant else 2
            )  # two weights of two layers
            model.zero_grad()
        torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)

        optimizer = torch.optim.SGD(parameter_groups(model), lr=0.1)
        with symmoe.grouped.cache_quantized_weights(model):
            small.rank_loss(model, 0, rank, shares).backward()
            optimizer.step()
            with pytest.raises(
                symmoe.errors.ArgumentError, match="written to inside cache_quantized_weights"
            ):
                small.rank_loss(model, 0, rank, shares)
        before = small.rank_loss(model, 0, rank, shares)
        with symmoe.grouped.cache_quantized_weights(model):
            after = small.rank_loss(model, 0, rank, shares)
        assert torch.equal(before, after)


# -- torch.distributed.checkpoint: saved at one EP x FSDP layout, loaded at another ----------------------------------
BIASED = dataclasses.replace(
    small.CONFIG, router=dataclasses.replace(small.CONFIG.router, expert_bias=True)
)
State = dict[str, torch.Tensor]

# (replicas, ep) of who saves and who loads, what wraps the model that saves, and its number of experts
ROUTES = {
    "EP2 to FSDP2": ((1, 2), (2, 1), "fsdp", 4),
    "FSDP2 to EP2": ((2, 1), (1, 2), "fsdp", 4),
    "EP2 x FSDP2 to EP4": ((2, 2), (1, 4), "fsdp", 4),
    "EP4 to one process": ((1, 4), (1, 1), "fsdp", 4),
    "one process to EP2 x FSDP2": ((1, 1), (2, 2), "fsdp", 4),
    "more shards than experts, to EP2": ((2, 2), (1, 2), "fsdp", 2),
    "EP2 to more shards than experts": ((1, 2), (2, 2), "fsdp", 2),
    "DDP with EP2 to FSDP2": ((1, 2), (2, 1), "ddp", 4),
}


def build(
    mesh, heap: symmoe.SymmetricHeap, wrap: str, experts: int
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = small.on_mesh(mesh, heap, wrap, dataclasses.replace(BIASED, num_experts=experts))
    return model, torch.optim.AdamW(parameter_groups(model), lr=1e-2)


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, num_ranks: int
) -> None:
    small.rank_loss(model, 0, rank, small.equal_shares(num_ranks)).backward()
    optimizer.step()
    optimizer.zero_grad()


def full_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Every parameter, buffer and moment, unsharded. Collective."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state = {name: small.full_tensor(tensor).clone() for name, tensor in of_model.items()}
    for name, moments in of_optimizer["state"].items():
        state |= {
            f"{name}/{kind}": small.full_tensor(tensor).clone() for kind, tensor in moments.items()
        }
    return state


def save(
    rank: int, num_ranks: int, layout: tuple[int, int], wrap: str, experts: int, folder: str
) -> State:
    with small.on_layout(*layout) as (mesh, heap):
        model, optimizer = build(mesh, heap, wrap, experts)
        for _ in range(2):  # the state of a new optimizer has a step, too
            train_step(model, optimizer, rank, num_ranks)
        for number, moe in enumerate(
            module for module in model.modules() if isinstance(module, symmoe.MoELayer)
        ):
            moe.router.expert_bias.copy_(torch.arange(experts) * 0.01 + number)
        of_model, of_optimizer = get_state_dict(model, optimizer)
        dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder)
        return full_state(model, optimizer)


def load(
    rank: int, num_ranks: int, layout: tuple[int, int], experts: int, folder: str
) -> tuple[State, State, tuple]:
    """State before and after loading, and the local shape of the first expert weight."""
    with small.on_layout(*layout) as (mesh, heap):
        model, optimizer = build(mesh, heap, "fsdp", experts)
        for parameter in model.parameters():
            parameter.data.mul_(-1)
        # A new optimizer has no moments to load into until get_state_dict has made them.
        of_model, of_optimizer = get_state_dict(model, optimizer)
        before = full_state(model, optimizer)
        state = {"model": of_model, "optimizer": of_optimizer}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        after = full_state(model, optimizer)
        weight = model.blocks[0].moe.experts.fc1.weight
        assert weight.shape == (experts, 2 * small.FFN, small.HIDDEN)
        train_step(model, optimizer, rank, num_ranks)  # it goes on
        return before, after, tuple(weight.to_local().shape)


@pytest.mark.parametrize("route", ROUTES)
def test_every_value_survives_the_change_of_layout(cluster, tmp_path: Path, route: str):
    source, target, wrap, experts = ROUTES[route]
    saved = cluster(source[0] * source[1]).run(save, source, wrap, experts, str(tmp_path))[0]
    for before, after, shape in cluster(target[0] * target[1]).run(
        load, target, experts, str(tmp_path)
    ):
        assert after.keys() == saved.keys()
        assert {name for name in saved if "experts" in name} >= {
            f"blocks.0.moe.experts.fc{n}.weight{suffix}"
            for n in (1, 2)
            for suffix in ("", "/exp_avg", "/exp_avg_sq")
        }
        for name, tensor in saved.items():
            assert raw(after[name]) == raw(tensor), name
        changed = [name for name in saved if raw(before[name]) != raw(saved[name])]
        assert len(changed) > 0.9 * len(saved)  # loading had something to do
        assert math.prod(shape) == experts * 2 * small.FFN * small.HIDDEN // (target[0] * target[1])
