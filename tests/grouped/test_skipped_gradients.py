"""Backward without gradients that no input requires: fewer launches and messages, and the same bits for the others."""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from cluster import run_on
from heap_calls import outcome
from layers import WAYS, tokens_of
from reliability.delays import before_steps
from worker import Findings, Watching, open_heap

import symmoe
from symmoe.kernels import control, twin
from symmoe.moe.ep_step import STASHES, expert_parallel_mlp
from symmoe.precision import MXFP8, Float8Block

T, K, H, I = 10, 2, 64, 32
FULL = (True, True)
NEEDS = (FULL, (True, False), (False, True), (False, False))  # of x, and of probs
SUMS = {"rank": ("push_sums", "sum_home"), "slot": ("pull_rows",)}
PRODUCTS = ("grouped_gemm", "grouped_gemm_dgrad", "grouped_gemm_quantized")


@contextlib.contextmanager
def counted_kernels(heap: symmoe.SymmetricHeap) -> Iterator[Counter[str]]:
    """The number of launches of each kernel in the context."""
    counts = Counter()
    with before_steps(heap.device, lambda name: counts.update([name]), twin.__all__):
        yield counts


@dataclasses.dataclass
class Backward:
    """A backward pass: gradients of x, probs and the parameters (None without), barriers, launches of kernels."""

    dx: torch.Tensor | None
    dprobs: torch.Tensor | None
    parameters: list[torch.Tensor | None]
    num_barriers: int
    launches: Counter[str]


def routing(heap: symmoe.SymmetricHeap, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + heap.rank)
    ids = [
        torch.randperm(2 * heap.num_ranks, generator=generator)[:K] for _ in range(T + heap.rank)
    ]
    return torch.stack(ids).to(heap.device)


def compare(
    findings: Findings, got: Backward, full: Backward, needs: tuple[bool, bool], order: str
) -> None:
    """Required gradients have the same bits; others are neither computed nor sent."""
    needs_x, needs_probs = needs
    expected = [full.dx if needs_x else None, full.dprobs if needs_probs else None]
    findings.same_bits(
        [got.dx, got.dprobs, *got.parameters], [*expected, *full.parameters], "gradients"
    )
    findings.equal("barriers", got.num_barriers, full.num_barriers - 2 * (needs == (False, False)))
    for name, is_needed in {
        **dict.fromkeys(SUMS[order], needs_x),
        **dict.fromkeys(("pull_values", "gather_values"), needs_probs),
    }.items():
        findings.equal(name, got.launches[name], full.launches[name] if is_needed else 0)
        findings.check(full.launches[name] > 0, f"a full pass launches no {name}")
    findings.equal(
        "bias dots",
        got.launches["grouped_bias_dot"],
        full.launches["grouped_bias_dot"] * needs_probs,
    )


# -- the expert-parallel MLP ------------------------------------------------------------------------------------------
OPTIONS = [
    *(
        {"stash": stash, "order": order, **fields}
        for fields in WAYS
        for stash, order in (("all", "rank"), ("none", "slot"))
    ),
    *({"stash": stash} for stash in STASHES),
    {"precision": MXFP8(), "stash": "hidden", "order": "slot"},
    *(
        {"precision": Float8Block(), "quantized_wire": wire, "stash": stash}
        for wire, stash in (
            ("none", "all"),
            ("both", "all"),
            ("both", "none"),
            ("backward", "rows"),
        )
    ),
    {"bias": True},
    {"bias": True, "layout": "expert-major", "schedule": "serial", "precision": Float8Block()},
    {"adapters": "both"},
    {"adapters": "only", "stash": "none"},
    {"adapters": "only", "schedule": "serial", "order": "slot", "bias": True},
    {"frozen": True},
]


FP32, BF16 = torch.float32, torch.bfloat16
PLAIN = [options for options in OPTIONS if "precision" not in options]
QUANTIZED = [
    options for options in OPTIONS if isinstance(options.get("precision"), Float8Block)
]  # on any Hopper
ON_GPUS = [
    pytest.param(
        num_ranks,
        "cuda",
        dtype,
        options,
        id=f"{num_ranks} GPUs, {name}, {dtype}",
        marks=pytest.mark.gpu,
    )
    for num_ranks in (1, 2)
    for name, dtype, options in (
        ("plain", FP32, PLAIN),
        ("plain", BF16, PLAIN),
        ("quantized", BF16, QUANTIZED),
    )
]
ON_CPUS = [
    pytest.param(
        num_ranks,
        "cpu",
        FP32,
        OPTIONS,
        id=f"{num_ranks}",
        marks=[pytest.mark.slow] * (num_ranks == 2),
    )
    for num_ranks in (1, 2, 3)
]


