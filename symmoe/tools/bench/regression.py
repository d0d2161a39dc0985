"""`--check`: has a figure become worse in relation to the yardstick of the same run?

Ratios are compared, not times: another machine, or a warmer one, changes a figure and its yardstick by the same factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from symmoe.tools.bench.records import IDENTITY, Identity, Record, identity, ratio

MAX_DROP = 0.1


@dataclass(frozen=True)
class Comparison:
    """New records compared with those of a baseline.

    Attributes:
        dropped: (identity, ratio of the baseline, ratio now) where more than MAX_DROP of the ratio is gone.
        missing: identities that only the baseline has.
        extra: identities that the baseline lacks.
        num_compared: ratios that both have.
    """

    dropped: list[tuple[Identity, float, float]]
    missing: list[Identity]
    extra: list[Identity]
    num_compared: int

    @property
    def passed(self) -> bool:
        """Whether no ratio has dropped, and there was something to compare."""
        return not self.dropped and self.num_compared > 0

    def report(self) -> str:
        """The comparison as text."""
        lines = [f"check: {self.num_compared} ratios compared, {len(self.dropped)} dropped by more than {MAX_DROP:.0%}"]
        for where, before, now in self.dropped:
            lines.append(f"  dropped  {_named(where)}: {before:.3f} -> {now:.3f} ({now / before - 1:+.1%})")
        lines += [f"  missing  {_named(where)}: only in the baseline" for where in self.missing]
        lines += [f"  extra    {_named(where)}: not in the baseline" for where in self.extra]
        if not self.num_compared:
            lines.append("  nothing could be compared, which counts as a failure")
        return "\n".join(lines)


def compare(records: Sequence[Record], baseline: Sequence[Record]) -> Comparison:
    """Compares every record that has a yardstick, by what it measures."""
    now, before = _ratios(records), _ratios(baseline)
    both = [where for where in before if where in now]
    dropped = [(where, before[where], now[where]) for where in both if now[where] < (1 - MAX_DROP) * before[where]]
    return Comparison(
        dropped=dropped,
        missing=[where for where in before if where not in now],
        extra=[where for where in now if where not in before],
        num_compared=len(both),
    )


def _ratios(records: Sequence[Record]) -> dict[Identity, float]:
    found = {identity(record): ratio(record) for record in records}
    return {where: value for where, value in found.items() if value is not None}


def _named(where: Identity) -> str:
    return ", ".join(f"{key} {value}" for key, value in zip(IDENTITY, where, strict=True))
