"""Steps of layers in a row, in 1F1B too, and one big step in all ways; their bits."""

import random
import time

import torch
from layers import WAYS, make_layer, tokens_of
from worker import Findings, open_heap

from symmoe import MoEConfig, SymmetricHeap
from symmoe.combine.trip import CombineTrip

NUM_LAYERS = 2


class Stack(torch.nn.Module):
    """Layers of different weights with a residual around each; `through` calls one of them."""

    def __init__(self, heap: SymmetricHeap, config: MoEConfig) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            [make_layer(heap, config, salt)[0] for salt in range(NUM_LAYERS)]
        )

    def forward(self, x: torch.Tensor, through=lambda layer, x: layer(x)[0]) -> torch.Tensor:
        for layer in self.layers:
            x = x + through(layer, x)
        return x

    def gradients(self) -> list[torch.Tensor]:
        """Of the parameters; none are left."""
        gradients = [p.grad for p in self.parameters()]
        assert all(gradient is not None for gradient in gradients)
        self.zero_grad(set_to_none=True)
        return gradients


def batch(heap: SymmetricHeap, hidden: int, turn: int) -> torch.Tensor:
    """Other tokens on every rank, and another number of them."""
    num_tokens = 6 + (turn + heap.rank) % 3
    return tokens_of(heap.rank, num_tokens, hidden, salt=turn).to(heap.device).requires_grad_()


def batches(heap: SymmetricHeap, hidden: int, turn: int) -> list[torch.Tensor]:
    """Of a step with two micro-batches."""
    return [batch(heap, hidden, turn), batch(heap, hidden, turn + 1)]


def step(model: Stack, *xs: torch.Tensor, **options) -> list[torch.Tensor]:
    """y and dx of each micro-batch, all of which are in flight at once, and the gradients of the weights."""
    ys = [model(x, **options) for x in xs]
    for y in ys:
        y.square().sum().backward()
    return [*(y.detach() for y in ys), *(x.grad for x in xs), *model.gradients()]


def pipeline(num_batches: int, in_flight: int) -> list[tuple[str, int]]:
    """1F1B: F0 F1 B0 F2 B1 ... with so many micro-batches in flight."""
    turns = []
    for turn in range(num_batches + in_flight - 1):
        if turn < num_batches:
            turns.append(("F", turn))
        if turn + 1 >= in_flight:
            turns.append(("B", turn + 1 - in_flight))
    return turns


def run_schedule(
    model: Stack, heap: SymmetricHeap, turns: list[tuple[str, int]]
) -> list[torch.Tensor]:
    """Gradients accumulated over all micro-batches, and every y and dx."""
    flying, tensors = {}, {}
    for direction, turn in turns:
        if direction == "F":
            x = batch(heap, model.layers[0].config.hidden, turn)
            flying[turn] = x, model(x)
        else:
            x, y = flying.pop(turn)
            y.square().sum().backward()
            tensors[turn] = [y.detach(), x.grad]
            del x, y
    return [tensor for turn in sorted(tensors) for tensor in tensors[turn]] + model.gradients()


BIG_H, BIG_I = 256, 96
RANK_TO_TOKENS = (
    400,
    5,
    900,
    1,
)  # experts of several tiles; ranks that by themselves would cut a call differently
MOST_TOKENS = max(RANK_TO_TOKENS)
Kind = tuple[str, str, dict]  # order, stash, limits
EXACT: Kind = ("rank", "all", {})
STATIC: Kind = ("slot", "none", {"capacity": 2 * sum(RANK_TO_TOKENS), "max_tokens": MOST_TOKENS})


def check_ways(
    rank, num_ranks, findings: Findings, device, dtype, kinds=(EXACT, STATIC), ranks_per_node=None
) -> None:
    """The same bits in every way, when rows come, and sums go, in many parts; ranks lag."""
    generator = random.Random(rank)
    num_tokens = RANK_TO_TOKENS[rank % len(RANK_TO_TOKENS)]
    with open_heap(device, num_bytes=64 << 20, ranks_per_node=ranks_per_node) as heap:
        x, dy = (
            tokens_of(rank, num_tokens, BIG_H, salt=salt).to(heap.device, dtype) for salt in (1, 2)
        )
        x.requires_grad_()
        for order, stash, limits in kinds:
            want = None
            for options in WAYS:
                findings.where = (
                    f"rank {rank} of {num_ranks}, {options}, order {order}, stash {stash}, {limits}"
                )
                sizes = {"hidden": BIG_H, "ffn": BIG_I, "num_experts": 2 * num_ranks, "top_k": 2}
                layer, _ = make_layer(
                    heap, MoEConfig(**sizes, order=order, stash=stash, **limits, **options)
                )
                layer.experts.to(dtype)
                time.sleep(0.01 * generator.random())
                sent = []
                send = CombineTrip.send
                CombineTrip.send = lambda self, source=None, send=send, sent=sent, **options: (
                    sent.append(source),
                    send(self, source, **options),
                )
                try:
                    y, metrics = layer(x)
                finally:
                    CombineTrip.send = send
                early = (
                    order == "rank" and num_ranks > 1 and options["schedule"] == "always-overlapped"
                )
                peers = [(rank + step) % num_ranks for step in range(1, num_ranks)]
                if heap.nodes is None:
                    findings.equal("ranks that get sums", sent, peers if early else [None])
                time.sleep(0.01 * generator.random())
                actual = [y.detach(), *torch.autograd.grad(y, (x, *layer.parameters()), dy)]
                del y
                findings.equal("leased bytes", heap.leased_bytes, 0)
                findings.equal("drops", bool(metrics.num_dropped), "overflow" in limits)
                if "overflow" not in limits:
                    findings.check(
                        all(bool(tensor.any()) for tensor in actual), "a result is all zeros"
                    )
                if want is None:
                    want = actual
                findings.same_bits(actual, want)
