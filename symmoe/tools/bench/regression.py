"""`--check`: has a figure become worse in relation to the yardstick of the same run?

Ratios are compared, not times: another machine, or a warmer one, changes a figure and its yardstick by the same factor.
"""

from __future__ import annotations

from collections.abc import Sequence

from symmoe.tools.bench.records import IDENTITY, Identity, Record, identity, ratio

MAX_DROP = 0.1


def compare(records: Sequence[Record], baseline: Sequence[Record]) -> tuple[bool, str]:
    """(whether there was something to compare and no ratio has dropped by more than MAX_DROP, the comparison as text).

    Compares every record that has a yardstick, by what it measures.
    """
    now, before = _ratios(records), _ratios(baseline)
    both = [where for where in before if where in now]
    dropped = [where for where in both if now[where] < (1 - MAX_DROP) * before[where]]
    lines = [f"check: {len(both)} ratios compared, {len(dropped)} dropped by more than {MAX_DROP:.0%}"]
    for where in dropped:
        change = now[where] / before[where] - 1
        lines.append(f"  dropped  {_named(where)}: {before[where]:.3f} -> {now[where]:.3f} ({change:+.1%})")
    lines += [f"  missing  {_named(where)}: only in the baseline" for where in before if where not in now]
    lines += [f"  extra    {_named(where)}: not in the baseline" for where in now if where not in before]
    if not both:
        lines.append("  nothing could be compared, which counts as a failure")
    return bool(both) and not dropped, "\n".join(lines)


def _ratios(records: Sequence[Record]) -> dict[Identity, float]:
    found = {identity(record): ratio(record) for record in records}
    return {where: value for where, value in found.items() if value is not None}


def _named(where: Identity) -> str:
    return ", ".join(f"{key} {value}" for key, value in zip(IDENTITY, where, strict=True))
