"""Fine-tunes a Mixture-of-Experts model of Hugging Face transformers with its experts spread over the ranks.

    torchrun --nproc-per-node=2 examples/finetune_transformers.py      2 CPU processes, under a minute
    torchrun --nproc-per-node=4 examples/finetune_transformers.py      1, 2 or 4 GPUs: the same command
    ... --checkpoint FOLDER                                            a local checkpoint of Qwen3-MoE, Mixtral, OLMoE,
                                                                       DeepSeek-V3 or gpt-oss

Without a checkpoint it makes one: a small, randomly initialised Qwen3-MoE. The text is the source code of Python's
standard library, a token is a byte. Every rank reads its own experts from the checkpoint and writes them back into a
checkpoint with the same files, which plain transformers reads at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before a process group exists: see lm/ranks.py
import transformers
from lm.data import Corpus, heldout_batch, load_corpus, train_batch

import symmoe
from symmoe.integrations.transformers import from_pretrained, save_checkpoint

HELDOUT_SEQUENCES = 16


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, help="what to fine-tune (default: a small random Qwen3-MoE)")
    parser.add_argument("--out", type=Path, default=Path("runs/finetune_transformers"), help="a new folder")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--sequences", type=int, default=8, help="per rank and step")
    parser.add_argument("--context", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    arguments = parser.parse_args()
    if arguments.out.exists() and any(arguments.out.iterdir()):
        parser.error(f"--out: {arguments.out} is not empty")
    return arguments


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """The ranks that torchrun has started, or this process alone."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    else:
        torch.set_num_threads(1)  # one core per process
    if "RANK" not in os.environ:
        yield
        return
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def write_random_checkpoint(folder: Path) -> None:
    """A Qwen3-MoE of 5 million parameters in several files. The name of a file says how many there are."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        moe_intermediate_size=192,
        num_experts=16,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=1024,
        output_router_logits=True,
        router_aux_loss_coef=0.01,
    )
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder, max_shard_size="8MB")


def heap_bytes(config: transformers.PretrainedConfig, *, num_ranks: int, num_tokens: int) -> int:
    """Symmetric memory for one forward and backward pass, however the tokens are routed."""
    shape = symmoe.MoEConfig(
        hidden=config.hidden_size,
        ffn=getattr(config, "moe_intermediate_size", None) or config.intermediate_size,
        num_experts=config.num_local_experts,
        top_k=config.num_experts_per_tok,
    )
    plan = symmoe.plan_memory(
        shape,
        num_ranks=num_ranks,
        num_tokens=num_tokens,
        num_layers=config.num_hidden_layers,
        dtype=torch.float32,
        routing="worst",
    )
    return plan.heap_bytes


def mean_over_ranks(value: torch.Tensor, num_ranks: int) -> float:
    """Mean of a scalar. Collective."""
    if num_ranks > 1:
        dist.all_reduce(value)
    return value.item() / num_ranks


@torch.no_grad()
def heldout_loss(model: torch.nn.Module, corpus: Corpus, sequences: range, *, context: int) -> torch.Tensor:
    """Mean cross entropy over some of the held-out sequences."""
    batch = heldout_batch(corpus, sequences=sequences, total=HELDOUT_SEQUENCES, context=context)
    batch = batch[:, :context].to(model.device)
    was_training = model.training
    loss = model.eval()(batch, labels=batch, output_router_logits=False).loss
    model.train(was_training)
    return loss.detach()


def finetune(model: torch.nn.Module, heap: symmoe.SymmetricHeap, corpus: Corpus, arguments: argparse.Namespace) -> None:
    """Trains the model in place. Collective."""
    rank, num_ranks, device = heap.rank, heap.num_ranks, heap.device
    tokens_per_step = num_ranks * arguments.sequences * arguments.context
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate, weight_decay=0.0)
    model.train()
    shown_step, shown_at = 0, time.perf_counter()
    for step in range(1, arguments.steps + 1):
        mine = range(rank * arguments.sequences, (rank + 1) * arguments.sequences)
        batch = train_batch(corpus, seed=0, step=step, sequences=mine, context=arguments.context - 1).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(batch, labels=batch).loss
        loss.backward()
        symmoe.reduce_gradients(model)  # dense averaged over ranks, experts scaled
        symmoe.clip_grad_norm(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 or step % 10 == 0 or step == arguments.steps:
            mean_loss = mean_over_ranks(loss.detach(), num_ranks)  # waits for the device
            now = time.perf_counter()
            rate = (step - shown_step) * tokens_per_step / (now - shown_at)
            if rank == 0:
                print(f"step {step:4d}  loss {mean_loss:.4f}  {rate:,.0f} tokens/s")
            shown_step, shown_at = step, now


def main() -> None:
    arguments = parse_arguments()
    corpus = load_corpus()
    context = arguments.context
    with process_group(), tempfile.TemporaryDirectory() as scratch:
        rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        source = arguments.checkpoint
        if source is None:
            where = [str(Path(scratch) / "checkpoint")]
            if rank == 0:
                write_random_checkpoint(Path(where[0]))
            if num_ranks > 1:
                dist.broadcast_object_list(where)  # rank 0's folder, and the news that it is complete
            source = Path(where[0])
        config = transformers.AutoConfig.from_pretrained(source)
        num_bytes = heap_bytes(config, num_ranks=num_ranks, num_tokens=arguments.sequences * context)

        with symmoe.SymmetricHeap(num_bytes=num_bytes) as heap:
            model = from_pretrained(source, heap, dtype=torch.float32)
            here = sum(parameter.numel() for parameter in model.parameters())
            if rank == 0:
                print(f"{num_ranks} ranks on {heap.backend}, {here:,} parameters on each, heap {num_bytes >> 20} MiB")
            finetune(model, heap, corpus, arguments)
            each = HELDOUT_SEQUENCES // num_ranks
            mine = range(rank * each, (rank + 1) * each)
            heldout = mean_over_ranks(heldout_loss(model, corpus, mine, context=context), num_ranks)
            save_checkpoint(model, arguments.out, like=source)
        if rank == 0:
            whole = transformers.AutoModelForCausalLM.from_pretrained(arguments.out)
            everything = range(each * num_ranks)
            plain = heldout_loss(whole, corpus, everything, context=context).item()
            print(f"held-out loss {heldout:.4f}; of {arguments.out} in plain transformers {plain:.4f}")
        if num_ranks > 1:
            dist.barrier()  # the source goes when rank 0 leaves


if __name__ == "__main__":
    main()
