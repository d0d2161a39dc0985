"""Wrong arguments: the same typed error on every rank in the same call, and the next correct call is exact."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from limits import HANG_S
from test_heap import outcome
from worker import Findings, free_bytes, open_heap

from symmoe import Lease, MoEConfig, MoELayer, Plan, SymmetricHeap, combine_tokens, dispatch_tokens, kernels, make_plan
from symmoe.errors import ArgumentError, ConfigMismatch, HeapClosed
from symmoe.grouped.mlp import GroupedMLP
from symmoe.moe.ep_step import expert_parallel_mlp
from symmoe.precision import MXFP8, NVFP4, Float8Block, Recipe

T, K, H = 6, 2, 16
NUM_BYTES = 1 << 20


@dataclass(frozen=True)
class Bad:
    """One mistake: what the culprits pass, and the error that every rank must raise.

    Attributes:
        change: from (heap, the correct keyword arguments) to the wrong ones.
        error: name of the class.
        parts: what the text must contain; `{rank}` stands for the first culprit.
        base: keyword arguments that all ranks pass on top of the usual ones.
    """

    name: str
    change: Callable[[SymmetricHeap, dict[str, Any]], dict[str, Any]]
    error: str
    parts: tuple[str, ...]
    base: tuple[tuple[str, Any], ...] = ()


def given(**values: Any) -> Callable[[SymmetricHeap, dict], dict]:
    return lambda heap, good: {**good, **values}


def changed(name: str, change: Callable[[Any], Any]) -> Callable[[SymmetricHeap, dict], dict]:
    return lambda heap, good: {**good, name: change(good[name])}


def on_heap(name: str, make: Callable[[SymmetricHeap, dict], torch.Tensor]) -> Callable[[SymmetricHeap, dict], dict]:
    return lambda heap, good: {**good, name: make(heap, good)}


# -- tensors that kernels cannot read ---------------------------------------------------------------------------------


class Wrapper(torch.Tensor):
    """A tensor whose memory another one has, as DTensor is."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        raise NotImplementedError(func)


