"""What tests of groups that span nodes have in common, on CPUs and on GPUs."""

import contextlib
import itertools
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock, patch

import heap_calls
import pytest
import torch
from layers import layer_config
from limits import HANG_S, PROMPT_S
from worker import Findings, open_heap

from symmoe import MoEConfig, MoELayer, SymmetricHeap, combine_tokens, dispatch_tokens, make_plan
from symmoe.combine import trip as combine_trip
from symmoe.combine.nodes import FromNodes
from symmoe.dispatch import nodes as dispatch_nodes
from symmoe.dispatch import plan as dispatch_plan
from symmoe.dispatch import trip
from symmoe.dispatch.nodes import RailPlan, RailRows
from symmoe.grouped.weights import Target
from symmoe.nodes import reach
from symmoe.nodes.rail import Pairs, Started
from symmoe.nodes.reach import Endpoint
from symmoe.symm_mem import faults

NUM_TOKENS, TOP_K, NUM_EXPERTS, HIDDEN = 8, 3, 12, 8


def outcome(call: Callable[[], object]) -> tuple[str, str]:
    """Class and text of what a call raises; the text without the rank that is put before it on others."""
    name, text = heap_calls.outcome(call)
    return name, re.sub(r"^on rank \d+: ", "", text)


class Ready:
    """Inputs of this rank."""

    def __init__(self, heap: SymmetricHeap, rank: int) -> None:
        self.heap = heap
        generator = torch.Generator().manual_seed(rank)
        chosen = [
            torch.randperm(NUM_EXPERTS, generator=generator)[:TOP_K] for _ in range(NUM_TOKENS)
        ]
        self.ids = torch.stack(chosen).to(heap.device)
        self.x = torch.randn((NUM_TOKENS, HIDDEN), generator=generator).to(heap.device)

    def plan(self, **options):
        """A plan."""
        return make_plan(self.ids, num_experts=NUM_EXPERTS, heap=self.heap, **options)

    def step(self) -> torch.Tensor:
        """Forward and backward; raises if a result is wrong."""
        x = self.x.clone().requires_grad_()
        plan = self.plan()
        rows, _, handle = dispatch_tokens(x, plan)
        y = combine_tokens(rows, handle)
        y.sum().backward()
        torch.testing.assert_close(y, TOP_K * self.x)
        torch.testing.assert_close(x.grad, torch.full_like(self.x, TOP_K))
        return y


class Overlapping(Ready):
    """Its steps are those of a layer whose GEMMs run while rows travel. `is_back`: whether it has come to backward."""

    def __init__(self, heap: SymmetricHeap, rank: int) -> None:
        super().__init__(heap, rank)
        sizes = {"hidden": HIDDEN, "ffn": 8, "num_experts": NUM_EXPERTS, "top_k": TOP_K}
        self.layer = MoELayer(MoEConfig(**sizes, router=None, schedule="always-overlapped"), heap)
        self.probs = torch.full(self.ids.shape, 0.5, device=heap.device)
        self._expected: list[torch.Tensor] = []
        self.is_back = False

    def step(self) -> torch.Tensor:
        self.is_back = False
        x = self.x.clone().requires_grad_()
        y, _ = self.layer(x, topk_idx=self.ids, probs=self.probs)
        self.is_back = True
        y.sum().backward()
        self.heap.synchronize()  # what a call that has failed has computed is nothing to compare
        actual = [y.detach(), x.grad]
        self._expected = self._expected or actual
        assert all(torch.equal(a, b) for a, b in zip(actual, self._expected, strict=True))
        return y


