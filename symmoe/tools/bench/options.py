"""What one call of `symmoe bench` is to do."""

from __future__ import annotations

from dataclasses import dataclass

from symmoe.tools.bench.cases import Case


@dataclass(frozen=True, kw_only=True)
class Options:
    """What one call of `symmoe bench` is to do.

    Attributes:
        suites: suites to run, in this order.
        cases: cases that the suites run on.
        repetitions: repetitions of every variant.
        heap_gib: size of the heap; None is what the cases need.
        ranks_per_node: of the heap.
        load: files with records to use instead of measuring.
        json: file to write.
        check: file with the baseline.
    """

    suites: tuple[str, ...]
    cases: tuple[Case, ...]
    repetitions: int
    heap_gib: float | None
    ranks_per_node: int | None
    load: tuple[str, ...]
    json: str | None
    check: str | None
