"""Wrong arguments of public calls, one table for tests/moe/test_bad_input.py and reliability/fuzz.py."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from heap_calls import expect, outcome, round_trip
from layers import layer_config
from worker import Findings

from symmoe import MoELayer, SymmetricHeap, combine_tokens, dispatch_tokens, kernels, make_plan
from symmoe.checks.arguments import CHOICES
from symmoe.dispatch.plan import Plan
from symmoe.grouped.mlp import GroupedMLP
from symmoe.kernels.activation import Activation
from symmoe.moe.ep_step import OPTION_DEFAULTS, expert_parallel_mlp
from symmoe.precision import MXFP8, NVFP4, Float8Block

T, K, H = 6, 2, 16
NUM_BYTES = 1 << 20
Arguments = dict


@dataclass(frozen=True)
class Bad:
    """One mistake: what the culprits pass, and the error that every rank must raise."""

    change: Callable[
        [SymmetricHeap, Arguments], Arguments
    ]  # from correct keyword arguments to wrong ones
    parts: tuple[str, ...]  # what the text must contain; `{rank}` stands for the first culprit
    error: str = "ArgumentError"  # name of the class
    base: tuple[
        tuple[str, object], ...
    ] = ()  # keyword arguments that all ranks pass on top of the usual ones


def wrong(name: str, make, *parts: str, error: str = "ArgumentError", base: tuple = ()) -> Bad:
    """The argument `name` is `make`, or, if that is a function, what it makes of the right one."""
    return Bad(
        lambda heap, good: {name: make(good[name]) if callable(make) else make}, parts, error, base
    )


def on_heap(name: str, make: Callable[[SymmetricHeap, Arguments], object], *parts: str) -> Bad:
    return Bad(lambda heap, good: {name: make(heap, good)}, parts)


# -- tensors that kernels cannot read ---------------------------------------------------------------------------------
class Wrapper(torch.Tensor):
    """A tensor whose memory another one has, as DTensor is."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "Wrapper":
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device
        )

    @classmethod
    def __torch_dispatch__(cls, func, types, args: tuple = (), kwargs: dict | None = None):
        raise NotImplementedError(func)


def freed(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def stale(name: str) -> Callable[[SymmetricHeap, Arguments], torch.Tensor]:
    """A copy of an argument in memory of a lease that is over."""

    def make(heap: SymmetricHeap, good: Arguments) -> torch.Tensor:
        lease = heap.lease(tuple(good[name].shape), good[name].dtype, name="old")
        tensor = lease.tensor.copy_(good[name])
        lease.release()
        return tensor

    return make


# What the text says of a tensor, and how it is made of a good one.
UNREADABLE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "(torch.sparse_coo)": lambda tensor: tensor.to_sparse(),
    "(torch.sparse_csr)": lambda tensor: tensor.to_sparse_csr(),
    "(a nested tensor)": lambda tensor: torch.nested.nested_tensor(list(tensor)),
    "(a nested  tensor)": lambda tensor: torch.nested.nested_tensor(
        list(tensor), layout=torch.jagged
    ),
    "(Wrapper)": Wrapper,
    "(a tensor whose memory has been freed)": freed,
}


def unreadable(name: str, *, without: tuple[str, ...] = ()) -> Iterator[Bad]:
    """Mistakes in the memory of an argument [., .]."""
    for kind, make in UNREADABLE.items():
        if kind not in without:
            yield wrong(name, make, f"{name} {kind.replace('  ', ' ')} must be a strided tensor")

    released = on_heap(name, stale(name), f"{name} is memory of lease 'old'", "released")
    yield dataclasses.replace(released, error="StaleLease")


