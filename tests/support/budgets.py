"""How large the house may be: lines of rooms, crowds, and the way of one step. `make lint` prints it. BUDGETS has, of
each, the bound and what has been reached where that is more. A test sees to it that nothing grows beyond the larger of
the two. Whoever makes something smaller lowers its second number."""

from __future__ import annotations

import ast
import functools
import signal
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

BUDGETS: dict[str, tuple[int, int]] = {
    # lines of .py files, of docs those of .md files
    "symmoe": (36_000, 38_355),
    "tests": (42_000, 51_438),
    "docs": (4_000, 0),
    "kernels + tape": (15_000, 0),
    "symm_mem + nodes": (3_900, 4_688),
    "checks + precision": (1_200, 1_237),
    "dispatch + combine": (1_500, 0),
    "grouped + moe + training": (6_900, 7_973),
    "checkpoint + integrations": (3_500, 4_366),
    "tools + timeline": (2_700, 0),
    # the fullest of all
    "files in one folder": (22, 0),
    "methods of SymmetricHeap": (30, 0),
    "functions on the host with more than 8 parameters": (25, 0),
    # a steady step of a layer on two CPU ranks, see test_bounds.py
    "files of a step": (32, 0),
    "changes of file in forward": (300, 0),
    "frames in forward": (14, 0),
}
MOST_PARAMETERS = 8


def num_lines(room: str) -> int:
    """Lines of the package, the tests, the docs, or rooms of the package."""
    if room == "docs":
        paths = list((ROOT / "docs").rglob("*.md"))
    elif room in ("symmoe", "tests"):
        paths = list((ROOT / room).rglob("*.py"))
    else:
        paths = [path for name in room.split(" + ") for path in (ROOT / "symmoe" / name).rglob("*.py")]
    return sum(path.read_bytes().count(b"\n") for path in paths)


@functools.cache
def measured() -> dict[str, int]:
    """What BUDGETS bounds and sources show, by its names there."""
    found = {name: num_lines(name) for name in list(BUDGETS)[:10]}
    folders = [path.parent for path in (ROOT / "symmoe").rglob("*.py")]
    found["files in one folder"] = max(map(folders.count, folders))
    nodes = [node for path in (ROOT / "symmoe").rglob("*.py") for node in ast.walk(ast.parse(path.read_bytes()))]
    (heap,) = (node for node in nodes if isinstance(node, ast.ClassDef) and node.name == "SymmetricHeap")
    found["methods of SymmetricHeap"] = sum(isinstance(node, ast.FunctionDef) for node in heap.body)
    found["functions on the host with more than 8 parameters"] = len(list(_with_many_parameters(nodes)))
    return found


def _with_many_parameters(nodes: list[ast.AST]) -> Iterator[ast.FunctionDef]:
    for node in nodes:
        if isinstance(node, ast.FunctionDef) and "jit" not in "".join(map(ast.unparse, node.decorator_list)):
            names = {each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
            if len(names - {"self", "cls"}) > MOST_PARAMETERS:
                yield node


def main() -> None:
    """Prints what is measured beside its bound."""
    for name, number in measured().items():
        bound, reached = BUDGETS[name]
        note = "" if number <= bound else f"  {number - bound} too many" + "!" * (number > max(bound, reached))
        print(f"{name:52}{number:7} of {bound:6}{note}")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it, without a traceback
    main()
