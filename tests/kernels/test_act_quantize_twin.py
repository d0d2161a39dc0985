"""Twins of the activations that quantise: bits against numpy where the activation is exact, near float64 elsewhere."""

from __future__ import annotations

from functools import partial
from itertools import product

import numpy as np
import pytest
import torch

pytest.importorskip("ml_dtypes")

from act_quantize_cases import (
    ACTIVATIONS,
    NAMES,
    Problem,
    assert_same_sums,
    backward,
    backward_apart,
    exact_problem,
    forward,
    forward_apart,
    named,
    reference_operand,
)
from grouped_cases import clamped_swiglu, gating, interleaved_order, srelu, swiglu, tanh_gelu
from quantize_cases import FILL, FORMATS, as_bytes, differences

from symmoe.errors import ArgumentError
from symmoe.kernels import twin
from symmoe.kernels.act_quantized import dact_quantize_workspace_numel, takes_act_quantize, takes_dact_quantize
from symmoe.kernels.formats import TILE
from symmoe.precision import Quantized

FFN = 288  # more than two blocks of 128, no multiple of them


FORMULAS = {
    "swiglu": swiglu,
    "clamped": partial(clamped_swiglu, alpha=1.702, limit=7.0, offset=1.0),
    "interleaved": partial(clamped_swiglu, alpha=1.702, limit=7.0, offset=1.0),
    "interleaved 32": swiglu,
    "srelu": srelu,
    "geglu": gating(torch.nn.functional.gelu),
    "tanh gelu": tanh_gelu,
}


@pytest.mark.parametrize("name", NAMES)
def test_bits_against_numpy(name):
    p = exact_problem(FFN)
    h, da, scale = p.h.float().numpy(), p.da.float().numpy(), p.row_scale.numpy()[:, None]
    with np.errstate(invalid="ignore"):
        positive = np.maximum(h, 0)
        a, dh = positive**2 * scale, da * scale * 2 * positive
        dscale = (da.astype(np.float64) * positive**2).sum(axis=1)
        groups = np.split(dh[: p.num_rows].astype(np.float64), np.cumsum(p.splits)[:-1])
        dbias = np.stack([rows.sum(axis=0) for rows in groups])
    rows, columns = (reference_operand(p, a, name, columns=each) for each in (False, True))
    assert differences(forward(twin, p, name), named(rows=rows, columns=columns)) == []
    dh_rows, dh_columns = (reference_operand(p, dh, name, columns=each) for each in (False, True))
    found, sums = backward(twin, p, name)
    assert differences(found, named(rows=dh_rows, columns=dh_columns, a_columns=columns)) == []
    dscale[p.num_rows :] = 0
    assert np.array_equal(sums["dscale"].numpy(), dscale)
    assert np.array_equal(sums["dbias"].numpy(), dbias)


