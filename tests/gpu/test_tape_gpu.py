"""Calls that are played from a tape on GPUs: the bits of calls that are not."""

import gc

import pytest
import torch
from cluster import run_on
from tape_cases import AROUND, OPTIONS, check_bits, make_calls, make_layer, step
from worker import open_heap

from symmoe.kernels.launch import player
from symmoe.kernels.launch.launch import FastLaunch
from symmoe.kernels.triton import router_products

LARGE = {"hidden": 512, "ffn": 256, "dtype": torch.bfloat16}  # kernels for Hopper take these


def compare(cluster, num_ranks: int, options: dict, around: str, least: int = 16) -> None:
    results = cluster(num_ranks, "cuda").run(check_bits, options, around, "cuda")
    assert [text for *_, texts in results for text in texts] == []
    for num_played, _, _ in results:
        assert num_played >= least


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("options", [*OPTIONS.values(), LARGE], ids=[*OPTIONS, "large"])
def test_played_calls_have_the_bits_of_others(cluster, options, num_ranks):
    compare(cluster, num_ranks, {**LARGE, **options} if options.get("bias") else options, "")


@pytest.mark.parametrize("around", AROUND[1:])
def test_recomputed_and_copied(cluster, around):
    # A copy has the size of the routing, so hardly any backward has the sizes of another.
    compare(cluster, 2, LARGE, around, least=8 if around == "saved copies" else 16)


@run_on(2, device="cuda")
def test_without_a_compiler_triton_launches_and_nothing_is_played(rank: int, num_ranks: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(player, "_player", lambda: None)
        num_played, _, texts = check_bits(rank, num_ranks, {**LARGE, "schedule": "always-overlapped"}, "", "cuda")
    for kernel in [each for each in gc.get_objects() if type(each) is FastLaunch]:
        kernel._calls.clear()  # who remembers a variant knows that nothing else launches it
    assert num_played == 0
    assert all("nothing plays it here" in text or "Triton's JIT" in text for text in texts)


@run_on(2, device="cuda")
def test_a_section_ends_where_the_plan_is_read_or_a_lease_ends_for_another(rank: int, num_ranks: int) -> None:
    """Of each tape, in how many sections C plays it."""
    counts, in_sections = [], player.in_sections

    def counted(tape):
        result = in_sections(tape)
        if tape.entries:
            counts.append(sum(isinstance(entry, player.Section) for entry in result.entries))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(player, "in_sections", counted)
        # As with many tokens: torch adds up the parts of the router's gradient, after the last launch.
        patch.setattr(router_products, "_splits", lambda num_tokens, num_tiles: (-(-num_tokens // 64), 64))
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
        assert all(gradient.isfinite().all() for x, dy in calls for gradient in step(layer, x, dy, ""))
