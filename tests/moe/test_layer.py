"""expert_parallel_mlp, its public parts and MoELayer against the float64 oracle, and what happens to their leases."""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import warnings
from collections.abc import Callable, Iterator

import numpy as np
import oracle
import pytest
import routings
import torch
from cluster import on_ranks
from torch.utils.hooks import RemovableHandle
from worker import Findings, experts_of, is_poison, mlp_with_room, open_heap, poison, poisoned_lease

from symmoe import GroupedMLP, MoEConfig, MoELayer, SymmetricHeap, combine_tokens, dispatch_tokens, make_plan
from symmoe.dispatch.plan import Plan
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


# -- the expert-parallel MLP ------------------------------------------------------------------------------------------


def shapes(device: str) -> tuple[int, int]:
    return (H, I) if device == "cpu" else (GPU_H, GPU_I)


def config_for(num_ranks: int, device: str, **options) -> MoEConfig:
    """Two experts per rank, two for each token."""
    hidden, ffn = shapes(device)
    sizes = {"hidden": hidden, "ffn": ffn, "num_experts": 2 * num_ranks, "top_k": 2}
    return MoEConfig(**sizes, **{"schedule": "always-overlapped", **options})


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


@contextlib.contextmanager
def in_parts(
    x: torch.Tensor, probs: torch.Tensor, experts: GroupedMLP, plan: Plan, order: str, num_rows: int, findings: Findings
) -> Iterator[torch.Tensor]:
    """y of dispatch_tokens, the experts and combine_tokens, in leases; at the end their tails must be untouched."""
    names = ("rows", "expert output", "gradient of the output", "gradient of the rows")
    with contextlib.ExitStack() as stack:
        shape = (plan.row_capacity, x.shape[1])
        leases = [stack.enter_context(poisoned_lease(plan.heap, shape, x.dtype, name=name)) for name in names]
        rows_out, out, d_out, d_rows = (lease.tensor for lease in leases)
        rows, row_probs = dispatch_tokens(x, plan, probs=probs, out=rows_out, order=order)
        n = rows.shape[0]
        expert_out = experts(rows, plan.splits, row_probs, out=out[:n], grad_input_out=d_rows[:n])
        yield combine_tokens(expert_out, plan, order=order, grad_out=d_out[:n])
        for lease in leases:
            findings.check(is_poison(lease.tensor[num_rows:]), f"the tail of '{lease.name}' was written")
        del rows, expert_out


def check_mlp(rank: int, num_ranks: int, numbers: list[int], device: str, dtype: torch.dtype) -> list[str]:
    findings = Findings()
    with open_heap(device) as heap:
        for number in numbers:
            case = routings.case_on(number, device)
            findings.where = f"rank {rank} of {num_ranks}, {case}, {dtype}"
            _check_mlp(heap, case, shapes(device), dtype, findings)
        findings.equal("staging copies", heap.statistics.num_staging_copies, 0)
    return findings.texts


# Ways of an expert-parallel step: the first is compared with the oracle, and so are its public parts; the others with
# the first's bits.
WAYS = tuple(
    {"layout": layout, "schedule": schedule}
    for schedule in ("serial", "always-overlapped")
    for layout in ("packed", "expert-major")
)
WITH_ROOM = tuple({"with room": way} for way in (WAYS[0], WAYS[-1]))  # with exact capacity


