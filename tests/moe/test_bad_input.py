"""Wrong arguments: the same typed error on every rank in the same call, and the next correct call is exact."""

import contextlib
import itertools
import time
from collections.abc import Callable
from functools import partial
from unittest import mock

import bad_calls
import pytest
import torch
from bad_calls import NUM_BYTES, H, K, Stage, T, goes_on, layer_of, plan_of, routing
from cluster import run_on
from culprits import TRANSFORMS, sets_of_culprits
from heap_calls import expect, outcome
from worker import Findings, difference, free_bytes, open_heap

import symmoe
from symmoe import (
    MoEConfig,
    MoELayer,
    SymmetricHeap,
    combine_tokens,
    dispatch_tokens,
    kernels,
    make_plan,
)
from symmoe.grouped.mlp import GroupedMLP
from symmoe.lora import add_lora
from symmoe.moe.ep_step import expert_parallel_mlp


@pytest.mark.parametrize("stage_name", bad_calls.MISTAKES)
@run_on(1, 3)
def test_wrong_arguments_raise_on_every_rank(
    rank: int, num_ranks: int, findings: Findings, heap: SymmetricHeap, stage_name: str
):
    mistakes = list(bad_calls.MISTAKES[stage_name](num_ranks))
    for turn, (culprits, bad) in enumerate(
        itertools.product(sets_of_culprits(num_ranks), mistakes)
    ):
        findings.where = (
            f"{stage_name}, {bad.parts} on ranks {culprits}, seen by rank {rank} of {num_ranks}"
        )
        bad_calls.check_mistake(heap, findings, stage_name, bad, culprits, turn)


@run_on(2, 4)
def test_settings_that_differ_between_ranks_raise_on_every_rank(
    rank: int, num_ranks: int, findings: Findings, heap: SymmetricHeap
):
    ranks = itertools.cycle(range(num_ranks))  # the culprits take turns
    for culprit, (changes, field, usual, different, base) in zip(
        ranks, bad_calls.plan_mismatches(2 * num_ranks), strict=False
    ):
        findings.where = (
            f"{field}: {different} on rank {culprit}, seen by rank {rank} of {num_ranks}"
        )
        stage = Stage("make_plan", heap, base)
        if changes is None:
            changes = {"topk_idx": stage.good["topk_idx"][:, :1]}
        actual = stage.call(**(changes if rank == culprit else {}))
        expected = difference(f"{field} differs", culprit, usual, different)
        findings.equal("error", actual, ("ConfigMismatch", expected))
        goes_on(heap, findings, culprit)
    for culprit, (fields, field, value) in zip(
        ranks, bad_calls.layer_mismatches(num_ranks), strict=False
    ):
        findings.where = (
            f"layer: {field}={value} on rank {culprit}, seen by rank {rank} of {num_ranks}"
        )
        layer = layer_of(heap, **(fields | {field: value} if rank == culprit else fields))
        config = layer_of(heap, **fields).config
        values = getattr(config, field, getattr(config.router, field, None)), value
        usual, different = ("none" if v is None else repr(v).removesuffix(".0") for v in values)
        actual = outcome(layer, torch.randn(T, layer.config.hidden))
        expected = difference(f"{field} differs", culprit, usual, different)
        findings.equal("error", actual, ("ConfigMismatch", expected))
        goes_on(heap, findings)
    # Not collective: the configuration is the same everywhere.
    text = (
        f"num_experts ({2 * num_ranks + 1}) must be divisible by the number of ranks ({num_ranks})"
    )
    actual = outcome(layer_of, heap, num_experts=2 * num_ranks + 1)
    findings.equal("error", actual, ("ArgumentError", text))


@run_on(2, 3)
def test_all_ranks_name_the_same_one_of_several_errors(
    rank: int, num_ranks: int, findings: Findings, heap: SymmetricHeap
):
    """With several errors at once every rank names the same one. And one error directly follows another."""
    num_experts, ids = 2 * num_ranks, routing(heap, 1)
    bad_id = bad_calls.with_id(num_experts + rank)(ids)
    for turn in range(40):  # rank 0 fails in its arguments, all others have ids out of range
        actual = Stage("make_plan", heap).call(
            **({"topk_idx": bad_id} if rank else {"overflow": f"turn {turn}"})
        )
        findings.equal(f"class in turn {turn}", actual[0], "ArgumentError")
        findings.check(f"overflow ('turn {turn}')" in actual[1], f"turn {turn}: {actual[1]!r}")
    goes_on(heap, findings)
    actual = Stage("make_plan", heap).call(topk_idx=bad_id if rank else ids)
    text = (
        f"topk_idx on rank 1, flat position {3 * K + 1}: {num_experts + 1} is neither -1 nor in "
        f"[0, {num_experts})"
    )
    findings.equal("error", actual, ("ExpertIdError", text))


