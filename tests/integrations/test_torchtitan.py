"""torchtitan's MoE with symmoe's dispatcher on two ranks, against its LocalTokenDispatcher with every expert."""

from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from cluster import run_on
from small_model import other_routing, weigh
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.skipif(
    find_spec("torchtitan") is None, reason="needs torchtitan, which only `make test-all` installs"
)

DIM, FFN, EXPERTS = 16, 24, 8


def routed_experts(dispatcher):
    """torchtitan's RoutedExperts with every expert, weights by a fixed seed."""
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts

    inner = GroupedExperts.Config(dim=DIM, hidden_dim=FFN, num_experts=EXPERTS)
    module = RoutedExperts(RoutedExperts.Config(inner_experts=inner, token_dispatcher=dispatcher))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    return module


def spread(module, rank: int) -> DeviceMesh:
    """Leaves a RoutedExperts the experts of one of two ranks, and gives its dispatcher their mesh, which it returns."""
    for name, parameter in list(module.inner_experts.named_parameters()):
        setattr(module.inner_experts, name, torch.nn.Parameter(parameter.detach().chunk(2)[rank].clone()))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    module.token_dispatcher.wire_meshes(ep_mesh=mesh)
    return mesh


def inputs(rank: int, num_tokens: int, top_k: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """x, scores and expert ids."""
    generator = torch.Generator().manual_seed(10 + rank)
    x = torch.randn(1, num_tokens, DIM, generator=generator).to(dtype).requires_grad_()
    scores, ids = torch.randn(1, num_tokens, EXPERTS, generator=generator).softmax(-1).topk(top_k)
    return x, scores.detach().requires_grad_(), ids


def run(module, x: torch.Tensor, scores: torch.Tensor, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    y = module(x, scores, ids, torch.bincount(ids.flatten(), minlength=EXPERTS))
    (y.float().square().sum() + y.float().sum()).backward()
    found = {"y": y.detach(), "x": x.grad, "scores": scores.grad}
    return found | {name: parameter.grad for name, parameter in module.inner_experts.named_parameters()}


def compare(rank: int, num_ranks: int, nums: tuple[int, int], top_k: int, dtype: torch.dtype) -> dict[str, float]:
    """Largest deviation of each result, relative to the largest value."""
    from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

    from symmoe.integrations.torchtitan import SymmoeTokenDispatcher

    local = routed_experts(LocalTokenDispatcher.Config(num_experts=EXPERTS, top_k=top_k))
    config = SymmoeTokenDispatcher.Config(
        num_experts=EXPERTS, top_k=top_k, hidden_dim=DIM, num_max_tokens_per_rank=max(nums), order="slot"
    )
    ours = routed_experts(config)
    mesh = spread(ours, rank)
    other = routed_experts(config).token_dispatcher  # a second layer
    other.wire_meshes(ep_mesh=mesh)
    assert other.heap is ours.token_dispatcher.heap
    assert isinstance(ours.token_dispatcher, SymmoeTokenDispatcher)

    expected = run(local, *inputs(rank, nums[rank], top_k, dtype))
    found = run(ours, *inputs(rank, nums[rank], top_k, dtype))
    ours.token_dispatcher.close()
    other.close()
    for name, parameter in local.inner_experts.named_parameters():
        dist.all_reduce(parameter.grad)  # an expert has seen the tokens of both ranks
        expected[name] = parameter.grad.chunk(2)[rank]
    return {
        name: ((found[name].float() - tensor.float()).abs().max() / tensor.float().abs().max()).item()
        for name, tensor in expected.items()
        if tensor.numel()
    }


@pytest.mark.parametrize("nums", [(40, 40), (33, 7), (25, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_two_ranks_give_what_one_with_every_expert_gives(ranks, nums: tuple[int, int], dtype: torch.dtype):
    for deviations in ranks(2).run(compare, nums, 2, dtype):
        # A sum of two has one order, and torchtitan multiplies in bf16: the same products of the same rows.
        for name in ("y", "x", "scores"):
            assert deviations.get(name, 0.0) == 0.0, name
        for name in ("w1_EFD", "w2_EDF", "w3_EFD"):  # sums over tokens, in bf16, in two parts or in one
            assert deviations[name] < 0.02, name


def test_sums_of_more_experts_differ_by_rounding(ranks):
    for deviations in ranks(2).run(compare, (40, 21), 5, torch.float32):
        assert deviations["y"] < 1e-6
        assert deviations["x"] < 1e-6
        assert deviations["scores"] < 1e-6


@run_on(2, fixture="ranks")
def test_torch_compile_leaves_the_trips_alone(rank: int, num_ranks: int) -> None:
    """A compiled RoutedExperts breaks its graph for them only; results equal those of the module without compiling."""
    from symmoe.integrations.torchtitan import SymmoeTokenDispatcher

    config = SymmoeTokenDispatcher.Config(num_experts=EXPERTS, top_k=2, hidden_dim=DIM, num_max_tokens_per_rank=64)
    module = routed_experts(config)
    spread(module, rank)
    num_tokens = (40, 21)[rank]
    arguments = inputs(rank, num_tokens, 2, torch.float32)
    expected = {name: tensor.clone() for name, tensor in run(module, *arguments).items()}
    module.zero_grad()
    arguments = inputs(rank, num_tokens, 2, torch.float32)
    found = run(torch.compile(module, backend="aot_eager"), *arguments)
    torch._dynamo.reset()
    x, scores, ids = arguments
    breaks = torch._dynamo.explain(module)(x, scores, ids, torch.bincount(ids.flatten(), minlength=EXPERTS))
    module.token_dispatcher.close()
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, rtol=1e-5, atol=1e-6), name
    assert all(tensor.abs().max() > 0 for tensor in expected.values() if tensor.numel())
    for each, name in zip(breaks.break_reasons, ("_dispatch", "_combine"), strict=True):
        assert f"SymmoeTokenDispatcher.{name}" in str(each.reason)
        assert "it was wrapped with `torch.compiler.disable`" in str(each.reason)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@run_on(2, fixture="ranks")
def test_routing_is_given_to_torchtitans_router(rank: int, num_ranks: int, score: str) -> None:
    """An MoE takes what was recorded, bit for bit; other experts (none for every fifth token), each micro-batch its
    own when activations are computed again, give what one with every expert and a router written here gives."""
    from torchtitan.models.common.linear import Linear
    from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter
    from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

    from symmoe import MetricsLogger, record_routing, replay_routing
    from symmoe.integrations.torchtitan import SymmoeTokenDispatcher

    numbers, is_sigmoid = {"num_experts": EXPERTS, "top_k": 2}, score == "sigmoid"
    groups = {"num_expert_groups": 4, "num_limited_groups": 2} if is_sigmoid else {}
    options = {"score_func": score, "route_norm": is_sigmoid, "route_scale": 1.5, **groups}
    gate = Linear.Config(in_features=DIM, out_features=EXPERTS)
    router = TokenChoiceTopKRouter.Config(**numbers, **options, gate=gate)

    def moe(dispatcher) -> MoE:
        inner = GroupedExperts.Config(dim=DIM, hidden_dim=FFN, num_experts=EXPERTS)
        experts = RoutedExperts.Config(inner_experts=inner, token_dispatcher=dispatcher)
        module = MoE(MoE.Config(num_experts=EXPERTS, routed_experts=experts, router=router)).train()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for tensor in (*module.parameters(), module.expert_bias_E):
                tensor.copy_(torch.randn(tensor.shape, generator=generator) / 4)
        return module

    ours = moe(SymmoeTokenDispatcher.Config(**numbers, hidden_dim=DIM, num_max_tokens_per_rank=64))
    spread(ours.routed_experts, rank)
    stock = moe(LocalTokenDispatcher.Config(**numbers))
    batches = [inputs(seed, 40 - 7 * rank, 2, torch.float32)[0] for seed in (rank, 5)]

    def results(module, *batches: torch.Tensor) -> list[torch.Tensor]:
        ys = [checkpoint(module, x, use_reentrant=False) for x in batches]
        gradients = torch.autograd.grad(sum(y.square().sum() for y in ys), [*batches, module.router.gate.weight])
        return [*ys, *gradients]

    want = results(ours, batches[0])
    with record_routing(ours) as routing, torch.no_grad():
        ours(batches[0])
    with replay_routing(ours, routing):
        assert all(map(torch.equal, results(ours, batches[0]), want))

    others, expected = [other_routing(routing, seed) for seed in (rank, 2 + rank)], []
    for x, other in zip(batches, others, strict=True):

        def by_hand(x_BLD: torch.Tensor, _bias: torch.Tensor, ids=other["routed_experts"][None]) -> tuple:
            logits = x_BLD @ stock.router.gate.weight.T
            return *weigh(logits, ids, score, scale=1.5, renormalize=is_sigmoid), logits

        stock.router.forward = by_hand
        expected.append(results(stock, x))
    logger = MetricsLogger(ours, times_forward=True)
    with replay_routing(ours, others):
        found = results(ours, *batches)
    (record,) = logger.step(0)
    assert (record.num_calls, sum(record.tokens_per_expert)) == (2, 2 * 2 * (32 + 26))  # without every fifth token
    ours.routed_experts.token_dispatcher.close()
    (y, dx, d_gate), (other_y, other_dx, other_d_gate) = expected
    torch.testing.assert_close(found, [y, other_y, dx, other_dx, d_gate + other_d_gate], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(y, want[0], atol=1e-2)


@run_on(2, fixture="ranks")
def test_without_expert_parallelism_it_is_the_local_dispatcher(rank: int, num_ranks: int) -> None:
    from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

    from symmoe.errors import ArgumentError
    from symmoe.integrations.torchtitan import SymmoeTokenDispatcher

    config = {"num_experts": EXPERTS, "top_k": 2}
    own = SymmoeTokenDispatcher.Config(**config, hidden_dim=DIM, num_max_tokens_per_rank=64)
    without_mesh = routed_experts(own)
    without_mesh.token_dispatcher.wire_meshes(ep_mesh=None)
    local = routed_experts(LocalTokenDispatcher.Config(**config))
    expected, found = (run(module, *inputs(rank, 12, 2, torch.float32)) for module in (local, without_mesh))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())

    own.num_experts = 7
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    with pytest.raises(ArgumentError, match=r"num_experts \(7\) .* 2 ranks"):
        own.build().wire_meshes(ep_mesh=mesh)
