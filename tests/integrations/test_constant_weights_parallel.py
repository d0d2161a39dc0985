"""constant_weights where experts are DTensors, gathered or not, and inside torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from cluster import Cluster
from small_model import CONFIG, assert_same, equal_shares, open_heap, open_mesh, rank_loss, step, whole_gradients
from test_compile import block, heap, tokens  # noqa: F401 - heap is a fixture
from test_low_precision_layer import count_calls
from test_parallel import build

import symmoe
from symmoe.errors import ArgumentError
from symmoe.integrations.parallel import parameter_groups
from symmoe.precision import Float8Block

MICRO_BATCHES, NUM_WEIGHTS = 3, 4  # of two layers
QUANTIZED = replace(CONFIG, ffn=16, precision=Float8Block(), quantized_wire="both")


def accumulated(rank: int, num_ranks: int, layout: tuple[int, int], wrap: str) -> None:
    """Micro-batches in the block give the bits of those outside, and each weight is quantised once; a step is found."""
    mesh, shares = open_mesh(*layout), equal_shares(num_ranks)
    with open_heap(mesh) as shared, pytest.MonkeyPatch.context() as patch:
        model = build(mesh, shared, wrap, QUANTIZED)
        counts = count_calls(patch, "quantize_weights", "quantize_weight_pairs")
        found = []
        for make in (nullcontext, lambda: symmoe.constant_weights(model)):
            counts.update(dict.fromkeys(counts, 0))
            with make():
                losses = []
                for number in range(MICRO_BATCHES):
                    losses.append(rank_loss(model, number, rank, shares))
                    losses[-1].backward()
            found.append({"losses": torch.stack(losses).detach(), **whole_gradients(model)})
            times = MICRO_BATCHES if make is nullcontext else 1
            assert sum(counts.values()) == times * NUM_WEIGHTS, counts
            model.zero_grad()
        for name, want in found[0].items():
            assert torch.equal(found[1][name], want), name

        optimizer = torch.optim.SGD(parameter_groups(model), lr=0.1)
        with symmoe.constant_weights(model):
            rank_loss(model, 0, rank, shares).backward()
            optimizer.step()
            with pytest.raises(ArgumentError, match="written to inside constant_weights"):
                rank_loss(model, 0, rank, shares)
        before = rank_loss(model, 0, rank, shares)
        with symmoe.constant_weights(model):
            after = rank_loss(model, 0, rank, shares)
        assert torch.equal(before, after)


@pytest.mark.parametrize("layout", [(2, 1), (1, 2)], ids=["FSDP2", "EP2"])
@pytest.mark.parametrize("wrap", ["fsdp", "ddp"])
def test_gradient_accumulation(cluster: Callable[..., Cluster], layout: tuple[int, int], wrap: str):
    cluster(2).run(accumulated, layout, wrap)


def test_compiled_blocks_quantise_for_themselves(heap):  # noqa: F811
    torch.manual_seed(0)
    module = torch.nn.Sequential(block(heap, capacity=256, max_tokens=64))
    module[0].moe = symmoe.MoELayer(
        replace(module[0].moe.config, ffn=16, precision=Float8Block()), heap, dtype=torch.float32
    )
    want = step(module, tokens())
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    with symmoe.constant_weights(module):
        for _ in range(2):
            assert_same(step(compiled, tokens()), want)
