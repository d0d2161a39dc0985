"""Writes docs/measurements.md from the records in benchmarks/results, so that every figure of the page is a record's.

    python benchmarks/measurements.py

A new record takes the place of the old one under its name; a test compares the page with what this makes.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "measurements.md"
PRESETS = ("qwen3-30b", "mixtral-8x7b", "deepseek-like")
NEW_PRESETS = (
    "glm-5",
    "kimi-k2",
    "deepseek-v4-pro",
    "qwen3.5-397b",
    "gpt-oss-120b",
    "nemotron-3-super",
    "3584x3072x448x16",
)
BOTH = ("forward", "backward")

H200 = "NVIDIA H200, driver 580.159.04, torch 2.11.0+cu130, Triton 3.6.0, NVSHMEM 3.4.5"

TOP = f"""\
# Measurements

`benchmarks/measurements.py` writes this page from the [records](../benchmarks/results/README.md), with commands and
percentiles. *H200* is {H200}. Medians, bf16,
T = 8192 tokens per rank, uniform routing, unless stated. Layers, as (hidden, ffn, experts, choices): qwen3-30b (2048,
768, 128, 8), mixtral-8x7b (4096, 14336, 8, 2), deepseek-like (7168, 2048, 64, 8), deepseek-v3 (7168, 2048, 256, 8),
glm-5 (6144, 2048, 256, 8), kimi-k2 (7168, 2048, 384, 8), deepseek-v4-pro (7168, 3072, 384, 6), qwen3.5-397b (4096,
1024, 512, 10), gpt-oss-120b (2880, 2880, 128, 4); in their latent width nemotron-3-super (1024, 2688, 512, 22) and half
of kimi-k3 (3584, 3072, 448, 16). Suites: [benchmarking](benchmarking.md), [reliability](reliability.md#suites).
"""

Record = dict[str, Any]


@cache
def load(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def pick(name: str, **fields: object) -> Record:
    """The only row of a record with these values."""
    rows = [
        row for row in load(name) if all(row.get(key) == value for key, value in fields.items())
    ]
    if len(rows) != 1:
        raise LookupError(f"{name}.json has {len(rows)} rows of {fields}; there must be one")
    return rows[0]


def both_ways(name: str, **fields: object) -> list[Record]:
    """The forward and the backward row with these values."""
    return [pick(name, direction=direction, **fields) for direction in BOTH]


def both_ms(name: str, **fields: object) -> str:
    """Forward / backward in ms."""
    return " / ".join(f"{row['ms_median']:.2f}" for row in both_ways(name, **fields))


def machine(row: Record) -> str:
    nvshmem = re.sub(r"nvidia-nvshmem-cu13 (.*), .*", r"NVSHMEM \1", row.get("nvshmem") or "")
    driver = row["driver"] and f"driver {row['driver']}"
    parts = (row["gpu"], driver, f"torch {row['torch']}", f"Triton {row['triton']}", nvshmem)
    return ", ".join(filter(None, parts)).replace(H200, "H200")


def when(row: Record) -> str:
    commit, *_ = (row.get("commit") or "no commit recorded").split(" and ")
    short = re.sub(r"([0-9a-f]{7})[0-9a-f]{33}", r"\1", commit)
    return f"{row['date'][:10]}, {short}"


def source(*names: str, note: str = "") -> str:
    """The source of figures: machine and versions of each record, dates and commits of its runs."""
    parts = []
    for name in names:
        rows = load(name) if isinstance(load(name), list) else [load(name).get("env", load(name))]
        runs = "; ".join(dict.fromkeys(map(when, rows)))
        parts.append(f"{name}.json, {machine(rows[0])} ({runs}).")
    return fill(" ".join([*parts, note]).strip())


def fill(text: str) -> str:
    return textwrap.fill(text, 120, break_on_hyphens=False, break_long_words=False)


def table(head: Sequence[str], rows: Iterable[Sequence[object]], num_names: int = 1) -> str:
    lines = [head, [*["---"] * num_names, *["--:"] * (len(head) - num_names)], *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |".replace("  ", " ") for line in lines)


# -- layers -----------------------------------------------------------------------------------------------------------

KINDS = (
    "layer",
    "layer, losses",
    "layer, static",
    "layer, graph",
    "experts",
    "experts, static",
    "experts, graph",
)


STEPS = ("steps-h200-ep2", "deepep-h200-ep2", "steps-h100-ep1")
COLUMNS = [
    *(("qwen3-30b", tokens, STEPS[:2]) for tokens in (8192, 2048, 512)),
    *((preset, 8192, STEPS[:2]) for preset in (*PRESETS[1:], *NEW_PRESETS)),
    *((preset, 8192, STEPS[2:]) for preset in ("qwen3-30b", "deepseek-like")),
]


def steps() -> Iterable[list[object]]:
    rows = {
        (row["variant"], row["preset"], row["tokens"], name): f"{row['ms_median']:.2f}"
        for name in STEPS
        for row in load(name)
        if row["suite"] == "steps"
    }
    for kind in (*KINDS, "deepep", "stock torch"):
        cells = (
            [rows.get((kind, preset, tokens, name), "") for name in names]
            for preset, tokens, names in COLUMNS
        )
        yield [kind, *("".join(cell) for cell in cells)]


def host(name: str) -> str:
    keys = ("launches", "waits", "copies", "allocations")
    rows = (
        (kind, pick(name, suite="steps", variant=kind, preset="qwen3-30b", tokens=8192))
        for kind in KINDS[:4]
    )
    return table(
        ["qwen3-30b, a step", "host us after a pause", *keys],
        ([kind, f"{row['host_us']:.0f}", *(row[key] for key in keys)] for kind, row in rows),
    )


def memory() -> Iterable[list[object]]:
    for variant in ("layer", "layer, packed", "deepep", "stock torch"):
        rows = [pick("memory-h100-ep2", variant=variant, preset=preset) for preset in PRESETS]
        parts = [
            [row[f"{when}_{kind}_bytes"] for kind in ("ordinary", "heap")]
            for row in rows
            for when in ("held", "peak")
        ]
        yield [
            variant,
            *(" + ".join(f"{part / 2**20:.0f}" for part in both if part) for both in parts),
        ]


PLACES = [
    *((preset, 2, "layer-h200-ep2") for preset in PRESETS),
    *((preset, 4, "layer-h200-ep4") for preset in PRESETS),
]


def layers() -> Iterable[list[object]]:
    for preset, num_ranks, name in PLACES:
        both, stock = (
            both_ways(name, suite="layer", variant=variant, preset=preset)
            for variant in ("graph", "stock torch")
        )
        cells = [
            f"{row['ms_median']:.2f} | {row['tflops']:.0f} | {row['tflops'] / row['ceiling_tflops']:.2f}"
            for row in both
        ]
        faster = sum(row["ms_median"] for row in stock) / sum(row["ms_median"] for row in both)
        yield [preset, num_ranks, *cells, f"{faster:.2f}"]


def ceilings() -> Iterable[list[object]]:
    for preset, num_ranks, name in PLACES:
        figures = [
            f"{row['ms_median']:.2f} / {row['tflops']:.0f}"
            for row in both_ways(name, suite="layer", preset=preset, variant="gemms alone")
        ]
        stock = both_ms(name, suite="layer", preset=preset, variant="stock torch")
        yield [preset, num_ranks, *figures, stock]


def variants() -> Iterable[list[object]]:
    name = "variants-h200-ep2"
    layouts = ("static", "packed", "expert-major", "order=slot")
    for variant in (*layouts, "stash=rows", "stash=hidden", "stash=none", "public parts"):
        cells = []
        for preset in PRESETS:
            row = pick(name, variant=variant, preset=preset, direction="forward")
            mib = " + ".join(
                f"{row[key] / 2**20:.0f}" for key in ("peak_ordinary_bytes", "peak_heap_bytes")
            )
            cells += [both_ms(name, variant=variant, preset=preset), mib]
        yield [variant, *cells]


def trips() -> Iterable[list[object]]:
    for num_ranks, name in ((2, "trips-h200-ep2"), (4, "trips-h200-ep4")):
        for preset in ("qwen3-30b", "deepseek-like"):
            gbs = {
                (row["suite"], row["variant"], row["direction"]): f"{row['wire_gbs']:.0f}"
                for row in load(name)
                if row["preset"] == preset and row["wire_gbs"]
            }
            yield [
                preset,
                num_ranks,
                *(
                    gbs["dispatch", layout, d]
                    for layout in ("packed", "expert-major")
                    for d in BOTH
                ),
                gbs["dispatch", "copy", "forward"],
                *(gbs["combine", f"order={order}", "forward"] for order in ("rank", "slot")),
                *(gbs["combine", f"copy {order}", "forward"] for order in ("rank", "slot")),
            ]


# -- parts ------------------------------------------------------------------------------------------------------------


def router() -> Iterable[list[object]]:
    for preset, by_way in load("router-h200")["results"].items():
        both = (f"{row['forward_us']:.0f} / {row['backward_us']:.0f}" for row in by_way.values())
        errors = (f"{row['error']:.1e}".replace("e-0", "e-") for row in by_way.values())
        yield [preset, *both, ", ".join(errors)]


PRODUCTS = {
    "fc1": "FC1",
    "fc2": "FC2",
    "dfc2": "FC2 dgrad",
    "dfc1": "FC1 dgrad",
    "wgrad2": "W2 gradient",
    "wgrad1": "W1 gradient",
}
FUSIONS = {
    "forward-fusion": "FC1 + SwiGLU * scale",
    "backward-fusion": "FC2 dgrad + dSwiGLU + dscale, a again",
}
HOW = {
    "symmoe": "one kernel",
    "unfused": "our kernels, one after the other",
    "torch": "torch._grouped_mm and eager activations",
}


def products() -> Iterable[list[object]]:
    speeds = {
        (x["shape"], x["op"], x["way"]): f"{x['tflops']:.0f}" for x in load("gemm-h200")["results"]
    }
    for op, name in PRODUCTS.items():
        yield [
            name,
            *(
                f"{speeds[preset, f'{op}-plain', 'symmoe']} ({speeds[preset, f'{op}-plain', 'torch']})"
                for preset in PRESETS
            ),
        ]
    for op, name in FUSIONS.items():
        for variant, label in HOW.items():
            yield [f"{name}: {label}", *(speeds[preset, op, variant] for preset in PRESETS)]


def fp8_products() -> Iterable[list[object]]:
    """FP8 / bf16 of the last run with both."""
    for preset in PRESETS:
        cells = []
        for op in PRODUCTS:
            runs = [
                {
                    x["way"]: x["tflops"]
                    for x in run["results"]
                    if (x["shape"], x["op"]) == (preset, op)
                }
                for run in load("fp8-gemm-h200")
            ]
            last = [run for run in runs if {"hopper", "bf16"} <= run.keys()][-1]
            cells.append(f"{last['hopper']:.0f} / {last['bf16']:.0f}")
        yield [preset, *cells]


FP8 = {
    "bf16": "static",
    "bf16, graph": "graph",
    "Float8Block": "float8-block",
    "Float8Block, E4M3 on the wire": "float8-block, wire",
    "the same, graph": "float8-block, wire, graph",
    "the same, weights quantised before (cache_quantized_weights)": "float8-block, wire, constant weights",
    "float8-auto": "float8-auto",
}


def fp8_layers() -> Iterable[list[object]]:
    name = "precision-h200-ep2"
    for label, variant in FP8.items():
        cells = []
        for preset in PRESETS:
            fields = {"suite": "precision", "variant": variant, "preset": preset}
            precision = both_ways(name, **fields)[0].get("precision")
            chosen = (
                f" ({'bf16' if precision == 'bf16' else 'FP8'})" if variant == "float8-auto" else ""
            )
            cells.append(both_ms(name, **fields) + chosen)
        yield [label, *cells]


def convergence() -> Iterable[list[object]]:
    for recipe, result in load("convergence-h200")["results"].items():
        if recipe == "float8-rowwise":  # a recipe that has been removed
            continue
        seeds = (f"{bits:.3f}" for bits in result["final_bits_per_byte"]["seeds"].values())
        difference = 100 * result["more_than_bf16"], 100 * result["more_than_bf16_standard_error"]
        yield [recipe, *seeds, "" if recipe == "bf16" else "{:+.1f} ± {:.1f} %".format(*difference)]


def balance() -> Iterable[list[object]]:
    records = load("balance-h200-ep2")
    for preset in dict.fromkeys(row["preset"] for row in records):
        rows = [row for row in records if row["preset"] == preset]
        for without, replicas in zip(rows[::2], rows[1::2], strict=True):
            ms, peaks = zip(
                *(
                    (
                        f"{row['ms_median']:.2f}",
                        f"{(row['peak_ordinary_bytes'] + row['peak_heap_bytes']) / 2**20:,.0f}",
                    )
                    for row in (without, replicas)
                ),
                strict=True,
            )
            yield [
                preset,
                without["skew"],
                *ms,
                f"{replicas['ms_median'] / rows[0]['ms_median']:.2f}",
                *peaks,
            ]


# -- trainers ---------------------------------------------------------------------------------------------------------


TRAINERS = ("torchtitan-h200-ep2", "megatron-training-h200-ep2", "trainer-h200-ep2")
Training = tuple[
    str, float, dict[str, float]
]  # whose trainer and which way, tokens per second, losses by step


def trainings() -> Iterable[list[Training]]:
    """The runs of each trainer; the last one is the trainer's own layer, the baseline."""
    titan, megatron, trainer = map(load, TRAINERS)
    return (
        [(f"torchtitan: {run['way']}", run["tokens_per_s"], run["losses"]) for run in titan],
        [of_megatron(run) for run in megatron],
        [
            (f"transformers: {run['way']}", run["tokens_per_s"][0], run["losses"][0])
            for run in trainer["results"]
        ],
    )


def of_megatron(run: Record) -> Training:
    shape = run["shape"]
    name = run["trained"].replace("+", ", ")
    tokens = shape["sequence"] * shape["micro_batch"] * shape["micro_batches"] * run["ranks"]
    name += f", capacity {run['load_factor']:g} times the mean" if run["load_factor"] else ""
    return f"Megatron-Core: {name}", tokens / run["step_ms"]["median"] * 1e3, run["losses"]


def trainers() -> Iterable[list[object]]:
    for ways in trainings():
        for name, rate, losses in ways:
            shown = (f"{losses[step]:.3f}" for step in ("20", "100", "200"))
            yield [name, f"{rate:,.0f}", f"{rate / ways[-1][1]:.2f}x", *shown]


# -- reliability ------------------------------------------------------------------------------------------------------

CALL = "python -m tests.reliability"
SUITES = (
    "routings",
    "gradients",
    "determinism",
    "faults",
    "stalls",
    "fuzz",
    "soak",
    "lifecycle",
    "litmus",
)


def findings_of(record: Record) -> str:
    """The counts of a suite besides cases."""
    if "num_stalls" in record:
        return f"{record['num_stalls']} calls stalled"
    if "observations" in record:
        stale = {kind: counts["stale"] for kind, counts in record["kinds"].items()}
        controls = stale.pop("flag first"), stale.pop("relaxed", None)
        shown = ", ".join(f"{count:,}" for count in controls if count is not None)
        return f"{record['observations'] / 1e6:,.1f} million words, {sum(stale.values())} stale; controls {shown}"
    if record["suite"] == "faults":
        kinds = (
            f"{kind} {x['cases']}: {x['detect_ms']['p50']:.0f}, {x['detect_ms']['max']:.0f} ms"
            for kind, x in record["kinds"].items()
        )
        return "; ".join(kinds)
    return ""


def suites(records: dict[str, Record]) -> Iterable[list[object]]:
    for name in SUITES:
        if record := records.get(name):
            yield [
                name,
                f"{record['cases_run']:,}",
                record["cases_failed"],
                f"{record['wall_s']:.0f}",
                when(record),
                findings_of(record),
            ]


def both_suites() -> Iterable[list[object]]:
    """The rows of the suites, for 4 and for 2 ranks."""
    four, two = (suites(load(f"reliability-h200-ep{count}")["suites"]) for count in (4, 2))
    for row4, row2 in zip(four, two, strict=True):
        yield [
            row4[0],
            *(str(a) if a == b else f"{a} / {b}" for a, b in zip(row4[1:], row2[1:], strict=True)),
        ]


GPU_RANKS = (2, 4)


def failed_on_gpus() -> str:
    """The failed cases by suite and number of GPUs, for this page and for README."""
    parts = []
    for ranks in GPU_RANKS:
        failed = [
            f"{name} {record['cases_failed']} of {record['cases_run']:,}"
            for name, record in load(f"reliability-h200-ep{ranks}")["suites"].items()
            if record["cases_failed"]
        ]
        parts.append(f"on {ranks} H200s {' and '.join(failed) or 'none'}")
    return ", ".join(parts)


def failures() -> Iterable[str]:
    """A line for each case that failed on GPUs."""
    for ranks in GPU_RANKS:
        for name, record in load(f"reliability-h200-ep{ranks}")["suites"].items():
            for failure in record.get("failures", ()):
                yield f"* {ranks} GPUs, {name}, case {failure['case']}: {failure['problems'][0]}"


def sanitizer(text: str) -> Iterable[list[object]]:
    reports = re.search(r"^racecheck: (.*others)", text, re.MULTILINE)[1]
    for tool in ("memcheck", "initcheck", "synccheck", "racecheck"):
        pattern = rf"^{tool}: .*?(\d+) (?:errors|hazards).*?; tests: (\d+) passed"
        note = f" ({reports})" if tool == "racecheck" else ""
        yield [tool + note, *re.search(pattern, text, re.MULTILINE).groups()]


# -- the page ---------------------------------------------------------------------------------------------------------


def sections() -> list[tuple[str, list[str]]]:
    passes = "forward / backward"
    cpu = [f"reliability-cpu-{name}" for name in SUITES]
    head = ["suite", "cases", "failed", "s", "run", "found"]
    columns = (
        f"{preset}, {tokens}{', one H100' * (names == STEPS[2:])}"
        for preset, tokens, names in COLUMNS
    )
    three = ["ms", "TFLOP/s", "of ceiling"]
    trip = [f"dispatch {layout}, {d}" for layout in ("packed", "expert-major") for d in BOTH]
    trace = (RESULTS / "trace-h200-ep2.txt").read_text(encoding="utf-8")
    sanitized = (RESULTS / "sanitize-h200.txt").read_text(encoding="utf-8")
    counted = ("device-to-device copies", "calls that wait for the GPU", "kernels")
    counts = [re.search(rf"^{label}: (\d+)$", trace, re.MULTILINE)[1] for label in counted]
    return [
        (
            "## Whole steps",
            [
                source(*STEPS, note="2 H200s, and one H100 without traffic."),
                table(["ms of a step", *columns], steps()),
                host("steps-h200-ep2"),
            ],
        ),
        (
            "## Memory of a step",
            [
                source("memory-h100-ep2", note="Ordinary memory + leases of the heap."),
                table(
                    [
                        "MiB",
                        *(f"{preset}, {label}" for preset in PRESETS for label in ("held", "peak")),
                    ],
                    memory(),
                ),
            ],
        ),
        (
            "## Layer",
            [
                source(
                    "layer-h200-ep2",
                    "layer-h200-ep4",
                    note="Static capacity, a CUDA graph; the pictures in [benchmarking](benchmarking.md#pictures) show "
                    "it without a graph.",
                ),
                table(
                    [
                        "layer",
                        "EP",
                        *(f"{d} {label}" for d in BOTH for label in three),
                        "x stock",
                    ],
                    layers(),
                    2,
                ),
                table(
                    [
                        "layer",
                        "EP",
                        "GEMMs alone forward ms / TFLOP/s",
                        "backward",
                        f"stock {passes} ms",
                    ],
                    ceilings(),
                    2,
                ),
            ],
        ),
        (
            "### Balance by replicas",
            [
                source(
                    "balance-h200-ep2",
                    note="Steps without a router, 4 replica slots. Load: rows of rank 0 divided by the mean. Peak: of "
                    "rank 0.",
                ),
                table(
                    [
                        "",
                        "load",
                        "ms",
                        "with replicas",
                        "by the uniform step",
                        "peak MiB",
                        "with replicas",
                    ],
                    balance(),
                ),
            ],
        ),
        (
            "## Router",
            [
                source(
                    "router-h200",
                    note=f"us {passes}; errors of logits against float64, divided by the sum of the terms' magnitudes.",
                ),
                table(
                    ["layer", "ours", "fp32", "tf32", "bf16", "error: ours, fp32, tf32, bf16"],
                    router(),
                ),
            ],
        ),
        (
            "## Grouped GEMM, one GPU",
            [
                source(
                    "gemm-h200", note="TFLOP/s, torch._grouped_mm in brackets; contiguous rows."
                ),
                table(["product", *PRESETS], products()),
            ],
        ),
        (
            "## Stash choices, layouts, order",
            [
                source(
                    "variants-h200-ep2", note="Peak memory of one step: ordinary memory + heap."
                ),
                table(
                    ["", *(f"{preset} {label}" for preset in PRESETS for label in ("ms", "MiB"))],
                    variants(),
                ),
            ],
        ),
        (
            "## Dispatch and combine",
            [
                source(
                    "trips-h200-ep2",
                    "trips-h200-ep4",
                    note="GB/s over NVLink; copy: plain copies of as many bytes.",
                ),
                table(
                    ["layer", "EP", *trip, "copy", "combine, rank", "slot", "copy, rank", "slot"],
                    trips(),
                    2,
                ),
            ],
        ),
        (
            "## FP8 on Hopper",
            [
                source("fp8-gemm-h200", note="TFLOP/s, FP8 / bf16 in the last run of both."),
                table(["products, Float8Block / bf16", *PRODUCTS.values()], fp8_products()),
                source(
                    "precision-h200-ep2",
                    note=f"ms {passes}.",
                ),
                table(["2 GPUs", *PRESETS], fp8_layers()),
            ],
        ),
        (
            "## Convergence",
            [
                source(
                    "convergence-h200", note="Held-out bits per byte; differences seed by seed."
                ),
                table(["", *(f"seed {seed}" for seed in range(4)), "against bf16"], convergence()),
            ],
        ),
        (
            "## Trainers",
            [
                source(
                    *TRAINERS,
                    note="A model with four layers of Qwen3-30B-A3B, 200 steps of 16,384 tokens, of bytes of Python's "
                    "library. The losses of transformers' Trainer are means of 20 steps. "
                    "benchmarks/torchtitan_stand_ins.py adds names that torchtitan 0.3.0 needs and torch 2.11 lacks.",
                ),
                fill(
                    "Each way ran once, with the same tokens. Ways of a trainer start from the same weights, and "
                    "their first losses agree within 0.001; torchtitan's *step* draws other initial experts. Later "
                    "losses differ, because rows and gradients are summed in other orders. Other causes were not "
                    "excluded, and runs of several seeds were not compared. On CPUs, in fp32, losses agree within "
                    "1e-6 ([tests](trainers.md))."
                ),
                table(
                    [
                        "trainer: way",
                        "tokens/s on 2 GPUs",
                        "",
                        *(f"loss, step {n}" for n in (20, 100, 200)),
                    ],
                    trainers(),
                ),
            ],
        ),
        (
            "## Reliability suites on CPUs",
            [
                fill(
                    f"reliability-cpu-SUITE.json, {machine(load(cpu[0]))}: {CALL} SUITE. 2 or 3 ranks."
                ),
                table(head, suites({name.rpartition("-")[2]: load(name) for name in cpu}), 5),
            ],
        ),
        (
            "### On GPUs",
            [
                fill(
                    f"reliability-h200-ep4.json and -ep2.json, H200: {CALL} SUITE --device cuda --ranks R. Times of "
                    "faults: median and maximum until survivors raise an error."
                ),
                table(["4 / 2 H200s", *head[1:]], both_suites(), 5),
                fill(f"Failed: {failed_on_gpus()}. The failed cases:"),
                "\n".join(failures()),
            ],
        ),
        (
            "### Sanitizer, trace",
            [
                fill(f"sanitize-h200.txt, by benchmarks/sanitize.sh: {sanitized.splitlines()[0]}."),
                table(["compute-sanitizer", "errors", "tests passed"], sanitizer(sanitized)),
                fill(
                    f"trace-h200-ep2.txt, {trace.splitlines()[0]}. A step of qwen3-30b's layer with static capacity: "
                    f"{counts[0]} copies on the device, {counts[1]} waits for it, {counts[2]} kernels."
                ),
            ],
        ),
    ]


def page() -> str:
    return TOP + "".join(
        f"\n{heading}\n\n" + "\n\n".join(parts) + "\n" for heading, parts in sections()
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
