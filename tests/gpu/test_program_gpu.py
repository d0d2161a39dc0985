"""Calls that run programs on GPUs: by what, and in how many sections. Their bits: tests/program."""

import gc

import pytest
import torch
from cluster import run_on
from program_cases import LARGE, check_bits, make_calls, make_layer, step
from worker import open_heap

from symmoe.kernels.launch import driver, player
from symmoe.kernels.launch.launch import FastLaunch
from symmoe.kernels.triton import router_products


@run_on(2, device="cuda")
def test_with_an_old_driver_triton_launches_one_by_one(rank: int, num_ranks: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "can_launch", lambda: False)
        num_runs, _, texts = check_bits(
            rank, num_ranks, {**LARGE, "schedule": "always-overlapped"}, "", "cuda"
        )
    for kernel in [item for item in gc.get_objects() if type(item) is FastLaunch]:
        kernel._calls.clear()  # who remembers a variant knows that nothing else launches it
    assert (num_runs, texts) == (0, [])


@run_on(2, device="cuda")
def test_a_section_ends_where_the_plan_is_read_or_a_lease_ends_for_another(
    rank: int, num_ranks: int
) -> None:
    """Of each program, how many sections it has."""
    counts, in_sections = [], player.in_sections

    def counted(program):
        result = in_sections(program)
        functions = [getattr(entry, "function", None) for entry in result.entries]
        methods = [getattr(function, "__func__", None) for function in functions]
        counts.append(methods.count(player.Section.launch))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(player, "in_sections", counted)
        # As with many tokens: torch adds up the parts of the router's gradient, after the last launch.
        patch.setattr(
            router_products, "_splits", lambda num_tokens, num_tiles: (-(-num_tokens // 64), 64)
        )
        check_bits(rank, num_ranks, {**LARGE, "schedule": "always-overlapped"}, "", "cuda")
    assert set(counts) <= {1, 2, 3}
    assert len(counts) > 1


@run_on(2, device="cuda")
def test_training_after_inference_mode(rank: int, num_ranks: int) -> None:
    """Training after an evaluation in inference mode."""
    with open_heap("cuda", num_bytes=128 << 20) as heap:
        layer = make_layer(heap, **LARGE)
        calls = make_calls(rank, 8, torch.bfloat16, hidden=512, device=heap.device)
        with torch.inference_mode():
            for _ in range(4):
                layer(next(calls)[0])
        assert all(
            gradient.isfinite().all() for x, dy in calls for gradient in step(layer, x, dy, "")
        )