def mismatches_of_misuse(heap: SymmetricHeap, findings: Findings) -> None:
    """Misuse that only several ranks can have."""
    rank = heap.rank
    # A static capacity and uneven T, without max_tokens.
    actual = Stage("make_plan", heap).call(
        topk_idx=routing(heap, 5)[rank:], capacity=T * K * heap.num_ranks
    )
    expected = f"max_tokens differs: rank 0 has {T}, rank 1 has {T - 1}"
    findings.equal("uneven T", actual, ("ConfigMismatch", expected))
    goes_on(heap, findings)
    # The order of dispatch is that of its backward.
    rows, *_ = dispatch_tokens(
        torch.randn(T, H, requires_grad=True), plan_of(heap), order="slot" if rank else "rank"
    )
    expected = "order differs at 'combine: ready': rank 0 has rank, rank 1 has slot"
    findings.equal("order", outcome(rows.sum().backward), ("ConfigMismatch", expected))
    del rows
    goes_on(heap, findings)


@run_on(1, 2, 4)
def test_calls_in_a_wrong_order_raise(rank: int, num_ranks: int, findings: Findings):
    """Calls in a wrong order, more rows than the capacity, different orders of sums, and a closed heap."""
    with open_heap("cpu", num_bytes=NUM_BYTES) as heap:
        plan = plan_of(heap)
        actual = outcome(combine_tokens, torch.ones(plan.num_rows, H), plan)
        expect(findings, actual, "ArgumentError", "handle (", "what dispatch_tokens returns")
        for none in (None, "plan", 7):  # no peer is told
            actual = outcome(dispatch_tokens, torch.ones(T, H), none)
            expect(findings, actual, "ArgumentError", "plan (")
            actual = outcome(combine_tokens, torch.ones(T, H), none)
            expect(findings, actual, "ArgumentError", "handle (")
        goes_on(heap, findings)
        last = torch.full((T, K), 2 * num_ranks - 1)
        for capacity in (1, T * K * num_ranks - 1):
            expected = f"rank {num_ranks - 1} is routed {T * K * num_ranks} rows, more than capacity ({capacity})"
            actual = Stage("make_plan", heap).call(topk_idx=last, capacity=capacity)
            findings.equal("overflow", actual, ("CapacityError", expected))
            goes_on(heap, findings, capacity)
        layer = layer_of(heap)
        x = torch.randn(T, H)
        want = layer(x)[0].detach()
        layer.experts.to(torch.float64 if rank == 0 else torch.float32)
        expect(findings, outcome(layer, x), "ArgumentError", "the weights are torch.float64")
        findings.equal("experts of float64 are cast back", layer.float()(x)[0].detach(), want)
        stage = Stage("expert_parallel_mlp", heap)
        if num_ranks > 1:
            mismatches_of_misuse(heap, findings)
    for wrong in (
        {"schedule": "overlap"},
        {"quantized_wire": "both"},
    ):  # wrong words, of which no peer can be told
        findings.equal(f"error of {wrong} on a closed heap", stage.call(**wrong)[0], "HeapClosed")


@run_on(2, 3)
def test_a_plan_of_another_call_raises_on_every_rank(
    rank: int, num_ranks: int, findings: Findings, heap: SymmetricHeap
):
    """One rank passes an older plan, or one of another call, with the same shapes."""
    x = torch.randn(T, H)
    for culprit, fails_between in itertools.product(range(num_ranks), (False, True)):
        findings.where = (
            f"culprit {culprit}, a fault between {fails_between}, rank {rank} of {num_ranks}"
        )
        old_plan = plan_of(heap)
        *_, old_handle = dispatch_tokens(x, old_plan)
        if fails_between:  # epochs that were launched and have not counted are nobody's generations
            findings.equal(
                "error", Stage("make_plan", heap).call(overflow=rank)[0], "ArgumentError"
            )
        new_plan = plan_of(heap)
        text = difference("plan differs at '{}'", culprit, new_plan.generation, old_plan.generation)
        passed = old_plan if rank == culprit else new_plan
        actual = outcome(dispatch_tokens, x, passed)
        findings.equal("error", actual, ("ConfigMismatch", text.format("dispatch: ready")))
        *_, new_handle = dispatch_tokens(x, new_plan)
        passed = old_handle if rank == culprit else new_handle
        actual = outcome(combine_tokens, torch.ones(passed.plan.num_rows, H), passed)
        findings.equal("error", actual, ("ConfigMismatch", text.format("combine: ready")))
        dispatch_tokens(x, new_plan)
        goes_on(heap, findings, culprit)
        rows, _, handle = dispatch_tokens(
            x, old_plan
        )  # a plan may be used as often as its ranks like
        findings.equal("y by the old plan", combine_tokens(rows, handle, order="slot"), K * x)
        del rows
        findings.equal("leased bytes", heap.leased_bytes, 0)


