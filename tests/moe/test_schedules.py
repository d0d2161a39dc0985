"""MoELayer in real schedules: saved tensors, 1F1B, exceptions, a shared expert."""

import gc
from dataclasses import replace

import pytest
import torch
from cluster import run_on
from heap_calls import outcome
from layers import WAYS, H, I, config_for, make_layer, tokens_of
from stacks import NUM_LAYERS, Stack, batch, batches, check_ways, pipeline, run_schedule, step
from worker import Findings, open_heap

import symmoe
from symmoe import GroupedMLP, MoEConfig, MoELayer, Router, SymmetricHeap, plan_memory
from symmoe.checks.arguments import CHOICES
from symmoe.errors import ArgumentError
from symmoe.grouped import ScaledSReLU
from symmoe.moe.router import RouterOutput
from symmoe.symm_mem.memory import ALIGNMENT_BYTES

STASHES = CHOICES["stash"]


# -- what is kept for backward ----------------------------------------------------------------------------------------
@run_on(1, 2, 3, on_gpus=(1, 2))
def test_stashes_give_the_same_bits(
    rank: int, num_ranks: int, findings: Findings, device: str
) -> None:
    for options in ({"order": "rank"}, {"order": "slot", "capacity": 64, "max_tokens": 8}):
        by_stash, leased = {}, {}
        for stash in STASHES:
            findings.where = f"rank {rank} of {num_ranks}, stash {stash}, {options}"
            with open_heap(device) as heap:
                config = config_for(num_ranks, device, stash=stash, **options)
                model = Stack(heap, config)
                output = model(batch(heap, config.hidden, 0))
                leased[stash] = heap.leased_bytes
                del output
                by_stash[stash] = step(model, *batches(heap, config.hidden, 1))
                findings.equal("leased bytes", heap.leased_bytes, 0)
                findings.same_bits(by_stash[stash], by_stash["all"])
        findings.check(leased["all"] == leased["rows"] > 0, f"the rows are not kept: {leased}")
        findings.check(
            leased["hidden"] == leased["none"] == 0, f"something is kept on the heap: {leased}"
        )


# -- layouts and schedules of one step --------------------------------------------------------------------------------
CALLS = [
    *((num_ranks, "cpu", torch.float32) for num_ranks in (1, 2, 3, 4)),
    *(
        pytest.param(num_ranks, "cuda", dtype, marks=pytest.mark.gpu)
        for num_ranks in (1, 2, 4)
        for dtype in (torch.float32, torch.bfloat16)
    ),
]


@pytest.mark.parametrize(("num_ranks", "device", "dtype"), CALLS, ids=str)
def test_all_options_give_the_same_bits(cluster, num_ranks: int, device: str, dtype: torch.dtype):
    assert cluster(num_ranks, device).findings(check_ways, device, dtype, timeout_s=280) == []


# -- schedules --------------------------------------------------------------------------------------------------------
@pytest.mark.slow
@run_on(2, on_gpus=(2, 8))
def test_1f1b_fits_a_heap_of_the_planned_size(
    rank: int, num_ranks: int, findings: Findings, device: str
) -> None:
    """1F1B against micro-batches in sequence, on a heap of exactly `plan_memory`'s size."""
    num_batches = 5
    for stash, options in [(stash, WAYS[0]) for stash in STASHES] + [
        ("all", WAYS[1]),
        ("none", WAYS[2]),
        ("all", WAYS[3]),
    ]:
        config = config_for(num_ranks, device, stash=stash, capacity=48, max_tokens=8, **options)
        for in_flight in (1, 2, 3) if (stash, options) == ("all", WAYS[0]) else (2,):
            findings.where = (
                f"rank {rank} of {num_ranks}, {stash}, {options}, {in_flight} in flight"
            )
            sizes = {
                "num_ranks": num_ranks,
                "num_tokens": 8,
                "num_layers": NUM_LAYERS,
                "num_in_flight": in_flight,
            }
            plan = plan_memory(config, **sizes, dtype=torch.float32)
            with open_heap(device, num_bytes=plan.heap_bytes) as heap:
                model = Stack(heap, config)
                serial = [turn for i in range(num_batches) for turn in (("F", i), ("B", i))]
                want = run_schedule(model, heap, serial)
                findings.same_bits(
                    run_schedule(model, heap, pipeline(num_batches, in_flight)), want
                )
                if (
                    in_flight == 2
                ):  # the last one first; two gradients add up to the same bits in either order
                    want = run_schedule(model, heap, serial[:4])
                    turns = [("F", 0), ("F", 1), ("B", 1), ("B", 0)]
                    findings.same_bits(run_schedule(model, heap, turns), want)
                findings.equal("leased bytes", heap.leased_bytes, 0)
                peak = heap.high_water_bytes
                findings.check(0 < peak <= heap.num_bytes, f"high-water mark {peak}")


