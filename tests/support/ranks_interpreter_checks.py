"""Kernels between ranks in Triton's interpreter, which test_interpreted.py runs, against the twins. The interpreter has
no inline assembly, so the barrier's four helpers that contain it are replaced: a wait looks once (everything has
arrived by then, or never will), the fence and the clock do nothing."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
import triton
import triton.language as tl
from compared_launches import EPOCH, Numbers, differences, results
from launch_table import I32, I64, Arguments, Launch, later, peers_of
from simulated_ranks import CASES, case_differences
from written_arguments import ComparedCalls

from symmoe.kernels import control, gpu, twin
from symmoe.kernels.control import ControlLayout, Peers, PlanIntegers, plan_layout
from symmoe.kernels.triton import plan, replicas, sync, tokens


@triton.jit
def look_once(address, value, deadline):
    return tl.load(address.to(tl.pointer_type(tl.int64)))


@triton.jit
def no_fence():
    pass


@triton.jit
def no_clock():
    return 0


TRIP_KERNELS = (
    "count_slots send_counts lay_out assign_rows place_replicas route_to_replicas push_replicas "
    "add_from_replicas push_rows push_slots index_rows place_rows fan_out push_sums gather_values "
    "pull_rows sum_home pull_values"
)
# Every loop over parts of something takes several turns with these.
SMALL_SIZES = {
    plan: {
        "COUNT_EXPERTS": 4,
        "SEND_COLUMNS": 4,
        "SEND_BLOCKS": 1,
        "PACKED_ENTRIES": 2,
        "BLOCK_SLOTS": 16,
        "OTHER_SLOTS": 8,
    },
    replicas: {"BLOCK": 16, "NUM_PROGRAMS": 2, "OTHER_SLOTS": 8},
    tokens: {
        "SLOTS_PER_PROGRAM": 16,
        "UNROLL": 2,
        "PEERS_UNROLL": 2,
        "ROW_WARPS": 2,
        "NUM_CTAS": 5,
    },
}
DEFAULT_SIZES = {
    module: {name: vars(module)[name] for name in sizes} for module, sizes in SMALL_SIZES.items()
}

CALL = control.pack_call(phase=3, hidden=2048)
# What the peers of rank 1 have sent when it enters its barrier: their word 0 in epochs relative to its own.
BARRIERS = {
    "all there": {"sent": (0, None, 0)},
    "nobody there": {"sent": (-2, None, -2)},
    "one missing": {"sent": (0, None, -2)},
    "a fault": {"sent": (0, None, "fault")},
    "own fault": {"sent": (0, None, 0), "fault": True},
    "a fault of a rail": {"sent": (0, None, 0), "rail_fault": 1},
    "faults of a rail and of its own": {"sent": (0, None, 0), "rail_fault": 1, "fault": True},
    "two faults": {"sent": ("fault", None, "fault"), "fault": True},
    "a fault and one missing": {"sent": ("fault", None, -2)},
    "another call": {"sent": (0, None, "call")},
    "all in another call": {"sent": ("call", None, "call")},
    "a fault and another call": {"sent": ("call", None, "fault")},
    "aborted before": {"sent": (0, None, 0), "aborted": 1},
    "faulted before": {"sent": (0, None, 0), "faulted": 1},
    "a record pending": {"sent": (-2, None, 0), "pending": control.STATUS_PLAN},
    "one gave up": {"sent": (0, None, "abort")},
    "one gave up, one missing": {"sent": (-2, None, "abort")},
    "two gave up, a fault": {"sent": ("abort", None, "abort", "fault")},
    "one gave up after it came": {"sent": (0, None, "then abort")},
    "a fault of one that gave up then": {"sent": (0, None, "fault, then abort")},
    "one rank": {"sent": (None,), "rank": 0},
    "four ranks": {"sent": (0, None, 0, 0)},
}


def set_counters(
    peers: Peers, epoch: int, aborted: int = 0, faulted: int = 0, rail_fault: int = 0
) -> None:
    counters = epoch, aborted, faulted, rail_fault
    peers.counters(peers.rank)[: len(counters)] = torch.tensor(counters)


def mail_of(peer: int, state: int | str, epoch: int) -> list[int]:
    """The words that a peer has written to its slot of a mailbox. state: its epoch, relative to this one, or an
    event there."""
    behind = state if isinstance(state, int) else 0
    word = 2 * (epoch + behind) + int(state in ("fault", "fault, then abort"))
    if "abort" in str(state):  # rank 5 has; "abort": before this one came
        word = max(word - 4 * (state == "abort"), 0)
        word += control.ABORT + (5 << control.ABORT_RANK_SHIFT)
    call = CALL + 2**30 if state == "call" else CALL
    return [word, 100 + peer, 2**40 + peer, -peer, 2**41, call]


@later
def mailboxes(
    make: Arguments,
    epoch: int,
    sent: tuple[int | str | None, ...],
    rank: int = 1,
    **counters: int,
) -> Peers:
    """Arenas before a rank enters its barrier with this epoch."""
    peers = make(peers_of(len(sent), rank))
    set_counters(peers, epoch - 1, **counters)
    for peer, state in enumerate(sent):
        if state is not None:
            slot = peers.mailbox(rank)[epoch & 1, peer]
            slot[: control.MAIL_CALL + 1] = torch.tensor(mail_of(peer, state, epoch))
    return peers


@later
def signalled(make: Arguments, offset: int, **counters: int) -> Peers:
    """Arenas when rank 1 waits for rank 2."""
    peers = make(peers_of(3, 1))
    set_counters(peers, EPOCH, **counters)
    peers.signals(1)[2, 0] = EPOCH + offset
    return peers


def waiting(pending: int) -> dict[str, object]:
    """Arguments of what waits. One turn of a kernel's loop sets 512 words of a result to NaN."""
    status = torch.zeros(control.STATUS_WORDS, dtype=I64)
    status[control.STATUS_KIND] = pending
    nan_on_failure = lambda make: make("3 1040")[1:2]  # noqa: E731
    return {"status": status, "timeout_ns": 10**6, "nan_on_failure": nan_on_failure}


