"""The kernels for Hopper against Triton's: the same bits, the same rows, the same indifference to everything else."""

import functools
import itertools

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

import gemm_problem
from gemm_problem import SENTINEL, ActProblem, check_ranges
from row_ranges import random_ranges, rows_of, spans_of, whole_groups

from symmoe.kernels import hopper_choice
from symmoe.kernels.activation import Activation, num_scale_sums
from symmoe.kernels.triton import gemm, gemm_act, tiles

BF16, FP16 = torch.bfloat16, torch.float16
if hopper_choice.hopper_kernels(torch.device("cuda", 0), BF16, 256) is None:
    pytest.skip("needs a Triton that has the kernels", allow_module_level=True)

from symmoe.kernels.hopper import act, launchers, wgrad  # noqa: E402

# A kernel whose warps wait for each other for ever cannot be interrupted: the process ends.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(40, method="thread")]

kernels = gemm_problem.triton_kernels()
Problem = functools.partial(ActProblem, device="cuda")
forward, backward = (functools.partial(each, kernels) for each in (gemm_problem.forward, gemm_problem.backward))
EXACT, ODD = (1024, 768), (1032, 712)  # H, I: all tiles and steps are full; none of the last ones
SPLITS = [(300, 0, 1, 777, 128, 129, 0), (0,) * 7, (0, 64, 0, 1000, 0, 0, 9)]
SWIGLU, LIMITED, SRELU, GEGLU, TANH_GEGLU = (
    Activation(),
    Activation(alpha=1.702, limit=1.0, offset=1.0),
    Activation(function="relu2", is_gated=False),
    Activation(function="gelu"),
    Activation(function="gelu_tanh"),
)
DACT_CASES = {
    "two warps": (act.TWO_WARPS, SWIGLU, BF16, ODD),
    "alternate": (act.ALTERNATE, SWIGLU, BF16, ODD),
    "gathered": (act.GATHERED, SWIGLU, BF16, ODD),
    "two warps exact": (act.TWO_WARPS, SWIGLU, BF16, EXACT),
    "alternate exact": (act.ALTERNATE, SWIGLU, BF16, EXACT),
    "gathered exact": (act.GATHERED, SWIGLU, BF16, EXACT),
    "two warps limited": (act.TWO_WARPS, LIMITED, BF16, ODD),
    "alternate limited": (act.ALTERNATE, LIMITED, BF16, ODD),
    "gathered limited": (act.GATHERED, LIMITED, BF16, ODD),
    "two warps srelu": (act.TWO_WARPS, SRELU, BF16, ODD),
    "alternate srelu": (act.ALTERNATE, SRELU, BF16, EXACT),
    "alternate geglu": (act.ALTERNATE, GEGLU, BF16, ODD),
    "gathered tanh geglu": (act.GATHERED, TANH_GEGLU, BF16, EXACT),
    "two warps fp16": (act.TWO_WARPS, SWIGLU, FP16, ODD),
    "alternate fp16": (act.ALTERNATE, SWIGLU, FP16, EXACT),
    "gathered fp16": (act.GATHERED, SWIGLU, FP16, ODD),
}
ACT_CASES = {
    "separate": (act.SEPARATE, SWIGLU, BF16, (1032, 384)),
    "alternate": (act.ALTERNATE, SWIGLU, BF16, (1032, 384)),
    "separate exact": (act.SEPARATE, SWIGLU, BF16, EXACT),
    "alternate limited": (act.ALTERNATE, LIMITED, BF16, (1032, 384)),
    "alternate fp16": (act.ALTERNATE, SWIGLU, FP16, (1032, 384)),
    "alternate geglu": (act.ALTERNATE, GEGLU, BF16, (1032, 384)),
    "separate tanh geglu": (act.SEPARATE, TANH_GEGLU, BF16, EXACT),
}


