"""Run by test_interpreted.py in a process with TRITON_INTERPRET=1: Triton kernels against the twins. The interpreter
has no inline assembly, so the barrier's four helpers that contain it are replaced: a wait looks once (everything has
arrived by then, or never will), the fence and the clock do nothing."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import get_args

import torch
import triton
import triton.language as tl
from router_choices import (
    RULES,
    SIZES,
    choices,
    differing,
    fits,
    hard_logits,
    losses,
    wrong_extremes,
)
from simulated_ranks import CASES, differences, empty_arenas, peers_of_arenas, run_case

from symmoe.kernels import control, twin
from symmoe.kernels.control import ControlLayout, Peers, PlanIntegers, plan_layout
from symmoe.kernels.routing_rule import Score
from symmoe.kernels.triton import plan, replicas, route, sync, tokens


@triton.jit
def look_once(address, value, deadline):
    return tl.load(address.to(tl.pointer_type(tl.int64)))


@triton.jit
def no_fence():
    pass


@triton.jit
def no_clock():
    return 0


gpu = SimpleNamespace(
    **vars(plan) | vars(replicas) | vars(tokens)
)  # symmoe.kernels.gpu, without the GEMMs
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


def make_arenas(num_ranks: int, rank: int, epoch: int, aborted=0, faulted=0, rail_fault=0) -> Peers:
    """Zeros, but for the counters of `rank`."""
    peers = peers_of_arenas(empty_arenas(num_ranks))[rank]
    counters = peers.counters(rank)
    counters[control.BARRIER_EPOCH], counters[control.ABORTED], counters[control.FAULTED] = (
        epoch,
        aborted,
        faulted,
    )
    counters[control.RAIL_FAULT] = rail_fault
    return peers


def run_barrier(
    barrier,
    epoch,
    sent,
    fault=False,
    aborted=0,
    faulted=0,
    rail_fault=0,
    pending=0,
    rank=1,
    timeout_ns=10**6,
):
    """Bytes that rank `rank`'s barrier leaves: all arenas, what it received, the status record, what it sets to NaN."""
    num_ranks = len(sent)
    peers = make_arenas(num_ranks, rank, epoch - 1, aborted, faulted, rail_fault)
    views, mail = peers.views, peers.mailbox(rank)
    for peer, state in enumerate(sent):
        if state is not None:
            behind = state if isinstance(state, int) else 0
            word = 2 * (epoch + behind) + int(state in ("fault", "fault, then abort"))
            if "abort" in str(state):  # rank 5 has; "abort": before this one came
                word = (
                    max(word - 4 * (state == "abort"), 0)
                    + control.ABORT
                    + (5 << control.ABORT_RANK_SHIFT)
                )
            call = CALL + 2**30 if state == "call" else CALL
            words = 100 + peer, 2**40 + peer, -peer, 2**41
            mail[epoch & 1, peer, : control.MAIL_CALL + 1] = torch.tensor([word, *words, call])
    received = torch.full((num_ranks, control.NUM_PUBLISHED), -7, dtype=torch.int64)
    status = torch.zeros(control.STATUS_WORDS, dtype=torch.int64)
    status[control.STATUS_KIND] = pending
    nan_on_failure = torch.ones(
        3, 2 * 520, dtype=torch.bfloat16
    )  # one turn of the kernel's loop sets 512 words
    bounds = {"timeout_ns": timeout_ns, "nan_on_failure": nan_on_failure[1:2]}
    barrier(peers, (2**41, 0, 5, 2**40), received, status, call=CALL, fault=fault, **bounds)
    results = {
        "received": received,
        "status": status,
        "nan_on_failure": nan_on_failure.view(torch.int16),
    }
    return {**results, **{f"arena {i}": view for i, view in enumerate(views)}}


# What stands in the slot of rank 2 when rank 1 waits for its signal: an epoch relative to the last barrier's.
SIGNALS = {
    "there": {"seen": 0},
    "of the last trip": {"seen": -2},
    "later than asked for": {"seen": 1},
    "aborted before": {"seen": 0, "aborted": 1},
    "faulted before": {"seen": 0, "faulted": 1},
    "missing, a record pending": {"seen": -1, "pending": control.STATUS_PLAN},
    "one gave up": {"seen": control.ABORT - 2},
    "one gave up after it sent": {"seen": control.ABORT + (3 << control.ABORT_RANK_SHIFT)},
}


