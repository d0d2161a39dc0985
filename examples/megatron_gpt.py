"""Trains a GPT of Megatron-Core with symmoe's MoE layers on the source code of Python's standard library.

    torchrun --nproc-per-node=2 examples/megatron_gpt.py                              2 CPU processes, under a minute
    torchrun --nproc-per-node=2 examples/megatron_gpt.py --preset qwen3-30b           2 GPUs: a few layers of that shape
    torchrun --nproc-per-node=2 examples/megatron_gpt.py --dispatcher alltoall        Megatron's own, for comparison
    torchrun --nproc-per-node=2 examples/megatron_gpt.py --preset qwen3-30b --force-balance --steps 0 \\
        --compare alltoall,alltoall+symmoe,symmoe           no training: only MoE layers, timed in turn

Model, optimizer, DDP and router are Megatron's in every run; `--dispatcher` chooses the dispatcher, `--experts`
the experts. "megatron" means its fastest experts that run here: TEGroupedMLP with Transformer Engine; else, in bf16,
GroupedMLP on torch's grouped GEMM (up to 0.16); else SequentialMLP. The same seed gives the same model and data, so
losses are comparable. At the end one line of JSON has the times of steps and of single MoE layers.

Needs megatron-core 0.16.1 or newer. megatron_cpu.py and megatron_without_te.py replace the parts of CUDA and of
Transformer Engine that Megatron expects.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import os
import platform
import re
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import megatron_cpu
import megatron_without_te
import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before init_process_group, see lm/ranks.py
import torch.nn.functional as F
from lm.data import VOCABULARY, load_corpus, train_batch
from megatron_layers import Summary, time_layers

WARMUP_STEPS = 5  # not timed: kernels are compiled, buffers grow
SHOWN_EVERY = 20  # steps whose losses are in the last line
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """Shape of the model, of a micro-batch (micro_batch sequences), and of a step (micro_batches of them); "tiny"."""

    layers: int = 2
    hidden: int = 64
    heads: int = 4
    query_groups: int = 2
    ffn: int = 64
    num_experts: int = 8
    top_k: int = 2
    sequence: int = 64
    micro_batch: int = 4
    micro_batches: int = 1
    steps: int = 40
    learning_rate: float = 2e-3


_ATTENTION = {"hidden": 2048, "heads": 32, "query_groups": 4}
_EXPERTS = {"ffn": 768, "num_experts": 128, "top_k": 8}
_BATCH = {"sequence": 2048, "micro_batches": 8, "steps": 20, "learning_rate": 3e-4}
PRESETS = {"tiny": Preset(), "qwen3-30b": Preset(layers=4, **_ATTENTION, **_EXPERTS, **_BATCH)}


@dataclasses.dataclass(frozen=True, slots=True)
class Variant:
    """The dispatcher (one of DISPATCHERS) and the experts (one of EXPERTS) of an MoE layer."""

    dispatcher: str
    experts: str

    @classmethod
    def parse(cls, text: str) -> Variant:
        """DISPATCHER or DISPATCHER+EXPERTS; without EXPERTS, the experts belong to the dispatcher's package."""
        dispatcher, _, experts = text.partition("+")
        experts = experts or ("symmoe" if dispatcher == "symmoe" else "megatron")
        if dispatcher not in DISPATCHERS or experts not in EXPERTS:
            raise argparse.ArgumentTypeError(
                f"{text!r} must be one of {', '.join(DISPATCHERS)}, or with +EXPERTS behind it, of {', '.join(EXPERTS)}"
            )
        return cls(dispatcher, experts)

    def __str__(self) -> str:
        return f"{self.dispatcher}+{self.experts}"


DISPATCHERS = ("symmoe", "alltoall")
EXPERTS = ("symmoe", "megatron", "sequential")


def variants(text: str) -> list[Variant]:
    """The variants of a comma-separated list."""
    return [Variant.parse(part) for part in text.split(",")]


