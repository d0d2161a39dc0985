"""Combinations of features against the float64 reference: two layers, two micro-batches in flight, and ranks that
differ in tokens, routing and values; every two features, and every three in slow cases. New memory is NaN."""

from collections.abc import Iterator
from typing import Any

import pytest
import reference
import torch
from cluster import run_on
from combinations import covering
from layers import layer_config, shapes
from torch.utils.checkpoint import checkpoint
from worker import Findings, open_heap

from symmoe import GroupedMLP, MoEConfig, MoELayer, SymmetricHeap
from symmoe.lora import add_lora
from symmoe.training import balance_step

EXPERTS, TOP_K = 8, 2
ALPHA, LORA_RANK = 6.0, 4
STEPS = 2  # of two layers and two sizes
REPEATS = 2  # of the last one: rows that calls get settle, and the last step runs programs
MOST_TOKENS = 32  # of a rank in a call
AUX = {"aux_loss_coef": 0.1, "z_loss_coef": 0.01}
SIGMOID = {"score": "sigmoid", "route_scale": 2.5}
# Names of features, and of each the names of what it may be; with fields of the configuration where there are any.
FEATURES: dict[str, dict[str, Any]] = {
    "capacity": {
        "exact": {},
        "static": {"capacity": 300, "max_tokens": MOST_TOKENS},
        "drop": {"capacity": 9, "max_tokens": MOST_TOKENS, "overflow": "drop"},
        "factor": {"capacity_factor": 1.0},
    },
    "stash": {name: {"stash": name} for name in ("all", "rows", "hidden", "none")},
    "routing": {
        "softmax": {},
        "sqrtsoftplus": {"score": "sqrtsoftplus"},
        "biased": {**SIGMOID, "expert_bias": True},
        "groups": {**SIGMOID, "num_expert_groups": 4, "topk_groups": 2, "renormalize": False},
    },
    "losses": {
        "none": {},
        "micro-batch": AUX,
        "sequence": {**AUX, "aux_loss": "sequence"},
        "global": {**AUX, "aux_loss": "global"},
    },
    "weights": {"packed": {}, "discrete": {}, "lora": {}},
    "gradients": {"grad": {}, "main_grad": {}, "delayed": {}},
    "programs": {"on": {}, "off": {}},
    "order": {name: {"order": name} for name in ("rank", "slot")},
    "layout": {name: {"layout": name} for name in ("packed", "expert-major")},
    "schedule": {name: {"schedule": name} for name in ("serial", "always-overlapped")},
    "balance": {"none": {}, "replicas": {"balance": "replicas"}},
    "mask": {"every token": {}, "padding": {}},
    "recompute": {"kept": {}, "checkpoint": {}},
    "backward": {"in order": {}, "last first": {}},
    "shared": {"alone": {}, "shared expert": {}},
    "bias": {"no bias": {}, "bias": {}},
    "latent": {"full width": {}, "latent": {"latent": 32}},
    "nodes": {"one node": {}, "nodes": {}},
}
DO_NOT_FIT = [
    {"weights": "lora", "gradients": "main_grad"},  # weights are frozen
    {"weights": "lora", "gradients": "delayed"},
    {"balance": "replicas", "gradients": "delayed"},
    {"capacity": "factor", "routing": "biased"},
    {"capacity": "factor", "losses": "global"},
    {"capacity": "drop", "balance": "replicas"},  # replicas decide who is dropped: test_replicas.py
    {"balance": "replicas", "nodes": "nodes"},  # of one rank each, which has nobody to give rows to
]


def cases() -> Iterator[object]:
    """Every two features in quick cases, every three in all cases."""
    quick = covering(FEATURES, 2, DO_NOT_FIT)
    for case in quick:
        yield pytest.param(case, id="-".join(case.values()))
    for case in covering(FEATURES, 3, DO_NOT_FIT):
        if case not in quick:
            yield pytest.param(case, id="-".join(case.values()), marks=pytest.mark.slow)


class Model(torch.nn.Module):
    """Two layers with a residual around each; ranks have different experts and the same router."""

    def __init__(self, heap: SymmetricHeap, config: MoEConfig, case: dict[str, str]) -> None:
        super().__init__()
        self.recomputes = case["recompute"] == "checkpoint"
        self.layers = torch.nn.ModuleList(make_layer(heap, config, case, n) for n in range(2))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None):
        """y, and the metrics of both layers."""
        by_layer = []
        for layer in self.layers:
            call = (x, mask)
            y, metrics = (
                checkpoint(layer, *call, use_reentrant=False) if self.recomputes else layer(*call)
            )
            x = x + y
            by_layer.append(metrics)
        return x, by_layer


def make_layer(
    heap: SymmetricHeap, config: MoEConfig, case: dict[str, str], number: int
) -> MoELayer:
    torch.manual_seed(10 * number + heap.rank)
    adds = case["gradients"] == "main_grad"
    experts = GroupedMLP(
        EXPERTS // heap.num_ranks,
        config.expert_hidden,
        config.ffn,
        bias=case["bias"] == "bias",
        weights="discrete" if case["weights"] == "discrete" else "packed",
        accumulate_into_main_grad=adds,
        delay_wgrad=case["gradients"] == "delayed",
        device=heap.device,
    )
    if case["weights"] == "lora":
        add_lora(experts, rank=LORA_RANK, alpha=ALPHA)
    for name, parameter in experts.named_parameters():
        torch.nn.init.normal_(parameter, std=0.5 * config.expert_hidden**-0.5)
        if adds and "weight" in name:
            parameter.main_grad = torch.zeros_like(parameter)
    shared = None
    torch.manual_seed(100 + number)  # what is replicated
    if case["shared"] == "shared expert":
        shared = torch.nn.Linear(config.hidden, config.hidden, device=heap.device)
    layer = MoELayer(config, heap, experts=experts, shared_expert=shared)
    torch.nn.init.normal_(layer.router.weight, std=0.3)
    if config.router.expert_bias:
        layer.router.expert_bias.copy_(torch.linspace(-0.1, 0.1, EXPERTS))
    return layer


