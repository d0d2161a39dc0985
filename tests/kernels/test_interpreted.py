"""Kernels run without a GPU, in Triton's interpreter or in an emulator of Gluon, in processes of their own. Their
results are compared with twins, or with an oracle. `-m 'not gpu' -k choose_experts` runs the checks of one kernel.

Not covered here: inline assembly (wait, fence and clock of the barrier) and the hardware's casts to and from E4M3,
which the interpreter lacks or has wrong: the modules replace them; ordering between GPUs; sums of bf16 rows (the
interpreter truncates where hardware rounds to nearest). The *_compile.py files look at the generated code; tests/gpu
runs it."""

import pytest
from interpreter import interpreter, run_checks

KERNELS = {  # of modules of checks
    "nodes pointers": "rail_rows plan_in_node publish_header own_counts other_counts take_rows swizzle_scales",
    "gemm": "grouped_gemm grouped_gemm_dgrad grouped_gemm_wgrad grouped_bias_grad grouped_bias_dot grouped_gemm_act "
    "grouped_gemm_dact scaled_activation splits_to_row_range",
    "ranks": "barrier send_signal wait_for_signal lay_out send_counts post_report count_exchange receive_fault_flags "
    "count_slots assign_rows place_replicas route_to_replicas push_replicas add_from_replicas push_rows push_slots "
    "index_rows place_rows fan_out push_sums gather_values pull_rows sum_home pull_values",
    "quantize act_quantize": "quantize_rows sum_dbias quantize_columns group_amax weight_amax quantize_weights "
    "quantize_weight_pairs act_quantize dact_quantize encode_rows unpack_rows decode_rows requantize_columns "
    "unswizzle_scales",
    "quantized_gemm": "grouped_gemm_quantized grouped_gemm_wgrad_quantized",
    "router": "router_gemm router_gemm_grads choose_experts choose_experts_grad router_losses router_losses_grad",
}
EMULATED = {
    "hopper": "launch_gemm launch_wgrad launch_act launch_dact",
    "columns": "launch_quantize_columns launch_requantize_columns launch_quantize_weight_pairs",
    "dact_quantize": "launch_dact_quantize",
    "fp8": "launch_fp8_gemm launch_fp8_wgrad",
}


def modules(kernels: dict[str, str]) -> pytest.MarkDecorator:
    """The first one is for every run."""
    return pytest.mark.parametrize(
        ("names", "kernels"),
        [
            pytest.param(names, text, id=text, marks=[pytest.mark.slow] * (number > 0))
            for number, (names, text) in enumerate(kernels.items())
        ],
    )


def run(request: pytest.FixtureRequest, kind: str, names: str, kernels: str) -> None:
    word = request.config.option.keyword
    is_kernel = any(word in text.split() for text in (*KERNELS.values(), *EMULATED.values()))
    if is_kernel and word not in kernels.split():
        pytest.skip(f"the checks of {word} are others")
    checks = (f"{name}_{kind}_checks" for name in names.split())
    run_checks(word if is_kernel else "", *checks)


@interpreter
@modules(KERNELS)
def test_kernels_in_the_interpreter(request, names, kernels):
    run(request, "interpreter", names, kernels)


@modules(EMULATED)
def test_kernels_in_the_emulator(request, names, kernels):
    pytest.importorskip("triton")
    pytest.importorskip("ml_dtypes")
    run(request, "emulator", names, kernels)