def run_signals(module, epoch, seen, aborted=0, faulted=0, pending=0, timeout_ns=10**6):
    """Bytes that rank 1 leaves: it signals ranks 0 and 1, then waits for rank 2."""
    peers = make_arenas(3, 1, epoch, aborted, faulted)
    peers.signals(1)[2, 0] = epoch + seen
    arrived = torch.full((1,), -7)
    status = torch.zeros(control.STATUS_WORDS, dtype=torch.int64)
    status[control.STATUS_KIND] = pending
    for rank in (0, 1):
        module.send_signal(peers, rank)
    nan_on_failure = torch.ones(3, 8)
    bounds = {"timeout_ns": timeout_ns, "nan_on_failure": nan_on_failure[1:2]}
    module.wait_for_signal(peers, 2, arrived, status, phase=3, **bounds)
    results = {
        "arrived": arrived,
        "status": status,
        "nan_on_failure": nan_on_failure.view(torch.int32),
    }
    return {**results, **{f"arena {i}": view for i, view in enumerate(peers.views)}}


def parts(module, ranks: range, rank: int, num_ranks: int, num_local: int) -> torch.Tensor:
    """What lay_out says of experts with none, few and many rows of a source."""
    generator, num_experts = (
        torch.Generator().manual_seed(100 * num_ranks + rank),
        num_ranks * num_local,
    )
    most = torch.tensor([0, 3, 130, 700])[
        torch.randint(0, 4, (num_ranks, num_experts), generator=generator)
    ]
    counts = (torch.rand((num_ranks, num_experts), generator=generator) * (most + 1)).int()
    peers = make_arenas(num_ranks, rank, 6)
    table = peers.region(
        rank, peers.layout.count_table, (num_ranks, peers.layout.row_words), torch.int32
    ).fill_(-1)
    row = torch.cat([counts, counts.view(num_ranks, num_ranks, -1).sum(2)], 1)
    table[:, control.HEADER_WORDS : control.HEADER_WORDS + row.shape[1]] = row
    numel, places = plan_layout(0, 1, num_experts, num_ranks)
    out = PlanIntegers(torch.full((numel,), -7, dtype=torch.int32), places)
    received, status = (
        torch.zeros(shape, dtype=torch.int64)
        for shape in ((num_ranks, control.NUM_PUBLISHED), control.STATUS_WORDS)
    )
    module.lay_out(
        peers, received, status, out, capacity=-1, overflow=control.OVERFLOW_RAISE, ranks=ranks
    )
    assert (
        int(out.report[control.SUM_NUM_ROWS])
        == counts.view(num_ranks, num_ranks, -1).sum((0, 2))[rank]
    )
    return out.source_to_rows


