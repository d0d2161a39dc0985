"""`order="slot"`: the same bits on any number of ranks and for any distribution of the tokens. Both orders: the same
bits from run to run."""

import itertools
import random
import time
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from cluster import on_ranks
from layers import WAYS
from oracle import bits_of
from worker import experts_of, mlp_with_budget, open_heap

from symmoe import make_plan
from symmoe.moe.ep_step import expert_parallel_mlp

NUM_EXPERTS = 8


@dataclass(frozen=True)
class Batch:
    """A global batch: T tokens of all ranks."""

    name: str
    num_tokens: int
    hidden: int
    ffn: int
    top_k: int
    skew: float  # 0 is uniform; the larger, the more tokens go to few experts
    static: bool

    def make(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Tokens, routing, weights and gradient of the output of the whole group."""
        rng = np.random.default_rng([5, self.num_tokens, self.hidden])
        weights = 1 / (1 + np.arange(NUM_EXPERTS)) ** self.skew
        ids = np.stack(
            [
                rng.choice(NUM_EXPERTS, self.top_k, replace=False, p=weights / weights.sum())
                for _ in range(self.num_tokens)
            ]
        )
        ids[rng.random(ids.shape) < 0.1] = -1
        ids[3] = -1
        ids[7] = ids[7, 0]  # one expert in all slots

        def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return torch.from_numpy(rng.standard_normal(shape) * scale).to(dtype)

        return {
            "topk_idx": torch.from_numpy(ids),
            "probs": torch.from_numpy(rng.random(ids.shape, dtype=np.float32)),
            "x": normal(self.num_tokens, self.hidden),
            "dy": normal(self.num_tokens, self.hidden),
            "w1": normal(NUM_EXPERTS, 2 * self.ffn, self.hidden, scale=self.hidden**-0.5),
            "w2": normal(NUM_EXPERTS, self.hidden, self.ffn, scale=self.ffn**-0.5),
        }


BATCHES = (
    Batch("small", 48, 24, 20, 3, 0.0, False),
    Batch("skewed", 61, 40, 33, 4, 1.5, False),
    Batch("static", 48, 16, 48, 2, 0.7, True),
    Batch("large", 301, 64, 96, 2, 0.5, False),
    # Experts with a row or two, whose operands lie at other alignments on other numbers of ranks: MKL rounds by that.
    Batch("sparse", 12, 66, 33, 1, 0.0, False),
)
GPU_BATCHES = (
    Batch("small", 48, 64, 96, 3, 0.0, False),
    Batch("skewed", 301, 128, 64, 4, 1.5, False),
    Batch("static", 160, 256, 192, 2, 0.7, True),
)
PER_TOKEN = ("y", "dx", "dprobs")
PER_EXPERT = ("dw1", "dw2")


def cuts_of(num_tokens: int, num_ranks: int) -> list[list[int]]:
    """Numbers of tokens per rank: as even as possible, uneven, and with ranks without tokens."""
    even = [num_tokens // num_ranks + (rank < num_tokens % num_ranks) for rank in range(num_ranks)]
    if num_ranks == 1:
        return [even]
    ends = [num_tokens * (rank + 1) ** 2 // num_ranks**2 for rank in range(num_ranks)]
    uneven = [end - start for start, end in itertools.pairwise([0, *ends])]
    return [
        even,
        uneven,
        [0] * (num_ranks - 1) + [num_tokens],
        [num_tokens] + [0] * (num_ranks - 1),
    ]


def run_layer(
    rank,
    num_ranks,
    batch: Batch,
    cuts: list[list[int]],
    dtype: torch.dtype,
    device: str,
    order: str,
    lag_s: float,
) -> list[dict[str, np.ndarray]]:
    """Forward and backward of this rank's part, once per distribution, with other options each time. Results as bit
    patterns."""
    results, variations = [], itertools.cycle(WAYS)
    generator = random.Random(rank)
    full = batch.make(dtype)
    with open_heap(device, num_bytes=16 << 20) as heap:
        for cut in cuts:
            tokens = slice(sum(cut[:rank]), sum(cut[: rank + 1]))
            experts = slice(rank * NUM_EXPERTS // num_ranks, (rank + 1) * NUM_EXPERTS // num_ranks)
            local = {
                name: tensor[experts if name in ("w1", "w2") else tokens].to(heap.device, copy=True)
                for name, tensor in full.items()
            }
            experts_here = experts_of(local["w1"], local["w2"])
            for name in ("x", "probs"):
                local[name].requires_grad_()
            routed = (local["topk_idx"], local["x"], local["probs"], experts_here)
            options = {"order": order, **next(variations)}
            time.sleep(lag_s * generator.random())
            if batch.static:
                limits = {"capacity": batch.num_tokens * batch.top_k, "max_tokens": max(cut)}
                plan = make_plan(routed[0], num_experts=NUM_EXPERTS, heap=heap, **limits)
                y = expert_parallel_mlp(*routed[1:], plan, **options)
            else:
                y = mlp_with_budget(heap, *routed, num_experts=NUM_EXPERTS, **options)
            time.sleep(lag_s * generator.random())
            y.backward(local["dy"])
            tensors = {
                "y": y,
                "dx": local["x"].grad,
                "dprobs": local["probs"].grad,
                "dw1": experts_here.fc1.weight.grad,
                "dw2": experts_here.fc2.weight.grad,
            }
            results.append({name: bits_of(tensor) for name, tensor in tensors.items()})
    return results


def joined(ranks: list[list[dict[str, np.ndarray]]]) -> list[dict[str, np.ndarray]]:
    """For each distribution, the tokens and experts of all ranks in order."""
    return [
        {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        for parts in zip(*ranks, strict=True)
    ]


def assert_same_bits(got: dict[str, np.ndarray], want: dict[str, np.ndarray], label: str) -> None:
    for name in (*PER_TOKEN, *PER_EXPERT):
        assert got[name].shape == want[name].shape
        differ = int((got[name] != want[name]).sum())
        assert differ == 0, f"{label}: {differ} of {want[name].size} elements of {name} differ"


CALLS = [
    *(pytest.param("cpu", batch, torch.float32, id=batch.name) for batch in BATCHES),
    *(
        pytest.param("cuda", batch, dtype, id=f"{batch.name}, {dtype}, GPUs", marks=pytest.mark.gpu)
        for batch in GPU_BATCHES
        for dtype in (torch.bfloat16, torch.float32)
    ),
]


@pytest.mark.parametrize(("device", "batch", "dtype"), CALLS)
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_slot_order_does_not_depend_on_the_ranks(
    cluster, num_ranks, device: str, batch: Batch, dtype: torch.dtype
):
    def run(num_ranks: int, cuts: list[list[int]]) -> list[dict[str, np.ndarray]]:
        return joined(
            cluster(num_ranks, device).run(run_layer, batch, cuts, dtype, device, "slot", 0.0)
        )

    (want,) = run(1, cuts_of(batch.num_tokens, 1))
    for name in (*PER_TOKEN, *PER_EXPERT):
        assert np.count_nonzero(want[name]) > 0.5 * want[name].size  # there is something to compare
    cuts = cuts_of(batch.num_tokens, num_ranks)
    for cut, got in zip(cuts, run(num_ranks, cuts), strict=True):
        assert_same_bits(got, want, f"{num_ranks} ranks with {cut} tokens")


@pytest.mark.parametrize("order", ["rank", "slot"])
@on_ranks(cpu=(1, 2, 4, 8), cuda=(1, 2, 4, 8))
def test_runs_repeat_bit_for_bit(cluster, num_ranks: int, device: str, order: str):
    """The same call again, in the same heap, in another heap, and with delayed ranks."""
    batch, dtype = (
        (BATCHES[1], torch.float32) if device == "cpu" else (GPU_BATCHES[1], torch.bfloat16)
    )
    cut = cuts_of(batch.num_tokens, num_ranks)[0]
    ranks = cluster(num_ranks, device)
    want, again = joined(ranks.run(run_layer, batch, [cut, cut], dtype, device, order, 0.0))
    assert_same_bits(again, want, "in the same heap")
    (lagging,) = joined(ranks.run(run_layer, batch, [cut], dtype, device, order, 0.01))
    assert_same_bits(lagging, want, "with ranks that lag")


def test_the_orders_of_sums_round_differently(cluster):
    """With 4 experts per token: otherwise the tests above could not detect a wrong order."""
    cut = cuts_of(BATCHES[1].num_tokens, 2)[0]
    by_order = {}
    for order in ("rank", "slot"):
        (by_order[order],) = joined(
            cluster(2).run(run_layer, BATCHES[1], [cut], torch.float32, "cpu", order, 0.0)
        )
    assert (by_order["rank"]["y"] != by_order["slot"]["y"]).any()
