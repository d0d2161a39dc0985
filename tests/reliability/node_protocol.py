"""A model of how nodes agree on an error, and on who is lost, and a search through all its interleavings. Written from
docs/design/nodes.md and the text of symm_mem/faults.py, not from the code. Ranks of a node meet in
barriers, ranks of a rail exchange headers, and then tensors. What a rank sends, another one takes at any later time:
messages of a pair keep their order, those of different pairs do not. What barriers are made of is in protocol.py; here
one is an arrival, with or without a fault, and a wait for the arrivals of the node.

Rank r is on node r // G. On CPUs: a host knows at the end of a barrier how it went."""

import functools
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from reliability.protocol import Protocol, Searchable

# The rules, and what a mutant that breaks one is called.
NODE_RULES = {
    # Who learns of an error in a barrier, or has one, says so at the next meeting.
    "faults_tell_the_rail": "an error in a barrier is not passed on to the rail",
    # Who learns of one at a meeting enters the next barrier of its node with it, and does not meet for it again.
    "rails_tell_the_node": "an error at a meeting is not passed on to the node",
    "told_once": "an error of a meeting is told again",
    "says_so_first": "who fails waits in a barrier before its rail knows",
    # So that an error of any step before gets through a barrier and a meeting in its call.
    "meets_before_last_barrier": "no meeting before the last barrier",
    "meets_before_payload": "no meeting before tensors are sent",
    "barrier_before_rails": "no barrier before counts are sent",  # in which the node has written them
    "plan_ends_with_barrier": "no barrier at the end of a plan",  # so that an error of one rail gets to the others
    "make_plan_meets": "no meeting at the end of make_plan",  # whose next call may be far away; in layers trips meet
    "gives_up_on_rails": "rails are not told who gave up",
    "reports_name": "who gives up names itself",  # and not whom it has missed
    # Who misses a rank of its node that is on its rail waits for what that one finds out.
    "waits_for_verdict": "no wait for what a rank on its rail finds out",
    # Who misses a rail peer waits longer than that one does for its node.
    "rails_are_patient": "rails wait no longer than nodes",
    "rails_time_out": "rails wait without end",  # waits on rails are bounded
    # Counts lie in two places in turn, by the parity of the epoch. Breaks nothing by itself.
    "table_halves": "and counts in one place, whatever the parity",
}

NodeProtocol = partial(Protocol, rules=NODE_RULES)


@dataclass(frozen=True)
class NodeScenario:
    """What the ranks do."""

    name: str
    # One after the other: "make_plan", or the "plan" of a layer, "dispatch", "combine", or "layer": the last three.
    calls: tuple[str, ...]
    num_nodes: int = 2
    ranks_of_node: int = 2
    fails: tuple[
        tuple[int, int, int], ...
    ] = ()  # (rank, call, step): who has an error of its own before which step
    ends: int | None = None  # the rank that may end at any moment, and with it its connections
    stops: int | None = None  # the rank that may stop at any moment: its connections stay


_RUNS, _FINISHED, _GAVE_UP, _ENDED, _STOPPED = range(5)
_NOBODY = -1
_GOES_ON, _FAILED, _HAS_GIVEN_UP = "goes on", "failed", "gave up"


class _Rank(NamedTuple):
    """A rank's state: where it is follows from what it has heard."""

    heard: tuple[int, ...] = ()  # in each step: whose error, or nobody's
    waits: bool = False  # has it said what its step says
    faults: tuple[int, ...] = ()  # whose error it has brought to each barrier
    counts: tuple[int, ...] = ()  # of the node's ranks, in both halves of its table
    status: int = _RUNS
    named: int = _NOBODY


State = tuple[tuple[_Rank, ...], tuple[tuple[tuple, ...], ...]]
Step = tuple[str, object]  # its kind, and what it says or writes


