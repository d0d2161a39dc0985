"""Steps, forward and backward, with another number of tokens every time: nothing grows, and results stay right. A case
is one step of two layers in turn, with static and with exact capacity. After the first steps, of which one has room for
the most rows, these have to stay as they are: the heap's high-water mark, its leased bytes between steps, file
descriptors, and on GPUs the bytes that torch has allocated. Host memory may grow by less than 1 MB in 1,000 steps, once
programs of as many kinds of calls are kept as a heap keeps.
Every 50 steps y is compared with a plain loop in float64, and a fixed step with the hash it had at first. Every 14
steps a call gets too small a row budget."""

import gc
import random
import statistics
import sys
import time
from functools import partial

import oracle
import torch
from layers import global_weights
from worker import give_budget

from reliability import step
from reliability.suite import SEED_STRIDE, Numbers, Outcome, Results, Suite, on_ranks
from symmoe import MoELayer, SymmetricHeap

MAX_TOKENS = 24
WARM_UP = 100  # steps; torch and malloc settle on what they keep
PROGRAMS_WARM_UP = 3000  # steps; as many kinds of calls have programs as are kept, of all sizes
CHECK_EVERY = 50
TOO_LITTLE_ROOM_EVERY = 14
JUDGE_EVERY = 2500
GROWTH_BYTES_PER_STEP = 1e6 / 1000
_SLACK_BYTES = (
    2e6  # a page here and there: in a short run it is more than the growth that is allowed
)
_PROGRAMS_BYTES = 16e6  # what they may take until then: 256 kinds of 60 KB
_WEIGHTS_SEED = 5


