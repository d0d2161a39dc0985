"""Tables of docs/measurements.md against the records they are made of.

Rows and columns may come in any order, and there may be others: a cell is found by the names of its row and column.
"""

from __future__ import annotations

import itertools
import json
import re
from functools import cache, partial
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = (ROOT / "docs" / "measurements.md").read_text(encoding="utf-8")
Table = dict[str, dict[str, str]]  # cells by the names of row and column


@cache
def record(name: str) -> list | dict:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def block_of(text: str, heading: str, words: str) -> str:
    """The table of a section that has these words in it."""
    _, found, rest = f"\n{text}".partition(f"\n{heading}\n")
    assert found, f"there is no section {heading!r}"
    section = re.split(r"^#+ ", rest, maxsplit=1, flags=re.MULTILINE)[0]
    (block,) = [block for block in re.findall(r"(?:^\|.*\|\n)+", section, re.MULTILINE) if words in block]
    return block


def table_with(text: str, heading: str, words: str) -> Table:
    """Its cells."""
    (_, *columns), _, *rows = (
        [cell.strip() for cell in line[1:-1].split("|")] for line in block_of(text, heading, words).splitlines()
    )
    table = {name: dict(zip(columns, cells, strict=True)) for name, *cells in rows}
    assert len(table) == len(rows), "two rows have the same name"
    return table


def row_of(table: Table, suite: str) -> dict[str, str]:
    """The first row whose name begins with that word."""
    return next(row for name, row in table.items() if re.match(rf"{suite}\b", name))


def differing(wanted: dict[tuple[str, str], tuple[str, str]]) -> list[str]:
    """What a table has wrong, of {(row, column): (cell, what the record says)}."""
    return [
        f"{row}, {column}: {cell!r}, not {figure!r}"
        for (row, column), (cell, figure) in wanted.items()
        if cell != figure
    ]


# -- layer in FP8 -----------------------------------------------------------------------------------------------------

PRESETS = ("deepseek-like", "mixtral-8x7b", "qwen3-30b")
VARIANTS = {
    "bf16": "static",
    "bf16, graph": "graph",
    "Float8Block": "float8-block",
    "Float8Block, E4M3 on the wire": "float8-block, wire",
    "the same, graph": "float8-block, wire, graph",
    "the same, weights quantised before (`constant_weights`)": "float8-block, wire, constant weights",
    "float8-auto": "float8-auto",
}
SPEED_UPS = "speed-up of E4M3 on the wire; with constant weights"


def precision_steps() -> dict[tuple[str, str], list[dict]]:
    """Records of the forward and the backward pass by preset and variant."""
    found: dict[tuple[str, str], list[dict]] = {}
    for one in record("precision-h200-ep2"):
        if one["suite"] == "precision":
            found.setdefault((one["preset"], one["variant"]), []).append(one)
    for both in found.values():
        assert [one["direction"] for one in both] == ["forward", "backward"]
        assert {(one["ep"], one["tokens"], one["gpu"]) for one in both} == {(2, 8192, "NVIDIA H200")}
    return found


def wrong_layers(text: str) -> list[str]:
    table, steps = table_with(text, "## FP8 on Hopper", SPEED_UPS), precision_steps()
    wanted = {}
    for preset in PRESETS:
        for name, variant in VARIANTS.items():
            both = steps[preset, variant]
            figure = " / ".join(f"{one['ms_median']:.2f}" for one in both)
            if variant == "float8-auto":
                (taken,) = {one["precision"] for one in both}
                figure += " (bf16)" if taken == "bf16" else " (FP8)"
            wanted[name, preset] = table[name][preset], figure
        full, *faster = (
            sum(one["ms_median"] for one in steps[preset, variant])
            for variant in ("static", "float8-block, wire", "float8-block, wire, constant weights")
        )
        figure = "; ".join(f"{full / quantized:.2f}" for quantized in faster)
        wanted[SPEED_UPS, preset] = table[SPEED_UPS][preset], figure
    return differing(wanted)


