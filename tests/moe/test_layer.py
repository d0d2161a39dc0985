"""expert_parallel_mlp, its public parts and MoELayer against the float64 oracle, and the ends of their leases."""

import functools
import gc
import itertools
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import routings
import torch
from cluster import run_on
from heap_calls import expect, outcome
from layers import H, I, config_for, make_layer, shapes, tokens_of
from mlp_oracle import check_mlp, compare
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from worker import Findings, open_heap

import symmoe
from symmoe import MoEConfig, MoELayer, RouterConfig, SymmetricHeap
from symmoe.errors import ConfigMismatch

# -- the expert-parallel MLP ------------------------------------------------------------------------------------------
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
STEPS = [(2, "cpu", FP32, 1)]  # ranks, device, dtype and cases of a stratum
SLOW = [(1, 1), (1, 3), (2, 3), (3, 3), (4, 2)]
SLOW = [
    *((num_ranks, "cpu", FP32, count) for num_ranks, count in SLOW),
    (2, "cpu", BF16, 1),
    (2, "cpu", FP16, 1),
]
STEPS += [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW]
STEPS += [
    pytest.param(n, "cuda", dtype, 1, marks=pytest.mark.gpu)
    for n in (1, 2)
    for dtype in (BF16, FP32)
]


@pytest.mark.parametrize(("num_ranks", "device", "dtype", "per_stratum"), STEPS, ids=str)
@run_on()
def test_expert_parallel_mlp_equals_the_oracle(
    rank: int, num_ranks: int, findings: Findings, device: str, dtype: torch.dtype, per_stratum: int
) -> None:
    """Finite cases of every stratum."""
    chosen = [n for n in routings.chosen() if routings.CASES[n].stratum != "nonfinite"]
    with open_heap(device) as heap:
        for number in chosen[: per_stratum * len(routings.STRATA)]:
            case = routings.case_on(number, device)
            findings.where = f"rank {rank} of {num_ranks}, {case}, {dtype}"
            check_mlp(heap, case, shapes(device), dtype, findings)
        findings.equal("staging copies", heap.statistics.num_staging_copies, 0)


# -- MoELayer ---------------------------------------------------------------------------------------------------------
@run_on(1, 2, 4, on_gpus=(1, 2))
def test_the_dtype_of_tokens_or_autocast_decides_the_computation(
    rank: int, num_ranks: int, findings: Findings, device: str
) -> None:
    """Weights are fp32; gradients have the weights' dtype."""
    config = config_for(num_ranks, device)
    with open_heap(device) as heap:
        layer, _ = make_layer(heap, config)
        x = (
            tokens_of(rank, 8, config.hidden).bfloat16().to(heap.device)
        )  # the router sees the same numbers each time
        want = {}
        for name, tokens in (("fp32", x.float()), ("bf16", x), ("autocast", x.float())):
            findings.where = f"rank {rank} of {num_ranks}, {name}"
            tokens = tokens.clone().requires_grad_()
            with torch.autocast(device, torch.bfloat16, enabled=name == "autocast"):
                y, _ = layer(tokens)
            findings.equal(
                "dtype of y", y.dtype, torch.float32 if name == "fp32" else torch.bfloat16
            )
            y.float().sum().backward()
            findings.equal("dtype of dx", tokens.grad.dtype, tokens.dtype)
            findings.equal("dtype of dw1", layer.experts.fc1.weight.grad.dtype, torch.float32)
            got = {
                "y": y,
                "dx": tokens.grad,
                "dw1": layer.experts.fc1.weight.grad,
                "dw": layer.router.weight.grad,
            }
            layer.zero_grad(set_to_none=True)
            for key, tensor in got.items():
                want.setdefault(key, tensor)
                compare(findings, key, tensor, want[key], torch.bfloat16)


