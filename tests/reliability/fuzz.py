"""Wrong calls: one argument or one rank is not as it should be, and every rank raises the documented class.

A case takes a correct call, changes one thing on some ranks (or on all, where a call cannot tell its peers), and wants
the same class on every rank, a text that names the argument, nothing left on lease, and then an exact call.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from heap_calls import round_trip

from reliability.suite import SEED_STRIDE, Numbers, Outcome, Results, Suite, on_ranks
from symmoe import Lease, MoEConfig, MoELayer, SymmetricHeap, combine_tokens, dispatch_tokens, make_plan
from symmoe.errors import SymmoeError

ARGUMENT, MISMATCH, STALE = "ArgumentError", "ConfigMismatch", "StaleLease"


@dataclass
class Call:
    """A correct call, to be changed.

    Attributes:
        random: gives the same on all ranks.
        culprits: ranks on which the call is changed.
        arguments: keyword arguments of `function`.
        error: class names, any of which is right.
        parts: what the text has to contain; `{rank}` is the first culprit.
    """

    heap: SymmetricHeap
    random: random.Random
    culprits: list[int]
    num_tokens: int
    top_k: int
    hidden: int
    num_experts: int
    function: Callable[..., Any] = make_plan
    arguments: dict[str, Any] = field(default_factory=dict)
    error: tuple[str, ...] = (ARGUMENT,)
    parts: tuple[str, ...] = ()
    leases: list[Lease] = field(default_factory=list)

    @property
    def is_culprit(self) -> bool:
        return self.heap.rank in self.culprits

    def wants(self, error: str | tuple[str, ...], *parts: str) -> None:
        self.error, self.parts = (error,) if isinstance(error, str) else error, parts

    def change(self, name: str, value: Any) -> None:
        """On the culprits."""
        if self.is_culprit:
            self.arguments[name] = value() if callable(value) else value

    def lease(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        self.leases.append(self.heap.lease(shape, dtype, name="fuzz"))
        return self.leases[-1].tensor

    def everywhere(self) -> None:
        self.culprits = list(range(self.heap.num_ranks))

    def one_rank(self) -> None:
        self.culprits = self.culprits[:1]

    def ids(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.random.randrange(1 << 30) + self.heap.rank)
        rows = [torch.randperm(self.num_experts, generator=generator)[: self.top_k] for _ in range(self.num_tokens)]
        return torch.stack(rows).to(self.heap.device)

    def new_plan(self, **options: Any):
        return make_plan(self.ids(), num_experts=self.num_experts, heap=self.heap, **options)


# -- correct calls ----------------------------------------------------------------------------------------------------


def plan_call(call: Call) -> None:
    call.function = make_plan
    call.arguments = {"topk_idx": call.ids(), "num_experts": call.num_experts, "heap": call.heap}
    if call.random.random() < 0.5:  # static capacity
        most = call.heap.num_ranks * (call.num_tokens + 3) * call.top_k
        call.arguments |= {"capacity": most, "max_tokens": call.num_tokens + 3, "hidden": call.hidden}


def dispatch_call(call: Call) -> None:
    plan = call.new_plan()
    call.function = dispatch_tokens
    x = torch.randn(call.num_tokens, call.hidden, device=call.heap.device)
    call.arguments = {"x": x, "plan": plan, "probs": torch.rand(call.num_tokens, call.top_k, device=x.device)}


def combine_call(call: Call) -> None:
    dispatch_call(call)
    plan = call.arguments["plan"]
    rows, _ = dispatch_tokens(**call.arguments)
    call.function, call.arguments = combine_tokens, {"expert_out": rows, "plan": plan, "order": "rank"}


def layer_call(call: Call) -> None:
    config = MoEConfig(hidden=call.hidden, ffn=call.hidden, num_experts=call.num_experts, top_k=call.top_k)
    layer = MoELayer(config, call.heap)
    call.function = layer
    call.arguments = {"x": torch.randn(call.num_tokens, call.hidden, device=call.heap.device)}


# -- what is wrong with them ------------------------------------------------------------------------------------------


def id_out_of_range(call: Call) -> None:
    plan_call(call)
    places = sorted(call.random.sample(range(call.num_tokens * call.top_k), call.random.randint(1, 3)))
    high = call.num_experts + call.random.randrange(1000)
    value = call.random.choice([call.num_experts, high, -2, -2 - call.random.randrange(1000), 2**31 - 1])

    def wrong() -> torch.Tensor:
        ids = call.arguments["topk_idx"].clone()
        ids.view(-1)[places] = value
        return ids.int() if call.random.random() < 0.5 else ids

    call.change("topk_idx", wrong)
    call.wants("ExpertIdError", f"topk_idx on rank {{rank}}, flat position {places[0]}: {value} ")


def ids_dtype(call: Call) -> None:
    plan_call(call)
    dtype = call.random.choice([torch.float32, torch.float64, torch.int16, torch.uint8, torch.bool, torch.bfloat16])
    call.change("topk_idx", lambda: call.arguments["topk_idx"].to(dtype))
    call.wants(ARGUMENT, "topk_idx", str(dtype))


def ids_shape(call: Call) -> None:
    plan_call(call)
    too_many = call.random.randint(33, 40)
    ids = call.arguments["topk_idx"]
    wrong = [ids.flatten(), ids[None], ids[:, :0], ids[:, :1].expand(-1, too_many), ids.tolist(), None, ids.to("meta")]
    call.change("topk_idx", wrong[call.random.randrange(len(wrong))])
    call.wants(ARGUMENT, "topk_idx")


def plan_number(call: Call) -> None:
    plan_call(call)
    static = {"capacity": 500, "max_tokens": 40}
    wrong, more = call.random.choice(
        [
            ({"num_experts": -call.random.randrange(99)}, {}),
            ({"num_experts": 1025 + call.random.randrange(9999)}, {}),
            ({"num_experts": str(call.num_experts)}, {}),
            ({"num_experts": call.num_experts + 0.5}, {}),
            ({"capacity": -call.random.randrange(99)}, static),
            ({"capacity": 2**31 + call.random.randrange(99)}, static),
            ({"capacity": "all"}, static),
            ({"capacity": 2.5}, static),
            ({"max_tokens": call.num_tokens - 1 - call.random.randrange(call.num_tokens)}, static),
            ({"max_tokens": 2**33}, static),
            ({"max_tokens": 1.5}, static),
            ({"overflow": f"word {call.random.randrange(99)}"}, static),
            ({"overflow": None}, static),
            ({"hidden": -call.random.randrange(99)}, {}),
            ({"hidden": "wide"}, {}),
            ({"dtype": call.random.choice([torch.float64, torch.int8, torch.int64, torch.complex64])}, {}),
        ]
        + [({"num_experts": call.num_experts + 1}, {})] * (call.heap.num_ranks > 1)
    )
    call.arguments |= more
    ((name, value),) = wrong.items()
    call.change(name, value)
    call.wants(ARGUMENT, f"{name} (")


def plan_disagreement(call: Call) -> None:
    call.one_rank()
    plan_call(call)
    common = {"capacity": 600, "max_tokens": 40, "overflow": "raise", "hidden": call.hidden, "dtype": torch.float32}
    call.arguments |= common
    name, value = call.random.choice(
        [
            ("capacity", 600 + 1 + call.random.randrange(99)),
            ("max_tokens", 40 + 1 + call.random.randrange(99)),
            ("overflow", "drop"),
            ("hidden", call.hidden + call.random.randint(1, 99)),
            ("dtype", call.random.choice([torch.bfloat16, torch.float16, None])),
            ("num_experts", 2 * call.num_experts),
            ("top_k", None),
        ]
    )
    if name == "top_k":
        call.change("topk_idx", lambda: call.arguments["topk_idx"].repeat(1, 2))
    else:
        call.change(name, value)
    call.wants(MISMATCH, f"{name} differs: rank 0 has ")


def overflow(call: Call) -> None:
    call.everywhere()
    plan_call(call)
    last = call.num_experts - 1
    call.arguments["topk_idx"] = torch.full_like(call.arguments["topk_idx"], last)
    needed = call.num_tokens * call.top_k * call.heap.num_ranks
    call.arguments |= {"capacity": call.random.randint(1, needed - 1), "max_tokens": call.num_tokens}
    call.wants("CapacityError", f"rank {call.heap.num_ranks - 1} is routed {needed} rows", "capacity (")


def rows_that_travel(call: Call) -> None:
    name, base = call.random.choice([("x", dispatch_call), ("expert_out", combine_call)])
    base(call)
    x = call.arguments[name]
    dtype = call.random.choice([torch.float64, torch.int32, torch.int8, torch.bool, torch.complex64])
    some = torch.zeros(call.random.randint(1, 3), x.shape[1], device=x.device)
    most = torch.zeros(call.arguments["plan"].row_capacity + 1, x.shape[1], device=x.device)
    wrong = [None, x.flatten(), x[None], torch.cat([x, most, some]), x.to(dtype), x.to("meta"), x.tolist()]
    call.change(name, wrong[call.random.randrange(len(wrong))])
    call.wants(ARGUMENT, name)


def wrong_order(call: Call) -> None:
    call.random.choice([dispatch_call, combine_call])(call)
    word = call.random.choice(["fast", "", "Rank", "slots"])
    call.change("order", word)
    call.wants(ARGUMENT, f"order ({word!r})")


def wrong_probs(call: Call) -> None:
    dispatch_call(call)
    probs = call.arguments["probs"]
    dtype = call.random.choice([torch.float64, torch.bfloat16, torch.float16, torch.int32])
    wrong = [probs.to(dtype), probs.flatten(), probs.repeat(1, 2), probs[:-1], probs.to("meta"), probs.tolist(), 1.0]
    call.change("probs", wrong[call.random.randrange(len(wrong))])
    call.wants(ARGUMENT, "probs")


def wrong_buffer(call: Call) -> None:
    """`out` of dispatch_tokens, `grad_out` of combine_tokens. All ranks bring one."""
    name, base, like = call.random.choice([("out", dispatch_call, "x"), ("grad_out", combine_call, "expert_out")])
    base(call)
    plan, given = call.arguments["plan"], call.arguments[like]
    # row_capacity is the same on all ranks, the number of rows is not.
    rows = plan.row_capacity if name == "out" else given.shape[0]
    call.arguments[name] = call.lease(plan.row_capacity, call.hidden)[:rows]
    kind = call.random.randrange(9)
    wrong: list[Callable[[], Any]] = [
        lambda: call.lease(rows + 1, call.hidden),
        lambda: call.lease(rows, call.hidden + 1),
        lambda: call.lease(rows, call.hidden, dtype=torch.bfloat16),
        lambda: call.lease(max(rows, 2), 2 * call.hidden)[:, ::2] if rows > 1 else [0.0],
        lambda: torch.empty(rows, call.hidden, device="meta"),
        lambda: torch.empty(max(rows, 1), call.hidden, device=call.heap.device),
        lambda: call.lease(rows * call.hidden + 1)[1:].view(rows, call.hidden) if rows else [0.0],
        lambda: call.lease(rows, call.hidden).requires_grad_(),
        lambda: [1.0],
    ]
    call.change(name, wrong[kind])
    call.wants(ARGUMENT, name)


def released_buffer(call: Call) -> None:
    name, base = call.random.choice([("out", dispatch_call), ("expert_out", combine_call)])
    base(call)
    rows = call.arguments["plan"].row_capacity

    def released() -> torch.Tensor:
        lease = call.heap.lease((rows, call.hidden), torch.float32, name="released")
        tensor = lease.tensor
        lease.release()
        return tensor

    if name == "out":
        call.arguments[name] = call.lease(rows, call.hidden)
    call.change(name, released)
    call.wants(STALE, name, "released")


def call_disagreement(call: Call) -> None:
    """What only the ready barrier of a trip can find."""
    call.one_rank()
    base, name, field_name = call.random.choice(
        [
            (dispatch_call, "x", "hidden"),
            (dispatch_call, "x", "dtype"),
            (dispatch_call, "probs", "probs"),
            (dispatch_call, "out", "layout"),
            (combine_call, "expert_out", "hidden"),
            (combine_call, "expert_out", "dtype"),
            (combine_call, "order", "order"),
        ]
    )
    base(call)
    half = call.random.choice([torch.bfloat16, torch.float16])
    wrong = {
        "hidden": lambda: call.arguments[name].repeat(1, 2),
        "dtype": lambda: call.arguments[name].to(half),
        "probs": None,
        "layout": lambda: call.lease(call.arguments["plan"].row_capacity, call.hidden),
        "order": "slot",
    }
    call.change(name, wrong[field_name])
    call.wants(MISMATCH, f"{field_name} differs at '")


def different_calls(call: Call) -> None:
    call.one_rank()
    usual = call.random.choice([dispatch_call, combine_call])
    usual(call)
    if call.is_culprit:
        plan = call.arguments["plan"]
        x = torch.randn(call.num_tokens, call.hidden, device=call.heap.device)
        if usual is combine_call:
            call.function, call.arguments = dispatch_tokens, {"x": x, "plan": plan}
        else:
            call.function = make_plan
            call.arguments = {"topk_idx": call.ids(), "num_experts": call.num_experts, "heap": call.heap}
    call.wants(MISMATCH, "ranks are in different calls", "rank 0 at '")


def no_plan(call: Call) -> None:
    """It has no heap to tell the peers with, so all ranks are given one."""
    call.everywhere()
    call.random.choice([dispatch_call, combine_call])(call)
    call.change("plan", call.random.choice([None, "plan", 7, []]))
    call.wants(ARGUMENT, "plan (")


def stale_plan(call: Call) -> None:
    call.everywhere()
    combine_call(call)
    call.arguments["plan"] = call.new_plan()
    call.arguments["expert_out"] = torch.zeros(call.arguments["plan"].num_rows, call.hidden, device=call.heap.device)
    call.wants("StalePlan", "dispatched nothing yet")


def another_plan(call: Call) -> None:
    """One rank goes on with an older plan of the same sizes than its peers."""
    call.one_rank()
    base = call.random.choice([dispatch_call, combine_call])
    base(call)
    older, rows = call.arguments["plan"], call.arguments.get("expert_out")
    base(call)
    if call.is_culprit:
        call.arguments["plan"] = older
        if rows is not None:
            call.arguments["expert_out"] = rows
    call.wants((MISMATCH, "StalePlan"), "plan")


def foreign_buffer(call: Call) -> None:
    """A lease of another heap, which has been closed."""
    dispatch_call(call)
    rows = call.arguments["plan"].row_capacity
    call.arguments["out"] = call.lease(rows, call.hidden)
    with SymmetricHeap(num_bytes=1 << 20, backend="host") as other:
        call.change("out", other.lease((rows, call.hidden), torch.float32).tensor)
    call.wants(STALE, "out is memory of lease 'lease'", "whose heap was closed")


def ordinary_buffer(call: Call) -> None:
    """Memory of torch's allocator, on the heap's device."""
    dispatch_call(call)
    rows = call.arguments["plan"].row_capacity
    call.arguments["out"] = call.lease(rows, call.hidden)
    call.change("out", lambda: torch.empty(rows, call.hidden, device=call.heap.device))
    call.wants(ARGUMENT, "out is not on this symmetric heap")


def closed_heap(call: Call) -> None:
    call.everywhere()
    other = SymmetricHeap(num_bytes=1 << 20, backend="host")
    base = call.random.choice([plan_call, dispatch_call, combine_call])
    heap, call.heap = call.heap, other
    base(call)
    call.heap = heap
    for _ in range(call.random.randint(1, 2)):  # twice is no error
        other.close()
    call.wants("HeapClosed", "has been closed")


def lease_twice(call: Call) -> None:
    call.everywhere()
    lease = call.heap.lease((call.random.randint(1, 9),), torch.float32, name="twice")
    lease.release()
    call.function, call.arguments = call.random.choice([lease.release, lambda: lease.tensor, lambda: lease.peer(0)]), {}
    call.wants(STALE, "lease 'twice'", "released")


def no_room(call: Call) -> None:
    call.random.choice([dispatch_call, combine_call, layer_call])(call)
    if call.is_culprit:
        while call.heap.memory.arena.largest_free_bytes:
            call.lease(call.heap.memory.arena.largest_free_bytes, dtype=torch.uint8)
    call.wants("HeapExhausted", "lease '", "high-water mark")


def wrong_tokens_of_a_layer(call: Call) -> None:
    layer_call(call)
    x = call.arguments["x"]
    wrong = [x[:, :-1], x.repeat(1, 2), x.double(), x.int(), x.to("meta"), None, x.tolist()]
    call.change("x", wrong[call.random.randrange(len(wrong))])
    call.wants(ARGUMENT, "x ")


def wrong_choice_of_a_layer(call: Call) -> None:
    layer_call(call)
    name = call.random.choice(["token_mask", "topk_idx"])
    shape = (call.num_tokens + 1, call.top_k)
    wrong = {
        "token_mask": [torch.ones(call.num_tokens), torch.ones(call.num_tokens + 1, dtype=torch.bool), [True]],
        "topk_idx": [torch.zeros(shape, dtype=torch.int64), torch.zeros(shape[0] - 1, call.top_k), [0]],
    }[name]
    index = call.random.randrange(3)
    call.change(name, wrong[index].to(call.heap.device) if isinstance(wrong[index], torch.Tensor) else wrong[index])
    call.wants(ARGUMENT, name)


def scores_that_are_not_finite(call: Call) -> None:
    """NaN or Inf in a token reaches the router's logits."""
    layer_call(call)
    places = sorted(call.random.sample(range(call.num_tokens), call.random.randint(1, 3)))
    value = call.random.choice([float("nan"), float("inf"), -float("inf")])
    column = call.random.randrange(call.hidden)

    def wrong() -> torch.Tensor:
        x = call.arguments["x"].clone()
        x[places, column] = value
        return x

    call.change("x", wrong)
    call.wants(ARGUMENT, f"the router's logits of token {places[0]} are not finite ({len(places)} such tokens)")


