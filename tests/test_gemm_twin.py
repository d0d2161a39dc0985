"""The twins of the grouped GEMMs, of the biases' gradients and of the splits against float64 loops over single rows."""

import pytest
import torch
from row_ranges import whole_groups

from symmoe.kernels.table import TensorTable
from symmoe.kernels.twin import bias, gemm
from symmoe.kernels.twin.splits import splits_to_row_range

HIDDEN, FFN, NUM_PACKED, CAPACITY = 24, 40, 9, 40
SPLITS = [(5, 0, 1, 13, 0, 7), (0, 0, 0), (0, 40), (40,), (1, 0) * 35]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SENTINEL = -77.0
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}  # one rounding

of_every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
of_all_splits = pytest.mark.parametrize("splits", SPLITS, ids=lambda splits: f"{len(splits)} groups, {sum(splits)}")


class Problem:
    """Inputs of all functions: tail rows are NaN, tail indices out of range, packed rows are shared."""

    def __init__(self, splits, dtype, seed=0):
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype, self.splits = dtype, splits
        self.num_groups, self.num_rows = len(splits), sum(splits)
        self.row_range = whole_groups(splits)
        self.row_group = [g for g, size in enumerate(splits) for _ in range(size)]
        self.row_index = torch.randint(0, NUM_PACKED, (CAPACITY,), dtype=torch.int32, generator=self.generator)
        self.row_index[self.num_rows :] = 2**30
        self.rows, self.dout = self.with_tail(HIDDEN), self.with_tail(FFN)
        self.packed, self.packed_dout = self.normal(NUM_PACKED, HIDDEN), self.normal(NUM_PACKED, FFN)
        self.weight, self.bias = self.normal(self.num_groups, FFN, HIDDEN), self.normal(self.num_groups, FFN)
        self.scale = self.with_tail(dtype=torch.float32)

    def normal(self, *shape, dtype=None):
        return torch.randn(*shape, generator=self.generator).to(dtype or self.dtype)

    def with_tail(self, *shape, dtype=None):
        tensor = self.normal(CAPACITY, *shape, dtype=dtype)
        tensor[self.num_rows :] = torch.nan
        return tensor

    def blank(self, *shape, dtype=None):
        return torch.full((CAPACITY, *shape), SENTINEL, dtype=dtype or self.dtype)

    def sources(self, rows, packed):
        """(tensor, index, function from a row to its float64 values), contiguous and gathered."""
        yield rows, None, lambda r: rows[r].double()
        yield packed, self.row_index, lambda r: packed[self.row_index[r]].double()

    def check(self, out, expected_row, tail=SENTINEL):
        """Every row is expected_row(r), and the tail is all `tail`."""
        expected = torch.full_like(out, tail, dtype=torch.float64)
        for r in range(self.num_rows):
            expected[r] = expected_row(r)
        assert_near(out, expected, out.dtype)
        assert torch.equal(out[self.num_rows :], torch.full_like(out[self.num_rows :], tail))


def assert_near(out, expected, dtype):
    scale = max(1.0, expected.abs().max().item())
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=TOLERANCE[dtype] * scale)


def scattered(matrices):
    """(table, memory that holds its matrices): copies of packed matrices, last first, with 16 bytes between them."""
    num_groups, num_rows, num_columns = matrices.shape
    gap = 16 // matrices.dtype.itemsize
    size = num_rows * num_columns + gap
    memory = torch.full((num_groups, size), torch.nan, dtype=matrices.dtype)
    memory[:, : size - gap] = matrices.flatten(1).flip(0)
    step = size * matrices.dtype.itemsize
    pointers = torch.tensor([memory.data_ptr() + (num_groups - 1 - g) * step for g in range(num_groups)])
    return TensorTable(pointers, (num_groups, num_rows, num_columns), matrices.dtype), memory


def collected(table, memory):
    """The matrices of `scattered`, packed; what lies between them must be as it was."""
    num_groups, num_rows, num_columns = table.shape
    assert memory[:, num_rows * num_columns :].isnan().all()
    return memory[:, : num_rows * num_columns].flip(0).view(num_groups, num_rows, num_columns)


@of_all_splits
@of_every_dtype
@pytest.mark.parametrize("biased", ["no bias", "bias", "scaled bias"])
def test_grouped_gemm(splits, dtype, biased):
    p = Problem(splits, dtype)
    biases = {"no bias": {}, "bias": {"bias": p.bias}, "scaled bias": {"bias": p.bias, "bias_scale": p.scale}}[biased]

    def addend(r):
        scale = p.scale[r].double() if "bias_scale" in biases else 1.0
        return p.bias[p.row_group[r]].double() * scale if biases else 0.0

    for source, index, row in p.sources(p.rows, p.packed):
        out = p.blank(FFN)
        gemm.grouped_gemm(source, p.weight, p.row_range, out, row_index=index, **biases)
        p.check(out, lambda r, row=row: p.weight[p.row_group[r]].double() @ row(r) + addend(r))
        table, _memory = scattered(p.weight)
        again = p.blank(FFN)
        gemm.grouped_gemm(source, table, p.row_range, again, row_index=index, zero_tail=True, **biases)
        assert torch.equal(again[: p.num_rows], out[: p.num_rows])
        assert not again[p.num_rows :].any()


