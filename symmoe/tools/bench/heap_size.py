"""How large a heap the suites need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from symmoe.tools.bench.cases import Case
from symmoe.tools.bench.layer import VARIANTS, Choice
from symmoe.tools.bench.problem import DTYPE
from symmoe.training.memory_plan import plan_memory

_SPARE_BYTES = 64 << 20  # alignment and fragments
_ROW_BUFFERS = 5  # combine has one, and its two copies have four; the public parts' step has only four


def heap_bytes(case: Case, num_ranks: int, num_rows: int, suites: Sequence[Mapping[str, Choice]] = (VARIANTS,)) -> int:
    """Bytes that the suites lease at one time on the busiest rank, by all captured steps and one eager step.

    Args:
        num_rows: the most that any rank receives. Capacities are up to 1.2 times that, or the mean, if that is more.
        suites: the choices that are measured together, of every suite; those of "variants" include those of "layer".
    """
    shape = case.shape
    rows = int(1.2 * max(num_rows, case.num_slots)) + 1

    def step_bytes(choice: Choice) -> int:
        config = choice.config(shape, rows)
        return plan_memory(config, num_ranks=num_ranks, num_tokens=case.num_tokens, dtype=DTYPE).heap_bytes

    # A graph's leases on one stream do not take over what was freed on another.
    captured = max(2 * sum(step_bytes(choice) for choice in suite.values() if choice.captured) for suite in suites)
    eager = max(step_bytes(choice) for suite in suites for choice in suite.values())
    returned = (num_ranks - 1) * case.num_tokens  # sums that combine gets
    parts = (_ROW_BUFFERS * rows + returned) * shape.hidden * DTYPE.itemsize
    return captured + max(eager, parts) + _SPARE_BYTES
