"""torch.compile of a block around the layer: no graph breaks, the results of the eager block, and no tensor or lease
stays behind."""

import copy
import dataclasses
import gc
import io
import pickle
from collections.abc import Callable
from functools import partial
from unittest import mock

import pytest
import torch
from cluster import run_on
from layers import layer_config
from small_model import Block, assert_same, counted_barriers, step
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._pytree import tree_flatten, tree_unflatten, treespec_dumps, treespec_loads
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from worker import Watching, assert_refused

import symmoe
from symmoe.kernels.routing_rule import RoutingRule
from symmoe.moe import ep_step, routed_experts, router
from symmoe.precision import Float8Block

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script_method.*:DeprecationWarning"
)  # inductor's own

HIDDEN, FFN, EXPERTS = 16, 8, 4
STATIC = {"capacity": 256, "max_tokens": 64}
CONFIGS = {
    "static": STATIC | {"order": "slot"},
    "static, drop": {"capacity": 48, "max_tokens": 64, "overflow": "drop"},
    "exact": {},
    "stash none": STATIC | {"stash": "none"},
    "overlapped": STATIC | {"layout": "expert-major", "schedule": "overlapped"},
    "sqrtsoftplus": STATIC | {"score": "sqrtsoftplus"},
    "groups": STATIC
    | {
        "score": "sigmoid",
        "num_expert_groups": 2,
        "topk_groups": 1,
        "expert_bias": True,
        "route_scale": 2.5,
    },
}


def config(**fields) -> symmoe.MoEConfig:
    sizes = {"hidden": HIDDEN, "ffn": FFN, "num_experts": EXPERTS, "top_k": 2}
    return layer_config(**sizes, aux_loss_coef=0.01, z_loss_coef=0.01, **fields)


