"""What the suites of one run share, and what they ask of the heap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from symmoe.dispatch.plan import Plan, make_plan
from symmoe.symm_mem.heap import SymmetricHeap
from symmoe.tools.bench.problem import DTYPE, Problem
from symmoe.tools.bench.ranks import Ranks
from symmoe.tools.bench.records import Record, new_record
from symmoe.tools.bench.timing import Variant, clock_for, measure, verify


@dataclass(frozen=True)
class Run:
    """One run of `symmoe bench`: the ranks, their heap, and how often everything is timed."""

    ranks: Ranks
    heap: SymmetricHeap
    repetitions: int

    def measure(self, variants: Sequence[Variant]) -> tuple[dict[str, npt.NDArray[np.float64]], dict[str, float]]:
        """(milliseconds [repetitions, directions], relative error) of every variant by name: steps. Verifies first."""
        return self._measure(variants, self.ranks.align)

    def measure_kernels(
        self, variants: Sequence[Variant]
    ) -> tuple[dict[str, npt.NDArray[np.float64]], dict[str, float]]:
        """Same as :meth:`measure`, for calls that are so short that launches would hide their time."""
        return self._measure(variants, self.ranks.align_ahead)

    def _measure(
        self, variants: Sequence[Variant], align: Callable[[], None]
    ) -> tuple[dict[str, npt.NDArray[np.float64]], dict[str, float]]:
        errors = {variant.name: verify(variant, self.ranks) for variant in variants}
        clock = clock_for(self.ranks.device)
        times = measure(variants, self.ranks, clock, repetitions=self.repetitions, align=align)
        return times, errors

    def plan(self, problem: Problem, capacity: int | None = None) -> Plan:
        """A plan of the problem's routing. Collective."""
        return make_plan(
            problem.topk_idx, num_experts=problem.case.shape.num_experts, heap=self.heap, capacity=capacity
        )


def case_record(
    problem: Problem, suite: str, variant: str, direction: str, times_ms: npt.NDArray[np.float64], **more: Any
) -> Record:
    """A record of one case."""
    case = problem.case
    shape = {name: getattr(case.shape, name) for name in ("hidden", "ffn", "num_experts", "top_k")}
    return new_record(
        times_ms,
        suite=suite,
        variant=variant,
        preset=case.shape.name,
        ep=problem.num_ranks,
        tokens=case.num_tokens,
        skew=case.skew,
        direction=direction,
        **more,
        **shape,
        dtype=str(DTYPE).removeprefix("torch."),
    )