def parse_arguments() -> tuple[argparse.Namespace, Preset]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=sorted(PRESETS), default="tiny")
    parser.add_argument("--dispatcher", choices=DISPATCHERS, default="symmoe")
    parser.add_argument("--experts", choices=EXPERTS, help="default: those of the dispatcher")
    parser.add_argument(
        "--compare", type=variants, metavar="V,V", help="MoE layers to time: DISPATCHER[+EXPERTS]"
    )
    parser.add_argument(
        "--layer-steps", type=int, default=30, help="timed steps of each MoE layer; 0: none"
    )
    parser.add_argument("--json", metavar="FILE", help="add the last line to this file")
    parser.add_argument(
        "--dtype", choices=sorted(DTYPES), help="default: bf16 on GPUs, fp32 on CPUs"
    )
    parser.add_argument(
        "--load-factor",
        type=float,
        help="rows that a rank accepts, divided by their mean: no host waits in symmoe",
    )
    parser.add_argument(
        "--order", choices=("rank", "slot"), default="rank", help="order of combine's sums"
    )
    parser.add_argument(
        "--expert-parallel", type=int, help="ranks that share the experts (default: all)"
    )
    parser.add_argument(
        "--force-balance", action="store_true", help="random routing, as benchmarks use it"
    )
    parser.add_argument(
        "--heap-mib", type=int, help="size of the symmetric heap (default: enough for any routing)"
    )
    parser.add_argument("--seed", type=int, default=0)
    for field in dataclasses.fields(Preset):
        parser.add_argument(
            f"--{field.name.replace('_', '-')}", type=float if field.type == "float" else int
        )
    arguments = parser.parse_args()
    fields = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(Preset)}
    changes = {name: value for name, value in fields.items() if value is not None}
    return arguments, dataclasses.replace(PRESETS[arguments.preset], **changes)


@contextlib.contextmanager
def open_groups(arguments: argparse.Namespace) -> Iterator[torch.device]:
    """Megatron's process groups over the ranks of torchrun; yields this rank's device."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=arguments.expert_parallel or dist.get_world_size(),
        expert_tensor_parallel_size=1,
    )
    torch.manual_seed(arguments.seed)
    model_parallel_cuda_manual_seed(arguments.seed + 1)
    try:
        yield device
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def make_config(arguments: argparse.Namespace, preset: Preset, variant: Variant) -> Any:
    """Megatron's TransformerConfig."""
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_config import TransformerConfig

    dtype = DTYPES[arguments.dtype or ("bf16" if torch.cuda.is_available() else "fp32")]
    return TransformerConfig(
        num_layers=preset.layers,
        hidden_size=preset.hidden,
        num_attention_heads=preset.heads,
        num_query_groups=preset.query_groups,
        ffn_hidden_size=preset.ffn,
        moe_ffn_hidden_size=preset.ffn,
        num_moe_experts=preset.num_experts,
        moe_router_topk=preset.top_k,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=0.01,
        moe_router_force_load_balancing=arguments.force_balance,
        moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=variant.experts == "megatron" and has_grouped_experts(dtype),
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        expert_tensor_parallel_size=1,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,  # asks for a kernel that Megatron-LM builds, and megatron-core does not have
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
    )


def has_grouped_experts(dtype: torch.dtype) -> bool:
    """Whether Megatron has grouped experts here, which compute together."""
    from megatron.core.transformer.moe import experts

    return _has_transformer_engine() or (dtype == torch.bfloat16 and hasattr(experts, "GroupedMLP"))


def make_spec(
    arguments: argparse.Namespace, preset: Preset, config: Any, variant: Variant, heap: Any
) -> Any:
    """Megatron's layer spec, with symmoe's dispatcher and experts if the variant has them."""
    from megatron.core.models.gpt import gpt_layer_specs

    from symmoe.integrations.megatron import (
        DispatchOptions,
        use_symmoe,
        use_symmoe_dispatcher,
        use_symmoe_experts,
    )

    experts = {"num_experts": config.num_moe_experts, "moe_grouped_gemm": config.moe_grouped_gemm}
    if _has_transformer_engine():
        spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(**experts)
    else:
        if config.moe_grouped_gemm:
            megatron_without_te.provide_grouped_gemm()
        spec = gpt_layer_specs.get_gpt_layer_local_spec(
            **experts, normalization=config.normalization
        )
        megatron_without_te.use_fused_attention(spec)
    own_experts = variant.experts == "symmoe"
    if variant.dispatcher == "symmoe":
        use = use_symmoe if own_experts else use_symmoe_dispatcher
        capacity = None
        if arguments.load_factor is not None:
            capacity = int(
                arguments.load_factor * preset.micro_batch * preset.sequence * preset.top_k
            )
        return use(spec, heap, options=DispatchOptions(order=arguments.order, capacity=capacity))
    return use_symmoe_experts(spec) if own_experts else spec