def wrong_calls(
    rank, num_ranks, ranks_per_node: int, culprit: int, device="cpu"
) -> list[tuple[str, tuple[str, str]]]:
    """The errors of calls in which the culprit, or its node, makes a mistake; a right call follows each of them."""
    errors: list[tuple[str, tuple[str, str]]] = []
    is_culprit = rank == culprit
    on_its_node = rank // ranks_per_node == culprit // ranks_per_node
    # A rank of the next node on another rail: its peers and rail peers do not wait for those of the culprit.
    across = (culprit // ranks_per_node + 1) * ranks_per_node % num_ranks + (
        culprit + 1
    ) % ranks_per_node
    with open_heap(device, num_bytes=1 << 20, ranks_per_node=ranks_per_node) as heap:
        ready = Ready(heap, rank)
        with_room = Overlapping(heap, rank)
        with_room.step()
        x = ready.x
        plan = ready.plan()
        other_plan = ready.plan()
        rows, _, handle = dispatch_tokens(x, plan)
        other_rows, _, other_handle = dispatch_tokens(x, other_plan)
        wide = torch.cat([x, x], 1)
        short = x[1:]
        bad_ids = ready.ids.clone()
        bad_ids[0, 0] = NUM_EXPERTS if is_culprit else bad_ids[0, 0]
        float_ids = ready.ids.float() if is_culprit else ready.ids
        num_experts = NUM_EXPERTS * (2 if is_culprit else 1)
        its_plan = plan if on_its_node else other_plan
        its_handle = handle if on_its_node else other_handle
        sizes = {"hidden": HIDDEN, "ffn": 8, "num_experts": NUM_EXPERTS, "top_k": 1}
        layers = [
            MoELayer(layer_config(**sizes, stash="none" if differs else "all"), heap)
            for differs in (is_culprit, on_its_node)
        ]

        def new_plan(ids: torch.Tensor, num_experts: int = NUM_EXPERTS, **options):
            return make_plan(ids, num_experts=num_experts, heap=heap, **options)

        def capacity_if(has_capacity: bool) -> dict[str, int | None]:
            return {"capacity": 100 if has_capacity else None}

        rails = {"capacity": 100, "max_tokens": 50, "rail_capacity": 50 if on_its_node else 40}
        calls: list[tuple[str, Callable[[], object]]] = [
            # It has room, and its host does not wait for the plan: errors end that.
            (
                "ExpertIdError",
                lambda: with_room.layer(x, topk_idx=bad_ids, probs=with_room.probs),
            ),
            ("ArgumentError", lambda: new_plan(float_ids)),
            ("ExpertIdError", lambda: new_plan(bad_ids)),
            ("ArgumentError", lambda: new_plan(float_ids, capacity=100)),
            ("ExpertIdError", lambda: new_plan(bad_ids, capacity=100)),
            ("ConfigMismatch", lambda: new_plan(ready.ids, num_experts)),
            ("ConfigMismatch", lambda: layers[0](x)),
            ("ConfigMismatch", lambda: layers[1](x)),
            ("ConfigMismatch", lambda: ready.plan(**rails)),
            # With a capacity, hosts of the others read the plan.
            ("ConfigMismatch", lambda: ready.plan(**capacity_if(is_culprit))),
            ("ConfigMismatch", lambda: ready.plan(**capacity_if(not is_culprit))),
            ("ConfigMismatch", lambda: ready.plan(**capacity_if(on_its_node))),
            ("CapacityError", lambda: ready.plan(capacity=1)),
            ("CapacityError", lambda: ready.plan(capacity=100, rail_capacity=1)),
            ("ArgumentError", lambda: dispatch_tokens(short if is_culprit else x, plan)),
            (
                "ArgumentError",
                lambda: dispatch_tokens(short if rank in (culprit, across) else x, plan),
            ),
            ("ConfigMismatch", lambda: dispatch_tokens(wide if is_culprit else x, plan)),
            ("ConfigMismatch", lambda: dispatch_tokens(wide if on_its_node else x, plan)),
            ("ArgumentError", lambda: combine_tokens(rows[1:] if is_culprit else rows, handle)),
            (
                "ConfigMismatch",
                lambda: combine_tokens(rows, handle, order="slot" if on_its_node else "rank"),
            ),
            ("ConfigMismatch", lambda: dispatch_tokens(x, its_plan)),
            (
                "ConfigMismatch",
                lambda: combine_tokens(rows if on_its_node else other_rows, its_handle),
            ),
            (
                "ConfigMismatch",
                lambda: dispatch_tokens(x, plan) if on_its_node else combine_tokens(rows, handle),
            ),
            (
                "ConfigMismatch",
                lambda: ready.plan() if on_its_node else combine_tokens(rows, handle),
            ),
        ]
        for name, call in calls:
            errors.append((name, outcome(lambda call=call: (call(), heap.synchronize()))))
            ready.step()
        stashes = [text for _, (_, text) in errors if text.startswith("stash differs: rank ")]
        assert len(stashes) == len(layers)
    return errors