@run_on(1, 2)
def test_a_heap_one_block_below_the_plan_is_exhausted(
    rank: int, num_ranks: int, findings: Findings
) -> None:
    """A typed error on every rank names the missing bytes; afterwards the heap still works."""
    config = config_for(num_ranks, "cpu", capacity=48, max_tokens=8)
    sizes = {
        "num_ranks": num_ranks,
        "num_tokens": 8,
        "num_layers": NUM_LAYERS,
        "dtype": torch.float32,
    }
    num_bytes = plan_memory(config, num_in_flight=2, **sizes).heap_bytes - ALIGNMENT_BYTES
    with open_heap("cpu", num_bytes=num_bytes) as heap:
        model = Stack(heap, config)
        name, text = outcome(run_schedule, model, heap, pipeline(3, 2))
        for part in ("lease '", f"(now {num_bytes})", "high-water mark"):
            findings.check(
                name == "HeapExhausted" and part in text, f"{part!r} is not in {name}: {text!r}"
            )
        model.zero_grad(set_to_none=True)
        gc.collect()
        findings.equal("leased bytes after the error", heap.leased_bytes, 0)
        findings.same_bits(
            step(model, batch(heap, config.hidden, 7)),
            step(model, batch(heap, config.hidden, 7)),
        )


@run_on(1, 2)
def test_exceptions_between_forward_and_backward(
    rank, num_ranks, findings: Findings, heap: SymmetricHeap
) -> None:
    """The user's code raises between forward and backward, and during a backward pass."""
    config = config_for(num_ranks, "cpu")

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx, dy: torch.Tensor) -> torch.Tensor:
            raise ValueError("not today")

    model = Stack(heap, config)
    want = step(model, *batches(heap, config.hidden, 3))

    def fail_after_forward() -> None:
        y = model(batch(heap, config.hidden, 3))
        raise ValueError(f"loss of {tuple(y.shape)}")

    def fail_in_backward() -> None:
        x = batch(heap, config.hidden, 3)
        y = model(Failing.apply(x))  # after both layers' backward passes, before x has its gradient
        y.square().sum().backward()

    for fail in (fail_after_forward, fail_in_backward):
        findings.equal(f"error of {fail.__name__}", outcome(fail)[0], "ValueError")
        model.zero_grad(set_to_none=True)
        gc.collect()
        findings.equal(f"leased bytes after {fail.__name__}", heap.leased_bytes, 0)
        findings.same_bits(step(model, *batches(heap, config.hidden, 3)), want)


# -- a shared expert, other experts -----------------------------------------------------------------------------------
class TakesTokensOnly(Router):
    def forward(self, x: torch.Tensor) -> RouterOutput:  # type: ignore[override]
        return super().forward(x)


