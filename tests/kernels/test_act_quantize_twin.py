"""Twins of the activations that quantise: bits against numpy where the activation is exact, near float64 elsewhere."""

import numpy as np
import pytest
import torch

pytest.importorskip("ml_dtypes")

from act_quantize_cases import (
    ACTIVATIONS,
    NAMES,
    Problem,
    backward,
    exact_problem,
    forward,
    reference_operand,
)
from activation_formula import scaled
from quantize_cases import FILL, FORMATS, as_bytes, differences, named

from symmoe.kernels import twin
from symmoe.kernels.act_quantized import takes_act_quantize, takes_dact_quantize
from symmoe.precision import Quantized

FFN = 288  # more than two blocks of 128, no multiple of them


@pytest.mark.parametrize("name", NAMES)
def test_exact_results_have_the_bits_of_numpy(name):
    p = exact_problem(FFN)
    da = p.da.float().numpy()
    scale = p.row_scale.numpy()[:, None]
    with np.errstate(invalid="ignore"):
        positive = np.maximum(p.h.float().numpy(), 0)
        a, dh = positive**2 * scale, da * scale * 2 * positive
        dscale = (da.astype(np.float64) * positive**2).sum(axis=1)
        groups = np.split(dh[: p.num_rows].astype(np.float64), np.cumsum(p.splits)[:-1])
        dbias = np.stack([rows.sum(axis=0) for rows in groups])
    assert (
        differences(forward(twin, p, name), named(*reference_operand(p, a, name, columns=False)))
        == []
    )
    (actual, sums), expected = backward(twin, p, name), {}
    for prefix, x in (("rows ", dh), ("columns ", dh), ("a_columns ", a)):
        expected |= named(*reference_operand(p, x, name, columns="columns" in prefix), prefix)
    assert differences(actual, expected) == []
    dscale[p.num_rows :] = 0
    assert np.array_equal(sums["dscale"].numpy(), dscale)
    assert np.array_equal(sums["dbias"].numpy(), dbias)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", NAMES)
def test_dequantised_results_are_near_float64(activation, name):
    p = Problem(ACTIVATIONS[activation], 256, splits=(0, 37, 20, 1))  # few enough rows to be finite
    n = p.num_rows
    a, dh, dscale = scaled(p.h[:n], p.row_scale[:n], p.da[:n], p.activation)
    (grads, sums), actual = backward(twin, p, name), forward(twin, p, name)
    pairs = [
        (a, actual, ""),
        (dh, grads, "rows "),
        (dh, grads, "columns "),
        (a, grads, "a_columns "),
    ]
    for expected, tensors, operand in pairs:
        layout = "columns" if "columns" in operand else "rows"
        quantized = Quantized(
            data=tensors[f"{operand}data"],
            scale=tensors[f"{operand}scale"],
            block_format=FORMATS[name],
            layout=layout,
            num_rows=len(p.h),
            row_range=p.row_range,
        )
        got = quantized.dequantize()[: p.num_rows].double()
        largest = expected.abs().amax(dim=1 if layout == "rows" else 0, keepdim=True)
        assert ((got - expected).abs() <= 0.07 * expected.abs() + 1e-4 * largest).all(), operand
    torch.testing.assert_close(sums["dscale"][: p.num_rows].double(), dscale, rtol=1e-4, atol=1e-3)
    floor = 1e-7 * dh.abs().max()  # 1 + erf(x) of a negative x has no more digits
    for actual, rows in zip(
        sums["dbias"].double(), dh.split(p.splits), strict=True
    ):  # dh is rounded to bf16
        assert ((actual - rows.sum(dim=0)).abs() <= 2**-8 * rows.abs().sum(dim=0) + floor).all()


def test_rows_outside_of_groups_stay_unchanged():
    p = Problem(ACTIVATIONS["swiglu"], 256)
    for tensor in forward(twin, p, "float8_block").values():
        assert (as_bytes(tensor[p.num_rows :]) == FILL).all()
    results, sums = backward(
        twin, Problem(ACTIVATIONS["swiglu"], 256, splits=(0, 0)), "float8_block"
    )
    assert all((as_bytes(tensor) == FILL).all() for tensor in results.values())
    assert not any(total.any() for total in sums.values())


def test_formats_and_widths_of_quantising_activations():
    supported = {name: takes_act_quantize(block_format) for name, block_format in FORMATS.items()}
    assert supported == {
        "float8_block": True,
        "float8_block_powers": True,
        "mxfp8": True,
        "nvfp4": False,
    }
    for ffn, activation, name, is_taken in (
        (256, "swiglu", "float8_block", True),
        (288, "swiglu", "float8_block", False),
        (288, "swiglu", "mxfp8", True),
        (288, "interleave by one", "float8_block", True),
        (288, "srelu", "float8_block", True),
    ):
        assert takes_dact_quantize(ffn, ACTIVATIONS[activation], FORMATS[name]) == is_taken
