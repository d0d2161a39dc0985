"""Layers with replicas compute the results of layers without them, for any routing. Against a dense reference, with
every stash and router, and with two micro-batches in flight: test_features.py."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from cluster import run_on
from worker import Findings, open_heap

from symmoe import GroupedMLP, MoEConfig, MoELayer, MoEMetrics, SymmetricHeap, make_plan
from symmoe.errors import ArgumentError, ConfigMismatch
from symmoe.lora import add_lora
from symmoe.metrics import MetricsLogger

H, I, K, TOKENS = 64, 32, 2, 60
REPLICAS = {"balance": "replicas", "replica_slack": 0.0}


def config(num_ranks: int, **options: Any) -> MoEConfig:
    return MoEConfig(
        hidden=H, ffn=I, num_experts=4 * num_ranks, top_k=K, **{"router": None, **options}
    )


def steps(
    layer: MoELayer,
    dtype: torch.dtype,
    *,
    forward=None,
    num_steps: int = 3,
    saved_metrics: list | None = None,
) -> list[dict[str, torch.Tensor]]:
    """Results of steps with changing, skewed routings."""
    heap, num_experts, results = layer.heap, layer.config.num_experts, []
    for step in range(num_steps):
        generator = torch.Generator().manual_seed(heap.rank + 10 * step)
        heat = torch.ones(num_experts)
        hot = 4 * (step % heap.num_ranks)  # the hot spot moves
        num_hot = 4 if step % 3 == 2 else 1  # a whole rank, with two replicas elsewhere
        heat[hot : hot + num_hot] = 8
        heat[1] = 4
        ids = torch.multinomial(heat.expand(TOKENS, num_experts), K, generator=generator).to(
            heap.device
        )
        x, dy = torch.randn(2, TOKENS, H, generator=generator).to(heap.device, dtype)
        probs = torch.rand(TOKENS, K, generator=generator).to(heap.device).requires_grad_()
        x.requires_grad_()
        layer.zero_grad()
        y, metrics = (layer if forward is None else forward)(x, topk_idx=ids, probs=probs)
        y.backward(dy)
        if saved_metrics is not None:
            saved_metrics.append(metrics)
        tensors = {"y": y.detach(), "dx": x.grad, "dprobs": probs.grad, "load": metrics.expert_load}
        results.append(
            {**tensors, **{name: param.grad for name, param in layer.named_parameters()}}
        )
    return results


def compare(
    actual: list[dict[str, torch.Tensor]],
    expected: list[dict[str, torch.Tensor]],
    findings: Findings,
    *,
    same_bits: bool,
) -> None:
    """Gradients of experts with replicas are rounded once more; all other tensors have the same bits with order
    "slot"."""
    for step, (actual_step, expected_step) in enumerate(zip(actual, expected, strict=True)):
        for name, want in expected_step.items():
            got = actual_step[name]
            if want is None:
                findings.check(got is None, f"{name} of step {step} is a gradient")
            elif "." in name or (not same_bits and name != "load"):
                error = (got.float() - want.float()).norm()
                limit = 2 * torch.finfo(want.dtype).eps * want.float().norm()
                findings.check(
                    bool(error <= limit), f"{name} of step {step}: {error}, at most {limit}"
                )
            else:
                findings.check(torch.equal(got, want), f"{name} of step {step} has other bits")


def with_and_without_replicas(
    heap: SymmetricHeap,
    dtype: torch.dtype,
    findings: Findings,
    *,
    replicas_per_rank: int = 2,
    **options: Any,
) -> None:
    results = []
    kind = options.pop("kind", {})
    lora_rank = options.pop("lora_rank", 0)
    for fields in ({**REPLICAS, "replicas_per_rank": replicas_per_rank}, {}):
        torch.manual_seed(1 + heap.rank)
        experts = GroupedMLP(4, H, I, **kind, dtype=dtype, device=heap.device)
        layer = MoELayer(config(heap.num_ranks, **options, **fields), heap, experts=experts)
        for adapter in add_lora(layer, rank=lora_rank, alpha=8.0) if lora_rank else ():
            torch.nn.init.normal_(adapter)
        results.append(steps(layer, dtype))
    compare(*results, findings, same_bits=options.get("order") == "slot")
    findings.equal("leased bytes", heap.leased_bytes, 0)


BF16, FP32 = torch.bfloat16, torch.float32
SERIAL = {"schedule": "serial", "stash": "none", "order": "slot"}
OVERLAPPED = {"schedule": "always-overlapped", "stash": "all", "order": "slot"}
WAYS = [
    (FP32, {**SERIAL, "layout": "packed"}),
    (BF16, {**OVERLAPPED, "layout": "packed"}),
    (FP32, {**OVERLAPPED, "layout": "expert-major", "kind": {"bias": True}}),
    (BF16, {**SERIAL, "layout": "expert-major", "kind": {"weights": "discrete", "bias": True}}),
    (BF16, {**OVERLAPPED, "lora_rank": 8, "kind": {"bias": True}}),
    (FP32, {**SERIAL, "lora_rank": 8, "kind": {"weights": "discrete"}}),
    (BF16, {"replicas_per_rank": 1}),
]


@run_on(1, 2, 4, on_gpus=(2,))
def test_results_equal_those_without_replicas(
    rank: int, num_ranks: int, findings: Findings, device: str
) -> None:
    """For all kinds of experts."""
    static = {"order": "slot", "capacity": TOKENS * K * num_ranks}
    with open_heap(device) as heap:
        for dtype, options in [*WAYS, (BF16, static)]:
            findings.where = f"rank {rank} of {num_ranks}, {dtype}, {options}"
            with_and_without_replicas(heap, dtype, findings, **options)


@pytest.mark.parametrize("ranks_per_node", [2, 1])
@run_on(4)
def test_rows_move_inside_a_node_only(
    rank: int, num_ranks: int, findings: Findings, ranks_per_node: int
) -> None:
    """A node with one rank keeps all its rows."""
    with open_heap("cpu", ranks_per_node=ranks_per_node) as heap:
        findings.where = f"rank {rank} of {num_ranks}"
        with_and_without_replicas(heap, torch.float32, findings, kind={"bias": True}, **OVERLAPPED)
        with_and_without_replicas(
            heap,
            torch.bfloat16,
            findings,
            order="slot",
            capacity=TOKENS * K * num_ranks,
            lora_rank=8,
        )
        plan = make_plan(
            torch.zeros((TOKENS, 1), dtype=torch.int32),
            num_experts=4,
            heap=heap,
            replicas_per_rank=1,
        )
        findings.equal(
            "replica slots",
            plan.replica_to_expert.view(-1).tolist(),
            [-1, 0 if ranks_per_node == 2 else -1, -1, -1],
        )


@run_on(2)
def test_repeated_steps_have_the_same_bits(
    rank: int, num_ranks: int, findings: Findings, heap: SymmetricHeap
) -> None:
    """Weight gradients, too."""
    runs = []
    for _ in range(2):
        torch.manual_seed(1 + rank)
        runs.append(
            steps(
                MoELayer(config(num_ranks, **REPLICAS), heap, dtype=torch.bfloat16), torch.bfloat16
            )
        )
    findings.same_bits(*([tensor for step in run for tensor in step.values()] for run in runs))


@run_on(2, 4)
def test_metrics_count_replicas_and_their_rows(
    rank: int, num_ranks: int, findings: Findings, heap: SymmetricHeap
) -> None:
    """Eager and compiled calls have the same results; saved metrics do not change in later steps."""
    torch.manual_seed(1 + rank)
    layer = MoELayer(config(num_ranks, order="slot", **REPLICAS), heap, dtype=torch.bfloat16)
    logger = MetricsLogger(layer)
    results = []
    sizes = [weight[0].numel() for weight in layer.experts.parameters()]
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for name, forward in (("eager", layer), ("compiled", compiled)):
        findings.where = f"{name}, rank {rank} of {num_ranks}"
        saved_metrics: list[MoEMetrics] = []
        results.append(
            steps(layer, torch.bfloat16, forward=forward, num_steps=6, saved_metrics=saved_metrics)
        )
        totals, num_replicas, num_lent = np.zeros((2, num_ranks), dtype=int), 0, 0
        for metrics in saved_metrics:
            sizes_of_plan = {
                "num_experts": 4 * num_ranks,
                "replicas_per_rank": 2,
                "replica_slack": 0.0,
            }
            plan = make_plan(metrics.topk_idx, heap=heap, **sizes_of_plan)
            splits = torch.stack(
                oracle.gather(plan.splits)
            ).numpy()  # [R, 4 + 2], rows as they are computed
            slots = np.concatenate([ids.flatten() for ids in oracle.gather(metrics.topk_idx)])
            rows = np.stack([np.bincount(slots // 4, minlength=num_ranks), splits.sum(1)])
            used = splits[:, 4:] > 0
            findings.equal("rows of ranks", metrics.rows_per_rank.numpy(), rows)
            findings.equal("replicas", int(metrics.num_replicas), int(used.sum()))
            totals, num_replicas = totals + rows, num_replicas + int(used.sum())
            num_lent += int((plan.expert_to_replica_slot[4 * rank : 4 * rank + 4] >= 0).sum())
        (record,) = logger.step(0)
        findings.equal("tokens_per_rank", np.array(record.tokens_per_rank), totals[0])
        findings.equal("balanced_per_rank", np.array(record.balanced_per_rank), totals[1])
        findings.equal("num_replicas", record.num_replicas, num_replicas)
        findings.equal("replica_bytes", record.replica_bytes, num_lent * 3 * 2 * sum(sizes))
        num_runs = heap.programs.num_runs
        findings.check(num_replicas > 0 and num_runs > 0, "nothing has moved, or has run a program")
    compare(*results, findings, same_bits=True)
    layer.experts.fc1.requires_grad_(requires_grad=False)
    steps(layer, torch.bfloat16, num_steps=1, saved_metrics=saved_metrics)
    lent = int((saved_metrics[-1].replica_to_expert // 4 == rank).sum())
    findings.equal(
        "of frozen FC1",
        logger.step(1)[0].replica_bytes,
        lent * (2 * 2 * sizes[0] + 3 * 2 * sizes[1]),
    )


@run_on(2)
def test_gradients_of_main_grad_and_of_frozen_weights(
    rank: int, num_ranks: int, findings: Findings, heap: SymmetricHeap
) -> None:
    """main_grad is accumulated; a frozen layer, or frozen weights of FC1, get no gradients."""
    results = []
    for options in (REPLICAS, {}):
        torch.manual_seed(1 + rank)
        experts = GroupedMLP(4, H, I, accumulate_into_main_grad=True, dtype=torch.bfloat16)
        for weight in experts.parameters():
            weight.main_grad = torch.full_like(weight, 0.5, dtype=torch.float32)
        layer = MoELayer(config(num_ranks, order="slot", **options), heap, experts=experts)
        actual = steps(layer, torch.bfloat16)
        results.append([weight.main_grad for weight in experts.parameters()])
        experts.fc1.requires_grad_(requires_grad=False)
        actual += steps(layer, torch.bfloat16, num_steps=1)
        experts.requires_grad_(requires_grad=False)
        actual += steps(layer, torch.bfloat16, num_steps=1)
        results.append([tensors[name] for tensors in actual for name in ("y", "dx", "dprobs")])
        findings.equal(
            "gradients of frozen weights",
            [param.grad for param in layer.parameters()],
            [None, None],
        )
    main_grads, other_tensors, expected_main_grads, expected_tensors = results
    for got, want in zip(main_grads, expected_main_grads, strict=True):
        findings.check(bool(torch.allclose(got, want, rtol=1e-5, atol=1e-5)), "main_grad differs")
    findings.same_bits(other_tensors, expected_tensors)


@pytest.mark.parametrize("kind", [{}, {"bias": True}, {"weights": "discrete"}], ids=str)
def test_metrics_count_the_bytes_of_a_replica(heap: SymmetricHeap, kind: dict[str, Any]) -> None:
    """All weights of an expert, forward and backward, and the gradients of the trained ones."""
    layer = MoELayer(config(1), heap, experts=GroupedMLP(4, H, I, **kind, dtype=torch.bfloat16))
    numel = 2 * I * H + H * I + (2 * I + H) * ("bias" in kind)
    reports = []
    layer.listeners.add(lambda report: reports.append(report.replica_bytes))
    steps(layer, torch.bfloat16, num_steps=1)
    add_lora(layer, rank=8, alpha=8.0)
    steps(layer, torch.bfloat16, num_steps=1)
    of_adapters = 8 * (H + 2 * I + I + H)
    assert reports == [3 * 2 * numel, 2 * 2 * numel + 3 * 2 * of_adapters]


@run_on(2)
def test_unsupported_options_are_refused(
    rank: int, num_ranks: int, findings: Findings, heap: SymmetricHeap
) -> None:
    layer = MoELayer(
        config(num_ranks, **REPLICAS), heap, experts=GroupedMLP(4, H, I, delay_wgrad=True)
    )
    with pytest.raises(ArgumentError, match="delay_wgrad"):
        steps(layer, torch.float32)
    layer = MoELayer(config(num_ranks, balance="replicas", replicas_per_rank=1 + rank), heap)
    with pytest.raises(ConfigMismatch, match="replicas_per_rank"):
        steps(layer, torch.float32)
    # Weights of some ranks may be packed, those of others not.
    kind = {"weights": ["packed", "discrete"][rank]}
    with_and_without_replicas(heap, torch.float32, findings, order="slot", kind=kind)


def bf16_experts(rank: int, change: str) -> GroupedMLP:
    """A rank's experts; those of rank 1 differ."""
    experts = GroupedMLP(4, H, I, bias=change == "biases" and rank == 1, dtype=torch.bfloat16)
    if change == "adapters":
        add_lora(experts, rank=8 + 8 * rank, alpha=8.0)
    if change == "main_grad" and rank == 1:
        experts.fc1.accumulate_into_main_grad = True
        experts.fc1.weight.main_grad = torch.zeros(experts.fc1.weight.shape)
    if change == "frozen":
        experts.fc2.requires_grad_(requires_grad=rank == 0)
    return experts