def block(
    heap: symmoe.SymmetricHeap, *, shared: bool = False, bias: bool = False, **fields
) -> Block:
    torch.manual_seed(0)
    result = Block(config(**fields), heap, shared=shared)
    if bias:
        result.moe.experts = symmoe.GroupedMLP(EXPERTS // heap.num_ranks, HIDDEN, FFN, bias=True)
        result.moe = symmoe.MoELayer(result.moe.config, heap, experts=result.moe.experts)
    return result


def tokens(rank: int = 0, num: int = 34) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(2, num // 2, HIDDEN, generator=generator, requires_grad=True)


@pytest.mark.parametrize("fields", CONFIGS.values(), ids=CONFIGS)
def test_compiled_block_gives_the_eager_results(heap, fields):
    extras = {"shared": True, "bias": True} if fields is CONFIGS["static"] else {}
    module = block(heap, **extras, **fields)
    is_frozen = fields is CONFIGS["exact"]
    module.moe.experts.requires_grad_(not is_frozen)
    expected = step(module, tokens())
    assert all(
        is_frozen and ".experts." in name if tensor is None else tensor.abs().max() > 0
        for name, tensor in expected.items()
    )
    assert_same(
        step(torch.compile(module, fullgraph=True, backend="aot_eager"), tokens()), expected
    )


@pytest.mark.slow
def test_inductor_gives_the_eager_results(heap, inductor):
    module = nn.Sequential(
        block(heap, **STATIC)
    )  # the block's output is a tuple: only one may stand in a Sequential
    expected = step(module, tokens())
    compiled = torch.compile(module, fullgraph=True, backend=inductor)
    for _ in range(2):
        assert_same(step(compiled, tokens()), expected)


@pytest.mark.parametrize(
    "fields",
    [{"balance": "replicas", "replicas_per_rank": 1, "replica_slack": 0.0}, {}],
    ids=str,
)
@run_on(2)
def test_compiled_block_on_two_ranks_gives_the_eager_results(
    rank: int, num_ranks: int, heap: symmoe.SymmetricHeap, fields: dict[str, str | float]
) -> None:
    module = block(heap, shared=True, **STATIC, **fields)
    # Other numbers of tokens on each rank, then none on one; each compiles for its own.
    for num in (34 - 8 * rank, 0 if rank else 30):
        expected = step(module, tokens(rank, num))
        actual = step(torch.compile(module, fullgraph=True, backend="aot_eager"), tokens(rank, num))
        assert_same(actual, expected)
    gc.collect()
    assert heap.leased_bytes == 0


def test_equal_layers_share_one_graph(heap):
    counter = CompileCounterWithBackend("eager")
    x = tokens()
    blocks = [block(heap, **STATIC) for _ in range(3)]
    blocks[1].moe.router.weight.data.neg_()
    for module in blocks:
        expected = step(module, x)
        assert_same(step(torch.compile(module, fullgraph=True, backend=counter), x), expected)
    assert counter.frame_count == 1
    different = block(heap, **STATIC, renormalize=False)
    assert different.moe._routed_experts is not blocks[0].moe._routed_experts
    assert_same(
        step(torch.compile(different, fullgraph=True, backend=counter), x), step(different, x)
    )
    assert counter.frame_count == 2


def test_compiled_block_leaves_no_lease_and_no_tensor(heap):
    module = block(heap, **STATIC)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x = tokens()
    outputs = compiled(x)
    assert heap.leased_bytes > 0  # the received rows, until backward
    del outputs  # no backward
    assert heap.leased_bytes == 0
    with torch.no_grad():
        outputs = compiled(x)
    assert heap.leased_bytes == 0
    step(compiled, x)
    assert heap.leased_bytes == 0
    number = module.moe._routed_experts.number
    assert number in routed_experts.BY_NUMBER
    del module, compiled, outputs
    torch._dynamo.reset()
    gc.collect()
    assert number not in routed_experts.BY_NUMBER


def test_backward_twice_through_a_retained_graph(heap):
    layer = symmoe.MoELayer(config(**STATIC), heap)
    x = tokens()
    y, _ = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    loss = y.square().sum()
    with mock.patch.object(ep_step, "_Backward", wraps=ep_step._Backward) as passes:
        (first,) = torch.autograd.grad(loss, x, retain_graph=True)
        (second,) = torch.autograd.grad(loss, x)
    assert torch.equal(first, second)
    spends_h = [ep_step._Backward(*call.args).spends_h for call in passes.call_args_list]
    assert spends_h == [False, True]


def test_errors_keep_their_types(heap, monkeypatch):
    module = block(heap, capacity=8, max_tokens=64)
    with pytest.raises(symmoe.errors.CapacityError, match="8"):
        torch.compile(module, fullgraph=True, backend="eager")(tokens())
    monkeypatch.setattr(routed_experts, "is_traced", lambda experts: True)
    for option in ("delay_wgrad", "accumulate_into_main_grad"):
        experts = symmoe.GroupedMLP(EXPERTS, HIDDEN, FFN, **{option: True})
        layer = symmoe.MoELayer(config(**STATIC), heap, experts=experts)
        arguments = torch.ones(2, HIDDEN), torch.ones(2, 2), torch.zeros(2, 2, dtype=torch.int32)
        with pytest.raises(symmoe.errors.ArgumentError, match=option):
            routed_experts.run_routed(layer._routed_experts, *arguments, experts)


def test_operators_refuse_wrong_arguments_and_replaced_experts(heap):
    """In a dispatch mode, which sees operators only."""
    module = block(heap, **STATIC)
    wrong = partial(module.moe, torch.ones(3, 5)), r"x \(\[3, 5\]\).*hidden \(16\)"
    with Watching():
        assert_refused(wrong)
        module.moe.experts = symmoe.GroupedMLP(EXPERTS, HIDDEN, FFN, bias=True)
        assert_refused((partial(module, tokens()), "the layer was made with"))


def test_delayed_weight_gradients_work_in_a_dispatch_mode(heap):
    """A mode that only observes removes no feature."""
    experts = symmoe.GroupedMLP(EXPERTS, HIDDEN, FFN, delay_wgrad=True)
    layer = symmoe.MoELayer(config(**STATIC), heap, experts=experts)
    with Watching() as mode:
        y, _ = layer(tokens())
    y.square().sum().backward()
    assert experts.fc1.weight.grad is None
    experts.backward_dw()
    assert experts.fc1.weight.grad.abs().max() > 0
    assert torch.ops.symmoe.moe_forward.default not in mode.noted
    with Watching() as mode:
        block(heap, **STATIC)(tokens())
    assert torch.ops.symmoe.moe_forward.default in mode.noted


TOPK_IDX = torch.tensor([[0, 1], [1, 2], [2, 3]], dtype=torch.int32)


def call_of(layer: symmoe.MoELayer) -> list[int]:
    """The arguments of an operator's call in which every tensor is trained."""
    return list(
        routed_experts._Call(
            layer._routed_experts.number, 2, trains=1, trains_layers=1, gradients=3
        )
    )


def test_backward_reads_its_arguments_and_not_memory_of_forward(heap):
    """A compiled graph may reuse the memory of forward's arguments: the test overwrites that memory before backward."""
    layer = symmoe.MoELayer(config(stash="none", **STATIC), heap)
    call = call_of(layer)
    dy = torch.randn(3, HIDDEN)
    arguments = [
        torch.randn(3, HIDDEN),
        torch.rand(3, 2),
        *[p.detach().clone() for p in layer.experts.parameters()],
    ]
    saved = [tensor.clone() for tensor in arguments]

    def forward() -> torch.Tensor:
        return torch.ops.symmoe.moe_forward(arguments, TOPK_IDX, call)[-1]

    expected = torch.ops.symmoe.moe_backward(dy, forward(), arguments, call)
    assert len(expected) == len(arguments)
    state = forward()
    with pytest.raises(symmoe.errors.StalePlan, match="copy"):
        torch.ops.symmoe.moe_backward(dy, state.clone(), arguments, call)
    for tensor in arguments:
        tensor.fill_(torch.nan)
    assert all(map(torch.equal, torch.ops.symmoe.moe_backward(dy, state, saved, call), expected))


def test_operators_pass_torchs_opcheck(heap, monkeypatch):
    checked = set()

    def check(operator: torch._ops.OpOverload, arguments: tuple) -> None:
        checked.add(operator.name())
        torch.library.opcheck(operator, arguments)

    layer = symmoe.MoELayer(config(**STATIC), heap)
    weights = [p.detach().requires_grad_() for p in layer.experts.parameters()]
    x = torch.randn(3, HIDDEN, requires_grad=True)
    probs = torch.rand(3, 2, requires_grad=True)
    arguments = ([x, probs, *weights], TOPK_IDX, call_of(layer))
    check(torch.ops.symmoe.moe_forward.default, arguments)
    state = torch.ops.symmoe.moe_forward(*arguments)[-1]
    saved = routed_experts._state_of(state)
    monkeypatch.setattr(
        routed_experts, "_state_of", lambda state: saved
    )  # the checks copy what they give to an operator
    tensors = [tensor.detach() for tensor in (x, probs, *weights)]
    check(
        torch.ops.symmoe.moe_backward.default,
        (torch.randn(3, HIDDEN), state, tensors, call_of(layer)),
    )
    grouped = RoutingRule(score="sigmoid", num_expert_groups=2, topk_groups=1, route_scale=1.5)
    numbers, plain = (router._packed(2, rule) for rule in (grouped, RoutingRule()))
    matrix = torch.randn(4, HIDDEN, requires_grad=True)
    chosen = torch.tensor([[0, -1]] * 5, dtype=torch.int32)
    for dtype in (torch.bfloat16, torch.float32):
        rows = torch.randn(5, HIDDEN).to(dtype).requires_grad_()
        for choice in (None, chosen):
            check(torch.ops.symmoe.route.default, (rows, matrix, torch.randn(4), choice, numbers))
        detached = [rows.detach(), matrix.detach(), chosen.relu(), torch.rand(5, 4)]
        gradient = (torch.rand(5, 4), torch.rand(5, 2), None, detached, plain)
        check(torch.ops.symmoe.route_gradients.default, gradient)
    step_load = torch.arange(4)
    load = torch.ones(4, dtype=torch.int32)
    check(torch.ops.symmoe.load_so_far.default, (step_load, load))
    check(torch.ops.symmoe.add_load.default, (step_load, load))
    check(torch.ops.symmoe.product.default, (torch.tensor([[0, 3], [3, 5]]), 0, 7))
    check(torch.ops.symmoe.product.default, (None, 5, 7))
    assert checked == {
        name for name in torch._C._dispatch_get_all_op_names() if name.startswith("symmoe::")
    }


def test_a_copy_works_after_the_original_is_freed(heap):
    """The copy runs compiled, and under a checkpoint that saves the experts' operator. No operator around the layer's
    is rounded differently, so equality is exact."""
    layer = symmoe.MoELayer(config(**STATIC), heap)
    copied = copy.deepcopy(layer)
    x = torch.randn(5, HIDDEN)
    want, metrics = layer(x)
    want.square().sum().backward()
    gradients = [parameter.grad for parameter in layer.parameters()]
    del layer
    gc.collect()
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.symmoe.moe_forward.default])
    for run in (
        torch.compile(copied, backend="aot_eager", fullgraph=True),
        partial(checkpoint, copied, use_reentrant=False, context_fn=contexts),
    ):
        copied.zero_grad()
        y, copied_metrics = run(x)
        y.square().sum().backward()
        assert torch.equal(y, want)
        assert torch.equal(copied_metrics.expert_load, metrics.expert_load)
        assert torch.equal(copied_metrics.num_dropped, metrics.num_dropped)
        assert all(
            torch.equal(p.grad, g) for p, g in zip(copied.parameters(), gradients, strict=True)
        )
    assert copy.deepcopy(copied)._routed_experts is copied._routed_experts