def test_the_result_is_rounded_once():
    """256 + 1 + 1 is 258 in bf16, but 256 + 1 alone is rounded to 256."""
    ones = torch.ones(1, 8, dtype=torch.bfloat16)
    weight = torch.tensor([256.0, 1, 0, 0, 0, 0, 0, 0], dtype=torch.bfloat16).expand(1, 8, 8).contiguous()
    out = torch.empty(1, 8, dtype=torch.bfloat16)
    row_range = whole_groups([1])
    gemm.grouped_gemm(ones, weight, row_range, out, bias=ones, bias_scale=torch.ones(1))
    assert torch.equal(out, torch.full_like(out, 258.0))


@of_all_splits
@of_every_dtype
def test_dgrad(splits, dtype):
    p = Problem(splits, dtype)
    table, _memory = scattered(p.weight)
    for dout, index, row in p.sources(p.dout, p.packed_dout):
        out, again = p.blank(HIDDEN), p.blank(HIDDEN)
        gemm.grouped_gemm_dgrad(dout, p.weight, p.row_range, out, row_index=index)
        p.check(out, lambda r, row=row: row(r) @ p.weight[p.row_group[r]].double())
        gemm.grouped_gemm_dgrad(dout, table, p.row_range, again, row_index=index, zero_tail=True)
        assert torch.equal(again[: p.num_rows], out[: p.num_rows])
        assert not again[p.num_rows :].any()


@of_all_splits
@of_every_dtype
def test_results_are_added(splits, dtype):
    """To what out holds, in the panel alone; the tail stays as it is."""
    p = Problem(splits, dtype)
    forward, backward = p.blank(FFN), p.blank(HIDDEN)
    for out in (forward, backward):
        out[: p.num_rows] = p.normal(p.num_rows, out.shape[1])
    biases = {"bias": p.bias, "bias_scale": p.scale}
    for source, index, row in p.sources(p.rows, p.packed):
        out = forward.clone()
        gemm.grouped_gemm(source, p.weight, p.row_range, out, row_index=index, accumulate=True, **biases)

        def expected(r, row=row):
            g = p.row_group[r]
            return forward[r].double() + p.weight[g].double() @ row(r) + p.bias[g].double() * p.scale[r].double()

        p.check(out, expected)
    for source, index, row in p.sources(p.dout, p.packed_dout):
        out = backward.clone()
        gemm.grouped_gemm_dgrad(source, p.weight, p.row_range, out, row_index=index, accumulate=True)
        p.check(out, lambda r, row=row: backward[r].double() + row(r) @ p.weight[p.row_group[r]].double())


def test_a_sum_is_rounded_once():
    """256 + 1 is 256 in bf16, and so is a second 1 more; their sum of 2 is not lost."""
    ones, row_range = torch.ones(1, 8, dtype=torch.bfloat16), whole_groups([1])
    weight = torch.zeros(1, 8, 8, dtype=torch.bfloat16)
    weight[:, :, :2] = 1
    for call in (gemm.grouped_gemm, gemm.grouped_gemm_dgrad):
        out = torch.full((1, 8), 256.0, dtype=torch.bfloat16)
        call(ones, weight if call is gemm.grouped_gemm else weight.mT.contiguous(), row_range, out, accumulate=True)
        assert torch.equal(out, torch.full_like(out, 258.0))


@of_all_splits
@of_every_dtype
@pytest.mark.parametrize("out_dtype", [None, torch.float32], ids=["", "fp32 out"])
@pytest.mark.parametrize("accumulate", [False, True], ids=["", "accumulate"])
def test_wgrad(splits, dtype, out_dtype, accumulate):
    p = Problem(splits, dtype)
    out_dtype = out_dtype or dtype
    for dout, dout_index, dout_row in p.sources(p.dout, p.packed_dout):
        for rows, rows_index, row in p.sources(p.rows, p.packed):
            before = p.normal(p.num_groups, FFN, HIDDEN, dtype=out_dtype)
            if not accumulate:
                before.fill_(torch.nan)
            indices = {"dout_index": dout_index, "rows_index": rows_index}
            out, (table, memory) = before.clone(), scattered(before)
            gemm.grouped_gemm_wgrad(dout, rows, p.row_range, out, accumulate=accumulate, **indices)
            expected = before.double() if accumulate else torch.zeros(out.shape, dtype=torch.float64)
            for r, g in enumerate(p.row_group):
                expected[g] += torch.outer(dout_row(r), row(r))
            assert_near(out, expected, out_dtype)
            gemm.grouped_gemm_wgrad(dout, rows, p.row_range, table, accumulate=accumulate, **indices)
            assert torch.equal(collected(table, memory), out)