def barrier(
    epoch: int,
    sent: tuple[int | str | None, ...],
    *,
    fault: bool = False,
    pending: int = 0,
    **options: int,
) -> Launch:
    changes = waiting(pending) | {
        "peers": mailboxes(epoch, sent, **options),
        "words": (2**41, 0, 5, 2**40),
        "call": CALL,
        "fault": fault,
    }
    return Launch("barrier", {"T": 1, "E": len(sent), "R": len(sent)}, changes=changes)


# What stands in the slot of rank 2 when rank 1 waits for its signal: an epoch relative to the last barrier's.
SIGNALS = {
    "there": {"offset": 0},
    "of the last trip": {"offset": -2},
    "later than asked for": {"offset": 1},
    "aborted before": {"offset": 0, "aborted": 1},
    "faulted before": {"offset": 0, "faulted": 1},
    "missing, a record pending": {"offset": -1, "pending": control.STATUS_PLAN},
    "one gave up": {"offset": control.ABORT - 2},
    "one gave up after it sent": {"offset": control.ABORT + (3 << control.ABORT_RANK_SHIFT)},
}


def wait_for_signal(offset: int, pending: int = 0, **counters: int) -> list[Launch]:
    """Rank 1 signals ranks 0 and 1, then waits for rank 2."""
    peers = signalled(offset, **counters)
    changes = waiting(pending) | {"peers": peers, "rank": 2, "arrived": torch.tensor([-7])}
    return [
        Launch("send_signal", changes={"peers": peers, "rank": 0}),
        Launch("send_signal", changes={"peers": peers, "rank": 1}),
        Launch("wait_for_signal", changes=changes),
    ]


@later
def counted(make: Arguments, rank: int) -> Peers:
    """Arenas with the counts of experts that have none, few and many rows of a source."""
    num_ranks, num_experts = make.sizes["R"], make.sizes["E"]
    peers = make(peers_of(num_ranks, rank))
    generator = torch.Generator().manual_seed(100 * num_ranks + rank)
    shape = num_ranks, num_experts
    limits = torch.tensor([0, 3, 130, 700])[torch.randint(0, 4, shape, generator=generator)]
    counts = (torch.rand(shape, generator=generator) * (limits + 1)).int()
    num_tokens = counts.view(num_ranks, num_ranks, -1).sum(2)
    table = peers.count_table(rank, EPOCH).fill_(-1)
    table[:, control.HEADER_WORDS :][:, : num_experts + num_ranks] = torch.cat(
        [counts, num_tokens], 1
    )
    return peers


def parts_differ(num_ranks: int, num_local: int, per_node: int) -> list[str]:
    """Of lay_out on every rank, whose plan has rows."""
    sizes = {"T": 0, "K": 1, "E": num_ranks * num_local, "R": num_ranks}
    options = {"capacity": -1, "overflow": control.OVERFLOW_RAISE}
    names = []
    for rank in range(num_ranks):
        first = rank // per_node * per_node
        ranks = range(first, first + per_node)
        changes = {"peers": counted(rank), "ranks": ranks, **options}
        launch = Launch("lay_out", sizes, changes=changes)
        names += differences(launch)
        assert results(launch, twin.lay_out, Numbers(launch))["plan 0"].max() > 0
    return names


