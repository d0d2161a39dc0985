"""Records as text."""

from __future__ import annotations

from collections.abc import Sequence

from symmoe.tools.bench.records import Record, ratio

# Heading, width, key, format.
_COLUMNS = (
    ("suite", -9, "suite", "s"),
    ("variant", -38, "variant", "s"),
    ("preset", -14, "preset", "s"),
    ("ep", 3, "ep", "d"),
    ("tokens", 7, "tokens", "d"),
    ("skew", -8, "skew", "s"),
    ("direction", -9, "direction", "s"),
    ("ms", 10, "ms_median", ".4f"),
    ("p10", 10, "ms_p10", ".4f"),
    ("p90", 10, "ms_p90", ".4f"),
    ("host us", 8, "host_us", ".0f"),
    ("in a row", 8, "in_a_row_us", ".1f"),
    ("TFLOP/s", 9, "tflops", ".4g"),
    ("ceiling", 8, "ceiling_tflops", ".4g"),
    ("stock", 8, "stock_tflops", ".4g"),
    ("wire GB/s", 10, "wire_gbs", ".4g"),
    ("copy GB/s", 10, "copy_gbs", ".4g"),
    ("copied B", 9, "weight_copy_bytes", ".3g"),
)


def render(records: Sequence[Record]) -> str:
    """A line for each record, without columns that no record has, then what was skipped and why.

    "ratio" is to the yardstick of the same run.
    """
    columns = [column for column in _COLUMNS if any(record.get(column[2]) is not None for record in records)]
    lines = [" ".join(_cell(head, width) for head, width, _, _ in columns) + "   ratio"]
    for record in records:
        cells = [_cell(_shown(record.get(key), kind), width) for _, width, key, kind in columns]
        lines.append(" ".join(cells) + f" {_shown(ratio(record), '.3f'):>7}")
    skipped = {(name, why) for record in records for name, why in record.get("skipped", {}).items()}
    lines += [f"skipped {name}: {why}" for name, why in sorted(skipped)]
    return "\n".join(line.rstrip() for line in lines)


def _shown(value: object, kind: str) -> str:
    return "" if value is None else format(value, kind)


def _cell(text: str, width: int) -> str:
    return text.ljust(-width) if width < 0 else text.rjust(width)
