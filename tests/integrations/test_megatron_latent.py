"""Megatron's latent experts: Megatron's layer projects tokens to a smaller width and back, and symmoe moves and
computes rows of that width. A linear layer of torch replaces Transformer Engine's linear layer here."""

from unittest import mock

import pytest

pytest.importorskip("megatron.core")

import megatron_cases as cases
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cluster import run_on
from megatron.core.transformer.moe import moe_layer

LATENT, FFN, TOP_K = 16, 24, 3
FIELDS = {
    "moe_latent_size": LATENT,
    "moe_ffn_hidden_size": FFN,
    "moe_router_topk": TOP_K,
    "moe_shared_expert_intermediate_size": 40,
}


class Linear(torch.nn.Linear):
    """Replaces TELinear: returns None for the bias beside the result."""

    def __init__(self, in_features: int, out_features: int, **options: object) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x):
        return super().forward(x), None


def reference(layer, weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The layer's output, computed expert by expert for its router's choice."""
    probs, routing_map = layer.router(x)
    tokens = F.linear(x, layer.fc1_latent_proj.weight).view(-1, LATENT)
    sums = torch.zeros_like(tokens)
    for expert in range(cases.NUM_EXPERTS):
        gate, up = F.linear(tokens, weights[f"{expert}.linear_fc1"]).chunk(2, dim=1)
        results = F.linear(F.silu(gate) * up, weights[f"{expert}.linear_fc2"])
        sums = sums + results * (probs * routing_map)[:, expert, None]
    return F.linear(sums, layer.fc2_latent_proj.weight).view_as(x) + layer.shared_experts(x)


@run_on(1, 2)
def test_latent_experts_are_the_reference(rank: int, num_ranks: int) -> None:
    with cases.opened(ep=num_ranks, fields=FIELDS) as (config, heap, forms):
        with mock.patch.multiple(moe_layer, create=True, HAVE_TE=True, TELinear=Linear):
            layer = cases.layer_of(config, forms["experts"])
        for step in range(3):  # later ones run programs
            drawn = [torch.Generator().manual_seed(10 * step + r) for r in range(num_ranks)]
            calls = [torch.randn(2, 6 + r, 2, 32, generator=g) for r, g in enumerate(drawn)]
            layer.zero_grad()
            x, dy = calls[rank]
            y, dx = cases.differentiated(layer, x, dy)
            local = {
                name.partition("experts.")[2].removesuffix(".weight"): part
                for name, part in cases.named_parameters(layer)
                if name.startswith("experts.")
            }
            gathered: list = [None] * num_ranks
            dist.all_gather_object(gathered, {name: part.detach() for name, part in local.items()})
            weights = {name: part for tensors in gathered for name, part in tensors.items()}
            assert len(weights) == 2 * cases.NUM_EXPERTS
            for weight in weights.values():
                weight.requires_grad_()
            projections = layer.fc1_latent_proj.weight, layer.fc2_latent_proj.weight
            actual = {"y": y, "dx": dx, "down": projections[0].grad, "up": projections[1].grad}
            expected = {}
            for r, (x, dy) in enumerate(calls):
                x = x.clone().requires_grad_()
                result = reference(layer, weights, x)
                inputs = x, *projections, *weights.values()
                dx, down, up, *d_weights = torch.autograd.grad(result, inputs, dy)
                if r == rank:
                    expected |= {"y": result.detach(), "dx": dx, "down": down, "up": up}
                for name, gradient in zip(weights, d_weights, strict=True):
                    if name in local:
                        expected[name] = expected.get(name, 0) + gradient
            actual |= {name: part.grad for name, part in local.items()}
            changes = cases.differences(actual, expected)
            assert max(changes.values(), default=0.0) < cases.ROUNDING, changes
        assert heap.statistics.num_staging_copies == 0
        assert heap.programs.num_runs > 0