@pytest.mark.parametrize(("num_ranks", "device", "dtype", "options"), [*ON_CPUS, *ON_GPUS])
@run_on()
def test_the_mlp_computes_required_gradients_only(
    rank: int,
    num_ranks: int,
    findings: Findings,
    device: str,
    dtype: torch.dtype,
    options: list[dict],
):
    with open_heap(device, num_bytes=64 << 20) as heap:
        for fields in options:
            option = dict(fields)
            adapters = option.pop("adapters", None)
            is_frozen = option.pop("frozen", False)
            torch.manual_seed(7)
            mlp = symmoe.GroupedMLP(
                2,
                H,
                I,
                bias=option.pop("bias", False),
                precision=option.pop("precision", None),
                dtype=dtype,
                device=heap.device,
            )
            if adapters is not None:
                symmoe.lora.add_lora(mlp, rank=8, alpha=8.0)
                for parameter in mlp.parameters():
                    with torch.no_grad():
                        parameter.normal_(std=0.1)
                    parameter.requires_grad_(parameter.requires_grad or adapters == "both")
            if is_frozen:
                mlp.requires_grad_(False)
            x, dy = (
                tokens_of(rank, T + rank, H, salt=salt).to(heap.device, dtype) for salt in (1, 2)
            )
            probs = torch.rand(T + rank, K, generator=torch.Generator().manual_seed(rank)).to(
                heap.device
            )
            passes = {}
            for needs in NEEDS:
                findings.where = f"rank {rank} of {num_ranks}, {fields}, x and probs {needs}"
                if is_frozen and not any(needs):
                    continue
                mlp.zero_grad(set_to_none=True)
                leaf = x.clone().requires_grad_(needs[0])
                weights = probs.clone().requires_grad_(needs[1])
                plan = symmoe.make_plan(routing(heap), num_experts=2 * num_ranks, heap=heap)
                y = expert_parallel_mlp(leaf, weights, mlp, plan, **option)
                epoch = heap.epoch
                with counted_kernels(heap) as launches:
                    y.backward(dy)
                    heap.synchronize()
                gradients = [p.grad for p in mlp.parameters()]
                passes[needs] = Backward(
                    leaf.grad, weights.grad, gradients, heap.epoch - epoch, launches
                )
                findings.check(
                    any(p is not None for p in gradients) != is_frozen, "the parameters' gradients"
                )
                findings.equal("leased bytes", heap.leased_bytes, 0)
                compare(findings, passes[needs], passes[FULL], needs, option.get("order", "rank"))
                products, of_full = (
                    sum(passes[n].launches[name] for name in PRODUCTS) for n in (needs, FULL)
                )
                dgrads = 1 + (adapters is not None)  # through the weight, and through the adapters
                findings.equal("products", products, of_full - (0 if needs[0] else dgrads))


# -- dispatch_tokens --------------------------------------------------------------------------------------------------
@run_on(1, 3, on_gpus=(2,))
def test_dispatch_sends_required_gradients_only(
    rank: int, num_ranks: int, findings: Findings, device: str
) -> None:
    with open_heap(device, num_bytes=16 << 20) as heap:
        for order in ("rank", "slot"):
            full = None
            for needs in NEEDS[:3]:
                findings.where = f"rank {rank} of {num_ranks}, order {order}, x and probs {needs}"
                x = tokens_of(rank, T + rank, H).to(heap.device).requires_grad_(needs[0])
                probs = torch.full((T + rank, K), 0.5, device=heap.device, requires_grad=needs[1])
                plan = symmoe.make_plan(routing(heap), num_experts=2 * num_ranks, heap=heap)
                rows, row_probs, _ = symmoe.dispatch_tokens(x, plan, probs=probs, order=order)
                epoch = heap.epoch
                with counted_kernels(heap) as launches:
                    (rows * row_probs[:, None]).square().sum().backward()
                    heap.synchronize()
                got = Backward(x.grad, probs.grad, [], heap.epoch - epoch, launches)
                full = got if full is None else full
                compare(findings, got, full, needs, order)
                findings.equal("leased bytes", heap.leased_bytes, 0)


