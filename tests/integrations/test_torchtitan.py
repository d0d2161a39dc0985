"""torchtitan's MoE with symmoe's dispatcher on two ranks, against its LocalTokenDispatcher with every expert."""

from functools import partial
from importlib.util import find_spec
from unittest.mock import patch

import oracle
import pytest
import torch
import torch.distributed as dist
from cluster import run_on
from small_model import other_routing, weigh
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from symmoe import kernels
from symmoe.errors import ArgumentError

pytestmark = pytest.mark.skipif(
    find_spec("torchtitan") is None, reason="needs torchtitan, which only `make test-all` installs"
)

DIM, FFN, EXPERTS = 16, 24, 8


def local_dispatcher(top_k: int = 2):
    """torchtitan's configuration for one rank with every expert."""
    from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

    return LocalTokenDispatcher.Config(num_experts=EXPERTS, top_k=top_k)


def symmoe_dispatcher(top_k: int = 2, num_tokens: int = 64, **fields: str):
    """symmoe's configuration, as its override creates it."""
    from symmoe.integrations.torchtitan import token_dispatcher

    sizes = {"hidden_dim": DIM, "num_max_tokens_per_rank": num_tokens}
    return token_dispatcher(local_dispatcher(top_k), **sizes, **fields)


def config_of(dispatcher):
    """The configuration of torchtitan's RoutedExperts with this dispatcher."""
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts

    inner = GroupedExperts.Config(dim=DIM, hidden_dim=FFN, num_experts=EXPERTS)
    return RoutedExperts.Config(inner_experts=inner, token_dispatcher=dispatcher)


def routed_experts(dispatcher):
    """torchtitan's RoutedExperts with every expert, weights by a fixed seed."""
    module = config_of(dispatcher).build()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    return module


def spread(module, rank: int) -> DeviceMesh:
    """Reduces a RoutedExperts to the experts of one of two ranks, and sets its dispatcher's mesh. Returns the mesh."""
    for parent in module.inner_experts.modules():
        for name, parameter in list(parent.named_parameters(recurse=False)):
            setattr(parent, name, torch.nn.Parameter(parameter.detach().chunk(2)[rank].clone()))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    module.token_dispatcher.wire_meshes(ep_mesh=mesh)
    return mesh