def middle(ranks_per_node: int) -> dict[str, tuple[object, str, int, bool]]:
    """In the middle of what code: a function, which of its calls in a step on two nodes, and whether in backward."""
    parts = ranks_per_node + 1  # of a dispatch: the ranks of this node, and the other node
    return {
        "sending": (RailPlan, "sent_rows", 0, False),
        "own rows": (trip, "Part", 0, False),
        "rows of a peer": (trip, "Part", 1, False),
        "rows of other nodes": (trip, "Part", parts - 1, False),
        "FC2 of other nodes": (combine_trip, "Part", 0, False),
        "FC2 of own rows": (combine_trip, "Part", 1, False),
        "summing": (FromNodes, "add", 0, False),
        "sending gradients": (RailPlan, "sent_rows", 2, True),  # after those of tokens and probs
        "own gradients": (trip, "Part", parts, True),
        "gradients of other nodes": (trip, "Part", 2 * parts - 1, True),
        "weight gradients": (Target, "add", 0, True),
        "summing in backward": (FromNodes, "add", 1, True),
    }


def unforeseen(rank: int, num_ranks: int, ranks_per_node: int) -> list[tuple[str, str, bool]]:
    """Class and text of exceptions on the last rank, and whether the step has come to backward. The steps that follow
    are right."""
    errors = []
    with open_heap("cpu", ranks_per_node=ranks_per_node) as heap:
        ready = Overlapping(heap, rank)
        ready.step()
        for owner, name, number, _ in middle(ranks_per_node).values():
            remaining, original = number, getattr(owner, name)

            def fail(*arguments, original: Callable = original, **options):
                nonlocal remaining
                remaining -= 1
                if remaining == -1:
                    raise RuntimeError("out of memory, say")
                return original(*arguments, **options)

            with pytest.MonkeyPatch.context() as patch:
                if rank == num_ranks - 1:
                    patch.setattr(owner, name, fail)
                    # A program would not call it.
                    patch.setattr(heap.programs, "run", lambda key, function, *_: function())
                errors.append((*outcome(ready.step), ready.is_back))
            ready.step()
    return errors


def fail_plans(rank: int, num_ranks: int, ranks_per_node: int) -> None:
    """The last rank has an exception at the end of make_plan, which all raise in that call; later steps are right."""
    kind, text, is_last = "RuntimeError", "out of memory, say", rank == num_ranks - 1
    ends = (RailRows, "complete"), (dispatch_plan, "plan_in_node"), (dispatch_nodes, "NodesPlan")
    with open_heap("cpu", ranks_per_node=ranks_per_node) as heap:
        ready = Ready(heap, rank)
        for capacity, end in itertools.product((None, 100), ends):
            ready.step()
            with pytest.MonkeyPatch.context() as patch:
                if is_last:
                    patch.setattr(*end, Mock(side_effect=RuntimeError(text)))
                    # A program would not call it.
                    patch.setattr(heap.programs, "run", lambda key, function, *_: function())
                error = outcome(
                    lambda capacity=capacity: (ready.plan(capacity=capacity), heap.synchronize())
                )
            assert error == ((kind, text) if is_last else ("SymmoeError", f"{kind}: {text}"))
        ready.step()


def check_unforeseen(by_rank: list[list[tuple[str, str, bool]]], ranks_per_node: int) -> None:
    """All ranks raise the error in the same step."""
    text, *survivors, victim = "out of memory, say", *by_rank
    assert [error[:2] for error in victim] == [("RuntimeError", text)] * len(victim)
    for errors in survivors:
        assert [error[:2] for error in errors] == [("SymmoeError", f"RuntimeError: {text}")] * len(
            victim
        )
    assert [is_back for *_, is_back in victim] == [
        is_back for *_, is_back in middle(ranks_per_node).values()
    ]


TIMEOUT_S = 4.0
BOUND_S = 1.25 * TIMEOUT_S + PROMPT_S  # the machine may be busy
LAYER_NUM_EXPERTS, LAYER_HIDDEN, LAYER_FFN, LAYER_TOP_K = 12, 16, 24, 3
MOST_TOKENS = 40


