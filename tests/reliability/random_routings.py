"""Random routings against the oracle: dispatch byte for byte, combine bit for bit in both orders. Cases are those of
support/routings.py, 14 strata in turn; what is checked of each is what the oracle tests check. In every other case one
rank dawdles between the steps of the protocol."""

import time
from collections import Counter
from contextlib import nullcontext
from functools import partial

import routings
from trip_checks import check_combine, check_dispatch
from worker import Findings, open_heap

from reliability.delays import dawdling
from reliability.suite import SEED_STRIDE, Numbers, Outcome, Results, Suite, on_ranks


def check(rank: int, num_ranks: int, numbers: Numbers, seed: int, device: str) -> Results:
    """Yields an outcome for each case; the ranks share one heap for all cases."""
    with open_heap(device) as heap:
        for number in numbers:
            case = routings.case_on(seed * SEED_STRIDE + number, device)
            start = time.perf_counter()
            findings = Findings(str(case))
            slow = number % 2 == 1 and number // 2 % num_ranks == rank
            delay = dawdling(heap.device, case.number, longest_s=1e-3) if slow else nullcontext()
            with delay:
                check_dispatch(heap, case, findings)
                check_combine(heap, case, findings)
            findings.equal("leased bytes after the case", heap.leased_bytes, 0)
            yield 1e3 * (time.perf_counter() - start), findings.texts, {"stratum": case.stratum}


def summarize(outcomes: list[Outcome]) -> dict:
    strata = Counter(
        outcome.facts["stratum"][0] for outcome in outcomes if "stratum" in outcome.facts
    )
    return {"strata": dict(sorted(strata.items()))}


SUITE = Suite(partial(on_ranks, check=check, deadline_s=60.0), num_cases=2000, summarize=summarize)
