"""Latent experts beyond test_features.py: dtypes, bytes of rows, and gradients of the projections."""

import pytest
import torch
from cluster import run_on
from layers import layer_config
from worker import Findings

import symmoe
from symmoe import MoELayer, SymmetricHeap
from symmoe.errors import ArgumentError
from symmoe.metrics import MetricsLogger
from symmoe.tools.shapes import PRESETS, config_of
from symmoe.training import plan_memory

SIZES = {"hidden": 64, "ffn": 16, "num_experts": 8, "top_k": 2}


def make_layer(heap: SymmetricHeap, latent: int | None = 16) -> MoELayer:
    torch.manual_seed(3)
    return MoELayer(layer_config(latent=latent, **SIZES), heap)


@pytest.mark.parametrize("autocast", [False, True])
def test_the_layer_computes_in_the_dtype_of_its_input(heap: SymmetricHeap, autocast: bool):
    """Parameters are fp32, as in trainers; the expected y is that of the experts between two products of torch."""
    layer = make_layer(heap)
    bare = MoELayer(
        layer_config(**SIZES | {"hidden": 16}, router=None), heap, experts=layer.experts
    )
    x = torch.randn(24, 64, dtype=torch.float32 if autocast else torch.bfloat16, requires_grad=True)
    down, up = (
        projection.weight.bfloat16()
        for projection in (layer.fc1_latent_proj, layer.fc2_latent_proj)
    )
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y, metrics = layer(x)
        with torch.no_grad():
            routed = layer.router(x)
            rows, _ = bare(x.bfloat16() @ down.T, topk_idx=routed.topk_idx, probs=routed.probs)
    assert y.dtype == torch.bfloat16
    assert torch.equal(metrics.topk_idx, routed.topk_idx)
    assert torch.equal(y, rows @ up.T)
    y.float().square().sum().backward()
    for parameter in layer.parameters():
        assert parameter.dtype == parameter.grad.dtype == torch.float32
        assert parameter.grad.count_nonzero()


@run_on(2)
def test_rows_travel_in_the_latent_width(
    rank: int, num_ranks: int, findings: Findings, heap: SymmetricHeap
) -> None:
    """Projections are replicated: their gradients are means over the ranks, like the router's."""
    sent = {}
    for latent in (None, 16):
        layer = make_layer(heap, latent)
        symmoe.training.broadcast_parameters(layer)
        logger = MetricsLogger(layer)
        x = torch.randn(10 + rank, 64, generator=torch.Generator().manual_seed(rank))
        layer(x)[0].sum().backward()
        sent[latent] = logger.step(0)[0].dispatch_bytes
        logger.close()
    findings.equal("bytes of dispatch", 4 * sent[16], sent[None])
    findings.check(sent[16] > 0, "no rows travel")
    local = layer.fc1_latent_proj.weight.grad.clone()
    parts = [torch.empty_like(local) for _ in range(num_ranks)]
    torch.distributed.all_gather(parts, local)
    symmoe.reduce_gradients(layer)
    mean = sum(parts) / 2
    findings.close("gradient", layer.fc1_latent_proj.weight.grad, mean, rtol=0, atol=1e-6)


def test_one_autograd_function_includes_the_router(heap: SymmetricHeap):
    layer = make_layer(heap)
    x = torch.randn(12, 64, requires_grad=True)
    runs = []
    for _ in range(6):
        before = heap.programs.num_runs
        layer(x)[0].sum().backward()
        runs.append(heap.programs.num_runs - before)
    assert runs[-1] == 2  # forward and backward
    names = [name for name, _ in layer.named_parameters()]
    assert {"fc1_latent_proj.weight", "fc2_latent_proj.weight"} <= {*names}
    assert torch.compile(layer, backend="eager")(x)[0].equal(layer(x)[0])


def test_plans_use_the_latent_width():
    sizes = {"num_ranks": 2, "num_tokens": 256}
    narrow, wide = (
        plan_memory(layer_config(latent=latent, **SIZES | {"hidden": 1024}), **sizes)
        for latent in (256, None)
    )
    assert 3 < wide.lease_bytes_per_call / narrow.lease_bytes_per_call < 4.5
    # The tokens themselves are kept besides their rows.
    activation_bytes = wide.activation_bytes_per_call + 256 * 256 * 2
    assert narrow.activation_bytes_per_call == activation_bytes
    assert config_of(PRESETS["kimi-k3"]).expert_hidden == 3584


def test_wrong_widths_are_refused(heap: SymmetricHeap):
    with pytest.raises(ArgumentError, match=r"experts.hidden \(64\) must be 16"):
        MoELayer(layer_config(latent=16, **SIZES), heap, experts=make_layer(heap, None).experts)