def test_an_exported_model_gives_the_eager_results(heap):
    """Metrics stay a MoEMetrics, because the class is a pytree node."""
    layer = symmoe.MoELayer(config(capacity_factor=1.0), heap)
    model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), layer)
    x = torch.randn(5, HIDDEN)
    y, metrics = torch.export.export(model, (x,)).module()(x)
    expected_y, expected_metrics = model(x)
    torch.testing.assert_close(y, expected_y)
    assert isinstance(metrics, symmoe.MoEMetrics)
    torch.testing.assert_close(tuple(metrics), tuple(expected_metrics))
    leaves, spec = tree_flatten(expected_metrics._replace(num_over_capacity=None))
    assert tree_unflatten(leaves, treespec_loads(treespec_dumps(spec))).num_over_capacity is None


def test_pickling_raises_an_error_that_names_state_dict(heap):
    layer = symmoe.MoELayer(config(), heap)
    for obj in (layer, heap, layer._routed_experts, nn.Sequential(layer)):
        for save in (pickle.dumps, lambda obj: torch.save(obj, io.BytesIO())):
            with pytest.raises(symmoe.errors.ArgumentError, match=r"state_dict.*save_checkpoint"):
                save(obj)
    saved = io.BytesIO()
    torch.save(layer.state_dict(), saved)
    saved.seek(0)
    symmoe.MoELayer(config(), heap).load_state_dict(torch.load(saved))


