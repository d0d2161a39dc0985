"""Parts of the grouped GEMMs: ranges of rows, which together are the whole, bit for bit."""

import itertools

import pytest
import torch
from gemm_problem import (
    BOTH,
    DTYPES,
    ActProblem,
    Problem,
    check_a_forgotten_range,
    check_act_ranges,
    check_ranges,
    part_calls,
)
from row_ranges import random_ranges, whole_groups

from symmoe.kernels import twin
from symmoe.kernels.activation import Activation

ACTIVATIONS = {
    "swiglu": Activation(),
    "limits": Activation(alpha=1.702, limit=0.75, offset=1.0, interleave=4),
    "srelu": Activation(function="relu2", is_gated=False),
}

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
seeds = pytest.mark.parametrize("seed", range(6))


def random_splits(seed):
    """1 to 6 groups of up to 40 rows, about a third of them without rows."""
    generator = torch.Generator().manual_seed(seed)
    num_groups = int(torch.randint(1, 7, (1,), generator=generator))
    sizes = torch.randint(0, 41, (num_groups,), generator=generator)
    return (sizes * (torch.rand(num_groups, generator=generator) > 0.33)).tolist()


@seeds
@dtypes
@pytest.mark.parametrize("name", ["plain", "biased", "gathered", "dgrad"])
def test_ranges_of_rows(name, dtype, seed):
    """Their bits are those of the whole, which test_gemm_twin.py compares with float64."""
    p = Problem(random_splits(seed), (24, 40), dtype, seed=seed)
    check_ranges(p, *part_calls(twin, p)[name], random_ranges(p.splits, 4, seed=seed))


@pytest.fixture(params=[1, 2])
def threads(request):
    """That many threads of torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("widths", [(8, 16), (64, 256), (520, 24), (136, 300)], ids=str)
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(widths):
    """MKL alone would break this: its sums for few rows have another order."""
    generator = torch.Generator().manual_seed(0)
    rows, weight = torch.randn(130, widths[0], generator=generator), torch.randn(1, *widths[::-1], generator=generator)
    whole = torch.empty(130, widths[1])
    twin.grouped_gemm(rows, weight, whole_groups([130]), whole)
    for size, first in itertools.product((1, 2, 3, 4, 7, 12, 15, 16, 17, 33, 64), (0, 1, 5, 61)):
        out = torch.empty_like(whole)
        twin.grouped_gemm(rows, weight, torch.tensor([[first], [first + size]], dtype=torch.int32), out)
        assert torch.equal(out[first : first + size], whole[first : first + size]), (size, first)


@seeds
@dtypes
@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_ranges_of_the_fused_functions(activation, dtype, seed):
    p = ActProblem(random_splits(seed), (24, 40), dtype, activation, seed=seed)
    for gather, bias in itertools.product(BOTH, (None, p.bias)):
        check_act_ranges(twin, p, random_ranges(p.splits, 4, seed=seed), gather=gather, bias=bias)


def test_a_forgotten_part_of_dact_is_seen():
    p = ActProblem((13, 0, 9), (24, 40), torch.float32, ACTIVATIONS["swiglu"])
    check_a_forgotten_range(twin, p, 0, 3)


# ------------------------------------------------------------------------------------------------- both packages
