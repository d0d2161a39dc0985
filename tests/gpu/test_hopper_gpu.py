"""The kernels for Hopper against Triton's: the same bits, the same rows, the same indifference to everything else."""

import functools
import itertools

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

import gemm_problem
from gemm_problem import SENTINEL, ActProblem, check_ranges, launched_by
from row_ranges import random_ranges

from symmoe.kernels import hopper_choice
from symmoe.kernels.activation import Activation, num_scale_sums
from symmoe.kernels.triton import gemm, gemm_act, tiles

BF16, FP16 = torch.bfloat16, torch.float16
if hopper_choice.hopper_kernels(torch.device("cuda", 0), BF16, 256) is None:
    pytest.skip("needs a Triton that has the kernels", allow_module_level=True)

from symmoe.kernels import hopper_launchers as launchers  # noqa: E402
from symmoe.kernels.hopper import act, wgrad  # noqa: E402

# A kernel whose warps wait for each other for ever cannot be interrupted: the process ends.
pytestmark = pytest.mark.timeout(40, method="thread")

kernels = gemm_problem.triton_kernels()
Problem = functools.partial(ActProblem, device="cuda")
forward, backward = (
    functools.partial(function, kernels)
    for function in (gemm_problem.forward, gemm_problem.backward)
)
EXACT = (1024, 768)
ODD = (1032, 712)  # H, I: all tiles and steps are full; none of the last ones
SPLITS = [(300, 0, 1, 777, 128, 129, 0), (0,) * 7, (0, 64, 0, 1000, 0, 0, 9)]
SWIGLU = Activation()
NUMBERS = {
    "swiglu": (SWIGLU, BF16),
    "limited": (Activation(alpha=1.702, limit=1.0, offset=1.0), BF16),
    "geglu": (Activation(function="gelu"), BF16),
    "tanh geglu": (Activation(function="gelu_tanh"), BF16),
    "srelu": (Activation(function="relu2", is_gated=False), BF16),
    "fp16": (SWIGLU, FP16),
}


class Product:
    """launch_gemm, or with k_first the input gradient, and what Triton's kernel makes of the same."""

    def __init__(self, k_first):
        self.k_first = k_first

    def blanks(self, p):
        return p.blanks(p.ffn if self.k_first else p.width)()

    def launch(self, p, row_range, outs, arrived, **options):
        rows = torch.where(arrived[:, None], p.rows, torch.nan)
        weight = p.weight2 if self.k_first else p.weight1
        launchers.launch_gemm(
            rows, weight, row_range, *outs, weight_k_first=self.k_first, **options
        )

    def results(self, p, outs):
        return outs

    def usual(self, p):
        (out,), weight = self.blanks(p), p.weight2 if self.k_first else p.weight1
        function = kernels.grouped_gemm_dgrad if self.k_first else kernels.grouped_gemm
        function(p.rows, weight, p.row_range, out, config=gemm.gemm_config(out.shape[1], p.dtype))
        return [out]

    def run(self, p, **options):
        """The results by the kernel for Hopper."""
        outs = self.blanks(p)
        self.launch(
            p, p.row_range, outs, torch.ones(p.capacity, dtype=torch.bool, device="cuda"), **options
        )
        return self.results(p, outs)


class Act(Product):
    """launch_act: h and a."""

    odd = 1032, 384  # it takes no others

    def __init__(self, variant):
        self.variant = variant

    def blanks(self, p):
        return p.blanks(p.width, p.ffn)()

    def launch(self, p, row_range, outs, arrived, **options):
        rows = torch.where(arrived[:, None], p.rows, torch.nan)
        options = {"variant": self.variant, **options}
        act.launch_act(rows, p.weight1, row_range, p.scale, outs, p.activation, **options)

    def usual(self, p):
        return forward(p, p.rows, config=gemm_act.act_config(p.ffn, p.dtype, p.activation))


class Dact(Act):
    """launch_dact: dh, a, and dscale from the sums that are left."""

    odd = ODD

    def blanks(self, p):
        return [*super().blanks(p), p.workspace(kernels)]

    def source(self, p):
        return (p.packed, p.row_index) if self.variant is act.GATHERED else p.rows

    def launch(self, p, row_range, outs, arrived, **options):
        rows = self.source(p)
        hidden = torch.where(arrived[:, None], p.h, torch.nan)
        if self.variant is not act.GATHERED:
            rows = torch.where(arrived[:, None], rows, torch.nan)
        operands = (rows, p.weight2, row_range, (hidden, p.scale))
        options = {"variant": self.variant, **options}
        act.launch_dact(*operands, outs, p.activation, **options)

    def results(self, p, outs):
        dh, a, sums = outs
        dscale = p.blank(dtype=torch.float32)
        gemm_act.sum_dact_partials(sums, p.row_range, dscale, num_scale_sums(p.ffn))
        return [dh, a, dscale]

    def usual(self, p):
        config = gemm_act.dact_config(p.ffn, p.dtype)
        return backward(p, self.source(p), p.h, with_dbias=False, config=config)[:3]


