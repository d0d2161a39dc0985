"""The table of launches: example arguments of every kernel of the contract, and of the kernels for Hopper. Tests
compile them, run them without a GPU and on one, and compare them with the twins: they take their launches from here.

A row says of every parameter what it gets, in the contract's letters (symmoe/kernels/twin):

    "i32 T K"     a tensor of these sizes, of the launch's dtype if none is named
    (a, b)        a tuple of such
    a function    what it makes of an `Arguments`
    else          the value itself

Further sizes: P rows that a gather reads, M tokens of columns, C copies of experts with S replica slots on a rank, L
nodes with Q ranks each. A launch names its sizes, and what it gets in place of what is in the row, which WAYS names."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from types import FunctionType
from typing import Any

import torch

from symmoe.kernels import control
from symmoe.kernels.act_quantized import DactOperands, dact_quantize_workspace_numel
from symmoe.kernels.activation import SWIGLU, Activation, num_scale_sums
from symmoe.kernels.bias_sums import SLOT_ROWS, bias_slots
from symmoe.kernels.formats import TILE, BlockFormat, max_tiles
from symmoe.kernels.operands import Buffers, Operand, ScaleTable, ScatteredWeight, TensorTable
from symmoe.kernels.routing_rule import RoutingRule

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
I32, I64, U8 = torch.int32, torch.int64, torch.uint8
KINDS = {"i32": I32, "i64": I64, "u8": U8, "bool": torch.bool, "f32": FP32, "bf16": BF16}
NUM_SMS = 132
SIZES = {
    "qwen3-30b": {"G": 32, "H": 2048, "I": 768, "N": 65536, "T": 8192, "E": 128, "K": 8, "R": 4},
    "mixtral-8x7b": {"G": 4, "H": 4096, "I": 14336, "N": 16384, "T": 8192, "E": 8},
    "deepseek-like": {"G": 32, "H": 7168, "I": 2048, "N": 65536, "T": 8192, "E": 64},
    "deepseek-v3": {"H": 7168, "T": 4096, "E": 256, "K": 8, "R": 8},
    "qwen3-30b, two ranks": {"H": 2048, "T": 8192, "E": 128, "K": 8, "R": 2},
    # Widths that no tile divides, contractions that no step divides.
    "odd": {"G": 3, "H": 1032, "I": 712, "N": 999},
    "odd router": {"H": 1000, "T": 100, "E": 20, "K": 3},
    "odd trip": {"H": 1000, "T": 100, "E": 12, "K": 3, "R": 3},
    # Parts of tiles, of steps and of blocks of numbers of 8 and of 4 bits.
    "odd blocks": {"G": 3, "H": 1056, "W": 712, "N": 999},
    "odd fp8": {"G": 3, "H": 1040, "W": 712, "N": 999},
    "narrow": {"G": 65, "H": 136, "I": 72, "N": 999},
    "narrow blocks": {"G": 65, "H": 96, "W": 136, "N": 999},
    "narrower": {"G": 65, "H": 136, "I": 36, "N": 999},
    "one group": {"G": 1, "H": 160, "N": 65536},
    "largest": {"H": 512, "T": 33, "E": 1024, "K": 32, "R": 64},
    "most experts per rank": {"H": 512, "T": 64, "E": 1024, "K": 1, "R": 1},
}
TRIPS = [name for name, sizes in SIZES.items() if "R" in sizes]
ROUTERS = ["qwen3-30b", "mixtral-8x7b", "deepseek-like", "deepseek-v3", "odd router"]
ACTIVATIONS = {
    "swiglu": SWIGLU,
    "gpt-oss": Activation(alpha=1.702, limit=7.0, offset=1.0),
    "interleave": Activation(interleave=32),
    "interleave by one": Activation(alpha=1.702, limit=7.0, offset=1.0, interleave=1),
    "srelu": Activation(function="relu2", is_gated=False),
    "gelu": Activation(function="gelu", is_gated=False),
    "geglu": Activation(function="gelu"),
    "tanh geglu": Activation(function="gelu_tanh"),
    "tanh gelu": Activation(function="gelu_tanh", is_gated=False),
}
FORMATS = {
    "float8_block": BlockFormat(element="e4m3", scale="fp32", block=128),
    "float8_block_powers": BlockFormat(element="e4m3", scale="power_of_two", block=128),
    "mxfp8": BlockFormat(element="e4m3", scale="e8m0", block=32),
    "nvfp4": BlockFormat(element="e2m1", scale="e4m3", block=16),
}
SIGNS = 0x9A5C
WEIGHT_LINES = {"float8_block": 128, "float8_block_powers": 128, "nvfp4": 16}


@dataclass(frozen=True)
class Launch:
    """A call of a kernel with sizes, a working dtype, a format and an activation. ways, changes: what is not as in its
    row."""

    kernel: str
    sizes: str | Mapping[str, int] = "qwen3-30b"
    dtype: torch.dtype = BF16
    format: str = "float8_block"
    activation: Activation = SWIGLU
    ways: str = ""  # words of WAYS
    changes: Mapping[str, Any] | None = None

    def arguments(self, make: "Arguments | None" = None) -> dict[str, Any]:
        """By name; without memory, if `make` does not make others."""
        make = make or Arguments(self)
        row = dict(TABLE[self.kernel])
        for variant in self.ways.split():
            row |= WAYS[self.kernel][variant]
        for name, spec in (row | (self.changes or {})).items():
            make.begin(name)
            make.values[name] = make(spec)
        return make.values

    def __call__(self, device: str = "meta") -> None:
        """Launches it, with whatever numbers."""
        self.function(**self.arguments(Arguments(self, device)))

    @property
    def function(self) -> Callable[..., object]:
        """Of the kernels for GPUs, or what launches one for Hopper."""
        if not self.kernel.startswith("launch_"):
            return getattr(import_module("symmoe.kernels.gpu"), self.kernel)
        launchers = import_module("symmoe.kernels.hopper_launchers")
        return (vars(launchers) | vars(launchers.hopper_columns))[self.kernel]

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.kernel}, {self.sizes}, {kind}, {self.format}, {self.ways}"


class Arguments:
    """Makes arguments of a launch of what its row says: tensors without memory, or with whatever numbers."""

    def __init__(self, launch: Launch, device: str = "meta") -> None:
        self.launch, self.device, self.block_format = launch, device, FORMATS[launch.format]
        sizes = SIZES[launch.sizes] if isinstance(launch.sizes, str) else launch.sizes
        self.sizes = with_others(sizes, launch.activation)
        self.values = dict[str, Any]()

    def begin(self, name: str) -> None:
        """Called before each argument; `values` has those before it."""

    def __call__(self, spec: Any) -> Any:
        if isinstance(spec, str):
            return self.tensor(spec)
        if isinstance(spec, torch.Tensor):
            return spec.to(self.device, copy=True)
        if isinstance(spec, tuple):
            return tuple(map(self, spec))
        return spec(self) if isinstance(spec, FunctionType) else spec

    def size(self, name: str) -> int:
        return int(name) if name.isdigit() else self.sizes[name]

    def shape(self, text: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Dtype and sizes of a text."""
        words = text.split()
        first = words[0] if words else ""
        names = words[1:] if first in KINDS else words
        return KINDS.get(first, self.launch.dtype), tuple(map(self.size, names))

    def tensor(self, text: str) -> torch.Tensor:
        kind, shape = self.shape(text)
        return self.numbers(*shape, dtype=kind)

    def numbers(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def indices(self, shape: tuple[int, ...], end: int) -> torch.Tensor:
        return self.numbers(*shape, dtype=I32)

    def row_range(self) -> torch.Tensor:
        return self.numbers(2, self.sizes["G"], dtype=I32)

    def group_range(self) -> torch.Tensor:
        """row_range of whole groups."""
        return self.row_range()

    def scales(self, *shape: int) -> torch.Tensor:
        """Scales of one byte."""
        return self.numbers(*shape, dtype=U8)

    def amax(self) -> torch.Tensor:
        return self("f32 G")

    def wire(self, num_bytes: int) -> torch.Tensor:
        """Rows as they travel."""
        return self.numbers(self.sizes["N"], num_bytes, dtype=U8)

    def arenas(self, layout: control.ControlLayout) -> list[torch.Tensor]:
        """Of the ranks of a node."""
        return [torch.empty(1 << 30, dtype=U8, device="meta")] * layout.num_ranks

    def table(
        self, kind: torch.dtype, shape: tuple[int, ...], of_scales: bool = False
    ) -> TensorTable:
        """Of matrices that are nowhere."""
        return TensorTable(self.numbers(shape[0], dtype=I64), shape, kind)


def with_others(basic: Mapping[str, int], activation: Activation) -> dict[str, int]:
    """Sizes, and those that follow from them."""
    sizes = {"A": control.NUM_PUBLISHED, "S": 0, "L": 2, **basic}
    if "I" in sizes:
        sizes.setdefault("W", activation.hidden_width(sizes["I"]))
    if "N" in sizes:
        num_rows = sizes["N"]
        num_groups = sizes["G"]
        sizes.setdefault("P", num_rows // 2)
        sizes["M"] = TILE * max_tiles(num_rows, num_groups)
        sizes["slots"] = bias_slots(num_rows, num_groups, SLOT_ROWS)
    if "T" in sizes:
        num_tokens = sizes["T"]
        num_experts = sizes["E"]
        sizes["loss_blocks"] = -(-num_tokens // control.TOKENS_PER_LOSS_BLOCK)
        sizes["blocks"] = -(-num_tokens // control.TOKENS_PER_BLOCK)
        sizes |= {"2T": 2 * num_tokens, "E+1": num_experts + 1, "E+2": num_experts + 2}
    if "R" in sizes:
        num_ranks = sizes["R"]
        sizes |= {"C": num_experts + num_ranks * sizes["S"], "Q": num_ranks // sizes["L"]}
        sizes["words"] = control.ControlLayout(num_ranks).row_words
        sizes |= {"R+1": num_ranks + 1, "L+2": sizes["L"] + 2, "R-Q": num_ranks - sizes["Q"]}
        sizes |= {name + "+R+2": sizes[name] + num_ranks + 2 for name in ("E", "C")}
    return sizes


# -- what rows say besides tensors ------------------------------------------------------------------------------------
def later(function: Callable[..., Any]) -> Callable[..., Callable[[Arguments], Any]]:
    """Takes all arguments but the first one, an Arguments, which comes when the launch's are made."""
    return lambda *args, **options: lambda make: function(make, *args, **options)


def method(name: str) -> Callable[[Arguments], Any]:
    return lambda make: getattr(make, name)()


row_range = method("row_range")
group_range = method("group_range")
amax = method("amax")


def activation(make: Arguments) -> Activation:
    return make.launch.activation


def block_format(make: Arguments) -> BlockFormat:
    return make.block_format


def format_of_weights(name: str) -> BlockFormat:
    """The one that goes with one of FORMATS."""
    return replace(FORMATS[name], block_lines=WEIGHT_LINES.get(name, 1))


def weight_format(make: Arguments) -> BlockFormat:
    return format_of_weights(make.launch.format)


@later
def size(make: Arguments, name: str) -> int:
    return make.size(name)


@later
def index(make: Arguments, lines: str, end: str) -> torch.Tensor:
    """Which of `end` lines stands for each of these."""
    return make.indices(tuple(map(make.size, lines.split())), make.size(end))


@later
def table(make: Arguments, text: str) -> TensorTable:
    """Matrices anywhere in memory."""
    return make.table(*make.shape(text))


@later
def on_host(make: Arguments, *shape: int) -> torch.Tensor:
    """Words that the host reads."""
    return torch.zeros(shape, dtype=I64)


@later
def of_global_scale(make: Arguments, spec: Any) -> Any:
    """Where the format has a global scale."""
    return make(spec) if make.block_format.has_global_scale else None


def buffers(
    make: Arguments, block_format: BlockFormat, shape: tuple[int, ...], **options: bool
) -> Buffers:
    """Data and scales of lines; of columns, whose fp32 scales are block-major."""
    *groups, num_lines, width = shape
    data = make.numbers(
        *groups, num_lines, block_format.data_width(width), dtype=block_format.data_dtype
    )
    blocks = *groups, -(-num_lines // block_format.block_lines), block_format.num_blocks(width)
    if options and block_format.scale_dtype == FP32:
        return data, make.numbers(*blocks[::-1], dtype=FP32).t()
    return data, make.numbers(*blocks, dtype=block_format.scale_dtype)


@later
def lines(make: Arguments, num_lines: str, width: str, **options: bool) -> Buffers:
    return buffers(make, make.block_format, (make.size(num_lines), make.size(width)), **options)


@later
def weight_lines(make: Arguments, num_lines: str, width: str) -> Buffers:
    shape = make.sizes["G"], make.size(num_lines), make.size(width)
    return buffers(make, weight_format(make), shape)


@later
def wire(make: Arguments, width: str) -> torch.Tensor:
    """Rows as they travel."""
    block_format, num_columns = make.block_format, make.size(width)
    num_blocks = block_format.num_blocks(num_columns)
    num_bytes = num_columns + num_blocks * block_format.scale_dtype.itemsize
    return make.wire(-(-num_bytes // 16) * 16)


def unpacked(make: Arguments) -> list[torch.Tensor]:
    """Data and scales of rows, in bytes."""
    return [tensor.view(U8) for tensor in make(lines("N", "H"))]


def scales(make: Arguments) -> torch.Tensor:
    return unpacked(make)[1]


@later
def dact_results(make: Arguments, dbias: str | None = None) -> DactOperands:
    operands = lines("N", "W"), lines("W", "M", columns=True), lines("I", "M", columns=True)
    return DactOperands(make("f32 N"), *map(make, operands), make(dbias))


@later
def dact_workspace(make: Arguments, dbias: str | None = None) -> torch.Tensor:
    numel = dact_quantize_workspace_numel(make.sizes["N"], make.sizes["I"], make(dbias))
    return make.numbers(numel, dtype=FP32)


@later
def dact_arguments(make: Arguments, dbias: str | None = None) -> tuple[Any, ...]:
    """The arguments of the kernel for Hopper."""
    act_quantized = import_module("symmoe.kernels.low_precision.act_quantized")
    parts = "N I", "N W", "f32 N", row_range, dact_results(dbias), dact_workspace(dbias)
    return act_quantized.dact_arguments(*map(make, parts))


def fused_workspace(make: Arguments) -> torch.Tensor:
    sizes = make.sizes["N"], make.sizes["G"], make.sizes["I"]
    numel_of = import_module("symmoe.kernels.gpu").dact_workspace_numel
    return make.numbers(numel_of(*sizes, make.launch.activation), dtype=FP32)


@later
def tiles(make: Arguments, num_tiles: int, width: int) -> torch.Tensor:
    """Of 128 lines by 4 blocks of scales."""
    return make.scales(num_tiles, -(-width // (4 * make.block_format.block)), 512)


def row_tiles(make: Arguments) -> torch.Tensor:
    return make(tiles(make.sizes["M"] // TILE, make.sizes["H"]))


@later
def scale_table(make: Arguments, *shapes: tuple[int, int]) -> ScaleTable:
    """A matrix of scales of every shape (rows, blocks)."""
    extents = torch.tensor([(rows, blocks, blocks, 1) for rows, blocks in shapes], dtype=I32)
    addresses = make.numbers(len(shapes), dtype=I64)
    numbers = torch.arange(len(shapes), dtype=I32, device=make.device)
    extent = max(-(-rows // 128) for rows, _ in shapes), max(-(-n // 4) for _, n in shapes)
    return ScaleTable(addresses, addresses, numbers, extents.to(make.device), extent)


def operand(make: Arguments, shape: tuple[int, ...], scale: Any) -> Operand:
    """Of a product, with this scale where the format has scales in tiles."""
    block_format = weight_format(make) if len(shape) == 3 else make.block_format
    data, compact = buffers(make, block_format, shape)
    is_compact = block_format.scale == "fp32"
    return Operand(data, compact if is_compact else make(scale), make(of_global_scale("f32 G")))


def rows_operand(make: Arguments) -> Operand:
    return operand(make, (make.sizes["N"], make.sizes["H"]), row_tiles)


def weight_operand(make: Arguments) -> Operand:
    groups, out, width = shape = [make.sizes[name] for name in "GWH"]
    return operand(make, shape, tiles(max_tiles(groups * out, groups), width))


def scattered_weight(make: Arguments) -> ScatteredWeight:
    data, scale, global_scale = weight_operand(make)
    shape = tuple(scale.shape)
    is_byte = scale.dtype == U8
    if is_byte:  # tiles of each matrix
        shape = len(data), -(-data.shape[1] // TILE), shape[1] * shape[2]
    of_scales = make.table(scale.dtype, shape, is_byte)
    return ScatteredWeight(make.table(data.dtype, tuple(data.shape)), of_scales, global_scale)


@later
def columns_operand(make: Arguments, width: str) -> Operand:
    num_lines = make.size(width)
    num_tokens = make.sizes["M"]
    result = operand(make, (num_lines, num_tokens), tiles(-(-num_lines // TILE), num_tokens))
    if result.scale.dtype != FP32:
        return result
    return result._replace(scale=make(lines(width, "M", columns=True))[1])


@later
def peers_of(
    make: Arguments,
    num_ranks: int,
    rank: int,
    group_ranks: tuple[int, ...] = (),
    group_size: int | None = None,
) -> control.Peers:
    """The arenas of a node, as `rank` sees them. group_ranks: its ranks in a group of group_size ranks on several
    nodes."""
    layout = control.ControlLayout(num_ranks, group_size)
    arenas = tuple(make.arenas(layout))
    pointers = [0 if arena.is_meta else arena.data_ptr() for arena in arenas]
    bases = torch.tensor(pointers, device=make.device)
    return control.Peers(rank, num_ranks, bases, arenas, layout, group_ranks)


def peers(make: Arguments) -> control.Peers:
    """The arenas, seen from the last rank."""
    return make(peers_of(make.sizes["R"], make.sizes["R"] - 1))


def node_peers(make: Arguments) -> control.Peers:
    """The arenas, seen from the last rank of the first node."""
    per_node = make.sizes["Q"]
    return make(peers_of(per_node, per_node - 1, tuple(range(per_node)), make.sizes["R"]))


def plan(make: Arguments) -> control.PlanIntegers:
    numel, layout = control.plan_layout(*(make.sizes[name] for name in "TKERS"))
    return control.PlanIntegers(make.numbers(numel, dtype=I32), layout)


def in_node_plan(make: Arguments) -> control.InNodeIntegers:
    num_tokens, top_k, num_experts, num_ranks, num_nodes, per_node = (
        make.sizes[name] for name in "TKERLQ"
    )
    num_sent = 8 * (num_nodes - 1)
    numel, layout = control.in_node_layout(
        num_tokens, top_k, num_experts // num_ranks, (num_nodes, per_node), num_sent, num_sent
    )
    return control.InNodeIntegers(make.numbers(numel, dtype=I32), layout)


def rank_maps(make: Arguments) -> control.RankMaps:
    to_node, by_node, remote, first = map(make, ("i64 R+1", "i64 L Q", "i64 R-Q", "i64 R+1"))
    starts = make.numbers(make.sizes["L"] * make.sizes["R+1"], dtype=I32)
    return control.RankMaps(1, make.sizes["Q"], to_node, starts, by_node, by_node[0], remote, first)


def all_ranks(make: Arguments) -> range:
    return range(make.sizes["R"])


def last_rank(make: Arguments) -> int:
    return make.sizes["R"] - 1


TRIP = ("i64 R A", "i64 R A")
SLOTS = "i32 T K"
MATRICES = "8 1032 712", "8 712 516"  # of the experts of a rank
STATUS = on_host(control.STATUS_WORDS)
SUMS = "f32 slots H", "f32 N"
BUDGET = {"num_sms": NUM_SMS}
TIMEOUT = {"timeout_ns": 10**9}

TABLE: dict[str, dict[str, Any]] = {
    # grouped GEMMs
    "grouped_gemm": {
        "rows": "N H",
        "weight": "G W H",
        "row_range": row_range,
        "out": "N W",
        **BUDGET,
    },
    "grouped_gemm_dgrad": {
        "dout": "N W",
        "weight": "G W H",
        "row_range": row_range,
        "out": "N H",
        "zero_tail": True,
        **BUDGET,
    },
    "grouped_gemm_wgrad": {
        "dout": "N W",
        "rows": "N H",
        "row_range": row_range,
        "out": "G W H",
        **BUDGET,
    },
    "grouped_bias_grad": {"dout": "N W", "row_range": row_range, "dbias": "G W", "scale": "f32 N"},
    "grouped_bias_dot": {
        "dout": "N W",
        "bias": "G W",
        "row_range": row_range,
        "dscale": "f32 N",
        "accumulate": True,
    },
    # activations
    "scaled_activation": {"h": "N W", "scale": "f32 N", "out": "N I", "activation": activation},
    "scaled_activation_grad": {
        "dout": "N I",
        "h": "N W",
        "scale": "f32 N",
        "dh": "N W",
        "dscale": "f32 N",
        "activation": activation,
    },
    "grouped_gemm_act": {
        "rows": "N H",
        "weight": "G W H",
        "row_range": row_range,
        "row_scale": "f32 N",
        "results": ("N W", "N I"),
        "activation": activation,
        **BUDGET,
    },
    "grouped_gemm_dact": {
        "dout": "N H",
        "weight": "G H I",
        "row_range": row_range,
        "hidden": ("N W", "f32 N"),
        "gradients": ("N W", "N I", "f32 N", None),
        "workspace": fused_workspace,
        "activation": activation,
        **BUDGET,
    },
    "sum_dact_partials": {
        "workspace": fused_workspace,
        "row_range": row_range,
        "dscale": "f32 N",
        "num_partials": lambda make: num_scale_sums(make.sizes["I"]),
    },
    # quantised numbers
    "quantize_rows": {
        "rows": "N H",
        "row_range": row_range,
        "out": lines("N", "H"),
        "block_format": block_format,
        "row_index": None,
        "amax": of_global_scale(amax),
        "seeds": of_global_scale("i64 G"),
    },
    "sum_dbias": {"bias_sums": SUMS[0], "row_range": row_range, "dbias": "G H"},
    "quantize_columns": {
        "rows": "N H",
        "row_range": row_range,
        "out": lines("H", "M", columns=True),
        "block_format": block_format,
        "row_index": None,
        "signs": of_global_scale(SIGNS),
        "amax": of_global_scale(amax),
        "seeds": of_global_scale("i64 G"),
    },
    "group_amax": {"rows": "N H", "row_range": row_range, "amax": "f32 G"},
    "weight_amax": {"weight": "G W H", "amax": "f32 G"},
    "quantize_weights": {
        "weight": "G W H",
        "out": weight_lines("W", "H"),
        "block_format": weight_format,
        "amax": of_global_scale(amax),
    },
    "quantize_weight_pairs": {
        "weight": "G W H",
        "out": weight_lines("W", "H"),
        "transposed_out": weight_lines("H", "W"),
        "block_format": weight_format,
        "amax": of_global_scale(amax),
    },
    "act_quantize": {
        "h": "N W",
        "row_scale": "f32 N",
        "row_range": row_range,
        "out": lines("N", "I"),
        "activation": activation,
        "block_format": block_format,
    },
    "dact_quantize": {
        "da": "N I",
        "h": "N W",
        "row_scale": "f32 N",
        "row_range": row_range,
        "out": dact_results(),
        "workspace": dact_workspace(),
        "activation": activation,
        "block_format": block_format,
    },
    "swizzle_scales": {
        "scale": scales,
        "row_range": row_range,
        "swizzled": row_tiles,
    },
    "unswizzle_scales": {
        "swizzled": row_tiles,
        "row_range": row_range,
        "scale": scales,
    },
    "encode_rows": {"rows": "N H", "wire": wire("H"), "block_format": block_format},
    "unpack_rows": {"wire": wire("H"), "row_range": row_range, "out": unpacked},
    "decode_rows": {"wire": wire("H"), "out": "N H", "block_format": block_format},
    "requantize_columns": {
        "wire": wire("H"),
        "row_range": row_range,
        "out": lines("H", "M", columns=True),
        "block_format": block_format,
        "dtype": lambda make: make.launch.dtype,
    },
    "grouped_gemm_quantized": {
        "rows": rows_operand,
        "weight": weight_operand,
        "row_range": row_range,
        "out": "N W",
        **BUDGET,
    },
    "grouped_gemm_wgrad_quantized": {
        "dout": columns_operand("W"),
        "rows": columns_operand("H"),
        "row_range": row_range,
        "out": "G W H",
        **BUDGET,
    },
    # the router
    "router_gemm": {"x": "bf16 T H", "weight": "f32 E H", "logits": "f32 T E"},
    "router_gemm_grads": {
        "d_logits": "f32 T E",
        "x": "bf16 T H",
        "weight": "f32 E H",
        "dx": "bf16 T H",
        "d_weight": "f32 E H",
    },
    "choose_experts": {
        "logits": "f32 T E",
        "bias": "f32 E",
        "given_idx": None,
        "topk_idx": SLOTS,
        "probs": "f32 T K",
        "scores": "f32 T E",
        "rule": RoutingRule(),
    },
    "choose_experts_grad": {
        "d_probs": "f32 T K",
        "d_scores": "f32 T E",
        "topk_idx": index("T K", "E"),
        "scores": "f32 T E",
        "d_logits": "f32 T E",
        "rule": RoutingRule(),
    },
    "router_losses": {
        "logits": "f32 T E",
        "scores": "f32 T E",
        "expert_load": "i32 E",
        "token_mask": "bool T",
        "sums": "f32 loss_blocks E+2",
        "slopes": "f32 E+1",
        "loss": "f32",
        "balance_coef": 0.1,
        "z_coef": 0.1,
        "normalises": False,
    },
    "router_losses_grad": {
        "d_loss": "f32",
        "logits": "f32 T E",
        "scores": "f32 T E",
        "token_mask": "bool T",
        "slopes": "f32 E+1",
        "d_logits": "f32 T E",
        "d_scores": "f32 T E",
        "normalises": False,
    },
    # the plan
    "splits_to_row_range": {"splits": "i32 G", "row_range": row_range, "num_rows": size("N")},
    "count_slots": {
        "topk_idx": SLOTS,
        "block_counts": "i32 blocks C+R+2",
        "num_experts": size("C"),
        "num_ranks": size("R"),
    },
    "send_counts": {
        "block_counts": "i32 blocks C+R+2",
        "topk_idx": SLOTS,
        "header": tuple(range(control.HEADER_WORDS)),
        "peers": peers,
        "num_experts": size("C"),
    },
    "lay_out": {
        "peers": peers,
        "received": "i64 R A",
        "status": STATUS,
        "plan": plan,
        "capacity": 1000,
        "overflow": control.OVERFLOW_REPEAT,
        "ranks": all_ranks,
    },
    "post_report": {
        "report": lambda make: make.numbers(control.SUMMARY_WORDS, dtype=I32),
        "posted": on_host(control.REPORT_SLOTS, control.SUMMARY_WORDS),
        "plan": 1,
    },
    "assign_rows": {
        "topk_idx": SLOTS,
        "block_starts": "i32 blocks C+R+2",
        "plan": plan,
        "drop": False,
    },
    "place_replicas": {"peers": peers, "plan": plan, "slack": 50, "num_near": size("R")},
    "route_to_replicas": {
        "topk_idx": SLOTS,
        "block_starts": "i32 blocks E+R+2",
        "plan": plan,
        "block_counts": "i32 blocks E+R+2",
    },
    "push_replicas": {
        "weights": MATRICES,
        "replica_to_expert": "i32 4 2",
        "peers": peers_of(4, 3),
        "received": "i64 4 A",
        "column": 3,
        "starts": (512, 4096),
    },
    "add_from_replicas": {
        "gradients": MATRICES,
        "replica_slots": ("i32 4 2", "i32 32 4"),
        "peers": peers_of(4, 3),
        "received": "i64 4 A",
        "column": 0,
        "starts": (0, 4096),
    },
    "rail_rows": {
        "topk_idx": SLOTS,
        "maps": rank_maps,
        "numbers": "i32 L+2",
        "token_to_rail_row": "i32 T L",
        "num_experts": size("E"),
        "max_rows": 8,
    },
    "publish_header": {"number": "i32 L+2", "peers": node_peers, "source": 0, "word": 1},
    "own_counts": {
        "ranks": "i64 Q",
        "peers": node_peers,
        "rows": "i32 Q words",
        "cleared": "i32 3 words",
    },
    "other_counts": {
        "rows": "i32 R-Q words",
        "ranks": "i64 R-Q",
        "peers": node_peers,
        "received": "i64 R A",
    },
    "take_rows": {"rows": "T 64", "index": "i32 T L", "out": "T 64"},
    "plan_in_node": {
        "plan": plan,
        "token_to_rail_row": "i32 T L",
        "numbers": "i32 L+2",
        "maps": rank_maps,
        "integers": in_node_plan,
    },
    # between ranks
    "barrier": {
        "peers": peers,
        "words": tuple(range(control.NUM_PUBLISHED)),
        "received": "i64 R A",
        "status": STATUS,
        "call": 1,
        "fault": False,
        **TIMEOUT,
    },
    "send_signal": {"peers": peers_of(4, 3), "rank": 3},
    "wait_for_signal": {
        "peers": peers_of(4, 3),
        "rank": 3,
        "arrived": on_host(1),
        "status": STATUS,
        "phase": 3,
        **TIMEOUT,
    },
    "count_exchange": {"counts": "i64 2", "progress": on_host(2), "which": 1},
    "receive_fault_flags": {"heard": "i64 L 5", "fault": "i64 1"},
    "push_rows": {
        "x": "T H",
        "token_to_row": "i32 T R",
        "peers": peers,
        "received": "i64 R A",
        "column": 0,
    },
    "push_slots": {
        "slots": (SLOTS, SLOTS, "f32 T K"),
        "region": ("i32 T R", "i32 1 R", "i32 R", "i32 R"),
        "peers": peers,
        "received": "i64 R A",
        "row_column": 1,
        "prob_column": 2,
    },
    "index_rows": {
        "wire": (SLOTS, "f32 T K"),
        "packed": ("i32 1", "i32 1"),
        "num_rows": "i32 1",
        "trip": TRIP,
        "index": (SLOTS, "i32 T", "f32 T"),
    },
    "place_rows": {
        "x": "T H",
        "slot_to_rank": SLOTS,
        "slot_to_row": SLOTS,
        "rows": "2T H",
        "received": "i64 R A",
        "rank": last_rank,
    },
    "fan_out": {
        "rows": "2T H",
        "packed_to_row": SLOTS,
        "source_to_packed_start": "i32 R+1",
        "rank": last_rank,
    },
    "push_sums": {
        "rows": "2T H",
        "packed_to_row": SLOTS,
        "source_to_packed_start": "i32 R+1",
        "peers": peers,
        "received": "i64 R A",
        "column": 0,
    },
    "gather_values": {
        "row_values": "f32 T",
        "packed_to_row": SLOTS,
        "num_packed": "i32 1",
        "packed_values": "f32 T K",
    },
    "pull_rows": {
        "source_rank": SLOTS,
        "source_row": SLOTS,
        "peers": peers,
        "received": "i64 R A",
        "out": "T H",
        "column": 0,
    },
    "sum_home": {
        "rows": ("2T H", "2T H"),
        "index": ("i32 T R", "i32 R", SLOTS, SLOTS),
        "trip": TRIP,
        "out": "T H",
        "rank": last_rank,
    },
    "pull_values": {
        "slot_to_rank": SLOTS,
        "token_to_packed_row": "i32 T R",
        "peers": peers,
        "received": "i64 R A",
        "out": "f32 T K",
        "column": 1,
    },
    # for Hopper
    "launch_gemm": {
        "rows": "N I",
        "weight": "G H I",
        "row_range": row_range,
        "out": "N H",
        "weight_k_first": False,
        "zero_tail": True,
        **BUDGET,
    },
    "launch_act": {
        "rows": "N H",
        "weight": "G W H",
        "row_range": row_range,
        "row_scale": "f32 N",
        "results": ("N W", "N I"),
        "activation": activation,
        "variant": None,
        **BUDGET,
    },
    "launch_dact": {
        "dout": "N H",
        "weight": "G H I",
        "row_range": row_range,
        "hidden": ("N W", "f32 N"),
        "results": ("N W", "N I", "f32 N"),
        "activation": activation,
        "variant": None,
        **BUDGET,
    },
    "launch_wgrad": {
        "dout": "N W",
        "rows": "N H",
        "row_range": row_range,
        "out": "G W H",
        **BUDGET,
    },
    "launch_push": {
        "x": "T H",
        "token_to_row": "i32 T R",
        "peers": peers_of(2, 0),
        "received": "i64 R 3",
        "column": 0,
        "rank": 1,
        "num_ctas": 4,
    },
    "launch_fan_out": {
        "rows": "T H",
        "packed_to_row": SLOTS,
        "source_to_packed_start": "i32 R+1",
        "source": 1,
        "num_ctas": 4,
    },
    "launch_push_sums": {
        "rows": "T H",
        "packed_to_row": SLOTS,
        "source_to_packed_start": "i32 R+1",
        "peers": peers,
        "received": "i64 R 3",
        "column": 0,
        "home": 1,
        "num_ctas": 8,
    },
    "launch_sum_home": {
        "rows": ("T H", "T H"),
        "index": ("i32 T R", "i32 R", SLOTS, SLOTS),
        "trip": ("i64 R 3", "i64 R 3"),
        "out": "T H",
        "rank": 2,
        "num_ctas": 8,
    },
    "launch_dact_quantize": {
        "arguments": dact_arguments(),
        "activation": activation,
        "block_format": block_format,
        **BUDGET,
    },
}
COLUMNS = "row_range", "out", "block_format"
TABLE |= {
    "launch_quantize_columns": {
        name: TABLE["quantize_columns"][name] for name in ("rows", *COLUMNS)
    }
    | BUDGET,
    "launch_requantize_columns": TABLE["requantize_columns"] | BUDGET,
    "launch_quantize_weight_pairs": {
        name: TABLE["quantize_weight_pairs"][name]
        for name in ("weight", "out", "transposed_out", "block_format")
    }
    | BUDGET,
    "launch_fp8_gemm": TABLE["grouped_gemm_quantized"],
    "launch_fp8_wgrad": TABLE["grouped_gemm_wgrad_quantized"],
}


def gathered(name: str, width: str) -> dict[str, Any]:
    return {name: (f"P {width}", index("N", "P"))}


ACCUMULATE = {"accumulate": True}
KEEP_TAIL = {"zero_tail": False}
INDEXED = {"row_index": index("N", "N")}
WAYS: dict[str, dict[str, dict[str, Any]]] = {
    "grouped_gemm": {
        "gather": gathered("rows", "H"),
        "table": {"weight": table("G W H")},
        "bias": {"bias": "G W"},
        "biased": {"bias": ("G W", "f32 N"), "zero_tail": True},
        "zero-tail": {"zero_tail": True},
        "keep-tail": KEEP_TAIL,
        "accumulate": ACCUMULATE,
    },
    "grouped_gemm_dgrad": {
        "gather": gathered("dout", "W"),
        "table": {"weight": table("G W H")},
        "keep-tail": KEEP_TAIL,
        "accumulate": ACCUMULATE,
    },
    "grouped_gemm_wgrad": {
        "gather": gathered("rows", "H"),
        "gather-dout": gathered("dout", "W"),
        "table": {"out": table("G W H")},
        "accumulate": ACCUMULATE,
        "fp32": {"out": "f32 G W H"},
        "fp32-table": {"out": table("f32 G W H")},
        "no-rows": {"dout": "0 W", "rows": "0 H", "out": table("G W H")},
    },
    "grouped_bias_grad": {
        "gather": {"dout": ("N W", index("N", "N"))},
        "unscaled": {"scale": None},
        "fp32": {"dbias": "f32 G W"},
    },
    "grouped_bias_dot": {
        "gather": {"dout": ("N W", index("N", "N"))},
        "first": {"accumulate": False},
    },
    "grouped_gemm_act": {
        "gather": gathered("rows", "H"),
        "table": {"weight": table("G W H")},
        "biased": {"bias": "G W"},
    },
    "grouped_gemm_dact": {
        "gather": gathered("dout", "H"),
        "table": {"weight": table("G H I")},
        "biased": {"gradients": ("N W", "N I", "f32 N", "G W")},
        "unsummed": {"gradients": ("N W", "N I", None, None)},
    },
    "quantize_rows": {"indexed": INDEXED, "sums": {"sums": SUMS}},
    "quantize_columns": {"indexed": INDEXED, "plain": dict.fromkeys(("seeds", "signs"))},
    "group_amax": {"signs": {"signs": SIGNS}, "indexed": INDEXED},
    "weight_amax": {"table": {"weight": table("G W H")}},
    "quantize_weights": {
        "transposed": {"weight": lambda make: make("G W H").mT, "out": weight_lines("H", "W")}
    },
    "quantize_weight_pairs": {"table": {"weight": table("G W H")}},
    "dact_quantize": {
        "dbias": {"out": dact_results("G W"), "workspace": dact_workspace("G W")},
        "fp32-dbias": {"out": dact_results("f32 G W"), "workspace": dact_workspace("f32 G W")},
    },
    "unpack_rows": {"indexed": INDEXED},
    "requantize_columns": {"indexed": INDEXED},
    "grouped_gemm_quantized": {
        "biased": {"bias": ("G W", "f32 N")},
        "fp32-biased": {"bias": ("f32 G W", "f32 N")},
        "zero-tail": {"zero_tail": True},
        "scattered": {"weight": scattered_weight},
        "parts": {"group_range": group_range},
    },
    "grouped_gemm_wgrad_quantized": {
        "accumulate": ACCUMULATE,
        "table": {"out": table("f32 G W H")},
    },
    "choose_experts": {"counted": {"block_counts": "i32 blocks E+R+2"}},
    "push_replicas": {"table": {"weights": tuple(map(table, MATRICES))}},
    "add_from_replicas": {"table": {"gradients": tuple(map(table, MATRICES))}},
    "push_slots": {"no-probs": {"slots": (SLOTS, SLOTS, None)}},
    "index_rows": {"no-probs": {"wire": (SLOTS, None), "index": (SLOTS, "i32 T", None)}},
    "launch_gemm": {"k-first": {"rows": "N H", "out": "N I", "weight_k_first": True}},
    "launch_dact": {"gather": gathered("dout", "H")},
    "launch_wgrad": {"fc2": {"dout": "N H", "rows": "N I", "out": "G H I"}},
    "launch_quantize_columns": {"indexed": INDEXED},
    "launch_requantize_columns": {"indexed": INDEXED},
    "launch_quantize_weight_pairs": {"table": {"weight": table("G W H")}},
    "launch_dact_quantize": {"dbias": {"arguments": dact_arguments("G W")}},
}
WAYS["launch_fp8_gemm"] = {
    "bias": {"bias": ("G W", None)},
    **{
        variant: WAYS["grouped_gemm_quantized"][variant]
        for variant in ("biased", "zero-tail", "scattered")
    },
}
WAYS["grouped_gemm_quantized"]["bias"] = WAYS["launch_fp8_gemm"]["bias"]
WAYS["launch_fp8_wgrad"] = WAYS["grouped_gemm_wgrad_quantized"]
GEMMS = [  # what the layer asks of its products
    *(
        ("grouped_gemm", ways)
        for ways in (
            "",
            "gather",
            "biased",
            "gather biased",
            "table",
            "gather table biased",
            "accumulate",
            "gather biased accumulate",
        )
    ),
    *(("grouped_gemm_dgrad", ways) for ways in ("", "table", "gather", "accumulate")),
    *(
        ("grouped_gemm_wgrad", ways)
        for ways in (
            "",
            "gather",
            "accumulate",
            "gather accumulate",
            "accumulate fp32",
            "gather accumulate fp32-table",
            "fp32-table",
        )
    ),
]
LAYOUTS = ("gather", "", "gather table", "gather biased")  # of rows and weights of fused GEMMs
E2M1_AND_E8M0 = ("mxfp8", "nvfp4")  # what Blackwell multiplies