def make_model(config: Any, spec: Any, preset: Preset, seed: int) -> Any:
    """GPTModel on this rank's device; every rank has its own experts."""
    from megatron.core.models.gpt import GPTModel

    model = GPTModel(config, spec, VOCABULARY, preset.sequence, position_embedding_type="rope")
    start_alike(model, config, seed)
    return model.cuda() if torch.cuda.is_available() else model


def in_ddp(config: Any, model: Any) -> Any:
    """The model in Megatron's DDP."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    if config.bf16:
        model = Float16Module(config, model)
    ddp = DistributedDataParallel(
        config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model
    )
    ddp.broadcast_params()
    return ddp


@torch.no_grad()
def start_alike(model: Any, config: Any, seed: int) -> None:
    """The same initial numbers for all classes of experts and any number of ranks."""
    from megatron.core import parallel_state

    num_local = config.num_moe_experts // config.expert_model_parallel_size
    first = parallel_state.get_expert_model_parallel_rank() * num_local
    for name, parameter in model.named_parameters():
        # SequentialMLP: local_experts.{i}.linear_fc1.weight; TEGroupedMLP: linear_fc1.weight{i}; ours: without {i}.
        expert = re.search(
            r"\.mlp\.experts\.(?:local_experts\.(\d+)\.)?(linear_fc\d)\.weight(\d*)", name
        )
        grouped = re.search(r"\.mlp\.experts\.weight([12])$", name)
        named = {name: parameter}
        if expert and (expert[1] or expert[3]):
            number = first + int(expert[1] or expert[3])
            named = {f"{name[: expert.start()]} expert {number} {expert[2]}": parameter}
        elif expert:
            prefix = name[: expert.start()]
            named = {
                f"{prefix} expert {first + i} {expert[2]}": matrix
                for i, matrix in enumerate(parameter)
            }
        elif (
            grouped
        ):  # GroupedMLP: weight1 [H, e * 2F] holds [e, H, 2F], weight2 [e * F, H] holds [e, F, H]
            rows = config.hidden_size if grouped[1] == "1" else config.moe_ffn_hidden_size
            matrices = parameter.view(num_local, rows, -1).transpose(1, 2)
            prefix = name[: grouped.start()]
            named = {
                f"{prefix} expert {first + i} linear_fc{grouped[1]}": matrix
                for i, matrix in enumerate(matrices)
            }
        for label, matrix in named.items():
            if matrix.dim() > 1:
                generator = torch.Generator(matrix.device).manual_seed(
                    zlib.crc32(f"{seed} {label}".encode())
                )
                numbers = torch.empty(matrix.shape, dtype=matrix.dtype, device=matrix.device)
                matrix.copy_(numbers.normal_(std=config.init_method_std, generator=generator))


def make_optimizer(config: Any, model: Any, learning_rate: float) -> Callable[[], None]:
    """`step()`: Megatron's Adam on GPUs; on CPUs, which it does not support, torch's on the same gradients."""
    if torch.cuda.is_available():
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        choice = OptimizerConfig(
            optimizer="adam",
            lr=learning_rate,
            weight_decay=0.0,
            clip_grad=0.0,  # as on CPUs
            bf16=config.bf16,
            params_dtype=config.params_dtype,
        )
        optimizer = get_megatron_optimizer(choice, [model])

        def megatron_step() -> None:
            optimizer.step()
            optimizer.zero_grad()

        return megatron_step
    adam = torch.optim.Adam(model.parameters(), lr=learning_rate)

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = parameter.main_grad.to(parameter.dtype)
        adam.step()
        adam.zero_grad()

    return step


def train(
    arguments: argparse.Namespace, preset: Preset, device: torch.device, config: Any, model: Any
) -> dict[str, Any]:
    """Rank 0 prints losses and tokens per second of all ranks. Returns figures."""
    from megatron.core.distributed import finalize_model_grads

    corpus, rank, num_ranks = load_corpus(), dist.get_rank(), dist.get_world_size()
    optimizer_step = make_optimizer(config, model, preset.learning_rate)
    shape = (preset.micro_batch, preset.sequence)
    positions = torch.arange(preset.sequence, device=device).expand(shape)
    mask = torch.ones(shape[1], shape[1], dtype=torch.bool, device=device).triu(1)[None, None]
    per_rank = preset.micro_batch * preset.micro_batches
    local_indices, num_tokens = (
        range(rank * per_rank, (rank + 1) * per_rank),
        per_rank * preset.sequence * num_ranks,
    )
    seconds, losses = [], []
    for step in range(preset.steps):
        text = train_batch(
            corpus, seed=arguments.seed, step=step, sequences=local_indices, context=preset.sequence
        ).to(device)
        loss_sum = torch.zeros((), device=device)
        _synchronize()
        start = time.perf_counter()
        model.zero_grad_buffer()
        for micro_batch in text.split(preset.micro_batch):
            inputs, labels = micro_batch[:, :-1].contiguous(), micro_batch[:, 1:].contiguous()
            loss = (
                model(inputs, positions, mask, labels=labels).float().mean() / preset.micro_batches
            )
            loss.backward()
            loss_sum += loss.detach()
        finalize_model_grads([model])
        optimizer_step()
        _synchronize()
        loss_and_seconds = torch.tensor(
            [0.0, time.perf_counter() - start], dtype=torch.float64, device=device
        )
        loss_and_seconds[0] = loss_sum / num_ranks
        dist.all_reduce(loss_and_seconds[:1])
        dist.all_reduce(
            loss_and_seconds[1:], op=dist.ReduceOp.MAX
        )  # a step takes as long as on its slowest rank
        for values, value in zip((losses, seconds), loss_and_seconds.tolist(), strict=True):
            values.append(value)
        if rank == 0:
            speed = num_tokens / seconds[-1]
            print(f"step {step + 1} loss {losses[-1]:.6f} tokens/s {speed:.0f}", flush=True)
    shown = (1, *range(SHOWN_EVERY, preset.steps + 1, SHOWN_EVERY))
    figures: dict[str, Any] = {"first_loss": losses[0], "last_loss": losses[-1]}
    figures["losses"] = {step: round(losses[step - 1], 4) for step in shown}
    timed = seconds[WARMUP_STEPS:]
    if timed:
        step_ms = Summary.of([1e3 * value for value in timed])
        figures.update(timed_steps=len(timed), step_ms=dataclasses.asdict(step_ms))
        if rank == 0:
            print(f"median tokens/s {num_tokens / step_ms.median * 1e3:.0f}", flush=True)
    return figures


def compare_layers(
    arguments: argparse.Namespace,
    preset: Preset,
    device: torch.device,
    chosen: list[Variant],
    heap: Any,
) -> dict[str, Any]:
    """Times one MoE layer of each variant, all with the same numbers; rank 0 prints a line each. Returns figures."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    layers: dict[str, Any] = {}
    for variant in chosen:
        shape = dataclasses.replace(preset, layers=1)
        config = make_config(arguments, shape, variant)
        spec = make_spec(arguments, preset, config, variant, heap)
        layers[str(variant)] = make_model(config, spec, shape, arguments.seed).decoder.layers[0].mlp
    generator = torch.Generator(device).manual_seed(
        arguments.seed + dist.get_rank()
    )  # every rank has its own tokens
    size, options = (
        (preset.sequence, preset.micro_batch, preset.hidden),
        {"generator": generator, "device": device},
    )
    x, dy = (torch.randn(size, **options).to(config.params_dtype) for _ in range(2))
    times = time_layers(
        layers,
        x,
        dy,
        repetitions=arguments.layer_steps,
        reseed=lambda: model_parallel_cuda_manual_seed(arguments.seed + 1, force_reset_rng=True),
    )
    first = next(iter(times.values()))["total_ms"]["median"]
    figures = {}
    for name, summaries in times.items():
        speedup = round(first / summaries["total_ms"]["median"], 3)
        figures[name] = {
            "experts": type(layers[name].experts).__name__,
            **summaries,
            "speedup": speedup,
        }
        if dist.get_rank() == 0:
            parts = ", ".join(
                f"{phase} {summaries[f'{phase}_ms']['median']:.3f}"
                for phase in ("forward", "backward")
            )
            print(
                f"layer {name} ({figures[name]['experts']}): {summaries['total_ms']['median']:.3f} ms ({parts}), "
                f"{speedup:.2f} x as fast as the first",
                flush=True,
            )
    return {"timed_layer_steps": arguments.layer_steps, "layers": figures}