# -- MoELayer ---------------------------------------------------------------------------------------------------------
@run_on(1, 2, on_gpus=(2,))
def test_layers_compute_required_gradients_only(
    rank: int, num_ranks: int, findings: Findings, device: str
) -> None:
    """LoRA on a first layer: tokens without gradient, a router that is trained or frozen; as kernels and as an
    operator."""
    with open_heap(device, num_bytes=64 << 20) as heap:
        config = symmoe.MoEConfig(hidden=H, ffn=I, num_experts=2 * num_ranks, top_k=K)
        torch.manual_seed(3)
        layer = symmoe.MoELayer(config, heap)
        symmoe.lora.add_lora(layer, rank=8, alpha=8.0)
        x = tokens_of(rank, T + rank, H).to(heap.device)
        results = {}
        for is_watched in (False, True):
            for trains_x, trains_router in ((True, True), (False, True), (False, False)):
                findings.where = f"rank {rank} of {num_ranks}, {is_watched}, x {trains_x}, router {trains_router}"
                layer.zero_grad(set_to_none=True)
                layer.router.weight.requires_grad_(trains_router)
                leaf = x.clone().requires_grad_(trains_x)
                with Watching() if is_watched else contextlib.nullcontext():
                    y, _ = layer(leaf)
                    epoch = heap.epoch
                    y.square().sum().backward()
                heap.synchronize()
                barriers = results.setdefault("barriers", heap.epoch - epoch)
                findings.equal(
                    "barriers",
                    heap.epoch - epoch,
                    barriers - 2 * (not trains_x and not trains_router),
                )
                actual = [
                    leaf.grad,
                    layer.router.weight.grad,
                    *(p.grad for p in layer.experts.parameters()),
                ]
                of_x, of_router, *other_gradients = results.setdefault("full", actual)
                expected = [of_x if trains_x else None, of_router if trains_router else None]
                findings.same_bits(actual, [*expected, *other_gradients], "gradients")
                findings.check(
                    sum(p is not None for p in actual[2:]) >= 4, "the adapters' gradients"
                )
                del y
                findings.equal("leased bytes", heap.leased_bytes, 0)


# -- ranks that do not ask for the same -------------------------------------------------------------------------------
@run_on(2, 3, on_gpus=(2,))
def test_required_gradients_that_differ_between_ranks_raise(
    rank: int, num_ranks: int, findings: Findings, device: str
) -> None:
    """The same error on every rank, and the next correct step is exact."""
    with open_heap(device, num_bytes=64 << 20) as heap:
        torch.manual_seed(7)
        mlp = symmoe.GroupedMLP(2, H, I, device=heap.device)
        x = tokens_of(rank, T + rank, H).to(heap.device)
        probs = torch.rand(T + rank, K, device=heap.device)

        def step(needs: tuple[bool, bool], parts: bool) -> None:
            leaf = x.clone().requires_grad_(needs[0])
            weights = probs.clone().requires_grad_(needs[1])
            plan = symmoe.make_plan(routing(heap), num_experts=2 * num_ranks, heap=heap)
            if parts:
                rows, row_probs, handle = symmoe.dispatch_tokens(leaf, plan, probs=weights)
                y = symmoe.combine_tokens(mlp(rows, plan.splits, row_probs), handle)
            else:
                y = expert_parallel_mlp(leaf, weights, mlp, plan)
            y.sum().backward()
            heap.synchronize()

        for parts in (False, True):
            for culprit in range(num_ranks):
                for usual, different in zip(NEEDS, (*NEEDS[1:], NEEDS[0]), strict=True):
                    if parts and not (
                        any(usual) and any(different)
                    ):  # that rank has no backward of the dispatch
                        continue
                    findings.where = (
                        f"rank {rank}, {different} on {culprit}, else {usual}, parts {parts}"
                    )
                    zero, own_needs = (different, usual) if culprit == 0 else (usual, different)
                    shown = [
                        control.GRADIENTS[control.gradients_index(x=n[0], probs=n[1])]
                        for n in (zero, own_needs)
                    ]
                    where = "combine: ready" if parts else "dispatch: ready"
                    text = f"gradients differs at '{where}': rank 0 has {shown[0]}, rank {culprit or 1} has {shown[1]}"
                    actual = outcome(step, different if rank == culprit else usual, parts)
                    findings.equal("error", actual, ("ConfigMismatch", text))
                    findings.equal("leased bytes after the error", heap.leased_bytes, 0)
                    mlp.zero_grad(set_to_none=True)
                    step(usual, parts)
                    findings.check(
                        bool(mlp.fc1.weight.grad.isfinite().all()), "the next step is wrong"
                    )
