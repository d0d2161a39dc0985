"""What tests of heaps have in common: a call whose result is known exactly, and what a call raises."""

from collections.abc import Iterator

import torch
from worker import Findings

from symmoe import SymmetricHeap, combine_tokens, dispatch_tokens, make_plan


def round_trip(heap: SymmetricHeap, seed: int = 0) -> bool:
    """Whether a plan, a dispatch and a combine give every token the sum of its own row by its probs."""
    *_, is_exact = calls_of_a_round_trip(heap, seed)
    return is_exact


def calls_of_a_round_trip(heap: SymmetricHeap, seed: int) -> Iterator[bool]:
    """Yields after each of the three calls, at last whether the result is exact."""
    num_experts = 2 * heap.num_ranks
    generator = torch.Generator().manual_seed(seed + heap.rank)
    ids = torch.stack([torch.randperm(num_experts, generator=generator)[:2] for _ in range(5)]).to(
        heap.device
    )
    x = torch.randint(-50, 50, (5, 8), generator=generator).float().to(heap.device)
    probs = torch.rand((5, 2), generator=generator).to(heap.device)
    plan = make_plan(ids, num_experts=num_experts, heap=heap)
    yield True
    rows, row_probs, handle = dispatch_tokens(x, plan, probs=probs)
    yield True
    y = combine_tokens(rows * row_probs[:, None], handle, order="slot")
    yield torch.equal(y, x * probs[:, :1] + x * probs[:, 1:])


def outcome(fn, *args, **kwargs) -> tuple[str, str]:
    """Class and text of what a call raises; ("", "") if it raises nothing."""
    try:
        fn(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - the caller compares the class
        return type(error).__name__, str(error)
    return "", ""


def expect(findings: Findings, actual: tuple[str, str], error: str, *parts: str) -> None:
    """Notes an error of another class, and each part that its text has not."""
    name, text = actual
    findings.equal("error", (name, "" if name == error else text), (error, ""))
    for part in parts:
        findings.check(part in text, f"{part!r} is not in {text!r}")