class NodeModel(Searchable):
    """One scenario under one protocol."""

    def __init__(self, scenario: NodeScenario, protocol: Protocol) -> None:
        self._scenario, self._rules = scenario, protocol
        self._size = scenario.ranks_of_node
        self._num_ranks = scenario.num_nodes * self._size
        self._calls = [self._kinds_of(call) for call in scenario.calls]
        self._step_of = functools.cache(self._step_after)

    def _kinds_of(self, call: str) -> list[str]:
        rules = self._rules
        if call == "plan":
            counted = ["barrier"] * rules.barrier_before_rails
            last = ["barrier"] * rules.plan_ends_with_barrier
            return ["write counts", *counted, *self._exchange_of("counts"), *last]
        last = [*["meet"] * rules.meets_before_last_barrier, "barrier"]
        if call == "make_plan":
            return [*self._kinds_of("plan"), *last * rules.make_plan_meets]
        if call == "layer":  # only the last trip of a call ends with a meeting
            trips = [*self._exchange_of("rows"), "barrier", "barrier", *self._kinds_of("combine")]
            return [*self._kinds_of("plan"), *trips]
        if call == "dispatch":
            return [*self._exchange_of("rows"), "barrier", *last]
        return ["barrier", *self._exchange_of("sums"), "barrier", *last]

    def _exchange_of(self, what: str) -> list[str]:
        return ["meet"] * self._rules.meets_before_payload + [what]

    # -- what a rank does ---------------------------------------------------------------------------------------------

    def _program(self, rank: int) -> Generator[Step, int, list[tuple[int, int]]]:
        """All steps of a rank, each of which gets what is heard in it. Returns what is raised: (call, whose)."""
        raised = []
        for call in range(len(self._calls)):
            whose = yield from self._call(rank, call)
            if whose != _NOBODY:
                raised.append((call, whose))
        return raised

    def _call(self, rank: int, call: int) -> Generator[Step, int, int]:
        """Returns whose error ends it."""
        rules = self._rules
        for step, kind in enumerate(self._calls[call]):
            if (rank, call, step) in self._scenario.fails:
                if rules.says_so_first:
                    yield "say", (_FAILED, rank)
                rest = ("barrier", "listen" if rules.says_so_first else "meet")
                return (yield from self._pass_on(rank, *rest))
            says = {"barrier": _NOBODY, "meet": (_GOES_ON, (call, step))}.get(kind, (call, step))
            whose = yield kind, says
            if whose != _NOBODY and kind == "barrier":
                return (yield from self._pass_on(whose, *["meet"] * rules.faults_tell_the_rail))
            if whose != _NOBODY:
                rest = (*["barrier"] * rules.rails_tell_the_node, *["meet"] * (not rules.told_once))
                return (yield from self._pass_on(whose, *rest))
        return _NOBODY

    def _pass_on(self, whose: int, *kinds: str) -> Generator[Step, int, int]:
        """What is left of an error's way. Returns whose is raised in the end."""
        for kind in kinds:
            heard = yield kind, whose if kind == "barrier" else (_FAILED, whose)
            whose = whose if kind == "barrier" else heard
        return whose

    def _step_after(self, rank: int, heard: tuple[int, ...]) -> Step:
        """The step to which a rank has come that has heard this."""
        program = self._program(rank)
        try:
            step = next(program)
            for each in heard:
                step = program.send(each)
        except StopIteration as end:
            return "finish", end.value
        return step

    # -- places -------------------------------------------------------------------------------------------------------

    def _node(self, rank: int) -> list[int]:
        first = rank - rank % self._size
        return [peer for peer in range(first, first + self._size) if peer != rank]

    def _rail_peers(self, rank: int) -> list[int]:
        return [
            other
            for other in range(rank % self._size, self._num_ranks, self._size)
            if other != rank
        ]

    def _queue(self, source: int, target: int, kind: str) -> int:
        """Headers and tensors have an order each."""
        return 2 * (source * self._num_ranks + target) + (kind == "tensor")

    # -- steps --------------------------------------------------------------------------------------------------------

    def _start(self) -> State:
        own = _Rank(counts=(_NOBODY,) * (2 * self._size))
        return (own,) * self._num_ranks, ((),) * (2 * self._num_ranks**2)

    def _followers(self, state: State) -> Iterator[State | str]:
        """States that can follow, or what has gone wrong, as text."""
        steps = {
            "say": self._say_first,
            "barrier": self._barrier,
            "meet": self._meet,
            "listen": self._meet,
            "write counts": self._write_counts,
            "finish": self._finish,
        }
        for rank, own in enumerate(state[0]):
            if own.status != _RUNS:
                continue
            if rank == self._scenario.ends:
                yield self._with(state, rank, own._replace(status=_ENDED))
            if rank == self._scenario.stops:
                yield self._with(state, rank, own._replace(status=_STOPPED))
            kind, says = self._step_of(rank, own.heard)
            yield from steps.get(kind, self._exchange)(state, rank, own, kind, says)

    def _done(self, state: State, rank: int, whose: int = _NOBODY) -> State:
        """The step has been made, in which an error was heard, or none."""
        own = state[0][rank]
        return self._with(state, rank, own._replace(heard=(*own.heard, whose), waits=False))

    def _finish(self, state: State, rank: int, own: _Rank, *_) -> Iterator[State]:
        yield self._with(state, rank, own._replace(status=_FINISHED))

    def _say_first(
        self, state: State, rank: int, own: _Rank, kind: str, header: tuple
    ) -> Iterator[State]:
        yield self._done(self._say(state, rank, own, "header", header), rank)

    def _half(self, own: _Rank, before_barrier: bool) -> int:
        """Of the count table, by the epoch of the plan's barrier, which has been or is about to be."""
        return (len(own.faults) + before_barrier) & 1 if self._rules.table_halves else 0

    def _write_counts(
        self, state: State, rank: int, own: _Rank, kind: str, at: tuple[int, int]
    ) -> Iterator[State]:
        ranks = list(self._done(state, rank)[0])
        place = self._half(own, True) * self._size + rank % self._size
        for peer in self._node(rank):
            counts = ranks[peer].counts
            counts = (*counts[:place], at[0], *counts[place + 1 :])
            ranks[peer] = ranks[peer]._replace(counts=counts)
        yield tuple(ranks), state[1]

    def _barrier(
        self, state: State, rank: int, own: _Rank, kind: str, whose: int
    ) -> Iterator[State]:
        if not own.waits:
            brings = own._replace(waits=True, faults=(*own.faults, whose))
            yield self._with(state, rank, brings)
            return
        epoch, ranks = len(own.faults), state[0]
        missing = [peer for peer in self._node(rank) if len(ranks[peer].faults) < epoch]
        for peer in missing:
            yield from self._miss_peer(state, rank, peer)
        if not missing:
            brought = [ranks[peer].faults[epoch - 1] for peer in sorted((rank, *self._node(rank)))]
            culprits = [whose for whose in brought if whose != _NOBODY]
            yield self._done(state, rank, culprits[0] if culprits else _NOBODY)

    def _meet(
        self, state: State, rank: int, own: _Rank, kind: str, header: tuple
    ) -> Iterator[State | str]:
        if not own.waits:
            waits = own._replace(waits=True)
            yield (
                self._say(state, rank, waits, "header", header)
                if kind == "meet"
                else self._with(state, rank, waits)
            )
            return
        heard, queues = [header], list(state[1])
        for other in self._rail_peers(rank):
            queue = self._queue(other, rank, "header")
            if not queues[queue]:
                yield from self._miss_rail_peer(state, rank, other, "header")
                return
            heard.append(queues[queue][0])
            queues[queue] = queues[queue][1:]
        after: State = (state[0], tuple(queues))
        gave_up = [whom for said, whom in heard if said == _HAS_GIVEN_UP]
        failed = [whose for said, whose in heard if said == _FAILED]
        if gave_up:
            yield self._give_up(after, rank, gave_up[0])
        elif failed:
            yield self._done(after, rank, min(failed))
        elif any(each != header for each in heard):
            yield f"ranks of a rail meet in different steps: {sorted(at for _, at in heard)}"
        else:
            yield self._done(after, rank)

    def _exchange(
        self, state: State, rank: int, own: _Rank, kind: str, at: tuple[int, int]
    ) -> Iterator[State | str]:
        if not own.waits:
            half = self._half(own, not self._rules.barrier_before_rails)
            places = [half * self._size + peer % self._size for peer in self._node(rank)]
            seen = [own.counts[place] for place in places]
            if kind == "counts" and any(each != at[0] for each in seen):
                yield f"rank {rank} sends counts of plans {seen} in place of {at[0]}"
                return
            yield self._say(state, rank, own._replace(waits=True), "tensor", at)
            return
        queues = list(state[1])
        for other in self._rail_peers(rank):
            queue = self._queue(other, rank, "tensor")
            if not queues[queue]:
                yield from self._miss_rail_peer(state, rank, other, "tensor")
                return
            sent, *left = queues[queue]
            queues[queue] = tuple(left)
            if sent != at:
                yield f"rank {rank} gets at step {at} what rank {other} has sent at step {sent}"
                return
        yield self._done((state[0], tuple(queues)), rank)

    # -- lost ranks ---------------------------------------------------------------------------------------------------

    def _miss_peer(self, state: State, rank: int, peer: int) -> Iterator[State]:
        its = state[0][peer]
        if its.status in (_ENDED, _STOPPED):
            yield self._give_up(state, rank, peer)
        elif its.status == _GAVE_UP:
            yield self._give_up(state, rank, its.named if self._rules.reports_name else peer)
        elif not self._rules.waits_for_verdict and self._is_stuck(state, peer, on_rail=True):
            yield self._give_up(state, rank, peer)

    def _miss_rail_peer(self, state: State, rank: int, other: int, kind: str) -> Iterator[State]:
        its, said = state[0][other], state[1][self._queue(other, rank, "header")]
        if kind == "tensor" and said and said[0][0] == _HAS_GIVEN_UP:
            yield self._give_up(state, rank, said[0][1])
        elif its.status in (_ENDED, _GAVE_UP):  # its connection has closed
            yield self._give_up(state, rank, other)
        elif its.status == _STOPPED and self._rules.rails_time_out:
            yield self._give_up(state, rank, other)
        elif not self._rules.rails_are_patient and self._is_stuck(state, other, on_rail=False):
            yield self._give_up(state, rank, other)

    def _give_up(self, state: State, rank: int, whom: int) -> State:
        own = state[0][rank]._replace(status=_GAVE_UP, named=whom)
        if not self._rules.gives_up_on_rails:
            return self._with(state, rank, own)
        header = _HAS_GIVEN_UP, whom if self._rules.reports_name else rank
        return self._say(state, rank, own, "header", header)

    def _is_stuck(self, state: State, rank: int, *, on_rail: bool) -> bool:
        """Whether a rank waits for another that does not come any more, of its rail or of its node."""
        own, kind = state[0][rank], self._step_of(rank, state[0][rank].heard)[0]
        if own.status != _RUNS or not own.waits or on_rail == (kind == "barrier"):
            return False
        others = self._rail_peers(rank) if on_rail else self._node(rank)
        lost = [state[0][each] for each in others if state[0][each].status in (_ENDED, _STOPPED)]
        return any(on_rail or len(each.faults) < len(own.faults) for each in lost)

    # -- states -------------------------------------------------------------------------------------------------------

    @staticmethod
    def _with(state: State, rank: int, own: _Rank) -> State:
        return (*state[0][:rank], own, *state[0][rank + 1 :]), state[1]

    def _say(self, state: State, rank: int, own: _Rank, kind: str, message: tuple) -> State:
        queues = list(state[1])
        for other in self._rail_peers(rank):
            queues[self._queue(rank, other, kind)] += (message,)
        ranks, _ = self._with(state, rank, own)
        return ranks, tuple(queues)

    def _wrong_end(self, state: State) -> str | None:
        """What is wrong where nothing can happen any more."""
        ranks, lost = state[0], (self._scenario.ends, self._scenario.stops)
        steps = [self._step_of(rank, own.heard) for rank, own in enumerate(ranks)]
        stuck = [rank for rank, own in enumerate(ranks) if own.status == _RUNS]
        if stuck:
            where = [f"rank {rank} at {steps[rank][0]}" for rank in stuck]
            return f"deadlock: {', '.join(where)}"
        named = {own.named for own in ranks if own.status == _GAVE_UP}
        if named - {*lost}:
            return f"rank {min(named - {*lost})} is named, which was not lost"
        if lost != (None, None):
            return None
        raised = [
            its for (_, its), own in zip(steps, ranks, strict=True) if own.status == _FINISHED
        ]
        errors = [[whose for _, whose in each] for each in raised]
        of_calls = [
            {rank for rank, of_call, _ in self._scenario.fails if of_call == call}
            for call in sorted({call for _, call, _ in self._scenario.fails})
        ]
        for each in errors:
            if len(each) != len(of_calls) or any(
                rank not in of_call for rank, of_call in zip(each, of_calls, strict=True)
            ):
                return f"ranks raise the errors of ranks {errors}"
        for together in zip(*raised, strict=True):
            if len(calls := {call for call, _ in together}) > 1:
                return f"an error is raised in calls {sorted(calls)}"
        left = [messages for messages in state[1] if messages]
        return f"messages that nobody has taken: {left}" if left else None


