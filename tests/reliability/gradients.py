"""Gradients of the expert-parallel step against the float64 oracle, and <dispatch(x), g> = <x, combine(g)>, exactly. A
case is a routing of support/routings.py with finite numbers; its gradients are compared in both orders of sums, both
layouts and both schedules, in fp32 (every third case bf16 or, on CPUs, fp16: GPUs compile kernels for each). In every
other case one rank dawdles."""

import time
from contextlib import nullcontext
from functools import partial

import routings
import torch
from layers import shapes
from mlp_oracle import check_mlp
from trip_checks import check_adjoint
from worker import Findings, open_heap

from reliability.delays import dawdling
from reliability.suite import SEED_STRIDE, Numbers, Results, Suite, on_ranks

_FINITE = [index for index, stratum in enumerate(routings.STRATA) if stratum != "nonfinite"]
_DTYPES = (
    torch.float32,
    torch.float32,
    torch.bfloat16,
    torch.float32,
    torch.float32,
    torch.float16,
)


def case_number(number: int, seed: int) -> int:
    """Case `number` among those with finite numbers."""
    turn, index = divmod(number, len(_FINITE))
    first = -(-seed * SEED_STRIDE // len(routings.STRATA)) * len(routings.STRATA)
    return first + turn * len(routings.STRATA) + _FINITE[index]


def check(rank: int, num_ranks: int, numbers: Numbers, seed: int, device: str) -> Results:
    """Yields an outcome for each case; the ranks share one heap for all cases."""
    with open_heap(device) as heap:
        for number in numbers:
            start = time.perf_counter()
            case = routings.case_on(case_number(number, seed), device)
            dtype = _DTYPES[number % len(_DTYPES)]
            if device == "cuda" and dtype == torch.float16:
                dtype = torch.bfloat16
            findings, copies = Findings(), heap.statistics.num_staging_copies
            findings.where = f"{case}, step in {dtype}"
            slow = number % 2 == 1 and number // 2 % num_ranks == rank
            with dawdling(heap.device, number, longest_s=1e-3) if slow else nullcontext():
                check_mlp(heap, case, shapes(device), dtype, findings)
            findings.equal("staging copies", heap.statistics.num_staging_copies, copies)
            check_adjoint(heap, case, case.shape(device), findings)
            yield 1e3 * (time.perf_counter() - start), findings.texts, {}


SUITE = Suite(partial(on_ranks, check=check, deadline_s=60.0), num_cases=200)
