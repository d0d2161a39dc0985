"""Checks of expert-parallel layers in low precision, for ranks on CPUs and on GPUs."""

import gc
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import oracle
import torch
from layers import WAYS, global_weights, local_part, tokens_of
from low_precision_cases import ONE_PRODUCT, RECIPES, TWO_LAYERS
from low_precision_oracle import relative_error
from stacks import Stack, compare_bits, step
from torch.utils.checkpoint import checkpoint
from worker import Findings, Watching, experts_of, open_heap, poison

from symmoe import GroupedMLP, MoEConfig, MoELayer, make_plan
from symmoe.grouped import quantized_experts
from symmoe.kernels import twin
from symmoe.moe.ep_step import expert_parallel_mlp
from symmoe.precision import Float8Block

H, I, K = 512, 32, 2

RANK_TO_TOKENS = (300, 3, 61, 0)  # experts of several tiles: FC2 computes some of them before the others

WIRE_RECIPES = [recipe for recipe in RECIPES if recipe.row_format.element == "e4m3"]

NAMES = ("y", "dx", "dprobs", "dw1", "dw2")

STASHED = list(zip(WAYS[1:], ("rows", "hidden", "none"), strict=True))

STASHED_SLOT = [WAYS[0], {**WAYS[3], "stash": "rows"}]


def check_ways(rank: int, num_ranks: int, findings: Findings, device: str, recipe, dtype: torch.dtype) -> None:
    """The same bits in all of them, near the oracle; what travels quantised changes weight gradients alone."""
    element = recipe.row_format.element
    num_experts, num_tokens = 2 * num_ranks, RANK_TO_TOKENS[rank]
    generator = torch.Generator().manual_seed(rank)
    ids = torch.rand((num_tokens, num_experts), generator=generator).topk(K).indices
    probs = torch.rand((num_tokens, K), generator=generator) + 0.25
    x, dy = (tokens_of(rank, num_tokens, H, salt=salt).to(dtype) for salt in (1, 2))
    all_ids, weights = oracle.gather(ids), global_weights(num_experts, H, I, dtype)
    layout = oracle.lay_out([t.numpy() for t in all_ids], num_experts)
    gathered = [oracle.gather(tensor) for tensor in (x, probs, dy)]
    exact = oracle.dense_moe(layout, all_ids, *gathered[:2], weights, gathered[2])
    mine = slice(2 * rank, 2 * rank + 2)
    wanted = exact.y[rank], exact.dx[rank], exact.dprobs[rank], *(w[mine] for w in exact.dweights)
    with open_heap(device, num_bytes=32 << 20) as heap:
        x, probs, dy, ids = (tensor.to(heap.device) for tensor in (x, probs, dy, ids))
        experts = experts_of(*local_part(weights, heap), precision=recipe)
        leaves = x.requires_grad_(), probs.requires_grad_(), experts.fc1.weight, experts.fc2.weight

        def run(**way) -> list[torch.Tensor]:
            poison(heap)
            limits = {"capacity": 768, "max_tokens": 300} if way.get("stash") == "none" else {}
            plan = make_plan(ids, num_experts=num_experts, heap=heap, **limits)
            y = expert_parallel_mlp(x, probs, experts, plan, **way)
            found = [y.detach(), *torch.autograd.grad(y, leaves, dy)]
            del y
            findings.equal("leased bytes", heap.leased_bytes, 0)
            return found

        for order in ("rank", "slot"):
            ways = [*WAYS, *({**way, "stash": stash} for way, stash in STASHED)] if order == "rank" else STASHED_SLOT
            first = None
            for way in ways:
                findings.where = f"rank {rank} of {num_ranks}, {recipe}, order {order}, {way}"
                found = run(order=order, **way)
                first = found if first is None else first
                compare_bits(findings, found, first)
            for name, got, want in zip(NAMES, first, wanted, strict=True):
                if want.numel() > 50:  # few numbers may be small by chance
                    error = relative_error(got, want)
                    findings.check(0.01 < error < 1.25 * TWO_LAYERS[element], f"{name} is off by {error}")
        if element == "e4m3":
            for wire, way in (
                ("forward", WAYS[0]),
                ("backward", WAYS[3]),
                ("both", {**WAYS[1], "stash": "none"}),
                ("both", {**WAYS[2], "stash": "rows"}),
            ):
                findings.where = f"rank {rank} of {num_ranks}, {recipe}, wire {wire}, {way}"
                found = run(order="slot", quantized_wire=wire, **way)
                changed = {"dw1"} if wire == "forward" else {"dw2"} if wire == "backward" else {"dw1", "dw2"}
                for name, got, one, want in zip(NAMES, found, first, wanted, strict=True):
                    if name not in changed:
                        findings.check(torch.equal(got, one), f"{name} has other bits than without")
                        continue
                    # A row that was rounded once is rounded again along tokens: another 2.8 % at most. Where scales are
                    # powers of two, its numbers have 3 bits behind the leading one already, and nothing changes.
                    error = relative_error(got, want)
                    if recipe == Float8Block():
                        findings.check(not torch.equal(got, one), f"{name} knows nothing of the wire")
                    findings.check(error < 1.25 * (TWO_LAYERS[element] + ONE_PRODUCT[element] / 2), f"{name}: {error}")
        findings.equal("staging copies", heap.statistics.num_staging_copies, 0)