DIFFERENCES = {
    "biases": ("fc1 bias", "none", "'torch.bfloat16 [64]'"),
    "adapters": ("fc1 lora_a", "'torch.bfloat16 [8, 64]'", "'torch.bfloat16 [16, 64]'"),
    "main_grad": (
        "gradient of fc1 weight",
        "'torch.bfloat16 [64, 64]'",
        "'torch.float32 [64, 64]'",
    ),
    "frozen": ("gradient of fc2 weight", "'torch.bfloat16 [64, 32]'", "none"),
}


@pytest.mark.parametrize("change", DIFFERENCES)
@run_on(2)
def test_experts_that_differ_between_ranks_are_refused(
    rank: int, num_ranks: int, findings: Findings, heap: SymmetricHeap, change: str
) -> None:
    """The next correct call works."""
    layer = MoELayer(config(num_ranks, **REPLICAS), heap, experts=bf16_experts(rank, change))
    name, zero, first = DIFFERENCES[change]
    text = f"{name} differs at 'dispatch: ready': rank 0 has {zero}, rank 1 has {first}"
    with pytest.raises(ConfigMismatch, match=re.escape(text)):
        steps(layer, torch.bfloat16)
    layer.set_experts(bf16_experts(0, change))
    steps(layer, torch.bfloat16, num_steps=1)
    findings.equal("leased bytes", heap.leased_bytes, 0)