def train(
    rank, num_ranks, ranks_per_node: int | None, options: dict, dtype, device="cpu"
) -> list[torch.Tensor]:
    """The tensors of two steps of a layer: outputs, metrics, and all gradients; and the bytes that are still leased."""
    generator = torch.Generator().manual_seed(1)
    tensors = []
    with open_heap(device, ranks_per_node=ranks_per_node) as heap:
        sizes = {
            "hidden": LAYER_HIDDEN,
            "ffn": LAYER_FFN,
            "num_experts": LAYER_NUM_EXPERTS,
            "top_k": LAYER_TOP_K,
        }
        config = layer_config(**{**sizes, "aux_loss_coef": 0.01, **options})
        layer = MoELayer(config, heap, dtype=dtype)
        for name, parameter in layer.named_parameters():
            shape = (
                parameter.shape if "router" in name else (LAYER_NUM_EXPERTS, *parameter.shape[1:])
            )
            full = torch.randn(shape, generator=generator) * 0.3
            first = 0 if "router" in name else rank * parameter.shape[0]
            parameter.data.copy_(full[first : first + parameter.shape[0]])
        for step in range(2):
            tokens = torch.randn((num_ranks, MOST_TOKENS, config.hidden), generator=generator)
            num_tokens = (37, 0, 40, 5)[(rank + step) % 4]
            x = tokens[rank, :num_tokens].to(heap.device, dtype).requires_grad_()
            y, metrics = layer(x)
            (y.float().square().sum() + metrics.aux_loss).backward()
            tensors += [
                y.detach(),
                x.grad,
                metrics.aux_loss.detach(),
                metrics.expert_load,
                metrics.num_dropped,
            ]
        tensors += [torch.zeros(0) if p.grad is None else p.grad for p in layer.parameters()]
        del y, metrics
        heap.synchronize()
        tensors.append(torch.tensor(heap.leased_bytes))
        return [tensor.cpu() for tensor in tensors]


EAGERLY = {"schedule": "always-overlapped"}
EXACT: dict = {}
STATIC = {"capacity": 55, "max_tokens": MOST_TOKENS, "overflow": "drop"}
ON_RAILS = {**STATIC, "capacity": 300, "rail_capacity": MOST_TOKENS}