def freed(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().clone()
    tensor.untyped_storage().resize_(0)
    return tensor


# (what, how it is made of a good tensor, what the text says of it)
UNREADABLE: tuple[tuple[str, Callable[[torch.Tensor], torch.Tensor], str], ...] = (
    ("sparse", lambda tensor: tensor.to_sparse(), "torch.sparse_coo"),
    ("compressed", lambda tensor: tensor.to_sparse_csr(), "torch.sparse_csr"),
    ("nested", lambda tensor: torch.nested.nested_tensor(list(tensor)), "a nested tensor"),
    ("jagged", lambda tensor: torch.nested.nested_tensor(list(tensor), layout=torch.jagged), "a nested tensor"),
    ("wrapper", Wrapper, "Wrapper"),
    ("freed", freed, "a tensor whose memory has been freed"),
)


def unreadable(name: str, *parts: str) -> Iterator[Bad]:
    """Mistakes in the memory of an argument [., .]."""
    for what, make, kind in UNREADABLE:
        texts = (f"{name} ({kind}) must be a strided tensor", *parts)
        yield Bad(f"{name} {what}", changed(name, make), "ArgumentError", texts)

    def stale(heap: SymmetricHeap, good: dict) -> torch.Tensor:
        lease = heap.lease(tuple(good[name].shape), good[name].dtype, name="old")
        tensor = lease.tensor.copy_(good[name])
        lease.release()
        return tensor

    yield Bad(f"{name} stale", on_heap(name, stale), "StaleLease", (f"{name} is memory of lease 'old'", "released"))


# -- make_plan --------------------------------------------------------------------------------------------------------

STATIC = (("capacity", 60), ("max_tokens", 9))


def with_id(value: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(ids: torch.Tensor) -> torch.Tensor:
        ids = ids.clone()
        ids[3, 1] = value
        ids[5, 0] = value  # the first one is named
        return ids

    return change


def plan_mistakes(num_experts: int) -> Iterator[Bad]:
    def argument(name: str, change: Callable, *parts: str, base: tuple = ()) -> Bad:
        return Bad(name, change, "ArgumentError", parts, base)

    yield from unreadable("topk_idx")
    yield argument("list", changed("topk_idx", lambda ids: ids.tolist()), "topk_idx (list)", "[T, K]")
    yield argument("flat", changed("topk_idx", lambda ids: ids.flatten()), f"topk_idx has shape [{T * K}]", "[T, K]")
    yield argument("float", changed("topk_idx", lambda ids: ids.float()), "topk_idx", "torch.float32", "torch.int64")
    yield argument("short", changed("topk_idx", lambda ids: ids.short()), "topk_idx", "torch.int16", "torch.int32")
    yield argument("meta", changed("topk_idx", lambda ids: ids.to("meta")), "topk_idx is on meta", "on cpu")
    yield argument("many", changed("topk_idx", lambda ids: ids[:1].expand(2**31, K)), "topk_idx [2147", "2**31 slots")
    yield argument("K = 0", changed("topk_idx", lambda ids: ids[:, :0]), "topk_idx has K = 0", "[1, 32]")
    yield argument("K = 33", changed("topk_idx", lambda ids: ids[:, :1].expand(-1, 33)), "K = 33", "[1, 32]")
    yield argument("no experts", given(num_experts=0), "num_experts (0)", "[1, 1024]")
    yield argument("many experts", given(num_experts=1200), "num_experts (1200)", "[1, 1024]")
    yield argument("no number of experts", given(num_experts=True), "num_experts (True)", "int, not bool")
    yield argument("words of overflow", given(overflow=np.array(["raise", "drop"])), "overflow (array", "'raise'")
    yield argument("array for dtype", given(dtype=np.arange(3)), "dtype (", "torch.bfloat16")
    yield argument("text for experts", given(num_experts="8"), "num_experts ('8')", "int")
    yield argument("overflow", given(overflow="ignore"), "overflow ('ignore')", "'raise' or 'drop'")
    yield argument("overflow list", given(overflow=["drop"]), "overflow (['drop'])", "'raise' or 'drop'")
    yield argument("dtype", given(dtype=torch.float64), "dtype (torch.float64)", "torch.bfloat16")
    yield argument("hidden", given(hidden=0), "hidden (0)", "at least 1")
    yield argument("hidden text", given(hidden="16"), "hidden ('16')", "int")
    yield argument("capacity 0", given(capacity=0), "capacity (0)", "at least 1", base=STATIC)
    yield argument("capacity -1", given(capacity=-1), "capacity (-1)", "at least 1", base=STATIC)
    yield argument("capacity 2.5", given(capacity=2.5), "capacity (2.5)", "int", base=STATIC)
    yield argument("few tokens", given(max_tokens=T - 1), f"max_tokens ({T - 1})", f"({T})", base=STATIC)
    yield argument("huge capacity", given(capacity=2**31), "capacity (2147483648)", "less than 2**31", base=STATIC)
    yield argument("max_tokens text", given(max_tokens="9"), "max_tokens ('9')", "int", base=STATIC)
    yield argument("max_tokens alone", given(max_tokens=9), "max_tokens (9)", "capacity is None")
    yield argument("drop alone", given(overflow="drop"), "overflow ('drop')", "capacity is None")
    for base in ((), STATIC):
        for value, shown in ((num_experts, num_experts), (-2, -2), (2**40, 2**31 - 1), (-(2**40), -(2**31))):
            text = f"topk_idx on rank {{rank}}, flat position {3 * K + 1}: {shown} is neither -1 nor in"
            parts = (text, f"[0, {num_experts})")
            yield Bad(f"id {value} {base}", changed("topk_idx", with_id(value)), "ExpertIdError", parts, base)


def plan_mismatches(num_experts: int) -> Iterator[tuple[Bad, str, str, str]]:
    """(mistake, field, the usual value, the culprit's) of what only a comparison between ranks can find."""
    agreed = (*STATIC, ("hidden", H), ("dtype", torch.float32))

    def mismatch(field: str, change: Callable, base: tuple = agreed) -> Bad:
        return Bad(f"{field} {base}", change, "ConfigMismatch", (), base)

    yield mismatch("top_k", changed("topk_idx", lambda ids: ids[:, :1]), ()), "top_k", str(K), "1"
    yield mismatch("top_k", changed("topk_idx", lambda ids: ids[:, :1])), "top_k", str(K), "1"
    yield mismatch("E", given(num_experts=2 * num_experts)), "num_experts", str(num_experts), str(2 * num_experts)
    yield mismatch("E", given(num_experts=2 * num_experts), ()), "num_experts", str(num_experts), str(2 * num_experts)
    yield mismatch("capacity", given(capacity=61)), "capacity", "60", "61"
    yield mismatch("capacity", given(capacity=None, max_tokens=None)), "capacity", "60", "none"
    yield mismatch("overflow", given(overflow="drop")), "overflow", "'raise'", "'drop'"
    yield mismatch("max_tokens", given(max_tokens=10)), "max_tokens", "9", "10"
    yield mismatch("max_tokens", given(max_tokens=None)), "max_tokens", "9", str(T)
    yield mismatch("hidden", given(hidden=2 * H)), "hidden", str(H), str(2 * H)
    yield mismatch("hidden", given(hidden=None)), "hidden", str(H), "none"
    yield mismatch("dtype", given(dtype=torch.float16)), "dtype", "torch.float32", "torch.float16"
    yield mismatch("dtype", given(dtype=None)), "dtype", "torch.float32", "none"


# -- dispatch_tokens and combine_tokens -------------------------------------------------------------------------------


def quantized(x: torch.Tensor) -> torch.Tensor:
    return torch.quantize_per_tensor(x, 0.1, 0, torch.quint8)


def rows_mistakes(name: str, num_rows_text: str) -> Iterator[Bad]:
    """Mistakes in the rows that travel, `x` or `expert_out`."""

    def argument(what: str, change: Callable, *parts: str) -> Bad:
        return Bad(f"{name} {what}", change, "ArgumentError", parts)

    yield from unreadable(name)
    yield argument("None", given(**{name: None}), f"{name} (NoneType)", "[N, H]")
    yield argument("flat", changed(name, lambda x: x.flatten()), f"{name} has shape [", "[N, H]")
    yield argument("no features", changed(name, lambda x: x[:, :0]), f"{name} has rows of 0 features")
    yield argument("complex", changed(name, lambda x: x.cfloat()), f"{name} has dtype torch.complex64")
    yield argument("quantized", changed(name, quantized), f"{name} has dtype torch.quint8", "torch.bfloat16")
    yield argument("rows", changed(name, lambda x: torch.cat([x, x, x[:1]])), f"{name} has", num_rows_text)
    yield argument("int", changed(name, lambda x: x.int()), f"{name} has dtype torch.int32", "torch.bfloat16")
    yield argument("double", changed(name, lambda x: x.double()), f"{name} has dtype torch.float64", "torch.float16")
    yield argument("meta", changed(name, lambda x: x.to("meta")), f"{name} is on meta", "on cpu")
    yield argument("order", given(order="fast"), "order ('fast')", "'rank'", "'slot'")
    yield argument("orders", given(order=np.array(["rank", "slot"])), "order (array", "'rank'", "'slot'")


def buffer_mistakes(name: str, like: str) -> Iterator[Bad]:
    """Mistakes in a buffer for results, `out` or `grad_out`, that belongs on the heap."""

    def argument(what: str, make: Callable, *parts: str) -> Bad:
        return Bad(f"{name} {what}", on_heap(name, make), "ArgumentError", parts)

    def shape(good: dict) -> tuple[int, int]:
        return tuple(good[name].shape)

    def lease(heap: SymmetricHeap, good: dict, size: tuple[int, ...], dtype: torch.dtype = torch.float32):
        found = heap.lease(size, dtype)
        good.setdefault("_leases", []).append(found)  # alive until the call is over
        return found.tensor

    yield argument("list", lambda heap, good: [1.0], f"{name} (list)", "tensor")
    for what, make, kind in UNREADABLE:
        yield argument(what, lambda heap, good, make=make: make(torch.ones(shape(good))), f"{name} ({kind})")

    def rows(heap, good):
        return lease(heap, good, (shape(good)[0] + 1, H))

    yield argument("rows", rows, f"{name} has shape", "must be")

    def wide(heap, good):
        return lease(heap, good, (shape(good)[0], H + 1))

    yield argument("hidden", wide, f"{name} has shape", f", {H + 1}]", f", {H}]")

    def half(heap, good):
        return lease(heap, good, shape(good), torch.bfloat16)

    yield argument("dtype", half, f"{name} has dtype torch.bfloat16", "torch.float32")
    yield argument("meta", lambda heap, good: torch.empty(shape(good), device="meta"), f"{name} is on meta", "on cpu")

    def strided(heap, good):
        return lease(heap, good, (shape(good)[0], 2 * H))[:, ::2]

    yield argument("strided", strided, f"{name} has strides [{2 * H}, 2]", "contiguous")
    yield argument(
        "gradient", lambda heap, good: lease(heap, good, shape(good)).requires_grad_(), f"{name} requires a gradient"
    )

    def odd(heap, good):
        return lease(heap, good, (shape(good)[0] * H + 1,))[1:].view(shape(good))

    yield argument("address", odd, f"{name} starts at address", "aligned to 16")
    yield argument("elsewhere", lambda heap, good: torch.empty(shape(good)), f"{name} is not on this symmetric heap")

    def overlapping(heap: SymmetricHeap, good: dict) -> dict:
        most = max(shape(good)[0], good[like].shape[0])
        memory = lease(heap, good, (most, H))
        rows = memory[: good[like].shape[0]]
        rows.copy_(good[like])
        return {**good, like: rows, name: memory[: shape(good)[0]]}

    yield Bad(f"{name} overlaps", overlapping, "ArgumentError", (f"{name} [", "overlaps a tensor of shape ["))

    def released(heap: SymmetricHeap, good: dict) -> torch.Tensor:
        found = heap.lease(shape(good), torch.float32)
        tensor = found.tensor
        found.release()
        return tensor

    if name == "out":  # a released grad_out would be found in backward
        yield Bad(f"{name} released", on_heap(name, released), "StaleLease", ("which was released",))


def dispatch_mistakes() -> Iterator[Bad]:
    yield from rows_mistakes("x", f"this plan needs {T}")
    yield from buffer_mistakes("out", "x")

    def argument(what: str, change: Callable, *parts: str) -> Bad:
        return Bad(f"probs {what}", change, "ArgumentError", parts)

    yield from unreadable("probs")
    yield argument("list", changed("probs", lambda p: p.tolist()), "probs (list)", "tensor")
    yield argument("shape", changed("probs", lambda p: p[:, :1]), f"probs has shape [{T}, 1]", f"[{T}, {K}]")
    yield argument("double", changed("probs", lambda p: p.double()), "probs has dtype torch.float64", "torch.float32")
    yield argument("half", changed("probs", lambda p: p.bfloat16()), "probs has dtype torch.bfloat16", "torch.float32")
    yield argument("meta", changed("probs", lambda p: p.to("meta")), "probs is on meta", "on cpu")


def combine_mistakes() -> Iterator[Bad]:
    yield from rows_mistakes("expert_out", "this plan needs")
    yield from buffer_mistakes("grad_out", "expert_out")


# -- expert_parallel_mlp ----------------------------------------------------------------------------------------------

# (argument, no such word, the words), the same in a call and in a configuration
WORDS = (
    ("order", "fast", "('rank', 'slot')"),
    ("stash", "some", "('all', 'rows', 'hidden', 'none')"),
    ("layout", "expert_major", "('auto', 'packed', 'expert-major')"),
    ("schedule", "overlap", "('serial', 'overlapped', 'always-overlapped')"),
    ("schedule", None, "('serial', 'overlapped', 'always-overlapped')"),
    ("quantized_wire", "forwards", "('none', 'forward', 'backward', 'both')"),
    ("quantized_wire", True, "('none', 'forward', 'backward', 'both')"),
)


def mlp_mistakes() -> Iterator[Bad]:
    for name, word, words in WORDS:
        text = f"{name} ({word!r}) must be one of {words}"
        yield Bad(f"{name}={word!r}", given(**{name: word}), "ArgumentError", (text,))


# -- the calls, on every rank -----------------------------------------------------------------------------------------


def routing(heap: SymmetricHeap, seed: int) -> torch.Tensor:
    """[T, K]: every rank has rows, from every rank."""
    generator = torch.Generator().manual_seed(seed + heap.rank)
    num_experts = 2 * heap.num_ranks
    return torch.stack([torch.randperm(num_experts, generator=generator)[:K] for _ in range(T)])


def round_trip(heap: SymmetricHeap, seed: int) -> bool:
    """The next correct call, and whether it is exact."""
    generator = torch.Generator().manual_seed(1000 * seed + heap.rank)
    x = torch.randint(-99, 99, (T, H), generator=generator).float()
    probs = torch.rand((T, K), generator=generator)
    plan = make_plan(routing(heap, seed), num_experts=2 * heap.num_ranks, heap=heap)
    rows, row_probs = dispatch_tokens(x, plan, probs=probs)
    y = combine_tokens(rows * row_probs[:, None], plan, order="slot")
    want = torch.zeros(T, H)
    for k in range(K):
        want += x * probs[:, k : k + 1]
    return torch.equal(y, want)


class Stage:
    """One public call with correct arguments that mistakes start from."""

    def __init__(self, name: str, heap: SymmetricHeap, base: tuple = ()) -> None:
        self.name, self.heap = name, heap
        self.plan: Plan | None = None
        self.leases: list[Lease] = []
        num_experts = 2 * heap.num_ranks
        ids = routing(heap, 5)
        generator = torch.Generator().manual_seed(heap.rank)
        x, probs = torch.randn((T, H), generator=generator), torch.rand((T, K), generator=generator)
        if name == "make_plan":
            self.good = {"topk_idx": ids, "num_experts": num_experts, "heap": heap, **dict(base)}
            return
        self.plan = plan = make_plan(ids, num_experts=num_experts, heap=heap)
        if name == "dispatch_tokens":
            out = self._lease(plan.row_capacity)
            self.good = {"x": x, "plan": plan, "probs": probs, "out": out, "order": "rank"}
            return
        if name == "expert_parallel_mlp":
            self.good = {"x": x, "probs": probs, "experts": GroupedMLP(2, H, H), "plan": plan}
            return
        dispatch_tokens(x, plan, probs=probs)
        grad_out = self._lease(plan.row_capacity)[: plan.num_rows]
        expert_out = torch.ones(plan.num_rows, H)
        self.good = {"expert_out": expert_out, "plan": plan, "order": "rank", "grad_out": grad_out}

    def call(self, arguments: dict) -> tuple[str, str]:
        """(class, text) of the error."""
        arguments = {name: value for name, value in arguments.items() if name != "_leases"}
        try:
            CALLS[self.name](**arguments)
        except Exception as error:  # noqa: BLE001 - the class is what is tested
            return type(error).__name__, str(error)
        return "nothing", ""

    def _lease(self, num_rows: int) -> torch.Tensor:
        self.leases.append(self.heap.lease((num_rows, H), torch.float32))
        return self.leases[-1].tensor

    def close(self) -> None:
        for lease in self.leases:
            lease.release()


CALLS = {
    "make_plan": make_plan,
    "dispatch_tokens": dispatch_tokens,
    "combine_tokens": combine_tokens,
    "expert_parallel_mlp": expert_parallel_mlp,
}
MISTAKES = {
    "dispatch_tokens": dispatch_mistakes,
    "combine_tokens": combine_mistakes,
    "expert_parallel_mlp": mlp_mistakes,
}


def check_mistakes(rank: int, num_ranks: int, stage_name: str) -> list[str]:
    findings = Findings()
    sets = [[r] for r in range(num_ranks)] + [list(range(num_ranks))] * (num_ranks > 1)
    with open_heap("cpu", num_bytes=NUM_BYTES) as heap:
        make = MISTAKES.get(stage_name)
        mistakes = list(make() if make else plan_mistakes(2 * num_ranks))
        for turn, (culprits, bad) in enumerate((c, b) for c in sets for b in mistakes):
            findings.where = f"{stage_name}, {bad.name} on ranks {culprits}, seen by rank {rank} of {num_ranks}"
            stage = Stage(stage_name, heap, bad.base)
            wrong = bad.change(heap, dict(stage.good)) if rank in culprits else stage.good
            name, text = stage.call(wrong)
            findings.equal("error", (name, "" if name == bad.error else text), (bad.error, ""))
            for part in bad.parts:
                findings.check(part.format(rank=culprits[0]) in text, f"{part!r} is not in {text!r}")
            if rank != culprits[0] and bad.error != "ExpertIdError":  # the first one's error, if there are several
                findings.check(text.startswith(f"on rank {culprits[0]}: "), f"the culprit is not named: {text!r}")
            if stage_name == "expert_parallel_mlp":
                findings.check(stage.plan.not_dispatched is not None, "tokens have been dispatched")
            stage.close()
            del wrong, stage
            findings.equal("leased bytes after the error", heap.leased_bytes, 0)
            findings.check(round_trip(heap, turn), "the next correct call is wrong")
    return findings.texts


def check_mismatches(rank: int, num_ranks: int) -> list[str]:
    findings = Findings()
    with open_heap("cpu", num_bytes=NUM_BYTES) as heap:
        for culprit in range(num_ranks):
            for turn, (bad, field, usual, other) in enumerate(plan_mismatches(2 * num_ranks)):
                findings.where = f"{bad.name}: {other} on rank {culprit}, seen by rank {rank} of {num_ranks}"
                stage = Stage("make_plan", heap, bad.base)
                found = stage.call(bad.change(heap, dict(stage.good)) if rank == culprit else stage.good)
                zero, first, its = (other, 1, usual) if culprit == 0 else (usual, culprit, other)
                text = f"{field} differs: rank 0 has {zero}, rank {first} has {its}"
                findings.equal("error", found, ("ConfigMismatch", text))
                findings.equal("leased bytes after the error", heap.leased_bytes, 0)
                findings.check(round_trip(heap, turn), "the next correct call is wrong")
    return findings.texts


def check_a_closed_heap(rank: int, num_ranks: int) -> list[str]:
    """A wrong word where no peer can be told of it."""
    findings = Findings()
    findings.where = f"rank {rank} of {num_ranks}"
    with open_heap("cpu", num_bytes=NUM_BYTES) as heap:
        stage = Stage("expert_parallel_mlp", heap)
    for wrong in ({"schedule": "overlap"}, {"quantized_wire": "both"}):
        findings.equal(f"error of {wrong}", stage.call({**stage.good, **wrong})[0], HeapClosed.__name__)
    return findings.texts


def check_call_mismatches(rank: int, num_ranks: int) -> list[str]:
    """Ranks that call dispatch or combine with arguments that do not fit together, or make different calls."""
    findings = Findings()
    phases = {"dispatch_tokens": "dispatch: ready", "combine_tokens": "combine: ready"}
    fp32, fp16 = torch.float32, torch.float16
    changes = {
        "dispatch_tokens": (
            ("hidden", (H, 2 * H), lambda good: {**good, "x": good["x"].repeat(1, 2), "out": None}),
            ("dtype", (fp32, fp16), lambda good: {**good, "x": good["x"].half(), "out": None}),
            ("probs", ("with", "without"), lambda good: {**good, "probs": None}),
        ),
        "combine_tokens": (
            ("hidden", (H, 2 * H), lambda good: {**good, "expert_out": torch.ones(good["plan"].num_rows, 2 * H)}),
            ("dtype", (fp32, fp16), lambda good: {**good, "expert_out": good["expert_out"].half()}),
            ("order", ("rank", "slot"), lambda good: {**good, "order": "slot"}),
        ),
    }
    with open_heap("cpu", num_bytes=NUM_BYTES) as heap:
        for culprit in range(num_ranks):
            for call in changes:
                for field, (usual, other), change in changes[call]:
                    findings.where = f"{call}: {field} is {other} on rank {culprit}, seen by rank {rank} of {num_ranks}"
                    stage = Stage(call, heap)
                    stage.good.pop("grad_out", None)
                    found = stage.call(change(stage.good) if rank == culprit else stage.good)
                    zero, first, its = (other, 1, usual) if culprit == 0 else (usual, culprit, other)
                    text = f"{field} differs at '{phases[call]}': rank 0 has {zero}, rank {first} has {its}"
                    findings.equal("error", found, ("ConfigMismatch", text))
                    stage.close()
                    del stage
                    findings.equal("leased bytes after the error", heap.leased_bytes, 0)
                    findings.check(round_trip(heap, culprit), "the next correct call is wrong")
            findings.where = f"rank {culprit} plans while others dispatch, seen by rank {rank} of {num_ranks}"
            stages = {name: Stage(name, heap) for name in ("make_plan", "dispatch_tokens")}
            stage = stages["make_plan" if rank == culprit else "dispatch_tokens"]
            zero, other = ("plan: counts", "dispatch: ready") if culprit == 0 else ("dispatch: ready", "plan: counts")
            text = f"ranks are in different calls: rank 0 at '{zero}', rank {culprit or 1} at '{other}'"
            findings.equal("error", stage.call(stage.good), ("ConfigMismatch", text))
            stages["dispatch_tokens"].close()
            findings.check(round_trip(heap, culprit), "the next correct call is wrong")
    return findings.texts


def check_order_of_errors(rank: int, num_ranks: int) -> list[str]:
    """Several things are wrong at once: every rank names the same one. And one fault follows the other at once."""
    findings = Findings()
    findings.where = f"rank {rank} of {num_ranks}"
    with open_heap("cpu", num_bytes=NUM_BYTES) as heap:
        num_experts, ids = 2 * num_ranks, routing(heap, 1)
        bad_id = with_id(num_experts + rank)(ids)
        for turn in range(40):
            # Rank 0 fails in its arguments, all others have ids out of range.
            stage = Stage("make_plan", heap)
            wrong = {**stage.good, "overflow": f"turn {turn}"} if rank == 0 else {**stage.good, "topk_idx": bad_id}
            name, text = stage.call(wrong)
            findings.equal(f"class in turn {turn}", name, "ArgumentError")
            findings.check(f"overflow ('turn {turn}')" in text, f"turn {turn}: {text!r}")
        findings.check(round_trip(heap, 3), "the next correct call is wrong")
        stage = Stage("make_plan", heap)
        stage.good["topk_idx"] = bad_id if rank else ids
        found = stage.call(stage.good)
        place, limits = f"topk_idx on rank 1, flat position {3 * K + 1}", f"[0, {num_experts})"
        text = f"{place}: {num_experts + 1} is neither -1 nor in {limits}"
        findings.equal("error", found, ("ExpertIdError", text))
    return findings.texts


def check_misuse(rank: int, num_ranks: int) -> list[str]:
    """Calls in a wrong order, and more rows than the capacity."""
    findings = Findings()
    findings.where = f"rank {rank} of {num_ranks}"
    with open_heap("cpu", num_bytes=NUM_BYTES) as heap:
        num_experts = 2 * num_ranks
        plan = make_plan(routing(heap, 1), num_experts=num_experts, heap=heap)
        try:
            combine_tokens(torch.ones(plan.num_rows, H), plan)
        except Exception as error:  # noqa: BLE001 - the class is what is tested
            findings.equal("combine before dispatch", type(error).__name__, "StalePlan")
            findings.check("dispatch_tokens comes before combine_tokens" in str(error), str(error))
        else:
            findings.check(False, "combine before dispatch raised nothing")
        findings.check(round_trip(heap, 1), "the next correct call is wrong")
        last = torch.full((T, K), num_experts - 1)
        for capacity in (1, T * K * num_ranks - 1):
            stage = Stage("make_plan", heap, (("capacity", capacity),))
            wanted = f"rank {num_ranks - 1} is routed {T * K * num_ranks} rows, more than capacity ({capacity})"
            findings.equal("overflow", stage.call({**stage.good, "topk_idx": last}), ("CapacityError", wanted))
            findings.check(round_trip(heap, capacity), "the next correct call is wrong")
        if num_ranks == 1:
            return findings.texts
        # A static capacity and uneven T, without max_tokens.
        stage = Stage("make_plan", heap, (("capacity", T * K * num_ranks),))
        stage.good["topk_idx"] = stage.good["topk_idx"][rank:]
        text = f"max_tokens differs: rank 0 has {T}, rank 1 has {T - 1}"
        findings.equal("uneven T", stage.call(stage.good), ("ConfigMismatch", text))
        findings.check(round_trip(heap, 2), "the next correct call is wrong")
        # The order of dispatch is that of its backward.
        plan = make_plan(routing(heap, 1), num_experts=num_experts, heap=heap)
        x = torch.randn(T, H, requires_grad=True)
        rows, _ = dispatch_tokens(x, plan, order="slot" if rank else "rank")
        text = "order differs at 'combine: ready': rank 0 has rank, rank 1 has slot"
        findings.equal("order", outcome(rows.sum().backward), ("ConfigMismatch", text))
        findings.check(round_trip(heap, 3), "the next correct call is wrong")
    return findings.texts


def check_plans(rank: int, num_ranks: int) -> list[str]:
    """A rank that brings another plan than its peers, older or of another call, which has the same shapes."""
    findings = Findings()
    with open_heap("cpu", num_bytes=NUM_BYTES) as heap:
        x = torch.randn(T, H)
        for culprit in range(num_ranks):
            for fails_between in (False, True):
                findings.where = f"culprit {culprit}, a fault between {fails_between}, rank {rank} of {num_ranks}"
                old = make_plan(routing(heap, 5), num_experts=2 * num_ranks, heap=heap)
                dispatch_tokens(x, old)
                if fails_between:  # epochs that were launched and have not counted are nobody's generations
                    stage = Stage("make_plan", heap)
                    findings.equal("error", stage.call({**stage.good, "overflow": rank})[0], "ArgumentError")
                new = make_plan(routing(heap, 5), num_experts=2 * num_ranks, heap=heap)
                zero, first, its = (old, 1, new) if culprit == 0 else (new, culprit, old)
                text = f"rank 0 has {zero.generation}, rank {first} has {its.generation}"
                mine = old if rank == culprit else new
                for phase, call in (
                    ("dispatch: ready", lambda mine=mine: dispatch_tokens(x, mine)),
                    ("combine: ready", lambda mine=mine: combine_tokens(torch.ones(mine.num_rows, H), mine)),
                ):
                    try:
                        call()
                    except ConfigMismatch as error:
                        findings.equal("text", str(error), f"plan differs at '{phase}': {text}")
                    else:
                        findings.check(False, f"nothing was raised at '{phase}'")
                    dispatch_tokens(x, new)
                findings.check(round_trip(heap, culprit), "the next correct call is wrong")
                rows, _ = dispatch_tokens(x, old)  # a plan may be used as often as its ranks like
                findings.equal("y by the old plan", combine_tokens(rows, old, order="slot"), K * x)
                findings.equal("leased bytes", heap.leased_bytes, 0)
    return findings.texts


def dispatch_on_different_heaps(rank: int, num_ranks: int, timeout_s: float) -> dict[str, Any]:
    """Rank 0 brings a plan of heap B, rank 1 one of heap A. What they see there, and then on the other heap."""
    facts: dict[str, Any] = {}
    x, ids = torch.randn(T, H), torch.arange(T * K).view(T, K) % (2 * num_ranks)
    heaps = [SymmetricHeap(num_bytes=NUM_BYTES, backend="host") for _ in range(2)]
    plans = [make_plan(ids, num_experts=2 * num_ranks, heap=heap) for heap in heaps]
    leases = [heap.lease((plan.row_capacity, H), torch.float32) for heap, plan in zip(heaps, plans, strict=True)]
    buffers = [lease.tensor.fill_(7) for lease in leases]
    for heap in heaps:
        heap.timeout_s = heap.start_timeout_s = timeout_s
    for name, index in (("here", 1 - rank), ("there", rank)):
        dist.barrier()
        start = time.monotonic()
        facts[name] = outcome(dispatch_tokens, x, plans[index], out=buffers[index])
        facts[f"{name} after s"] = time.monotonic() - start
        facts[f"rows {name} are NaN"] = bool(buffers[index].isnan().all())
    facts["next"] = [outcome(make_plan, ids, num_experts=2 * num_ranks, heap=heap)[0] for heap in heaps]
    for heap in heaps:
        heap.timeout_s = HANG_S  # nobody waits
    facts["closing"] = [outcome(heap.close) for heap in heaps]
    dist.barrier()
    with open_heap("cpu", num_bytes=NUM_BYTES) as heap:
        facts["a new heap works"] = round_trip(heap, 3)
    return facts


def check_scores(rank: int, num_ranks: int) -> list[str]:
    """NaN and Inf in the router's logits, by a token or by the router's weight."""
    findings = Findings()
    with open_heap("cpu", num_bytes=NUM_BYTES) as heap:
        torch.manual_seed(0)
        config = MoEConfig(hidden=H, ffn=H, num_experts=2 * num_ranks, top_k=K, schedule="always-overlapped")
        for layer in (MoELayer(config, heap), MoELayer(dataclasses.replace(config, capacity=T * K * num_ranks), heap)):
            x = torch.randn(T, H)
            want = layer(x)[0].detach().clone()
            for culprit in range(num_ranks):
                for value in (float("nan"), float("inf"), -float("inf")):
                    findings.where = f"{value} on rank {culprit}, rank {rank} of {num_ranks}"
                    bad = x.clone()
                    if rank == culprit:
                        bad[3, 5], bad[4] = value, value
                    try:
                        layer(bad)
                    except ArgumentError as error:
                        text = "the router's logits of token 3 are not finite (2 such tokens)"
                        wanted = text if rank == culprit else f"on rank {culprit}: {text}"
                        findings.equal("text", str(error), wanted)
                    else:
                        findings.check(False, "nothing was raised")
                    findings.equal("y of the next correct call", layer(x)[0], want)
            mask = torch.ones(T, dtype=torch.bool)
            mask[3:5] = False
            findings.check(bool(layer(bad, mask)[0].isfinite().all()), "padding may hold anything")
    return findings.texts


RECIPES = (None, Float8Block(), Float8Block(power_of_two=True), MXFP8(), NVFP4(hadamard_signs=5))
# Every recipe beside every other one, and every choice of what travels.
NUMBERS = [(recipe, "none") for recipe in RECIPES]
NUMBERS += [(recipe, wire) for recipe in (Float8Block(), MXFP8()) for wire in ("forward", "backward", "both")]
SHOWN = {
    None: "none",
    Float8Block(): "float8-block",
    Float8Block(power_of_two=True): r"float8-block with options 0x[0-9a-f]+",
    MXFP8(): "mxfp8",
    NVFP4(hadamard_signs=5): r"nvfp4 with options 0x[0-9a-f]+",
}


def check_numbers(rank: int, num_ranks: int, capacity: int | None) -> list[str]:
    """Layers that disagree on what experts multiply, or on what travels as that: some have rows of the same bytes."""
    findings = Findings()
    hidden, num_experts = 64, 2 * num_ranks
    torch.manual_seed(rank)
    x, dy = torch.randn(T, hidden), torch.randn(T, hidden)
    with open_heap("cpu", num_bytes=4 << 20) as heap:

        def step(recipe: Recipe | None, wire: str) -> list[torch.Tensor]:
            """y, dx and the weights' gradients."""
            torch.manual_seed(7)
            config = MoEConfig(
                hidden=hidden,
                ffn=32,
                num_experts=num_experts,
                top_k=K,
                capacity=capacity,
                precision=recipe,
                quantized_wire=wire,
                schedule="always-overlapped",
            )
            layer, leaf = MoELayer(config, heap), x.clone().requires_grad_()
            y, _ = layer(leaf)
            y.backward(dy)
            return [y.detach(), leaf.grad, layer.experts.fc1.weight.grad, layer.experts.fc2.weight.grad]

        wanted = [step(*numbers) for numbers in NUMBERS]
        pairs = [(a, b) for a in range(len(NUMBERS)) for b in range(len(NUMBERS)) if a != b]
        for turn, (usual, other) in enumerate(pairs):
            culprit = turn % num_ranks
            zero, mine = ((usual, other)[rank_ == culprit] for rank_ in (0, rank))
            findings.where = f"{NUMBERS[other]} on rank {culprit}, else {NUMBERS[usual]}, seen by {rank} of {num_ranks}"
            first = culprit or 1
            its = other if first == culprit else usual
            field = 0 if NUMBERS[zero][0] != NUMBERS[its][0] else 1
            shown = [SHOWN[NUMBERS[i][0]] if field == 0 else repr(NUMBERS[i][1]) for i in (zero, its)]
            name = ("precision", "quantized_wire")[field]
            pattern = f"{name} differs: rank 0 has {shown[0]}, rank {first} has {shown[1]}"
            try:
                step(*NUMBERS[mine])
            except ConfigMismatch as error:
                findings.check(re.fullmatch(pattern, str(error)) is not None, f"{error}; wanted {pattern}")
            else:
                findings.check(False, "nothing was raised")
            findings.equal("leased bytes after the error", heap.leased_bytes, 0)
            for got, want in zip(step(*NUMBERS[usual]), wanted[usual], strict=True):
                findings.equal("the next correct call", got, want)
        # What ranks compare makes a difference. Scales that are powers of two are exact in normal numbers, however many
        # share one and however often they are rounded: Float8Block has them once here, MXFP8 four times.
        different = {tuple(map(float, (w[0].double().sum(), w[2].double().sum(), w[3].double().sum()))) for w in wanted}
        findings.equal("different results", len(different), len(NUMBERS) - 4)
        for name, change in (("precision", {"precision": "mxfp8"}), ("quantized_wire", {"quantized_wire": "rows"})):
            findings.where = f"wrong {name} on the last rank, seen by {rank} of {num_ranks}"
            stage = Stage("make_plan", heap)
            found = stage.call({**stage.good, **(change if rank == num_ranks - 1 else {})})
            findings.equal("error", found[0], "ArgumentError")
            findings.check(f"{name} ('{change[name]}') must be" in found[1], found[1])
            findings.check(round_trip(heap, rank), "the next correct call is wrong")
    return findings.texts


def check_other_heaps(rank: int, num_ranks: int) -> list[str]:
    """Memory of another heap: refused as a buffer that peers reach into, copied like any other memory as input."""
    findings = Findings()
    findings.where = f"rank {rank} of {num_ranks}"
    with open_heap("cpu", num_bytes=NUM_BYTES) as heap, open_heap("cpu", num_bytes=NUM_BYTES) as other:
        for turn in range(3):
            x = torch.randn(T, H)
            plan = make_plan(routing(heap, turn), num_experts=2 * num_ranks, heap=heap)
            rows, _ = dispatch_tokens(x, plan)
            with other.lease((plan.row_capacity, H), torch.float32, name="foreign") as lease:
                foreign = lease.tensor
                for name, call in (
                    ("out", lambda plan=plan, x=x, out=foreign: dispatch_tokens(x, plan, out=out)),
                    (
                        "grad_out",
                        lambda plan=plan, rows=rows, out=foreign: combine_tokens(rows, plan, grad_out=out[: len(rows)]),
                    ),
                ):
                    try:
                        call()
                    except ArgumentError as error:
                        findings.check(f"{name} is not on this symmetric heap" in str(error), str(error))
                    else:
                        findings.check(False, f"nothing was raised for {name}")
                foreign[: len(rows)] = rows
                y = combine_tokens(foreign[: plan.num_rows], plan, order="slot")
                findings.equal("y of foreign rows", y, sum(x for _ in range(K)))
            findings.check(round_trip(heap, turn), "the next correct call is wrong")
            findings.check(round_trip(other, turn), "the next correct call on the other heap is wrong")
    return findings.texts


# -- a heap that is too small -----------------------------------------------------------------------------------------


LEASING_CALLS = ("dispatch_tokens", "combine_tokens", "layer", "backward of dispatch", "backward of the layer")


def exhaust(heap: SymmetricHeap, left: int) -> list[Lease]:
    """Leases that leave one free range of `left` bytes."""
    last = heap.lease((left,), torch.uint8) if left else None
    taken = []
    while free_bytes(heap):
        taken.append(heap.lease((free_bytes(heap),), torch.uint8, name="everything"))
    if last is not None:
        last.release()
    return taken


def check_exhaustion(rank: int, num_ranks: int) -> list[str]:
    """One rank, or all, have no memory left: HeapExhausted everywhere, whichever lease of the call fails."""
    findings = Findings()
    sets = [[r] for r in range(num_ranks)] + [list(range(num_ranks))] * (num_ranks > 1)
    with open_heap("cpu", num_bytes=NUM_BYTES) as heap:
        layer = MoELayer(
            MoEConfig(hidden=H, ffn=H, num_experts=2 * num_ranks, top_k=K, schedule="always-overlapped"), heap
        )
        for turn, culprits in enumerate(sets):
            for call in LEASING_CALLS:
                for left in range(0, 1 << 14, 512):
                    findings.where = f"{call} with {left} bytes left on {culprits}, rank {rank} of {num_ranks}"
                    raised = _raises(heap, layer, call, left if rank in culprits else None, culprits, findings)
                    findings.equal("leased bytes", heap.leased_bytes, 0)
                    findings.check(round_trip(heap, turn), "the next correct call is wrong")
                    if not raised:
                        break
                findings.check(0 < left < (1 << 14) - 512, "the memory was always or never enough")
    return findings.texts


def _raises(
    heap: SymmetricHeap, layer: MoELayer, call: str, left: int | None, culprits: list[int], findings: Findings
) -> bool:
    """Whether the call raises, which must be HeapExhausted."""
    x = torch.randn(T, H, requires_grad=True)
    probs = torch.rand((T, K), requires_grad=True)
    plan = make_plan(routing(heap, 2), num_experts=2 * heap.num_ranks, heap=heap)
    if call == "combine_tokens":
        dispatch_tokens(x.detach(), plan)
        expert_out = torch.ones(plan.num_rows, H)
    elif call == "backward of dispatch":
        rows, row_probs = dispatch_tokens(x, plan, probs=probs)
        loss = (rows * row_probs[:, None]).sum()
    elif call == "backward of the layer":
        loss = layer(x)[0].sum()
    taken = [] if left is None else exhaust(heap, left)
    raised = False
    try:
        if call == "dispatch_tokens":
            dispatch_tokens(x, plan, probs=probs)
        elif call == "combine_tokens":
            combine_tokens(expert_out, plan)
        elif call == "layer":
            layer(x)[0].sum().backward()
        else:
            loss.backward()
    except Exception as error:  # noqa: BLE001 - the class is what is tested
        raised = True
        findings.equal("error", type(error).__name__, "HeapExhausted")
        parts = ("lease '", " needs ", "high-water mark", f"num_bytes (now {NUM_BYTES})")
        findings.check(all(part in str(error) for part in parts), str(error))
        if left is None:
            findings.check(str(error).startswith(f"on rank {culprits[0]}: "), str(error))
    for lease in taken:
        lease.release()
    return raised


# -- MoELayer ---------------------------------------------------------------------------------------------------------


def layer_mistakes() -> Iterator[Bad]:
    def argument(what: str, change: Callable, *parts: str) -> Bad:
        return Bad(what, change, "ArgumentError", parts)

    def of_x(change: Callable[[torch.Tensor], Any]) -> Callable[[SymmetricHeap, dict], dict]:
        return changed("x", change)

    for name in ("x", "token_mask", "topk_idx"):
        for bad in unreadable(name):
            if not (name == "token_mask" and ("compressed" in bad.name or "jagged" in bad.name)):  # it is flat
                yield bad

    yield argument("list", of_x(lambda x: x.tolist()), "x (list)", f"hidden ({H})")
    yield argument("width", of_x(lambda x: x[:, :-1]), f"x ([{T}, {H - 1}])", f"hidden ({H})")
    yield argument("nothing", of_x(lambda x: x[:, :0]), f"x ([{T}, 0])", f"hidden ({H})")
    yield argument("scalar", of_x(lambda x: x.sum()), "x has shape []", f"hidden ({H})")
    yield argument("int", of_x(lambda x: x.int()), "x has dtype torch.int32", "torch.bfloat16")
    yield argument("double", of_x(lambda x: x.double()), "x has dtype torch.float64", "torch.float32")
    yield argument("quantized", of_x(quantized), "x has dtype torch.quint8", "torch.float32")
    yield argument("meta", of_x(lambda x: x.to("meta")), "x is on meta", "on cpu")
    for name in ("x", "token_mask", "topk_idx"):
        yield argument(
            f"inference {name}", changed(name, of_inference), f"{name} was made in inference_mode", "clone()"
        )
    yield argument("list for mask", changed("token_mask", lambda mask: mask.tolist()), "token_mask (list)", f"[{T}]")
    yield argument("ids", changed("topk_idx", lambda ids: ids[:, :1]), f"topk_idx has shape [{T}, 1]", f"[{T}, {K}]")


@torch.inference_mode()
def of_inference(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone()


def check_layer_mistakes(rank: int, num_ranks: int) -> list[str]:
    findings = Findings()
    sets = [[r] for r in range(num_ranks)] + [list(range(num_ranks))] * (num_ranks > 1)
    usual = {"hidden": H, "ffn": H, "num_experts": 2 * num_ranks, "top_k": K, "schedule": "always-overlapped"}
    with open_heap("cpu", num_bytes=NUM_BYTES) as heap:
        torch.manual_seed(0)
        layer = MoELayer(MoEConfig(**usual), heap)
        x = torch.randn(T, H)
        want, _ = layer(x)
        want = want.detach().clone()

        def call(layer: MoELayer, x: Any, **options: Any) -> tuple[str, str]:
            try:
                layer(x, **options)
            except Exception as error:  # noqa: BLE001 - the class is what is tested
                return type(error).__name__, str(error)
            return "nothing", ""

        for culprits in sets:
            for bad in layer_mistakes():
                findings.where = f"{bad.name} on {culprits}, seen by rank {rank} of {num_ranks}"
                good = {"x": x, "token_mask": torch.ones(T, dtype=torch.bool), "topk_idx": routing(heap, 5)}
                name, text = call(layer, **(bad.change(heap, good) if rank in culprits else good))
                findings.equal("error", name, bad.error)
                findings.check(all(part in text for part in bad.parts), f"{bad.parts} not in {text!r}")
                findings.check(rank in culprits or f"on rank {culprits[0]}: " in text, text)
                findings.equal("y of the next correct call", layer(x)[0], want)
        for culprit in range(num_ranks if num_ranks > 1 else 0):
            for field, value in (("hidden", 2 * H), ("top_k", 1), ("num_experts", 4 * num_ranks), ("capacity", 99)):
                findings.where = f"{field}={value} on rank {culprit}, seen by rank {rank} of {num_ranks}"
                config = MoEConfig(**{**usual, **({field: value} if rank == culprit else {})})
                name, text = call(MoELayer(config, heap), torch.randn(T, config.hidden))
                findings.equal("error", name, "ConfigMismatch")
                findings.check(f"{field} differs: rank 0 has " in text, text)
                findings.check(str(value) in text and str(usual.get(field, "none")) in text, text)
                findings.equal("y of the next correct call", layer(x)[0], want)
            findings.where = f"order on rank {culprit}, seen by rank {rank} of {num_ranks}"
            torch.manual_seed(0)
            other = MoELayer(MoEConfig(**usual, order="slot" if rank == culprit else "rank"), heap)
            name, text = call(other, x)
            findings.equal("error", name, "ConfigMismatch")
            findings.check("order differs at 'combine: ready': rank 0 has " in text, text)
            findings.equal("y of the next correct call", layer(x)[0], want)
            findings.where = f"dtype on rank {culprit}, seen by rank {rank} of {num_ranks}"
            name, text = call(layer, x.bfloat16() if rank == culprit else x)
            findings.equal("error", name, "ConfigMismatch")
            findings.check("dtype differs" in text and "torch.bfloat16" in text and "torch.float32" in text, text)
            findings.equal("y of the next correct call", layer(x)[0], want)
        if num_ranks > 1:  # not collective: the configuration is the same everywhere
            odd = MoEConfig(hidden=H, ffn=H, num_experts=2 * num_ranks + 1, top_k=K)
            text = rf"num_experts \({odd.num_experts}\).*number of ranks \({num_ranks}\)"
            with pytest.raises(ArgumentError, match=text):
                MoELayer(odd, heap)
        findings.equal("leased bytes", heap.leased_bytes, 0)
    return findings.texts


# -- gradients that a caller brings -----------------------------------------------------------------------------------

PASSED_ON = ("sparse", "wrapper", "freed", "stale")  # autograd itself refuses others
BACKWARDS = ("y of the layer", "y of combine_tokens", "rows", "row_probs")


def check_gradients(rank: int, num_ranks: int) -> list[str]:
    """A gradient that kernels cannot read, on one rank or on all: the same error on every rank; the next is right."""
    findings = Findings()
    sets = [[r] for r in range(num_ranks)] + [list(range(num_ranks))] * (num_ranks > 1)
    kinds = [bad for bad in unreadable("the gradient") if bad.name.split()[-1] in PASSED_ON]
    with open_heap("cpu", num_bytes=NUM_BYTES, timeout_s=5.0) as heap:
        torch.manual_seed(0)
        layer = MoELayer(MoEConfig(hidden=H, ffn=H, num_experts=2 * num_ranks, top_k=K), heap)
        x = torch.randn(T, H, requires_grad=True)

        def outputs(name: str) -> list[torch.Tensor]:
            """What is differentiated; the first is the one of that name."""
            if name == "y of the layer":
                return [layer(x)[0]]
            plan = make_plan(routing(heap, 5), num_experts=2 * num_ranks, heap=heap)
            rows, row_probs = dispatch_tokens(x, plan, probs=torch.ones(T, K, requires_grad=True))
            if name == "y of combine_tokens":
                return [combine_tokens(torch.ones(plan.num_rows, H, requires_grad=True), plan)]
            return [rows, row_probs] if name == "rows" else [row_probs, rows]

        for name in BACKWARDS:
            for turn, (culprits, bad) in enumerate((c, b) for c in sets for b in kinds):
                findings.where = f"{bad.name} of {name} on {culprits}, seen by rank {rank} of {num_ranks}"
                found = outputs(name)
                gradients = [torch.ones_like(tensor) for tensor in found]
                if rank in culprits:
                    gradients[0] = bad.change(heap, {"the gradient": gradients[0]})["the gradient"]
                try:
                    torch.autograd.backward(found, gradients)
                except Exception as error:  # noqa: BLE001 - the class is what is tested
                    findings.equal("error", type(error).__name__, bad.error)
                    what = f"the gradient of {name.split()[0]} "
                    for part in bad.parts:
                        part = part.replace("the gradient ", what)
                        findings.check(part in str(error), f"{part!r} is not in {str(error)!r}")
                else:
                    findings.check(False, "nothing was raised")
                del found, gradients
                findings.equal("leased bytes after the error", heap.leased_bytes, 0)
                findings.check(round_trip(heap, turn), "the next correct call is wrong")
    return findings.texts


# -- errors that nobody foresaw ---------------------------------------------------------------------------------------


class Shared(torch.nn.Module):
    """A shared expert that runs out of something."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.fails = fails

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise OSError("no space left")
        return x


def check_unforeseen(rank: int, num_ranks: int, schedule: str) -> list[str]:
    """One rank has an error of its own in the middle of a call: the others raise it too, at once. The heap lives."""
    findings = Findings()
    with open_heap("cpu", num_bytes=NUM_BYTES, timeout_s=60.0) as heap:
        for culprit in range(num_ranks):
            findings.where = f"culprit {culprit}, rank {rank} of {num_ranks}"

            def spoiled(call: Callable[[], object], owner: Any, name: str, culprit: int = culprit) -> None:
                """`call` with owner.name out of order on one rank."""

                def fail(*_: object, **__: object) -> None:
                    raise OSError("no space left")

                good, is_culprit = getattr(owner, name), rank == culprit
                if is_culprit:
                    setattr(owner, name, fail)
                started = time.monotonic()
                try:
                    call()
                except OSError as error:
                    findings.check(is_culprit, f"a peer raised {error!r}")
                except Exception as error:  # noqa: BLE001 - the class is what is tested
                    findings.check(not is_culprit, f"the culprit raised {error!r}")
                    findings.equal("error", type(error).__name__, "SymmoeError")
                    findings.equal("text", str(error), f"on rank {culprit}: OSError: no space left")
                else:
                    findings.check(False, "nothing was raised")
                finally:
                    setattr(owner, name, good)
                findings.check(time.monotonic() - started < 30, "the peers have waited")
                findings.equal("leased bytes", heap.leased_bytes, 0)
                findings.check(round_trip(heap, culprit), "the next correct call is wrong")

            torch.manual_seed(0)
            config = MoEConfig(hidden=H, ffn=H, num_experts=2 * num_ranks, top_k=K, schedule=schedule)
            layer = MoELayer(config, heap, shared_expert=Shared(False))
            x = torch.randn(T, H, requires_grad=True)
            ops = kernels.for_device(heap.device)

            def step(layer: MoELayer = layer, x: torch.Tensor = x) -> None:
                layer(x)[0].sum().backward()

            for owner, name in (
                (layer.router, "forward"),
                (layer.shared_expert, "forward"),
                *((ops, name) for name in ("count_slots", "grouped_gemm_act", "grouped_gemm", "pull_sums")),
                *((ops, name) for name in ("grouped_gemm_dact", "grouped_gemm_dgrad", "grouped_gemm_wgrad")),
            ):
                findings.where = f"{name}, culprit {culprit}, rank {rank} of {num_ranks}"
                spoiled(step, owner, name)
            findings.where = f"parts, culprit {culprit}, rank {rank} of {num_ranks}"
            plan = make_plan(routing(heap, 5), num_experts=2 * num_ranks, heap=heap)
            spoiled(lambda plan=plan, x=x: dispatch_tokens(x, plan), ops, "push_rows")
            rows, _ = dispatch_tokens(x, plan)
            spoiled(lambda plan=plan, rows=rows: combine_tokens(rows.detach(), plan), ops, "pull_sums")
            spoiled(lambda rows=rows: rows.sum().backward(), ops, "pull_sums")
            findings.check(bool(layer(x)[0].isfinite().all()), "the layer works no more")
    return findings.texts


def check_signals(rank: int, num_ranks: int, broken: str) -> list[str]:
    findings = Findings()
    findings.where = f"rank {rank} of {num_ranks}"
    with open_heap("cpu", num_bytes=NUM_BYTES, timeout_s=60.0) as heap:
        config = MoEConfig(hidden=H, ffn=H, num_experts=2 * num_ranks, top_k=K, schedule="always-overlapped")
        layer, x, ops = MoELayer(config, heap), torch.randn(T, H), kernels.for_device(heap.device)
        good, started = getattr(ops, broken), time.monotonic()
        if rank == 0:
            setattr(ops, broken, None)
        found = outcome(layer, x)
        setattr(ops, broken, good)
        findings.check(time.monotonic() - started < 30, "the peer has waited")
        text = "'NoneType' object is not callable"
        wanted = ("TypeError", text) if rank == 0 else ("PeerAborted", f"rank 0 gave up: TypeError: {text}")
        findings.equal("error", found, wanted)
        findings.equal("next error", outcome(layer, x)[0], "HeapPoisoned")
    return findings.texts


def flat(results: list[list[str]]) -> list[str]:
    return [text for texts in results for text in texts]


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("stage", ["make_plan", "dispatch_tokens", "combine_tokens", "expert_parallel_mlp"])
def test_wrong_arguments(cluster, stage: str, num_ranks: int):
    assert flat(cluster(num_ranks).run(check_mistakes, stage)) == []


@pytest.mark.parametrize(("name", "word", "words"), WORDS)
def test_the_configuration_takes_the_same_words(name: str, word: object, words: str):
    with pytest.raises(ArgumentError) as raised:
        MoEConfig(hidden=H, ffn=H, num_experts=2, top_k=K, **{name: word})
    assert str(raised.value) == f"{name} ({word!r}) must be one of {words}"


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_wrong_word_on_a_closed_heap(cluster, num_ranks: int):
    assert flat(cluster(num_ranks).run(check_a_closed_heap)) == []


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_that_disagree(cluster, num_ranks: int):
    assert flat(cluster(num_ranks).run(check_mismatches)) == []


@pytest.mark.parametrize("capacity", [None, pytest.param(4 * T * K, marks=pytest.mark.slow)])
def test_ranks_that_multiply_or_send_other_numbers(cluster, capacity: int | None):
    assert flat(cluster(2).run(check_numbers, capacity)) == []


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_that_disagree_in_dispatch_and_combine(cluster, num_ranks: int):
    assert flat(cluster(num_ranks).run(check_call_mismatches)) == []


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_faults_in_a_row_and_at_once(cluster, num_ranks: int):
    assert flat(cluster(num_ranks).run(check_order_of_errors)) == []


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_with_different_plans(cluster, num_ranks: int):
    assert flat(cluster(num_ranks).run(check_plans)) == []


def test_ranks_with_plans_of_different_heaps(cluster):
    """No rank can tell it from a peer that does not come, so that is what both raise."""
    timeout_s = 1.0
    for rank, facts in enumerate(cluster(2).run(dispatch_on_different_heaps, timeout_s)):
        (here, why_here), (there, why_there) = facts["here"], facts["there"]
        assert (here, there) == ("PeerTimeout", "PeerAborted")
        text = "rank {} did not reach 'dispatch: ready' within timeout_s=1: expected epoch"
        assert why_here.startswith(text.format(1 - rank))
        assert why_there.startswith(f"rank {1 - rank} gave up: {text.format(rank)}")
        assert 0.9 * timeout_s < facts["here after s"]
        assert facts["rows here are NaN"]
        assert facts["rows there are NaN"]
        assert facts["next"] == ["HeapPoisoned"] * 2
        assert facts["closing"] == [("", "")] * 2
        assert facts["a new heap works"]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_scores_that_are_not_finite(cluster, num_ranks: int):
    assert flat(cluster(num_ranks).run(check_scores)) == []


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_memory_of_another_heap(cluster, num_ranks: int):
    assert flat(cluster(num_ranks).run(check_other_heaps)) == []


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_wrong_order_and_overflow(cluster, num_ranks: int):
    assert flat(cluster(num_ranks).run(check_misuse)) == []


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_heap_that_is_too_small(cluster, num_ranks: int):
    assert flat(cluster(num_ranks).run(check_exhaustion)) == []


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_wrong_gradients(cluster, num_ranks: int):
    assert flat(cluster(num_ranks).run(check_gradients)) == []


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("schedule", ["serial", "overlapped"])
def test_errors_that_nobody_foresaw(cluster, num_ranks: int, schedule: str):
    assert flat(cluster(num_ranks).run(check_unforeseen, schedule)) == []


@pytest.mark.parametrize("broken", ["push_slots", "push_rows"])
def test_signals_that_cannot_be_sent(cluster, broken: str):
    """Nothing but giving up ends the peers' waits for them."""
    for texts in cluster(2).run(check_signals, broken):
        assert texts == []


@pytest.mark.parametrize(("heap", "kind"), [(None, "NoneType"), ("host", "str")])
def test_a_plan_without_a_heap(heap: object, kind: str):
    """No peer can be told."""
    with pytest.raises(ArgumentError, match=rf"heap \({kind}\) must be a SymmetricHeap"):
        make_plan(torch.zeros(T, K, dtype=torch.int64), num_experts=2, heap=heap)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_wrong_arguments_of_the_layer(cluster, num_ranks: int):
    assert flat(cluster(num_ranks).run(check_layer_mistakes)) == []