# -- reliability suites on GPUs ---------------------------------------------------------------------------------------

RANKS = (4, 2)  # as in "failed on 4 / on 2"
CASES, FAILED, SECONDS = "cases", "failed on 4 / on 2", "s"


def suites() -> dict[str, list[dict]]:
    """Records of every suite, by RANKS."""
    of_ranks = [record(f"reliability-h200-ep{num_ranks}")["suites"] for num_ranks in RANKS]
    assert {frozenset(found) for found in of_ranks} == {frozenset(of_ranks[0])}
    result = {name: [found[name] for found in of_ranks] for name in of_ranks[0]}
    for name, both in result.items():
        for num_ranks, one in zip(RANKS, both, strict=True):
            assert (one["suite"], one["ranks"], one["device"]) == (name, num_ranks, "cuda")
            assert one["cases_run"] == one["cases_wanted"]
            assert (one["cases_failed"] == 0) == (not one["failures"])
    return result


def cases_of(name: str, both: list[dict]) -> str:
    """Of the column, by the records of both runs."""
    (number,) = {one["cases_run"] for one in both}
    if name == "stalls":
        return f"{number:,} calls, {both[0]['num_stalls']} / {both[1]['num_stalls']} of them stalled"
    if name == "litmus":
        return "{:.0f} / {:.0f} billion observations".format(*(one["observations"] / 1e9 for one in both))
    if name == "faults":
        parts = [[kind["cases"] for kind in one["kinds"].values()] for one in both]
        assert parts[0] == parts[1]
        assert sum(parts[0]) == number
        assert [*both[0]["kinds"]] == ["kill", "stop", "raise"]
        return " + ".join(map(str, parts[0]))
    return f"{number:,} steps" if name == "soak" else f"{number:,}"


def failed_of(name: str, both: list[dict]) -> str:
    if name == "litmus":
        stale = []
        for one in both:
            words = {kind: counts["stale"] for kind, counts in one["kinds"].items()}
            controls = [words.pop("flag first"), words.pop("relaxed")]  # which have to find stale ones
            assert all(controls)
            assert (sum(words.values()) == 0) == (one["cases_failed"] == 0)
            stale.append(sum(words.values()))
        return f"{stale[0]} / {stale[1]} stale"
    failed = f"{both[0]['cases_failed']} / {both[1]['cases_failed']}"
    return f"{failed} false timeouts" if name == "stalls" else failed


def summed(cell: str) -> str:
    """Cases of several kinds, of which a record has the sum."""
    return f"{sum(int(part.replace(',', '')) for part in cell.split(' + ')):,}"


def wrong_suites(text: str) -> list[str]:
    table, wanted = table_with(text, "### On GPUs", FAILED), {}
    for name, both in suites().items():
        row = row_of(table, name)
        cases = summed(row[CASES]) if name in ("determinism", "lifecycle") else row[CASES]
        wanted[name, CASES] = cases, cases_of(name, both)
        wanted[name, FAILED] = row[FAILED], failed_of(name, both)
        wanted[name, SECONDS] = row[SECONDS], "{:.0f} / {:.0f}".format(*(one["wall_s"] for one in both))
    return differing(wanted)


# -- the router's products --------------------------------------------------------------------------------------------

ROUTER_WAYS = ("ours", "fp32", "tf32", "bf16")
ERRORS = "error: ours, fp32, tf32, bf16"


def short_error(error: float) -> str:
    number, exponent = f"{error:.1e}".split("e")
    return f"{number}e{int(exponent)}"


def wrong_router(text: str) -> list[str]:
    table, wanted = table_with(text, "## Router", ERRORS), {}
    for preset, ways in record("router-h200")["results"].items():
        for way in ROUTER_WAYS:
            figure = f"{ways[way]['forward_us']:.0f} / {ways[way]['backward_us']:.0f}"
            wanted[preset, way] = table[preset][way], figure
        figure = ", ".join(short_error(ways[way]["error"]) for way in ROUTER_WAYS)
        wanted[preset, ERRORS] = table[preset][ERRORS], figure
    return differing(wanted)