def drop_on_rails(rank: int, num_ranks: int, ranks_per_node: int, device: str = "cpu") -> list[str]:
    """Every token has an expert on every node, and the rails take the first ones of this rank's five."""
    findings = Findings()
    num_nodes = num_ranks // ranks_per_node
    with open_heap(device, ranks_per_node=ranks_per_node) as heap:
        on = {"device": heap.device}
        ids = (
            torch.arange(num_nodes, **on).repeat(5, 1) * ranks_per_node
        )  # E = R: the first rank of each node
        for capacity in (2, 3, 1):
            findings.where = f"rank {rank}, rail_capacity {capacity}"
            options = {
                "num_experts": num_ranks,
                "capacity": 100,
                "overflow": "drop",
                "rail_capacity": capacity,
            }
            x = torch.randn(5, 8, requires_grad=True, **on)
            plan = make_plan(ids, heap=heap, **options)
            probs = torch.ones(5, num_nodes, requires_grad=True, **on)
            rows, row_probs, handle = dispatch_tokens(x, plan, probs=probs)
            y = combine_tokens(rows * row_probs[:, None], handle)
            y.sum().backward()
            expected = torch.full((5, num_nodes), True, **on)
            expected[capacity:] = False
            expected[:, rank // ranks_per_node] = True
            findings.check(
                torch.equal(plan.slot_to_rank >= 0, expected), "other slots were dropped"
            )
            findings.equal(
                "num_dropped", plan.num_dropped, [(5 - capacity) * (num_nodes - 1) * num_ranks]
            )
            findings.close("y", y, expected.sum(1, keepdim=True) * x, rtol=1e-5, atol=1e-5)
            findings.close(
                "dx", x.grad, expected.sum(1, keepdim=True).expand_as(x), rtol=1e-5, atol=1e-5
            )
            findings.check(
                torch.equal(probs.grad != 0, expected),
                "probs have gradients where there are no slots",
            )
            # As after the replay of a graph with an odd number of barriers, which hosts do not count.
            heap.waits.flight.epoch += 1
    return findings.texts


def connections() -> int:
    """Sockets of this process."""
    return sum(
        os.readlink(path).startswith("socket:")
        for path in Path("/proc/self/fd").iterdir()
        if path.is_symlink()
    )


@contextlib.contextmanager
def refuses() -> Iterator[None]:
    """Nobody listens where this rank says that it does."""

    def listen(self: reach.Listener) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.endpoint = Endpoint("lo", "127.0.0.1", listener.getsockname()[1])

    with patch.object(reach.Listener, "__init__", listen):
        yield


def lose(
    rank, num_ranks, ranks_per_node: int, victims: tuple, fault: str, where: tuple, device="cpu"
) -> tuple:
    """The error of a survivor when ranks are lost, its time, and how long closing takes.

    fault: "kill", "stop", "stop half way"; "hang": with a host that answers; or "kill, deaf": survivors' GPUs take no
        copies before the exchange has ended.
    where: what makes steps, and the arguments of end_at or stop_half_way.
    """
    backend = "host" if device == "cpu" else "nvshmem"
    heap = SymmetricHeap(
        num_bytes=1 << 20, backend=backend, ranks_per_node=ranks_per_node, timeout_s=HANG_S / 2
    )
    kind, *point = where
    ready = kind(heap, rank)
    for _ in range(2):
        ready.step()
    heap.synchronize()
    heap.timeout_s, heap.start_timeout_s = TIMEOUT_S, 60.0
    if fault == "kill, deaf":
        has_ended, end_waits = heap.nodes.payload._ended, faults.end_waits
        patch = pytest.MonkeyPatch()
        patch.setattr(
            faults,
            "end_waits",
            lambda *args, **options: has_ended.wait() and end_waits(*args, **options),
        )
    if rank in victims:
        stop_half_way(heap, *point) if fault == "stop half way" else end_at(heap, fault, *point)
    start = time.monotonic()
    try:
        for _ in range(3):
            ready.step()
            heap.synchronize()
        error_fields: tuple = ("nothing", -1, -1)
    except Exception as error:  # noqa: BLE001
        error_fields = type(error).__name__, getattr(error, "rank", -1), getattr(error, "node", -1)
    raised = time.monotonic()
    heap.close()
    return *error_fields, raised - start, time.monotonic() - raised


def check_survivors(
    survivors: dict[int, tuple], victims: tuple[int, ...], ranks_per_node: int
) -> None:
    """All survivors name a victim within the bound, and close at once."""
    assert survivors
    for name, missing, node, raised_s, closed_s in survivors.values():
        assert (name, node) == ("PeerTimeout", missing // ranks_per_node), survivors
        assert missing in victims, survivors
        assert raised_s < BOUND_S, survivors
        assert closed_s < PROMPT_S, survivors


def end_at(
    heap: SymmetricHeap, fault: str, method: str, phase: int | None = None, number: int = 1
) -> None:
    """This process ends, or stops, when it comes to that of its barriers or meetings of that phase, or to the end of
    that exchange."""
    owner: object = heap.nodes if method == "meet" or phase is None else heap
    original, remaining = getattr(owner, method), number

    def end(*arguments, **options):
        nonlocal remaining
        remaining -= phase is None or phase in arguments
        if remaining == 0 and fault == "hang":
            time.sleep(HANG_S)
        elif remaining == 0:
            os.kill(os.getpid(), signal.SIGKILL if fault.startswith("kill") else signal.SIGSTOP)
        return original(*arguments, **options)

    setattr(owner, method, end)
    heap.programs.run = lambda key, function, *_: function()  # a program would not call it


def stop_half_way(heap: SymmetricHeap, number: int) -> None:
    """This process stops when it has sent the tensors of that exchange to the last node, and to no other."""
    payload = heap.nodes.payload
    original, remaining = payload.begin, number

    def begin(sends: Pairs, receives: Pairs, *options) -> Started:
        nonlocal remaining
        remaining -= 1
        if remaining:
            return original(sends, receives, *options)
        last = heap.topology.num_nodes - 1
        original([(node, tensor) for node, tensor in sends if node == last], receives, *options)
        os.kill(os.getpid(), signal.SIGSTOP)
        return []

    payload.begin = begin


def give_up(rank: int, num_ranks: int) -> tuple[str, int, str, float]:
    """The errors of ranks when one of them has an error of its own, and how long after it."""
    heap = SymmetricHeap(num_bytes=1 << 20, backend="host", ranks_per_node=2, timeout_s=60.0)
    ready = Ready(heap, rank)
    ready.step()
    start = time.monotonic()
    try:
        with heap:
            if rank == 1:
                raise KeyError("a user's error")
            ready.step()
            heap.synchronize()
    except Exception as error:  # noqa: BLE001
        return (
            type(error).__name__,
            getattr(error, "rank", -1),
            str(error),
            time.monotonic() - start,
        )
    return "", -1, "", 0.0
