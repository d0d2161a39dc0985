"""A model, not a measurement, of what replicas of hot experts give on more GPUs than the records have.

    python benchmarks/balance_model.py --json balance-model.json

Every token chooses K distinct experts with odds n ** -s for the n-th most popular. Popular experts lie at random (mean
of five orders), or all on the first ranks ("sorted"). Which rows move is what place_replicas finds. A step then takes

    base + slope * load + cost + bytes / rate

load: rows of the slowest rank over the mean; bytes: of weights, twice, and of gradients, that replicas move out of or
into the busiest rank. base and slope are fitted to balance-h200-ep2.json (two H200s), and so are, to its steps with
replicas, cost and rate: whatever replicas add there, as if nothing of it were hidden. It is within 4 % of all steps of
the record. Left out: that more ranks send more rows over the network, and do so unevenly, and that GEMMs of fewer rows
are slower.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from suites.cases import parser_of

from symmoe.kernels import control, twin
from symmoe.moe.balance import rows_per_rank
from symmoe.tools.shapes import PRESETS, Options, Shape

RECORD = Path(__file__).parent / "results" / "balance-h200-ep2.json"
SHAPES = {
    "qwen3-30b": PRESETS["qwen3-30b"],
    "deepseek-v3": replace(PRESETS["deepseek-like"], num_experts=256),
}
RECORDED = {
    "qwen3-30b": "qwen3-30b",
    "deepseek-v3": "deepseek-like",
}  # a quarter of the experts, of the same size
TOKENS, SLACK, ITEM_BYTES, NUM_ORDERS = 8192, 50, 2, 5


OPTIONS: Options = {"--json": {"type": Path, "help": "write what is predicted to this file"}}


def popularity(shape: Shape, exponent: float) -> np.ndarray:
    """The share of the tokens that choose each expert [E], the most popular one first, measured on 64 Ki tokens."""
    generator = torch.Generator().manual_seed(1)
    noise = -torch.log(
        -torch.log(
            torch.rand(1 << 16, shape.num_experts, generator=generator).clamp(1e-30, 1 - 2**-24)
        )
    )
    keys = noise - exponent * torch.arange(1, shape.num_experts + 1).log()
    chosen = keys.topk(shape.top_k, dim=1).indices.flatten()
    return torch.bincount(chosen, minlength=shape.num_experts).numpy() / len(noise)


def place_replicas(counts: np.ndarray, num_replica_slots: int) -> tuple[float, float, int]:
    """For slots [R, E]: rows of the slowest rank over the mean, before and after, and the largest number of replicas
    that a rank sends weights of or has."""
    num_ranks, num_experts = counts.shape
    layout = control.ControlLayout(num_ranks)
    views = (torch.zeros(layout.num_bytes, dtype=torch.uint8),) * num_ranks
    bases = torch.tensor([view.data_ptr() for view in views])
    peers = control.Peers(rank=0, num_ranks=num_ranks, bases=bases, views=views, layout=layout)
    first = control.HEADER_WORDS
    peers.count_table(0, peers.epoch)[:, first : first + num_experts] = torch.from_numpy(counts)
    numel, layout_offsets = control.plan_layout(0, 1, num_experts, num_ranks, num_replica_slots)
    plan = control.PlanIntegers(torch.zeros(numel, dtype=torch.int32), layout_offsets)
    twin.place_replicas(peers, plan, slack=SLACK, num_near=num_ranks)
    before, after = rows_per_rank(
        plan.expert_load, plan.replica_to_expert, plan.replica_rows
    ).numpy()
    is_used = plan.replica_to_expert >= 0
    owners = plan.replica_to_expert[is_used] // (num_experts // num_ranks)
    max_replicas = max(int(owners.bincount(minlength=num_ranks).max()), int(is_used.sum(1).max()))
    return before.max() / before.mean(), after.max() / before.mean(), max_replicas


def replica_gb(shape: Shape) -> float:
    """GB that a replica moves in a step: three matrices [H, I], as weights in forward and backward, and gradients."""
    return 3 * 3 * shape.hidden * shape.ffn * ITEM_BYTES / 1e9


def fit(name: str) -> dict[str, float]:
    """base, slope, cost (ms) and rate (GB/s) of a shape, fitted to the record."""
    rows = [
        row
        for row in json.loads(RECORD.read_text(encoding="utf-8"))
        if row["preset"] == RECORDED[name]
    ]
    loads, plain, balanced = (
        np.array([row[field] for row in rows if row["variant"] == variant])
        for field, variant in (("load", "none"), ("ms_median", "none"), ("ms_median", "replicas"))
    )
    slope, base = np.polyfit(loads, plain, 1)
    # So many of rank 0's experts move: hot ones with 2 T rows each, until it has no more than the mean, or all 4
    # replica slots are used.
    moved = np.where(loads > 1.05, np.ceil((loads - 1) * SHAPES[name].top_k / 2), 0)
    ms_per_gb, cost = np.polyfit(moved * replica_gb(SHAPES[name]), balanced - base - slope, 1)
    return {"base": base, "slope": slope, "cost": max(cost, 0.0), "rate": 1e3 / ms_per_gb}


def predict(
    name: str, num_ranks: int, exponent: float, rates: dict[str, float]
) -> list[dict[str, object]]:
    """Predictions for both layouts of experts and for 2 and 4 replica slots."""
    shape = SHAPES[name]
    rng = np.random.default_rng(1)
    shares = popularity(shape, exponent)
    counts = rng.multinomial(TOKENS * shape.top_k, shares / shares.sum(), size=num_ranks)
    orders = [rng.permutation(shape.num_experts) for _ in range(NUM_ORDERS)]
    uniform = rates["base"] + rates["slope"]
    predictions = []
    for where, expert_orders in (("random", orders), ("sorted", [np.arange(shape.num_experts)])):
        for num_replica_slots in (2, 4):
            before, after, replicas = np.array(
                [place_replicas(counts[:, order], num_replica_slots) for order in expert_orders]
            ).mean(0)
            moving = rates["cost"] + 1e3 * replicas * replica_gb(shape) / rates["rate"]
            results = {
                "load": before,
                "balanced_load": after,
                "busiest_rank_replicas": replicas,
                "uniform_ms": uniform,
                "ms": rates["base"] + rates["slope"] * before,
                "balanced_ms": rates["base"] + rates["slope"] * after + moving,
            }
            predictions.append(
                {
                    "model": True,
                    "shape": name,
                    "ep": num_ranks,
                    "zipf": exponent,
                    "experts": where,
                    "num_replica_slots": num_replica_slots,
                    **{key: round(float(x), 3) for key, x in results.items()},
                }
            )
    return predictions


def main() -> None:
    options = parser_of(__doc__, OPTIONS).parse_args()
    predictions = []
    for name in SHAPES:
        rates = fit(name)
        print(f"{name}: {', '.join(f'{key} {value:.3g}' for key, value in rates.items())}")
        predictions += [
            prediction
            for r in (8, 64)
            for s in (0.5, 0.8, 1.0, 1.2)
            for prediction in predict(name, r, s, rates)
        ]
    for prediction in predictions:
        print(
            "  ".join(
                f"{key} {value}"
                for key, value in prediction.items()
                if key not in ("model", "uniform_ms")
            )
        )
    if options.json:
        options.json.write_text(
            "[\n" + ",\n".join(map(json.dumps, predictions)) + "\n]\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
