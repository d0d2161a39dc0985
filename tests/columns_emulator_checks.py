"""Runs the sources of the quantisers of columns for Hopper in gluon_emulator.py. A script.

test_columns_emulator.py starts it. The emulator has none of Triton's arithmetic: conversions and scales are numpy's, as
the reference of the quantisers has them. What is checked is which numbers share a scale and where results go.
"""

import gluon_emulator
import torch

gluon_emulator.install()

import numpy as np  # noqa: E402
import quantize_reference as reference  # noqa: E402
from quantize_cases import (  # noqa: E402
    FORMATS,
    SPLITS,
    TAIL,
    bounds,
    differences,
    encode_rows,
    filled,
    filled_column_scale,
    hard_rows,
)

from symmoe.kernels import twin  # noqa: E402
from symmoe.kernels.formats import TILE, max_tiles  # noqa: E402
from symmoe.kernels.gpu.hopper import columns  # noqa: E402

OPTIONS = ({}, {"features": 64}, {"features": 64, "num_warps": 4, "panel": 2}, {"num_warps": 16, "panel": 1})
NAMES = ("float8_block", "float8_block_powers")


def block_scales(bits, global_scale, kind):
    """Of features whose largest |x| has these bits."""
    assert global_scale == 1.0
    amax = bits.view(torch.float32)
    scale = (amax.where(torch.isfinite(amax), 0.0) / 448).clamp(min=2.0**-126)
    if kind == "power_of_two":
        scale = torch.tensor([float(reference.power_of_two_above(number)) for number in scale.numpy()])
    return scale.where(torch.isfinite(amax), torch.nan), 1.0 / scale


def install_arithmetic():
    columns.block_scales = block_scales
    columns.magnitude_bits = lambda x: x.abs().view(torch.int32)
    columns.INFINITY_BITS = 0x7F800000
    columns.e4m3_code = lambda x: torch.from_numpy(reference.e4m3(x.numpy()).view(np.uint8).copy()) & ~sign_of_nan(x)
    columns.e4m3_number = lambda codes: codes.view(torch.float8_e4m3fn).float()


def sign_of_nan(x):
    """Where the conversion has no sign."""
    return torch.isnan(x).to(torch.uint8) << 7


def buffers(width, num_rows, num_groups, name):
    tokens = TILE * max_tiles(num_rows, num_groups)
    data = filled((width, tokens), torch.float8_e4m3fn)
    return {"data": data, "scale": filled_column_scale((width, tokens // TILE), FORMATS[name])}


def check(rows, splits, name, row_index, options):
    num_rows, width = (rows if row_index is None else row_index).shape[0], rows.shape[1]
    found, expected = (buffers(width, num_rows, len(splits), name) for _ in range(2))
    columns.launch_quantize_columns(
        rows, bounds(splits), *found.values(), FORMATS[name], row_index=row_index, **options
    )
    twin.quantize_columns(rows, bounds(splits), *expected.values(), FORMATS[name], row_index=row_index)
    assert differences(found, expected) == [], (splits, name, options, width)
    return found


def check_wire(wire, width, dtype, splits, name, row_index, options):
    num_rows = (wire if row_index is None else row_index).shape[0]
    found, expected = (buffers(width, num_rows, len(splits), name) for _ in range(2))
    for function, result in ((columns.launch_requantize_columns, found), (twin.requantize_columns, expected)):
        given = options if result is found else {}
        function(wire, bounds(splits), *result.values(), FORMATS[name], dtype, row_index=row_index, **given)
    assert differences(found, expected) == [], (splits, name, options, width)


def check_that_mistakes_are_noticed(rows):
    """The end of the group before; scales of the neighbouring block."""
    locate, scales = columns.locate, columns.block_scales

    def is_right():
        try:
            check(rows, SPLITS, "float8_block", None, {})
        except AssertionError:
            return False
        return True

    assert is_right()
    columns.locate = lambda *args: (locate(*args)[0], locate(*args)[1] + 1)
    assert not is_right()
    columns.locate, columns.block_scales = locate, lambda *args: tuple(x.roll(1) for x in scales(*args))
    assert not is_right()
    columns.block_scales = scales
    assert is_right()


def main():
    torch.set_num_threads(1)
    install_arithmetic()
    index = torch.randint(50, (sum(SPLITS) + TAIL,), generator=torch.Generator().manual_seed(3)).int()
    index[-TAIL:] = 1 << 30  # of the tail
    for number, options in enumerate(OPTIONS):
        width, name = (272, 256)[number % 2], NAMES[number % 2]
        for dtype in (torch.bfloat16, torch.float16):
            check(hard_rows(len(index), width, dtype), SPLITS, name, None, options)
            check(hard_rows(50, width, dtype), SPLITS, name, index, options)
            wire = encode_rows(twin, hard_rows(50, width, dtype), name)[:50]
            check_wire(wire, width, dtype, SPLITS, name, index, options)
        check_wire(wire, width, torch.bfloat16, (0, 40, 3), name, None, options)
    many = tuple(3 * (i % 4 == 1) for i in range(40))  # groups of which a lane has two
    check(hard_rows(sum(many), 128, torch.bfloat16), many, "float8_block", None, {})
    check_that_mistakes_are_noticed(hard_rows(len(index), 256, torch.bfloat16))
    print("all is well")


if __name__ == "__main__":
    main()
