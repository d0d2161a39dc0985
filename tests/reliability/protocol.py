"""A model of the barrier, epoch and signal protocol, a search through all its interleavings, and walks through some.
Written from docs/design/ (trips.md, faults.md, plan.md), not from the code. Ranks run programs of small
steps. A plain store waits in its rank's store buffer and becomes visible at any later time, in any order (as on GPUs;
x86-64 would keep it); a flag is a release: it is stored once the buffer is empty. Loads take place where they stand.
Every value carries the number of the trip, plan or epoch that it belongs to, so a read knows what it should see:
something older is a stale read, something newer was overwritten before it was read.

A rank's own slots and rows play no part: no other rank is needed to get them right."""

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations

# The rules of docs/design/, and what a mutant that breaks one is called.
RULES = {
    "fenced_flags": "flags without a fence",  # a flag or signal is stored after all stores before it
    "fenced_signals": "signals without a fence",
    "words_before_flag": "words after the flag",  # of a barrier
    "counts_epochs": "epoch stays",  # a barrier adds one to it
    "mailbox_halves": "one half of the mailbox",  # two halves in turn, by the parity of the epoch
    "table_halves": "one half of the count table",
    "waits_for_all": "no wait for the last rank",
    "waits_for_this_epoch": "wait for an older epoch",
    "ready_before_push": "no barrier before rows are sent",  # barriers of a dispatch
    "arrived_after_push": "no barrier after rows are sent",
    "ready_before_sums": "no barrier before sums are sent",  # of a combine, whose sums are pushed
    "done_after_sums": "no barrier after sums are sent",
    "ready_before_pull": "no barrier before rows are pulled",  # of a combine with order "slot", whose rows are pulled
    "done_after_pull": "no barrier after rows are pulled",
    "plan_barrier": "no barrier of the plan",  # between the counts and their use
    "waits_for_signals": "no wait for signals",  # before reading what came with them
    "signal_is_epoch": "signal carries no epoch",  # that of the ready barrier, not just "something came"
    "fault_stops_payload": "fault ignored",  # after a barrier in which a rank has failed, nobody moves anything
    "failed_barriers_do_not_count": "failed barriers count",  # those still on their way then count no epochs
    "times_out": "wait without end",  # waits are bounded
    "abort_is_final": "abort is not final",  # a rank that has timed out reads nothing any more
    "tells": "nobody is told",  # a rank that gives up says so in all slots and signals of all ranks
    "report_names": "report without a name",  # what it says names the rank that it has waited for in vain
    "timeout_counts_nothing": "what came counts after a timeout",  # what had come does not count any more then
    "abort_keeps": "nothing counts after an abort",  # after an error of its own, what had come counts
}


class Protocol:
    """All rules but those that a mutant breaks. Each is an attribute."""

    def __init__(self, *broken: str) -> None:
        self.__dict__ |= {rule: rule not in broken for rule in RULES}


@dataclass(frozen=True)
class Scenario:
    """What the ranks do."""

    name: str
    calls: tuple[
        str, ...
    ]  # one after the other: "plan", "dispatch", "combine", "slot combine", "overlapped dispatch"
    num_ranks: int = 3
    fails: tuple[int, int] | None = None  # (rank, call): whose arguments are wrong in which call
    dies: tuple[int, ...] = ()  # the ranks that may die, each at any moment
    late: int | None = None  # the rank that others may give up at any moment, although it comes
    raises: int | None = (
        None  # the rank that may give up between two calls, because of an error of its own
    )


@dataclass(frozen=True)
class Verdict:
    """What the search has found."""

    num_states: int  # that have been reached; by a search, all that can be if nothing is wrong
    violation: str | None  # the first thing that is wrong


# A step: (kind, peer, number). Queued stores and the start of a barrier take no time of their own: nobody sees them.
_RUNS, _FINISHED, _GAVE_UP, _DEAD = range(4)
_TELLS = 4  # and how many ranks know already
_ABORT = 1 << 20  # times (who gives up + 1), added to what is kept of a flag or signal


# kinds of memory cells, each [owner][writer]; halves are neighbours
_FLAG, _WORDS, _TABLE, _SIGNAL, _PAYLOAD = 0, 2, 4, 6, 7


