"""The router's products, forward and backward: ours and torch's in fp32, tf32 and bf16, on one GPU.

    python benchmarks/router.py [--json router.json]

8,192 tokens in bf16, weights in fp32. fp32 and tf32 need an fp32 copy of the tokens, and keep it for backward; their
times have the copy and the rounding of the tokens' gradient. bf16 rounds weights and logits, which routers in fp32 are
to avoid. Times are of CUDA graphs that go through so many different inputs that those do not stay in the L2 cache;
medians, all ways in turn. Errors are of logits: the largest one against float64, relative to the sum of the
terms' magnitudes. They are looked at before anything is timed.
"""

import sys
from collections.abc import Callable

import torch
from one_gpu import medians_in_turn_ms, parser_of, write

from symmoe import kernels

SHAPES = {  # experts, hidden size
    "qwen3-30b": (128, 2048),
    "mixtral-8x7b": (8, 4096),
    "deepseek-like": (64, 7168),
    "deepseek-v3": (256, 7168),
}
TOKENS = 8192
INPUTS_BYTES = 200 << 20  # of different inputs: four times the L2 cache of an H200
MOST_ERROR = {"ours": 2.0**-21, "fp32": 2.0**-21, "tf32": 2.0**-9, "bf16": 2.0**-6}

Logits = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def of_fp32_copy(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x.float(), weight)


def of_bf16(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x, weight.bfloat16()).float()


class _OfKernels(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        logits = torch.empty((len(x), len(weight)), dtype=torch.float32, device=x.device)
        kernels.for_device(x.device).router_gemm(x, weight, logits)
        return logits

    @staticmethod
    def backward(ctx, d_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        gradients = torch.empty_like(x), torch.empty_like(weight)
        kernels.for_device(x.device).router_gemm_grads(d_logits, x, weight, *gradients)
        return gradients


WAYS: dict[str, Logits] = {
    "ours": _OfKernels.apply,
    "fp32": of_fp32_copy,
    "tf32": of_fp32_copy,
    "bf16": of_bf16,
}


def captured(
    way: str, xs: list[torch.Tensor], weight: torch.Tensor, d_logits: torch.Tensor | None
) -> Callable:
    """Replays the products of all inputs: forward, or with d_logits both."""
    torch.backends.cuda.matmul.allow_tf32 = way == "tf32"

    def run() -> None:
        for x in xs:
            logits = WAYS[way](x, weight)
            if d_logits is not None:
                torch.autograd.grad(logits, (x, weight), d_logits)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    torch.backends.cuda.matmul.allow_tf32 = False
    return graph.replay


def error_of(way: str, x: torch.Tensor, weight: torch.Tensor) -> float:
    torch.backends.cuda.matmul.allow_tf32 = way == "tf32"
    x, weight = x[:1024].detach(), weight.detach()
    logits = WAYS[way](x, weight).double()
    torch.backends.cuda.matmul.allow_tf32 = False
    x, weight = x.double(), weight.double()
    return float(((logits - x @ weight.t()).abs() / (x.abs() @ weight.abs().t())).max())


def compare(shape: str, repetitions: int) -> dict[str, dict[str, float]]:
    """By way, its error and microseconds."""
    num_experts, hidden = SHAPES[shape]
    generator = torch.Generator("cuda").manual_seed(0)
    numbers = {"device": "cuda", "generator": generator}
    num_inputs = -(-INPUTS_BYTES // (2 * TOKENS * hidden))
    xs = [
        torch.randn(TOKENS, hidden, **numbers).bfloat16().requires_grad_()
        for _ in range(num_inputs)
    ]
    weight = (torch.randn(num_experts, hidden, **numbers) / hidden**0.5).requires_grad_()
    d_logits = torch.randn(TOKENS, num_experts, **numbers)
    results: dict[str, dict[str, float]] = {}
    replays = {}
    for way in WAYS:
        results[way] = {"error": error_of(way, xs[0], weight)}
        if not results[way]["error"] <= MOST_ERROR[way]:
            sys.exit(f"{shape}, {way}: the logits are off by {results[way]['error']:.1e}")
        for key, gradient in (("forward_us", None), ("both_us", d_logits)):
            replays[f"{way} {key}"] = captured(way, xs, weight, gradient)
    for name, ms in medians_in_turn_ms(replays, repetitions).items():
        way, key = name.split()
        results[way][key] = round(1e3 * ms / num_inputs, 2)
    for result in results.values():
        result["backward_us"] = round(result["both_us"] - result["forward_us"], 2)
    return results


def main() -> None:
    options = parser_of(__doc__, SHAPES).parse_args()
    results = {}
    for shape in options.shapes:
        results[shape] = compare(shape, options.repetitions)
        for way, result in results[shape].items():
            times = (
                f"forward {result['forward_us']:7.1f} us, backward {result['backward_us']:7.1f} us"
            )
            print(f"{shape:14} {way:5} {times}, error {result['error']:.1e}")
    write(options.json, results, torch.device("cuda"))


if __name__ == "__main__":
    main()