FUSED = {
    "separate act": Act(act.SEPARATE),
    "alternate act": Act(act.ALTERNATE),
    "two warps dact": Dact(act.TWO_WARPS),
    "alternate dact": Dact(act.ALTERNATE),
    "gathered dact": Dact(act.GATHERED),
}
CASES = {
    **{
        f"{name}, {numbers}, {widths}": (kernel, *NUMBERS[numbers], widths)
        for name, kernel in (("forward", Product(False)), ("dgrad", Product(True)))
        for numbers, widths in itertools.product(("swiglu", "fp16"), (EXACT, ODD))
    },
    **{f"{name}, exact": (kernel, SWIGLU, BF16, EXACT) for name, kernel in FUSED.items()},
    **{
        f"{name}, {numbers}": (kernel, *NUMBERS[numbers], kernel.odd)
        for (name, kernel), numbers in itertools.product(FUSED.items(), NUMBERS)
        if (numbers, kernel.odd) != ("srelu", Act.odd)
    },
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def assert_same_rows(p, results, references):
    """Equal bits in the groups' rows, NaN where the other has NaN; the tail untouched, of dscale 0."""
    n = p.num_rows
    for got, expected in zip(results, references, strict=True):
        torch.testing.assert_close(got[:n], expected[:n], rtol=0, atol=0, equal_nan=True)
        assert torch.equal(got[n:], torch.full_like(got[n:], SENTINEL if got.ndim == 2 else 0.0))


@cases
def test_the_bits_are_tritons(case):
    kernel, activation, dtype, widths = case
    for splits in SPLITS:
        p = Problem(splits, widths, dtype, activation)
        usual = kernel.usual(p)
        for num_sms in (None, 7, 1):
            assert_same_rows(p, kernel.run(p, num_sms=num_sms), usual)


@cases
def test_ranges_have_the_bits_of_the_whole(case):
    kernel, activation, dtype, widths = case
    for splits, step in itertools.product(SPLITS, (1, 128)):
        p = Problem(splits, widths, dtype, activation)
        blanks = functools.partial(kernel.blanks, p)
        launch = functools.partial(kernel.launch, p)
        full, union = check_ranges(
            p, blanks, launch, random_ranges(splits, 3, step=step), num_sms=7
        )
        for expected, out in zip(kernel.results(p, full), kernel.results(p, union), strict=True):
            assert torch.equal(expected, out)


def test_the_tail_becomes_zero_if_asked_for():
    for splits in SPLITS:
        p = Problem(splits, ODD, BF16, SWIGLU)
        (out,), (usual,) = Product(True).run(p, zero_tail=True), Product(True).usual(p)
        assert torch.equal(out[: p.num_rows], usual[: p.num_rows])
        assert not out[p.num_rows :].any()


def test_many_groups():
    for num_groups in (1, 33, 256):
        p = Problem(
            tuple(i % 5 * (i % 7) for i in range(1, num_groups + 1)), (64, 256), BF16, SWIGLU
        )
        assert_same_rows(p, Product(True).run(p), Product(True).usual(p))


def test_nan_stays_in_its_row():
    """Tiles begin at a group's first row and read on into the next group."""
    p, q = (Problem(SPLITS[0], ODD, BF16, SWIGLU) for _ in range(2))
    row = p.spans[3].start  # which the tile of group 2 reads
    q.rows[row] = torch.nan
    (clean,), (dirty,) = Product(True).run(p), Product(True).run(q)
    assert dirty[row].isnan().all()
    dirty[row] = clean[row]
    assert torch.equal(dirty, clean)


def test_more_than_two_to_the_31_elements():
    """h and dh are that large, out is half of it; the last rows are right."""
    p = Problem((1_400_000, 55_555), (64, 768), BF16, SWIGLU)
    assert_same_rows(p, Product(True).run(p), Product(True).usual(p))
    usual = Dact(act.ALTERNATE).usual(p)
    for variant in (act.TWO_WARPS, act.ALTERNATE):
        assert_same_rows(p, Dact(variant).run(p), usual)
    del usual
    assert_same_rows(p, forward(p, p.rows), Act(None).usual(p))


def test_public_functions_choose_these_kernels(monkeypatch):
    """And the others for what these do not take; repeated calls, which skip the JIT, say the same."""
    p = Problem(SPLITS[0], EXACT, BF16, SWIGLU)
    called = launched_by(
        monkeypatch, launchers, "grouped_gemm", "grouped_gemm_act", "grouped_gemm_dact"
    )
    results = []
    for _ in range(3):
        out = p.blank(p.ffn)
        gemm.grouped_gemm_dgrad(p.rows, p.weight2, p.row_range, out)
        results.append((out, *forward(p, p.rows), *backward(p, p.rows, p.h, with_dbias=False)[:2]))
    assert called == ["grouped_gemm", "grouped_gemm_act", "grouped_gemm_dact"] * 3
    for again in results[1:]:
        assert all(
            torch.equal(tensor, reference)
            for tensor, reference in zip(again, results[0], strict=True)
        )
    forward(p, (p.packed, p.row_index))
    forward(p, p.rows, bias=p.bias)
    backward(p, p.rows, p.h)
    assert len(called) == 9


# -- weight gradients --------------------------------------------------------------------------------------------------
WGRAD_WIDTHS = [(256, 512), (1032, 712), (712, 1032), (72, 264), (64, 8)]  # O, C
WGRAD_SPLITS = [
    (300, 0, 1, 777, 128, 65, 0),
    (0,) * 7,
    (0, 64, 0, 1000, 0, 0, 9),
    (1, 65, 63, 64, 0, 193, 449),
]
WGRAD_CONFIG = tiles.TileConfig(
    block_m=128, block_n=256, block_k=64, num_stages=3, num_warps=8, flatten=True
)


def wgrad_problem(splits, widths, dtype=BF16):
    return gemm_problem.Problem(splits, widths[::-1], dtype, device="cuda")


def on_hopper(p, **options):
    """The weight gradient by the kernel for Hopper; there is NaN before and after the result, and stays."""
    size = p.weight.numel()
    around = torch.full((size + 2048,), torch.nan, dtype=p.dtype, device="cuda")
    out = around[1024 : 1024 + size].view(p.weight.shape)
    wgrad.launch_wgrad(p.dout, p.rows, p.row_range, out, **options)
    assert around[:1024].isnan().all()
    assert around[1024 + size :].isnan().all()
    return out


def by_triton(p):
    out = torch.full_like(p.weight, torch.nan)
    kernels.grouped_gemm_wgrad(p.dout, p.rows, p.row_range, out, config=WGRAD_CONFIG)
    return out


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("widths", WGRAD_WIDTHS, ids=str)
def test_wgrad_the_bits_are_tritons(widths, dtype):
    for splits in WGRAD_SPLITS:
        p = wgrad_problem(splits, widths, dtype)
        usual = by_triton(p)
        assert not usual.isnan().any()
        for num_sms in (None, 7, 1):
            assert torch.equal(on_hopper(p, num_sms=num_sms), usual)
        for group, span in enumerate(p.spans):
            expected = p.dout[span].double().T @ p.rows[span].double()
            error = (usual[group].double() - expected).abs().max()
            assert error <= 1e-2 * max(1.0, expected.abs().max().item())


def test_wgrad_the_order_of_tiles_does_not_matter():
    p = wgrad_problem(WGRAD_SPLITS[0], (1032, 712))
    usual = by_triton(p)
    for group_m in (1, 3, 16):
        assert torch.equal(on_hopper(p, group_m=group_m), usual)


def test_wgrad_many_groups():
    for num_groups in (1, 33, 256):
        p = wgrad_problem(tuple(i % 5 * (i % 7) * 4 for i in range(1, num_groups + 1)), (136, 264))
        assert torch.equal(on_hopper(p), by_triton(p))


def test_wgrad_nan_stays_in_its_group():
    """A group's last step begins inside of it and ends among the rows of the next."""
    p = wgrad_problem(WGRAD_SPLITS[3], (1032, 712))
    clean = on_hopper(p)
    for group, span in enumerate(p.spans):
        if span.start == span.stop:
            continue
        q = wgrad_problem(WGRAD_SPLITS[3], (1032, 712))
        q.dout[span] = torch.nan
        q.rows[span] = torch.nan
        dirty = on_hopper(q)
        assert dirty[group].isnan().all()
        dirty[group] = clean[group]
        assert torch.equal(dirty, clean)


def test_wgrad_more_than_two_to_the_31_elements():
    """Rows of 2^31 elements and more; then such a result."""
    p = wgrad_problem((1_400_000, 55_555), (256, 1536))
    assert torch.equal(on_hopper(p), by_triton(p))
    del p
    p = wgrad_problem(tuple(i % 3 * 50 for i in range(36)), (8192, 8192))
    assert torch.equal(on_hopper(p), by_triton(p))