class Model:
    """One scenario under one protocol."""

    def __init__(self, scenario: Scenario, protocol: Protocol) -> None:
        self._scenario, self._protocol = scenario, protocol
        self._num_ranks = scenario.num_ranks
        self._programs: list[list[tuple]] = []
        self._call_starts: list[list[int]] = []
        for rank in range(self._num_ranks):
            program, starts = [], []
            for number, call in enumerate(scenario.calls):
                starts.append(len(program))
                program += self._steps_of(rank, number, call)
            self._programs.append(program)
            self._call_starts.append([*starts, len(program)])
        flags = [
            [i for i, step in enumerate(program) if step[0] == "flag"] for program in self._programs
        ]
        # Between two calls: before the first flag of one that is not the first.
        self._between = [
            {
                min(i for i in places if i >= start)
                for start in starts[1:-1]
                if any(i >= start for i in places)
            }
            for places, starts in zip(flags, self._call_starts, strict=True)
        ]

    def search(self, most_states: int = 3_000_000) -> Verdict:
        """Breadth first through all states. Followers that are text, and wrong ends, are problems."""
        start = self._start()
        seen, queue = {start}, deque([start])
        while queue:
            state = queue.popleft()
            followers = list(self._followers(state))
            for follower in followers:
                if isinstance(follower, str):
                    return Verdict(len(seen), follower)
                if follower not in seen:
                    seen.add(follower)
                    queue.append(follower)
            if not followers and (problem := self._wrong_end(state)):
                return Verdict(len(seen), problem)
            if len(seen) > most_states:
                raise AssertionError(f"{self._scenario.name}: more than {most_states} states")
        return Verdict(len(seen), None)

    # -- programs -----------------------------------------------------------------------------------------------------

    def _peers(self, rank: int) -> list[int]:
        return [(rank + step) % self._num_ranks for step in range(1, self._num_ranks)]

    def _steps_of(self, rank: int, number: int, call: str) -> list[tuple]:
        """A call's steps; `number` + 1 is what its stores carry."""
        rules, tag, peers = self._protocol, number + 1, self._peers(rank)

        def barrier(present: bool = True) -> list[tuple]:
            return self._barrier(rank, number) if present else []

        if call == "plan":
            send = [("store", (_TABLE, peer, rank), tag) for peer in peers]
            return [
                *send,
                *barrier(rules.plan_barrier),
                *[("read table", peer, tag) for peer in peers],
            ]
        if call == "slot combine":
            write = [("store", (_PAYLOAD, rank, rank), tag)]
            pull = [("pull", peer, tag) for peer in peers]
            return [
                *write,
                *barrier(rules.ready_before_pull),
                *pull,
                *barrier(rules.done_after_pull),
            ]
        read = [("read", peer, tag) for peer in reversed(peers)]
        push = [("store", (_PAYLOAD, peer, rank), tag) for peer in peers]
        if call == "dispatch":
            return [
                *barrier(rules.ready_before_push),
                *push,
                *barrier(rules.arrived_after_push),
                *read,
            ]
        if call == "combine":  # into memory that the last dispatch or combine may have had
            return [
                *barrier(rules.ready_before_sums),
                *push,
                *barrier(rules.done_after_sums),
                *read,
            ]
        steps = barrier(rules.ready_before_push)
        for peer in peers:
            steps += [("store", (_PAYLOAD, peer, rank), tag), ("signal", peer, tag)]
        for step in read:
            steps += [("wait for signal", step[1], tag)] * rules.waits_for_signals + [step]
        return steps

    def _barrier(self, rank: int, number: int) -> list[tuple]:
        peers = [peer for peer in range(self._num_ranks) if peer != rank]
        words = [("store words", peer, number) for peer in peers]
        flags = [("flag", peer, number) for peer in peers]
        sends = [*words, *flags] if self._protocol.words_before_flag else [*flags, *words]
        waits = [
            ("wait", peer, number)
            for peer in (peers if self._protocol.waits_for_all else peers[:-1])
        ]
        return [
            ("begin", None, number),
            *sends,
            *waits,
            *[("read words", peer, number) for peer in peers],
        ]

    def _at(self, kind: int, owner: int, writer: int) -> int:
        """The number of a memory cell, which has one writer."""
        return (kind * self._num_ranks + owner) * self._num_ranks + writer

    # -- states -------------------------------------------------------------------------------------------------------
    # A state: (per rank (position, epoch, has seen a fault, store buffer, status, whom it names), memory)

    def _start(self) -> tuple:
        ranks = []
        for rank in range(self._num_ranks):
            ranks.append(self._settled(rank, (0, 0, False, frozenset(), _RUNS, -1)))
        return tuple(ranks), (0,) * (8 * self._num_ranks**2)

    def _settled(self, rank: int, state: tuple) -> tuple:
        """After the steps that nobody sees."""
        position, epoch, failed, buffer, status, named = state
        program = self._programs[rank]
        while status == _RUNS:
            if position == len(program):
                status = _FINISHED
                break
            kind, peer, number = program[position]
            if kind == "begin":
                if failed and self._protocol.failed_barriers_do_not_count:
                    position = self._call_starts[rank][
                        number + 1
                    ]  # it returns at once, and so does the call
                    failed = False
                    continue
                epoch += self._protocol.counts_epochs
            elif kind == "store words":
                half = epoch & 1 if self._protocol.mailbox_halves else 0
                buffer = buffer | {
                    (self._at(_WORDS + half, peer, rank), self._words(epoch, number))
                }
            elif kind == "store":
                what, owner, writer = peer
                if failed and what == _PAYLOAD and self._protocol.fault_stops_payload:
                    position += 1
                    continue
                half = 0
                if what == _TABLE and self._protocol.table_halves:
                    half = (epoch + 1) & 1
                buffer = buffer | {(self._at(what + half, owner, writer), number)}
            else:
                break
            position += 1
        return position, epoch, failed, buffer, status, named

    @staticmethod
    def _words(epoch: int, number: int) -> int:
        return 100 * epoch + number

    def _next(self, state: tuple, rank: int) -> Iterator[tuple | str]:
        """States that can follow when this rank does something, or what has gone wrong, as text."""
        ranks, memory = state
        own = ranks[rank]
        position, epoch, failed, buffer, status, _ = own
        for cell, value in buffer:
            if any(c == cell and v < value for c, v in buffer):
                continue  # stores of one rank to one place keep their order
            changed = (position, epoch, failed, buffer - {(cell, value)}, status, own[5])
            yield self._with(ranks, rank, changed), self._stored(memory, cell, value)
        if status >= _TELLS:
            yield self._told(ranks, memory, rank)
        if status != _RUNS:
            return
        if rank == self._scenario.raises and position in self._between[rank]:
            yield self._giving_up(ranks, rank, -1), memory
        if rank in self._scenario.dies:
            yield self._with(ranks, rank, (*own[:4], _DEAD, -1)), memory
        yield from self._step(ranks, memory, rank)

    def _step(self, ranks: tuple, memory: tuple, rank: int) -> Iterator[tuple | str]:
        position, epoch, failed, buffer, status, named = ranks[rank]
        kind, peer, number = self._programs[rank][position]
        rules, at = self._protocol, self._at
        done = (position + 1, epoch, failed, buffer, status, named)
        half = epoch & 1 if rules.mailbox_halves else 0

        def moved(state: tuple = done, new_memory: tuple = memory) -> tuple:
            return self._with(ranks, rank, self._settled(rank, state)), new_memory

        if kind in ("flag", "signal"):
            if buffer and (rules.fenced_flags if kind == "flag" else rules.fenced_signals):
                return
            if kind == "signal":
                value = epoch if rules.signal_is_epoch else 1
                yield moved(done, self._stored(memory, at(_SIGNAL, peer, rank), value))
                return
            fault = self._scenario.fails == (rank, number) and not failed
            yield moved(done, self._stored(memory, at(_FLAG + half, peer, rank), 2 * epoch + fault))
        elif kind in ("wait", "wait for signal"):
            cell = at(_FLAG + half, rank, peer) if kind == "wait" else at(_SIGNAL, rank, peer)
            who, seen = divmod(memory[cell], _ABORT)
            who -= 1
            seen = seen >> 1 if kind == "wait" else seen
            if seen >= (epoch if rules.signal_is_epoch or kind == "wait" else 1) - (
                not rules.waits_for_this_epoch
            ):
                if who >= 0 and ranks[who][5] >= 0:
                    yield f"rank {rank} goes on in epoch {epoch}, which rank {who} has given up"
                    return
                yield moved()
            elif who >= 0:
                if (
                    who == peer and ranks[who][5] < 0 and ranks[who][1] > epoch
                ):  # its next flag is of ranks[who][1]
                    yield f"rank {who} had come in epoch {epoch} when it gave up, and does not count"
                    return
                yield self._learned(ranks, rank, who), memory
            elif rules.times_out and self._may_miss(ranks, peer):
                if not rules.abort_is_final:
                    yield moved()
                    return
                told = (
                    [memory[at(_FLAG + half, rank, w)] for w in range(self._num_ranks)]
                    if kind == "wait"
                    else []
                )
                told = [
                    value // _ABORT - 1
                    for value in told
                    if value >= _ABORT and value % _ABORT >> 1 < epoch
                ]
                yield (
                    (
                        self._learned(ranks, rank, told[0])
                        if told
                        else self._giving_up(ranks, rank, peer)
                    ),
                    memory,
                )
        elif kind == "read words":
            value, want = memory[at(_WORDS + half, rank, peer)], self._words(epoch, number)
            if value != want:
                yield self._wrong_read(f"words of rank {peer} in epoch {epoch}", value, want)
                return
            is_last = self._programs[rank][position + 1 : position + 2] == [] or (
                self._programs[rank][position + 1][0] != "read words"
            )
            faults = failed or self._sees_fault(memory, rank, half, epoch, number)
            if is_last and faults and not failed:
                if not rules.failed_barriers_do_not_count and self._scenario.fails[0] != rank:
                    failed = True  # its host has launched the rest of the call: that goes on without payload
                elif rules.fault_stops_payload or self._scenario.fails[0] == rank:
                    yield moved(
                        (self._call_starts[rank][number + 1], epoch, False, buffer, status, named)
                    )
                    return
            yield moved((position + 1, epoch, failed, buffer, status, named))
        elif kind == "read table":
            which = epoch & 1 if rules.table_halves else 0
            yield self._checked(
                moved, memory[at(_TABLE + which, rank, peer)], number, f"counts of rank {peer}"
            )
        elif failed:
            yield moved()
        elif kind == "read":
            yield self._checked(
                moved, memory[at(_PAYLOAD, rank, peer)], number, f"rows or sums from rank {peer}"
            )
        elif kind == "pull":
            yield self._checked(
                moved, memory[at(_PAYLOAD, peer, peer)], number, f"rows on rank {peer}"
            )
        else:
            raise AssertionError(kind)

    def _may_miss(self, ranks: tuple, peer: int) -> bool:
        """Whether a wait for a peer may come to its bound. All who live come in time, but for the late one and those
        that have given up; of these it is known in time: a rank that tells does so long before anybody's time is up."""
        if ranks[peer][4] == _DEAD or peer == self._scenario.late:
            return True
        return ranks[peer][4] == _GAVE_UP and all(own[4] < _TELLS for own in ranks)

    def _giving_up(self, ranks: tuple, rank: int, missing: int) -> tuple:
        """A rank gives up because of another one, or (-1) of an error of its own."""
        status = _TELLS if self._protocol.tells else _GAVE_UP
        return self._with(ranks, rank, (*ranks[rank][:4], status, missing))

    def _learned(self, ranks: tuple, rank: int, who: int) -> tuple:
        """A rank has found that another one gave up, and names whom that one reports."""
        missing = ranks[who][5] if self._protocol.report_names else -1
        return self._with(
            ranks, rank, (*ranks[rank][:4], _GAVE_UP, who if missing in (-1, rank) else missing)
        )

    def _told(self, ranks: tuple, memory: tuple, rank: int) -> tuple:
        """A rank that gives up tells one more rank; itself it need not."""
        own = ranks[rank]
        target = own[4] - _TELLS
        rules, keeps = self._protocol, own[5] < 0
        keeps = rules.abort_keeps if keeps else not rules.timeout_counts_nothing
        if target != rank:
            for kind in (_FLAG, _FLAG + 1, _SIGNAL):
                for writer in range(self._num_ranks):
                    cell = self._at(kind, target, writer)
                    kept = memory[cell] % _ABORT if keeps else 0
                    memory = self._stored(memory, cell, (rank + 1) * _ABORT + kept)
        status = _GAVE_UP if target == self._num_ranks - 1 else own[4] + 1
        return self._with(ranks, rank, (*own[:4], status, own[5])), memory

    def _misnamed(self, ranks: tuple) -> str | None:
        """At the end: whoever has given up names a rank that is a reason."""
        scenario = self._scenario
        reasons = {*scenario.dies, scenario.late, scenario.raises} - {None}
        for rank, own in enumerate(ranks):
            if (
                own[4] == _GAVE_UP
                and rank not in (scenario.late, scenario.raises)
                and own[5] not in reasons - {rank}
            ):
                return (
                    f"rank {rank} names rank {own[5]}, but the reasons are ranks {sorted(reasons)}"
                )
        return None

    def _sees_fault(self, memory: tuple, rank: int, half: int, epoch: int, number: int) -> bool:
        if self._scenario.fails is None:
            return False
        if self._scenario.fails == (rank, number):
            return True
        peers = (peer for peer in range(self._num_ranks) if peer != rank)
        return any(
            memory[self._at(_FLAG + half, rank, peer)] % _ABORT == 2 * epoch + 1 for peer in peers
        )

    def _checked(self, moved, value: int, want: int, what: str) -> tuple | str:
        return moved() if value == want else self._wrong_read(what, value, want)

    @staticmethod
    def _wrong_read(what: str, value: int, want: int) -> str:
        return f"{'stale read' if value < want else 'overwritten before it was read'}: {what} are {value}, want {want}"

    @staticmethod
    def _with(ranks: tuple, rank: int, state: tuple) -> tuple:
        return (*ranks[:rank], state, *ranks[rank + 1 :])

    @staticmethod
    def _stored(memory: tuple, cell: int, value: int) -> tuple:
        return (*memory[:cell], value, *memory[cell + 1 :])

    # -- search and walks ---------------------------------------------------------------------------------------------

    def _followers(self, state: tuple) -> list[tuple | str]:
        return [follower for rank in range(self._num_ranks) for follower in self._next(state, rank)]

    def walk(self, seed: int) -> Verdict:
        """One way from the start to an end, at random, for more ranks than a search can take. Some ranks are much
        slower than others, and ranks that may die do so early in some walks and late in others."""
        generator, state, num_states = random.Random(seed), self._start(), 1
        speeds = [10 ** generator.uniform(-2, 0) for _ in range(self._num_ranks)]
        frailty = 10 ** generator.uniform(-3, 0)
        while True:
            for rank in sorted(
                range(self._num_ranks), key=lambda rank: generator.expovariate(speeds[rank])
            ):
                followers = list(self._next(state, rank))
                if followers:
                    break
            else:
                return Verdict(num_states, self._wrong_end(state))
            follower = generator.choice(followers)
            if isinstance(follower, str):
                return Verdict(num_states, follower)
            if (
                follower[0][rank][4] != _DEAD
                or state[0][rank][4] == _DEAD
                or generator.random() < frailty
            ):
                state, num_states = follower, num_states + 1

    def _wrong_end(self, state: tuple) -> str | None:
        """What is wrong with a state that none can follow."""
        if _RUNS in [own[4] for own in state[0]]:
            return f"deadlock: {self._where(state)}"
        return self._misnamed(state[0])

    def _where(self, state: tuple) -> list[str]:
        where = []
        for rank, own in enumerate(state[0]):
            at = self._programs[rank][own[0]] if own[0] < len(self._programs[rank]) else ("end",)
            status = ("runs", "finished", "gave up", "dead", "gives up")[min(own[4], _TELLS)]
            where.append(f"rank {rank} in epoch {own[1]} at {at[0]} ({status})")
        return where


