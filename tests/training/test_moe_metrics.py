"""Metrics of a model's layers against counts in plain Python and against the plan."""

import numpy as np
import pytest
import torch
from cluster import run_on
from stacks import Stack
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from worker import Findings

from symmoe import MoEConfig, MoELayer, RouterConfig, SymmetricHeap, make_plan
from symmoe.errors import ArgumentError
from symmoe.metrics import MetricsLogger
from symmoe.moe.listeners import RoutingReport

EXPERTS, TOP_K, H, I = 8, 3, 16, 8


def make_model(heap: SymmetricHeap, **options) -> Stack:
    config = MoEConfig(
        hidden=H,
        ffn=I,
        num_experts=EXPERTS,
        top_k=TOP_K,
        router=RouterConfig(aux_loss_coef=0.1),
        **options,
    )
    return Stack(heap, config)


def batch(rank: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * rank + number)
    return (torch.randn(6 + rank + number, H, generator=generator) + 0.3).requires_grad_()


GROUPS = [(num_ranks, order, None) for num_ranks in (1, 2, 4) for order in ("rank", "slot")]
GROUPS += [
    (2, "slot", 1),
    pytest.param(4, "slot", 2, marks=pytest.mark.slow),
]  # bytes are counted as on one node


@pytest.mark.parametrize(("num_ranks", "order", "ranks_per_node"), GROUPS)
@run_on()
def test_records_equal_counts_by_hand(
    rank, num_ranks, findings: Findings, order: str, ranks_per_node: int | None
) -> None:
    logged: list[tuple[dict[str, float], int]] = []
    with SymmetricHeap(num_bytes=4 << 20, backend="host", ranks_per_node=ranks_per_node) as heap:
        model = make_model(heap, order=order, capacity_factor=1.1)
        recorded: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        for name, layer in model.named_modules():
            if isinstance(layer, MoELayer):
                layer.register_forward_hook(
                    lambda m, a, out, n=name: recorded.append(
                        (n, out[1].topk_idx, out[1].aux_loss.detach())
                    )
                )
        logger = MetricsLogger(
            model, lambda numbers, step: logged.append((numbers, step)), times_forward=True
        )
        for number in range(3):
            model(batch(rank, number)).sum().backward()
        with torch.no_grad():
            model.eval()(batch(rank, 0))
        records = {record.name: record for record in logger.step(17)}
        findings.equal("layers", sorted(records), ["layers.0", "layers.1"])
        for name, record in records.items():
            findings.where = f"rank {rank} of {num_ranks}, {order}, {name}"
            calls = [(ids, loss) for n, ids, loss in recorded if n == name][:3]
            load = np.zeros(EXPERTS, dtype=np.int64)
            sent = read = over = 0
            for ids, _ in calls:
                plan = make_plan(ids, num_experts=EXPERTS, heap=heap)
                load += plan.expert_load.numpy()
                away = torch.arange(num_ranks) != rank
                sent += int((plan.token_to_packed_row[:, away] >= 0).sum())
                remote = (plan.slot_to_row >= 0) & (plan.slot_to_rank != rank)
                read += (
                    int(remote.sum())
                    if order == "slot"
                    else int((plan.token_to_primary_row[:, away] >= 0).sum())
                )
                over += int((ids < 0).sum())
            findings.check(over > 0, "nothing was over the capacity")
            findings.check((sent > 0) == (num_ranks > 1), "no bytes to count")
            expected = {
                "num_calls": 3,
                "tokens_per_expert": tuple(load.tolist()),
                "tokens_per_rank": tuple(load.reshape(num_ranks, -1).sum(1).tolist()),
                "num_dead_experts": int((load == 0).sum()),
                "num_over_capacity": over,
                "num_dropped": 0,
                "balanced_per_rank": None,
                "num_replicas": 0,
                "replica_bytes": 0,
                "dispatch_bytes": sent * H * 4,
                "combine_bytes": read * H * 4,
                "heap_high_water_bytes": heap.high_water_bytes,
            }
            for field, want in expected.items():
                findings.equal(field, getattr(record, field), want)
            near = {
                "coefficient_of_variation": load.std() / load.mean(),
                "max_violation": load.max() / load.mean() - 1,
                "load_entropy": -sum(f * np.log(f) for f in load[load > 0] / load.sum())
                / np.log(EXPERTS),
                "aux_loss": float(sum(loss for _, loss in calls)) / 3,
            }
            for field, want in near.items():
                actual = getattr(record, field)
                findings.check(abs(actual - want) < 1e-6, f"{field} is {actual}, want {want}")
            findings.check(0 < record.forward_s < 60, f"forward took {record.forward_s} s")
            trips = (record.dispatch_s, record.combine_s)
            findings.check(
                min(trips) > 0 and sum(trips) < record.forward_s,
                f"trips {trips} of {record.forward_s} s",
            )
        (numbers, step) = logged[0]
        findings.equal("step", step, 17)
        findings.equal("all numbers", {type(value) for value in numbers.values()}, {float})
        violations = [record.max_violation for record in records.values()]
        findings.equal("max over layers", numbers["moe/max_violation/max"], max(violations))
        findings.equal("mean over layers", numbers["moe/max_violation/mean"], sum(violations) / 2)
        findings.equal("of a layer", numbers["moe/layers.1/num_calls"], 3.0)
        for name, record in records.items():
            loads = [numbers[f"moe/{name}/tokens_per_expert/{expert}"] for expert in range(EXPERTS)]
            findings.equal("of an expert", loads, list(record.tokens_per_expert))
        with pytest.raises(ArgumentError):
            model.train()(batch(rank, 0)[..., 1:])
        with torch.no_grad():
            model.eval()(batch(rank, 0))
        next_step = [
            (entry.num_calls, entry.forward_s, entry.dispatch_s) for entry in logger.step(18)
        ]
        findings.equal("the next step", next_step, [(0, 0.0, 0.0)] * 2)
        with pytest.raises(ArgumentError):
            model.train()(batch(rank, 0)[..., 1:])
        logger.close()
        findings.check(heap.trip_timer is None, "the heap still has the timer")
        model.train()(batch(rank, 0))
        findings.equal("after close", sum(r.num_calls for r in logger.step(19)), 0)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputed_forwards_are_not_counted(heap: SymmetricHeap, use_reentrant: bool):
    model = make_model(heap)
    for _ in range(3):  # later calls run programs, which lease otherwise than the first ones
        model(batch(0, 0)).sum().backward()
    logger = MetricsLogger(model)
    model(batch(0, 0)).sum().backward()
    want, calls = logger.step(0), []
    model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    with set_checkpoint_early_stop(False):  # or the second forward would end before the hooks
        y = model(
            batch(0, 0), lambda layer, x: checkpoint(layer, x, use_reentrant=use_reentrant)[0]
        )
    y.sum().backward()
    assert (len(calls), logger.step(1)) == (2, want)