MUTATIONS = (
    id_out_of_range,
    ids_dtype,
    ids_shape,
    plan_number,
    plan_disagreement,
    overflow,
    rows_that_travel,
    wrong_order,
    wrong_probs,
    wrong_buffer,
    released_buffer,
    call_disagreement,
    different_calls,
    no_plan,
    stale_plan,
    another_plan,
    foreign_buffer,
    closed_heap,
    lease_twice,
    no_room,
    wrong_tokens_of_a_layer,
    wrong_choice_of_a_layer,
    ordinary_buffer,
    scores_that_are_not_finite,
)
ONLY_BETWEEN_RANKS = (plan_disagreement, call_disagreement, different_calls, another_plan)
# NVSHMEM has one heap per process; on GPUs scores that are not finite make this token's output NaN, and are no error.
ONLY_ON_CPUS = (foreign_buffer, closed_heap, scores_that_are_not_finite)


# -- on the ranks -----------------------------------------------------------------------------------------------------


def mutations_for(num_ranks: int, device: str) -> list[Callable[[Call], None]]:
    """Those that there are; case I makes number I modulo how many."""
    left_out = (() if num_ranks > 1 else ONLY_BETWEEN_RANKS) + (() if device == "cpu" else ONLY_ON_CPUS)
    return [mutation for mutation in MUTATIONS if mutation not in left_out]


