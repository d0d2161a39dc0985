"""Forward, backward and update with training features run no operator of READS, whose result the host must read. CPU
tensors stand in for tensors of a device, because the test looks for operators. Reads that are no operator on a CPU are
not noticed: tolist(), numpy() and cpu(). Under a dispatch mode the step is one operator, whose kernels tests/gpu
checks."""

import pytest
import torch
from host_reads import NoReads
from layers import layer_config

from symmoe import MoELayer, SymmetricHeap
from symmoe.lora import add_lora
from symmoe.metrics import MetricsLogger
from symmoe.routing import balanced_choice
from symmoe.training import balance_step

EXPERTS, TOP_K, H, I = 4, 2, 16, 8

FEATURES = (
    {"aux_loss_coef": 0.1, "aux_loss": "global", "expert_bias": True, "z_loss_coef": 0.1},
    {"aux_loss_coef": 0.1, "aux_loss": "sequence", "capacity_factor": 1.0},
    {
        "aux_loss_coef": 0.1,
        "capacity_factor": 0.7,
        "drop_policy": "position",
        "num_expert_groups": 2,
        "topk_groups": 2,
    },
    {"balance": "replicas"},
)


@pytest.mark.parametrize("has_topk_idx", [False, True])
@pytest.mark.parametrize("options", FEATURES, ids=str)
def test_a_step_reads_nothing(heap: SymmetricHeap, options: dict, has_topk_idx: bool):
    config = layer_config(
        hidden=H, ffn=I, num_experts=EXPERTS, top_k=TOP_K, capacity=64, max_tokens=16, **options
    )
    layer = MoELayer(config, heap)
    if config.balance == "none":
        add_lora(layer, rank=2, alpha=2.0, rank_dropout=0.1)
    MetricsLogger(layer, times_forward=True)
    x = torch.randn(2, 5, H, requires_grad=True)
    mask = torch.ones(2, 5, dtype=torch.bool)
    with NoReads() as mode:
        y, metrics = layer(
            x, mask, topk_idx=balanced_choice(10, TOP_K, EXPERTS) if has_topk_idx else None
        )
        (y.sum() + metrics.aux_loss).backward()
        balance_step(layer)
    assert mode.noted == []
    assert mode.num_operations > 50


def test_reads_are_found():
    x = torch.arange(4.0)
    with NoReads() as mode:
        x[x > 1].sum().item()
        x[x > 2] = 0
    assert mode.noted == ["index", "_local_scalar_dense", "index_put_"]
