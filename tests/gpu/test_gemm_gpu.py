"""The GEMM kernels on a GPU against float64 and against the twins, which run on the same CUDA tensors."""

import itertools

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from row_ranges import random_ranges, rows_of, spans_of, whole_groups

from symmoe.kernels.table import TensorTable
from symmoe.kernels.triton import bias, gemm, tiles
from symmoe.kernels.triton.splits import splits_to_row_range
from symmoe.kernels.twin import bias as twin_bias
from symmoe.kernels.twin import gemm as twin_gemm
from symmoe.kernels.twin import splits as twin_splits

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# H, O: tiles fit exactly; neither tiles nor contraction steps fit; smaller than a tile.
WIDTHS = [(1024, 1536), (1032, 1424), (64, 48)]
# As many groups everywhere, because every number of groups is compiled anew.
SPLITS = [(300, 0, 1, 777, 128, 129, 0), (0,) * 7, (0, 64, 0, 1000, 0, 0, 9), (0, 0, 0, 0, 0, 0, 1500)]
TAIL = 37
SENTINEL = -77.0
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 1.5e-3, torch.float32: 1e-5}

of_every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


class Problem:
    """Inputs of all functions, results around 1; tail rows are NaN, tail indices out of range."""

    def __init__(self, splits, widths, dtype, seed=0):
        self.generator = torch.Generator(device="cuda").manual_seed(seed)
        self.splits, self.dtype = splits, dtype
        self.hidden, self.ffn = widths
        self.num_groups, self.num_rows = len(splits), sum(splits)
        self.capacity = self.num_rows + TAIL
        self.num_packed = self.num_rows // 2 + 1
        self.row_range = whole_groups(splits, device="cuda")
        self.spans = spans_of(self.row_range)
        self.row_index = torch.randint(
            0, self.num_packed, (self.capacity,), dtype=torch.int32, device="cuda", generator=self.generator
        )
        self.row_index[self.num_rows :] = 2**31 - 1
        self.packed, self.rows = self.normal(self.num_packed, self.hidden), self.with_tail(self.hidden)
        self.packed_dout, self.dout = self.normal(self.num_packed, self.ffn), self.with_tail(self.ffn)
        self.weight = self.normal(self.num_groups, self.ffn, self.hidden, scale=self.hidden**-0.5)
        self.bias = self.normal(self.num_groups, self.ffn)
        self.scale = self.with_tail().float()

    def normal(self, *shape, scale=1.0, dtype=None):
        return (torch.randn(*shape, device="cuda", generator=self.generator) * scale).to(dtype or self.dtype)

    def with_tail(self, *shape):
        tensor = self.normal(self.capacity, *shape)
        tensor[self.num_rows :] = torch.nan
        return tensor

    def blank(self, *shape, dtype=None):
        return torch.full((self.capacity, *shape), SENTINEL, dtype=dtype or self.dtype, device="cuda")

    def source(self, gather):
        """(rows tensor, index, the rows themselves in float64), contiguous or gathered."""
        return self.choose(self.rows, self.packed, gather)

    def dout_source(self, gather):
        return self.choose(self.dout, self.packed_dout, gather)

    def choose(self, rows, packed, gather):
        if not gather:
            return rows, None, rows.double()
        gathered = torch.full((self.capacity, packed.shape[1]), torch.nan, dtype=torch.float64, device="cuda")
        gathered[: self.num_rows] = packed[self.row_index[: self.num_rows].long()].double()
        return packed, self.row_index, gathered

    def check_rows(self, out, per_group, tail=SENTINEL):
        """out's rows of group g are per_group(g, span), and its tail is all `tail`."""
        for g, span in enumerate(self.spans):
            if span.start < span.stop:
                assert_near(out[span], per_group(g, span))
        assert torch.equal(out[self.num_rows :], torch.full_like(out[self.num_rows :], tail))

    def check_twin(self, out, twin_out):
        assert_near(out[: self.num_rows], twin_out[: self.num_rows])


def assert_near(out, expected):
    """Relative to the largest value; rounding of that value included."""
    scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
    torch.testing.assert_close(out.double(), expected.double(), rtol=0, atol=TOLERANCE[out.dtype] * scale)