@torch.inference_mode()
def of_inference(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone()


def quantized(x: torch.Tensor) -> torch.Tensor:
    return torch.quantize_per_tensor(x, 0.1, 0, torch.quint8)


# -- arguments of each call -------------------------------------------------------------------------------------------
STATIC = (("capacity", 60), ("max_tokens", 9))
REPLICAS = (("replicas_per_rank", 1),)
SIZES = [name for name, kind in make_plan.__annotations__.items() if kind.startswith("int")]


def with_id(value: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(ids: torch.Tensor) -> torch.Tensor:
        ids = ids.clone()
        ids[3, 1] = value
        ids[5, 0] = value  # the first one is named
        return ids

    return change


def ids_out_of_range(num_experts: int, base: tuple = ()) -> list[Bad]:
    """Values of `topk_idx`, and what the text shows of them: kernels see the nearest int32."""
    mistakes = []
    for value in (num_experts, -2, 2**40, -(2**40)):
        shown = max(-(2**31), min(value, 2**31 - 1))
        text = f"topk_idx on rank {{rank}}, flat position {3 * K + 1}: {shown} is neither -1 nor in"
        parts = text, f"[0, {num_experts})"
        mistakes.append(wrong("topk_idx", with_id(value), *parts, error="ExpertIdError", base=base))
    return mistakes


def plan_mistakes(num_experts: int) -> list[Bad]:
    return [
        *unreadable("topk_idx"),
        wrong("topk_idx", lambda ids: ids.tolist(), "topk_idx (list)", "[T, K]"),
        wrong("topk_idx", lambda ids: ids.flatten(), f"topk_idx has shape [{T * K}]", "[T, K]"),
        wrong("topk_idx", lambda ids: ids.float(), "topk_idx", "torch.float32", "torch.int64"),
        wrong("topk_idx", lambda ids: ids.short(), "topk_idx", "torch.int16", "torch.int32"),
        wrong("topk_idx", lambda ids: ids.to("meta"), "topk_idx is on meta", "on {device}"),
        wrong("topk_idx", lambda ids: ids[:1].expand(2**31, K), "topk_idx [2147", "2**31 slots"),
        wrong("topk_idx", lambda ids: ids[:, :0], "topk_idx has K = 0", "[1, 32]"),
        wrong("topk_idx", lambda ids: ids[:, :1].expand(-1, 33), "K = 33", "[1, 32]"),
        wrong("num_experts", 0, "num_experts (0)", "[1, 1024]"),
        wrong("num_experts", 1200, "num_experts (1200)", "[1, 1024]"),
        *(
            wrong(name, value, f"{name} ({value!r}) must be an int, not {type(value).__name__}")
            for name, value in zip(SIZES, itertools.cycle((True, "8", 2.5)), strict=False)
        ),
        wrong("overflow", np.array(["raise", "drop"]), "overflow (array", "'raise'"),
        wrong("overflow", "ignore", "overflow ('ignore')", "('raise', 'drop')"),
        wrong("overflow", ["drop"], "overflow (['drop'])", "('raise', 'drop')"),
        wrong("overflow", "drop", "overflow ('drop')", "capacity is None"),
        wrong("dtype", np.arange(3), "dtype (", "torch.bfloat16"),
        wrong("dtype", torch.float64, "dtype (torch.float64)", "torch.bfloat16"),
        wrong("hidden", 0, "hidden (0)", "at least 1"),
        wrong("precision", "mxfp8", "precision ('mxfp8') must be"),
        wrong("quantized_wire", "rows", "quantized_wire ('rows') must be"),
        wrong("capacity", 0, "capacity (0)", "at least 1", base=STATIC),
        wrong("capacity", -1, "capacity (-1)", "at least 1", base=STATIC),
        wrong("capacity", 2**31, "capacity (2147483648)", "less than 2**31", base=STATIC),
        wrong("max_tokens", T - 1, f"max_tokens ({T - 1})", f"({T})", base=STATIC),
        wrong("max_tokens", 9, "max_tokens (9)", "capacity is None"),
        wrong("replicas_per_rank", -1, "replicas_per_rank (-1)"),
        wrong("replicas_per_rank", 1100, "must be at most 1024"),
        wrong("replica_slack", 2.0, "replica_slack (2.0)", base=REPLICAS),
        *ids_out_of_range(num_experts),
        *ids_out_of_range(num_experts, STATIC),
    ]


def rows_mistakes(name: str, num_rows_text: str) -> list[Bad]:
    """Mistakes in the rows that travel, `x` or `expert_out`."""
    return [
        *unreadable(name),
        wrong(name, None, f"{name} (NoneType)", "[N, H]"),
        wrong(name, lambda x: x.flatten(), f"{name} has shape [", "[N, H]"),
        wrong(name, lambda x: x[:, :0], f"{name} has rows of 0 features"),
        wrong(name, lambda x: x.cfloat(), f"{name} has dtype torch.complex64"),
        wrong(name, quantized, f"{name} has dtype torch.quint8", "torch.bfloat16"),
        wrong(name, lambda x: torch.cat([x, x, x[:1]]), f"{name} has", num_rows_text),
        wrong(name, lambda x: x.int(), f"{name} has dtype torch.int32", "torch.bfloat16"),
        wrong(name, lambda x: x.double(), f"{name} has dtype torch.float64", "torch.float16"),
        wrong(name, lambda x: x.to("meta"), f"{name} is on meta", "on {device}"),
        wrong("order", "fast", "order ('fast')", "'rank'", "'slot'"),
        wrong("order", np.array(["rank", "slot"]), "order (array", "'rank'", "'slot'"),
    ]


def buffer_mistakes(name: str, like: str) -> list[Bad]:
    """Mistakes in a buffer for results, `out` or `grad_out`, that belongs on the heap; test_buffers.py has more."""

    def memory(
        more_rows: int = 0, features: int = H, dtype=torch.float32
    ) -> Callable[..., torch.Tensor]:
        return lambda heap, good: heap.lease((len(good[name]) + more_rows, features), dtype).tensor

    def overlapping(heap: SymmetricHeap, good: Arguments) -> Arguments:
        both = heap.lease((max(len(good[name]), len(good[like])), H), torch.float32).tensor
        return {like: both[: len(good[like])].copy_(good[like]), name: both[: len(good[name])]}

    mistakes = [
        wrong(name, freed, f"{name} (a tensor whose memory has been freed)"),
        on_heap(name, memory(more_rows=1), f"{name} has shape", "must be"),
        on_heap(name, memory(features=H + 1), f"{name} has shape", f", {H + 1}]", f", {H}]"),
        on_heap(
            name, memory(dtype=torch.bfloat16), f"{name} has dtype torch.bfloat16", "torch.float32"
        ),
        wrong(name, lambda good: good.to("meta"), f"{name} is on meta", "on {device}"),
        wrong(name, lambda good: good.clone(), f"{name} is not on this symmetric heap"),
        Bad(overlapping, (f"{name} [", "overlaps a tensor of shape [")),
    ]
    if name == "out":  # a released grad_out would be found in backward
        released = on_heap(name, stale(name), "which was released")
        mistakes.append(dataclasses.replace(released, error="StaleLease"))
    return mistakes


def dispatch_mistakes() -> list[Bad]:
    return [
        *rows_mistakes("x", f"this plan needs {T}"),
        *buffer_mistakes("out", "x"),
        *unreadable("probs"),
        wrong("probs", lambda p: p.tolist(), "probs (list)", "tensor"),
        wrong("probs", lambda p: p[:, :1], f"probs has shape [{T}, 1]", f"[{T}, {K}]"),
        wrong("probs", lambda p: p.double(), "probs has dtype torch.float64", "torch.float32"),
        wrong("probs", lambda p: p.bfloat16(), "probs has dtype torch.bfloat16", "torch.float32"),
        wrong("probs", lambda p: p.to("meta"), "probs is on meta", "on {device}"),
    ]


def combine_mistakes() -> list[Bad]:
    return [
        *rows_mistakes("expert_out", "this plan needs"),
        *buffer_mistakes("grad_out", "expert_out"),
    ]


def mlp_mistakes() -> list[Bad]:
    return [
        wrong(name, word, f"{name} ({word!r}) must be one of {CHOICES[name]}")
        for name, word in zip(OPTION_DEFAULTS, itertools.cycle(("fast", None, True)), strict=False)
    ]


# Fields of a layer's configuration whose calls go another way.
OF_LAYERS = ((), (("capacity_factor", 1.0), ("aux_loss_coef", 0.1)))


def layer_mistakes(num_experts: int) -> list[Bad]:
    flat = ("(torch.sparse_csr)", "(a nested  tensor)")  # which a mask cannot be
    mistakes = [
        *unreadable("x"),
        *unreadable("token_mask", without=flat),
        *unreadable("topk_idx"),
        *(
            wrong(name, of_inference, f"{name} was made in inference_mode", "clone()")
            for name in ("x", "token_mask", "topk_idx")
        ),
        wrong("x", lambda x: x.tolist(), "x (list)", f"hidden ({H})"),
        wrong("x", lambda x: x[:, :-1], f"x ([{T}, {H - 1}])", f"hidden ({H})"),
        wrong("x", lambda x: x[:, :0], f"x ([{T}, 0])", f"hidden ({H})"),
        wrong("x", lambda x: x.sum(), "x has shape []", f"hidden ({H})"),
        wrong("x", lambda x: x.int(), "x has dtype torch.int32", "torch.bfloat16"),
        wrong("x", lambda x: x.double(), "x has dtype torch.float64", "torch.float32"),
        wrong("x", quantized, "x has dtype torch.quint8", "torch.float32"),
        wrong("x", lambda x: x.to("meta"), "x is on meta", "on {device}"),
        wrong("token_mask", lambda mask: mask.tolist(), "token_mask (list)", f"[{T}]"),
        wrong("topk_idx", lambda ids: ids[:, :1], f"topk_idx has shape [{T}, 1]", f"[{T}, {K}]"),
    ]
    for base in OF_LAYERS:
        mistakes += [
            wrong("token_mask", lambda mask: mask[1:], f"has shape [{T - 1}]", f"[{T}]", base=base),
            wrong("token_mask", lambda mask: mask.float(), "token_mask has dtype", base=base),
            wrong("topk_idx", lambda ids: ids.float(), "topk_idx has dtype", base=base),
            *ids_out_of_range(num_experts, base),
        ]
    return mistakes


# -- the calls, on every rank -----------------------------------------------------------------------------------------
def routing(heap: SymmetricHeap, seed: int) -> torch.Tensor:
    """[T, K]: every rank has rows, from every rank."""
    generator = torch.Generator().manual_seed(seed + heap.rank)
    num_experts = 2 * heap.num_ranks
    return torch.stack([torch.randperm(num_experts, generator=generator)[:K] for _ in range(T)]).to(
        heap.device
    )


def plan_of(heap: SymmetricHeap, seed: int = 5) -> Plan:
    return make_plan(routing(heap, seed), num_experts=2 * heap.num_ranks, heap=heap)


def layer_of(heap: SymmetricHeap, **options) -> MoELayer:
    """With the same weights whenever it is made."""
    torch.manual_seed(0)
    usual = {
        "hidden": H,
        "ffn": H,
        "num_experts": 2 * heap.num_ranks,
        "top_k": K,
        "schedule": "always-overlapped",
    }
    return MoELayer(layer_config(**{**usual, **options}), heap)


def goes_on(heap: SymmetricHeap, findings: Findings, seed: int = 3) -> None:
    """After an error nothing is leased, and the next correct call is exact."""
    findings.equal("leased bytes after the error", heap.leased_bytes, 0)
    findings.check(round_trip(heap, 1000 * seed), "the next correct call is wrong")


class Stage:
    """One public call with correct arguments that mistakes start from."""

    def __init__(self, name: str, heap: SymmetricHeap, base: tuple = ()) -> None:
        self._heap = heap
        ids = routing(heap, 5)
        generator = torch.Generator().manual_seed(heap.rank)
        x = torch.randn((T, H), generator=generator).to(heap.device)
        probs = torch.rand((T, K), generator=generator).to(heap.device)
        if name == "make_plan":
            self.function: Callable = make_plan
            self.good = {
                "topk_idx": ids,
                "num_experts": 2 * heap.num_ranks,
                "heap": heap,
                **dict(base),
            }
            return
        if name == "layer":
            self.function = layer_of(heap, **dict(base))
            self.good = {
                "x": x,
                "token_mask": torch.ones_like(x[:, 0], dtype=torch.bool),
                "topk_idx": ids,
            }
            return
        plan = plan_of(heap)
        if name == "expert_parallel_mlp":
            self.function = expert_parallel_mlp
            experts = GroupedMLP(2, H, H, device=heap.device)
            self.good = {"x": x, "probs": probs, "experts": experts, "plan": plan}
            return
        buffer = heap.lease((plan.row_capacity, H), torch.float32).tensor
        if name == "dispatch_tokens":
            self.function = dispatch_tokens
            self.good = {"x": x, "plan": plan, "probs": probs, "out": buffer, "order": "rank"}
            return
        *_, handle = dispatch_tokens(x, plan, probs=probs)
        self.function, expert_out = combine_tokens, torch.ones(plan.num_rows, H, device=heap.device)
        self.good = {
            "expert_out": expert_out,
            "handle": handle,
            "order": "rank",
            "grad_out": buffer[: plan.num_rows],
        }

    def call(self, **changes) -> tuple[str, str]:
        """(class, text) of the error, at the latest when the rank waits for its stream."""
        return outcome(
            lambda: [self.function(**{**self.good, **changes}), self._heap.synchronize()]
        )


MISTAKES: dict[str, Callable[[int], list[Bad]]] = {
    "make_plan": lambda num_ranks: plan_mistakes(2 * num_ranks),
    "dispatch_tokens": lambda num_ranks: dispatch_mistakes(),
    "combine_tokens": lambda num_ranks: combine_mistakes(),
    "expert_parallel_mlp": lambda num_ranks: mlp_mistakes(),
    "layer": lambda num_ranks: layer_mistakes(2 * num_ranks),
}


def check_mistake(
    heap, findings: Findings, stage_name: str, bad: Bad, culprits: list[int], seed: int
) -> None:
    """Makes a wrong call on the culprits, then a correct one; notes what is not as documented."""
    stage = Stage(stage_name, heap, bad.base)
    launched = []

    def note(name: str, kernel: Callable, /, *args: object, **options: object) -> object:
        launched.append(name)
        return kernel(*args, **options)

    with kernels.hooked(heap.device, note):
        error = stage.call(**(bad.change(heap, stage.good) if heap.rank in culprits else {}))
    parts = (part.format(rank=culprits[0], device=heap.device.type) for part in bad.parts)
    expect(findings, error, bad.error, *parts)
    if (
        heap.rank != culprits[0] and bad.error != "ExpertIdError"
    ):  # the first one's error, if there are several
        findings.check(
            error[1].startswith(f"on rank {culprits[0]}: "), f"the culprit is not named: {error[1]}"
        )
    if stage_name == "expert_parallel_mlp" and (
        heap.rank in culprits or heap.streams.raises_at_once
    ):
        # On a GPU the peers have launched the dispatch by then; its rows are NaN.
        findings.check("push_rows" not in launched, "tokens have been dispatched")
    if stage_name == "layer":
        y, want = (
            layer(stage.good["x"])[0].detach()
            for layer in (stage.function, layer_of(heap, **dict(bad.base)))
        )
        findings.equal("y of the next correct call", y, want)
    del stage
    goes_on(heap, findings, seed)


def plan_mismatches(num_experts: int) -> list[tuple[Arguments | None, str, str, str, tuple]]:
    """(what the culprit passes, None: one column of ids; field, the usual value, the culprit's, arguments of all) of
    what only a comparison between ranks can find."""
    agreed = (*STATIC, ("hidden", H), ("dtype", torch.float32))
    twice = {"num_experts": 2 * num_experts}
    counts = "num_experts", str(num_experts), str(2 * num_experts)
    return [
        (None, "top_k", str(K), "1", ()),
        (None, "top_k", str(K), "1", agreed),
        (twice, *counts, ()),
        (twice, *counts, agreed),
        ({"capacity": 61}, "capacity", "60", "61", agreed),
        ({"capacity": None, "max_tokens": None}, "capacity", "60", "none", agreed),
        ({"overflow": "drop"}, "overflow", "'raise'", "'drop'", agreed),
        ({"max_tokens": 10}, "max_tokens", "9", "10", agreed),
        ({"max_tokens": None}, "max_tokens", "9", str(T), agreed),
        ({"hidden": 2 * H}, "hidden", str(H), str(2 * H), agreed),
        ({"hidden": None}, "hidden", str(H), "none", agreed),
        ({"dtype": torch.float16}, "dtype", "torch.float32", "torch.float16", agreed),
        ({"dtype": None}, "dtype", "torch.float32", "none", agreed),
        ({"replicas_per_rank": 2}, "replica slots", "1", "2", REPLICAS),
        ({"replica_slack": 0.1}, "slack per mille", "50", "100", REPLICAS),
    ]


# What the text says of a recipe. Rows in some of them have the same bytes.
RECIPES = (None, Float8Block(), Float8Block(power_of_two=True), MXFP8(), NVFP4(hadamard_signs=5))


def layer_mismatches(num_ranks: int) -> Iterator[tuple[dict, str, object]]:
    """(fields of all configurations, one field, the culprit's value): what plans compare and what only this rank
    computes with."""
    changes = {
        "hidden": 2 * H,
        "top_k": 1,
        "num_experts": 4 * num_ranks,
        "capacity": 99,
        "ffn": 2 * H,
        "stash": "rows",
        "aux_loss_coef": 0.5,
        "max_row_budget": 7,
        "score": "sigmoid",
    }
    for field, value in {**changes, "activation": Activation(function="gelu")}.items():
        yield {}, field, value
    for usual, changed in itertools.combinations(RECIPES, 2):
        yield {"hidden": 64, "ffn": 32, "precision": usual}, "precision", changed
    for usual, changed in itertools.combinations(CHOICES["quantized_wire"], 2):
        yield (
            {"hidden": 64, "ffn": 32, "precision": MXFP8(), "quantized_wire": usual},
            "quantized_wire",
            changed,
        )
