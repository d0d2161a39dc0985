"""The bounds of size: statements of a folder, crowded folders and classes, and how far one step goes through the
package. `make lint` prints them. BUDGETS has the bound and, where the code is still beyond it, what has been reached
and 2 % of room for a contribution. A test fails if anything grows beyond the larger of the two. Whoever makes
something smaller lowers its second number.

A statement is a node `ast.stmt` that is no docstring: formatting does not change their number."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

STATEMENTS: dict[str, tuple[int, int]] = {
    "symmoe": (18_000, 22_800),
    "tests": (26_000, 33_130),
    "benchmarks": (3_000, 0),
    # rooms of symmoe
    "kernels + program": (7_000, 8_250),
    "symm_mem + nodes": (2_300, 2_960),
    "checks + precision": (550, 633),
    "dispatch + combine": (750, 952),
    "grouped + moe + training + lora + metrics + pointers + routing": (3_600, 5_220),
    "checkpoint + integrations": (2_100, 2_525),
    "tools + timeline": (1_400, 1_660),
}
BUDGETS: dict[str, tuple[int, int]] = {
    **STATEMENTS,
    "lines of docs": (4_000, 4_075),
    # a, b = x, y
    "packed assignments per 1,000 statements of symmoe": (15, 0),
    "packed assignments per 1,000 statements of tests": (15, 0),
    "packed assignments per 1,000 statements of benchmarks": (15, 0),
    # the fullest of all
    "files in one folder": (22, 0),
    "methods of SymmetricHeap": (30, 0),
    "functions on the host with more than 8 parameters": (25, 0),
    # a steady step of a layer on two CPU ranks, see test_bounds.py
    "files of a step": (24, 32),
    "frames in forward": (10, 16),
    "calls in forward": (300, 490),
    "calls before the first kernel": (60, 65),
}
MOST_PARAMETERS = 8


def statements_of(tree: ast.Module) -> list[ast.stmt]:
    """All statements of a tree without docstrings. Expressions, which hold none, are not looked through."""
    statements: list[ast.stmt] = []
    nodes: list[ast.AST] = [tree]
    while nodes:
        node = nodes.pop()
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            nodes += getattr(node, field, ())
        if isinstance(node, ast.stmt) and not _is_docstring(node):
            statements.append(node)
    return statements


def _is_docstring(node: ast.AST) -> bool:
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
        return False
    return isinstance(node.value.value, str)


def num_packed(statements: list[ast.stmt]) -> int:
    """Assignments of several values to several names at once."""
    assigned = [node for node in statements if isinstance(node, ast.Assign)]
    return sum(
        isinstance(node.value, ast.Tuple) and isinstance(node.targets[0], ast.Tuple)
        for node in assigned
    )


@functools.cache
def measured() -> dict[str, int]:
    """Numbers that BUDGETS bounds, measured in the sources, by their names there."""
    package = ROOT / "symmoe"
    folders = ("symmoe", "tests", "benchmarks")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    statements = {file: statements_of(ast.parse(file.read_bytes())) for file in files}

    def within(*paths: Path) -> list[ast.stmt]:
        """Statements of modules and of all files below folders."""
        return [
            node
            for file, nodes in statements.items()
            if {file.with_suffix(""), *file.parents} & {*paths}
            for node in nodes
        ]

    numbers = {}
    for package_parts in STATEMENTS:
        is_folder = (ROOT / package_parts).is_dir()
        paths = (
            [ROOT / package_parts]
            if is_folder
            else map(package.joinpath, package_parts.split(" + "))
        )
        numbers[package_parts] = len(within(*paths))
    pages = [path.read_bytes() for path in (ROOT / "docs").rglob("*.md")]
    numbers["lines of docs"] = sum(page.count(b"\n") for page in pages)
    for folder in folders:
        share = num_packed(within(ROOT / folder)) / numbers[folder]
        numbers[f"packed assignments per 1,000 statements of {folder}"] = round(1000 * share)
    full = [file.parent for file in statements if package in file.parents]
    numbers["files in one folder"] = max(map(full.count, full))
    nodes = within(package)
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    (heap,) = (node for node in classes if node.name == "SymmetricHeap")
    numbers["methods of SymmetricHeap"] = sum(
        isinstance(node, ast.FunctionDef) for node in heap.body
    )
    many = list(_with_many_parameters(nodes))
    numbers["functions on the host with more than 8 parameters"] = len(many)
    return numbers


def _with_many_parameters(nodes: list[ast.stmt]) -> Iterator[ast.FunctionDef]:
    for node in nodes:
        if isinstance(node, ast.FunctionDef) and "jit" not in "".join(
            map(ast.unparse, node.decorator_list)
        ):
            names = {
                parameter.arg
                for parameter in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            }
            if len(names - {"self", "cls"}) > MOST_PARAMETERS:
                yield node


def main() -> None:
    """Prints what is measured, what fits, and the aim."""
    for name, number in measured().items():
        aim, reached = BUDGETS[name]
        limit = max(aim, reached)
        note = f"  {number - limit} too many!" if number > limit else ""
        print(f"{name:70}{number:7} of at most {limit:6}, the aim is {aim:6}{note}")


if __name__ == "__main__":
    main()