def _check_mlp(
    heap: SymmetricHeap, case: routings.Case, sizes: tuple[int, int], dtype: torch.dtype, findings: Findings
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
    is_of_a_layer = routing.capacity is None and ids.shape[1] <= routing.num_experts
    ways = *WAYS, *(WITH_ROOM if is_of_a_layer else ()), "parts"
    for order, way in itertools.product(("rank", "slot"), ways):
        findings.where = f"{where}, order={order}, {way}"
        poison(heap)
        if way in WITH_ROOM:
            arguments = {"num_experts": routing.num_experts, "order": order, **way["with room"]}
            y = mlp_with_room(heap, ids.to(heap.device), x, probs, experts, **arguments)
            step = contextlib.nullcontext(y)
        else:
            plan = make_plan(ids.to(heap.device), **routing.arguments, heap=heap)
            if way == "parts":
                step = in_parts(x, probs, experts, plan, order, len(layout.rows[rank]), findings)
            else:
                step = contextlib.nullcontext(expert_parallel_mlp(x, probs, experts, plan, order=order, **way))
        with step as y:
            found = [y.detach(), *torch.autograd.grad(y, leaves, dy.to(heap.device))]
            del y
        del step
        findings.equal("leased bytes", heap.leased_bytes, 0)
        if way in (*WAYS[1:], *WITH_ROOM):
            for name, got, one in zip(("y", "dx", "dprobs", "dw1", "dw2"), found, first, strict=True):
                findings.check(torch.equal(got, one), f"{name} has other bits than with {WAYS[0]}")
            continue
        first = found if way == WAYS[0] else first
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


@pytest.mark.parametrize(
    ("num_ranks", "per_stratum"),
    [(2, 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 1), (1, 3), (2, 3), (3, 3), (4, 2)))],
)
def test_expert_parallel_mlp_is_the_oracle(cluster, num_ranks: int, per_stratum: int):
    assert cluster(num_ranks).findings(check_mlp, few_cases(per_stratum), "cpu", torch.float32) == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_expert_parallel_mlp_in_half_precision(cluster, dtype: torch.dtype):
    assert cluster(2).findings(check_mlp, few_cases(1), "cpu", dtype) == []


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_expert_parallel_mlp_is_the_oracle_on_gpus(cluster, num_ranks: int, dtype: torch.dtype):
    assert cluster(num_ranks, "cuda").findings(check_mlp, few_cases(1), "cuda", dtype, timeout_s=280) == []


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
    config = config_for(num_ranks, device, **options)
    num_tokens = 7 + 3 * rank
    with open_heap(device) as heap:
        layer, weights = make_layer(heap, config)
        x = tokens_of(rank, num_tokens, config.hidden).to(heap.device).requires_grad_()
        dy = tokens_of(rank, num_tokens, config.hidden, salt=1)
        y, metrics = layer(x.view(1, num_tokens, config.hidden))
        findings.equal("shape of y", tuple(y.shape), (1, num_tokens, config.hidden))
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
    {"capacity": 200, "max_tokens": 28},
    {"capacity": 9, "max_tokens": 28, "overflow": "drop"},
)


@pytest.mark.parametrize("options", LAYER_OPTIONS, ids=str)
@on_ranks(cpu=(1, 2, 4, 8), cuda=(1, 2, 4, 8))
def test_layer_is_the_oracle(cluster, num_ranks: int, device: str, options: dict):
    assert cluster(num_ranks, device).findings(check_layer, device, options) == []


def check_dtypes(rank: int, num_ranks: int, device: str) -> list[str]:
    """fp32 weights, tokens of another dtype or autocast: computed in that dtype, gradients in the weights' own."""
    findings = Findings()
    config = config_for(num_ranks, device)
    with open_heap(device) as heap:
        layer, _ = make_layer(heap, config)
        x = tokens_of(rank, 8, config.hidden).bfloat16().to(heap.device)  # the router sees the same numbers each time
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


def check_leases(rank: int, num_ranks: int, device: str) -> list[str]:
    """Forward without backward, no-grad, a second backward."""
    findings = Findings()
    findings.where = f"rank {rank} of {num_ranks}"
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

        empty = torch.zeros(0 if rank == 0 else 2, config.hidden, device=heap.device, requires_grad=True)
        y, metrics = layer(empty)
        (y.sum() + metrics.aux_loss).backward()
        findings.equal("shape of the gradient", empty.grad.shape, empty.shape)
        findings.equal("slots", int(metrics.expert_load.sum()), 4 * (num_ranks - 1))
        del y, metrics
        findings.equal("leased bytes", heap.leased_bytes, 0)
    return findings.texts


@pytest.mark.parametrize("check", [check_dtypes, check_leases])
@on_ranks(cpu=(1, 2, 4), cuda=(1, 2))
def test_a_layer(cluster, num_ranks: int, device: str, check: Callable[..., list[str]]):
    assert cluster(num_ranks, device).findings(check, device) == []


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
    assert cluster(num_ranks).findings(check_default_device) == []
