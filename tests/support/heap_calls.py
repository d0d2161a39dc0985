"""What tests of heaps have in common: a call whose result is known exactly, and what a call raises."""

import torch
from worker import Findings

from symmoe import SymmetricHeap, combine_tokens, dispatch_tokens, make_plan


def round_trip(heap: SymmetricHeap, seed: int = 0) -> bool:
    """Whether a plan, a dispatch and a combine give every token K times its own row."""
    rank, num_experts = heap.rank, 2 * heap.num_ranks
    generator = torch.Generator().manual_seed(seed + rank)
    ids = torch.stack([torch.randperm(num_experts, generator=generator)[:2] for _ in range(5)]).to(
        heap.device
    )
    x = torch.randint(-50, 50, (5, 8), generator=generator).float().to(heap.device)
    plan = make_plan(ids, num_experts=num_experts, heap=heap)
    rows, _ = dispatch_tokens(x, plan)
    return torch.equal(combine_tokens(rows, plan, order="slot"), 2 * x)


def outcome(fn, *args, **kwargs) -> tuple[str, str]:
    """Class and text of what a call raises; ("", "") if it raises nothing."""
    try:
        fn(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - the caller compares the class
        return type(error).__name__, str(error)
    return "", ""


def expect(findings: Findings, found: tuple[str, str], error: str, *parts: str) -> None:
    """Notes an error of another class, and each part that its text has not."""
    name, text = found
    findings.equal("error", (name, "" if name == error else text), (error, ""))
    for part in parts:
        findings.check(part in text, f"{part!r} is not in {text!r}")