class Scattered:
    """Matrices of a packed tensor copied to where no two are neighbours, NaN between them."""

    def __init__(self, packed):
        num_groups, self.size = packed.shape[0], packed[0].numel()
        gap = 16 // packed.dtype.itemsize
        self.shape = packed.shape
        self.memory = torch.full((num_groups, self.size + gap), torch.nan, dtype=packed.dtype, device="cuda")
        self.memory[:, : self.size] = packed.flatten(1).flip(0)
        step = (self.size + gap) * packed.dtype.itemsize
        addresses = [self.memory.data_ptr() + (num_groups - 1 - g) * step for g in range(num_groups)]
        self.table = TensorTable(torch.tensor(addresses, device="cuda"), tuple(packed.shape), packed.dtype)

    def packed(self):
        """The matrices as they are now; what lies between them must not have changed."""
        assert self.memory[:, self.size :].isnan().all()
        return self.memory[:, : self.size].flip(0).view(self.shape)


def biases(p, kind):
    return {"none": {}, "bias": {"bias": p.bias}, "scaled": {"bias": p.bias, "bias_scale": p.scale}}[kind]


def check_gemm(p, gather, table, biased, zero_tail, **options):
    source, index, rows = p.source(gather)
    arguments = {"row_index": index, "zero_tail": zero_tail, **biases(p, biased)}
    scattered = Scattered(p.weight)
    out, twin_out = p.blank(p.ffn), p.blank(p.ffn)
    gemm.grouped_gemm(source, scattered.table if table else p.weight, p.row_range, out, **arguments, **options)

    def expected(g, span):
        addend = p.bias[g].double() * (p.scale[span].double()[:, None] if biased == "scaled" else 1.0)
        return rows[span] @ p.weight[g].double().t() + (0.0 if biased == "none" else addend)

    p.check_rows(out, expected, 0.0 if zero_tail else SENTINEL)
    twin_gemm.grouped_gemm(source, p.weight, p.row_range, twin_out, **arguments)
    p.check_twin(out, twin_out)
    if table:
        packed_out = p.blank(p.ffn)
        gemm.grouped_gemm(source, p.weight, p.row_range, packed_out, **arguments, **options)
        assert torch.equal(out, packed_out)


def check_dgrad(p, table, zero_tail, **options):
    scattered = Scattered(p.weight)
    out, twin_out = p.blank(p.hidden), p.blank(p.hidden)
    weight = scattered.table if table else p.weight
    gemm.grouped_gemm_dgrad(p.dout, weight, p.row_range, out, zero_tail=zero_tail, **options)
    p.check_rows(out, lambda g, span: p.dout[span].double() @ p.weight[g].double(), tail=0.0 if zero_tail else SENTINEL)
    twin_gemm.grouped_gemm_dgrad(p.dout, p.weight, p.row_range, twin_out, zero_tail=zero_tail)
    p.check_twin(out, twin_out)
    if table:
        packed_out = p.blank(p.hidden)
        gemm.grouped_gemm_dgrad(p.dout, p.weight, p.row_range, packed_out, zero_tail=zero_tail, **options)
        assert torch.equal(out, packed_out)


def check_wgrad(p, gather_dout, gather_rows, table, accumulate, out_dtype, **options):
    dout, dout_index, dout_rows = p.dout_source(gather_dout)
    source, index, rows = p.source(gather_rows)
    before = p.normal(p.num_groups, p.ffn, p.hidden, dtype=out_dtype)
    if accumulate:
        before[p.row_range[0] == p.row_range[1]] = torch.nan  # left alone
    else:
        before.fill_(torch.nan)
    arguments = {"dout_index": dout_index, "rows_index": index, "accumulate": accumulate}
    packed, scattered, twin_out = before.clone(), Scattered(before), before.clone()
    gemm.grouped_gemm_wgrad(dout, source, p.row_range, packed, **arguments, **options)
    if table:
        gemm.grouped_gemm_wgrad(dout, source, p.row_range, scattered.table, **arguments, **options)
        assert torch.equal(scattered.packed().nan_to_num(7), packed.nan_to_num(7))
    twin_gemm.grouped_gemm_wgrad(dout, source, p.row_range, twin_out, **arguments)
    for g, span in enumerate(p.spans):
        if span.start < span.stop:
            product = dout_rows[span].t() @ rows[span]
            assert_near(packed[g], product + before[g].double() if accumulate else product)
            assert_near(packed[g], twin_out[g])
        else:
            assert packed[g].isnan().all() if accumulate else not packed[g].any()


