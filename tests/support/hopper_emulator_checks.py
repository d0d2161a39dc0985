"""Runs the sources of the GEMMs for Hopper in gluon_emulator.py, against float64. Every kernel has several tiles to a
program, some of them partial, and a ring that turns several times or not at all."""

from functools import partial
from types import SimpleNamespace

import gemm_problem as problems
import gluon_emulator
import torch
from row_ranges import random_ranges

from symmoe.kernels import hopper_choice, twin
from symmoe.kernels.activation import Activation, num_scale_sums
from symmoe.kernels.hopper import act, gemm, pipeline, wgrad
from symmoe.kernels.triton import gemm as public
from symmoe.kernels.triton import tiles
from symmoe.kernels.twin.activation import value_and_slopes

SPLITS = (140, 0, 1, 128, 0)
FEW = (0, 3, 129)
ODD = (200, 152)
EXACT = (64, 256)  # H, I: parts of tiles and steps; whole ones
WHOLE_HALVES = (200, 256)  # of act, which takes no others
LIMITED = Activation(alpha=1.702, limit=1.0, offset=1.0)
VARIANTS = {  # of act and dact; without one, act is the twin
    "separate": (act.SEPARATE, act.SEPARATE),
    "alternate": (act.ALTERNATE, act.ALTERNATE),
    "two warps": (None, act.TWO_WARPS),
    "gathered": (None, act.GATHERED),
}


def of_parts(gate, up, activation):
    return value_and_slopes(torch.cat((gate, up), 1) if activation.is_gated else gate, activation)


def act_gradients(gate, up, da, scale, activation):
    value, slopes = of_parts(gate, up, activation)
    return value * scale, da * scale * slopes[0], da * scale * slopes[-1], da * value


def add_neighbours(x, steps):
    for _ in range(int(steps)):
        x = x[:, 0::2] + x[:, 1::2]
    return x


tiles.device_num_sms = lambda device: 3
launched = {"grouped_gemm": gemm.launch_gemm, "grouped_gemm_wgrad": wgrad.launch_wgrad}
on_hopper = SimpleNamespace(
    LAUNCHERS={name: (each, lambda *_: True) for name, each in launched.items()}
)
hopper_choice.hopper_kernels = lambda device, dtype, columns: on_hopper
# In Triton or in assembly:
act.act_value = lambda *args: of_parts(*args)[0]
act.act_gradients = act_gradients
act.add_neighbours = add_neighbours
act.unpack = lambda pair, dtype: (
    pair.contiguous().view(dtype).float().unflatten(1, (-1, 2)).unbind(2)
)
act.pack = lambda low, high, dtype: (
    torch.stack((low, high), 2).to(dtype).flatten(1).view(torch.int32)
)


def dact(variant, dout, weight, row_range, hidden, gradients, workspace, activation, **options):
    dh, a, dscale, _ = gradients
    act.launch_dact(
        dout, weight, row_range, hidden, (dh, a, workspace), activation, variant=variant, **options
    )
    if dscale is not None:
        sum_partials(workspace, row_range, dscale, num_scale_sums(a.shape[1]))
    return num_scale_sums(a.shape[1])


def sum_partials(workspace, row_range, dscale, num_partials):
    sums = workspace[: num_partials * len(dscale)].view(num_partials, -1)
    dscale.zero_()
    for each in sums:
        dscale += each
    dscale[int(row_range[1, -1]) :] = 0


def kernels_of(act_variant, dact_variant):
    launch_act = partial(act.launch_act, variant=act_variant)
    return SimpleNamespace(
        grouped_gemm_act=lambda *args, bias, **options: (
            launch_act if act_variant else twin.grouped_gemm_act
        )(*args, **options),
        grouped_gemm_dact=partial(dact, dact_variant),
        dact_workspace_numel=lambda num_rows, num_groups, ffn, activation: (
            num_rows * num_scale_sums(ffn)
        ),
        sum_dact_partials=sum_partials,
    )


def check_products(splits, widths, dtype):
    """By the public functions, which choose these kernels."""
    p = problems.ActProblem(splits, widths, dtype, Activation())
    for number, zero_tail in enumerate((False, True)):
        problems.check_gemm(public, p, False, False, "none", zero_tail, num_sms=number + 1)
        problems.check_dgrad(public, p, False, False, zero_tail, num_sms=3 - number)
    problems.check_wgrad(public, p, False, False, False, False, dtype, num_sms=3)


def check_parts_of_products():
    p = problems.Problem(FEW, EXACT, torch.float16)
    for name in ("plain", "dgrad"):
        blanks, call = problems.part_calls(public, p)[name]
        problems.check_ranges(p, blanks, call, random_ranges(FEW, 2), num_sms=2)


def check_activations(name, splits, widths, dtype, activation):
    p = problems.ActProblem(splits, widths, dtype, activation)
    cases = [(name == "gathered", False)]
    kernels = kernels_of(*VARIANTS[name])
    problems.check_act(kernels, p, {"num_sms": 2}, {"num_sms": 3}, cases=cases)


def check_parts_of_activations(name):
    p = problems.ActProblem(FEW, EXACT, torch.float16, Activation())
    kernels = kernels_of(*VARIANTS[name])
    gather = name == "gathered"
    problems.check_act_ranges(kernels, p, random_ranges(FEW, 2), gather=gather, num_sms=2)


def check_that_mistakes_are_noticed():
    """A ring's stage that one of two warpgroups frees; products that one of two readers overwrites."""
    p = problems.ActProblem((140,), (512, 256), torch.bfloat16, Activation())
    gluon_emulator.check_mistakes(
        lambda: problems.check_gemm(public, p, False, False, "none", False, num_sms=1),
        (
            pipeline.mbarrier,
            "init",
            lambda right: lambda barrier, count: right(barrier, max(1, int(count) - 1)),
        ),
        errors=(AssertionError, RuntimeError),
    )


def checks():
    """Names, and what checks them."""
    for splits, widths, dtype in (
        (SPLITS, ODD, torch.bfloat16),
        (FEW, EXACT, torch.float16),
        ((0, 0, 0), EXACT, torch.bfloat16),
    ):
        check = partial(check_products, splits, widths, dtype)
        yield f"launch_gemm, launch_wgrad, {splits}", check
    yield "parts of launch_gemm", check_parts_of_products
    for name, (variant, _) in VARIANTS.items():
        kernels = "launch_dact" if variant is None else "launch_act, launch_dact"
        widths = ODD if variant is None else WHOLE_HALVES
        of_limits = SPLITS, widths, torch.bfloat16, LIMITED
        of_gelu = FEW, EXACT, torch.float16, Activation(function="gelu")
        for case in (of_limits, of_gelu):
            check = partial(check_activations, name, *case)
            yield f"{kernels}, {name}, {case[0]}", check
        yield f"parts of {kernels}, {name}", partial(check_parts_of_activations, name)
    none = (0, 0), EXACT, torch.bfloat16, Activation()
    yield "launch_dact, no rows", partial(check_activations, "two warps", *none)
    yield "launch_gemm, mistakes", check_that_mistakes_are_noticed