PLACES = (
    ("experts.fc1.weight", lambda layer: layer.experts.to("meta")),
    ("experts.fc2.weight", lambda layer: layer.experts.fc2.to("meta")),
    (
        "experts.fc1.lora_b",
        lambda layer: (add_lora(layer, rank=2, alpha=1.0), _to_meta(layer.experts.fc1, "lora_b")),
    ),
    ("router.weight", lambda layer: layer.router.to("meta")),
    ("shared_expert.bias", lambda layer: _to_meta(layer.shared_expert, "bias")),
)


def _to_meta(module: torch.nn.Module, name: str) -> None:
    module._parameters[name] = torch.nn.Parameter(
        torch.empty_like(module._parameters[name], device="meta")
    )


@run_on(1, 3)
def test_parameters_without_memory_raise(
    rank: int, num_ranks: int, findings: Findings, heap: SymmetricHeap
):
    """In the first call and later."""

    def new_layer(**options) -> MoELayer:
        return MoELayer(
            layer_of(heap).config, heap, shared_expert=torch.nn.Linear(H, H, **options), **options
        )

    x = torch.randn(T, H)
    for culprits, (name, move), calls in itertools.product(
        sets_of_culprits(num_ranks), PLACES, (0, 1, 9)
    ):
        findings.where = (
            f"{name} on ranks {culprits}, after {calls} calls, seen by rank {rank} of {num_ranks}"
        )
        layer = new_layer()
        for _ in range(calls):
            layer(x)[0].sum().backward()
        if rank in culprits:
            move(layer)
        expect(
            findings, outcome(layer, x), "ArgumentError", f"{name} is on meta; it must be on cpu"
        )
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


@run_on(1, 3)
def test_logits_that_are_not_finite_raise_on_cpus(
    rank: int, num_ranks: int, findings: Findings, heap: SymmetricHeap
):
    """NaN and Inf in the router's logits. Padding may have them: test_features.py."""
    for layer in (layer_of(heap), layer_of(heap, capacity=T * K * num_ranks)):
        x = torch.randn(T, H)
        want = layer(x)[0].detach().clone()
        for culprit, value in itertools.product(
            range(num_ranks), map(float, ("nan", "inf", "-inf"))
        ):
            findings.where = f"{value} on rank {culprit}, rank {rank} of {num_ranks}"
            bad = x.clone()
            if rank == culprit:
                bad[3, 5] = bad[4] = value
            text = "the router's logits of token 3 are not finite (2 such tokens)"
            expected = text if rank == culprit else f"on rank {culprit}: {text}"
            findings.equal("error", outcome(layer, bad), ("ArgumentError", expected))
            findings.equal("y of the next correct call", layer(x)[0], want)


@run_on(1, 2)
def test_buffers_of_another_heap_are_refused_and_inputs_copied(
    rank: int, num_ranks: int, findings: Findings
):
    """Refused as a buffer that peers access, and copied like ordinary memory as input."""
    with open_heap("cpu", num_bytes=NUM_BYTES) as closed:
        closed_memory = closed.lease((T * K * num_ranks, H), torch.float32).tensor
    with (
        open_heap("cpu", num_bytes=NUM_BYTES) as heap,
        open_heap("cpu", num_bytes=NUM_BYTES) as second_heap,
    ):
        for turn in range(3):
            x = torch.randn(T, H)
            plan = plan_of(heap, turn)
            actual = outcome(dispatch_tokens, x, plan, out=closed_memory[: plan.row_capacity])
            expect(
                findings, actual, "StaleLease", "out is memory of lease", "whose heap was closed"
            )
            rows, _, handle = dispatch_tokens(x, plan)
            foreign = second_heap.lease(
                (plan.row_capacity, H), torch.float32, name="foreign"
            ).tensor
            for name, actual in (
                ("out", outcome(dispatch_tokens, x, plan, out=foreign)),
                ("grad_out", outcome(combine_tokens, rows, handle, grad_out=foreign[: len(rows)])),
            ):
                expect(findings, actual, "ArgumentError", f"{name} is not on this symmetric heap")
            foreign[: len(rows)] = rows
            y = combine_tokens(foreign[: plan.num_rows], handle, order="slot")
            findings.equal("y of foreign rows", y, sum(x for _ in range(K)))
            del foreign, rows, plan
            goes_on(heap, findings, turn)
            goes_on(second_heap, findings, turn)