def check_biases(p, gather, scaled, accumulate):
    dout, index, dout_rows = p.dout_source(gather)
    for out_dtype in {p.dtype, torch.float32}:
        dbias, twin_dbias = torch.full((2, p.num_groups, p.ffn), torch.nan, dtype=out_dtype, device="cuda")
        arguments = {"dout_index": index, "scale": p.scale if scaled else None}
        bias.grouped_bias_grad(dout, p.row_range, dbias, **arguments)
        twin_bias.grouped_bias_grad(dout, p.row_range, twin_dbias, **arguments)
        assert_near(dbias, twin_dbias)
        for g, span in enumerate(p.spans):
            addends = dout_rows[span] * (p.scale[span].double()[:, None] if scaled else 1.0)
            assert_near(dbias[g], addends.sum(dim=0))
    dscale, twin_dscale = p.blank(dtype=torch.float32), p.blank(dtype=torch.float32)
    bias.grouped_bias_dot(dout, p.bias, p.row_range, dscale, dout_index=index, accumulate=accumulate)
    twin_bias.grouped_bias_dot(dout, p.bias, p.row_range, twin_dscale, dout_index=index, accumulate=accumulate)
    p.check_twin(dscale, twin_dscale)
    p.check_rows(dscale, lambda g, span: dout_rows[span] @ p.bias[g].double() + (SENTINEL if accumulate else 0.0))


# gather, table, bias, zero_tail
GEMM_CASES = [(False, False, "none", False), (True, True, "scaled", True), (True, False, "bias", False),
              (False, True, "none", True)]  # fmt: skip
DGRAD_CASES = [(False, False), (True, True)]  # table, zero_tail
# gather dout, gather rows, table, accumulate, whether out is fp32
WGRAD_CASES = [(False, False, False, False, False), (True, False, True, True, True), (False, True, True, False, True),
               (False, True, False, True, False), (True, True, False, False, False)]  # fmt: skip
BIAS_CASES = [(False, False, False), (True, True, True)]  # gather, scaled, accumulate


def check_all(p, **options):
    """Every option of every function at least once."""
    for case in GEMM_CASES:
        check_gemm(p, *case, **options)
    for case in DGRAD_CASES:
        check_dgrad(p, *case, **options)
    for *case, is_fp32 in WGRAD_CASES:
        check_wgrad(p, *case, torch.float32 if is_fp32 else p.dtype, **options)


@of_every_dtype
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_against_float64_and_twins(widths, dtype):
    for splits in SPLITS:
        p = Problem(splits, widths, dtype)
        check_all(p)
        for case in BIAS_CASES:
            check_biases(p, *case)


@of_every_dtype
def test_every_combination_of_options(dtype):
    """The products that the lists above leave out, on widths that nothing divides."""
    p = Problem(SPLITS[0], WIDTHS[1], dtype)
    both = (False, True)
    for case in itertools.product(both, both, ("none", "bias", "scaled"), both):
        check_gemm(p, *case)
    for case in itertools.product(both, both):
        check_dgrad(p, *case)
    for case in itertools.product(both, both, both, both, {p.dtype, torch.float32}):
        check_wgrad(p, *case)
    for case in itertools.product(both, both, both):
        check_biases(p, *case)


def part_calls(p):
    """(width of the output, function (row_range, out, mask of the rows that have come, **options)), one of a kind."""
    table, usual, usual_dgrad = (
        Scattered(p.weight),
        gemm.gemm_config(p.ffn, p.dtype),
        gemm.gemm_config(p.hidden, p.dtype),
    )
    biased = {"bias": p.bias, "bias_scale": p.scale}

    def only(rows, come):
        return torch.where(come[:, None], rows, torch.nan)

    def plain(row_range, out, come, **options):
        gemm.grouped_gemm(only(p.rows, come), p.weight, row_range, out, **options)

    def by_triton(row_range, out, come, **options):
        gemm.grouped_gemm(only(p.rows, come), p.weight, row_range, out, config=usual, **biased, **options)

    def gathered(row_range, out, come, **options):
        gemm.grouped_gemm(p.packed, table.table, row_range, out, row_index=p.row_index, bias=p.bias, **options)

    def dgrad(row_range, out, come, **options):
        gemm.grouped_gemm_dgrad(only(p.dout, come), p.weight, row_range, out, **options)

    def dgrad_by_triton(row_range, out, come, **options):
        gemm.grouped_gemm_dgrad(only(p.dout, come), p.weight, row_range, out, config=usual_dgrad, **options)

    yield from ((p.ffn, call) for call in (plain, by_triton, gathered))
    yield from ((p.hidden, call) for call in (dgrad, dgrad_by_triton))