def test_compiled_blocks_quantise_constant_weights_themselves(heap):
    module = nn.Sequential(block(heap, **STATIC))
    precise = dataclasses.replace(module[0].moe.config, ffn=16, precision=Float8Block())
    module[0].moe = symmoe.MoELayer(precise, heap, dtype=torch.float32)
    want = step(module, tokens())
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    with symmoe.grouped.cache_quantized_weights(module):
        for _ in range(2):
            assert_same(step(compiled, tokens()), want)


# -- activation checkpointing around a block: what is recomputed, and what crosses the wire again --------------------
# Barriers of one step (plan 1, dispatch 2, combine 2), and of its backward (dispatch 2, combine 2).
FORWARD, BACKWARD = 5, 4


def save_experts(ctx, op, *args, **kwargs) -> CheckpointPolicy:
    if op is torch.ops.symmoe.moe_forward.default:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def selective(policy) -> Callable:
    contexts = partial(create_selective_checkpoint_contexts, policy)
    return partial(checkpoint, use_reentrant=False, context_fn=contexts)


# How a block runs; barriers of its step, calls of its dense layer, and whether received rows stay until backward.
CHECKPOINTS: dict[str, tuple[Callable, int, int, bool]] = {
    "none": (lambda block, x: block(x), FORWARD + BACKWARD, 1, True),
    "full": (partial(checkpoint, use_reentrant=False), 2 * FORWARD + BACKWARD, 2, False),
    "full, reentrant": (partial(checkpoint, use_reentrant=True), 2 * FORWARD + BACKWARD, 2, False),
    "selective, experts saved": (selective(save_experts), FORWARD + BACKWARD, 2, True),
    "selective, list of operators": (
        selective([torch.ops.symmoe.moe_forward.default]),
        *(FORWARD + BACKWARD, 2, True),
    ),
    "selective, nothing saved": (selective([]), 2 * FORWARD + BACKWARD, 2, False),
}
CAPACITIES = {
    "static": STATIC,
    "exact": {},
    "stash rows": STATIC | {"stash": "rows"},
}


