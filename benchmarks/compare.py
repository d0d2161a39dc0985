"""Shows records, of several files together, and says whether a figure has become worse than that of a baseline.

    python benchmarks/compare.py now.json deepep.json
    python benchmarks/compare.py now.json --check benchmarks/results/layer-h200-ep2.json

Ratios to the yardstick of the same run are compared, not times: another machine, or a warmer one, changes a figure and
its yardstick by the same factor. The exit status is 1 if one has dropped by more than 10 %, or if nothing could be
compared.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from suites.cases import parser_of
from suites.records import Record, ratio, render

from symmoe.tools.shapes import Options

MAX_DROP = 0.1
IDENTITY = (
    "suite",
    "variant",
    "preset",
    "ep",
    "tokens",
    "skew",
    "direction",
)  # what makes two records the same


def load(path: str) -> list[Record]:
    """The records of a file; ends the program if there are none."""
    try:
        records = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        sys.exit(f"cannot read records from {path}: {error}")
    if not isinstance(records, list) or not all(
        isinstance(r, dict) and "suite" in r for r in records
    ):
        sys.exit(f"{path} does not hold a list of records")
    return records


def compare(records: Sequence[Record], baseline: Sequence[Record]) -> tuple[bool, str]:
    """(whether there was something to compare and no ratio has dropped by more than MAX_DROP, the comparison as text).

    Compares every record that has a yardstick, by what it measures.
    """
    now = _ratios(records)
    before = _ratios(baseline)
    both = [where for where in before if where in now]
    dropped = [where for where in both if now[where] < (1 - MAX_DROP) * before[where]]
    lines = [
        f"check: {len(both)} ratios compared, {len(dropped)} dropped by more than {MAX_DROP:.0%}",
        *(
            f"  dropped  {_named(where)}: {before[where]:.3f} -> {now[where]:.3f} "
            f"({now[where] / before[where] - 1:+.1%})"
            for where in dropped
        ),
        *(f"  missing  {_named(at)}: only in the baseline" for at in before if at not in now),
        *(f"  extra    {_named(at)}: not in the baseline" for at in now if at not in before),
        *["  nothing could be compared, which counts as a failure"] * (not both),
    ]
    return bool(both) and not dropped, "\n".join(lines)


def _ratios(records: Sequence[Record]) -> dict[tuple[object, ...], float]:
    ratios = {tuple(record.get(key) for key in IDENTITY): ratio(record) for record in records}
    return {where: value for where, value in ratios.items() if value is not None}


def _named(where: tuple[object, ...]) -> str:
    return ", ".join(f"{key} {value}" for key, value in zip(IDENTITY, where, strict=True))


OPTIONS: Options = {
    "files": {"nargs": "+", "metavar": "FILE", "help": "records that --json has written"},
    "--check": {"metavar": "BASELINE.json", "help": "records to compare with"},
}


def main(arguments: list[str] | None = None) -> int:
    options = parser_of(__doc__, OPTIONS).parse_args(arguments)
    records = [record for path in options.files for record in load(path)]
    print(render(records))
    if options.check is None:
        return 0
    passed, report = compare(records, load(options.check))
    print(report)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
