"""Training features in a CUDA graph: replays equal eager steps, bit for bit, and are counted."""

import pytest
import torch
from cluster import run_on
from graphs import captured
from layers import layer_config
from worker import Findings, open_heap

from symmoe import MoELayer
from symmoe.lora import add_lora
from symmoe.metrics import MetricsLogger
from symmoe.training import balance_step

HIDDEN, FFN, TOKENS, TOP_K, NUM_REPLAYS = 256, 128, 512, 4, 8
FEATURES = (
    {"aux_loss_coef": 0.01, "aux_loss": "global", "expert_bias": True, "bias_update_rate": 0.01},
    {"aux_loss_coef": 0.01, "aux_loss": "sequence", "capacity_factor": 1.0},
    {"z_loss_coef": 0.01, "capacity_factor": 0.8, "drop_policy": "position"},
)


@pytest.mark.parametrize("options", FEATURES, ids=str)
@run_on(1, 2, device="cuda")
def test_features_in_a_graph(rank: int, num_ranks: int, findings: Findings, options: dict) -> None:
    with open_heap("cuda", num_bytes=256 << 20) as heap:
        torch.use_deterministic_algorithms(False)
        capacity = TOKENS * TOP_K * num_ranks
        config = layer_config(
            hidden=HIDDEN,
            ffn=FFN,
            num_experts=8 * num_ranks,
            top_k=TOP_K,
            capacity=capacity,
            **{"schedule": "always-overlapped", **options},
        )
        layers = []
        for _ in range(2):
            torch.manual_seed(5)
            layer = MoELayer(config, heap, dtype=torch.bfloat16)
            torch.manual_seed(7 + rank)
            add_lora(layer, rank=8, alpha=16.0, dtype=torch.float32)
            for parameter in layer.experts.parameters():
                parameter.data.normal_(std=0.05)
            layers.append(layer)
        loggers = [MetricsLogger(layer) for layer in layers]
        x, dy = torch.randn(2, 4, TOKENS // 4, HIDDEN, device=heap.device, dtype=torch.bfloat16)
        mask = torch.rand(4, TOKENS // 4, device=heap.device) < 0.8

        has_bias = config.router.expert_bias

        def step(layer: MoELayer) -> tuple[torch.Tensor, torch.Tensor]:
            for _ in range(2):  # micro-batches
                y, metrics = layer(x, mask)
                torch.autograd.backward(
                    (y, metrics.aux_loss), (dy, torch.ones_like(metrics.aux_loss))
                )
            if has_bias:
                balance_step(layer)
            return y.detach(), metrics.aux_loss.detach()

        graph, got = captured(lambda: step(layers[0]))
        for layer, logger in zip(layers, loggers, strict=True):
            if has_bias:
                layer.router.expert_bias.zero_()
                layer.router.step_load.zero_()
            for parameter in layer.parameters():
                if parameter.requires_grad:
                    parameter.grad = (
                        torch.zeros_like(parameter)
                        if parameter.grad is None
                        else parameter.grad.zero_()
                    )
            logger.step(0)
        generator = torch.Generator(heap.device).manual_seed(rank)
        for turn in range(NUM_REPLAYS):
            findings.where = f"rank {rank} of {num_ranks}, replay {turn}, {options}"
            for tensor in (x, dy):
                tensor.normal_(generator=generator)
            mask.copy_(torch.rand(mask.shape, device=heap.device, generator=generator) < 0.8)
            graph.replay()
            for name, actual, expected in zip(("y", "aux_loss"), got, step(layers[1]), strict=True):
                findings.check(torch.equal(actual, expected), f"{name} differs")
            findings.check(not got[0][~mask].any(), "a masked token has an output")
            if has_bias:
                findings.check(
                    turn > 0 or bool(layers[0].router.expert_bias.any()), "the bias has not moved"
                )
                findings.check(
                    torch.equal(*(layer.router.expert_bias for layer in layers)), "the bias differs"
                )
            for (name, actual), expected in zip(
                layers[0].named_parameters(), layers[1].parameters(), strict=True
            ):
                if actual.requires_grad:
                    findings.check(
                        torch.equal(actual.grad, expected.grad), f"the gradient of {name} differs"
                    )
        records = [logger.step(1) for logger in loggers]
        findings.check(records[0] == records[1], f"{records[0]} is not {records[1]}")
        findings.equal("calls", records[0][0].num_calls, 2 * NUM_REPLAYS)
        heap.synchronize()
        del graph
        heap.release_graphs()
