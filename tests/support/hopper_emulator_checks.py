"""Runs the sources of the GEMMs for Hopper in gluon_emulator.py, and compares every bit with the twins: of whole
numbers, whose sums are exact; the activation's arithmetic is the twin's. Every kernel has several tiles to a program,
some of them partial, and a ring that turns several times or not at all."""

from functools import partial
from itertools import product
from types import SimpleNamespace

import gluon_emulator
import torch
from compared_launches import check_sums_of_parts, differences
from launch_table import BF16, FP16, Launch
from row_ranges import random_ranges

from symmoe.kernels import hopper_choice, twin
from symmoe.kernels.activation import Activation, num_scale_sums
from symmoe.kernels.hopper import act, gemm, pipeline, wgrad
from symmoe.kernels.triton import gemm as public
from symmoe.kernels.triton import tiles
from symmoe.kernels.twin.activation import value_and_slopes

SPLITS = (140, 0, 1, 128, 0)
FEW = (0, 3, 129)
ODD = {"H": 200, "I": 152}
WHOLE_HALVES = {"H": 200, "I": 256}  # of act, which takes no others
EXACT = {"H": 64, "I": 256}  # whole tiles and steps
PRODUCTS = [  # groups of one row sum nothing, whose zeros have other signs
    ((140, 0, 2, 128, 0), {"H": 200, "W": 304}, BF16),
    (FEW, {"H": 64, "W": 512}, FP16),
    ((0, 0, 0), {"H": 64, "W": 512}, BF16),
]
NAMES = {
    "grouped_gemm": "launch_gemm",
    "grouped_gemm_dgrad": "launch_gemm",
    "grouped_gemm_wgrad": "launch_wgrad",
    "grouped_gemm_act": "launch_act",
    "grouped_gemm_dact": "launch_dact",
}
LIMITED = Activation(alpha=1.702, limit=1.0, offset=1.0)
GELU = Activation(function="gelu")
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


launched = {"grouped_gemm": gemm.launch_gemm, "grouped_gemm_wgrad": wgrad.launch_wgrad}
on_hopper = SimpleNamespace(
    LAUNCHERS={name: (launcher, lambda *_: True) for name, launcher in launched.items()}
)
tiles.device_num_sms = lambda device: 2
hopper_choice.hopper_kernels = lambda device, dtype, columns: on_hopper
# In Triton or in assembly:
act.act_value = lambda *args: of_parts(*args)[0]
act.act_gradients, act.add_neighbours = act_gradients, add_neighbours
act.unpack = lambda pair, dtype: (
    pair.contiguous().view(dtype).float().unflatten(1, (-1, 2)).unbind(2)
)
act.pack = lambda low, high, dtype: (
    torch.stack((low, high), 2).to(dtype).flatten(1).view(torch.int32)
)


def sum_partials(workspace, row_range, dscale, num_partials):
    """As sum_dact_partials."""
    dscale.zero_()
    for sums in workspace[: num_partials * len(dscale)].view(num_partials, -1):
        dscale += sums
    dscale[int(row_range[1, -1]) :] = 0


def dact(variant, *, gradients, workspace, **arguments):
    dh, a, dscale, _ = gradients
    act.launch_dact(results=(dh, a, workspace), variant=variant, **arguments)
    if dscale is not None:
        sum_partials(workspace, arguments["row_range"], dscale, num_scale_sums(a.shape[1]))


def kernels_of(name):
    """Kernels of the contract, by these of a variant."""
    act_variant, dact_variant = VARIANTS[name]
    launch_act = partial(act.launch_act, variant=act_variant)
    return SimpleNamespace(
        grouped_gemm_act=launch_act if act_variant else twin.grouped_gemm_act,
        grouped_gemm_dact=partial(dact, dact_variant),
        sum_dact_partials=sum_partials,
    )


def compared(kernels, launch, splits, **options):
    """The launch, and what checks it."""
    check = partial(differences, launch, kernels, splits=splits, **options)
    return f"{NAMES[launch.kernel]}, {launch}, {launch.activation}, {splits}", check


def check_that_mistakes_are_noticed():
    """A ring's stage that one of two warpgroups frees; products that one of two readers overwrites."""
    launch = Launch("grouped_gemm", {"H": 512, "W": 512})

    def check():
        assert differences(launch, public, splits=(140,)) == []

    mistake = lambda right: lambda barrier, count: right(barrier, max(1, int(count) - 1))  # noqa: E731
    gluon_emulator.check_mistakes(
        check, (pipeline.mbarrier, "init", mistake), errors=(AssertionError, RuntimeError)
    )


def checks():
    """Names, and what checks them. Of parts, rows of others are NaN, and are not written."""
    for splits, sizes, dtype in PRODUCTS:
        for kernel, zero_tail in product(("grouped_gemm", "grouped_gemm_dgrad"), (False, True)):
            launch = Launch(kernel, sizes, dtype, changes={"zero_tail": zero_tail})
            yield compared(public, launch, splits)
        yield compared(public, Launch("grouped_gemm_wgrad", sizes, dtype), splits)
    for kernel, part in product(("grouped_gemm", "grouped_gemm_dgrad"), random_ranges(FEW, 2)):
        yield compared(public, Launch(kernel, {"H": 64, "W": 512}, FP16), FEW, part=part)
    for name, kernel in product(VARIANTS, ("grouped_gemm_act", "grouped_gemm_dact")):
        fused = partial(Launch, kernel, ways="gather" if name == "gathered" else "")
        sizes = WHOLE_HALVES if VARIANTS[name][0] else ODD
        yield compared(kernels_of(name), fused(sizes, activation=LIMITED), SPLITS)
        yield compared(kernels_of(name), fused(EXACT, FP16, activation=GELU), FEW)
        yield compared(kernels_of(name), fused(EXACT), (0, 0))
        ways = fused.keywords["ways"] + " unsummed" * (kernel == "grouped_gemm_dact")
        for part in random_ranges(FEW, 2):
            launch = fused(EXACT, FP16, ways=ways)
            yield compared(kernels_of(name), launch, FEW, part=part)
    for name in VARIANTS:
        launch = Launch("grouped_gemm_dact", EXACT, FP16)
        check = partial(check_sums_of_parts, launch, kernels_of(name), FEW)
        yield f"launch_dact, sums of parts, {name}", check
    yield "launch_gemm, mistakes", check_that_mistakes_are_noticed
