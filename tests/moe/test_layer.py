"""expert_parallel_mlp, its public parts and MoELayer against the float64 oracle, and what happens to their leases."""

import gc
import warnings
from collections.abc import Callable

import pytest
import routings
import torch
from cluster import run_on
from heap_calls import outcome
from layers import H, I, config_for, make_layer, shapes, tokens_of
from mlp_oracle import check_mlp, compare
from torch.utils.hooks import RemovableHandle
from worker import Findings, open_heap

from symmoe import MoEConfig, MoELayer, SymmetricHeap

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
def test_expert_parallel_mlp_is_the_oracle(
    rank: int, num_ranks: int, findings: Findings, device: str, dtype: torch.dtype, per_stratum: int
) -> None:
    """Finite cases of every stratum; the float64 loops are slow."""
    chosen = [n for n in routings.chosen() if routings.CASES[n].stratum != "nonfinite"]
    with open_heap(device) as heap:
        for number in chosen[: per_stratum * len(routings.STRATA)]:
            case = routings.case_on(number, device)
            findings.where = f"rank {rank} of {num_ranks}, {case}, {dtype}"
            check_mlp(heap, case, shapes(device), dtype, findings)
        findings.equal("staging copies", heap.statistics.num_staging_copies, 0)


# -- MoELayer ---------------------------------------------------------------------------------------------------------
@run_on(1, 2, 4, on_gpus=(1, 2))
def test_dtypes(rank: int, num_ranks: int, findings: Findings, device: str) -> None:
    """fp32 weights, tokens of another dtype or autocast: computed in that dtype, gradients in the weights' own."""
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
def test_leases(rank: int, num_ranks: int, findings: Findings, device: str) -> None:
    """Forward without backward, no-grad, a second backward."""
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


# -- hooks ------------------------------------------------------------------------------------------------------------
def hooks_on(module: torch.nn.Module) -> dict[str, Callable[[], RemovableHandle]]:
    """How a hook of each kind is put on a module."""

    def hook(*_: object) -> None:
        raise AssertionError("it ran")

    return {
        "forward_pre_hook": lambda: module.register_forward_pre_hook(hook),
        "forward_hook": lambda: module.register_forward_hook(hook),
        "backward_pre_hook": lambda: module.register_full_backward_pre_hook(hook),
        "backward_hook": lambda: module.register_full_backward_hook(hook),
    }


@pytest.mark.parametrize("where", ["experts", "experts.fc1", "experts.fc2", "experts.activation"])
def test_hooks_that_never_run_are_warned_of(heap: SymmetricHeap, where: str):
    for kind in hooks_on(torch.nn.Module()):
        layer = MoELayer(MoEConfig(hidden=H, ffn=I, num_experts=4, top_k=2), heap)
        x = torch.randn(3, H, requires_grad=True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            layer(x)
        hooks_on(layer.get_submodule(where))[kind]()
        with pytest.warns(UserWarning, match=f"never runs the {kind} on {where}:") as warned:
            layer(x)[0].sum().backward()
        assert warned[0].filename == __file__
        with warnings.catch_warnings():  # once
            warnings.simplefilter("error")
            layer(x)


def test_hooks_elsewhere_run_without_a_warning():
    ran = []
    with open_heap("cpu") as heap, warnings.catch_warnings():
        warnings.simplefilter("error")
        shared = torch.nn.Linear(H, H)
        layer = MoELayer(
            MoEConfig(hidden=H, ffn=I, num_experts=4, top_k=2), heap, shared_expert=shared
        )
        for name in ("", "router", "shared_expert"):
            layer.get_submodule(name).register_forward_hook(lambda *_, name=name: ran.append(name))
        layer.experts.fc1.weight.register_hook(lambda _: ran.append("weight"))
        layer(torch.randn(3, H))[0].sum().backward()
    assert sorted(ran) == ["", "router", "shared_expert", "weight"]
