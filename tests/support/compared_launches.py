"""Launches of the table with numbers, by the twins and by kernels: in Triton's interpreter, in gluon_emulator.py, or on
a GPU. What a kernel must write has the twin's bits; all else holds random numbers before, and the same ones after."""

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from typing import Any, ClassVar

import torch
from launch_table import FORMATS, I32, I64, SIZES, U8, Arguments, Launch
from quantize_cases import Scattered, hard_rows
from row_ranges import random_ranges, rows_of, whole_groups
from written_arguments import bytes_with_one_nan, tensors_of

from symmoe.kernels import control, twin
from symmoe.kernels.activation import num_scale_sums
from symmoe.kernels.operands import TensorTable

TAIL = 10  # rows of no group
EPOCH = 6  # of the last barrier


class Numbers(Arguments):
    """Arguments on a device that are the same for all who are given the same launch. Groups have `splits` rows, of
    which `part` is computed; other rows are NaN, and no index. Numbers are whole and small, so that sums are exact, and
    zeros are -0.0; or they are hard to quantise, and then `prepared`. Ranks have passed EPOCH barriers, and their count
    tables have any bytes."""

    prepared = staticmethod(lambda rows: rows)
    elsewhere: ClassVar[list[torch.Tensor]] = []  # the latest matrices of tables

    def __init__(
        self,
        launch: Launch,
        device: str = "cpu",
        *,
        splits: tuple[int, ...] | None = None,
        part: torch.Tensor | None = None,
        hard: bool = False,
    ) -> None:
        sizes = dict(SIZES[launch.sizes] if isinstance(launch.sizes, str) else launch.sizes)
        if splits is not None:
            sizes = {"N": sum(splits) + TAIL, **sizes, "G": len(splits)}
        super().__init__(replace(launch, sizes=sizes), device)
        self.groups = whole_groups(splits or ())
        self.hard = hard
        self.scattered = list[Scattered]()
        self.part = self.groups if part is None else part

    def begin(self, name: str) -> None:
        self.generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))

    def numbers(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        tensor = self._on_cpu(shape, dtype)
        if dtype.is_floating_point and dtype.itemsize > 1 and shape[:1] == (self.sizes.get("N"),):
            tensor[~rows_of(self.part, len(tensor))] = torch.nan
        return tensor.to(self.device)

    def _on_cpu(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if dtype == torch.float8_e8m0fnu:
            return self._integers(125, 129, shape).to(U8).view(dtype)
        if dtype == U8:  # two small numbers of E2M1
            codes = self._integers(0, 4, (2, *shape)) + 8 * self._integers(0, 2, (2, *shape))
            return (codes[0] + 16 * codes[1]).to(U8)
        if not dtype.is_floating_point:
            return self._integers(0, 2, shape).to(dtype)
        if self.hard and len(shape) > 1 and dtype.itemsize > 1:
            seed = int(self._integers(0, 1000, ()))
            rows = hard_rows(math.prod(shape[:-1]), shape[-1], dtype, seed=seed)
            return self.prepared(rows).view(shape)
        return (-self._integers(-3, 4, shape).float()).to(dtype)

    def _integers(self, low: int, high: int, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(low, high, tuple(shape), generator=self.generator)

    def indices(self, shape: tuple[int, ...], end: int) -> torch.Tensor:
        index = self._integers(0, max(end, 1), shape).to(I32)
        if shape == (self.sizes.get("N"),):
            index[int(self.groups[1, -1]) :] = 1 << 30
        return index.to(self.device)

    def row_range(self) -> torch.Tensor:
        return self.part.to(self.device)

    def group_range(self) -> torch.Tensor:
        return self.groups.to(self.device)

    def scales(self, *shape: int) -> torch.Tensor:
        """Powers of two, of E8M0 or of E4M3."""
        codes = self._integers(125, 129, shape)
        if self.block_format.scale == "e4m3":
            codes = 8 * (codes - 119)
        return codes.to(U8).to(self.device)

    def amax(self) -> torch.Tensor:
        result = torch.empty(self.sizes["G"])
        if "weight" in self.values:
            twin.weight_amax(packed(self.values["weight"], self.scattered), result)
        else:
            index = self.values["row_index"]
            options = {"row_index": None if index is None else index.cpu()}
            rows = self.values["rows"].cpu()
            options["signs"] = self.values.get("signs")
            twin.group_amax(rows, self.groups, result, **options)
        return result.to(self.device)

    def wire(self, num_bytes: int) -> torch.Tensor:
        sent = self._on_cpu((self.sizes["N"], num_bytes), U8)
        twin.encode_rows(self("f32 N H").cpu(), sent, self.block_format)
        return sent.to(self.device)

    def arenas(self, layout: control.ControlLayout) -> list[torch.Tensor]:
        blocks = self._integers(0, 9, (layout.num_ranks, layout.num_bytes)).to(U8)
        blocks[:, : layout.count_table] = 0
        blocks[:, : layout.mailbox].view(I64)[:, control.BARRIER_EPOCH] = EPOCH
        return list(blocks.to(self.device))

    def table(
        self, kind: torch.dtype, shape: tuple[int, ...], of_scales: bool = False
    ) -> TensorTable:
        matrices = self.scales(*shape) if of_scales else self.numbers(*shape, dtype=kind)
        self.scattered.append(Scattered(matrices))
        self.elsewhere[:] = [
            matrix for scattered in self.scattered for matrix in scattered.matrices
        ]
        return self.scattered[-1].table


def packed(weight: torch.Tensor | TensorTable, scattered: list[Scattered]) -> torch.Tensor:
    """On the CPU."""
    return (weight if isinstance(weight, torch.Tensor) else scattered[-1].packed()).cpu()


def without_subnormals(rows: torch.Tensor) -> torch.Tensor:
    """Triton's interpreter loses those of bf16."""
    tiny = torch.finfo(rows.dtype).smallest_normal
    return rows.where((rows.abs() >= tiny) | rows.isnan(), 0.0)


def results(
    launch: Launch, function: Callable[..., object], make: Numbers, **tuning: object
) -> dict[str, torch.Tensor]:
    """All that a call leaves in its arguments, whether it writes there or not, and in scattered matrices."""
    arguments = launch.arguments(make)
    function(**arguments | tuning)
    values = {**arguments, "scattered": [matrices.packed() for matrices in make.scattered]}
    return {
        f"{name} {number}": tensor.cpu().clone()  # of tables, whose memory goes
        for name, value in values.items()
        for number, tensor in enumerate(tensors_of(value))
        if name != "workspace"
    }


def differences(
    launch: Launch,
    kernels: Any = None,
    device: str = "cpu",
    *,
    like: str = "",
    reference: Any = twin,
    reference_device: str = "cpu",
    tuning: Mapping[str, object] | None = None,
    tolerance: float = 0.0,
    **options: Any,
) -> list[str]:
    """Differences between the outputs of a launch and of a reference. kernels: a module of them. like: the kernel of
    the contract that it stands for, if its name is another one. tuning: arguments of the kernel alone. tolerance: of
    numbers that are no bits of the reference's, see is_near."""
    function = launch.function if kernels is None else getattr(kernels, launch.kernel)
    public = replace(launch, kernel=like) if like else launch
    actual = results(launch, function, Numbers(launch, device, **options), **(tuning or {}))
    function = getattr(reference, public.kernel)
    expected = results(public, function, Numbers(public, reference_device, **options))
    assert actual.keys() <= expected.keys()
    return [
        f"{launch}, {options}: {name}"
        for name, tensor in actual.items()
        if not is_near(tensor, expected[name], tolerance)
    ]


def is_near(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    """Every number: relative to the expected one, or to 0.1; NaN where that one is. Without a tolerance, and of
    integers every bit."""
    if not tolerance or not actual.is_floating_point():
        return torch.equal(bytes_with_one_nan(actual), bytes_with_one_nan(expected))
    pair = actual.double(), expected.double()
    return torch.allclose(*pair, rtol=tolerance, atol=tolerance / 10, equal_nan=True)


def check_sums_of_parts(launch: Launch, kernels: Any, splits: tuple[int, ...]) -> None:
    """Parts of grouped_gemm_dact leave their sums in the workspace: together those of the whole."""
    make = Numbers(launch, splits=splits)
    arguments = launch.arguments(make)
    *parts, dscale, _ = arguments["gradients"]
    for part in random_ranges(splits, 2):
        changes = {"row_range": part, "gradients": (*parts, None, None)}
        kernels.grouped_gemm_dact(**arguments | changes)
    sums = dscale.clone()
    num_partials = num_scale_sums(make.sizes["I"])
    kernels.sum_dact_partials(arguments["workspace"], arguments["row_range"], sums, num_partials)
    twin.grouped_gemm_dact(**arguments)
    assert torch.equal(sums, dscale)


# -- what quantises ----------------------------------------------------------------------------------------------------
IN_ALL_FORMATS = {
    "quantize_rows": ("", "indexed", "sums", "indexed sums"),
    "quantize_columns": ("", "indexed", "plain"),
    "quantize_weights": ("", "transposed"),
    "quantize_weight_pairs": ("", "table"),
}
ON_THE_WIRE = {
    "encode_rows": ("",),
    "unpack_rows": ("", "indexed"),
    "decode_rows": ("",),
    "requantize_columns": ("", "indexed"),
}
IN_NO_FORMAT = {
    "group_amax": ("", "signs", "signs indexed"),
    "weight_amax": ("", "table"),
    "swizzle_scales": ("",),
    "unswizzle_scales": ("",),
    "sum_dbias": ("",),
}
E4M3_FORMATS = [name for name, block_format in FORMATS.items() if block_format.element == "e4m3"]


def quantising(sizes: dict[str, int], dtype: torch.dtype, *kernels: str) -> list[Launch]:
    """In all formats and ways; of these kernels, or of all."""
    of_formats = (IN_ALL_FORMATS, FORMATS), (ON_THE_WIRE, E4M3_FORMATS), (IN_NO_FORMAT, ["mxfp8"])
    return [
        Launch(kernel, sizes, dtype, name, ways=variant)
        for table, names in of_formats
        for kernel, ways in table.items()
        for name, variant in product(names, ways)
        if kernel in (kernels or table)
    ]
