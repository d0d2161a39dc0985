"""The largest allowed layer against the float64 reference; one more of any size is an error."""

from pathlib import Path

import pytest
import reference
import torch
from cluster import run_on
from layers import layer_config, make_layer, shapes, tokens_of
from worker import Findings, open_heap

from symmoe import MoELayer, SymmetricHeap
from symmoe.dispatch.plan import MAX_TOP_K
from symmoe.errors import ArgumentError
from symmoe.kernels.control import MAX_EXPERTS


def test_the_limits_are_those_of_the_pages():
    page = (Path(__file__).resolve().parents[2] / "docs" / "concepts.md").read_text()
    assert f"experts in all (at most {MAX_EXPERTS:,})" in page
    assert f"experts per token (top-k, at most {MAX_TOP_K})" in page


@run_on(2, on_gpus=(1, 2))
def test_1024_experts_and_32_choices(
    rank: int, num_ranks: int, findings: Findings, device: str
) -> None:
    """Ranks have different numbers of tokens."""
    hidden, ffn = shapes(device)
    config = layer_config(
        hidden=hidden, ffn=ffn, num_experts=1024, top_k=32, aux_loss_coef=0.01, z_loss_coef=0.01
    )
    with open_heap(device, num_bytes=32 << 20) as heap:
        model = torch.nn.Module()
        model.layers = torch.nn.ModuleList([make_layer(heap, config)[0]])
        x, dy = (
            tokens_of(rank, 3 + 2 * rank, hidden, salt)[None].to(heap.device) for salt in (0, 1)
        )
        x.requires_grad_()
        out, metrics = model.layers[0](x)
        y = x + out
        ((y * dy).sum() + metrics.aux_loss).backward()
        call = {"x": x, "dy": dy, "mask": None}
        (expected,), gradients = reference.expected_results(config, model, [call], scaling=1.0)
        findings.close("y", y, expected.y, rtol=1e-4, atol=1e-4)
        findings.close("dx", x.grad, expected.x.grad, rtol=1e-4, atol=1e-3)
        for name, parameter in model.named_parameters():
            findings.close(
                f"gradient of {name}", parameter.grad, gradients[name], rtol=1e-3, atol=1e-3
            )


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"num_experts": 1025, "top_k": 2}, r"num_experts \(1025\) must be at most 1024"),
        ({"num_experts": 64, "top_k": 33}, r"top_k \(33\) must be at most 32"),
    ],
)
def test_sizes_above_the_limits_are_refused(heap: SymmetricHeap, sizes: dict[str, int], text: str):
    with pytest.raises(ArgumentError, match=text):
        MoELayer(layer_config(hidden=16, ffn=8, **sizes), heap)