# -- a heap that is too small -----------------------------------------------------------------------------------------
LEASING_CALLS = (
    "dispatch_tokens",
    "combine_tokens",
    "layer",
    "backward of dispatch",
    "backward of the layer",
)


def leasing_call(name: str, heap: SymmetricHeap, layer: MoELayer) -> Callable[[], object]:
    """The call that must fail, after all calls that must succeed."""
    x = torch.randn(T, H, requires_grad=True)
    probs = torch.rand((T, K), requires_grad=True)
    if name == "layer":
        return lambda: layer(x)[0].sum().backward()
    if name == "backward of the layer":
        return layer(x)[0].sum().backward
    plan = plan_of(heap, 2)
    if name == "dispatch_tokens":
        return partial(dispatch_tokens, x, plan, probs=probs)
    rows, row_probs, handle = dispatch_tokens(x, plan, probs=probs)
    if name == "combine_tokens":
        return partial(combine_tokens, torch.ones(plan.num_rows, H), handle)
    return (rows * row_probs[:, None]).sum().backward


def exhaust(heap: SymmetricHeap, num_free_bytes: int) -> list[symmoe.symm_mem.memory.Lease]:
    """Leases that leave one free range of `num_free_bytes` bytes."""
    last = heap.lease((num_free_bytes,), torch.uint8) if num_free_bytes else None
    leases = []
    while free_bytes(heap):
        leases.append(heap.lease((free_bytes(heap),), torch.uint8, name="everything"))
    if last is not None:
        last.release()
    return leases


@run_on(1, 3)
def test_an_exhausted_heap_raises_on_every_rank(rank: int, num_ranks: int, findings: Findings):
    """One rank, or all, have no free memory: HeapExhausted on every rank, for each lease of the call that may fail."""
    parts = ("lease '", " needs ", "high-water mark", f"(now {NUM_BYTES})")
    with open_heap("cpu", num_bytes=NUM_BYTES) as heap:
        layer = layer_of(heap)
        for (turn, culprits), name in itertools.product(
            enumerate(sets_of_culprits(num_ranks)), LEASING_CALLS
        ):
            for num_free_bytes in range(0, 1 << 14, 512):
                findings.where = f"{name} with {num_free_bytes} bytes left on {culprits}, rank {rank} of {num_ranks}"
                call = leasing_call(name, heap, layer)
                leases = exhaust(heap, num_free_bytes) if rank in culprits else []
                actual = outcome(call)
                del call, leases
                goes_on(heap, findings, turn)
                if actual == ("", ""):
                    break
                expect(findings, actual, "HeapExhausted", *parts)
                findings.check(
                    rank in culprits or actual[1].startswith(f"on rank {culprits[0]}: "), actual[1]
                )
            findings.check(
                0 < num_free_bytes < (1 << 14) - 512, "the memory was always or never enough"
            )


# -- gradients that a caller brings -----------------------------------------------------------------------------------
PASSED_ON = (
    "(torch.sparse_coo)",
    "(Wrapper)",
    "has been freed",
    "lease 'old'",
)  # autograd itself refuses others