@pytest.mark.parametrize("fields", CAPACITIES.values(), ids=CAPACITIES)
@run_on(2)
def test_checkpoints_recompute_only_operators_that_they_do_not_save(
    rank: int, num_ranks: int, heap: symmoe.SymmetricHeap, fields: dict
) -> None:
    """A saved operator does not communicate again, all others are recomputed, and gradients have the bits of a run
    without checkpoints."""
    config = symmoe.MoEConfig(
        hidden=16,
        ffn=8,
        num_experts=4,
        top_k=2,
        router=symmoe.RouterConfig(z_loss_coef=0.01),
        **fields,
    )
    x = torch.randn(
        20 + 7 * rank, 16, generator=torch.Generator().manual_seed(rank), requires_grad=True
    )
    expected: list[torch.Tensor] = []
    torch.manual_seed(0)
    block = Block(config, heap)
    calls = []
    block.dense.register_forward_pre_hook(lambda *_: calls.append(1))
    for name, (run, num_barriers, num_calls, keeps_rows) in CHECKPOINTS.items():
        calls.clear()
        with counted_barriers(heap) as phases:
            y, aux_loss = run(block, x)
            leased = heap.leased_bytes
            (y.square().sum() + aux_loss).backward()
        assert (len(phases), len(calls), leased > 0) == (num_barriers, num_calls, keeps_rows), name
        gradients = [x.grad.clone(), *(p.grad.clone() for p in block.parameters())]
        expected = expected or gradients
        assert all(map(torch.equal, gradients, expected)), name
        x.grad = None
        block.zero_grad()
        del y, aux_loss
        assert heap.leased_bytes == 0


@run_on(2)
def test_compiled_checkpoints_recompute_only_operators_that_they_do_not_save(
    rank, num_ranks, heap: symmoe.SymmetricHeap
) -> None:
    """The same inside torch.compile: the partitioner follows the policy."""
    x = tokens(rank, 20)
    module = block(heap, **STATIC)
    module(x)[0].square().sum().backward()
    expected = [parameter.grad for parameter in module.parameters()]
    for name in ("full", "selective, experts saved"):
        checkpointed, num_barriers, *_ = CHECKPOINTS[name]
        module.zero_grad()
        torch._dynamo.reset()
        run = torch.compile(partial(checkpointed, module), fullgraph=True, backend="aot_eager")
        with counted_barriers(heap) as phases:
            run(x)[0].square().sum().backward()
        assert len(phases) == num_barriers, name
        torch.testing.assert_close([parameter.grad for parameter in module.parameters()], expected)