@run_on(1, 2, 4, on_gpus=(1, 2))
def test_leases_end_with_the_graph(
    rank: int, num_ranks: int, findings: Findings, device: str
) -> None:
    """Forward without backward, no-grad, and a second backward."""
    config = config_for(num_ranks, device)
    with open_heap(device) as heap:
        layer, _ = make_layer(heap, config)
        x = tokens_of(rank, 6, config.hidden).to(heap.device).requires_grad_()
        y, metrics = layer(x)
        first = y.detach().clone()
        findings.check(heap.leased_bytes > 0, "backward has nothing to start from")
        del y, metrics
        gc.collect()
        findings.equal("leased bytes once the output is gone", heap.leased_bytes, 0)

        with torch.no_grad():
            y, _ = layer(x)
            findings.equal("leased bytes without gradients", heap.leased_bytes, 0)
            findings.check(torch.equal(y, first), "y differs without gradients")

        layer.requires_grad_(False)
        y, _ = layer(x)  # frozen weights: only x takes a gradient
        y.sum().backward()
        findings.check(bool(x.grad.any()), "no gradient of x with frozen weights")
        layer.requires_grad_(True)

        y, _ = layer(x)
        x.grad = None
        y.sum().backward()
        grad = x.grad.clone()
        name, text = outcome(y.sum().backward)
        findings.check(name == "RuntimeError" and "second time" in text, f"{name}: {text}")
        findings.check(torch.equal(x.grad, grad), "the second backward left something")
        findings.equal("leased bytes after a second backward", heap.leased_bytes, 0)
        y, _ = layer(x)
        y.sum().backward(retain_graph=True)
        findings.check(heap.leased_bytes > 0, "the graph is retained, its lease is not")
        y.sum().backward()
        findings.check(
            torch.equal(x.grad, grad + grad + grad), "backward through a retained graph differs"
        )
        del y
        findings.equal("leased bytes after a retained graph", heap.leased_bytes, 0)
        x.grad = None
        y, _ = layer(x)
        y.sum().backward()
        findings.check(torch.equal(y, first), "the next step differs")
        del y

        empty = torch.zeros(
            0 if rank == 0 else 2, config.hidden, device=heap.device, requires_grad=True
        )
        y, metrics = layer(empty)
        (y.sum() + metrics.aux_loss).backward()
        findings.equal("shape of the gradient", empty.grad.shape, empty.shape)
        findings.equal("slots", int(metrics.expert_load.sum()), 4 * (num_ranks - 1))
        del y, metrics
        findings.equal("leased bytes", heap.leased_bytes, 0)


# -- what somebody has put around a call, or in place of a forward ----------------------------------------------------
def other_class(module: torch.nn.Module) -> Callable[[], object]:
    """Changes a module's class to a subclass with its own forward; returns a function that undoes this."""
    kind = type(module)
    forward = lambda self, *args, **options: kind.forward(self, *args, **options)  # noqa: E731
    module.__class__ = type("Other", (kind,), {"forward": forward})
    return lambda: setattr(module, "__class__", kind)


def other_forward(module: torch.nn.Module) -> Callable[[], object]:
    """Replaces an instance's forward, as accelerate's hooks do."""
    original = module.forward
    module.forward = functools.update_wrapper(
        lambda *args, **options: original(*args, **options), original
    )
    return lambda: delattr(module, "forward")


def patched_class(module: torch.nn.Module) -> Callable[[], object]:
    """Replaces the forward of a module's class."""
    original = type(module).forward
    patched = functools.wraps(original)(
        lambda self, *args, **options: original(self, *args, **options)
    )
    patch = mock.patch.object(
        next(k for k in type(module).__mro__ if "forward" in vars(k)), "forward", patched
    )
    patch.start()
    return patch.stop


AROUND = {
    "a forward_pre_hook": lambda module: module.register_forward_pre_hook(print).remove,
    "a forward_hook": lambda module: module.register_forward_hook(print).remove,
    "a backward_pre_hook": lambda module: module.register_full_backward_pre_hook(print).remove,
    "a backward_hook": lambda module: module.register_full_backward_hook(print).remove,
    "the forward of Other": other_class,
    "a forward of its own": other_forward,
    "the forward of ": patched_class,
}


PLACES = ("experts", "experts.fc1", "experts.fc2", "experts.activation")