def check(rank: int, num_ranks: int, numbers: Numbers, seed: int, device: str) -> Results:
    """Yields per case."""
    backend = "nvshmem" if device == "cuda" else "host"
    mutations = mutations_for(num_ranks, device)
    with SymmetricHeap(num_bytes=1 << 20, backend=backend) as heap:
        for number in numbers:
            start, mutation = time.perf_counter(), mutations[number % len(mutations)]
            problems = problems_with(heap, mutation, seed * SEED_STRIDE + number)
            if heap.leased_bytes:
                problems.append(f"{mutation.__name__} left {heap.leased_bytes} bytes on lease")
            if not round_trip(heap, number):
                problems.append(f"the call after {mutation.__name__} is not exact")
            yield 1e3 * (time.perf_counter() - start), problems, {"mutation": mutation.__name__}


def problems_with(heap: SymmetricHeap, mutation: Callable[[Call], None], number: int) -> list[str]:
    """Makes the wrong call; what is not as documented."""
    generator = random.Random(f"{number}")
    culprits = sorted(generator.sample(range(heap.num_ranks), generator.randint(1, heap.num_ranks)))
    call = Call(
        heap=heap,
        random=generator,
        culprits=culprits,
        num_tokens=generator.randint(4, 12),
        top_k=generator.randint(1, 2),
        hidden=8 * generator.randint(1, 4),
        num_experts=2 * heap.num_ranks,
    )
    mutation(call)
    shown = f"{mutation.__name__} on ranks {call.culprits}"
    try:
        call.function(**call.arguments)
        heap.synchronize()
    except SymmoeError as error:
        name, text = type(error).__name__, str(error)
    except Exception as error:  # noqa: BLE001 - another class than any of the package's is a finding
        name, text = type(error).__name__, str(error)
    else:
        name, text = "nothing", ""
    for lease in call.leases:
        lease.release()
    problems = [] if name in call.error else [f"{shown} raised {name} ({text}), want {' or '.join(call.error)}"]
    for part in call.parts:
        if part.format(rank=call.culprits[0]) not in text:
            problems.append(f"{shown}: {part!r} is not in {text!r}")
    return problems


def summarize(outcomes: list[Outcome]) -> dict[str, Any]:
    names = Counter(outcome.facts["mutation"][0] for outcome in outcomes if "mutation" in outcome.facts)
    return {"mutations": dict(sorted(names.items()))}


SUITE = Suite(partial(on_ranks, check=check, deadline_s=30.0), num_cases=500, summarize=summarize)
