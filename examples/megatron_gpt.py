"""Trains a GPT of Megatron-Core whose MoE layers are symmoe's, on the source code of Python's standard library.

    torchrun --nproc-per-node=2 examples/megatron_gpt.py                              2 CPU processes, under a minute
    torchrun --nproc-per-node=2 examples/megatron_gpt.py --preset qwen3-30b           2 GPUs: a few layers of that shape
    torchrun --nproc-per-node=2 examples/megatron_gpt.py --dispatcher alltoall        Megatron's own, to compare

Model, optimizer, DDP and router are Megatron's in every run; `--dispatcher` and `--experts` say whose tokens travel and
whose experts compute. The same seed gives the same model and data, so losses can be compared. Needs megatron-core
0.16.1 or newer. Without GPUs, megatron_cpu.py stands in for what Megatron expects of CUDA.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import re
import statistics
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import megatron_cpu
import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before init_process_group, see lm/ranks.py
import torch.nn.functional as F
from lm.data import VOCABULARY, load_corpus, train_batch

WARMUP_STEPS = 3  # not timed: kernels are compiled, buffers grow


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """Shape of the model and of a micro-batch."""

    layers: int
    hidden: int
    heads: int
    query_groups: int
    ffn: int
    num_experts: int
    top_k: int
    sequence: int
    micro_batch: int
    steps: int
    learning_rate: float


PRESETS = {
    "tiny": Preset(
        layers=2,
        hidden=64,
        heads=4,
        query_groups=2,
        ffn=64,
        num_experts=8,
        top_k=2,
        sequence=64,
        micro_batch=4,
        steps=40,
        learning_rate=2e-3,
    ),
    "qwen3-30b": Preset(
        layers=4,
        hidden=2048,
        heads=32,
        query_groups=4,
        ffn=768,
        num_experts=128,
        top_k=8,
        sequence=2048,
        micro_batch=4,
        steps=20,
        learning_rate=3e-4,
    ),
}


def parse_arguments() -> tuple[argparse.Namespace, Preset]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="tiny")
    parser.add_argument("--dispatcher", choices=("symmoe", "alltoall"), default="symmoe")
    parser.add_argument("--experts", choices=("symmoe", "megatron"), help="default: as the dispatcher")
    parser.add_argument("--order", choices=("rank", "slot"), default="rank", help="order of combine's sums")
    parser.add_argument("--expert-parallel", type=int, help="ranks that share the experts (default: all)")
    parser.add_argument("--force-balance", action="store_true", help="random routing, as benchmarks use it")
    parser.add_argument("--heap-mib", type=int, help="size of the symmetric heap (default: enough for any routing)")
    parser.add_argument("--seed", type=int, default=0)
    for field in dataclasses.fields(Preset):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=float if field.type == "float" else int)
    arguments = parser.parse_args()
    given = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(Preset)}
    changes = {name: value for name, value in given.items() if value is not None}
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
        expert_model_parallel_size=arguments.expert_parallel or dist.get_world_size(), expert_tensor_parallel_size=1
    )
    torch.manual_seed(arguments.seed)
    model_parallel_cuda_manual_seed(arguments.seed + 1)
    try:
        yield device
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def make_config(arguments: argparse.Namespace, preset: Preset) -> Any:
    """Megatron's TransformerConfig: bf16 on GPUs, fp32 on CPUs."""
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_config import TransformerConfig

    on_gpu = torch.cuda.is_available()
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
        moe_grouped_gemm=_has_transformer_engine(),
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        expert_tensor_parallel_size=1,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=on_gpu,
        params_dtype=torch.bfloat16 if on_gpu else torch.float32,
    )


def make_spec(arguments: argparse.Namespace, config: Any, heap: Any) -> Any:
    """Megatron's layer spec, with symmoe's dispatcher and experts where they are asked for."""
    from megatron.core.models.gpt import gpt_layer_specs

    from symmoe.integrations.megatron import DispatchOptions, use_symmoe, use_symmoe_dispatcher, use_symmoe_experts

    if _has_transformer_engine():
        spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts, moe_grouped_gemm=True
        )
    else:
        spec = gpt_layer_specs.get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts, normalization=config.normalization
        )
    own_experts = (arguments.experts or arguments.dispatcher) == "symmoe"
    if arguments.dispatcher == "symmoe":
        use = use_symmoe if own_experts else use_symmoe_dispatcher
        return use(spec, heap, options=DispatchOptions(order=arguments.order))
    return use_symmoe_experts(spec) if own_experts else spec