def check(rank: int, num_ranks: int, numbers: Numbers, seed: int, device: str) -> Results:
    """Yields an outcome for each step; growth is a problem of the last step, and of some steps in between."""
    with SymmetricHeap(
        num_bytes=8 << 20, backend="nvshmem" if device == "cuda" else "host"
    ) as heap:
        max_rows = num_ranks * MAX_TOKENS * step.TOP_K
        layers = (
            step.make_layer(heap, _WEIGHTS_SEED, capacity=max_rows, max_tokens=MAX_TOKENS),
            step.make_layer(heap, _WEIGHTS_SEED, order="slot", schedule="overlapped"),
        )
        weights = [
            weight.double()
            for weight in global_weights(
                layers[0].config.num_experts, step.HIDDEN, step.FFN, torch.float32, _WEIGHTS_SEED
            )
        ]
        fixed = step.tokens_of(heap, 99, MAX_TOKENS)
        give_budget(
            heap, (layers[1].config.num_experts, step.TOP_K), MAX_TOKENS, max_rows
        )  # no later call needs more
        step.forward_backward(layers[1], fixed)
        expected = [step.hash_of_step(layer, fixed) for layer in layers]
        samples, python_blocks = [], []
        for turn, number in enumerate(numbers):
            start, problems, facts = time.perf_counter(), [], {}
            generator = random.Random(f"{seed * SEED_STRIDE + number}, {rank}")
            layer = layers[number % 2]
            num_tokens = generator.randint(0, MAX_TOKENS)
            x = step.tokens_of(heap, seed * SEED_STRIDE + number, num_tokens)
            if number % TOO_LITTLE_ROOM_EVERY == 1:  # number is odd where capacity is exact
                give_budget(heap, (layer.config.num_experts, step.TOP_K), num_tokens, 1)
            y = step.forward_backward(layer, x)
            if (
                number % CHECK_EVERY == 0 or number == numbers[-1]
            ):  # so that gradients are of one size in every sample
                problems += wrong_values(layer, x, y, weights)
                actual = [step.hash_of_step(layer, fixed) for layer in layers]
                if actual != expected:
                    problems.append(f"the fixed step hashes to {actual}, at first to {expected}")
            del x, y
            if turn >= WARM_UP and (turn % CHECK_EVERY == 0 or number == numbers[-1]):
                samples.append((turn, step.resident_bytes(), *footprint(heap)))
            if samples and (number == numbers[-1] or turn % JUDGE_EVERY == 0):
                problems += growth_problems(samples)
                python_blocks.append(sys.getallocatedblocks())
                late = settled(samples)
                facts = {
                    "resident_bytes_per_1000_steps": 1000.0
                    * slope([s[0] for s in late], [s[1] for s in late]),
                    "resident_mib": [
                        round(s[1] / 2**20, 2) for s in samples[:: JUDGE_EVERY // CHECK_EVERY]
                    ],
                    "high_water_bytes": heap.high_water_bytes,
                    "open_files": step.num_open_files(),
                    "python_blocks": [*python_blocks],
                }
            if number == numbers[-1]:
                facts["tensor_maps"] = (
                    num_tensor_maps()
                )  # last, because the list of all objects takes megabytes
            yield 1e3 * (time.perf_counter() - start), problems, facts


def wrong_values(
    layer: MoELayer, x: torch.Tensor, y: torch.Tensor, weights: list[torch.Tensor]
) -> list[str]:
    """Compares y with the experts' formula in float64."""
    with torch.no_grad():
        routed = layer.router(x)
        ids = routed.topk_idx.cpu()
        probs = routed.probs.cpu().double()
        tokens = x.detach().cpu().double()
        want = oracle.experts(tokens, ids, probs, *weights)
    worst = float((y.cpu().double() - want).abs().max()) if y.numel() else 0.0
    return [] if worst < 1e-4 else [f"y is off by {worst:.3g}"]


def footprint(heap: SymmetricHeap) -> tuple[int, ...]:
    """Figures that must stay exactly equal: see NAMES."""
    on_device = torch.cuda.memory_allocated() if heap.device.type == "cuda" else 0
    return heap.high_water_bytes, heap.leased_bytes, step.num_open_files(), on_device


def num_tensor_maps() -> int:
    """The number of tensor maps of all launches (symmoe/kernels/launch/player.py, which bounds it). The import is by
    name: the module needs Triton."""
    return sum(len(cache) for cache in gc.get_objects() if type(cache).__name__ == "_TensorMaps")


def settled(samples: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The measurements after the last new programs; all of them, if fewer than two follow."""
    late = [sample for sample in samples if sample[0] >= PROGRAMS_WARM_UP]
    return late if len(late) > 1 else samples


NAMES = ("heap high water", "leased bytes", "open files", "device bytes")


def growth_problems(samples: list[tuple[int, ...]]) -> list[str]:
    first = samples[0]
    problems = [
        f"{name} went from {first[2 + i]} to {sorted({s[2 + i] for s in samples})}"
        for i, name in enumerate(NAMES)
        if len({sample[2 + i] for sample in samples}) > 1
    ]
    judged = settled(samples)
    num_steps = judged[-1][0] - judged[0][0]
    growth = num_steps * slope([sample[0] for sample in judged], [sample[1] for sample in judged])
    allowed = GROWTH_BYTES_PER_STEP * num_steps + _SLACK_BYTES
    if judged is samples:
        allowed += _PROGRAMS_BYTES
    if growth > allowed:
        problems.append(f"host memory grew by {growth:.0f} bytes in {num_steps} steps")
    return problems


def slope(x: list[float], y: list[float]) -> float:
    """The slope of the least-squares line. Not by LAPACK, whose first call keeps megabytes: more than the searched
    growth."""
    return statistics.linear_regression(x, y).slope if len(set(x)) > 1 else 0.0


def summarize(outcomes: list[Outcome]) -> dict:
    facts = [outcome.facts for outcome in outcomes if outcome.facts]
    return {"footprint": facts[-1]} if facts else {}


SUITE = Suite(
    partial(on_ranks, check=check, deadline_s=60.0), num_cases=20_000, summarize=summarize
)
