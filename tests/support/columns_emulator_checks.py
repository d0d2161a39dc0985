"""Runs the sources of the quantisers of columns and weights for Hopper in gluon_emulator.py. For test_interpreted.py.
The emulator has none of Triton's arithmetic: conversions and scales are numpy's, as the reference of the quantisers has
them. What is checked is which numbers share a scale and where results go."""

import types

import gluon_emulator
import numpy as np
import quantize_cases as cases
import quantize_reference as reference
import torch

from symmoe.kernels import twin
from symmoe.kernels.low_precision import hopper_columns, hopper_weights

SMS = (1, 4, 1, 2)
NAMES = ("float8_block", "float8_block_powers")


def install_arithmetic():
    hopper_columns.block_scales_or_nan = reference.block_scales_or_nan
    hopper_columns.magnitude_bits = lambda x: x.abs().contiguous().view(torch.int32)
    for module in (hopper_columns, hopper_weights):
        module.e4m3_code = e4m3_code
        module.largest = largest
        module.first_number = lambda words, dtype: numbers(words, dtype)[..., 0]
        module.second_number = lambda words, dtype: numbers(words, dtype)[..., 1]
    hopper_weights.code_pairs = lambda *pair: (
        e4m3_code(torch.stack(pair, dim=-1)).view(torch.int16).squeeze(-1)
    )
    hopper_columns.decoded = decoded
    hopper_weights.matrix_pointer = gluon_emulator.pointer_in_table


def numbers(words, dtype):
    """fp32 [..., words, 2]."""
    return words.contiguous().view(*words.shape, 1).view(dtype).float()


def e4m3_code(x):
    """Of fp32 numbers."""
    return torch.from_numpy(reference.e4m3(x.numpy()).view(np.uint8).copy()) & ~sign_of_nan(x)


def largest(words, dtype):
    """Along the tokens; NaN if one number is."""
    return numbers(words, dtype).abs().amax(0).to(dtype).view(torch.int32).squeeze(-1)


def decoded(codes, scale, dtype):
    """Words of code * scale in dtype."""
    exact = codes.contiguous().view(torch.float8_e4m3fn).float() * scale
    return exact.to(dtype).view(torch.int32)


def sign_of_nan(x):
    """Where the conversion has no sign."""
    return torch.isnan(x).to(torch.uint8) << 7


def check(rows, splits, name, row_index, num_sms=1):
    num_rows, width = (rows if row_index is None else row_index).shape[0], rows.shape[1]
    found, expected = (
        cases.column_buffers(num_rows, len(splits), width, cases.FORMATS[name]) for _ in range(2)
    )
    given = {"row_index": row_index, "num_sms": num_sms}
    hopper_columns.launch_quantize_columns(
        rows, cases.row_range_of(splits), found, cases.FORMATS[name], **given
    )
    twin.quantize_columns(
        rows, cases.row_range_of(splits), expected, cases.FORMATS[name], row_index=row_index
    )
    assert cases.differences(cases.named(*found), cases.named(*expected)) == [], (
        splits,
        name,
        width,
    )


def check_wire(wire, width, dtype, splits, name, row_index, num_sms=1):
    num_rows = (wire if row_index is None else row_index).shape[0]
    found, expected = (
        cases.column_buffers(num_rows, len(splits), width, cases.FORMATS[name]) for _ in range(2)
    )
    for function, result in (
        (hopper_columns.launch_requantize_columns, found),
        (twin.requantize_columns, expected),
    ):
        given = {"num_sms": num_sms} if result is found else {}
        function(
            wire,
            cases.row_range_of(splits),
            result,
            cases.FORMATS[name],
            dtype,
            row_index=row_index,
            **given,
        )
    assert cases.differences(cases.named(*found), cases.named(*expected)) == [], (
        splits,
        name,
        width,
    )