@pytest.mark.parametrize("where", PLACES)
@run_on(2)
def test_hooks_that_kernels_would_skip_are_refused_on_every_rank(
    rank: int, num_ranks: int, findings: Findings, heap: SymmetricHeap, where: str
) -> None:
    layer, _ = make_layer(heap, config_for(num_ranks, "cpu"))
    x = tokens_of(rank, 5, H)
    calls = {
        "": lambda: layer(x)[0],
        "mask": lambda: layer(x, torch.arange(5) < 4)[0],
        "given": lambda: layer(x, topk_idx=torch.tensor([[0, 1]] * 5), probs=torch.ones(5, 2))[0],
        "evaluation": torch.no_grad()(lambda: layer(x)[0]),
    }
    expected = {name: call() for name, call in calls.items()}
    # Each kind meets each call at one of the places.
    turns = itertools.islice(itertools.cycle(calls), PLACES.index(where), None)
    for (kind, modify), name in zip(AROUND.items(), turns, strict=False):
        findings.where = f"rank {rank}, {kind} on {where}, {name}"
        undo = modify(layer.get_submodule(where)) if rank == 0 else lambda: None
        refused = outcome(calls[name])
        undo()
        expect(findings, refused, "ArgumentError", f"has {kind}", "left out")
        findings.check(torch.equal(calls[name](), expected[name]), "the next call is wrong")


@pytest.mark.parametrize("where", ["fc1", "fc2", "activation"])
def test_a_grouped_mlp_refuses_hooks_that_kernels_would_skip(where: str):
    mlp = symmoe.GroupedMLP(2, H, I)
    arguments = (torch.ones(3, H), [1, 2], torch.ones(3))
    expected = mlp(*arguments)
    for kind, modify in AROUND.items():
        undo = modify(mlp.get_submodule(where))
        error, text = outcome(mlp, *arguments)
        undo()
        assert (error, f"has {kind}" in text) == ("ArgumentError", True), text
        assert torch.equal(mlp(*arguments), expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "made_of",
    [
        torch.jit.script,
        lambda plain: torch.jit.trace(plain, torch.ones(2, H)),
        functools.partial(torch.compile, backend="aot_eager"),
    ],
    ids=["scripted", "traced", "compiled"],
)
def test_any_module_may_be_the_shared_expert(made_of: Callable[[torch.nn.Module], torch.nn.Module]):
    torch.manual_seed(0)
    plain = torch.nn.Linear(H, H)
    x = torch.randn(3, H)
    config = MoEConfig(hidden=H, ffn=I, num_experts=4, top_k=2)
    with open_heap("cpu") as heap:
        layer = MoELayer(config, heap)
        expected = (layer(x)[0] + plain(x)).detach()
        layer.shared_expert = made_of(plain)
        for _ in range(2):
            torch.testing.assert_close(layer(x)[0], expected)
        weight = weakref.ref(layer.experts.fc1.weight)
        del layer
        assert weight() is None, "only a search for garbage frees a layer"


def test_hooks_on_other_modules_run_without_a_warning():
    ran = []
    with open_heap("cpu") as heap, warnings.catch_warnings():
        warnings.simplefilter("error")
        shared = torch.nn.Linear(H, H)
        layer = MoELayer(
            MoEConfig(hidden=H, ffn=I, num_experts=4, top_k=2), heap, shared_expert=shared
        )
        for name in ("", "router", "shared_expert"):
            layer.get_submodule(name).register_forward_hook(lambda *_, name=name: ran.append(name))
            other_forward(layer.get_submodule(name))
        layer.experts.fc1.weight.register_hook(lambda _: ran.append("weight"))
        everywhere = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
        layer(torch.randn(3, H))[0].sum().backward()
        everywhere.remove()
    assert sorted(ran) == ["", "router", "shared_expert", "weight"]


# -- warnings and errors are for the user -----------------------------------------------------------------------------
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("returns", ["metrics", "aux_loss"])
def test_an_aux_loss_lost_in_a_checkpoint_is_warned_of(
    heap: SymmetricHeap, use_reentrant: bool, returns: str
):
    config = MoEConfig(
        hidden=H, ffn=I, num_experts=4, top_k=2, router=RouterConfig(aux_loss_coef=0.1)
    )
    first = MoELayer(config, heap)
    second = MoELayer(config, heap)

    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, metrics = second(x)
        return y, metrics.aux_loss

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for salt in range(2):
            x, _ = first(tokens_of(0, 5, H, salt))
            again = second if returns == "metrics" else forward
            y, aux_loss = checkpoint(again, x, use_reentrant=use_reentrant)
            (y.sum() + getattr(aux_loss, "aux_loss", aux_loss)).backward()
    is_lost = use_reentrant and returns == "metrics"
    assert len(warned) == 2 * is_lost
    for warning in warned:
        assert "metrics.aux_loss has no gradient" in str(warning.message)
        line = Path(warning.filename).read_text().splitlines()[warning.lineno - 1]
        assert "checkpoint(again" in line


