"""Tells racecheck's reports of how Triton hands out roles from reports of anything else.

    python benchmarks/racecheck_reports.py racecheck.log      # prints both numbers; 1 if there are others, 2 if unknown

In a kernel with `gl.warp_specialize` the first warps tell the others what to do through shared memory, a byte per warp.
B is `BAR.SYNC 1` without a number of threads: it holds up every warp of the program until all have come.

    first warps:  write roles             B  B  their role  B  write "leave"              B
    other warps:                          B  read  B  role  B                             B  read, leave

So a B lies between each read and both writes, and nothing races: test_racecheck_reports.py looks for just these
instructions in every kernel below. racecheck reports the reads against the writes all the same, and does not say why:
also of kernels that do hardly more (`planted_dispatch_kernel`; on an H200 six of seven such kernels, of one role and of
several, of one program and of 512, with mbarriers and without). The seventh has no shared memory but those bytes.

A report gives a source line for each access, and to the compiler the bytes have these lines:

* reads: the `def` of the kernel;
* writes: that, the `def` of the function that calls warp_specialize, if it is another, or the kernel's last statement,
  where it returns.

A report of a listed kernel with these lines and no others is one of the dispatch. Everything else is not, among it
what racecheck has counted but not printed.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_HOPPER = "symmoe/kernels/hopper/"
_LOW_PRECISION = "symmoe/kernels/low_precision/hopper_"
# Kernels with warp_specialize, and the functions that call it for them: (file, name).
_RUN = (_HOPPER + "pipeline.py", "run")
KERNELS = {
    "hopper_gemm_kernel": (_HOPPER + "gemm.py", _RUN),
    "hopper_act_kernel": (_HOPPER + "act.py", _RUN),
    "hopper_dact_kernel": (_HOPPER + "act.py", _RUN),
    "hopper_wgrad_kernel": (_HOPPER + "wgrad.py", None),
    "hopper_fp8_gemm_kernel": (_LOW_PRECISION + "fp8.py", None),
    "hopper_fp8_wgrad_kernel": (_LOW_PRECISION + "fp8_wgrad.py", None),
    "hopper_push_kernel": (_HOPPER + "rows.py", (_HOPPER + "rows.py", "run_movers")),
    "hopper_push_sums_kernel": (_HOPPER + "rows.py", (_HOPPER + "rows.py", "run_pairs")),
    "hopper_sum_home_kernel": (_HOPPER + "rows.py", (_HOPPER + "rows.py", "run_pairs")),
    "planted_dispatch_kernel": ("benchmarks/planted_races.py", None),
    "planted_race_kernel": ("benchmarks/planted_races.py", None),
}
_AND = r"\n.*=========[ \t]+and "
_REPORT = re.compile(rf"Race reported between (.*(?:{_AND}.*)*)")
_ACCESS = re.compile(r"(Read|Write) access at (\w+)(?:\(.*\))?\+0x[0-9a-f]+ in (\S+):(\d+)")
_SUMMARY = re.compile(r"RACECHECK SUMMARY: .*\((\d+) errors?, (\d+) warnings?\)")


def dispatch_lines(kernel: str) -> dict[str, set[tuple[str, int]]]:
    """Lines (file name, number) of the reads and the writes in a listed kernel's dispatch, from its current source."""
    file, helper = KERNELS[kernel]
    function = _function(file, kernel)
    read = Path(file).name, function.lineno
    writes = {read, (Path(file).name, function.body[-1].lineno)}
    if helper is not None:
        writes.add((Path(helper[0]).name, _function(*helper).lineno))
    return {"Read": {read}, "Write": writes}


def _function(file: str, name: str) -> ast.FunctionDef:
    for node in ast.walk(ast.parse((_ROOT / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
    raise LookupError(f"{file} has no function {name}")


def is_dispatch(accesses: list[str]) -> bool:
    """Whether a report concerns only a listed kernel's dispatch."""
    parsed = [_ACCESS.match(access) for access in accesses]
    if any(access is None or access[2] not in KERNELS for access in parsed):
        return False
    return {access[1] for access in parsed} == {"Read", "Write"} and all(
        (file, int(line)) in dispatch_lines(kernel)[kind]
        for kind, kernel, file, line in (access.groups() for access in parsed)
    )


def count(log: str) -> tuple[int, int] | None:
    """(reports of the dispatch, others) in a log of racecheck; None if the log is incomplete."""
    summaries = _SUMMARY.findall(log)
    if not summaries:
        return None
    reports = [re.split(_AND, accesses) for accesses in _REPORT.findall(log)]
    dispatch = sum(map(is_dispatch, reports))
    return dispatch, max(len(reports), sum(map(int, summaries[-1]))) - dispatch


def main(path: str) -> int:
    """Returns the exit status."""
    counts = count(Path(path).read_text(encoding="utf-8", errors="replace"))
    if counts is None:
        print("no summary of racecheck")
        return 2
    print(f"{counts[0]} reports of warp_specialize's dispatch, {counts[1]} others")
    return 1 if counts[1] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
