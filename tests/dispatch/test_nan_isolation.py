"""NaN and Inf in a token reach its own output and gradients and the weight gradients of its experts, and nothing else.
The same step is run with the tokens' rows replaced by zeros; all other results have the same bits."""

from itertools import product

import pytest
import torch
from low_precision_cases import RECIPES
from worker import Findings, open_heap

from symmoe import GroupedMLP, SymmetricHeap, combine_tokens, dispatch_tokens, make_plan
from symmoe.moe.ep_step import expert_parallel_mlp
from symmoe.precision import NVFP4
from symmoe.precision.recipes import Recipe

T = 40
K = 3
H = 32
I = 24
BAD = {"NaN": float("nan"), "Inf": float("inf"), "-Inf": float("-inf")}
WAYS = [*product(("packed", "expert-major"), ("serial", "always-overlapped"), ("rank", "slot"))]


def bad_tokens(rank: int) -> list[int]:
    """A few tokens, also at the edges of blocks; none on rank 1."""
    return [] if rank == 1 else [0, 7, T - 1]


def routing(rank: int, num_experts: int) -> torch.Tensor:
    """[T, K]: bad tokens go to even experts only, so that odd experts get none."""
    generator = torch.Generator().manual_seed(rank)
    ids = torch.stack([torch.randperm(num_experts, generator=generator)[:K] for _ in range(T)])
    for token in bad_tokens(rank):
        ids[token] = torch.arange(0, 2 * K, 2) % num_experts
    return ids


def run(
    heap,
    value: float,
    layout: str | None,
    schedule: str,
    order: str,
    dtype,
    recipe=None,
    wire: str = "none",
) -> dict[str, torch.Tensor]:
    """Outputs and gradients with `value` in the bad tokens; layout None: dispatch, experts and combine one by one."""
    num_experts = 2 * max(heap.num_ranks, K)
    num_experts -= num_experts % heap.num_ranks
    generator = torch.Generator().manual_seed(100 + heap.rank)
    torch.manual_seed(heap.rank)
    ffn = I if recipe is None else H  # blocks want a multiple of 32
    experts = GroupedMLP(num_experts // heap.num_ranks, H, ffn, precision=recipe, dtype=dtype)
    x = torch.randn((T, H), generator=generator).to(dtype)
    dy = torch.randn((T, H), generator=generator).to(dtype)
    probs = torch.rand((T, K), generator=generator).requires_grad_()
    # One element each of some, the whole row of others.
    for index, token in enumerate(bad_tokens(heap.rank)):
        x[token] = 0.0
        x[token, slice(None) if index % 2 else index] = value
    x.requires_grad_()
    plan = make_plan(routing(heap.rank, num_experts), num_experts=num_experts, heap=heap)
    if layout is None:
        rows, row_probs, handle = dispatch_tokens(x, plan, probs=probs)
        y = combine_tokens(experts(rows, plan.splits, row_probs), handle, order=order)
    else:
        options = {"order": order, "layout": layout, "schedule": schedule}
        y = expert_parallel_mlp(x, probs, experts, plan, quantized_wire=wire, **options)
    y.backward(dy)
    results = {"y": y.detach(), "dx": x.grad, "dprobs": probs.grad}
    return results | {"dW1": experts.fc1.weight.grad, "dW2": experts.fc2.weight.grad}


def check_isolation(
    rank: int, num_ranks: int, findings: Findings, text: str, dtype: torch.dtype
) -> None:
    with open_heap("cpu") as heap:
        for layout, schedule, order in [
            *WAYS,
            (None, "in parts", "rank"),
            (None, "in parts", "slot"),
        ]:
            findings.where = (
                f"{text} {dtype}, {layout}, {schedule}, {order}, rank {rank} of {num_ranks}"
            )
            clean = run(heap, 0.0, layout, schedule, order, dtype)
            dirty = run(heap, BAD[text], layout, schedule, order, dtype)
            compare(findings, rank, text, clean, dirty, same=("y", "dx", "dprobs"))


def compare(
    findings: Findings, rank: int, text: str, clean: dict, dirty: dict, *, same: tuple[str, ...]
) -> None:
    """same: the results of which other tokens have the same bits. All other results are finite."""
    bad = torch.zeros(T, dtype=torch.bool)
    bad[bad_tokens(rank)] = True
    for name in ("y", "dx", "dprobs"):
        findings.check(bool(clean[name].isfinite().all()), f"{name} of zeros is not finite")
        findings.check(
            bool(dirty[name][~bad].isfinite().all()), f"{name} of other tokens is not finite"
        )
        if name in same:
            findings.check(
                torch.equal(clean[name][~bad], dirty[name][~bad]), f"{name} of other tokens differs"
            )
    findings.check(bool((~dirty["y"][bad].isfinite()).any(1).all()), "y of a bad token is finite")
    if text == "NaN":
        findings.check(bool(dirty["y"][bad].isnan().all()), "y of a NaN token is not NaN")
    first = rank * len(clean["dW1"])
    for name in ("dW1", "dW2"):
        for expert in range(len(clean[name])):
            got = dirty[name][expert]
            want = clean[name][expert]
            if (first + expert) % 2 or first + expert >= 2 * K:
                findings.check(torch.equal(got, want), f"{name} of expert {first + expert} differs")
            else:
                findings.check(
                    not got.isfinite().all(), f"{name} of expert {first + expert} is finite"
                )


def check_recipe(rank, num_ranks, findings, heap, text: str, recipe: Recipe, wire: str) -> None:
    """With stochastic rounding, whose seeds depend on all gradients of an expert, dx has other bits."""
    same = ("y", "dprobs") if recipe.stochastic_gradients else ("y", "dx", "dprobs")
    for layout in ("packed", "expert-major"):
        findings.where = f"{text}, {recipe}, {wire}, {layout}, rank {rank} of {num_ranks}"
        options = layout, "always-overlapped", "slot", torch.bfloat16, recipe, wire
        compare(
            findings,
            rank,
            text,
            run(heap, 0.0, *options),
            run(heap, BAD[text], *options),
            same=same,
        )


@pytest.mark.parametrize(
    ("text", "dtype"),
    [("NaN", torch.float32), ("Inf", torch.bfloat16), ("-Inf", torch.float32)],
    ids=str,
)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_bad_tokens_change_no_other_token(cluster, num_ranks: int, text: str, dtype: torch.dtype):
    assert cluster(num_ranks).findings(check_isolation, text, dtype) == []


@pytest.mark.parametrize("text", ["NaN", "Inf"])
@pytest.mark.parametrize("recipe", [*RECIPES, NVFP4(stochastic_gradients=False)], ids=str)
def test_bad_tokens_change_no_other_token_in_low_precision(cluster, recipe: Recipe, text: str):
    """Also where a token shares blocks of columns, and a group's scale, with others."""
    for wire in ("none", "both") if recipe.row_format.element == "e4m3" else ("none",):
        assert cluster(2).findings(check_recipe, text, recipe, wire) == []


def test_the_check_notices_a_token_that_changes_its_neighbour(heap: SymmetricHeap):
    """Negative control: in this step a token changes its neighbour."""
    clean, dirty = (
        run(heap, value, "packed", "serial", "rank", torch.float32) for value in (0.0, BAD["NaN"])
    )
    dirty["y"] = dirty["y"] + dirty["y"].roll(1, 0)
    findings = Findings()
    compare(findings, 0, "NaN", clean, dirty, same=("y",))
    assert any("y of other tokens differs" in text for text in findings.texts)