def inputs(rank: int, num_tokens: int, top_k: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """x, scores and expert ids."""
    generator = torch.Generator().manual_seed(10 + rank)
    x = torch.randn(1, num_tokens, DIM, generator=generator).to(dtype).requires_grad_()
    scores, ids = torch.randn(1, num_tokens, EXPERTS, generator=generator).softmax(-1).topk(top_k)
    return x, scores.detach().requires_grad_(), ids


def run(
    module, x: torch.Tensor, scores: torch.Tensor, ids: torch.Tensor
) -> dict[str, torch.Tensor]:
    y = module(x, scores, ids, torch.bincount(ids.flatten(), minlength=EXPERTS))
    (y.float().square().sum() + y.float().sum()).backward()
    tensors = {"y": y.detach(), "x": x.grad, "scores": scores.grad}
    return tensors | {
        name: parameter.grad for name, parameter in module.inner_experts.named_parameters()
    }


@pytest.mark.parametrize(
    ("nums", "top_k"), [((40, 40), 2), ((33, 7), 2), ((25, 0), 2), ((40, 21), 5)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@run_on(2, fixture="ranks")
def test_two_ranks_equal_one_with_every_expert(
    rank: int, num_ranks: int, nums: tuple[int, int], top_k: int, dtype: torch.dtype
) -> None:
    config = symmoe_dispatcher(top_k, max(nums), order="slot")
    local = routed_experts(local_dispatcher(top_k))
    layer = routed_experts(config)
    mesh = spread(layer, rank)
    second_dispatcher = routed_experts(config).token_dispatcher  # a second layer
    second_dispatcher.wire_meshes(ep_mesh=mesh)
    assert second_dispatcher.heap is layer.token_dispatcher.heap

    expected = run(local, *inputs(rank, nums[rank], top_k, dtype))
    actual = run(layer, *inputs(rank, nums[rank], top_k, dtype))
    # Rows are copied from the heap, and gradients; between nodes and with this order also to it.
    assert layer.token_dispatcher.heap.statistics.num_staging_copies == 4
    layer.token_dispatcher.close()
    second_dispatcher.close()
    # A sum of two has one order, and torchtitan multiplies in bf16: the same products of the same rows.
    bounds = dict.fromkeys(
        ("y", "x", "scores"),
        0.0 if top_k == 2 else {torch.float32: 1e-6, torch.bfloat16: 0.02}[dtype],
    )
    for name, parameter in local.inner_experts.named_parameters():
        dist.all_reduce(parameter.grad)  # an expert has seen the tokens of both ranks
        expected[name], bounds[name] = (
            parameter.grad.chunk(2)[rank],
            0.02,
        )  # sums in bf16, in two parts or in one
    for name, tensor in expected.items():
        if tensor.numel():
            want = tensor.float()
            assert (actual[name].float() - want).abs().max() / want.abs().max() <= bounds[name], (
                name
            )


@run_on(2, fixture="ranks")
def test_torch_compile_does_not_trace_the_trips(rank: int, num_ranks: int) -> None:
    """The results equal those of the module without torch.compile."""
    module = routed_experts(symmoe_dispatcher())
    spread(module, rank)
    num_tokens = (40, 21)[rank]
    arguments = inputs(rank, num_tokens, 2, torch.float32)
    expected = {name: tensor.clone() for name, tensor in run(module, *arguments).items()}
    module.zero_grad()
    arguments = inputs(rank, num_tokens, 2, torch.float32)
    actual = run(torch.compile(module, backend="aot_eager"), *arguments)
    torch._dynamo.reset()
    x, scores, ids = arguments
    breaks = torch._dynamo.explain(module)(
        x, scores, ids, torch.bincount(ids.flatten(), minlength=EXPERTS)
    )
    module.token_dispatcher.close()
    for name, tensor in expected.items():
        assert torch.allclose(actual[name], tensor, rtol=1e-5, atol=1e-6), name
    assert all(tensor.abs().max() > 0 for tensor in expected.values() if tensor.numel())
    for reason, name in zip(breaks.break_reasons, ("_dispatch", "_combine"), strict=True):
        assert f"SymmoeTokenDispatcher.{name}" in str(reason.reason)
        assert "it was wrapped with `torch.compiler.disable`" in str(reason.reason)


@pytest.mark.parametrize(
    ("score", "is_step"), [("softmax", False), ("sigmoid", False), ("sigmoid", True)]
)
@run_on(2, fixture="ranks")
def test_torchtitans_router_replays_routing(
    rank: int, num_ranks: int, score: str, is_step: bool
) -> None:
    """A replay of recorded routing has the same bits. Other experts (none for every fifth token), with a choice for
    each micro-batch when activations are recomputed, give the results of one rank with every expert and the router of
    by_hand."""
    from torchtitan.models.common.linear import Linear
    from torchtitan.models.common.moe import MoE, TokenChoiceTopKRouter

    from symmoe.integrations import torchtitan_experts
    from symmoe.metrics import MetricsLogger
    from symmoe.routing import record_routing, replay_routing

    is_sigmoid = score == "sigmoid"
    groups = {"num_expert_groups": 4, "num_limited_groups": 2} if is_sigmoid else {}
    options = {"score_func": score, "route_norm": is_sigmoid, "route_scale": 1.5, **groups}
    gate = Linear.Config(in_features=DIM, out_features=EXPERTS)
    router = TokenChoiceTopKRouter.Config(num_experts=EXPERTS, top_k=2, **options, gate=gate)
    local = config_of(local_dispatcher())
    step = torchtitan_experts.routed_experts(local, num_max_tokens_per_rank=64)
    sharded = step if is_step else config_of(symmoe_dispatcher())
    configs = [
        MoE.Config(num_experts=EXPERTS, routed_experts=experts, router=router)
        for experts in (local, sharded)
    ]
    stock, model = (MoE(config).train() for config in configs)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in (*stock.parameters(), stock.expert_bias_E):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) / 4)
    model.load_state_dict(stock.state_dict())
    spread(model.routed_experts, rank)
    if is_step:  # in fp32, which torchtitan's experts do not compute in
        weights = list(stock.routed_experts.parameters())
        stock.routed_experts.forward = lambda x, scores, ids, _num_tokens: formula(
            weights, x, scores, ids
        )
    batches = [inputs(seed, 40 - 7 * rank, 2, torch.float32)[0] for seed in (rank, 5)]

    def results(module, *batches: torch.Tensor) -> list[torch.Tensor]:
        ys = [checkpoint(module, x, use_reentrant=False) for x in batches]
        gradients = torch.autograd.grad(
            sum(y.square().sum() for y in ys), [*batches, module.router.gate.weight]
        )
        return [*ys, *gradients]

    want = results(model, batches[0])
    with record_routing(model) as routing, torch.no_grad():
        model(batches[0])
    with replay_routing(model, routing):
        assert all(map(torch.equal, results(model, batches[0]), want))

    routings, expected = [other_routing(routing, seed) for seed in (rank, 2 + rank)], []
    for x, different in zip(batches, routings, strict=True):

        def by_hand(
            x_BLD: torch.Tensor, _bias: torch.Tensor, ids=different["routed_experts"][None]
        ) -> tuple:
            logits = x_BLD @ stock.router.gate.weight.T
            return *weigh(logits, ids, score, scale=1.5, renormalize=is_sigmoid), logits

        stock.router.forward = by_hand
        expected.append(results(stock, x))
    logger = MetricsLogger(model, times_forward=True)
    with replay_routing(model, routings):
        actual = results(model, *batches)
    (record,) = logger.step(0)
    assert (record.num_calls, sum(record.tokens_per_expert)) == (
        2,
        2 * 2 * (32 + 26),
    )  # without every fifth token
    model.routed_experts.token_dispatcher.close()
    (y, dx, d_gate), (other_y, other_dx, other_d_gate) = expected
    torch.testing.assert_close(
        actual, [y, other_y, dx, other_dx, d_gate + other_d_gate], rtol=1e-5, atol=1e-5
    )
    assert not torch.allclose(y, want[0], atol=1e-2)


@run_on(2, fixture="ranks")
def test_without_expert_parallelism_dispatch_is_local(rank: int, num_ranks: int) -> None:
    dispatcher = symmoe_dispatcher()
    local = routed_experts(local_dispatcher())
    without_mesh = routed_experts(dispatcher)
    without_mesh.token_dispatcher.wire_meshes(ep_mesh=None)
    expected, actual = (
        run(module, *inputs(rank, 12, 2, torch.float32)) for module in (local, without_mesh)
    )
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())

    dispatcher.num_experts = 7
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    with pytest.raises(ArgumentError, match=r"num_experts \(7\) .* 2 ranks"):
        dispatcher.build().wire_meshes(ep_mesh=mesh)