@of_every_dtype
def test_accumulating_leaves_groups_without_rows_alone(dtype):
    """Not even -0 or the payload of a NaN may change."""
    p = Problem((0, 3, 0), dtype)
    bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    out = torch.full((3, FFN, HIDDEN), -0.0, dtype=dtype)
    out[2].view(bits).fill_(torch.full((1,), -torch.nan, dtype=dtype).view(bits).item() ^ 1)
    before = out.clone()
    gemm.grouped_gemm_wgrad(p.dout, p.rows, p.row_range, out, accumulate=True)
    for g in (0, 2):
        assert torch.equal(out[g].view(bits), before[g].view(bits))
    assert out[1].any()


@of_all_splits
@of_every_dtype
@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])
def test_bias_grad(splits, dtype, scaled):
    p = Problem(splits, dtype)
    for dout, index, row in p.sources(p.dout, p.packed_dout):
        for out_dtype in {dtype, torch.float32}:
            dbias = torch.full((p.num_groups, FFN), torch.nan, dtype=out_dtype)
            bias.grouped_bias_grad(dout, p.row_range, dbias, dout_index=index, scale=p.scale if scaled else None)
            expected = torch.zeros(dbias.shape, dtype=torch.float64)
            for r, g in enumerate(p.row_group):
                expected[g] += row(r) * (p.scale[r].double() if scaled else 1.0)
            assert_near(dbias, expected, out_dtype)


@of_all_splits
@of_every_dtype
@pytest.mark.parametrize("accumulate", [False, True], ids=["", "accumulate"])
def test_bias_dot(splits, dtype, accumulate):
    p = Problem(splits, dtype)
    for dout, index, row in p.sources(p.dout, p.packed_dout):
        dscale = p.blank(dtype=torch.float32)
        bias.grouped_bias_dot(dout, p.bias, p.row_range, dscale, dout_index=index, accumulate=accumulate)
        before = SENTINEL if accumulate else 0.0
        p.check(dscale, lambda r, row=row, before=before: before + row(r).dot(p.bias[p.row_group[r]].double()))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    ("splits", "num_rows", "expected"),
    [
        ([3, 0, 4], 10, [0, 3, 3, 7]),
        ([3, 0, 4], 7, [0, 3, 3, 7]),
        ([3, 0, 4], 5, [0, 3, 3, 5]),
        ([3, 0, 4], 0, [0, 0, 0, 0]),
        ([-3, 2, -(2**31), 4], 10, [0, 0, 2, 2, 6]),
        ([2**31 - 1] * 5, 9, [0, 9, 9, 9, 9, 9]),
        ([1, 2**31 - 1, 1], 2**31 - 1, [0, 1, 2**31 - 1, 2**31 - 1]),
        ([6], 8, [0, 6]),
        ([1] * 70, 64, [*range(65), *[64] * 6]),
    ],
)
def test_splits(splits, num_rows, expected, dtype):
    row_range = torch.full((2, len(splits)), -1, dtype=torch.int32)
    splits_to_row_range(torch.tensor(splits, dtype=dtype), row_range, num_rows)
    assert row_range.tolist() == [expected[:-1], expected[1:]]


def test_splits_of_64_bits():
    """Sums of what a single split is limited to do not overflow."""
    row_range = torch.full((2, 4), -1, dtype=torch.int32)
    splits_to_row_range(torch.tensor([-(2**63), 5, 2**63 - 1, 2**63 - 1]), row_range, 100)
    assert row_range.tolist() == [[0, 0, 5, 100], [0, 5, 100, 100]]


@of_every_dtype
@pytest.mark.parametrize("width_bytes", [16, 48, 64, 144, 400])
def test_bits_do_not_depend_on_where_the_rows_lie(dtype, width_bytes):
    """The same 13 rows behind 0 to 16 rows of another group, so that they start at every 16-byte alignment."""
    width = width_bytes // dtype.itemsize
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    rows, dout, scale = normal(13, width), normal(13, 2 * width), normal(13).float()
    weight, bias_g = normal(2 * width, width), normal(2 * width)

    def run(shift):
        row_range = whole_groups([shift, 13])
        n = shift + 13

        def placed(tensor):
            return torch.cat([torch.ones(shift, *tensor.shape[1:], dtype=tensor.dtype), tensor])

        both, both_bias = torch.stack([torch.ones_like(weight), weight]), torch.stack([bias_g * 2, bias_g])
        x, d, s = placed(rows), placed(dout), placed(scale)
        out, dx = torch.empty(n, 2 * width, dtype=dtype), torch.empty(n, width, dtype=dtype)
        dw, db, ds = torch.empty_like(both), torch.empty_like(both_bias), torch.empty(n)
        gemm.grouped_gemm(x, both, row_range, out, bias=both_bias, bias_scale=s)
        gemm.grouped_gemm_dgrad(d, both, row_range, dx)
        gemm.grouped_gemm_wgrad(d, x, row_range, dw)
        bias.grouped_bias_grad(d, row_range, db)
        bias.grouped_bias_dot(d, both_bias, row_range, ds)
        return [dw[1], db[1], *(t[shift:] for t in (out, dx, ds))]

    expected = run(0)
    for shift in range(1, 17):
        for got, want in zip(run(shift), expected, strict=True):
            assert torch.equal(got, want)
