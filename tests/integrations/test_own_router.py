"""Layers without a router: a user's router passes the experts and their weights."""

import oracle
import pytest
import torch
import torch.distributed as dist
from cluster import run_on
from layers import layer_config, tokens_of
from small_model import on_layout, open_heap, set_weights
from torch import nn
from worker import assert_refused

import symmoe
from symmoe.training.parallel import data_parallel, parallelize

H, FFN, EXPERTS, TOP_K = 16, 8, 4, 2
SHAPE = {"hidden": H, "ffn": FFN, "num_experts": EXPERTS, "top_k": TOP_K}
NONE = symmoe.MoEConfig(**SHAPE, router=None)


class OwnRouterModel(nn.Module):
    """A router that scores by cosine, which no router of symmoe does, and a layer without a router."""

    def __init__(self, config: symmoe.MoEConfig, heap: symmoe.SymmetricHeap) -> None:
        super().__init__()
        self.keys = nn.Parameter(
            torch.randn(EXPERTS, H, generator=torch.Generator().manual_seed(5))
        )
        self.moe = symmoe.MoELayer(config, heap)

    def choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cosines = nn.functional.normalize(x, dim=-1) @ nn.functional.normalize(self.keys, dim=-1).T
        probs, topk_idx = cosines.exp().topk(TOP_K)
        return topk_idx, probs

    def forward(
        self, x: torch.Tensor, token_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, object]:
        topk_idx, probs = self.choose(x)
        return self.moe(x, token_mask, topk_idx=topk_idx, probs=probs)


def own_model(heap: symmoe.SymmetricHeap, config: symmoe.MoEConfig = NONE) -> OwnRouterModel:
    model = OwnRouterModel(config, heap)
    set_weights(model, heap)
    return model


def in_one_process(rank: int, num_ranks: int) -> dict[str, torch.Tensor]:
    """The expected results of a rank, and its part of the gradients of all ranks' sum of squares, by the oracle in
    float64."""
    with open_heap(None) as heap:
        model = own_model(heap).double()
    inputs = [tokens_of(r, 7 + 2 * r, H).double().requires_grad_() for r in range(num_ranks)]
    weights = model.moe.experts.fc1.weight, model.moe.experts.fc2.weight
    ys = [oracle.experts(x, *model.choose(x), *weights) for x in inputs]
    torch.cat(ys).square().sum().backward()
    fc1, fc2 = (weight.grad.chunk(num_ranks)[rank] for weight in weights)
    return {"y": ys[rank], "dx": inputs[rank].grad, "keys": model.keys.grad, "fc1": fc1, "fc2": fc2}


@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"]
)
@run_on(2)
def test_results_and_gradients_are_those_of_one_process(
    rank, num_ranks, heap: symmoe.SymmetricHeap, compiled: bool
) -> None:
    model = own_model(heap)
    assert model.moe.router is None
    assert set(dict(model.named_parameters())) == {
        "keys",
        "moe.experts.fc1.weight",
        "moe.experts.fc2.weight",
    }
    x = tokens_of(rank, 7 + 2 * rank, H).requires_grad_()
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    y, metrics = run(x)
    y.square().sum().backward()
    dist.all_reduce(model.keys.grad)
    actual = {
        "y": y,
        "dx": x.grad,
        "keys": model.keys.grad,
        **{name: model.moe.get_parameter(f"experts.{name}.weight").grad for name in ("fc1", "fc2")},
    }
    actual = {name: tensor.double() for name, tensor in actual.items()}
    torch.testing.assert_close(actual, in_one_process(rank, num_ranks), rtol=1e-4, atol=1e-5)
    loads = torch.cat(
        [model.choose(tokens_of(r, 7 + 2 * r, H))[0].flatten() for r in range(num_ranks)]
    ).bincount(minlength=EXPERTS)
    assert (metrics.expert_load.tolist(), metrics.aux_loss) == (loads.tolist(), 0)


OPTIONS = [{}, {"capacity_factor": 0.8}, {"order": "slot", "stash": "none"}, {"capacity": 64}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["all tokens", "padding"])
def test_the_routers_choice_as_arguments_gives_the_same_results(
    heap: symmoe.SymmetricHeap, options: dict, masked: bool
):
    layer = symmoe.MoELayer(layer_config(**SHAPE, **options), heap)
    bare = symmoe.MoELayer(
        symmoe.MoEConfig(**SHAPE, **options, router=None), heap, experts=layer.experts
    )
    x = tokens_of(3, 13, H)
    token_mask = torch.arange(13) % 3 > 0 if masked else None
    want, metrics = layer(x, token_mask)
    want.square().sum().backward()
    gradient = layer.router.weight.grad.clone()
    layer.zero_grad()
    plain = symmoe.Router(layer_config(**SHAPE))
    plain.load_state_dict(layer.router.state_dict())
    for given_to in (layer, bare):
        plain.zero_grad()
        routed = plain(x)
        y, own_metrics = given_to(x, token_mask, topk_idx=routed.topk_idx, probs=routed.probs)
        y.square().sum().backward()
        assert torch.equal(y, want)
        torch.testing.assert_close(plain.weight.grad, gradient, rtol=1e-5, atol=1e-7)
        assert layer.router.weight.grad is None
        for name in ("expert_load", "num_dropped", "topk_idx", "num_over_capacity"):
            actual = getattr(own_metrics, name)
            expected = getattr(metrics, name)
            assert actual is expected is None or torch.equal(actual, expected), name


