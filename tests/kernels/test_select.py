"""The seam between callers and kernels: hooks see every call, in order, until they are gone."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from symmoe import kernels
from symmoe.kernels import flops, twin  # noqa: F401 - a counter knows only the formulas that are there when it is made

CPU = torch.device("cpu")


def splits_of(device: torch.device) -> torch.Tensor:
    """The row_range of two groups of 3 and 4 rows."""
    row_range = torch.zeros(2, 2, dtype=torch.int32, device=device)
    kernels.for_device(device).splits_to_row_range(
        torch.tensor([3, 4], device=device), row_range, 7
    )
    return row_range


def test_the_last_hook_is_called_first():
    calls: list[tuple[str, str]] = []

    def hook_of(owner: str) -> kernels.select.Hook:
        def hook(name: str, kernel: Any, /, *args: Any, **options: Any) -> Any:
            calls.append((owner, name))
            return kernel(*args, **options)

        return hook

    kernel_getter = kernels.kernel_getter(CPU)
    first = hook_of("first")
    second = hook_of("second")
    with kernels.hooked(CPU, first), kernels.hooked(CPU, second):
        assert (splits_of(CPU).tolist(), kernel_getter().__all__) == (
            [[0, 3], [3, 7]],
            twin.__all__,
        )
        assert kernels.has_hook(CPU, first)
    assert calls == [("second", "splits_to_row_range"), ("first", "splits_to_row_range")]
    assert kernels.for_device(CPU) is kernel_getter() is twin
    assert not kernels.has_hook(CPU, first)


def test_a_hook_is_gone_after_an_error():
    def refuse(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), kernels.hooked(CPU, refuse):
        splits_of(CPU)
    assert kernels.for_device(CPU) is twin


def test_on_meta_nothing_is_computed():
    assert splits_of(torch.device("meta")).device.type == "meta"
    ops = kernels.for_device(torch.device("meta"))
    assert ops.read_addresses([], CPU, alignment=1, contiguous=True) is None


def test_a_mode_and_a_hook_see_the_same_product():
    calls = []
    with kernels.hooked(CPU, lambda name, kernel, *args: (calls.append(name), kernel(*args))[1]):
        with FlopCounterMode(display=False) as counter:
            kernels.for_device(CPU).router_gemm(
                torch.ones(5, 3), torch.ones(4, 3), torch.empty(5, 4)
            )
    assert (calls, counter.get_total_flops()) == (["router_gemm"], 2 * 5 * 3 * 4)