STEP = ("plan", "dispatch", "combine")

# Steps before which a call may fail on a rank: a barrier and a meeting follow in the call, in either order. What fails
# later is raised by the other nodes in their next call: of a plan in what follows of its layer's call.
MAY_FAIL = {
    "make_plan": (0, 1, 2, 4, 5),
    "plan": (0, 1, 2),
    "dispatch": (0, 2, 3),
    "combine": (0, 1, 3, 4),
    "layer": (0, 4, 5, 7, 8, 10, 12, 13),
}


def node_scenarios() -> list[NodeScenario]:
    """What is searched, on two nodes of two ranks."""
    found = [
        NodeScenario("a step", STEP),
        NodeScenario("layers", ("layer", "layer")),
        NodeScenario("plans", ("plan",) * 3),
        NodeScenario("two ranks fail at once", ("plan", "dispatch"), fails=((0, 0, 1), (3, 0, 1))),
        NodeScenario(
            "two ranks fail one after the other", ("plan", "dispatch"), fails=((0, 0, 2), (3, 0, 1))
        ),
        NodeScenario("two ranks fail a layer", ("layer", "plan"), fails=((1, 0, 4), (2, 0, 8))),
        NodeScenario(
            "two ranks fail a dispatch", ("dispatch", "plan"), fails=((1, 0, 0), (2, 0, 3))
        ),
        NodeScenario("and before one meeting", ("dispatch", "plan"), fails=((1, 0, 0), (2, 0, 0))),
        NodeScenario(
            "ranks fail two calls", ("plan", "dispatch", "plan"), fails=((1, 0, 1), (2, 1, 3))
        ),
    ]
    for call, steps in MAY_FAIL.items():
        calls = (call, "dispatch" if call == "plan" else "plan")
        for step in steps:
            found.append(
                NodeScenario(f"rank 0 fails {call}, step {step}", calls, fails=((0, 0, step),))
            )
    for calls in (("plan",), ("combine", "plan"), ("layer",)):
        found.append(NodeScenario(f"rank 0 ends in {calls[0]}", calls, ends=0))
        found.append(NodeScenario(f"rank 3 stops in {calls[0]}", calls, stops=3))
    return found