@of_every_dtype
@pytest.mark.parametrize("step", [1, 128])
def test_ranges_of_rows(step, dtype):
    """A range's rows are written, no others, and none are read that have not come; all ranges are the whole."""
    for splits in SPLITS:
        p = Problem(splits, WIDTHS[1], dtype)
        everything = torch.arange(p.capacity, device="cuda") < p.num_rows
        for width, call in part_calls(p):
            whole, union = p.blank(width), p.blank(width)
            call(p.row_range, whole, everything)
            assert not whole.isnan().any()
            for ranges in random_ranges(splits, 3, step=step):
                ranges, out = ranges.cuda(), p.blank(width)
                come = rows_of(ranges, p.capacity)
                call(ranges, out, come, num_sms=7)
                assert torch.equal(out, torch.where(come[:, None], whole, SENTINEL)), call.__name__
                call(ranges, union, come)
            assert torch.equal(union, whole), call.__name__


@of_every_dtype
def test_ranges_of_a_single_group(dtype):
    """Rows in the middle of it, none at the end, and an end far before the begin."""
    p = Problem((500,), WIDTHS[1], dtype)
    for width, call in part_calls(p):
        whole = p.blank(width)
        call(p.row_range, whole, torch.arange(p.capacity, device="cuda") < 500)
        for begin, end in ((131, 402), (500, 500), (499, 3), (0, 1)):
            ranges = torch.tensor([[begin], [end]], dtype=torch.int32, device="cuda")
            come, out = rows_of(ranges, p.capacity), p.blank(width)
            call(ranges, out, come)
            assert torch.equal(out, torch.where(come[:, None], whole, SENTINEL)), (call.__name__, begin, end)


@of_every_dtype
def test_panels_of_columns(dtype):
    """A panel's columns are written, no others, in the tail too; of all rows and of ranges."""
    for splits in SPLITS:
        p = Problem(splits, WIDTHS[1], dtype)
        everything = torch.arange(p.capacity, device="cuda") < p.num_rows
        parts = [ranges.cuda() for ranges in random_ranges(splits, 2, step=128)]
        for width, call in part_calls(p):
            if call.__name__ in (
                "by_triton",
                "dgrad",
            ):  # to compile less; the kernels of `dgrad` are in test_hopper_gpu
                continue
            whole, union = p.blank(width), p.blank(width)
            call(p.row_range, whole, everything, zero_tail=True)
            for columns in ((0, 256), (256, width)):
                inside = slice(*columns)
                out, right = p.blank(width), p.blank(width)
                right[:, inside] = whole[:, inside]
                call(p.row_range, out, everything, columns=columns, zero_tail=True, num_sms=13)
                assert torch.equal(out, right), (call.__name__, columns)
                for ranges in parts:
                    call(ranges, union, rows_of(ranges, p.capacity), columns=columns)
            assert torch.equal(union[: p.num_rows], whole[: p.num_rows]), call.__name__
            assert (union[p.num_rows :] == SENTINEL).all()
            assert not whole[p.num_rows :].any()