def assert_same_rows(p, got, expected):
    """Equal bits in the groups' rows, NaN where the other has NaN; the tail untouched."""
    n = p.num_rows
    torch.testing.assert_close(got[:n], expected[:n], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(got[n:], torch.full_like(got[n:], SENTINEL))


def products(p, k_first, zero_tail=False, num_sms=None):
    """The product by the kernel for Hopper, and by Triton's."""
    source, weight = p.rows, p.weight2 if k_first else p.weight1
    width = p.ffn if k_first else p.width
    on_hopper, usual = p.blank(width), p.blank(width)
    launchers.launch_gemm(
        source, weight, p.row_range, on_hopper, weight_k_first=k_first, zero_tail=zero_tail, num_sms=num_sms
    )
    function = kernels.grouped_gemm_dgrad if k_first else kernels.grouped_gemm
    function(source, weight, p.row_range, usual, config=gemm.gemm_config(width, p.dtype))
    return on_hopper, usual


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("widths", [EXACT, ODD], ids=str)
@pytest.mark.parametrize("k_first", [False, True], ids=["forward", "dgrad"])
def test_products_have_the_bits_of_tritons(k_first, widths, dtype):
    for splits, num_sms in itertools.product(SPLITS, (None, 7, 1)):
        p = Problem(splits, widths, dtype, SWIGLU)
        assert_same_rows(p, *products(p, k_first, num_sms=num_sms))


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("widths", [EXACT, ODD], ids=str)
@pytest.mark.parametrize("k_first", [False, True], ids=["forward", "dgrad"])
def test_parts_of_products_have_the_bits_of_the_whole(k_first, widths, dtype):
    for splits, step in itertools.product(SPLITS, (1, 128)):
        p = Problem(splits, widths, dtype, SWIGLU)
        weight, width = (p.weight2, p.ffn) if k_first else (p.weight1, p.width)

        def call(row_range, out, come, p=p, weight=weight, **options):
            rows = torch.where(come[:, None], p.rows, torch.nan)
            launchers.launch_gemm(rows, weight, row_range, out, weight_k_first=k_first, **options)

        check_ranges(p, width, call, random_ranges(splits, 3, step=step), num_sms=7)


def test_the_tail_becomes_zero_if_asked_for():
    for splits in SPLITS:
        p = Problem(splits, ODD, BF16, SWIGLU)
        on_hopper, usual = products(p, True, zero_tail=True)
        assert torch.equal(on_hopper[: p.num_rows], usual[: p.num_rows])
        assert not on_hopper[p.num_rows :].any()


def test_many_groups():
    for num_groups in (1, 33, 256):
        p = Problem(tuple(i % 5 * (i % 7) for i in range(1, num_groups + 1)), (64, 256), BF16, SWIGLU)
        assert_same_rows(p, *products(p, True))


def test_nan_stays_in_its_row():
    """Tiles begin at a group's first row and read on into the next group."""
    p, q = (Problem(SPLITS[0], ODD, BF16, SWIGLU) for _ in range(2))
    row = p.spans[3].start  # which the tile of group 2 reads
    q.rows[row] = torch.nan
    (clean, _), (dirty, _) = products(p, True), products(q, True)
    assert dirty[row].isnan().all()
    dirty[row] = clean[row]
    assert torch.equal(dirty, clean)


def dact(p, variant, num_sms=None, parts=None):
    """dh, a and dscale by the kernel for Hopper. parts: ranges of rows, one after the other."""
    rows = (p.packed, p.row_index) if variant is act.GATHERED else p.rows
    dh, a, sums = results = p.blank(p.width), p.blank(p.ffn), p.workspace(kernels)
    for row_range in [p.row_range] if parts is None else parts:
        operands = rows, p.weight2, row_range, (p.h, p.scale)
        act.launch_dact(*operands, results, p.activation, num_sms=num_sms, variant=variant)
    dscale = p.blank(dtype=torch.float32)
    gemm_act.sum_dact_partials(sums, p.row_range, dscale, num_scale_sums(p.ffn))
    return dh, a, dscale


@pytest.mark.parametrize("case", DACT_CASES)
def test_dact_has_the_bits_of_tritons(case):
    variant, activation, dtype, widths = DACT_CASES[case]
    for splits in SPLITS:
        p = Problem(splits, widths, dtype, activation)
        source = (p.packed, p.row_index) if variant is act.GATHERED else p.rows
        config = gemm_act.dact_config(p.ffn, dtype)
        dh, a, dscale, _ = backward(p, source, p.h, with_dbias=False, config=config)
        for num_sms in (None, 7, 1):
            on_hopper = dact(p, variant, num_sms)
            assert_same_rows(p, on_hopper[0], dh)
            assert_same_rows(p, on_hopper[1], a)
            assert torch.equal(on_hopper[2], dscale)


@pytest.mark.parametrize("case", DACT_CASES)
def test_dact_of_ranges_has_the_bits_of_the_whole(case):
    variant, activation, dtype, widths = DACT_CASES[case]
    for splits, step in itertools.product(SPLITS, (1, 128)):
        p = Problem(splits, widths, dtype, activation)
        parts = [ranges.cuda() for ranges in random_ranges(splits, 3, step=step)]
        whole = dact(p, variant)
        assert not whole[2].isnan().any()
        for num_sms in (None, 7):
            for out, expected in zip(dact(p, variant, num_sms, parts), whole, strict=True):
                assert torch.equal(out, expected)


@pytest.mark.parametrize("case", ACT_CASES)
def test_act_of_ranges_has_the_bits_of_the_whole(case):
    variant, activation, dtype, widths = ACT_CASES[case]
    for splits, step in itertools.product(SPLITS, (1, 128)):
        p = Problem(splits, widths, dtype, activation)
        whole, union = ((p.blank(p.width), p.blank(p.ffn)) for _ in range(2))

        def run(row_range, rows, h, a, p=p, **options):
            act.launch_act(rows, p.weight1, row_range, p.scale, (h, a), p.activation, variant=variant, **options)

        run(p.row_range, p.rows, *whole)
        for ranges in random_ranges(splits, 3, step=step):
            ranges, outs = ranges.cuda(), (p.blank(p.width), p.blank(p.ffn))
            come = rows_of(ranges, p.capacity)
            rows = torch.where(come[:, None], p.rows, torch.nan)
            run(ranges, rows, *outs, num_sms=7)
            run(ranges, rows, *union)
            for out, expected in zip(outs, whole, strict=True):
                assert torch.equal(out, torch.where(come[:, None], expected, SENTINEL))
        for out, expected in zip(union, whole, strict=True):
            assert torch.equal(out, expected)


@pytest.mark.parametrize("case", ACT_CASES)
def test_act_has_the_bits_of_tritons(case):
    variant, activation, dtype, widths = ACT_CASES[case]
    for splits in SPLITS:
        p = Problem(splits, widths, dtype, activation)
        usual = forward(p, p.rows, config=gemm_act.act_config(p.ffn, dtype, activation))
        for num_sms in (None, 7, 1):
            h, a = p.blank(p.width), p.blank(p.ffn)
            options = {"num_sms": num_sms, "variant": variant}
            act.launch_act(p.rows, p.weight1, p.row_range, p.scale, (h, a), activation, **options)
            assert_same_rows(p, h, usual[0])
            assert_same_rows(p, a, usual[1])


def test_more_than_two_to_the_31_elements():
    """h and dh are that large, out is half of it; the last rows are right."""
    p = Problem((1_400_000, 55_555), (64, 768), BF16, SWIGLU)
    on_hopper, usual = products(p, True)
    assert torch.equal(on_hopper[: p.num_rows], usual[: p.num_rows])
    del on_hopper, usual
    dh, a, *_ = backward(p, p.rows, p.h, with_dbias=False, config=gemm_act.dact_config(p.ffn, BF16))
    for variant in (act.TWO_WARPS, act.ALTERNATE):
        on_hopper = dact(p, variant)
        assert_same_rows(p, on_hopper[0], dh)
        assert_same_rows(p, on_hopper[1], a)
    h, a = forward(p, p.rows, config=gemm_act.act_config(p.ffn, BF16, SWIGLU))
    on_hopper = forward(p, p.rows)
    assert_same_rows(p, on_hopper[0], h)
    assert_same_rows(p, on_hopper[1], a)


def test_public_functions_choose_these_kernels(monkeypatch):
    """And the others for what these do not take; repeated calls, which skip the JIT, say the same."""
    p, called = Problem(SPLITS[0], EXACT, BF16, SWIGLU), []
    for name in ("launch_gemm", "launch_act", "launch_dact"):
        kernel = getattr(launchers, name)

        def recorded(*args, _kernel=kernel, _name=name, **options):
            called.append(_name)
            return _kernel(*args, **options)

        monkeypatch.setattr(launchers, name, recorded)
    results = []
    for _ in range(3):
        out = p.blank(p.ffn)
        gemm.grouped_gemm_dgrad(p.rows, p.weight2, p.row_range, out)
        results.append((out, *forward(p, p.rows), *backward(p, p.rows, p.h, with_dbias=False)[:2]))
    assert called == ["launch_gemm", "launch_act", "launch_dact"] * 3
    for again in results[1:]:
        for left, right in zip(again, results[0], strict=True):
            assert torch.equal(left, right)
    forward(p, (p.packed, p.row_index))
    forward(p, p.rows, bias=p.bias)
    backward(p, p.rows, p.h)
    assert len(called) == 9


# -- weight gradients --------------------------------------------------------------------------------------------------

WGRAD_WIDTHS = [(256, 512), (1032, 712), (712, 1032), (72, 264), (64, 8)]  # O, C
WGRAD_SPLITS = [(300, 0, 1, 777, 128, 65, 0), (0,) * 7, (0, 64, 0, 1000, 0, 0, 9), (1, 65, 63, 64, 0, 193, 449)]
TAIL = 37
WGRAD_CONFIG = tiles.TileConfig(block_m=128, block_n=256, block_k=64, num_stages=3, num_warps=8, flatten=True)


class WgradProblem:
    """dout and rows, whose tails are NaN, and row_range."""

    def __init__(self, splits, widths, dtype, seed=0):
        generator = torch.Generator(device="cuda").manual_seed(seed)
        num_rows, self.row_range = sum(splits), whole_groups(splits, device="cuda")
        self.spans = spans_of(self.row_range)
        self.shape, self.dtype = (len(splits), *widths), dtype
        shapes = [(num_rows + TAIL, width) for width in widths]
        self.dout, self.rows = (torch.randn(s, device="cuda", generator=generator).to(dtype) for s in shapes)
        self.dout[num_rows:] = torch.nan
        self.rows[num_rows:] = torch.nan

    def on_hopper(self, **options):
        """By the kernel for Hopper; there is NaN before and after the result, and stays."""
        size = torch.Size(self.shape).numel()
        around = torch.full((size + 2048,), torch.nan, dtype=self.dtype, device="cuda")
        out = around[1024 : 1024 + size].view(self.shape)
        wgrad.launch_wgrad(self.dout, self.rows, self.row_range, out, **options)
        assert around[:1024].isnan().all()
        assert around[1024 + size :].isnan().all()
        return out

    def usual(self):
        """By Triton's."""
        out = torch.full(self.shape, torch.nan, dtype=self.dtype, device="cuda")
        kernels.grouped_gemm_wgrad(self.dout, self.rows, self.row_range, out, config=WGRAD_CONFIG)
        return out


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("widths", WGRAD_WIDTHS, ids=str)
def test_wgrad_the_bits_are_tritons(widths, dtype):
    for splits in WGRAD_SPLITS:
        p = WgradProblem(splits, widths, dtype)
        usual = p.usual()
        assert not usual.isnan().any()
        for num_sms in (None, 7, 1):
            assert torch.equal(p.on_hopper(num_sms=num_sms), usual)
        for group, span in enumerate(p.spans):
            expected = p.dout[span].double().T @ p.rows[span].double()
            error = (usual[group].double() - expected).abs().max()
            assert error <= 1e-2 * max(1.0, expected.abs().max().item())


def test_wgrad_the_order_of_tiles_does_not_matter():
    p = WgradProblem(WGRAD_SPLITS[0], (1032, 712), BF16)
    usual = p.usual()
    for group_m in (1, 3, 16):
        assert torch.equal(p.on_hopper(group_m=group_m), usual)


def test_wgrad_many_groups():
    for num_groups in (1, 33, 256):
        p = WgradProblem(tuple(i % 5 * (i % 7) * 4 for i in range(1, num_groups + 1)), (136, 264), BF16)
        assert torch.equal(p.on_hopper(), p.usual())


def test_wgrad_nan_stays_in_its_group():
    """A group's last step begins inside of it and ends among the rows of the next."""
    p = WgradProblem(WGRAD_SPLITS[3], (1032, 712), BF16)
    clean = p.on_hopper()
    for group, span in enumerate(p.spans):
        if span.start == span.stop:
            continue
        q = WgradProblem(WGRAD_SPLITS[3], (1032, 712), BF16)
        q.dout[span] = torch.nan
        q.rows[span] = torch.nan
        dirty = q.on_hopper()
        assert dirty[group].isnan().all()
        dirty[group] = clean[group]
        assert torch.equal(dirty, clean)


def test_wgrad_calls_repeat():
    """A launch that skips the JIT, and rows whose bounds change between calls."""
    for splits in WGRAD_SPLITS * 3:
        p = WgradProblem(splits, (1032, 712), BF16)
        assert torch.equal(p.on_hopper(), p.usual())


def test_wgrad_more_than_two_to_the_31_elements():
    """Rows of 2^31 elements and more; then such a result."""
    p = WgradProblem((1_400_000, 55_555), (256, 1536), BF16)
    assert torch.equal(p.on_hopper(), p.usual())
    del p
    p = WgradProblem(tuple(i % 3 * 50 for i in range(36)), (8192, 8192), BF16)
    assert torch.equal(p.on_hopper(), p.usual())
