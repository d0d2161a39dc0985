"""The weight gradient's kernel for Hopper against Triton's: the same bits, whatever lies beside a group's rows."""

import pytest
import torch
from row_ranges import spans_of, whole_groups

if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from symmoe.kernels import hopper_choice
from symmoe.kernels.triton import gemm

if hopper_choice.hopper_kernels(torch.device("cuda", 0), torch.bfloat16, 256) is None:
    pytest.skip("needs a Triton that has the kernels", allow_module_level=True)

from symmoe.kernels.hopper import wgrad
from symmoe.kernels.triton import tiles

# A kernel whose warps wait for each other for ever cannot be interrupted: the process ends.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(40, method="thread")]

DTYPES = [torch.bfloat16, torch.float16]
WIDTHS = [(256, 512), (1032, 712), (712, 1032), (72, 264), (64, 8)]  # O, C
SPLITS = [(300, 0, 1, 777, 128, 65, 0), (0,) * 7, (0, 64, 0, 1000, 0, 0, 9), (1, 65, 63, 64, 0, 193, 449)]
TAIL = 37
CONFIG = tiles.TileConfig(block_m=128, block_n=256, block_k=64, num_stages=3, num_warps=8, flatten=True)


class Problem:
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
        gemm.grouped_gemm_wgrad(self.dout, self.rows, self.row_range, out, config=CONFIG)
        return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_the_bits_are_tritons(widths, dtype):
    for splits in SPLITS:
        p = Problem(splits, widths, dtype)
        usual = p.usual()
        assert not usual.isnan().any()
        for num_sms in (None, 7, 1):
            assert torch.equal(p.on_hopper(num_sms=num_sms), usual)
        for group, span in enumerate(p.spans):
            expected = p.dout[span].double().T @ p.rows[span].double()
            error = (usual[group].double() - expected).abs().max()
            assert error <= 1e-2 * max(1.0, expected.abs().max().item())


def test_the_order_of_tiles_does_not_matter():
    p = Problem(SPLITS[0], (1032, 712), torch.bfloat16)
    usual = p.usual()
    for group_m in (1, 3, 16):
        assert torch.equal(p.on_hopper(group_m=group_m), usual)


def test_many_groups():
    for num_groups in (1, 33, 256):
        p = Problem(tuple(i % 5 * (i % 7) * 4 for i in range(1, num_groups + 1)), (136, 264), torch.bfloat16)
        assert torch.equal(p.on_hopper(), p.usual())


def test_nan_stays_in_its_group():
    """A group's last step begins inside of it and ends among the rows of the next."""
    p = Problem(SPLITS[3], (1032, 712), torch.bfloat16)
    clean = p.on_hopper()
    for group, span in enumerate(p.spans):
        if span.start == span.stop:
            continue
        q = Problem(SPLITS[3], (1032, 712), torch.bfloat16)
        q.dout[span] = torch.nan
        q.rows[span] = torch.nan
        dirty = q.on_hopper()
        assert dirty[group].isnan().all()
        dirty[group] = clean[group]
        assert torch.equal(dirty, clean)


def test_no_rows_give_zeros():
    p = Problem((0, 0, 0), (136, 264), torch.bfloat16)
    p.dout, p.rows = p.dout[:0], p.rows[:0]
    assert not p.on_hopper().any()


def test_calls_repeat():
    """A launch that skips the JIT, and rows whose bounds change between calls."""
    for splits in SPLITS * 3:
        p = Problem(splits, (1032, 712), torch.bfloat16)
        assert torch.equal(p.on_hopper(), p.usual())


def test_more_than_two_to_the_31_elements():
    """Rows of 2^31 elements and more; then such a result."""
    p = Problem((1_400_000, 55_555), (256, 1536), torch.bfloat16)
    assert torch.equal(p.on_hopper(), p.usual())
    del p
    p = Problem(tuple(i % 3 * 50 for i in range(36)), (8192, 8192), torch.bfloat16)
    assert torch.equal(p.on_hopper(), p.usual())