def heap_size(
    arguments: argparse.Namespace, preset: Preset, trained: Variant, timed: list[Variant]
) -> int:
    """Bytes of the heap for training and then for the layers; 0 without symmoe's dispatcher in both."""
    from symmoe.integrations.megatron import heap_bytes

    numbers_of_layers = [preset.layers] * (preset.steps > 0 and trained.dispatcher == "symmoe")
    numbers_of_layers += [
        1 for variant in timed if variant.dispatcher == "symmoe"
    ]  # each has buffers of its own
    num_tokens = preset.micro_batch * preset.sequence
    config = make_config(arguments, preset, trained)
    return sum(
        heap_bytes(
            config, num_tokens=num_tokens, num_layers=number, load_factor=arguments.load_factor
        )
        for number in numbers_of_layers
    )


def about(
    arguments: argparse.Namespace, preset: Preset, config: Any, device: torch.device
) -> dict[str, Any]:
    """The subject of the figures: model, machine and versions."""
    from symmoe.integrations.megatron import MEGATRON_VERSION

    return {
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["torchrun", *sys.argv]),
        "preset": arguments.preset,
        "shape": dataclasses.asdict(preset),
        "ranks": dist.get_world_size(),
        "expert_parallel": config.expert_model_parallel_size,
        "force_balance": arguments.force_balance,
        "order": arguments.order,
        "load_factor": arguments.load_factor,
        "dtype": str(config.params_dtype).removeprefix("torch."),
        "python": platform.python_version(),
        "megatron": MEGATRON_VERSION,
        "transformer_engine": _has_transformer_engine(),
    }


