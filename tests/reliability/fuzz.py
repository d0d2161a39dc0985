"""Wrong calls: one argument is not as it should be on some ranks, and every rank raises the documented class. A case is
a mistake of support/bad_calls.py, whose table tests/moe/test_bad_input.py goes through, on random ranks: it wants the
same class on every rank, a text that names the argument, nothing left on lease, and then an exact call."""

import random
import time
from collections import Counter
from functools import partial

from bad_calls import MISTAKES, Bad, check_mistake
from worker import Findings, open_heap

from reliability.suite import SEED_STRIDE, Numbers, Outcome, Results, Suite, on_ranks

# What tensors on GPUs cannot be, or what stands in for them there is another text.
ONLY_ON_CPUS = ("nested", "quint8", "(Wrapper)", "sparse_csr")


def mistakes_for(num_ranks: int, device: str) -> list[tuple[str, Bad]]:
    """All pairs (call, mistake)."""
    pairs = [(call, bad) for call, mistakes in MISTAKES.items() for bad in mistakes(num_ranks)]
    return [
        (call, bad)
        for call, bad in pairs
        if device == "cpu" or not any(w in bad.parts[0] for w in ONLY_ON_CPUS)
    ]


def check(rank: int, num_ranks: int, numbers: Numbers, seed: int, device: str) -> Results:
    """Yields an outcome for each case."""
    mistakes = mistakes_for(num_ranks, device)
    with open_heap(device, num_bytes=1 << 20) as heap:
        for number in numbers:
            start = time.perf_counter()
            generator = random.Random(f"{seed * SEED_STRIDE + number}")
            findings = Findings()
            call, bad = generator.choice(mistakes)
            culprits = sorted(generator.sample(range(num_ranks), generator.randint(1, num_ranks)))
            findings.where = f"{call}, {bad.parts} on ranks {culprits}"
            check_mistake(heap, findings, call, bad, culprits, number)
            yield 1e3 * (time.perf_counter() - start), findings.texts, {"call": call}


def summarize(outcomes: list[Outcome]) -> dict:
    calls = Counter(outcome.facts["call"][0] for outcome in outcomes if "call" in outcome.facts)
    return {"calls": dict(sorted(calls.items()))}


SUITE = Suite(partial(on_ranks, check=check, deadline_s=30.0), num_cases=500, summarize=summarize)