def plans_of_nodes(module, overflow: int) -> dict[str, torch.Tensor]:
    """What plan kernels leave of four ranks on two nodes, each with the count table of a group of four: send_counts
    writes the rows of its own node, those of the other are copied. Rails have no room for all: it is dropped, an
    error, or planned again."""
    num_ranks, num_experts, num_tokens, top_k, per_node, epoch = 4, 8, 40, 3, 2, 6
    layout = ControlLayout(per_node, num_ranks)
    nodes = [
        [torch.zeros(layout.num_bytes, dtype=torch.uint8) for _ in range(per_node)]
        for _ in range(2)
    ]
    ranks = []
    for rank in range(num_ranks):
        views = tuple(nodes[rank // per_node][peer % per_node] for peer in range(num_ranks))
        bases = torch.tensor([view.data_ptr() for view in views], dtype=torch.int64)
        ranks.append(Peers(rank=rank, num_ranks=num_ranks, bases=bases, views=views, layout=layout))
        ranks[rank].counters(rank)[control.BARRIER_EPOCH] = epoch - 1
    found = {}
    for peers in ranks:
        generator = torch.Generator().manual_seed(peers.rank)
        topk_idx = torch.randint(-1, num_experts, (num_tokens, top_k), generator=generator)
        counts = torch.zeros((2, num_experts + num_ranks + 2), dtype=torch.int32)
        module.count_slots(topk_idx, counts, num_experts=num_experts, num_ranks=num_ranks)
        words = {
            control.HEAD_RAIL_DROPPED: peers.rank,
            control.HEAD_CAPACITY: 1000,
            control.HEAD_PACKED_CAPACITY: -1,
        }
        header = tuple(words.get(word, 0) for word in range(control.HEADER_WORDS))
        module.send_counts(counts, topk_idx, header, peers, num_experts=num_experts)
    for peers in ranks:
        peers.counters(peers.rank)[control.BARRIER_EPOCH] = epoch
        tables = [each.count_table(each.rank, epoch) for each in ranks]
        other = 2 * (1 - peers.rank // per_node)
        tables[peers.rank][other : other + per_node] = tables[other][other : other + per_node]
        found[f"table of rank {peers.rank}"] = tables[peers.rank].clone()
    for peers in ranks:
        numel, places = plan_layout(num_tokens, top_k, num_experts, num_ranks)
        out = PlanIntegers(torch.full((numel,), -7, dtype=torch.int32), places)
        received = torch.zeros((num_ranks, control.NUM_PUBLISHED), dtype=torch.int64)
        node = range(peers.rank // per_node * per_node, (peers.rank // per_node + 1) * per_node)
        options = {"capacity": 1000, "overflow": overflow, "ranks": node}
        status = torch.zeros(control.STATUS_WORDS, dtype=torch.int64)
        module.lay_out(peers, received, status, out, **options)
        found |= {f"{name} of rank {peers.rank}": getattr(out, name) for name in places}
    return found


def compared(run, ours, theirs, *args, **options) -> list[str]:
    """Names of what two modules leave that differs in a byte."""
    return differences(run(ours, *args, **options), run(theirs, *args, **options))


def same_choices(logits: torch.Tensor, top_k: int, rule, *way) -> object:
    return differing(*(choices(module, logits, top_k, rule, *way) for module in (route, twin)))


def same_losses(*case) -> object:
    return differing(losses(route, *case), losses(twin, *case))


def wrong_parts(num_ranks: int, num_local: int, per_node: int) -> list[tuple]:
    nodes = [range(first, first + per_node) for first in range(0, num_ranks, per_node)]
    cases = [(node, rank, num_ranks, num_local) for node in nodes for rank in node]
    return [case for case in cases if not torch.equal(parts(plan, *case), parts(twin, *case))]


def wrong_plans(overflow: int, least_rows: int, error: int) -> list[str]:
    expected = plans_of_nodes(twin, overflow)
    reports = [expected[f"report of rank {rank}"] for rank in range(4)]
    assert all(int(report[control.SUM_NUM_ROWS]) >= least_rows for report in reports)
    assert all(int(report[control.SUM_ERROR]) == error for report in reports)
    return differences(plans_of_nodes(plan, overflow), expected)


def is_posted_otherwise(generation: int) -> bool:
    report = torch.tensor([-1, 2**31 - 1, -(2**31), 7, 0, *range(11)], dtype=torch.int32)
    posted = torch.zeros(2, control.REPORT_SLOTS, control.SUMMARY_WORDS, dtype=torch.int64)
    for module, words in zip((plan, twin), posted, strict=True):
        module.post_report(report, words, plan=generation)
    return not torch.equal(*posted) or not posted[0].any()


def wrong_trips(case) -> list[str]:
    """With sizes of loops as they are, and with small ones."""
    expected, wrong = run_case(twin, case), []
    for sizes in (DEFAULT_SIZES, SMALL_SIZES):
        for module, values in sizes.items():
            vars(module).update(values)
        for cached in (tokens._cut, plan.plan_constants, replicas._constants):
            cached.cache_clear()
        wrong += differences(run_case(gpu, case), expected)
    return wrong


def checks() -> Iterator[tuple[str, Callable[[], object]]]:
    """Names, and what checks them."""
    sync.wait_for_words, sync.system_fence, sync.now_ns = look_once, no_fence, no_clock
    for (name, barrier), epoch in itertools.product(BARRIERS.items(), (6, 7)):
        check = partial(compared, run_barrier, sync.barrier, twin.barrier, epoch, **barrier)
        yield f"barrier, {name}, epoch {epoch}", check
    for name, signals in SIGNALS.items():
        check = partial(compared, run_signals, sync, twin, 6, **signals)
        yield f"send_signal, wait_for_signal, {name}", check
    for case in ((1, 3, 1), (2, 5, 2), (4, 33, 2), (6, 3, 2), (3, 5, 1), (8, 16, 8)):
        yield f"lay_out, ranks, experts, ranks of a node {case}", partial(wrong_parts, *case)
    for case in (
        (control.OVERFLOW_DROP, 21, control.PLAN_OK),
        (control.OVERFLOW_RAISE, 0, control.PLAN_RAIL_OVERFLOW),
        (control.OVERFLOW_REPEAT, 0, control.PLAN_OVER_BUDGET),
    ):
        yield f"send_counts, lay_out, nodes, overflow {case[0]}", partial(wrong_plans, *case)
    for generation in (1, 8, 2**31 + 5):
        yield f"post_report {generation}", partial(is_posted_otherwise, generation)
    for (num_tokens, num_experts, top_k), rule in itertools.product(SIZES, RULES):
        if not fits(rule, num_experts, top_k):
            continue
        logits = hard_logits(num_tokens, num_experts)
        for way in ((False, False), (True, False), (False, True)):
            name = f"choose_experts, {top_k} of {num_experts}, {rule}, (biased, given) {way}"
            yield name, partial(same_choices, logits, top_k, rule, *way)
    yield "choose_experts, extreme logits", partial(wrong_extremes, route)
    for case in itertools.product((0, 1, 300), (20, 32), get_args(Score), (False, True)):
        yield f"router_losses, {case}", partial(same_losses, *case)
    for name, case in CASES.items():
        yield f"{TRIP_KERNELS}, {name}", partial(wrong_trips, case)
