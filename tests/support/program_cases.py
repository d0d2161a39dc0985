"""Steps of a layer with programs and without, for tests on CPUs and on GPUs."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from layers import layer_config
from torch.utils.checkpoint import checkpoint
from worker import Findings, open_heap

from symmoe import MoELayer, SymmetricHeap
from symmoe.grouped.experts import materialized
from symmoe.grouped.mlp import GroupedMLP

H, I, E, K, T = 16, 24, 8, 3, 200
NUM_CALLS = {"cpu": 13, "cuda": 20}  # of check_bits; every sixth does not fit
CPU = torch.device("cpu")
LARGE = {"hidden": 512, "ffn": 256, "dtype": torch.bfloat16}  # kernels for Hopper take these


@contextmanager
def without_programs(heap: SymmetricHeap) -> Iterator[None]:
    """Nothing is recorded or played."""
    heap._run = lambda key, function, inputs, **numbers: function()
    try:
        yield
    finally:
        del heap._run


def make_layer(
    heap: SymmetricHeap,
    *,
    bias=False,
    dtype=torch.float32,
    hidden=H,
    ffn=I,
    overwrites=(None, None),
    delays=(False, False),
    **options,
) -> MoELayer:
    """overwrites: for fc1 and fc2, whether gradients overwrite `main_grad`; None: they go to `.grad`. delays: for both,
    whether backward_dw computes them."""
    torch.manual_seed(heap.rank)
    config = layer_config(hidden=hidden, ffn=ffn, num_experts=E, top_k=K, **options)
    experts = GroupedMLP(
        E // heap.num_ranks,
        hidden,
        ffn,
        bias=bias,
        dtype=dtype,
        device=heap.device,
        precision=config.precision,
    )
    if bias:
        for fc in (experts.fc1, experts.fc2):
            torch.nn.init.normal_(fc.bias)
    for fc, overwrite in zip((experts.fc1, experts.fc2), overwrites, strict=True):
        if overwrite is not None:
            fc.accumulate_into_main_grad = True
            fc.weight.main_grad = torch.randn(fc.weight.shape).to(heap.device)
            fc.weight.overwrite_main_grad, fc.weight.grad_added_to_main_grad = overwrite, False
    experts.fc1.delay_wgrad, experts.fc2.delay_wgrad = delays
    return MoELayer(config, heap, experts=experts)


def main_grads(layer: MoELayer) -> list[torch.Tensor]:
    return [
        parameter.main_grad for parameter in layer.parameters() if hasattr(parameter, "main_grad")
    ]


def make_calls(
    rank: int, count: int, dtype: torch.dtype, *, hidden: int = H, device: torch.device = CPU
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """x and dy of calls of the same size; every sixth sends all tokens to few experts, which no room is kept for."""
    for number in range(count):
        generator = torch.Generator().manual_seed(100 * number + rank)
        x, dy = (torch.randn(T, hidden, generator=generator) for _ in range(2))
        if number % 6 == 5:
            x = x[:1] + 0.01 * x
        yield x.to(device, dtype), dy.to(device, dtype)


def step(layer: MoELayer, x: torch.Tensor, dy: torch.Tensor, around: str) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    with ExitStack() as stack:
        if around == "saved copies":
            stack.enter_context(torch.autograd.graph.save_on_cpu())
        elif around == "autocast":  # forward and backward
            stack.enter_context(torch.autocast(x.device.type, torch.bfloat16))
        y, metrics = (
            checkpoint(layer, x, use_reentrant=False) if around == "checkpoint" else layer(x)
        )
        outputs = [y] if around == "checkpoint" else [y, metrics.aux_loss]
        outputs = [output for output in outputs if output.requires_grad]
        gradients = [dy.to(y.dtype), *(torch.ones_like(output) for output in outputs[1:])]
        grads = torch.autograd.grad(outputs, (x, *layer.parameters()), gradients, allow_unused=True)
    layer.experts.backward_dw()
    delayed = [p.grad for p in layer.parameters() if p.grad is not None]
    layer.zero_grad()
    assert len(delayed) == sum(grad is None for grad in grads)
    assert all(p.grad_added_to_main_grad for p in layer.parameters() if hasattr(p, "main_grad"))
    return [
        y.detach(),
        metrics.expert_load,
        metrics.topk_idx,
        *(grad for grad in grads if grad is not None),
        *delayed,
        *(grad.clone() for grad in main_grads(layer)),
    ]


OPTIONS = {
    "defaults": {},
    "static": {"capacity": 2 * T * K, "max_tokens": T},
    "nothing kept": {"stash": "none", "layout": "expert-major"},
    "hidden kept": {"stash": "hidden", "layout": "packed", "order": "slot"},
    "overlapped": {
        "schedule": "always-overlapped",
        "layout": "packed",
        "dtype": torch.bfloat16,
    },
    "overlapped, expert-major, nothing kept": {
        "schedule": "always-overlapped",
        "layout": "expert-major",
        "stash": "none",
    },
    "biases": {"bias": True, "schedule": "always-overlapped"},
    "main_grad": {"overwrites": (False, False)},
    "main_grad, overwritten": {"overwrites": (True, True), "schedule": "always-overlapped"},
    "main_grad of one layer": {
        "overwrites": (None, False),
        "dtype": torch.bfloat16,
        "stash": "none",
    },
    "delayed": {
        "delays": (True, True),
        "schedule": "always-overlapped",
        "score": "sqrtsoftplus",
        "aux_loss_coef": 0.1,
    },
    "delayed gradients of one layer": {
        "delays": (False, True),
        "overwrites": (False, None),
        "stash": "none",
    },
    "losses": {"aux_loss_coef": 0.1, "z_loss_coef": 0.1, "score": "sigmoid", "expert_bias": True},
}
AROUND = ("", "checkpoint", "saved copies", "autocast")


def check_bits(
    rank, num_ranks, options: dict, around: str, device: str = "cpu"
) -> tuple[int, int, list[str]]:
    """Calls that were played; calls that did not fit; findings."""
    findings = Findings()
    options = dict(options)
    dtype = options.get("dtype", torch.float32)
    hidden = options.get("hidden", H)
    with open_heap(device, programs="on", num_bytes=(16 if device == "cpu" else 128) << 20) as heap:
        layer = make_layer(heap, **options)
        plain = make_layer(heap, **options)
        plain.load_state_dict(layer.state_dict())
        findings.same_bits(main_grads(layer), main_grads(plain), "main_grad begins with others")
        repeats = 0
        for number, (x, dy) in enumerate(
            make_calls(rank, NUM_CALLS[device], dtype, hidden=hidden, device=heap.device)
        ):
            budget = layer._routed_experts._find_budget(
                T, dtype.itemsize, materialized(layer.experts, dtype)
            )
            actual = step(layer, x, dy, around)
            with without_programs(heap):
                expected = step(plain, x, dy, around)
            repeats += budget is not None and heap.row_histories[E, K, 0]._last_rows > budget.rows
            findings.same_bits(actual, expected, f"rank {rank}, call {number}: other bits")
            del actual, expected
        findings.check(heap.leased_bytes == 0, "leases are left")
        return heap.programs.num_runs, repeats, findings.texts
