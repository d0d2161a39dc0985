"""Figures of README.md, docs/reliability.md and docs/measurements.md are those of the records, and every error has a
section. The index of the records names each record, its command, and the files that use it."""

import inspect
import json
import re
from pathlib import Path

import measurements

from symmoe import errors

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
README = (ROOT / "README.md").read_text(encoding="utf-8")
INDEX = (RESULTS / "README.md").read_text(encoding="utf-8")
PROMISES = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
COLUMNS = ("layer", "layer, graph", "deepep", "stock torch")


def record(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def speed_rows(text: str) -> list[list[str]]:
    """Cells of the rows of the table of TFLOP/s."""
    rows = re.findall(r"^\| [\w.-]+ \| \d+ \|.*\|$", text, re.MULTILINE)
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def wrong_speeds(text: str) -> list[str]:
    actual = {
        (row["preset"], str(row["tokens"]), row["variant"]): f"{row['tflops']:.0f}"
        for name in ("steps-h200-ep2", "deepep-h200-ep2")
        for row in record(name)
        if row["suite"] == "steps"
    }
    return [
        f"{preset}, {tokens} tokens, {variant}: {cell}"
        for preset, tokens, *cells in speed_rows(text)
        for variant, cell in zip(COLUMNS, cells, strict=True)
        if actual.get((preset, tokens, variant), "") != cell
    ]


def test_speeds_are_those_of_the_records():
    rows = speed_rows(README)
    assert len({(preset, tokens) for preset, tokens, *_ in rows}) == len(rows) == 9
    assert not wrong_speeds(README)
    changed = README.replace(f"| {rows[3][2]} |", "| 999 |", 1)  # negative control
    assert len(wrong_speeds(changed)) == 1


def test_speeds_of_gemms_alone_are_those_of_the_records():
    alone = [row for row in record("layer-h200-ep2") if row["variant"] == "gemms alone"]
    presets = {row["preset"] for row in alone}
    both = (  # 6 and 12 T H I K: forward is a third of the FLOPs
        [
            (1 if row["direction"] == "forward" else 2) / row["tflops"]
            for row in alone
            if row["preset"] == preset
        ]
        for preset in presets
    )
    reached = sorted(3 / sum(times) for times in both)
    assert f"reach {reached[0]:.0f} to {reached[-1]:.0f}" in README


def test_memory_figures_are_those_of_the_record():
    by_variant = {
        row["variant"]: row for row in record("memory-h100-ep2") if row["preset"] == "qwen3-30b"
    }
    mib = {
        name: (row["held_ordinary_bytes"] + row["held_heap_bytes"]) / 2**20
        for name, row in by_variant.items()
    }
    text = (
        f"{mib['layer']:,.0f} MiB a layer until its backward ({mib['layer, packed']:,.0f} with packed rows), "
        f"DeepEP {mib['deepep']:,.0f}, stock torch {mib['stock torch']:,.0f} "
    )
    assert text in " ".join(README.split())


def test_trainer_figures_are_those_of_the_records():
    for ways in measurements.trainings():
        _, own_rate, baseline = ways[-1]
        assert f"| {max(rate for _, rate, _ in ways):,.0f} and {own_rate:,.0f} |" in README
        first = next(iter(baseline))
        for name, _, losses in ways:
            assert abs(losses["200"] - baseline["200"]) < 0.05 * baseline["200"]
            if name != "torchtitan: step":  # whose experts start from other numbers
                assert abs(losses[first] - baseline[first]) < 1e-3


def faults(kind: str) -> dict:
    return record("reliability-cpu-faults")["kinds"][kind]["detect_ms"]


def suite(name: str) -> dict:
    suite_record = record(f"reliability-cpu-{name}")
    assert (suite_record["cases_failed"], suite_record["cases_run"]) == (
        0,
        suite_record["cases_wanted"],
    )
    return suite_record


def promises() -> list[str]:
    """The expected rows of the table of promises, from the records."""
    kills = json.loads(
        (ROOT / "tests" / "reliability" / "results" / "checkpoint_kills.json").read_text("utf-8")
    )
    assert (kills["cases_failed"], kills["cases_run"]) == (0, kills["cases_wanted"])
    litmus = suite("litmus")
    words = {kind: counts["stale"] for kind, counts in litmus["kinds"].items()}
    assert words.pop("flag first") > 0
    assert not any(words.values())
    trace = (RESULTS / "trace-h200-ep2.txt").read_text(encoding="utf-8")
    copies = re.search(r"^device-to-device copies: (\d+)$", trace, re.MULTILINE)[1]
    waits = re.search(r"^calls that wait for the GPU: (\d+)$", trace, re.MULTILINE)[1]
    return [
        f"{suite('routings')['cases_run']:,} random routings, "
        f"{suite('gradients')['cases_run']} gradient cases: 0 wrong",
        f"{suite('determinism')['cases_run']:,} repeats",
        f"trace on 2 H200s: {copies} copies, {waits} waits",
        f"{suite('fuzz')['cases_run']} bad calls, each followed by a good one: 0 wrong",
        f"{suite('faults')['cases_run']} kills, stops, exceptions",
        f"after {faults('kill')['p50'] / 1000:.3f} s (`timeout_s=2`), after {faults('raise')['p50']:.0f} ms",
        f"{suite('stalls')['cases_run']:,} calls, {suite('stalls')['num_stalls']} of them with a stall "
        "of half a timeout: 0 false timeouts",
        f"{litmus['observations'] / 1e6:.1f} million words: 0 stale",
        f"{suite('soak')['cases_run']:,} steps, {suite('lifecycle')['cases_run']} heaps and jobs",
        f"{kills['cases_run']} kills: old or new state",
    ]


def test_promises_have_the_figures_of_the_records():
    assert [text for text in promises() if text not in PROMISES] == []
    changed = PROMISES.replace("2,000 random", "3,000 random")  # negative control
    assert len([text for text in promises() if text not in changed]) == 1


def test_failures_on_gpus_are_those_of_the_records():
    assert f"failed cases: {measurements.failed_on_gpus()} " in " ".join(README.split())


def test_the_page_of_measurements_is_generated_from_the_records():
    assert measurements.PAGE.read_text(encoding="utf-8") == measurements.page(), (
        "run python benchmarks/measurements.py"
    )


def index_rows(index: str) -> list[list[str]]:
    """Cells of the index of records: a record or a pattern, command, GPU, date, users."""
    return [
        row.strip("| ").split(" | ") for row in re.findall(r"^\| .*\.(?:json|txt) .*$", index, re.M)
    ]


def text_below(path: Path) -> str:
    """The text of a file, or of the pages of a folder."""
    files = (file for file in (path, *path.glob("*.md")) if file.is_file())
    return "".join(file.read_text(encoding="utf-8") for file in files)


def wrong_rows(index: str) -> list[str]:
    """Patterns of rows without a record, with users that do not name the record, or with a command that the record does
    not have."""
    return [
        pattern
        for pattern, command, *_, users in index_rows(index)
        if not any(RESULTS.glob(pattern))
        or not all(
            re.split(r"[.*]", pattern)[0] in text_below(ROOT / user) for user in users.split(", ")
        )
        or not all(
            called in record.read_text(encoding="utf-8")
            for called in re.findall("`(.+?)`", command)
            for record in RESULTS.glob(pattern)
        )
    ]


def test_the_index_names_every_record_its_command_and_its_users():
    named = [path for pattern, *_ in index_rows(INDEX) for path in RESULTS.glob(pattern)]
    assert sorted([*named, RESULTS / "README.md"]) == sorted(RESULTS.iterdir())
    assert wrong_rows(INDEX) == []
    changed = INDEX.replace("docs/balance.md", "docs/start.md").replace("router.py", "route.py")
    assert wrong_rows(changed) == ["balance-model.json", "router-h200.json"]  # negative control


def test_every_error_that_is_raised_has_its_section():
    classes = {
        c
        for _, c in inspect.getmembers(errors, inspect.isclass)
        if issubclass(c, errors.SymmoeError)
    }
    raised = classes - {base for c in classes for base in c.__bases__} | {errors.ArgumentError}
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    assert {c.__name__ for c in raised} <= set(re.findall(r"^## (\w+)$", page, re.MULTILINE))


def wrong_change_rows(page: str) -> list[str]:
    """Rows of the table of changes that do not list the files with the word of the row, or that name tests that do not
    exist."""
    table = page.split("## Where to change what")[1].split("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("| a")]
    wrong = []
    for change, word, package, tests in rows:
        listed = set(re.findall(r"`([\w/]+\.py)`", package))
        actual = {
            path.relative_to(ROOT / "symmoe").as_posix()
            for path in (ROOT / "symmoe").rglob("*.py")
            if word.strip() and word.strip(" `") in path.read_text(encoding="utf-8")
        }
        paths = [ROOT / "tests" / path for path in re.findall(r"`([\w/]+\.py)`", tests)]
        if actual != listed or not paths or not all(path.exists() for path in paths):
            wrong.append(change.strip())
    return wrong


def test_the_table_of_changes_lists_the_files_with_its_words():
    page = (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")
    assert wrong_change_rows(page) == []
    changed = page.replace("`kernels/twin/route.py`, ", "").replace("trip_checks.py", "trips.py")
    named = ["a router score", "an order of sums", "a number that a dispatch carries"]
    assert wrong_change_rows(changed) == named  # negative control