def micro_batch(
    heap: SymmetricHeap, config: MoEConfig, number: int, case: dict[str, str]
) -> dict[str, torch.Tensor | None]:
    """x, dy and mask of a call: ranks have different numbers of tokens, which prefer different experts. Padding is NaN
    where no module reads it; in some calls a rank has only padding."""
    generator = torch.Generator().manual_seed(1000 * number + heap.rank)
    shape = (2, 4 + 3 * ((heap.rank + number) % 2), config.hidden)
    x, dy = (torch.randn(shape, generator=generator) for _ in range(2))
    x = x + 0.7 * torch.randn(config.hidden, generator=generator)
    tensors = {"x": x, "dy": dy, "mask": None}
    if case["mask"] == "padding":
        mask = torch.rand(shape[:2], generator=generator) < 0.7 * ((heap.rank + number) % 3 > 0)
        tensors["mask"] = mask
        if case["shared"] == "alone" and case["latent"] == "full width":
            x[~mask] = torch.nan
            dy[~mask] = 0
    tensors = {
        name: None if tensor is None else tensor.to(heap.device) for name, tensor in tensors.items()
    }
    tensors["x"].requires_grad_()
    return tensors


def run_step(model: Model, calls: list[dict], case: dict[str, str]) -> list:
    """y and metrics of each call, after backward of all."""
    results = [model(call["x"], call["mask"]) for call in calls]
    turns = list(zip(calls, results, strict=True))
    for call, (y, metrics) in turns if case["backward"] == "in order" else turns[::-1]:
        (
            (y * call["dy"]).sum() + sum(layer_metrics.aux_loss for layer_metrics in metrics)
        ).backward()
    if case["gradients"] == "delayed":
        for layer in model.layers:
            for _ in calls:
                layer.experts.backward_dw()
    return results


def take_gradients(model: Model) -> dict[str, torch.Tensor | None]:
    """Returns the gradients by the parameter's name, and clears them."""
    gradients = {}
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "main_grad"):
            gradients[name] = parameter.main_grad.clone()
            parameter.main_grad.zero_()
        else:
            gradients[name] = parameter.grad
            parameter.grad = None
    return gradients


def compare_step(model: Model, config: MoEConfig, calls, actual, findings: Findings) -> None:
    """Records differences from the reference."""
    gradients = take_gradients(model)

    def close(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
        largest = max([1.0, *want.detach().flatten().abs().tolist()])
        findings.close(name, got, want, rtol=0, atol=1e-4 * largest)

    expected, expected_gradients = reference.expected_results(
        config, model, calls, ALPHA / LORA_RANK
    )
    for turn, (call, (y, metrics), want) in enumerate(zip(calls, actual, expected, strict=True)):
        is_finite = call["x"].isfinite().all(-1).cpu()
        close(f"y of call {turn}", y.cpu()[is_finite], want.y[is_finite])
        close(f"dx of call {turn}", call["x"].grad, want.x.grad)
        for number, layer_metrics in enumerate(metrics):
            where = f"call {turn}, layer {number}:"
            findings.equal(f"{where} load", layer_metrics.expert_load, want.load[number])
            findings.equal(
                f"{where} drops", int(layer_metrics.num_dropped), want.num_dropped[number]
            )
            close(f"{where} aux_loss", layer_metrics.aux_loss, want.aux[number])
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            close(f"gradient of {name}", gradients[name], expected_gradients[name])
        else:
            findings.check(gradients[name] is None, f"{name} is frozen and has a gradient")


@pytest.mark.parametrize("case", [*cases()])
@run_on(2, 4, on_gpus=(1, 2))
def test_combined_features_equal_the_reference(
    rank: int, num_ranks: int, findings: Findings, device: str, case: dict[str, str]
) -> None:
    hidden, ffn = shapes(device)
    options = {"hidden": hidden, "ffn": ffn, "num_experts": EXPERTS, "top_k": TOP_K}
    for feature, value in case.items():
        options |= FEATURES[feature][value]
    config = layer_config(**options)
    per_node = 1 if case["nodes"] == "nodes" else None
    with open_heap(
        device, num_bytes=16 << 20, programs=case["programs"], ranks_per_node=per_node
    ) as heap:
        model = Model(heap, config, case)
        moved = 0
        num_steps = STEPS + (REPEATS if case["programs"] == "on" else 0)
        for step in range(num_steps):
            findings.where = f"rank {rank} of {num_ranks}, step {step}"
            first = 2 * min(step, STEPS - 1)
            calls = [micro_batch(heap, config, first + turn, case) for turn in range(2)]
            actual = run_step(model, calls, case)
            if step in (0, num_steps - 1):
                compare_step(model, config, calls, actual, findings)
            take_gradients(model)
            balance_step(model)
            moved += sum(
                int(layer_metrics.num_replicas or 0)
                for _, by_layer in actual
                for layer_metrics in by_layer
            )
            del actual
        findings.equal("leased bytes", heap.leased_bytes, 0)
        has_replicas = case["balance"] == "replicas" and num_ranks > 1
        findings.equal("replicas were there", moved > 0, has_replicas)
        findings.check(
            heap.programs.num_runs > 0
            or case["programs"] != "on"
            or case["recompute"] == "checkpoint",
            "no program has run",
        )