EXPERTS, TOKENS = 8, 44


def run_cut(rank, num_ranks, device: str, recipe, wire: str, cut: list[int], order: str) -> dict[str, np.ndarray]:
    """Bits of this rank's part of a batch that `cut` divides between the ranks."""
    generator = torch.Generator().manual_seed(4)
    ids = torch.rand((TOKENS, EXPERTS), generator=generator).topk(K).indices
    probs = torch.rand((TOKENS, K), generator=generator)
    x, dy = torch.randn((2, TOKENS, 64), generator=generator).bfloat16()
    tokens = slice(sum(cut[:rank]), sum(cut[: rank + 1]))
    with open_heap(device, num_bytes=8 << 20) as heap:
        weights = local_part(global_weights(EXPERTS, 64, 32, torch.bfloat16), heap)
        experts = experts_of(*weights, precision=recipe)
        ids, probs, x, dy = (tensor[tokens].to(heap.device) for tensor in (ids, probs, x, dy))
        x.requires_grad_()
        plan = make_plan(ids, num_experts=EXPERTS, heap=heap)
        y = expert_parallel_mlp(
            x, probs.requires_grad_(), experts, plan, order=order, schedule="always-overlapped", quantized_wire=wire
        )
        y.backward(dy)
        found = {"y": y, "dx": x.grad, "dprobs": probs.grad}
        found |= {"dw1": experts.fc1.weight.grad, "dw2": experts.fc2.weight.grad}
        return {name: tensor.detach().cpu().contiguous().view(torch.uint8).numpy() for name, tensor in found.items()}


def config_for(num_ranks: int, **options) -> MoEConfig:
    return MoEConfig(
        hidden=64, ffn=32, num_experts=2 * num_ranks, top_k=2, **{"schedule": "always-overlapped", **options}
    )


def check_layer(rank: int, num_ranks: int, findings: Findings, device: str, recipe, wire: str) -> None:
    """Two layers in a row, as they are, watched (so as operators), and recomputed: the same bits."""
    config = config_for(num_ranks, precision=recipe, quantized_wire=wire)
    with open_heap(device) as heap:

        def batch() -> torch.Tensor:
            return tokens_of(rank, 9, 64).to(heap.device).requires_grad_()

        model = Stack(heap, config)
        findings.equal("precision", model.layers[0].experts.precision, recipe)
        want, x = step(model, batch()), batch()
        with Watching():
            y = model(x)
            y.square().sum().backward()
        compare_bits(findings, [y.detach(), x.grad, *model.gradients()], want)
        del y

        def through(layer: MoELayer, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(lambda x: layer(x)[0], x, use_reentrant=False)

        kept = model(batch(), through=through)
        findings.equal("leased bytes between forward and backward", heap.leased_bytes, 0)
        del kept
        compare_bits(findings, step(model, batch(), through=through), want)
        plain = Stack(heap, replace(config, precision=None, quantized_wire="none"))
        for name, one, other in zip(("y", "dx"), step(plain, batch()), want, strict=False):
            findings.check(1e-4 < relative_error(other, one) < 0.5, f"{name} is not near the layer in full")
        gc.collect()
        findings.equal("leased bytes", heap.leased_bytes, 0)


def check_second_bias(rank: int, num_ranks: int, findings: Findings, device: str, recipe, wire: str) -> None:
    """The gradient of FC2's bias: the bits of a kernel that only sums, in every way to run a step, in parts too."""
    right = quantized_experts.QuantizedBackward

    class Summed(right):
        def __init__(self, x, weights, hidden, d_out, **options) -> None:
            super().__init__(x, weights, hidden, d_out, **options)
            x, want = self._x, torch.empty_like(self.db2)
            d_out = self._output_gradients(), x.row_index
            self._ops.grouped_bias_grad(d_out, x.row_range, want, scale=x.bias_scale)
            findings.check(torch.equal(self.db2, want) and want.any(), "db2 has other bits")
            steps.append(x)

    quantized_experts.QuantizedBackward, steps = Summed, []
    try:
        with open_heap(device, num_bytes=64 << 20) as heap:
            for way, (weights, dtype) in product(WAYS, (("packed", torch.float32), ("discrete", torch.bfloat16))):
                findings.where = f"rank {rank} of {num_ranks}, {recipe}, wire {wire}, {way}, {weights}, {dtype}"
                experts = GroupedMLP(2, H, I, bias=True, precision=recipe, weights=weights, device=heap.device)
                config = replace(config_for(num_ranks, precision=recipe, quantized_wire=wire, **way), hidden=H, ffn=I)
                layer = MoELayer(config, heap, experts=experts.to(dtype))
                y, _ = layer(tokens_of(rank, RANK_TO_TOKENS[rank], H).to(heap.device, dtype).requires_grad_())
                y.square().sum().backward()
                del y
    finally:
        quantized_experts.QuantizedBackward = right
    findings.equal("backward passes", len(steps), 2 * len(WAYS))


def count_calls(monkeypatch, *names: str) -> dict[str, int]:
    """How often the kernels of these names are called from now on."""
    counts = dict.fromkeys(names, 0)

    def counted(name: str, call, *args, **options):
        counts[name] += 1
        return call(*args, **options)

    for name in names:
        monkeypatch.setattr(twin, name, partial(counted, name, getattr(twin, name)))
    return counts