@run_on(2)
def test_the_traceback_of_an_error_is_the_users(
    rank: int, num_ranks: int, heap: SymmetricHeap
) -> None:
    """The traceback has only the first and the last frame in the package."""
    layer, _ = make_layer(heap, config_for(num_ranks, "cpu", order=("rank", "slot")[rank]))
    with pytest.raises(ConfigMismatch, match="order differs") as caught:
        layer(tokens_of(rank, 5, H))
    files = [Path(entry.path) for entry in caught.traceback]
    assert files[0] == Path(__file__)
    assert len([path for path in files if Path(symmoe.__file__).parent in path.parents]) <= 2


# -- gradients of gradients -------------------------------------------------------------------------------------------
def penalised(forward: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """A loss of y and of its gradient by x for a constant gradient of y."""
    y = forward(x)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)
    return y.square().sum() + dx.square().sum()


@run_on(1, 2)
def test_second_order_gradients_are_refused_on_every_rank(
    rank: int, num_ranks: int, findings: Findings, heap: SymmetricHeap
) -> None:
    first, second = (
        make_layer(heap, config_for(num_ranks, "cpu", z_loss_coef=0.1))[0] for _ in range(2)
    )
    x = tokens_of(rank, 6, H).requires_grad_()
    splits = [1, 5]
    topk_idx = torch.tensor([[0, 1]] * 6)

    def by_parts(x: torch.Tensor) -> torch.Tensor:
        plan = symmoe.make_plan(topk_idx, num_experts=2 * num_ranks, heap=heap)
        rows, _, handle = symmoe.dispatch_tokens(x, plan)
        return symmoe.combine_tokens(rows, handle)

    calls = {
        "layers": lambda x: second(first(x)[0])[0],
        "loss": lambda x: first(x)[1].aux_loss,
        "mask": lambda x: first(x, torch.arange(6) < 5)[0],
        "given": lambda x: first(x, topk_idx=topk_idx, probs=torch.ones(6, 2))[0],
        "checkpoint": lambda x: checkpoint(first, x, use_reentrant=False)[0],
        "operator": lambda x: traced(first, x),
        "parts": by_parts,
        "router": lambda x: first.router(x).logits,
        "experts": lambda x: first.experts(x, splits, torch.ones(6)),
        "linear": lambda x: first.experts.fc1(x, splits),
        "activation": lambda x: symmoe.grouped.ScaledSwiGLU()(x, torch.ones(6)),
    }
    for name, call in calls.items():
        findings.where = f"rank {rank} of {num_ranks}, {name}"
        loss = penalised(call, x)
        expect(findings, outcome(loss.backward), "ArgumentError", "create_graph (True)", "order")
        (dx,) = torch.autograd.grad(call(x).square().sum(), x, create_graph=True)
        actual = outcome(lambda dx=dx: torch.autograd.grad(dx.square().sum(), x))
        expect(findings, actual, "ArgumentError", "create_graph (True)", "order")
        if name != "parts":  # which are linear in x
            # Linear in y. The loss also depends on x in a way that passes no kernel.
            (dx,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
            actual = outcome(lambda dx=dx: torch.autograd.grad((dx * x).sum(), x))
            expect(findings, actual, "ArgumentError", "create_graph (True)", "order")
        (expected,) = torch.autograd.grad(call(x).sum(), x)
        call(x).sum().backward(create_graph=True, inputs=[x])  # and nobody differentiates that
        findings.check(torch.equal(x.grad, expected), "other gradients with create_graph")
        x.grad = None


def traced(layer: MoELayer, x: torch.Tensor) -> torch.Tensor:
    with FlopCounterMode(display=False):  # a dispatch mode: the step is an operator
        return layer(x)[0]
