"""Training steps of a layer on GPUs, and replays of a CUDA graph of one."""

from collections.abc import Callable

import torch
from graphs import captured
from layers import layer_config
from worker import Findings, open_heap

from symmoe import MoEConfig, MoELayer, SymmetricHeap

HIDDEN, FFN, TOKENS, TOP_K = 768, 128, 512, 4


def config_for(num_ranks: int, **options) -> MoEConfig:
    options = {
        "capacity": TOKENS * TOP_K * 2,
        "overflow": "drop",
        "aux_loss_coef": 1e-2,
        "z_loss_coef": 1e-3,
        "schedule": "always-overlapped",
        **options,
    }
    return layer_config(hidden=HIDDEN, ffn=FFN, num_experts=8 * num_ranks, top_k=TOP_K, **options)


def layer_for(heap: SymmetricHeap, config: MoEConfig, shared: bool = False) -> MoELayer:
    torch.manual_seed(5)
    module = (
        torch.nn.Linear(HIDDEN, HIDDEN, device=heap.device, dtype=torch.bfloat16)
        if shared
        else None
    )
    layer = MoELayer(config, heap, dtype=torch.bfloat16, shared_expert=module)
    torch.manual_seed(7 + heap.rank)
    for weight in (layer.experts.fc1.weight, layer.experts.fc2.weight):
        weight.data.normal_(std=0.05)
    return layer


def training_step(layer: MoELayer, num_tokens: int) -> Callable[[], None]:
    """A step on fixed tokens; gradients accumulate."""
    dtype = next(layer.experts.parameters()).dtype
    x = torch.randn(
        num_tokens, layer.config.hidden, device=layer.heap.device, dtype=dtype, requires_grad=True
    )
    dy = torch.randn_like(x)

    def step() -> None:
        y, metrics = layer(x)
        torch.autograd.backward((y, metrics.aux_loss), (dy, torch.ones_like(metrics.aux_loss)))

    return step


def check_replays(
    rank: int,
    num_ranks: int,
    findings: Findings,
    num_replays: int,
    stash: str,
    shared: bool,
    fields: dict[str, str],
) -> None:
    """Replays with new tokens (so new routing) against eager steps on another layer with the same weights."""
    with open_heap("cuda", num_bytes=512 << 20) as heap:
        torch.use_deterministic_algorithms(False)
        layers = [
            layer_for(heap, config_for(num_ranks, stash=stash, **fields), shared) for _ in range(2)
        ]
        x = torch.zeros(
            TOKENS, HIDDEN, device=heap.device, dtype=torch.bfloat16, requires_grad=True
        )
        dy = torch.zeros_like(x)

        def step(layer: MoELayer, x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y, metrics = layer(x)
            torch.autograd.backward((y, metrics.aux_loss), (dy, torch.ones_like(metrics.aux_loss)))
            return y.detach(), metrics.aux_loss.detach(), metrics.expert_load, metrics.num_dropped

        graph, got = captured(lambda: step(layers[0], x, dy))
        findings.check(heap.memory.graph_bytes > 0, "the graph holds no leases")
        for layer in layers:
            for parameter in layer.parameters():
                parameter.grad = (
                    torch.zeros_like(parameter)
                    if parameter.grad is None
                    else parameter.grad.zero_()
                )
        x.grad.zero_()
        other_x = x.detach().clone().requires_grad_()
        generator = torch.Generator(heap.device).manual_seed(rank)
        loads = set()
        for turn in range(num_replays):
            for tensor in (x.data, dy):
                tensor.normal_(generator=generator)
            other_x.data.copy_(x.data)
            graph.replay()
            want = step(layers[1], other_x, dy)
            if turn % 50 and turn < num_replays - 1:
                continue
            findings.where = f"rank {rank} of {num_ranks}, replay {turn}, stash {stash}"
            for name, actual, expected in zip(
                ("y", "aux_loss", "expert_load", "num_dropped"), got, want, strict=True
            ):
                findings.check(torch.equal(actual, expected), f"{name} differs")
            findings.check(torch.equal(x.grad, other_x.grad), "the gradient of x differs")
            loads.add(tuple(got[2].tolist()))
            for (name, actual), expected in zip(
                layers[0].named_parameters(), layers[1].parameters(), strict=True
            ):
                findings.check(
                    torch.equal(actual.grad, expected.grad),
                    f"the accumulated gradient of {name} differs",
                )
            if findings.texts:
                break
        findings.check(len(loads) > 1 or num_replays < 2, "the routing never changed")
        heap.synchronize()
        del graph
        heap.release_graphs()
        findings.equal("bytes of graphs", heap.memory.graph_bytes, 0)
        findings.equal("leased bytes", heap.leased_bytes, 0)
