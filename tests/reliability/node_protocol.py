"""A model of how nodes agree on an error, and on who is lost, and a search through all its interleavings. Written from
docs/design.md ("Between nodes") and the text of symm_mem/faults.py, not from the code. Ranks of a node meet in
barriers, ranks of a rail exchange headers, and then tensors. What a rank sends, another one takes at any later time:
messages of a pair keep their order, those of different pairs do not. What barriers are made of is in protocol.py; here
one is an arrival, with or without a fault, and a wait for the arrivals of the node.

Rank r is on node r // G. On CPUs: a host knows at the end of a barrier how it went."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

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


@dataclass(frozen=True)
class _Rank:
    """A rank's state. `faults`: whose error it has brought to each barrier; `todo`: what is left of an error's way;
    `error`: whose it is; `has_said`: whether its rail peers know; `raised`: (call, whose)."""

    position: int = 0
    waits: bool = False  # has it said what the step at its position says
    faults: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()  # of the node's ranks, in both halves of its table
    todo: tuple[str, ...] = ()
    error: int = _NOBODY
    has_said: bool = False
    raised: tuple[tuple[int, int], ...] = ()
    status: int = _RUNS
    named: int = _NOBODY


State = tuple[tuple[_Rank, ...], tuple[tuple[tuple, ...], ...]]


class NodeModel(Searchable):
    """One scenario under one protocol."""

    def __init__(self, scenario: NodeScenario, protocol: Protocol) -> None:
        self._scenario, self._rules = scenario, protocol
        self._size = scenario.ranks_of_node
        self._num_ranks = scenario.num_nodes * self._size
        self._program: list[tuple[str, int, int]] = []  # (kind, call, step)
        self._ends: list[int] = []
        for number, call in enumerate(scenario.calls):
            steps = self._steps_of(call)
            self._program += [(kind, number, step) for step, kind in enumerate(steps)]
            self._ends += [len(self._program)]

    def _steps_of(self, call: str) -> list[str]:
        rules = self._rules
        if call == "plan":
            counted = ["barrier"] if rules.barrier_before_rails else []
            last = ["barrier"] if rules.plan_ends_with_barrier else []
            return ["write counts", *counted, *self._exchange("counts"), *last]
        last = [*["meet"] * rules.meets_before_last_barrier, "barrier"]
        if call == "make_plan":
            return [*self._steps_of("plan"), *last * rules.make_plan_meets]
        if call == "layer":  # only the last trip of a call ends with a meeting
            trips = [*self._exchange("rows"), "barrier", "barrier", *self._steps_of("combine")]
            return [*self._steps_of("plan"), *trips]
        if call == "dispatch":
            return [*self._exchange("rows"), "barrier", *last]
        return ["barrier", *self._exchange("sums"), "barrier", *last]

    def _exchange(self, what: str) -> list[str]:
        return ["meet"] * self._rules.meets_before_payload + [what]

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
        counts = (_NOBODY,) * (2 * self._size)
        return tuple(_Rank(counts=counts) for _ in range(self._num_ranks)), ((),) * (
            2 * self._num_ranks**2
        )

    def _followers(self, state: State) -> Iterator[State | str]:
        """States that can follow, or what has gone wrong, as text."""
        for rank, own in enumerate(state[0]):
            if own.status != _RUNS:
                continue
            if rank == self._scenario.ends:
                yield self._with(state, rank, replace(own, status=_ENDED))
            if rank == self._scenario.stops:
                yield self._with(state, rank, replace(own, status=_STOPPED))
            if own.todo:
                yield from self._pass_on(state, rank, own)
            elif own.position == len(self._program):
                yield self._with(state, rank, replace(own, status=_FINISHED))
            else:
                yield from self._step(state, rank, own, *self._program[own.position])

    def _step(
        self, state: State, rank: int, own: _Rank, kind: str, call: int, step: int
    ) -> Iterator[State | str]:
        done = replace(own, position=own.position + 1, waits=False)
        has_raised = any(of_call == call and who == rank for of_call, who in own.raised)
        if (rank, call, step) in self._scenario.fails and not own.waits and not has_raised:
            fails = replace(
                own, error=rank, has_said=self._rules.says_so_first, todo=("barrier", "meet")
            )
            if fails.has_said:
                yield self._say(state, rank, fails, "header", (_FAILED, rank))
            else:
                yield self._with(state, rank, fails)
        elif kind == "write counts":
            yield self._write_counts(state, rank, done, call)
        elif kind == "barrier":
            yield from self._barrier(state, rank, own, done)
        elif kind == "meet":
            yield from self._meet(state, rank, own, done, (_GOES_ON, own.position))
        elif not own.waits:
            if kind == "counts":
                half = self._half(own, call)
                seen = [
                    own.counts[half * self._size + peer % self._size] for peer in self._node(rank)
                ]
                if any(each != call for each in seen):
                    yield f"rank {rank} sends counts of plans {seen} in place of {call}"
                    return
            yield self._say(state, rank, replace(own, waits=True), "tensor", (own.position,))
        else:
            yield from self._receive(state, rank, done, own.position)

    def _half(self, own: _Rank, call: int) -> int:
        """Of the count table, by the epoch of the plan's barrier, which has been or is about to be."""
        epoch = len(own.faults) + (
            self._program[own.position][0] == "write counts" or not self._rules.barrier_before_rails
        )
        return epoch & 1 if self._rules.table_halves else 0

    def _write_counts(self, state: State, rank: int, done: _Rank, call: int) -> State:
        ranks = list(self._with(state, rank, done)[0])
        half = self._half(state[0][rank], call)
        for peer in self._node(rank):
            place = half * self._size + rank % self._size
            counts = ranks[peer].counts
            ranks[peer] = replace(ranks[peer], counts=(*counts[:place], call, *counts[place + 1 :]))
        return tuple(ranks), state[1]

    def _barrier(self, state: State, rank: int, own: _Rank, done: _Rank) -> Iterator[State | str]:
        if not own.waits:
            yield self._with(state, rank, replace(own, waits=True, faults=(*own.faults, own.error)))
            return
        epoch, ranks = len(own.faults), state[0]
        missing = [peer for peer in self._node(rank) if len(ranks[peer].faults) < epoch]
        for peer in missing:
            yield from self._miss_peer(state, rank, own, peer)
        if missing:
            return
        brought = [ranks[peer].faults[epoch - 1] for peer in sorted((rank, *self._node(rank)))]
        culprits = [whose for whose in brought if whose != _NOBODY]
        if not culprits:
            yield self._with(state, rank, done)
            return
        if own.todo:  # it has entered with an error of its own, or of its rail
            yield self._with(state, rank, self._after(replace(own, waits=False), own.todo[1:]))
            return
        todo = ("meet",) if self._rules.faults_tell_the_rail else ()
        yield self._with(
            state, rank, self._after(replace(own, waits=False, error=culprits[0]), todo)
        )

    def _meet(
        self, state: State, rank: int, own: _Rank, done: _Rank, header: tuple[str, int]
    ) -> Iterator[State | str]:
        if not own.waits:
            waits = replace(own, waits=True, has_said=False)
            yield (
                self._with(state, rank, waits)
                if own.has_said
                else self._say(state, rank, waits, "header", header)
            )
            return
        heard, queues = [header], list(state[1])
        for other in self._rail_peers(rank):
            queue = self._queue(other, rank, "header")
            if not queues[queue]:
                yield from self._miss_rail_peer(state, rank, own, other, "header")
                return
            heard.append(queues[queue][0])
            queues[queue] = queues[queue][1:]
        after: State = (state[0], tuple(queues))
        gave_up = [whom for kind, whom in heard if kind == _HAS_GIVEN_UP]
        failed = [whose for kind, whose in heard if kind == _FAILED]
        if gave_up:
            yield self._give_up(after, rank, gave_up[0])
        elif not failed:
            if any(position != own.position for _, position in heard):
                yield f"ranks of a rail meet in different steps: {sorted(position for _, position in heard)}"
                return
            yield self._with(after, rank, done)
        elif own.todo:
            yield self._with(
                after, rank, self._after(replace(own, waits=False, error=min(failed)), own.todo[1:])
            )
        else:
            todo = ("barrier",) if self._rules.rails_tell_the_node else ()
            todo += () if self._rules.told_once else ("meet",)
            yield self._with(
                after, rank, self._after(replace(own, waits=False, error=min(failed)), todo)
            )

    def _pass_on(self, state: State, rank: int, own: _Rank) -> Iterator[State | str]:
        """The next step of an error's way."""
        if own.todo[0] == "barrier":
            yield from self._barrier(state, rank, own, own)
        else:
            yield from self._meet(state, rank, own, own, (_FAILED, own.error))

    def _after(self, own: _Rank, todo: tuple[str, ...]) -> _Rank:
        """What follows on a step of an error's way: the next one, or the error is raised and the call is left."""
        if todo:
            return replace(own, todo=todo)
        call = self._program[min(own.position, len(self._program) - 1)][1]
        raised = (*own.raised, (call, own.error))
        return replace(own, todo=(), error=_NOBODY, raised=raised, position=self._ends[call])

    def _receive(
        self, state: State, rank: int, done: _Rank, position: int
    ) -> Iterator[State | str]:
        queues = list(state[1])
        for other in self._rail_peers(rank):
            queue = self._queue(other, rank, "tensor")
            if not queues[queue]:
                yield from self._miss_rail_peer(state, rank, state[0][rank], other, "tensor")
                return
            (sent,), queues[queue] = queues[queue][0], queues[queue][1:]
            if sent != position:
                yield f"rank {rank} gets at step {position} what rank {other} has sent at step {sent}"
                return
        yield self._with((state[0], tuple(queues)), rank, done)

    # -- lost ranks ---------------------------------------------------------------------------------------------------

    def _miss_peer(self, state: State, rank: int, own: _Rank, peer: int) -> Iterator[State]:
        its = state[0][peer]
        if its.status in (_ENDED, _STOPPED):
            yield self._give_up(state, rank, peer)
        elif its.status == _GAVE_UP:
            yield self._give_up(state, rank, its.named if self._rules.reports_name else peer)
        elif not self._rules.waits_for_verdict and self._is_stuck_on_rail(state, peer):
            yield self._give_up(state, rank, peer)

    def _miss_rail_peer(
        self, state: State, rank: int, own: _Rank, other: int, kind: str
    ) -> Iterator[State]:
        its, said = state[0][other], state[1][self._queue(other, rank, "header")]
        if kind == "tensor" and said and said[0][0] == _HAS_GIVEN_UP:
            yield self._give_up(state, rank, said[0][1])
        elif its.status in (_ENDED, _GAVE_UP):  # its connection has closed
            yield self._give_up(state, rank, other)
        elif its.status == _STOPPED and self._rules.rails_time_out:
            yield self._give_up(state, rank, other)
        elif not self._rules.rails_are_patient and self._is_stuck_in_node(state, other):
            yield self._give_up(state, rank, other)

    def _give_up(self, state: State, rank: int, whom: int) -> State:
        own = replace(state[0][rank], status=_GAVE_UP, named=whom, todo=())
        given_up = self._with(state, rank, own)
        if not self._rules.gives_up_on_rails:
            return given_up
        return self._say(
            given_up,
            rank,
            own,
            "header",
            (_HAS_GIVEN_UP, whom if self._rules.reports_name else rank),
        )

    def _is_stuck_on_rail(self, state: State, rank: int) -> bool:
        """Whether a rank waits for another that does not come any more."""
        own = state[0][rank]
        on_rail = (
            own.todo[:1] == ("meet",)
            if own.todo
            else self._kind_at(own) not in ("barrier", "write counts")
        )
        lost = [state[0][other].status in (_ENDED, _STOPPED) for other in self._rail_peers(rank)]
        return own.status == _RUNS and own.waits and on_rail and any(lost)

    def _is_stuck_in_node(self, state: State, rank: int) -> bool:
        """Whether a rank waits for one of its node that does not come any more."""
        own = state[0][rank]
        in_node = own.todo[:1] == ("barrier",) if own.todo else self._kind_at(own) == "barrier"
        lost = [
            state[0][peer].status in (_ENDED, _STOPPED)
            and len(state[0][peer].faults) < len(own.faults)
            for peer in self._node(rank)
        ]
        return own.status == _RUNS and own.waits and in_node and any(lost)

    def _kind_at(self, own: _Rank) -> str:
        return self._program[own.position][0] if own.position < len(self._program) else "barrier"

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
        stuck = [rank for rank, own in enumerate(ranks) if own.status == _RUNS]
        if stuck:
            where = [
                f"rank {rank} at {ranks[rank].todo or self._kind_at(ranks[rank])}" for rank in stuck
            ]
            return f"deadlock: {', '.join(where)}"
        named = {own.named for own in ranks if own.status == _GAVE_UP}
        if named - {*lost}:
            return f"rank {min(named - {*lost})} is named, which was not lost"
        if lost != (None, None):
            return None
        errors = [[whose for _, whose in own.raised] for own in ranks if own.status == _FINISHED]
        of_calls = [
            {rank for rank, of_call, _ in self._scenario.fails if of_call == call}
            for call in sorted({call for _, call, _ in self._scenario.fails})
        ]
        for each in errors:
            if len(each) != len(of_calls) or any(
                rank not in of_call for rank, of_call in zip(each, of_calls, strict=True)
            ):
                return f"ranks raise the errors of ranks {errors}"
        calls = [[call for call, _ in own.raised] for own in ranks if own.status == _FINISHED]
        for together in zip(*calls, strict=True):
            if len({*together}) > 1:
                return f"an error is raised in calls {together}"
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