def check_weights(weight, name, num_sms):
    def launched(*args, amax):
        assert amax is None
        assert hopper_weights.takes_weight_pairs(args[-1], args[0])
        hopper_weights.launch_quantize_weight_pairs(*args, num_sms=num_sms)

    expected, scattered = (
        cases.quantize_weights(twin, weight, name, in_pairs=True),
        cases.Scattered(weight),
    )
    kernels = types.SimpleNamespace(quantize_weight_pairs=launched)
    gluon_emulator.ELSEWHERE[:] = scattered.matrices
    for table in (None, scattered.table):
        found = cases.quantize_weights(kernels, weight, name, table, in_pairs=True)
        assert cases.differences(found, expected) == [], (
            name,
            weight.shape,
            cases.differences(found, expected),
        )


def check_that_mistakes_are_noticed(rows):
    """Rows past a group's end; scales of the neighbouring block; the same tile again; a tile that has not come."""
    gluon_emulator.check_mistakes(
        lambda: check(rows, cases.SPLITS, "float8_block", None),
        (
            hopper_columns,
            "locate",
            lambda right: lambda *args: (right(*args)[0], right(*args)[1] + 1),
        ),
        (
            hopper_columns,
            "block_scales_or_nan",
            lambda right: lambda *args: tuple(x.roll(1) for x in right(*args)),
        ),
        (hopper_columns, "further", lambda right: lambda at, *_: at),
        (hopper_columns.async_copy, "wait_group", lambda right: lambda number: None),
    )


def check_that_mistakes_with_weights_are_noticed():
    """Codes of neighbours changed places; another matrix; another scale; a tile that has not come."""
    weight = torch.randn(2, 256, 256, generator=torch.Generator().manual_seed(5)).bfloat16()
    gluon_emulator.check_mistakes(
        lambda: check_weights(weight, NAMES[0], 1),
        (hopper_weights, "code_pairs", lambda right: lambda a, b: right(b, a)),
        (
            hopper_weights,
            "store_turned",
            lambda right: lambda *args: right(*args[:3], 1 - args[3], *args[4:]),
        ),
        (hopper_weights, "scales_of", lambda right: lambda x, plan: right(2 * x, plan)),
        (hopper_weights.async_copy, "wait_group", lambda right: lambda number: None),
    )


def checks():
    """Names of what is right."""
    torch.set_num_threads(1)
    install_arithmetic()
    index = torch.randint(
        50, (sum(cases.SPLITS) + cases.TAIL,), generator=torch.Generator().manual_seed(3)
    ).int()
    index[-cases.TAIL :] = 1 << 30  # of the tail
    for number, num_sms in enumerate(SMS):
        width, name = (272, 256)[number % 2], NAMES[number % 2]
        for dtype in (torch.bfloat16, torch.float16):
            check(cases.hard_rows(len(index), width, dtype), cases.SPLITS, name, None, num_sms)
            check(cases.hard_rows(50, width, dtype), cases.SPLITS, name, index, num_sms)
            wire = cases.encode_rows(twin, cases.hard_rows(50, width, dtype), name)[:50]
            check_wire(wire, width, dtype, cases.SPLITS, name, index, num_sms)
        check_wire(wire, width, torch.bfloat16, (0, 40, 3), name, None, num_sms)
        yield f"{width}, {name}, {num_sms} SMs", None
    for num_sms in (1, 3, 100):  # two panels; of which a program has more than one, or no tile
        check(
            cases.hard_rows(len(index), 1024, torch.bfloat16),
            cases.SPLITS,
            "float8_block",
            None,
            num_sms,
        )
    check(cases.hard_rows(cases.TAIL, 256, torch.bfloat16), (0, 0), "float8_block", None)
    wire = cases.encode_rows(twin, cases.hard_rows(50, 264, torch.bfloat16), "float8_block")[
        :50
    ]  # a copy of codes and scales
    check_wire(wire, 264, torch.bfloat16, cases.SPLITS, "float8_block", index)
    many = tuple(3 * (i % 4 == 1) for i in range(40))  # groups of which a lane has two
    check(cases.hard_rows(sum(many), 128, torch.bfloat16), many, "float8_block", None)
    check_that_mistakes_are_noticed(cases.hard_rows(len(index), 256, torch.bfloat16))
    for num_sms, dtype in zip(SMS, 2 * [torch.bfloat16, torch.float16], strict=True):
        for name in NAMES:
            check_weights(cases.hard_rows(3 * 256, 384, dtype).view(3, 256, 384), name, num_sms)
    check_that_mistakes_with_weights_are_noticed()
