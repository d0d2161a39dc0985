"""Parts of the grouped GEMMs: ranges of rows and panels of columns, which together are the whole, bit for bit."""

import inspect
import itertools

import pytest
import torch
from row_ranges import random_ranges, rows_of, whole_groups

from symmoe.errors import ArgumentError
from symmoe.kernels import parts, twin
from symmoe.kernels.activation import Activation
from symmoe.kernels.table import TensorTable

NUM_PACKED, TAIL = 11, 5
SENTINEL = -77.0
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
ACTIVATIONS = {
    "swiglu": Activation(),
    "limits": Activation(alpha=1.702, limit=0.75, offset=1.0, interleave=4),
    "srelu": Activation(kind="srelu"),
}
WIDE = 600  # two panels of 256 columns, and a narrow one
PANELS = [(0, 256), (256, 512), (512, WIDE)]

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
seeds = pytest.mark.parametrize("seed", range(6))


def random_splits(generator):
    """1 to 6 groups of up to 40 rows, about a third of them without rows."""
    num_groups = int(torch.randint(1, 7, (1,), generator=generator))
    sizes = torch.randint(0, 41, (num_groups,), generator=generator)
    return (sizes * (torch.rand(num_groups, generator=generator) > 0.33)).tolist()


class Problem:
    """Random groups, random parts of them, and operands; packed rows are shared, tail indices out of range."""

    def __init__(self, seed, dtype, widths=(24, 40)):
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype
        self.in_width, self.out_width = widths
        self.splits = random_splits(self.generator)
        self.num_groups, self.num_rows = len(self.splits), sum(self.splits)
        self.capacity = self.num_rows + TAIL
        self.row_range = whole_groups(self.splits)
        self.row_group = [g for g, size in enumerate(self.splits) for _ in range(size)]
        self.ranges = random_ranges(self.splits, 4, seed=seed)
        self.row_index = torch.randint(0, NUM_PACKED, (self.capacity,), dtype=torch.int32, generator=self.generator)
        self.row_index[self.num_rows :] = 2**30
        self.rows, self.packed = self.normal(self.capacity, self.in_width), self.normal(NUM_PACKED, self.in_width)
        self.rows[self.num_rows :] = torch.nan
        self.weight = self.normal(self.num_groups, self.out_width, self.in_width, scale=self.in_width**-0.5)
        self.bias = self.normal(self.num_groups, self.out_width)
        self.scale = self.normal(self.capacity).float()

    def normal(self, *shape, scale=1.0):
        return (torch.randn(*shape, generator=self.generator) * scale).to(self.dtype)

    def blank(self, *shape, dtype=None):
        return torch.full((self.capacity, *shape), SENTINEL, dtype=dtype or self.dtype)

    def only(self, tensor, ranges):
        """A copy of rows with NaN where the ranges have none: these have not arrived yet."""
        return torch.where(rows_of(ranges, self.capacity)[:, None], tensor, torch.nan)

    def sources(self):
        """(tensor, index), contiguous and gathered."""
        return (self.rows, None), (self.packed, self.row_index)

    def product(self, r, index, dgrad=False):
        """Row r of the product in float64, by itself."""
        row = (self.rows[r] if index is None else self.packed[index[r]]).double()
        weight = self.weight[self.row_group[r]].double()
        return row @ weight if dgrad else weight @ row


def check_ranges(p, call, whole, expected_row):
    """call(ranges, out) writes the rows of every part, and nothing else; together they are `whole`."""
    union = torch.full_like(whole, SENTINEL)
    for ranges in p.ranges:
        out = torch.full_like(whole, SENTINEL)
        call(ranges, out)
        inside = rows_of(ranges, p.capacity)
        assert (out[~inside] == SENTINEL).all()
        for r in inside.nonzero().flatten().tolist():
            expected = expected_row(r)
            bound = TOLERANCE[p.dtype] * max(1.0, expected.abs().max().item())
            assert (out[r].double() - expected).abs().max() <= bound
        call(ranges, union)
    assert torch.equal(union, whole)


@seeds
@dtypes
@pytest.mark.parametrize("biased", ["no bias", "bias", "scaled bias"])
def test_grouped_gemm_of_ranges(biased, dtype, seed):
    p = Problem(seed, dtype)
    biases = {"no bias": {}, "bias": {"bias": p.bias}, "scaled bias": {"bias": p.bias, "bias_scale": p.scale}}[biased]

    def expected(r, index):
        scale = p.scale[r].double() if "bias_scale" in biases else 1.0
        return p.product(r, index) + (p.bias[p.row_group[r]].double() * scale if biases else 0)

    for source, index in p.sources():
        whole = p.blank(p.out_width)
        twin.grouped_gemm(source, p.weight, p.row_range, whole, row_index=index, **biases)

        def call(ranges, out, source=source, index=index):
            rows = source if index is not None else p.only(source, ranges)
            twin.grouped_gemm(rows, p.weight, ranges, out, row_index=index, **biases)

        check_ranges(p, call, whole, lambda r, index=index: expected(r, index))