def scenarios(num_ranks: int = 3) -> list[Scenario]:
    """What is searched: every rank as the one that fails, dies, is late or raises, and on three and more every two."""
    quiet = [
        Scenario("plans", ("plan",) * 3),
        Scenario("dispatches", ("dispatch", "dispatch")),
        Scenario("combines", ("combine", "combine")),
        Scenario("slot combines", ("slot combine", "slot combine")),
        Scenario("step", ("plan", "dispatch", "combine")),
        Scenario("overlapped", ("overlapped dispatch",) * 3),
        Scenario("overlapped step", ("overlapped dispatch", "combine", "overlapped dispatch")),
    ]
    overlapped = ("overlapped dispatch", "overlapped dispatch", "plan")
    step = ("plan", "dispatch")
    trips = ("dispatch", "combine", "plan")
    troubled = []
    for rank in range(num_ranks):
        who = f"rank {rank}"
        troubled += [
            Scenario(f"{who} fails call 0", trips, fails=(rank, 0)),
            Scenario(f"{who} fails call 1", trips, fails=(rank, 1)),
            Scenario(f"{who} fails a plan", ("plan", "plan", "dispatch"), fails=(rank, 1)),
            Scenario(f"{who} dies in a step", step, dies=(rank,)),
            Scenario(f"{who} dies in a combine", ("combine", "plan"), dies=(rank,)),
            Scenario(f"{who} dies while rows travel", overlapped, dies=(rank,)),
            Scenario(f"{who} is late", ("plan", "combine"), late=rank),
            Scenario(f"{who} is late with its rows", ("overlapped dispatch", "plan"), late=rank),
            Scenario(f"{who} raises", ("plan", "dispatch", "plan"), raises=rank),
        ]
    if num_ranks > 2:
        troubled += [
            Scenario(f"ranks {one} and {other} die in a step", step, dies=(one, other))
            for one, other in combinations(range(num_ranks), 2)
        ]
    return [replace(scenario, num_ranks=num_ranks) for scenario in (*quiet, *troubled)]