def more_node_scenarios() -> list[NodeScenario]:
    """The same on every rank, and other layouts."""
    found = []
    for each in node_scenarios():
        for rank in (1, 2, 3):
            if len(each.fails) == 1:
                (_, call, step), name = each.fails[0], each.name.replace("rank 0", f"rank {rank}")
                found.append(replace(each, name=name, fails=((rank, call, step),)))
        if each.ends is not None:
            for rank in range(4):
                found.append(
                    replace(each, name=f"rank {rank} ends, {each.calls}", ends=rank, stops=None)
                )
                found.append(
                    replace(each, name=f"rank {rank} stops, {each.calls}", ends=None, stops=rank)
                )
        if all(rank < 3 for rank, _, _ in each.fails) and each.stops is None:
            found.append(
                replace(each, name=f"{each.name}, 3 nodes of 1", num_nodes=3, ranks_of_node=1)
            )
        if len(each.calls) < 3:
            found.append(
                replace(
                    each, name=f"{each.name}, 3 ranks a node", calls=each.calls[:1], ranks_of_node=3
                )
            )
    return found


NODE_MUTANTS = {mutant: (rule,) for rule, mutant in NODE_RULES.items()}
NODE_MUTANTS[NODE_RULES["table_halves"]] = ("plan_ends_with_barrier", "table_halves")
_OF_LOST_RANKS = (
    "gives_up_on_rails",
    "reports_name",
    "waits_for_verdict",
    "rails_are_patient",
    "rails_time_out",
)


def found_in_node_model(mutant: str) -> str:
    """The first violation of a mutant; "" if there is none. Some change nothing where nobody is lost."""
    rules = NODE_MUTANTS[mutant]
    needs_loss = not set(rules).isdisjoint(_OF_LOST_RANKS)
    for scenario in node_scenarios():
        if needs_loss == ((scenario.ends, scenario.stops) != (None, None)):
            verdict = NodeModel(scenario, NodeProtocol(*rules)).search()
            if verdict.violation is not None:
                return f"{scenario.name}: {verdict.violation}"
    return ""