def make_model(config: Any, spec: Any, preset: Preset, seed: int) -> Any:
    """GPTModel in Megatron's DDP; every rank has experts of its own."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.module import Float16Module

    model = GPTModel(config, spec, VOCABULARY, preset.sequence, position_embedding_type="rope")
    start_alike(model, config, seed)
    if torch.cuda.is_available():
        model = Float16Module(config, model.cuda())
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    ddp.broadcast_params()
    return ddp


@torch.no_grad()
def start_alike(model: Any, config: Any, seed: int) -> None:
    """The same numbers whichever classes hold the experts, and on however many ranks."""
    from megatron.core import parallel_state

    num_local = config.num_moe_experts // config.expert_model_parallel_size
    first = parallel_state.get_expert_model_parallel_rank() * num_local
    for name, parameter in model.named_parameters():
        # SequentialMLP: local_experts.{i}.linear_fc1.weight; grouped: linear_fc1.weight{i}.
        expert = re.search(r"\.mlp\.experts\.(?:local_experts\.(\d+)\.)?(linear_fc\d)\.weight(\d*)", name)
        if expert:
            number = first + int(expert[1] or expert[3])
            name = f"{name[: expert.start()]} expert {number} {expert[2]}"
        if parameter.dim() > 1:
            generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            parameter.normal_(std=config.init_method_std, generator=generator)


def make_optimizer(model: Any, learning_rate: float) -> Callable[[], None]:
    """`step()`: Megatron's Adam on GPUs; on CPUs, where that does not run, torch's on the same gradients."""
    if torch.cuda.is_available():
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        choice = OptimizerConfig(
            optimizer="adam", lr=learning_rate, weight_decay=0.0, bf16=True, params_dtype=torch.bfloat16
        )
        optimizer = get_megatron_optimizer(choice, [model])

        def megatron_step() -> None:
            optimizer.step()
            optimizer.zero_grad()

        return megatron_step
    adam = torch.optim.Adam(model.parameters(), lr=learning_rate)

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = parameter.main_grad
        adam.step()
        adam.zero_grad()

    return step


def train(arguments: argparse.Namespace, preset: Preset, device: torch.device, model: Any) -> None:
    """Steps of one micro-batch each; rank 0 prints losses and tokens per second of all ranks."""
    from megatron.core.distributed import finalize_model_grads

    corpus, rank, num_ranks = load_corpus(), dist.get_rank(), dist.get_world_size()
    optimizer_step = make_optimizer(model, preset.learning_rate)
    shape = (preset.micro_batch, preset.sequence)
    positions = torch.arange(preset.sequence, device=device).expand(shape)
    mask = torch.ones(shape[1], shape[1], dtype=torch.bool, device=device).triu(1)[None, None]
    mine = range(rank * preset.micro_batch, (rank + 1) * preset.micro_batch)
    seconds = []
    for step in range(preset.steps):
        text = train_batch(corpus, seed=arguments.seed, step=step, sequences=mine, context=preset.sequence).to(device)
        _synchronize()
        start = time.perf_counter()
        model.zero_grad_buffer()
        inputs, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        loss = model(inputs, positions, mask, labels=labels).float().mean()
        loss.backward()
        finalize_model_grads([model])
        optimizer_step()
        _synchronize()
        seconds.append(time.perf_counter() - start)
        mean_loss = loss.detach().clone()
        dist.all_reduce(mean_loss)
        if rank == 0:
            speed = shape[0] * shape[1] * num_ranks / seconds[-1]
            print(f"step {step + 1} loss {mean_loss.item() / num_ranks:.6f} tokens/s {speed:.0f}", flush=True)
    if rank == 0 and len(seconds) > WARMUP_STEPS:
        median = statistics.median(seconds[WARMUP_STEPS:])
        print(f"median tokens/s {shape[0] * shape[1] * num_ranks / median:.0f}", flush=True)


def _has_transformer_engine() -> bool:
    from megatron.core.extensions.transformer_engine import HAVE_TE

    return HAVE_TE and torch.cuda.is_available()


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    arguments, preset = parse_arguments()
    megatron_cpu.install()
    from symmoe.integrations.megatron import heap_bytes, open_heap

    with open_groups(arguments) as device, contextlib.ExitStack() as stack:
        config = make_config(arguments, preset)
        heap = None
        if arguments.dispatcher == "symmoe":
            num_tokens = preset.micro_batch * preset.sequence
            num_bytes = heap_bytes(config, num_tokens=num_tokens, num_layers=preset.layers)
            if arguments.heap_mib is not None:
                num_bytes = arguments.heap_mib << 20
            heap = stack.enter_context(open_heap(num_bytes, timeout_s=120.0))
        model = make_model(config, make_spec(arguments, config, heap), preset, arguments.seed)
        train(arguments, preset, device, model)
        if heap is not None and dist.get_rank() == 0:
            print(f"heap: {heap.high_water_bytes >> 20} of {heap.num_bytes >> 20} MiB used", flush=True)
        del model


if __name__ == "__main__":
    main()