@run_on(1, 2)
def test_unreadable_gradients_raise_on_every_rank(
    rank: int, num_ranks: int, findings: Findings, heap: SymmetricHeap
):
    """A gradient that kernels cannot read, on one rank or on all: the same error on every rank; the next call is
    correct."""
    kinds = [
        bad
        for bad in bad_calls.unreadable("the gradient")
        if any(part in bad.parts[0] for part in PASSED_ON)
    ]
    assert len(kinds) == len(PASSED_ON)
    layer = layer_of(heap)
    x = torch.randn(T, H, requires_grad=True)

    def outputs(name: str) -> list[torch.Tensor]:
        """The differentiated tensors; the first one has that name."""
        if name == "y of the layer":
            return [layer(x)[0]]
        plan = plan_of(heap)
        rows, row_probs, handle = dispatch_tokens(
            x, plan, probs=torch.ones(T, K, requires_grad=True)
        )
        if name == "y of combine_tokens":
            return [combine_tokens(torch.ones(plan.num_rows, H, requires_grad=True), handle)]
        return [rows, row_probs] if name == "rows" else [row_probs, rows]

    for name in ("y of the layer", "y of combine_tokens", "rows", "row_probs"):
        for turn, (culprits, bad) in enumerate(
            itertools.product(sets_of_culprits(num_ranks), kinds)
        ):
            findings.where = (
                f"{bad.parts} of {name} on {culprits}, seen by rank {rank} of {num_ranks}"
            )
            tensors = outputs(name)
            gradients = [torch.ones_like(tensor) for tensor in tensors]
            if rank in culprits:
                gradients[0] = bad.change(heap, {"the gradient": gradients[0]})["the gradient"]
            parts = [
                part.replace("the gradient ", f"the gradient of {name.split()[0]} ")
                for part in bad.parts
            ]
            expect(
                findings, outcome(torch.autograd.backward, tensors, gradients), bad.error, *parts
            )
            del tensors, gradients
            goes_on(heap, findings, turn)


# -- transforms of torch.func and forward-mode AD ---------------------------------------------------------------------
@run_on(1, 2)
def test_function_transforms_raise_on_every_rank(rank: int, num_ranks: int, findings: Findings):
    """On one rank or on all, of the arguments or of the weights only: the same error on every rank; the next call is
    correct."""
    with open_heap("cpu", num_bytes=NUM_BYTES, timeout_s=5.0) as heap:
        layer = layer_of(heap)
        ids = routing(heap, 5)
        plan = plan_of(heap)
        x = torch.ones(T, H)
        *_, handle = dispatch_tokens(x, plan)

        def of_weights(weight: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(layer, {"router.weight": weight}, (x,))[0].sum()

        calls: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]] = {
            "layer": (lambda x: layer(x)[0].sum(), x),
            "weights": (of_weights, layer.router.weight.detach()),
            "make_plan": (
                lambda x: (
                    make_plan(ids, num_experts=2 * num_ranks, heap=heap).num_dropped + x.sum()
                ),
                x,
            ),
            "experts": (
                lambda x: expert_parallel_mlp(x, torch.ones(T, K), layer.experts, plan).sum(),
                x,
            ),
            "dispatch_tokens": (lambda x: dispatch_tokens(x, plan)[0].sum(), x),
            "combine_tokens": (
                lambda rows: combine_tokens(rows, handle).sum(),
                torch.ones(plan.num_rows, H),
            ),
        }
        for turn, (culprits, (name, transform)) in enumerate(
            itertools.product(sets_of_culprits(num_ranks), TRANSFORMS.items())
        ):
            # Every third call: each is transformed in every way, on some of the sets of culprits.
            for kind, (call, argument) in list(calls.items())[turn % 3 :: 3]:
                findings.where = (
                    f"{name} of {kind} on {culprits}, seen by rank {rank} of {num_ranks}"
                )
                actual = (
                    outcome(transform, call, argument)
                    if rank in culprits
                    else outcome(call, argument)
                )
                expect(findings, actual, "ArgumentError", "no rules for transforms of torch.func")
                goes_on(heap, findings)
            y = layer(x.requires_grad_())[0]
            options = {"is_grads_batched": True} if rank in culprits else {}
            dy = torch.ones((2, T, H) if rank in culprits else (T, H))
            actual = outcome(torch.autograd.grad, y, x, dy, **options)
            expect(findings, actual, "ArgumentError", "(a tensor of vmap) must be a strided tensor")
            del y
            x.requires_grad_(False)
            goes_on(heap, findings)


