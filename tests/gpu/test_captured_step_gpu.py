"""Captured steps on GPUs: CUDA graphs, of which some have too little room; layers inside torch's own captures."""

import gc
import weakref

import pytest
import torch
from captured_cases import Batch, H, Model, T
from cluster import run_on
from worker import Findings, open_heap

import symmoe
from symmoe.errors import ArgumentError


@run_on(1, 2, device="cuda")
def test_arguments(rank: int, num_ranks: int, findings: Findings) -> None:
    """Of a dataclass with new tensors in every call and a number on the CPU that changes: the bits of eager steps."""
    alive = []
    with open_heap("cuda", num_bytes=64 << 20) as heap:
        torch.use_deterministic_algorithms(False)
        model = Model(heap)
        plain = Model(heap)
        plain.load_state_dict(model.state_dict())

        def step_of(model: Model):
            def step(batch: Batch) -> Batch:
                y, aux_loss = model(batch.x)
                loss = batch.scale * y.square().mean() + aux_loss
                loss.backward()
                return Batch(loss, y)

            return step

        captured = symmoe.capture_step(step_of(model), model, num_eager=2)
        eager = step_of(plain)
        results = []
        for number, scale in enumerate([0.5] * 5 + [2.0] * 4 + [0.5]):
            x = torch.randn(
                T, H, generator=torch.Generator().manual_seed(number % 4 + 10 * rank)
            ).to(heap.device)
            batch = Batch(x, x + 1, torch.tensor(scale))
            alive += [
                weakref.ref(batch),
                weakref.ref(x),
                weakref.ref(batch.y),
                weakref.ref(batch.scale),
            ]
            plain.zero_grad()
            torch.manual_seed(number)
            actual = captured(batch)
            torch.manual_seed(number)
            expected = eager(batch)
            results.append((number, actual, Batch(expected.x.detach(), expected.y.detach())))
            pairs = zip(model.parameters(), plain.parameters(), strict=True)
            same = [torch.equal(p.grad, reference.grad) for p, reference in pairs]
            findings.check(all(same), f"rank {rank}, step {number}: {same}")
            del expected
        for number, actual, expected in results:  # also after later replays
            same = torch.equal(actual.x, expected.x), torch.equal(actual.y, expected.y)
            findings.check(all(same), f"rank {rank}, results of step {number}: {same}")
        findings.check(
            2 <= captured.num_captures <= 2 + captured.num_repeated,
            f"{captured.num_captures} captures",
        )
        with pytest.raises(ArgumentError, match=r"batch\.y \[3\] is on cpu, the model on cuda:"):
            captured(Batch(x, torch.ones(3)))
        del batch, x
        gc.collect()
        findings.equal("alive", [reference() for reference in alive if reference() is not None], [])
        captured.close()


@run_on(1, device="cuda")
def test_autocast_around_steps(rank: int, num_ranks: int, findings: Findings) -> None:
    """Weights that autocast has cast and kept before a capture are cast anew in each replay."""
    with open_heap("cuda", num_bytes=64 << 20) as heap:
        linear = torch.nn.Linear(H, H, device=heap.device)

        def step(x: torch.Tensor) -> torch.Tensor:
            y = linear(x).float()
            y.square().sum().backward()
            return y

        captured = symmoe.capture_step(step, linear, num_eager=1)
        x = torch.randn(T, H, device=heap.device)
        with torch.autocast("cuda", torch.bfloat16):
            for number in range(4):
                actual = captured(x)
                with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
                    findings.check(
                        torch.equal(actual, linear(x).float().detach()),
                        f"rank {rank}, step {number}",
                    )
                with torch.no_grad():
                    linear.weight.mul_(1.5)
        captured.close()