# -- convergence ------------------------------------------------------------------------------------------------------

PRECISION_PAGE = (ROOT / "docs" / "precision.md").read_text(encoding="utf-8")
WAYS = {
    "bf16": "bf16",
    "Float8Block": "float8-block",
    "Float8Block, on the wire": "float8-block, on the wire",
    "MXFP8": "mxfp8",
    "NVFP4": "nvfp4",
}
AGAINST = "against bf16, seed by seed"


def wrong_convergence(text: str) -> list[str]:
    table, wanted = table_with(text, "## Convergence", "seed 3"), {}
    results = record("convergence-h200")["results"]
    for name, way in WAYS.items():
        result = results[way]
        for seed, bits in result["final_bits_per_byte"]["seeds"].items():
            wanted[name, f"seed {seed}"] = table[name][f"seed {seed}"], f"{bits:.3f}"
        if way != "bf16":
            figure = f"{100 * result['more_than_bf16']:+.1f} ± {100 * result['more_than_bf16_standard_error']:.1f} %"
            wanted[name, AGAINST] = table[name][AGAINST], figure
    return differing(wanted)


# -- whole steps ------------------------------------------------------------------------------------------------------


STEPS = {
    "## Whole steps, 2 GPUs": ("steps-h200-ep2", "deepep-h200-ep2"),
    "## Whole steps, one H100": ("steps-h100-ep1",),
}


def wrong_steps(heading: str, text: str) -> list[str]:
    table, wanted = table_with(text, heading, "layer, losses"), {}
    for name, row in table.items():
        wanted |= {(name, column): (cell, "") for column, cell in row.items()}
    for one in itertools.chain.from_iterable(map(record, STEPS[heading])):
        if one["suite"] == "steps":
            place = one["variant"], f"{one['preset']}, {one['tokens']}"
            wanted[place] = table[place[0]][place[1]], f"{one['ms_median']:.2f}"
    return differing(wanted)


# -- all tables -------------------------------------------------------------------------------------------------------

TABLES = {  # page, section, words of the table, what it has wrong, columns that are not compared
    **{heading: (PAGE, heading, "layer, losses", partial(wrong_steps, heading), 1) for heading in STEPS},
    "layers in FP8": (PAGE, "## FP8 on Hopper", SPEED_UPS, wrong_layers, 1),
    "suites on GPUs": (PAGE, "### On GPUs", FAILED, wrong_suites, 1),
    "router": (PAGE, "## Router", ERRORS, wrong_router, 2),
    "convergence": (PRECISION_PAGE, "## Convergence", "seed 3", wrong_convergence, 1),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_has_the_figures_of_its_record_and_a_changed_one_is_found(name: str):
    """The negative control: each number of each cell."""
    text, heading, words, wrong_of, num_names = TABLES[name]
    assert not wrong_of(text)
    block = block_of(text, heading, words)
    for line in block.splitlines()[2:]:
        names = line.split("|")[: num_names + 1]
        for place in re.finditer(r"\d+", line):
            if place.start() < len("|".join(names)):
                continue
            other = line[: place.start()] + str(int(place[0]) + 1) + line[place.end() :]
            (wrong,) = wrong_of(text.replace(block, block.replace(line, other)))
            assert wrong.startswith(re.match(r"\w+", names[1].strip())[0])


def test_records_are_whole():
    assert len(suites()) == 9
    others = {"gemms alone", "stock torch", "float8-rowwise, wire"}  # which the table does not have
    assert {variant for _, variant in precision_steps()} - others == set(VARIANTS.values())
    assert len(record("router-h200")["results"]) == 4
    found = record("convergence-h200")
    assert not found["failed"] + found["missing"]
    assert set(found["results"]) == {*WAYS.values(), "float8-rowwise"}  # a recipe that has been removed