CONFIG = MoEConfig(hidden=H, ffn=H, num_experts=2, top_k=K)
TRANSFORMED: dict[str, tuple[Callable[[], object], tuple]] = {
    "GroupedLinear": (lambda: symmoe.GroupedLinear(2, H, H), ([2, 4],)),
    "GroupedMLP": (lambda: GroupedMLP(2, H, H), ([2, 4], torch.ones(T))),
    "ScaledSwiGLU": (symmoe.grouped.ScaledSwiGLU, (torch.ones(T),)),
    "Sequential": (
        lambda: symmoe.grouped.Sequential(*(symmoe.GroupedLinear(2, H, H) for _ in range(2))),
        ([2, 4], [2, 4]),
    ),
    "Router": (lambda: symmoe.Router(CONFIG), ()),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", TRANSFORMED)
def test_transforms_of_modules_without_a_heap(name: str, transform: str):
    make, arguments = TRANSFORMED[name]
    module = make()
    with pytest.raises(
        symmoe.errors.ArgumentError, match=r"no rules for transforms of torch\.func"
    ):
        TRANSFORMS[transform](lambda x: module(x, *arguments), torch.ones(T, H))


# -- errors that nobody foresaw ---------------------------------------------------------------------------------------
KERNELS_OF_A_STEP = (
    "send_counts grouped_gemm_act grouped_gemm push_sums sum_home "
    "grouped_gemm_dact grouped_gemm_dgrad grouped_gemm_wgrad"
).split()


@pytest.mark.parametrize("schedule", ["serial", "overlapped"])
@run_on(2, 3)
def test_an_unexpected_error_of_one_rank_reaches_its_peers(
    rank: int, num_ranks: int, findings: Findings, schedule: str
):
    """One rank raises in the middle of a call: its peers raise at once too, and the heap stays usable."""

    def spoiled(call: Callable[[], object], broken, culprit: int) -> None:
        """The outcome of `call` with a module, or the kernel of that name, that raises on one rank."""
        findings.where = f"{broken}, culprit {culprit}, rank {rank} of {num_ranks}"

        def fail(name: object, kernel=None, /, *args: object, **options: object) -> object:
            if isinstance(broken, str) and name != broken:
                return kernel(*args, **options)
            raise OSError("no space left")

        started = time.monotonic()
        is_kernel = isinstance(broken, str)
        wrong = (
            kernels.hooked(heap.device, fail)
            if is_kernel
            else mock.patch.object(broken, "forward", fail)
        )
        with wrong if rank == culprit else contextlib.nullcontext():
            actual = outcome(call)
        text = "no space left" if rank == culprit else f"on rank {culprit}: OSError: no space left"
        findings.equal("error", actual, ("OSError" if rank == culprit else "SymmoeError", text))
        findings.check(time.monotonic() - started < 30, "the peers have waited")
        goes_on(heap, findings, culprit)

    with open_heap("cpu", num_bytes=NUM_BYTES, timeout_s=60.0) as heap:
        layer = MoELayer(
            layer_of(heap, schedule=schedule).config, heap, shared_expert=torch.nn.Identity()
        )
        x = torch.randn(T, H, requires_grad=True)
        for culprit in range(num_ranks):
            for broken in (layer.router, layer.shared_expert, *KERNELS_OF_A_STEP):
                spoiled(lambda: layer(x)[0].sum().backward(), broken, culprit)
            plan = plan_of(heap)
            spoiled(partial(dispatch_tokens, x, plan), "push_rows", culprit)
            rows, _, handle = dispatch_tokens(x, plan)
            spoiled(partial(combine_tokens, rows.detach().clone(), handle), "push_sums", culprit)
            loss = dispatch_tokens(x, plan)[0].sum()
            del rows
            spoiled(loss.backward, "push_sums", culprit)
            findings.check(bool(layer(x)[0].isfinite().all()), "the layer works no more")


@pytest.mark.parametrize("broken", ["push_slots", "push_rows"])
@run_on(2)
def test_failed_signals_abort_the_peers(rank: int, num_ranks: int, findings: Findings, broken: str):
    """If a rank cannot send signals, only an abort ends the peers' waits."""
    with open_heap("cpu", num_bytes=NUM_BYTES, timeout_s=60.0) as heap:
        layer = layer_of(heap)
        started = time.monotonic()
        text = "no space left"

        def fail(name: str, kernel, /, *args: object, **options: object) -> object:
            if rank == 0 and name == broken:
                raise OSError(text)
            return kernel(*args, **options)

        with kernels.hooked(heap.device, fail):
            actual = outcome(layer, torch.randn(T, H))
        findings.check(time.monotonic() - started < 30, "the peer has waited")
        expected = (
            ("OSError", text) if rank == 0 else ("PeerAborted", f"rank 0 gave up: OSError: {text}")
        )
        findings.equal("error", actual, expected)
        findings.equal("next error", outcome(layer, torch.randn(T, H))[0], "HeapPoisoned")
