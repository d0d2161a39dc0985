"""Wrong masks and choices of experts. What right ones give: moe/test_features.py."""

import pytest
import torch
from cluster import run_on
from heap_calls import outcome
from worker import Findings

from symmoe import MoEConfig, MoELayer, SymmetricHeap

EXPERTS, TOP_K, H, I = 4, 2, 16, 8


def make_layer(heap: SymmetricHeap, **options) -> MoELayer:
    torch.manual_seed(2)
    return MoELayer(MoEConfig(hidden=H, ffn=I, num_experts=EXPERTS, top_k=TOP_K, **options), heap)


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
