"""Padding in a layer: as if the masked tokens were not there."""

import pytest
import torch
from cluster import run_on
from heap_calls import outcome
from torch import nn
from worker import Findings

from symmoe import MoEConfig, MoELayer, SymmetricHeap

EXPERTS, TOP_K, H, I = 4, 2, 16, 8
OPTIONS = (
    {},
    {
        "aux_loss_coef": 0.1,
        "z_loss_coef": 0.01,
        "score": "sigmoid",
        "route_scale": 2.5,
        "expert_bias": True,
    },
    {"aux_loss_coef": 0.1, "aux_loss": "global", "order": "slot", "layout": "expert-major"},
    {"capacity": 200, "max_tokens": 20, "stash": "none"},
    {"capacity_factor": 10.0, "renormalize": False},
)


def make_layer(heap: SymmetricHeap, **options) -> MoELayer:
    torch.manual_seed(2)
    return MoELayer(MoEConfig(hidden=H, ffn=I, num_experts=EXPERTS, top_k=TOP_K, **options), heap)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@run_on(1, 2)
def test_masked_tokens_are_not_there(
    rank: int, num_ranks: int, findings: Findings, options: dict
) -> None:
    generator = torch.Generator().manual_seed(rank)
    x, dy = torch.randn(2, 2, 7, H, generator=generator)
    mask = torch.rand(2, 7, generator=generator) < 0.6
    if rank == 1:
        mask[:] = False  # a rank of padding alone
    with torch.no_grad():
        x[~mask] = torch.nan
    with SymmetricHeap(num_bytes=4 << 20, backend="host") as heap:
        padded, alone = make_layer(heap, **options), make_layer(heap, **options)
        x.requires_grad_()
        y, metrics = padded(x, mask)
        ((y * dy).sum() + metrics.aux_loss).backward()
        rest = x.detach()[mask].requires_grad_()
        want, wanted = alone(rest)
        ((want * dy[mask]).sum() + wanted.aux_loss).backward()
        findings.check(not y[~mask].any(), "a masked token has an output")
        findings.check(not x.grad[~mask].any(), "a masked token has a gradient")
        findings.close("y", y[mask], want, rtol=0, atol=0)
        findings.close("dx", x.grad[mask], rest.grad, rtol=1e-5, atol=1e-6)
        findings.close("aux_loss", metrics.aux_loss, wanted.aux_loss, rtol=1e-6, atol=0)
        findings.equal("load", metrics.expert_load, wanted.expert_load)
        findings.equal("slots", int((metrics.topk_idx >= 0).sum()), int(mask.sum()) * TOP_K)
        for (name, a), b in zip(padded.named_parameters(), alone.parameters(), strict=True):
            findings.close(name, a.grad, b.grad, rtol=1e-5, atol=1e-6)
        if padded.router.step_load is not None:
            findings.equal("load of the step", padded.router.step_load, wanted.expert_load.long())
        unmasked, _ = padded(x.nan_to_num(1.0))
        findings.check(bool((unmasked[~mask] != 0).all()), "the mask has nothing to do")


def test_the_shared_expert_sees_all_tokens(heap: SymmetricHeap):
    shared = nn.Linear(H, H)
    layer = MoELayer(
        MoEConfig(hidden=H, ffn=I, num_experts=EXPERTS, top_k=TOP_K), heap, shared_expert=shared
    )
    x, mask = torch.randn(5, H), torch.tensor([True, False, True, False, False])
    y, _ = layer(x, mask)
    torch.testing.assert_close(y[~mask], shared(x[~mask]))
    assert not torch.allclose(y[mask], shared(x[mask]))


@pytest.mark.parametrize("options", [{}, {"capacity_factor": 1.0, "aux_loss_coef": 0.1}], ids=str)
@run_on(1, 2)
def test_wrong_masks_and_choices(
    rank: int, num_ranks: int, findings: Findings, options: dict
) -> None:
    """A wrong argument of one rank is an error of all, and the next call works."""
    wrong = {
        "token_mask has shape [3]; it must be [2, 3]": {
            "token_mask": torch.ones(3, dtype=torch.bool)
        },
        "token_mask has dtype torch.float32; it must be torch.bool": {
            "token_mask": torch.ones(2, 3)
        },
        "topk_idx has dtype torch.float32; it must be torch.int32": {
            "topk_idx": torch.zeros(6, TOP_K)
        },
        f"{EXPERTS}": {"topk_idx": torch.full((6, TOP_K), EXPERTS, dtype=torch.int32)},
        "-2": {"topk_idx": torch.full((6, TOP_K), -2, dtype=torch.int32)},
    }
    with SymmetricHeap(num_bytes=1 << 20, backend="host") as heap:
        layer = make_layer(heap, **options)
        for text, arguments in wrong.items():
            name, found = outcome(layer, torch.ones(2, 3, H), **(arguments if rank == 0 else {}))
            findings.check(
                name in ("ArgumentError", "ExpertIdError") and text in found,
                f"{name}: {found}, not {text}",
            )
        y, _ = layer(torch.ones(2, 3, H))
        findings.check(bool(y.isfinite().all()), "the next call is wrong")
