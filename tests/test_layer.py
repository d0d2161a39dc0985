"""GroupedMLP, expert_parallel_mlp and MoELayer against the float64 oracle, and what happens to their leases."""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Callable

import numpy as np
import oracle
import pytest
import routings
import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle
from worker import Findings, experts_of, is_poison, open_heap, poison, poisoned_lease

from symmoe import (
    GroupedMLP,
    MoEConfig,
    MoELayer,
    SymmetricHeap,
    combine_tokens,
    dispatch_tokens,
    make_plan,
    reduce_gradients,
)
from symmoe.errors import ArgumentError
from symmoe.moe.ep_step import expert_parallel_mlp
from symmoe.precision import NVFP4, Float8Block, draw_signs

H, I = 16, 24
GPU_H, GPU_I = 64, 96
# Of the largest wanted value. fp32: sums of two dozen products. bf16: h, a, rows and y are each rounded to 2^-9,
# and the gradients go through as many roundings again.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}
GPU_SUMS = math.sqrt(GPU_I / I)  # the rounding of fp32 sums grows with the root of their length


def compare(
    findings: Findings, name: str, got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype, *, num_terms: int = 0
) -> None:
    """Notes a tensor that is further from the oracle than the dtype explains.

    num_terms: that a number is the sum of, each about 1/2. Such sums are of any size, and where they cancel, they are
    no more exact for it; a single one cannot say of what size they mostly are.
    """
    scale = max(float(want.abs().max()) if want.numel() else 0.0, 0.5 * math.sqrt(num_terms), 0.1)
    tolerance = TOLERANCE[dtype] * (GPU_SUMS if got.is_cuda and dtype == torch.float32 else 1.0)
    findings.close(name, got, want, rtol=0.0, atol=tolerance * scale)


def flat(results: list[list[str]]) -> list[str]:
    return [text for texts in results for text in texts]


# -- GroupedMLP alone -------------------------------------------------------------------------------------------------

SPLITS = (3, 0, 5, 1, 0)
NUM_ROWS, TAIL = sum(SPLITS), 4
DTYPES = (torch.float32, torch.bfloat16)