# -- the step ---------------------------------------------------------------------------------------------------------


def formula(
    weights: list[torch.Tensor], x: torch.Tensor, scores: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """The output of torchtitan's routed experts, by the oracle."""
    w1, w2, w3 = weights
    return oracle.experts(x[0], ids[0], scores[0], torch.cat([w1, w3], dim=1), w2)[None]


@pytest.mark.parametrize(("nums", "num_kept_layers"), [((33, 7), 0), ((25, 0), 2), ((33, 7), 2)])
@run_on(2, fixture="ranks")
def test_the_step_equals_the_formula_without_copies(
    rank: int, num_ranks: int, nums: tuple[int, int], num_kept_layers: int
) -> None:
    """Outputs, all gradients, and weights in torchtitan's names. GEMMs read rows where they arrive and weights in the
    parameters' memory, and write into combine's input. The heap suffices for the most uneven routing."""
    from symmoe.integrations import torchtitan, torchtitan_experts

    local = local_dispatcher(3)
    sizes = {"num_max_tokens_per_rank": max(nums), "num_kept_layers": num_kept_layers}
    config = torchtitan_experts.routed_experts(config_of(local), **sizes)
    state = {
        name: weight.requires_grad_()
        for name, weight in routed_experts(local).inner_experts.state_dict().items()
    }
    config.inner_experts.param_init = {
        name: partial(torch.Tensor.copy_, other=state[name].detach()) for name in state
    }
    layers = torch.nn.ModuleList([config.build(), config.build()])
    layers[0].init_states()
    layers[1].inner_experts.load_state_dict(state)
    for layer in layers:
        assert all(
            torch.equal(weight, state[name])
            for name, weight in layer.inner_experts.state_dict().items()
        )
        with patch.object(torchtitan, "_SPARE_BYTES", 8000):
            spread(layer, rank)
    heap, actual = layers[0].token_dispatcher.heap, []

    def look(name: str, kernel, /, *args, **options):
        if (
            name.startswith("grouped_gemm") and name != "grouped_gemm_wgrad"
        ):  # what is read on the heap, or written
            actual.append(
                (heap.owns(args[0][0] if name.endswith("act") else args[3]), args[1].data_ptr())
            )
        return kernel(*args, **options)

    x, scores, chosen = inputs(rank, nums[rank], 3, torch.float32)
    for ids in (chosen, chosen % 3):  # the latter all on rank 0
        x.grad = scores.grad = None
        with kernels.hooked(heap.device, look):
            y = layers[1](layers[0](x, scores, ids, None), scores, ids, None)
            y.square().sum().backward()
        got = y, x.grad, scores.grad
        x.grad = scores.grad = None
        want = formula(
            list(state.values()), formula(list(state.values()), x, scores, ids), scores, ids
        )
        want.square().sum().backward()
        torch.testing.assert_close(got, (want, x.grad, scores.grad), rtol=1e-4, atol=1e-4)
    fc1, fc2 = (
        sum(layer.inner_experts.get_submodule(name).weight.grad for layer in layers)
        for name in ("fc1", "fc2")
    )
    w1, w3 = fc1.chunk(2, dim=1)
    for name, gradient in {"w1_EFD": w1, "w2_EDF": fc2, "w3_EFD": w3}.items():
        dist.all_reduce(state[name].grad)
        expected = state[name].grad.chunk(2)[rank]
        assert (gradient - expected).abs().max() < 1e-5 * expected.abs().max(), name
    weights = [parameter.data_ptr() for parameter in layers.parameters()]
    assert len(actual) == 2 * 2 * 4  # FC1, FC2 and their gradients
    assert all(is_on_heap and weight in weights for is_on_heap, weight in actual)
    assert heap.statistics.num_staging_copies == 0
    layers[0].token_dispatcher.close()