@seeds
@dtypes
def test_dgrad_of_ranges(dtype, seed):
    p = Problem(seed, dtype)
    p.weight = p.weight.transpose(1, 2).contiguous()
    whole = p.blank(p.out_width)
    twin.grouped_gemm_dgrad(p.rows, p.weight, p.row_range, whole)
    check_ranges(
        p,
        lambda ranges, out: twin.grouped_gemm_dgrad(p.only(p.rows, ranges), p.weight, ranges, out),
        whole,
        lambda r: p.product(r, None, dgrad=True),
    )


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


@pytest.mark.parametrize("seed", range(2))
@dtypes
@pytest.mark.parametrize("name", ["grouped_gemm", "biased", "grouped_gemm_dgrad"])
def test_panels_of_columns(name, dtype, seed):
    """Of the groups, of ranges, of tables; with zeros in the tail."""
    p = Problem(seed, dtype, widths=(24, WIDE))
    dgrad = name == "grouped_gemm_dgrad"
    weight = p.weight.transpose(1, 2).contiguous() if dgrad else p.weight
    pointers = torch.tensor([matrix.data_ptr() for matrix in weight])
    table = TensorTable(pointers, tuple(weight.shape), dtype)
    biases = {"bias": p.bias, "bias_scale": p.scale} if name == "biased" else {}

    def call(row_range, out, operand=weight, **options):
        function = twin.grouped_gemm_dgrad if dgrad else twin.grouped_gemm
        function(p.rows, operand, row_range, out, **biases, **options)

    whole, with_zeros = p.blank(WIDE), p.blank(WIDE)
    call(p.row_range, whole)
    call(p.row_range, with_zeros, zero_tail=True)
    assert not with_zeros[p.num_rows :].any()
    for columns in [*PANELS, (0, 512), (256, WIDE), (0, WIDE)]:
        inside = slice(*columns)
        for expected, options in ((whole, {}), (with_zeros, {"zero_tail": True}), (whole, {"operand": table})):
            out = p.blank(WIDE)
            call(p.row_range, out, columns=columns, **options)
            assert torch.equal(out[:, inside], expected[:, inside])
            out[:, inside] = SENTINEL
            assert torch.equal(out, torch.full_like(out, SENTINEL))
    for r in range(0, p.num_rows, 7):
        addend = p.bias[p.row_group[r]].double() * p.scale[r].double() if biases else 0
        expected = (
            p.product(r, None) if not dgrad else weight[p.row_group[r]].double().T @ p.rows[r].double()
        ) + addend
        assert (whole[r].double() - expected).abs().max() <= TOLERANCE[dtype] * max(1.0, expected.abs().max().item())
    union = p.blank(WIDE)
    for ranges, columns in itertools.product(p.ranges, PANELS):
        call(ranges, union, columns=columns)
    assert torch.equal(union, whole)


@seeds
@dtypes
@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_act_of_ranges(activation, dtype, seed):
    ffn = 40
    p = Problem(seed, dtype, widths=(24, activation.hidden_width(ffn)))
    for (source, index), bias in itertools.product(p.sources(), (None, p.bias)):

        def call(row_range, rows, h, a, index=index, bias=bias):
            twin.grouped_gemm_act(rows, p.weight, row_range, p.scale, h, a, activation, row_index=index, bias=bias)

        whole, union = ((p.blank(p.out_width), p.blank(ffn)) for _ in range(2))
        call(p.row_range, source, *whole)
        for ranges in p.ranges:
            rows = source if index is not None else p.only(source, ranges)
            h, a = p.blank(p.out_width), p.blank(ffn)
            call(ranges, rows, h, a)
            outside = ~rows_of(ranges, p.capacity)
            assert (h[outside] == SENTINEL).all()
            assert (a[outside] == SENTINEL).all()
            call(ranges, rows, *union)
        assert torch.equal(union[0], whole[0])
        assert torch.equal(union[1], whole[1])