class ReturnsTensors(Router):
    def forward(
        self, x: torch.Tensor, **options: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        routed = super().forward(x, **options)
        return routed.topk_idx, routed.probs


@run_on(1, 2)
def test_parts_that_a_layer_cannot_call_are_named_on_every_rank(
    rank: int, num_ranks: int, findings: Findings, heap: SymmetricHeap
) -> None:
    """A router or experts of a wrong kind on one rank: an error on all ranks names the required kind."""
    layer, _ = make_layer(heap, config_for(num_ranks, "cpu"))
    x, router, experts = tokens_of(rank, 6, layer.config.hidden), layer.router, layer.experts
    want = layer(x)[0]
    for name, part, text in (
        ("router", torch.nn.Linear(H, 8), "router (Linear) must be a Router"),
        (
            "router",
            TakesTokensOnly(layer.config),
            "router (TakesTokensOnly) must be a Router, called as router(",
        ),
        (
            "router",
            ReturnsTensors(layer.config),
            "router returns tuple; it must return a RouterOutput",
        ),
        ("router", torch.nn.Sequential(router), "router (Sequential) must be a Router"),
        ("experts", torch.nn.Linear(H, H), "experts (Linear) must be a GroupedMLP"),
    ):
        findings.where = f"rank {rank} of {num_ranks}, {text}"
        if rank == 0:
            setattr(layer, name, part)
        name_of_error, actual = outcome(layer, x)
        findings.equal("error", name_of_error, "ArgumentError")
        findings.check(text in actual and ("MoELayer" in actual or "returns" in text), actual)
        layer.router, layer.experts = router, experts
        findings.check(torch.equal(layer(x)[0], want), "the next call is wrong")


@run_on(1, 2)
def test_users_experts_run_by_parts(
    rank: int, num_ranks: int, findings: Findings, heap: SymmetricHeap
) -> None:
    """The program of MoELayer's docstring, with one dense matrix for each expert, against a plain loop."""
    generator = torch.Generator().manual_seed(3)
    local, every = 2, [torch.randn(H, H, generator=generator) for _ in range(2 * num_ranks)]
    x = tokens_of(rank, 6, H).requires_grad_()
    topk_idx = (torch.arange(12) * 3 % len(every)).view(6, 2)
    probs = torch.rand(6, 2, generator=generator).requires_grad_()

    def own_experts(rows: torch.Tensor, splits: torch.Tensor) -> torch.Tensor:
        local_weights = every[rank * local : (rank + 1) * local]
        return torch.cat(
            [
                part @ w.tanh()
                for part, w in zip(rows.split(splits.tolist()), local_weights, strict=True)
            ]
        )

    plan = symmoe.make_plan(topk_idx, num_experts=len(every), heap=heap)
    rows, row_probs, handle = symmoe.dispatch_tokens(x, plan, probs=probs)
    y = symmoe.combine_tokens(own_experts(rows, plan.splits) * row_probs.unsqueeze(1), handle)
    actual = torch.autograd.grad(y.square().sum(), [x, probs])
    dense = (
        probs[..., None]
        * torch.stack([x @ w.tanh() for w in every], 1).gather(
            1, topk_idx[..., None].expand(-1, -1, H)
        )
    ).sum(1)
    expected = torch.autograd.grad(dense.square().sum(), [x, probs])
    for name, got, want in zip(
        ("y", "dx", "dprobs"), (y, *actual), (dense, *expected), strict=True
    ):
        findings.close(name, got, want, rtol=1e-4, atol=1e-4)


def test_experts_must_fit_the_config(heap: SymmetricHeap):
    config = MoEConfig(hidden=H, ffn=I, num_experts=4, top_k=2, schedule="always-overlapped")
    for wrong, text in (
        (
            torch.nn.Linear(H, H),
            "experts (Linear) must be a GroupedMLP, whose call the kernels replace",
        ),
        (GroupedMLP(3, H, I), "experts.num_groups (3) must be 4"),
        (GroupedMLP(4, 2 * H, I), f"experts.hidden ({2 * H}) must be {H}"),
        (GroupedMLP(4, H, I + 8), f"experts.ffn ({I + 8}) must be {I}"),
        (
            GroupedMLP(4, H, I, activation=ScaledSReLU()),
            "experts.activation (Activation(function='relu2'",
        ),
    ):
        with pytest.raises(ArgumentError) as caught:
            MoELayer(config, heap, experts=wrong)
        assert text in str(caught.value)
    config = replace(config, activation=ScaledSReLU().activation)
    assert MoELayer(config, heap).experts.activation.activation == config.activation