def mlp_and_inputs(dtype: torch.dtype) -> tuple[GroupedMLP, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A module, rows with a tail of NaN, their probs, and a gradient of the output."""
    torch.manual_seed(3)
    mlp = GroupedMLP(len(SPLITS), H, I, dtype=dtype)
    rows, dy = torch.randn(2, NUM_ROWS + TAIL, H).to(dtype)
    probs = torch.rand(NUM_ROWS + TAIL) + 0.5
    for tensor in (rows, dy, probs):
        tensor[NUM_ROWS:] = float("nan")
    return mlp, rows.requires_grad_(), probs.requires_grad_(), dy


def mlp_oracle(mlp: GroupedMLP, rows: torch.Tensor, probs: torch.Tensor, dy: torch.Tensor) -> oracle.Dense:
    """The rows as tokens that have one expert each."""
    ids = torch.repeat_interleave(torch.arange(len(SPLITS)), torch.tensor(SPLITS))[:, None]
    layout = oracle.lay_out([ids.numpy()], len(SPLITS))
    rows, probs, dy = rows[:NUM_ROWS], probs[:NUM_ROWS, None], dy[:NUM_ROWS]
    return oracle.dense_moe(layout, [ids], [rows], [probs], [mlp.fc1.weight, mlp.fc2.weight], [dy])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", ["list", "tuple", "int32", "int64"])
@pytest.mark.parametrize("buffers", [False, True], ids=["own buffers", "given buffers"])
def test_grouped_mlp_is_the_oracle(dtype: torch.dtype, form: str, buffers: bool):
    mlp, rows, probs, dy = mlp_and_inputs(dtype)
    want = mlp_oracle(mlp, rows, probs, dy)
    splits = {
        "list": list(SPLITS),
        "tuple": SPLITS,
        "int32": torch.tensor(SPLITS, dtype=torch.int32),
        "int64": torch.tensor(SPLITS),
    }[form]
    out = torch.full_like(rows, 7.0, requires_grad=False) if buffers else None
    grad_out = torch.full_like(rows, 9.0, requires_grad=False) if buffers else None
    y = mlp(rows, splits, probs, out=out, grad_input_out=grad_out)
    y.backward(dy)
    if buffers:
        assert y.data_ptr() == out.data_ptr()
        assert rows.grad[:NUM_ROWS].equal(grad_out[:NUM_ROWS])
        assert bool((out[NUM_ROWS:] == 7.0).all())
        assert bool((grad_out[NUM_ROWS:] == 9.0).all())
    findings = Findings()
    compare(findings, "y", y[:NUM_ROWS], want.y[0], dtype)
    compare(findings, "d_rows", rows.grad[:NUM_ROWS], want.dx[0], dtype)
    compare(findings, "d_probs", probs.grad[:NUM_ROWS, None], want.dprobs[0], dtype, num_terms=I)
    compare(findings, "dw1", mlp.fc1.weight.grad, want.dweights[0], dtype)
    compare(findings, "dw2", mlp.fc2.weight.grad, want.dweights[1], dtype)
    assert findings.texts == []
    for group, count in enumerate(SPLITS):
        assert bool(mlp.fc1.weight.grad[group].any()) == bool(mlp.fc2.weight.grad[group].any()) == (count > 0)


def test_grouped_mlp_without_rows():
    mlp = GroupedMLP(2, H, I)
    rows = torch.empty(0, H, requires_grad=True)
    y = mlp(rows, [0, 0], torch.empty(0))
    y.sum().backward()
    assert y.shape == rows.grad.shape == (0, H)
    assert not mlp.fc1.weight.grad.any()
    assert not mlp.fc2.weight.grad.any()


def test_grouped_mlp_without_gradients():
    mlp, rows, probs, _ = mlp_and_inputs(torch.float32)
    y = mlp(rows, SPLITS, probs)
    with torch.no_grad():
        quiet = mlp(rows, SPLITS, probs)
    evaluated = mlp.eval()(rows.detach(), SPLITS, probs.detach())
    assert not quiet.requires_grad
    assert evaluated.requires_grad  # eval() is about dropout and the like; the weights still take gradients
    assert quiet[:NUM_ROWS].equal(y[:NUM_ROWS])
    assert evaluated[:NUM_ROWS].equal(y[:NUM_ROWS])


def test_grouped_mlp_refuses_wrong_arguments():
    mlp, rows, probs, _ = mlp_and_inputs(torch.float32)
    rows, probs = rows.detach(), probs.detach()
    n = len(rows)
    wrong = [
        ((rows[:, 1:], SPLITS, probs), {}, rf"rows has shape \[{n}, {H - 1}\]; it must be \[\.\.\., {H}\]"),
        ((rows[0], SPLITS, probs[0]), {}, r"rows has shape"),
        ((rows.bfloat16(), SPLITS, probs), {}, r"rows is torch.bfloat16; the weights are torch.float32"),
        ((rows, SPLITS, probs[1:]), {}, rf"torch.float32 \[{n - 1}\] on cpu; it must be floating point \[{n}\] on cpu"),
        ((rows, SPLITS, probs.int()), {}, r"row_probs is torch.int32 .* must be floating point"),
        ((rows, SPLITS[1:], probs), {}, r"splits has shape \[4\]; it must be \[5\]"),
        ((rows, torch.tensor(SPLITS).float(), probs), {}, r"splits has dtype torch.float32"),
        ((rows, [3, 0, 5, 1, n], probs), {}, rf"splits \(\[3, 0, 5, 1, {n}\]\) .* at most {n} rows"),
        ((rows, [3, 0, 5, 1, -1], probs), {}, r"splits \(\[3, 0, 5, 1, -1\]\)"),
        ((rows, SPLITS, probs), {"out": rows}, r"out \[.*overlaps a tensor"),
        ((rows, SPLITS, probs), {"out": torch.empty(n, H + 1)}, rf"out has shape \[{n}, {H + 1}\]"),
        ((rows, SPLITS, probs), {"out": torch.empty(n, H).half()}, r"out has dtype torch.float16"),
        ((rows, SPLITS, probs), {"grad_input_out": torch.empty(H, n).t()}, r"grad_input_out has strides"),
        ((rows, SPLITS, probs), {"grad_input_out": torch.empty(n, H, device="meta")}, r"grad_input_out is on meta"),
        ((rows, SPLITS, probs), {"grad_input_out": [1.0]}, r"grad_input_out \(list\)"),
    ]
    for positional, named, text in wrong:
        with pytest.raises(ArgumentError, match=text):
            mlp(*positional, **named)
    for sizes in ((0, H, I), (1, 0, I), (1, H, 0)):
        with pytest.raises(ArgumentError, match=r"\(0\) must be at least 1"):
            GroupedMLP(*sizes)


# -- the expert-parallel MLP ------------------------------------------------------------------------------------------


def shapes(device: str) -> tuple[int, int]:
    return (H, I) if device == "cpu" else (GPU_H, GPU_I)


def global_weights(num_experts: int, hidden: int, ffn: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """w1 and w2 of all experts, the same on all ranks."""
    generator = torch.Generator().manual_seed(11)
    w1 = torch.randn((num_experts, 2 * ffn, hidden), generator=generator) / hidden**0.5
    w2 = torch.randn((num_experts, hidden, ffn), generator=generator) / ffn**0.5
    return [w1.to(dtype), w2.to(dtype)]


def local_part(weights: list[torch.Tensor], heap: SymmetricHeap) -> list[torch.Tensor]:
    """This rank's experts as leaves on its device."""
    local = weights[0].shape[0] // heap.num_ranks
    mine = slice(heap.rank * local, (heap.rank + 1) * local)
    return [w[mine].to(heap.device, copy=True).requires_grad_() for w in weights]


def check_mlp(rank: int, num_ranks: int, numbers: list[int], device: str, dtype: torch.dtype) -> list[str]:
    findings = Findings()
    with open_heap(device) as heap:
        for number in numbers:
            case = routings.case_on(number, device)
            findings.where = f"rank {rank} of {num_ranks}, {case}, {dtype}"
            _check_mlp(heap, case, shapes(device), dtype, findings)
        findings.equal("staging copies", heap.statistics.num_staging_copies, 0)
    return findings.texts


# Ways of an expert-parallel step: the first is compared with the oracle, the others with the first's bits.
WAYS = tuple(
    {"layout": layout, "schedule": schedule}
    for schedule in ("serial", "always-overlapped")
    for layout in ("packed", "expert-major")
)


def _check_mlp(
    heap: SymmetricHeap,
    case: routings.Case,
    sizes: tuple[int, int],
    dtype: torch.dtype,
    findings: Findings,
) -> None:
    rank, (hidden, ffn), routing = heap.rank, sizes, case.routing(heap.num_ranks)
    ids = torch.from_numpy(routing.topk_idx[rank])
    all_ids = oracle.gather(ids)
    layout = oracle.lay_out([t.numpy() for t in all_ids], routing.num_experts, capacity=routing.capacity)
    if routing.overflow == "raise" and layout.num_dropped:
        return
    weights = global_weights(routing.num_experts, hidden, ffn, dtype)
    rng = case.generator(600 + rank)
    x, dy = (torch.from_numpy(rng.standard_normal((len(ids), hidden))).to(dtype) for _ in range(2))
    probs = case.probs(rank, len(ids))
    want = oracle.dense_moe(layout, all_ids, oracle.gather(x), oracle.gather(probs), weights, oracle.gather(dy))

    x, probs = x.to(heap.device).requires_grad_(), probs.to(heap.device).requires_grad_()
    experts = experts_of(*local_part(weights, heap))
    leaves = x, probs, experts.fc1.weight, experts.fc2.weight
    where, first = findings.where, None
    for order, way in ((order, way) for order in ("rank", "slot") for way in WAYS):
        findings.where = f"{where}, order={order}, {way}"
        poison(heap)
        plan = make_plan(ids.to(heap.device), **routing.arguments, heap=heap)
        y = expert_parallel_mlp(x, probs, experts, plan, order=order, **way)
        found = [y.detach(), *torch.autograd.grad(y, leaves, dy.to(heap.device))]
        del y
        findings.equal("leased bytes", heap.leased_bytes, 0)
        if way != WAYS[0]:
            for name, got, one in zip(("y", "dx", "dprobs", "dw1", "dw2"), found, first, strict=True):
                findings.check(torch.equal(got, one), f"{name} has other bits than with {WAYS[0]}")
            continue
        first = found
        y, dx, dprobs, dw1, dw2 = found
        mine = slice(rank * len(dw1), (rank + 1) * len(dw1))
        compare(findings, "y", y, want.y[rank], dtype)
        compare(findings, "dx", dx, want.dx[rank], dtype)
        compare(findings, "dprobs", dprobs, want.dprobs[rank], dtype, num_terms=ffn)
        compare(findings, "dw1", dw1, want.dweights[0][mine], dtype)
        compare(findings, "dw2", dw2, want.dweights[1][mine], dtype)
        # What has no row has no gradient at all, not a small one.
        nowhere = torch.from_numpy(layout.slot_to_row[rank] < 0)
        findings.check(not dprobs.cpu()[nowhere].any(), "a slot without a row has a gradient")
        for g, count in enumerate(layout.splits[rank]):
            findings.equal(f"expert {g} has a gradient", bool(dw1[g].any()), count > 0)


def few_cases(per_stratum: int) -> list[int]:
    """Finite cases of every stratum; the float64 loops are slow."""
    chosen = [n for n in routings.chosen() if routings.CASES[n].stratum != "nonfinite"]
    return chosen[: per_stratum * len(routings.STRATA)]


@pytest.mark.parametrize("num_ranks", [1, 2, pytest.param(3, marks=pytest.mark.slow), 4])
def test_expert_parallel_mlp_is_the_oracle(cluster, num_ranks: int):
    numbers = few_cases(3 if num_ranks < 4 else 2)
    assert flat(cluster(num_ranks).run(check_mlp, numbers, "cpu", torch.float32)) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_expert_parallel_mlp_in_half_precision(cluster, dtype: torch.dtype):
    assert flat(cluster(2).run(check_mlp, few_cases(1), "cpu", dtype)) == []


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_expert_parallel_mlp_is_the_oracle_on_gpus(cluster, num_ranks: int, dtype: torch.dtype):
    assert flat(cluster(num_ranks, "cuda").run(check_mlp, few_cases(1), "cuda", dtype, timeout_s=280)) == []


def check_public_parts(rank: int, num_ranks: int, device: str, dtype: torch.dtype) -> list[str]:
    """dispatch_tokens, GroupedMLP into leases, combine_tokens: the oracle's numbers and not one staging copy."""
    findings = Findings()
    hidden, ffn = shapes(device)
    with open_heap(device) as heap:
        for number in few_cases(1):
            case = routings.case_on(number, device)
            findings.where = f"rank {rank} of {num_ranks}, {case}"
            routing = case.routing(num_ranks)
            ids = torch.from_numpy(routing.topk_idx[rank])
            all_ids = oracle.gather(ids)
            layout = oracle.lay_out([t.numpy() for t in all_ids], routing.num_experts, capacity=routing.capacity)
            if routing.overflow == "raise" and layout.num_dropped:
                continue
            rng = case.generator(700 + rank)
            x, dy = (torch.from_numpy(rng.standard_normal((len(ids), hidden))).to(dtype) for _ in range(2))
            probs = case.probs(rank, len(ids))
            weights = global_weights(routing.num_experts, hidden, ffn, dtype)
            want = oracle.dense_moe(layout, all_ids, oracle.gather(x), oracle.gather(probs), weights, oracle.gather(dy))

            mlp = GroupedMLP(case.experts_per_rank, hidden, ffn, dtype=dtype, device=heap.device)
            with torch.no_grad():
                for parameter, whole in zip((mlp.fc1.weight, mlp.fc2.weight), local_part(weights, heap), strict=True):
                    parameter.copy_(whole)
            x, probs = x.to(heap.device).requires_grad_(), probs.to(heap.device).requires_grad_()
            plan = make_plan(ids.to(heap.device), **routing.arguments, heap=heap)
            shape, num_rows = (plan.row_capacity, hidden), len(layout.rows[rank])
            with (
                poisoned_lease(heap, shape, dtype, name="rows") as rows_lease,
                poisoned_lease(heap, shape, dtype, name="expert output") as out_lease,
                poisoned_lease(heap, shape, dtype, name="gradient of the output") as d_out_lease,
                poisoned_lease(heap, shape, dtype, name="gradient of the rows") as d_rows_lease,
            ):
                rows, row_probs = dispatch_tokens(x, plan, probs=probs, out=rows_lease.tensor)
                n = rows.shape[0]
                out, d_rows = out_lease.tensor[:n], d_rows_lease.tensor[:n]
                expert_out = mlp(rows, plan.splits, row_probs, out=out, grad_input_out=d_rows)
                y = combine_tokens(expert_out, plan, grad_out=d_out_lease.tensor[:n])
                y.backward(dy.to(heap.device))
                for lease in (rows_lease, out_lease, d_out_lease, d_rows_lease):
                    findings.check(is_poison(lease.tensor[num_rows:]), f"the tail of '{lease.name}' was written")
                compare(findings, "y", y, want.y[rank], dtype)
                compare(findings, "dx", x.grad, want.dx[rank], dtype)
                compare(findings, "dprobs", probs.grad, want.dprobs[rank], dtype, num_terms=ffn)
                mine = slice(rank * mlp.num_groups, (rank + 1) * mlp.num_groups)
                compare(findings, "dw1", mlp.fc1.weight.grad, want.dweights[0][mine], dtype)
                compare(findings, "dw2", mlp.fc2.weight.grad, want.dweights[1][mine], dtype)
                del rows, expert_out, y
            findings.equal("leased bytes", heap.leased_bytes, 0)
        findings.equal("staging copies", heap.statistics.num_staging_copies, 0)
    return findings.texts


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_public_parts_put_together(cluster, num_ranks: int):
    assert flat(cluster(num_ranks).run(check_public_parts, "cpu", torch.float32)) == []


@pytest.mark.gpu
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_public_parts_put_together_on_gpus(cluster, num_ranks: int):
    assert flat(cluster(num_ranks, "cuda").run(check_public_parts, "cuda", torch.bfloat16)) == []


# -- MoELayer ---------------------------------------------------------------------------------------------------------


def make_layer(heap: SymmetricHeap, config: MoEConfig) -> tuple[MoELayer, list[torch.Tensor]]:
    """A layer with known weights, and the weights of all its experts."""
    torch.manual_seed(17)  # the router is replicated
    layer = MoELayer(config, heap)
    weights = global_weights(config.num_experts, config.hidden, config.ffn, torch.float32)
    with torch.no_grad():
        w1, w2 = local_part(weights, heap)
        layer.experts.fc1.weight.copy_(w1)
        layer.experts.fc2.weight.copy_(w2)
    return layer, weights


def tokens_of(rank: int, num_tokens: int, hidden: int, salt: int = 0) -> torch.Tensor:
    return torch.randn((num_tokens, hidden), generator=torch.Generator().manual_seed(100 * salt + rank))


def check_layer(rank: int, num_ranks: int, device: str, options: dict) -> list[str]:
    findings = Findings()
    findings.where = f"rank {rank} of {num_ranks}, {options}"
    hidden, ffn = shapes(device)
    config = MoEConfig(
        hidden=hidden, ffn=ffn, num_experts=2 * num_ranks, top_k=2, **{"schedule": "always-overlapped", **options}
    )
    num_tokens = 7 + 3 * rank
    with open_heap(device) as heap:
        layer, weights = make_layer(heap, config)
        x = tokens_of(rank, num_tokens, hidden).to(heap.device).requires_grad_()
        dy = tokens_of(rank, num_tokens, hidden, salt=1)
        y, metrics = layer(x.view(1, num_tokens, hidden))
        findings.equal("shape of y", tuple(y.shape), (1, num_tokens, hidden))
        (y[0] * dy.to(heap.device)).sum().add(metrics.aux_loss).backward()

        # The router is somebody else's test; here it says where tokens go, and takes the gradient of the probs.
        again = x.detach().clone().requires_grad_()
        routed = layer.router(again)
        ids = routed.topk_idx.cpu().long()
        all_ids = oracle.gather(ids)
        layout = oracle.lay_out([t.numpy() for t in all_ids], config.num_experts, capacity=config.capacity)
        all_probs = oracle.gather(routed.probs)
        want = oracle.dense_moe(layout, all_ids, oracle.gather(x), all_probs, weights, oracle.gather(dy))
        load = np.array(layout.expert_load)
        findings.equal("expert_load", metrics.expert_load, load)
        findings.close("imbalance", metrics.imbalance, torch.tensor(load.max() / load.mean()), rtol=1e-6, atol=0)
        findings.equal("num_dropped", metrics.num_dropped, np.array([layout.num_dropped]))
        findings.check(layout.num_dropped > 0 or options.get("overflow") != "drop", "the case drops nothing")
        scores = routed.scores / routed.scores.sum(1, keepdim=True)
        fraction = torch.tensor(load / load.sum(), dtype=torch.float32, device=heap.device)
        aux = config.aux_loss_coef * config.num_experts * (fraction * scores.mean(0)).sum()
        aux = aux + config.z_loss_coef * routed.logits.logsumexp(1).square().mean()
        findings.close("aux_loss", metrics.aux_loss, aux, rtol=1e-5, atol=0)

        outer = (routed.probs * want.dprobs[rank].float().to(heap.device)).sum() + aux
        dx_router, dw_router = torch.autograd.grad(outer, [again, layer.router.weight])
        local = config.num_experts // num_ranks
        mine = slice(rank * local, (rank + 1) * local)
        compare(findings, "y", y[0], want.y[rank], torch.float32)
        compare(findings, "dx", x.grad, want.dx[rank] + dx_router.cpu().double(), torch.float32)
        compare(findings, "dw of the router", layer.router.weight.grad, dw_router.cpu(), torch.float32)
        compare(findings, "dw1", layer.experts.fc1.weight.grad, want.dweights[0][mine], torch.float32)
        compare(findings, "dw2", layer.experts.fc2.weight.grad, want.dweights[1][mine], torch.float32)
        findings.equal("leased bytes", heap.leased_bytes, 0)
    return findings.texts


LAYER_OPTIONS = (
    {},
    {"order": "slot", "score": "sigmoid", "route_scale": 2.5, "aux_loss_coef": 0.1},
    {"aux_loss_coef": 0.1, "z_loss_coef": 0.01},
    {"capacity": 200, "max_tokens": 20},
    {"capacity": 9, "max_tokens": 20, "overflow": "drop"},
)


@pytest.mark.parametrize("options", LAYER_OPTIONS, ids=str)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_layer_is_the_oracle(cluster, num_ranks: int, options: dict):
    assert flat(cluster(num_ranks).run(check_layer, "cpu", options)) == []


@pytest.mark.gpu
@pytest.mark.parametrize("options", LAYER_OPTIONS, ids=str)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_layer_is_the_oracle_on_gpus(cluster, num_ranks: int, options: dict):
    assert flat(cluster(num_ranks, "cuda").run(check_layer, "cuda", options)) == []


def check_flights(rank: int, num_ranks: int, device: str) -> list[str]:
    """Two layers, four micro-batches in flight; gradients as if they had come one after the other, bit for bit."""
    findings = Findings()
    hidden, ffn = shapes(device)
    config = MoEConfig(hidden=hidden, ffn=ffn, num_experts=2 * num_ranks, top_k=2, schedule="always-overlapped")
    with open_heap(device) as heap:
        layers = [make_layer(heap, config)[0] for _ in range(2)]

        def forward(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
            x = tokens_of(rank, 5 + batch, hidden, salt=batch).to(heap.device).requires_grad_()
            hidden_state = x
            for layer in layers:
                hidden_state = hidden_state + layer(hidden_state)[0]
            return x, hidden_state

        def gradients(x: torch.Tensor) -> list[torch.Tensor]:
            found = [x.grad] + [p.grad for layer in layers for p in layer.parameters()]
            for layer in layers:
                layer.zero_grad(set_to_none=True)
            return found

        alone, most = [], 0
        for batch in range(4):
            x, y = forward(batch)
            most = max(most, heap.leased_bytes)
            y.sum().backward()
            alone.append((y.detach(), gradients(x)))
        findings.check(most > 0, "nothing was saved on the heap")
        for backwards in ([0, 1, 2, 3], [3, 2, 1, 0]):  # as pipelines drain, and the other way round
            findings.where = f"rank {rank} of {num_ranks}, backward in order {backwards}"
            flying = [forward(batch) for batch in range(4)]
            findings.check(heap.leased_bytes > most, "micro-batches share their saved rows")
            for batch in backwards:
                x, y = flying[batch]
                y.sum().backward()
                findings.check(torch.equal(y, alone[batch][0]), f"y of micro-batch {batch} differs")
                for one, other in zip(gradients(x), alone[batch][1], strict=True):
                    findings.check(torch.equal(one, other), f"a gradient of micro-batch {batch} differs")
            del flying, x, y
            findings.equal("leased bytes", heap.leased_bytes, 0)
    return findings.texts


def check_dtypes(rank: int, num_ranks: int, device: str) -> list[str]:
    """fp32 weights, tokens of another dtype or autocast: computed in that dtype, gradients in the weights' own."""
    findings = Findings()
    hidden, ffn = shapes(device)
    config = MoEConfig(hidden=hidden, ffn=ffn, num_experts=2 * num_ranks, top_k=2, schedule="always-overlapped")
    with open_heap(device) as heap:
        layer, _ = make_layer(heap, config)
        x = tokens_of(rank, 8, hidden).bfloat16().to(heap.device)  # the router sees the same numbers each time
        want = {}
        for name, tokens in (("fp32", x.float()), ("bf16", x), ("autocast", x.float())):
            findings.where = f"rank {rank} of {num_ranks}, {name}"
            tokens = tokens.clone().requires_grad_()
            with torch.autocast(device, torch.bfloat16, enabled=name == "autocast"):
                y, _ = layer(tokens)
            findings.equal("dtype of y", y.dtype, torch.float32 if name == "fp32" else torch.bfloat16)
            y.float().sum().backward()
            findings.equal("dtype of dx", tokens.grad.dtype, tokens.dtype)
            findings.equal("dtype of dw1", layer.experts.fc1.weight.grad.dtype, torch.float32)
            got = {"y": y, "dx": tokens.grad, "dw1": layer.experts.fc1.weight.grad, "dw": layer.router.weight.grad}
            layer.zero_grad(set_to_none=True)
            for key, tensor in got.items():
                want.setdefault(key, tensor)
                compare(findings, key, tensor, want[key], torch.bfloat16)
    return findings.texts


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_dtypes_of_a_layer(cluster, num_ranks: int):
    assert flat(cluster(num_ranks).run(check_dtypes, "cpu")) == []


@pytest.mark.gpu
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_dtypes_of_a_layer_on_gpus(cluster, num_ranks: int):
    assert flat(cluster(num_ranks, "cuda").run(check_dtypes, "cuda")) == []


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_micro_batches_in_flight(cluster, num_ranks: int):
    assert flat(cluster(num_ranks).run(check_flights, "cpu")) == []


@pytest.mark.gpu
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_micro_batches_in_flight_on_gpus(cluster, num_ranks: int):
    assert flat(cluster(num_ranks, "cuda").run(check_flights, "cuda")) == []


def check_leases(rank: int, num_ranks: int, device: str) -> list[str]:
    """Forward without backward, no-grad, a second backward."""
    findings = Findings()
    findings.where = f"rank {rank} of {num_ranks}"
    hidden, ffn = shapes(device)
    config = MoEConfig(hidden=hidden, ffn=ffn, num_experts=2 * num_ranks, top_k=2, schedule="always-overlapped")
    with open_heap(device) as heap:
        layer, _ = make_layer(heap, config)
        x = tokens_of(rank, 6, hidden).to(heap.device).requires_grad_()
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
        try:
            y.sum().backward()
        except RuntimeError as error:
            findings.check("second time" in str(error), str(error))
            findings.check(torch.equal(x.grad, grad), "the second backward left something")
        else:
            findings.check(False, "the second backward raised nothing")
        findings.equal("leased bytes after a second backward", heap.leased_bytes, 0)
        y, _ = layer(x)
        y.sum().backward(retain_graph=True)
        findings.check(heap.leased_bytes > 0, "the graph is retained, its lease is not")
        y.sum().backward()
        findings.check(torch.equal(x.grad, grad + grad + grad), "backward through a retained graph differs")
        del y
        findings.equal("leased bytes after a retained graph", heap.leased_bytes, 0)
        x.grad = None
        y, _ = layer(x)
        y.sum().backward()
        findings.check(torch.equal(y, first), "the next step differs")
        del y

        empty = torch.zeros(0 if rank == 0 else 2, hidden, device=heap.device, requires_grad=True)
        y, metrics = layer(empty)
        (y.sum() + metrics.aux_loss).backward()
        findings.equal("shape of the gradient", empty.grad.shape, empty.shape)
        findings.equal("slots", int(metrics.expert_load.sum()), 4 * (num_ranks - 1))
        del y, metrics
        findings.equal("leased bytes", heap.leased_bytes, 0)
    return findings.texts


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_leases_of_a_layer(cluster, num_ranks: int):
    assert flat(cluster(num_ranks).run(check_leases, "cpu")) == []


@pytest.mark.gpu
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_leases_of_a_layer_on_gpus(cluster, num_ranks: int):
    assert flat(cluster(num_ranks, "cuda").run(check_leases, "cuda")) == []


# -- gradients of a whole model ---------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    """A dense layer and an MoE layer, trained on the mean over tokens plus the balance loss."""

    def __init__(self, heap: SymmetricHeap, config: MoEConfig) -> None:
        super().__init__()
        torch.manual_seed(23)
        self.dense = torch.nn.Linear(config.hidden, config.hidden)
        self.moe, _ = make_layer(heap, config)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        y, metrics = self.moe(self.dense(x))
        return y.square().mean() + metrics.aux_loss


def check_reduction(rank: int, num_ranks: int, ep_size: int) -> list[str]:
    """EP groups of neighbours against one process that has all experts and all tokens."""
    findings = Findings()
    findings.where = f"rank {rank} of {num_ranks}, EP groups of {ep_size}"
    ep_groups = [dist.new_group(list(range(r, r + ep_size))) for r in range(0, num_ranks, ep_size)]
    replica_groups = [dist.new_group(list(range(r, num_ranks, ep_size))) for r in range(ep_size)]
    alone = [dist.new_group([r]) for r in range(num_ranks)]
    # The balance loss is about the tokens of an EP group, so it is the global one only where the world is one group.
    config = MoEConfig(
        hidden=H,
        ffn=I,
        num_experts=8,
        top_k=3,
        schedule="always-overlapped",
        aux_loss_coef=0.1 if ep_size == num_ranks else 0.0,
    )
    batches = [tokens_of(r, 6, H, salt=9) for r in range(num_ranks)]
    with (
        SymmetricHeap(ep_groups[rank // ep_size], num_bytes=4 << 20, backend="host") as heap,
        SymmetricHeap(alone[rank], num_bytes=4 << 20, backend="host") as single,
    ):
        whole, model = Block(single, config), Block(heap, config)
        whole.loss(torch.cat(batches)).backward()
        model.loss(batches[rank]).backward()
        reduce_gradients(model, expert_group=replica_groups[rank % ep_size] if ep_size < num_ranks else None)
        local = config.num_experts // ep_size
        mine = slice(rank % ep_size * local, (rank % ep_size + 1) * local)
        for (name, got), want in zip(model.named_parameters(), whole.parameters(), strict=True):
            part = want.grad[mine] if name.startswith("moe.experts") else want.grad
            findings.check(bool(part.any()), f"{name} has no gradient to compare")
            compare(findings, f"gradient of {name}", got.grad, part, torch.float32)
    for group in [*ep_groups, *replica_groups, *alone]:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    return findings.texts


@pytest.mark.parametrize(("num_ranks", "ep_size"), [(1, 1), (2, 2), (4, 4), (4, 2), (2, 1)])
def test_reduced_gradients_are_those_of_one_process(cluster, num_ranks: int, ep_size: int):
    assert flat(cluster(num_ranks).run(check_reduction, ep_size)) == []


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
def test_hooks_that_never_run_are_warned_of(where: str):
    with open_heap("cpu") as heap:
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
        layer = MoELayer(MoEConfig(hidden=H, ffn=I, num_experts=4, top_k=2), heap, shared_expert=shared)
        for name in ("", "router", "shared_expert"):
            layer.get_submodule(name).register_forward_hook(lambda *_, name=name: ran.append(name))
        layer.experts.fc1.weight.register_hook(lambda _: ran.append("weight"))
        layer(torch.randn(3, H))[0].sum().backward()
    assert sorted(ran) == ["", "router", "shared_expert", "weight"]


# -- another default device -------------------------------------------------------------------------------------------


def check_default_device(rank: int, num_ranks: int) -> list[str]:
    """Under a default device that holds no numbers: whatever does not say where it is made gives itself away."""
    findings = Findings()
    options = (
        {},
        {"capacity": 64, "max_tokens": 8, "stash": "none"},
        {"precision": Float8Block(), "quantized_wire": "both", "ffn": 32},
        {"precision": NVFP4(hadamard_signs=5), "hidden": 64, "ffn": 32},
    )
    with open_heap("cpu") as heap:
        for number, option in enumerate(options):
            findings.where = f"rank {rank} of {num_ranks}, {option}"
            features = {"aux_loss_coef": 0.1, "z_loss_coef": 0.1, "expert_bias": True, "aux_loss": "global"}
            config = MoEConfig(
                **{"hidden": H, "ffn": I, "num_experts": 2 * num_ranks, "top_k": 2, **features, **option}
            )
            layer, x = MoELayer(config, heap), tokens_of(rank, 5 + rank, config.hidden, salt=number)
            mask = torch.ones(len(x), dtype=torch.bool)

            def step(layer: MoELayer = layer, x: torch.Tensor = x, mask: torch.Tensor = mask) -> list[torch.Tensor]:
                num_experts = layer.config.num_experts
                leaf = x.clone().requires_grad_()
                y, metrics = layer(leaf, mask)
                (y.square().sum() + metrics.aux_loss).backward()
                found = [y.detach(), leaf.grad, *(p.grad for p in layer.parameters())]
                layer.zero_grad(set_to_none=True)
                layer.router.step_load.zero_()
                plan = make_plan(metrics.topk_idx, num_experts=num_experts, heap=heap)
                rows, probs = dispatch_tokens(x, plan, probs=x.new_ones(metrics.topk_idx.shape))
                return [*found, combine_tokens(rows * probs[:, None], plan)]

            want = step()
            with torch.device("meta"):
                found = step()
                findings.check(0 <= draw_signs() < 1 << 16, "signs")
            for number, (got, wanted) in enumerate(zip(found, want, strict=True)):
                findings.check(got.device.type == "cpu" and torch.equal(got, wanted), f"tensor {number} differs")
    return findings.texts


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_default_device_does_not_matter(cluster, num_ranks: int):
    assert flat(cluster(num_ranks).run(check_default_device)) == []