@seeds
@dtypes
@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_dact_of_ranges(activation, dtype, seed):
    ffn = 40
    width = activation.hidden_width(ffn)
    p = Problem(seed, dtype, widths=(24, ffn))
    weight, h = p.weight.transpose(1, 2).contiguous(), p.normal(p.capacity, width)
    h[p.num_rows :] = torch.nan
    numel = twin.dact_workspace_numel(p.capacity, p.num_groups, ffn, activation)

    def call(row_range, source, index, hidden, dh, a, dscale, workspace):
        return twin.grouped_gemm_dact(
            source, weight, row_range, hidden, p.scale, dh, a, dscale, workspace, activation, row_index=index
        )

    for source, index in p.sources():
        dh, a, dscale = p.blank(width), p.blank(ffn), p.blank(dtype=torch.float32)
        num_partials = call(p.row_range, source, index, h, dh, a, dscale, torch.full((numel,), torch.nan))
        workspace = torch.full((numel,), torch.nan)
        parts_dh, parts_a, parts_dscale = p.blank(width), p.blank(ffn), p.blank(dtype=torch.float32)
        for ranges in p.ranges:
            rows = source if index is not None else p.only(source, ranges)
            outs = p.blank(width), p.blank(ffn)
            assert call(ranges, rows, index, p.only(h, ranges), *outs, None, workspace.clone()) == num_partials
            outside = ~rows_of(ranges, p.capacity)
            assert all((out[outside] == SENTINEL).all() for out in outs)
            call(ranges, rows, index, p.only(h, ranges), parts_dh, parts_a, None, workspace)
        assert torch.equal(parts_dh, dh)
        assert torch.equal(parts_a, a)
        twin.sum_dact_partials(workspace, p.row_range, parts_dscale, num_partials)
        assert torch.equal(parts_dscale, dscale)


def test_a_forgotten_part_of_dact_is_seen():
    p = Problem(1, torch.float32)
    assert p.splits[0] > 8
    h, weight = p.normal(p.capacity, 80), p.weight.transpose(1, 2).contiguous()
    workspace, dscale = torch.full((p.capacity,), torch.nan), torch.empty(p.capacity)
    ranges = p.row_range.clone()
    ranges[1, 0] -= 3
    dh, a = p.blank(80), p.blank(40)
    num_partials = twin.grouped_gemm_dact(
        p.rows, weight, ranges, h, p.scale, dh, a, None, workspace, ACTIVATIONS["swiglu"]
    )
    twin.sum_dact_partials(workspace, p.row_range, dscale, num_partials)
    assert dscale[: p.num_rows].isnan().sum() == 3


# ------------------------------------------------------------------------------------------------- both packages


@pytest.fixture(params=["twin", "gpu"])
def ops(request):
    """The functions, none of which gets as far as to look at a device here."""
    if request.param == "twin":
        return twin
    pytest.importorskip("triton")
    from symmoe.kernels import gpu

    return gpu


@pytest.mark.parametrize(
    "columns", [(0, 300), (128, 256), (256, 256), (512, 256), (-256, 256), (0, 768), (512, 601), (256.5, 512)], ids=str
)
@pytest.mark.parametrize("name", ["grouped_gemm", "grouped_gemm_dgrad"])
def test_panels_that_are_none(ops, name, columns):
    weight = torch.zeros((2, WIDE, 8) if name == "grouped_gemm" else (2, 8, WIDE))
    row_range, rows, out = torch.zeros(2, 2, dtype=torch.int32), torch.zeros(4, 8), torch.zeros(4, WIDE)
    with pytest.raises(
        ArgumentError, match=rf"columns must be .* <= {WIDE}, both multiples of 256 or the width itself"
    ):
        getattr(ops, name)(rows, weight, row_range, out, columns=columns)


def test_all_columns_are_no_panel():
    assert parts.panel((0, 256), 256) is parts.panel(None, 256) is None
    assert parts.panel([0, 256], 257) == (0, 256)


@pytest.mark.parametrize(
    "name",
    [
        "grouped_gemm",
        "grouped_gemm_dgrad",
        "grouped_gemm_wgrad",
        "grouped_gemm_act",
        "grouped_gemm_dact",
        "sum_dact_partials",
        "dact_workspace_numel",
    ],
)
def test_twins_and_kernels_have_the_same_parameters(name):
    """But for the tiles."""
    pytest.importorskip("triton")
    from symmoe.kernels import gpu

    ours = dict(inspect.signature(getattr(gpu, name)).parameters)
    ours.pop("config", None)
    theirs = inspect.signature(getattr(twin, name)).parameters
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [
        (p.name, p.kind, p.default) for p in theirs.values()
    ]
    assert ("num_sms" in theirs) == name.startswith("grouped")
