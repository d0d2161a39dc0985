"""Every interleaving of the protocol's model: no deadlock, no stale read, nothing overwritten before it is read. A case
is a scenario of protocol.py, on 3 ranks unless told otherwise: some epochs of plans, trips and signals, also with one
or two ranks that may die at any moment, a rank that fails a call, is given up although it comes, or gives up because of
an error of its own: then nobody goes on in what others have given up, and everybody names a rank that is the reason.
More ranks have too many interleavings: then a case is one of them, at random. Runs in this process; needs no device."""

import time
from collections.abc import Iterator

from reliability.launch import Launcher
from reliability.protocol import Model, Protocol, scenarios
from reliability.suite import SEED_STRIDE, Outcome, Run, Suite

MOST_RANKS = 3  # of a search


def run_cases(run: Run, launcher: Launcher) -> Iterator[Outcome]:
    cases = scenarios(run.num_ranks)
    for number in run.numbers:
        start, scenario = time.perf_counter(), cases[number % len(cases)]
        model = Model(scenario, Protocol())
        verdict = (
            model.search()
            if run.num_ranks <= MOST_RANKS
            else model.walk(run.seed * SEED_STRIDE + number)
        )
        problems = [] if verdict.violation is None else [f"{scenario.name}: {verdict.violation}"]
        facts = {"scenario": scenario.name, "states": verdict.num_states}
        yield Outcome(number, 1e3 * (time.perf_counter() - start), problems, facts)


def summarize(outcomes: list[Outcome]) -> dict:
    return {"scenarios": [outcome.facts for outcome in outcomes]}


SUITE = Suite(run_cases, num_cases=len(scenarios()), num_ranks=3, summarize=summarize)