BASE = {"block_m": 128, "block_k": 64, "num_stages": 3, "num_warps": 8}
VARIANTS = {
    "flatten": {"flatten": True, "block_n": 128},
    "wide": {"block_n": 256},
    "flatten groups": {"flatten": True, "block_n": 128, "group_m": 16},
    "two programs": {"programs_per_sm": 2, "block_n": 64},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_other_tile_configs(variant):
    """What a sweep may choose must be right before it is fast."""
    check_all(Problem(SPLITS[0], WIDTHS[1], torch.bfloat16), config=tiles.TileConfig(**BASE, **VARIANTS[variant]))


def test_many_groups():
    """More groups than fit a power of two, most of them without rows."""
    p = Problem((3, 0, 0, 130, 0) * 14, (64, 48), torch.bfloat16)
    check_all(p)
    for case in BIAS_CASES:
        check_biases(p, *case)


def all_results(p, num_sms=None, *, table=False):
    """Every output of every function, gathered where there is a choice: ({name: rows}, {name: per group})."""
    options = {"num_sms": num_sms}
    weight = Scattered(p.weight) if table else None
    out, dx, dscale = p.blank(p.ffn), p.blank(p.hidden), p.blank(dtype=torch.float32)
    operand = weight.table if table else p.weight
    biased = {"bias": p.bias, "bias_scale": p.scale, "zero_tail": True}
    gemm.grouped_gemm(p.packed, operand, p.row_range, out, row_index=p.row_index, **biased, **options)
    gemm.grouped_gemm_dgrad(p.dout, operand, p.row_range, dx, **options)
    dw = torch.full_like(p.weight, 0.5)
    gemm.grouped_gemm_wgrad(p.dout, p.packed, p.row_range, dw, rows_index=p.row_index, accumulate=True, **options)
    dw_fp32 = torch.empty_like(p.weight, dtype=torch.float32)
    gemm.grouped_gemm_wgrad(p.dout, p.rows, p.row_range, dw_fp32, **options)
    dbias = torch.empty_like(p.bias)
    bias.grouped_bias_grad(p.dout, p.row_range, dbias, scale=p.scale)
    bias.grouped_bias_dot(p.dout, p.bias, p.row_range, dscale)
    return {"out": out, "dx": dx, "dscale": dscale}, {"dw": dw, "dw_fp32": dw_fp32, "dbias": dbias}


def assert_same_bits(left, right):
    for tensors, others in zip(left, right, strict=True):
        for name, tensor in tensors.items():
            assert torch.equal(tensor, others[name]), name


@of_every_dtype
def test_repeated_runs_other_grids_and_tables_give_the_same_bits(dtype):
    p = Problem(SPLITS[0], WIDTHS[1], dtype)
    first = all_results(p)
    for num_sms in (None, None, 100, 1):
        assert_same_bits(first, all_results(p, num_sms))
        assert_same_bits(first, all_results(p, num_sms, table=True))


@of_every_dtype
@pytest.mark.parametrize("before", [1, 63, 128, 500])
def test_an_experts_bits_do_not_depend_on_the_others(before, dtype):
    """777 rows alone, and the same rows behind, between and before others."""
    size = 777
    alone = Problem((size,), WIDTHS[1], dtype)
    among = Problem((before, size, 0, 65), WIDTHS[1], dtype, seed=1)
    span = slice(before, before + size)
    among.row_index[span] = torch.arange(size, dtype=torch.int32, device="cuda")
    alone.row_index[:size] = torch.arange(size, dtype=torch.int32, device="cuda")
    shared = alone.normal(size, alone.hidden)
    for p, rows in ((alone, slice(0, size)), (among, span)):
        p.packed = torch.cat([shared, p.packed])
        p.row_index[: p.num_rows] += size
        p.row_index[rows] -= size
    for name in ("rows", "dout", "scale"):
        getattr(among, name)[span] = getattr(alone, name)[:size]
    among.weight[1], among.bias[1] = alone.weight[0], alone.bias[0]
    alone_rows, alone_groups = all_results(alone)
    for table in (False, True):
        among_rows, among_groups = all_results(among, table=table)
        for name, tensor in alone_rows.items():
            assert torch.equal(tensor[:size], among_rows[name][span]), name
        for name, tensor in alone_groups.items():
            assert torch.equal(tensor[0], among_groups[name][1]), name


@of_every_dtype
def test_a_rows_bits_do_not_depend_on_its_place(dtype):
    """Reversing the rows of a group reverses the results (gradients of groups, sums over rows, left out)."""
    p = Problem((777,), WIDTHS[1], dtype)
    rows, _ = all_results(p)
    for tensor in (p.row_index, p.dout, p.scale):
        tensor[:777] = tensor[:777].flip(0)
    for name, tensor in all_results(p)[0].items():
        assert torch.equal(tensor[:777].flip(0), rows[name][:777]), name


def test_graph_replay_with_other_splits():
    """One capture serves every routing that fits the capacity."""
    first, second = (300, 0, 1, 777, 128, 0, 0), (0, 900, 300, 3, 0, 0, 3)
    assert sum(first) == sum(second)
    p = Problem(first, WIDTHS[0], torch.bfloat16)
    splits = torch.tensor(first, device="cuda")

    def step():
        splits_to_row_range(splits, p.row_range, p.capacity)
        return all_results(p)

    step()  # compile outside of the capture
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for sizes in (first, second, first):
        splits.copy_(torch.tensor(sizes))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(p.row_range.cpu(), whole_groups(sizes))
        assert_same_bits(captured, step())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_splits(dtype):
    cases = [([3, 0, 4], 10), ([3, 0, 4], 5), ([-3, 2, -(2**31), 4], 10), ([2**31 - 1] * 5, 9), ([6], 8),
             ([1, 2**31 - 1, 1], 2**31 - 1), ([1] * 70, 64), ([1] * 70, 1), ([3], 0)]  # fmt: skip
    for sizes, num_rows in cases:
        got = torch.full((2, len(sizes)), -1, dtype=torch.int32, device="cuda")
        expected = torch.full((2, len(sizes)), -1, dtype=torch.int32)
        splits_to_row_range(torch.tensor(sizes, dtype=dtype, device="cuda"), got, num_rows)
        twin_splits.splits_to_row_range(torch.tensor(sizes, dtype=dtype), expected, num_rows)
        assert got.tolist() == expected.tolist(), (sizes, num_rows)


def test_no_rows():
    """A capacity of zero: nothing to launch but the zeros of the gradients."""
    dout, rows = (torch.empty(0, n, dtype=torch.bfloat16, device="cuda") for n in (192, 64))
    row_range = whole_groups((0, 0, 0), device="cuda")
    weight = torch.ones(3, 192, 64, dtype=torch.bfloat16, device="cuda")
    scattered = Scattered(weight)
    gemm.grouped_gemm(rows, weight, row_range, dout, zero_tail=True)
    gemm.grouped_gemm_dgrad(dout, weight, row_range, rows, zero_tail=True)
    for out in (weight, scattered.table):
        gemm.grouped_gemm_wgrad(dout, rows, row_range, out, accumulate=True)
    assert (weight == 1).all()
    assert (scattered.packed() == 1).all()
    for out in (weight, scattered.table):
        gemm.grouped_gemm_wgrad(dout, rows, row_range, out)
    assert not weight.any()
    assert not scattered.packed().any()
    dbias = torch.ones(3, 192, dtype=torch.bfloat16, device="cuda")
    bias.grouped_bias_dot(dout, dbias, row_range, torch.empty(0, device="cuda"))
    bias.grouped_bias_grad(dout, row_range, dbias)
    assert not dbias.any()


def test_offsets_beyond_32_bits():
    """Outputs of more than 2^31 elements: the last rows, which a 32-bit offset would miss."""
    num_rows, width, inner, tail = 70_000, 32_768, 64, 100
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB")
    generator = torch.Generator(device="cuda").manual_seed(0)
    rows = torch.randn(num_rows + tail, inner, device="cuda", generator=generator).bfloat16()
    weight = torch.randn(2, width, inner, device="cuda", generator=generator).bfloat16()
    row_range = whole_groups((69_000, num_rows - 69_000), device="cuda")
    out = torch.full((num_rows + tail, width), torch.nan, dtype=torch.bfloat16, device="cuda")
    gemm.grouped_gemm(rows, weight, row_range, out, zero_tail=True)
    last = slice(num_rows - 500, num_rows)
    expected = rows[last].float() @ weight[1].float().t()
    torch.testing.assert_close(out[last].float(), expected, rtol=1e-2, atol=5e-2)
    assert not out[num_rows:].any()
    # The same rows read by a gather and by the transposed products.
    index = torch.arange(num_rows + tail, dtype=torch.int32, device="cuda")
    narrow = torch.empty(num_rows + tail, inner, dtype=torch.bfloat16, device="cuda")
    weight_t = weight.transpose(1, 2).contiguous()
    gemm.grouped_gemm(out, weight_t, row_range, narrow, row_index=index)
    again = torch.empty_like(narrow)
    gemm.grouped_gemm_dgrad(out, Scattered(weight).table, row_range, again)
    expected = out[last].double() @ weight[1].double()
    for got in (narrow, again):
        error = (got[last].double() - expected).abs().max() / expected.abs().max()
        assert error < 1e-2
    group = out[69_000:num_rows].double()
    expected = group.t() @ rows[69_000:num_rows].double()
    for dout_index in (index, None):
        dw = torch.empty_like(weight)
        gemm.grouped_gemm_wgrad(out, rows, row_range, dw, dout_index=dout_index)
        assert (dw[1].double() - expected).abs().max() / expected.abs().max() < 1e-2
    dbias, dscale = torch.empty(2, width, device="cuda"), torch.empty(num_rows + tail, device="cuda")
    bias.grouped_bias_grad(out, row_range, dbias)
    assert_near(dbias[1], group.sum(dim=0))
    bias_of_groups = torch.ones(2, width, dtype=torch.bfloat16, device="cuda")
    bias.grouped_bias_dot(out, bias_of_groups, row_range, dscale)
    error = (dscale[69_000:num_rows].double() - group.sum(dim=1)).abs().max()
    assert error < 1e-4 * group.abs().sum(dim=1).max()