def float64_results(p, name):
    """a, dh and dscale of the used rows by stock autograd, row by row."""
    n, block = p.num_rows, p.activation.interleave
    h, scale = (x[:n].double().requires_grad_() for x in (p.h, p.row_scale))
    rows = h
    if block is not None:
        order = torch.tensor(interleaved_order(h.shape[1], block))
        rows = h[:, torch.argsort(order)]  # gates first
    a = torch.stack([FORMULAS[name](row) for row in rows]) * scale[:, None]
    a.backward(p.da[:n].double())
    return a.detach(), h.grad, scale.grad


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", NAMES)
def test_dequantised_results_are_near_float64(activation, name):
    p = Problem(ACTIVATIONS[activation], 256, splits=(0, 37, 20, 1))  # few enough rows to be finite
    a, dh, dscale = float64_results(p, activation)
    found, (grads, sums) = forward(twin, p, name), backward(twin, p, name)
    pairs = [
        (a, found, "rows", "rows"),
        (a, found, "columns", "columns"),
        (dh, grads, "rows", "rows"),
        (dh, grads, "columns", "columns"),
        (a, grads, "a_columns", "columns"),
    ]
    for expected, tensors, operand, layout in pairs:
        quantized = Quantized(
            data=tensors[f"{operand} data"],
            scale=tensors[f"{operand} scale"],
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
    for found, rows in zip(sums["dbias"].double(), dh.split(p.splits), strict=True):  # dh is rounded to bf16
        assert ((found - rows.sum(dim=0)).abs() <= 2**-8 * rows.abs().sum(dim=0) + floor).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_bits_of_what_is_fused(activation, dtype):
    p = Problem(ACTIVATIONS[activation], 256, dtype)
    for name, with_dbias in product(NAMES, (False, True)):
        assert differences(forward(twin, p, name), forward_apart(twin, p, name)) == []
        found, sums = backward(twin, p, name, with_dbias=with_dbias)
        expected, wanted = backward_apart(twin, p, name, with_dbias=with_dbias)
        assert differences(found, expected) == []
        assert_same_sums(sums, wanted)
    before = forward_apart(twin, p, name)
    p.row_scale[40] *= 2
    assert "columns data" in differences(forward(twin, p, name), before)


def test_operands_that_are_not_wanted():
    p = Problem(ACTIVATIONS["swiglu"], 256)
    both = forward(twin, p, "mxfp8")
    for which in ("rows", "columns"):
        operand = p.operand(256, "mxfp8", columns=which == "columns")
        twin.act_quantize(p.h, p.row_scale, p.row_range, p.activation, FORMATS["mxfp8"], **{which: operand})
        assert differences(named(**{which: operand}), {k: v for k, v in both.items() if k.startswith(which)}) == []
    dscale, wanted = p.blank_dscale(), backward(twin, p, "mxfp8")[1]["dscale"]
    workspace = torch.empty(dact_quantize_workspace_numel(len(p.h), 256))
    arguments = (p.da, p.h, p.row_scale, p.row_range, dscale, workspace, p.activation, FORMATS["mxfp8"])
    twin.dact_quantize(*arguments)
    assert torch.equal(dscale.nan_to_num(7), wanted.nan_to_num(7))


def test_rows_of_no_group_are_left_alone():
    p = Problem(ACTIVATIONS["swiglu"], 256)
    for name, tensor in forward(twin, p, "float8_block").items():
        if name.startswith("rows"):
            assert (as_bytes(tensor[p.num_rows :]) == FILL).all()
    empty = Problem(ACTIVATIONS["swiglu"], 256, splits=(0, 0))
    results, sums = backward(twin, empty, "float8_block")
    assert all((as_bytes(tensor) == FILL).all() for tensor in results.values())
    assert not any(total.any() for total in sums.values())


def test_what_is_taken():
    block, mxfp8 = FORMATS["float8_block"], FORMATS["mxfp8"]
    assert takes_act_quantize(block)
    assert takes_act_quantize(mxfp8)
    assert not takes_act_quantize(FORMATS["nvfp4"])
    halves, alternating, plain = (ACTIVATIONS[name] for name in ("swiglu", "interleaved", "srelu"))
    assert takes_dact_quantize(256, halves, block)
    assert not takes_dact_quantize(288, halves, block)
    assert takes_dact_quantize(288, halves, mxfp8)
    assert takes_dact_quantize(288, alternating, block)
    assert takes_dact_quantize(288, plain, block)


def act_arguments(**changes):
    p = Problem(ACTIVATIONS["swiglu"], 256)
    arguments = {
        "h": p.h,
        "row_scale": p.row_scale,
        "row_range": p.row_range,
        "activation": p.activation,
        "block_format": FORMATS["float8_block"],
        "rows": p.operand(256, "float8_block"),
        "columns": p.operand(256, "float8_block", columns=True),
    }
    return arguments | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_format": FORMATS["nvfp4"]}, "block_format must be of E4M3 numbers in blocks of 32 or 128, got"),
        ({"rows": None, "columns": None}, "rows or columns must be given"),
        ({"h": torch.zeros(337, 512)}, "h must be of torch.bfloat16 or torch.float16, got torch.float32"),
        ({"h": torch.zeros(337, 511, dtype=torch.bfloat16)}, "h must have a multiple of 2 columns, got 511"),
        ({"row_scale": torch.zeros(336)}, r"row_scale must be \[337\], got \[336\]"),
        ({"block_format": FORMATS["mxfp8"]}, r"scales of rows must be \[337, 8\], got \[337, 2\]"),
    ],
    ids=["nvfp4", "nothing", "dtype", "odd", "scale", "other format"],
)
def test_bad_arguments(changes, message):
    with pytest.raises(ArgumentError, match=message):
        twin.act_quantize(**act_arguments(**changes))


def test_bad_columns():
    p = Problem(ACTIVATIONS["swiglu"], 256)
    data, scale = p.operand(256, "float8_block", columns=True)
    least = data.shape[1]
    for narrow in (data[:, :-1], data[:, :-TILE]):
        with pytest.raises(ArgumentError, match=f"at least {least}, got {narrow.shape[1]}"):
            twin.act_quantize(**act_arguments(columns=(narrow, scale)))
    wider = torch.zeros(256, least + TILE, dtype=data.dtype), torch.zeros(least // TILE + 1, 256).t()
    twin.act_quantize(**act_arguments(columns=wider))
    with pytest.raises(ArgumentError, match=r"scales of columns \[256, \d+\] must have strides \[1, 256\]"):
        twin.act_quantize(**act_arguments(columns=(data, scale.contiguous())))
    with pytest.raises(ArgumentError, match=r"scales of columns must be torch\.float32 \[256, \d+\], got"):
        twin.act_quantize(**act_arguments(columns=(data, scale[:, 1:])))


def test_bad_gradients():
    p = Problem(ACTIVATIONS["swiglu"], 288)
    workspace = torch.empty(dact_quantize_workspace_numel(len(p.h), 288))
    arguments = (p.da, p.h, p.row_scale, p.row_range, p.blank_dscale(), workspace, p.activation)
    with pytest.raises(ArgumentError, match=r"divide each half of h \(288\)"):
        twin.dact_quantize(*arguments, FORMATS["float8_block"])
    with pytest.raises(ArgumentError, match="workspace must have 1685 contiguous fp32 elements"):
        twin.dact_quantize(*arguments[:5], workspace[1:], p.activation, FORMATS["mxfp8"])
    with pytest.raises(ArgumentError, match=r"da must be of torch\.bfloat16, got torch\.float16"):
        twin.dact_quantize(p.da.half(), *arguments[1:], FORMATS["mxfp8"])
    with pytest.raises(ArgumentError, match=r"dbias must be \[6, 576\], got \[6, 288\]"):
        twin.dact_quantize(*arguments, FORMATS["mxfp8"], dbias=torch.empty(6, 288))
    # Six slots of groups, and two of the 337 rows.
    with pytest.raises(ArgumentError, match=f"workspace must have {337 * 5 + 8 * 576} contiguous fp32 elements"):
        twin.dact_quantize(*arguments, FORMATS["mxfp8"], dbias=torch.empty(6, 576))
