"""Wrong arguments: the same typed error on every rank in the same call, and the next correct call is exact."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from culprits import TRANSFORMS, sets_of_culprits
from heap_calls import outcome
from limits import HANG_S
from worker import Findings, difference, free_bytes, open_heap

from symmoe import (
    GroupedLinear,
    Lease,
    MoEConfig,
    MoELayer,
    Plan,
    Router,
    ScaledSwiGLU,
    Sequential,
    SymmetricHeap,
    combine_tokens,
    dispatch_tokens,
    kernels,
    make_plan,
)
from symmoe.checks.arguments import CHOICES
from symmoe.errors import ArgumentError
from symmoe.grouped.mlp import GroupedMLP
from symmoe.kernels.activation import Activation
from symmoe.moe.ep_step import expert_parallel_mlp
from symmoe.precision import MXFP8, NVFP4, Float8Block
from symmoe.training.lora import add_lora

T, K, H = 6, 2, 16
NUM_BYTES = 1 << 20
Arguments = dict[str, Any]


@dataclass(frozen=True)
class Bad:
    """One mistake: what the culprits pass, and the error that every rank must raise.

    Attributes:
        change: from (heap, the correct keyword arguments) to those that are wrong.
        parts: what the text must contain; `{rank}` stands for the first culprit.
        error: name of the class.
        base: keyword arguments that all ranks pass on top of the usual ones.
    """

    change: Callable[[SymmetricHeap, Arguments], Arguments]
    parts: tuple[str, ...]
    error: str = "ArgumentError"
    base: tuple[tuple[str, Any], ...] = ()


def wrong(name: str, make: Any, *parts: str, error: str = "ArgumentError", base: tuple = ()) -> Bad:
    """The argument `name` is `make`, or, if that is a function, what it makes of the right one."""
    return Bad(lambda heap, good: {name: make(good[name]) if callable(make) else make}, parts, error, base)


def on_heap(name: str, make: Callable[[SymmetricHeap, Arguments], Any], *parts: str) -> Bad:
    return Bad(lambda heap, good: {name: make(heap, good)}, parts)


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


# What the text says of a tensor, and how it is made of a good one.
UNREADABLE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "(torch.sparse_coo)": lambda tensor: tensor.to_sparse(),
    "(torch.sparse_csr)": lambda tensor: tensor.to_sparse_csr(),
    "(a nested tensor)": lambda tensor: torch.nested.nested_tensor(list(tensor)),
    "(a nested  tensor)": lambda tensor: torch.nested.nested_tensor(list(tensor), layout=torch.jagged),
    "(Wrapper)": Wrapper,
    "(a tensor whose memory has been freed)": freed,
}


def unreadable(name: str, *, without: tuple[str, ...] = ()) -> Iterator[Bad]:
    """Mistakes in the memory of an argument [., .]."""
    for kind, make in UNREADABLE.items():
        if kind not in without:
            yield wrong(name, make, f"{name} {kind.replace('  ', ' ')} must be a strided tensor")

    def stale(heap: SymmetricHeap, good: Arguments) -> torch.Tensor:
        lease = heap.lease(tuple(good[name].shape), good[name].dtype, name="old")
        tensor = lease.tensor.copy_(good[name])
        lease.release()
        return tensor

    yield dataclasses.replace(on_heap(name, stale, f"{name} is memory of lease 'old'", "released"), error="StaleLease")


@torch.inference_mode()
def of_inference(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone()


def quantized(x: torch.Tensor) -> torch.Tensor:
    return torch.quantize_per_tensor(x, 0.1, 0, torch.quint8)


# -- arguments of each call -------------------------------------------------------------------------------------------

STATIC = (("capacity", 60), ("max_tokens", 9))


def with_id(value: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(ids: torch.Tensor) -> torch.Tensor:
        ids = ids.clone()
        ids[3, 1] = value
        ids[5, 0] = value  # the first one is named
        return ids

    return change


def plan_mistakes(num_experts: int) -> Iterator[Bad]:
    yield from unreadable("topk_idx")
    yield wrong("topk_idx", lambda ids: ids.tolist(), "topk_idx (list)", "[T, K]")
    yield wrong("topk_idx", lambda ids: ids.flatten(), f"topk_idx has shape [{T * K}]", "[T, K]")
    yield wrong("topk_idx", lambda ids: ids.float(), "topk_idx", "torch.float32", "torch.int64")
    yield wrong("topk_idx", lambda ids: ids.short(), "topk_idx", "torch.int16", "torch.int32")
    yield wrong("topk_idx", lambda ids: ids.to("meta"), "topk_idx is on meta", "on cpu")
    yield wrong("topk_idx", lambda ids: ids[:1].expand(2**31, K), "topk_idx [2147", "2**31 slots")
    yield wrong("topk_idx", lambda ids: ids[:, :0], "topk_idx has K = 0", "[1, 32]")
    yield wrong("topk_idx", lambda ids: ids[:, :1].expand(-1, 33), "K = 33", "[1, 32]")
    yield wrong("num_experts", 0, "num_experts (0)", "[1, 1024]")
    yield wrong("num_experts", 1200, "num_experts (1200)", "[1, 1024]")
    yield wrong("num_experts", True, "num_experts (True)", "int, not bool")
    yield wrong("num_experts", "8", "num_experts ('8')", "int")
    yield wrong("overflow", np.array(["raise", "drop"]), "overflow (array", "'raise'")
    yield wrong("overflow", "ignore", "overflow ('ignore')", "'raise' or 'drop'")
    yield wrong("overflow", ["drop"], "overflow (['drop'])", "'raise' or 'drop'")
    yield wrong("overflow", "drop", "overflow ('drop')", "capacity is None")
    yield wrong("dtype", np.arange(3), "dtype (", "torch.bfloat16")
    yield wrong("dtype", torch.float64, "dtype (torch.float64)", "torch.bfloat16")
    yield wrong("hidden", 0, "hidden (0)", "at least 1")
    yield wrong("hidden", "16", "hidden ('16')", "int")
    yield wrong("precision", "mxfp8", "precision ('mxfp8') must be")
    yield wrong("quantized_wire", "rows", "quantized_wire ('rows') must be")
    yield wrong("capacity", 0, "capacity (0)", "at least 1", base=STATIC)
    yield wrong("capacity", -1, "capacity (-1)", "at least 1", base=STATIC)
    yield wrong("capacity", 2.5, "capacity (2.5)", "int", base=STATIC)
    yield wrong("capacity", 2**31, "capacity (2147483648)", "less than 2**31", base=STATIC)
    yield wrong("max_tokens", T - 1, f"max_tokens ({T - 1})", f"({T})", base=STATIC)
    yield wrong("max_tokens", "9", "max_tokens ('9')", "int", base=STATIC)
    yield wrong("max_tokens", 9, "max_tokens (9)", "capacity is None")
    for base in ((), STATIC):
        for value, shown in ((num_experts, num_experts), (-2, -2), (2**40, 2**31 - 1), (-(2**40), -(2**31))):
            text = f"topk_idx on rank {{rank}}, flat position {3 * K + 1}: {shown} is neither -1 nor in"
            yield wrong("topk_idx", with_id(value), text, f"[0, {num_experts})", error="ExpertIdError", base=base)


def rows_mistakes(name: str, num_rows_text: str) -> Iterator[Bad]:
    """Mistakes in the rows that travel, `x` or `expert_out`."""
    yield from unreadable(name)
    yield wrong(name, None, f"{name} (NoneType)", "[N, H]")
    yield wrong(name, lambda x: x.flatten(), f"{name} has shape [", "[N, H]")
    yield wrong(name, lambda x: x[:, :0], f"{name} has rows of 0 features")
    yield wrong(name, lambda x: x.cfloat(), f"{name} has dtype torch.complex64")
    yield wrong(name, quantized, f"{name} has dtype torch.quint8", "torch.bfloat16")
    yield wrong(name, lambda x: torch.cat([x, x, x[:1]]), f"{name} has", num_rows_text)
    yield wrong(name, lambda x: x.int(), f"{name} has dtype torch.int32", "torch.bfloat16")
    yield wrong(name, lambda x: x.double(), f"{name} has dtype torch.float64", "torch.float16")
    yield wrong(name, lambda x: x.to("meta"), f"{name} is on meta", "on cpu")
    yield wrong("order", "fast", "order ('fast')", "'rank'", "'slot'")
    yield wrong("order", np.array(["rank", "slot"]), "order (array", "'rank'", "'slot'")


def buffer_mistakes(name: str, like: str) -> Iterator[Bad]:
    """Mistakes in a buffer for results, `out` or `grad_out`, that belongs on the heap; test_buffers.py has more."""

    def memory(
        more_rows: int = 0, features: int = H, dtype: torch.dtype = torch.float32
    ) -> Callable[..., torch.Tensor]:
        return lambda heap, good: heap.lease((len(good[name]) + more_rows, features), dtype).tensor

    def overlapping(heap: SymmetricHeap, good: Arguments) -> Arguments:
        both = heap.lease((max(len(good[name]), len(good[like])), H), torch.float32).tensor
        return {like: both[: len(good[like])].copy_(good[like]), name: both[: len(good[name])]}

    def released(heap: SymmetricHeap, good: Arguments) -> torch.Tensor:
        lease = heap.lease((len(good[name]), H), torch.float32)
        tensor = lease.tensor
        lease.release()
        return tensor

    yield wrong(name, freed, f"{name} (a tensor whose memory has been freed)")
    yield on_heap(name, memory(more_rows=1), f"{name} has shape", "must be")
    yield on_heap(name, memory(features=H + 1), f"{name} has shape", f", {H + 1}]", f", {H}]")
    yield on_heap(name, memory(dtype=torch.bfloat16), f"{name} has dtype torch.bfloat16", "torch.float32")
    yield wrong(name, lambda good: good.to("meta"), f"{name} is on meta", "on cpu")
    yield wrong(name, lambda good: good.clone(), f"{name} is not on this symmetric heap")
    yield Bad(overlapping, (f"{name} [", "overlaps a tensor of shape ["))
    if name == "out":  # a released grad_out would be found in backward
        yield dataclasses.replace(on_heap(name, released, "which was released"), error="StaleLease")


def dispatch_mistakes() -> Iterator[Bad]:
    yield from rows_mistakes("x", f"this plan needs {T}")
    yield from buffer_mistakes("out", "x")
    yield from unreadable("probs")
    yield wrong("probs", lambda p: p.tolist(), "probs (list)", "tensor")
    yield wrong("probs", lambda p: p[:, :1], f"probs has shape [{T}, 1]", f"[{T}, {K}]")
    yield wrong("probs", lambda p: p.double(), "probs has dtype torch.float64", "torch.float32")
    yield wrong("probs", lambda p: p.bfloat16(), "probs has dtype torch.bfloat16", "torch.float32")
    yield wrong("probs", lambda p: p.to("meta"), "probs is on meta", "on cpu")


def combine_mistakes() -> Iterator[Bad]:
    yield from rows_mistakes("expert_out", "this plan needs")
    yield from buffer_mistakes("grad_out", "expert_out")


# (argument, no such word, the words), the same in a call and in a configuration
WORDS = (
    ("order", "fast", "('rank', 'slot', 'node')"),
    ("stash", "some", "('all', 'rows', 'hidden', 'none')"),
    ("layout", "expert_major", "('auto', 'packed', 'expert-major')"),
    ("schedule", "overlap", "('serial', 'overlapped', 'always-overlapped')"),
    ("schedule", None, "('serial', 'overlapped', 'always-overlapped')"),
    ("quantized_wire", "forwards", "('none', 'forward', 'backward', 'both')"),
    ("quantized_wire", True, "('none', 'forward', 'backward', 'both')"),
)


def mlp_mistakes() -> Iterator[Bad]:
    for name, word, words in WORDS:
        yield wrong(name, word, f"{name} ({word!r}) must be one of {words}")


def layer_mistakes() -> Iterator[Bad]:
    flat = ("(torch.sparse_csr)", "(a nested  tensor)")  # which a mask cannot be
    for name in ("x", "token_mask", "topk_idx"):
        yield from unreadable(name, without=flat if name == "token_mask" else ())
        yield wrong(name, of_inference, f"{name} was made in inference_mode", "clone()")
    yield wrong("x", lambda x: x.tolist(), "x (list)", f"hidden ({H})")
    yield wrong("x", lambda x: x[:, :-1], f"x ([{T}, {H - 1}])", f"hidden ({H})")
    yield wrong("x", lambda x: x[:, :0], f"x ([{T}, 0])", f"hidden ({H})")
    yield wrong("x", lambda x: x.sum(), "x has shape []", f"hidden ({H})")
    yield wrong("x", lambda x: x.int(), "x has dtype torch.int32", "torch.bfloat16")
    yield wrong("x", lambda x: x.double(), "x has dtype torch.float64", "torch.float32")
    yield wrong("x", quantized, "x has dtype torch.quint8", "torch.float32")
    yield wrong("x", lambda x: x.to("meta"), "x is on meta", "on cpu")
    yield wrong("token_mask", lambda mask: mask.tolist(), "token_mask (list)", f"[{T}]")
    yield wrong("topk_idx", lambda ids: ids[:, :1], f"topk_idx has shape [{T}, 1]", f"[{T}, {K}]")


# -- the calls, on every rank -----------------------------------------------------------------------------------------


def routing(heap: SymmetricHeap, seed: int) -> torch.Tensor:
    """[T, K]: every rank has rows, from every rank."""
    generator = torch.Generator().manual_seed(seed + heap.rank)
    num_experts = 2 * heap.num_ranks
    return torch.stack([torch.randperm(num_experts, generator=generator)[:K] for _ in range(T)])


def plan_of(heap: SymmetricHeap, seed: int = 5) -> Plan:
    return make_plan(routing(heap, seed), num_experts=2 * heap.num_ranks, heap=heap)


def layer_of(heap: SymmetricHeap, **options: Any) -> MoELayer:
    """With the same weights whenever it is made."""
    torch.manual_seed(0)
    usual = {"hidden": H, "ffn": H, "num_experts": 2 * heap.num_ranks, "top_k": K, "schedule": "always-overlapped"}
    return MoELayer(MoEConfig(**{**usual, **options}), heap)


def goes_on(heap: SymmetricHeap, findings: Findings, seed: int = 3) -> None:
    """After an error nothing is leased, and the next correct call is exact."""
    findings.equal("leased bytes after the error", heap.leased_bytes, 0)
    generator = torch.Generator().manual_seed(1000 * seed + heap.rank)
    x = torch.randint(-99, 99, (T, H), generator=generator).float()
    probs = torch.rand((T, K), generator=generator)
    plan = plan_of(heap, seed)
    rows, row_probs = dispatch_tokens(x, plan, probs=probs)
    want = sum((x * probs[:, k : k + 1] for k in range(K)), torch.zeros(T, H))
    found = combine_tokens(rows * row_probs[:, None], plan, order="slot")
    findings.check(torch.equal(found, want), "the next correct call is wrong")


def expect(findings: Findings, found: tuple[str, str], error: str, *parts: str) -> None:
    """Notes an error of another class, and each part that its text has not."""
    name, text = found
    findings.equal("error", (name, "" if name == error else text), (error, ""))
    for part in parts:
        findings.check(part in text, f"{part!r} is not in {text!r}")


class Stage:
    """One public call with correct arguments that mistakes start from."""

    def __init__(self, name: str, heap: SymmetricHeap, base: tuple = ()) -> None:
        self.plan: Plan | None = None
        ids = routing(heap, 5)
        generator = torch.Generator().manual_seed(heap.rank)
        x, probs = torch.randn((T, H), generator=generator), torch.rand((T, K), generator=generator)
        if name == "make_plan":
            self.function: Callable[..., Any] = make_plan
            self.good = {"topk_idx": ids, "num_experts": 2 * heap.num_ranks, "heap": heap, **dict(base)}
            return
        if name == "layer":
            self.function = layer_of(heap)
            self.good = {"x": x, "token_mask": torch.ones(T, dtype=torch.bool), "topk_idx": ids}
            return
        self.plan = plan = plan_of(heap)
        if name == "expert_parallel_mlp":
            self.function = expert_parallel_mlp
            self.good = {"x": x, "probs": probs, "experts": GroupedMLP(2, H, H), "plan": plan}
            return
        buffer = heap.lease((plan.row_capacity, H), torch.float32).tensor
        if name == "dispatch_tokens":
            self.function = dispatch_tokens
            self.good = {"x": x, "plan": plan, "probs": probs, "out": buffer, "order": "rank"}
            return
        dispatch_tokens(x, plan, probs=probs)
        self.function, expert_out = combine_tokens, torch.ones(plan.num_rows, H)
        self.good = {"expert_out": expert_out, "plan": plan, "order": "rank", "grad_out": buffer[: plan.num_rows]}

    def call(self, **changes: Any) -> tuple[str, str]:
        """(class, text) of the error."""
        return outcome(self.function, **{**self.good, **changes})


MISTAKES = {
    "dispatch_tokens": dispatch_mistakes,
    "combine_tokens": combine_mistakes,
    "expert_parallel_mlp": mlp_mistakes,
    "layer": layer_mistakes,
}


def check_mistakes(rank: int, num_ranks: int, stage_name: str) -> list[str]:
    findings = Findings()
    make, y = MISTAKES.get(stage_name, partial(plan_mistakes, 2 * num_ranks)), []
    with open_heap("cpu", num_bytes=NUM_BYTES) as heap:
        for turn, (culprits, bad) in enumerate(itertools.product(sets_of_culprits(num_ranks), list(make()))):
            findings.where = f"{stage_name}, {bad.parts} on ranks {culprits}, seen by rank {rank} of {num_ranks}"
            stage = Stage(stage_name, heap, bad.base)
            found = stage.call(**(bad.change(heap, stage.good) if rank in culprits else {}))
            expect(findings, found, bad.error, *(part.format(rank=culprits[0]) for part in bad.parts))
            if rank != culprits[0] and bad.error != "ExpertIdError":  # the first one's error, if there are several
                findings.check(found[1].startswith(f"on rank {culprits[0]}: "), f"the culprit is not named: {found[1]}")
            if stage_name == "expert_parallel_mlp":
                findings.check(stage.plan.packed_to_row is None, "tokens have been dispatched")
            if stage_name == "layer":
                y.append(stage.function(stage.good["x"])[0].detach())
                findings.equal("y of the next correct call", y[-1], y[0])
            del stage
            goes_on(heap, findings, turn)
    return findings.texts


def plan_mismatches(num_experts: int) -> Iterator[tuple[Arguments | None, str, str, str, tuple]]:
    """(what the culprit passes, None: one column of ids; field, the usual value, the culprit's, arguments of all) of
    what only a comparison between ranks can find."""
    agreed = (*STATIC, ("hidden", H), ("dtype", torch.float32))
    for base in ((), agreed):
        yield None, "top_k", str(K), "1", base
        yield {"num_experts": 2 * num_experts}, "num_experts", str(num_experts), str(2 * num_experts), base
    yield {"capacity": 61}, "capacity", "60", "61", agreed
    yield {"capacity": None, "max_tokens": None}, "capacity", "60", "none", agreed
    yield {"overflow": "drop"}, "overflow", "'raise'", "'drop'", agreed
    yield {"max_tokens": 10}, "max_tokens", "9", "10", agreed
    yield {"max_tokens": None}, "max_tokens", "9", str(T), agreed
    yield {"hidden": 2 * H}, "hidden", str(H), str(2 * H), agreed
    yield {"hidden": None}, "hidden", str(H), "none", agreed
    yield {"dtype": torch.float16}, "dtype", "torch.float32", "torch.float16", agreed
    yield {"dtype": None}, "dtype", "torch.float32", "none", agreed


# What the text says of a recipe. Rows in some of them have the same bytes.
RECIPES = (None, Float8Block(), Float8Block(power_of_two=True), MXFP8(), NVFP4(hadamard_signs=5))


def layer_mismatches(num_ranks: int) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """(fields of all configurations, one field, the culprit's value): what plans compare and what only this rank
    computes with."""
    changes = {"hidden": 2 * H, "top_k": 1, "num_experts": 4 * num_ranks, "capacity": 99, "ffn": 2 * H}
    changes |= {"stash": "rows", "aux_loss_coef": 0.5, "max_room": 7, "score": "sigmoid"}
    for field, value in {**changes, "activation": Activation(function="gelu")}.items():
        yield {}, field, value
    for usual, other in itertools.combinations(RECIPES, 2):
        yield {"hidden": 64, "ffn": 32, "precision": usual}, "precision", other
    for usual, other in itertools.combinations(CHOICES["quantized_wire"], 2):
        yield {"hidden": 64, "ffn": 32, "precision": MXFP8(), "quantized_wire": usual}, "quantized_wire", other


def check_mismatches(rank: int, num_ranks: int) -> list[str]:
    findings = Findings()
    with open_heap("cpu", num_bytes=NUM_BYTES) as heap:
        for culprit in range(num_ranks):
            for turn, (changes, field, usual, other, base) in enumerate(plan_mismatches(2 * num_ranks)):
                findings.where = f"{field}: {other} on rank {culprit}, seen by rank {rank} of {num_ranks}"
                stage = Stage("make_plan", heap, base)
                if changes is None:
                    changes = {"topk_idx": stage.good["topk_idx"][:, :1]}
                found = stage.call(**(changes if rank == culprit else {}))
                wanted = difference(f"{field} differs", culprit, usual, other)
                findings.equal("error", found, ("ConfigMismatch", wanted))
                goes_on(heap, findings, turn)
            for fields, field, value in layer_mismatches(num_ranks):
                findings.where = f"layer: {field}={value} on rank {culprit}, seen by rank {rank} of {num_ranks}"
                layer = layer_of(heap, **(fields | {field: value} if rank == culprit else fields))
                values = getattr(layer_of(heap, **fields).config, field), value
                usual, other = ("none" if v is None else repr(v).removesuffix(".0") for v in values)
                found = outcome(layer, torch.randn(T, layer.config.hidden))
                findings.equal(
                    "error", found, ("ConfigMismatch", difference(f"{field} differs", culprit, usual, other))
                )
                goes_on(heap, findings)
        # Not collective: the configuration is the same everywhere.
        text = f"num_experts ({2 * num_ranks + 1}) must be divisible by the number of ranks ({num_ranks})"
        found = outcome(layer_of, heap, num_experts=2 * num_ranks + 1)
        findings.equal("error", found, ("ArgumentError", text))
    return findings.texts


def check_order_of_errors(rank: int, num_ranks: int) -> list[str]:
    """Several things are wrong at once: every rank names the same one. And one fault follows the other at once."""
    findings = Findings()
    findings.where = f"rank {rank} of {num_ranks}"
    with open_heap("cpu", num_bytes=NUM_BYTES) as heap:
        num_experts, ids = 2 * num_ranks, routing(heap, 1)
        bad_id = with_id(num_experts + rank)(ids)
        for turn in range(40):  # rank 0 fails in its arguments, all others have ids out of range
            found = Stage("make_plan", heap).call(**({"topk_idx": bad_id} if rank else {"overflow": f"turn {turn}"}))
            findings.equal(f"class in turn {turn}", found[0], "ArgumentError")
            findings.check(f"overflow ('turn {turn}')" in found[1], f"turn {turn}: {found[1]!r}")
        goes_on(heap, findings)
        found = Stage("make_plan", heap).call(topk_idx=bad_id if rank else ids)
        place, limits = f"topk_idx on rank 1, flat position {3 * K + 1}", f"[0, {num_experts})"
        text = f"{place}: {num_experts + 1} is neither -1 nor in {limits}"
        findings.equal("error", found, ("ExpertIdError", text))
    return findings.texts


def mismatches_of_misuse(heap: SymmetricHeap, findings: Findings) -> None:
    """On several ranks."""
    rank, num_ranks = heap.rank, heap.num_ranks
    # A static capacity and uneven T, without max_tokens.
    found = Stage("make_plan", heap).call(topk_idx=routing(heap, 5)[rank:], capacity=T * K * num_ranks)
    wanted = f"max_tokens differs: rank 0 has {T}, rank 1 has {T - 1}"
    findings.equal("uneven T", found, ("ConfigMismatch", wanted))
    goes_on(heap, findings)
    # The order of dispatch is that of its backward.
    rows, _ = dispatch_tokens(torch.randn(T, H, requires_grad=True), plan_of(heap), order="slot" if rank else "rank")
    wanted = "order differs at 'combine: ready': rank 0 has rank, rank 1 has slot"
    findings.equal("order", outcome(rows.sum().backward), ("ConfigMismatch", wanted))
    del rows
    goes_on(heap, findings)


def check_misuse(rank: int, num_ranks: int) -> list[str]:
    """Calls in a wrong order, more rows than the capacity, orders of sums that differ, and a heap that is closed."""
    findings = Findings()
    findings.where = f"rank {rank} of {num_ranks}"
    with open_heap("cpu", num_bytes=NUM_BYTES) as heap:
        plan = plan_of(heap)
        text = "this plan has dispatched nothing yet: dispatch_tokens comes before combine_tokens"
        found = outcome(combine_tokens, torch.ones(plan.num_rows, H), plan)
        wanted = ("StalePlan", text if rank == 0 else f"on rank 0: {text}")
        findings.equal("combine before dispatch", found, wanted)
        goes_on(heap, findings)
        last = torch.full((T, K), 2 * num_ranks - 1)
        for capacity in (1, T * K * num_ranks - 1):
            wanted = f"rank {num_ranks - 1} is routed {T * K * num_ranks} rows, more than capacity ({capacity})"
            found = Stage("make_plan", heap).call(topk_idx=last, capacity=capacity)
            findings.equal("overflow", found, ("CapacityError", wanted))
            goes_on(heap, findings, capacity)
        layer, x = layer_of(heap), torch.randn(T, H)
        want = layer(x)[0].detach()
        layer.experts.to(torch.float64 if rank == 0 else torch.float32)
        expect(findings, outcome(layer, x), "ArgumentError", "the weights are torch.float64")
        findings.equal("experts of float64 are cast back", layer.float()(x)[0].detach(), want)
        stage = Stage("expert_parallel_mlp", heap)
        if num_ranks > 1:
            mismatches_of_misuse(heap, findings)
    for wrong in ({"schedule": "overlap"}, {"quantized_wire": "both"}):  # wrong words, of which no peer can be told
        findings.equal(f"error of {wrong} on a closed heap", stage.call(**wrong)[0], "HeapClosed")
    return findings.texts


def check_plans(rank: int, num_ranks: int) -> list[str]:
    """A rank that brings another plan than its peers, older or of another call, which has the same shapes."""
    findings = Findings()
    with open_heap("cpu", num_bytes=NUM_BYTES) as heap:
        x = torch.randn(T, H)
        for culprit, fails_between in itertools.product(range(num_ranks), (False, True)):
            findings.where = f"culprit {culprit}, a fault between {fails_between}, rank {rank} of {num_ranks}"
            old = plan_of(heap)
            dispatch_tokens(x, old)
            if fails_between:  # epochs that were launched and have not counted are nobody's generations
                findings.equal("error", Stage("make_plan", heap).call(overflow=rank)[0], "ArgumentError")
            new = plan_of(heap)
            text = difference("plan differs at '{}'", culprit, new.generation, old.generation)
            mine = old if rank == culprit else new
            found = outcome(dispatch_tokens, x, mine)
            findings.equal("error", found, ("ConfigMismatch", text.format("dispatch: ready")))
            dispatch_tokens(x, new)
            found = outcome(combine_tokens, torch.ones(mine.num_rows, H), mine)
            findings.equal("error", found, ("ConfigMismatch", text.format("combine: ready")))
            dispatch_tokens(x, new)
            goes_on(heap, findings, culprit)
            rows, _ = dispatch_tokens(x, old)  # a plan may be used as often as its ranks like
            findings.equal("y by the old plan", combine_tokens(rows, old, order="slot"), K * x)
            del rows
            findings.equal("leased bytes", heap.leased_bytes, 0)
    return findings.texts


def check_plans_of_different_heaps(rank: int, num_ranks: int) -> list[str]:
    """Rank 0 brings a plan of heap B, rank 1 one of heap A. No rank can tell it from a peer that does not come, so that
    is what both raise, there and then on the other heap."""
    findings, timeout_s = Findings(), 1.0
    findings.where = f"rank {rank}"
    x, heaps = torch.randn(T, H), [SymmetricHeap(num_bytes=NUM_BYTES, backend="host") for _ in range(2)]
    plans = [plan_of(heap) for heap in heaps]
    buffers = [heap.lease((T * K * num_ranks, H), torch.float32).tensor.fill_(7) for heap in heaps]
    for heap in heaps:
        heap.timeout_s = heap.start_timeout_s = timeout_s
    timeout = "rank {} did not reach 'dispatch: ready' within timeout_s=1: expected epoch"
    for index, wanted, text in (
        (1 - rank, "PeerTimeout", timeout.format(1 - rank)),
        (rank, "PeerAborted", f"rank {1 - rank} gave up: {timeout.format(rank)}"),
    ):
        dist.barrier()
        start = time.monotonic()
        out = buffers[index][: plans[index].row_capacity]
        name, found = outcome(dispatch_tokens, x, plans[index], out=out)
        findings.check(name == wanted and found.startswith(text), f"{name}: {found}")
        findings.check(wanted == "PeerAborted" or time.monotonic() - start > 0.9 * timeout_s, "it was not waited")
        findings.check(bool(out.isnan().all()), "rows are not NaN")
    for heap in heaps:
        findings.equal("the next error", outcome(plan_of, heap)[0], "HeapPoisoned")
    for heap in heaps:
        heap.timeout_s = HANG_S  # nobody waits
        findings.equal("closing", outcome(heap.close), ("", ""))
    dist.barrier()
    with open_heap("cpu", num_bytes=NUM_BYTES) as heap:
        goes_on(heap, findings)
    return findings.texts


PLACES = (
    ("experts.fc1.weight", lambda layer: layer.experts.to("meta")),
    ("experts.fc2.weight", lambda layer: layer.experts.fc2.to("meta")),
    ("experts.fc1.lora_b", lambda layer: (add_lora(layer, rank=2, alpha=1.0), _to_meta(layer.experts.fc1, "lora_b"))),
    ("router.weight", lambda layer: layer.router.to("meta")),
    ("shared_expert.bias", lambda layer: _to_meta(layer.shared_expert, "bias")),
)


def _to_meta(module: torch.nn.Module, name: str) -> None:
    module._parameters[name] = torch.nn.Parameter(torch.empty_like(module._parameters[name], device="meta"))


def check_places(rank: int, num_ranks: int) -> list[str]:
    """Parameters that have no memory, in the first call and later."""
    findings = Findings()
    with open_heap("cpu", num_bytes=NUM_BYTES) as heap:

        def new_layer(**options: Any) -> MoELayer:
            config = layer_of(heap).config
            return MoELayer(config, heap, shared_expert=torch.nn.Linear(H, H, **options), **options)

        x = torch.randn(T, H)
        for culprits, (name, move), calls in itertools.product(sets_of_culprits(num_ranks), PLACES, (0, 1, 9)):
            findings.where = f"{name} on ranks {culprits}, after {calls} calls, seen by rank {rank} of {num_ranks}"
            layer = new_layer()
            for _ in range(calls):
                layer(x)[0].sum().backward()
            if rank in culprits:
                move(layer)
            expect(findings, outcome(layer, x), "ArgumentError", f"{name} is on meta; it must be on cpu")
            goes_on(heap, findings)
        findings.where = f"assigned experts of another size, seen by rank {rank} of {num_ranks}"
        layer = new_layer()
        fitting, layer.experts = layer.experts, GroupedMLP(2, H, 2 * H if rank == num_ranks - 1 else H)
        expect(findings, outcome(layer, x), "ArgumentError", f"experts.ffn ({2 * H}) must be {H}")
        layer.experts = fitting
        findings.equal("y", outcome(layer, x), ("", ""))
        findings.where = f"a layer without memory, seen by rank {rank} of {num_ranks}"
        layer = new_layer(device="meta")
        expect(findings, outcome(layer, x), "ArgumentError", "router.weight is on meta")
        layer.to_empty(device="cpu")
        for parameter in layer.parameters():
            torch.nn.init.constant_(parameter, 0.25)
        findings.equal("y", outcome(layer, x), ("", ""))
    return findings.texts


def check_scores(rank: int, num_ranks: int) -> list[str]:
    """NaN and Inf in the router's logits, by a token or by the router's weight."""
    findings = Findings()
    with open_heap("cpu", num_bytes=NUM_BYTES) as heap:
        for layer in (layer_of(heap), layer_of(heap, capacity=T * K * num_ranks)):
            x = torch.randn(T, H)
            want = layer(x)[0].detach().clone()
            for culprit, value in itertools.product(range(num_ranks), map(float, ("nan", "inf", "-inf"))):
                findings.where = f"{value} on rank {culprit}, rank {rank} of {num_ranks}"
                bad = x.clone()
                if rank == culprit:
                    bad[3, 5], bad[4] = value, value
                text = "the router's logits of token 3 are not finite (2 such tokens)"
                wanted = text if rank == culprit else f"on rank {culprit}: {text}"
                findings.equal("error", outcome(layer, bad), ("ArgumentError", wanted))
                findings.equal("y of the next correct call", layer(x)[0], want)
            mask = torch.ones(T, dtype=torch.bool)
            mask[3:5] = False
            findings.check(bool(layer(bad, mask)[0].isfinite().all()), "padding may hold anything")
    return findings.texts


def check_other_heaps(rank: int, num_ranks: int) -> list[str]:
    """Memory of another heap: refused as a buffer that peers reach into, copied like any other memory as input."""
    findings = Findings()
    findings.where = f"rank {rank} of {num_ranks}"
    with open_heap("cpu", num_bytes=NUM_BYTES) as heap, open_heap("cpu", num_bytes=NUM_BYTES) as other:
        for turn in range(3):
            x, plan = torch.randn(T, H), plan_of(heap, turn)
            rows, _ = dispatch_tokens(x, plan)
            foreign = other.lease((plan.row_capacity, H), torch.float32, name="foreign").tensor
            for name, found in (
                ("out", outcome(dispatch_tokens, x, plan, out=foreign)),
                ("grad_out", outcome(combine_tokens, rows, plan, grad_out=foreign[: len(rows)])),
            ):
                expect(findings, found, "ArgumentError", f"{name} is not on this symmetric heap")
            foreign[: len(rows)] = rows
            y = combine_tokens(foreign[: plan.num_rows], plan, order="slot")
            findings.equal("y of foreign rows", y, sum(x for _ in range(K)))
            del foreign, rows, plan
            goes_on(heap, findings, turn)
            goes_on(other, findings, turn)
    return findings.texts


# -- a heap that is too small -----------------------------------------------------------------------------------------


LEASING_CALLS = ("dispatch_tokens", "combine_tokens", "layer", "backward of dispatch", "backward of the layer")


def leasing_call(name: str, heap: SymmetricHeap, layer: MoELayer) -> Callable[[], object]:
    """What is to fail, when all that comes before it is done."""
    x, probs = torch.randn(T, H, requires_grad=True), torch.rand((T, K), requires_grad=True)
    if name == "layer":
        return lambda: layer(x)[0].sum().backward()
    if name == "backward of the layer":
        return layer(x)[0].sum().backward
    plan = plan_of(heap, 2)
    if name == "dispatch_tokens":
        return partial(dispatch_tokens, x, plan, probs=probs)
    rows, row_probs = dispatch_tokens(x, plan, probs=probs)
    if name == "combine_tokens":
        return partial(combine_tokens, torch.ones(plan.num_rows, H), plan)
    return (rows * row_probs[:, None]).sum().backward


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
    parts = ("lease '", " needs ", "high-water mark", f"num_bytes (now {NUM_BYTES})")
    with open_heap("cpu", num_bytes=NUM_BYTES) as heap:
        layer = layer_of(heap)
        for (turn, culprits), name in itertools.product(enumerate(sets_of_culprits(num_ranks)), LEASING_CALLS):
            for left in range(0, 1 << 14, 512):
                findings.where = f"{name} with {left} bytes left on {culprits}, rank {rank} of {num_ranks}"
                call = leasing_call(name, heap, layer)
                taken = exhaust(heap, left) if rank in culprits else []
                found = outcome(call)
                del call, taken
                goes_on(heap, findings, turn)
                if found == ("", ""):
                    break
                expect(findings, found, "HeapExhausted", *parts)
                findings.check(rank in culprits or found[1].startswith(f"on rank {culprits[0]}: "), found[1])
            findings.check(0 < left < (1 << 14) - 512, "the memory was always or never enough")
    return findings.texts


# -- gradients that a caller brings -----------------------------------------------------------------------------------

PASSED_ON = ("(torch.sparse_coo)", "(Wrapper)", "has been freed", "lease 'old'")  # autograd itself refuses others


def check_gradients(rank: int, num_ranks: int) -> list[str]:
    """A gradient that kernels cannot read, on one rank or on all: the same error on every rank; the next is right."""
    findings = Findings()
    kinds = [bad for bad in unreadable("the gradient") if any(part in bad.parts[0] for part in PASSED_ON)]
    assert len(kinds) == len(PASSED_ON)
    with open_heap("cpu", num_bytes=NUM_BYTES) as heap:
        layer, x = layer_of(heap), torch.randn(T, H, requires_grad=True)

        def outputs(name: str) -> list[torch.Tensor]:
            """What is differentiated; the first is the one of that name."""
            if name == "y of the layer":
                return [layer(x)[0]]
            plan = plan_of(heap)
            rows, row_probs = dispatch_tokens(x, plan, probs=torch.ones(T, K, requires_grad=True))
            if name == "y of combine_tokens":
                return [combine_tokens(torch.ones(plan.num_rows, H, requires_grad=True), plan)]
            return [rows, row_probs] if name == "rows" else [row_probs, rows]

        for name in ("y of the layer", "y of combine_tokens", "rows", "row_probs"):
            for turn, (culprits, bad) in enumerate(itertools.product(sets_of_culprits(num_ranks), kinds)):
                findings.where = f"{bad.parts} of {name} on {culprits}, seen by rank {rank} of {num_ranks}"
                found = outputs(name)
                gradients = [torch.ones_like(tensor) for tensor in found]
                if rank in culprits:
                    gradients[0] = bad.change(heap, {"the gradient": gradients[0]})["the gradient"]
                parts = [part.replace("the gradient ", f"the gradient of {name.split()[0]} ") for part in bad.parts]
                expect(findings, outcome(torch.autograd.backward, found, gradients), bad.error, *parts)
                del found, gradients
                goes_on(heap, findings, turn)
    return findings.texts


# -- transforms of torch.func and forward-mode AD ---------------------------------------------------------------------


def check_transforms(rank: int, num_ranks: int) -> list[str]:
    """On one rank or on all, of what is passed or of weights alone: the same error on every rank; the next is right."""
    findings = Findings()
    with open_heap("cpu", num_bytes=NUM_BYTES, timeout_s=5.0) as heap:
        layer, ids, plan, x = layer_of(heap), routing(heap, 5), plan_of(heap), torch.ones(T, H)
        dispatch_tokens(x, plan)

        def of_weights(weight: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(layer, {"router.weight": weight}, (x,))[0].sum()

        calls: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]] = {
            "layer": (lambda x: layer(x)[0].sum(), x),
            "weights": (of_weights, layer.router.weight.detach()),
            "make_plan": (lambda x: make_plan(ids, num_experts=2 * num_ranks, heap=heap).num_dropped + x.sum(), x),
            "experts": (lambda x: expert_parallel_mlp(x, torch.ones(T, K), layer.experts, plan).sum(), x),
            "dispatch_tokens": (lambda x: dispatch_tokens(x, plan)[0].sum(), x),
            "combine_tokens": (lambda rows: combine_tokens(rows, plan).sum(), torch.ones(plan.num_rows, H)),
        }
        for culprits, (name, transform) in itertools.product(sets_of_culprits(num_ranks), TRANSFORMS.items()):
            for kind, (call, argument) in calls.items():
                findings.where = f"{name} of {kind} on {culprits}, seen by rank {rank} of {num_ranks}"
                found = outcome(transform, call, argument) if rank in culprits else outcome(call, argument)
                expect(findings, found, "ArgumentError", "no rules for transforms of torch.func")
                goes_on(heap, findings)
            y = layer(x.requires_grad_())[0]
            options = {"is_grads_batched": True} if rank in culprits else {}
            dy = torch.ones((2, T, H) if rank in culprits else (T, H))
            found = outcome(torch.autograd.grad, y, x, dy, **options)
            expect(findings, found, "ArgumentError", "(a tensor of vmap) must be a strided tensor")
            del y
            x.requires_grad_(False)
            goes_on(heap, findings)
    return findings.texts


CONFIG = MoEConfig(hidden=H, ffn=H, num_experts=2, top_k=K)
TRANSFORMED: dict[str, tuple[Callable[[], Any], tuple[Any, ...]]] = {
    "GroupedLinear": (lambda: GroupedLinear(2, H, H), ([2, 4],)),
    "GroupedMLP": (lambda: GroupedMLP(2, H, H), ([2, 4], torch.ones(T))),
    "ScaledSwiGLU": (ScaledSwiGLU, (torch.ones(T),)),
    "Sequential": (lambda: Sequential(GroupedLinear(2, H, H), GroupedLinear(2, H, H)), ([2, 4], [2, 4])),
    "Router": (lambda: Router(CONFIG), ()),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", TRANSFORMED)
def test_transforms_of_modules_without_a_heap(name: str, transform: str):
    make, others = TRANSFORMED[name]
    module = make()
    with pytest.raises(ArgumentError, match=r"no rules for transforms of torch\.func"):
        TRANSFORMS[transform](lambda x: module(x, *others), torch.ones(T, H))


# -- errors that nobody foresaw ---------------------------------------------------------------------------------------


KERNELS_OF_A_STEP = "count_slots grouped_gemm_act grouped_gemm push_sums sum_home".split()
KERNELS_OF_A_STEP += "grouped_gemm_dact grouped_gemm_dgrad grouped_gemm_wgrad".split()


def check_unforeseen(rank: int, num_ranks: int, schedule: str) -> list[str]:
    """One rank has an error of its own in the middle of a call: the others raise it too, at once. The heap lives."""
    findings, ops = Findings(), kernels.for_device(torch.device("cpu"))

    def fail(*_: object, **__: object) -> None:
        raise OSError("no space left")

    def spoiled(call: Callable[[], object], owner: Any, name: str, culprit: int) -> None:
        """`call` with owner.name out of order on one rank."""
        findings.where = f"{name}, culprit {culprit}, rank {rank} of {num_ranks}"
        started = time.monotonic()
        with pytest.MonkeyPatch.context() as patch:
            if rank == culprit:
                patch.setattr(owner, name, fail)
            found = outcome(call)
        text = "no space left" if rank == culprit else f"on rank {culprit}: OSError: no space left"
        findings.equal("error", found, ("OSError" if rank == culprit else "SymmoeError", text))
        findings.check(time.monotonic() - started < 30, "the peers have waited")
        goes_on(heap, findings, culprit)

    with open_heap("cpu", num_bytes=NUM_BYTES, timeout_s=60.0) as heap:
        config = layer_of(heap, schedule=schedule).config
        layer = MoELayer(config, heap, shared_expert=torch.nn.Identity())
        x = torch.randn(T, H, requires_grad=True)
        for culprit in range(num_ranks):
            for owner in (layer.router, layer.shared_expert):
                spoiled(lambda: layer(x)[0].sum().backward(), owner, "forward", culprit)
            for name in KERNELS_OF_A_STEP:
                spoiled(lambda: layer(x)[0].sum().backward(), ops, name, culprit)
            plan = plan_of(heap)
            spoiled(partial(dispatch_tokens, x, plan), ops, "push_rows", culprit)
            rows, _ = dispatch_tokens(x, plan)
            spoiled(partial(combine_tokens, rows.detach().clone(), plan), ops, "push_sums", culprit)
            loss = dispatch_tokens(x, plan)[0].sum()
            del rows
            spoiled(loss.backward, ops, "push_sums", culprit)
            findings.check(bool(layer(x)[0].isfinite().all()), "the layer works no more")
    return findings.texts


def check_signals(rank: int, num_ranks: int, broken: str) -> list[str]:
    """Signals that cannot be sent: nothing but giving up ends the peers' waits for them."""
    findings = Findings()
    findings.where = f"rank {rank} of {num_ranks}"
    with open_heap("cpu", num_bytes=NUM_BYTES, timeout_s=60.0) as heap:
        layer, ops, started = layer_of(heap), kernels.for_device(heap.device), time.monotonic()
        with pytest.MonkeyPatch.context() as patch:
            if rank == 0:
                patch.setattr(ops, broken, None)
            found = outcome(layer, torch.randn(T, H))
        findings.check(time.monotonic() - started < 30, "the peer has waited")
        text = "'NoneType' object is not callable"
        wanted = ("TypeError", text) if rank == 0 else ("PeerAborted", f"rank 0 gave up: TypeError: {text}")
        findings.equal("error", found, wanted)
        findings.equal("next error", outcome(layer, torch.randn(T, H))[0], "HeapPoisoned")
    return findings.texts


# (numbers of ranks, what is checked, with which arguments)
CHECKS: tuple[tuple[tuple[int, ...], Callable[..., list[str]], tuple[Any, ...]], ...] = (
    *(((1, 3), check_mistakes, (stage,)) for stage in ("make_plan", *MISTAKES)),
    ((2, 4), check_mismatches, ()),
    ((2, 3), check_order_of_errors, ()),
    ((2, 3), check_plans, ()),
    ((2,), check_plans_of_different_heaps, ()),
    ((1, 3), check_places, ()),
    ((1, 3), check_scores, ()),
    ((1, 2), check_other_heaps, ()),
    ((1, 2, 4), check_misuse, ()),
    ((1, 3), check_exhaustion, ()),
    ((1, 2), check_gradients, ()),
    ((1, 2), check_transforms, ()),
    *(((2, 3), check_unforeseen, (schedule,)) for schedule in ("serial", "overlapped")),
    *(((2,), check_signals, (broken,)) for broken in ("push_slots", "push_rows")),
)


def cases() -> list[Any]:
    found = []
    for sizes, check, arguments in CHECKS:
        for num_ranks in sizes:
            name = "-".join(map(str, (check.__name__.removeprefix("check_"), *arguments, num_ranks)))
            found.append(pytest.param(num_ranks, check, arguments, id=name))
    return found


@pytest.mark.parametrize(("num_ranks", "check", "arguments"), cases())
def test_every_rank_raises_it_and_the_next_call_works(cluster, num_ranks: int, check: Any, arguments: tuple[Any, ...]):
    assert cluster(num_ranks).run(check, *arguments) == [[]] * num_ranks


@pytest.mark.parametrize(("name", "word", "words"), WORDS)
def test_the_configuration_takes_the_same_words(name: str, word: object, words: str):
    with pytest.raises(ArgumentError) as raised:
        MoEConfig(hidden=H, ffn=H, num_experts=2, top_k=K, **{name: word})
    assert str(raised.value) == f"{name} ({word!r}) must be one of {words}"


@pytest.mark.parametrize(("heap", "kind"), [(None, "NoneType"), ("host", "str")])
def test_a_plan_without_a_heap(heap: object, kind: str):
    """No peer can be told."""
    with pytest.raises(ArgumentError, match=rf"heap \({kind}\) must be a SymmetricHeap"):
        make_plan(torch.zeros(T, K, dtype=torch.int64), num_experts=2, heap=heap)