def test_static_drops_and_the_metrics_of_one_call(heap: SymmetricHeap):
    model = make_model(heap, capacity=15, overflow="drop")
    logger = MetricsLogger(model)
    _, metrics = model.layers[0](batch(0, 0))
    model.layers[1](batch(0, 0))
    record = logger.step(0)[0]
    load = np.bincount(metrics.topk_idx.flatten().numpy(), minlength=EXPERTS)
    assert record.num_dropped == 6 * TOP_K - 15 == metrics.num_dropped.item()
    assert record.tokens_per_expert == tuple(load.tolist())
    assert metrics.max_violation.item() == pytest.approx(load.max() / load.mean() - 1)
    assert metrics.coefficient_of_variation.item() == pytest.approx(load.std() / load.mean())
    assert metrics.num_dead_experts.item() == int((load == 0).sum())
    assert metrics.load_entropy.item() == pytest.approx(record.load_entropy)
    assert metrics.num_over_capacity is None
    assert record.forward_s is record.dispatch_s is record.combine_s is None


def test_gate_mass_is_the_sum_of_probs(heap: SymmetricHeap):
    """Over two calls; slots beyond the capacity factor do not count."""
    model = make_model(heap, capacity_factor=1.1)
    logger = MetricsLogger(model)
    want = np.zeros(EXPERTS)
    for number in range(2):
        routed = model.layers[0].router(batch(0, number))
        ids, probs = routed.topk_idx.flatten().numpy(), routed.probs.detach().flatten().numpy()
        want += np.bincount(ids[ids >= 0], weights=probs[ids >= 0], minlength=EXPERTS)
        model(batch(0, number))
    assert logger.step(0)[0].gate_mass == pytest.approx(want)
    assert (want > 0).sum() > 2


def test_gate_mass_ignores_ids_out_of_range(heap: SymmetricHeap):
    """On a GPU, listeners of a call with static capacity run before the host knows of the error."""
    model = make_model(heap)
    logger = MetricsLogger(model)
    load = torch.zeros(EXPERTS, dtype=torch.int32)
    ids = torch.tensor([[0, EXPERTS, -1], [2**20, 3, 0]], dtype=torch.int32)
    report = RoutingReport(ids, ids, load, load[:1], 4, 4, is_training=True, probs=torch.ones(2, 3))
    model.layers[0].listeners.report(report)
    assert logger.step(0)[0].gate_mass == (2.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0)


def test_a_collapsed_router_is_warned_of(heap: SymmetricHeap):
    model = make_model(heap)
    logger = MetricsLogger(model, min_load_entropy=0.7)
    model(batch(0, 0))
    assert all(record.load_entropy > 0.7 for record in logger.step(0))
    with torch.no_grad():
        model.layers[1].router.weight[TOP_K:] = -1.0  # the first K get all tokens
    model.layers[1](batch(0, 0).abs())
    with pytest.warns(
        UserWarning, match=r"layer 'layers.1' collapses: load_entropy 0.528 .* 5 exp"
    ):
        logger.step(1)


def test_metrics_count_in_a_model_that_was_compiled_before(heap: SymmetricHeap):
    model = make_model(heap)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    compiled(batch(0, 0))
    logger = MetricsLogger(model)
    model(batch(0, 0))
    want = [record.tokens_per_expert for record in logger.step(0)]
    for num_calls in (1, 2):
        for _ in range(num_calls):
            compiled(batch(0, 0))
        records = logger.step(num_calls)
        assert [record.num_calls for record in records] == [num_calls] * 2
        assert [
            tuple(n // num_calls for n in record.tokens_per_expert) for record in records
        ] == want
    logger.close()
    compiled(batch(0, 0))
    assert [record.num_calls for record in logger.step(3)] == [0, 0]


def test_a_model_without_layers_is_refused():
    with pytest.raises(ArgumentError, match="has no MoELayer"):
        MetricsLogger(nn.Linear(2, 2))