def test_losses_and_counts_are_the_routers(heap: symmoe.SymmetricHeap):
    config = symmoe.MoEConfig(
        **SHAPE, router=symmoe.RouterConfig(aux_loss_coef=0.1, z_loss_coef=0.1, expert_bias=True)
    )
    layer = symmoe.MoELayer(config, heap)
    x = tokens_of(0, 7, H)
    topk_idx = torch.tensor([[0, 1]] * len(x))
    probs = torch.rand(len(x), TOP_K).bfloat16().requires_grad_()
    with symmoe.routing.record_routing(layer) as routing:
        y, metrics = layer(x, topk_idx=topk_idx, probs=probs)
        y.sum().backward()
    assert (metrics.aux_loss, metrics.expert_load.tolist()) == (0, [len(x), len(x), 0, 0])
    assert torch.equal(routing[""], topk_idx.int())
    assert not layer.router.step_load.any()
    assert probs.grad.dtype == torch.bfloat16
    assert probs.grad.any()
    y, metrics = layer(x)
    y.sum().backward()
    assert metrics.aux_loss > 0
    assert layer.router.step_load.sum() == len(x) * TOP_K


def test_the_weight_of_a_slot_without_an_expert_has_no_effect(heap: symmoe.SymmetricHeap):
    """Any weight beside an id of -1 changes nothing."""
    layer = symmoe.MoELayer(NONE, heap)
    x = tokens_of(0, 7, H)
    topk_idx = torch.tensor([[0, -1]] * len(x))
    probs = torch.tensor([[0.5, float("nan")]] * len(x)).requires_grad_()
    y, _ = layer(x, topk_idx=topk_idx, probs=probs)
    y.sum().backward()
    assert y.isfinite().all()
    assert probs.grad[:, 0].all()
    assert not probs.grad[:, 1].any()


WRONG = {
    "no probs": (lambda ids, probs: (ids, None), "probs (None) must be given"),
    "no ids": (lambda ids, probs: (None, probs), "topk_idx (None) must be given with probs"),
    "neither": (lambda ids, probs: (None, None), "probs (None) must be given"),
    "one prob": (lambda ids, probs: (ids, probs[:, :1]), "probs has shape [7, 1]"),
    "too many": (lambda ids, probs: (ids, torch.cat([probs, probs])), "probs has shape [14, 2]"),
    "integers": (lambda ids, probs: (ids, probs.int()), "probs has dtype torch.int32"),
    "a list": (lambda ids, probs: (ids, probs.tolist()), "probs (list) must be a tensor"),
    "meta": (lambda ids, probs: (ids, probs.to("meta")), "on meta"),
    "ids": (lambda ids, probs: (ids[:3], probs), "topk_idx has shape [3, 2]"),
    "not finite": (
        lambda ids, probs: (ids, probs / 0),
        "probs of token 0 are not finite (7 such tokens)",
    ),
}


@run_on(2)
def test_wrong_arguments_raise_on_every_rank(
    rank: int, num_ranks: int, heap: symmoe.SymmetricHeap
) -> None:
    layer = symmoe.MoELayer(NONE, heap)
    x = tokens_of(0, 7, H)
    good = torch.tensor([[0, 3]] * len(x)), torch.ones(len(x), TOP_K)
    for culprit in range(num_ranks):
        for name, (spoil, text) in WRONG.items():
            topk_idx, probs = spoil(*good) if rank == culprit else good
            with pytest.raises(symmoe.errors.ArgumentError) as caught:
                layer(x, topk_idx=topk_idx, probs=probs)
            assert text in str(caught.value), name
            assert (f"on rank {culprit}: " in str(caught.value)) == (rank != culprit), name
            layer(x, topk_idx=good[0], probs=good[1])[0].sum().backward()


@run_on(2)
def test_models_without_a_router_on_a_mesh(rank: int, num_ranks: int) -> None:
    with on_layout(1, 2) as (mesh, heap):
        x = tokens_of(rank, 7 + 2 * rank, H)
        want, _ = own_model(heap)(x)
        for wrap in (parallelize, data_parallel):
            y, _ = wrap(own_model(heap), mesh)(x)
            y.sum().backward()
            torch.testing.assert_close(y, want)


def test_replay_refuses_layers_without_a_router(heap: symmoe.SymmetricHeap):
    bare = symmoe.MoELayer(NONE, heap)
    layer = symmoe.MoELayer(layer_config(**SHAPE), heap)
    x = tokens_of(0, 7, H)
    with (
        pytest.raises(symmoe.errors.ArgumentError, match="has no router"),
        symmoe.routing.balanced_routing(bare),
    ):
        pass
    with (
        pytest.raises(symmoe.errors.ArgumentError, match="is called with probs"),
        symmoe.routing.balanced_routing(layer),
    ):
        layer(x, topk_idx=torch.zeros(len(x), TOP_K).int(), probs=torch.ones(len(x), TOP_K))


def test_a_router_of_another_kind_is_refused():
    assert_refused(
        (lambda: symmoe.MoEConfig(**SHAPE, router="linear"), r"router \(str\) must be a RouterC"),
        (lambda: symmoe.Router(NONE), r"config.router \(None\) must be a RouterConfig"),
    )