def _has_transformer_engine() -> bool:
    from megatron.core.extensions.transformer_engine import HAVE_TE

    return HAVE_TE and torch.cuda.is_available()


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    arguments, preset = parse_arguments()
    megatron_cpu.install()
    from symmoe.integrations.megatron import open_heap

    trained = Variant.parse("+".join(filter(None, (arguments.dispatcher, arguments.experts))))
    timed = (arguments.compare or [trained]) if arguments.layer_steps else []
    with open_groups(arguments) as device, contextlib.ExitStack() as stack:
        heap, num_bytes = None, heap_size(arguments, preset, trained, timed)
        if num_bytes:
            if arguments.heap_mib is not None:
                num_bytes = arguments.heap_mib << 20
            heap = stack.enter_context(open_heap(num_bytes))
        config = make_config(arguments, preset, trained)
        figures = about(arguments, preset, config, device)
        if preset.steps:
            model = make_model(
                config, make_spec(arguments, preset, config, trained, heap), preset, arguments.seed
            )
            figures["trained"] = str(trained)
            figures["experts"] = type(model.decoder.layers[0].mlp.experts).__name__
            model = in_ddp(config, model)
            figures.update(train(arguments, preset, device, config, model))
            del model
            gc.collect()  # the model's leases end, its memory is free for the layers
        if timed:
            figures.update(compare_layers(arguments, preset, device, timed, heap))
        if dist.get_rank() == 0:
            if heap is not None:
                print(
                    f"heap: {heap.high_water_bytes >> 20} of {heap.num_bytes >> 20} MiB used",
                    flush=True,
                )
            line = json.dumps(figures)
            print(line, flush=True)
            if arguments.json:
                with open(arguments.json, "a", encoding="utf-8") as file:
                    file.write(f"{line}\n")


if __name__ == "__main__":
    main()
