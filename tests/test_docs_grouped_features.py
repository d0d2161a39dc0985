"""docs/grouped_features.md: what its tables name exists, and every row says what it must."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "grouped_features.md"
MIN_ROWS = 150
HAS_RUN = {
    ran + compiled for ran in ("CPU", "CPU, H200", "CPU, no GPU record") for compiled in ("", ", Blackwell compiled")
} | {"H200", "no GPU record", "-"}
COMPILES = re.compile(r"_compile\.py::|::test_the_copy_kernel_assembles$")


def rows(page: str) -> Iterator[list[str]]:
    """Cells of the tables whose last column says where something has run."""
    for table in re.findall(r"(?:^\|.*\|\n)+", page, re.MULTILINE):
        head, _, *lines = table.splitlines()
        if head.endswith("| has run |"):
            yield from ([cell.strip() for cell in line[1:-1].split("|")] for line in lines)


def spans(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@functools.cache
def functions(path: Path) -> frozenset[str]:
    """Names of a file's functions; none if there is no such file."""
    if not path.is_file():
        return frozenset()
    return frozenset(node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef))


@functools.cache
def sources() -> str:
    return "".join(path.read_text() for path in sorted((ROOT / "symmoe").rglob("*.py")))


def found(name: str) -> object:
    """What a dotted name means: a module, or something in one."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            thing: object = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError as error:
            if not f"{name}.".startswith(f"{error.name}."):
                raise
            continue
        return functools.reduce(getattr, parts[length:], thing)
    raise AttributeError(name)


def name_problem(span: str) -> str | None:
    """What is wrong with `symmoe.name` or `symmoe.name(parameter=)`, or None."""
    match = re.fullmatch(r"([\w.]+)(?:\((\w+)=\))?", span)
    if match is None:
        return f"not a name: {span}"
    name, parameter = match.groups()
    try:
        thing = found(name)
    except AttributeError:
        return f"no such name: {name}"
    if parameter is not None and parameter not in inspect.signature(thing).parameters:
        return f"no such parameter: {span}"
    return None


def missing_test(test: str) -> str | None:
    """What is wrong with `file::function` below tests/, or None."""
    path, _, function = test.partition("::")
    is_there = function in functions(ROOT / "tests" / path)
    return None if is_there else f"no such test: {test}"


def problems_of(row: list[str]) -> Iterator[str]:
    """What is wrong with a row of four cells."""
    if len(row) != 4 or not all(row):
        yield f"{len(row)} cells, or an empty one"
        return
    _, where, shown_by, has_run = row
    tests = spans(shown_by)
    yield from filter(None, map(missing_test, tests))
    yield from filter(None, (name_problem(span) for span in spans(where) if re.match(r"symmoe\.", span)))
    if re.search(r"symmoe\.", re.sub(r"`[^`]+`|\"[^\"]+\"", "", where)):
        yield "a name without quotes"
    if has_run not in HAS_RUN:
        yield f"has run: {has_run}"
    if (has_run == "-") != (not tests) or (not tests and not re.search(r"^not there|no test$", where)):
        yield "no test, and no word about it"
    wants = {
        "GPU tests": (any(word in has_run for word in ("H200", "GPU")), any(t.startswith("gpu/") for t in tests)),
        "CPU tests": ("CPU" in has_run, any(not t.startswith("gpu/") for t in tests)),
        "compiling tests": ("Blackwell" in has_run, any(COMPILES.search(t) for t in tests)),
    }
    yield from (f"{what} without {what}" for what, (said, named) in wants.items() if said and not named)


def text_problems(page: str) -> list[str]:
    """Quoted parts of error texts that are nowhere in the package."""
    _, found_it, rest = page.partition("\n## Error texts\n")
    assert found_it
    section = rest.split("\n## ")[0]
    texts = [text for _, where, *_ in rows(section) for text in re.findall(r'"([^"]+)"', where)]
    assert len(texts) > 30
    return [text for text in texts if text not in sources()]


def test_every_row_is_of_things_that_exist():
    table = list(rows(PAGE.read_text()))
    assert len(table) >= MIN_ROWS
    problems = {row[0]: found_here for row in table if (found_here := list(problems_of(row)))}
    assert problems == {}
    assert len({tuple(row) for row in table}) == len(table)


def test_error_texts_are_the_packages():
    page = PAGE.read_text()
    assert text_problems(page) == []
    assert text_problems(page.replace('"needs a bias that is added"', '"needs a bias that adds"')) == [
        "needs a bias that adds"
    ]


GOOD = ["x", "`symmoe.GroupedLinear(bias=)`", "`test_grouped_linear.py::test_matrix`", "CPU"]


@pytest.mark.parametrize(
    ("cell", "value", "problem"),
    [
        (1, "`symmoe.NoSuchLayer`", "no such name"),
        (1, "`symmoe.grouped.no_such_module`", "no such name"),
        (1, "`symmoe.GroupedLinear(no_such=)`", "no such parameter"),
        (1, "symmoe.GroupedLinear", "without quotes"),
        (2, "`test_grouped_linear.py::test_no_such_thing`", "no such test"),
        (2, "`test_no_such_file.py::test_matrix`", "no such test"),
        (2, "`test_grouped_linear.py`", "no such test"),
        (2, "-", "no test"),
        (3, "B200", "has run"),
        (3, "CPU, H200", "GPU tests"),
        (3, "H200", "GPU tests"),
        (3, "CPU, Blackwell compiled", "compiling tests"),
        (3, "", "empty"),
    ],
)
def test_made_up_rows_are_noticed(cell: int, value: str, problem: str):
    """Negative control."""
    assert list(problems_of(GOOD)) == []
    wrong = [*GOOD]
    wrong[cell] = value
    assert any(problem in text for text in problems_of(wrong))
    page = PAGE.read_text()
    line = "| " + " | ".join(wrong) + " |\n"
    assert wrong in [*rows(page + "\n| a | where | shown by | has run |\n|---|---|---|---|\n" + line)]