def plans_of_nodes(kernels: object, overflow: int) -> list[PlanIntegers]:
    """Plans of four ranks on two nodes, each with the count table of a group of four: send_counts writes the rows of
    its own node, those of the other are copied. Rails have no room for all: it is dropped, an error, or planned
    again."""
    num_experts, num_tokens, top_k = 8, 40, 3
    layout = ControlLayout(2, 4)
    arenas = [torch.zeros(layout.num_bytes, dtype=torch.uint8) for _ in range(4)]
    sizes = {"num_experts": num_experts}
    group = []
    for rank in range(4):
        views = arenas[rank - rank % 2 :][:2] * 2
        bases = torch.tensor([view.data_ptr() for view in views])
        group.append(Peers(rank, 4, bases, tuple(views), layout))
        set_counters(group[rank], EPOCH - 1)
        generator = torch.Generator().manual_seed(rank)
        topk_idx = torch.randint(-1, num_experts, (num_tokens, top_k), generator=generator)
        counts = torch.zeros((2, num_experts + 4 + 2), dtype=I32)
        kernels.count_slots(topk_idx, counts, num_ranks=4, **sizes)
        header = [0] * control.HEADER_WORDS
        header[control.HEAD_RAIL_DROPPED] = rank
        header[control.HEAD_CAPACITY] = 1000
        header[control.HEAD_PACKED_CAPACITY] = -1
        kernels.send_counts(counts, topk_idx, tuple(header), group[rank], **sizes)
    tables = [peers.count_table(peers.rank, EPOCH) for peers in group]
    for table, remote in zip(tables, (2, 2, 0, 0), strict=True):
        table[remote : remote + 2] = tables[remote][remote : remote + 2]
    plans = []
    for peers in group:
        set_counters(peers, EPOCH)
        numel, offsets = plan_layout(num_tokens, top_k, num_experts, 4)
        plans.append(PlanIntegers(torch.full((numel,), -7, dtype=I32), offsets))
        received = torch.zeros((4, control.NUM_PUBLISHED), dtype=I64)
        status = torch.zeros(control.STATUS_WORDS, dtype=I64)
        ranks = range(peers.rank - peers.rank % 2, peers.rank - peers.rank % 2 + 2)
        options = {"capacity": 1000, "overflow": overflow, "ranks": ranks}
        kernels.lay_out(peers, received, status, plans[-1], **options)
    return plans


def plans_differ(overflow: int, least_rows: int, error: int) -> list[str]:
    compared = ComparedCalls(gpu)
    for plan_of_rank in plans_of_nodes(compared, overflow):
        assert plan_of_rank.report[control.SUM_NUM_ROWS] >= least_rows
        assert plan_of_rank.report[control.SUM_ERROR] == error
    return compared.differences


def trips_differ(case: str) -> list[str]:
    """With sizes of loops as they are, and with small ones."""
    names = []
    for sizes in (DEFAULT_SIZES, SMALL_SIZES):
        for module, values in sizes.items():
            vars(module).update(values)
        for cached in (tokens._cut, plan.plan_constants, replicas._constants):
            cached.cache_clear()
        names += case_differences(gpu, CASES[case])
    return names


REPORT = torch.tensor([-1, 2**31 - 1, -(2**31), 7, 0, *range(11)], dtype=I32)
OVERFLOWS = [  # of rails: a policy, the least rows of a rank, the error
    (control.OVERFLOW_DROP, 21, control.PLAN_OK),
    (control.OVERFLOW_RAISE, 0, control.PLAN_RAIL_OVERFLOW),
    (control.OVERFLOW_REPEAT, 0, control.PLAN_OVER_BUDGET),
]
NODES = [(1, 3, 1), (2, 5, 2), (4, 33, 2), (6, 3, 2), (3, 5, 1), (8, 16, 8)]


def launches() -> Iterator[tuple[str, Launch]]:
    """Launches by what happens."""
    for (name, options), epoch in product(BARRIERS.items(), (EPOCH, EPOCH + 1)):
        yield f"{name}, epoch {epoch}", barrier(epoch, **options)
    for name, options in SIGNALS.items():
        for launch in wait_for_signal(**options):
            yield name, launch
    for generation in (1, 8, 2**31 + 5):
        changes = {"report": REPORT, "plan": generation}
        yield f"plan {generation}", Launch("post_report", changes=changes)
    for kernel in ("count_exchange", "receive_fault_flags"):
        yield "numbers", Launch(kernel)


def checks() -> Iterator[tuple[str, Callable[[], list[str]]]]:
    """Names, and what checks them."""
    sync.wait_for_words, sync.system_fence, sync.now_ns = look_once, no_fence, no_clock
    for name, launch in launches():
        yield f"{launch.kernel}, {name}", partial(differences, launch)
    for case in NODES:
        yield f"lay_out, ranks, experts, ranks of a node {case}", partial(parts_differ, *case)
    for case in OVERFLOWS:
        yield f"send_counts, lay_out, nodes, overflow {case[0]}", partial(plans_differ, *case)
    for name in CASES:
        yield f"{TRIP_KERNELS}, {name}", partial(trips_differ, name)
